"""Matches assign a matchup to each agent under self-play and collect the results.

A match begins under the current matchup and ends under the same one. Where a simulator reports match ids, these define
the matches; else each group is a match, whose later members join its matchup, and so is each agent without a group. A
match ends when none of its agents is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.matches import NO_TEAM, Matchup, MatchupAssignment, Results
from sparring.pipeline.messages.simulator import Decisions, Ends
from sparring.pipeline.specs import BehaviorId
from sparring.pipeline.stepping.agents import Ids, Slots, SlotTable
from sparring.pipeline.stepping.behaviors import Behavior
from sparring.pipeline.stepping.connections import Arrival, SimulatorConnection
from sparring.pipeline.stepping.match_results import (
    UNKNOWN,
    Columns,
    MatchOutcome,
    MatchResults,
    joint_outcome,
    outcomes_of,
)

Kind = Literal["match", "group"]


@dataclass(slots=True)
class Match:
    """A Match has begun and not ended yet.

    Attributes:
        number: unique within the source; below 0 where it is not reported: a group of ghosts.
        key: kind and value of the id that its agents share in their simulator.
        matchup: the matchup of its policies.
        live: number of its live agents.
        outcomes: by behavior id, outcome of the agents that ended last.
    """

    number: int
    key: tuple[Kind, int]
    matchup: Matchup
    live: int = 0
    outcomes: dict[BehaviorId, MatchOutcome] = field(default_factory=dict)


class Matches:
    """Matches track the matches of all simulators of a stepping process.

    Args:
        names: behavior names under self-play.

    Attributes:
        assignment: matchups of the matches that begin now; None before the first is known.
        ended: number of matches that ended.
        lost: number of matches whose simulator disconnected.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names = frozenset(names)
        self.assignment: MatchupAssignment | None = None
        self.ended = 0
        self.lost = 0
        self._numbers = 0
        self._behavior_ids: dict[BehaviorId, int] = {}
        self._results: dict[str, MatchResults] = {}
        self._open: dict[int, Match] = {}
        self._unreported = 0
        self._by_key: dict[int, dict[tuple[Kind, int], Match]] = {}  # by key of the connection
        self._begun: dict[int, int] = {}  # likewise, number of matches with match ids

    @property
    def serial(self) -> int:
        """Returns the serial of the assignment; 0 before the first."""
        return 0 if self.assignment is None else self.assignment.serial

    @property
    def under_way(self) -> int:
        """Returns the number of open matches of several agents that will be reported."""
        return sum(number > 0 for number in self._open)

    def covers(self, connection: SimulatorConnection) -> bool:
        """Returns whether the assignment names a policy for each behavior id of a simulator."""
        behavior_ids = [one.id for one in connection.behaviors.values() if one.id.name in self.names]
        if not behavior_ids:
            return True
        if self.assignment is None:
            return False
        return all(_covers(self.assignment.matchups[0], behavior_id) for behavior_id in behavior_ids)

    def in_use(self, behaviors: Mapping[str, Behavior]) -> set[tuple[str, int]]:
        """Returns the ghosts, by behavior name and number, that play now or may play next."""
        matchups = [
            *self._matchups(),
            *(match.matchup for match in self._open.values()),
        ]  # others may join a match under way
        found = {(_name(behavior_id), ghost) for matchup in matchups for behavior_id, ghost in matchup.ghosts.items()}
        for name in self.names & behaviors.keys():
            table = behaviors[name].table
            playing = np.unique(table.ghosts[table.live & ~table.learning])
            found.update((name, ghost) for ghost in playing.tolist())
        return found

    # ---------------------------------------------------------------- matches end and begin

    def check(
        self, connection: SimulatorConnection, arrivals: Iterable[Arrival], behaviors: Mapping[str, Behavior]
    ) -> None:
        """Rejects agents that change their match without an end, and behavior ids that join an open match.

        Raises:
            RemoteProtocolError: an agent or behavior id does so.
        """
        for arrival in arrivals:
            decisions, behavior_id = arrival.decisions, arrival.simulator_behavior.id
            if decisions is None or behavior_id.name not in self.names:
                continue
            ids, known = _match_ids(decisions)
            table = behaviors[behavior_id.name].table
            here = (arrival.slots >= 0) & ~np.isin(arrival.slots, arrival.vacated)
            moved = here & (table.match_ids[arrival.slots] != ids) if known is not None else ~here & False
            if np.count_nonzero(moved):
                raise _match_error(
                    arrival, decisions, int(np.flatnonzero(moved)[0]), known, "an agent that was in another"
                )
            if known is None or here.all():
                continue
            for one, rows in _by_value(ids[~here]):
                match = self._by_key.get(connection.key, {}).get((known, one))
                if match is not None and not _covers(match.matchup, behavior_id):
                    row = int(np.flatnonzero(~here)[rows[0]])
                    raise _match_error(arrival, decisions, row, known, "a behavior that was not in it at its start")

    def end(
        self, connection: SimulatorConnection, arrivals: Iterable[Arrival], behaviors: Mapping[str, Behavior]
    ) -> None:
        """Ends the agents of a simulator in their matches, before their slots are reused."""
        closing: list[Match] = []
        for arrival in arrivals:
            if arrival.ends is None or arrival.simulator_behavior.id.name not in self.names:
                continue
            table, slots = behaviors[arrival.simulator_behavior.id.name].table, arrival.vacated
            numbers = table.matches[slots]
            alone = np.flatnonzero(table.alone[slots] & (numbers > 0))
            if alone.size:
                heads = np.stack([numbers[alone], table.matchups[slots[alone]]], 1)
                self._end_alone(connection, arrival.simulator_behavior.id, outcomes_of(arrival.ends, alone), heads)
            closing += self._end_shared(
                arrival.simulator_behavior.id, arrival.ends, np.where(table.alone[slots], 0, numbers)
            )
        for match in closing:
            self._close(connection, match)

    def begin(
        self,
        connection: SimulatorConnection,
        behavior_id: BehaviorId,
        table: SlotTable,
        slots: Slots,
        decisions: Decisions,
        rows: Any,
    ) -> None:
        """Assigns matchups to agents that begin an episode.

        Args:
            connection: their simulator.
            behavior_id: of the agents.
            table: of their slots.
            slots: [n] of the agents.
            decisions: all decisions of the report.
            rows: [n] rows of the agents in these.
        """
        if behavior_id.name not in self.names:
            return
        table.has_ghosts = True
        table.matches[slots] = 0
        every, kind = _match_ids(decisions)
        ids = every[rows]
        table.match_ids[slots] = ids
        together = np.arange(len(slots)) if kind == "match" else np.flatnonzero(ids)
        table.alone[slots] = False
        if len(together) < len(slots):
            self._begin_alone(connection, behavior_id, table, slots[ids == 0])
        if kind is None:
            return
        for one, those in _by_value(ids[together]):
            match = self._find(connection, behavior_id, (kind, one))
            match.live += len(those)
            table.matches[slots[together[those]]] = match.number
            _assign_matchup(table, slots[together[those]], behavior_id, match.matchup)

    def drop(self, connection: SimulatorConnection, behaviors: Mapping[str, Behavior]) -> None:
        """Drops the matches of a disconnected simulator, before its slots are reused."""
        matches = [one for one in self._by_key.pop(connection.key, {}).values() if self._open.pop(one.number)]
        heads = [[one.number, one.matchup.number] for one in matches if one.number > 0]
        for one in connection.behaviors.values():
            if one.id.name in self.names:
                table, slots = behaviors[one.id.name].table, one.roster.slots
                alone = slots[table.alone[slots] & (table.matches[slots] > 0)]
                heads += np.stack([table.matches[alone], table.matchups[alone]], 1).tolist()
        self._begun.pop(connection.key, None)
        self.lost += len(heads)
        self._add_without_result(connection, heads)

    @property
    def reported(self) -> int:
        """Returns how many results there were so far, taken or not."""
        return sum(results.reported for results in self._results.values())

    def take(self, source: str) -> list[Results]:
        """Returns the results since the last call, for each behavior name of learning agents.

        Args:
            source: incarnation of this stepping service.
        """
        found = (results.take(source, name, self._behavior_ids) for name, results in self._results.items())
        return [results for results in found if results is not None]

    # ---------------------------------------------------------------- inside

    def _matchups(self) -> tuple[Matchup, ...]:
        return () if self.assignment is None else self.assignment.matchups

    def _next_matchup(self, simulator: int, begun: int = 0) -> Matchup:
        matchups = self._matchups()
        return matchups[(simulator + begun) % len(matchups)]

    def _find(self, connection: SimulatorConnection, behavior_id: BehaviorId, key: tuple[Kind, int]) -> Match:
        """Returns the match with this key, a new one where there is none."""
        known = self._by_key.setdefault(connection.key, {})
        if key in known:
            return known[key]
        begun = self._begun.get(connection.key, 0)
        if key[0] == "match":
            self._begun[connection.key] = begun + 1
        matchup = self._next_matchup(connection.number, begun)
        if key[0] == "match" or behavior_id.team == self._reporting(connection, matchup):
            self._numbers += 1
            number = self._numbers
        else:
            self._unreported -= 1
            number = self._unreported
        match = known[key] = self._open[number] = Match(number, key, matchup)
        return match

    def _reporting(self, connection: SimulatorConnection, matchup: Matchup) -> int:
        """Returns the team whose groups and single agents count as matches: the learning one, else the first."""
        if matchup.team != NO_TEAM:
            return matchup.team
        return min(one.id.team for one in connection.behaviors.values() if one.id.name in self.names)

    def _add_without_result(self, connection: SimulatorConnection, heads: list[list[int]]) -> None:
        """Reports matches without a result, by number and matchup."""
        behavior_ids = [one.id.name for one in connection.behaviors.values() if one.id.name in self.names]
        if not heads or not behavior_ids:
            return
        table = [[number, matchup, connection.number, 0] for number, matchup in heads]
        self._results.setdefault(behavior_ids[0], MatchResults()).add(np.array(table, np.int64), np.empty((0, 4)))

    def _begin_alone(
        self, connection: SimulatorConnection, behavior_id: BehaviorId, table: SlotTable, slots: Slots
    ) -> None:
        """Begins matches of single agents, which are reported for one team only."""
        matchup = self._next_matchup(connection.number)
        _assign_matchup(table, slots, behavior_id, matchup)
        table.alone[slots] = True
        if behavior_id.team == self._reporting(connection, matchup):
            table.matches[slots] = np.arange(self._numbers + 1, self._numbers + 1 + len(slots))
            self._numbers += len(slots)

    def _end_alone(
        self, connection: SimulatorConnection, behavior_id: BehaviorId, outcomes: MatchOutcome, heads: NDArray[np.int64]
    ) -> None:
        """Ends matches of single agents; `heads` [n, 2] are number and matchup of each."""
        others = [(UNKNOWN, 0.0, 0.0)] * len(self._others(connection, behavior_id.team))
        n, row_count = len(heads), 1 + len(others)
        matches = np.empty((n, 4), np.int64)
        matches[:, :2], matches[:, 2], matches[:, 3] = heads, connection.number, row_count
        rows = np.empty((n, row_count, 4))
        rows[:, :, 0] = self._numbers_of([behavior_id, *self._others(connection, behavior_id.team)])
        rows[:, 0, 1:] = np.stack(outcomes, 1)
        rows[:, 1:, 1:] = np.array(others).reshape(-1, 3)
        self._add_result(behavior_id.name, matches, rows.reshape(-1, 4))

    def _end_shared(self, behavior_id: BehaviorId, ends: Ends, numbers: Ids) -> list[Match]:
        """Ends agents that share matches; returns the matches in which no agent is left."""
        over = []
        shared = np.flatnonzero(numbers)
        for number, those in _by_value(numbers[shared]):
            match = self._open[number]
            match.live -= len(those)
            match.outcomes[behavior_id] = joint_outcome(ends, shared[those])
            if not match.live:
                over.append(match)
        return over

    def _close(self, connection: SimulatorConnection, match: Match) -> None:
        """Closes a match in which no agent is left."""
        del self._open[match.number]
        del self._by_key[connection.key][match.key]
        team, outcomes = self._reporting(connection, match.matchup), match.outcomes
        reporting = next((behavior_id for behavior_id in outcomes if behavior_id.team == team), None)
        if reporting is None:  # a group of ghosts, or a match without the learning team
            self._add_without_result(connection, [[match.number, match.matchup.number]] if match.number > 0 else [])
            return
        if match.key[0] == "group":  # the other teams have groups of their own
            outcomes = outcomes | dict.fromkeys(self._others(connection, team), MatchOutcome(UNKNOWN, 0.0, 0.0))
        head = [[match.number, match.matchup.number, connection.number, len(outcomes)]]
        rows = [[number, *one] for number, one in zip(self._numbers_of(outcomes), outcomes.values(), strict=True)]
        self._add_result(reporting.name, np.array(head, np.int64), np.array(rows))

    def _add_result(self, name: str, matches: NDArray[np.int64], rows: Columns) -> None:
        self._results.setdefault(name, MatchResults()).add(matches, rows)
        self.ended += len(matches)

    def _others(self, connection: SimulatorConnection, team: int) -> list[BehaviorId]:
        """Returns the behavior ids of a simulator under self-play that belong to other teams."""
        behavior_ids = (one.id for one in connection.behaviors.values())
        return [
            behavior_id for behavior_id in behavior_ids if behavior_id.name in self.names and behavior_id.team != team
        ]

    def _numbers_of(self, behavior_ids: Iterable[BehaviorId]) -> list[int]:
        return [self._behavior_ids.setdefault(behavior_id, len(self._behavior_ids)) for behavior_id in behavior_ids]


