"""Under which draw each agent plays, and what comes of the matches: self-play as stepping sees it.

A match begins under the draw that is current then and ends under it. Where a simulator says which agents form a match,
that is the match; else a group is one, whose members that come later join its draw, or an agent without a group. A
match is over when none of its agents is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.matches import NOBODY, Matchup, MatchupAssignment, Results
from sparring.pipeline.messages.simulator import Decisions, Ends
from sparring.pipeline.specs import BehaviorId
from sparring.pipeline.stepping.agents import Ids, Slots, SlotTable
from sparring.pipeline.stepping.behaviors import Behavior
from sparring.pipeline.stepping.connections import Arrival, SimulatorConnection

UNKNOWN: Final = -1.0

Kind = Literal["match", "group"]
Columns = NDArray[np.float64]


class MatchOutcome(NamedTuple):
    """What came of a match for one seat, or of many matches for theirs: numbers, or columns of them.

    Attributes:
        scores: 1 won, 0.5 drawn, 0 lost, -1 unknown.
        explicit: 1 where the simulator said so.
        rewards: final reward.
    """

    scores: Any
    explicit: Any
    rewards: Any


@dataclass(slots=True)
class Match:
    """One that is under way.

    Attributes:
        number: unique within the source; below 0 where nothing will be told of it: a group of ghosts.
        key: what its agents have in common: a match id or a group id of their simulator.
        matchup: it is played under.
        live: agents in it.
        found: by seat, what came of it for the agents that ended last.
    """

    number: int
    key: tuple[Kind, int]
    matchup: Matchup
    live: int = 0
    found: dict[BehaviorId, MatchOutcome] = field(default_factory=dict)


class MatchResults:
    """Results of matches of one behavior name, kept until they are taken."""

    def __init__(self) -> None:
        self._matches: list[NDArray[np.int64]] = []  # [m, 4] number, draw, simulator, seats
        self._rows: list[Columns] = []  # [r, 4] seat, score, explicit, reward
        self._taken = 0

    def add(self, matches: NDArray[np.int64], rows: Columns) -> None:
        """Adds matches [m, 4] and their rows [r, 4]."""
        self._matches.append(matches)
        self._rows.append(rows)

    def take(self, behavior_ids: Iterable[BehaviorId]) -> Results | None:
        """All of them, once; None for none."""
        if not self._matches:
            return None
        numbers, matchups, simulators, counts = np.concatenate(self._matches).T.copy()
        who, scores, explicit, rewards = np.concatenate(self._rows).T.copy()
        self._matches, self._rows = [], []
        before, self._taken = self._taken, self._taken + len(numbers)
        return Results(
            before=before,
            numbers=numbers,
            matchups=matchups,
            simulators=simulators.astype(np.int32),
            row_counts=counts.astype(np.int32),
            names=tuple(map(str, behavior_ids)),
            who=who.astype(np.int32),
            scores=scores.astype(np.float32),
            explicit=explicit.astype(np.int32),
            rewards=rewards.astype(np.float32),
        )


class Matches:
    """The matches of all simulators of a stepping process.

    Args:
        names: behavior names under self-play.

    Attributes:
        assignment: what matches that begin now are played with; None before the first is known.
        ended: matches that ended so far.
        lost: matches whose simulator went away.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names = frozenset(names)
        self.assignment: MatchupAssignment | None = None
        self.ended = 0
        self.lost = 0
        self._numbers = 0
        self._behavior_ids: dict[BehaviorId, int] = {}
        self._sheets: dict[str, MatchResults] = {}
        self._open: dict[int, Match] = {}
        self._unreported = 0
        self._by_key: dict[int, dict[tuple[Kind, int], Match]] = {}  # by key of the connection
        self._begun: dict[int, int] = {}  # likewise, matches of those that say which agents form one

    @property
    def serial(self) -> int:
        """Of the assignment; 0 before the first."""
        return 0 if self.assignment is None else self.assignment.serial

    @property
    def under_way(self) -> int:
        """Matches of groups, and of simulators that say which agents form one, that will be told of."""
        return sum(number > 0 for number in self._open)

    def covers(self, connection: SimulatorConnection) -> bool:
        """Whether it is known who plays each seat of a simulator."""
        behavior_ids = [one.id for one in connection.behaviors.values() if one.id.name in self.names]
        if not behavior_ids:
            return True
        if self.assignment is None:
            return False
        return all(_covers(self.assignment.matchups[0], behavior_id) for behavior_id in behavior_ids)

    def in_use(self, behaviors: Mapping[str, Behavior]) -> set[tuple[str, int]]:
        """Ghosts, by behavior name and number, that play now or may play next."""
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
        """Refuses agents that go on to another match without an end, and seats that are new in one under way.

        Raises:
            RemoteProtocolError: there is one.
        """
        for arrival in arrivals:
            decisions, behavior_id = arrival.decisions, arrival.simulator_behavior.id
            if decisions is None or behavior_id.name not in self.names:
                continue
            ids, known = _named(decisions)
            table = behaviors[behavior_id.name].table
            here = (arrival.slots >= 0) & ~np.isin(arrival.slots, arrival.vacated)
            moved = here & (table.match_ids[arrival.slots] != ids) if known is not None else ~here & False
            if np.count_nonzero(moved):
                raise _refused(arrival, decisions, int(np.flatnonzero(moved)[0]), known, "an agent that was in another")
            if known is None or here.all():
                continue
            for one, rows in _by_value(ids[~here]):
                match = self._by_key.get(connection.key, {}).get((known, one))
                if match is not None and not _covers(match.matchup, behavior_id):
                    row = int(np.flatnonzero(~here)[rows[0]])
                    raise _refused(arrival, decisions, row, known, "a seat that it did not begin with")

    def end(
        self, connection: SimulatorConnection, arrivals: Iterable[Arrival], behaviors: Mapping[str, Behavior]
    ) -> set[str]:
        """Agents of a simulator have ended; before their slots are given on.

        Returns:
            Behavior names that have results for it.
        """
        told: set[str] = set()
        closing: list[Match] = []
        for arrival in arrivals:
            if arrival.ends is None or arrival.simulator_behavior.id.name not in self.names:
                continue
            table, slots = behaviors[arrival.simulator_behavior.id.name].table, arrival.vacated
            numbers = table.matches[slots]
            alone = np.flatnonzero(table.alone[slots] & (numbers > 0))
            if alone.size:
                told.add(arrival.simulator_behavior.id.name)
                heads = np.stack([numbers[alone], table.matchups[slots[alone]]], 1)
                self._end_alone(connection, arrival.simulator_behavior.id, _outcomes(arrival.ends, alone), heads)
            closing += self._end_shared(
                arrival.simulator_behavior.id, arrival.ends, np.where(table.alone[slots], 0, numbers)
            )
        return told.union(*(self._close(connection, match) for match in closing))

    def begin(
        self,
        connection: SimulatorConnection,
        behavior_id: BehaviorId,
        table: SlotTable,
        slots: Slots,
        decisions: Decisions,
        rows: Any,
    ) -> None:
        """Agents of a simulator begin new lives.

        Args:
            connection: the simulator.
            behavior_id: of the agents.
            table: of their slots.
            slots: [n] given to them.
            decisions: their first among others.
            rows: which these are.
        """
        if behavior_id.name not in self.names:
            return
        table.ghosted = True
        table.matches[slots] = 0
        every, kind = _named(decisions)
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

    def lose(self, connection: SimulatorConnection, behaviors: Mapping[str, Behavior]) -> set[str]:
        """A simulator went away, and its matches with it; before its slots are given on. Returns as `end`."""
        matches = [one for one in self._by_key.pop(connection.key, {}).values() if self._open.pop(one.number)]
        heads = [[one.number, one.matchup.number] for one in matches if one.number > 0]
        for one in connection.behaviors.values():
            if one.id.name in self.names:
                table, slots = behaviors[one.id.name].table, one.roster.slots
                alone = slots[table.alone[slots] & (table.matches[slots] > 0)]
                heads += np.stack([table.matches[alone], table.matchups[alone]], 1).tolist()
        self._begun.pop(connection.key, None)
        self.lost += len(heads)
        return self._void(connection, heads)

    def take(self, name: str) -> Results | None:
        """Results of matches of a behavior name's learning agents since this was last called."""
        sheet = self._sheets.get(name)
        return None if sheet is None else sheet.take(self._behavior_ids)

    # ---------------------------------------------------------------- inside

    def _matchups(self) -> tuple[Matchup, ...]:
        return () if self.assignment is None else self.assignment.matchups

    def _next_matchup(self, simulator: int, begun: int = 0) -> Matchup:
        matchups = self._matchups()
        return matchups[(simulator + begun) % len(matchups)]

    def _find(self, connection: SimulatorConnection, behavior_id: BehaviorId, key: tuple[Kind, int]) -> Match:
        """The match of some agents of a seat, or a new one."""
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
        """The team whose groups and single agents are matches: that which learns, or where none does, the first."""
        if matchup.team != NOBODY:
            return matchup.team
        return min(one.id.team for one in connection.behaviors.values() if one.id.name in self.names)

    def _void(self, connection: SimulatorConnection, heads: list[list[int]]) -> set[str]:
        """Tells of matches without a result, number and draw of each; returns the name they are told with."""
        behavior_ids = [one.id.name for one in connection.behaviors.values() if one.id.name in self.names]
        if not heads or not behavior_ids:
            return set()
        table = [[number, matchup, connection.number, 0] for number, matchup in heads]
        self._sheets.setdefault(behavior_ids[0], MatchResults()).add(np.array(table, np.int64), np.empty((0, 4)))
        return {behavior_ids[0]}

    def _begin_alone(
        self, connection: SimulatorConnection, behavior_id: BehaviorId, table: SlotTable, slots: Slots
    ) -> None:
        """Agents that are matches by themselves, if their team's are told of."""
        matchup = self._next_matchup(connection.number)
        _assign_matchup(table, slots, behavior_id, matchup)
        table.alone[slots] = True
        if behavior_id.team == self._reporting(connection, matchup):
            table.matches[slots] = np.arange(self._numbers + 1, self._numbers + 1 + len(slots))
            self._numbers += len(slots)

    def _end_alone(
        self, connection: SimulatorConnection, behavior_id: BehaviorId, found: MatchOutcome, heads: NDArray[np.int64]
    ) -> None:
        """Agents that are matches by themselves have ended; `heads` [n, 2] are number and draw of each."""
        others = [(UNKNOWN, 0.0, 0.0)] * len(self._others(connection, behavior_id.team))
        n, row_count = len(heads), 1 + len(others)
        matches = np.empty((n, 4), np.int64)
        matches[:, :2], matches[:, 2], matches[:, 3] = heads, connection.number, row_count
        rows = np.empty((n, row_count, 4))
        rows[:, :, 0] = self._numbers_of([behavior_id, *self._others(connection, behavior_id.team)])
        rows[:, 0, 1:] = np.stack(found, 1)
        rows[:, 1:, 1:] = np.array(others).reshape(-1, 3)
        self._keep(behavior_id.name, matches, rows.reshape(-1, 4))

    def _end_shared(self, behavior_id: BehaviorId, ends: Ends, numbers: Ids) -> list[Match]:
        """Agents have ended that share matches; returns those of which nobody is left."""
        over = []
        shared = np.flatnonzero(numbers)
        for number, those in _by_value(numbers[shared]):
            match = self._open[number]
            match.live -= len(those)
            match.found[behavior_id] = _outcome_together(ends, shared[those])
            if not match.live:
                over.append(match)
        return over

    def _close(self, connection: SimulatorConnection, match: Match) -> set[str]:
        """Nobody is left in a match; returns the behavior name that its result is told with, if it is."""
        del self._open[match.number]
        del self._by_key[connection.key][match.key]
        team, found = self._reporting(connection, match.matchup), match.found
        reporting = next((behavior_id for behavior_id in found if behavior_id.team == team), None)
        if reporting is None:  # a group of ghosts, or a match without the team that learns
            return self._void(connection, [[match.number, match.matchup.number]] if match.number > 0 else [])
        if match.key[0] == "group":  # the other teams have groups of their own
            found = found | dict.fromkeys(self._others(connection, team), MatchOutcome(UNKNOWN, 0.0, 0.0))
        head = [[match.number, match.matchup.number, connection.number, len(found)]]
        rows = [[number, *one] for number, one in zip(self._numbers_of(found), found.values(), strict=True)]
        self._keep(reporting.name, np.array(head, np.int64), np.array(rows))
        return {reporting.name}

    def _keep(self, name: str, matches: NDArray[np.int64], rows: Columns) -> None:
        self._sheets.setdefault(name, MatchResults()).add(matches, rows)
        self.ended += len(matches)

    def _others(self, connection: SimulatorConnection, team: int) -> list[BehaviorId]:
        """Seats of a simulator under self-play that belong to other teams."""
        behavior_ids = (one.id for one in connection.behaviors.values())
        return [
            behavior_id for behavior_id in behavior_ids if behavior_id.name in self.names and behavior_id.team != team
        ]

    def _numbers_of(self, behavior_ids: Iterable[BehaviorId]) -> list[int]:
        return [self._behavior_ids.setdefault(behavior_id, len(self._behavior_ids)) for behavior_id in behavior_ids]


