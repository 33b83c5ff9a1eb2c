"""What coordination holds of self-play: the rules, the weights that ghosts play with, and what of both is published.

Weights go to stepping under a few keys that are used again, so that no reader keeps more than an assignment needs. They
are published before the assignment that names them, and that after it is on disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from sparring.pipeline.coordination.opponents import ExternalOpponent
from sparring.pipeline.coordination.self_play import SelfPlay
from sparring.pipeline.coordination.snapshots import Snapshots
from sparring.pipeline.coordination.tournament import Tournament
from sparring.pipeline.files import append
from sparring.pipeline.messages.matches import RatedLearner, Rating, Results
from sparring.pipeline.messages.state import PolicyWeights
from sparring.pipeline.queues.interface import Topic

MATCHES_FILE: Final = "matches.jsonl"
PLAYERS_FOLDER: Final = "players"
"""Folder within that of the run with the weights of opponents from elsewhere, and of the players of a tournament."""
_LONGEST: Final = 16 * 2**20


class Ghosts:
    """Self-play of one run.

    Args:
        rules: who plays whom.
        directory: of the run.
        elsewhere: weights of opponents from elsewhere, by behavior name, in the order of their numbers.
        topic: for weights of ghosts.

    Attributes:
        missed: matches that ended and were never heard of.
    """

    def __init__(
        self,
        rules: SelfPlay | Tournament,
        directory: Path,
        elsewhere: Mapping[tuple[str, int], PolicyWeights],
        topic: Topic,
    ) -> None:
        self.rules = rules
        self._snapshots = Snapshots(directory)
        self._elsewhere = elsewhere
        self._board = topic
        self._latest: dict[str, PolicyWeights] = {}
        self._unsaved: dict[tuple[str, int], PolicyWeights] = {}
        self._slots: list[tuple[str, int] | None] = []  # what is published under each key
        self._matches = directory / MATCHES_FILE
        self._lines: list[str] = []
        self._written = 0
        self._told: dict[str, dict[str, int]] = {}  # matches heard of, by source and behavior
        self.missed = 0

    @property
    def serial(self) -> int:
        """Of the assignment; 0 before the first."""
        return 0 if self.rules.assignment is None else self.rules.assignment.serial

    def knows(self, name: str, version: int) -> bool:
        """Whether it is decided who plays with these weights of a behavior."""
        side = self.rules.sides.get(name)
        return side is None or (side.version >= version and self.rules.assignment is not None)

    # ---------------------------------------------------------------- what is heard

    def weights(self, weights: PolicyWeights) -> None:
        """A learner has published weights."""
        assert isinstance(self.rules, SelfPlay)
        self._hold()
        self._latest[weights.behavior] = weights
        self.rules.weights(weights.behavior, weights.version, weights.trained)
        self._save()  # the next ones may come before the next state is written

    def stepped(self, teams: Mapping[str, tuple[int, ...]], ghosts: Mapping[str, int]) -> None:
        """A stepping service has named teams, and ghosts have played so many steps in all, by behavior name."""
        for name in sorted(self.rules.names & teams.keys()):
            self.rules.set_teams(name, teams[name])
        for name in sorted(self.rules.names & ghosts.keys()):
            self.rules.ghosts(name, ghosts[name])

    def results(self, source: str, name: str, results: Results) -> list[tuple[str, float]]:
        """Matches of a source have ended, told with a behavior; returns each learner of one with its score.

        Where assembly died, some may come again and some never; these are counted in `missed`.
        """
        told = self._told.setdefault(source, {})
        known = told.get(name, 0) - results.before
        self.missed += max(0, -known)
        told[name] = max(told.get(name, 0), results.before + len(results.numbers))
        lines = list(self.rules.results(_without(results, max(0, known))))
        self._lines += [json.dumps({"source": source, **line}) for line in lines]
        return [
            (player, line["scores"][behavior_id])
            for line in lines
            for behavior_id, player in line["players"].items()
            if player in self.rules.names
        ]

    # ---------------------------------------------------------------- what is kept and published

    def keep(self) -> dict[str, Any]:
        """Brings the files up to date, except for the state, which it returns as plain JSON values."""
        self._save()
        if self._lines:
            if self._written > _LONGEST:
                self._matches.replace(self._former)
            self._written = append(self._matches, "".join(line + "\n" for line in self._lines).encode())
            self._lines.clear()
        return {
            "rules": self.rules.to_plain(),
            "matches_bytes": self._written,
            "told": self._told,
            "missed": self.missed,
        }

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Goes on from what `keep` gave: what is in the files beyond it comes again."""
        self.rules.restore(plain["rules"])
        self._written, self._told, self.missed = plain["matches_bytes"], plain["told"], plain["missed"]
        if _size(self._matches) < self._written <= _size(self._former):  # put aside after that state was written
            self._former.replace(self._matches)
        if _size(self._matches) > self._written:
            with self._matches.open("r+b") as file:
                file.truncate(self._written)
        self._written = _size(self._matches)

    def publish(self) -> None:
        """Publishes the weights that the assignment names, where they are not published yet."""
        playing = self.rules.playing
        for at, key in enumerate(self._slots):
            if key not in playing:
                self._slots[at] = None
        for name, number in sorted(playing - set(self._slots)):
            if None not in self._slots:
                self._slots.append(None)
            at = self._slots.index(None)
            self._slots[at] = name, number
            known = self._latest.get(name)
            if number < 0:
                weights = self._elsewhere[name, number]
            elif known is not None and known.version == number:
                weights = known
            else:
                weights = self._snapshots.load(name, number)
            self._board.publish(f"ghost-{at}", weights)
        self._tidy()

    def ratings(self) -> dict[str, RatedLearner]:
        """How strong each learner is, and what it meets."""
        rules = self.rules
        return {} if isinstance(rules, Tournament) else {name: _rated(rules, name) for name in rules.sides}

    def rating(self, name: str) -> float | None:
        """How strong a learner is: Elo, or with more than two teams mu; None where nothing is rated."""
        rules = self.rules
        if isinstance(rules, Tournament) or name not in rules.sides:
            return None
        return rules.ratings.skills[name][0] if _many(rules) else rules.ratings.elo[name]

    def gauges(self) -> Iterator[tuple[str, float]]:
        """Names and values for the numbers of the service."""
        if isinstance(self.rules, Tournament):
            return
        ratings = self.rules.ratings
        for name, side in self.rules.sides.items():
            window = [ratings.elo[f"{name}@{version}"] for version in side.window]
            mean, deviation = spread(window)
            if _many(self.rules):
                yield f"mu/{name}", ratings.skills[name][0]
                yield f"sigma/{name}", ratings.skills[name][1]
            else:
                yield f"elo/{name}", ratings.elo[name]
                yield f"opponents.elo/{name}", mean
                yield f"opponents.elo_deviation/{name}", deviation

    def described(self) -> dict[str, Any]:
        """The assignment, for the log."""
        rules = self.rules
        opponents = sorted({rules.player(name, number) for name, number in rules.playing})
        return {"team": rules.team, "opponents": opponents, "changes": rules.changes}

    # ---------------------------------------------------------------- inside

    @property
    def _former(self) -> Path:
        """The table of matches before this one."""
        return self._matches.with_suffix(".old.jsonl")

    def _save(self) -> None:
        """Writes the weights that are wanted and not on disk; where the disk is full they stay here for the next time.

        Raises:
            OSError: it is.
        """
        self._hold()
        for key, weights in [*self._unsaved.items()]:
            self._snapshots.save(weights)
            del self._unsaved[key]

    def _hold(self) -> None:
        """Keeps the latest weights, where they are wanted and not on disk, beyond the next ones."""
        wanted = self.rules.wanted
        for name, latest in self._latest.items():
            if (name, latest.version) in wanted and not self._snapshots.has(name, latest.version):
                self._unsaved[name, latest.version] = latest
        self._unsaved = {key: weights for key, weights in self._unsaved.items() if key in wanted}

    def _tidy(self) -> None:
        """Removes snapshots that nobody needs any more."""
        wanted = self.rules.wanted
        for name, side in self.rules.sides.items():
            if not side.settings.keep_all_snapshots:
                self._snapshots.keep(name, {number for one, number in wanted if one == name})


