"""Holds numbers over steps and time in bounded memory: rows merge as their number grows, and keep their extremes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Axis = Literal["step", "time"]
AXES: Final[Mapping[Axis, int]] = {"step": 0, "time": 1}

MOST_ROWS: Final = 1024
"""Rows that remain when twice as many are merged in pairs: a chart has fewer pixels than twice this."""
MOST_COLUMNS: Final = 400
"""Further columns are left out: simulators may name any number of statistics."""
_LONGEST_NAME: Final = 200
_FLUSH: Final = 256
"""Lines that become an array at once."""


class Rows(NamedTuple):
    """Rows are numbers over steps and time.

    Attributes:
        axes: [rows, 2] last step of the row, and its time in seconds since the epoch.
        values: [rows, columns, 3] mean, lowest and highest value; NaN where there is none.
    """

    axes: NDArray[np.float64]
    values: NDArray[np.float32]

    def part(self, rows: slice | NDArray[np.bool_]) -> Rows:
        """Returns some of the rows."""
        return Rows(self.axes[rows], self.values[rows])

    def merged(self, size: int) -> Rows:
        """Returns these rows in groups of `size`, of which the last may have fewer."""
        number = len(self.axes)
        if size <= 1 or not number:
            return self
        starts = np.arange(0, number, size)
        is_known = np.isfinite(self.values[..., 0])
        counts = np.add.reduceat(is_known, starts, dtype=np.int32)
        sums = np.add.reduceat(np.where(is_known, self.values[..., 0], 0), starts)
        mean = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
        low = np.fmin.reduceat(self.values[..., 1], starts)
        high = np.fmax.reduceat(self.values[..., 2], starts)
        ends = np.minimum(starts + size, number) - 1
        return Rows(self.axes[ends], np.stack([mean, low, high], -1).astype(np.float32))


def _joined(*parts: Rows) -> Rows:
    """Returns rows one after the other; those of an earlier part may have fewer columns."""
    columns = max(part.values.shape[1] for part in parts)
    wide = [np.pad(part.values, _beside(columns - part.values.shape[1]), constant_values=np.nan) for part in parts]
    return Rows(np.concatenate([part.axes for part in parts]), np.concatenate(wide))


def _beside(columns: int) -> Sequence[tuple[int, int]]:
    return (0, 0), (0, columns), (0, 0)


class Table:
    """A Table holds the lines of one behavior in rows of `width` lines each.

    Attributes:
        columns: number of each column by name.
        width: lines that a row stands for.

    Args:
        most_rows: rows that remain when twice as many are merged.
    """

    def __init__(self, most_rows: int = MOST_ROWS) -> None:
        self.columns: dict[str, int] = {}
        self.width = 1
        self._most_rows = most_rows
        self._rows = self._open = Rows(np.zeros((0, 2)), np.zeros((0, 0, 3), np.float32))
        self._waiting: list[tuple[float, float, Mapping[str, float]]] = []
        self._last_step = -np.inf

    @property
    def size(self) -> int:
        """Returns the memory of the rows in bytes."""
        return self._rows.values.nbytes + self._rows.axes.nbytes

    def add(self, step: float, time_s: float, values: Mapping[str, float]) -> None:
        """Adds a line; earlier ones that reach its step are removed: a crash has rolled them back."""
        if step <= self._last_step:
            self._flush()
            self._rows = self._rows.part(self._rows.axes[:, 0] < step)
            self._open = self._open.part(self._open.axes[:, 0] < step)
        self._last_step = step
        for name in values.keys() - self.columns.keys() if len(self.columns) < MOST_COLUMNS else ():
            if len(name) <= _LONGEST_NAME:
                self.columns[name] = len(self.columns)
        self._waiting.append((step, time_s, values))
        if len(self._waiting) >= _FLUSH:
            self._flush()

    def query(
        self, names: Iterable[str], axis: Axis, begin: float = -np.inf, end: float = np.inf, points: int = MOST_ROWS
    ) -> Rows:
        """Returns some columns between two values of an axis, and a row beyond each, in about `points` rows at most."""
        self._flush()
        at = [self.columns[name] for name in names]
        whole = _joined(self._rows, self._open)
        rows = Rows(whole.axes, whole.values[:, at])
        places = rows.axes[:, AXES[axis]]
        first = max(0, int(np.searchsorted(places, begin)) - 1)
        found = rows.part(slice(first, int(np.searchsorted(places, end, "right")) + 1))
        return found.merged(-(-len(found.axes) // max(1, points)))

    def _flush(self) -> None:
        """Takes over the lines that wait, in whole groups of `width`; the others stay as they are."""
        if not self._waiting:
            return
        raw = [[values.get(name, np.nan) for name in self.columns] for _, _, values in self._waiting]
        values = np.repeat(np.array(raw, np.float32).reshape(len(raw), len(self.columns), 1), 3, 2)
        new = _joined(self._open, Rows(np.array([line[:2] for line in self._waiting]), values))
        self._waiting.clear()
        whole = len(new.axes) // self.width * self.width
        self._rows = _joined(self._rows, new.part(slice(whole)).merged(self.width))
        self._open = Rows(new.axes[whole:].copy(), new.values[whole:].copy())  # a view would hold all that was read
        while len(self._rows.axes) >= 2 * self._most_rows:
            even = len(self._rows.axes) // 2 * 2
            self._rows = _joined(self._rows.part(slice(even)).merged(2), self._rows.part(slice(even, None)))
            self.width *= 2
