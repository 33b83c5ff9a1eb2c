"""One simulator's side of a tick: its agents, and the frame that waits for an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.simulator import BehaviorReport, Decisions, Ends, Step
from sparring.pipeline.specs import BehaviorId, BehaviorSpec
from sparring.pipeline.stepping.agents import Ids, Roster, Slots, SlotTable
from sparring.pipeline.stepping.steps import AgentEpisodes, BehaviorTick
from sparring.pipeline.stepping.validation import check_report, check_unique

NO_SLOTS: Slots = np.empty(0, np.int32)


@dataclass(slots=True)
class SimulatorBehavior:
    """One behavior id of one simulator.

    Attributes:
        grouped: some agent of it has had a group.
    """

    id: BehaviorId
    spec: BehaviorSpec
    roster: Roster = field(default_factory=Roster)
    grouped: bool = False


@dataclass(slots=True)
class Arrival:
    """One report of a Step, checked, with the slots of its agents.

    Attributes:
        behavior: id, as the simulator writes it.
        decisions: rows that want an action, or None for no rows; in lockstep by agent id.
        slots: [n] slot of each decision, -1 where the agent is new; once settled, all have one.
        restore: [n] row of the simulator's own order, or None where that is this order.
        ends: rows whose episode ended, or None for no rows.
        vacated: [m] slot of each end.
        unknown: how many agents are new.
        learning: once settled, how many of the decisions are not those of ghosts.
    """

    behavior: str
    simulator_behavior: SimulatorBehavior
    decisions: Decisions | None
    slots: Slots
    restore: NDArray[np.intp] | None
    ends: Ends | None
    vacated: Slots
    unknown: int
    learning: int = 0


@dataclass(slots=True)
class Frame:
    """A Step that was received and not answered.

    Attributes:
        sequence: of the Step.
        received_at: time.
        arrivals: its reports.
        reported: its outcomes have been taken over.
        backpressured_at: since when only a permit or weights are missing, None where nothing is.
    """

    sequence: int
    received_at: float
    arrivals: list[Arrival]
    reported: bool = False
    backpressured_at: float | None = None

    @property
    def waiting(self) -> list[Arrival]:
        """Reports whose decisions, taken over, wait for actions."""
        return [arrival for arrival in self.arrivals if arrival.decisions is not None] if self.reported else []


@dataclass(slots=True)
class SimulatorConnection:
    """One simulator.

    Attributes:
        number: orders the simulators; the supervisor's number where there is one.
        key: unique: a simulator that comes back has another.
        sorts: decisions are put in the order of their agents (lockstep).
        behaviors: by behavior id text.
        scripts: by behavior name, what it can play agents with itself.
        pending: by behavior name, actions whose outcome has not come; those of ghosts are not among them.
        completed: by behavior name, steps completed over this connection, those of ghosts included.
        frame: the Step that waits for an answer, if one does.
        sequence: of the next Step.
        gone: the link is closed.
        lessons: serial of the lessons that it has been told of.
    """

    number: int
    key: int = 0
    sorts: bool = False
    behaviors: dict[str, SimulatorBehavior] = field(default_factory=dict)
    scripts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    pending: dict[str, int] = field(default_factory=dict)
    completed: dict[str, int] = field(default_factory=dict)
    frame: Frame | None = None
    sequence: int = 0
    gone: bool = False
    lessons: int = 0

    @property
    def alive(self) -> int:
        """Its agents, as of the last frame that was taken over."""
        return sum(len(simulator_behavior.roster.slots) for simulator_behavior in self.behaviors.values())

    def arrive(self, step: Step) -> list[Arrival]:
        """The reports of a Step; one that contradicts the specs or the agents alive is refused.

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
        arrivals: dict[str, Arrival] = {}
        for report in step.reports:
            simulator_behavior = self.behaviors.get(report.behavior)
            if simulator_behavior is None or report.behavior in arrivals:
                raise RemoteProtocolError(
                    "unknown_behavior" if simulator_behavior is None else "duplicate_behavior",
                    got=f"a report of {report.behavior!r}",
                    expected=f"each of {sorted(self.behaviors)} at most once",
                    remedy="name every behavior in Hello or Behaviors first, and report it once in a Step",
                )
            check_report(report, simulator_behavior.spec)
            arrivals[report.behavior] = _arrival(report, simulator_behavior, sort=self.sorts)
        self.sequence += 1
        return list(arrivals.values())


