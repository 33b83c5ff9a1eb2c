"""Describes a behavior's observations and actions, which the simulator sends once, before any data.

A behavior id is `Name?team=N`. Behaviors of one name share one network, with which their teams can
play against each other.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.errors import ExplainedError

Array = NDArray[Any]
"""An array whose dtype only its reader knows: an observation, a column of a message, a weight."""
Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]

ObservationKind = Literal["vector", "image", "entities", "goal"]
ObservationDtype = Literal["float32", "uint8"]

_ID = re.compile(r"([^?]+)(?:\?team=([0-9]{1,10}))?")
_BAD_IN_NAME = frozenset('/\\?*:"<>|#')  # not allowed in folder names, except "#", which divides ids of senders
_LONGEST_NAME = 100
_TAKEN = frozenset({"checkpoints", "initial", "lock", "logs", "players", "replays", "run_logs", "snapshots", "writers"})
"""Names in the folder of a run that are not those of its behaviors; folders of other programs may be shared."""
_FILES = frozenset({".db", ".json", ".jsonl", ".onnx", ".png", ".prom", ".yaml"})
"""Suffixes of the files of a run, which another may follow: services.jsonl.1."""
_RANKS: dict[str, int] = {"vector": 1, "image": 3, "entities": 2, "goal": 1}


class SpecError(ExplainedError):
    """No network can be built for the spec, or the behavior id cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservationSpec:
    """Describes one named observation of an agent.

    Attributes:
        name: unique within the behavior.
        shape: shape per agent: vector and goal [size], image [channels, height, width],
            entities [most entities, features].
        dtype: `float32`, or `uint8` for images, which networks scale to 0..1.
        kind: selects the encoder.
    """

    name: str
    shape: tuple[int, ...]
    dtype: ObservationDtype = "float32"
    kind: ObservationKind = "vector"

    def __post_init__(self) -> None:
        if len(self.shape) != _RANKS.get(self.kind) or min(self.shape) < 1:
            raise SpecError(
                got=f"observation {self.name!r} of kind {self.kind!r} with shape {self.shape}",
                expected=f"one of {_RANKS} (kind: number of dimensions), every size at least 1",
                remedy="correct the kind or shape in the simulator, or leave out an observation that holds nothing",
            )
        if self.dtype not in ("float32", "uint8") or (self.dtype == "uint8" and self.kind != "image"):
            raise SpecError(
                got=f"observation {self.name!r} with dtype {self.dtype!r}",
                expected="float32, or uint8 for an image",
                remedy="convert it in the simulator",
            )

    def __str__(self) -> str:
        """Returns it in words."""
        unit = {"image": " of bytes" if self.dtype == "uint8" else " of floats", "entities": " (number x features)"}
        return f"{self.name}: {self.kind} {' x '.join(map(str, self.shape))}{unit.get(self.kind, '')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionSpec:
    """Describes the actions of an agent at a decision.

    Attributes:
        continuous: number of continuous actions, each in [-1, 1].
        discrete: number of choices of each discrete branch.
    """

    continuous: int = 0
    discrete: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.continuous < 0 or any(branch < 1 for branch in self.discrete):
            raise SpecError(
                got=f"{self.continuous} continuous actions and branches {self.discrete}",
                expected="no negative count and at least one choice in each branch",
                remedy="correct the action spec in the simulator",
            )
        if self.continuous == 0 and not self.discrete:
            raise SpecError(
                got="a behavior without actions",
                expected="at least one continuous action or one discrete branch",
                remedy="give the behavior an action, or do not report it",
            )

    def __str__(self) -> str:
        """Returns them in words."""
        parts = [f"{self.continuous} continuous"] if self.continuous else []
        parts += [f"branches of {', '.join(map(str, self.discrete))} choices"] if self.discrete else []
        return " and ".join(parts)

    @property
    def parts(self) -> int:
        """Returns the number of continuous dimensions and branches."""
        return self.continuous + len(self.discrete)

    @property
    def mask_size(self) -> int:
        """Returns the number of columns of an action mask: the choices of all branches side by side."""
        return sum(self.discrete)


@dataclass(frozen=True, kw_only=True, slots=True)
class BehaviorSpec:
    """Describes the observations and actions of one behavior name, the same for all its teams."""

    observations: tuple[ObservationSpec, ...]
    actions: ActionSpec

    def __post_init__(self) -> None:
        names = [observation.name for observation in self.observations]
        if not names or len(set(names)) != len(names):
            raise SpecError(
                got=f"observations named {names}",
                expected="at least one, each with a name of its own",
                remedy="name every observation differently",
            )

    def __str__(self) -> str:
        """Returns what agents observe and how they act, in words."""
        return f"observations {', '.join(map(str, self.observations))}; actions {self.actions}"

    @property
    def observation_bytes(self) -> int:
        """Returns the bytes of one agent's observations."""
        return sum(math.prod(one.shape) * np.dtype(one.dtype).itemsize for one in self.observations)


def read_spec(plain: Mapping[str, Any]) -> BehaviorSpec:
    """Returns the spec that `dataclasses.asdict`, and possibly JSON, have converted."""
    observations = tuple(ObservationSpec(**{**one, "shape": tuple(one["shape"])}) for one in plain["observations"])
    actions = plain["actions"]
    return BehaviorSpec(
        observations=observations,
        actions=ActionSpec(continuous=actions["continuous"], discrete=tuple(actions["discrete"])),
    )


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class BehaviorId:
    """Identifies a behavior by its name and team.

    Attributes:
        name: selects settings, network and learner.
        team: 0 or more; teams of one name can play against each other.
    """

    name: str
    team: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `Name` or `Name?team=N`.

        Raises:
            SpecError: the name is empty, the team is not a number from 0 to 2^31 - 1, or there is another query.
        """
        found = _ID.fullmatch(text)
        team = int(found[2] or 0) if found else -1
        if found is None or team > 2**31 - 1:
            raise SpecError(
                got=f"behavior id {text!r:.100}",
                expected="`Name` or `Name?team=N` with N from 0",
                remedy="correct the behavior id in the simulator",
            )
        return cls(name=found[1], team=team)

    def __str__(self) -> str:
        return f"{self.name}?team={self.team}"


def names_a_folder(name: str) -> bool:
    """Returns whether a behavior of this name can have its own folder and learner."""
    plain = bool(name.strip()) and name.isprintable() and not _BAD_IN_NAME & set(name) and not name.startswith(".")
    free = name not in _TAKEN and not _FILES & set(PurePath(name).suffixes)
    return plain and free and len(name.encode()) <= _LONGEST_NAME
