"""A connection holds one simulator's agents and the frame that waits for an answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
    """A SimulatorBehavior is one behavior id of one simulator.

    Attributes:
        has_groups: an agent of this id has had a group.
    """

    id: BehaviorId
    spec: BehaviorSpec
    roster: Roster = field(default_factory=Roster)
    has_groups: bool = False


@dataclass(slots=True)
class Arrival:
    """An Arrival is one validated report of a Step, with the slots of its agents.

    Attributes:
        behavior: id, as the simulator writes it.
        decisions: rows that need an action; None for no rows; in lockstep ordered by agent id.
        slots: [n] slot of each decision; -1 where the agent is new, until the report is applied.
        restore: [n] row in the simulator's own order; None where the order is the same.
        ends: rows whose episode ended; None for no rows.
        vacated: [m] slot of each end.
        unknown: number of new agents.
        learning: number of decisions of learning agents, once the report is applied.
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
    """A Frame is a Step that was received and not answered yet.

    Attributes:
        sequence: of the Step.
        received_at: time in seconds.
        arrivals: its reports.
        reported: its outcomes have been applied.
        backpressured_at: time since which it waits for a step allowance or weights; None before its outcomes apply.
    """

    sequence: int
    received_at: float
    arrivals: list[Arrival]
    reported: bool = False
    backpressured_at: float | None = None

    @property
    def waiting(self) -> list[Arrival]:
        """Returns the applied reports whose decisions wait for actions."""
        return [arrival for arrival in self.arrivals if arrival.decisions is not None] if self.reported else []


