"""What the games of the player stand-in say, and what they are told: columns, one row per agent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Sensor:
    """One observation of a behavior.

    Attributes:
        shape: of one agent's values; images are [channels, height, width] here, whatever is sent.
        mapping: of an image in PNG files: the image's channel that each channel of the files holds, -1 for none.
        goal: the observation tells the agent its goal.
    """

    name: str
    shape: tuple[int, ...]
    kind: Literal["vector", "entities", "image"] = "vector"
    png: bool = False
    mapping: tuple[int, ...] = ()
    goal: bool = False


@dataclass(frozen=True, kw_only=True)
class Behavior:
    """Attributes: key: as on the wire, `Name?team=N`. branches: choices of each discrete action."""

    key: str
    sensors: tuple[Sensor, ...]
    continuous: int = 0
    branches: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Entries:
    """Agents of one behavior, all of them ending or all of them deciding.

    Attributes:
        ids: [n].
        observations: per sensor [n, *shape], float32 or (images) uint8.
        rewards: [n] since the agent's previous decision.
        interrupted: [n] of those that end: cut by a limit.
        masks: [n, choices of all branches] True = forbidden.
        groups: [n] group ids, 0 for none.
        group_rewards: [n].
    """

    ids: NDArray[np.int64]
    observations: tuple[NDArray[Any], ...]
    rewards: NDArray[Any]
    interrupted: NDArray[np.bool_] | None = None
    masks: NDArray[np.bool_] | None = None
    groups: NDArray[np.int64] | None = None
    group_rewards: NDArray[Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """A behavior in one message; neither ends nor decisions: it is known, and has no agents just now."""

    behavior: Behavior
    ends: Entries | None = None
    decisions: Entries | None = None


@dataclass(frozen=True, kw_only=True)
class Actions:
    """Attributes: continuous: [n, k] float32. discrete: [n, branches] int64. Rows as in the last decisions."""

    continuous: NDArray[np.float32]
    discrete: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a game is made of.

    Attributes:
        behavior: name, or None for the game's own.
        hybrid: the trainer takes behaviors with both kinds of actions.
    """

    areas: int = 1
    behavior: str | None = None
    seed: int = 0
    discrete: bool = False
    actions: int = 1
    png: bool = True
    max_steps: int = 100
    late_after: int = 5
    hybrid: bool = True


def take(entries: Entries, rows: NDArray[Any]) -> Entries:
    """Some of the agents."""
    columns = {
        name: value[rows] for name, value in vars(entries).items() if value is not None and name != "observations"
    }
    return replace(entries, observations=tuple(seen[rows] for seen in entries.observations), **columns)


class Game(Protocol):
    def reset(self) -> list[Report]:
        """New episodes, and their first decisions."""

    def step(self, actions: dict[str, Actions]) -> list[Report]:
        """Plays on; there are actions for each behavior that had decisions in the last reports."""
