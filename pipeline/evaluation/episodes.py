"""This module selects the first episodes of a run, by the order of their starts, and records played ones.

Stopping at the N-th end would favor short episodes: those that end early come first. So the N episodes that began first
are waited for, and others that have ended by then are left out. Recordings are files of
`sparring.pipeline.demonstrations.episodes`.
"""

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from sparring.pipeline.demonstrations import episodes as recordings
from sparring.pipeline.files import regular, write_atomically
from sparring.pipeline.messages.segments import Episodes, Segments
from sparring.pipeline.networks.arrays import to_environment
from sparring.pipeline.networks.settings import ACTION_LIMIT
from sparring.pipeline.specs import Array, BehaviorSpec

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
    with regular(path).open(newline="") as file:
        header, *rows = csv.reader(file)
    return {name: np.array([row[at] for row in rows], COLUMNS.get(name, np.int64)) for at, name in enumerate(header)}


FILE_BYTES: Final = 64 * 2**20
"""Size from which a new file is begun."""


@dataclass
class Recorder:
    """Writes whole episodes of one behavior from one source to files.

    Attributes:
        folder: for the files; created with the first of them.
        behavior: name of the behavior.
        spec: observations and actions of the behavior.
        wanted: the last agent episode to record; 0 for all.
        action_limit: limit of raw samples, which scales them for simulators.
    """

    folder: Path
    behavior: str
    spec: BehaviorSpec
    wanted: int = 0
    action_limit: float = ACTION_LIMIT

    def __post_init__(self) -> None:
        self._open: dict[int, list[recordings.Arrays]] = {}
        self._whole: dict[int, recordings.Arrays] = {}  # whose result has not arrived yet
        self._reported: set[int] = set()  # whose last segment has not arrived yet
        self._ended: list[recordings.Arrays] = []
        self._bytes = 0
        self.episodes = 0
        self.files: list[Path] = []

    def add(self, segments: Segments) -> None:
        """Adds segments of episodes; writes a file once enough have ended.

        An episode is recorded once its last segment and its result have arrived, in any order: an episode cut short
        because its simulator disconnected has a last segment but no result.

        Raises:
            OSError: the disk is full or the folder cannot be written.
        """
        reported = segments.episodes.agents
        self._reported.update(reported[reported <= self.wanted].tolist() if self.wanted else reported.tolist())
        for agent_episode, part, over in _parts(segments, self.wanted, self.action_limit):
            self._open.setdefault(agent_episode, []).append(part)
            if over:
                self._whole[agent_episode] = recordings.joined(self._open.pop(agent_episode))
        for agent_episode in segments.episodes.unreported.tolist():
            self._open.pop(agent_episode, None)
            self._whole.pop(agent_episode, None)
        for agent_episode in sorted(self._reported & self._whole.keys()):
            self._reported.remove(agent_episode)
            self._ended.append(self._whole.pop(agent_episode))
            self._bytes += sum(column.nbytes for column in self._ended[-1].values())
        if self._bytes >= FILE_BYTES:
            self.flush()

    @property
    def waiting(self) -> bool:
        """Returns whether the last segment of an episode with a result is missing."""
        return bool(self._reported)

    def flush(self) -> None:
        """Writes the episodes that have ended; raises the same errors as `add`."""
        if not self._ended:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self.behavior}-{len(self.files) + 1:05d}{recordings.SUFFIX}"
        columns = recordings.stacked(self._ended)
        recording = recordings.Recording(behavior=self.behavior, spec=self.spec, columns=columns)
        write_atomically(path, recordings.encode(recording))
        self.files.append(path)
        self.episodes += len(self._ended)
        self._ended, self._bytes = [], 0


def _parts(segments: Segments, wanted: int, limit: float) -> Iterator[tuple[int, recordings.Arrays, bool]]:
    """Yields agent episode, columns and whether it is over, of each wanted segment."""
    ends = np.cumsum(segments.lengths)
    over = segments.terminated | segments.interrupted
    for at in np.flatnonzero((segments.agents <= wanted) | (wanted == 0)).tolist():
        rows, one = slice(int(ends[at] - segments.lengths[at]), int(ends[at])), slice(at, at + 1)
        part = {name: getattr(segments, name)[one] for name in recordings.PER_EPISODE}
        part |= {name: getattr(segments, name)[rows] for name in recordings.PER_STEP}
        part["continuous"] = to_environment(part["continuous"], limit)
        part |= {f"observation.{number}": column[rows] for number, column in enumerate(segments.observations)}
        part |= {f"final_observation.{number}": column[one] for number, column in enumerate(segments.next_observations)}
        part |= {} if segments.masks is None else {"masks": segments.masks[rows]}
        yield int(segments.agents[at]), {name: column.copy() for name, column in part.items()}, bool(over[at])
