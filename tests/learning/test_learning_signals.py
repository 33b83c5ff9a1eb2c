"""Steps, sums and rewards of several signals, and their use by PPO, MA-POCA and the learner."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparring.pipeline.demonstrations.episodes import RecordingError
from sparring.pipeline.demonstrations.library import files_of, read_any
from sparring.pipeline.learning.actor_critic import ActorCritic
from sparring.pipeline.learning.group_networks import GroupNetworks
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.memories import MOST_AGENTS
from sparring.pipeline.learning.poca import POCA
from sparring.pipeline.learning.ppo import PPO
from sparring.pipeline.learning.settings import BehavioralCloningSettings, ExtrinsicSettings, RewardSignals
from sparring.pipeline.learning.signals import EpisodeSums, Signals, by_series
from sparring.pipeline.learning.signals.beginnings import EpisodeStarts
from sparring.pipeline.learning.signals.steps import Features, Steps
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from tests.learning.group_helpers import batch_of, record
from tests.learning.group_lives import OWN, specs_of
from tests.learning.signals_helpers import (
    HYBRID,
    NAMES,
    SPECS,
    finite,
    moments,
    observed,
    played,
    record_of,
    recorded,
    shown_of,
    signals_of,
    state,
    trainer,
    weights_of,
    world,
    write,
)

PLAIN = SPECS["hybrid"]
SUBSETS = [names for count in range(1, 5) for names in combinations(NAMES, count)]
LOSSES = {
    "gail": {
        "Policy/GAIL Policy Estimate", "Policy/GAIL Expert Estimate", "Losses/GAIL Loss", "Policy/GAIL Grad Mag Loss",
    },
    "curiosity": {"Losses/Curiosity Forward Loss", "Losses/Curiosity Inverse Loss"},
    "rnd": {"Losses/RND Loss"},
    "extrinsic": set(),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of demonstrations, one for each spec."""
    root = tmp_path_factory.mktemp("demonstrations")
    for name, spec in SPECS.items():
        (root / name).mkdir()
        write(root / name, spec, recorded(spec, [4, 3, 5, 2, 6], masked=True))
    return root


# ---------------------------------------------------------------- steps


lengths_of_segments = st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(0, 9)), min_size=1, max_size=6)


@given(segments=lengths_of_segments)
def test_steps_of_segments(segments: list[tuple[int, bool, int]]) -> None:
    """What followed each step is the next row of its segment, or what followed that; only last steps can end.

    A segment may have no step at all: then what followed it belongs to nobody.
    """
    lengths, ended, agent_episodes = map(np.array, zip(*segments, strict=True))
    rows, count = int(lengths.sum()), len(lengths)
    seen = np.arange(rows, dtype=np.float32)[:, None]
    after = 1000 + np.arange(count, dtype=np.float32)[:, None]
    raw = np.linspace(-5, 5, 2 * rows, dtype=np.float32).reshape(rows, 2)
    steps = Steps.of_segments(
        HYBRID, lengths.astype(np.int32), [seen], [after], raw, np.zeros((rows, 2), np.int32), ended, agent_episodes
    )
    followed, over, life, row = [], [], [], 0
    for segment, length in enumerate(lengths):
        for step in range(length):
            last = step == length - 1
            followed.append(1000.0 + segment if last else row + 1.0)
            over.append(bool(last and ended[segment]))
            life.append(agent_episodes[segment])
            row += 1
    assert len(steps) == rows
    assert steps.observations[0][:rows, 0].tolist() == list(range(rows))
    assert steps.observations[0][steps.following, 0].tolist() == followed
    assert steps.ended.tolist() == over
    assert steps.flags[:, 0].tolist() == [float(one) for one in over]
    assert steps.agent_episodes.tolist() == life
    np.testing.assert_allclose(steps.continuous, np.clip(raw, -3, 3) / 3, rtol=1e-6)
    assert steps.done.shape == (rows, 7)


@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=6), seed=st.integers(0, 9))
def test_steps_of_demonstrations(lengths: list[int], seed: int) -> None:
    """The next step of the episode, or what was seen after it; each episode's last step is its end."""
    spec = SPECS["bytes"]
    columns = recorded(spec, lengths, seed=seed)
    shown = shown_of(spec, columns)
    steps = Steps.of_demonstrations(spec.actions, shown)
    assert len(steps) == sum(lengths)
    for at, after in enumerate(shown.next_observations):
        np.testing.assert_array_equal(steps.observations[at][: len(steps)], columns[f"observation.{at}"])
        np.testing.assert_array_equal(steps.observations[at][steps.following], after)
    assert steps.ended.tolist() == [row == length - 1 for length in lengths for row in range(length)]
    assert steps.agent_episodes.tolist() == [number for number, length in enumerate(lengths) for _ in range(length)]
    np.testing.assert_array_equal(steps.continuous, columns["continuous"])


