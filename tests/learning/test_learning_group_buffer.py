"""The group buffer keeps complete group segments in order, with all of their columns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.errors import ServiceError
from sparring.pipeline.learning.buffer import SegmentBuffer
from tests.learning.group_helpers import LENGTH, batch_of, learning, record, same_columns
from tests.learning.random_groups import OWN, TEAMMATES, World, specs_of

SPECS = specs_of(teammates=2)
ACTOR = learning(SPECS, memory=True, previous=True).actor
MANY = settings(max_examples=12, deadline=None)
MESSAGES = st.lists(st.integers(0, 4), min_size=1, max_size=4)


def random_parts(messages, seed=0, **how):
    """Returns random group segments for several records, each of the given number of groups."""
    world = World(SPECS, ACTOR, seed)
    return [world.groups(count, **{"horizon": 5} | how) for count in messages]


def filled(parts, **changes):
    """Returns a buffer with one record for each part that is not empty."""
    buffer = SegmentBuffer(LENGTH, groups=True)
    for part in parts:
        if part:
            buffer.add(record(part, SPECS, length=LENGTH, **changes))
    return buffer


def batch_from(groups):
    return batch_of(groups, SPECS, length=LENGTH)


@given(messages=MESSAGES, sizes=st.lists(st.integers(1, 40), max_size=8), seed=st.integers(0, 999))
@MANY
def test_group_segments_are_taken_complete_once_and_in_order(messages, sizes, seed):
    """A batch has as few group segments as contain the steps, and equals the batch of one record of them."""
    parts = random_parts(messages, seed)
    buffer, left = filled(parts), [group for part in parts for group in part]
    assert buffer.steps == sum(group.steps for group in left)
    for size in [*sizes, 10_000]:
        if not left:
            break
        chosen = []
        while left and sum(group.steps for group in chosen) < size:
            chosen.append(left.pop(0))
        steps = sum(group.steps for group in chosen)
        assert buffer.whole(size) == steps
        batch = buffer.take(min(size, buffer.steps))
        same_columns(batch, batch_from(chosen))
        assert batch.steps == steps
        assert batch.sizes.tolist() == [group.steps for group in chosen]
        assert buffer.steps == sum(group.steps for group in left)
    assert (buffer.steps, buffer.whole(5)) == (0, 0)


@given(messages=MESSAGES, seed=st.integers(0, 999), order=st.randoms(use_true_random=False))
@MANY
def test_selection_equals_a_batch_of_the_selected_segments(messages, seed, order):
    groups = [group for part in random_parts(messages, seed) for group in part]
    if not groups:
        return
    is_kept = np.array([order.random() < 0.6 for _ in groups])
    got = batch_from(groups).select(is_kept)
    chosen = [group for group, keep in zip(groups, is_kept, strict=True) if keep]
    if chosen:
        same_columns(got, batch_from(chosen))
    else:
        assert (got.steps, len(got.groups.teammates), len(got.carried)) == (0, 0, 0)


def test_taking_no_step_is_refused():
    with pytest.raises(ValueError, match="got 7 steps to take of the 0 there are"):
        SegmentBuffer(groups=True).take(7)
    with pytest.raises(ValueError, match="got 0 steps to take of the 0 there are"):
        SegmentBuffer(groups=True).take()


# ---------------------------------------------------------------- chunks that differ


def test_records_with_and_without_teammates_are_joined():
    """Columns of teammates have no rows for records without them."""
    alone = World(specs_of(), ACTOR).groups(2)
    world = World(SPECS, ACTOR, 1)
    few, crane, many = ([world.group(most=6, over=False)[0] for _ in range(2)] for _ in range(3))
    for group in crane:
        group.members = [one for one in group.members if one.name != "Driver"]
    for group in many:
        assert {one.name for one in group.members} == {OWN, *TEAMMATES}
    for parts in ([alone, crane, many], [many, alone], [crane, few, alone], [alone, alone]):
        groups = [group for part in parts for group in part]
        got = filled(parts).take()
        same_columns(got, batch_from(groups))
        for one in got.groups.teammates:
            assert one.members.tolist() == [len(group.of(one.behavior)) for group in groups]
    assert not filled([alone]).take().groups.teammates


def test_records_with_and_without_masks_are_joined():
    first, second = random_parts([2, 2])
    buffer = SegmentBuffer(groups=True)
    for part, masked in ((first, False), (second, True)):
        buffer.add(record(part, SPECS, masked=masked))
    masks, rows = buffer.take().masks, sum(group.steps for group in first)
    assert not masks[:rows].any()
    np.testing.assert_array_equal(masks[rows:], record(second, SPECS).masks)
    buffer.add(record(first, SPECS, masked=False))
    assert buffer.take().masks is None


def test_agent_numbers_belong_to_sources_and_group_numbers_to_origins():
    """A new assembly incarnation numbers groups anew; agent episodes keep the numbers of their source."""
    (groups,) = random_parts([2])
    buffer = SegmentBuffer(groups=True)
    for source, origin in (("a", "1"), ("a", "2"), ("b", "1"), ("a", "1")):
        buffer.add(record(groups, SPECS, source=source, origin=origin))
    batch = buffer.take()
    numbers, agent_episodes = batch.groups.numbers.reshape(4, -1), batch.agent_episodes.reshape(4, -1)
    assert len(np.unique(numbers)) == 3 * len(np.unique(numbers[0]))
    assert len(np.unique(agent_episodes)) == 2 * len(np.unique(agent_episodes[0]))
    assert numbers[0].tolist() == numbers[3].tolist()
    assert agent_episodes[0].tolist() == agent_episodes[1].tolist() == agent_episodes[3].tolist()


# ---------------------------------------------------------------- what is refused


def test_segments_without_groups_are_refused():
    (groups,) = random_parts([1])
    with pytest.raises(ServiceError, match="without group columns; expected segments of groups"):
        SegmentBuffer(groups=True).add(record(groups, SPECS, shared=None))


@pytest.mark.parametrize("change", [lambda carried: carried[1:], lambda carried: None])
def test_number_of_memories_must_equal_that_of_sequences(change):
    (groups,) = random_parts([2])
    right, buffer = record(groups, SPECS, length=LENGTH), SegmentBuffer(LENGTH, groups=True)
    with pytest.raises(ServiceError, match=f"expected {len(right.carried)}, one for each sequence"):
        buffer.add(record(groups, SPECS, length=LENGTH, carried=change(right.carried)))
    assert buffer.steps == 0
    buffer.add(right)


def test_unneeded_memories_are_dropped():
    (groups,) = random_parts([2])
    buffer = SegmentBuffer(groups=True)
    buffer.add(record(groups, SPECS, length=LENGTH))
    assert buffer.take().carried is None


@pytest.mark.parametrize("length", [0, LENGTH])
def test_empty_record_adds_nothing(length):
    buffer = SegmentBuffer(length, groups=True)
    buffer.add(record([], SPECS))
    assert buffer.steps == 0


# ---------------------------------------------------------------- age


def aged(parts, ages):
    """Returns parts in which every step of a group segment is old, except one of the given version."""
    versions = iter(ages)
    for part in parts:
        for group in part:
            newest = next(versions)
            steps = [step for one in group.of(OWN) for step in one.steps]
            for step in steps:
                step.version = 1
            steps[len(steps) // 2].version = newest
    return parts


@given(messages=MESSAGES, keep=st.integers(0, 60), seed=st.integers(0, 999), ages=st.randoms(use_true_random=False))
@MANY
def test_oldest_stale_group_segments_are_dropped_while_enough_remain(messages, keep, seed, ages):
    parts = random_parts(messages, seed)
    newest_versions = [ages.randint(1, 8) for part in parts for _ in part]
    buffer, groups = filled(aged(parts, newest_versions)), [group for part in parts for group in part]
    remaining, left = buffer.steps, []
    for group, newest in zip(groups, newest_versions, strict=True):
        if newest < 8 - 3 and remaining - group.steps >= keep:
            remaining -= group.steps
        else:
            left.append(group)
    before = buffer.steps
    assert buffer.drop_stale(version=8, max_lag=3, keep_at_least=keep) == before - remaining
    assert buffer.steps == remaining
    if left:
        same_columns(buffer.take(), batch_from(left))
