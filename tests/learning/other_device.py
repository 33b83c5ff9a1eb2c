"""A simulated device that every machine has, whose tensors cannot be mixed with those of the CPU.

Each of its tensors wraps a CPU tensor and forwards every operation to it, so updates have the results of the CPU. Like
a GPU it refuses operations on tensors of both devices, and to read its tensors as arrays. A CPU tensor without
dimensions is allowed as an argument, but not in a list and not as a result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sparring.pipeline.learning import optimizer
from sparring.pipeline.networks import device as border

OTHER_DEVICE: Final = torch.device("meta")
"""The only device besides the CPU on which every PyTorch supports autograd."""

_HERE: Final = torch.device("cpu")
READS: Final[Counter[str]] = Counter()
"""How often an operation has read from the device, which on a GPU waits for all that it computes."""

_CROSSING: Final = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class OtherTensor(Tensor):
    """A tensor of the simulated device, which wraps a CPU tensor."""

    tensor: Tensor

    @staticmethod
    def __new__(cls, tensor: Tensor) -> OtherTensor:
        with torch.inference_mode(mode=False):  # PyTorch cannot make views of wrappers that it has made in that mode
            return Tensor._make_wrapper_subclass(
                cls, tensor.size(), strides=tensor.stride(), storage_offset=tensor.storage_offset(), dtype=tensor.dtype,
                device=OTHER_DEVICE,
            )  # fmt: skip

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __repr__(self) -> str:
        return f"OtherTensor({self.tensor})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _forwarded(func, args, kwargs or {})


class _ForwardingMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _forwarded(func, args, kwargs or {})


@contextmanager
def other_device() -> Iterator[torch.device]:
    """Makes the simulated device available; `READS` counts from 0."""
    READS.clear()
    with pytest.MonkeyPatch.context() as patch, _ForwardingMode():
        for module in (optimizer, border):
            patch.setattr(module, "place", _place)
        patch.setattr(torch.nn.modules.rnn, "weakref", SimpleNamespace(ref=lambda one: lambda: one))  # see `_place`
        yield OTHER_DEVICE


def _forwarded(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    there = [one for one in _tensors([*args, *kwargs.values()]) if isinstance(one, OtherTensor)]
    named = kwargs.get("device")
    stays = torch.device(named) == OTHER_DEVICE if named is not None else bool(there)
    if func is torch.ops.aten.copy_.default:
        stays = isinstance(args[0], OtherTensor)
    elif there and func not in _CROSSING:
        _refuse_mixed(func, args, kwargs)
    if not there and not stays:
        return func(*args, **kwargs)
    found = func(*_mapped(_here, args), **{name: _mapped(_here, one) for name, one in kwargs.items()})
    if there and (not stays or isinstance(found, bool | int | float)):
        READS[str(func)] += 1
    if not stays:
        return found
    written = {id(one.tensor): one for one in there}

    def wrapped(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        return written[id(one)] if id(one) in written else OtherTensor(one)

    return _mapped(wrapped, found)


def _here(one: Any) -> Any:
    if isinstance(one, torch.device):
        return _HERE
    return one.tensor if isinstance(one, OtherTensor) else one


def _refuse_mixed(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raises the error of a GPU if CPU tensors are among the arguments."""
    for number, argument in enumerate([*args, *kwargs.values()]):
        alias = func._schema.arguments[number].alias_info if number < len(args) else None
        written = alias is not None and alias.is_write
        alone = isinstance(argument, Tensor) and argument.dim() == 0 and not written
        if not alone and any(not isinstance(one, OtherTensor) for one in _tensors(argument)):
            raise RuntimeError(f"{func}: argument {number} is on the CPU, others are on another device")


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
    """Replaces `optimizer.place`.

    PyTorch cannot change the type of a parameter through `data`, or swap one that has weak references.
    """
    if not isinstance(values, OtherTensor):
        parameter.data = values
    elif isinstance(parameter, OtherTensor):
        parameter.tensor = values.tensor
    else:
        torch.utils.swap_tensors(parameter, nn.Parameter(values, requires_grad=parameter.requires_grad))
