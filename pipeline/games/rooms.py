"""Simulates a group of which one member opens the gate and leaves, so that the others can pass.

The group earns for that after the end of the member that opened: only credit beyond an agent's own episode finds it.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.base import Bools, BuiltInGame, Ints, one_vector
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.specs import ActionSpec, Array, BehaviorId

BUTTON: Final = 0
GATE: Final = 4
"""Last place before the gate."""
EXIT: Final = 6
LIMIT: Final = 24
"""Decisions after which the episode is truncated."""
MOVE_COST: Final = 0.01
"""Cost for the group of every decision of an area."""
_STRIDES: Final = np.array([-1, 0, 1])


class Rooms(BuiltInGame):
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
        spec = one_vector("place", 3 + 2 * (members - 1), ActionSpec(discrete=(len(_STRIDES),)))
        super().__init__(areas, {str(BehaviorId(name=behavior)): spec}, members)
        self._can_leave = True
        self._groups = 1 + self._areas
        self._places = np.zeros((areas, members), np.int64)
        self._open = np.zeros(areas, bool)

    def step(self, actions: Mapping[str, BehaviorActions]) -> tuple[BehaviorReport, ...]:
        """Moves all present members, then applies button, exit and time limit."""
        self._places[self._here] += _STRIDES[actions[self._ids[0]].discrete[:, 0]]
        self._places.clip(BUTTON, np.where(self._open, EXIT, GATE)[:, None], out=self._places)
        self._ages += 1
        held = self._hold()
        won = (self._here & (self._places == EXIT)).any(1)
        over = won | (self._ages >= LIMIT)
        ended, interrupted = held | (self._here & over[:, None]), ~won[:, None] & ~held
        return self._play_on(over, np.zeros(over.size), won - MOVE_COST, leaving=ended, interrupted=interrupted)

    def _hold(self) -> Bools:
        """Returns which members have just taken the button, and removes them, [areas, members]."""
        there = self._here & (self._places == BUTTON) & ~self._open[:, None]
        held: Bools = there & (np.cumsum(there, 1) == 1)
        self._here &= ~held
        self._open |= held.any(1)
        return held

    def _observe(self) -> list[list[Array]]:
        areas, members = self._here.shape
        places = self._places / EXIT
        general = np.stack(np.broadcast_arrays(places, self._open[:, None], self._ages[:, None] / LIMIT), 2)
        pairs = np.stack([self._here, np.where(self._here, places, 0)], 2)
        others = np.array([[other for other in range(members) if other != member] for member in range(members)])
        return [
            [np.concatenate([general, pairs[:, others].reshape(areas, members, -1)], 2).reshape(areas * members, -1)]
        ]

    def _begin(self, areas: Ints) -> None:
        self._places[areas] = self._random.integers(BUTTON + 1, GATE + 1, (areas.size, self._here.shape[1]))
        self._here[areas] = True
        self._open[areas] = False
