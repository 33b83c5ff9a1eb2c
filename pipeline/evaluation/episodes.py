"""The first episodes of a run, by the order of their starts.

To stop at the N-th end would favour short episodes: those that end early come first. So the N episodes that
began first are waited for, and what else has ended by then is left out.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.files import write_atomically
from sparring.pipeline.messages.segments import Episodes

EPISODES_FILE: Final = "episodes.csv"

COLUMNS: Final = {
    "returns": np.float32,
    "shared_returns": np.float32,
    "lengths": np.int32,
    "teams": np.int32,
    "outcomes": np.float32,
    "groups": np.int64,
}
"""What is kept of an episode, in the words of `Episodes`."""


class FirstEpisodes:
    """The episodes of one behavior from one source that began first, apart from those of which nothing can be told.

    Attributes:
        unreported: lives of which nothing can be told: their simulator went away.

    Args:
        wanted: how many.
    """

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._told: dict[int, tuple[Any, ...]] = {}
        self._settled = 0  # all lives up to this number have ended
        self._counted = 0  # of these, told
        self.unreported: set[int] = set()

    @property
    def count(self) -> int:
        """Of the wanted episodes, those that have surely come: all that began before them have ended."""
        return min(self._counted, self._wanted)

    @property
    def waiting_for(self) -> str:
        """What is missing."""
        later = sum(life > self._settled for life in self._told)
        return f"the end of episode {self._settled + 1}; {later} that began later have ended"

    @property
    def complete(self) -> bool:
        """Whether all have come."""
        return self._counted >= self._wanted

    def add(self, episodes: Episodes) -> None:
        """Takes in episodes that have ended."""
        rows = zip(*(getattr(episodes, name).tolist() for name in COLUMNS), strict=True)
        self._told.update(zip(episodes.agents.tolist(), rows, strict=True))
        self.unreported.update(episodes.unreported.tolist())
        if len(self._told) > 2 * self._wanted:  # those that began last are not wanted in any case
            self._told = {life: self._told[life] for life in sorted(self._told)[: self._wanted]}
        while (following := self._settled + 1) in self._told or following in self.unreported:
            self._settled = following
            self._counted += following in self._told

    def columns(self) -> dict[str, NDArray[Any]]:
        """Life and the columns of `COLUMNS` of the episodes wanted, in the order of their starts.

        As far as surely come: up to the first life that is under way, so that short episodes do not count more.
        """
        chosen = sorted(life for life in self._told if life <= self._settled)[: self._wanted]
        columns: dict[str, NDArray[Any]] = {
            name: np.array([self._told[life][place] for life in chosen], dtype)
            for place, (name, dtype) in enumerate(COLUMNS.items())
        }
        return {"agents": np.array(chosen, np.int64)} | columns


def write_episodes(path: Path, columns: Mapping[str, NDArray[Any]]) -> None:
    """Writes columns as a table, a line for each episode; raises `OSError`."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(zip(*(column.astype(str).tolist() for column in columns.values()), strict=True))
    write_atomically(path, text.getvalue().encode())


def read_episodes(path: Path) -> dict[str, NDArray[Any]]:
    """The columns of a table that `write_episodes` wrote; none where there is no file."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    return {name: np.array([row[at] for row in rows], COLUMNS.get(name, np.int64)) for at, name in enumerate(header)}