# ---------------------------------------------------------------- sums


histories = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-9, 9), st.booleans()), max_size=8), min_size=1, max_size=6
)


@given(batches=histories, asked=st.lists(st.booleans(), min_size=6, max_size=6))
def test_sums_of_episodes_over_several_batches(batches: list[Any], asked: list[bool]) -> None:
    """Each life's rewards are added up until it ends, whatever batches they come in; then they are told once."""
    sums, running, ended, told, expected = EpisodeSums(), {}, set(), [], []
    for batch, ask in zip(batches, asked, strict=False):
        rows = []
        for slot, reward, over in batch:
            life = 100 * slot + sum(1 for one in ended if one // 100 == slot)  # a slot's next life
            rows.append((life, reward, over))
            running[life] = running.get(life, 0) + reward
            if over:
                ended.add(life)
                expected.append(running.pop(life))
        columns = list(zip(*rows, strict=True)) or [(), (), ()]
        sums.add(np.array(columns[0], np.int64), np.array(columns[1], np.float32), np.array(columns[2], np.bool_))
        if ask:
            told += sums.take().tolist()
    told += sums.take().tolist()
    assert sorted(told) == sorted(expected)
    assert sums.take().size == 0


def test_lives_that_never_end_are_not_kept_for_ever() -> None:
    """Agents of simulators that went away are never heard of again: there is a bound, as for memories."""
    sums = EpisodeSums()
    for batch in range(4):
        agent_episodes = np.arange(MOST_AGENTS // 2) + batch * MOST_AGENTS
        sums.add(agent_episodes, np.ones(len(agent_episodes), np.float32), np.zeros(len(agent_episodes), np.bool_))
    assert len(sums._sums) <= MOST_AGENTS


lives_of_batches = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=6), min_size=1, max_size=5
)


@given(batches=lives_of_batches)
def test_beginnings_of_lives(batches: list[list[tuple[int, bool]]]) -> None:
    """A segment is the first of its life once, in whatever batch it comes."""
    found, expected, told, generation = EpisodeStarts(), [], [], dict.fromkeys(range(4), 0)
    known: set[int] = set()
    for batch in batches:
        agent_episodes, ends = [], []
        for slot, ended in batch:
            life = 10 * generation[slot] + slot
            generation[slot] += ended
            agent_episodes.append(life)
            ends.append(ended)
            expected.append(life not in known)
            known.add(life)
        told += found.find(np.array(agent_episodes, np.int64), np.array(ends, np.bool_)).tolist()
    assert told == expected


