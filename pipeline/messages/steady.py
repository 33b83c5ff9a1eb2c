"""A steady message differs from one before in its number and the contents of its arrays alone.

While agents and shapes stay the same, nothing else in a frame of a simulator, or in its answer, changes: neither side
parses, builds or checks again what recurs.
"""

from collections.abc import Callable, Set
from dataclasses import fields, is_dataclass
from typing import NamedTuple

import numpy as np

from sparring.pipeline.messages.schema import Arrays, Hint, Value
from sparring.pipeline.specs import Array

NUMBER = "sequence"
"""Field of a record that holds the number of its message."""


class Shape(NamedTuple):
    """A Shape is a record without its number and its arrays.

    Attributes:
        collect: appends the arrays of another record, as its encoder does; False where that has another shape.
        build: returns a record of this shape with other arrays and another number.
    """

    collect: Callable[[Value, Arrays], bool]
    build: Callable[[Arrays, int], Value]


def shape_of(record: Value, arrays: Arrays) -> Shape | None:
    """Returns the shape of a decoded record with a number and these arrays; None where another value may change."""
    return _shape_of(record, {id(array): index for index, array in enumerate(arrays)}, {NUMBER})


def _shape_of(value: Value, places: dict[int, int], numbers: Set[str] = frozenset()) -> Shape | None:
    """Returns the shape of a value; `numbers` names the fields of a record that hold the number."""
    if isinstance(value, np.ndarray):
        return _shape_of_array(value, places[id(value)])
    if is_dataclass(value):
        return _shape_of_record(value, places, numbers)
    if isinstance(value, tuple) and value:
        items = [_shape_of(one, places) for one in value]
        found = [item for item in items if item is not None]
        return _shape_of_items(found) if len(found) == len(items) else None
    kind: Hint = type(value)
    if kind in (dict, tuple):
        return None if value else Shape(lambda other, _: type(other) is kind and not other, lambda *_: kind())
    if kind is float:  # it may be -0.0 where it was 0.0
        return None
    return Shape(lambda other, _: type(other) is kind and other == value, lambda *_: value)


def _shape_of_array(value: Array, place: int) -> Shape:
    dtype, shape = value.dtype, value.shape

    def collect(other: Value, into: Arrays) -> bool:
        if not isinstance(other, np.ndarray) or other.shape != shape or other.dtype != dtype:
            return False
        into.append(other if other.flags.c_contiguous else np.ascontiguousarray(other))
        return True

    return Shape(collect, lambda arrays, _: arrays[place])


def _shape_of_record(value: Value, places: dict[int, int], numbers: Set[str]) -> Shape | None:
    kind: Hint = type(value)
    names = [one.name for one in fields(value) if one.name not in numbers]
    parts = [(name, _shape_of(getattr(value, name), places)) for name in names]
    found = [(name, part.collect, part.build) for name, part in parts if part is not None]

    def collect(other: Value, into: Arrays) -> bool:
        return type(other) is kind and all(part(getattr(other, name), into) for name, part, _ in found)

    def build(arrays: Arrays, number: int) -> Value:
        return kind(**{name: part(arrays, number) for name, _, part in found}, **dict.fromkeys(numbers, number))

    return Shape(collect, build) if len(found) == len(parts) else None


def _shape_of_items(items: list[Shape]) -> Shape:
    def collect(other: Value, into: Arrays) -> bool:
        same = isinstance(other, tuple) and len(other) == len(items)
        return same and all(item.collect(one, into) for item, one in zip(items, other, strict=True))

    return Shape(collect, lambda arrays, number: tuple([item.build(arrays, number) for item in items]))
