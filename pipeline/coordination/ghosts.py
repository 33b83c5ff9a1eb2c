"""Self-play of one run: its rules, the weights of its ghosts, its match file, and what is published of them.

Stepping receives weights under a few keys that are reused, so that no reader keeps more than an assignment needs.
They are published before the assignment that names them, and the assignment after it is on disk.
"""

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
from sparring.pipeline.messages.channels import ghost_topic
from sparring.pipeline.messages.matches import RatedLearner, Rating, Results
from sparring.pipeline.messages.state import PolicyWeights
from sparring.pipeline.queues.interface import Publisher

MATCHES_FILE: Final = "matches.jsonl"
PLAYERS_FOLDER: Final = "players"
"""Folder within that of the run that holds the weights of external opponents and of the players of a tournament."""
_LONGEST: Final = 16 * 2**20


class Ghosts:
    """Applies the rules of self-play to a run, and publishes and stores what follows.

    Args:
        rules: of self-play or of a tournament.
        directory: of the run.
        topic: for weights of ghosts.
    """

    def __init__(
        self,
        rules: SelfPlay | Tournament,
        directory: Path,
        topic: Publisher,
    ) -> None:
        self.rules = rules
        self._directory = directory
        self._snapshots = Snapshots(directory)
        self._external: dict[tuple[str, int], PolicyWeights] = {}
        self._topic = topic
        self._latest: dict[str, PolicyWeights] = {}
        self._unsaved: dict[tuple[str, int], PolicyWeights] = {}
        self._slots: list[tuple[str, int] | None] = []  # what is published under each key
        self._matches = directory / MATCHES_FILE
        self._lines: list[str] = []
        self._written = 0
        self._received: dict[str, dict[str, int]] = {}  # matches whose results arrived, by source and behavior

    def load_external(self, name: str, opponents: Sequence[ExternalOpponent]) -> None:
        """Loads the weights of a behavior's external opponents, or of the players of a tournament: -1, -2, ...

        Raises:
            ServiceError: a file of weights is missing or damaged.
        """
        players = Snapshots(self._directory / PLAYERS_FOLDER)
        for number, one in enumerate(opponents, 1):
            scripted = PolicyWeights(behavior=name, version=-number, arrays={}, script=one.script)
            weights = scripted if one.script else replace(players.load(name, number), version=-number)
            self._external[name, -number] = weights

    @property
    def serial(self) -> int:
        """Serial of the assignment, 0 before the first."""
        return 0 if self.rules.assignment is None else self.rules.assignment.serial

    def knows(self, name: str, version: int) -> bool:
        """Whether an assignment takes this version of a behavior into account."""
        side = self.rules.sides.get(name)
        return side is None or (side.version >= version and self.rules.assignment is not None)

    # ---------------------------------------------------------------- what arrives

    def weights(self, weights: PolicyWeights) -> None:
        """Takes over the weights that a learner has published."""
        assert isinstance(self.rules, SelfPlay)
        self._hold()
        self._latest[weights.behavior] = weights
        self.rules.weights(weights.behavior, weights.version, weights.trained)
        self._save()  # the next weights may arrive before the next state is written

    def stepped(self, teams: Mapping[str, tuple[int, ...]], ghosts: Mapping[str, int]) -> None:
        """Takes over the teams that stepping has seen, and the total steps of ghosts, by behavior name."""
        for name in sorted(self.rules.names & teams.keys()):
            self.rules.set_teams(name, teams[name])
        for name in sorted(self.rules.names & ghosts.keys()):
            self.rules.ghosts(name, ghosts[name])

    def results(self, results: Results) -> list[tuple[str, float]]:
        """Counts matches that ended, and returns each of their learners with its score.

        Stepping reports again what was not on disk when coordination died; such results are counted once.
        """
        received = self._received.setdefault(results.source, {})
        known = max(0, received.get(results.behavior, 0) - results.before)
        received[results.behavior] = max(received.get(results.behavior, 0), results.before + len(results.numbers))
        lines = list(self.rules.results(_without(results, known)))
        self._lines += [json.dumps({"source": results.source, **line}) for line in lines]
        return [
            (player, line["scores"][behavior_id])
            for line in lines
            for behavior_id, player in line.get("players", {}).items()
            if player in self.rules.names
        ]

    def received(self, source: str) -> int:
        """Returns how many matches of an incarnation of stepping have been counted."""
        return sum(self._received.get(source, {}).values())

    # ---------------------------------------------------------------- what is kept and published

    def keep(self) -> dict[str, Any]:
        """Writes snapshots and matches to disk, and returns the state as plain JSON values."""
        self._save()
        if self._lines:
            if self._written > _LONGEST:
                self._matches.replace(self._former)
            self._written = append(self._matches, "".join(line + "\n" for line in self._lines).encode())
            self._lines.clear()
        return {
            "rules": self.rules.to_plain(),
            "matches_bytes": self._written,
            "received": self._received,
        }

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Continues from what `keep` returned; later lines of the match file are removed, as they arrive again."""
        self.rules.restore(plain["rules"])
        self._written, self._received = plain["matches_bytes"], plain["received"]
        if _size(self._matches) < self._written <= _size(self._former):  # rotated after that state was written
            self._former.replace(self._matches)
        if _size(self._matches) > self._written:
            with self._matches.open("r+b") as file:
                file.truncate(self._written)
        self._written = _size(self._matches)

    def publish(self) -> None:
        """Publishes the weights that the assignment names and that are not published yet."""
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
                weights = self._external[name, number]
            elif known is not None and known.version == number:
                weights = known
            else:
                weights = self._snapshots.load(name, number)
            self._topic.publish(ghost_topic(at), weights)
        self._tidy()

    def ratings(self) -> dict[str, RatedLearner]:
        """Returns the rating of each learner and of its opponents, once a match is rated."""
        rules = self.rules
        if isinstance(rules, Tournament) or not rules.ratings.matches:
            return {}
        return {name: _rated(rules, name) for name in rules.sides}

    def rating(self, name: str) -> float | None:
        """Returns a learner's Elo rating, or with more than two teams its mu; None where nothing is rated."""
        rules = self.rules
        if isinstance(rules, Tournament) or name not in rules.sides or not rules.ratings.matches:
            return None
        return rules.ratings.skills[name][0] if _many(rules) else rules.ratings.elo[name]

    def gauges(self) -> Iterator[tuple[str, float]]:
        """Yields name and value of each gauge, once a match is rated."""
        if isinstance(self.rules, Tournament) or not self.rules.ratings.matches:
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
        """Describes the assignment for the log."""
        rules = self.rules
        opponents = sorted({rules.player(name, number) for name, number in rules.playing})
        return {"team": rules.team, "opponents": opponents, "changes": rules.changes}

    # ---------------------------------------------------------------- inside

    @property
    def _former(self) -> Path:
        """The match file that was rotated away."""
        return self._matches.with_suffix(".old.jsonl")

    def _save(self) -> None:
        """Writes the weights that can still play and are not on disk; on failure they stay here for the next call.

        Raises:
            OSError: the disk is full.
        """
        self._hold()
        for key, weights in [*self._unsaved.items()]:
            self._snapshots.save(weights)
            del self._unsaved[key]

    def _hold(self) -> None:
        """Keeps the latest weights past the next ones, where they can still play and are not on disk."""
        wanted = self.rules.wanted
        for name, latest in self._latest.items():
            if (name, latest.version) in wanted and not self._snapshots.has(name, latest.version):
                self._unsaved[name, latest.version] = latest
        self._unsaved = {key: weights for key, weights in self._unsaved.items() if key in wanted}

    def _tidy(self) -> None:
        """Removes the snapshots that can no longer play."""
        wanted = self.rules.wanted
        for name, side in self.rules.sides.items():
            if not side.settings.keep_all_snapshots:
                self._snapshots.keep(name, {number for one, number in wanted if one == name})


def _without(results: Results, first: int) -> Results:
    """Returns the results without their first matches."""
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
    """Whether the game has more than two teams."""
    return len({team for side in rules.sides.values() for team in side.teams}) > 2


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Returns mean and standard deviation, zeros for no values."""
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
