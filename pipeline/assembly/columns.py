"""Columns of equal length: in records, whose rows are picked and joined, and in tables, which grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.assembly import sequences
from sparring.pipeline.specs import Array

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Mask = NDArray[np.bool_]
Slots = NDArray[np.int32]
"""Slots of agents of one behavior name."""
Places = NDArray[np.int64]
"""Rows of the table of groups."""
RowNumbers = NDArray[np.int64]
"""Row numbers in a log of steps."""

NO_ROWS: Final[RowNumbers] = np.empty(0, np.int64)

FIRST_ROWS: Final = 16

Number = TypeVar("Number", bound=np.generic)


def _zeros(dtype: type[Number]) -> Callable[[], NDArray[Number]]:
    """Returns what makes a column of a new table."""
    return lambda: np.zeros(FIRST_ROWS, dtype)


flags = _zeros(np.bool_)
integers = _zeros(np.int64)
short_integers = _zeros(np.int32)
sums = _zeros(np.float64)

Record = TypeVar("Record", bound="DataclassInstance")


def pick(record: Record, rows: slice | Array) -> Record:
    """Returns some rows of a record, each of whose fields is a column, a tuple of columns or None."""
    values: dict[str, Array | tuple[Array, ...] | None] = {}
    for name in _names(type(record)):
        column: Array | tuple[Array, ...] | None = getattr(record, name)
        if isinstance(column, tuple):
            values[name] = tuple([part[rows] for part in column])
        else:
            values[name] = None if column is None else column[rows]
    return type(record)(**values)


def pick_where(record: Record, chosen: Mask) -> Record:
    """Returns the chosen rows of a record, often all of them."""
    return record if np.count_nonzero(chosen) == len(chosen) else pick(record, np.flatnonzero(chosen))


def pick_ragged(record: Record, which: NDArray[np.int64], ragged: str, lengths: str) -> Record:
    """Returns some rows of a record whose column `ragged` has as many values for each row as the column `lengths`."""
    sizes: Array = getattr(record, lengths)
    first = np.cumsum(sizes, dtype=np.int64) - sizes
    values = getattr(record, ragged)[sequences.rows_of(first[which], sizes[which])]
    return replace(pick(replace(record, **{ragged: sizes}), which), **{ragged: values})


def concatenate(records: Sequence[Record]) -> Record:
    """Returns the rows of all records, of which there is at least one, and each of whose fields is a column."""
    first = records[0]
    if len(records) == 1:
        return first
    names = _names(type(first))
    return type(first)(**{name: np.concatenate([getattr(one, name) for one in records]) for name in names})


def grow(table: DataclassInstance, rows: int) -> None:
    """Adds rows of zeros to all columns of a table, so that it has at least `rows`, and at least twice as many."""
    for name in _names(type(table)):
        column = getattr(table, name)
        if isinstance(column, np.ndarray):
            more = max(rows, 2 * len(column)) - len(column)
            setattr(table, name, np.concatenate([column, np.zeros((more, *column.shape[1:]), column.dtype)]))


@cache
def _names(kind: type[DataclassInstance]) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind))
