"""Ghost self-play: which team learns, who plays against it, and how well it does. Rules without I/O.

One team learns at a time; all others are ghosts, fixed policies. A team is a number: all behavior names that have it
learn together. Names with several teams play against themselves (symmetric), others against each other (asymmetric).

    every `save_steps` learner steps      a snapshot of the weights joins the window
    every `team_change` learner steps     the next team learns
    every `swap_steps` ghost steps        new opponents are sampled, the latest weights among them

Time is that of the weights: a snapshot, a change of team and, in lockstep, a change of opponents happen when new
weights arrive. A learner that a crash threw back continues to count from where it stands.
"""

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Self

from openskill.models import PlackettLuce

from sparring.pipeline.coordination.opponents import ExternalOpponent, Record, Side, sample_opponent
from sparring.pipeline.coordination.settings import Candidate, SelfPlaySettings
from sparring.pipeline.messages.matches import Matchup, MatchupAssignment, Results, ghosts_of, one_by_one
from sparring.pipeline.specs import BehaviorId

SCRIPTED: Final = "scripted"
"""The player of a side that simulators play themselves."""
_KNOWN_MATCHUPS: Final = 256
_MODEL: Final = PlackettLuce()


def expected(own: float, other: float) -> float:
    """Returns the expected score, 0 to 1, of a player with rating `own` against one with `other`."""
    return float(1 / (1 + 10 ** ((other - own) / 400)))


@dataclass(slots=True)
class Ratings:
    """Keeps the ratings of all players: learners, and the fixed policies that they play against, by name.

    Two teams: Elo (1978, "The Rating of Chessplayers"). More: Plackett-Luce with mu and sigma (Weng and Lin 2011, "A
    Bayesian Approximation Method for Online Ranking"), by the library `openskill`.

    Attributes:
        elo: by player.
        skills: mu and sigma, by player.
        matches: rated so far.
    """

    elo: dict[str, float] = field(default_factory=dict)
    skills: dict[str, tuple[float, float]] = field(default_factory=dict)
    matches: int = 0

    def enter(self, player: str, *, elo: float = 1200.0, like: str | None = None) -> None:
        """Enters a new player with the given rating, or with that of another player."""
        if player in self.elo:
            return
        if like is None:
            rating = _MODEL.rating()
            self.elo[player], self.skills[player] = elo, (rating.mu, rating.sigma)
        else:
            self.elo[player], self.skills[player] = self.elo[like], self.skills[like]

    def leave(self, player: str) -> None:
        """Removes a player."""
        self.elo.pop(player, None)
        self.skills.pop(player, None)

    def rate(self, teams: Sequence[Sequence[str]], scores: Sequence[float], k: float = 16.0) -> None:
        """Rates one match.

        Args:
            teams: players of each, at least two teams.
            scores: of each team: 1 won, 0.5 a draw, 0 lost; with more than two teams, the higher the better.
            k: how far an Elo rating moves at most.
        """
        self.matches += 1
        if len(teams) == 2:
            own, other = (sum(self.elo[player] for player in team) / len(team) for team in teams)
            change = k * (scores[0] - expected(own, other))
            for team, moved in zip(teams, (change, -change), strict=True):
                for player in team:
                    self.elo[player] += moved
            return
        before = [[_MODEL.create_rating(list(self.skills[player])) for player in team] for team in teams]
        after: Any = _MODEL.rate(before, scores=[float(score) for score in scores])
        found: dict[str, list[tuple[float, float]]] = {}  # a policy may play several behavior ids
        for team, ratings in zip(teams, after, strict=True):
            for player, rating in zip(team, ratings, strict=True):
                found.setdefault(player, []).append((rating.mu, rating.sigma))
        for player, values in found.items():
            self.skills[player] = statistics.mean(mu for mu, _ in values), statistics.mean(sigma for _, sigma in values)


