"""This module defines the functions of hidden units, by their names in the settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from sparring.pipeline.networks.settings import Activation


class Function(NamedTuple):
    """Combines an elementwise function with its derivative.

    Attributes:
        forward: values of sums.
        in_place: the same, written over the sums.
        backward: gradient for the sums, from the gradient for the values, the sums and the values.
    """

    forward: Callable[[Tensor], Tensor]
    in_place: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor], Tensor]


def _silu_in_place(sums: Tensor) -> Tensor:
    return silu(sums, inplace=True)


def _silu_backward(gradient: Tensor, sums: Tensor, _values: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.silu_backward(gradient, sums)
    return found


def _tanh_backward(gradient: Tensor, _sums: Tensor, values: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.tanh_backward(gradient, values)
    return found


FUNCTIONS: Final[dict[Activation, Function]] = {
    "silu": Function(silu, _silu_in_place, _silu_backward),
    "tanh": Function(torch.tanh, torch.tanh_, _tanh_backward),
}
