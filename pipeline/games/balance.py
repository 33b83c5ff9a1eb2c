"""Keeps a ball on a plate that tilts about two axes.

The ball rolls without slipping (a solid sphere: 5/7 of the pull along the slope accelerates it); rolling resistance and
the plate's own motion are neglected. One decision is one semi-implicit Euler step of `STEP_S` seconds. The ball falls
when its center leaves the round plate.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.games.base import BuiltInGame, Ints, one_vector
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.specs import ActionSpec, Array, BehaviorId

STEP_S: Final = 0.05
GRAVITY: Final = 9.81
RADIUS: Final = 1.5
"""Radius of the plate, in meters."""
MAX_TILT: Final = 0.4
"""Largest tilt about each axis, in radians."""
TILT_PER_STEP: Final = 0.1
"""Radians by which a full action turns the plate in one decision."""
START_TILT: Final = 0.1
START_POSITION: Final = 0.5
START_SPEED: Final = 0.3
"""Largest tilt (radians), position (meters) and speed (meters per second) on each axis at the start, uniform."""
MAX_STEPS: Final = 1000
REWARD: Final = 0.1
FALL_REWARD: Final = -1.0

_SPREAD: Final = np.repeat(np.array([START_TILT, START_POSITION, START_SPEED], np.float32), 2)[:, None]
_REWARDS: Final = np.array([REWARD, FALL_REWARD], np.float32)
_FREE: Final = np.array([0, 1, 2, 4, 5, 7])  # rows of the state that determine height and climb


class Balance(BuiltInGame):
    """Simulates `areas` plates, each with one agent of the same behavior.

    Observation `state` [8]: tilt about both axes (radians), ball position relative to the plate's center (x, height, z;
    meters), ball velocity (x, climb, z; meters per second). Actions: 2 continuous, each turns the plate about one axis.
    Reward: 0.1 per decision on the plate, -1 for the fall that ends the episode; interrupted after 1000 decisions.
    Parameter: `gravity` (9.81, in meters per second squared), read anew for each episode; it is not observed.

    Args:
        areas: number of plates side by side.
        behavior: name of the behavior.
    """

    name = "balance"

    def __init__(self, areas: int = 12, behavior: str = "Balance") -> None:
        super().__init__(areas, {str(BehaviorId(name=behavior)): one_vector("state", 8, ActionSpec(continuous=2))})
        self._state = np.zeros((8, areas), np.float32)  # row by row: numpy is twice as fast along areas
        self._tilt, self._position, self._velocity = self._state[0:2], self._state[2:5:2], self._state[5:8:2]
        self._height, self._climb = self._state[3], self._state[6]
        self._change = np.empty((2, areas), np.float32)
        self._pull = np.empty(areas, np.float32)  # meters per second that a step adds on a slope of 1

    def step(self, actions: Mapping[str, BehaviorActions]) -> tuple[BehaviorReport, ...]:
        """Turns the plates and lets the balls roll for `STEP_S`."""
        self._roll(actions[self._ids[0]].continuous.T)
        self._ages += 1
        fallen = np.einsum("ij,ij->j", self._position, self._position) > RADIUS**2
        rewards = _REWARDS[fallen.view(np.int8)]
        return self._play_on(fallen | (self._ages >= MAX_STEPS), rewards, interrupted=~fallen)

    def _roll(self, actions: NDArray[np.float32]) -> None:
        """Rolls the balls for one step with actions [2, areas]."""
        tilt, position, velocity, climb, change = self._tilt, self._position, self._velocity, self._climb, self._change
        actions.clip(-1, 1, out=change)
        change *= TILT_PER_STEP
        tilt += change
        tilt.clip(-MAX_TILT, MAX_TILT, out=tilt)
        slope = np.sin(tilt)
        np.multiply(slope, self._pull, out=change)
        velocity += change
        np.multiply(velocity, STEP_S, out=change)
        position += change
        slope *= position
        height = slope[0] + slope[1]
        np.subtract(height, self._height, out=climb)
        climb /= STEP_S
        self._height[:] = height

    def _begin(self, areas: Ints) -> None:
        started = self._random.uniform(-1, 1, (6, areas.size)).astype(np.float32)
        started *= _SPREAD
        self._state[_FREE[:, None], areas] = started
        slope = np.sin(started[0:2])
        self._height[areas] = (slope * started[2:4]).sum(0)
        self._climb[areas] = (slope * started[4:6]).sum(0)
        for area in areas:  # a positive tilt raises the positive side
            self._pull[area] = -5 / 7 * self._parameters.get("gravity", GRAVITY) * STEP_S

    def _observe(self) -> list[list[Array]]:
        return [[self._state.T.copy()]]
