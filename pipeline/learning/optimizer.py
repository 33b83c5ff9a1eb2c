"""This module implements Adam on all parameters of a learner, which are kept in one block of memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from sparring.pipeline.networks.device import CPU

BackwardFn = Callable[[Sequence[Tensor], Sequence[Tensor]], object]
"""Propagates gradients of outputs to the `grad` of all parameters: autograd, or explicit formulas of a network."""

_AVERAGES: Final = ("exp_avg", "exp_avg_sq")


class FlatParameters:
    """Moves the parameters of modules into one flat tensor and makes them views of it, and so their gradients.

    A clip, a check or an optimizer step is then one operation instead of one per parameter.

    Attributes:
        flat: [P] all values.
        gradient: [P] their gradient.

    Args:
        modules: in the order of their parameters in the block; the parameters must stay in it.
        device: device of the block. Buffers stay on the CPU.
    """

    def __init__(self, modules: nn.Module, device: torch.device = CPU) -> None:
        named = dict(modules.named_parameters())
        self._shapes = {name: parameter.shape for name, parameter in named.items()}
        with torch.no_grad():
            self.flat = torch.cat([parameter.reshape(-1).to(device) for parameter in named.values()])
        self.gradient = torch.zeros_like(self.flat)
        values, gradients = self.named(self.flat), self.named(self.gradient)
        for name, parameter in named.items():
            place(parameter, values[name])
            parameter.grad = gradients[name]

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Returns views of parts of a block like `flat`, in the shapes and by the names of the parameters."""
        parts = torch.split(flat, [shape.numel() for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def backward(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], backward_fn: BackwardFn = torch.autograd.backward
    ) -> None:
        """Sets `gradient` to the derivative for all parameters; arguments as for `Adam.step`."""
        self.gradient.zero_()
        backward_fn(outputs, gradients)


class Adam:
    """Implements Adam (Kingma and Ba 2015, arXiv 1412.6980); a step with a non-finite gradient is skipped.

    It uses PyTorch's operator without its optimizer class, whose bookkeeping takes longer than a small network's step.

    Attributes:
        device: device of the parameters, their gradients and the state.
        learning_rate: of the next step.
        gradient_norm: Euclidean norm of the last step's gradient, of all parameters together and before clipping; not
            finite if the step was skipped, 0 before the first.
        moments: the state by PyTorch's names, to be saved and restored in place.
        tried: steps tried since creation; other threads may read it.

    Args:
        modules: their parameters become views of one block.
        learning_rate: initial value.
        device: device that the parameters move to.
        epsilon: added to the denominator.
        max_norm: the gradient is scaled down to this norm if its own is larger; None for no limit.
    """

    def __init__(
        self,
        modules: nn.Module,
        learning_rate: float,
        device: torch.device = CPU,
        *,
        epsilon: float = 1e-8,
        max_norm: float | None = None,
    ) -> None:
        self._modules = modules
        self._epsilon = epsilon
        self._max_norm = max_norm
        self.gradient_norm = 0.0
        self.device = device
        self.tried = 0
        self.learning_rate = learning_rate
        self.parameters = FlatParameters(modules, device)
        flat = self.parameters.flat
        self.moments = {"step": flat.new_zeros(()), **{name: torch.zeros_like(flat) for name in _AVERAGES}}

    def step(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], backward_fn: BackwardFn = torch.autograd.backward
    ) -> bool:
        """Takes one step.

        Args:
            outputs: outputs of the modules.
            gradients: gradients of the loss for each of them.
            backward_fn: propagates them to the parameters.

        Returns:
            False if the gradient was not finite and the step was skipped.
        """
        self.tried += 1
        self.parameters.backward(outputs, gradients, backward_fn)
        # A NaN or an infinity in any row of the loss also reaches the gradient and its norm.
        gradient = self.parameters.gradient
        self.gradient_norm = math.sqrt(gradient.dot(gradient).item())
        if not math.isfinite(self.gradient_norm):
            return False
        if self._max_norm is not None and self.gradient_norm > self._max_norm:
            gradient.mul_(self._max_norm / self.gradient_norm)
        self.moments["step"].add_(1)
        torch._fused_adam_(
            [self.parameters.flat],
            [gradient],
            [self.moments["exp_avg"]],
            [self.moments["exp_avg_sq"]],
            [],  # the largest averages, of AMSGrad alone
            [self.moments["step"]],
            lr=self.learning_rate,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=self._epsilon,
            amsgrad=False,
            maximize=False,
        )
        return True

    def grown(self) -> Adam:
        """Returns an optimizer of the same modules with their new parameters; the state of the others is kept."""
        grown = Adam(self._modules, self.learning_rate, self.device, epsilon=self._epsilon, max_norm=self._max_norm)
        grown.tried = self.tried
        grown.moments["step"].copy_(self.moments["step"])
        for name in _AVERAGES:
            before = self.parameters.named(self.moments[name])
            for parameter, values in grown.parameters.named(grown.moments[name]).items():
                if parameter in before:
                    values.copy_(before[parameter])
        return grown


def place(parameter: nn.Parameter, values: Tensor) -> None:
    """Replaces a parameter's storage with `values`; references to the parameter stay valid."""
    parameter.data = values
