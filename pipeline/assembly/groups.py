"""Tracks the groups of one source: their timesteps, their rewards, and the segments of their members.

A group timestep passes at each tick in which any member decides or ends. A group's segment is open for all members
together, whatever their behavior names, and closes for all together.

g groups, s segments of members, r their steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.assembly import sequences
from sparring.pipeline.assembly.columns import joined
from sparring.pipeline.assembly.log import RowNumbers
from sparring.pipeline.specs import Array

Places = NDArray[np.int64]
"""Rows of a group table."""
Mask = NDArray[np.bool_]

_FIRST_PLACES: Final = 16
_FIRST_TIMES: Final = 16


@dataclass(slots=True)
class MemberSegments:
    """Holds segments of members of one behavior name, one after the other.

    Attributes:
        groups: [s] group of each: its place while its segment is open, its index in the closed ones afterwards.
        lengths: [s] steps.
        rows: [r] rows of the steps in the log.
        following: [s] row of the decision or end after each segment.
        next_times: [s] group timestep of that row.
        until: [s] group timestep from which the member is absent.
        terminated: [s] whether the member's episode ended with the segment.
        interrupted: [s] whether the member's episode was interrupted with the segment.
        agents: [s] id of the agent episode.
        keys: [s] group key, 0 for none.
        teams: [s] team.
        simulators: [s] connection number.
        matchups: [s] number of the matchup.
    """

    groups: Places
    lengths: NDArray[np.int32]
    rows: RowNumbers
    following: RowNumbers
    next_times: NDArray[np.int32]
    until: NDArray[np.int32]
    terminated: Mask
    interrupted: Mask
    agents: NDArray[np.int64]
    keys: NDArray[np.int64]
    teams: NDArray[np.int32]
    simulators: NDArray[np.int32]
    matchups: NDArray[np.int64]

    def pick(self, which: NDArray[np.int64]) -> MemberSegments:
        """Returns the given segments, in that order."""
        first = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        columns = {name: getattr(self, name)[which] for name in self.__slots__ if name != "rows"}
        return MemberSegments(rows=self.rows[sequences.rows_of(first[which], self.lengths[which])], **columns)

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> MemberSegments:
        """Returns the segments of all `parts`, of which there is at least one."""
        return (
            parts[0]
            if len(parts) == 1
            else MemberSegments(**{n: joined([getattr(p, n) for p in parts], None) for n in _MEMBER_COLUMNS})
        )


_MEMBER_COLUMNS: Final[tuple[str, ...]] = tuple(MemberSegments.__slots__)


@dataclass(slots=True)
class ClosedGroupSegments:
    """Holds finished group segments.

    Attributes:
        numbers: [g] number of the group's episode.
        spans: [g] group timesteps.
        ended: [g] whether no member is left.
        rewards: [sum of spans] reward between each timestep and the next.
        members: segments of members by behavior name, group by group; their `groups` count from 0.
    """

    numbers: NDArray[np.int64]
    spans: NDArray[np.int32]
    ended: Mask
    rewards: NDArray[np.float32]
    members: Mapping[str, MemberSegments]

    def steps(self, behavior: str) -> NDArray[np.int64]:
        """Returns [g] the steps of one behavior name in each group segment."""
        members = self.members.get(behavior)
        if members is None:
            return np.zeros(len(self.numbers), np.int64)
        return np.bincount(members.groups, members.lengths, len(self.numbers)).astype(np.int64)

    def pick(self, which: NDArray[np.int64]) -> ClosedGroupSegments:
        """Returns the given group segments, in that rising order, without names that have no member in them."""
        first = np.cumsum(self.spans, dtype=np.int64) - self.spans
        rank = np.full(len(self.numbers), -1, np.int64)
        rank[which] = np.arange(len(which))
        members = {}
        for behavior, segments in self.members.items():
            picked = segments.pick(np.flatnonzero(rank[segments.groups] >= 0))
            if picked.groups.size:
                picked.groups = rank[picked.groups]
                members[behavior] = picked
        times = sequences.rows_of(first[which], self.spans[which])
        return ClosedGroupSegments(
            self.numbers[which], self.spans[which], self.ended[which], self.rewards[times], members
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> ClosedGroupSegments:
        """Returns the group segments of all `parts`, of which there is at least one."""
        if len(parts) == 1:
            return parts[0]
        before = np.cumsum([0, *(len(part.numbers) for part in parts)])
        members: dict[str, list[MemberSegments]] = {}
        for part, offset in zip(parts, before, strict=False):
            for behavior, own in part.members.items():
                moved = own.pick(np.arange(len(own.groups)))
                moved.groups = own.groups + offset
                members.setdefault(behavior, []).append(moved)
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("numbers", "spans", "ended", "rewards")
        }
        return ClosedGroupSegments(
            **columns, members={name: MemberSegments.concatenate(parts) for name, parts in sorted(members.items())}
        )


@dataclass(frozen=True, slots=True)
class MemberRewards:
    """Holds the rewards that members with a pending step report.

    Attributes:
        places: [n] places of their groups.
        own: [n] reward of each member.
        shared: [n] reward of the group since the member's last decision.
        totals: [n] rewards of the group up to that decision, as far as they were known.
        decided: [n] tick of that decision.
        ended: [n] whether the member ended, so that it missed later group rewards of the same report.
    """

    places: Places
    own: NDArray[np.float32]
    shared: NDArray[np.float32]
    totals: NDArray[np.float64]
    decided: NDArray[np.int64]
    ended: Mask


class Groups:
    """Holds a table with a place for each group that has members.

    Attributes:
        live: [places] live members.
        times: [places] group timesteps in the open segment so far.
        participants: [places] members that are or were in the open segment.
        horizons: [places] most group timesteps of a segment.
        totals: [places] the group's own rewards in its episode so far, each counted once.
        known: [places] whether the group's whole episode was seen.
        names: [places] set of the members' behavior names, a bit for each.
        numbers: [places] number of the group's episode.
    """

    def __init__(self) -> None:
        self.live: NDArray[np.int64] = np.zeros(_FIRST_PLACES, np.int64)
        self.times: NDArray[np.int64] = np.zeros(_FIRST_PLACES, np.int64)
        self.participants: NDArray[np.int64] = np.zeros(_FIRST_PLACES, np.int64)
        self.horizons: NDArray[np.int64] = np.zeros(_FIRST_PLACES, np.int64)
        self.totals: NDArray[np.float64] = np.zeros(_FIRST_PLACES)
        self.known: Mask = np.zeros(_FIRST_PLACES, bool)
        self.names: NDArray[np.int64] = np.zeros(_FIRST_PLACES, np.int64)
        self.numbers: NDArray[np.int64] = np.zeros(_FIRST_PLACES, np.int64)
        self._rewards: NDArray[np.float64] = np.zeros((_FIRST_PLACES, _FIRST_TIMES))
        self._free: list[int] = list(range(_FIRST_PLACES - 1, -1, -1))
        self._keys: NDArray[np.int64] = np.empty(0, np.int64)
        self._places: Places = np.empty(0, np.int64)
        self._group_episodes = 0

    def find(self, keys: NDArray[np.int64]) -> Places:
        """Returns [n] the place of each group; a new group gets one."""
        wanted, back = np.unique(keys, return_inverse=True)
        new = wanted[~np.isin(wanted, self._keys, assume_unique=True)]
        if new.size:
            self._add(new)
        found: Places = self._places[np.searchsorted(self._keys, wanted)][back]
        return found

    def has(self, keys: NDArray[np.int64]) -> bool:
        """Returns whether one of these groups has members."""
        return bool(np.isin(keys, self._keys).any())

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

    def earn(self, reports: Sequence[MemberRewards]) -> None:
        """Adds the rewards of members since the last group timestep, and the group's own as far as not yet counted."""
        if not reports:
            return
        places, own, shared, totals, decided, ended = (
            np.concatenate([getattr(one, name) for one in reports]) for name in MemberRewards.__slots__
        )
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
        most, width = int(self.times[places].max(initial=0)), self._rewards.shape[1]
        if most > width:
            more = np.zeros((len(self._rewards), max(most, 2 * width) - width))
            self._rewards = np.concatenate([self._rewards, more], axis=1)
        self._rewards[places, self.times[places] - 1] = 0.0

    def rewards(self, places: Places, spans: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns [sum of spans] the reward between each group timestep and the next."""
        times = sequences.rows_of(np.zeros(len(spans), np.int64), spans)
        return self._rewards[np.repeat(places, spans), times].astype(np.float32)

    def restart(self, places: Places) -> None:
        """Begins new segments with the present group timestep."""
        self.times[places] = 1
        self.participants[places] = self.live[places]
        self._rewards[places, 0] = 0.0

    def free(self, places: Places) -> None:
        """Frees the places of groups without members."""
        kept = ~np.isin(self._places, places)
        self._keys, self._places = self._keys[kept], self._places[kept]
        self._free = sorted([*self._free, *places.tolist()], reverse=True)

    # ---------------------------------------------------------------- inside

    def _credit(self, places: Places, gain: Array) -> None:
        begun = self.times[places] > 0
        np.add.at(self._rewards, (places[begun], self.times[places[begun]] - 1), gain[begun])

    def _add(self, keys: NDArray[np.int64]) -> None:
        while len(self._free) < len(keys):
            self._grow()
        places = np.array([self._free.pop() for _ in keys], np.int64)
        for column in (self.live, self.times, self.participants, self.horizons, self.totals, self.names):
            column[places] = 0
        self.known[places] = True
        self.numbers[places] = np.arange(self._group_episodes, self._group_episodes + len(keys))
        self._group_episodes += len(keys)
        every, held = np.concatenate([self._keys, keys]), np.concatenate([self._places, places])
        order = np.argsort(every, kind="stable")
        self._keys, self._places = every[order], held[order]

    def _grow(self) -> None:
        size = len(self.live)
        for name in ("live", "times", "participants", "horizons", "totals", "known", "names", "numbers", "_rewards"):
            column: Array = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self._free = [*range(2 * size - 1, size - 1, -1), *self._free]