def _without(results: Results, first: int) -> Results:
    """The matches after the first ones."""
    if not first:
        return results
    rows = int(results.row_counts[:first].sum())
    return replace(
        results,
        **{name: getattr(results, name)[first:] for name in ("numbers", "matchups", "simulators", "row_counts")},
        **{name: getattr(results, name)[rows:] for name in ("who", "scores", "explicit", "rewards")},
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _many(rules: SelfPlay) -> bool:
    """Whether there are more than two teams."""
    return len({team for side in rules.sides.values() for team in side.teams}) > 2


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Mean and standard deviation; zeros of none."""
    found = list(values)
    if not found:
        return 0.0, 0.0
    mean = sum(found) / len(found)
    return float(mean), float((sum((one - mean) ** 2 for one in found) / len(found)) ** 0.5)


def _rated(rules: SelfPlay, name: str) -> RatedLearner:
    side = rules.sides[name]
    ratings = rules.ratings
    opponents = [(player, record) for player, record in side.records.items() if player in ratings.elo]
    return RatedLearner(
        team=-1 if rules.team is None else rules.team,
        learning=name in rules.learning,
        elo=ratings.elo[name],
        mu=ratings.skills[name][0],
        sigma=ratings.skills[name][1],
        ghost_steps=side.ghost,
        opponents={
            player: Rating(
                elo=ratings.elo[player],
                mu=ratings.skills[player][0],
                matches=record.matches,
                win_rate=record.points / record.matches,
            )
            for player, record in opponents
        },
    )


def elsewhere(
    directory: Path, opponents: Mapping[str, Sequence[ExternalOpponent]]
) -> dict[tuple[str, int], PolicyWeights]:
    """What opponents from elsewhere, and the players of a tournament, play with, under their numbers: -1, -2, ...

    Args:
        directory: of the run.
        opponents: by behavior name.

    Raises:
        ServiceError: one is missing or damaged.
    """
    players = Snapshots(directory / PLAYERS_FOLDER)
    found = {}
    for name, own in opponents.items():
        for number, one in enumerate(own, 1):
            scripted = PolicyWeights(behavior=name, version=-number, arrays={}, script=one.script)
            found[name, -number] = scripted if one.script else replace(players.load(name, number), version=-number)
    return found
