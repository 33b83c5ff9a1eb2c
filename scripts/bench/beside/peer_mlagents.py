"""ML-Agents on a game, without Unity and its protocol: `python -m beside.peer_mlagents CONFIG ...`.

`PEERS_GAME` names the game. ML-Agents' own environment process steps it as a `BaseEnv`, so that nothing but the trainer
is measured: a Unity player would add its messages.
"""

from __future__ import annotations

import os
from typing import Any, Final

import numpy as np
from mlagents.trainers import learn as trainer
from mlagents_envs.base_env import (
    ActionSpec,
    ActionTuple,
    BaseEnv,
    BehaviorSpec,
    DecisionSteps,
    DimensionProperty,
    ObservationSpec,
    ObservationType,
    TerminalSteps,
)

from beside import learn
from beside.environments import MAKERS
from beside.settings import GAMES

GAME: Final = "PEERS_GAME"
NAME: Final = "Game?team=0"


class Environments(BaseEnv):  # type: ignore[misc]
    """The environments of a game, each with one agent that gets a new id with each episode."""

    def __init__(self, game: str) -> None:
        self._settings = GAMES[game]
        self._all = [MAKERS[game]() for _ in range(self._settings.environments)]
        shape = self._settings.shape
        actions = ActionSpec(self._settings.continuous, (self._settings.choices,) if self._settings.choices else ())
        kinds: tuple[Any, ...] = (DimensionProperty.NONE,) * len(shape)
        if self._settings.images:
            moved = DimensionProperty.TRANSLATIONAL_EQUIVARIANCE
            shape, kinds = (shape[2], *shape[:2]), (DimensionProperty.NONE, moved, moved)
        spec = ObservationSpec(shape, kinds, ObservationType.DEFAULT, "seen")
        self._specs = {NAME: BehaviorSpec([spec], actions)}

    @property
    def behavior_specs(self) -> Any:
        return self._specs

    def reset(self) -> None:
        count = len(self._all)
        self._now = [self._read(one.reset()[0]) for one in self._all]
        self._ids, self._next = np.arange(count, dtype=np.int32), count
        self._rewards = np.zeros(count, np.float32)
        self._ended: list[tuple[int, Any, float, bool]] = []

    def set_actions(self, behavior_name: str, action: ActionTuple) -> None:
        self._actions = action.discrete[:, 0] if self._settings.choices else action.continuous.clip(-1, 1)

    def set_action_for_agent(self, behavior_name: str, agent_id: int, action: ActionTuple) -> None:
        raise NotImplementedError("the trainer sets the actions of all agents at once")

    def step(self) -> None:
        self._ended = []
        self._rewards = np.zeros(len(self._all), np.float32)
        for i, one in enumerate(self._all):
            observation, reward, terminated, truncated, _ = one.step(self._actions[i])
            self._now[i], self._rewards[i] = self._read(observation), reward
            if terminated or truncated:
                self._ended.append((int(self._ids[i]), self._now[i], float(reward), truncated))
                self._now[i], self._rewards[i] = self._read(one.reset()[0]), 0
                self._ids[i], self._next = self._next, self._next + 1

    def get_steps(self, behavior_name: str) -> tuple[DecisionSteps, TerminalSteps]:
        none, choices = np.zeros(len(self._all)), self._settings.choices
        masks = [np.zeros((len(self._all), choices), np.bool_)] if choices else None
        deciding = DecisionSteps(
            [np.stack(self._now)], self._rewards, self._ids.copy(), masks, none.astype(int), none.astype(np.float32)
        )
        if not self._ended:
            return deciding, TerminalSteps.empty(self._specs[NAME])
        ids, last, rewards, late = zip(*self._ended)  # noqa: B905 - Python 3.9 has no `strict`
        zeros = np.zeros(len(ids))
        ended = TerminalSteps(
            [np.stack(last)],
            np.array(rewards, np.float32),
            np.array(late),
            np.array(ids, np.int32),
            zeros.astype(int),
            zeros.astype(np.float32),
        )
        return deciding, ended

    def close(self) -> None:
        """Closes nothing: the record is written line by line."""

    def _read(self, observation: Any) -> Any:
        if self._settings.images:
            return observation.transpose(2, 0, 1).astype(np.float32) / 255
        return np.asarray(observation, np.float32)


def _factory(*_: Any, **__: Any) -> Any:
    game = os.environ[GAME]
    return lambda worker_id, side_channels: Environments(game)


def main() -> None:
    trainer.create_environment_factory = _factory
    learn.main()


if __name__ == "__main__":
    main()
