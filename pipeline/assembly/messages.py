"""Turns finished segments into the messages of each behavior name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.assembly import sequences
from sparring.pipeline.assembly.columns import NO_ROWS, RowNumbers, pick_ragged
from sparring.pipeline.assembly.episodes import take_episodes
from sparring.pipeline.assembly.groups import FinishedGroups
from sparring.pipeline.assembly.log import MemberSegments
from sparring.pipeline.assembly.members import Members
from sparring.pipeline.errors import ServiceError
from sparring.pipeline.messages.segments import GroupSegments, Segments, TeammateSegments
from sparring.pipeline.specs import Array

_PER_ROW: Final = ("continuous", "discrete", "log_probs", "rewards", "group_rewards", "versions")
_PER_SEGMENT: Final = ("lengths", "terminated", "interrupted", "group_ended", "teams", "groups", "agents", "simulators")


@dataclass(frozen=True, slots=True)
class FinishedSegments:
    """Holds finished segments of behavior names that share groups, or of one whose agents are each a group of one.

    Attributes:
        members: members by behavior name.
        segments: their segments by behavior name, in the order of their groups.
        groups: what group segments have beside these; None where each agent is a group of one.
    """

    members: Mapping[str, Members]
    segments: Mapping[str, MemberSegments]
    groups: FinishedGroups | None

    @property
    def count(self) -> int:
        """Returns the number of group segments."""
        return len(next(iter(self.segments.values())).places) if self.groups is None else len(self.groups.numbers)

    def divide(self, behavior: str, largest: int) -> Iterator[FinishedSegments]:
        """Yields the group segments in which a behavior name has steps, as many at a time as fit into a message.

        Args:
            behavior: behavior name.
            largest: most steps of a message, those of teammates included.

        Raises:
            ServiceError: a single group segment does not fit.
        """
        groups = self.count
        steps = {name: np.bincount(one.places, one.lengths, groups) for name, one in self.segments.items()}
        own = np.flatnonzero(steps[behavior])
        ends = np.cumsum(np.sum([*steps.values()], axis=0)[own])
        start = 0
        while start < len(own):
            before = ends[start - 1] if start else 0
            stop = int(np.searchsorted(ends, before + largest, side="right"))
            if stop == start:
                raise ServiceError(
                    f"got {ends[start] - before:.0f} steps of one group at once for {behavior}; expected at most "
                    f"{largest}; raise hyperparameters.buffer_size, or form smaller groups"
                )
            yield self if stop - start == groups else self.pick(own[start:stop])
            start = stop

    def pick(self, which: NDArray[np.int64]) -> FinishedSegments:
        """Returns some of the group segments, in their order."""
        rank = np.full(self.count, -1, np.int64)
        rank[which] = np.arange(len(which))
        picked = {}
        for name, segments in self.segments.items():
            picked[name] = pick_ragged(segments, np.flatnonzero(rank[segments.places] >= 0), "rows", "lengths")
            picked[name].places = rank[picked[name].places]
        of_groups = None if self.groups is None else pick_ragged(self.groups, which, "rewards", "spans")
        return FinishedSegments(self.members, picked, of_groups)

    def message(self, behavior: str, flush: int) -> Segments:
        """Returns the next message of a behavior name, with all its segments.

        Args:
            behavior: behavior name.
            flush: serial of the flush that the message completes, else 0.
        """
        one, own = self.members[behavior], self.segments[behavior]
        columns = one.log.columns
        masks, carried = columns.get("masks"), columns.get("carried")
        one.reached += len(own.rows)
        one.announced = one.reached
        return Segments(
            behavior=behavior,
            source=one.source,
            origin=one.origin,
            reached=one.reached,
            flush=flush,
            episodes=take_episodes(one),
            observations=_observations(one, own.rows),
            next_observations=_observations(one, own.following),
            masks=None if masks is None else masks[own.rows],
            carried=None if carried is None else carried[own.rows[_starts(one, own)]],
            matchups=own.matchups if one.has_matchups else None,
            shared=None if self.groups is None else self._group_segments(behavior, self.groups),
            **{name: columns[name][own.rows] for name in _PER_ROW},
            **{name: getattr(own, name) for name in _PER_SEGMENT},
        )

    def _group_segments(self, behavior: str, groups: FinishedGroups) -> GroupSegments:
        return GroupSegments(
            numbers=groups.numbers,
            spans=groups.spans,
            ended=groups.ended,
            rewards=groups.rewards,
            teammates=tuple(
                TeammateSegments(
                    behavior=name,
                    lengths=segments.lengths,
                    observations=_observations(self.members[name], segments.rows),
                    next_observations=_observations(self.members[name], segments.following),
                    continuous=self.members[name].log.columns["continuous"][segments.rows],
                    discrete=self.members[name].log.columns["discrete"][segments.rows],
                    **self._of_members(name, len(groups.numbers)),
                )
                for name, segments in self.segments.items()
                if name != behavior and segments.places.size
            ),
            **self._of_members(behavior, len(groups.numbers)),
        )

    def _of_members(self, behavior: str, groups: int) -> dict[str, Array]:
        """Returns the columns that `GroupSegments` and `TeammateSegments` have in common."""
        columns, segments = self.members[behavior].log.columns, self.segments[behavior]
        return {
            "members": np.bincount(segments.places, minlength=groups).astype(np.int32),
            "times": columns["times"][segments.rows],
            "next_times": segments.next_times,
            "until": segments.until,
            "next_continuous": columns["continuous"][segments.following],
            "next_discrete": columns["discrete"][segments.following],
        }


def _observations(one: Members, rows: RowNumbers) -> tuple[Array, ...]:
    return tuple(column[rows] for column in one.log.observations)


def _starts(one: Members, own: MemberSegments) -> RowNumbers:
    """Returns the first row of each sequence, of which the message contains what the member carried."""
    length = one.sizes.sequence
    if not length:
        return NO_ROWS
    times = one.log.columns["times"][own.rows]
    return sequences.windows(own.lengths, times, length) if one.in_groups else sequences.divide(own.lengths, length)[0]
