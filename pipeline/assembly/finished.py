"""Finished segments: of members of one behavior name, and of the groups that these form.

g group segments, s segments of members, r their steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.assembly import sequences
from sparring.pipeline.assembly.columns import Mask, Places, RowNumbers, pick
from sparring.pipeline.errors import ServiceError
from sparring.pipeline.specs import Array


@dataclass(slots=True)
class MemberSegments:
    """Holds segments of members of one behavior name, one after the other; other columns are those of `Segments`.

    Attributes:
        rows: [r] rows of the steps in the log.
        following: [s] row of the decision or end after each segment.
        places: [s] group of each: its place while its segment is open, its index in the finished ones afterwards.
        next_times: [s] group timestep of the row `following`.
        until: [s] group timestep from which the member is absent.
    """

    rows: RowNumbers
    lengths: NDArray[np.int32]
    following: RowNumbers
    places: Places
    next_times: NDArray[np.int32]
    until: NDArray[np.int32]
    terminated: Mask
    interrupted: Mask
    group_ended: Mask
    agents: NDArray[np.int64]
    groups: NDArray[np.int64]
    teams: NDArray[np.int32]
    simulators: NDArray[np.int32]
    matchups: NDArray[np.int64]

    def pick(self, which: NDArray[np.int64]) -> MemberSegments:
        """Returns the given segments, in that order."""
        first = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        picked = pick(replace(self, rows=self.following), which)  # all columns have a row for each segment
        return replace(picked, rows=self.rows[sequences.rows_of(first[which], picked.lengths)])

    @classmethod
    def concatenate(cls, parts: Sequence[MemberSegments]) -> MemberSegments:
        """Returns the segments of all `parts`, of which there is at least one."""
        return parts[0] if len(parts) == 1 else cls(**_concatenated(parts, cls.__slots__))


@dataclass(slots=True)
class FinishedSegments:
    """Holds finished segments of groups.

    Attributes:
        numbers: [g] number of the group's episode.
        spans: [g] group timesteps.
        ended: [g] whether no member is left.
        rewards: [sum of spans] reward between each timestep and the next.
        members: segments of members by behavior name, group by group; their `places` count from 0.
    """

    numbers: NDArray[np.int64]
    spans: NDArray[np.int32]
    ended: Mask
    rewards: NDArray[np.float32]
    members: Mapping[str, MemberSegments]

    @classmethod
    def of_agents(cls, behavior: str, segments: Sequence[MemberSegments]) -> FinishedSegments:
        """Returns segments of agents that are each a group of one, without group timesteps."""
        members = {}
        groups = sum(len(one.lengths) for one in segments)
        if groups:
            members[behavior] = replace(MemberSegments.concatenate(segments), places=np.arange(groups))
        numbers, no_rewards = np.zeros(groups, np.int64), np.empty(0, np.float32)
        return cls(numbers, numbers.astype(np.int32), numbers > 0, no_rewards, members)

    @classmethod
    def concatenate(cls, parts: Sequence[FinishedSegments]) -> FinishedSegments:
        """Returns the group segments of all `parts`."""
        if len(parts) < 2:
            return parts[0] if parts else cls.of_agents("", [])
        before = np.cumsum([0, *(len(part.numbers) for part in parts)])
        members: dict[str, list[MemberSegments]] = {}
        for part, offset in zip(parts, before, strict=False):
            for behavior, own in part.members.items():
                members.setdefault(behavior, []).append(replace(own, places=own.places + offset))
        by_name = {name: MemberSegments.concatenate(found) for name, found in sorted(members.items())}
        return cls(**_concatenated(parts, ("numbers", "spans", "ended", "rewards")), members=by_name)

    def pick(self, which: NDArray[np.int64]) -> FinishedSegments:
        """Returns the given group segments, in that rising order, without names that have no member in them."""
        first = np.cumsum(self.spans, dtype=np.int64) - self.spans
        rank = np.full(len(self.numbers), -1, np.int64)
        rank[which] = np.arange(len(which))
        members = {}
        for behavior, segments in self.members.items():
            picked = segments.pick(np.flatnonzero(rank[segments.places] >= 0))
            if picked.places.size:
                members[behavior] = replace(picked, places=rank[picked.places])
        rewards = self.rewards[sequences.rows_of(first[which], self.spans[which])]
        return FinishedSegments(self.numbers[which], self.spans[which], self.ended[which], rewards, members)

    def steps(self, behavior: str) -> NDArray[np.int64]:
        """Returns [g] the steps of one behavior name in each group segment."""
        members = self.members.get(behavior)
        if members is None:
            return np.zeros(len(self.numbers), np.int64)
        return np.bincount(members.places, members.lengths, len(self.numbers)).astype(np.int64)

    def divide(self, behavior: str, largest: int) -> Iterator[FinishedSegments]:
        """Yields the group segments in which a behavior name has steps, as many at a time as fit into a message.

        Args:
            behavior: behavior name.
            largest: most steps of a message, those of teammates included.

        Raises:
            ServiceError: a single group segment does not fit.
        """
        own = np.flatnonzero(self.steps(behavior))
        sizes = np.sum([self.steps(name) for name in self.members], axis=0)[own] if own.size else own
        start, size = 0, 0
        for at, steps in enumerate(sizes.tolist()):
            if steps > largest:
                raise ServiceError(
                    f"got {steps} steps of one group at once for {behavior}; expected at most {largest}; "
                    "raise hyperparameters.buffer_size, or form smaller groups"
                )
            if size + steps > largest:
                yield self.pick(own[start:at])
                start, size = at, 0
            size += steps
        if start < len(own):
            yield self if len(own) - start == len(self.numbers) else self.pick(own[start:])


def _concatenated(parts: Sequence[MemberSegments | FinishedSegments], names: Iterable[str]) -> dict[str, Array]:
    return {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
