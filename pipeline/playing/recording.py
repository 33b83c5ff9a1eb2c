"""Recorded episodes: one columnar file format, without code in it.

A file is in the format of safetensors. Its metadata say `format` ("sparring-episodes"), `version` ("1"), `behavior`
(name) and `spec` (JSON of the behavior's observations and actions). Its tensors, r steps of e episodes one after the
other, each episode's steps in order:

    lengths             [e] int32       steps of each episode
    agents              [e] int64       number of the agent's life
    teams, simulators   [e] int32       team, connection number of the simulator
    groups              [e] int64       group key, 0 for none
    terminated          [e] bool        the task ended; else the episode was cut
    observation.I       [r, *shape]     I-th observation of the spec, as the simulator sent it
    final_observation.I [e, *shape]     ... after the last step
    continuous          [r, C] float32  continuous actions as the simulator got them, in [-1, 1]
    discrete            [r, D] int32    chosen index of each branch
    masks               [r, K] bool     forbidden choices; absent where nothing was
    rewards             [r] float32     the agent's own reward of the step
    group_rewards       [r] float32     its group's
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from pipeline.actions import to_environment
from pipeline.errors import Explained
from pipeline.files import write_atomically
from pipeline.messages.service import Segments
from pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

FORMAT: Final = "sparring-episodes"
VERSION: Final = "1"
SUFFIX: Final = ".episodes.safetensors"
FILE_BYTES: Final = 64 * 2**20
"""Content from which a new file is begun."""

Arrays = dict[str, NDArray[Any]]

_PER_EPISODE: Final = ("lengths", "agents", "teams", "simulators", "groups", "terminated")
_PER_STEP: Final = ("continuous", "discrete", "rewards", "group_rewards")


class RecordingError(Explained):
    """A file that does not hold recorded episodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """The content of a file.

    Attributes:
        behavior: name.
        spec: of it.
        columns: by name, as the module's documentation lists them.
    """

    behavior: str
    spec: BehaviorSpec
    columns: Arrays


class Recorder:
    """Writes whole episodes of one behavior from one source to files.

    Args:
        folder: for the files; made when the first is written.
        behavior: name.
        spec: of it.
        wanted: the last life to record; 0 for all.
    """

    def __init__(self, folder: Path, behavior: str, spec: BehaviorSpec, wanted: int = 0) -> None:
        self._folder = folder
        self._behavior = behavior
        self._spec = spec
        self._wanted = wanted
        self._open: dict[int, list[Arrays]] = {}
        self._whole: dict[int, Arrays] = {}  # of which nothing is told yet
        self._told: set[int] = set()  # whose last segment has not come yet
        self._ended: list[Arrays] = []
        self._bytes = 0
        self.episodes = 0
        self.files: list[Path] = []

    def add(self, segments: Segments) -> None:
        """Takes in segments of episodes; writes a file where enough have ended.

        An episode is recorded once its last segment has come and it was told: a life that was cut short because its
        simulator went away has a last segment too. The two may come in any order, and in different messages.

        Raises:
            OSError: the disk is full or the folder can not be written.
        """
        told = segments.episodes.agents
        self._told.update(told[told <= self._wanted].tolist() if self._wanted else told.tolist())
        for life, part, over in _parts(segments, self._wanted):
            self._open.setdefault(life, []).append(part)
            if over:
                self._whole[life] = _joined(self._open.pop(life))
        for life in segments.episodes.untold.tolist():
            self._open.pop(life, None)
            self._whole.pop(life, None)
        for life in sorted(self._told & self._whole.keys()):
            self._told.remove(life)
            self._ended.append(self._whole.pop(life))
            self._bytes += sum(column.nbytes for column in self._ended[-1].values())
        if self._bytes >= FILE_BYTES:
            self.flush()

    @property
    def waiting(self) -> bool:
        """Whether the last segment of an episode that was told has not come yet."""
        return bool(self._told)

    def flush(self) -> None:
        """Writes what has ended. Raises as `add`."""
        if not self._ended:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._behavior}-{len(self.files) + 1:05d}{SUFFIX}"
        columns = _stacked(self._ended)
        write_atomically(path, encode(Recording(behavior=self._behavior, spec=self._spec, columns=columns)))
        self.files.append(path)
        self.episodes += len(self._ended)
        self._ended, self._bytes = [], 0


def encode(recording: Recording) -> bytes:
    """A file's content."""
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "behavior": recording.behavior,
        "spec": json.dumps(dataclasses.asdict(recording.spec)),
    }
    return save({name: np.ascontiguousarray(column) for name, column in recording.columns.items()}, metadata)


