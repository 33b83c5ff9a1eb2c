"""Several reward signals: steps, sums, rewards, and their use by PPO, MA-POCA and the learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparring.pipeline.errors import ServiceError
from sparring.pipeline.learning.minibatches import MOST_AGENTS, Memories
from sparring.pipeline.learning.signals import EpisodeStarts, Features, Signals, Steps, add_to_sums, by_series
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from tests.learning.learning_helpers import algorithm_of
from tests.learning.signals_algorithms import PLAIN, steps_of_batch
from tests.learning.signals_helpers import (
    HYBRID,
    NAMES,
    SPECS,
    observed,
    played,
    signals_of,
    steps_from,
    trainer,
    weights_of,
)

# ---------------------------------------------------------------- steps


lengths_of_segments = st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(0, 9)), min_size=1, max_size=6)


@given(segments=lengths_of_segments)
def test_steps_of_segments(segments: list[tuple[int, bool, int]]) -> None:
    """Each step is followed by the next row of its segment or by the row after the segment; only last steps end.

    A segment may have no step; then the row after it follows no step.
    """
    lengths, ended, agent_episodes = map(np.array, zip(*segments, strict=True))
    rows, count = int(lengths.sum()), len(lengths)
    seen = np.arange(rows, dtype=np.float32)[:, None]
    after = 1000 + np.arange(count, dtype=np.float32)[:, None]
    raw = np.linspace(-5, 5, 2 * rows, dtype=np.float32).reshape(rows, 2)
    steps = steps_from(
        HYBRID, lengths.astype(np.int32), [seen], [after], raw, np.zeros((rows, 2), np.int32), ended, agent_episodes
    )
    followed, over, episode, row = [], [], [], 0
    for segment, length in enumerate(lengths):
        for step in range(length):
            last = step == length - 1
            followed.append(1000.0 + segment if last else row + 1.0)
            over.append(bool(last and ended[segment]))
            episode.append(agent_episodes[segment])
            row += 1
    assert len(steps) == rows
    assert steps.observations[0][:rows, 0].tolist() == list(range(rows))
    assert steps.observations[0][steps.following, 0].tolist() == followed
    assert steps.ended.tolist() == over
    assert steps.agent_episodes.tolist() == episode
    np.testing.assert_allclose(steps.done[:, :2].numpy(), np.clip(raw, -3, 3) / 3, rtol=1e-6)
    assert steps.done.shape == (rows, 7)


# ---------------------------------------------------------------- sums


histories = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-9, 9), st.booleans()), max_size=8), min_size=1, max_size=6
)


@given(batches=histories)
def test_sums_of_episodes_over_several_batches(batches: list[Any]) -> None:
    """Rewards of an agent episode are summed over batches until it ends, and the sum is returned once."""
    sums, running, ended, returns, expected = Memories(1), {}, set(), [], []
    for batch in batches:
        rows = []
        for slot, reward, over in batch:
            episode = 100 * slot + sum(1 for one in ended if one // 100 == slot)  # the next episode of a slot
            rows.append((episode, reward, over))
            running[episode] = running.get(episode, 0) + reward
            if over:
                ended.add(episode)
                expected.append(running.pop(episode))
        columns = list(zip(*rows, strict=True)) or [(), (), ()]
        rewards, over = np.array(columns[1], np.float32), np.array(columns[2], np.bool_)
        returns += add_to_sums(sums, np.array(columns[0], np.int64), rewards, over).tolist()
    assert sorted(returns) == sorted(expected)


def test_number_of_open_episode_sums_is_limited() -> None:
    """Agents of disconnected simulators never end, so the number of sums has a limit, as for memories."""
    sums = Memories(1)
    for batch in range(4):
        agent_episodes = np.arange(MOST_AGENTS // 2) + batch * MOST_AGENTS
        add_to_sums(
            sums, agent_episodes, np.ones(len(agent_episodes), np.float32), np.zeros(len(agent_episodes), np.bool_)
        )
    assert len(sums) <= MOST_AGENTS


episodes_of_batches = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=6), min_size=1, max_size=5
)


@given(batches=episodes_of_batches)
def test_first_segments_of_agent_episodes_are_found(batches: list[list[tuple[int, bool]]]) -> None:
    """Each agent episode has one first segment, in whichever batch it is."""
    found, expected, starts, generation = EpisodeStarts(), [], [], dict.fromkeys(range(4), 0)
    known: set[int] = set()
    for batch in batches:
        agent_episodes, ends = [], []
        for slot, ended in batch:
            episode = 10 * generation[slot] + slot
            generation[slot] += ended
            agent_episodes.append(episode)
            ends.append(ended)
            expected.append(episode not in known)
            known.add(episode)
        starts += found.find(np.array(agent_episodes, np.int64), np.array(ends, np.bool_)).tolist()
    assert starts == expected


def test_number_of_known_open_episodes_is_limited() -> None:
    """The number of open episodes has a limit, because some ends are never reported or dropped as stale."""
    found = EpisodeStarts()
    for batch in range(4):
        agent_episodes = np.arange(MOST_AGENTS // 2) + batch * MOST_AGENTS
        found.find(agent_episodes, np.zeros(len(agent_episodes), np.bool_))
    assert len(found._under_way) <= MOST_AGENTS


def test_value_of_episode_starts() -> None:
    """It is the mean over the latest batch that has episode starts, and 0 before there is one."""
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
def test_rewards_of_members_by_timestep(spans: list[int], chosen: list[tuple[int, int]]) -> None:
    """The reward of a group at a timestep is the sum over its members; the timestep after a segment has none."""
    in_series, timestep = [], 0
    for span in spans:
        in_series += range(timestep, timestep + span)
        timestep += span + 1
    at = np.array([in_series[number % len(in_series)] for number, _ in chosen], np.int64)
    rewards = np.array([reward for _, reward in chosen], np.float32)
    found = by_series(rewards, at, np.array(in_series))
    expected = [sum(r for r, one in zip(rewards.tolist(), at.tolist(), strict=True) if one == m) for m in in_series]
    assert found.tolist() == expected
    assert found.dtype == np.float32


# ---------------------------------------------------------------- signals


def test_order_and_strengths(demo: Path) -> None:
    """The order is extrinsic, gail, curiosity, rnd, and each reward is that of its network times its strength."""
    settings = trainer(signals_of(reversed(NAMES), demo / "hybrid"))
    signals = algorithm_of("Test", PLAIN, settings, torch.Generator().manual_seed(0)).signals
    assert tuple(signals.settings) == NAMES
    assert list(signals.sources) == ["gail", "curiosity", "rnd"]
    signals.sources["curiosity"].module.updated.fill_(1)
    batch = played(algorithm_of("Test", PLAIN, trainer(signals_of(["extrinsic"])), torch.Generator().manual_seed(0)))
    steps = steps_of_batch(PLAIN, batch)
    found = signals.begin(batch.rewards, lambda: steps)
    assert tuple(found) == NAMES
    np.testing.assert_allclose(found["extrinsic"], 0.7 * batch.rewards, rtol=1e-6)
    for name, strength in (("gail", 0.3), ("curiosity", 0.2), ("rnd", 0.1)):
        np.testing.assert_allclose(found[name], strength * signals.sources[name].begin(steps), rtol=1e-6)
        assert found[name].dtype == np.float32


def test_mean_rewards_of_episodes_that_ended(demo: Path) -> None:
    """`Policy/Gail Reward` is the mean return of the ended episodes, whose rewards may come from several batches."""
    ppo = algorithm_of("Test", PLAIN, trainer(signals_of(NAMES, demo / "hybrid")), torch.Generator().manual_seed(0))
    sums, carried = {name: {} for name in NAMES[1:]}, {}
    for update, parts in enumerate([[(1, 3, False), (2, 4, False)], [(1, 4, True), (2, 5, False), (3, 2, True)]]):
        batch = played(ppo, parts, seed=update, carried_by_agent=carried)
        steps = steps_of_batch(PLAIN, batch)
        for name, strength in (("gail", 0.3), ("curiosity", 0.2), ("rnd", 0.1)):
            earned = strength * ppo.signals.sources[name].begin(steps)
            for episode, reward in zip(steps.agent_episodes.tolist(), earned.tolist(), strict=True):
                sums[name][episode] = sums[name].get(episode, 0.0) + reward
        found = ppo.update(batch, 1, 0).statistics
        for name in sums:
            key = f"Policy/{name.capitalize()} Reward"
            if update == 0:
                assert key not in found
            else:
                assert found[key] == pytest.approx((sums[name][1] + sums[name][3]) / 2, rel=1e-4)


def test_no_steps_are_prepared_without_reward_networks() -> None:
    """The extrinsic signal alone needs no `Steps`."""
    signals = Signals(signals_of(["extrinsic"]), {})
    assert not signals.sources
    assert not signals.modules.state_dict()

    def never() -> Steps:
        raise AssertionError

    found = signals.begin(np.ones(3, np.float32), never)
    np.testing.assert_allclose(found["extrinsic"], 0.7)
    signals.learn(torch.arange(3))
    assert signals.statistics() == {}


def test_random_observations_match_their_specs() -> None:
    """Observations of these tests have the shapes and dtypes of their specs."""
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


@pytest.mark.parametrize(
    ("made", "got"),
    [
        (lambda rewards: rewards[:-1], "float32 [6]"),
        (lambda rewards: rewards[:, None], "float32 [7, 1]"),
        (lambda rewards: rewards.astype(object), "object [7]"),
        (lambda rewards: rewards.tolist(), "list"),
        (lambda _: None, "NoneType"),
    ],
)
def test_reward_signal_that_returns_no_reward_for_each_step_is_named(made: Any, got: str, demo: Path) -> None:
    ppo = algorithm_of("Test", PLAIN, trainer(signals_of(["rnd"])), torch.Generator().manual_seed(0))
    network, batch = ppo.signals.sources["rnd"], played(ppo, [(1, 3, False), (2, 4, True)])
    begin = network.begin
    network.begin = lambda steps: made(begin(steps))
    with pytest.raises(
        ServiceError, match=r"Rnd.begin, the reward signal rnd; expected an array float32 \[7\]"
    ) as raised:
        ppo.signals.begin(batch.rewards, lambda: steps_of_batch(PLAIN, batch))
    assert str(raised.value).startswith(f"got {got} from ")
