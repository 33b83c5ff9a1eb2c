"""This module implements Adam on all parameters of a learner, which are kept in one block of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from sparring.pipeline.learning.ranks import Ranks
from sparring.pipeline.networks.device import CPU, back, constant, place

T = TypeVar("T")


class StepTaken(NamedTuple):
    """Tells of a step of the optimizer; both are scalars on its device.

    Attributes:
        skipped: 1 if the gradient was not finite, which skips the step; else 0.
        square: squared Euclidean norm of the gradient, of all parameters together and before clipping.
    """

    skipped: Tensor
    square: Tensor


AVERAGES: Final = ("exp_avg", "exp_avg_sq")
"""PyTorch's names of the state of Adam, beside `step`."""
fused_adam = partial(torch._fused_adam_, beta1=0.9, beta2=0.999, weight_decay=0.0, amsgrad=False, maximize=False)


def of_finite(steps: Sequence[tuple[Tensor, T]]) -> list[T]:
    """Returns what belongs to the steps that were not skipped; this waits for the device.

    Args:
        steps: 1 if a step was skipped, else 0, and what belongs to it.
    """
    skipped = back(torch.stack([one for one, _ in steps])).tolist() if steps else []
    return [found for (_, found), is_skipped in zip(steps, skipped, strict=True) if not is_skipped]


@dataclass(eq=False)
class Adam:
    """Implements Adam (Kingma and Ba 2015, arXiv 1412.6980); a step with a non-finite gradient is skipped.

    All parameters are views of one block, and so are their gradients: a clip, a check or a step is then one operation
    instead of one per parameter. A step uses PyTorch's operator without its optimizer class, whose bookkeeping takes
    longer than a small network's step.

    Attributes:
        modules: their parameters become views of one block.
        learning_rate: of the next step.
        device: device that the parameters, their gradients and the state move to.
        epsilon: added to the denominator.
        max_norm: the gradient is scaled down to this norm if its own is larger; None for no limit.
        ranks: whose gradients are summed.
        flat: [P] all values.
        gradient: [P] their gradient.
        moments: the state by PyTorch's names, to be saved and restored in place.
        tried: steps tried since creation; other threads may read it.
    """

    modules: nn.Module
    learning_rate: float
    device: torch.device = CPU
    epsilon: float = 1e-8
    max_norm: float | None = None
    ranks: Ranks = field(default_factory=Ranks)

    def __post_init__(self) -> None:
        self.tried = 0
        named = dict(self.modules.named_parameters())
        self._shapes = {name: parameter.shape for name, parameter in named.items()}
        size, dtype = sum(map(torch.Size.numel, self._shapes.values())), next(iter(named.values())).dtype
        self.flat = torch.empty(size, dtype=dtype, device=self.device)
        self.gradient = torch.zeros_like(self.flat)
        values, gradients = self.named(self.flat), self.named(self.gradient)
        for name, parameter in named.items():
            place(parameter, values[name].copy_(parameter.detach()))
            parameter.grad = gradients[name]
        averages = {name: torch.zeros_like(self.flat) for name in AVERAGES}
        self.moments = {"step": self.flat.new_zeros(()), **averages}
        largest: list[Tensor] = []  # of AMSGrad alone
        state = (self.flat, self.gradient, *averages.values())
        self._state = (*([one] for one in state), largest, [self.moments["step"]])

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Returns views of parts of a block like `flat`, in the shapes and by the names of the parameters."""
        parts = torch.split(flat, [shape.numel() for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def step(self, backward_fn: Callable[[], object]) -> StepTaken:
        """Takes one step, without waiting for the device.

        Args:
            backward_fn: adds the gradient of a loss to the `grad` of all parameters: autograd, or explicit formulas.

        Returns:
            Whether the gradient was finite, else the step was skipped, and its norm.
        """
        self.tried += 1
        gradient = self.gradient
        gradient.zero_()
        backward_fn()
        self.ranks.sum(gradient)
        # A NaN or an infinity in any row of the loss also reaches the gradient and its norm.
        square = gradient.dot(gradient)
        skipped = square.sub(square).ne_(0)
        if self.max_norm is not None:
            gradient.mul_((self.max_norm / square.double().sqrt()).clamp_(max=1.0))
        self.moments["step"].add_(constant(1.0, skipped)).sub_(skipped)
        fused_adam(*self._state, lr=self.learning_rate, eps=self.epsilon, found_inf=skipped)
        return StepTaken(skipped, square)

    def grown(self) -> Adam:
        """Returns an optimizer of the same modules with their new parameters; the state of the others is kept."""
        grown = replace(self)
        grown.tried = self.tried
        grown.moments["step"].copy_(self.moments["step"])
        for name in AVERAGES:
            before = self.named(self.moments[name])
            for parameter, values in grown.named(grown.moments[name]).items():
                if parameter in before:
                    values.copy_(before[parameter])
        return grown
