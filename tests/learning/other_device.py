"""A device that every machine has: tensors there can be computed with, but not mixed with those of the processor.

Each of its tensors holds one of the processor and passes every operation on to that. So an update there works with the
processor's numbers, and what a GPU refuses is refused: an operation on tensors of both, and to read them as arrays. As
on a GPU, a number without dimensions may be the processor's, but not in a list, and nothing there is written to here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sparring.pipeline.learning import parameters
from sparring.pipeline.learning.signals import rnd

ELSEWHERE: Final = torch.device("meta")
"""Its name: that of the one device besides the processor with which every PyTorch can derive."""

_HERE: Final = torch.device("cpu")
_CROSSING: Final = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class Held(Tensor):
    """A tensor there."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Held:
        return Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=ELSEWHERE,
        )  # fmt: skip

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __repr__(self) -> str:
        return f"Held({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _passed_on(func, args, kwargs or {})


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _passed_on(func, args, kwargs or {})


@contextmanager
def elsewhere() -> Iterator[torch.device]:
    """Within it, the device is there."""
    with pytest.MonkeyPatch.context() as patch, _Watch():
        for module in (parameters, rnd):
            patch.setattr(module, "place", _place)
        patch.setattr(torch.nn.modules.rnn, "weakref", SimpleNamespace(ref=lambda one: lambda: one))  # see `_place`
        yield ELSEWHERE


def _passed_on(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    there = [one for one in _tensors([*args, *kwargs.values()]) if isinstance(one, Held)]
    named = kwargs.get("device")
    stays = torch.device(named) == ELSEWHERE if named is not None else bool(there)
    if func is torch.ops.aten.copy_.default:
        stays = isinstance(args[0], Held)
    elif there and func not in _CROSSING:
        _refuse_mixed(func, args, kwargs)
    if not there and not stays:
        return func(*args, **kwargs)
    found = func(*_mapped(_here, args), **{name: _mapped(_here, one) for name, one in kwargs.items()})
    if not stays:
        return found
    written = {id(one.held): one for one in there}

    def wrapped(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        return written[id(one)] if id(one) in written else Held(one)

    return _mapped(wrapped, found)


def _here(one: Any) -> Any:
    if isinstance(one, torch.device):
        return _HERE
    return one.held if isinstance(one, Held) else one


def _refuse_mixed(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """As a GPU does."""
    for number, argument in enumerate([*args, *kwargs.values()]):
        alias = func._schema.arguments[number].alias_info if number < len(args) else None
        written = alias is not None and alias.is_write
        alone = isinstance(argument, Tensor) and argument.dim() == 0 and not written
        if not alone and any(not isinstance(one, Held) for one in _tensors(argument)):
            raise RuntimeError(f"{func}: argument {number} is on the processor, others are elsewhere")


def _tensors(argument: Any) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for one in argument:
            yield from _tensors(one)


def _mapped(change: Callable[[Any], Any], argument: Any) -> Any:
    if isinstance(argument, list | tuple):
        return type(argument)([_mapped(change, one) for one in argument])
    return change(argument)


def _place(parameter: nn.Parameter, values: Tensor) -> None:
    """As `parameters.place`.

    PyTorch makes no parameter another kind of tensor by its `data`, and swaps none that a weak reference names.
    """
    if not isinstance(values, Held):
        parameter.data = values
    elif isinstance(parameter, Held):
        parameter.held = values.held
    else:
        torch.utils.swap_tensors(parameter, nn.Parameter(values, requires_grad=parameter.requires_grad))
