"""Sequences are never split, and memories stay with their agent."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sparring.pipeline.assembly import sequences
from sparring.pipeline.errors import ServiceError
from sparring.pipeline.learning.buffer import SegmentBuffer
from sparring.pipeline.learning.minibatches import Memories
from tests.learning.learning_helpers import segments

LENGTHS = st.lists(st.integers(1, 12), max_size=8)

# ---------------------------------------------------------------- sequences


def slow_divide(lengths, length):
    """Returns (first row, rows) of each sequence, segment by segment."""
    found, start = [], 0
    for rows in lengths:
        found += [(start + at, min(length, rows - at)) for at in range(0, rows, length)]
        start += rows
    return found


@given(lengths=LENGTHS, length=st.integers(1, 14), small=st.booleans())
@settings(max_examples=40, deadline=None)
def test_segments_are_divided_into_sequences(lengths, length, small):
    array = np.array(lengths, np.int32 if small else np.int64)
    first, rows = sequences.divide(array, length)
    assert list(zip(first.tolist(), rows.tolist(), strict=True)) == slow_divide(lengths, length)
    assert sequences.counts(array, length).tolist() == [len(slow_divide([rows], length)) for rows in lengths]


@given(lengths=LENGTHS, length=st.integers(1, 5), data=st.data())
@settings(max_examples=40, deadline=None)
def test_rows_of_selected_sequences_are_in_sequence_order(lengths, length, data):
    first, rows = sequences.divide(np.array(lengths, np.int32), length)
    some = data.draw(st.permutations(range(len(first))))
    some = np.array(some[: data.draw(st.integers(0, len(first)))], np.int64)
    expected = [int(start) + at for start, count in zip(first[some], rows[some], strict=True) for at in range(count)]
    assert sequences.rows_of(first[some], rows[some]).tolist() == expected


# ---------------------------------------------------------------- the buffer


@dataclass
class ModelSegment:
    """A segment of numbered rows, with the number after them and versions."""

    row_numbers: list[int]
    following: float
    versions: list[int]
    episode: int
    terminated: bool
    ended: bool


def carried_at(row_number):
    return [row_number + 0.25, -row_number]


def record(new, length, source):
    """Returns the record of some segments; the carried state of a row follows from its number."""
    lengths = [len(one.row_numbers) for one in new]
    message = segments(lengths, versions=[version for one in new for version in one.versions])
    message.observations[0][:, 0] = [row_number for one in new for row_number in one.row_numbers]
    message.next_observations[0][:, 0] = [one.following for one in new]
    starts = [row_number for one in new for row_number in one.row_numbers[::length]]
    changes = {
        "source": source,
        "agents": np.array([one.episode for one in new], np.int64),
        "terminated": np.array([one.terminated for one in new], np.bool_),
        "interrupted": np.array([one.ended and not one.terminated for one in new], np.bool_),
        "carried": np.array([carried_at(row_number) for row_number in starts], np.float32).reshape(-1, 2),
    }
    fields = {name: getattr(message, name) for name in message.__slots__} | changes
    return type(message)(**fields)


class BufferMachine(RuleBasedStateMachine):
    """Compares the buffer with a list of segments: steps are taken once, and no sequence is split."""

    @initialize(length=st.integers(1, 5))
    def begin(self, length):
        self.length, self.buffer = length, SegmentBuffer(length)
        self.segments: list[ModelSegment] = []
        self.next_row = self.agent_episodes = 0

    @rule(lengths=st.lists(st.integers(1, 11), max_size=4), seed=st.integers(0, 999), source=st.sampled_from("ab"))
    def add(self, lengths, seed, source):
        random, new = np.random.default_rng(seed), []
        for rows in lengths:
            row_numbers = list(range(self.next_row, self.next_row + rows))
            self.next_row += rows
            self.agent_episodes += 1
            ended, terminated = random.random(2) < 0.5
            versions = (random.integers(0, 9) + (random.random(rows) < 0.1)).tolist()
            terminated = bool(ended and terminated)
            new.append(
                ModelSegment(row_numbers, row_numbers[-1] + 0.5, versions, self.agent_episodes, terminated, bool(ended))
            )
        self.buffer.add(record(new, self.length, source))
        self.segments += new

    @rule(steps=st.integers(1, 40))
    def take(self, steps):
        whole = self.whole(steps)
        assert self.buffer.whole(steps) == whole
        if not whole or steps > self.steps:
            with pytest.raises(ValueError, match="expected at least"):
                self.buffer.take(steps)
            return
        segments_taken = []
        while whole:
            segment = self.segments[0]
            if len(segment.row_numbers) <= whole:
                segments_taken.append(self.segments.pop(0))
            else:
                segments_taken.append(self.split(segment, whole))
            whole -= len(segments_taken[-1].row_numbers)
        self.check(self.buffer.take(steps), segments_taken)

    @rule()
    def take_all(self):
        if self.segments:
            segments_taken, self.segments = self.segments, []
            self.check(self.buffer.take(), segments_taken)

    @rule(version=st.integers(0, 12), keep=st.integers(0, 40))
    def drop(self, version, keep):
        kept, remaining = [], self.steps
        for segment in self.segments:
            if max(segment.versions) < version - 3 and remaining - len(segment.row_numbers) >= keep:
                remaining -= len(segment.row_numbers)
            else:
                kept.append(segment)
        assert self.buffer.drop_stale(version, 3, keep) == self.steps - remaining
        self.segments = kept

    @invariant()
    def counts(self):
        if hasattr(self, "buffer"):
            assert self.buffer.steps == self.steps
            assert self.buffer.whole(10**6) == self.steps

    @property
    def steps(self):
        return sum(len(segment.row_numbers) for segment in self.segments)

    def whole(self, steps):
        """Returns the last end of a sequence among the first `steps` rows."""
        ends, start = [0], 0
        for segment in self.segments:
            rows = len(segment.row_numbers)
            ends += [start + min(rows, at + self.length) for at in range(0, rows, self.length)]
            start += rows
        return max(end for end in ends if end <= steps)

    @staticmethod
    def split(segment, at):
        """Takes the first rows from a segment, as a segment without an end."""
        head = ModelSegment(
            segment.row_numbers[:at], segment.row_numbers[at], segment.versions[:at], segment.episode, False, False
        )
        segment.row_numbers, segment.versions = segment.row_numbers[at:], segment.versions[at:]
        return head

    def check(self, batch, expected):
        assert batch.sequence_length == self.length
        assert batch.observations[0][:, 0].tolist() == [
            row_number for one in expected for row_number in one.row_numbers
        ]
        assert batch.versions.tolist() == [version for one in expected for version in one.versions]
        assert batch.lengths.tolist() == [len(one.row_numbers) for one in expected]
        assert batch.next_observations[0][:, 0].tolist() == [one.following for one in expected]
        assert batch.terminated.tolist() == [one.terminated for one in expected]
        assert batch.ended.tolist() == [one.ended for one in expected]
        assert (batch.agent_episodes % 2**40).tolist() == [one.episode for one in expected]
        first, _ = sequences.divide(batch.lengths, self.length)
        starts = [row_number for one in expected for row_number in one.row_numbers[:: self.length]]
        assert batch.observations[0][first, 0].tolist() == starts, "sequences are those that were stored"
        assert batch.carried.tolist() == [carried_at(row_number) for row_number in starts]


BufferMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestBufferOfSequences = BufferMachine.TestCase


def test_agent_episode_is_identified_by_source_and_number():
    buffer = SegmentBuffer(2)
    for source in ("stepping-0.1", "stepping-1.1", "stepping-0.1"):
        new = [ModelSegment([0], 0.5, [0], episode, False, False) for episode in (1, 2)]
        buffer.add(record(new, 2, source))
    agent_episodes = buffer.take().agent_episodes.tolist()
    assert agent_episodes[:2] == agent_episodes[4:]
    assert len(set(agent_episodes)) == 4


def test_buffer_without_recurrent_state_splits_anywhere():
    buffer = SegmentBuffer()
    buffer.add(segments([5, 4]))
    assert [buffer.whole(steps) for steps in (3, 7, 99)] == [3, 7, 9]
    batch = buffer.take(3)
    assert (batch.steps, batch.carried, batch.sequence_length) == (3, None, 0)


def test_recurrent_state_is_dropped_with_its_segments():
    buffer = SegmentBuffer(2)
    new = [
        ModelSegment([10, 11, 12], 12.5, [1] * 3, 1, False, False),
        ModelSegment([13, 14], 14.5, [9] * 2, 2, False, True),
    ]
    buffer.add(record(new, 2, "a"))
    assert buffer.drop_stale(version=9, max_lag=3, keep_at_least=0) == 3
    assert buffer.take().carried.tolist() == [carried_at(13)]


def test_taking_less_than_a_sequence_is_refused():
    buffer = SegmentBuffer(4)
    buffer.add(record([ModelSegment(list(range(9)), 8.5, [0] * 9, 1, False, False)], 4, "a"))
    with pytest.raises(ValueError, match="got 3 steps to take of the 9 there are; expected at least 4"):
        buffer.take(3)
    assert buffer.steps == 9
    assert [buffer.take(7).steps, buffer.take(5).steps] == [4, 5]


# ---------------------------------------------------------------- memories of the critic

UPDATES = st.lists(
    st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=8, unique_by=lambda one: one[0]), max_size=12
)


@given(updates=UPDATES, limit=st.integers(1, 9), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_memories_equal_those_of_a_dictionary(updates, limit, seed):
    """The latest memory of each agent is kept until it ends; beyond the limit the oldest are removed."""
    memories, random = Memories(3, limit), np.random.default_rng(seed)
    twin: dict[int, tuple[int, np.ndarray]] = {}
    for now, update in enumerate(updates):
        agent_episodes = np.array([episode for episode, _ in update], np.int64)
        ended = np.array([end for _, end in update], np.bool_)
        made = random.standard_normal((len(update), 3), np.float32)
        memories.keep(agent_episodes, made, ended)
        for episode, end, memory in zip(agent_episodes.tolist(), ended.tolist(), made, strict=True):
            twin.pop(episode, None)
            if not end:
                twin[episode] = (now, memory)
        oldest_first = sorted((last_update for last_update, _ in twin.values()))
        surely = oldest_first[-limit] if len(twin) > limit else -1
        got = memories.recall(np.arange(13))
        known = {episode for episode in twin if got[episode].any()}
        assert len(memories) == len(known) == min(limit, len(twin))
        assert known >= {episode for episode, (last_update, _) in twin.items() if last_update > surely}
        assert all(twin[episode][0] >= surely for episode in known)
        twin = {episode: twin[episode] for episode in known}  # of memories with the same last update any may be removed
        for episode in range(13):
            np.testing.assert_array_equal(got[episode], twin[episode][1] if episode in twin else np.zeros(3))


def test_recalled_memories_are_copies_in_the_requested_order():
    memories = Memories(1)
    memories.keep(np.array([7, 2**41, 3]), np.float32([[1], [2], [3]]), np.zeros(3, np.bool_))
    got = memories.recall(np.array([3, 7, 5, 2**41, 3]))
    assert got.tolist() == [[3], [1], [0], [2], [3]]
    got += 1
    assert memories.recall(np.array([3])).tolist() == [[3]]
    assert memories.recall(np.array([], np.int64)).shape == (0, 1)


def test_segments_without_recurrent_state_are_refused():
    buffer = SegmentBuffer(4)
    whole = record([ModelSegment(list(range(9)), 8.5, [0] * 9, 1, False, False)], 4, "a")
    for carried, message in ((None, "None memories"), (whole.carried[:2], "2 memories")):
        with pytest.raises(ServiceError, match=f"{message}; expected 3"):
            buffer.add(dataclasses.replace(whole, carried=carried))
    assert buffer.steps == 0
