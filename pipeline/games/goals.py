"""Simulates the 1-D goal game for groups, whose members end one by one and earn together."""

from collections.abc import Mapping
from typing import Final

import numpy as np

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.base import Bools, BuiltInGame, Ints
from sparring.pipeline.games.goal import SUCCESS, TIME_PENALTY, moves
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.specs import ActionSpec, Array, BehaviorId, BehaviorSpec, ObservationSpec

_CONTINUOUS: Final = ActionSpec(continuous=1)
_DISCRETE: Final = ActionSpec(discrete=(2,))
_GOAL: Final = (ObservationSpec(name="goal", shape=(1,)),)
_SIDE_AND_PLACE: Final = (ObservationSpec(name="goal", shape=(2,)), ObservationSpec(name="place", shape=(1,)))


class Goals(BuiltInGame):
    """Simulates `areas` games; in each a group of `members`.

    Every member has its own goal, -1 or +1, and a position, from 0, that its action moves by at most 0.2 within [-1,
    1]: a discrete 1 is +, a 0 is -. A member ends and leaves when its position is at an end; the others continue. The
    group then gets its share: 1.06 times position times goal, divided by the number of members. When the last one ends,
    the next episode starts; every decision of an area before that costs its group 0.01.

    Observation `goal` [1]: the member's own goal.

    Args:
        areas: number of games side by side.
        members: size of each group.
        discrete: use a branch of two choices instead of a continuous action.
        behavior: name of the behavior.
        mixed: members with odd numbers have another behavior with the suffix `Odd`: they have a branch of two choices,
            and see `goal` [2], one-hot for the side of the goal (1 0 for -1, 0 1 for +1), and `place` [1], their
            position.

    Raises:
        SettingsError: there are too few members, or both discrete and mixed are set.
    """

    name = "goals"

    def __init__(
        self, areas: int = 1, members: int = 2, discrete: bool = False, behavior: str = "Goals", mixed: bool = False
    ) -> None:
        fewest = 2 if mixed else 1
        if members < fewest:
            raise SettingsError(f"got {members} members; expected {fewest} or more; correct members")
        if discrete and mixed:
            raise SettingsError("got discrete and mixed; expected one of them; leave one out")
        specs = {behavior: BehaviorSpec(observations=_GOAL, actions=_DISCRETE if discrete else _CONTINUOUS)}
        if mixed:
            specs[f"{behavior}Odd"] = BehaviorSpec(observations=_SIDE_AND_PLACE, actions=_DISCRETE)
        super().__init__(areas, {str(BehaviorId(name=name)): spec for name, spec in specs.items()}, members)
        self._sides = [
            self._agents.reshape(areas, members)[:, first :: len(specs)].ravel() for first in range(len(specs))
        ]
        self._can_leave = True
        self._groups = 1 + self._areas
        self._positions = np.zeros((areas, members))
        self._goals = np.ones((areas, members))

    def step(self, actions: Mapping[str, BehaviorActions]) -> tuple[BehaviorReport, ...]:
        """Moves all present members; a behavior without present members has no report."""
        for key, side in zip(self._ids, self._sides, strict=True):
            if (chosen := actions.get(key)) is not None:
                self._positions.ravel()[side[self._here.ravel()[side]]] += moves(chosen)[:, 0]
        self._positions.clip(-1, 1, out=self._positions)
        arrived = self._here & (np.abs(self._positions) >= 1)
        self._here &= ~arrived
        over: Bools = self._here.sum(1) == 0
        reached = SUCCESS * (arrived * self._positions * self._goals).mean(1)
        earned = reached - np.where(over, 0, TIME_PENALTY)
        return self._play_on(over, np.zeros(over.size), group_rewards=earned, leaving=arrived)

    def _observe(self) -> list[list[Array]]:
        goals = self._goals.ravel()
        seen: list[list[Array]] = [[goals.reshape(-1, 1)]]
        if len(self._ids) > 1:
            sides = np.stack([goals < 0, goals > 0], 1).astype(np.float32)
            seen.append([sides, self._positions.reshape(-1, 1)])
        return seen

    def _begin(self, areas: Ints) -> None:
        self._positions[areas] = 0
        self._goals[areas] = self._random.integers(0, 2, (areas.size, self._here.shape[1])) * 2 - 1
        self._here[areas] = True
