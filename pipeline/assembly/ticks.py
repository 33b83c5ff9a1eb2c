"""Splits a record of several ticks into the events of each."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from sparring.pipeline.assembly.columns import Mask, Slots
from sparring.pipeline.messages.rows import pick
from sparring.pipeline.messages.steps import ActionsChosen, AgentsEnded, AgentsStarted, BehaviorSteps, OutcomesReported


class TickEvents(NamedTuple):
    """Holds the events of one tick of one behavior name, or of several ticks that are alike.

    Attributes:
        lost: slots whose simulator has disconnected.
        ended: agents that ended.
        joined: agents that started.
        reported: agents at their next decision.
        acted: actions chosen.
        completed: steps that the ticks complete.
        ticks: number of ticks.
    """

    lost: Slots | None
    ended: AgentsEnded | None
    joined: AgentsStarted | None
    reported: OutcomesReported | None
    acted: ActionsChosen | None
    completed: int
    ticks: int

    @property
    def outcomes(self) -> list[AgentsEnded | OutcomesReported]:
        """Returns the outcomes of steps in their order: a slot in both records has another agent in the second."""
        return [report for report in (self.ended, self.reported) if report is not None]


def split_ticks(part: BehaviorSteps, live: Mask, most: int) -> Iterator[tuple[int, TickEvents]]:
    """Yields numbers and events of the ticks of a record; the other arguments are those of `count_alike`."""
    completed, at = part.completed.tolist(), 0
    bounds: list[list[int]] = []
    while at < len(completed):
        following = at + count_alike(part, at, live, most)
        events: list[Any] = [part.lost, part.ended, part.joined, part.reported, part.acted]
        if following - at < len(completed):
            bounds = bounds or [[0] * 5, *np.cumsum(part.rows, axis=0).tolist()]
            events = list(map(_rows_of, events, bounds[at], bounds[following]))
        yield int(part.ticks[at]), TickEvents._make([*events, sum(completed[at:following]), following - at])
        at = following


def _rows_of(record: Any, start: int, stop: int) -> Any:
    """Returns some rows of a record or column; None for no rows."""
    if record is None or start == stop:
        return None
    return record[start:stop] if isinstance(record, np.ndarray) else pick(record, slice(start, stop))


def count_alike(part: BehaviorSteps, first: int, live: Mask, most: int) -> int:
    """Returns how many ticks from `first` on can be applied together: the same live agents decide and act in each.

    Args:
        part: record of ticks.
        first: number of the first tick in the record.
        live: [slots] whether an agent has the slot.
        most: most ticks that are applied together.
    """
    reported, acted, counts = part.reported, part.acted, part.rows
    if most < 2 or reported is None or acted is None or acted.slots is not None:
        return 1
    n = int(counts[first, 3])
    plain = (counts[first:] == (0, 0, 0, n, n)).all(axis=1)
    most = min(int(np.argmin(plain)) if not plain.all() else len(plain), most)
    if most < 2 or not n:
        return 1
    start = int(counts[:first, 3].sum())
    slots = reported.slots[start : start + most * n].reshape(most, n)
    if np.count_nonzero(live[slots[0]]) < n:
        return 1
    same = (slots == slots[0]).all(axis=1)
    return most if same.all() else int(np.argmin(same))