def _arrival(report: BehaviorReport, simulator_behavior: SimulatorBehavior, *, sort: bool) -> Arrival:
    decisions, restore = report.decisions, None
    if decisions is not None and not len(decisions.agents):
        decisions = None
    if decisions is not None and sort:
        decisions, restore = in_order(decisions)
    slots, unknown = (
        (NO_SLOTS, 0) if decisions is None else _look_up(report.behavior, decisions, simulator_behavior.roster)
    )
    ends, vacated = report.ends, NO_SLOTS
    if ends is not None and not len(ends.agents):
        ends = None
    if ends is not None:
        check_unique(report.behavior, "ends", ends.agents)
        vacated = simulator_behavior.roster.find(ends.agents)
        if np.count_nonzero(vacated < 0):
            raise RemoteProtocolError(
                "unknown_agent",
                got=f"the end of agent {ends.agents[vacated < 0][0]} of {report.behavior}",
                expected="the end of an agent that has decided before",
                remedy="report an agent's first decision before its end",
            )
    return Arrival(report.behavior, simulator_behavior, decisions, slots, restore, ends, vacated, unknown)


def _look_up(behavior: str, decisions: Decisions, roster: Roster) -> tuple[Slots, int]:
    """Slot of each decision, and how many agents are new."""
    known = roster.last(decisions.agents)
    if known is not None:
        return known, 0
    check_unique(behavior, "decisions", decisions.agents)
    slots = roster.find(decisions.agents)
    unknown = int(np.count_nonzero(slots < 0))
    if not unknown:
        roster.remember(decisions.agents, slots)
    return slots, unknown


Begin = Callable[[BehaviorId, SlotTable, Slots, Decisions, Any], None]
"""Says which draws agents that begin play under: seat, table, slots, decisions, and which of these are theirs."""


def settle(arrival: Arrival, table: SlotTable, simulator: int, tick: BehaviorTick, begin: Begin) -> tuple[int, int]:
    """Gives the agents of a report their slots, closes the actions it answers, and tells of both.

    Nothing is told of ghosts: nobody learns from them.

    Args:
        arrival: the report.
        table: slots of the behavior name.
        simulator: number of the connection.
        tick: of the behavior name; gets the rows.
        begin: of self-play.

    Returns:
        Steps completed by agents that learn, and by ghosts.
    """
    completed, ghosts, vacated = 0, 0, arrival.vacated
    if arrival.ends is not None:
        completed, ghosts = _complete(table, vacated)
        table.live[vacated] = False
        _tell(tick.ended, arrival.ends, vacated, table)
    if arrival.decisions is not None:
        if arrival.unknown or arrival.ends is not None:
            _begin(arrival, arrival.decisions, table, simulator, tick, begin)
        _regroup(arrival, arrival.decisions, table, simulator, tick)
        done = _complete(table, arrival.slots)
        completed, ghosts = completed + done[0], ghosts + done[1]
        arrival.learning = _tell(tick.reported, arrival.decisions, arrival.slots, table)
    if arrival.ends is not None:
        empty = vacated[~table.live[vacated]]
        if empty.size:
            arrival.simulator_behavior.roster.remove(empty)
            table.give_back(empty)
    tick.completed += completed
    return completed, ghosts


