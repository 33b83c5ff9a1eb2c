"""This module defines what a trainer brings, and what a learner gives it to build that from."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from sparring.pipeline.demonstrations.library import DemonstrationFile, Demonstrations, load, read_columns
from sparring.pipeline.learning.actor_critic import ActorCritic
from sparring.pipeline.learning.buffer import Batch
from sparring.pipeline.learning.cloning import Cloning
from sparring.pipeline.learning.losses import UpdateReport
from sparring.pipeline.learning.optimizer import Adam
from sparring.pipeline.learning.ranks import Ranks
from sparring.pipeline.learning.settings import EXTRINSIC, DemonstrationSettings, TrainerSettings
from sparring.pipeline.learning.signals import RewardNetwork, Signals
from sparring.pipeline.networks.device import CPU
from sparring.pipeline.specs import BehaviorSpec

_CLONING = "cloning."
"""Prefix of the optimizer state of behavioral cloning."""


class Algorithm(ABC):
    """Trains the networks of one behavior; a trainer's plug-in is a subclass.

    Attributes:
        networks: actor and critic; a checkpoint holds all their modules, and what acts is the actor.
        optimizer: changes their parameters.
        signals: rewards, and the networks of reward signals.
        cloning: trains the actor on demonstrations beside this; None for none.
        is_stopping: returns whether an update is to end after its present minibatch.
    """

    networks: ActorCritic
    optimizer: Adam
    signals: Signals
    cloning: Cloning | None = None
    is_stopping: Callable[[], bool] = staticmethod(lambda: False)

    @abstractmethod
    def update(self, batch: Batch, version: int, trained: int) -> UpdateReport:
        """Trains on new steps; the weights afterwards are a new version.

        Args:
            batch: whole segments.
            version: version of the current weights.
            trained: steps trained on before, for schedules.
        """

    def update_offline(self, steps: int, trained: int) -> UpdateReport:
        """Trains on recorded steps alone, as if `steps` of a simulator had arrived.

        Args:
            steps: for the number of gradient steps.
            trained: steps counted before, for schedules.
        """
        raise NotImplementedError

    @property
    def optimizers(self) -> dict[str, Adam]:
        """Returns all optimizers of `networks`, whose state a checkpoint holds below these prefixes."""
        return {"": self.optimizer}

    @property
    def modules(self) -> nn.ModuleDict:
        """Returns all networks: actor, critic and those of the reward signals."""
        return nn.ModuleDict({**dict(self.networks.modules.items()), "signals": self.signals.modules})

    @property
    def moments(self) -> dict[str, Tensor]:
        """Returns the states of all optimizers by name, to be saved and restored in place."""
        states = {prefix: optimizer.moments for prefix, optimizer in self.optimizers.items()}
        states |= {f"signals.{name}.": source.optimizer.moments for name, source in self.signals.sources.items()}
        states |= {} if self.cloning is None else {_CLONING: self.cloning.moments}
        return {prefix + name: moment for prefix, moments in states.items() for name, moment in moments.items()}

    @property
    def flat(self) -> list[Tensor]:
        """Returns the blocks of all trained parameters, which learners of several ranks have in common."""
        own = [optimizer.flat for optimizer in self.optimizers.values()]
        return [*own, *(source.optimizer.flat for source in self.signals.sources.values())]

    @property
    def tried(self) -> int:
        """Returns the minibatches tried since creation; other threads may read it."""
        cloned = 0 if self.cloning is None else self.cloning.tried
        return cloned + sum(optimizer.tried for optimizer in self.optimizers.values())

    @property
    def teammates(self) -> Mapping[str, BehaviorSpec]:
        """Returns the specs of the other behavior names whose members of groups the critic observes."""
        return {}

    def register(self, specs: Mapping[str, BehaviorSpec]) -> None:
        """Lets the critic observe members of other behavior names; without effect where it observes no groups.

        Raises:
            Unsupported: no encoder can be built for one of them.
        """
        del specs


def is_cloning(moment: str) -> bool:
    """Returns whether a name in `Algorithm.moments` belongs to cloning, which may begin or end with a restart."""
    return moment.startswith(_CLONING)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Holds what an algorithm is built from; the order of the calls decides which random numbers each part gets.

    Attributes:
        behavior: name of the behavior.
        spec: observations and actions of the behavior.
        settings: the learner's settings.
        generator: random source of the initial weights and of shuffling.
        device: device of the networks.
        ranks: of the processes that share minibatches.
        learns: False loads no demonstrations, for networks that only receive weights.
        files: demonstration files that were read.
        replay_folder: where a replay has its files; None for a learner without a folder.
        offline: there is no simulator, and the algorithm learns from recorded steps.
    """

    behavior: str
    spec: BehaviorSpec
    settings: TrainerSettings
    generator: torch.Generator
    device: torch.device = CPU
    ranks: Ranks = field(default_factory=Ranks)
    learns: bool = True
    files: list[DemonstrationFile] = field(default_factory=list)
    replay_folder: Path | None = None
    offline: bool = False

    def build(self) -> Algorithm:
        """Returns the algorithm of the settings, with new networks.

        Raises:
            Unsupported: no network can be built for the spec or the settings.
            RecordingError: demonstrations are missing, unreadable, or of another spec.
        """
        return self.settings.hyperparameters.algorithm(self)

    def adam(self, modules: nn.Module, epsilon: float = 1e-8, max_norm: float | None = None) -> Adam:
        """Returns an optimizer of all parameters of `modules`, which move to the device."""
        return Adam(modules, self.settings.hyperparameters.learning_rate, self.device, epsilon, max_norm, self.ranks)

    def signals(self) -> Signals:
        """Returns the reward signals, with new networks.

        Raises:
            RecordingError: demonstrations are missing, unreadable, or of another spec.
        """
        sources: dict[str, RewardNetwork] = {}
        for name, wanted in self.settings.reward_signals.named().items():
            if name != EXTRINSIC:
                shown = self.demonstrations(wanted) if isinstance(wanted, DemonstrationSettings) else None
                sources[name] = wanted.build(self.spec, self.generator, self.device, shown)
        return Signals(self.settings.reward_signals, sources)

    def cloning(self, networks: ActorCritic) -> Cloning | None:
        """Returns what trains the actor on demonstrations; None if the settings name none.

        Raises:
            RecordingError: demonstrations are missing, unreadable, or of another spec.
        """
        wanted = self.settings.behavioral_cloning
        shown = None if wanted is None else self.demonstrations(wanted)
        return None if shown is None else Cloning(networks.actor, self.settings, shown, self.generator)

    def recorded(self, wanted: DemonstrationSettings) -> Batch:
        """Reads recorded episodes as segments.

        Raises:
            RecordingError: they are missing, unreadable, or of another spec.
        """
        columns, files = read_columns(wanted.demo_path, self.behavior, self.spec, wanted.demo_actions)
        self.files.extend(files)
        lengths, rewards = columns["lengths"], columns["rewards"]
        places = range(len(self.spec.observations))
        return Batch(
            lengths=lengths,
            terminated=columns["terminated"],
            ended=np.ones(len(lengths), np.bool_),
            agent_episodes=np.arange(len(lengths)),
            next_observations=tuple(columns[f"final_observation.{at}"] for at in places),
            observations=tuple(columns[f"observation.{at}"] for at in places),
            continuous=columns["continuous"],
            discrete=columns["discrete"],
            log_probs=np.zeros_like(rewards),
            masks=columns.get("masks"),
            rewards=rewards,
            group_rewards=columns["group_rewards"],
            versions=np.zeros(len(rewards), np.int64),
        )

    def demonstrations(self, wanted: DemonstrationSettings) -> Demonstrations | None:
        """Reads demonstrations; returns None for networks that only receive weights.

        Raises:
            RecordingError: they are missing, unreadable, or of another spec.
        """
        if not self.learns:
            return None
        found = load(wanted.demo_path, self.behavior, self.spec, wanted.demo_actions)
        self.files.extend(found.files)
        return found
