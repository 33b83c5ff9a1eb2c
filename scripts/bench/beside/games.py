"""The games of the comparison, with numpy alone: they run in this project's environment and in ML-Agents'.

A game has arenas side by side and one agent per arena and behavior; every agent decides at every step.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
_BALANCE: Final = Path(__file__).parents[3] / "pipeline" / "games" / "balance.py"
_FORWARD: Final[NDArray[np.float64]] = np.array([[1.0], [-1.0]])
"""Direction along the line in which each team's body faces."""
_BASE: Final = "sparring.pipeline.games.base"
_RECORDS: Final = {
    "sparring.pipeline.messages.simulator": ("BehaviorActions", "BehaviorReport", "Decisions", "Ends"),
    "sparring.pipeline.specs": ("ActionSpec", "Array", "BehaviorId", "BehaviorSpec", "ObservationSpec"),
}
"""Replacements for what both import from the pipeline, which needs a newer Python than ML-Agents."""


@dataclass(frozen=True)
class Turn:
    """The outcome of one step for the agents of one behavior.

    Attributes:
        observations: [arenas, size] before the next decision.
        rewards: [arenas] of the decision before.
        ended: [arenas] True where the episode ended; `observations` begin the next one.
        interrupted: [arenas] True where a limit of time ended it.
        last: [arenas, size] observations at the end, of use where `ended`.
    """

    observations: Floats
    rewards: Floats
    ended: NDArray[np.bool_]
    interrupted: NDArray[np.bool_]
    last: Floats


class Game(Protocol):
    """Attributes: keys: of the behaviors, `Name?team=N`. size: of an observation. actions: continuous ones."""

    keys: tuple[str, ...]
    size: int
    actions: int

    def reset(self) -> dict[str, Floats]:
        """Begins new episodes in all arenas; returns observations [arenas, size] by behavior."""

    def step(self, actions: Mapping[str, Floats]) -> dict[str, Turn]:
        """Plays one step with actions [arenas, actions] in [-1, 1] by behavior."""


def _balance_module() -> ModuleType:
    """`pipeline/games/balance.py`, and `base.py` beside it, with plain records instead of the pipeline's."""
    known = {name: sys.modules.get(name) for name in (*_RECORDS, _BASE)}
    for name, records in _RECORDS.items():
        stand_in: Any = ModuleType(name)
        for record in records:
            setattr(stand_in, record, SimpleNamespace)
        sys.modules[name] = stand_in
    try:
        sys.modules[_BASE] = _load(_BALANCE.with_name("base.py"))
        return _load(_BALANCE)
    finally:
        for name, before in known.items():
            if before is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = before


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Balance:
    """3DBall's stand-in: the physics of `pipeline/games/balance.py`; an episode of 1,000 decisions returns 100."""

    def __init__(self, arenas: int, seed: int) -> None:
        self.keys: tuple[str, ...] = ("3DBall?team=0",)
        self.size, self.actions = 8, 2
        self._game: Any = _balance_module().Balance(arenas, "3DBall")
        ((self._id, _spec),) = self._game.behaviors().items()
        self._seed: int | None = seed
        self._arenas = arenas

    def reset(self) -> dict[str, Floats]:
        (report,) = self._game.reset({}, self._seed)
        self._seed = None
        return {self.keys[0]: report.decisions.observations[0]}

    def step(self, actions: Mapping[str, Floats]) -> dict[str, Turn]:
        chosen = SimpleNamespace(continuous=actions[self.keys[0]])
        (report,) = self._game.step({self._id: chosen})
        observations, rewards = report.decisions.observations[0], report.decisions.rewards
        ended, interrupted = np.zeros(self._arenas, np.bool_), np.zeros(self._arenas, np.bool_)
        last = observations
        if (ends := report.ends) is not None:
            ended[ends.agents], interrupted[ends.agents] = True, ends.interrupted
            rewards[ends.agents], last = ends.rewards, observations.copy()
            last[ends.agents] = ends.observations[0]
        return {self.keys[0]: Turn(observations, rewards, ended, interrupted, last)}


