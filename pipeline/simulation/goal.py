"""The 1-D goal game: walk to the side that is shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pipeline.messages.simulator import BehaviorActions, BehaviorReport
from pipeline.simulation.game import decisions, ends
from pipeline.specs import ActionSpec, BehaviorId, BehaviorSpec, ObservationSpec

STEP_SIZE: Final = 0.2
TIME_PENALTY: Final = 0.01
FEWEST_STEPS: Final = 6
SUCCESS: Final = 1 + FEWEST_STEPS * TIME_PENALTY
SHOWN_STEPS: Final = 2


class Goal:
    """`areas` games, each with one agent of the same behavior.

    Observation `goal` [1]: -1 or +1; with `memory` only at the first 2 decisions of an episode, then 0.
    Each action moves its own position, from 0, by at most 0.2 within [-1, 1]: a discrete 1 is +, a 0
    is -. The episode ends when every position is at an end; reward then 1.06 times the mean of
    position times goal, before that -0.01 per decision.

    Args:
        areas: games side by side.
        actions: number of actions, each with a position of its own.
        discrete: branches of two choices instead of continuous actions.
        memory: hide the goal after the start.
        behavior: name of the behavior.
    """

    name = "goal"

    def __init__(
        self,
        areas: int = 1,
        actions: int = 1,
        discrete: bool = False,
        memory: bool = False,
        behavior: str = "Goal",
    ) -> None:
        self._id = str(BehaviorId(name=behavior))
        self._discrete = discrete
        self._spec = ActionSpec(discrete=(2,) * actions) if discrete else ActionSpec(continuous=actions)
        self._shown = SHOWN_STEPS if memory else None
        self._agents = np.arange(areas, dtype=np.int64)
        self._random = np.random.default_rng()
        self._positions = np.zeros((areas, actions))
        self._goals = np.ones(areas)
        self._ages = np.zeros(areas, np.int64)

    def behaviors(self) -> Mapping[str, BehaviorSpec]:
        """One behavior, one number, the actions that were asked for."""
        return {self._id: BehaviorSpec(observations=(ObservationSpec(name="goal", shape=(1,)),), actions=self._spec)}

    def reset(self, parameters: Mapping[str, float], seed: int | None) -> tuple[BehaviorReport]:
        """New episodes in all areas; there are no parameters."""
        del parameters
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._restart(self._agents)
        return (BehaviorReport(behavior=self._id, decisions=decisions(self._agents, self._observe())),)

    def step(self, actions: Mapping[str, BehaviorActions]) -> tuple[BehaviorReport]:
        """Moves every position."""
        chosen = actions[self._id]
        if self._discrete:
            moves = np.where(chosen.discrete == 1, STEP_SIZE, -STEP_SIZE)
        else:
            moves = chosen.continuous.clip(-STEP_SIZE, STEP_SIZE)
        self._positions += moves
        self._positions.clip(-1, 1, out=self._positions)
        self._ages += 1
        over = np.abs(self._positions).min(1) >= 1
        ended = over.nonzero()[0]
        finished = None
        if ended.size:
            reached = SUCCESS * self._positions[ended].mean(1) * self._goals[ended]
            finished = ends(ended, self._observe()[ended], rewards=reached)
            self._restart(ended)
        going_on = decisions(self._agents, self._observe(), rewards=np.where(over, 0, -TIME_PENALTY))
        return (BehaviorReport(behavior=self._id, decisions=going_on, ends=finished),)

    def close(self) -> None:
        """Holds nothing."""

    def _observe(self) -> NDArray[np.float32]:
        goals = self._goals if self._shown is None else np.where(self._ages < self._shown, self._goals, 0)
        return goals.astype(np.float32)[:, None]

    def _restart(self, areas: NDArray[np.int64]) -> None:
        self._positions[areas] = 0
        self._goals[areas] = self._random.integers(0, 2, areas.size) * 2 - 1
        self._ages[areas] = 0