@dataclass(kw_only=True, slots=True)
class SelfPlay:
    """Decides the learning team and the matchups of one run; it is saved as it is.

    Attributes:
        seed: of the run.
        places: matchups of an assignment.
        lockstep: opponents change with new weights only.
        sides: by behavior name.
        ratings: of all players.
        assignment: who plays now; None before all is known.
        changes: of the learning team so far.
        unknown: matches of matchups that are no longer known.
        lost: matches without a result.
        unopposed: matches in which one team alone has played, although simulators have named others; they count for no
            rating.
        played: teams that have played a match.
        queue: teams, the learning one first.
        turn: learner steps since the team began to learn, by behavior name.
        sampled: opponent in each place, by behavior id.
        matchups: the latest, by number.
        arrived: names whose weights have arrived in this incarnation.
    """

    seed: int
    places: int
    lockstep: bool
    sides: dict[str, Side] = field(default_factory=dict)
    ratings: Ratings = field(default_factory=Ratings)
    assignment: MatchupAssignment | None = None
    changes: int = 0
    unknown: int = 0
    lost: int = 0
    unopposed: int = 0
    played: set[int] = field(default_factory=set)
    queue: list[int] = field(default_factory=list)
    turn: dict[str, int] = field(default_factory=dict)
    sampled: dict[str, list[int]] = field(default_factory=dict)
    matchups: dict[int, Matchup] = field(default_factory=dict)
    arrived: set[str] = field(default_factory=set)

    def add(self, name: str, settings: SelfPlaySettings, max_steps: int, external: Sequence[ExternalOpponent]) -> None:
        """Adds a behavior name, whose learner ends at `max_steps`, with opponents that are no snapshots of this run."""
        self.sides = dict(sorted({**self.sides, name: Side(settings, max_steps, [*external])}.items()))
        self.ratings.enter(name, elo=settings.initial_elo)

    @property
    def names(self) -> frozenset[str]:
        """Behavior names under self-play."""
        return frozenset(self.sides)

    @property
    def team(self) -> int | None:
        """The team that learns; None before any team is known."""
        return self.queue[0] if self.queue else None

    @property
    def learning(self) -> list[str]:
        """Behavior names of the learning team."""
        return [name for name, side in self.sides.items() if self.team in side.teams]

    @property
    def absent(self) -> set[int]:
        """Teams that simulators have named, and without which matches are played."""
        return {*self.queue} - self.played if self.unopposed else set()

    def is_opposed(self, behavior_ids: Iterable[str]) -> bool:
        """Returns whether the behavior ids of a match have an opponent, who is scripted where there is one team."""
        return len(self.queue) < 2 or len({BehaviorId.parse(one).team for one in behavior_ids}) > 1

    @property
    def wanted(self) -> set[tuple[str, int]]:
        """Behavior name and number of each policy that plays or may be sampled: their weights are needed."""
        found = {(name, version) for name, side in self.sides.items() for version in side.window}
        return found | self.playing

    @property
    def playing(self) -> set[tuple[str, int]]:
        """Behavior name and number of the ghosts of the assignment."""
        return set() if self.assignment is None else ghosts_of(self.assignment.matchups)

    # ---------------------------------------------------------------- what arrives

    def set_teams(self, name: str, teams: tuple[int, ...]) -> None:
        """Takes over the teams of a behavior name that simulators have."""
        side = self.sides[name]
        new = [team for team in teams if team not in side.teams]
        side.teams = sorted([*side.teams, *new])
        self.queue += [team for team in new if team not in self.queue]
        if not self.changes and not any(self.turn.values()):
            self.queue.sort()
        if new:
            self._assign()

    def weights(self, name: str, version: int, trained: int) -> None:
        """Takes over new weights of a behavior name."""
        side = self.sides[name]
        self.arrived.add(name)
        if version <= side.version:
            self._assign()
            return
        # steps trained before the first count belong to no turn
        gained = max(0, trained - side.trained) if side.version else 0
        side.version, side.trained = version, trained
        side.steps += gained
        if not side.window or side.steps - side.saved_at >= side.settings.save_steps:
            self._save(name, side)
        if self.team in side.teams:
            self.turn[name] = self.turn.get(name, 0) + gained
            if self.turn[name] >= side.settings.team_change:
                self._change_team()
        self._swap()
        self._assign()

    def ghosts(self, name: str, steps: int) -> None:
        """Takes over the total steps of ghosts of a behavior name."""
        self.sides[name].ghost = max(self.sides[name].ghost, steps)
        if not self.lockstep and self._swap():
            self._assign()

    def results(self, results: Results, first: int = 0) -> Iterator[dict[str, Any]]:
        """Rates matches that ended, and yields a line of the match file for each from the `first` on."""
        for match in itertools.islice(one_by_one(results), first, None):
            matchup = self.matchups.get(match.matchup)
            scores = match.scores
            if matchup is not None:  # a team that a simulator has named since then has not played
                scores = {one: score for one, score in scores.items() if matchup.covers(BehaviorId.parse(one))}
            teams = {BehaviorId.parse(one).team for one in scores}
            self.played |= teams
            if not match.behavior_ids:
                self.lost += 1
            elif matchup is None:
                self.unknown += 1
            elif match.explicit or len(teams) > 1:
                players = self._rate(matchup, scores)
                yield {
                    "match": match.number,
                    "simulator": match.simulator,
                    "matchup": match.matchup,
                    "team": matchup.team,
                    "players": players,
                    "steps": {one: self.sides[one].steps for one in sorted({*players.values()} & self.sides.keys())},
                    "scores": {behavior_id: score for behavior_id, score in scores.items() if score >= 0},
                    "explicit": match.explicit,
                }

    # ---------------------------------------------------------------- what follows

    def _save(self, name: str, side: Side) -> None:
        """Adds the latest weights to the window, which drops the oldest."""
        side.saved_at = side.steps
        if side.version not in side.window:
            side.window.append(side.version)
            self.ratings.enter(_name_of(name, side.version), like=name)
        del side.window[: -side.settings.window]

    def _change_team(self) -> None:
        """Gives the turn to the next team that is not done."""
        for _ in self.queue:
            self.queue.append(self.queue.pop(0))
            if self.team not in self.absent and not all(self.sides[name].done for name in self.learning):
                break
        self.changes += 1
        self.turn.clear()
        self.sampled.clear()

    def _swap(self) -> bool:
        """Forgets the opponents of names whose ghosts have played long enough; returns whether there were any."""
        due = {name for name, side in self.sides.items() if side.ghost - side.swapped_at >= side.settings.swap_steps}
        for side in (self.sides[name] for name in due):
            side.swapped_at = side.ghost
            side.crossings += 1
        self.sampled = {one: own for one, own in self.sampled.items() if BehaviorId.parse(one).name not in due}
        return bool(due)

    def _assign(self) -> None:
        """Samples opponents for the behavior ids that have none, and makes a new assignment if they differ."""
        team = self.team
        present = {name: side for name, side in self.sides.items() if side.teams}
        if team is None or not present.keys() <= self.arrived:
            return
        if all(self.sides[name].done for name in self.learning) and not all(side.done for side in present.values()):
            self._change_team()
            team = self.queue[0]
        ids = [BehaviorId(name=name, team=one) for name, side in present.items() for one in side.teams if one != team]
        for behavior_id in ids:
            if str(behavior_id) not in self.sampled:
                self.sampled[str(behavior_id)] = [self._sample(behavior_id, place) for place in range(self.places)]
        former = () if self.assignment is None else self.assignment.matchups
        matchups = []
        for place in range(self.places):
            ghosts = {one: self.sampled[one][place] for one in map(str, ids)}
            if former and former[place].team == team and former[place].ghosts == ghosts:
                matchups.append(former[place])
                continue
            number = next(reversed(self.matchups), 0) + 1
            self.matchups[number] = Matchup(number=number, team=team, ghosts=ghosts)
            matchups.append(self.matchups[number])
        if tuple(matchups) != former:
            serial = 1 if self.assignment is None else self.assignment.serial + 1
            self.assignment = MatchupAssignment(serial=serial, matchups=tuple(matchups))
            self.matchups = dict([*self.matchups.items()][-_KNOWN_MATCHUPS:])
            self._forget()

    def _sample(self, behavior_id: BehaviorId, place: int) -> int:
        side = self.sides[behavior_id.name]
        occasion = (self.seed, place, side.crossings, self.changes)
        number = sample_opponent(occasion, behavior_id, side, partial(self._candidate, behavior_id.name))
        like = behavior_id.name if number > 0 else None
        self.ratings.enter(self.player(behavior_id.name, number), elo=side.settings.initial_elo, like=like)
        return number

    def _candidate(self, name: str, version: int) -> Candidate:
        """Returns what the learning team has made of a snapshot; where several learn together, the mean."""
        player = _name_of(name, version)
        records = [self.sides[one].records.get(player, Record()) for one in self.learning] or [Record()]
        rate = sum(one.rate for one in records) / len(records)
        return Candidate(version, rate, sum(one.matches for one in records))

    def _forget(self) -> None:
        """Removes the players that can no longer be opponents."""
        known = ghosts_of(self.matchups.values()) | self.wanted
        possible = {self.player(*policy) for policy in known} | {*self.sides, SCRIPTED}
        for player in [player for player in self.ratings.elo if player not in possible]:
            self.ratings.leave(player)
            for side in self.sides.values():
                side.records.pop(player, None)

    def player(self, name: str, number: int) -> str:
        """Returns the label of a ghost."""
        return _name_of(name, number) if number > 0 else self.sides[name].external[-number - 1].label

    def _rate(self, matchup: Matchup, scores: Mapping[str, float]) -> dict[str, str]:
        """Rates one match, the learning team first; returns its players by behavior id."""
        players: dict[str, str] = {}
        teams: dict[int, list[str]] = {matchup.team: []}
        found: dict[int, list[float]] = {}
        for behavior_id, score in scores.items():
            one = BehaviorId.parse(behavior_id)
            learns = one.team == matchup.team
            players[behavior_id] = one.name if learns else self.player(one.name, matchup.ghosts[behavior_id])
            teams.setdefault(one.team, []).append(players[behavior_id])
            if score >= 0:
                found.setdefault(one.team, []).append(score)
        if matchup.team not in found:
            self.lost += 1
            return players
        own = sum(found[matchup.team]) / len(found[matchup.team])
        settings = self.sides[teams[matchup.team][0]].settings
        if not self.is_opposed(scores):
            self.unopposed += 1
            return players
        if len(teams) == 1:
            self.ratings.enter(SCRIPTED, elo=settings.initial_elo)
            teams[matchup.team + 1] = [SCRIPTED]
        results = [sum(found[team]) / len(found[team]) if team in found else 1 - own for team in teams]
        learners, *others = teams.values()
        self.ratings.rate([learners, *others], results, settings.elo_k)
        for opponents, other in zip(others, results[1:], strict=True):
            points = own if len(teams) == 2 else 0.5 + 0.5 * ((own > other) - (own < other))
            for learner, opponent in itertools.product(learners, opponents):
                records = self.sides[learner].records
                matches, before = records.get(opponent, Record())
                records[opponent] = Record(matches + 1, before + points)
        return players

    # ---------------------------------------------------------------- on disk

    def continue_from(self, saved: Self) -> Self:
        """Returns the saved rules with the settings and the behavior names of these."""
        rules = replace(
            saved, seed=self.seed, places=self.places, lockstep=self.lockstep, sides={}, arrived=self.arrived
        )
        for name, side in self.sides.items():
            former = saved.sides.get(name, side)
            external = _renumbered(former.external, side.external)
            rules.sides[name] = replace(former, settings=side.settings, max_steps=side.max_steps, external=external)
            rules.ratings.enter(name, elo=side.settings.initial_elo)
        return rules


def _name_of(name: str, version: int) -> str:
    return f"{name}@{version}"


def _renumbered(saved: Sequence[ExternalOpponent], present: Sequence[ExternalOpponent]) -> list[ExternalOpponent]:
    """Returns the present external opponents under the numbers that a saved state has for them.

    One that is no longer configured keeps its number and is not sampled again.
    """
    known = {one.label: one for one in present}
    return [known.pop(one.label, replace(one, weight=0.0)) for one in saved] + list(known.values())
