"""Columns of equal length: in records, whose rows are picked and joined, and in tables, which grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

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

NO_SLOTS: Final[Slots] = np.empty(0, np.int32)
NO_PLACES: Final[Places] = np.empty(0, np.int64)
NO_ROWS: Final[RowNumbers] = np.empty(0, np.int64)

FIRST_ROWS: Final = 16

Number = TypeVar("Number", bound=np.generic)
Record = TypeVar("Record", bound="DataclassInstance")


def joined(columns: Sequence[NDArray[Number]], dtype: type[Number]) -> NDArray[Number]:
    """Returns the columns concatenated, an empty one if there are none."""
    if len(columns) == 1:
        return columns[0]
    return np.concatenate(columns) if columns else np.empty(0, dtype)


def pick(record: Record, rows: slice | Array) -> Record:
    """Returns some rows of a record, each of whose fields is a column, a tuple of columns or None."""
    values: dict[str, Array | tuple[Array, ...] | None] = {}
    for one in fields(record):
        column: Array | tuple[Array, ...] | None = getattr(record, one.name)
        if column is None:
            values[one.name] = None
        else:
            values[one.name] = tuple(part[rows] for part in column) if isinstance(column, tuple) else column[rows]
    return type(record)(**values)


def flags() -> Mask:
    """Returns a column of a new table."""
    return np.zeros(FIRST_ROWS, np.bool_)


def integers() -> NDArray[np.int64]:
    """Returns a column of a new table."""
    return np.zeros(FIRST_ROWS, np.int64)


def short_integers() -> NDArray[np.int32]:
    """Returns a column of a new table."""
    return np.zeros(FIRST_ROWS, np.int32)


def sums() -> NDArray[np.float64]:
    """Returns a column of a new table."""
    return np.zeros(FIRST_ROWS, np.float64)


def grow(table: DataclassInstance, rows: int) -> None:
    """Adds rows of zeros to all columns of a table, so that it has at least `rows`, and at least twice as many."""
    for one in fields(table):
        column = getattr(table, one.name)
        if isinstance(column, np.ndarray):
            more = max(rows, 2 * len(column)) - len(column)
            setattr(table, one.name, np.concatenate([column, np.zeros((more, *column.shape[1:]), column.dtype)]))
