"""The games of `peers.py` as Gymnasium environments, the same for every trainer; each records its own episodes.

They need gymnasium and numpy alone, and run in the environment of each trainer. Importing this module registers them:
`beside.environments:CartPole-v9`, `...:Balance-v9`, `...:Catch-v9`, and `...:Recorded-v9`, the environment of Gymnasium
that `PEERS_GAME` names.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, Final

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from beside.games import Balance as Plates
from beside.settings import GAMES

RECORD: Final = "PEERS_RECORD"
"""Environment variable with the file to which all environments of a run append their episodes."""


class Balance(gym.Env[NDArray[np.float32], NDArray[np.float32]]):
    """A ball on a plate, which an action turns: 100 is the most that an episode of 1,000 steps returns."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (8,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self._plates = Plates(1, int(self.np_random.integers(2**31)))
        return self._plates.reset()[self._plates.keys[0]][0], {}

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        turn = self._plates.step({self._plates.keys[0]: np.asarray(action, np.float32)[None]})[self._plates.keys[0]]
        ended, late = bool(turn.ended[0]), bool(turn.interrupted[0])
        return turn.last[0].copy(), float(turn.rewards[0]), ended and not late, late, {}


class Catch(gym.Env[NDArray[np.uint8], np.int64]):
    """A ball falls, and a paddle on the ground moves to where it lands: 1 if it is there, else -1.

    Observation: an image [40, 40, 1] of bytes. Actions: left, stay, right. An episode has 9 steps.
    """

    CELLS: Final = 10
    observation_space = gym.spaces.Box(0, 255, (40, 40, 1), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        super().reset(seed=seed)
        self._row, self._column = 0, int(self.np_random.integers(self.CELLS))
        self._paddle = int(self.np_random.integers(self.CELLS))
        return self._image(), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        self._paddle = min(max(self._paddle + int(action) - 1, 0), self.CELLS - 1)
        self._row += 1
        ended = self._row == self.CELLS - 1
        reward = (1.0 if abs(self._paddle - self._column) <= 1 else -1.0) if ended else 0.0
        return self._image(), reward, ended, False, {}

    def _image(self) -> NDArray[np.uint8]:
        cells = np.zeros((self.CELLS, self.CELLS), np.uint8)
        cells[-1, max(self._paddle - 1, 0) : self._paddle + 2] = 128
        cells[self._row, self._column] = 255
        return cells.repeat(4, 0).repeat(4, 1)[:, :, None]


class Recorded(gym.Wrapper[Any, Any, Any, Any]):
    """Appends a line for its first step, and one for each episode that ends: time, length and return."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._file = open(os.environ[RECORD], "a", buffering=1)  # noqa: PTH123, SIM115 - as long as the environment
        self._length, self._return, self._began = 0, 0.0, False

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        self._length, self._return = 0, 0.0
        return self.env.reset(**options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if not self._began:
            self._began = True
            self._line()
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._length += 1
        self._return += float(reward)
        if terminated or truncated:
            self._line(length=self._length, reward=self._return)
        return observation, reward, terminated, truncated, info

    def _line(self, **values: float) -> None:
        self._file.write(json.dumps({"time": time.monotonic(), **values}) + "\n")


def cartpole() -> Recorded:
    return Recorded(gym.make("CartPole-v1"))


def balance() -> Recorded:
    return Recorded(Balance())


def catch() -> Recorded:
    return Recorded(Catch())


def recorded() -> Recorded:
    return Recorded(gym.make(os.environ["PEERS_GAME"], disable_env_checker=True))


MAKERS: Final = {"cartpole": cartpole, "single": cartpole, "balance": balance, "catch": catch}
for name, maker in MAKERS.items():
    gym.register(GAMES[name].environment, entry_point=maker, order_enforce=False, disable_env_checker=True)  # type: ignore[arg-type]
gym.register("Recorded-v9", entry_point=recorded, order_enforce=False, disable_env_checker=True)  # type: ignore[arg-type]
