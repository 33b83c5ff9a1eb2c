"""This module buffers finished segments of agents and of groups for the learner.

An agent without a group is a group of one: its segment is a group segment of a single member, and needs no columns that
join it with others. Only such a segment can be split.

g group segments (of an agent: its segments); s segments of agents, group by group; r rows of these; q sequences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from sparring.pipeline.assembly import sequences
from sparring.pipeline.errors import ServiceError
from sparring.pipeline.messages.segments import GroupSegments, Segments, TeammateSegments
from sparring.pipeline.specs import Array, Flags, Numbers

_EPISODES_PER_SOURCE: Final = 2**40
_DECISIONS: Final = ("observations", "continuous", "discrete")
_RECORDED: Final = (*_DECISIONS, "log_probs", "masks", "rewards", "group_rewards", "versions")
_OF_SEGMENTS: Final = ("lengths", "terminated", "next_observations", "next_masks")
_FOLLOWING: Final = ("next_times", "until", "next_continuous", "next_discrete")

Index = slice | Array
R = TypeVar("R", "Batch", GroupSegments, TeammateSegments)


class Series(NamedTuple):
    """Holds what agents, or groups, earned: T steps in g segments, one after the other.

    Attributes:
        rewards: [T] earned in each step, the group's rewards included.
        lengths: [g] steps of each segment.
        numbers: [g] number of the agent episode or the group.
        ended: [g] the episode or the group ended with the segment.
    """

    rewards: Array
    lengths: Array
    numbers: Array
    ended: Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Holds segments as columns.

    Attributes:
        lengths: [s] rows of each segment.
        terminated: [s] the task ended with the segment, so it has no bootstrap value.
        ended: [s] the agent episode ended with the segment, terminated or not.
        agent_episodes: [s] number of the agent episode, unique in the run.
        next_observations: one [s, *shape] per observation, from the step after each segment.
        observations: one [r, *shape] per observation.
        continuous: [r, continuous actions] raw samples.
        discrete: [r, branches] chosen index.
        log_probs: [r] log-probability of the joint action when it was chosen.
        masks: [r, choices of all branches] True = forbidden; None if every choice was allowed.
        next_masks: [s, choices of all branches] likewise, in what followed each segment, where the episode goes on.
        rewards: [r] the agent's own reward.
        group_rewards: [r] the group's reward, as reported to the agent.
        versions: [r] policy version that acted.
        sequence_length: most steps of a sequence, in groups its group times; 0 if agents carry nothing.
        carried: [q, numbers] what the agent carried into the first step of each sequence; None if agents carry nothing.
        groups: joins the segments into those of groups, whose numbers are unique in the run; None if each agent is a
            group of one.
    """

    lengths: Array
    terminated: Array
    ended: Array
    agent_episodes: Array
    next_observations: tuple[Array, ...]
    observations: tuple[Array, ...]
    continuous: Array
    discrete: Array
    log_probs: Array
    masks: Array | None
    rewards: Array
    group_rewards: Array
    versions: Array
    next_masks: Array | None = None
    sequence_length: int = 0
    carried: Array | None = None
    groups: GroupSegments | None = None

    @property
    def steps(self) -> int:
        """Returns the number of rows."""
        return len(self.rewards)

    @property
    def sizes(self) -> Array:
        """Returns [g] the rows of each group segment."""
        if self.groups is None:
            return self.lengths
        ends = np.concatenate([[0], np.cumsum(self.lengths)])
        last = np.cumsum(self.groups.members)
        sizes: Array = ends[last] - ends[last - self.groups.members]
        return sizes

    @property
    def series(self) -> Series:
        """Returns what groups earned; an agent without a group is one."""
        groups = self.groups
        if groups is None:
            return Series(self.rewards + self.group_rewards, self.lengths, self.agent_episodes, self.ended)
        return Series(groups.rewards, groups.spans, groups.numbers, groups.ended)

    def members(self, own: str) -> dict[str, TeammateSegments]:
        """Returns the members of groups by behavior name; those of the learner's `own` name come first."""
        groups = self.groups
        assert groups is not None
        ours = {name: getattr(self, name) for name in ("lengths", "next_observations", *_DECISIONS)}
        ours |= {name: getattr(groups, name) for name in ("members", "times", *_FOLLOWING)}
        return {own: TeammateSegments(behavior=own, **ours)} | {one.behavior: one for one in groups.teammates}

    def starts(self) -> Numbers:
        """Returns [q] the first row of each sequence."""
        length = self.sequence_length or 1
        if self.groups is None:
            return sequences.divide(self.lengths, length)[0]
        return sequences.windows(self.lengths, self.groups.times, length)

    def boundary(self, steps: int) -> int:
        """Returns how many of the first rows are separable: a whole sequence less, or in groups a whole segment more.

        Args:
            steps: wanted rows, more than 0 and fewer than there are.
        """
        if self.groups is None:
            starts = self.starts()
            return int(starts[np.searchsorted(starts, steps, side="right") - 1])
        ends = np.cumsum(self.sizes)
        return int(ends[np.searchsorted(ends, steps)])

    def select(self, kept_g: Flags) -> Batch:
        """Returns some of the group segments."""
        groups = self.groups
        segments = kept_g if groups is None else np.repeat(kept_g, groups.members)
        rows = np.repeat(segments, self.lengths)
        if groups is not None:
            teammates = (_of_groups(one, kept_g) for one in groups.teammates)
            index = {"g": kept_g, "s": segments, "r": rows, "T": np.repeat(kept_g, groups.spans)}
            groups = replace(_part(groups, index), teammates=tuple(one for one in teammates if len(one.lengths)))
        return replace(_part(self, {"s": segments, "r": rows, "q": rows[self.starts()]}), groups=groups)

    def split(self, at: int) -> tuple[Batch, Batch]:
        """Returns the rows before a `boundary` inside the batch, and the rest.

        An agent's segment that reaches beyond is split: its first part bootstraps with the observation at the boundary.
        """
        first_g = np.cumsum(self.sizes) <= at
        inside = at - int(self.sizes[first_g].sum())
        if not inside:
            return self.select(first_g), self.select(~first_g)
        cut, sequence = int(first_g.sum()), int(np.searchsorted(self.starts(), at))
        head = _part(self, {"r": slice(at), "s": np.arange(cut + 1), "q": slice(sequence)})
        rest = np.arange(cut, len(self.lengths))
        tail = _part(self, {"r": slice(at, None), "s": rest, "q": slice(sequence, None)})
        head.lengths[-1] = inside
        tail.lengths[0] -= inside
        head.terminated[-1] = head.ended[-1] = False
        for following, column in zip(head.next_observations, self.observations, strict=True):
            following[-1] = column[at]
        if self.masks is not None and head.next_masks is not None:
            head.next_masks[-1] = self.masks[at]
        return head, tail


