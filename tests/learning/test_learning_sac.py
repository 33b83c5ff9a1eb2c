"""SAC: its formulas against plain ones, what an update trains on, and what a checkpoint holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Categorical, Independent, Normal, TanhTransform, TransformedDistribution

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.export.checkpoints import export
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.sac_settings import SACHyperparameters
from sparring.pipeline.learning.settings import BehavioralCloningSettings, RewardSignals, TrainerSettings
from sparring.pipeline.networks.settings import MemorySettings, NetworkSettings
from sparring.pipeline.networks.squashed import LOG_SIGMA, SquashedActor, squash
from sparring.pipeline.settings.load import parse_settings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from tests.learning.learning_helpers import play_goal, segments
from tests.learning.other_device import OTHER_DEVICE, other_device
from tests.learning.random_groups import RICH
from tests.learning.signals_helpers import SPECS, played, record_of, recorded, write

SEEN = (ObservationSpec(name="near", shape=(3,)), ObservationSpec(name="far", shape=(2,)))
ACTIONS = {
    "continuous": ActionSpec(continuous=2),
    "discrete": ActionSpec(discrete=(3, 2)),
    "hybrid": ActionSpec(continuous=2, discrete=(3, 2)),
}


def spec_of(kind):
    return BehaviorSpec(observations=SEEN, actions=ACTIONS[kind])


def settings_of(*, signals=None, network=None, horizon=20, **hyper):
    given = {"batch_size": 16, "buffer_size": 200, "steps_per_update": 8, "learning_rate": 1e-3} | hyper
    return TrainerSettings(
        trainer_type="sac",
        hyperparameters=SACHyperparameters(**given),
        network_settings=NetworkSettings(**{"hidden_units": 16, "num_layers": 2, **(network or {})}),
        reward_signals=RewardSignals.model_validate(signals or {"extrinsic": {}}),
        max_steps=10_000,
        time_horizon=horizon,
    )


def learner(kind="hybrid", seed=0, **changes):
    return Learner("Test", spec_of(kind), settings_of(**changes), seed)


def fed(one, rows=64, seed=0, **fields):
    lengths = [rows // 2, rows - rows // 2]
    masked = bool(one.spec.actions.discrete)
    actions = np.random.default_rng([seed, 1]).uniform(-1, 1, (rows, one.spec.actions.continuous)).astype(np.float32)
    given = {"masked": masked, "terminated": [True, False], "continuous": actions} | fields
    one.add(segments(lengths, spec=one.spec, seed=seed, **given))
    return one


# ---------------------------------------------------------------- the policy


def plain_policy(actor, head, masks):
    """Returns the distribution of the continuous actions and those of the branches."""
    count = actor.actions.continuous
    means, log_sigmas = head[:, :count], head[:, count : 2 * count].clamp(*LOG_SIGMA)
    # Without a cache the inverse of tanh would be inaccurate.
    squashed = TransformedDistribution(Normal(means, log_sigmas.exp()), TanhTransform(cache_size=1))
    logits = head[:, 2 * count :] if masks is None else head[:, 2 * count :] - 1e8 * masks
    branches = [Categorical(logits=one) for one in logits.split(list(actor.actions.discrete), 1)]
    return Independent(squashed, 1), branches


def test_log_probability_is_that_of_the_squashed_gaussian_and_finite_at_its_limits():
    source = torch.Generator().manual_seed(1)
    means, log_sigmas, noise = (torch.randn(50, 3, generator=source, dtype=torch.float64) for _ in range(3))
    actions, log_prob = squash(means, log_sigmas, noise)
    plain = TransformedDistribution(Normal(means, log_sigmas.exp()), TanhTransform())
    torch.testing.assert_close(log_prob, plain.log_prob(actions).sum(1), rtol=1e-6, atol=1e-6)
    _, far = squash(torch.full((1, 1), 500.0), torch.zeros(1, 1), torch.ones(1, 1))
    assert torch.isfinite(far).all()


@pytest.mark.parametrize("kind", ACTIONS)
def test_acting_samples_the_distribution_that_training_evaluates(kind):
    actor = SquashedActor(spec_of(kind), NetworkSettings(hidden_units=8), torch.Generator().manual_seed(0))
    seen = tuple(np.random.default_rng(1).standard_normal((40, *one.shape), np.float32) for one in SEEN)
    masks = np.zeros((40, actor.actions.mask_size), np.bool_)
    masks[::2, :1] = True
    continuous, discrete, log_prob = actor.frozen().act(seen, masks, np.random.default_rng(2))
    head = actor(actor.encoder.prepare(actor.encoder.join(seen)))
    squashed, branches = plain_policy(actor, head, torch.from_numpy(masks))
    expected = sum(one.log_prob(torch.from_numpy(discrete[:, at]).long()) for at, one in enumerate(branches))
    if continuous.shape[1]:
        expected = expected + squashed.log_prob(torch.from_numpy(continuous))
    np.testing.assert_allclose(log_prob, expected.detach(), rtol=1e-3, atol=1e-4)
    assert np.abs(continuous).max(initial=0) <= 1
    np.testing.assert_array_equal(actor.executed(continuous), continuous)
    likeliest, *_ = actor.frozen().act(seen, masks, np.random.default_rng(2), deterministic=True)
    np.testing.assert_allclose(likeliest, head[:, : continuous.shape[1]].tanh().detach(), atol=1e-6)


@pytest.mark.parametrize("kind", ACTIONS)
def test_exported_model_acts_as_the_policy(kind, tmp_path):
    one = fed(learner(kind))
    one.update()
    for form in ("onnx", "torchscript"):
        assert export(one.checkpoint(), [tmp_path / f"a.{form}"], form).difference < 1e-5


# ---------------------------------------------------------------- one gradient step


def plain_losses(sac, batch, noise_of_following, noise, gammas):
    """Returns the losses of critics, policy and coefficients as in the papers, row by row, for autograd."""
    networks = sac.networks
    actor, alpha = sac.actor, networks.log_alpha.detach().exp()
    discrete, count = actor.actions.discrete, actor.actions.continuous
    first = np.cumsum(batch.lengths) - batch.lengths
    inputs = actor.encoder.prepare(actor.encoder.join([one[first] for one in batch.observations]))
    following = actor.encoder.prepare(actor.encoder.join(batch.next_observations))

    def values(critics, seen, actions, choices):
        """Returns [signals] of each critic: the sum of the values of the choices of all branches."""
        found = []
        for critic in critics:
            outputs = critic((torch.cat([seen, actions])[None],))[0].view(len(gammas), -1)
            at = np.cumsum([0, *discrete])[: len(discrete)] + np.array(choices, int)
            found.append(outputs[:, at].sum(1) if len(at) else outputs[:, 0])
        return found

    def soft(critics, seen, masks, noise_row):
        """Returns the soft value of each signal, and the entropy of each kind of action."""
        squashed, branches = plain_policy(actor, actor((seen[None],)), None if masks is None else masks[None])
        base = squashed.base_dist.base_dist
        raw = base.mean + noise_row * base.stddev
        action = raw.tanh()[0]
        entropies = []
        if count:
            slope = torch.log(1 - raw.tanh().square())
            entropies.append(-(base.log_prob(raw) - slope).sum())
        entropies += [one.entropy().sum() for one in branches]
        total = torch.zeros(len(gammas))
        if not discrete:
            total = torch.minimum(*values(critics, seen, action, []))
        both = [critic((torch.cat([seen, action])[None],))[0].view(len(gammas), -1) for critic in critics]
        least, start = torch.minimum(*both), 0
        for branch in branches:
            size = branch.probs.shape[1]
            total = total + (branch.probs[0] * least[:, start : start + size]).sum(1)
            start += size
        entropies = torch.stack(entropies)
        return total + (alpha * entropies).sum(), entropies

    masks = None if batch.masks is None else torch.from_numpy(batch.masks[first])
    next_masks = None if batch.next_masks is None else torch.from_numpy(batch.next_masks)
    errors, gains, coefficient = [[], []], [], 0.0
    for row, (at, length) in enumerate(zip(first, batch.lengths, strict=True)):
        with torch.no_grad():
            later, _ = soft(
                networks.targets, following[0][row], None if next_masks is None else next_masks[row],
                noise_of_following[row],
            )  # fmt: skip
        target = torch.zeros(len(gammas))
        for signal, gamma in enumerate(gammas):
            for step in range(length):
                target[signal] += gamma**step * batch.rewards[at + step]
            target[signal] += gamma**length * later[signal] * (not batch.terminated[row])
        action = torch.from_numpy(batch.continuous[at])
        for which, estimate in enumerate(values(networks.critics, inputs[0][row], action, batch.discrete[at])):
            errors[which].append((estimate - target).square())
        value, entropies = soft(networks.critics, inputs[0][row], None if masks is None else masks[row], noise[row])
        gains.append(value)
        aims = [-float(count)] if count else []
        if discrete:
            allowed = [float((~one).sum()) for one in masks[row].split(list(discrete))]
            aims += [sac.hyper.discrete_target_entropy * np.log(one) for one in allowed]
        coefficient = coefficient + (networks.log_alpha * (entropies.detach() - torch.tensor(aims))).sum()
    critics = sum(0.5 * torch.stack(one).mean() for one in errors)
    return critics, -torch.stack(gains).mean(), coefficient / len(first)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", ACTIONS)
def test_gradient_step_follows_the_papers(kind, steps):
    signals = {"extrinsic": {"gamma": 0.9}}
    one = learner(kind, n_step=steps, discrete_target_entropy=0.5, network={"normalize": True}, signals=signals)
    fed(one, 60)
    sac = one._algorithm
    one.update()
    networks, count = sac.networks, sac.actor.actions.continuous
    sample = sac.replay.sample(16, steps, torch.Generator().manual_seed(3))
    minibatch = sac._minibatch(sample)
    state = sac.generator.get_state()
    noises = [torch.randn(16, count, generator=sac.generator) for _ in range(2)]
    sac.generator.set_state(state)
    critics, policy, coefficient = plain_losses(sac, sample, *noises, [0.9])
    groups = {name: list(networks.modules[name].parameters()) for name in ("critic", "actor", "entropy")}
    expected = {}
    for (name, parameters), loss in zip(groups.items(), (critics, policy, coefficient), strict=True):
        sac.optimizer.gradient.zero_()
        loss.backward(retain_graph=True)
        expected[name] = [parameter.grad.clone() for parameter in parameters]
    before = [parameter.clone() for parameter in networks.modules["target"].parameters()]
    skipped, measures = sac._step(minibatch)
    assert not skipped
    for name, parameters in groups.items():
        for parameter, gradient in zip(parameters, expected[name], strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=2e-3, atol=2e-5)
    torch.testing.assert_close(0.5 * measures.critics.sum(), critics.detach(), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(measures.policy, policy.detach(), rtol=1e-3, atol=1e-5)
    targets, own = (networks.modules[name].parameters() for name in ("target", "critic"))
    for old, target, critic in zip(before, targets, own, strict=True):
        torch.testing.assert_close(target, old + 0.005 * (critic - old))


def test_each_signal_has_its_value_and_its_discount():
    signals = {"extrinsic": {"gamma": 0.5, "strength": 2.0}, "rnd": {"gamma": 0.9, "strength": 0.0}}
    one = fed(learner("continuous", signals=signals))
    report = one.update()
    sac = one._algorithm
    minibatch = sac._minibatch(sac.replay.sample(200, 1, sac.generator))
    np.testing.assert_allclose(minibatch.discounts.numpy(), np.tile([0.5, 0.9], (200, 1)), rtol=1e-6)
    assert not minibatch.rewards[:, 1].any()
    assert {
        "Policy/Extrinsic Value Estimate",
        "Policy/Rnd Value Estimate",
        "Losses/RND Loss",
    } <= report.statistics.keys()
    targets = sac._targets(minibatch, torch.zeros(1))
    values = sac._targets(minibatch._replace(terminated=torch.zeros_like(minibatch.terminated)), torch.zeros(1))
    ended = minibatch.terminated[:, 0]
    assert ended.any()
    torch.testing.assert_close(targets[ended, 0], minibatch.rewards[ended, 0], msg="the simulator's rewards end")
    assert not torch.isclose(values[ended, 0], targets[ended, 0]).any()
    assert targets[ended, 1].unique().numel() == 1, "novelty goes on with the mean of what follows"


def test_recurrent_policy_is_evaluated_from_the_memory_that_acted():
    network = {"memory": MemorySettings(sequence_length=4, memory_size=8), "previous_action": True}
    one = learner("hybrid", network=network, batch_size=16)
    actor, source = one._algorithm.actor, np.random.default_rng(0)
    rows = 10
    seen = tuple(source.standard_normal((rows, *one.shape), np.float32) for one in SEEN)
    carried, stored, chosen = np.zeros((1, actor.carried), np.float32), [], []
    acting = actor.frozen()
    for row in range(rows):
        stored += [carried.copy()] if row % 4 == 0 else []
        chosen.append(acting.act(tuple(column[row : row + 1] for column in seen), None, source, False, carried))
    continuous, discrete, log_probs = map(np.concatenate, zip(*chosen, strict=True))
    one.add(
        segments(
            [rows], spec=one.spec, observations=seen, continuous=continuous, discrete=discrete, log_probs=log_probs,
            carried=np.concatenate(stored), rewards=np.arange(rows, dtype=np.float32),
        )
    )  # fmt: skip
    one._algorithm.replay.add(one._buffer.take(), np.arange(rows, dtype=np.float32))
    sac = one._algorithm
    sample = sac._sample()
    minibatch = sac._minibatch(sample)
    for view, found in ((minibatch.now, sample.rewards), (minibatch.following, None)):
        head = sac.actor(view.inputs, view.layout, view.memory)
        if found is None:  # the row after each step, where that is another step of the sequence
            head, found = head.index_select(0, minibatch.at), minibatch.rewards[:, 0].numpy() + 1
            inside = np.ones(len(found), bool)
            inside[np.cumsum(sample.lengths) - 1] = False
        else:
            inside = np.ones(len(found), bool)
        at = found.astype(int)[inside]
        squashed, branches = plain_policy(sac.actor, head[torch.from_numpy(np.flatnonzero(inside))], None)
        expected = squashed.log_prob(torch.from_numpy(continuous[at]))
        expected = expected + sum(
            one.log_prob(torch.from_numpy(discrete[at, which]).long()) for which, one in enumerate(branches)
        )
        np.testing.assert_allclose(log_probs[at], expected.detach(), rtol=1e-3, atol=1e-3)
    assert one._algorithm._step(minibatch)[0] == 0


def test_value_after_an_end_is_learned_from_how_often_demonstrations_end(tmp_path):
    """Discriminator-actor-critic: the absorbing state pays log(1 + e / p), at most log 2, at every step, for ever.

    The entropy is rewarded there as elsewhere, so that ending an episode forgoes nothing.
    """
    spec = spec_of("continuous")
    write(tmp_path, spec, recorded(spec, [100] * 4) | {"terminated": np.ones(4, bool)})
    signals = {"gail": {"demo_path": str(tmp_path), "gamma": 0.9, "strength": 0.5, "use_actions": True}}
    one = learner("continuous", signals=signals, tau=0.1, steps_per_update=1, init_entcoef=0.1, learning_rate=1e-5)
    fed(one, 64).update()
    sac, paid, bonuses = one._algorithm, [], []
    for _ in range(300):
        minibatch = sac._minibatch(sac._sample())
        _, measures = sac._step(minibatch)
        paid.append(minibatch.absorbing.item())
        bonuses.append(0.1 * measures.entropies.item())
    # One of 100 demonstrated steps ends an episode, and one of 64 steps of the policy.
    assert np.mean(paid) == pytest.approx(0.5 * np.log(1 + 64 / 100), rel=0.15)
    assert sac.networks.absorbing.item() == pytest.approx((np.mean(paid) + np.mean(bonuses)) / (1 - 0.9), rel=0.1)
    assert abs(np.mean(bonuses)) > 0.3 * np.mean(paid)
    ended = minibatch._replace(terminated=torch.ones_like(minibatch.terminated))
    expected = minibatch.rewards + 0.9 * sac.networks.absorbing
    torch.testing.assert_close(sac._targets(ended, torch.zeros(1)), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_gradient_is_skipped_and_counted(bad):
    one = learner("continuous", batch_size=64)
    before = one.weights_sha256
    report = fed(one, 128, rewards=np.full(128, bad, np.float32)).update()
    assert report.skipped == report.minibatches == 8
    assert "Losses/Policy Loss" not in report.statistics
    assert one.weights_sha256 == before


# ---------------------------------------------------------------- what an update trains on


@given(
    news=st.lists(st.integers(1, 500), min_size=1, max_size=20),
    first=st.integers(0, 600),
    every=st.floats(0.25, 40),
)
def test_gradient_steps_follow_the_steps_beyond_the_first(news, first, every):
    """However the steps arrive: the sum is that of all of them at once, so that the ratio holds over any time."""
    hyper, stored, taken = SACHyperparameters(buffer_init_steps=first, batch_size=16), 0, 0
    for new in news:
        stored += new
        taken += hyper.gradient_steps(stored, new, every)
        assert taken == int(max(0, stored - max(first, 16)) / every)
        assert stored <= max(first, 16) + every * (taken + 1)


def test_update_takes_whole_segments_and_as_many_gradient_steps_as_are_due():
    one = fed(learner("continuous", buffer_init_steps=40, steps_per_update=4), 70)
    assert one.size_of_update() == 70
    report = one.update()
    assert (report.steps, report.minibatches, one.buffered) == (70, 7, 0)
    assert report.lags == (70,)
    assert {"Losses/Q1 Loss", "Losses/Q2 Loss", "Policy/Continuous Entropy Coeff"} <= report.statistics.keys()
    assert fed(learner("continuous", buffer_init_steps=80), 70).update().minibatches == 0


def test_steps_of_any_age_are_kept():
    one = fed(learner("continuous"), versions=1)
    one.version = 50
    assert one.drop_stale(3) == 0
    assert one.update().lags == (*[0] * 49, 64)


def test_reward_networks_take_steps_of_their_own():
    signals = {"extrinsic": {}, "curiosity": {}}
    one = learner("continuous", signals=signals, steps_per_update=8, reward_signal_steps_per_update=4)
    source, before = one._algorithm.signals.sources["curiosity"], 0
    fed(one, 112)
    report = one.update()
    assert report.minibatches == 12
    assert source.optimizer.tried - before == 24


@pytest.mark.parametrize("kind", ACTIONS)
def test_cloning_beside_moves_the_policy_to_the_demonstrations(kind, tmp_path):
    spec = spec_of(kind)
    columns = recorded(spec, [30] * 3)
    columns["continuous"][:], columns["discrete"][:] = 0.5, 1
    write(tmp_path, spec, columns)
    cloning = BehavioralCloningSettings(demo_path=str(tmp_path), strength=10.0, num_epoch=2)
    settings = settings_of().model_copy(update={"behavioral_cloning": cloning})
    one = Learner("Test", spec, settings, 0)
    losses = [fed(one, 130, seed=seed).update().statistics["Losses/Pretraining Loss"] for seed in range(40)]
    assert losses[-1] < 0.3 * losses[0]
    seen = [columns["observation.0"], columns["observation.1"]]
    likeliest = one._algorithm.actor.frozen().act(seen, None, None, deterministic=True)
    np.testing.assert_allclose(likeliest[0], columns["continuous"], atol=0.3)
    assert np.isclose(likeliest[1], columns["discrete"]).sum() >= 0.9 * columns["discrete"].size


# ---------------------------------------------------------------- reproducible, saved, restored


def test_same_seed_gives_the_same_weights_and_another_one_others():
    hashes = []
    for seed in (1, 1, 2):
        one = learner(seed=seed)
        for number in range(3):
            fed(one, seed=number).update()
        hashes.append(one.weights_sha256)
    assert hashes[0] == hashes[1] != hashes[2]


def test_restored_learner_with_a_kept_replay_continues_as_if_it_had_never_stopped(tmp_path):
    def made():
        settings = settings_of(save_replay_buffer=True)
        return Learner("Test", spec_of("hybrid"), settings, 0, replay_folder=tmp_path / "replay")

    one = made()
    for number in range(3):
        fed(one, seed=number).update()
    saved = one.checkpoint()
    assert not [name for name in one.weights().arrays if "replay" in name or "critic" in name]
    again = made()
    again.restore(saved)
    fed(one, seed=7).update()
    uninterrupted = one.weights_sha256
    lost = made()  # another process, after the update above was lost with its own
    lost.restore(saved)
    assert lost._algorithm.replay.stored == 192
    fed(lost, seed=7).update()
    assert lost.weights_sha256 == uninterrupted


def test_restored_learner_without_a_replay_fills_it_again_before_it_trains():
    one = learner(buffer_init_steps=100)
    for number in range(3):
        fed(one, seed=number).update()
    again = learner(buffer_init_steps=100)
    again.restore(one.checkpoint())
    assert fed(again).update().minibatches == 0
    assert fed(again, seed=1).update().minibatches == 3
    assert again.trained == 320


def test_learner_that_only_plays_stores_no_steps(tmp_path):
    one = Learner("Test", spec_of("hybrid"), settings_of(), 0, learns=False, replay_folder=tmp_path / "replay")
    assert one._algorithm.replay.bytes < 200
    assert not (tmp_path / "replay").exists()


# ---------------------------------------------------------------- settings


def test_defaults_are_those_of_ml_agents():
    (behavior,) = parse_settings("behaviors: {A: {trainer_type: sac}}", "run.yaml").settings.behaviors.values()
    expected = {
        "batch_size": 128, "buffer_size": 50_000, "learning_rate": 3e-4, "learning_rate_schedule": "constant",
        "buffer_init_steps": 0, "tau": 0.005, "steps_per_update": 1.0, "save_replay_buffer": False,
        "init_entcoef": 1.0, "reward_signal_steps_per_update": None, "discrete_target_entropy": 0.2,
        "n_step": 1,
    }  # fmt: skip
    assert behavior.hyperparameters.model_dump() == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hyperparameters: {buffer_size: 64}", "buffer_size 64 and time_horizon 64; expected a replay that holds more"),
        ("hyperparameters: {n_step: 3}, network_settings: {memory: {}}", "n_step 3 and network_settings.memory"),
        ("hyperparameters: {beta: 0.1}", "unknown key 'beta'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(text, message):
    with pytest.raises(SettingsError, match=message):
        parse_settings(f"behaviors: {{A: {{trainer_type: sac, {text}}}}}", "run.yaml")


def test_step_budget_is_that_of_the_pipeline_and_holds_an_update():
    text = "behaviors: {{A: {{trainer_type: sac}}}}\npipeline: {{step_budget: {}}}"
    settings = parse_settings(text.format(300), "run.yaml").settings
    assert settings.step_budget(settings.behaviors["A"]) == 300
    assert settings.agent_steps(settings.behaviors["A"]) == 0
    with pytest.raises(SettingsError, match="got 30 with A, whose updates wait for 32 new steps"):
        parse_settings(text.format(30), "run.yaml")
    default = parse_settings("behaviors: {A: {trainer_type: sac, time_horizon: 3}}", "run.yaml").settings
    assert default.step_budget(default.behaviors["A"]) == 64
    assert default.agent_steps(default.behaviors["A"]) == 3


# ---------------------------------------------------------------- learning


@pytest.mark.parametrize("actions", [{"continuous": 1}, {"discrete": (2,)}])
def test_goal_game_is_learned(actions):
    settings = settings_of(batch_size=32, buffer_size=2000, steps_per_update=2, init_entcoef=0.1, learning_rate=3e-3)
    assert play_goal(ActionSpec(**actions), settings, seed=1, steps=1200, window=30) > 0.9


# ---------------------------------------------------------------- every kind of observation, on any device

KINDS = {
    "rich": (RICH, {}),
    "memory": (RICH, {"memory": MemorySettings(sequence_length=4, memory_size=8), "previous_action": True}),
    "signals": (SPECS["bytes"], {"normalize": True}),
    "floats": (SPECS["floats"], {}),
    "entities": (SPECS["entities"], {}),
    "goal": (SPECS["goal"], {"normalize": True}),
}


@pytest.mark.parametrize(("spec", "network"), KINDS.values(), ids=KINDS)
def test_every_kind_of_observation_is_learned_from_on_another_device_as_on_the_cpu(spec, network, tmp_path):
    demo = write(tmp_path, spec, recorded(spec, [4, 6, 5, 3, 7]))
    signals = {"extrinsic": {}, "curiosity": {}, "gail": {"demo_path": str(demo), "use_actions": True}}
    for one in (signals["curiosity"], signals["gail"]):
        one["network_settings"] = {"hidden_units": 8, "vis_encode_type": "fully_connected"}
    network = {"vis_encode_type": "fully_connected", **network}
    settings = settings_of(signals=signals, network=network, batch_size=8, steps_per_update=12)
    here, carried = Learner("Test", spec, settings, 3), {}
    records = [record_of(played(here._algorithm, seed=seed, carried_by_agent=carried)) for seed in range(3)]

    def trained(one):
        statistics = {}
        for record in records:
            one.add(record)
            statistics |= one.update(everything=True).statistics
        return statistics

    expected = trained(here)
    assert {"Losses/Q1 Loss", "Losses/GAIL Loss", "Losses/Curiosity Forward Loss"} <= expected.keys()
    assert np.isfinite(list(expected.values())).all()
    with other_device() as device:
        there = Learner("Test", spec, settings, 3, device=device)
        assert trained(there) == pytest.approx(expected, rel=1e-3, abs=1e-5)
        for module in there._algorithm.networks.modules.values():
            assert {parameter.device for parameter in module.parameters()} == {OTHER_DEVICE}
