"""Simulates a group of which one member opens the gate and leaves, so that the others can pass.

The group earns for that after the end of the member that opened: only credit beyond an agent's own episode finds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.base import Bools, GroupGame, Ints, one_vector
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.specs import ActionSpec, BehaviorId

BUTTON: Final = 0
GATE: Final = 4
"""Last place before the gate."""
EXIT: Final = 6
LIMIT: Final = 24
"""Decisions after which the episode is truncated."""
MOVE_COST: Final = 0.01
"""Cost for the group of every decision of an area."""
_STRIDES: Final = np.array([-1, 0, 1])


class Rooms(GroupGame):
    """Simulates `areas` corridors of 7 places; in each a group of `members`.

    The button is at place 0, the gate between 4 and 5, the exit at 6. Members begin on places 1 to 4 and choose to go
    left, stay or go right. The first member on the button ends there and holds it until the end of the episode; of
    several at once it is the one with the lowest number. From then on the gate is open. When one of the others reaches
    the exit, the group gets 1 and all remaining members end. Every decision of an area costs its group 0.01. After 24
    decisions the episode is truncated.

    Observation `place` [3 + 2 (members - 1)]: own place divided by 6, whether the gate is open, share of elapsed time;
    then for each other member, in the order of their numbers, whether it is present, and its place divided by 6.

    Args:
        areas: number of corridors side by side.
        members: size of each group, 2 or more.
        behavior: name of the behavior.

    Raises:
        SettingsError: there are fewer than 2 members.
    """

    name = "rooms"

    def __init__(self, areas: int = 1, members: int = 2, behavior: str = "Rooms") -> None:
        if members < 2:
            raise SettingsError(f"got {members} members; expected 2 or more, one of them to open; correct members")
        self._id = str(BehaviorId(name=behavior))
        spec = one_vector("place", 3 + 2 * (members - 1), ActionSpec(discrete=(len(_STRIDES),)))
        super().__init__(areas, members, {self._id: spec})
        self._places = np.zeros((areas, members), np.int64)
        self._open = np.zeros(areas, bool)

    def _first_reports(self) -> tuple[BehaviorReport]:
        return self._report(self._decisions(self._here, self._observe()[self._here], None))

    def step(self, actions: Mapping[str, BehaviorActions]) -> tuple[BehaviorReport]:
        """Moves all present members, then applies button, exit and time limit."""
        self._places[self._here] += _STRIDES[actions[self._id].discrete[:, 0]]
        self._places.clip(BUTTON, np.where(self._open, EXIT, GATE)[:, None], out=self._places)
        self._ages += 1
        held = self._hold()
        left = self._here & (self._places == EXIT)
        won = left.any(1)
        over = won | (self._ages >= LIMIT)
        rewards = (won - MOVE_COST).astype(np.float32)[:, None]
        ended = held | (self._here & over[:, None])
        seen, last = self._observe(), None
        if ended.any():
            last = self._ends(ended, seen[ended], rewards, ~won[:, None] & ~held)
            self._begin(np.flatnonzero(over))
            seen = self._observe()
        earned = np.where(over[:, None], np.float32(0), rewards)
        return self._report(self._decisions(self._here, seen[self._here], earned), last)

    def _hold(self) -> Bools:
        """Returns which members have just taken the button, and removes them, [areas, members]."""
        there = self._here & (self._places == BUTTON) & ~self._open[:, None]
        held: Bools = there & (np.cumsum(there, 1) == 1)
        self._here &= ~held
        self._open |= held.any(1)
        return held

    def _observe(self) -> NDArray[np.float32]:
        """Returns the observations, [areas, members, size]."""
        areas, members = self._agents.shape
        places = self._places / EXIT
        general = np.stack(np.broadcast_arrays(places, self._open[:, None], self._ages[:, None] / LIMIT), 2)
        pairs = np.stack([self._here, np.where(self._here, places, 0)], 2)
        others = np.array([[other for other in range(members) if other != member] for member in range(members)])
        return np.concatenate([general, pairs[:, others].reshape(areas, members, -1)], 2).astype(np.float32)

    def _begin(self, areas: Ints) -> None:
        self._places[areas] = self._random.integers(BUTTON + 1, GATE + 1, (len(areas), self._agents.shape[1]))
        self._here[areas] = True
        self._open[areas] = False
        self._ages[areas] = 0
