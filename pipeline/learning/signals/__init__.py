# ruff: noqa: N803 (names end in their shape)
"""Reward signals give each step one reward per signal; some of them train networks of their own.

r steps of a batch, B of these in a minibatch, s segments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from sparring.pipeline.learning.memories import Memories
from sparring.pipeline.learning.optimizer import Adam
from sparring.pipeline.learning.settings import RewardSignals
from sparring.pipeline.learning.signals.scale import RewardScale
from sparring.pipeline.learning.signals.steps import Floats, Steps
from sparring.pipeline.specs import Array

EXTRINSIC: Final = "extrinsic"


class RewardNetwork(Protocol):
    """Computes a reward signal with networks of its own."""

    @property
    def module(self) -> nn.Module:
        """Returns all weights that a checkpoint saves."""

    @property
    def optimizer(self) -> Adam:
        """Returns the optimizer of the trained weights."""

    def begin(self, steps: Steps) -> Floats:
        """Starts a batch and returns its rewards [r]; `learn` then trains on its minibatches."""

    def learn(self, at_B: Tensor) -> None:
        """Takes one optimizer step on the rows `at_B` of the batch; the row numbers are on the CPU."""

    def terminal_bootstrap_fraction(self, ends: int, steps: int) -> float:
        """Returns the fraction, 0 to 1, of the mean value of episode starts that bootstraps a terminated episode.

        Args:
            ends: number of terminated episodes in the batch; interrupted ones do not count.
            steps: number of steps in the batch.
        """

    def restored(self) -> None:
        """Discards what was computed with the previous weights, after others were loaded."""

    def statistics(self) -> dict[str, float]:
        """Ends the batch and returns its statistics since `begin`, by ML-Agents' names."""


class Signals:
    """Combines the reward signals of one behavior, in the order of the settings.

    Attributes:
        settings: settings of each signal, by name.
        sources: the signals with networks, by name.
        modules: their networks, and the statistics of extrinsic rewards if these are normalized.

    Args:
        wanted: settings of the signals.
        sources: those with networks, by name.
    """

    def __init__(self, wanted: RewardSignals, sources: Mapping[str, RewardNetwork]) -> None:
        self.settings = wanted.named()
        self.sources = dict(sources)
        self.modules = nn.ModuleDict({name: source.module for name, source in self.sources.items()})
        self._sums = {name: EpisodeSums() for name in self.sources}
        extrinsic = wanted.extrinsic
        self._scale = RewardScale(extrinsic.gamma) if extrinsic is not None and extrinsic.normalize else None
        if self._scale is not None:
            self.modules[EXTRINSIC] = self._scale.module

    def __bool__(self) -> bool:
        return bool(self.sources)

    def scaled(
        self,
        extrinsic_r: Floats,
        lengths_s: Array,
        episodes_s: NDArray[np.int64],
        ended_s: NDArray[np.bool_],
    ) -> Floats:
        """Returns the simulator's rewards [r], normalized if the settings enable it; it is called once for each batch.

        Args:
            extrinsic_r: reward of each step.
            lengths_s: steps of each segment.
            episodes_s: number of each segment's agent episode, or of its group.
            ended_s: the agent episode, or the group, ended with the segment.
        """
        return extrinsic_r if self._scale is None else self._scale.divide(extrinsic_r, lengths_s, episodes_s, ended_s)

    def begin(self, extrinsic: Floats, steps: Callable[[], Steps]) -> dict[str, Floats]:
        """Starts a batch and returns its rewards [r] by signal, times the signal's strength.

        Args:
            extrinsic: the simulator's rewards, including those of an agent's group, `scaled`.
            steps: returns the networks' inputs; called only if there are networks.
        """
        found: dict[str, Floats] = {}
        batch = steps() if self.sources else None
        for name, signal in self.settings.items():
            if batch is None or name == EXTRINSIC:
                found[name] = extrinsic * np.float32(signal.strength)
                continue
            found[name] = self.sources[name].begin(batch) * np.float32(signal.strength)
            self._sums[name].add(batch.agent_episodes, found[name], batch.ended)
        return found

    def terminal_bootstrap_fraction(self, name: str, ends: int, steps: int) -> float:
        """Returns the fraction of `RewardNetwork.terminal_bootstrap_fraction`; 0 for the simulator's own rewards.

        Args:
            name: name of the signal.
            ends: number of terminated episodes in the batch; interrupted ones do not count.
            steps: number of steps in the batch.
        """
        return 0.0 if name == EXTRINSIC else self.sources[name].terminal_bootstrap_fraction(ends, steps)

    def learn(self, at_B: Tensor) -> None:
        """Takes one optimizer step of each network on rows of the batch."""
        for source in self.sources.values():
            source.learn(at_B)

    def restored(self) -> None:
        """Prepares all networks for weights that were loaded from a checkpoint."""
        for source in self.sources.values():
            source.restored()

    def statistics(self) -> dict[str, float]:
        """Returns the batch's losses by ML-Agents' names, and the mean reward of the episodes that ended."""
        found: dict[str, float] = {}
        for name, source in self.sources.items():
            found |= source.statistics()
            ended = self._sums[name].take()
            if ended.size:
                found[f"Policy/{name.capitalize()} Reward"] = float(ended.mean())
        return found

    @property
    def moments(self) -> dict[str, Tensor]:
        """Returns the states of all optimizers, to be saved and restored in place."""
        return {
            f"{name}.{moment}": values
            for name, source in self.sources.items()
            for moment, values in source.optimizer.moments.items()
        }


class EpisodeSums:
    """Sums rewards over episodes, which may span several batches."""

    def __init__(self) -> None:
        self._sums = Memories(1)
        self._ended: list[Floats] = []

    def add(self, episodes_r: NDArray[np.int64], rewards_r: Floats, ended_r: NDArray[np.bool_]) -> None:
        """Adds the rewards of steps to the sums of their episodes, and closes those that ended."""
        agent_episodes, at = np.unique(episodes_r, return_inverse=True)
        sums = self._sums.recall(agent_episodes)
        sums[:, 0] += np.bincount(at, rewards_r, len(agent_episodes))
        over = np.zeros(len(agent_episodes), bool)
        over[at[ended_r]] = True
        self._ended.append(sums[over, 0])
        self._sums.keep(agent_episodes, sums, over)

    def take(self) -> Floats:
        """Returns the sums of the episodes that ended since the last call."""
        ended, self._ended = self._ended, []
        return np.concatenate(ended) if ended else np.empty(0, np.float32)


def by_series(rewards_r: Floats, timesteps_r: NDArray[np.int64], in_series_T: NDArray[np.int64]) -> Floats:
    """Returns [T] what the members of groups earned together, at the timesteps of their decisions.

    Args:
        rewards_r: reward of each decision.
        timesteps_r: timestep of each decision.
        in_series_T: timesteps in the series.
    """
    most = int(max(in_series_T.max(), timesteps_r.max(initial=0))) + 1
    of_timesteps = np.bincount(timesteps_r, rewards_r, most)
    series: Floats = of_timesteps[in_series_T].astype(np.float32)
    return series
