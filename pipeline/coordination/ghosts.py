"""Self-play of one run: its rules, the weights of its ghosts, its match file, and what is published of them.

Stepping receives weights under a few keys that are reused, so that no reader keeps more than an assignment needs.
They are published before the assignment that names them, and the assignment after it is on disk.
"""

import json
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from sparring.pipeline.coordination.opponents import ExternalOpponent, Tournament
from sparring.pipeline.coordination.self_play import SelfPlay
from sparring.pipeline.errors import ServiceError
from sparring.pipeline.files import DAMAGE, append, regular, write_atomically
from sparring.pipeline.messages.channels import ghost_topic
from sparring.pipeline.messages.matches import RatedLearner, Rating, Results
from sparring.pipeline.messages.state import PolicyWeights
from sparring.pipeline.queues.interface import Publisher

MATCHES_FILE: Final = "matches.jsonl"
PLAYERS_FOLDER: Final = "players"
"""Folder within that of the run that holds the weights of external opponents and of the players of a tournament."""
_LONGEST: Final = 16 * 2**20


@dataclass(slots=True)
class SavedGhosts:
    """What a restart needs of self-play.

    Attributes:
        rules: of self-play.
        matches_bytes: size of the match file.
        received: matches whose results arrived, by source and behavior.
    """

    rules: SelfPlay
    matches_bytes: int
    received: dict[str, dict[str, int]]


