"""This module buffers finished group segments for the learner.

g group segments; s segments of members, group by group; r rows of these; q sequences; T group times of all segments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np

from sparring.pipeline.assembly import sequences
from sparring.pipeline.errors import ServiceError
from sparring.pipeline.learning.buffer import droppable
from sparring.pipeline.messages.segments import Segments, TeammateSegments
from sparring.pipeline.specs import Array

_EPISODES_PER_SOURCE: Final = 2**40
_SHARED: Final = ("members", "times", "next_times", "until", "next_continuous", "next_discrete")
_OBSERVED: Final = ("lengths", "continuous", "discrete", "observations", "next_observations")
_PER_ROW: Final = ("log_probs", "masks", "rewards", "group_rewards", "versions")
_PER_SEGMENT: Final = ("agent_episodes", "ended")


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupMembers:
    """Holds the members of one behavior name, from the records `TeammateSegments` and `Segments`.

    Attributes:
        members: [g] segments of members in each group segment.
        lengths: [s] rows of each.
        times: [r] group time of each row.
        next_times: [s] group time of the observation after the segment.
        until: [s] group time from which on the member is absent.
        observations: one [r, *shape] per observation.
        next_observations: one [s, *shape] per observation.
        continuous: [r, continuous actions] raw samples.
        discrete: [r, branches] chosen index.
        next_continuous: [s, continuous actions] at `next_times`.
        next_discrete: [s, branches] at `next_times`.
    """

    members: Array
    lengths: Array
    times: Array
    next_times: Array
    until: Array
    observations: tuple[Array, ...]
    next_observations: tuple[Array, ...]
    continuous: Array
    discrete: Array
    next_continuous: Array
    next_discrete: Array

    def select(self, kept_g: Array) -> GroupMembers:
        """Returns the members of some group segments."""
        segments = np.repeat(kept_g, self.members)
        rows = np.repeat(segments, self.lengths)
        by_size = {"members": kept_g, **dict.fromkeys(("times", "observations", "continuous", "discrete"), rows)}
        return GroupMembers(
            **{one.name: _part(getattr(self, one.name), by_size.get(one.name, segments)) for one in fields(self)}
        )

    def without_members(self, groups: int) -> GroupMembers:
        """Returns columns for `groups` group segments without any member."""
        none = self.select(np.zeros(len(self.members), bool))
        return replace(none, members=np.zeros(groups, self.members.dtype))


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupBatch:
    """Holds group segments as columns.

    Attributes:
        own: members of the learner's own behavior name.
        teammates: members of other behavior names, by name.
        numbers: [g] number of the group, unique in the run.
        spans: [g] group times.
        over: [g] no member remains after the segment.
        shared: [T] what all members earned between each time and the next.
        log_probs: [r] log-probability of the joint action when it was chosen.
        masks: [r, choices of all branches] True = forbidden; None if every choice was allowed.
        rewards: [r] the agent's own reward.
        group_rewards: [r] the group's reward, as reported to the agent.
        versions: [r] policy version that acted.
        agent_episodes: [s] number of the agent episode, unique in the run.
        ended: [s] the agent episode ended with the segment.
        sequence_length: group times of a sequence; 0 if agents carry nothing.
        carried: [q, numbers] what the agent carried into the first step of each sequence; None if agents carry nothing.
    """

    own: GroupMembers
    teammates: Mapping[str, GroupMembers]
    numbers: Array
    spans: Array
    over: Array
    shared: Array
    log_probs: Array
    masks: Array | None
    rewards: Array
    group_rewards: Array
    versions: Array
    agent_episodes: Array
    ended: Array
    sequence_length: int = 0
    carried: Array | None = None

    @property
    def steps(self) -> int:
        """Returns the number of rows."""
        return len(self.rewards)

    @property
    def sizes(self) -> Array:
        """Returns [g] the rows of each group segment."""
        ends = np.concatenate([[0], np.cumsum(self.own.lengths)])
        last = np.cumsum(self.own.members)
        sizes: Array = ends[last] - ends[last - self.own.members]
        return sizes

    def starts(self) -> Array:
        """Returns [q] the first row of each sequence."""
        return sequences.windows(self.own.lengths, self.own.times, self.sequence_length or 1)

    def select(self, kept_g: Array) -> GroupBatch:
        """Returns some of the group segments."""
        segments = np.repeat(kept_g, self.own.members)
        rows = np.repeat(segments, self.own.lengths)
        columns = {name: _part(getattr(self, name), rows) for name in _PER_ROW}
        columns |= {name: getattr(self, name)[segments] for name in _PER_SEGMENT}
        teammates = {name: one.select(kept_g) for name, one in self.teammates.items()}
        return GroupBatch(
            own=self.own.select(kept_g),
            teammates={name: one for name, one in teammates.items() if len(one.lengths)},
            numbers=self.numbers[kept_g],
            spans=self.spans[kept_g],
            over=self.over[kept_g],
            shared=self.shared[np.repeat(kept_g, self.spans)],
            sequence_length=self.sequence_length,
            carried=None if self.carried is None else self.carried[rows[self.starts()]],
            **columns,
        )


class GroupBuffer:
    """Holds finished group segments, the oldest first; none is ever split.

    Args:
        sequence_length: group times of a sequence; 0 if agents carry nothing.
    """

    def __init__(self, sequence_length: int = 0) -> None:
        self._sequence_length = sequence_length
        self._chunks: deque[GroupBatch] = deque()
        self._sources: dict[str, int] = {}
        self.steps = 0

    def add(self, record: Segments) -> None:
        """Appends the group segments of `record`.

        Raises:
            ServiceError: the record has no group columns, or not one carried memory for each sequence.
        """
        batch = self._batch(record)
        found = None if batch.carried is None else len(batch.carried)
        if self._sequence_length and batch.steps and found != len(batch.starts()):
            raise ServiceError(
                f"got segments of {record.behavior} with {found} memories; expected {len(batch.starts())}, one for "
                "each sequence; run all services with the same settings"
            )
        self._append(batch)

    def whole(self, steps: int) -> int:
        """Returns how many steps `take` would remove: those of whole group segments until there are `steps`."""
        if not self.steps:
            return 0
        sizes = np.concatenate([chunk.sizes for chunk in self._chunks])
        ends = np.cumsum(sizes)
        return int(ends[min(int(np.searchsorted(ends, steps)), len(ends) - 1)])

    def take(self, steps: int) -> GroupBatch:
        """Removes the oldest group segments that together hold `steps` steps; all if they hold fewer.

        Raises:
            ValueError: the buffer is empty.
        """
        missing = self.whole(steps)
        if not missing:
            raise ValueError(f"got {steps} steps to take from an empty buffer; expected segments; add some first")
        taken: list[GroupBatch] = []
        while missing:
            chunk = self._chunks.popleft()
            if chunk.steps > missing:
                first = np.cumsum(chunk.sizes) <= missing
                self._chunks.appendleft(chunk.select(~first))
                chunk = chunk.select(first)
            taken.append(chunk)
            missing -= chunk.steps
            self.steps -= chunk.steps
        return _concatenate(taken)

    def take_all(self) -> GroupBatch:
        """Removes everything; raises `ValueError` if the buffer is empty."""
        return self.take(self.steps)

    def drop_stale(self, version: int, max_lag: int, keep_at_least: int) -> int:
        """Drops group segments whose newest row is more than `max_lag` versions old, oldest first.

        Args:
            version: version of the weights published last.
            max_lag: in versions.
            keep_at_least: a group segment is kept if fewer steps would remain.

        Returns:
            The number of dropped steps.
        """
        before, chunks = self.steps, self._chunks
        self._chunks = deque()
        remaining, self.steps = before, 0
        for chunk in chunks:
            stale = droppable(chunk.sizes, chunk.versions, version - max_lag, remaining - keep_at_least)
            remaining -= int(chunk.sizes[stale].sum())
            self._append(chunk.select(~stale) if stale.any() else chunk)
        return before - self.steps

    def _batch(self, record: Segments) -> GroupBatch:
        shared = record.shared
        if shared is None:
            raise ServiceError(
                f"got segments of {record.behavior} without group columns; expected segments of groups; "
                "run all services with the same settings"
            )
        source = self._sources.setdefault(record.source, len(self._sources))
        origin = self._sources.setdefault(f"{record.origin} {record.source}", len(self._sources))
        own = {name: getattr(shared, name) for name in _SHARED} | {name: getattr(record, name) for name in _OBSERVED}
        return GroupBatch(
            own=GroupMembers(**own),
            teammates={teammates.behavior: _members(teammates) for teammates in shared.teammates},
            numbers=origin * _EPISODES_PER_SOURCE + shared.numbers,
            spans=shared.spans,
            over=shared.ended,
            shared=shared.rewards,
            agent_episodes=source * _EPISODES_PER_SOURCE + record.agents,
            ended=record.terminated | record.interrupted,
            sequence_length=self._sequence_length,
            carried=record.carried if self._sequence_length else None,
            **{name: getattr(record, name) for name in _PER_ROW},
        )

    def _append(self, chunk: GroupBatch) -> None:
        if chunk.steps:
            self._chunks.append(chunk)
            self.steps += chunk.steps


def _members(teammates: TeammateSegments) -> GroupMembers:
    return GroupMembers(**{one.name: getattr(teammates, one.name) for one in fields(GroupMembers)})


def _part(column: Any, kept: Array) -> Any:
    if isinstance(column, tuple):
        return tuple(one[kept] for one in column)
    return None if column is None else column[kept]


def _concatenate(chunks: list[GroupBatch]) -> GroupBatch:
    """Joins the group segments of `chunks`; rows without masks get empty ones if other rows have masks."""
    names = dict.fromkeys(name for chunk in chunks for name in chunk.teammates)
    teammates = {}
    for name in sorted(names):
        like = next(chunk.teammates[name] for chunk in chunks if name in chunk.teammates)
        teammates[name] = _joined(
            [
                chunk.teammates[name] if name in chunk.teammates else like.without_members(len(chunk.numbers))
                for chunk in chunks
            ]
        )
    width = next((chunk.masks.shape[1] for chunk in chunks if chunk.masks is not None), None)
    masks = None
    if width is not None:
        free = [np.zeros((chunk.steps, width), np.bool_) if chunk.masks is None else chunk.masks for chunk in chunks]
        masks = np.concatenate(free)
    carried = [chunk.carried for chunk in chunks if chunk.carried is not None]
    plain = (*_PER_SEGMENT, "log_probs", "rewards", "group_rewards", "versions", "numbers", "spans", "over", "shared")
    return GroupBatch(
        own=_joined([chunk.own for chunk in chunks]),
        teammates=teammates,
        masks=masks,
        sequence_length=chunks[0].sequence_length,
        carried=np.concatenate(carried) if carried else None,
        **{name: np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in plain},
    )


def _joined(parts: list[GroupMembers]) -> GroupMembers:
    return GroupMembers(
        **{one.name: _column([getattr(part, one.name) for part in parts]) for one in fields(GroupMembers)}
    )


def _column(columns: Iterable[Any]) -> Any:
    every = list(columns)
    if isinstance(every[0], tuple):
        return tuple(map(np.concatenate, zip(*every, strict=True)))
    if every[0].ndim == 2:  # members that have not acted yet have actions of width 0
        width = max(one.shape[1] for one in every)
        every = [one if one.shape[1] else np.zeros((len(one), width), one.dtype) for one in every]
    return np.concatenate(every)
