"""PPO and the learner: single updates, sequences of updates, reproducibility."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Normal

from sparring.pipeline.errors import CheckpointError, ServiceError
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.minibatches import RecurrentState
from sparring.pipeline.learning.ppo import hyperparameters_of
from sparring.pipeline.learning.settings import (
    Coefficients,
    ExtrinsicSettings,
    Hyperparameters,
    RewardSignals,
    RndSettings,
    TrainerSettings,
)
from sparring.pipeline.messages.segments import Episodes
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from tests.learning.learning_helpers import HYBRID, play_goal, segments, small_settings


def learner(seed=0, behavior="Test", **changes):
    return Learner(behavior, HYBRID, small_settings(**changes), seed)


def shaped(**changes):
    settings = small_settings()
    return settings.model_copy(update={"network_settings": settings.network_settings.model_copy(update=changes)})


def fed(one, seed=0, rows=64, **fields):
    one.add(segments([rows // 2, rows - rows // 2], seed=seed, **fields))
    return one


# ---------------------------------------------------------------- one update


def test_update_that_is_asked_to_stop_ends_after_a_minibatch_and_counts_its_steps():
    one, whole = fed(learner()), fed(learner())
    one.is_stopping = lambda: True
    report = one.update()
    assert report.minibatches == 1 < whole.update().minibatches
    assert (one.trained, one.version, one.updates) == (64, 2, 1)
    assert one.weights_sha256 != learner().weights_sha256


def plain_loss(ppo, batch, epsilon, beta):
    """Returns the loss of a single minibatch as in the paper, for autograd."""
    inputs = ppo.actor.encoder.prepare(ppo.actor.encoder.join(batch.observations))
    following = ppo.actor.encoder.prepare(ppo.actor.encoder.join(batch.next_observations))
    with torch.no_grad():
        values, next_values = ppo.networks.critic(inputs)[:, 0].numpy(), ppo.networks.critic(following)[:, 0].numpy()
    advantage, start = [], 0
    for length, bootstrap, terminated in zip(batch.lengths, next_values, batch.terminated, strict=True):
        running, later, part = 0.0, 0.0 if terminated else bootstrap, []
        for row in reversed(range(start, start + length)):
            running = batch.rewards[row] + 0.99 * later - values[row] + 0.99 * 0.95 * running
            later = values[row]
            part.append(running)
        advantage += part[::-1]
        start += length
    target = torch.tensor(np.array(advantage) + values, dtype=torch.float32)
    advantage = torch.tensor(returns_normalized(np.array(advantage)), dtype=torch.float32)
    head = ppo.actor(inputs)
    normal = Normal(head[:, :2], ppo.actor.log_sigma.exp())
    logits = head[:, 2:] + torch.from_numpy(batch.masks) * -1e8
    branches = [Categorical(logits=part) for part in logits.split([3, 2], dim=1)]
    log_prob = normal.log_prob(torch.from_numpy(batch.continuous)).sum(1)
    entropy = normal.entropy().mean(1)
    for number, branch in enumerate(branches):
        log_prob = log_prob + branch.log_prob(torch.from_numpy(batch.discrete[:, number]))
        entropy = entropy + branch.entropy()
    ratio = (log_prob - torch.from_numpy(batch.log_probs)).exp()
    policy = -torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage).mean()
    value = (ppo.networks.critic(inputs)[:, 0] - target).square().mean()
    return policy + 0.5 * value - beta * 4 * entropy.mean(), policy, value, entropy.mean()


def returns_normalized(values):
    return (values - values.mean()) / (values.std() + 1e-10)


def test_update_follows_the_gradient_of_the_paper():
    one = fed(learner(batch_size=64, num_epoch=1), masked=True, terminated=[True, False])
    ppo, batch = one._algorithm, one._buffer.take()
    coefficients = Coefficients.at(hyperparameters_of(one.settings), 0)
    loss, policy, value, entropy = plain_loss(ppo, batch, coefficients.epsilon, coefficients.beta)
    ppo.optimizer.gradient.zero_()
    loss.backward()
    expected = ppo.optimizer.gradient.clone()
    report = ppo.update(batch, version=1, trained=0)
    torch.testing.assert_close(ppo.optimizer.gradient, expected, rtol=1e-4, atol=1e-6)
    assert report.statistics["Losses/Policy Loss"] == pytest.approx(abs(policy.item()), rel=1e-4)
    assert report.statistics["Losses/Value Loss"] == pytest.approx(value.item(), rel=1e-4)
    assert report.statistics["Policy/Entropy"] == pytest.approx(entropy.item(), rel=1e-4)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("actions", [{"continuous": 2}, {"discrete": (3, 2)}, {"continuous": 1, "discrete": (4,)}])
def test_perceptrons_are_differentiated_without_autograd_bit_for_bit(actions, shared):
    spec = BehaviorSpec(observations=(ObservationSpec(name="state", shape=(3,)),), actions=ActionSpec(**actions))
    ppo = Learner("Test", spec, small_settings(shared_critic=shared), 0)._algorithm
    inputs = (torch.randn(16, 3, generator=torch.Generator().manual_seed(1)),)
    with torch.no_grad():
        head, values, backward_fn = ppo.networks.run(inputs, RecurrentState())
    outputs = ppo.actor(inputs)
    expected = outputs[:, : ppo.actor.outputs], ppo.networks.value(inputs)
    if shared:
        expected = expected[0], outputs[:, ppo.actor.outputs :]
    assert not head.requires_grad
    assert torch.equal(head, expected[0])
    assert torch.equal(values, expected[1])
    gradients = tuple(torch.randn(one.shape, generator=torch.Generator().manual_seed(2)) for one in expected)
    ppo.optimizer.gradient.zero_()
    torch.autograd.backward(expected, gradients)
    by_autograd = ppo.optimizer.gradient.clone()
    assert by_autograd.any()
    with torch.no_grad():
        ppo.optimizer.gradient.zero_()
        backward_fn(*gradients)
    assert torch.equal(ppo.optimizer.gradient, by_autograd)


def test_report_counts_minibatches_and_steps():
    one = fed(learner(batch_size=20), versions=np.r_[np.full(40, 5), np.full(24, 3)])
    one.version = 5
    report = one.update()
    assert (report.steps, report.minibatches, report.skipped) == (64, 9, 0), "an incomplete minibatch is left out"
    assert report.lags == (40, 0, 24)
    assert not report.group_rewards
    assert {"Policy/Learning Rate", "Policy/Epsilon", "Policy/Beta", "Policy/Extrinsic Value Estimate"} <= (
        report.statistics.keys()
    )
    assert (one.version, one.updates, one.trained) == (6, 1, 64)


def test_group_rewards_are_added_to_individual_rewards():
    own, group = np.random.default_rng(3).standard_normal((2, 64), np.float32)
    plain, summed = fed(learner(), rewards=own), fed(learner(), rewards=own + group)
    both = fed(learner(), rewards=own, group_rewards=group)
    assert not plain.update().group_rewards
    assert not summed.update().group_rewards
    assert both.update().group_rewards
    assert both.weights_sha256 == summed.weights_sha256 != plain.weights_sha256


def test_group_rewards_count_for_the_extrinsic_signal_only():
    """A learner without the extrinsic signal ignores them."""
    settings = small_settings().model_copy(update={"reward_signals": RewardSignals(rnd=RndSettings())})
    one, other = (Learner("Test", HYBRID, settings, 0) for _ in range(2))
    fed(one).update()
    fed(other, group_rewards=np.ones(64, np.float32)).update()
    assert one.weights_sha256 == other.weights_sha256


def test_episode_returns_since_the_last_update_are_reported_once():
    one = learner()
    none = np.zeros(0, np.float32)
    episodes = Episodes(
        returns=np.float32([1, 3]),
        lengths=np.int32([4, 4]),
        group_returns=none,
        teams=np.int32([0, 0]),
        outcomes=none,
        shared_returns=np.float32([0.5, 1.5]),
    )
    assert fed(one, episodes=episodes).update().statistics["Policy/Extrinsic Reward"] == 3.0
    assert "Policy/Extrinsic Reward" not in fed(one).update().statistics


def test_strength_scales_the_reward_of_a_signal():
    signals = RewardSignals(extrinsic=ExtrinsicSettings(strength=2.0))
    strong = Learner("Test", HYBRID, small_settings().model_copy(update={"reward_signals": signals}), 0)
    plain, rewards = learner(), np.linspace(-1, 1, 64, dtype=np.float32)
    fed(strong, rewards=rewards).update()
    fed(plain, rewards=2 * rewards).update()
    assert strong.weights_sha256 == plain.weights_sha256


def test_normalizer_is_frozen_during_an_update_and_includes_its_rows_afterwards():
    one = fed(learner())
    rows = torch.cat([torch.from_numpy(o) for o in segments([32, 32]).observations], 1)
    one.update()
    arrays = one.weights().arrays
    assert arrays["encoder.normalizer.count"] == 65
    np.testing.assert_allclose(arrays["encoder.normalizer.mean"], rows.sum(0) / 65, rtol=1e-4, atol=1e-6)


def test_value_loss_is_clipped_only_if_configured():
    hashes = set()
    for clip in (False, True):
        one = fed(learner(clip_value_loss=clip, learning_rate=0.05))
        one.update()
        hashes.add(one.weights_sha256)
    assert len(hashes) == 2


@pytest.mark.parametrize("changes", [{"max_grad_norm": 0.01}, {"adam_epsilon": 0.01}])
def test_gradient_limit_and_epsilon_reach_the_optimizer(changes):
    plain, other = fed(learner()), fed(learner(**changes))
    assert other.weights_sha256 == plain.weights_sha256
    norms = [one.update().statistics["Update/Gradient Norm"] for one in (plain, other)]
    assert other.weights_sha256 != plain.weights_sha256
    assert min(norms) > 0.01


# ---------------------------------------------------------------- anomalies


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_loss_is_skipped_and_counted_without_changing_weights(bad):
    one = learner()
    before = one.weights_sha256
    rewards = np.zeros(64, np.float32)
    rewards[3] = bad
    report = fed(one, rewards=rewards).update()
    assert report.skipped == report.minibatches == 12
    assert "Losses/Policy Loss" not in report.statistics
    state = one.checkpoint()
    assert not state.optimizer["exp_avg"].any()
    actor = {name: array for name, array in state.weights.items() if "normalizer" not in name}
    fresh = {name: array for name, array in learner().checkpoint().weights.items() if "normalizer" not in name}
    for name, array in actor.items():
        np.testing.assert_array_equal(array, fresh[name])
    assert one.weights_sha256 != before, "only the normalizer has moved"


def test_only_the_minibatch_with_the_anomaly_is_skipped():
    log_probs = segments([32, 32]).log_probs.copy()
    log_probs[5] = -np.inf  # its ratio is infinite
    one = fed(learner(), log_probs=log_probs, rewards=np.linspace(1, -1, 64, dtype=np.float32))
    report = one.update()
    assert report.skipped <= 3
    assert np.isfinite(one.weights().arrays["log_sigma"]).all()


def test_non_finite_weights_are_never_published():
    one = learner()
    with torch.no_grad():
        one._algorithm.actor.log_sigma[0] = float("nan")
    with pytest.raises(ServiceError, match="log_sigma"):
        one.weights()


# ---------------------------------------------------------------- many updates


def test_same_seed_and_segments_give_the_same_weights_bit_for_bit():
    hashes = []
    for _ in range(2):
        one = learner(seed=7)
        for seed in range(3):
            fed(one, seed=seed, masked=True).update()
            torch.rand(3)  # the global random source is not used
        hashes.append(one.weights_sha256)
    assert hashes[0] == hashes[1]


def test_seeds_and_behaviors_start_from_different_weights():
    hashes = {learner(0).weights_sha256, learner(1).weights_sha256, learner(0, behavior="Other").weights_sha256}
    assert len(hashes) == 3


def test_resumed_learner_continues_bit_for_bit():
    through = learner(seed=3)
    for seed in range(2):
        fed(through, seed=seed).update()
    resumed = learner(seed=99)
    resumed.restore(through.checkpoint())
    for seed in range(2, 5):
        assert fed(through, seed=seed).update() == fed(resumed, seed=seed).update()
    assert resumed.weights_sha256 == through.weights_sha256
    assert (resumed.version, resumed.updates, resumed.trained) == (6, 5, 320)


def test_checkpoint_is_a_copy():
    one = learner()
    state = one.checkpoint()
    before = {name: array.copy() for name, array in (state.weights | state.optimizer).items()}
    fed(one).update()
    for name, array in (state.weights | state.optimizer).items():
        np.testing.assert_array_equal(array, before[name])


def test_checkpoint_of_another_spec_network_or_behavior_is_refused():
    state = learner().checkpoint()
    spec = BehaviorSpec(observations=HYBRID.observations, actions=ActionSpec(continuous=2, discrete=(2, 3)))
    wide = small_settings().model_copy(update={"network_settings": NetworkSettings(hidden_units=17)})
    for other, named in (
        (
            Learner("Test", spec, small_settings(), 0),
            "with observations near: .* branches of 3, 2 choices; expected .* branches of 2, 3",
        ),
        (Learner("Test", HYBRID, wide, 0), "hidden_units"),
        (Learner("Test", HYBRID, shaped(activation="tanh"), 0), "activation"),
        (learner(behavior="Other"), "Other"),
    ):
        before = other.weights_sha256
        with pytest.raises(CheckpointError, match=named):
            other.restore(state)
        assert other.weights_sha256 == before


def test_checkpoint_without_activation_or_initialization_is_accepted():
    state = learner().checkpoint()
    assert not {"activation", "initialization"} & state.description["network_settings"].keys()
    other = Learner("Test", HYBRID, shaped(initialization="orthogonal"), 1)
    other.restore(state)
    assert other.weights_sha256 == learner().weights_sha256


def test_loading_weights_only_starts_a_new_lineage():
    one, other = fed(learner(0)), learner(1)
    one.update()
    other.load_weights(one.checkpoint())
    assert other.weights_sha256 == one.weights_sha256
    assert (other.version, other.updates, other.trained) == (1, 0, 0)


def test_versions_only_rise():
    one = learner()
    one.raise_version(41)
    assert one.weights().version == one.version == 42
    one.raise_version(7)
    assert one.version == 43


def test_update_takes_a_buffer_or_everything():
    one = fed(learner(), rows=100)
    assert one.ready
    assert one.update().steps == 64
    assert (one.buffered, one.ready) == (36, False)
    assert one.update(everything=True).steps == 36


def test_stale_steps_are_dropped_and_counted_while_enough_remain_for_an_update():
    one = fed(fed(learner()), seed=1)
    one.version = 9
    assert one.drop_stale(3) == one.stale == 64
    assert one.ready


def test_training_is_done_at_max_steps():
    one = Learner("Test", HYBRID, small_settings().model_copy(update={"max_steps": 64}), 0)
    assert not one.done
    fed(one).update()
    assert one.done


# ---------------------------------------------------------------- proof of learning


GOAL = TrainerSettings(
    hyperparameters=Hyperparameters(
        batch_size=16,
        buffer_size=64,
        learning_rate=5e-3,
        learning_rate_schedule="constant",
        beta_schedule="constant",
        epsilon_schedule="constant",
    ),
    network_settings=NetworkSettings(hidden_units=32, num_layers=1),
    max_steps=3000,
)
"""Settings of the proof; all others are defaults (beta 5e-3, epsilon 0.2, lambd 0.95, num_epoch 3, gamma 0.99)."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])  # of 0 to 47, 45 learn the continuous one in so few steps
@pytest.mark.parametrize(
    "actions", [ActionSpec(continuous=1), ActionSpec(discrete=(2,))], ids=["continuous", "discrete"]
)
def test_goal_game_is_learned_within_3000_steps(actions, seed):
    assert play_goal(actions, GOAL, seed) > 0.9


def test_several_vector_observations_are_learned_from():
    spec = BehaviorSpec(
        observations=(ObservationSpec(name="a", shape=(1,)), ObservationSpec(name="b", shape=(4,))),
        actions=ActionSpec(discrete=(2,)),
    )
    one = Learner("Test", spec, small_settings(learning_rate=5e-3), 0)
    report = fed(one, spec=spec).update()
    assert report.skipped == 0


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda _: None, "got NoneType from "),
        (lambda report: report._replace(steps=63), "got 63 steps and statistics "),
        (lambda report: report._replace(statistics={"loss": "low"}), "statistics {'loss': 'low'}"),
    ],
)
def test_what_is_no_report_of_the_batch_is_refused_because_the_accounts_would_be_wrong(change, got):
    one = fed(learner())
    update = one._algorithm.update
    one._algorithm.update = lambda *given: change(update(*given))
    with pytest.raises(ServiceError, match=r"PPO.update; expected an UpdateReport of the 64 steps") as raised:
        one.update()
    assert got in str(raised.value)
    assert (one.trained, one.version) == (0, 1)
