# ruff: noqa: N803, N806 (names end in their shape)
"""The actor maps observations to actions, the critic to the value of each reward signal.

B rows, Q sequences, C continuous actions, D branches, K choices of all branches, H = C + K, P = C + K features of a
previous action, M values of a recurrent memory, S reward signals.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sparring.pipeline.networks.arrays import Arrays, previous_features, to_environment
from sparring.pipeline.networks.device import back, over, to_arrays
from sparring.pipeline.networks.distributions import ActionSampler, Source, logits_of
from sparring.pipeline.networks.encoders import Encoder, Inputs
from sparring.pipeline.networks.layers import Layout, Recurrent
from sparring.pipeline.networks.perceptron import BackwardFn, Perceptron, backpropagate
from sparring.pipeline.networks.settings import Initialization, NetworkSettings
from sparring.pipeline.specs import ActionSpec, Array, BehaviorSpec, Flags, Floats

VALUE_GAIN: Final = 1.0
MEAN_GAINS: Final[dict[Initialization, float]] = {"he_normal": 0.2, "orthogonal": 0.01, "uniform": 1.0}
"""Gains of the means of continuous actions. A policy that begins near the same action everywhere learns more steadily
(Andrychowicz et al. 2020, arXiv 2006.05990, section 3.2)."""
LOGIT_GAINS: Final[dict[Initialization, float]] = {"he_normal": 0.1, "orthogonal": 0.01, "uniform": 1.0}

Choices = tuple[Floats, NDArray[np.int32], Floats]
"""Continuous [B, C] raw samples, discrete [B, D] choices, [B] log-probability of both together."""


class Sampler(Protocol):
    """Samples actions."""

    def sample(self, head: Floats, masks: Flags | None, source: Source, deterministic: bool = False) -> Choices:
        """Chooses an action per row.

        Args:
            head: [B, H] outputs of the body.
            masks: [B, K] True = forbidden; None allows everything.
            source: random source.
            deterministic: take the most likely action.
        """


class OnnxGraph(Protocol):
    """Collects the nodes of an ONNX model; results are known by name."""

    def add(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Adds a node of an operator of ONNX's opset 9, and returns the name of its result."""

    def constant(self, values: Tensor | Array | Sequence[int] | float) -> str:
        """Stores values and returns their name."""

    def slice(self, name: str, first: int, last: int) -> str:
        """Selects columns from `first` to before `last`."""


class _EncodedBody(nn.Module):
    """Combines an encoder and a body with one output for each gain.

    Raises:
        Unsupported: no network can be built for the spec or the settings.
    """

    def __init__(
        self, spec: BehaviorSpec, settings: NetworkSettings, gains: Sequence[float], generator: torch.Generator
    ) -> None:
        super().__init__()
        self.encoder = Encoder(spec, settings, generator)
        self.body = self.encoder.body(settings, gains, generator)

    @property
    def recurrent(self) -> Recurrent | None:
        """Returns the body if it is recurrent."""
        return self.body if isinstance(self.body, Recurrent) else None

    @property
    def needs_graph(self) -> bool:
        """Returns whether autograd differentiates it; a perceptron that reads vectors alone has its own derivative."""
        return not (self.encoder.plain and isinstance(self.body, Perceptron))

    def traced(
        self, prepared: Inputs, layout: Layout | None = None, memory_QM: Tensor | None = None
    ) -> tuple[Tensor, BackwardFn]:
        """Returns `forward`, and a function that propagates its gradient to the parameters."""
        if isinstance(self.body, Perceptron) and not self.needs_graph:
            return self.body.traced(prepared[0])
        with torch.enable_grad():
            outputs = self(prepared, layout, memory_QM)
        return outputs, partial(backpropagate, (outputs,))

    def forward(self, prepared: Inputs, layout: Layout | None = None, memory_QM: Tensor | None = None) -> Tensor:
        """Returns the outputs of prepared observations: means and logits [B, H], then values, or values alone.

        Args:
            prepared: observations, from `encoder.prepare` of the actor.
            layout: how the rows form sequences; only for recurrent networks.
            memory_QM: the network's memory before the first row of each sequence; only for recurrent networks.
        """
        features = self.encoder(prepared)
        outputs: Tensor = self.body(features) if layout is None else self.body(features, layout, memory_QM)[0]
        return outputs


