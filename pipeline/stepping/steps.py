"""Ticks collect steps for assembly as they arrive, and join them into columns when they are taken.

Joining is deferred because simulators wait for their actions, while no service waits for a single step.
"""

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.messages.rows import concatenate, join_columns
from sparring.pipeline.messages.steps import ActionsChosen, AgentsEnded, AgentsStarted, BehaviorSteps, OutcomesReported
from sparring.pipeline.stepping.agents import Behavior, Slots, SlotTable

_RECORDS: Final = ("ended", "joined", "reported", "acted")


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
            agents=table.agents[slots],
            groups=table.groups[slots],
            teams=table.teams[slots],
            simulators=table.simulators[slots],
            fresh=np.full(len(slots), fresh),
            matchups=table.matchups[slots] if table.has_ghosts else None,
            lessons=table.lessons[slots] if table.has_curricula else None,
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
        return [sum(map(len, self.lost)), *(sum([len(one.slots) for one in getattr(self, kind)]) for kind in _RECORDS)]


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
