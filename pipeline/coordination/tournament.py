"""A tournament: fixed players play each other in all orders, and no team learns. Rules without I/O."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sparring.pipeline.messages.matches import NO_TEAM, Matchup, MatchupAssignment, Results, one_by_one
from sparring.pipeline.specs import BehaviorId


class Tournament:
    """Decides who plays whom, and counts what is missing.

    A *line-up* says which player has which team. All line-ups of different players are played, as often as each other;
    where there are more teams than players, those with at least two different ones.

    Args:
        names: of the behaviors.
        players: labels; the number of each, from 1, is what plays for it, negative.
        matches: of each pair of players, at least.
        mirror: each also plays itself.

    Attributes:
        assignment: who plays now; None before all teams are known.
        team: `NO_TEAM`, as no team learns.
        changes: none.
    """

    def __init__(self, names: Sequence[str], players: Sequence[str], matches: int, *, mirror: bool = False) -> None:
        self.names = frozenset(names)
        self.sides: dict[str, Any] = {}
        self.players = tuple(players)
        self.assignment: MatchupAssignment | None = None
        self.team = NO_TEAM
        self.changes = 0
        self._matches = matches
        self._mirror = mirror
        self._teams: dict[str, set[int]] = {}
        self._lineups: dict[int, tuple[int, ...]] = {}  # by number of the matchup, player of each team
        self._given = 0  # number of matchups so far
        self._quota = 0
        self._ended: dict[int, int] = {}  # number of a match: its matchup
        self._whole = 0  # all matches up to this number have ended

    @property
    def playing(self) -> set[tuple[str, int]]:
        """Behavior name and number of all players."""
        if self.assignment is None:
            return set()
        return {(name, -number) for name in self._teams for number in range(1, len(self.players) + 1)}

    @property
    def wanted(self) -> set[tuple[str, int]]:
        """The same as `playing`."""
        return self.playing

    @property
    def complete(self) -> bool:
        """Whether every line-up has been played often enough.

        Matches count in the order in which they began, once all that began before have ended: else short ones would
        count more often.
        """
        if not self._lineups:
            return False
        return min(self._counts(range(1, self._whole + 1)).values()) >= self._quota

    def _counts(self, numbers: Iterable[int]) -> dict[int, int]:
        """Counts ended matches by line-up; matches from before all teams were known belong to none."""
        counts = dict.fromkeys(self._lineups, 0)
        for number in numbers:
            if (matchup := self._ended[number]) in counts:
                counts[matchup] += 1
        return counts

    def player(self, _name: str, number: int) -> str:
        """Returns the label of a player."""
        return self.players[-number - 1]

    def set_teams(self, name: str, teams: tuple[int, ...]) -> None:
        """Takes over the teams of a behavior name that simulators have."""
        known = self._teams.setdefault(name, set())
        if known >= set(teams):
            return
        known |= set(teams)
        if self._teams.keys() >= self.names and len(self._order()) > 1:
            self._begin()

    def ghosts(self, name: str, steps: int) -> None:
        """Does nothing: a tournament does not depend on steps."""

    def results(self, results: Results) -> Iterator[dict[str, Any]]:
        """Counts matches that ended, and yields a line of the match file for each."""
        for ended in one_by_one(results):
            lineup, teams = self._lineups.get(ended.matchup), self._order()
            line = {"match": ended.number, "simulator": ended.simulator, "matchup": ended.matchup}
            if lineup is None or not ended.behavior_ids:
                self._ended[ended.number] = 0
                yield {**line, "lost": True}
                continue
            self._ended[ended.number] = ended.matchup
            yield {
                **line,
                "players": {s: self.players[lineup[teams.index(BehaviorId.parse(s).team)]] for s in ended.behavior_ids},
                "scores": ended.scores,
                "rewards": ended.rewards,
                "explicit": ended.explicit,
            }
        while self._whole + 1 in self._ended:
            self._whole += 1
        self._narrow()

    # ---------------------------------------------------------------- inside

    def _order(self) -> list[int]:
        return sorted(set().union(*self._teams.values()))

    def _begin(self) -> None:
        """Begins the tournament, because all teams are known."""
        teams, count = self._order(), len(self.players)
        if self._mirror or count < len(teams):
            lineups = list(itertools.product(range(count), repeat=len(teams)))
            if not self._mirror:
                lineups = [one for one in lineups if len(set(one)) > 1]
        else:
            lineups = list(itertools.permutations(range(count), len(teams)))
        self._lineups = dict(enumerate(lineups, self._given + 1))
        self._given += len(lineups)
        of_a_pair = sum({0, 1} <= set(one) for one in lineups) or 1
        self._quota = -(-self._matches // of_a_pair)
        self._assign(list(self._lineups))

    def _narrow(self) -> None:
        """Removes line-ups that have been played often enough from the assignment."""
        counts = self._counts(self._ended)
        left = [matchup for matchup, count in counts.items() if count < self._quota] or list(self._lineups)
        if self.assignment is not None and left != [one.number for one in self.assignment.matchups]:
            self._assign(left)

    def _assign(self, numbers: Sequence[int]) -> None:
        teams = self._order()
        matchups = []
        for number in numbers:
            ghosts = {
                str(BehaviorId(name=name, team=team)): -1 - self._lineups[number][teams.index(team)]
                for name, own in sorted(self._teams.items())
                for team in sorted(own)
            }
            matchups.append(Matchup(number=number, team=NO_TEAM, ghosts=ghosts))
        serial = 1 if self.assignment is None else self.assignment.serial + 1
        self.assignment = MatchupAssignment(serial=serial, matchups=tuple(matchups))

    # ---------------------------------------------------------------- on disk

    def to_plain(self) -> dict[str, Any]:
        """Returns nothing: a tournament is not resumed."""
        return {}

    def restore(self, plain: dict[str, Any]) -> None:
        """Does nothing: see `to_plain`."""
