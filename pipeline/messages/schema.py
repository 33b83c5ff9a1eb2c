"""Annotations describe the arrays of a record, and a registry holds the records by their tags.

A record is a frozen, keyword-only dataclass decorated with `@record("tag")`. Its fields may be
`bool`, `int`, `float`, `str`, an optional of these, arrays (the names below), other records,
`tuple[T, ...]` and `dict[str, T]`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypeVar, dataclass_transform

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.specs import Array


class Columns(NamedTuple):
    """Declares that a field is an array.

    Attributes:
        dtypes: allowed dtypes, as little-endian numpy strings.
        ndim: number of dimensions; None where the behavior's spec determines it.
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
Masks = Annotated[NDArray[np.bool_], Columns(("|b1",), 2)]
Observation = Annotated[Array, Columns(("<f4", "|u1"), None)]
Weights = Annotated[Array, Columns(("<f4", "<i8"), None)]

T = TypeVar("T")

TAGS: dict[str, type[Any]] = {}
"""The closed union of records that the codec accepts, by tag."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def record(tag: str) -> Callable[[type[T]], type[T]]:
    """Turns a class into a frozen keyword-only dataclass and registers it under `tag`."""

    def decorate(cls: type[T]) -> type[T]:
        made = dataclass(frozen=True, kw_only=True, slots=True, eq=False)(cls)
        if tag in TAGS:
            raise ValueError(f"tag {tag!r} is taken by {TAGS[tag].__name__}: a tag is never reused")
        TAGS[tag] = made
        made.__record_tag__ = tag  # type: ignore[attr-defined]
        return made

    return decorate


def tag_of(value: object) -> str:
    """Returns the tag of a record or record class."""
    return value.__record_tag__  # type: ignore[attr-defined,no-any-return]
