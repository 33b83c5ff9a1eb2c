# ruff: noqa: N803 (names end in their shape)
"""The critic maps observations to the value of each reward signal.

B rows, F features, S reward signals, Q sequences, M values of a recurrent memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparring.pipeline.networks.actor import VALUE_GAIN, through
from sparring.pipeline.networks.encoders import Encoder, Inputs
from sparring.pipeline.networks.recurrent import Layout, Recurrent
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import BehaviorSpec


class Critic(nn.Module):
    """Combines encoder, body, and one value head per reward signal.

    Its encoder keeps no statistics of its own, because it reads observations that the actor's encoder has prepared.

    Args:
        spec: observations and actions of the behavior.
        settings: the network's settings.
        signals: names of the reward signals, in the order of the heads.
        generator: random source of the initial weights.

    Raises:
        Unsupported: no network can be built for the spec or the settings.
    """

    def __init__(
        self, spec: BehaviorSpec, settings: NetworkSettings, signals: tuple[str, ...], generator: torch.Generator
    ) -> None:
        super().__init__()
        self.signals = signals
        self.encoder = Encoder(spec, settings.model_copy(update={"normalize": False}), generator)
        self.body = self.encoder.body(settings, [VALUE_GAIN] * len(signals), generator)

    @property
    def recurrent(self) -> Recurrent | None:
        """Returns the body if it is recurrent."""
        return self.body if isinstance(self.body, Recurrent) else None

    def forward(self, prepared: Inputs, layout: Layout | None = None, memory_QM: Tensor | None = None) -> Tensor:
        """Returns values [B, S] of observations that the actor's encoder has prepared.

        Args:
            prepared: observations.
            layout: how the rows form sequences; only for recurrent networks.
            memory_QM: the critic's memory before the first row of each sequence; only for recurrent networks.
        """
        return through(self.body, self.encoder(prepared), layout, memory_QM)