def _complete(table: SlotTable, slots: Slots) -> tuple[int, int]:
    """Closes the actions of `slots`; returns how many there were of agents that learn, and of ghosts."""
    acted = table.acted[slots]
    table.acted[slots] = False
    done = int(np.count_nonzero(acted))
    if not table.ghosted:
        return done, 0
    learning = int(np.count_nonzero(acted & table.learning[slots]))
    return learning, done - learning


def _tell(told: list[tuple[Any, Slots]], rows: Decisions | Ends, slots: Slots, table: SlotTable) -> int:
    """Notes those rows that are not of ghosts; returns how many."""
    if not table.ghosted or table.learning[slots].all():
        told.append((rows, slots))
        return len(slots)
    learning = np.flatnonzero(table.learning[slots])
    if learning.size:
        told.append((_pick(rows, learning), slots[learning]))
    return len(learning)


def _begin(
    arrival: Arrival, decisions: Decisions, table: SlotTable, simulator: int, tick: BehaviorTick, begin: Begin
) -> None:
    """Gives slots to new agents, and new lives to those that ended and decide again."""
    simulator_behavior, ids, slots = arrival.simulator_behavior, decisions.agents, arrival.slots
    if arrival.unknown:
        new = np.flatnonzero(slots < 0)
        slots = slots.copy()
        slots[new] = table.take(len(new))
        simulator_behavior.roster.add(ids[new], slots[new])
        simulator_behavior.roster.remember(ids, slots)
        arrival.slots = slots
    fresh = np.flatnonzero(~table.live[slots])
    if fresh.size:
        joined = slots[fresh]
        groups = 0 if decisions.groups is None else _group_keys(decisions.groups[fresh], simulator)
        table.begin(joined, groups, simulator_behavior.id.team, simulator)
        begin(simulator_behavior.id, table, joined, decisions, fresh)
        _join(tick, table, joined, fresh=True)


def _join(tick: BehaviorTick, table: SlotTable, slots: Slots, *, fresh: bool) -> None:
    """Tells of agents in slots, unless they are ghosts."""
    if table.ghosted:
        slots = slots[table.learning[slots]]
    if slots.size:
        tick.joined.append(AgentEpisodes(table, slots, fresh=fresh))


def _regroup(arrival: Arrival, decisions: Decisions, table: SlotTable, simulator: int, tick: BehaviorTick) -> None:
    """Tells of agents that now name another group."""
    simulator_behavior = arrival.simulator_behavior
    if decisions.groups is None and not simulator_behavior.grouped:
        return
    simulator_behavior.grouped = True
    groups = np.zeros(len(arrival.slots), np.int64) if decisions.groups is None else decisions.groups
    keys = _group_keys(groups, simulator)
    moved = table.groups[arrival.slots] != keys
    if np.count_nonzero(moved):
        table.groups[arrival.slots] = keys
        _join(tick, table, arrival.slots[moved], fresh=False)


def _group_keys(groups: Ids, simulator: int) -> Ids:
    """Group ids of one simulator, made unique over all; 0 stays 0."""
    return np.where(groups == 0, 0, groups + ((simulator + 1) << 32))


def in_order(decisions: Decisions) -> tuple[Decisions, NDArray[np.intp] | None]:
    """The decisions by agent id, and each row's place in the simulator's own order.

    Lockstep needs it: the rounding of a matrix product depends on where a row stands.
    """
    if bool((decisions.agents[1:] > decisions.agents[:-1]).all()):
        return decisions, None
    order = np.argsort(decisions.agents, kind="stable")
    return _pick(decisions, order), np.argsort(order)


def _pick(rows: Any, which: NDArray[np.intp]) -> Any:
    """Some rows of a record of columns."""
    values = {column.name: _rows(getattr(rows, column.name), which) for column in fields(rows)}
    return type(rows)(**values)


def _rows(value: Any, order: NDArray[np.intp]) -> Any:
    if isinstance(value, tuple):
        return tuple(column[order] for column in value)
    return None if value is None else value[order]