def _assign_matchup(table: SlotTable, slots: Slots, behavior_id: BehaviorId, matchup: Matchup) -> None:
    """Agents take a seat under a draw."""
    learning = behavior_id.team == matchup.team
    table.matchups[slots] = matchup.number
    table.learning[slots] = learning
    table.ghosts[slots] = 0 if learning else matchup.ghosts[str(behavior_id)]


def _covers(matchup: Matchup, behavior_id: BehaviorId) -> bool:
    return behavior_id.team == matchup.team or str(behavior_id) in matchup.ghosts


def _named(decisions: Decisions) -> tuple[Ids, Kind | None]:
    """[n] What says which match each agent is in, and what kind of id that is; zeros and None where nothing says it."""
    if decisions.matches is not None:
        return decisions.matches, "match"
    if decisions.groups is not None:
        return decisions.groups, "group"
    return np.zeros(len(decisions.agents), np.int64), None


def _refused(arrival: Arrival, decisions: Decisions, row: int, kind: Kind | None, who: str) -> RemoteProtocolError:
    ids, _ = _named(decisions)
    return RemoteProtocolError(
        "match",
        got=f"agent {decisions.agents[row]} of {arrival.behavior} in {kind} {ids[row]}: {who}",
        expected="one match from an agent's first decision to its end, and no seat in it that is new since its start",
        remedy="report the agent's end, and its first decision in the next match; name all behaviors in Hello",
    )


