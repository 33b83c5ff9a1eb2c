"""Rewards divided by the running deviation of their discounted sum, compared with a slow twin and in learners."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.errors import CheckpointError
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.settings import ExtrinsicSettings, RewardSignals, TrainerSettings
from sparring.pipeline.learning.signals import RewardScale
from tests.learning.group_helpers import poca_settings, record
from tests.learning.learning_helpers import HYBRID, segments, small_settings
from tests.learning.random_groups import OWN, PLAIN, World, specs_of

GAMMA = 0.9


class Twin:
    """Divides rewards step by step in float64, with a list of all sums."""

    def __init__(self, gamma: float = GAMMA) -> None:
        self.gamma = gamma
        self.running: dict[int, float] = {}
        self.sums: list[float] = []

    def divide(self, rewards: Any, lengths: Any, agent_episodes: Any, ended: Any) -> np.ndarray:
        row = 0
        for length, episode, over in zip(lengths, agent_episodes, ended, strict=True):
            for reward in rewards[row : row + length]:
                self.running[episode] = self.gamma * self.running.get(episode, 0.0) + float(reward)
                self.sums.append(self.running[episode])
            row += length
            if over:
                del self.running[episode]
        sums = np.array(self.sums)
        mean = sums.sum() / (len(sums) + 1)
        variance = (((sums - mean) ** 2).sum() + mean**2 + 1) / (
            len(sums) + 1
        )  # includes one prior sum of 0 with variance 1
        return np.clip(rewards / np.sqrt(variance), -10, 10)


@given(data=st.data(), seed=st.integers(0, 1000), scale=st.sampled_from([0.001, 1.0, 100.0]))
@settings(max_examples=30, deadline=None)
def test_scaled_rewards_equal_those_of_the_twin_over_several_batches(
    data: st.DataObject, seed: int, scale: float
) -> None:
    random, twin, own = np.random.default_rng(seed), Twin(), RewardScale(GAMMA)
    next_life, alive = 5, [3, 1]
    for _ in range(data.draw(st.integers(1, 4))):
        parts = []
        for _ in range(data.draw(st.integers(1, 6))):
            episode = data.draw(st.sampled_from(alive))
            over = data.draw(st.booleans())
            parts.append((data.draw(st.integers(1, 9)), episode, over))
            if over:
                alive[alive.index(episode)] = next_life
                next_life += 1
        lengths, agent_episodes, ended = map(np.array, zip(*parts, strict=True))
        rewards = (scale * (random.standard_normal(lengths.sum()) + 0.5)).astype(np.float32)
        got = own.divide(rewards, lengths, agent_episodes, ended)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, twin.divide(rewards, lengths, agent_episodes, ended), rtol=2e-3, atol=1e-5)


def test_rare_reward_is_clipped_and_zero_rewards_stay_zero() -> None:
    own = RewardScale(GAMMA)
    still = np.zeros(10_000, np.float32)
    one = np.array([10_000]), np.array([1]), np.array([True])
    assert not own.divide(still, *one).any()
    rare = still.copy()
    rare[[-2, -1]] = 5, -5
    got = own.divide(rare, *one)
    assert got[-2:].tolist() == [10, -10]
    assert rare[-1] == -5, "the rewards themselves are not changed"


def test_non_finite_rewards_do_not_affect_statistics_or_the_next_batch() -> None:
    own, clean = RewardScale(GAMMA), RewardScale(GAMMA)
    one = np.array([3]), np.array([7]), np.array([False])
    assert np.isnan(own.divide(np.array([1, np.nan, 2], np.float32), *one)[1])
    assert own.module.count.item() == 1
    rewards = np.array([1, 2, 3], np.float32)
    np.testing.assert_array_equal(own.divide(rewards, *one), clean.divide(rewards, *one))


# ---------------------------------------------------------------- learners


def normalized(base: TrainerSettings, normalize: bool = True, **more: Any) -> TrainerSettings:
    signals = RewardSignals(extrinsic=ExtrinsicSettings(normalize=normalize, **more))
    return base.model_copy(update={"reward_signals": signals})


def learner(seed: int = 0, normalize: bool = True, **more: Any) -> Learner:
    return Learner("Test", HYBRID, normalized(small_settings(), normalize, **more), seed)


def fed(one: Learner, seed: int, scale: float = 1.0) -> Learner:
    record = segments([40, 24], seed=seed)
    one.add(segments([40, 24], seed=seed, rewards=scale * record.rewards))
    return one


def test_rewards_are_scaled_and_then_multiplied_by_strength(monkeypatch: pytest.MonkeyPatch) -> None:
    one, seen = learner(strength=3.0), []
    signals = one._algorithm.signals
    begin = signals.begin
    monkeypatch.setattr(signals, "begin", lambda *given_: seen.append(begin(*given_)) or seen[-1])
    twin = Twin(gamma=0.99)
    for seed in range(2):  # agents 0 and 1 continue in the second batch
        fed(one, seed, 50.0).update()
        rewards = 50.0 * segments([40, 24], seed=seed).rewards
        expected = 3.0 * twin.divide(rewards, [40, 24], [0, 1], [False, False])
        np.testing.assert_allclose(seen[seed]["extrinsic"], expected, rtol=1e-4)


def test_resumed_learner_with_scaled_rewards_continues_bit_for_bit() -> None:
    through, resumed = learner(3), learner(99)
    for seed in range(2):
        fed(through, seed, 50.0).update()
    resumed.restore(through.checkpoint())
    through._algorithm.signals._scale._sums.keep(np.arange(2), np.zeros((2, 1), np.float32), np.ones(2, bool))
    for seed in range(2, 4):
        assert fed(through, seed, 50.0).update() == fed(resumed, seed, 50.0).update()
    assert resumed.weights_sha256 == through.weights_sha256
    ours, theirs = through.checkpoint().weights, resumed.checkpoint().weights
    assert ours["signals.extrinsic.count"] == 1 + 4 * 64
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_checkpoints_with_and_without_scaled_rewards_are_not_interchangeable() -> None:
    for one, other in ((learner(), learner(normalize=False)), (learner(normalize=False), learner())):
        with pytest.raises(CheckpointError, match="normalized_rewards"):
            one.restore(other.checkpoint())


def test_group_rewards_are_scaled_by_their_own_deviation() -> None:
    specs = specs_of(PLAIN)
    hashes = []
    for normalize in (False, True):
        one = Learner(OWN, specs[OWN], normalized(poca_settings(), normalize), 0)
        world = World(specs, seed=3)
        one.add(record(world.groups(6, most=3), specs))
        batch = one._buffer.take(one._buffer.steps)
        one._algorithm.update(batch, 1, 0)
        hashes.append(one.weights_sha256)
        if normalize:
            weights = one.checkpoint().weights
            assert weights["signals.extrinsic.count"] == 1 + len(batch.groups.rewards)
            own, groups = RewardScale(0.99), batch.groups
            own.divide(groups.rewards, groups.spans, groups.numbers, groups.ended)
            assert weights["signals.extrinsic.variance"] == own.module.variance.numpy()
    assert hashes[0] != hashes[1]
