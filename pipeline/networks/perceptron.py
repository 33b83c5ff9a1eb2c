# ruff: noqa: N803, N806 (names end in their shape)
"""This module implements bodies without memory: a multi-layer perceptron, and one that a goal conditions.

A perceptron has its own derivative: as one autograd node, or without a graph. The forward and backward formulas are the
textbook's. A small minibatch takes more time for bookkeeping than for arithmetic: one node replaces a dozen, and writes
gradients to their final place. If only perceptrons are to be differentiated, even that node costs a third, and `traced`
works without it.

B rows, F inputs, G features of a goal, U units of a layer, O outputs.
"""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as apply_linear
from torch.nn.functional import silu

from sparring.pipeline.networks.device import constant
from sparring.pipeline.networks.settings import Activation, Initialization, NetworkSettings

HIDDEN_GAINS: Final[dict[Initialization, float]] = {"he_normal": 1.0, "orthogonal": math.sqrt(2), "uniform": 1.0}


BackwardFn = Callable[[Tensor], object]
"""Adds to the parameters' `grad` from the gradient of outputs."""

TracedFn = Callable[[Tensor], Tensor]
"""Does the same, and returns the gradient of what the outputs depend on."""


def backpropagate(outputs: Sequence[Tensor], *gradients: Tensor) -> None:
    """Propagates gradients of outputs through their graph.

    `torch.autograd.backward` does the same, and imports sympy the first time (0.7 s of CPU time).
    """
    with torch.enable_grad():
        products = [(output * gradient).sum() for output, gradient in zip(outputs, gradients, strict=True)]
        torch.stack(products).sum().backward()  # type: ignore[no-untyped-call]


class Function(NamedTuple):
    """Combines an elementwise function with its derivative.

    Attributes:
        forward: values of sums.
        in_place: the same, written over the sums.
        traced: values, written over the sums, and derivatives; what both are made of is computed once.
    """

    forward: Callable[[Tensor], Tensor]
    in_place: Callable[[Tensor], Tensor]
    traced: Callable[[Tensor], tuple[Tensor, Tensor]]


def _traced_silu(sums: Tensor) -> tuple[Tensor, Tensor]:
    shares = sums.sigmoid()
    values = sums.mul_(shares)
    # d (x s) / dx = x s + s (1 - x s)
    return values, torch.lerp(values, constant(1.0, values), shares, out=shares)


def _traced_tanh(sums: Tensor) -> tuple[Tensor, Tensor]:
    values = sums.tanh_()
    return values, torch.addcmul(constant(1.0, values), values, values, value=-1)


def _traced_relu(sums: Tensor) -> tuple[Tensor, Tensor]:
    values = sums.relu_()
    return values, (values > 0).to(values.dtype)


FUNCTIONS: Final[dict[Activation, Function]] = {
    "silu": Function(silu, partial(silu, inplace=True), _traced_silu),
    "tanh": Function(torch.tanh, torch.tanh_, _traced_tanh),
    "relu": Function(torch.relu, torch.relu_, _traced_relu),
}


def initialize_weights(
    layer: nn.Conv2d | nn.Linear, gain: float, generator: torch.Generator, initialization: Initialization = "he_normal"
) -> None:
    """Samples the initial weights of a layer, and sets its biases to 0, or samples them likewise if `uniform`.

    Args:
        layer: changed in place.
        gain: factor.
        generator: random source.
        initialization: `he_normal`: a normal distribution of variance gain^2 / inputs (He et al. 2015, arXiv
            1502.01852); `orthogonal`: a random orthogonal matrix times the gain (Saxe et al. 2014, arXiv 1312.6120);
            `uniform`: within gain / sqrt(inputs), as torch's own.
    """
    scale = gain / math.sqrt(layer.weight[0].numel())
    with torch.no_grad():
        if layer.bias is not None:
            layer.bias.zero_()
        if initialization == "orthogonal":
            nn.init.orthogonal_(layer.weight, gain, generator)
        elif initialization == "uniform":
            for parameter in layer.parameters():
                parameter.uniform_(-scale, scale, generator=generator)
        else:
            layer.weight.normal_(0.0, scale, generator=generator)


def linear(
    inputs: int, outputs: int, gain: float, generator: torch.Generator, initialization: Initialization = "he_normal"
) -> nn.Linear:
    """Builds a linear layer with sampled weights; the last arguments are those of `initialize_weights`.

    Torch's own `skip_init` does the same but imports a computer algebra system, which slows the start by half a second.
    """
    layer = nn.Linear(inputs, outputs, device="meta").to_empty(
        device="cpu"
    )  # samples nothing from the global generator
    initialize_weights(layer, gain, generator, initialization)
    return layer


