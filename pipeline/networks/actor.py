"""The actor: from observations to actions.

B rows, F features, C continuous actions, D branches, K choices of all branches, H = C + K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipeline.networks import distributions
from pipeline.networks.encoders import Encode, Encoder, Inputs
from pipeline.networks.settings import NetworkSettings
from pipeline.networks.weights import Arrays, to_arrays
from pipeline.specs import BehaviorSpec

MEAN_GAIN: Final = 0.2
LOGIT_GAIN: Final = 0.1
VALUE_GAIN: Final = 1.0

LIMIT: Final = np.float32(3.0)
"""Continuous samples beyond this, either sign, are the same action to a simulator."""

Choices = tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]
"""Continuous [B, C] raw samples, discrete [B, D] choices, [B] log-probability of both together."""


class Actor(nn.Module):
    """A policy: encoder, body, and one head of means and logits, with a log sigma of its own.

    Args:
        spec: of the behavior.
        settings: of the network.
        generator: random source of the initial weights; may be left out where weights are loaded anyway.
        values: outputs for a critic that shares all but these with the actor (`shared_critic`).

    Attributes:
        outputs: H, those that are not values.

    Raises:
        Unsupported: the spec or the settings ask for what can not be built.
    """

    def __init__(
        self,
        spec: BehaviorSpec,
        settings: NetworkSettings,
        generator: torch.Generator | None = None,
        values: int = 0,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.actions = spec.actions
        source = generator or torch.Generator()
        self.encoder = Encoder(spec, settings, source)
        gains = [MEAN_GAIN] * spec.actions.continuous + [LOGIT_GAIN] * spec.actions.mask_size
        self.outputs = len(gains)
        self.body = self.encoder.body(settings, [*gains, *[VALUE_GAIN] * values], source)
        self.log_sigma = nn.Parameter(torch.zeros(spec.actions.continuous))

    def forward(self, prepared: Inputs) -> Tensor:
        """Means and logits, [B, H], then values, of observations that `encoder.prepare` has seen."""
        return self.body(self.encoder(prepared))  # type: ignore[no-any-return]

    def act(
        self,
        observations: Sequence[NDArray[Any]],
        masks: NDArray[np.bool_] | None,
        generator: torch.Generator,
        deterministic: bool = False,
    ) -> Choices:
        """Chooses once with the present weights: `Acting.act` of a `frozen` copy."""
        return self.frozen().act(observations, masks, generator, deterministic)

    def arrays(self) -> Arrays:
        """Copies of what acting needs of the weights: all but the values' outputs."""
        found = to_arrays(self)
        for name in ("weight", "bias"):
            key = f"body.{self.body.output}.{name}"
            found[key] = found[key][: self.outputs]
        return found

    def frozen(self) -> Acting:
        """A copy of the present weights that does nothing but act."""
        return Acting(
            self.encoder.frozen(), self.body.frozen(self.outputs), distributions.Sampler(self.actions, self.log_sigma)
        )


class Acting:
    """A policy of fixed weights, for acting often and with few rows: plain functions one after the other.

    Args:
        encode: from observations to the body's input.
        body: from there to means and logits.
        sampler: from there to actions.
    """

    __slots__ = ("_body", "_encode", "_sampler")

    def __init__(self, encode: Encode, body: Callable[[Tensor], Tensor], sampler: distributions.Sampler) -> None:
        self._encode = encode
        self._body = body
        self._sampler = sampler

    def act(
        self,
        observations: Sequence[NDArray[Any]],
        masks: NDArray[np.bool_] | None,
        generator: torch.Generator,
        deterministic: bool = False,
    ) -> Choices:
        """Chooses an action per row.

        Args:
            observations: one [B, *shape] per observation of the spec.
            masks: [B, K] True = forbidden; None allows everything.
            generator: random source.
            deterministic: take the most likely action.

        Returns:
            continuous [B, C] raw samples, discrete [B, D] choices, [B] log-probability of both together.
        """
        return self._sampler.sample(self._body(self._encode(observations)), masks, generator, deterministic)


def to_environment(continuous: NDArray[np.float32]) -> NDArray[np.float32]:
    """Actions in [-1, 1] for a simulator, of raw samples [B, C]: clipped to +-3, divided by 3."""
    executed = np.minimum(continuous, LIMIT)  # np.clip is one call, but a slower one
    np.maximum(executed, -LIMIT, out=executed)
    executed /= LIMIT
    return executed
