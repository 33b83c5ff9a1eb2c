"""The outcomes in a simulator's report complete steps; new agents get slots, and ended ones give theirs back."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.messages.rows import pick_where
from sparring.pipeline.messages.simulator import Decisions
from sparring.pipeline.messages.steps import AgentsEnded, OutcomesReported
from sparring.pipeline.stepping.agents import Ids, Slots, SlotTable
from sparring.pipeline.stepping.connections import Arrival
from sparring.pipeline.stepping.steps import BehaviorTick

Outcomes = TypeVar("Outcomes", AgentsEnded, OutcomesReported)

BeginEpisodes = Callable[[Arrival, NDArray[np.intp]], None]
"""Prepares the episodes of new agents, which are these rows of the decisions."""


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
        ended = AgentsEnded(
            slots=vacated,
            observations=ends.observations,
            rewards=ends.rewards,
            interrupted=ends.interrupted,
            group_rewards=ends.group_rewards,
            outcomes=ends.outcomes,
        )
        _add_learning(tick.ended, ended, table)
    if (decisions := arrival.decisions) is not None:
        if arrival.unknown or ends is not None:
            _begin(arrival, decisions, simulator, tick, begin)
        _update_groups(arrival, decisions, simulator, tick)
        done = _complete(table, arrival.slots)
        completed, ghosts = completed + done[0], ghosts + done[1]
        reported = OutcomesReported(
            slots=arrival.slots,
            observations=decisions.observations,
            rewards=decisions.rewards,
            group_rewards=decisions.group_rewards,
        )
        arrival.learning = _add_learning(tick.reported, reported, table)
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


def _add_learning(records: list[Outcomes], record: Outcomes, table: SlotTable) -> int:
    """Adds the rows of learning agents; returns their number."""
    if table.has_ghosts:
        record = pick_where(record, table.learning[record.slots])
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