def hidden_layer(inputs: int, units: int, settings: NetworkSettings, generator: torch.Generator) -> nn.Linear:
    """Builds the linear layer of hidden units."""
    return linear(inputs, units, HIDDEN_GAINS[settings.initialization], generator, settings.initialization)


def output_layer(
    inputs: int, gains: Sequence[float], settings: NetworkSettings, generator: torch.Generator
) -> nn.Linear:
    """Builds a linear layer with one output for each gain, a factor on its initial weights."""
    layer = linear(inputs, len(gains), 1.0, generator, settings.initialization)
    with torch.no_grad():
        layer.weight.mul_(torch.tensor(gains).unsqueeze(1))
    return layer


class Perceptron(nn.Module):
    """Combines layers of hidden units and a linear layer of outputs.

    Args:
        sizes: F, then U of each hidden layer, in order.
        output_gains: O factors on the initial weights of each output.
        settings: with the function of the hidden units and the distribution of the initial weights.
        generator: random source of the initial weights.

    Attributes:
        output: name of the layer of outputs.
        activation: function of the hidden units.
    """

    def __init__(
        self, sizes: Sequence[int], output_gains: Sequence[float], settings: NetworkSettings, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.activation = settings.activation
        self.output = f"layers.{len(sizes) - 1}"
        hidden = [hidden_layer(*each, settings, generator) for each in pairwise(sizes)]
        self.layers = nn.ModuleList([*hidden, output_layer(sizes[-1], output_gains, settings, generator)])
        self._chain = tuple(self.layers.parameters())

    def forward(self, rows_BF: Tensor) -> Tensor:
        """Returns outputs [B, O]."""
        function = FUNCTIONS[self.activation]
        if torch.is_grad_enabled():
            trace = partial(self.traced, to_rows=rows_BF.requires_grad)
            return Node.apply(rows_BF, self._chain[0], trace)  # type: ignore[no-any-return,no-untyped-call]
        return _infer(_affine(self._chain), function.in_place, rows_BF)

    def traced(self, rows_BF: Tensor, *, to_rows: bool = False) -> tuple[Tensor, TracedFn]:
        """Returns outputs [B, O] and their `trace_layers`."""
        return trace_layers(self._chain, FUNCTIONS[self.activation], rows_BF, to_rows=to_rows)

    def frozen(self, outputs: int | None = None) -> Callable[[Tensor], Tensor]:
        """Returns the first `outputs`, or all, as a plain function of rows, on a copy of the current weights."""
        *chain, weight, bias = (parameter.detach() for parameter in self._chain)
        affine = _affine([one.clone() for one in (*chain, weight[:outputs], bias[:outputs])])
        return partial(_infer, affine, FUNCTIONS[self.activation].in_place)


def _affine(chain: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Returns bias and transposed weight of each layer, as views."""
    return [(bias_U, weight_UF.t()) for weight_UF, bias_U in zip(chain[::2], chain[1::2], strict=True)]


def _infer(affine: Sequence[tuple[Tensor, Tensor]], activate: Callable[[Tensor], Tensor], rows_BF: Tensor) -> Tensor:
    """Returns outputs if no gradient is wanted, so that nothing need be stored for one."""
    *hidden, (bias_O, weight_UO) = affine
    hidden_BU = rows_BF
    for bias_U, weight_FU in hidden:
        hidden_BU = activate(torch.addmm(bias_U, hidden_BU, weight_FU))
    return torch.addmm(bias_O, hidden_BU, weight_UO)


class Node(torch.autograd.Function):
    """Represents a traced computation as one node of autograd; it adds to its parameters' `grad` itself.

    One of the parameters is also passed as a tensor, so that autograd differentiates the node.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, _: Tensor, trace: Callable[[Tensor], tuple[Tensor, TracedFn]]) -> Tensor:
        outputs, ctx.backward_fn = trace(rows)
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError("got create_graph=True; expected a first derivative only; build it of torch.nn layers")
        to_rows = ctx.backward_fn(gradient)
        return to_rows if ctx.needs_input_grad[0] else None, None, None


def trace_layers(
    chain: Sequence[nn.Parameter], function: Function, rows_BF: Tensor, *, to_rows: bool
) -> tuple[Tensor, TracedFn]:
    """Returns the outputs of linear layers with a function between each two, and their derivative.

    The derivative adds to the parameters' `grad`, if they want one now, and returns the gradient of the rows if wanted,
    else that of the first layer's sums, [B, U].

    Args:
        chain: weight and bias of each layer.
        function: between the layers.
        rows_BF: inputs.
        to_rows: the gradient of the rows is wanted.
    """
    *hidden, weight_OU, bias_O = chain
    hidden_BU, inputs, slopes, is_trained = rows_BF, [rows_BF], [], bias_O.requires_grad
    for weight_UF, bias_U in zip(hidden[::2], hidden[1::2], strict=True):
        hidden_BU, slope_BU = function.traced(apply_linear(hidden_BU, weight_UF, bias_U))
        inputs.append(hidden_BU)
        slopes.append(slope_BU)

    def backward_fn(gradient: Tensor) -> Tensor:
        ones_B = constant(1.0, gradient, gradient.shape[0])
        for at in range(len(slopes), -1, -1):
            weight, bias = chain[2 * at], chain[2 * at + 1]
            if is_trained:
                transposed = gradient.t()
                gradient_of(weight).addmm_(transposed, inputs[at])
                gradient_of(bias).addmv_(transposed, ones_B)
            if at:
                gradient = gradient.mm(weight).mul_(slopes[at - 1])
            elif to_rows:
                gradient = gradient.mm(weight)
        return gradient

    return apply_linear(hidden_BU, weight_OU, bias_O), backward_fn


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Adds a gradient to that of a parameter, as autograd does."""
    gradient_of(parameter).add_(gradient)


def accumulate_rows(bias: Tensor, gradient_UB: Tensor) -> None:
    """Adds the sum of a gradient over rows to that of a bias, as a product, which takes less time than a sum."""
    gradient_of(bias).addmv_(gradient_UB, constant(1.0, gradient_UB, gradient_UB.shape[1]))


def gradient_of(parameter: Tensor) -> Tensor:
    """Returns the gradient of a parameter, zeros if it has none yet."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class ConditionedLayers(nn.Module):
    """Generates the last of its hidden layers from the goal by a hypernetwork (Ha et al. 2016, arXiv 1609.09106).

    So each goal selects another network instead of being another input; ML-Agents does the same.

    Args:
        sizes: F - G, then U of each hidden layer, in order.
        goal: G, the last inputs of each row.
        output_gains: O factors on the initial weights of each output; None outputs the sums of the last hidden layer.
        settings: with the function of the hidden units and the distribution of the initial weights; the hypernetwork's
            own are He-normal.
        generator: random source of the initial weights.

    Attributes:
        output: name of the layer of outputs.
        activation: function of the hidden units.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        goal: int,
        output_gains: Sequence[float] | None,
        settings: NetworkSettings,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.activation = settings.activation
        self._goal = goal
        self.output = "head"
        *before, last = sizes
        hyper = _Hyper(before[-1], last, goal, generator, FUNCTIONS[self.activation].forward)
        self.layers = nn.ModuleList(hidden_layer(*each, settings, generator) for each in pairwise(before))
        self.hyper = hyper
        self.head = None if output_gains is None else output_layer(last, output_gains, settings, generator)

    def forward(self, rows_BF: Tensor) -> Tensor:
        """Returns outputs [B, O] of features followed by the goal."""
        hidden_BU, goal_BG = rows_BF[:, : -self._goal], rows_BF[:, -self._goal :]
        activate = FUNCTIONS[self.activation].forward
        for layer in self.layers:
            hidden_BU = activate(layer(hidden_BU))
        sums_BU: Tensor = self.hyper(hidden_BU, goal_BG)
        return sums_BU if self.head is None else self.head(activate(sums_BU))

    def frozen(self, outputs: int | None = None) -> Callable[[Tensor], Tensor]:
        """Returns the first `outputs`, or all, as a plain function of rows, on a copy of the current weights."""
        body = copy.deepcopy(self).requires_grad_(False)
        if body.head is not None:
            body.head.weight.data, body.head.bias.data = body.head.weight[:outputs], body.head.bias[:outputs]
        return body


class _Hyper(nn.Module):
    """Applies a linear layer whose weights are the outputs of a perceptron of the goal."""

    def __init__(
        self, inputs: int, outputs: int, goal: int, generator: torch.Generator, activate: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self._activate = activate
        self._shape = (outputs, inputs)
        # Half the variance of an ordinary layer depends on the goal, half is the same for all goals.
        deviation = math.sqrt(0.5 / inputs)
        self.code = linear(goal, outputs, 1.0, generator)
        biases = linear(outputs, outputs, 1.0, generator)
        self.weights = linear(outputs, outputs * inputs, deviation, generator)
        self.biases = biases
        with torch.no_grad():
            self.weights.bias.normal_(0.0, deviation, generator=generator)

    def forward(self, rows_BF: Tensor, goal_BG: Tensor) -> Tensor:
        code_BU = self._activate(self.code(goal_BG))
        weights_BUF = self.weights(code_BU).unflatten(1, self._shape)
        made_BU: Tensor = torch.einsum("buf,bf->bu", weights_BUF, rows_BF) + self.biases(code_BU)
        return made_BU
