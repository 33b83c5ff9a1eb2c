"""Behavioral cloning alone: a policy learns from demonstrations, and the simulator shows how well it does.

After each `buffer_size` steps of the simulator, which nothing is learned from, follow `num_epoch` passes over the
demonstrations (`cloning`). There is no critic. The deviation of continuous actions is learned too, by maximum
likelihood: nobody explores with it.
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
    """Actor of one behavior, and the demonstrations that it learns from.

    Attributes:
        actor: learns.
        modules: it alone.
        optimizer: keeps its parameters; what moves them is that of `cloning`.
        signals: none.
        cloning: what is learned; None where the weights are only there to be loaded.

    Args:
        behavior: name.
        spec: of the behavior.
        settings: of the learner.
        generator: random source of initial weights and of the order.
        learns: False where the networks are only there to be loaded: then demonstrations are not needed.
        device: where the network is.

    Raises:
        Unsupported: the spec or the settings ask for what cannot be built.
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
        self.actor = Actor(spec, settings.network_settings, generator)
        self.modules = nn.ModuleDict({"actor": self.actor})
        self.optimizer = Adam(self.modules, settings.hyperparameters.learning_rate, device)
        self.signals = Signals(behavior, spec, settings, generator, learns=False)
        self.cloning: Cloning | None = (
            cloning_of(behavior, self.actor, settings, generator, alone=True) if learns else None
        )

    def update(self, batch: Batch, version: int, trained: int) -> UpdateReport:
        """Learns from demonstrations.

        Args:
            batch: what the policy did meanwhile: it is counted.
            version: of the present weights.
            trained: steps counted before, for the schedule.
        """
        assert self.cloning is not None
        return UpdateReport(
            statistics=self.cloning.update(trained),
            steps=batch.steps,
            minibatches=self.cloning.minibatches,
            skipped=self.cloning.skipped,
            lags=lags(version, batch.versions),
            group_rewards=False,  # nothing is learned from them, and nothing is meant to be
        )
