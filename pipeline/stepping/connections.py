"""One simulator's side of a wake-up: its agents, and the frame that waits for an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import RemoteProtocolError
from pipeline.messages.simulator import BehaviorReport, Decisions, Ends, Step
from pipeline.specs import BehaviorId, BehaviorSpec
from pipeline.stepping.agents import Ids, Roster, Slots, SlotTable
from pipeline.stepping.door import check_report, check_unique


@dataclass(slots=True)
class Waiting:
    """Decisions of one behavior id that wait for actions.

    Attributes:
        behavior: id, as the simulator writes it.
        name: behavior name.
        slots: [n] slot of each row.
        decisions: the rows.
        restore: [n] row of the simulator's own order, or None where that is this order.
    """

    behavior: str
    name: str
    slots: Slots
    decisions: Decisions
    restore: NDArray[np.intp] | None


@dataclass(slots=True)
class Frame:
    """A Step that was received and not answered.

    Attributes:
        step: the record.
        received_at: time.
        newcomers: by behavior name, agents that have no slot yet.
        reported: its outcomes have been taken over.
        waiting: its decisions.
        withheld_at: since when only a permit or weights are missing, None where nothing is.
    """

    step: Step
    received_at: float
    newcomers: dict[str, int] = field(default_factory=dict)
    reported: bool = False
    waiting: list[Waiting] = field(default_factory=list)
    withheld_at: float | None = None


@dataclass(slots=True)
class Seat:
    """One behavior id of one simulator."""

    id: BehaviorId
    spec: BehaviorSpec
    roster: Roster = field(default_factory=Roster)


@dataclass(slots=True)
class Connection:
    """One simulator.

    Attributes:
        number: orders the simulators; the supervisor's number where there is one.
        seats: by behavior id text.
        pending: by behavior name, actions whose outcome has not come.
        completed: by behavior name, steps completed over this connection.
        frame: the Step that waits for an answer, if one does.
        sequence: of the next Step.
        gone: the link is closed.
    """

    number: int
    seats: dict[str, Seat] = field(default_factory=dict)
    pending: dict[str, int] = field(default_factory=dict)
    completed: dict[str, int] = field(default_factory=dict)
    frame: Frame | None = None
    sequence: int = 0
    gone: bool = False

    def check(self, step: Step) -> None:
        """Refuses a Step that contradicts the specs or the agents alive.

        Raises:
            RemoteProtocolError: something is wrong.
        """
        if step.sequence != self.sequence:
            raise RemoteProtocolError(
                "sequence",
                got=f"Step {step.sequence}",
                expected=f"Step {self.sequence}",
                remedy="count the Steps of a connection from 0",
            )
        seen: set[str] = set()
        for report in step.reports:
            seat = self.seats.get(report.behavior)
            if seat is None or report.behavior in seen:
                raise RemoteProtocolError(
                    "unknown_behavior" if seat is None else "duplicate_behavior",
                    got=f"a report of {report.behavior!r}",
                    expected=f"each of {sorted(self.seats)} at most once",
                    remedy="name every behavior in Hello or Behaviors first, and report it once in a Step",
                )
            seen.add(report.behavior)
            check_report(report, seat.spec)
            _check_agents(report, seat.roster)
        self.sequence += 1

    def newcomers(self, step: Step) -> dict[str, int]:
        """How many agents of a checked Step are not here yet, by behavior name."""
        new: dict[str, int] = {}
        for report in step.reports:
            seat = self.seats[report.behavior]
            if report.decisions is not None and not seat.roster.same_as_last(report.decisions.agents):
                unknown = int(np.count_nonzero(seat.roster.find(report.decisions.agents) < 0))
                new[seat.id.name] = new.get(seat.id.name, 0) + unknown
        return new


def _check_agents(report: BehaviorReport, roster: Roster) -> None:
    if report.decisions is not None and not roster.same_as_last(report.decisions.agents):
        check_unique(report.behavior, "decisions", report.decisions.agents)
    if report.ends is not None:
        check_unique(report.behavior, "ends", report.ends.agents)
        unknown = roster.find(report.ends.agents) < 0
        if unknown.any():
            raise RemoteProtocolError(
                "unknown_agent",
                got=f"the end of agent {report.ends.agents[unknown][0]} of {report.behavior}",
                expected="the end of an agent that has decided before",
                remedy="report an agent's first decision before its end",
            )


@dataclass(slots=True)
class Outcomes:
    """What one frame reports for one behavior id, in slots.

    Attributes:
        ended: rows of Ends with their slots and whether they complete a step, or None.
        joined: slots given a new life.
        moved: slots whose group changed.
        reported: rows of Decisions with their slots and whether they complete a step, or None.
    """

    ended: tuple[Ends, Slots, NDArray[np.bool_]] | None = None
    joined: Slots | None = None
    moved: Slots | None = None
    reported: tuple[Decisions, Slots, NDArray[np.bool_]] | None = None

    @property
    def completed(self) -> int:
        """Steps completed."""
        done = 0 if self.ended is None else int(np.count_nonzero(self.ended[2]))
        return done + (0 if self.reported is None else int(np.count_nonzero(self.reported[2])))


def settle(seat: Seat, report: BehaviorReport, table: SlotTable, simulator: int) -> Outcomes:
    """Gives the rows of a report their slots and closes the actions they answer.

    Args:
        seat: of the behavior id.
        report: checked.
        table: slots of the behavior name.
        simulator: connection number.
    """
    out = Outcomes()
    vacant: Slots = np.empty(0, np.int32)
    if report.ends is not None and len(report.ends.agents):
        vacant = seat.roster.find(report.ends.agents)
        out.ended = (report.ends, vacant, table.acted[vacant])
        table.live[vacant] = False
        table.acted[vacant] = False
    if report.decisions is not None and len(report.decisions.agents):
        slots, joined = _slots_of(seat, report.decisions, table, simulator)
        out.joined = joined
        out.reported = (report.decisions, slots, table.acted[slots])
        out.moved = _regroup(report.decisions, slots, table, simulator)
        table.acted[slots] = False
    empty = vacant[~table.live[vacant]]
    if empty.size:
        seat.roster.remove(empty)
        table.give_back(empty)
    return out


def _slots_of(seat: Seat, decisions: Decisions, table: SlotTable, simulator: int) -> tuple[Slots, Slots | None]:
    """Slot of each decision, and which of them begin a life."""
    roster, ids = seat.roster, decisions.agents
    if roster.same_as_last(ids):
        slots = roster.last_slots()
    else:
        slots = roster.find(ids)
        new = np.flatnonzero(slots < 0)
        if new.size:
            slots = slots.copy()
            slots[new] = table.take(len(new))
            roster.add(ids[new], slots[new])
        roster.remember(ids, slots)
    fresh = ~table.live[slots]
    if not fresh.any():
        return slots, None
    joined = slots[fresh]
    table.begin(joined, _group_keys(decisions.groups[fresh], simulator), seat.id.team, simulator)
    return slots, joined


def _regroup(decisions: Decisions, slots: Slots, table: SlotTable, simulator: int) -> Slots | None:
    """Slots whose agent now names another group."""
    keys = _group_keys(decisions.groups, simulator)
    moved = table.groups[slots] != keys
    if not moved.any():
        return None
    table.groups[slots] = keys
    changed: Slots = slots[moved]
    return changed


def _group_keys(groups: Ids, simulator: int) -> Ids:
    """Group ids of one simulator, made unique over all; 0 stays 0."""
    return np.where(groups == 0, 0, groups + ((simulator + 1) << 32))


def in_order(report: BehaviorReport) -> tuple[BehaviorReport, NDArray[np.intp] | None]:
    """The report with its decisions by agent id, and each row's place in the simulator's own order.

    Lockstep needs it: the rounding of a matrix product depends on where a row stands.
    """
    decisions = report.decisions
    if decisions is None or bool((decisions.agents[1:] > decisions.agents[:-1]).all()):
        return report, None
    order = np.argsort(decisions.agents, kind="stable")
    names = [column.name for column in fields(decisions)]
    rows = {name: _rows(getattr(decisions, name), order) for name in names}
    return BehaviorReport(behavior=report.behavior, decisions=Decisions(**rows), ends=report.ends), np.argsort(order)


def _rows(value: Any, order: NDArray[np.intp]) -> Any:
    if isinstance(value, tuple):
        return tuple(column[order] for column in value)
    return None if value is None else value[order]


def join_columns(columns: Sequence[Any]) -> Any:
    """One column after the other; no copy where there is one."""
    return columns[0] if len(columns) == 1 else np.concatenate(columns)