_AXES: Final[Mapping[type, Mapping[str, str]]] = {
    Batch: dict.fromkeys(_RECORDED, "r")
    | dict.fromkeys((*_OF_SEGMENTS, "ended", "agent_episodes"), "s")
    | {"carried": "q"},
    GroupSegments: dict.fromkeys(("members", "numbers", "spans", "ended"), "g")
    | dict.fromkeys(_FOLLOWING, "s")
    | {"times": "r", "rewards": "T"},
    TeammateSegments: {"members": "g"}
    | dict.fromkeys(("lengths", "next_observations", *_FOLLOWING), "s")
    | dict.fromkeys(("times", *_DECISIONS), "r"),
}
"""The axis of each column: groups, segments, rows, sequences, or group times (T)."""


class SegmentBuffer:
    """Holds finished segments, the oldest first; the step budget of the behavior bounds its size.

    Args:
        sequence_length: most steps (in groups: group times) of a sequence, which is never split; 0 if agents carry
            nothing.
        groups: segments belong to those of groups, which are never split.
    """

    def __init__(self, sequence_length: int = 0, *, groups: bool = False) -> None:
        self._sequence_length = sequence_length
        self._groups = groups
        self._chunks: deque[Batch] = deque()
        self._sources: dict[str, int] = {}
        self.steps = 0

    def add(self, record: Segments) -> None:
        """Appends the segments of `record`.

        Raises:
            ServiceError: the record has no group columns, or not one carried memory for each sequence.
        """
        source, groups = self._number(record.source), record.shared if self._groups else None
        if groups is not None:
            numbers = self._number(f"{record.origin} {record.source}") + groups.numbers
            groups = replace(groups, numbers=numbers)
        elif self._groups:
            raise ServiceError(
                f"got segments of {record.behavior} without group columns; expected segments of groups; "
                "run all services with the same settings"
            )
        batch = Batch(
            ended=record.terminated | record.interrupted,
            agent_episodes=source + record.agents,
            sequence_length=self._sequence_length,
            carried=record.carried if self._sequence_length else None,
            groups=groups,
            **{name: getattr(record, name) for name in (*_OF_SEGMENTS, *_RECORDED)},
        )
        found = None if batch.carried is None else len(batch.carried)
        if self._sequence_length and batch.steps and found != len(batch.starts()):
            raise ServiceError(
                f"got segments of {record.behavior} with {found} memories; expected {len(batch.starts())}, one for "
                "each sequence; run all services with the same settings"
            )
        self._append(batch)

    def whole(self, steps: int) -> int:
        """Returns how many steps `take` would remove.

        Of agents these are the `steps` oldest ones without a sequence that reaches beyond them; of groups, whole group
        segments until there are `steps`.
        """
        left, found = min(steps, self.steps), 0
        for chunk in self._chunks:
            if chunk.steps > left:
                return found + (chunk.boundary(left) if left else 0)
            found += chunk.steps
            left -= chunk.steps
        return found

    def take(self, steps: int | None = None) -> Batch:
        """Removes the `whole` steps of the `steps` oldest ones; without a number all.

        Raises:
            ValueError: the buffer holds fewer steps or none, or `steps` is below 1 or below a sequence.
        """
        wanted = self.steps if steps is None else steps
        missing = self.whole(wanted) if 1 <= wanted <= self.steps else 0
        if not missing:
            raise ValueError(
                f"got {wanted} steps to take of the {self.steps} there are; "
                f"expected at least {max(1, self._sequence_length)} and no more than there are"
            )
        taken: list[Batch] = []
        self.steps -= missing
        while missing:
            chunk = self._chunks.popleft()
            if chunk.steps > missing:
                chunk, rest = chunk.split(missing)
                self._chunks.appendleft(rest)
            taken.append(chunk)
            missing -= chunk.steps
        return _concatenate(taken)

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
        self._chunks, self.steps, spare = deque(), 0, before - keep_at_least
        for chunk in chunks:
            sizes = chunk.sizes
            stale = np.maximum.reduceat(chunk.versions, np.cumsum(sizes) - sizes) < version - max_lag
            for number in np.flatnonzero(stale):
                stale[number] = sizes[number] <= spare
                spare -= int(sizes[number]) if stale[number] else 0
            self._append(chunk.select(~stale) if stale.any() else chunk)
        return before - self.steps

    def _number(self, name: str) -> int:
        """Returns the first number for the episodes of a source."""
        return self._sources.setdefault(name, len(self._sources)) * _EPISODES_PER_SOURCE

    def _append(self, chunk: Batch) -> None:
        if chunk.steps:
            self._chunks.append(chunk)
            self.steps += chunk.steps


