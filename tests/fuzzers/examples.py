"""Valid random records, generated from the records' annotations: the first corpus."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from random import Random
from typing import Any, Final

import numpy as np

from sparring.pipeline.messages.schema import Columns
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

_TEXTS: Final = ("", "A", "A?team=1", "stepping-0.1#18a3bc~0", "gravity", "ü", "x" * 40)
_NUMBERS: Final = (0, 1, 2, 3, 7, 255, 2**31 - 1, 2**31, 2**63 - 1, 2**64 - 1, -1, -(2**31), -(2**63))
_SPEC: Final = BehaviorSpec(
    observations=(
        ObservationSpec(name="number", shape=(1,)),
        ObservationSpec(name="pixels", shape=(1, 2, 2), dtype="uint8", kind="image"),
    ),
    actions=ActionSpec(continuous=2, discrete=(3, 2)),
)


def example(hint: Any, rng: Random) -> Any:
    """Returns a random value that an annotation allows, a record included."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _array(next(one for one in hint.__metadata__ if isinstance(one, Columns)), rng)
    if hint is BehaviorSpec:
        return _SPEC
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        return typing.cast("Any", hint)(**{name: example(one, rng) for name, one in hints.items()})
    if origin in (types.UnionType, typing.Union):
        return None if rng.random() < 0.3 else example(next(arg for arg in args if arg is not type(None)), rng)
    if origin is tuple:
        return tuple(example(args[0], rng) for _ in range(rng.randrange(3)))
    if origin is dict:
        return {rng.choice(_TEXTS): example(args[1], rng) for _ in range(rng.randrange(3))}
    return rng.choice(args) if origin is typing.Literal else _plain(hint, rng)


def _plain(hint: Any, rng: Random) -> Any:
    if hint is bool:
        return rng.random() < 0.5
    if hint is int:
        return rng.choice(_NUMBERS)
    return rng.choice(_TEXTS) if hint is str else rng.choice((0.0, 1.5, -1e300, 5e-324))


def _array(columns: Columns, rng: Random) -> Any:
    ndim = rng.randrange(1, 4) if columns.ndim is None else columns.ndim
    shape = tuple(rng.randrange(4) for _ in range(ndim))
    dtype = np.dtype(rng.choice(columns.dtypes))
    values = np.frombuffer(rng.randbytes(math.prod(shape) * dtype.itemsize), np.uint8)
    return (values % 2 if dtype == np.bool_ else values).view(dtype).reshape(shape)
