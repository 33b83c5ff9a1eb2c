"""Logs the decisions of open and unsent segments in columns: a row per decision, in the order of arrival.

A row is written in three parts: the agent's observations, its action, and the outcome. Segments are lists
of row numbers, so a step of all agents is written as it arrives and copied once more when it is sent. When
the log is full, rows that no segment needs are dropped, and the others move to its front.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.assembly.columns import Mask, Places, RowNumbers
from sparring.pipeline.messages.steps import ActionsChosen
from sparring.pipeline.specs import Array

_FIRST_ROWS: Final = 256
_ACTION: Final = ("continuous", "discrete", "log_probs", "versions", "carried")


@dataclass(slots=True)
class MemberSegments:
    """Holds segments of members of one behavior name, one after the other; other columns are those of `Segments`.

    Attributes:
        rows: [r] rows of the steps in the log.
        following: [s] row of the decision or end after each segment.
        places: [s] group of each: its place while its segment is open, then its number among finished ones.
        next_times: [s] group timestep of the row `following`.
        until: [s] group timestep from which the member is absent.
    """

    rows: RowNumbers
    lengths: NDArray[np.int32]
    following: RowNumbers
    places: Places
    next_times: NDArray[np.int32]
    until: NDArray[np.int32]
    terminated: Mask
    interrupted: Mask
    group_ended: Mask
    agents: NDArray[np.int64]
    groups: NDArray[np.int64]
    teams: NDArray[np.int32]
    simulators: NDArray[np.int32]
    matchups: NDArray[np.int64]


class StepLog:
    """Holds columns of `capacity` rows, of which the first `size` are in use.

    Attributes:
        size: rows in use.
        capacity: rows allocated.
        observations: one [rows, *shape] per observation; empty before the first decision.
        columns: [rows, ...] by their names in `Segments`, and `times`, the group timestep of the decision; `masks` and
            `carried` only once there were any.
    """

    def __init__(self) -> None:
        self.size = 0
        self.capacity = _FIRST_ROWS
        self.observations: list[Array] = []
        self.columns: dict[str, Array] = {
            "continuous": np.zeros((_FIRST_ROWS, 0), np.float32),
            "discrete": np.zeros((_FIRST_ROWS, 0), np.int32),
            "log_probs": np.zeros(_FIRST_ROWS, np.float32),
            "versions": np.zeros(_FIRST_ROWS, np.int64),
            "rewards": np.zeros(_FIRST_ROWS, np.float32),
            "group_rewards": np.zeros(_FIRST_ROWS, np.float32),
            "times": np.zeros(_FIRST_ROWS, np.int32),
        }

    def add(self, observations: tuple[Array, ...], masks: Mask | None = None) -> RowNumbers:
        """Writes the observations and masks of agents, for which enough rows must be free.

        Returns:
            Their consecutive rows.
        """
        if not self.observations:
            self.observations = [np.zeros((self.capacity, *c.shape[1:]), c.dtype) for c in observations]
        first = self.size
        self.size += len(observations[0])
        for held, column in zip(self.observations, observations, strict=True):
            held[first : self.size] = column
        if masks is not None:
            self._column("masks", masks)[first : self.size] = masks
        return np.arange(first, self.size)

    def act(self, rows: RowNumbers | slice, acted: ActionsChosen, part: RowNumbers | slice) -> None:
        """Writes the actions of agents: the rows `part` of `acted` in `rows` of the log."""
        for name in _ACTION:
            column: Array | None = getattr(acted, name)
            if column is not None:
                self._column(name, column)[rows] = column[part]

    def _column(self, name: str, like: Array) -> Array:
        """Returns a column, which gets its width with the first values."""
        held = self.columns.get(name)
        if held is None or not held.shape[-1]:
            held = self.columns[name] = np.zeros((self.capacity, *like.shape[1:]), like.dtype)
        return held

    def keep(self, needed: Mask, more: int) -> RowNumbers:
        """Drops all rows but those needed, and grows if that frees too few.

        Args:
            needed: [size] whether each row is kept.
            more: number of rows that must fit afterwards.

        Returns:
            [size] new number of each row that is kept.
        """
        kept = np.flatnonzero(needed)
        while self.capacity < 2 * (len(kept) + more):  # at least half is free, so that rows are not moved again soon
            self.capacity *= 2

        def moved(column: Array) -> Array:
            new = np.zeros((self.capacity, *column.shape[1:]), column.dtype)
            new[: len(kept)] = column[kept]
            return new

        self.observations = [moved(column) for column in self.observations]
        self.columns = {name: moved(column) for name, column in self.columns.items()}
        self.size = len(kept)
        numbers: RowNumbers = np.cumsum(needed) - 1
        return numbers
