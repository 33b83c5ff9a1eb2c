"""Simulates large groups whose members come and go, and in which one member has to stand in a dangerous place.

The group earns from members that pass the gate, and no member passes unless another one holds it open.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.base import Bools, BuiltInGame, Ints, one_vector
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.specs import ActionSpec, Array, BehaviorId

PLATE: Final = 0
GATE: Final = 4
"""Last place before the gate; members appear on places 1 to 4."""
EXIT: Final = 7
PLACES: Final = EXIT + 1
PLATE_LIMIT: Final = 4
"""Consecutive steps on the plate after which a member is caught."""
LONGEST_PAUSE: Final = 8
"""Longest absence of a member, in steps."""
LIMIT: Final = 200
"""Steps of an area after which the episode is truncated."""
OBSERVATION_SIZE: Final = 2 * PLACES + 3
_STRIDES: Final = np.array([-1, 0, 1])


class Crowd(BuiltInGame):
    """Simulates `areas` corridors of 8 places; in each a group of up to `members` that come and go.

    The plate is at place 0, the gate between 4 and 5, the exit at 7. Members choose to go left, stay or go right; any
    number may stand on one place. The gate is open, in both directions, if any member stood on the plate before the
    move. A member that reaches the exit is delivered: it ends, and its group gets 1 / members. A member that is on the
    plate for the fourth consecutive step is caught: it ends, and its group gets nothing. 1 to 8 steps later (at random)
    it appears on one of the places 1 to 4 (at random), as a new episode of the same id. If all present members would
    end in one step, the one with the lowest number stays for now, so a group is never empty. After 200 steps the
    episode of the whole group is truncated; at the start of the next one some are present and others appear within 8
    steps.

    Observation `corridor` [19]: own place as one of 8; for each of the 8 places, the count of members there, divided by
    `members`; steps of the member on the plate, and the largest number of steps of any member, divided by 4; whether it
    is one of those that decide less often.

    Args:
        areas: number of corridors side by side.
        members: size of each group, 2 or more.
        behavior: name of the behavior.
        every: members with odd numbers decide only at every `every`-th step of their episode, and stay in between.

    Raises:
        SettingsError: there are fewer than 2 members, or `every` is below 1.
    """

    name = "crowd"

    def __init__(self, areas: int = 1, members: int = 20, behavior: str = "Crowd", every: int = 1) -> None:
        if members < 2:
            raise SettingsError(f"got {members} members; expected 2 or more, one of them to open; correct members")
        if every < 1:
            raise SettingsError(f"got every={every}; expected 1 or more steps; correct every")
        shape = (areas, members)
        spec = one_vector("corridor", OBSERVATION_SIZE, ActionSpec(discrete=(len(_STRIDES),)))
        super().__init__(areas, {str(BehaviorId(name=behavior)): spec}, members)
        self._can_leave = True
        self._groups = 1 + self._areas
        self._every = np.where(np.arange(members) % 2 == 1, every, 1)
        self._places = np.zeros(shape, np.int64)
        self._held = np.zeros(shape, np.int64)  # consecutive steps on the plate
        self._pauses = np.zeros(shape, np.int64)  # steps until an absent member appears
        self._member_ages = np.zeros(shape, np.int64)  # steps since the member appeared
        self._earned = np.zeros(shape)  # reward of the group since the member's last decision

    def step(self, actions: Mapping[str, BehaviorActions]) -> tuple[BehaviorReport, ...]:
        """Moves the members that decided, then applies exit, plate and time limit, and lets absent members appear."""
        self._move(actions)
        before = self._here.copy()
        leaving, delivered = self._leaving()
        self._here &= ~leaving
        self._member_ages += 1
        self._earned += delivered.sum(1, keepdims=True) / before.shape[1]
        self._ages += 1
        over = self._ages >= LIMIT
        ended = leaving | (before & over[:, None])
        nothing = np.zeros(over.size)
        last = self._end(ended, rewards=nothing, group_rewards=self._earned, interrupted=~leaving)
        self._pauses -= 1
        self._pauses[leaving] = self._random.integers(1, LONGEST_PAUSE + 1, int(leaving.sum()))
        self._appear(~before & (self._pauses <= 0))
        self._start(over.nonzero()[0])
        deciding = self._deciding()
        reports = self._reports(last, deciding, rewards=nothing, group_rewards=self._earned)
        self._earned[deciding] = 0
        return reports

    def _deciding(self) -> Bools:
        """Returns which members decide, [areas, members]."""
        deciding: Bools = self._here & (self._member_ages % self._every == 0)
        return deciding

    def _move(self, actions: Mapping[str, BehaviorActions]) -> None:
        deciding = self._deciding()
        shut = ~(self._here & (self._places == PLATE)).any(1, keepdims=True)
        beyond = self._places > GATE
        lowest = np.where(shut & beyond, GATE + 1, PLATE)
        highest = np.where(shut & ~beyond, GATE, EXIT)
        if deciding.any():
            self._places[deciding] += _STRIDES[actions[self._ids[0]].discrete[:, 0]]
        self._places.clip(lowest, highest, out=self._places)
        self._held = np.where(self._places == PLATE, np.minimum(self._held + 1, PLATE_LIMIT), 0)

    def _leaving(self) -> tuple[Bools, Bools]:
        """Returns which members end by themselves, and which of these are delivered, both [areas, members]."""
        at_exit = self._places == EXIT
        leaving = self._here & (at_exit | (self._held >= PLATE_LIMIT))
        would_be_empty = (leaving == self._here).all(1, keepdims=True)
        first = self._here & (np.cumsum(self._here, 1) == 1)
        leaving &= ~(would_be_empty & first)
        return leaving, leaving & at_exit

    def _appear(self, members: Bools) -> None:
        self._places[members] = self._random.integers(PLATE + 1, GATE + 1, int(members.sum()))
        self._here |= members
        self._held[members] = 0
        self._member_ages[members] = 0
        self._earned[members] = 0

    def _begin(self, areas: Ints) -> None:
        pauses = self._random.integers(0, LONGEST_PAUSE + 1, (len(areas), self._here.shape[1]))
        self._pauses[areas] = pauses - pauses.min(1, keepdims=True)  # at least one member is present at once
        self._here[areas] = False
        anew = np.zeros_like(self._here)
        anew[areas] = self._pauses[areas] == 0
        self._appear(anew)

    def _observe(self) -> list[list[Array]]:
        areas, members = self._here.shape
        own = self._places[:, :, None] == np.arange(PLACES)
        crowd = (own & self._here[:, :, None]).sum(1, keepdims=True) / members
        held = self._held / PLATE_LIMIT
        longest = np.where(self._here, held, 0).max(1, keepdims=True)
        slow = self._every > 1
        rest = np.stack(np.broadcast_arrays(held, longest, slow), 2)
        crowd = np.broadcast_to(crowd, (areas, members, PLACES))
        return [[np.concatenate([own, crowd, rest], 2).reshape(-1, OBSERVATION_SIZE)]]
