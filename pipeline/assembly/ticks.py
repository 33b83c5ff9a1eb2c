"""Splits a record of several ticks into the events of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sparring.pipeline.assembly.block import Slots
from sparring.pipeline.assembly.columns import slice_rows
from sparring.pipeline.messages.steps import AgentsEnded, AgentsStarted, BehaviorSteps, OutcomesReported

NO_SLOTS: Final[Slots] = np.empty(0, np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class TickEvents:
    """Holds the events of one tick of one behavior name.

    Attributes:
        part: record that contains the tick.
        lost: slots whose simulator has disconnected.
        ended: agents that ended.
        joined: agents that started.
        reported: agents at their next decision.
        acted: rows of the actions in `part`.
        completed: steps that the tick completes.
    """

    part: BehaviorSteps
    lost: Slots
    ended: AgentsEnded | None
    joined: AgentsStarted | None
    reported: OutcomesReported | None
    acted: slice
    completed: int

    @property
    def has_only_losses(self) -> bool:
        """Returns whether simulators have disconnected and nothing else happened."""
        others = self.ended or self.joined or self.reported
        return self.lost.size > 0 and others is None and self.acted.start == self.acted.stop


def split_ticks(part: BehaviorSteps) -> Iterator[TickEvents]:
    """Yields the ticks of a record one by one."""
    bounds = [[0, 0, 0, 0, 0], *np.cumsum(part.rows, axis=0).tolist()]
    records = (part.lost, part.ended, part.joined, part.reported, part.acted)
    for at, completed in enumerate(part.completed.tolist()):
        lost, ended, joined, reported, acted = (
            slice(start, stop) if record is not None else slice(0, 0)
            for start, stop, record in zip(bounds[at], bounds[at + 1], records, strict=True)
        )
        yield TickEvents(
            part=part,
            lost=NO_SLOTS if part.lost is None else part.lost[lost],
            ended=_rows_of(part.ended, ended),
            joined=_rows_of(part.joined, joined),
            reported=_rows_of(part.reported, reported),
            acted=acted,
            completed=completed,
        )


def _rows_of(record: AgentsEnded | AgentsStarted | OutcomesReported | None, rows: slice) -> Any:
    return None if record is None or rows.start == rows.stop else slice_rows(record, rows)