def _assign_matchup(table: SlotTable, slots: Slots, behavior_id: BehaviorId, matchup: Matchup) -> None:
    """Assigns a matchup to agents of a behavior id."""
    learning = behavior_id.team == matchup.team
    table.matchups[slots] = matchup.number
    table.learning[slots] = learning
    table.ghosts[slots] = 0 if learning else matchup.ghosts[str(behavior_id)]


def _covers(matchup: Matchup, behavior_id: BehaviorId) -> bool:
    return behavior_id.team == matchup.team or str(behavior_id) in matchup.ghosts


def _match_ids(decisions: Decisions) -> tuple[Ids, Kind | None]:
    """Returns the id, [n], of each agent's match and the kind of these ids; zeros and None without any."""
    if decisions.matches is not None:
        return decisions.matches, "match"
    if decisions.groups is not None:
        return decisions.groups, "group"
    return np.zeros(len(decisions.agents), np.int64), None


def _match_error(arrival: Arrival, decisions: Decisions, row: int, kind: Kind | None, who: str) -> RemoteProtocolError:
    ids, _ = _match_ids(decisions)
    return RemoteProtocolError(
        "match",
        got=f"agent {decisions.agents[row]} of {arrival.behavior} in {kind} {ids[row]}: {who}",
        expected="one match from an agent's first decision to its end, and no behavior that joins it later",
        remedy="report the agent's end, and its first decision in the next match; name all behaviors in Hello",
    )


def _by_value(ids: Ids) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Yields each value with its positions."""
    order = np.argsort(ids, kind="stable")
    values, starts = np.unique(ids[order], return_index=True)
    yield from zip(values.tolist(), np.split(order, starts[1:]), strict=len(values) > 0)


def _name(behavior_id: str) -> str:
    return BehaviorId.parse(behavior_id).name
