"""This module records played episodes into files of `sparring.pipeline.demonstrations.episodes`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from sparring.pipeline.demonstrations.episodes import (
    PER_EPISODE,
    PER_STEP,
    SUFFIX,
    Arrays,
    Recording,
    encode,
    joined,
    stacked,
)
from sparring.pipeline.files import write_atomically
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.networks.arrays import to_environment
from sparring.pipeline.networks.settings import ACTION_LIMIT
from sparring.pipeline.specs import BehaviorSpec

FILE_BYTES: Final = 64 * 2**20
"""Size from which a new file is begun."""


class Recorder:
    """Writes whole episodes of one behavior from one source to files.

    Args:
        folder: for the files; created with the first of them.
        behavior: name of the behavior.
        spec: observations and actions of the behavior.
        wanted: the last agent episode to record; 0 for all.
        action_limit: limit of raw samples, which scales them for simulators.
    """

    def __init__(
        self, folder: Path, behavior: str, spec: BehaviorSpec, wanted: int = 0, action_limit: float = ACTION_LIMIT
    ) -> None:
        self._limit = action_limit
        self._folder = folder
        self._behavior = behavior
        self._spec = spec
        self._wanted = wanted
        self._open: dict[int, list[Arrays]] = {}
        self._whole: dict[int, Arrays] = {}  # whose result has not arrived yet
        self._reported: set[int] = set()  # whose last segment has not arrived yet
        self._ended: list[Arrays] = []
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
        self._reported.update(reported[reported <= self._wanted].tolist() if self._wanted else reported.tolist())
        for agent_episode, part, over in _parts(segments, self._wanted, self._limit):
            self._open.setdefault(agent_episode, []).append(part)
            if over:
                self._whole[agent_episode] = joined(self._open.pop(agent_episode))
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
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._behavior}-{len(self.files) + 1:05d}{SUFFIX}"
        columns = stacked(self._ended)
        write_atomically(path, encode(Recording(behavior=self._behavior, spec=self._spec, columns=columns)))
        self.files.append(path)
        self.episodes += len(self._ended)
        self._ended, self._bytes = [], 0


def _parts(segments: Segments, wanted: int, limit: float) -> Iterator[tuple[int, Arrays, bool]]:
    """Yields agent episode, columns and whether it is over, of each wanted segment."""
    ends = np.cumsum(segments.lengths)
    over = segments.terminated | segments.interrupted
    for at in np.flatnonzero((segments.agents <= wanted) | (wanted == 0)).tolist():
        rows, one = slice(int(ends[at] - segments.lengths[at]), int(ends[at])), slice(at, at + 1)
        part = {name: getattr(segments, name)[one] for name in PER_EPISODE}
        part |= {name: getattr(segments, name)[rows] for name in PER_STEP}
        part["continuous"] = to_environment(part["continuous"], limit)
        for number, column in enumerate(segments.observations):
            part[f"observation.{number}"] = column[rows]
        for number, column in enumerate(segments.next_observations):
            part[f"final_observation.{number}"] = column[one]
        if segments.masks is not None:
            part["masks"] = segments.masks[rows]
        yield int(segments.agents[at]), {name: column.copy() for name, column in part.items()}, bool(over[at])