class Critic(_EncodedBody):
    """Combines encoder, body, and one value head per reward signal.

    Its encoder keeps no statistics of its own, because it reads observations that the actor's encoder has prepared.

    Args:
        spec: observations and actions of the behavior.
        settings: the network's settings.
        signals: S.
        generator: random source of the initial weights.
    """

    def __init__(self, spec: BehaviorSpec, settings: NetworkSettings, signals: int, generator: torch.Generator) -> None:
        super().__init__(spec, settings.model_copy(update={"normalize": False}), [VALUE_GAIN] * signals, generator)


class Actor(_EncodedBody):
    """Implements a policy: encoder, body, and one head of means and logits, with a separate log sigma.

    a trainer with another distribution has a subclass: `gains` for the outputs of the body, of which the logits of the
    branches are last, `sampler` and `executed` for acting, `continuous` and `continuous_onnx` for exported models.

    Args:
        spec: observations and actions of the behavior.
        settings: the network's settings.
        generator: random source of the initial weights; unneeded if weights are loaded afterwards.
        values: outputs for a critic that shares all but these with the actor (`shared_critic`).

    Attributes:
        outputs: H, without values.
        action_limit: limit of raw samples, which scales them for simulators.
        carried: numbers that an agent carries from one decision to the next: M, then P if the network reads them.
    """

    def __init__(
        self, spec: BehaviorSpec, settings: NetworkSettings, generator: torch.Generator | None = None, values: int = 0
    ) -> None:
        gains = self.gains(spec.actions, settings)
        super().__init__(spec, settings, [*gains, *[VALUE_GAIN] * values], generator or torch.Generator())
        self.spec = spec
        self.actions = spec.actions
        self.outputs = len(gains)
        self.action_limit = settings.action_limit
        self.carried = settings.carried(spec.actions)
        self.log_sigma = nn.Parameter(torch.zeros(spec.actions.continuous))

    @staticmethod
    def gains(actions: ActionSpec, settings: NetworkSettings) -> list[float]:
        """Returns factors on the initial weights of each output: means, then logits."""
        mean, logit = MEAN_GAINS[settings.initialization], LOGIT_GAINS[settings.initialization]
        return [mean] * actions.continuous + [logit] * actions.mask_size

    @property
    def device(self) -> torch.device:
        """Returns the device of the parameters and inputs; the statistics of observations may be elsewhere."""
        return self.log_sigma.device

    def sampler(self) -> Sampler:
        """Returns what samples actions from the outputs of the body, with a copy of the present weights."""
        return ActionSampler(self.actions, back(self.log_sigma.detach()))

    def executed(self, continuous: Floats) -> Floats:
        """Returns actions [B, C] as simulators receive them, from raw samples."""
        return to_environment(continuous, self.action_limit)

    def scaled_means(self, head_BH: Tensor) -> Tensor:
        """Returns the means [B, C] of continuous actions, scaled for simulators and not clipped."""
        return head_BH[:, : self.actions.continuous] / self.action_limit

    def continuous(self, head_BH: Tensor, *, sampled: bool) -> Tensor:
        """Returns continuous actions [B, C] as simulators receive them, sampled or the most likely ones.

        A program that PyTorch exports contains this, `continuous_onnx` writes the same to ONNX, `frozen` acts by it.

        Args:
            head_BH: outputs of the body.
            sampled: False for the most likely actions.
        """
        raw_BC = head_BH[:, : self.actions.continuous]
        if sampled:
            raw_BC = raw_BC + torch.randn_like(raw_BC) * self.log_sigma.exp()
        return raw_BC.clamp(-self.action_limit, self.action_limit) / self.action_limit

    def continuous_onnx(self, graph: OnnxGraph, head: str, *, sampled: bool, output: str = "") -> str:
        """Adds the nodes of `continuous` to a graph of ONNX, and returns the name of the result.

        Args:
            graph: of the model.
            head: name of the outputs of the body.
            sampled: False for the most likely actions.
            output: name that the result is to have; "" for any.
        """
        raw, limit = graph.slice(head, 0, self.actions.continuous), self.action_limit
        if sampled:
            noise = graph.add("Mul", graph.add("RandomNormalLike", raw), graph.constant(self.log_sigma.exp()))
            raw = graph.add("Add", raw, noise)
        clipped = graph.add("Clip", raw, min=-limit, max=limit)
        return graph.add("Div", clipped, graph.constant(limit), output=output)

    def logits(self, head_BH: Tensor) -> Tensor:
        """Returns the logits [B, K] of all branches."""
        return head_BH[:, self.outputs - self.actions.mask_size : self.outputs]

    def branch_logits(self, head_BH: Tensor, masks_BK: Tensor | None) -> Sequence[Tensor]:
        """Returns the logits [B, k] of each branch, those of forbidden choices far below all others."""
        return logits_of(self.actions, self.logits(head_BH), masks_BK)

    def arrays(self) -> Arrays:
        """Returns copies of the weights needed for acting: all but the values' outputs."""
        found = to_arrays(self)
        for name in ("weight", "bias"):
            key = f"body.{self.body.output}.{name}"
            found[key] = found[key][: self.outputs]
        return found

    def frozen(self) -> InferenceActor:
        """Returns a copy of the current weights that can only act."""
        return InferenceActor(self)


