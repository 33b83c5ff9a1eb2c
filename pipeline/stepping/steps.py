"""Ticks collect steps for assembly as they arrive, and join them into columns when they are taken.

The outcomes in a simulator's report complete steps; new agents get slots, and ended ones give theirs back.

Joining is deferred because simulators wait for their actions, while no service waits for a single step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.messages.rows import concatenate, join_columns, names_of, pick_where
from sparring.pipeline.messages.simulator import Decisions, Ends
from sparring.pipeline.messages.steps import ActionsChosen, AgentsEnded, AgentsStarted, BehaviorSteps, OutcomesReported
from sparring.pipeline.stepping.agents import Behavior, Ids, Slots, SlotTable
from sparring.pipeline.stepping.connections import Arrival

_RECORDS: Final = ("ended", "joined", "reported", "acted")

Reported = TypeVar("Reported", AgentsEnded, OutcomesReported)

BeginEpisodes = Callable[[Arrival, NDArray[np.intp]], None]
"""Prepares the episodes of new agents, which are these rows of the decisions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledActions:
    """SampledActions are the actions of `n` agents.

    Attributes:
        continuous: [n, continuous] raw sample.
        executed: [n, continuous] actions that the simulator gets, in [-1, 1].
        discrete: [n, branches] chosen index.
        log_probs: [n] of the joint action.
    """

    continuous: NDArray[np.float32]
    executed: NDArray[np.float32]
    discrete: NDArray[np.int32]
    log_probs: NDArray[np.float32]


@dataclass(slots=True)
class BehaviorTick:
    """A BehaviorTick collects one tick of one behavior name: its records, by simulator and behavior id.

    Attributes:
        number: of the tick.
        completed: steps completed by `ended` and `reported`.
        acted: at most one record, with slots of its own.
    """

    number: int
    completed: int = 0
    lost: list[Slots] = field(default_factory=list)
    ended: list[AgentsEnded] = field(default_factory=list)
    joined: list[AgentsStarted] = field(default_factory=list)
    reported: list[OutcomesReported] = field(default_factory=list)
    acted: list[ActionsChosen] = field(default_factory=list)

    def join(self, table: SlotTable, slots: Slots, *, fresh: bool) -> None:
        """Lists the learning agents among `slots` with copies of their rows; `fresh`: their episodes start now."""
        slots = slots[table.learning[slots]]
        if not slots.size:
            return
        started = AgentsStarted(
            slots=slots,
            fresh=np.full(len(slots), fresh),
            matchups=table.matchups[slots] if table.has_ghosts else None,
            lessons=table.lessons[slots] if table.has_curricula else None,
            **{name: getattr(table, name)[slots] for name in ("agents", "groups", "teams", "simulators")},
        )
        self.joined.append(started)

    def join_all(self, table: SlotTable) -> None:
        """Lists all learning live agents of `table`, not only those that are new."""
        live = np.flatnonzero(table.live).astype(np.int32)
        self.joined = [started for started in self.joined if started.fresh.all()]
        listed = [started.slots for started in self.joined]
        self.join(table, live[~np.isin(live, np.concatenate(listed))] if listed else live, fresh=False)

    def rows(self) -> list[int]:
        """Returns the numbers of rows lost, ended, joined, reported and acted."""
        listed = [sum([len(one.slots) for one in records]) for records in (self.ended, self.joined, self.reported)]
        return [sum(map(len, self.lost)), *listed, len(self.acted[0].log_probs) if self.acted else 0]


def apply_report(arrival: Arrival, simulator: int, tick: BehaviorTick, begin: BeginEpisodes) -> tuple[int, int]:
    """Assigns slots to the agents of a report, completes the actions that it answers, and adds the rows to the tick.

    Rows of ghosts are left out: no learner uses them.

    Args:
        arrival: the report.
        simulator: number of the connection.
        tick: of the behavior name; gets the rows.
        begin: called before the episodes of new agents are added to the tick.

    Returns:
        Steps completed by learning agents, and by ghosts.
    """
    completed, ghosts, table, vacated = 0, 0, arrival.table, arrival.vacated
    if (ends := arrival.ends) is not None:
        completed, ghosts = _complete(table, vacated)
        table.live[vacated] = False
        _add_learning(tick.ended, AgentsEnded, ends, vacated, table)
    if (decisions := arrival.decisions) is not None:
        if arrival.unknown or ends is not None:
            _begin(arrival, decisions, simulator, tick, begin)
        _update_groups(arrival, decisions, simulator, tick)
        done = _complete(table, arrival.slots)
        completed, ghosts = completed + done[0], ghosts + done[1]
        arrival.learning = _add_learning(tick.reported, OutcomesReported, decisions, arrival.slots, table)
    if ends is not None:
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


