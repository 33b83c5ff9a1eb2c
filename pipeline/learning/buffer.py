"""This module buffers finished segments for the learner.

r rows of all segments, one segment after the other; s segments; q sequences that these are divided into.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparring.pipeline.assembly import sequences
from sparring.pipeline.errors import ServiceError
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.specs import Array

_PER_ROW = ("continuous", "discrete", "log_probs", "rewards", "group_rewards", "versions")
_PER_SEGMENT = ("lengths", "terminated", "ended", "agent_episodes")
_EPISODES_PER_SOURCE = 2**40


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
        rewards: [r] the agent's own reward.
        group_rewards: [r] the group's reward.
        versions: [r] policy version that acted.
        sequence_length: most steps of a sequence; 0 if agents carry nothing.
        carried: [q, numbers] what the agent carried into the first step of each sequence; None if agents carry nothing.
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
    sequence_length: int = 0
    carried: Array | None = None

    @property
    def steps(self) -> int:
        """Returns the number of rows."""
        return len(self.rewards)


class SegmentBuffer:
    """Holds finished segments, the oldest first; the step budget of the behavior bounds its size.

    Args:
        sequence_length: most steps of a sequence, which is never split; 0 if agents carry nothing.
    """

    def __init__(self, sequence_length: int = 0) -> None:
        self._sequence_length = sequence_length
        self._chunks: deque[Batch] = deque()
        self._sources: dict[str, int] = {}
        self.steps = 0

    def add(self, record: Segments) -> None:
        """Appends the segments of `record`.

        Raises:
            ServiceError: the record does not hold one carried memory for each sequence.
        """
        source = self._sources.setdefault(record.source, len(self._sources))
        self._check_carried(record)
        names = (*_PER_ROW, "lengths", "terminated", "next_observations", "observations", "masks")
        self._append(
            Batch(
                **{name: getattr(record, name) for name in names},
                ended=record.terminated | record.interrupted,
                agent_episodes=source * _EPISODES_PER_SOURCE + record.agents,
                sequence_length=self._sequence_length,
                carried=record.carried if self._sequence_length else None,
            )
        )

    def whole(self, steps: int) -> int:
        """Returns how many of the `steps` oldest steps `take` would remove: no sequence that reaches beyond them."""
        left, length = min(steps, self.steps), self._sequence_length
        if not length:
            return left
        fitting = 0
        for chunk in self._chunks:
            if chunk.steps > left:
                ends = np.cumsum(chunk.lengths)
                segment = int(np.searchsorted(ends, left, side="right"))
                start = int(ends[segment] - chunk.lengths[segment])
                return fitting + start + (left - start) // length * length
            fitting += chunk.steps
            left -= chunk.steps
        return fitting

    def take(self, steps: int) -> Batch:
        """Removes the `steps` oldest steps: all of them, or if agents carry something, `whole(steps)` of them.

        A segment that reaches beyond is split: its first part is closed at the boundary and bootstraps with the
        observation there; the rest stays.

        Args:
            steps: from 1 to `self.steps`; at least `sequence_length`.

        Raises:
            ValueError: the buffer holds fewer steps, or `steps` is below 1 or below a sequence.
        """
        fitting = self.whole(steps) if 1 <= steps <= self.steps else 0
        if not fitting:
            raise ValueError(
                f"got {steps} steps to take of the {self.steps} there are; "
                f"expected at least {max(1, self._sequence_length)} and no more than there are"
            )
        steps = fitting
        taken: list[Batch] = []
        missing = steps
        while missing:
            chunk = self._chunks.popleft()
            if chunk.steps > missing:
                chunk, rest = _split(chunk, missing)
                self._chunks.appendleft(rest)
            taken.append(chunk)
            missing -= chunk.steps
        self.steps -= steps
        return _concatenate(taken)

    def take_all(self) -> Batch:
        """Removes everything; raises `ValueError` if the buffer is empty."""
        return self.take(self.steps)

    def drop_stale(self, version: int, max_lag: int, keep_at_least: int) -> int:
        """Drops whole segments whose newest row is more than `max_lag` versions old, oldest first.

        Args:
            version: version of the weights published last.
            max_lag: in versions.
            keep_at_least: a segment is kept if fewer steps would remain.

        Returns:
            The number of dropped steps.
        """
        before, chunks = self.steps, self._chunks
        self._chunks = deque()
        remaining, self.steps = before, 0
        for chunk in chunks:
            stale = droppable(chunk.lengths, chunk.versions, version - max_lag, remaining - keep_at_least)
            remaining -= int(chunk.lengths[stale].sum())
            self._append(_select(chunk, ~stale) if stale.any() else chunk)
        return before - self.steps

    def _check_carried(self, record: Segments) -> None:
        if not self._sequence_length or not len(record.lengths):
            return
        expected = int(sequences.counts(record.lengths, self._sequence_length).sum())
        got = None if record.carried is None else len(record.carried)
        if got != expected:
            raise ServiceError(
                f"got segments of {record.behavior} with {got} memories; expected {expected}, one for each sequence; "
                "run all services with the same settings"
            )

    def _append(self, chunk: Batch) -> None:
        if chunk.steps:
            self._chunks.append(chunk)
            self.steps += chunk.steps


def droppable(sizes: Array, versions: Array, oldest: int, spare: int) -> Array:
    """Returns which segments are too old to be trained on, from the first on, as long as steps can be spared.

    Args:
        sizes: [s] rows of each segment, at least 1.
        versions: [r] policy version of each row.
        oldest: oldest version that a segment's newest row may have.
        spare: most steps to drop.
    """
    stale: Array = np.maximum.reduceat(versions, np.cumsum(sizes) - sizes) < oldest
    for segment in np.flatnonzero(stale):
        stale[segment] = sizes[segment] <= spare
        spare -= int(sizes[segment]) if stale[segment] else 0
    return stale


def _select(chunk: Batch, kept: Array) -> Batch:
    """Returns the segments for which `kept` is True."""
    return _slice(chunk, np.repeat(kept, chunk.lengths), kept, np.repeat(kept, _sequences(chunk)))


def _split(chunk: Batch, at: int) -> tuple[Batch, Batch]:
    """Returns the rows before row `at` and the rest; `at` is inside the chunk, and no sequence reaches over it."""
    ends = np.cumsum(chunk.lengths)
    segment = int(np.searchsorted(ends, at))
    inside = int(ends[segment]) - at  # rows of the boundary segment that stay in the buffer
    before = int(_sequences(chunk)[: segment + 1].sum())
    if inside and chunk.carried is not None:
        before -= -(-inside // chunk.sequence_length)
    head = _slice(chunk, slice(0, at), slice(0, segment + 1), slice(0, before))
    tail = _slice(chunk, slice(at, None), slice(segment if inside else segment + 1, None), slice(before, None))
    if inside:
        head = _replace(head, lengths=_with_last(head.lengths, head.lengths[-1] - inside))
        head = _replace(head, terminated=_with_last(head.terminated, False), ended=_with_last(head.ended, False))
        following = tuple(
            _with_last(next_rows, rows[at])
            for next_rows, rows in zip(head.next_observations, chunk.observations, strict=True)
        )
        head = _replace(head, next_observations=following)
        tail = _replace(tail, lengths=np.concatenate(([inside], tail.lengths[1:])).astype(tail.lengths.dtype))
    return head, tail


def _with_last(array: Array, value: Any) -> Array:
    changed = array.copy()
    changed[-1] = value
    return changed


def _replace(batch: Batch, **fields: Any) -> Batch:
    return Batch(**({name: getattr(batch, name) for name in Batch.__slots__} | fields))


def _sequences(chunk: Batch) -> Array:
    """Returns [s] how many sequences each segment has."""
    return sequences.counts(chunk.lengths, chunk.sequence_length or 1)


def _slice(chunk: Batch, rows: Any, segments: Any, starts: Any) -> Batch:
    """Selects rows, segments and sequences of every column."""
    return Batch(
        **{name: getattr(chunk, name)[rows] for name in _PER_ROW},
        **{name: getattr(chunk, name)[segments] for name in _PER_SEGMENT},
        next_observations=tuple(column[segments] for column in chunk.next_observations),
        observations=tuple(column[rows] for column in chunk.observations),
        masks=None if chunk.masks is None else chunk.masks[rows],
        sequence_length=chunk.sequence_length,
        carried=None if chunk.carried is None else chunk.carried[starts],
    )


def _concatenate(chunks: list[Batch]) -> Batch:
    """Joins the segments of `chunks`; rows without masks get empty ones if other rows have masks."""
    width = next((chunk.masks.shape[1] for chunk in chunks if chunk.masks is not None), None)
    masks = None
    if width is not None:
        free = [np.zeros((chunk.steps, width), np.bool_) if chunk.masks is None else chunk.masks for chunk in chunks]
        masks = np.concatenate(free)
    carried = [chunk.carried for chunk in chunks if chunk.carried is not None]
    joined = {name: np.concatenate([getattr(c, name) for c in chunks]) for name in (*_PER_ROW, *_PER_SEGMENT)}
    return Batch(
        **joined,
        next_observations=tuple(map(np.concatenate, zip(*(c.next_observations for c in chunks), strict=True))),
        observations=tuple(map(np.concatenate, zip(*(c.observations for c in chunks), strict=True))),
        masks=masks,
        sequence_length=chunks[0].sequence_length,
        carried=np.concatenate(carried) if carried else None,
    )
