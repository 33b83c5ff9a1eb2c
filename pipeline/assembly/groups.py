"""The groups of one source: their time, what they earn, and which segments of members belong together.

A group's time advances at each tick in which any of its members decides or ends. Its segment is open for all
members together, whatever their behavior names, and closes for all together.

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
from sparring.pipeline.assembly.log import Lines

Places = NDArray[np.int64]
"""Rows of a group table."""
Mask = NDArray[np.bool_]

_FIRST_PLACES: Final = 16
_FIRST_TIMES: Final = 16


@dataclass(slots=True)
class MemberSegments:
    """Segments of members of one behavior name, one after the other.

    Attributes:
        groups: [s] which group each belongs to: its place while the group goes on, its number among others after.
        lengths: [s] steps.
        rows: [r] of the log, their steps.
        following: [s] row of the log, what came after each.
        next_times: [s] group time of that.
        until: [s] group time from which on the member is not there.
        terminated: [s] the member's episode ended with the segment.
        interrupted: [s] it was cut with the segment.
        agents: [s] id of the member's life.
        keys: [s] group key, 0 for none.
        teams: [s] team.
        simulators: [s] connection number.
        matchups: [s] number of the draw.
    """

    groups: Places
    lengths: NDArray[np.int32]
    rows: Lines
    following: Lines
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
        """The given segments, in that order."""
        first = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        columns = {name: getattr(self, name)[which] for name in self.__slots__ if name != "rows"}
        return MemberSegments(rows=self.rows[sequences.rows_of(first[which], self.lengths[which])], **columns)

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> MemberSegments:
        """All segments of some; at least one."""
        return (
            parts[0]
            if len(parts) == 1
            else MemberSegments(**{n: joined([getattr(p, n) for p in parts], None) for n in _STAYS})
        )


_STAYS: Final[tuple[str, ...]] = tuple(MemberSegments.__slots__)


@dataclass(slots=True)
class ClosedGroupSegments:
    """Finished group segments.

    Attributes:
        numbers: [g] of the group's life.
        spans: [g] group times.
        ended: [g] nobody is left.
        rewards: [sum of spans] what was earned between each time and the next.
        stays: by behavior name, segments of members, group by group; their `groups` count from 0.
    """

    numbers: NDArray[np.int64]
    spans: NDArray[np.int32]
    ended: Mask
    rewards: NDArray[np.float32]
    stays: Mapping[str, MemberSegments]

    def steps(self, behavior: str) -> NDArray[np.int64]:
        """[g] steps of one behavior name in each group segment."""
        stays = self.stays.get(behavior)
        if stays is None:
            return np.zeros(len(self.numbers), np.int64)
        return np.bincount(stays.groups, stays.lengths, len(self.numbers)).astype(np.int64)

    def pick(self, which: NDArray[np.int64]) -> ClosedGroupSegments:
        """The given group segments, in that order, which rises; names without any member there are left out."""
        first = np.cumsum(self.spans, dtype=np.int64) - self.spans
        rank = np.full(len(self.numbers), -1, np.int64)
        rank[which] = np.arange(len(which))
        stays = {}
        for behavior, all_stays in self.stays.items():
            here = all_stays.pick(np.flatnonzero(rank[all_stays.groups] >= 0))
            if here.groups.size:
                here.groups = rank[here.groups]
                stays[behavior] = here
        times = sequences.rows_of(first[which], self.spans[which])
        return ClosedGroupSegments(
            self.numbers[which], self.spans[which], self.ended[which], self.rewards[times], stays
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> ClosedGroupSegments:
        """All group segments of some; at least one."""
        if len(parts) == 1:
            return parts[0]
        before = np.cumsum([0, *(len(part.numbers) for part in parts)])
        stays: dict[str, list[MemberSegments]] = {}
        for part, offset in zip(parts, before, strict=False):
            for behavior, own in part.stays.items():
                moved = own.pick(np.arange(len(own.groups)))
                moved.groups = own.groups + offset
                stays.setdefault(behavior, []).append(moved)
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("numbers", "spans", "ended", "rewards")
        }
        return ClosedGroupSegments(
            **columns, stays={name: MemberSegments.concatenate(parts) for name, parts in sorted(stays.items())}
        )


@dataclass(frozen=True, slots=True)
class MemberRewards:
    """What members that had a step under way report of it.

    Attributes:
        places: [n] of their groups.
        own: [n] reward of each.
        shared: [n] reward of the group since the member's last decision.
        totals: [n] what the group had earned by then, as far as was known.
        decided: [n] tick of that decision.
        ended: [n] the member ended, and what the group got after that in the same report it has not heard of.
    """

    places: Places
    own: NDArray[np.float32]
    shared: NDArray[np.float32]
    totals: NDArray[np.float64]
    decided: NDArray[np.int64]
    ended: Mask


class Groups:
    """A place for each group that has members.

    Attributes:
        live: [places] members there.
        times: [places] group times in the open segment so far.
        stayed: [places] members that are or were in the open segment.
        horizons: [places] most group times of a segment.
        totals: [places] the group's own rewards since its life began, each counted once.
        known: [places] all of its life was seen.
        names: [places] set of behavior names that members had, a bit for each.
        numbers: [places] of the group's life.
    """

    def __init__(self) -> None:
        self.live: NDArray[np.int64] = np.zeros(_FIRST_PLACES, np.int64)
        self.times: NDArray[np.int64] = np.zeros(_FIRST_PLACES, np.int64)
        self.stayed: NDArray[np.int64] = np.zeros(_FIRST_PLACES, np.int64)
        self.horizons: NDArray[np.int64] = np.zeros(_FIRST_PLACES, np.int64)
        self.totals: NDArray[np.float64] = np.zeros(_FIRST_PLACES)
        self.known: Mask = np.zeros(_FIRST_PLACES, bool)
        self.names: NDArray[np.int64] = np.zeros(_FIRST_PLACES, np.int64)
        self.numbers: NDArray[np.int64] = np.zeros(_FIRST_PLACES, np.int64)
        self._rewards: NDArray[np.float64] = np.zeros((_FIRST_PLACES, _FIRST_TIMES))
        self._free: list[int] = list(range(_FIRST_PLACES - 1, -1, -1))
        self._keys: NDArray[np.int64] = np.empty(0, np.int64)
        self._places: Places = np.empty(0, np.int64)
        self._agent_episodes = 0

    def find(self, keys: NDArray[np.int64]) -> Places:
        """[n] Place of each group; one that has none gets one."""
        wanted, back = np.unique(keys, return_inverse=True)
        new = wanted[~np.isin(wanted, self._keys, assume_unique=True)]
        if new.size:
            self._add(new)
        found: Places = self._places[np.searchsorted(self._keys, wanted)][back]
        return found

    def has(self, keys: NDArray[np.int64]) -> bool:
        """Whether one of these groups has members here."""
        return bool(np.isin(keys, self._keys).any())

    def enter(self, places: Places, name: int, horizon: int, known: Mask) -> None:
        """Members came, one for each of `places`.

        Args:
            places: [n].
            name: number of their behavior name.
            horizon: most group times of a segment, as they have it.
            known: [n] their episodes begin now.
        """
        np.add.at(self.live, places, 1)
        np.add.at(self.stayed, places, 1)
        self.names[places] |= 1 << name
        self.horizons[places] = np.where(self.horizons[places], np.minimum(self.horizons[places], horizon), horizon)
        np.logical_and.at(self.known, places, known)

    def earn(self, reports: Sequence[MemberRewards]) -> None:
        """Adds what members earned since the last group time; of the group's own reward, what is not yet counted."""
        if not reports:
            return
        places, own, shared, totals, decided, ended = (
            np.concatenate([getattr(one, name) for one in reports]) for name in MemberRewards.__slots__
        )
        self._credit(places, own)
        # Of those that go on, who decided first has heard of all that the others have, and perhaps of more.
        order = np.lexsort((-np.abs(shared), decided, ended, places))
        _, first = np.unique(places[order], return_index=True)
        chosen = order[first]
        gain = shared[chosen] - (self.totals[places[chosen]] - totals[chosen])
        self.totals[places[chosen]] += gain
        self._credit(places[chosen], gain)

    def advance(self, places: Places) -> None:
        """A new group time begins in each of `places`, each of them once."""
        self.times[places] += 1
        most, width = int(self.times[places].max(initial=0)), self._rewards.shape[1]
        if most > width:
            more = np.zeros((len(self._rewards), max(most, 2 * width) - width))
            self._rewards = np.concatenate([self._rewards, more], axis=1)
        self._rewards[places, self.times[places] - 1] = 0.0

    def rewards(self, places: Places, spans: NDArray[np.int64]) -> NDArray[np.float32]:
        """[sum of spans] What was earned between each time and the next."""
        times = sequences.rows_of(np.zeros(len(spans), np.int64), spans)
        return self._rewards[np.repeat(places, spans), times].astype(np.float32)

    def restart(self, places: Places) -> None:
        """New segments begin with the present group time."""
        self.times[places] = 1
        self.stayed[places] = self.live[places]
        self._rewards[places, 0] = 0.0

    def free(self, places: Places) -> None:
        """Nobody is left in these groups."""
        kept = ~np.isin(self._places, places)
        self._keys, self._places = self._keys[kept], self._places[kept]
        self._free = sorted([*self._free, *places.tolist()], reverse=True)

    # ---------------------------------------------------------------- inside

    def _credit(self, places: Places, gain: NDArray[Any]) -> None:
        begun = self.times[places] > 0
        np.add.at(self._rewards, (places[begun], self.times[places[begun]] - 1), gain[begun])

    def _add(self, keys: NDArray[np.int64]) -> None:
        while len(self._free) < len(keys):
            self._grow()
        places = np.array([self._free.pop() for _ in keys], np.int64)
        for column in (self.live, self.times, self.stayed, self.horizons, self.totals, self.names):
            column[places] = 0
        self.known[places] = True
        self.numbers[places] = np.arange(self._agent_episodes, self._agent_episodes + len(keys))
        self._agent_episodes += len(keys)
        every, held = np.concatenate([self._keys, keys]), np.concatenate([self._places, places])
        order = np.argsort(every, kind="stable")
        self._keys, self._places = every[order], held[order]

    def _grow(self) -> None:
        size = len(self.live)
        for name in ("live", "times", "stayed", "horizons", "totals", "known", "names", "numbers", "_rewards"):
            column: NDArray[Any] = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self._free = [*range(2 * size - 1, size - 1, -1), *self._free]
