"""Ghost self-play: which team learns, who plays against it, and how well it does. Rules without I/O.

One team learns at a time; all others are ghosts, fixed policies. A team is a number: all behavior names that have it
learn together. Names with several teams play against themselves (symmetric), others against each other (asymmetric).

    every `save_steps` learner steps      a snapshot of the weights joins the window
    every `team_change` learner steps     the next team learns
    every `swap_steps` ghost steps        new opponents are sampled, the latest weights among them

Time is that of the weights: a snapshot, a change of team and, in lockstep, a change of opponents happen when new
weights arrive. A learner that a crash threw back continues to count from where it stands.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from sparring.pipeline.coordination.opponents import ExternalOpponent, Record, Side, sample_opponent
from sparring.pipeline.coordination.ratings import Ratings
from sparring.pipeline.coordination.settings import SelfPlaySettings
from sparring.pipeline.messages.matches import Matchup, MatchupAssignment, Results, one_by_one
from sparring.pipeline.specs import BehaviorId

SCRIPTED: Final = "scripted"
"""The player of a side that simulators play themselves."""
_KNOWN_MATCHUPS: Final = 256


class SelfPlay:
    """Decides the learning team and the matchups of one run.

    Args:
        seed: of the run.
        places: matchups of an assignment.
        lockstep: opponents change with new weights only.

    Attributes:
        sides: by behavior name.
        ratings: of all players.
        assignment: who plays now; None before all is known.
        changes: of the learning team so far.
        unknown: matches of matchups that are no longer known.
        lost: matches without a result.
    """

    def __init__(
        self,
        *,
        seed: int,
        places: int,
        lockstep: bool,
    ) -> None:
        self.sides: dict[str, Side] = {}
        self.ratings = Ratings()
        self.assignment: MatchupAssignment | None = None
        self.changes = 0
        self.unknown = 0
        self.lost = 0
        self._seed = seed
        self._places = places
        self._lockstep = lockstep
        self._queue: list[int] = []  # teams, the learning one first
        self._turn: dict[str, int] = {}  # learner steps since the team began to learn, by behavior name
        self._sampled: dict[BehaviorId, list[int]] = {}
        self._matchups: dict[int, Matchup] = {}  # the latest, by number
        self._numbers = 0
        self._arrived: set[str] = set()  # names whose weights have arrived in this incarnation

    def add(
        self, name: str, settings: SelfPlaySettings, max_steps: int, external: Sequence[ExternalOpponent] = ()
    ) -> None:
        """Adds a behavior name.

        Args:
            name: of the behavior.
            settings: of its self-play.
            max_steps: where its learner ends.
            external: opponents that are no snapshots of this run.
        """
        self.sides = dict(sorted({**self.sides, name: Side(settings, max_steps, [*external])}.items()))
        self.ratings.enter(name, elo=settings.initial_elo)

    @property
    def names(self) -> frozenset[str]:
        """Behavior names under self-play."""
        return frozenset(self.sides)

    @property
    def team(self) -> int | None:
        """The team that learns; None before any team is known."""
        return self._queue[0] if self._queue else None

    @property
    def learning(self) -> list[str]:
        """Behavior names of the learning team."""
        return [name for name, side in self.sides.items() if self.team in side.teams]

    @property
    def wanted(self) -> set[tuple[str, int]]:
        """Behavior name and number of each policy that plays or may be sampled: their weights are needed."""
        found = {(name, version) for name, side in self.sides.items() for version in side.window}
        return found | self.playing

    @property
    def playing(self) -> set[tuple[str, int]]:
        """Behavior name and number of the ghosts of the assignment."""
        matchups = () if self.assignment is None else self.assignment.matchups
        return {
            (BehaviorId.parse(behavior_id).name, number)
            for one in matchups
            for behavior_id, number in one.ghosts.items()
        }

    # ---------------------------------------------------------------- what arrives

    def set_teams(self, name: str, teams: tuple[int, ...]) -> None:
        """Takes over the teams of a behavior name that simulators have."""
        side = self.sides[name]
        new = [team for team in teams if team not in side.teams]
        side.teams = sorted([*side.teams, *new])
        self._queue += [team for team in new if team not in self._queue]
        if not self.changes and not any(self._turn.values()):
            self._queue.sort()
        if new:
            self._assign()

    def weights(self, name: str, version: int, trained: int) -> None:
        """Takes over new weights of a behavior name."""
        side = self.sides[name]
        self._arrived.add(name)
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
            self._turn[name] = self._turn.get(name, 0) + gained
            if self._turn[name] >= side.settings.team_change:
                self._change_team()
        self._swap()
        self._assign()

    def ghosts(self, name: str, steps: int) -> None:
        """Takes over the total steps of ghosts of a behavior name."""
        self.sides[name].ghost = max(self.sides[name].ghost, steps)
        if not self._lockstep and self._swap():
            self._assign()

    def results(self, results: Results) -> Iterator[dict[str, Any]]:
        """Rates matches that ended, and yields a line of the match file for each."""
        for ended in one_by_one(results):
            known = self._matchups.get(ended.matchup)
            if not ended.behavior_ids:
                self.lost += 1
                continue
            if known is None:
                self.unknown += 1
                continue
            teams = {BehaviorId.parse(behavior_id).team for behavior_id in ended.behavior_ids}
            if len(teams) == 1 and not ended.explicit:  # an episode without opponents
                continue
            players = {
                behavior_id: self._player(known, BehaviorId.parse(behavior_id)) for behavior_id in ended.behavior_ids
            }
            self._rate(known, players, ended.scores)
            yield {
                "match": ended.number,
                "simulator": ended.simulator,
                "matchup": ended.matchup,
                "team": known.team,
                "players": players,
                "scores": {behavior_id: score for behavior_id, score in ended.scores.items() if score >= 0},
                "explicit": ended.explicit,
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
        for _ in self._queue:
            self._queue.append(self._queue.pop(0))
            if not self._over():
                break
        self.changes += 1
        self._turn.clear()
        self._sampled.clear()

    def _over(self) -> bool:
        """Returns whether all learners of a team have reached their end."""
        return all(self.sides[name].done for name in self.learning)

    def _swap(self) -> bool:
        """Forgets the opponents of names whose ghosts have played long enough; returns whether there were any."""
        due = [side for side in self.sides.values() if side.ghost - side.swapped_at >= side.settings.swap_steps]
        for side in due:
            side.swapped_at = side.ghost
            side.crossings += 1
        names = {name for name, side in self.sides.items() if side in due}
        self._sampled = {
            behavior_id: matchup for behavior_id, matchup in self._sampled.items() if behavior_id.name not in names
        }
        return bool(due)

    def _assign(self) -> None:
        """Samples opponents for the behavior ids that have none, and makes a new assignment if they differ."""
        team = self.team
        present = {name: side for name, side in self.sides.items() if side.teams}
        if team is None or not present.keys() <= self._arrived:
            return
        if self._over() and not all(side.done for side in present.values()):
            self._change_team()
            team = self._queue[0]
        behavior_ids = [
            BehaviorId(name=name, team=one) for name, side in present.items() for one in side.teams if one != team
        ]
        for behavior_id in behavior_ids:
            if behavior_id not in self._sampled:
                self._sampled[behavior_id] = [self._sample(behavior_id, place) for place in range(self._places)]
        former = () if self.assignment is None else self.assignment.matchups
        matchups = []
        for place in range(self._places):
            ghosts = {str(behavior_id): self._sampled[behavior_id][place] for behavior_id in behavior_ids}
            same = former and former[place].team == team and former[place].ghosts == ghosts
            matchups.append(former[place] if same else self._new_matchup(team, ghosts))
        if tuple(matchups) != former:
            serial = 1 if self.assignment is None else self.assignment.serial + 1
            self.assignment = MatchupAssignment(serial=serial, matchups=tuple(matchups))
            self._forget()

    def _sample(self, behavior_id: BehaviorId, place: int) -> int:
        side = self.sides[behavior_id.name]
        occasion = (self._seed, place, side.crossings, self.changes)
        number = sample_opponent(occasion, behavior_id, side, self._rates(behavior_id.name, side))
        player = self.player(behavior_id.name, number)
        if number > 0:
            self.ratings.enter(player, like=behavior_id.name)
        else:
            self.ratings.enter(player, elo=side.settings.initial_elo)
        return number

    def _rates(self, name: str, side: Side) -> dict[int, float]:
        """Returns the win rate of the learning team against each snapshot of a side."""
        found = {}
        for version in side.window:
            player = _name_of(name, version)
            records = [self.sides[one].records.get(player, Record()) for one in self.learning]
            if records:
                found[version] = sum(record.rate for record in records) / len(records)
        return found

    def _new_matchup(self, team: int, ghosts: dict[str, int]) -> Matchup:
        self._numbers += 1
        new = Matchup(number=self._numbers, team=team, ghosts=ghosts)
        self._matchups[new.number] = new
        while len(self._matchups) > _KNOWN_MATCHUPS:
            self._matchups.pop(next(iter(self._matchups)))
        return new

    def _forget(self) -> None:
        """Removes the players that can no longer be opponents."""
        possible = {
            self.player(BehaviorId.parse(behavior_id).name, n)
            for d in self._matchups.values()
            for behavior_id, n in d.ghosts.items()
        }
        possible |= {_name_of(name, version) for name, side in self.sides.items() for version in side.window}
        possible |= {*self.sides, SCRIPTED}
        for player in [player for player in self.ratings.elo if player not in possible]:
            self.ratings.leave(player)
            for side in self.sides.values():
                side.records.pop(player, None)

    def player(self, name: str, number: int) -> str:
        """Returns the label of a ghost."""
        return _name_of(name, number) if number > 0 else self.sides[name].external[-number - 1].label

    def _player(self, matchup: Matchup, behavior_id: BehaviorId) -> str:
        return (
            behavior_id.name
            if behavior_id.team == matchup.team
            else self.player(behavior_id.name, matchup.ghosts[str(behavior_id)])
        )

    def _rate(self, matchup: Matchup, players: Mapping[str, str], scores: Mapping[str, float]) -> None:
        """Rates one match, the learning team first."""
        teams: dict[int, list[str]] = {matchup.team: []}
        found: dict[int, list[float]] = {}
        for behavior_id, player in players.items():
            team = BehaviorId.parse(behavior_id).team
            teams.setdefault(team, []).append(player)
            if scores[behavior_id] >= 0:
                found.setdefault(team, []).append(scores[behavior_id])
        if matchup.team not in found:
            self.lost += 1
            return
        own = sum(found[matchup.team]) / len(found[matchup.team])
        if len(teams) == 1:
            self.ratings.enter(SCRIPTED, elo=self.sides[teams[matchup.team][0]].settings.initial_elo)
            teams[matchup.team + 1] = [SCRIPTED]
        results = [sum(found[team]) / len(found[team]) if team in found else 1 - own for team in teams]
        k = self.sides[teams[matchup.team][0]].settings.elo_k
        self.ratings.rate(list(teams.values()), results, k)
        for learner in teams[matchup.team]:
            for opponents, other in list(zip(teams.values(), results, strict=True))[1:]:
                for opponent in opponents:
                    record = self.sides[learner].records.setdefault(opponent, Record())
                    record.matches += 1
                    record.points += own if len(teams) == 2 else 0.5 + 0.5 * ((own > other) - (own < other))

    # ---------------------------------------------------------------- on disk

    def to_plain(self) -> dict[str, Any]:
        """Returns all that a restart needs, as plain JSON values."""
        sides = {}
        for name, side in self.sides.items():
            records = {player: [record.matches, record.points] for player, record in side.records.items()}
            external = [one.label for one in side.external]
            sides[name] = {key: getattr(side, key) for key in _SAVED} | {"records": records, "external": external}
        return {
            "sides": sides,
            "elo": self.ratings.elo,
            "skills": self.ratings.skills,
            "matches": self.ratings.matches,
            "changes": self.changes,
            "unknown": self.unknown,
            "lost": self.lost,
            "queue": self._queue,
            "turn": self._turn,
            "sampled": {str(behavior_id): matchup for behavior_id, matchup in self._sampled.items()},
            "matchups": [asdict(one) for one in self._matchups.values()],
            "numbers": self._numbers,
            "assignment": None if self.assignment is None else asdict(self.assignment),
        }

    def restore(self, plain: dict[str, Any]) -> None:
        """Continues from what `to_plain` returned."""
        for name, saved in plain["sides"].items():
            side = self.sides.get(name)
            if side is None:
                continue
            for key in _SAVED:
                setattr(side, key, saved[key])
            side.external = _renumbered(saved["external"], side.external)
            side.records = {player: Record(*counts) for player, counts in saved["records"].items()}
        self.ratings.elo = dict(plain["elo"])
        self.ratings.skills = {player: (mu, sigma) for player, (mu, sigma) in plain["skills"].items()}
        for name, side in self.sides.items():  # those that the state does not know yet
            self.ratings.enter(name, elo=side.settings.initial_elo)
        self.ratings.matches = plain["matches"]
        self.changes, self.unknown, self.lost = plain["changes"], plain["unknown"], plain["lost"]
        self._numbers = plain["numbers"]
        self._queue, self._turn = list(plain["queue"]), dict(plain["turn"])
        self._sampled = {BehaviorId.parse(behavior_id): matchup for behavior_id, matchup in plain["sampled"].items()}
        self._matchups = {one["number"]: Matchup(**one) for one in plain["matchups"]}
        if plain["assignment"] is not None:
            matchups = tuple(Matchup(**one) for one in plain["assignment"]["matchups"])
            self.assignment = MatchupAssignment(serial=plain["assignment"]["serial"], matchups=matchups)


_SAVED: Final = (
    "teams",
    "version",
    "trained",
    "steps",
    "saved_at",
    "ghost",
    "swapped_at",
    "crossings",
    "window",
)


def _name_of(name: str, version: int) -> str:
    return f"{name}@{version}"


def _renumbered(labels: Sequence[str], present: Sequence[ExternalOpponent]) -> list[ExternalOpponent]:
    """Returns the present external opponents under the numbers that a saved state has for them.

    One that is no longer configured keeps its number and is not sampled again.
    """
    known = {one.label: one for one in present}
    return [known.pop(label, ExternalOpponent(label, 0.0)) for label in labels] + list(known.values())
