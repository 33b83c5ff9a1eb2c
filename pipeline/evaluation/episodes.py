"""This module selects the first episodes of a run, by the order of their starts.

Stopping at the N-th end would favor short episodes: those that end early come first. So the N episodes that began first
are waited for, and others that have ended by then are left out.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from sparring.pipeline.files import write_atomically
from sparring.pipeline.messages.segments import Episodes
from sparring.pipeline.specs import Array

EPISODES_FILE: Final = "episodes.csv"

COLUMNS: Final = {
    "returns": np.float32,
    "shared_returns": np.float32,
    "lengths": np.int32,
    "teams": np.int32,
    "outcomes": np.float32,
    "groups": np.int64,
}
"""Columns stored of an episode, by their names in `Episodes`."""


class FirstEpisodes:
    """Collects the episodes of one behavior from one source that began first, except those without a result.

    Attributes:
        unreported: agent episodes without a result, because their simulator disconnected.

    Args:
        wanted: how many.
    """

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._reported: dict[int, tuple[float, ...]] = {}
        self._settled = 0  # all agent episodes up to this number have ended
        self._counted = 0  # of these, with a result
        self.unreported: set[int] = set()

    @property
    def count(self) -> int:
        """Returns how many wanted episodes are settled: all that began before them have ended."""
        return min(self._counted, self._wanted)

    @property
    def waiting_for(self) -> str:
        """Returns what is missing, for a user."""
        later = sum(number > self._settled for number in self._reported)
        return f"the end of episode {self._settled + 1}; {later} that began later have ended"

    @property
    def complete(self) -> bool:
        """Returns whether all wanted episodes are settled."""
        return self._counted >= self._wanted

    def add(self, episodes: Episodes) -> None:
        """Adds episodes that have ended."""
        rows = zip(*(getattr(episodes, name).tolist() for name in COLUMNS), strict=True)
        self._reported.update(zip(episodes.agents.tolist(), rows, strict=True))
        self.unreported.update(episodes.unreported.tolist())
        if len(self._reported) > 2 * self._wanted:  # those that began last cannot be wanted
            self._reported = dict(sorted(self._reported.items())[: self._wanted])
        while (following := self._settled + 1) in self._reported or following in self.unreported:
            self._settled = following
            self._counted += following in self._reported

    def columns(self) -> dict[str, Array]:
        """Returns agent episodes and the columns of `COLUMNS` of the wanted episodes, in the order of their starts.

        Only those before the first one under way are included, so that short episodes do not count more.
        """
        chosen = sorted(number for number in self._reported if number <= self._settled)[: self._wanted]
        columns: dict[str, Array] = {
            name: np.array([self._reported[number][place] for number in chosen], dtype)
            for place, (name, dtype) in enumerate(COLUMNS.items())
        }
        return {"agents": np.array(chosen, np.int64)} | columns


def write_episodes(path: Path, columns: Mapping[str, Array]) -> None:
    """Writes columns as a table, a line for each episode; raises `OSError`."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(zip(*(column.astype(str).tolist() for column in columns.values()), strict=True))
    write_atomically(path, text.getvalue().encode())


def read_episodes(path: Path) -> dict[str, Array]:
    """Returns the columns of a table that `write_episodes` wrote; none without a file."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    return {name: np.array([row[at] for row in rows], COLUMNS.get(name, np.int64)) for at, name in enumerate(header)}
