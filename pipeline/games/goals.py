"""Simulates the 1-D goal game for groups, whose members end one by one and earn together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.base import Bools, Float, GroupGame, Ints
from sparring.pipeline.games.goal import STEP_SIZE, SUCCESS, TIME_PENALTY
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport, Ends
from sparring.pipeline.specs import ActionSpec, Array, BehaviorId, BehaviorSpec, ObservationSpec

_CONTINUOUS: Final = ActionSpec(continuous=1)
_DISCRETE: Final = ActionSpec(discrete=(2,))
_GOAL: Final = (ObservationSpec(name="goal", shape=(1,)),)
_SIDE_AND_PLACE: Final = (ObservationSpec(name="goal", shape=(2,)), ObservationSpec(name="place", shape=(1,)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Holds the members of one behavior.

    Attributes:
        id: id of the behavior.
        members: [members] True for members of this behavior.
        spec: spec of the behavior.
    """

    id: str
    members: Bools
    spec: BehaviorSpec


class Goals(GroupGame):
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
        self._parts = _parts(behavior, members, discrete, mixed)
        super().__init__(areas, members, {part.id: part.spec for part in self._parts})
        self._positions = np.zeros((areas, members))
        self._goals = np.ones((areas, members))

    def _first_reports(self) -> tuple[BehaviorReport, ...]:
        return self._reports([None] * len(self._parts), np.zeros(len(self._areas)))

    def step(self, actions: Mapping[str, BehaviorActions]) -> tuple[BehaviorReport, ...]:
        """Moves all present members; a behavior without present members has no report."""
        for part in self._parts:
            if (chosen := actions.get(part.id)) is not None:
                self._positions[self._here & part.members] += _moves(chosen, part.spec.actions)
        self._positions.clip(-1, 1, out=self._positions)
        arrived = self._here & (np.abs(self._positions) >= 1)
        self._here &= ~arrived
        over = ~self._here.any(1)
        reached = SUCCESS * (arrived * self._positions * self._goals).mean(1)
        earned = reached - np.where(over, 0, TIME_PENALTY)
        ended = [(part, arrived & part.members) for part in self._parts]
        last = [self._ends(mine, self._seen(part, mine), earned[:, None]) for part, mine in ended]
        self._begin(np.flatnonzero(over))
        return self._reports(last, np.where(over, 0, earned))

    def _reports(self, last: Sequence[Ends | None], earned: Float) -> tuple[BehaviorReport, ...]:
        """Returns a report for each behavior with any member to report.

        Args:
            last: ends of each behavior.
            earned: [areas] rewards of the groups, for the members that are present now.
        """
        reports = []
        for part, ended in zip(self._parts, last, strict=True):
            mine = self._here & part.members
            seen = self._decisions(mine, self._seen(part, mine), earned[:, None])
            if seen is not None or ended is not None:
                reports.append(BehaviorReport(behavior=part.id, decisions=seen, ends=ended))
        return tuple(reports)

    def _seen(self, part: _Part, mine: Bools) -> list[Array]:
        goals = self._goals[mine]
        if part.spec.observations == _GOAL:
            return [goals[:, None]]
        return [np.stack([goals < 0, goals > 0], 1), self._positions[mine][:, None]]

    def _begin(self, areas: Ints) -> None:
        self._positions[areas] = 0
        self._goals[areas] = self._random.integers(0, 2, (len(areas), self._agents.shape[1])) * 2 - 1
        self._here[areas] = True


def _parts(behavior: str, members: int, discrete: bool, mixed: bool) -> tuple[_Part, ...]:
    first, odd = str(BehaviorId(name=behavior)), np.arange(members) % 2 == 1
    spec = BehaviorSpec(observations=_GOAL, actions=_DISCRETE if discrete else _CONTINUOUS)
    if not mixed:
        return (_Part(id=first, members=np.ones(members, bool), spec=spec),)
    other = BehaviorSpec(observations=_SIDE_AND_PLACE, actions=_DISCRETE)
    return (
        _Part(id=first, members=~odd, spec=spec),
        _Part(id=str(BehaviorId(name=f"{behavior}Odd")), members=odd, spec=other),
    )


def _moves(chosen: BehaviorActions, spec: ActionSpec) -> NDArray[np.floating]:
    """Returns how far each action moves, [n]."""
    if spec == _CONTINUOUS:
        return chosen.continuous[:, 0].clip(-STEP_SIZE, STEP_SIZE)
    return np.where(chosen.discrete[:, 0] == 1, STEP_SIZE, -STEP_SIZE)
