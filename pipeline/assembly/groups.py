"""Tracks the groups of one source: their timesteps and their rewards.

A group timestep passes at each tick in which any member decides or ends. A group's segment is open for all members
together, whatever their behavior names, and closes for all together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.assembly import columns, sequences
from sparring.pipeline.assembly.columns import FIRST_ROWS, NO_ROWS, Mask, Places
from sparring.pipeline.messages.rows import concatenate
from sparring.pipeline.specs import Array


@dataclass(slots=True)
class FinishedGroups:
    """Holds what segments of members have in common; columns are those of `GroupSegments`."""

    numbers: NDArray[np.int64]
    spans: NDArray[np.int32]
    ended: Mask
    rewards: NDArray[np.float32]


NO_GROUPS: Final = FinishedGroups(NO_ROWS, np.empty(0, np.int32), np.empty(0, bool), np.empty(0, np.float32))


@dataclass(slots=True)
class Groups:
    """Holds a table with a place for each group that has members.

    Attributes:
        used: whether a group has the place.
        keys: what distinguishes groups: their key, or a unique negative number for an agent without a group.
        live: live members.
        times: group timesteps in the open segment so far.
        participants: members that are or were in the open segment.
        horizons: most group timesteps of a segment.
        totals: the group's own rewards in its episode so far, each counted once.
        known: whether the group's whole episode was seen.
        names: set of the members' behavior names, a bit for each.
        numbers: number of the group's episode.
        series: [places, timesteps] reward between each timestep of the open segment and the next.
        episodes: number of group episodes so far.
        unsent: finished group segments that are not sent yet.
    """

    used: Mask = field(default_factory=columns.flags)
    keys: NDArray[np.int64] = field(default_factory=columns.integers)
    live: NDArray[np.int64] = field(default_factory=columns.integers)
    times: NDArray[np.int64] = field(default_factory=columns.integers)
    participants: NDArray[np.int64] = field(default_factory=columns.integers)
    horizons: NDArray[np.int64] = field(default_factory=columns.integers)
    totals: NDArray[np.float64] = field(default_factory=columns.sums)
    known: Mask = field(default_factory=columns.flags)
    names: NDArray[np.int64] = field(default_factory=columns.integers)
    numbers: NDArray[np.int64] = field(default_factory=columns.integers)
    series: NDArray[np.float64] = field(default_factory=lambda: np.zeros((FIRST_ROWS, FIRST_ROWS)))
    episodes: int = 0
    unsent: list[FinishedGroups] = field(default_factory=list)

    def find(self, keys: NDArray[np.int64]) -> Places:
        """Returns [n] the place of each group; a new group gets one."""
        wanted, back = np.unique(keys, return_inverse=True)
        self._add(np.setdiff1d(wanted, self.keys[self.used], assume_unique=True))
        held = np.flatnonzero(self.used)
        held = held[np.argsort(self.keys[held])]
        found: Places = held[np.searchsorted(self.keys[held], wanted)][back]
        return found

    def enter(self, places: Places, name: int, horizon: int, known: Mask) -> None:
        """Adds members, one to each of `places`.

        Args:
            places: [n] places of their groups.
            name: number of their behavior name.
            horizon: most group timesteps of a segment with them.
            known: [n] whether their episodes begin now.
        """
        np.add.at(self.live, places, 1)
        np.add.at(self.participants, places, 1)
        self.names[places] |= 1 << name
        self.horizons[places] = np.where(self.horizons[places], np.minimum(self.horizons[places], horizon), horizon)
        np.logical_and.at(self.known, places, known)

    def leave(self, left: Sequence[Places]) -> Places:
        """Removes members, one from each of `left`; returns the places of their groups once."""
        if not left:
            return NO_ROWS
        for places in left:
            np.subtract.at(self.live, places, 1)
        return np.unique(np.concatenate(left))

    def earn(self, own: Array, shared: Array, ended: Mask, places: Places, totals: Array, decided: Array) -> None:
        """Adds the rewards of members since the last group timestep, and the group's own as far as not yet counted.

        Args:
            own: [n] reward of each member that reports the outcome of a step.
            shared: [n] reward of the group since the member's last decision.
            ended: [n] whether the member ended, so that it missed later group rewards of the same report.
            places: [n] place of the group.
            totals: [n] rewards of the group up to that decision, as far as they were known.
            decided: [n] tick of that decision.
        """
        self._credit(places, own)
        # Of those that continue, the first to decide has seen all group rewards that the others have, perhaps more.
        order = np.lexsort((-np.abs(shared), decided, ended, places))
        _, first = np.unique(places[order], return_index=True)
        chosen = order[first]
        gain = shared[chosen] - (self.totals[places[chosen]] - totals[chosen])
        self.totals[places[chosen]] += gain
        self._credit(places[chosen], gain)

    def advance(self, places: Places) -> None:
        """Begins a new group timestep in each of `places`, which are unique."""
        self.times[places] += 1
        most, width = int(self.times[places].max(initial=0)), self.series.shape[1]
        if most > width:
            more = np.zeros((len(self.series), max(most, 2 * width) - width))
            self.series = np.concatenate([self.series, more], axis=1)
        self.series[places, self.times[places] - 1] = 0.0

    def returns(self, ended: Places, name: int) -> NDArray[np.float32]:
        """Returns the returns of those of the groups `ended` that were seen whole and had members of a name."""
        reported = self.known[ended] & (self.keys[ended] > 0) & (self.times[ended] > 0)
        had_members = (self.names[ended] >> name & 1) > 0
        return self.totals[ended[reported & had_members]].astype(np.float32)

    def close(self, places: Places, spans: NDArray[np.int64], *, ended: bool) -> None:
        """Finishes segments of `spans` group timesteps, and begins new ones with the present timestep."""
        times = sequences.rows_of(np.zeros(len(spans), np.int64), spans)
        finished = FinishedGroups(
            numbers=self.numbers[places],
            spans=spans.astype(np.int32),
            ended=np.full(len(places), ended),
            rewards=self.series[np.repeat(places, spans), times].astype(np.float32),
        )
        self.unsent.append(finished)
        self.times[places] = 1
        self.participants[places] = self.live[places]
        self.series[places, 0] = 0.0

    def take(self) -> FinishedGroups:
        """Returns the finished group segments, and forgets them."""
        unsent, self.unsent = self.unsent, []
        return concatenate(unsent or [NO_GROUPS])

    def full(self, largest: int) -> Places:
        """Returns the groups whose segments have reached the horizon, or would soon exceed `largest` steps."""
        spans = self.times - 1
        full = (spans >= self.horizons) | (self.participants * (spans + 1) > largest)
        return np.flatnonzero(full & (self.live > 0) & (spans > 0))

    def _credit(self, places: Places, gain: Array) -> None:
        begun = self.times[places] > 0
        np.add.at(self.series, (places[begun], self.times[places[begun]] - 1), gain[begun])

    def _add(self, keys: NDArray[np.int64]) -> None:
        needed = int(np.count_nonzero(self.used)) + len(keys)
        if needed > len(self.used):
            columns.grow(self, needed)
        places = np.flatnonzero(~self.used)[: len(keys)]
        for column in (self.live, self.times, self.participants, self.horizons, self.totals, self.names):
            column[places] = 0
        self.used[places] = True
        self.known[places] = True
        self.keys[places] = keys
        self.numbers[places] = np.arange(self.episodes, self.episodes + len(keys))
        self.episodes += len(keys)
