"""This module trains a policy by behavioral cloning alone, while the simulator shows how well it performs.

After each `buffer_size` steps of the simulator, whose rewards are ignored, `num_epoch` passes over the demonstrations
follow (`cloning`). There is no critic. The deviation of continuous actions is fitted by maximum likelihood too, because
it is not needed for exploration.
"""

from __future__ import annotations

import torch
from torch import nn

from sparring.pipeline.learning.buffer import Batch
from sparring.pipeline.learning.cloning import Cloning, cloning_of
from sparring.pipeline.learning.optimizer import Adam
from sparring.pipeline.learning.report import UpdateReport, lags
from sparring.pipeline.learning.settings import TrainerSettings
from sparring.pipeline.learning.signals import Signals
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.networks.device import CPU
from sparring.pipeline.specs import BehaviorSpec


class BC:
    """Trains the actor of one behavior on demonstrations.

    Attributes:
        actor: the network that learns.
        modules: the actor alone.
        optimizer: holds the actor's parameters; the optimizer of `cloning` changes them.
        signals: empty.
        cloning: the training; None if the weights are only loaded.

    Args:
        behavior: name of the behavior.
        spec: observations and actions of the behavior.
        settings: the learner's settings.
        generator: random source of the initial weights and of the order.
        learns: False loads no demonstrations, for a network that only receives weights.
        device: device of the network.

    Raises:
        Unsupported: no network can be built for the spec or the settings.
        RecordingError: demonstrations are missing, unreadable, or of another spec.
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
        self.actor = Actor(spec, settings.network_settings, generator)
        self.modules = nn.ModuleDict({"actor": self.actor})
        self.optimizer = Adam(self.modules, settings.hyperparameters.learning_rate, device)
        self.signals = Signals(behavior, spec, settings, generator, learns=False)
        self.cloning: Cloning | None = (
            cloning_of(behavior, self.actor, settings, generator, alone=True) if learns else None
        )

    def update(self, batch: Batch, version: int, trained: int) -> UpdateReport:
        """Trains on the demonstrations.

        Args:
            batch: steps of the policy, which are only counted.
            version: version of the current weights.
            trained: steps counted before, for the schedule.
        """
        assert self.cloning is not None
        return UpdateReport(
            statistics=self.cloning.update(trained),
            steps=batch.steps,
            minibatches=self.cloning.minibatches,
            skipped=self.cloning.skipped,
            lags=lags(version, batch.versions),
            group_rewards=False,  # BC ignores all rewards by design
        )
