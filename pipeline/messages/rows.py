"""Picks and joins rows of records, each of whose fields is a column, a tuple of columns or None."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.specs import Array

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")

_MISSING: Final = {"outcomes": -1.0}
"""Value of the rows of a record without a column that another record has; 0 for other columns."""


def pick(record: Record, rows: slice | Array) -> Record:
    """Returns some rows of a record."""
    values: dict[str, Array | tuple[Array, ...] | None] = {}
    for name in names_of(type(record)):
        column: Array | tuple[Array, ...] | None = getattr(record, name)
        if isinstance(column, tuple):
            values[name] = tuple([part[rows] for part in column])
        else:
            values[name] = None if column is None else column[rows]
    return type(record)(**values)


def pick_where(record: Record, chosen: NDArray[np.bool_]) -> Record:
    """Returns the chosen rows of a record, often all of them."""
    return record if np.count_nonzero(chosen) == len(chosen) else pick(record, np.flatnonzero(chosen))


def concatenate(records: Sequence[Record]) -> Record:
    """Returns the rows of all records, of which there is at least one; each has a value in its first field."""
    kind = type(records[0])
    if len(records) == 1:
        return records[0]
    first, *others = names_of(kind)
    leading = [getattr(one, first) for one in records]
    values: dict[str, Any] = {first: np.concatenate(leading)}
    for name in others:
        columns = [getattr(one, name) for one in records]
        if isinstance(columns[0], tuple):
            values[name] = tuple(map(np.concatenate, zip(*columns, strict=True)))
        else:
            values[name] = join_columns(columns, map(len, leading), _MISSING.get(name, 0))
    return kind(**values)


def join_columns(columns: Sequence[Any], rows: Iterable[int] = (), missing: float = 0) -> Any:
    """Concatenates columns; returns None where all are None.

    Args:
        columns: of which some may be None.
        rows: number of rows of each, where any may be None.
        missing: value in the rows of one that is None.
    """
    if len(columns) == 1:
        return columns[0]
    if any(column is None for column in columns):
        like = next((column for column in columns if column is not None), None)
        if like is None:
            return None
        columns = [
            np.full((n, *like.shape[1:]), missing, like.dtype) if column is None else column
            for column, n in zip(columns, rows, strict=True)
        ]
    return np.concatenate(columns)


def names_of(kind: type[DataclassInstance]) -> Collection[str]:
    """Returns the names of the fields of a record, faster than `dataclasses.fields`."""
    return kind.__dataclass_fields__
