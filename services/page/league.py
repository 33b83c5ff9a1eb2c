"""Adds up the matches of self-play: who beats whom, in which phase of the training, and how certain that is."""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from sparring.pipeline.evaluation.ratings import rated
from sparring.pipeline.files import Json
from sparring.pipeline.monitoring.events import Lines
from sparring.services.page.history import number, section, unread

_PHASES: Final = 12
"""Phases of a training that remain when twice as many are merged in pairs."""
_FIRST_MATCHES: Final = 32
_GROUPS: Final = 24
"""Opponents of a chart; snapshots are put together where there are more."""
_RECENT: Final = 100
_READ_S: Final = 1.0
"""Seconds for which one call reads: others wait meanwhile."""
_LONGEST_NAME: Final = 200


@dataclass(slots=True)
class Phase:
    """A Phase holds the results of a learner in a part of its training.

    Attributes:
        begin: steps of the learner at the first match.
        end: steps at the last one.
        matches: by opponent.
        halves: twice its points, likewise: 2 for a win, 1 for a tied match.
    """

    begin: float
    end: float
    matches: Counter[str] = field(default_factory=Counter)
    halves: Counter[str] = field(default_factory=Counter)

    def add(self, opponent: str, score: float, step: float) -> None:
        """Adds a match."""
        self.end = max(self.end, step)
        self.matches[opponent] += 1
        self.halves[opponent] += round(2 * score)

    def merge(self, other: Phase) -> None:
        """Adds the phase that follows."""
        self.end = max(self.end, other.end)
        self.matches.update(other.matches)
        self.halves.update(other.halves)


class League:
    """Follows the matches of one run.

    Attributes:
        phases: of each learner, in their order.
        recent: last matches, the newest last.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.phases: dict[str, list[Phase]] = {}
        self.recent: deque[Json] = deque(maxlen=_RECENT)
        self._path = folder / "matches.jsonl"
        self._lines = Lines(self._path)
        self._sizes: dict[str, int] = {}

    def refresh(self) -> None:
        """Reads what was written since the last call, for a bounded time; the next call reads on.

        Lines without players or scores are left out.
        """
        end_s = time.monotonic() + _READ_S
        for line in unread(self._lines) if self._path.is_file() else ():
            if isinstance(line, dict):
                self._take(line)
            if time.monotonic() >= end_s:
                return

    def _take(self, line: Mapping[str, Json]) -> None:
        players, scores, steps = (section(line, name) for name in ("players", "scores", "steps"))
        known = {one: player[:_LONGEST_NAME] for one, player in players.items() if isinstance(player, str)}
        self.recent.append({"match": line.get("match"), "players": known, "scores": scores, "steps": steps})
        for behavior_id, learner in known.items():
            score = number(scores.get(behavior_id))
            if learner == behavior_id.partition("?")[0] and score is not None and 0 <= score <= 1:
                step = number(steps.get(learner)) or 0.0
                self._add(learner, {other for one, other in known.items() if one != behavior_id}, score, step)

    def _add(self, learner: str, opponents: Iterable[str], score: float, step: float) -> None:
        phases, size = self.phases.setdefault(learner, []), self._sizes.setdefault(learner, _FIRST_MATCHES)
        if not phases or phases[-1].matches.total() >= size:
            phases.append(Phase(step, step))
        for opponent in opponents:
            if opponent != learner:
                phases[-1].add(opponent, score, step)
        if len(phases) > 2 * _PHASES:
            for one, other in zip(phases[::2], phases[1::2], strict=False):
                one.merge(other)
            del phases[1::2]
            self._sizes[learner] *= 2

    def describe(self) -> dict[str, Json]:
        """Returns the table of each learner, with ratings over its phases, and the last matches."""
        return {
            "learners": {name: _table(phases) for name, phases in self.phases.items()},
            "recent": list(self.recent)[::-1],
        }


def _table(phases: list[Phase]) -> dict[str, Json]:
    """Returns the points of each phase against each opponent, or group of opponents, and the ratings of all."""
    names = sorted({name for phase in phases for name in phase.matches}, key=_in_order)
    every = -(-len(names) // _GROUPS) or 1
    groups = [names[at : at + every] for at in range(0, len(names), every)]
    count = len(phases)
    matches = np.array([[sum(phase.matches[name] for name in group) for group in groups] for phase in phases])
    points = np.array([[sum(phase.halves[name] for name in group) / 2 for group in groups] for phase in phases])
    matches, points = matches.reshape(count, len(groups)), points.reshape(count, len(groups))
    whole = np.zeros((count + len(groups), count + len(groups)))
    whole[:count, count:], whole[count:, :count] = points, (matches - points).T
    ratings, margins = rated(whole)
    return {
        "phases": [{"begin": phase.begin, "end": phase.end} for phase in phases],
        "opponents": [group[0] if len(group) == 1 else f"{group[0]} to {group[-1]}" for group in groups],
        "matches": matches.tolist(),
        "points": points.tolist(),
        "ratings": ratings.tolist(),
        "margins": margins.tolist(),
    }


def _in_order(name: str) -> tuple[str, int]:
    """Returns what sorts snapshots by their version."""
    found = re.fullmatch(r"(.*)@([0-9]{1,12})", name, re.DOTALL)
    return (found[1], int(found[2])) if found else (name, -1)


def lineage(folder: Path, elo: Mapping[str, Json]) -> list[dict[str, Json]]:
    """Returns the snapshots and checkpoints that a run keeps, in the order in which they were made.

    Args:
        folder: of the run.
        elo: present ratings by player.
    """
    found: list[dict[str, Json]] = []
    for path in [*folder.glob("*/snapshots/*.safetensors"), *folder.glob("*/checkpoint-*/state.json")]:
        made_s, behavior = path.stat().st_mtime, path.relative_to(folder).parts[0]
        name, player = path.parent.name, f"{behavior}@{int(path.stem)}" if path.stem.isdecimal() else path.stem
        one: dict[str, Json] = {"kind": "snapshot", "name": player, "rating": number(elo.get(player))}
        if path.name == "state.json":
            trained = name.rpartition("-")[2]
            one = {"kind": "checkpoint", "name": name, "step": int(trained) if trained.isdecimal() else None}
        found.append({"behavior": behavior, "time_s": made_s, **one})
    return sorted(found, key=lambda one: float(one["time_s"]))
