# ruff: noqa: N803, N806 (names end in their shape)
"""The actor: from observations to actions.

B rows, F features, C continuous actions, D branches, K choices of all branches, H = C + K.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipeline.networks import distributions
from pipeline.networks.encoders import VectorEncoder
from pipeline.networks.perceptron import Perceptron
from pipeline.networks.settings import NetworkSettings
from pipeline.specs import BehaviorSpec

MEAN_GAIN: Final = 0.2
LOGIT_GAIN: Final = 0.1

LIMIT: Final = 3.0
"""Continuous samples beyond this, either sign, are the same action to a simulator."""


class Actor(nn.Module):
    """A policy: encoder, body, and one head of means and logits, with a log sigma of its own.

    Args:
        spec: of the behavior.
        settings: of the network.
        generator: random source of the initial weights; may be left out where weights are loaded anyway.

    Raises:
        Unsupported: the spec or the settings ask for what can not be built.
    """

    def __init__(self, spec: BehaviorSpec, settings: NetworkSettings, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.actions = spec.actions
        self.encoder = VectorEncoder(spec, settings)
        gains = [MEAN_GAIN] * spec.actions.continuous + [LOGIT_GAIN] * spec.actions.mask_size
        units = [settings.hidden_units] * settings.num_layers
        self.body = Perceptron(self.encoder.size, units, gains, generator or torch.Generator())
        self.log_sigma = nn.Parameter(torch.zeros(spec.actions.continuous))

    def forward(self, prepared_BF: Tensor) -> Tensor:
        """Means and logits, [B, H], of observations that `encoder.prepare` has seen."""
        return self.body(self.encoder(prepared_BF))  # type: ignore[no-any-return]

    @torch.inference_mode()
    def act(
        self,
        observations: Sequence[NDArray[np.float32]],
        masks: NDArray[np.bool_] | None,
        generator: torch.Generator,
        deterministic: bool = False,
    ) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
        """Chooses an action per row.

        Args:
            observations: one [B, size] per observation of the spec.
            masks: [B, K] True = forbidden; None allows everything.
            generator: random source.
            deterministic: take the most likely action.

        Returns:
            continuous [B, C] raw samples, discrete [B, D] choices, [B] log-probability of both together.
        """
        head_BH = self(self.encoder.prepare(self.encoder.join(observations)))
        masks_BK = None if masks is None else torch.from_numpy(masks.copy())
        continuous_BC, discrete_BD, log_prob_B = distributions.sample(
            self.actions, head_BH, self.log_sigma, masks_BK, generator, deterministic
        )
        return continuous_BC.numpy(), discrete_BD.int().numpy(), log_prob_B.numpy()


def to_environment(continuous: NDArray[np.float32]) -> NDArray[np.float32]:
    """Actions in [-1, 1] for a simulator, of raw samples [B, C]: clipped to +-3, divided by 3."""
    limit = np.float32(LIMIT)
    return np.clip(continuous, -limit, limit) / limit