class Push:
    """Two bodies on a line push each other; one that is pushed beyond its own end loses.

    The ends move inward until they reach the bodies, so that few matches are draws.

    Observation [7], from the own side (forward is toward the other): own distance to the own end, speed and stamina,
    the other's three, and the share of the time that is left. Action [1]: a force. A force tires, and a tired body is
    weak. Reward at the end: 1 to who won, -1 to who lost; 0 for both after `LIMIT` decisions, an interruption.

    Args:
        arenas: lines side by side.
        seed: of the starts.
    """

    STEP_S: Final = 0.05
    FORCE: Final = 4.0
    """Acceleration of a full force at full stamina."""
    DRAG: Final = 0.8
    """Share of the speed that is lost per second."""
    TIRING: Final = 0.8
    """Stamina that a full force costs per second, of 1."""
    REST: Final = 0.5
    """Stamina that recovers per second without a force."""
    WEAKEST: Final = 0.1
    """Share of the force that an exhausted body has."""
    WIDTH: Final = 0.3
    """Distance of two bodies that touch."""
    BOUNCE: Final = 0.4
    """Share of the relative speed that a collision restores."""
    LIMIT: Final = 150
    SHRINK: Final = 0.85
    """How far each end has moved inward at the limit, from 1."""

    def __init__(self, arenas: int, seed: int) -> None:
        self.keys: tuple[str, ...] = ("Push?team=0", "Push?team=1")
        self.size, self.actions = 7, 1
        self._random = np.random.default_rng(seed)
        self._position = np.zeros((2, arenas))
        self._speed = np.zeros((2, arenas))
        self._stamina = np.ones((2, arenas))
        self._age = np.zeros(arenas, np.int64)

    def reset(self) -> dict[str, Floats]:
        self._restart(np.ones(len(self._age), np.bool_))
        return self._observations()

    def step(self, actions: Mapping[str, Floats]) -> dict[str, Turn]:
        pushes = np.stack([actions[key][:, 0].astype(np.float64) for key in self.keys]).clip(-1, 1)
        self._move(pushes)
        self._age += 1
        behind = -self._room()
        lost = (behind > 0) & (behind >= behind[::-1])
        decided = lost.any(0) & ~lost.all(0)
        late = (self._age >= self.LIMIT) | lost.all(0)
        ended, interrupted = decided | late, late & ~decided
        last = self._observations()
        self._restart(ended)
        now = self._observations()
        rewards = (lost[::-1].astype(np.float32) - lost) * decided
        return {
            key: Turn(now[key], rewards[team].astype(np.float32), ended, interrupted, last[key])
            for team, key in enumerate(self.keys)
        }

    def _move(self, pushes: NDArray[np.float64]) -> None:
        """Makes one semi-implicit Euler step. Args: pushes: [2, arenas]."""
        strength = self.WEAKEST + (1 - self.WEAKEST) * self._stamina
        self._speed += self.STEP_S * (_FORWARD * self.FORCE * strength * pushes - self.DRAG * self._speed)
        effort = np.abs(pushes)
        self._stamina += self.STEP_S * (self.REST * (1 - effort) - self.TIRING * effort)
        np.clip(self._stamina, 0, 1, out=self._stamina)
        self._position += self.STEP_S * self._speed
        overlap = self.WIDTH - (self._position[1] - self._position[0])
        touching = overlap > 0
        self._position += np.where(touching, overlap / 2, 0) * -_FORWARD
        closing = self._speed[0] - self._speed[1]
        hit = np.where(touching & (closing > 0), (1 + self.BOUNCE) / 2 * closing, 0)
        self._speed += hit * -_FORWARD

    def _restart(self, arenas: NDArray[np.bool_]) -> None:
        count = int(arenas.sum())
        if not count:
            return
        gap = self._random.uniform(0.3, 0.6, count)
        self._position[:, arenas] = [-gap, gap]
        self._speed[:, arenas] = 0
        self._stamina[:, arenas] = 1
        self._age[arenas] = 0

    def _room(self) -> NDArray[np.float64]:
        """Returns the distance from each body to its own end: [2, arenas]."""
        return 1 - self.SHRINK * self._age / self.LIMIT + self._position * _FORWARD

    def _observations(self) -> dict[str, Floats]:
        own = self._room()
        ahead = self._speed * _FORWARD
        left = 1 - self._age / self.LIMIT
        found = {}
        for team, key in enumerate(self.keys):
            columns = [values[side] for side in (team, 1 - team) for values in (own, ahead, self._stamina)]
            found[key] = np.stack([*columns, left], 1).astype(np.float32)
        return found


GAMES: Final[dict[str, Callable[[int, int], Game]]] = {"balance": Balance, "balance_sac": Balance, "push": Push}
"""Makers of games by name; arguments: arenas, seed."""
ARENAS: Final = {"balance": 12, "balance_sac": 12, "push": 8}
