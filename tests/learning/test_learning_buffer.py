"""The buffer keeps all steps in order, and a split segment bootstraps at the split."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.learning.buffer import SegmentBuffer
from tests.learning.learning_helpers import segments

LENGTHS = st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=5)


def filled(messages, **fields):
    buffer, first = SegmentBuffer(), 0
    for seed, lengths in enumerate(messages):
        buffer.add(segments(lengths, first=first, seed=seed, numbered=True, terminated=[True] * len(lengths), **fields))
        first += sum(lengths)
    return buffer


def row_numbers(batch):
    return batch.observations[0][:, 0]


@given(messages=LENGTHS, sizes=st.lists(st.integers(1, 20), min_size=1, max_size=12))
@settings(max_examples=30, deadline=None)
def test_every_step_is_taken_once_and_in_order(messages, sizes):
    buffer, batches = filled(messages), []
    total = buffer.steps
    assert total == sum(map(sum, messages))
    for size in sizes:
        if size <= buffer.steps:
            batch = buffer.take(size)
            assert batch.steps == batch.lengths.sum() == size
            batches.append(batch)
    if buffer.steps:
        batches.append(buffer.take())
    assert buffer.steps == 0
    if batches:
        np.testing.assert_array_equal(
            np.concatenate([row_numbers(b) for b in batches]), np.arange(total, dtype=np.float32)
        )


@given(messages=LENGTHS, size=st.integers(1, 60))
@settings(max_examples=40, deadline=None)
def test_split_segment_bootstraps_with_the_next_row(messages, size):
    buffer = filled(messages)
    ends = set(np.cumsum([length for lengths in messages for length in lengths]).tolist())
    if size > buffer.steps:
        return
    batch = buffer.take(size)
    parts = [batch, *([buffer.take()] if buffer.steps else [])]
    for part in parts:
        last = row_numbers(part)[np.cumsum(part.lengths) - 1]
        for row, following, terminated in zip(last, part.next_observations[0][:, 0], part.terminated, strict=True):
            at_end = int(row) + 1 in ends
            assert terminated == at_end, "a split is not the end of an episode"
            assert following == (row + 0.5 if at_end else row + 1)


def test_all_columns_stay_together():
    record = segments([4, 5], numbered=True, masked=True, versions=np.arange(9))
    buffer = SegmentBuffer()
    buffer.add(record)
    buffer.take(3)
    rest = buffer.take()
    for name in ("continuous", "discrete", "log_probs", "rewards", "versions", "masks"):
        np.testing.assert_array_equal(getattr(rest, name), getattr(record, name)[3:])
    np.testing.assert_array_equal(rest.observations[1], record.observations[1][3:])
    assert rest.lengths.tolist() == [1, 5]


def test_rows_without_masks_can_follow_rows_with_masks():
    buffer = SegmentBuffer()
    buffer.add(segments([2]))
    buffer.add(segments([3], masked=True))
    masks = buffer.take().masks
    assert masks.shape == (5, 5)
    assert not masks[:2].any()
    assert masks[2:].any()


def test_batch_without_masks_has_none():
    buffer = SegmentBuffer()
    buffer.add(segments([2]))
    assert buffer.take().masks is None


@pytest.mark.parametrize("steps", [0, 4])
def test_taking_no_step_or_too_many_is_refused(steps):
    with pytest.raises(ValueError, match=f"got {steps} steps to take of the 3 there are"):
        filled([[3]]).take(steps)


def test_empty_record_adds_nothing():
    buffer = SegmentBuffer()
    buffer.add(segments([]))
    assert buffer.steps == 0


def test_age_of_a_segment_is_that_of_its_newest_row():
    buffer = SegmentBuffer()
    buffer.add(segments([2, 2], versions=[1, 1, 1, 5], numbered=True))
    assert buffer.drop_stale(version=8, max_lag=3, keep_at_least=0) == 2
    assert row_numbers(buffer.take()).tolist() == [2, 3]


def test_oldest_segments_are_dropped_while_enough_remain():
    buffer = filled([[3, 3], [3, 3]])
    assert buffer.drop_stale(version=9, max_lag=3, keep_at_least=5) == 6
    assert row_numbers(buffer.take())[0] == 6


@given(messages=LENGTHS, keep=st.integers(0, 50), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_dropping_counts_all_steps_and_keeps_fresh_ones(messages, keep, seed):
    random, buffer, fresh = np.random.default_rng(seed), SegmentBuffer(), 0
    for lengths in messages:
        ages = random.integers(1, 9, len(lengths))
        fresh += int(sum(length for length, age in zip(lengths, ages, strict=True) if age >= 5))
        buffer.add(segments(lengths, versions=np.repeat(ages, lengths)))
    before = buffer.steps
    dropped = buffer.drop_stale(version=8, max_lag=3, keep_at_least=keep)
    assert buffer.steps + dropped == before
    assert buffer.steps >= min(before, max(keep, fresh))
    if buffer.steps:
        assert buffer.take().steps == before - dropped
