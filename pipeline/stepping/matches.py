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

from pipeline.errors import RemoteProtocolError
from pipeline.messages.matches import NOBODY, Assignment, Draw, Results
from pipeline.messages.simulator import Decisions, Ends
from pipeline.specs import BehaviorId
from pipeline.stepping.agents import Ids, Slots, SlotTable
from pipeline.stepping.behaviors import Behavior
from pipeline.stepping.connections import Arrival, Connection

UNKNOWN: Final = -1.0

Kind = Literal["match", "group"]
Columns = NDArray[np.float64]


class Outcome(NamedTuple):
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
        number: unique within the source.
        key: what its agents have in common: a match id or a group id of their simulator.
        draw: it is played under.
        live: agents in it.
        found: by seat, what came of it for the agents that ended last.
    """

    number: int
    key: tuple[Kind, int]
    draw: Draw
    live: int = 0
    found: dict[BehaviorId, Outcome] = field(default_factory=dict)


class Sheet:
    """Results of matches of one behavior name, kept until they are taken."""

    def __init__(self) -> None:
        self._matches: list[NDArray[np.int64]] = []  # [m, 4] number, draw, simulator, seats
        self._rows: list[Columns] = []  # [r, 4] seat, score, explicit, reward

    def add(self, matches: NDArray[np.int64], rows: Columns) -> None:
        """Adds matches [m, 4] and their rows [r, 4]."""
        self._matches.append(matches)
        self._rows.append(rows)

    def take(self, seats: Iterable[BehaviorId]) -> Results | None:
        """All of them, once; None for none."""
        if not self._matches:
            return None
        numbers, draws, simulators, counts = np.concatenate(self._matches).T.copy()
        who, scores, explicit, rewards = np.concatenate(self._rows).T.copy()
        self._matches, self._rows = [], []
        return Results(
            numbers=numbers,
            draws=draws,
            simulators=simulators.astype(np.int32),
            seats=counts.astype(np.int32),
            names=tuple(map(str, seats)),
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
        self.assignment: Assignment | None = None
        self.ended = 0
        self.lost = 0
        self._numbers = 0
        self._seats: dict[BehaviorId, int] = {}
        self._sheets: dict[str, Sheet] = {}
        self._open: dict[int, Match] = {}
        self._by_key: dict[int, dict[tuple[Kind, int], Match]] = {}  # by number of the simulator
        self._begun: dict[int, int] = {}  # likewise, matches of those that say which agents form one

    @property
    def serial(self) -> int:
        """Of the assignment; 0 before the first."""
        return 0 if self.assignment is None else self.assignment.serial

    @property
    def under_way(self) -> int:
        """Matches of groups and of simulators that say which agents form one."""
        return len(self._open)

    def covers(self, connection: Connection) -> bool:
        """Whether it is known who plays each seat of a simulator."""
        seats = [seat.id for seat in connection.seats.values() if seat.id.name in self.names]
        if not seats:
            return True
        if self.assignment is None:
            return False
        draw = self.assignment.draws[0]
        return all(seat.team == draw.team or str(seat) in draw.ghosts for seat in seats)

    def in_use(self, behaviors: Mapping[str, Behavior]) -> set[tuple[str, int]]:
        """Ghosts, by behavior name and number, that play now or may play next."""
        found = {(_name(seat), ghost) for draw in self._draws() for seat, ghost in draw.ghosts.items()}
        for name in self.names & behaviors.keys():
            table = behaviors[name].table
            playing = np.unique(table.ghosts[table.live & ~table.learning])
            found.update((name, ghost) for ghost in playing.tolist())
        return found

    # ---------------------------------------------------------------- matches end and begin

    def check(self, arrivals: Iterable[Arrival], behaviors: Mapping[str, Behavior]) -> None:
        """Refuses agents that go on to another match without an end.

        Raises:
            RemoteProtocolError: one does.
        """
        for arrival in arrivals:
            if arrival.decisions is None or arrival.decisions.matches is None:
                continue
            table = behaviors[arrival.seat.id.name].table
            going_on = (arrival.slots >= 0) & ~np.isin(arrival.slots, arrival.vacated)
            moved = going_on & (table.match_ids[arrival.slots] != arrival.decisions.matches)
            if table.ghosted and np.count_nonzero(moved):
                row = int(np.flatnonzero(moved)[0])
                raise RemoteProtocolError(
                    "match",
                    got=f"match {arrival.decisions.matches[row]} of agent {arrival.decisions.agents[row]} of "
                    f"{arrival.behavior}, which was in match {table.match_ids[arrival.slots[row]]}",
                    expected="one match from an agent's first decision to its end",
                    remedy="report the agent's end, and then its first decision in the next match",
                )

    def end(self, connection: Connection, arrivals: Iterable[Arrival], behaviors: Mapping[str, Behavior]) -> None:
        """Agents of a simulator have ended; before their slots are given on."""
        closing: list[Match] = []
        for arrival in arrivals:
            if arrival.ends is None or arrival.seat.id.name not in self.names:
                continue
            table, slots = behaviors[arrival.seat.id.name].table, arrival.vacated
            numbers = table.matches[slots]
            alone = np.flatnonzero((numbers == 0) & self._tells(connection, arrival.seat.id, table, slots))
            if alone.size:
                self._end_alone(connection, arrival.seat.id, _outcomes(arrival.ends, alone), table.draws[slots[alone]])
            closing += self._end_shared(arrival.seat.id, arrival.ends, numbers)
        for match in closing:
            self._close(connection, match)

    def begin(
        self, connection: Connection, seat: BehaviorId, table: SlotTable, slots: Slots, decisions: Decisions, rows: Any
    ) -> None:
        """Agents of a simulator begin new lives.

        Args:
            connection: the simulator.
            seat: theirs.
            table: of their slots.
            slots: [n] given to them.
            decisions: their first among others.
            rows: which these are.
        """
        if seat.name not in self.names:
            return
        table.ghosted = True
        table.matches[slots] = 0
        kind: Kind = "group"
        if decisions.matches is not None:
            kind, ids = "match", decisions.matches[rows]
            table.match_ids[slots] = ids
        elif decisions.groups is not None:
            ids = decisions.groups[rows]
        else:
            ids = np.zeros(len(slots), np.int64)
        alone = slots[ids == 0] if kind == "group" else slots[:0]
        if alone.size:
            _seat(table, alone, seat, self._next_draw(connection.number))
        together = np.flatnonzero(ids != 0) if alone.size else np.arange(len(slots))
        for one, those in _by_value(ids[together]):
            match = self._find(connection.number, (kind, one))
            match.live += len(those)
            table.matches[slots[together[those]]] = match.number
            _seat(table, slots[together[those]], seat, match.draw)

    def lose(self, number: int) -> None:
        """A simulator went away, and its matches with it."""
        for match in self._by_key.pop(number, {}).values():
            del self._open[match.number]
            self.lost += 1
        self._begun.pop(number, None)

    def take(self, name: str) -> Results | None:
        """Results of matches of a behavior name's learning agents since this was last called."""
        sheet = self._sheets.get(name)
        return None if sheet is None else sheet.take(self._seats)

    # ---------------------------------------------------------------- inside

    def _draws(self) -> tuple[Draw, ...]:
        return () if self.assignment is None else self.assignment.draws

    def _next_draw(self, simulator: int, begun: int = 0) -> Draw:
        draws = self._draws()
        return draws[(simulator + begun) % len(draws)]

    def _find(self, simulator: int, key: tuple[Kind, int]) -> Match:
        """The match of some agents, or a new one."""
        known = self._by_key.setdefault(simulator, {})
        match = known.get(key)
        if match is None:
            begun = self._begun.get(simulator, 0)
            if key[0] == "match":
                self._begun[simulator] = begun + 1
            self._numbers += 1
            match = known[key] = Match(self._numbers, key, self._next_draw(simulator, begun))
            self._open[match.number] = match
        return match

    def _tells(self, connection: Connection, seat: BehaviorId, table: SlotTable, slots: Slots) -> NDArray[np.bool_]:
        """[n] Whose matches are told of: those of the team that learns, or where none does, of the first."""
        team = self._draws()[0].team
        if team != NOBODY:
            return table.learning[slots]
        return np.full(len(slots), seat.team == self._first_team(connection))

    def _first_team(self, connection: Connection) -> int:
        return min(seat.id.team for seat in connection.seats.values() if seat.id.name in self.names)

    def _end_alone(self, connection: Connection, seat: BehaviorId, found: Outcome, draws: Ids) -> None:
        """Learning agents without a group have ended: a match for each."""
        others = [(UNKNOWN, 0.0, 0.0)] * len(self._others(connection, seat.team))
        n, seats = len(draws), 1 + len(others)
        matches = np.empty((n, 4), np.int64)
        matches[:, 0] = np.arange(self._numbers + 1, self._numbers + 1 + n)
        matches[:, 1], matches[:, 2], matches[:, 3] = draws, connection.number, seats
        rows = np.empty((n, seats, 4))
        rows[:, :, 0] = self._numbers_of([seat, *self._others(connection, seat.team)])
        rows[:, 0, 1:] = np.stack(found, 1)
        rows[:, 1:, 1:] = np.array(others).reshape(-1, 3)
        self._numbers += n
        self._keep(seat.name, matches, rows.reshape(-1, 4))

    def _end_shared(self, seat: BehaviorId, ends: Ends, numbers: Ids) -> list[Match]:
        """Agents have ended that share matches; returns those of which nobody is left."""
        over = []
        shared = np.flatnonzero(numbers)
        for number, those in _by_value(numbers[shared]):
            match = self._open[number]
            match.live -= len(those)
            match.found[seat] = _outcome_together(ends, shared[those])
            if not match.live:
                over.append(match)
        return over

    def _close(self, connection: Connection, match: Match) -> None:
        """Nobody is left in a match."""
        del self._open[match.number]
        del self._by_key[connection.number][match.key]
        team, found = match.draw.team, match.found
        if team == NOBODY:
            team = self._first_team(connection)
        learning = next((seat for seat in found if seat.team == team), None)
        if learning is None:
            return
        if match.key[0] == "group":  # the other teams have groups of their own
            found = found | dict.fromkeys(self._others(connection, team), Outcome(UNKNOWN, 0.0, 0.0))
        head = [[match.number, match.draw.number, connection.number, len(found)]]
        rows = [[number, *one] for number, one in zip(self._numbers_of(found), found.values(), strict=True)]
        self._keep(learning.name, np.array(head, np.int64), np.array(rows))

    def _keep(self, name: str, matches: NDArray[np.int64], rows: Columns) -> None:
        self._sheets.setdefault(name, Sheet()).add(matches, rows)
        self.ended += len(matches)

    def _others(self, connection: Connection, team: int) -> list[BehaviorId]:
        """Seats of a simulator under self-play that belong to other teams."""
        seats = (seat.id for seat in connection.seats.values())
        return [seat for seat in seats if seat.name in self.names and seat.team != team]

    def _numbers_of(self, seats: Iterable[BehaviorId]) -> list[int]:
        return [self._seats.setdefault(seat, len(self._seats)) for seat in seats]