def _by_value(ids: Ids) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Each value, and where it stands."""
    order = np.argsort(ids, kind="stable")
    values, starts = np.unique(ids[order], return_index=True)
    yield from zip(values.tolist(), np.split(order, starts[1:]), strict=len(values) > 0)


def _outcomes(ends: Ends, rows: NDArray[np.intp]) -> MatchOutcome:
    """Of each of some agents, in columns."""
    rewards = ends.rewards[rows].astype(np.float64)
    if ends.group_rewards is not None:
        rewards += ends.group_rewards[rows]
    said = ends.outcomes is not None
    scores = 0.5 + 0.5 * np.sign(rewards) if ends.outcomes is None else ends.outcomes[rows]
    return MatchOutcome(scores, np.full(len(rows), float(said)), rewards)


def _outcome_together(ends: Ends, rows: NDArray[np.intp]) -> MatchOutcome:
    """Of agents of one seat that ended together: the mean of what was said, or the sign of the mean reward."""
    scores, explicit, rewards = _outcomes(ends, rows)
    reward = float(rewards.mean())
    score = float(scores.mean()) if explicit[0] else 0.5 + 0.5 * float(np.sign(reward))
    return MatchOutcome(score, float(explicit[0]), reward)


def _name(behavior_id: str) -> str:
    return BehaviorId.parse(behavior_id).name