def _of_groups(members: TeammateSegments, kept_g: Flags) -> TeammateSegments:
    """Returns the members of some group segments."""
    segments = np.repeat(kept_g, members.members)
    return _part(members, {"g": kept_g, "s": segments, "r": np.repeat(segments, members.lengths)})


def _concatenate(chunks: Sequence[Batch]) -> Batch:
    """Joins the segments of `chunks`; rows without masks get empty ones if other rows have masks."""
    if any(chunk.masks is not None for chunk in chunks):
        chunks = [chunk if chunk.masks is not None else _with_empty_masks(chunk) for chunk in chunks]
    groups = [chunk.groups for chunk in chunks if chunk.groups is not None]
    return replace(_joined(chunks), groups=_concatenate_groups(groups) if groups else None)


def _with_empty_masks(chunk: Batch) -> Batch:
    masks, following = (np.empty((rows, 0), np.bool_) for rows in (chunk.steps, len(chunk.lengths)))
    return replace(chunk, masks=masks, next_masks=following)


def _concatenate_groups(chunks: Sequence[GroupSegments]) -> GroupSegments:
    """Joins columns of groups; where a behavior name has no members, it has no rows."""
    named = [{one.behavior: one for one in chunk.teammates} for chunk in chunks]
    teammates = []
    for name in sorted({name for one in named for name in one}):
        like = next(one[name] for one in named if name in one)
        empty = _of_groups(like, np.zeros(len(like.members), bool))
        absent = (replace(empty, members=np.zeros(len(chunk.numbers), np.int32)) for chunk in chunks)
        teammates.append(_joined([one.get(name, none) for one, none in zip(named, absent, strict=True)]))
    return replace(_joined(chunks), teammates=tuple(teammates))


def _part(record: R, index: Mapping[str, Index]) -> R:
    """Returns a part of each column of a record, by its axis."""
    parts: dict[str, Any] = {}
    for name, axis in _AXES[type(record)].items():
        column, at = getattr(record, name), index[axis]
        if isinstance(column, tuple):
            parts[name] = tuple(one[at] for one in column)
        elif column is not None:
            parts[name] = column[at]
    return replace(record, **parts)


def _joined(records: Sequence[R]) -> R:
    """Joins each column of records.

    Some have a width of 0: masks where every choice was allowed, and actions of members that have not acted yet.
    """
    joined: dict[str, Any] = {}
    for name in _AXES[type(records[0])]:
        columns: list[Any] = [getattr(one, name) for one in records]
        if isinstance(columns[0], tuple):
            joined[name] = tuple(map(np.concatenate, zip(*columns, strict=True)))
        elif columns[0] is not None:
            width: tuple[int, ...] = max(one.shape[1:] for one in columns)
            padded = (one if one.shape[1:] == width else np.zeros((len(one), *width), one.dtype) for one in columns)
            joined[name] = np.concatenate(list(padded))
    return replace(records[0], **joined)
