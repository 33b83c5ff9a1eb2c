"""This module keeps all parameters of a learner in one block of memory, and their gradients in another.

A clip, a check or an optimizer step is then one operation instead of one per parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from sparring.pipeline.networks.device import CPU

BackwardFn = Callable[[Sequence[Tensor], Sequence[Tensor]], object]
"""Propagates gradients of outputs to the `grad` of all parameters: autograd, or explicit formulas of a network."""


class FlatParameters:
    """Moves the parameters of modules into one flat tensor and makes them views of it.

    Attributes:
        flat: [P] all values, as a parameter for an optimizer.
        gradient: [P] its gradient, `flat.grad`.

    Args:
        modules: in the order of their parameters in the block; the parameters must stay in it.
        device: device of the block. Buffers stay on the CPU.
    """

    def __init__(self, *modules: nn.Module, device: torch.device = CPU) -> None:
        named = [named for module in modules for named in module.named_parameters()]
        self._names = [name for name, _ in named]
        parameters = [parameter for _, parameter in named]
        self._shapes = [parameter.shape for parameter in parameters]
        self._sizes = sizes = [parameter.numel() for parameter in parameters]
        with torch.no_grad():
            block = torch.cat([parameter.reshape(-1).to(device) for parameter in parameters])
        self.flat = nn.Parameter(block)
        self.gradient = torch.zeros_like(block)
        self.flat.grad = self.gradient
        views = zip(parameters, torch.split(block, sizes), torch.split(self.gradient, sizes), strict=True)
        for parameter, values, gradient in views:
            place(parameter, values.view_as(parameter))
            parameter.grad = gradient.view_as(parameter)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Returns views of parts of a block like `flat`, in the shapes and by the names of the parameters."""
        parts = zip(self._names, self._shapes, torch.split(flat, self._sizes), strict=True)
        return {name: part.view(shape) for name, shape, part in parts}

    def backward(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], backward_fn: BackwardFn = torch.autograd.backward
    ) -> None:
        """Sets `gradient` to the derivative for all parameters.

        Args:
            outputs: outputs of the modules.
            gradients: gradients of the loss for each of them.
            backward_fn: propagates them to the parameters.
        """
        self.gradient.zero_()
        backward_fn(outputs, gradients)


def place(parameter: nn.Parameter, values: Tensor) -> None:
    """Replaces a parameter's storage with `values`; references to the parameter stay valid."""
    parameter.data = values
