# ruff: noqa: N803, N806 (names end in their shape)
"""This module implements a multi-layer perceptron with its own derivative: as one autograd node, or without a graph.

The forward and backward formulas are the textbook's. A small minibatch takes more time for bookkeeping than for
arithmetic: one node replaces a dozen, and writes gradients to their final place. If only perceptrons are to be
differentiated, even that node costs a third, and `traced` works without it.

B rows, F inputs, U units of a layer, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from sparring.pipeline.networks.activations import FUNCTIONS, Function
from sparring.pipeline.networks.initialization import HIDDEN_GAINS, initialize_weights
from sparring.pipeline.networks.settings import Activation, Initialization


class Perceptron(nn.Module):
    """Combines layers of hidden units and a linear layer of outputs.

    Args:
        inputs: F.
        units: U of each hidden layer, in order.
        output_gains: O factors on the initial weights of each output.
        generator: random source of the initial weights.
        activation: function of the hidden units.
        initialization: distribution of the initial weights.

    Attributes:
        output: name of the layer of outputs.
        activation: function of the hidden units.
    """

    def __init__(
        self,
        inputs: int,
        units: Sequence[int],
        output_gains: Sequence[float],
        generator: torch.Generator,
        activation: Activation = "silu",
        initialization: Initialization = "he_normal",
    ) -> None:
        super().__init__()
        self.activation = activation
        sizes = [inputs, *units, len(output_gains)]
        self.layers = nn.ModuleList(unset_linear(before, after) for before, after in pairwise(sizes))
        self.output = f"layers.{len(sizes) - 2}"
        self._chain: tuple[nn.Parameter, ...] = tuple(self.layers.parameters())
        gains = [*[HIDDEN_GAINS[initialization]] * len(units), 1.0]
        for layer, gain in zip(self.layers, gains, strict=True):
            assert isinstance(layer, nn.Linear)
            initialize_weights(layer, gain, generator, initialization)
        with torch.no_grad():
            self._chain[-2].mul_(torch.tensor(output_gains).unsqueeze(1))

    def forward(self, rows_BF: Tensor) -> Tensor:
        """Returns outputs [B, O]."""
        if torch.is_grad_enabled():
            function = FUNCTIONS[self.activation]
            return _Chain.apply(rows_BF, self._chain[0], self._chain, function)  # type: ignore[no-any-return,no-untyped-call]
        return _infer(_affine(self._chain), FUNCTIONS[self.activation].in_place, rows_BF)

    def traced(self, rows_BF: Tensor) -> tuple[Tensor, Callable[[Tensor], object]]:
        """Returns outputs [B, O] and a function from their gradient that sets the parameters' `grad`."""
        function = FUNCTIONS[self.activation]
        outputs_BO, activations = _forward(self._chain, function, rows_BF)
        return outputs_BO, partial(_backward, self._chain, function, activations, _set)

    def frozen(self, outputs: int | None = None) -> Callable[[Tensor], Tensor]:
        """Returns the first `outputs`, or all, as a plain function of rows, on a copy of the current weights."""
        *chain, weight, bias = (parameter.detach() for parameter in self._chain)
        affine = _affine([one.clone() for one in (*chain, weight[:outputs], bias[:outputs])])
        return partial(_infer, affine, FUNCTIONS[self.activation].in_place)


def unset_linear(inputs: int, outputs: int) -> nn.Linear:
    """Returns a linear layer whose weights are still to be sampled.

    Torch's own `skip_init` does the same but imports a computer algebra system, which slows the start by half a second.
    """
    layer = nn.Linear(inputs, outputs, device="meta")  # samples nothing from the global generator
    layer.weight = nn.Parameter(torch.empty(outputs, inputs))
    layer.bias = nn.Parameter(torch.empty(outputs))
    return layer


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


class _Chain(torch.autograd.Function):
    """Represents the whole perceptron as one node, which adds to its parameters' `grad` itself.

    The parameters pass as a Python tuple, and only the first of them also as a tensor, so that autograd differentiates
    the node.
    """

    @staticmethod
    def forward(
        ctx: Any, rows_BF: Tensor, first: Tensor, chain: tuple[nn.Parameter, ...], function: Function
    ) -> Tensor:
        outputs_BO, ctx.activations = _forward(chain, function, rows_BF)
        ctx.chain, ctx.function = chain, function
        return outputs_BO

    @staticmethod
    def backward(ctx: Any, gradient_BO: Tensor) -> tuple[Tensor | None, None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError("got create_graph=True; expected a first derivative only; build it of torch.nn layers")
        gradient_BU = _backward(ctx.chain, ctx.function, ctx.activations, _accumulate, gradient_BO)
        return gradient_BU.mm(ctx.chain[0]) if ctx.needs_input_grad[0] else None, None, None, None


def _forward(chain: Sequence[nn.Parameter], function: Function, rows_BF: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns outputs, and the inputs and sums of each layer."""
    *hidden, weight_OU, bias_O = chain
    hidden_BU, activations = rows_BF, [rows_BF]
    for weight_UF, bias_U in zip(hidden[::2], hidden[1::2], strict=True):
        sum_BU = torch.addmm(bias_U, hidden_BU, weight_UF.t())
        hidden_BU = function.forward(sum_BU)
        activations += (sum_BU, hidden_BU)
    return torch.addmm(bias_O, hidden_BU, weight_OU.t()), activations


def _backward(
    chain: Sequence[nn.Parameter],
    function: Function,
    activations: Sequence[Tensor],
    keep: Callable[[nn.Parameter, nn.Parameter, Tensor, Tensor], None],
    gradient_BO: Tensor,
) -> Tensor:
    """Differentiates each layer's parameters, and passes their gradients to `keep`.

    Returns:
        The gradient for the sums of the first layer, [B, U].
    """
    weights, biases = chain[::2], chain[1::2]
    gradient = gradient_BO
    for layer in range(len(weights) - 1, 0, -1):
        sum_BU, hidden_BU = activations[2 * layer - 1 : 2 * layer + 1]
        keep(weights[layer], biases[layer], gradient, hidden_BU)
        gradient = function.backward(gradient.mm(weights[layer]), sum_BU, hidden_BU)
    keep(weights[0], biases[0], gradient, activations[0])
    return gradient


def _accumulate(weight: nn.Parameter, bias: nn.Parameter, gradient_BU: Tensor, inputs_BF: Tensor) -> None:
    """Adds a linear layer's gradient to that of its parameters."""
    if weight.grad is None or bias.grad is None:
        weight.grad, bias.grad = torch.zeros_like(weight), torch.zeros_like(bias)
    weight.grad.addmm_(gradient_BU.t(), inputs_BF)
    bias.grad.add_(gradient_BU.sum(0))


def _set(weight: nn.Parameter, bias: nn.Parameter, gradient_BU: Tensor, inputs_BF: Tensor) -> None:
    """Overwrites the gradient of a linear layer's parameters; `grad` must exist."""
    assert weight.grad is not None
    assert bias.grad is not None
    torch.mm(gradient_BU.t(), inputs_BF, out=weight.grad)
    torch.sum(gradient_BU, 0, out=bias.grad)


def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Adds a gradient to that of a parameter, as autograd does."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    parameter.grad.add_(gradient)
