"""Columns of tables, which grow, and of records with a ragged column."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.assembly import sequences
from sparring.pipeline.messages.rows import Record, names_of, pick
from sparring.pipeline.specs import Array

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


def pick_ragged(record: Record, which: NDArray[np.int64], ragged: str, lengths: str) -> Record:
    """Returns some rows of a record whose column `ragged` has as many values for each row as the column `lengths`."""
    sizes: Array = getattr(record, lengths)
    first = np.cumsum(sizes, dtype=np.int64) - sizes
    values = getattr(record, ragged)[sequences.rows_of(first[which], sizes[which])]
    return replace(pick(replace(record, **{ragged: sizes}), which), **{ragged: values})


def grow(table: Record, rows: int) -> None:
    """Adds rows of zeros to all columns of a table, so that it has at least `rows`, and at least twice as many."""
    for name in names_of(type(table)):
        column = getattr(table, name)
        if isinstance(column, np.ndarray):
            more = max(rows, 2 * len(column)) - len(column)
            setattr(table, name, np.concatenate([column, np.zeros((more, *column.shape[1:]), column.dtype)]))
