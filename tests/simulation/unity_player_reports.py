"""Reports of the player stand-in's games and actions for them, in columns with one row per agent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Sensor:
    """One observation of a behavior.

    Attributes:
        shape: shape for one agent; images are [channels, height, width] here, whatever layout is sent.
        mapping: channel of the image in each channel of its PNG files, -1 for none.
        goal: whether the observation is the agent's goal.
    """

    name: str
    shape: tuple[int, ...]
    kind: Literal["vector", "entities", "image"] = "vector"
    png: bool = False
    mapping: tuple[int, ...] = ()
    goal: bool = False


@dataclass(frozen=True, kw_only=True)
class Behavior:
    """A behavior, with its `key` on the wire, `Name?team=N`, and the `branches` of its discrete actions."""

    key: str
    sensors: tuple[Sensor, ...]
    continuous: int = 0
    branches: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Entries:
    """Agents of one behavior, all of which end or all of which decide.

    Attributes:
        ids: shape [n].
        observations: shape [n, *shape] for each sensor, float32, or uint8 for images.
        rewards: shape [n], since the agent's previous decision.
        interrupted: shape [n], for agents that end by a limit.
        masks: shape [n, choices of all branches]; True is forbidden.
        groups: group ids [n], 0 for none.
        group_rewards: shape [n].
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
    """A behavior in one message; without ends and decisions it is known but has no agents yet."""

    behavior: Behavior
    ends: Entries | None = None
    decisions: Entries | None = None


@dataclass(frozen=True, kw_only=True)
class Actions:
    """Actions for the last decisions, in their order: continuous [n, k] float32, discrete [n, branches] int64."""

    continuous: NDArray[np.float32]
    discrete: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The settings of a game.

    Attributes:
        behavior: behavior name, or None for the game's own.
        hybrid: whether the trainer accepts behaviors with both kinds of actions.
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
    """Returns the entries of some agents."""
    columns = {
        name: value[rows] for name, value in vars(entries).items() if value is not None and name != "observations"
    }
    return replace(entries, observations=tuple(values[rows] for values in entries.observations), **columns)


class Game(Protocol):
    def reset(self) -> list[Report]:
        """Starts new episodes and returns their first decisions."""

    def step(self, actions: dict[str, Actions]) -> list[Report]:
        """Plays one step with actions for each behavior that had decisions in the last reports."""