def test_lives_that_never_end_are_not_known_for_ever() -> None:
    """Neither are the lives under way of which no end is told, or whose last segment was too old."""
    found = EpisodeStarts()
    for batch in range(4):
        agent_episodes = np.arange(MOST_AGENTS // 2) + batch * MOST_AGENTS
        found.find(agent_episodes, np.zeros(len(agent_episodes), np.bool_))
    assert len(found._under_way) <= MOST_AGENTS


def test_value_of_beginnings() -> None:
    """The mean of a batch's, or of the last batch that had any; 0 where there was none."""
    found, nothing = EpisodeStarts(), np.empty(0, np.float32)
    assert found.value("gail", nothing) == 0
    assert found.value("gail", np.array([1, 2, 6], np.float32)) == 3
    assert found.value("gail", nothing) == 3
    assert found.value("rnd", nothing) == 0
    assert found.value("gail", np.array([5], np.float32)) == 5


@given(
    spans=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    chosen=st.lists(st.tuples(st.integers(0, 99), st.integers(-9, 9)), max_size=12),
)
def test_rewards_of_members_by_moment(spans: list[int], chosen: list[tuple[int, int]]) -> None:
    """All that members earn for decisions at a moment is earned by their group then; what followed has no reward."""
    in_series, moment = [], 0
    for span in spans:
        in_series += range(moment, moment + span)
        moment += span + 1
    at = np.array([in_series[number % len(in_series)] for number, _ in chosen], np.int64)
    rewards = np.array([reward for _, reward in chosen], np.float32)
    found = by_series(rewards, at, np.array(in_series))
    expected = [sum(r for r, one in zip(rewards.tolist(), at.tolist(), strict=True) if one == m) for m in in_series]
    assert found.tolist() == expected
    assert found.dtype == np.float32


# ---------------------------------------------------------------- signals


def test_order_and_strengths(demo: Path) -> None:
    """Always extrinsic, gail, curiosity, rnd; each reward is its network's times its strength."""
    settings = trainer(signals_of(reversed(NAMES), demo / "hybrid"))
    signals = Signals("Test", PLAIN, settings, torch.Generator().manual_seed(0))
    assert tuple(signals.settings) == NAMES
    assert list(signals.sources) == ["gail", "curiosity", "rnd"]
    signals.sources["curiosity"].module.updated.fill_(1)
    batch = played(PPO("Test", PLAIN, trainer(signals_of(["extrinsic"])), torch.Generator().manual_seed(0)))
    shown = shown_steps(PLAIN, batch)
    found = signals.begin(batch.rewards, lambda: shown)
    assert tuple(found) == NAMES
    np.testing.assert_allclose(found["extrinsic"], 0.7 * batch.rewards, rtol=1e-6)
    for name, strength in (("gail", 0.3), ("curiosity", 0.2), ("rnd", 0.1)):
        np.testing.assert_allclose(found[name], strength * signals.sources[name].begin(shown), rtol=1e-6)
        assert found[name].dtype == np.float32


def shown_steps(spec: BehaviorSpec, batch: Any) -> Steps:
    return Steps.of_segments(
        spec.actions, batch.lengths, batch.observations, batch.next_observations, batch.continuous, batch.discrete,
        batch.ended, batch.agent_episodes,
    )  # fmt: skip


def test_mean_rewards_of_episodes_that_ended(demo: Path) -> None:
    """`Policy/Gail Reward` is the mean sum of the strengthened rewards over the episodes that ended, over batches."""
    ppo = PPO("Test", PLAIN, trainer(signals_of(NAMES, demo / "hybrid")), torch.Generator().manual_seed(0))
    sums, standing = {name: {} for name in NAMES[1:]}, {}
    for update, parts in enumerate([[(1, 3, False), (2, 4, False)], [(1, 4, True), (2, 5, False), (3, 2, True)]]):
        batch = played(ppo, parts, seed=update, standing=standing)
        shown = shown_steps(PLAIN, batch)
        for name, strength in (("gail", 0.3), ("curiosity", 0.2), ("rnd", 0.1)):
            earned = strength * ppo.signals.sources[name].begin(shown)
            for life, reward in zip(shown.agent_episodes.tolist(), earned.tolist(), strict=True):
                sums[name][life] = sums[name].get(life, 0.0) + reward
        found = ppo.update(batch, 1, 0).statistics
        for name in sums:
            key = f"Policy/{name.capitalize()} Reward"
            if update == 0:
                assert key not in found
            else:
                assert found[key] == pytest.approx((sums[name][1] + sums[name][3]) / 2, rel=1e-4)


def test_nothing_is_prepared_without_reward_networks() -> None:
    """Rewards of the simulator alone need no `Steps`."""
    signals = Signals("Test", PLAIN, trainer(signals_of(["extrinsic"])), torch.Generator())
    assert not signals
    assert signals.moments == {}
    assert not signals.modules.state_dict()

    def never() -> Steps:
        raise AssertionError

    found = signals.begin(np.ones(3, np.float32), never)
    np.testing.assert_allclose(found["extrinsic"], 0.7)
    signals.learn(torch.arange(3))
    assert signals.statistics() == {}


# ---------------------------------------------------------------- PPO


def plain_gae(rewards: Any, values: Any, following: Any, lengths: Any, gamma: float, lambd: float) -> list[float]:
    """Row by row from each segment's end."""
    found, start = [], 0
    for segment, length in enumerate(lengths):
        later, running, part = float(following[segment]), 0.0, []
        for row in reversed(range(start, start + length)):
            running = float(rewards[row]) + gamma * later - float(values[row]) + gamma * lambd * running
            later = float(values[row])
            part.append(running)
        found += part[::-1]
        start += length
    return found


def share_of(folder: Path, ends: int, steps: int) -> float:
    """How much of a beginning follows an end for GAIL, by the demonstrations in a folder."""
    lengths = np.concatenate([read_any(file).columns["lengths"] for file in files_of(folder)])
    over = np.concatenate([read_any(file).columns["terminated"] for file in files_of(folder)])
    return min(1.0, np.log2(1 + (over.sum() / lengths.sum()) / (ends / steps)))


def beginnings(batch: Any) -> list[int]:
    """First rows of the lives of a first batch."""
    known, found, row = set(), [], 0
    for life, length in zip(batch.agent_episodes.tolist(), batch.lengths.tolist(), strict=True):
        if life not in known:
            known.add(life)
            found.append(row)
        row += length
    return found


@pytest.mark.parametrize("shared", [False, True])
def test_returns_and_advantages_of_all_signals(demo: Path, shared: bool) -> None:
    """One value head for each signal in their order; the end of an episode stops the extrinsic return alone.

    The others go on with the mean value of the episodes' beginnings, GAIL with a share of it; what is cut goes on with
    what was seen for all.
    The advantage is the mean over signals, normalised over the batch.
    """
    settings = trainer(signals_of(NAMES, demo / "hybrid"), shared_critic=shared)
    ppo = PPO("Test", PLAIN, settings, torch.Generator().manual_seed(0))
    ppo.signals.sources["curiosity"].module.updated.fill_(1)
    batch = played(ppo)
    assert batch.terminated.any()
    prepared = ppo.networks.prepare(batch)
    with torch.no_grad():
        values, following = ppo.networks.value(prepared.inputs).numpy(), ppo.networks.value(prepared.following).numpy()
    assert values.shape[1] == 4
    shown, every = shown_steps(PLAIN, batch), []
    gammas = {"extrinsic": 0.9, "gail": 0.8, "curiosity": 0.95, "rnd": 0.85}
    strengths = {"extrinsic": 0.7, "gail": 0.3, "curiosity": 0.2, "rnd": 0.1}
    for head, name in enumerate(NAMES):
        source = ppo.signals.sources.get(name)
        rewards = strengths[name] * (batch.rewards if source is None else source.begin(shown))
        begun = np.mean([values[row, head] for row in beginnings(batch)])
        share = {"extrinsic": 0.0, "gail": share_of(demo / "hybrid", batch.terminated.sum(), batch.steps)}.get(
            name, 1.0
        )
        bootstrap = np.where(batch.terminated, share * begun, following[:, head])
        every.append(plain_gae(rewards, values[:, head], bootstrap, batch.lengths, gammas[name], 0.95))
    estimates = np.array(every).T
    rows = ppo._rows(batch, prepared, ppo.networks.estimate(prepared, batch), 0.2)
    np.testing.assert_allclose(rows.returns.numpy(), estimates + values, rtol=1e-3, atol=1e-4)
    mean = estimates.mean(1)
    np.testing.assert_allclose(rows.advantage.numpy(), (mean - mean.mean()) / mean.std(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("kind", ["ppo", "poca"])
def test_one_step_for_each_minibatch_of_the_policy_on_its_rows(
    demo: Path, kind: str, memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The networks are shown the rows that the policy was shown, one step each; the number of minibatches is told."""
    algorithm, batch = made(kind, "hybrid", demo, NAMES, memory=memory)
    of_policy, of_networks = [], []
    plain_step, plain_learn = algorithm._step, algorithm.signals.learn
    every = batch.log_probs

    def step(rows: Any, *others: Any) -> Any:
        of_policy.append(rows.log_prob.numpy())
        return plain_step(rows, *others)

    def learn(at: torch.Tensor) -> None:
        of_networks.append(at.numpy())
        plain_learn(at)

    monkeypatch.setattr(algorithm, "_step", step)
    monkeypatch.setattr(algorithm.signals, "learn", learn)
    report = algorithm.update(batch, 0, 0)  # version 0: no row is stale, so that each keeps its log-probability
    assert report.minibatches == len(of_policy) == len(of_networks) > 2
    for log_probs, at in zip(of_policy, of_networks, strict=True):
        np.testing.assert_array_equal(every[at], log_probs)
    for source in algorithm.signals.sources.values():
        assert source.optimizer.moments["step"].item() == report.minibatches


# ---------------------------------------------------------------- every combination


def made(
    kind: str, name: str, demo: Path, names: Any, *, memory: bool = False, previous: bool = False, **how: Any
) -> tuple[Any, Any]:
    """A learner's algorithm and a batch for it."""
    spec = SPECS[name]
    settings = trainer(signals_of(names, demo / name, **how), kind=kind, memory=memory, previous=previous)
    generator = torch.Generator().manual_seed(0)
    if kind == "ppo":
        ppo = PPO("Test", spec, settings, generator)
        return ppo, played(ppo)
    poca = POCA(OWN, spec, settings, generator)
    specs = specs_of(spec)
    length = settings.network_settings.sequence_length
    return poca, batch_of(world(poca, specs).groups(4), specs, length=length)


def check(algorithm: Any, report: Any, names: Any) -> None:
    """Everything was learned, and all that is told is finite and has its name."""
    assert report.skipped == 0
    assert finite(algorithm.modules)
    assert finite(algorithm.signals.modules)
    for name, value in report.statistics.items():
        assert np.isfinite(value), name
    for name in names:
        assert f"Policy/{name.capitalize()} Value Estimate" in report.statistics
        assert LOSSES[name] <= report.statistics.keys()
    for name in set(NAMES) - set(names):
        assert LOSSES[name].isdisjoint(report.statistics)
        assert f"Policy/{name.capitalize()} Value Estimate" not in report.statistics


@pytest.mark.parametrize("names", SUBSETS, ids="+".join)
@pytest.mark.parametrize("kind", ["ppo", "poca"])
def test_every_combination_of_signals(demo: Path, kind: str, names: tuple[str, ...]) -> None:
    """Updates run, all weights move and stay finite, and each signal tells of itself."""
    algorithm, batch = made(kind, "hybrid", demo, names)
    before = state(algorithm.signals.modules)
    for update in range(2 if kind == "ppo" else 1):
        check(algorithm, algorithm.update(batch, update + 1, 0), names)
    after = state(algorithm.signals.modules)
    assert all((after[name] != before[name]) != ("rnd.target." in name) for name in after if "updated" not in name)


VARIANTS = [
    *((name, {}) for name in SPECS),
    ("hybrid", {"memory": True}),
    ("hybrid", {"previous": True}),
    ("entities", {"memory": True, "previous": True}),
    ("bytes", {"memory": True}),
    ("goal", {"normalize": True}),
    ("hybrid", {"use_actions": True}),
    ("entities", {"use_vail": True, "use_actions": True}),
    ("bytes", {"use_vail": True, "normalize": True}),
]


@pytest.mark.parametrize(("name", "how"), VARIANTS, ids=[f"{name}-{'-'.join(how)}" for name, how in VARIANTS])
@pytest.mark.parametrize("kind", ["ppo", "poca"])
def test_all_signals_with_all_kinds_of_observations_and_memories(
    demo: Path, kind: str, name: str, how: dict[str, bool]
) -> None:
    """Images of bytes and of floats, entities, goals, masks, hybrid actions, policies that remember."""
    if kind == "poca" and not SPECS[name].actions.discrete:
        name = "discrete"  # the groups of these tests have branches
    algorithm, batch = made(kind, name, demo, NAMES, **how)
    for update in range(2 if kind == "ppo" else 1):
        check(algorithm, algorithm.update(batch, update + 1, 0), NAMES)


def test_reward_networks_that_are_told_to_remember_do_not(demo: Path) -> None:
    """`network_settings` of a signal may name a memory or the previous action, as a copied configuration does."""
    one = signals_of(NAMES, demo / "hybrid")
    shape = trainer(one, memory=True, previous=True).network_settings
    changed = {
        name: getattr(one, name).model_copy(update={"network_settings": shape}) for name in ("gail", "curiosity", "rnd")
    }
    ppo = PPO("Test", PLAIN, trainer(one.model_copy(update=changed)), torch.Generator().manual_seed(0))
    check(ppo, ppo.update(played(ppo), 1, 0), NAMES)


@pytest.mark.parametrize("kind", ["ppo", "poca"])
def test_mates_of_other_names(demo: Path, kind: str) -> None:
    """Agents of other behaviors in the groups are not shown to the reward networks."""
    if kind == "ppo":
        algorithm, batch = made(kind, "hybrid", demo, NAMES)
        assert len(algorithm._shown(batch)) == batch.steps
        return
    specs = specs_of(PLAIN, teammates=2)
    algorithm = POCA(OWN, PLAIN, trainer(signals_of(NAMES, demo / "hybrid"), kind="poca"), torch.Generator())
    algorithm.meet({name: spec for name, spec in specs.items() if name != OWN})
    batch = batch_of(world(algorithm, specs).groups(6), specs)
    assert len(algorithm._shown(batch)) == batch.steps
    check(algorithm, algorithm.update(batch, 1, 0), NAMES)


@pytest.mark.parametrize("kind", ["ppo", "poca"])
def test_a_batch_that_is_not_finite_leaves_the_reward_networks_alone(demo: Path, kind: str) -> None:
    """Bit by bit: weights, beta, `updated` and all optimisers; the next batch is learned from."""
    algorithm, batch = made(kind, "hybrid", demo, NAMES, use_actions=True, use_vail=True, normalize=True)
    algorithm.update(batch, 1, 0)
    columns = (batch if kind == "ppo" else batch.own).observations[0]
    kept = columns.copy()
    columns[:] = np.nan
    before = state(algorithm.signals.modules), moments(algorithm.signals)
    with np.errstate(invalid="ignore"):
        report = algorithm.update(batch, 2, 0)
    assert report.skipped == report.minibatches
    assert (state(algorithm.signals.modules), moments(algorithm.signals)) == before
    columns[:] = kept
    report = algorithm.update(batch, 3, 0)
    assert report.skipped == 0
    assert (state(algorithm.signals.modules), moments(algorithm.signals)) != before
    assert finite(algorithm.signals.modules)
    assert all(np.isfinite(value) for name, value in report.statistics.items() if "Reward" not in name)


def test_rewards_of_later_episodes_are_told_after_a_batch_that_was_not_finite(demo: Path) -> None:
    """What is not a number spoils the sums of the episodes it is in, and of no other."""
    ppo, batch = made("ppo", "hybrid", demo, NAMES)
    kept = batch.observations[0].copy()
    batch.observations[0][:] = np.nan
    with np.errstate(invalid="ignore"):
        ppo.update(played_again(batch, 0), 1, 0)
    batch.observations[0][:] = kept
    found = ppo.update(played_again(batch, 100, only_ended=True), 2, 0).statistics
    for name in ("Gail", "Curiosity", "Rnd"):
        assert np.isfinite(found[f"Policy/{name} Reward"])


def test_batches_after_one_that_was_not_finite_are_learned_from(demo: Path) -> None:
    """Nothing of a batch that was skipped is left in the returns of the next one, though no episode begins in that."""
    ppo, _ = made("ppo", "hybrid", demo, NAMES)
    standing: dict[int, Any] = {}
    ppo.update(played(ppo, [(1, 9, False), (2, 9, False)], standing=standing), 1, 0)
    spoilt = played(ppo, [(3, 9, False), (4, 9, False)], standing=standing)
    spoilt.observations[0][:] = np.nan
    with np.errstate(invalid="ignore"):
        report = ppo.update(spoilt, 2, 0)
    assert report.skipped == report.minibatches
    report = ppo.update(played(ppo, [(1, 9, True), (2, 9, True)], standing=standing), 3, 0)
    assert report.skipped == 0
    assert finite(ppo.modules)


def played_again(batch: Any, more: int, only_ended: bool = False) -> Any:
    """The same segments, of other lives."""
    fields = {name: getattr(batch, name) for name in type(batch).__slots__}
    fields["agent_episodes"] = (
        more + np.arange(len(batch.agent_episodes)) if only_ended else batch.agent_episodes + more
    )
    return type(batch)(**fields)


@pytest.mark.parametrize("kind", ["ppo", "poca"])
def test_learning_rates_of_reward_networks_stay(demo: Path, kind: str) -> None:
    """The policy's learning rate falls over training, those of the reward networks do not."""
    algorithm, batch = made(kind, "hybrid", demo, NAMES)
    report = algorithm.update(batch, 1, 9000)
    assert report.statistics["Policy/Learning Rate"] == pytest.approx(1e-4, rel=1e-3)
    for source in algorithm.signals.sources.values():
        assert source.optimizer.learning_rate == 1e-3


# ---------------------------------------------------------------- MA-POCA


def test_members_rewards_are_added_up_at_the_time_of_their_decisions(demo: Path) -> None:
    """The group's series of a signal holds each member's reward once, times the strength, at its decision's time.

    Twin of the lambda returns of all signals: `R_T = r_T + gamma V_next`, `R_t = r_t + gamma (lambda R_{t+1} +
    (1 - lambda) V_{t+1})`, in groups that went on.
    """
    spec = PLAIN
    settings = trainer(signals_of(NAMES, demo / "hybrid"), kind="poca")
    poca = POCA(OWN, spec, settings, torch.Generator().manual_seed(0))
    poca.signals.sources["curiosity"].module.updated.fill_(1)
    specs = specs_of(spec)
    groups = world(poca, specs).groups(4, over=False)
    batch = batch_of(groups, specs)
    prepared = poca.networks.prepare(batch)
    found = poca.networks.estimate(prepared, batch)
    shown = poca._shown(batch)
    gammas = {"extrinsic": 0.9, "gail": 0.8, "curiosity": 0.95, "rnd": 0.85}
    strengths = {"extrinsic": 0.7, "gail": 0.3, "curiosity": 0.2, "rnd": 0.1}
    targets = poca._targets(batch, prepared, found, 0.2)
    for head, name in enumerate(NAMES):
        earned = None if name == "extrinsic" else poca.signals.sources[name].begin(shown)
        row, moment = 0, 0
        for group in groups:
            series = [float(one) for one in group.rewards] if earned is None else [0.0] * group.span
            if earned is not None:
                for member in group.of(OWN):
                    for step in member.steps:
                        series[step.time] += float(earned[row])
                        row += 1
            values = found.values[moment : moment + group.span + 1, head].tolist()
            later = values[-1]
            for time in reversed(range(group.span)):
                value = strengths[name] * series[time] + gammas[name] * later
                assert targets.returns[moment + time, head].item() == pytest.approx(value, rel=1e-3, abs=1e-4)
                later = 0.95 * value + 0.05 * values[time]
            moment += group.span + 1


def test_the_end_of_a_group_stops_the_extrinsic_return_alone(demo: Path) -> None:
    """Others go on: what follows a group's end is worth something to them."""
    settings = trainer(signals_of(NAMES, demo / "hybrid"), kind="poca")
    poca = POCA(OWN, PLAIN, settings, torch.Generator().manual_seed(0))
    specs = specs_of(PLAIN)
    groups = world(poca, specs).groups(6, over=True)
    for group in groups:
        for member in group.members:
            member.terminated, member.interrupted = member.ended, False
            member.until = min(member.until, group.span)
    batch = batch_of(groups, specs)
    prepared = poca.networks.prepare(batch)
    shown = poca._shown(batch)
    targets = poca._targets(batch, prepared, poca.networks.estimate(prepared, batch), 0.2)
    rewards = {"extrinsic": 0.7 * batch.shared}
    for name, strength in (("gail", 0.3), ("rnd", 0.1)):
        earned = strength * poca.signals.sources[name].begin(shown)
        rewards[name] = by_series(earned, prepared.index.timesteps, prepared.index.in_series)
    last = np.cumsum(batch.spans) - 1
    for name, series in rewards.items():
        returns = targets.returns[prepared.index.last - 1, NAMES.index(name)].numpy()
        stops = np.isclose(returns, series[last], rtol=1e-5, atol=1e-6)
        assert stops.all() == (name == "extrinsic"), name
        if name != "extrinsic":  # nobody is there afterwards: what follows is worth what beginnings are
            begun = targets.values[prepared.index.first, NAMES.index(name)].numpy().mean()
            gamma = {"gail": 0.8, "rnd": 0.85}[name]
            share = {"gail": share_of(demo / "hybrid", len(groups), len(batch.shared)), "rnd": 1.0}[name]
            np.testing.assert_allclose(returns, series[last] + gamma * share * begun, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- randomness


@pytest.mark.parametrize("kind", ["ppo", "poca"])
def test_without_reward_networks_the_same_numbers_are_drawn(kind: str, demo: Path) -> None:
    """Weights are those of actor and critic alone, and an update draws its orders and nothing else."""
    settings = trainer(RewardSignals(extrinsic=ExtrinsicSettings()), kind=kind)
    alone, generator = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    if kind == "ppo":
        networks: Any = ActorCritic(PLAIN, settings, alone)
        algorithm: Any = PPO("Test", PLAIN, settings, generator)
        batch: Any = played(algorithm)
    else:
        networks = GroupNetworks(OWN, PLAIN, settings, alone)
        algorithm = POCA(OWN, PLAIN, settings, generator)
        batch = batch_of(world(algorithm, specs_of(PLAIN)).groups(4), specs_of(PLAIN))
    assert state(algorithm.modules) == state(networks.modules)
    assert torch.equal(generator.get_state(), alone.get_state())
    if kind == "ppo":
        algorithm.update(batch, 1, 0)
        for _ in range(settings.hyperparameters.num_epoch):
            torch.randperm(batch.steps, generator=alone)
        assert torch.equal(generator.get_state(), alone.get_state())


def test_actor_begins_the_same_with_reward_networks(demo: Path) -> None:
    """Reward networks draw after the actor: the policy starts as it would without them."""
    plain, rich = (
        PPO("Test", PLAIN, trainer(signals_of(names, demo / "hybrid")), torch.Generator().manual_seed(3))
        for names in (["extrinsic"], NAMES)
    )
    assert state(plain.actor) == state(rich.actor)


# ---------------------------------------------------------------- checkpoints


def learner(kind: str, demo: Path, *, learns: bool = True, cloning: bool = True, seed: int = 0, **how: Any) -> Learner:
    """With all signals, VAIL and cloning."""
    path = str(demo / "hybrid")
    settings = trainer(
        signals_of(NAMES, path, use_actions=True, use_vail=True, normalize=True),
        kind=kind,
        normalize=True,
        cloning=BehavioralCloningSettings(demo_path=path, steps=5000, batch_size=4) if cloning else None,
        **how,
    )
    return Learner("Test" if kind == "ppo" else OWN, PLAIN, settings, seed, learns=learns)


def fed(one: Learner, seed: int, source: str = "stepping-0.1") -> Learner:
    """Adds the same segments, whoever is fed."""
    if one.settings.trainer_type == "poca":
        specs = specs_of(PLAIN)
        groups = world(one._algorithm, specs, seed).groups(5)
        one.add(record(groups, specs, length=one.settings.network_settings.sequence_length, source=source))
    else:
        one.add(record_of(played(one._algorithm, seed=seed), source))
    return one


def everything(one: Learner) -> Any:
    checkpoint = one.checkpoint()
    return [
        {name: array.tobytes() for name, array in arrays.items()}
        for arrays in (checkpoint.weights, checkpoint.optimizer)
    ], (one.version, one.updates, one.trained)


@pytest.mark.parametrize("how", [{}, {"memory": True}], ids=["plain", "memory"])
@pytest.mark.parametrize("kind", ["ppo", "poca"])
def test_a_restored_learner_goes_on_bit_by_bit(demo: Path, kind: str, how: dict[str, bool]) -> None:
    """Discriminator, beta, `updated`, running statistics, all optimisers, cloning and the random state."""
    one = learner(kind, demo, **how)
    fed(one, 0).update(everything=True)
    fed(one, 1).update(everything=True)
    one._algorithm.signals.sources["gail"].module.beta.fill_(0.25)
    checkpoint = one.checkpoint()
    other = learner(kind, demo, seed=9, **how)
    assert everything(other) != everything(one)
    other.restore(checkpoint)
    assert other._algorithm.signals.sources["gail"].module.beta == 0.25
    assert everything(other) == everything(one)
    names = checkpoint.weights.keys()
    for part in ("gail.beta", "gail.sigma", "gail.head.weight", "curiosity.updated", "rnd.target.layers.0.weight"):
        assert f"signals.{part}" in names
    assert checkpoint.weights["signals.gail.beta"] == 0.25
    assert checkpoint.weights["signals.curiosity.updated"] == 1
    for signal in NAMES[1:]:
        assert checkpoint.optimizer[f"signals.{signal}.step"] > 0
    for learning in (one, other):  # of new lives: what a critic remembers of agents is not in checkpoints
        fed(learning, 2, source="stepping-0.2")
    reports = [learning.update(everything=True).statistics for learning in (one, other)]
    kept = {name for name in reports[0] if not name.endswith(" Reward")}  # sums of episodes under way are not saved
    assert {name: reports[0][name] for name in kept} == {name: reports[1][name] for name in kept}
    assert everything(other) == everything(one)


@pytest.mark.parametrize("kind", ["ppo", "poca"])
def test_who_only_plays_needs_no_demonstrations(demo: Path, kind: str, tmp_path: Path) -> None:
    """A learner that does not learn restores a checkpoint where the demonstrations are not there."""
    one = fed(learner(kind, demo), 0)
    one.update(everything=True)
    other = learner(kind, tmp_path, learns=False, seed=5)
    other.restore(one.checkpoint())
    assert other.weights_sha256 == one.weights_sha256
    assert other.trained == one.trained
    ours, theirs = other.weights().arrays, one.weights().arrays
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    with pytest.raises(RecordingError):
        learner(kind, tmp_path)


def test_fresh_reward_networks_of_a_new_lineage(demo: Path) -> None:
    """`init_path` brings actor and critic; reward networks start anew."""
    one = fed(learner("ppo", demo), 0)
    one.update(everything=True)
    other = learner("ppo", demo, seed=4)
    before = state(other._algorithm.signals.modules)
    other.load_weights(one.checkpoint())
    assert other.weights_sha256 == one.weights_sha256
    assert state(other._algorithm.signals.modules) == before


def test_resumed_with_more_demonstrations_both_sides_are_normalised_alike(tmp_path: Path) -> None:
    """Running statistics come from the checkpoint; the demonstrations must be read by the same ones."""
    columns = recorded(PLAIN, [4, 5])
    write(tmp_path, PLAIN, columns)
    settings = trainer(signals_of(["gail"], tmp_path, normalize=True))
    one = Learner("Test", PLAIN, settings, 0)
    far = recorded(PLAIN, [6, 6], seed=3)
    far["observation.0"] = 10 + 5 * far["observation.0"]
    write(tmp_path, PLAIN, far, "two")
    other = Learner("Test", PLAIN, settings, 0)
    other.restore(one.checkpoint())
    gail: Any = other._algorithm.signals.sources["gail"]
    raw = np.concatenate([columns["observation.0"], far["observation.0"]])
    normalizer = gail.module.features.encoder.normalizer
    mean, deviation = normalizer.mean.numpy()[:3], normalizer.variance.sqrt().numpy()[:3]
    batch = fed(other, 0)._buffer.take_all()
    other._algorithm.update(batch, 1, 0)
    np.testing.assert_allclose(
        gail._expert.inputs[0][:, :3].numpy(), np.clip((raw - mean) / deviation, -5, 5), rtol=1e-4, atol=1e-5
    )


def test_helpers_observe_what_specs_say() -> None:
    """Batches of these tests have images of bytes and floats, and some padding."""
    random = np.random.default_rng(0)
    for spec in SPECS.values():
        for one, column in zip(spec.observations, observed(spec, 20, random), strict=True):
            assert column.shape == (20, *one.shape)
            assert column.dtype == one.dtype


def test_reward_networks_have_the_hidden_units_that_their_settings_name() -> None:
    spec = BehaviorSpec(observations=(ObservationSpec(name="a", shape=(3,)),), actions=ActionSpec(continuous=1))
    settings = NetworkSettings(hidden_units=8, activation="tanh", initialization="orthogonal")
    features = Features(spec, settings, 0, torch.Generator().manual_seed(0))
    weights = weights_of(features.layers)
    np.testing.assert_allclose(weights["2.weight"] @ weights["2.weight"].T, 2 * np.eye(8), atol=1e-5)
    expected = rows = observed(spec, 5, np.random.default_rng(0))[0]
    for layer in ("0", "2"):
        expected = np.tanh(expected @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"])
    np.testing.assert_allclose(features((torch.from_numpy(rows),)).detach(), expected, atol=1e-5)