def _seat(table: SlotTable, slots: Slots, seat: BehaviorId, draw: Draw) -> None:
    """Agents take a seat under a draw."""
    learning = seat.team == draw.team
    table.draws[slots] = draw.number
    table.learning[slots] = learning
    table.ghosts[slots] = 0 if learning else draw.ghosts[str(seat)]


def _by_value(ids: Ids) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Each value, and where it stands."""
    order = np.argsort(ids, kind="stable")
    values, starts = np.unique(ids[order], return_index=True)
    yield from zip(values.tolist(), np.split(order, starts[1:]), strict=len(values) > 0)


def _outcomes(ends: Ends, rows: NDArray[np.intp]) -> Outcome:
    """Of each of some agents, in columns."""
    rewards = ends.rewards[rows].astype(np.float64)
    if ends.group_rewards is not None:
        rewards += ends.group_rewards[rows]
    said = ends.outcomes is not None
    scores = 0.5 + 0.5 * np.sign(rewards) if ends.outcomes is None else ends.outcomes[rows]
    return Outcome(scores, np.full(len(rows), float(said)), rewards)


def _outcome_together(ends: Ends, rows: NDArray[np.intp]) -> Outcome:
    """Of agents of one seat that ended together: the mean of what was said, or the sign of the mean reward."""
    scores, explicit, rewards = _outcomes(ends, rows)
    reward = float(rewards.mean())
    score = float(scores.mean()) if explicit[0] else 0.5 + 0.5 * float(np.sign(reward))
    return Outcome(score, float(explicit[0]), reward)


def _name(seat: str) -> str:
    return BehaviorId.parse(seat).name
