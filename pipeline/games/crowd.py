"""Crowd: members of large groups come and go all the time, and one has to stand where it is dangerous.

What the group earns comes from those who pass, and nobody passes unless another one holds the gate open for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport, Ends
from sparring.pipeline.simulation.game import decisions, ends
from sparring.pipeline.specs import ActionSpec, BehaviorId, BehaviorSpec, ObservationSpec

PLATE: Final = 0
GATE: Final = 4
"""The last place before the gate; members appear on places 1 to 4."""
EXIT: Final = 7
PLACES: Final = EXIT + 1
PATIENCE: Final = 4
"""Steps in a row on the plate, the last of which is one too many."""
LONGEST_PAUSE: Final = 8
"""Most steps for which a member is absent."""
LIMIT: Final = 200
"""Steps of an area after which the episode is cut."""
OBSERVATION_SIZE: Final = 2 * PLACES + 3
_STRIDES: Final = np.array([-1, 0, 1])


class Crowd:
    """`areas` corridors of 8 places; in each a group of up to `members` that come and go.

    The plate is at place 0, the gate between 4 and 5, the exit at 7. Members choose to go left, stay or go right; any
    number may stand on one place. The gate lets pass, either way, while anybody stood on the plate before the move.
    A member that reaches the exit is delivered: it ends, and its group gets 1 / members. A member that is on the plate
    for the fourth step in a row is caught: it ends, and its group gets nothing. 1 to 8 steps later (at random) it
    appears on one of the places 1 to 4 (at random), as a new life of the same id. If all that are there would end in
    one step, the one with the lowest number stays for the time being, so a group is never empty. After 200 steps the
    episode of the whole group is cut; at the start of the next one some are there and others appear within 8 steps.

    Observation `corridor` [19]: own place as one of 8; for each of the 8 places, how many of the group are there, over
    `members`; steps for which the member has been on the plate, and the longest for which anybody has, over 4; whether
    it is one of those that decide less often.

    Args:
        areas: corridors side by side.
        members: of each group, 2 or more.
        behavior: name of the behavior.
        every: members with odd numbers decide at every so many steps of their life only, and stay in between.

    Raises:
        SettingsError: fewer than 2 members, or `every` below 1.
    """

    name = "crowd"

    def __init__(self, areas: int = 1, members: int = 20, behavior: str = "Crowd", every: int = 1) -> None:
        if members < 2:
            raise SettingsError(f"got {members} members; expected 2 or more: one opens, another goes; correct members")
        if every < 1:
            raise SettingsError(f"got every={every}; expected 1 or more steps; correct every")
        shape = (areas, members)
        self._id = str(BehaviorId(name=behavior))
        self._random = np.random.default_rng()
        self._agents = np.arange(areas * members, dtype=np.int64).reshape(shape)
        self._groups = np.repeat(1 + np.arange(areas, dtype=np.int64), members).reshape(shape)
        self._every = np.where(np.arange(members) % 2 == 1, every, 1)
        self._places = np.zeros(shape, np.int64)
        self._here = np.ones(shape, bool)
        self._held = np.zeros(shape, np.int64)  # steps in a row on the plate
        self._pauses = np.zeros(shape, np.int64)  # steps until an absent member appears
        self._lives = np.zeros(shape, np.int64)  # steps since it appeared
        self._earned = np.zeros(shape)  # by the group since the member's last decision
        self._ages = np.zeros(areas, np.int64)

    def behaviors(self) -> Mapping[str, BehaviorSpec]:
        """One behavior."""
        observations = (ObservationSpec(name="corridor", shape=(OBSERVATION_SIZE,)),)
        return {self._id: BehaviorSpec(observations=observations, actions=ActionSpec(discrete=(len(_STRIDES),)))}

    def reset(self, parameters: Mapping[str, float], seed: int | None) -> Sequence[BehaviorReport]:
        """New episodes in all areas; there are no parameters."""
        del parameters
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._restart(np.arange(len(self._agents)))
        return self._reports(None)

    def step(self, actions: Mapping[str, BehaviorActions]) -> Sequence[BehaviorReport]:
        """Moves whoever has decided; then exit, plate, time, and who appears. No report where nobody has a row."""
        self._move(actions)
        before = self._here.copy()
        leaving, delivered = self._leaving()
        self._here &= ~leaving
        self._lives += 1
        self._earned += delivered.sum(1, keepdims=True) / before.shape[1]
        self._ages += 1
        over = self._ages >= LIMIT
        last = self._ends(leaving | (before & over[:, None]), leaving)
        self._pauses -= 1
        self._pauses[leaving] = self._random.integers(1, LONGEST_PAUSE + 1, int(leaving.sum()))
        self._appear(~before & (self._pauses <= 0))
        self._restart(np.flatnonzero(over))
        return self._reports(last)

    def close(self) -> None:
        """Holds nothing."""

    def _deciding(self) -> NDArray[np.bool_]:
        """[areas, members]."""
        deciding: NDArray[np.bool_] = self._here & (self._lives % self._every == 0)
        return deciding

    def _move(self, actions: Mapping[str, BehaviorActions]) -> None:
        deciding = self._deciding()
        shut = ~(self._here & (self._places == PLATE)).any(1, keepdims=True)
        beyond = self._places > GATE
        lowest = np.where(shut & beyond, GATE + 1, PLATE)
        highest = np.where(shut & ~beyond, GATE, EXIT)
        if deciding.any():
            self._places[deciding] += _STRIDES[actions[self._id].discrete[:, 0]]
        self._places.clip(lowest, highest, out=self._places)
        self._held = np.where(self._places == PLATE, np.minimum(self._held + 1, PATIENCE), 0)

    def _leaving(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """[areas, members] Who ends by itself; who of them is delivered."""
        at_exit = self._places == EXIT
        leaving = self._here & (at_exit | (self._held >= PATIENCE))
        nobody_left = (leaving == self._here).all(1, keepdims=True)
        first = self._here & (np.cumsum(self._here, 1) == 1)
        leaving &= ~(nobody_left & first)
        return leaving, leaving & at_exit

    def _appear(self, members: NDArray[np.bool_]) -> None:
        self._places[members] = self._random.integers(PLATE + 1, GATE + 1, int(members.sum()))
        self._here |= members
        self._held[members] = 0
        self._lives[members] = 0
        self._earned[members] = 0

    def _restart(self, areas: NDArray[np.int64]) -> None:
        pauses = self._random.integers(0, LONGEST_PAUSE + 1, (len(areas), self._agents.shape[1]))
        self._pauses[areas] = pauses - pauses.min(1, keepdims=True)  # somebody is there at once
        self._here[areas] = False
        self._ages[areas] = 0
        anew = np.zeros_like(self._here)
        anew[areas] = self._pauses[areas] == 0
        self._appear(anew)

    def _reports(self, last: Ends | None) -> Sequence[BehaviorReport]:
        deciding = self._deciding()
        following = None
        if deciding.any():
            following = decisions(
                self._agents[deciding],
                self._observe()[deciding],
                groups=self._groups[deciding],
                group_rewards=self._earned[deciding],
            )
            self._earned[deciding] = 0
        if following is None and last is None:
            return ()
        return (BehaviorReport(behavior=self._id, decisions=following, ends=last),)

    def _ends(self, ended: NDArray[np.bool_], leaving: NDArray[np.bool_]) -> Ends | None:
        if not ended.any():
            return None
        return ends(
            self._agents[ended],
            self._observe()[ended],
            interrupted=~leaving[ended],
            group_rewards=self._earned[ended],
        )

    def _observe(self) -> NDArray[np.float32]:
        """[areas, members, 19]."""
        areas, members = self._agents.shape
        own = self._places[:, :, None] == np.arange(PLACES)
        crowd = (own & self._here[:, :, None]).sum(1, keepdims=True) / members
        held = self._held / PATIENCE
        longest = np.where(self._here, held, 0).max(1, keepdims=True)
        slow = self._every > 1
        rest = np.stack(np.broadcast_arrays(held, longest, slow), 2)
        crowd = np.broadcast_to(crowd, (areas, members, PLACES))
        return np.concatenate([own, crowd, rest], 2).astype(np.float32)