class InferenceActor:
    """Evaluates a policy of fixed weights often and with few rows, by plain functions, on the device of the weights.

    Args:
        actor: whose weights are copied.

    Attributes:
        carried: numbers that an agent carries from one decision to the next: a memory [M], its previous action [P],
            both, or none.
        executed: returns actions as simulators receive them, from raw samples.
    """

    def __init__(self, actor: Actor) -> None:
        self.carried = actor.carried
        self._actions, self._limit = actor.actions, actor.action_limit
        self._remembered = actor.carried - actor.encoder.previous
        self._device = actor.device
        self._encode = actor.encoder.frozen(actor.device)
        body = actor.body
        self._infer = None if isinstance(body, Recurrent) else body.frozen(actor.outputs)
        self._step = body.frozen(actor.outputs) if isinstance(body, Recurrent) else None
        self._sampler = actor.sampler()
        self.executed = actor.executed

    def act(
        self,
        observations: Sequence[Array],
        masks: Flags | None,
        source: Source,
        deterministic: bool = False,
        carried: Floats | None = None,
    ) -> Choices:
        """Chooses an action per row.

        Args:
            observations: one [B, *shape] per observation of the spec.
            masks: [B, K] True = forbidden; None allows everything.
            source: random source.
            deterministic: take the most likely action.
            carried: [B, numbers carried] by each agent, zeros at its first decision (as without this argument);
                overwritten with the numbers for its next one.

        Returns:
            continuous [B, C] raw samples, discrete [B, D] choices, [B] log-probability of both together.
        """
        if self._infer is not None and not self.carried:
            head = back(self._infer(self._encode(observations, None)))
            return self._sampler.sample(head, masks, source, deterministic)
        if carried is None:
            carried = np.zeros((len(observations[0]), self.carried), np.float32)
        remembered, before = self._remembered, torch.from_numpy(carried)
        previous = before[:, remembered:] if self.carried > remembered else None
        features = self._encode(observations, previous)
        if self._infer is not None:
            outputs = self._infer(features)
        else:
            assert self._step is not None
            outputs, after = self._step(features, over(before[:, :remembered], self._device))
            carried[:, :remembered] = back(after)
        choices = self._sampler.sample(back(outputs), masks, source, deterministic)
        if previous is not None:
            carried[:, remembered:] = previous_features(self._actions, *choices[:2], self._limit)
        return choices
