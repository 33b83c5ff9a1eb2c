# ruff: noqa: N803 (names end in their shape)
"""What is learned from: a reward per step for each reward signal, and the networks that some of these have.

r steps of a batch, B of these in a minibatch, s segments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sparring.pipeline.demonstrations.library import DemonstrationFile, load
from sparring.pipeline.learning.memories import Memories
from sparring.pipeline.learning.optimizer import Adam
from sparring.pipeline.learning.settings import TrainerSettings
from sparring.pipeline.learning.signals.curiosity import Curiosity
from sparring.pipeline.learning.signals.gail import Gail
from sparring.pipeline.learning.signals.rnd import Rnd
from sparring.pipeline.learning.signals.scale import RewardScale
from sparring.pipeline.learning.signals.steps import Floats, Steps
from sparring.pipeline.networks.device import CPU
from sparring.pipeline.specs import BehaviorSpec

EXTRINSIC: Final = "extrinsic"


class RewardNetwork(Protocol):
    """A reward signal with networks of its own."""

    @property
    def module(self) -> nn.Module:
        """All that is saved."""

    @property
    def optimizer(self) -> Adam:
        """Of what is trained."""

    def begin(self, steps: Steps) -> Floats:
        """[r] Rewards of a batch, on whose minibatches `learn` goes on."""

    def learn(self, at_B: Tensor) -> None:
        """One step on some rows of the batch, whose numbers are on the processor."""

    def terminal_bootstrap_fraction(self, ends: int, steps: int) -> float:
        """How much of the value of a beginning follows the end of an episode, 0 to 1.

        Args:
            ends: of the batch, those that were not cut.
            steps: of the batch.
        """

    def restored(self) -> None:
        """The weights are others now: what was worked out with the former ones is worked out anew."""

    def statistics(self) -> dict[str, float]:
        """Of the steps since `begin`, by ML-Agents' names; ends the batch."""


class Signals:
    """The reward signals of one behavior, in the order of the settings.

    Attributes:
        settings: by name, of each signal.
        sources: by name, of those with networks.
        modules: of these, and the statistics of extrinsic rewards where these are normalized.
        demo_files: that the demonstrations of GAIL were read from.

    Args:
        behavior: name.
        spec: of the behavior.
        settings: of the learner.
        generator: random source of initial weights and of sampling.
        learns: False where the networks are only there to be loaded: then demonstrations are not needed.
        device: where the networks are.

    Raises:
        Unsupported: no encoder can be built for an observation.
        RecordingError: demonstrations are not there, cannot be read, or are of another spec.
    """

    def __init__(
        self,
        behavior: str,
        spec: BehaviorSpec,
        settings: TrainerSettings,
        generator: torch.Generator,
        *,
        learns: bool = True,
        device: torch.device = CPU,
    ) -> None:
        wanted = settings.reward_signals
        self.settings = wanted.named()
        self.sources: dict[str, RewardNetwork] = {}
        self.demo_files: tuple[DemonstrationFile, ...] = ()
        if wanted.gail is not None:
            gail = wanted.gail
            shown = load(gail.demo_path, behavior, spec, gail.demo_actions) if learns else None
            self.demo_files = () if shown is None else shown.files
            self.sources["gail"] = Gail(spec, gail, shown, generator, device)
        if wanted.curiosity is not None:
            self.sources["curiosity"] = Curiosity(spec, wanted.curiosity, generator, device)
        if wanted.rnd is not None:
            self.sources["rnd"] = Rnd(spec, wanted.rnd, generator, device)
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
        lengths_s: NDArray[Any],
        lives_s: NDArray[np.int64],
        ended_s: NDArray[np.bool_],
    ) -> Floats:
        """[r] The simulator's own rewards, normalized where the settings say so; once for each batch.

        Args:
            extrinsic_r: of each step.
            lengths_s: steps of each segment.
            lives_s: number of each segment's life, an agent's or a group's.
            ended_s: the life ended with it.
        """
        return extrinsic_r if self._scale is None else self._scale.divide(extrinsic_r, lengths_s, lives_s, ended_s)

    def begin(self, extrinsic: Floats, steps: Callable[[], Steps]) -> dict[str, Floats]:
        """[r] Rewards of a batch by signal, times its strength.

        Args:
            extrinsic: the simulator's rewards, those of an agent's group included, `scaled`.
            steps: makes what the networks are shown; called only where there are any.
        """
        found: dict[str, Floats] = {}
        shown = steps() if self.sources else None
        for name, signal in self.settings.items():
            if shown is None or name == EXTRINSIC:
                found[name] = extrinsic * np.float32(signal.strength)
                continue
            found[name] = self.sources[name].begin(shown) * np.float32(signal.strength)
            self._sums[name].add(shown.agent_episodes, found[name], shown.ended)
        return found

    def terminal_bootstrap_fraction(self, name: str, ends: int, steps: int) -> float:
        """How much of the value of a beginning follows the end of an episode: nothing for the simulator's own rewards.

        Args:
            name: of the signal.
            ends: of the batch, those that were not cut.
            steps: of the batch.
        """
        return 0.0 if name == EXTRINSIC else self.sources[name].terminal_bootstrap_fraction(ends, steps)

    def learn(self, at_B: Tensor) -> None:
        """One step of each network on rows of the batch."""
        for source in self.sources.values():
            source.learn(at_B)

    def restored(self) -> None:
        """The weights are those of a checkpoint now."""
        for source in self.sources.values():
            source.restored()

    def statistics(self) -> dict[str, float]:
        """Of the batch, by ML-Agents' names: losses, and the mean reward of the episodes that ended."""
        found: dict[str, float] = {}
        for name, source in self.sources.items():
            found |= source.statistics()
            ended = self._sums[name].take()
            if ended.size:
                found[f"Policy/{name.capitalize()} Reward"] = float(ended.mean())
        return found

    @property
    def moments(self) -> dict[str, Tensor]:
        """States of all optimisers, to be saved and restored in place."""
        return {
            f"{name}.{moment}": values
            for name, source in self.sources.items()
            for moment, values in source.optimizer.moments.items()
        }


class EpisodeSums:
    """Sums of rewards over episodes that reach over several batches."""

    def __init__(self) -> None:
        self._sums = Memories(1)
        self._ended: list[Floats] = []

    def add(self, lives_r: NDArray[np.int64], rewards_r: Floats, ended_r: NDArray[np.bool_]) -> None:
        """Adds the rewards of steps to those of their lives; of those that ended no more will come."""
        agent_episodes, at = np.unique(lives_r, return_inverse=True)
        sums = self._sums.recall(agent_episodes)
        sums[:, 0] += np.bincount(at, rewards_r, len(agent_episodes))
        over = np.zeros(len(agent_episodes), bool)
        over[at[ended_r]] = True
        self._ended.append(sums[over, 0])
        self._sums.keep(agent_episodes, sums, over)

    def take(self) -> Floats:
        """Sums of the episodes that ended since this was last called."""
        ended, self._ended = self._ended, []
        return np.concatenate(ended) if ended else np.empty(0, np.float32)


def by_series(rewards_r: Floats, timesteps_r: NDArray[np.int64], in_series_T: NDArray[np.int64]) -> Floats:
    """[T] what the members of groups earned together, at the moments of their decisions.

    Args:
        rewards_r: of each decision.
        timesteps_r: number of its moment.
        in_series_T: numbers of the moments in the series.
    """
    most = int(max(in_series_T.max(), timesteps_r.max(initial=0))) + 1
    of_timesteps = np.bincount(timesteps_r, rewards_r, most)
    series: Floats = of_timesteps[in_series_T].astype(np.float32)
    return series
