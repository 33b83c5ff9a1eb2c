"""Adam on all parameters of a learner, kept in one block of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from sparring.pipeline.learning.parameters import FlatParameters, Pull
from sparring.pipeline.networks.device import CPU

_AVERAGES = ("exp_avg", "exp_avg_sq")
_USUAL: Final[Any] = {
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 0.0,
    "amsgrad": False,
    "maximize": False,
}


class Adam:
    """Adam (Kingma and Ba 2015, arXiv 1412.6980); a step that would not be finite is not made.

    PyTorch's operator without its optimiser class, whose bookkeeping takes longer than a small network's step.

    Attributes:
        device: where the parameters, their gradients and its state are.
        learning_rate: of the next step.
        gradient_norm: Euclidean norm of the gradient of the last step, of all parameters together and before it was
            clipped; not finite where the step was not made, 0 before the first.
        moments: its state by PyTorch's names, to be saved and restored in place.
        tried: steps tried since it was made; may be read from another thread.

    Args:
        modules: whose parameters it moves; they become views of one block.
        learning_rate: at the start.
        device: where they are moved.
        epsilon: added to the denominator.
        max_norm: the gradient is scaled down to this norm where its own is larger; None for no limit.
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
        self.parameters = FlatParameters(modules, device=device)
        flat = self.parameters.flat.detach()
        self.moments = {"step": flat.new_zeros(()), **{name: torch.zeros_like(flat) for name in _AVERAGES}}
        self._state: Any = {
            "self": [flat],
            "grads": [self.parameters.gradient],
            "exp_avgs": [self.moments["exp_avg"]],
            "exp_avg_sqs": [self.moments["exp_avg_sq"]],
            "max_exp_avg_sqs": [],
            "state_steps": [self.moments["step"]],
        }

    def step(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], pull: Pull = torch.autograd.backward
    ) -> bool:
        """One step.

        Args:
            outputs: what the modules put out.
            gradients: of the loss, for each of them.
            pull: carries them back to the parameters.

        Returns:
            False where the gradient was not finite and nothing was done.
        """
        self.tried += 1
        self.parameters.backward(outputs, gradients, pull)
        # A NaN or an infinity in any row of the loss is in the gradient too, and so in its norm.
        gradient = self.parameters.gradient
        self.gradient_norm = math.sqrt(gradient.dot(gradient).item())
        if not math.isfinite(self.gradient_norm):
            return False
        if self._max_norm is not None and self.gradient_norm > self._max_norm:
            gradient.mul_(self._max_norm / self.gradient_norm)
        self.moments["step"].add_(1)
        torch._fused_adam_(**self._state, lr=self.learning_rate, eps=self._epsilon, **_USUAL)
        return True

    def grown(self) -> Adam:
        """An optimiser of the same modules, which have got more parameters; what it knows of the others is kept."""
        grown = Adam(self._modules, self.learning_rate, self.device, epsilon=self._epsilon, max_norm=self._max_norm)
        grown.tried = self.tried
        grown.moments["step"].copy_(self.moments["step"])
        for name in _AVERAGES:
            before = self.parameters.named(self.moments[name])
            for parameter, values in grown.parameters.named(grown.moments[name]).items():
                if parameter in before:
                    values.copy_(before[parameter])
        return grown
