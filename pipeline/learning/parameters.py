"""All parameters of a learner in one block of memory, and their gradients in another.

A clip, a check or an optimiser step is then one operation and not one per parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from sparring.pipeline.networks.device import CPU

Pull = Callable[[Sequence[Tensor], Sequence[Tensor]], object]
"""Adds to `grad` of all parameters what gradients of outputs make of them: autograd, or what knows the network."""


class FlatParameters:
    """Moves the parameters of modules into one flat tensor, whose views they become.

    Attributes:
        flat: [P] all values, as a parameter for an optimiser.
        gradient: [P] its gradient, `flat.grad`.

    Args:
        modules: in the order of their parameters in the block; they must stay there.
        device: where the block is. Buffers stay where they are, on the processor.
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
        """Parts of a block like `flat`, in their shapes, by the names of their parameters: views."""
        parts = zip(self._names, self._shapes, torch.split(flat, self._sizes), strict=True)
        return {name: part.view(shape) for name, shape, part in parts}

    def backward(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], pull: Pull = torch.autograd.backward
    ) -> None:
        """Sets `gradient` to the derivative for all parameters.

        Args:
            outputs: what the modules put out.
            gradients: of the loss, for each of them.
            pull: carries them back.
        """
        self.gradient.zero_()
        pull(outputs, gradients)


def place(parameter: nn.Parameter, values: Tensor) -> None:
    """Makes a parameter a view of its values, wherever these are; who holds the parameter holds the same one."""
    parameter.data = values