def read(path: Path) -> Recording:
    """Reads a file.

    Raises:
        RecordingError: it is no such file, or its columns do not fit together.
    """
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError, TypeError) as error:  # TypeError: of a dtype that numpy does not have
        raise _refused(path, str(error)) from error
    if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
        raise _refused(path, f"format {metadata.get('format')!r} version {metadata.get('version')!r}")
    try:
        spec = spec_of(json.loads(metadata["spec"]))
        recording = Recording(behavior=metadata["behavior"], spec=spec, columns=columns)
    except (ValueError, KeyError, TypeError, RecursionError, Explained) as error:
        raise _refused(path, f"a spec that can not be read ({error})") from error
    lengths = columns.get("lengths")
    if lengths is None or lengths.dtype != np.int32 or lengths.ndim != 1 or (lengths < 1).any():
        raise _refused(path, "column 'lengths' that is not one int32 of at least 1 for each episode")
    for name, (dtype, shape) in _expected(recording).items():
        column = columns.get(name)
        if column is None or column.dtype != dtype or column.shape != shape:
            found = "nothing" if column is None else f"{column.dtype} {column.shape}"
            raise _refused(path, f"{found} for column {name!r} where {np.dtype(dtype)} {shape} is expected")
    return recording


def spec_of(plain: dict[str, Any]) -> BehaviorSpec:
    """A spec out of its JSON.

    Raises:
        TypeError, KeyError, SpecError: it is something else.
    """
    observations = tuple(ObservationSpec(**{**one, "shape": tuple(one["shape"])}) for one in plain["observations"])
    actions = ActionSpec(continuous=plain["actions"]["continuous"], discrete=tuple(plain["actions"]["discrete"]))
    return BehaviorSpec(observations=observations, actions=actions)


def _expected(recording: Recording) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Dtype and shape of each column that must be there; `masks` where it is."""
    columns, spec = recording.columns, recording.spec
    e, r = len(columns["lengths"]), int(columns["lengths"].sum(dtype=np.int64))
    expected: dict[str, tuple[Any, tuple[int, ...]]] = {
        "agents": (np.int64, (e,)),
        "teams": (np.int32, (e,)),
        "simulators": (np.int32, (e,)),
        "groups": (np.int64, (e,)),
        "terminated": (np.bool_, (e,)),
        "continuous": (np.float32, (r, spec.actions.continuous)),
        "discrete": (np.int32, (r, len(spec.actions.discrete))),
        "rewards": (np.float32, (r,)),
        "group_rewards": (np.float32, (r,)),
    }
    for at, one in enumerate(spec.observations):
        expected[f"observation.{at}"] = (np.dtype(one.dtype), (r, *one.shape))
        expected[f"final_observation.{at}"] = (np.dtype(one.dtype), (e, *one.shape))
    if "masks" in columns:
        expected["masks"] = (np.bool_, (r, spec.actions.mask_size))
    return expected


def _parts(segments: Segments, wanted: int) -> Iterator[tuple[int, Arrays, bool]]:
    """Life, columns and whether it is over, of each segment that is wanted."""
    ends = np.cumsum(segments.lengths)
    over = segments.terminated | segments.interrupted
    for at in np.flatnonzero((segments.agents <= wanted) | (wanted == 0)).tolist():
        rows, one = slice(int(ends[at] - segments.lengths[at]), int(ends[at])), slice(at, at + 1)
        part = {name: getattr(segments, name)[one] for name in _PER_EPISODE}
        part |= {name: getattr(segments, name)[rows] for name in _PER_STEP}
        part["continuous"] = to_environment(part["continuous"])
        for number, column in enumerate(segments.observations):
            part[f"observation.{number}"] = column[rows]
        for number, column in enumerate(segments.next_observations):
            part[f"final_observation.{number}"] = column[one]
        if segments.masks is not None:
            part["masks"] = segments.masks[rows]
        yield int(segments.agents[at]), {name: column.copy() for name, column in part.items()}, bool(over[at])


def _per_step(name: str) -> bool:
    return name in _PER_STEP or name == "masks" or name.startswith("observation.")


def _joined(parts: list[Arrays]) -> Arrays:
    """One episode of its segments."""
    last = {name: column for name, column in parts[-1].items() if not _per_step(name)}
    last["lengths"] = np.array([sum(int(part["lengths"][0]) for part in parts)], np.int32)
    return last | _stacked_steps(parts)


def _stacked(episodes: list[Arrays]) -> Arrays:
    """All episodes, one after the other."""
    names = [name for name in episodes[0] if not _per_step(name)]
    return {name: np.concatenate([one[name] for one in episodes]) for name in names} | _stacked_steps(episodes)


def _stacked_steps(parts: list[Arrays]) -> Arrays:
    names = [name for name in parts[0] if _per_step(name) and name != "masks"]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in names}
    like = next((part["masks"] for part in parts if "masks" in part), None)
    if like is not None:
        free = [part.get("masks", np.zeros((len(part["rewards"]), like.shape[1]), np.bool_)) for part in parts]
        columns["masks"] = np.concatenate(free)
    return columns


def _refused(path: Path, got: str) -> RecordingError:
    return RecordingError(
        got=f"{path}: {got}",
        expected=f"recorded episodes: a safetensors file of format {FORMAT!r} version {VERSION!r}",
        remedy="record it again, or give the path of another file",
    )