def _add_learning(
    records: list[Reported], kind: type[Reported], rows: Decisions | Ends, slots: Slots, table: SlotTable
) -> int:
    """Adds a record of the rows of learning agents, whose columns have the same names there; returns their number."""
    record = kind(slots=slots, **{name: getattr(rows, name) for name in names_of(kind) if name != "slots"})
    if table.has_ghosts:
        record = pick_where(record, table.learning[slots])
    if record.slots.size:
        records.append(record)
    return len(record.slots)


def _begin(arrival: Arrival, decisions: Decisions, simulator: int, tick: BehaviorTick, begin: BeginEpisodes) -> None:
    """Gives slots to new agents, and begins new episodes for those that ended and decide again."""
    simulator_behavior, table, slots = arrival.simulator_behavior, arrival.table, arrival.slots
    if arrival.unknown:
        new = np.flatnonzero(slots < 0)
        slots = slots.copy()
        slots[new] = table.take(len(new))
        simulator_behavior.roster.add(decisions.agents[new], slots[new])
        simulator_behavior.roster.remember(decisions.agents, slots)
        arrival.slots = slots
    fresh = np.flatnonzero(~table.live[slots])
    if fresh.size:
        groups = 0 if decisions.groups is None else _group_keys(decisions.groups[fresh], simulator)
        table.begin(slots[fresh], groups, simulator_behavior.id.team, simulator)
        begin(arrival, fresh)
        tick.join(table, slots[fresh], fresh=True)


def _update_groups(arrival: Arrival, decisions: Decisions, simulator: int, tick: BehaviorTick) -> None:
    """Updates agents whose group has changed, and lists them in the tick."""
    simulator_behavior, table, slots = arrival.simulator_behavior, arrival.table, arrival.slots
    if decisions.groups is None and not simulator_behavior.has_groups:
        return
    simulator_behavior.has_groups = True
    groups = np.zeros(len(slots), np.int64) if decisions.groups is None else decisions.groups
    keys = _group_keys(groups, simulator)
    moved = table.groups[slots] != keys
    if np.count_nonzero(moved):
        table.groups[slots] = keys
        tick.join(table, slots[moved], fresh=False)


def _group_keys(groups: Ids, simulator: int) -> Ids:
    """Makes the group ids of one simulator unique over all; 0 stays 0."""
    return np.where(groups == 0, 0, groups + ((simulator + 1) << 32))


class PendingSteps:
    """PendingSteps collect the ticks of all behaviors since the last `take`."""

    def __init__(self) -> None:
        self._number = 0
        self._present: dict[str, BehaviorTick] = {}
        self._produced_before: dict[str, int] = {}
        self._ticks: dict[str, list[BehaviorTick]] = {}

    @property
    def is_empty(self) -> bool:
        """Returns whether there are none."""
        return not self._ticks

    def begin_tick(self) -> None:
        """Begins the next tick of all behaviors."""
        self._number += 1
        self._present = {}

    def present(self, behavior: Behavior) -> BehaviorTick:
        """Returns the present tick of a behavior, to be filled."""
        if behavior.name not in self._present:
            self._present[behavior.name] = self._add(behavior)
        return self._present[behavior.name]

    def add_lost(self, behavior: Behavior, slots: Slots) -> None:
        """Adds agents that are lost after all else in the present tick."""
        self._add(behavior).lost.append(slots)

    def take(self) -> tuple[BehaviorSteps, ...]:
        """Returns all steps as records, in order of behavior names, and forgets them."""
        ticks, self._ticks, self._present = self._ticks, {}, {}
        return tuple(_join_ticks(name, ticks[name], self._produced_before[name]) for name in sorted(ticks))

    def _add(self, behavior: Behavior) -> BehaviorTick:
        if behavior.name not in self._ticks:
            self._ticks[behavior.name] = []
            self._produced_before[behavior.name] = behavior.produced
        tick = BehaviorTick(self._number)
        self._ticks[behavior.name].append(tick)
        return tick


def _join_ticks(name: str, ticks: list[BehaviorTick], produced_before: int) -> BehaviorSteps:
    lost = [slots for tick in ticks for slots in tick.lost]
    records = {kind: [one for tick in ticks for one in getattr(tick, kind)] for kind in _RECORDS}
    joined = {kind: concatenate(found) for kind, found in records.items() if found}
    if "acted" in joined and all(map(_as_reported, ticks)):
        joined["acted"] = replace(joined["acted"], slots=None)
    return BehaviorSteps(
        behavior=name,
        produced_before=produced_before,
        ticks=np.array([tick.number for tick in ticks], np.int64),
        completed=np.array([tick.completed for tick in ticks], np.int64),
        rows=np.array([tick.rows() for tick in ticks], np.int32),
        lost=np.concatenate(lost) if lost else None,
        **joined,
    )


def _as_reported(tick: BehaviorTick) -> bool:
    """Returns whether the rows acted for are the rows reported: then they need no slots of their own."""
    if not tick.acted or not tick.reported:
        return not tick.acted and not tick.reported
    acted, reported = tick.acted[0].slots, join_columns([one.slots for one in tick.reported])
    return acted is reported or (acted is not None and np.array_equal(acted, reported))
