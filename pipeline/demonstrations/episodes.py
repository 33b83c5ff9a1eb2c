"""This module reads and writes recorded episodes: one columnar file format, without code in it.

A file is in the format of safetensors. Its metadata hold `format` ("sparring-episodes"), `version` ("1"), `behavior`
(name) and `spec` (JSON of the behavior's observations and actions). Its tensors hold r steps of e episodes one after
the other, each episode's steps in order:

    lengths             [e] int32       steps of each episode
    agents              [e] int64       number of the agent episode
    teams, simulators   [e] int32       team, connection number of the simulator
    groups              [e] int64       group key, 0 for none
    terminated          [e] bool        the task ended; else the episode was interrupted
    observation.I       [r, *shape]     I-th observation of the spec, as the simulator sent it
    final_observation.I [e, *shape]     ... after the last step
    continuous          [r, C] float32  continuous actions as the simulator received them, in [-1, 1]
    discrete            [r, D] int32    chosen index of each branch
    masks               [r, K] bool     forbidden choices; absent if every choice was allowed
    rewards             [r] float32     the agent's own reward of the step
    group_rewards       [r] float32     its group's
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from sparring.pipeline.errors import ExplainedError
from sparring.pipeline.files import DAMAGE
from sparring.pipeline.specs import Array, BehaviorSpec, read_spec

FORMAT: Final = "sparring-episodes"
VERSION: Final = "1"
SUFFIX: Final = ".episodes.safetensors"

Arrays = dict[str, Array]
Layout = dict[str, tuple[np.dtype[np.generic], tuple[int, ...]]]
"""Dtypes and shapes of columns, by their names."""

PER_EPISODE: Final = {
    "lengths": np.int32,
    "agents": np.int64,
    "teams": np.int32,
    "simulators": np.int32,
    "groups": np.int64,
    "terminated": np.bool_,
}
"""Dtypes of the columns with one number for each episode."""
PER_STEP: Final = ("continuous", "discrete", "rewards", "group_rewards")

SLACK: Final = 1e-3
"""How far rounding may move a continuous action beyond its range."""

ActionsOf = Literal["previous", "own"]
DemoActions = Literal["auto", "previous", "own"]
"""Which decision's action accompanies an observation in a `.demo` file; `auto` detects it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairing:
    """Names which decision's action a pair of a `.demo` file holds.

    Attributes:
        actions: that of the decision before, or that of the pair's own observation.
        evidence: how it is known.
    """

    actions: ActionsOf
    evidence: str


class RecordingError(ExplainedError):
    """Reports a file without valid recorded episodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """Holds the content of a file.

    Attributes:
        behavior: name of the behavior.
        spec: observations and actions of the behavior.
        columns: by name, as the module's docstring lists them.
        pairing: for a `.demo` file, how its actions were placed; None for any other.
    """

    behavior: str
    spec: BehaviorSpec
    columns: Arrays
    pairing: Pairing | None = None


def encode(recording: Recording) -> bytes:
    """Returns a file's content."""
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "behavior": recording.behavior,
        "spec": json.dumps(asdict(recording.spec)),
    }
    return save({name: np.ascontiguousarray(column) for name, column in recording.columns.items()}, metadata)


def read(path: Path) -> Recording:
    """Reads a file.

    Raises:
        RecordingError: the file has another format, or its columns do not fit together.
    """
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (*DAMAGE, SafetensorError) as error:
        raise _refused(path, str(error)) from error
    if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
        raise _refused(path, f"format {metadata.get('format')!r} version {metadata.get('version')!r}")
    try:
        spec = read_spec(json.loads(metadata["spec"]))
        recording = Recording(behavior=metadata["behavior"], spec=spec, columns=columns)
    except (*DAMAGE, ExplainedError) as error:
        raise _refused(path, f"a spec that cannot be read ({error})") from error
    lengths = columns.get("lengths", np.empty(0))
    if lengths.dtype != np.int32 or lengths.ndim != 1 or (lengths < 1).any():
        raise _refused(path, "column 'lengths' that is not one int32 of at least 1 for each episode")
    for name, (dtype, shape) in _expected(recording).items():
        column = columns.get(name)
        if column is None or column.dtype != dtype or column.shape != shape:
            found = "nothing" if column is None else f"{column.dtype} {column.shape}"
            raise _refused(path, f"{found} for column {name!r} where {dtype} {shape} is expected")
    return recording


def step_columns(spec: BehaviorSpec) -> Layout:
    """Returns the dtype of each column with one row for each step, and the shape of a row."""
    actions = spec.actions
    columns: Layout = {
        "continuous": (np.dtype(np.float32), (actions.continuous,)),
        "discrete": (np.dtype(np.int32), (len(actions.discrete),)),
        "rewards": (np.dtype(np.float32), ()),
        "group_rewards": (np.dtype(np.float32), ()),
        "masks": (np.dtype(np.bool_), (actions.mask_size,)),
    }
    return columns | {f"observation.{at}": (np.dtype(one.dtype), one.shape) for at, one in enumerate(spec.observations)}


def _expected(recording: Recording) -> Layout:
    """Returns dtype and shape of each required column, and of `masks` if it exists."""
    lengths = recording.columns["lengths"]
    e, r = len(lengths), int(lengths.sum(dtype=np.int64))
    expected: Layout = {name: (np.dtype(dtype), (e,)) for name, dtype in PER_EPISODE.items()}
    for name, (dtype, shape) in step_columns(recording.spec).items():
        if name != "masks" or name in recording.columns:
            expected[name] = dtype, (r, *shape)
        if name.startswith("observation."):
            expected[f"final_{name}"] = dtype, (e, *shape)
    return expected


def joined(parts: list[Arrays]) -> Arrays:
    """Joins the segments of one episode."""
    columns = stacked(parts)
    last = {name: one[-1:] for name, one in columns.items() if name in PER_EPISODE or name.startswith("final_")}
    return columns | last | {"lengths": columns["lengths"].sum(dtype=np.int32, keepdims=True)}


def stacked(parts: list[Arrays]) -> Arrays:
    """Joins the columns of episodes, one after the other; steps without masks get free ones if others have masks."""
    names = [name for name in parts[0] if name != "masks"]
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