class Snapshots:
    """Stores the snapshots of policies of a run: RUN/BEHAVIOR/snapshots/VERSION.safetensors.

    Args:
        root: the run folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, name: str, version: int) -> Path:
        """Returns the path of a snapshot."""
        return self._root / name / "snapshots" / f"{version:09d}.safetensors"

    def save(self, weights: PolicyWeights) -> None:
        """Writes a snapshot atomically."""
        path = self.path(weights.behavior, weights.version)
        path.parent.mkdir(parents=True, exist_ok=True)
        noted = {"trained": str(weights.trained), "network": weights.network, "trainer": weights.trainer}
        write_atomically(path, save(weights.arrays, noted), durable=False)

    def load(self, name: str, version: int) -> PolicyWeights:
        """Reads a snapshot.

        Raises:
            ServiceError: it is missing or damaged.
        """
        path = self.path(name, version)
        try:
            arrays = dict(sorted(load(regular(path).read_bytes()).items()))  # safetensors gives them in any order
            with safe_open(path, "np") as file:
                noted = file.metadata() or {}
            if not all(np.isfinite(array).all() for array in arrays.values()):
                raise ValueError("NaN or infinity")
            trained = int(noted.get("trained", 0))
        except (*DAMAGE, SafetensorError) as error:
            raise ServiceError(
                f"got {path}, which cannot be read ({error}); expected a snapshot that this run has written; "
                "put it back from a copy of the run folder, or start a new run"
            ) from error
        return PolicyWeights(
            behavior=name,
            version=version,
            arrays=arrays,
            trained=trained,
            network=noted.get("network", ""),
            trainer=noted.get("trainer", ""),
        )

    def keep(self, name: str, versions: Collection[int]) -> None:
        """Removes all other snapshots of a behavior."""
        for path in self.path(name, 0).parent.glob("*.safetensors"):
            if path.stem.isdecimal() and int(path.stem) not in versions:  # a user may keep another one there
                path.unlink(missing_ok=True)


class Ghosts:
    """Applies the rules of self-play to a run, and publishes and stores what follows.

    Args:
        rules: of self-play or of a tournament.
        directory: of the run.
        topic: for weights of ghosts.
    """

    def __init__(self, rules: SelfPlay | Tournament, directory: Path, topic: Publisher) -> None:
        self.rules = rules
        self._directory = directory
        self._snapshots = Snapshots(directory)
        self._external: dict[tuple[str, int], PolicyWeights] = {}
        self._topic = topic
        self._held: dict[tuple[str, int], PolicyWeights] = {}  # the latest, and those that are not on disk yet
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

    def knows(self, name: str, version: int) -> bool:
        """Whether an assignment takes this version of a behavior into account."""
        side = self.rules.sides.get(name)
        return side is None or (side.version >= version and self.rules.assignment is not None)

    # ---------------------------------------------------------------- what arrives

    def weights(self, weights: PolicyWeights) -> None:
        """Takes over the weights that a learner has published."""
        assert isinstance(self.rules, SelfPlay)
        self._held[weights.behavior, weights.version] = weights
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
        rules, lines = self.rules, list(self.rules.results(results, known))
        self._lines += [json.dumps({"source": results.source, **line}) for line in lines]
        if isinstance(rules, SelfPlay):
            lines = [line for line in lines if rules.is_opposed(line["players"])]
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

    def keep(self) -> SavedGhosts | None:
        """Writes snapshots and matches to disk, and returns all that a restart needs; no tournament is restarted."""
        self._save()
        if self._lines:
            if self._written > _LONGEST and not isinstance(self.rules, Tournament):  # whose standings need all
                self._matches.replace(self._former)
            self._written = append(self._matches, "".join(line + "\n" for line in self._lines).encode())
            self._lines.clear()
        if isinstance(self.rules, Tournament):
            return None
        return SavedGhosts(self.rules, self._written, self._received)

    def restore(self, saved: SavedGhosts) -> None:
        """Continues from what `keep` returned; later lines of the match file are removed, as they arrive again."""
        assert isinstance(self.rules, SelfPlay)
        self.rules = self.rules.continue_from(saved.rules)
        self._written, self._received = saved.matches_bytes, saved.received
        if _size(self._matches) < self._written <= _size(self._former):  # rotated after that state was written
            self._former.replace(self._matches)
        if _size(self._matches) > self._written:
            with regular(self._matches).open("r+b") as file:
                file.truncate(self._written)
        self._written = _size(self._matches)

    def publish(self) -> None:
        """Publishes the weights that the assignment names and that are not published yet."""
        playing = self.rules.playing
        self._slots = [key if key in playing else None for key in self._slots]
        for key in sorted(playing - set(self._slots)):
            if None not in self._slots:
                self._slots.append(None)
            at = self._slots.index(None)
            self._slots[at] = key
            weights = self._external.get(key) or self._held.get(key) or self._snapshots.load(*key)
            self._topic.publish(ghost_topic(at), weights)
        for name, side in self.rules.sides.items():
            if not side.settings.keep_all_snapshots:
                self._snapshots.keep(name, {number for one, number in self.rules.wanted if one == name})

    def ratings(self) -> dict[str, RatedLearner]:
        """Returns the rating of each learner and of its opponents, once a match is rated."""
        rules = self.rules
        if isinstance(rules, Tournament) or not rules.ratings.matches:
            return {}
        team, elo, skills = -1 if rules.team is None else rules.team, rules.ratings.elo, rules.ratings.skills
        return {
            name: RatedLearner(
                team=team,
                learning=name in rules.learning,
                elo=elo[name],
                mu=skills[name][0],
                sigma=skills[name][1],
                ghost_steps=side.ghost,
                opponents={
                    player: Rating(elo=elo[player], mu=skills[player][0], matches=matches, win_rate=points / matches)
                    for player, (matches, points) in side.records.items()
                    if player in elo
                },
            )
            for name, side in rules.sides.items()
        }

    def rating(self, name: str) -> float | None:
        """Returns a learner's Elo rating, or with more than two teams its mu; None where nothing is rated."""
        rated = self.ratings().get(name)
        return None if rated is None else rated.mu if self._has_many_teams else rated.elo

    def gauges(self) -> Iterator[tuple[str, float]]:
        """Yields name and value of each gauge, once a match is rated."""
        if isinstance(self.rules, Tournament) or not self.rules.ratings.matches:
            return
        ratings = self.rules.ratings
        for name, side in self.rules.sides.items():
            window = [ratings.elo[f"{name}@{version}"] for version in side.window] or [0.0]
            if self._has_many_teams:
                yield f"mu/{name}", ratings.skills[name][0]
                yield f"sigma/{name}", ratings.skills[name][1]
            else:
                yield f"elo/{name}", ratings.elo[name]
                yield f"opponents.elo/{name}", statistics.fmean(window)
                yield f"opponents.elo_deviation/{name}", statistics.pstdev(window)

    def described(self) -> dict[str, Any]:
        """Describes the assignment for the log."""
        rules = self.rules
        opponents = sorted({rules.player(name, number) for name, number in rules.playing})
        return {"team": rules.team, "opponents": opponents, "changes": rules.changes}

    # ---------------------------------------------------------------- inside

    @property
    def _has_many_teams(self) -> bool:
        """Whether the game has more than two teams."""
        return len({team for side in self.rules.sides.values() for team in side.teams}) > 2

    @property
    def _former(self) -> Path:
        """The match file that was rotated away."""
        return self._matches.with_suffix(".old.jsonl")

    def _save(self) -> None:
        """Writes the weights that can still play and are not on disk; on failure they stay here for the next call.

        Raises:
            OSError: the disk is full.
        """
        wanted, latest = self.rules.wanted, {(name, side.version) for name, side in self.rules.sides.items()}
        self._held = {key: weights for key, weights in self._held.items() if key in wanted | latest}
        for key, weights in [*self._held.items()]:
            if key in wanted and not self._snapshots.path(*key).exists():
                self._snapshots.save(weights)
            if key not in latest:
                del self._held[key]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