@dataclass(slots=True)
class SimulatorConnection:
    """A SimulatorConnection tracks one connected simulator.

    Attributes:
        number: orders the simulators; the supervisor's number where there is one.
        key: unique; a simulator that reconnects gets another.
        sorts: decisions are sorted by agent id (lockstep).
        behaviors: by behavior id text.
        scripts: by behavior name, scripts with which it can play agents itself.
        pending: by behavior name, actions of learning agents whose outcome has not arrived.
        completed: by behavior name, steps completed over this connection, those of ghosts included.
        frame: the Step that waits for an answer, if any.
        sequence: of the next Step.
        is_closed: the link is closed.
        lessons: serial of the lessons that it has received.
        process: name of its process; "" where it has none.
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
    is_closed: bool = False
    lessons: int = 0
    process: str = ""

    @property
    def alive(self) -> int:
        """Returns the number of its live agents, as of the last frame applied."""
        return sum(len(simulator_behavior.roster.slots) for simulator_behavior in self.behaviors.values())

    def arrive(self, step: Step) -> list[Arrival]:
        """Validates a Step and returns its reports.

        Raises:
            RemoteProtocolError: the Step contradicts the specs or the live agents.
        """
        check_step(step, self.sequence, self.behaviors)
        arrivals = []
        for report in step.reports:
            simulator_behavior = self.behaviors[report.behavior]
            check_report(report, simulator_behavior.spec)
            arrivals.append(_arrival(report, simulator_behavior, sort=self.sorts))
        self.sequence += 1
        return arrivals


def check_step(step: Step, sequence: int, known: Collection[str]) -> None:
    """Checks the number of a Step, and that it reports known behavior ids, each at most once.

    Raises:
        RemoteProtocolError: the Step has another number, or a wrong behavior id.
    """
    if step.sequence != sequence:
        raise RemoteProtocolError(
            "sequence",
            got=f"Step {step.sequence}",
            expected=f"Step {sequence}",
            remedy="count the Steps of a connection from 0",
        )
    seen: set[str] = set()
    for report in step.reports:
        if report.behavior not in known or report.behavior in seen:
            raise RemoteProtocolError(
                "duplicate_behavior" if report.behavior in seen else "unknown_behavior",
                got=f"a report of {report.behavior!r}",
                expected=f"each of {sorted(known)} at most once",
                remedy="name every behavior in Hello or Behaviors first, and report it once in a Step",
            )
        seen.add(report.behavior)


def _arrival(report: BehaviorReport, simulator_behavior: SimulatorBehavior, *, sort: bool) -> Arrival:
    decisions, restore = report.decisions, None
    if decisions is not None and not len(decisions.agents):
        decisions = None
    if decisions is not None and sort:
        decisions, restore = sort_by_agent(decisions)
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
    """Returns the slot of each decision, and the number of new agents."""
    known = roster.last(decisions.agents)
    if known is not None:
        return known, 0
    check_unique(behavior, "decisions", decisions.agents)
    slots = roster.find(decisions.agents)
    unknown = int(np.count_nonzero(slots < 0))
    if not unknown:
        roster.remember(decisions.agents, slots)
    return slots, unknown


BeginEpisodes = Callable[[BehaviorId, SlotTable, Slots, Decisions, Any], None]
"""Assigns matchups to new agents: behavior id, table, their slots, decisions, and their rows in these."""


def apply_report(
    arrival: Arrival, table: SlotTable, simulator: int, tick: BehaviorTick, begin: BeginEpisodes
) -> tuple[int, int]:
    """Assigns slots to the agents of a report, completes the actions that it answers, and adds the rows to the tick.

    Rows of ghosts are left out: no learner uses them.

    Args:
        arrival: the report.
        table: slots of the behavior name.
        simulator: number of the connection.
        tick: of the behavior name; gets the rows.
        begin: assigns matchups to new agents.

    Returns:
        Steps completed by learning agents, and by ghosts.
    """
    completed, ghosts, vacated = 0, 0, arrival.vacated
    if arrival.ends is not None:
        completed, ghosts = _complete(table, vacated)
        table.live[vacated] = False
        _add_rows(tick.ended, arrival.ends, vacated, table)
    if arrival.decisions is not None:
        if arrival.unknown or arrival.ends is not None:
            _begin(arrival, arrival.decisions, table, simulator, tick, begin)
        _update_groups(arrival, arrival.decisions, table, simulator, tick)
        done = _complete(table, arrival.slots)
        completed, ghosts = completed + done[0], ghosts + done[1]
        arrival.learning = _add_rows(tick.reported, arrival.decisions, arrival.slots, table)
    if arrival.ends is not None:
        empty = vacated[~table.live[vacated]]
        if empty.size:
            arrival.simulator_behavior.roster.remove(empty)
            table.give_back(empty)
    tick.completed += completed
    return completed, ghosts


def _complete(table: SlotTable, slots: Slots) -> tuple[int, int]:
    """Completes the actions of `slots`; returns their numbers for learning agents and for ghosts."""
    acted = table.acted[slots]
    table.acted[slots] = False
    done = int(np.count_nonzero(acted))
    if not table.has_ghosts:
        return done, 0
    learning = int(np.count_nonzero(acted & table.learning[slots]))
    return learning, done - learning


def _add_rows(collected: list[tuple[Any, Slots]], rows: Decisions | Ends, slots: Slots, table: SlotTable) -> int:
    """Adds the rows of learning agents; returns their number."""
    if not table.has_ghosts or table.learning[slots].all():
        collected.append((rows, slots))
        return len(slots)
    learning = np.flatnonzero(table.learning[slots])
    if learning.size:
        collected.append((_pick(rows, learning), slots[learning]))
    return len(learning)


def _begin(
    arrival: Arrival, decisions: Decisions, table: SlotTable, simulator: int, tick: BehaviorTick, begin: BeginEpisodes
) -> None:
    """Gives slots to new agents, and begins new episodes for those that ended and decide again."""
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
    """Adds learning agents to the tick."""
    if table.has_ghosts:
        slots = slots[table.learning[slots]]
    if slots.size:
        tick.joined.append(AgentEpisodes(table, slots, fresh=fresh))


def _update_groups(
    arrival: Arrival, decisions: Decisions, table: SlotTable, simulator: int, tick: BehaviorTick
) -> None:
    """Updates agents whose group has changed, and adds them to the tick."""
    simulator_behavior = arrival.simulator_behavior
    if decisions.groups is None and not simulator_behavior.has_groups:
        return
    simulator_behavior.has_groups = True
    groups = np.zeros(len(arrival.slots), np.int64) if decisions.groups is None else decisions.groups
    keys = _group_keys(groups, simulator)
    moved = table.groups[arrival.slots] != keys
    if np.count_nonzero(moved):
        table.groups[arrival.slots] = keys
        _join(tick, table, arrival.slots[moved], fresh=False)


def _group_keys(groups: Ids, simulator: int) -> Ids:
    """Makes the group ids of one simulator unique over all; 0 stays 0."""
    return np.where(groups == 0, 0, groups + ((simulator + 1) << 32))


def sort_by_agent(decisions: Decisions) -> tuple[Decisions, NDArray[np.intp] | None]:
    """Sorts decisions by agent id; returns each row's place in the simulator's own order, too.

    Lockstep needs it: the rounding of a matrix product depends on the position of a row.
    """
    if bool((decisions.agents[1:] > decisions.agents[:-1]).all()):
        return decisions, None
    order = np.argsort(decisions.agents, kind="stable")
    return _pick(decisions, order), np.argsort(order)


def _pick(rows: Any, which: NDArray[np.intp]) -> Any:
    """Selects rows of a record of columns."""
    values = {column.name: _rows(getattr(rows, column.name), which) for column in fields(rows)}
    return type(rows)(**values)


def _rows(value: Any, order: NDArray[np.intp]) -> Any:
    if isinstance(value, tuple):
        return tuple(column[order] for column in value)
    return None if value is None else value[order]
