"""How a record says what it holds: array annotations, and the registry of tags.

A record is a frozen, keyword-only dataclass decorated with `@record("tag")`. Its fields may be
`bool`, `int`, `float`, `str`, an optional of these, arrays (the names below), other records,
`tuple[T, ...]` and `dict[str, T]`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, dataclass_transform

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Columns:
    """Marks a field as an array.

    Attributes:
        dtypes: what is allowed, as little-endian numpy dtype strings.
        ndim: number of dimensions, or None where the behavior's spec decides.
    """

    dtypes: tuple[str, ...]
    ndim: int | None = 1


F32 = Annotated[NDArray[np.float32], Columns(("<f4",))]
F32Matrix = Annotated[NDArray[np.float32], Columns(("<f4",), 2)]
I32 = Annotated[NDArray[np.int32], Columns(("<i4",))]
I32Matrix = Annotated[NDArray[np.int32], Columns(("<i4",), 2)]
I64 = Annotated[NDArray[np.int64], Columns(("<i8",))]
Octets = Annotated[NDArray[np.uint8], Columns(("|u1",))]
Flags = Annotated[NDArray[np.bool_], Columns(("|b1",))]
FlagsMatrix = Annotated[NDArray[np.bool_], Columns(("|b1",), 2)]
Observation = Annotated[NDArray[Any], Columns(("<f4", "|u1"), None)]
Weights = Annotated[NDArray[Any], Columns(("<f4", "<i8"), None)]

T = TypeVar("T")

TAGS: dict[str, type[Any]] = {}
"""Every record by its tag: the closed union that the codec accepts."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def record(tag: str) -> Callable[[type[T]], type[T]]:
    """Makes a frozen keyword-only dataclass and registers it under `tag`."""

    def decorate(cls: type[T]) -> type[T]:
        made = dataclass(frozen=True, kw_only=True, slots=True, eq=False)(cls)
        if tag in TAGS:
            raise ValueError(f"tag {tag!r} is taken by {TAGS[tag].__name__}: a tag is never used again")
        TAGS[tag] = made
        made.__record_tag__ = tag  # type: ignore[attr-defined]
        return made

    return decorate


def tag_of(value: object) -> str:
    """The tag of a record or record class."""
    return value.__record_tag__  # type: ignore[attr-defined,no-any-return]
