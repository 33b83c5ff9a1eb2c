# ruff: noqa: N803 (names end in their shape)
"""The actor maps observations to actions.

B rows, Q sequences, F features, C continuous actions, D branches, K choices of all branches, H = C + K, P = C + K
features of a previous action, M values of a recurrent memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sparring.pipeline.networks import distributions
from sparring.pipeline.networks.actions import previous_features
from sparring.pipeline.networks.arrays import Arrays
from sparring.pipeline.networks.encoders import Encode, Encoder, Inputs
from sparring.pipeline.networks.initialization import LOGIT_GAINS, MEAN_GAINS
from sparring.pipeline.networks.recurrent import Layout, Recurrent
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.networks.weights import to_arrays
from sparring.pipeline.specs import Array, BehaviorSpec

VALUE_GAIN: Final = 1.0

Choices = tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]
"""Continuous [B, C] raw samples, discrete [B, D] choices, [B] log-probability of both together."""


class Actor(nn.Module):
    """Implements a policy: encoder, body, and one head of means and logits, with a separate log sigma.

    Args:
        spec: observations and actions of the behavior.
        settings: the network's settings.
        generator: random source of the initial weights; unneeded if weights are loaded afterwards.
        values: outputs for a critic that shares all but these with the actor (`shared_critic`).

    Attributes:
        outputs: H, without values.
        action_limit: limit of raw samples, which scales them for simulators.
        carried: numbers that an agent carries from one decision to the next: M, then P if the network reads them.

    Raises:
        Unsupported: no network can be built for the spec or the settings.
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
        mean, logit = MEAN_GAINS[settings.initialization], LOGIT_GAINS[settings.initialization]
        gains = [mean] * spec.actions.continuous + [logit] * spec.actions.mask_size
        self.outputs = len(gains)
        self.body = self.encoder.body(settings, [*gains, *[VALUE_GAIN] * values], source)
        self.action_limit = settings.action_limit
        self.carried = settings.carried(spec.actions)
        self.log_sigma = nn.Parameter(torch.zeros(spec.actions.continuous))

    @property
    def recurrent(self) -> Recurrent | None:
        """Returns the body if it is recurrent."""
        return self.body if isinstance(self.body, Recurrent) else None

    @property
    def device(self) -> torch.device:
        """Returns the device of the parameters and inputs; the statistics of observations may be elsewhere."""
        return self.log_sigma.device

    def forward(self, prepared: Inputs, layout: Layout | None = None, memory_QM: Tensor | None = None) -> Tensor:
        """Returns means and logits [B, H], then values, of observations from `encoder.prepare`.

        Args:
            prepared: observations.
            layout: how the rows form sequences; only for recurrent networks.
            memory_QM: memory before the first row of each sequence; only for recurrent networks.
        """
        return through(self.body, self.encoder(prepared), layout, memory_QM)

    def act(
        self,
        observations: Sequence[Array],
        masks: NDArray[np.bool_] | None,
        generator: torch.Generator,
        deterministic: bool = False,
    ) -> Choices:
        """Chooses once with the current weights: `InferenceActor.act` of a `frozen` copy, without carried numbers."""
        return self.frozen().act(observations, masks, generator, deterministic)

    def arrays(self) -> Arrays:
        """Returns copies of the weights needed for acting: all but the values' outputs."""
        found = to_arrays(self)
        for name in ("weight", "bias"):
            key = f"body.{self.body.output}.{name}"
            found[key] = found[key][: self.outputs]
        return found

    def frozen(self) -> InferenceActor:
        """Returns a copy of the current weights that can only act."""
        sampler = distributions.ActionSampler(self.actions, self.log_sigma)
        if not self.carried:
            return InferenceActor(self.encoder.frozen(), self.body.frozen(self.outputs), sampler)
        remembered = self.carried - self.encoder.previous
        body = self.body.frozen(self.outputs)
        features = partial(previous_features, self.actions, limit=self.action_limit)
        return RecurrentInferenceActor(
            self.encoder.frozen(), body, sampler, features, remembered, self.encoder.previous
        )


class InferenceActor:
    """Evaluates a policy of fixed weights often and with few rows, by plain functions.

    Args:
        encode: maps observations to the body's input.
        body: maps that to means and logits.
        sampler: samples actions from these.

    Attributes:
        carried: numbers that an agent carries from one decision to the next.
    """

    __slots__ = ("_body", "_encode", "_sampler")

    carried = 0

    def __init__(self, encode: Encode, body: Callable[..., Any], sampler: distributions.ActionSampler) -> None:
        self._encode = encode
        self._body = body
        self._sampler = sampler

    def act(
        self,
        observations: Sequence[Array],
        masks: NDArray[np.bool_] | None,
        generator: torch.Generator,
        deterministic: bool = False,
        carried: NDArray[np.float32] | None = None,
    ) -> Choices:
        """Chooses an action per row.

        Args:
            observations: one [B, *shape] per observation of the spec.
            masks: [B, K] True = forbidden; None allows everything.
            generator: random source.
            deterministic: take the most likely action.
            carried: [B, numbers carried] by each agent, zeros at its first decision; overwritten with the numbers for
                its next one. Required if `self.carried` is not 0.

        Returns:
            continuous [B, C] raw samples, discrete [B, D] choices, [B] log-probability of both together.
        """
        del carried
        return self._sampler.sample(self._body(self._encode(observations, None)), masks, generator, deterministic)


class RecurrentInferenceActor(InferenceActor):
    """Evaluates a policy of fixed weights whose agents carry a memory [M], their previous action [P], or both.

    Args:
        encode: maps observations and previous actions to the body's input.
        body: maps that, with any memory, to means and logits, and to the next memory.
        sampler: samples actions from these.
        features: maps raw samples and choices to action features.
        remembered: M.
    """

    __slots__ = ("_features", "_remembered", "carried")

    def __init__(
        self,
        encode: Encode,
        body: Callable[..., Any],
        sampler: distributions.ActionSampler,
        features: Callable[..., NDArray[np.float32]],
        remembered: int,
        previous: int,
    ) -> None:
        super().__init__(encode, body, sampler)
        self.carried = remembered + previous
        self._features = features
        self._remembered = remembered

    def act(
        self,
        observations: Sequence[Array],
        masks: NDArray[np.bool_] | None,
        generator: torch.Generator,
        deterministic: bool = False,
        carried: NDArray[np.float32] | None = None,
    ) -> Choices:
        """Chooses an action per row, as `InferenceActor.act` does."""
        if carried is None:
            carried = np.zeros((len(observations[0]), self.carried), np.float32)
        remembered, before = self._remembered, torch.from_numpy(carried)
        previous = before[:, remembered:] if self.carried > remembered else None
        features = self._encode(observations, previous)
        if remembered:
            outputs, after = self._body(features, before[:, :remembered])
            carried[:, :remembered] = after.numpy()
        else:
            outputs = self._body(features)
        choices = self._sampler.sample(outputs, masks, generator, deterministic)
        if previous is not None:
            carried[:, remembered:] = self._features(*choices[:2])
        return choices


def through(body: nn.Module, features: Tensor, layout: Layout | None, memory_QM: Tensor | None) -> Tensor:
    """Returns the outputs of any body; `layout` and `memory_QM` are only for a recurrent one."""
    return body(features) if layout is None else body(features, layout, memory_QM)  # type: ignore[no-any-return]
