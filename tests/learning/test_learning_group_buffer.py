"""The buffer of groups: group segments in are group segments out, whole, in order, with all that belongs to them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.errors import ServiceError
from sparring.pipeline.learning.group_buffer import GroupBuffer
from tests.learning.group_helpers import LENGTH, batch_of, learning, record, same_batch
from tests.learning.group_lives import OWN, TEAMMATES, World, specs_of

SPECS = specs_of(teammates=2)
ACTOR = learning(SPECS, memory=True, previous=True).actor
MANY = settings(max_examples=25, deadline=None)
MESSAGES = st.lists(st.integers(0, 4), min_size=1, max_size=4)


def told(messages, seed=0, **how):
    """Group segments of some messages, each of as many groups' lives."""
    world = World(SPECS, ACTOR, seed)
    return [world.groups(count, **{"horizon": 5} | how) for count in messages]


def filled(parts, **changes):
    """A buffer with a message of each part; an empty one tells nothing."""
    buffer = GroupBuffer(LENGTH)
    for part in parts:
        if part:
            buffer.add(record(part, SPECS, length=LENGTH, **changes))
    return buffer


def whole(groups):
    return batch_of(groups, SPECS, length=LENGTH)


@given(messages=MESSAGES, sizes=st.lists(st.integers(1, 40), max_size=8), seed=st.integers(0, 999))
@MANY
def test_group_segments_come_out_whole_once_and_in_order(messages, sizes, seed):
    """As few as hold the steps asked for; each batch is what one message of the same group segments gives."""
    parts = told(messages, seed)
    buffer, left = filled(parts), [group for part in parts for group in part]
    assert buffer.steps == sum(group.steps for group in left)
    for size in [*sizes, 10_000]:
        if not left:
            break
        taken = []
        while left and sum(group.steps for group in taken) < size:
            taken.append(left.pop(0))
        steps = sum(group.steps for group in taken)
        assert buffer.whole(size) == steps
        batch = buffer.take(size)
        same_batch(batch, whole(taken))
        assert batch.steps == steps
        assert batch.sizes.tolist() == [group.steps for group in taken]
        assert buffer.steps == sum(group.steps for group in left)
    assert (buffer.steps, buffer.whole(5)) == (0, 0)


@given(messages=MESSAGES, seed=st.integers(0, 999), order=st.randoms(use_true_random=False))
@MANY
def test_selecting_is_as_if_only_these_had_been_told(messages, seed, order):
    groups = [group for part in told(messages, seed) for group in part]
    if not groups:
        return
    kept = np.array([order.random() < 0.6 for _ in groups])
    got = whole(groups).select(kept)
    chosen = [group for group, keep in zip(groups, kept, strict=True) if keep]
    if chosen:
        same_batch(got, whole(chosen))
    else:
        assert (got.steps, len(got.teammates), len(got.carried)) == (0, 0, 0)


def test_taking_nothing_is_refused():
    with pytest.raises(ValueError, match="got 7 steps to take of none"):
        GroupBuffer().take(7)
    with pytest.raises(ValueError, match="of none"):
        GroupBuffer().take_all()


# ---------------------------------------------------------------- chunks that differ


def test_chunks_with_and_without_mates_join():
    """Mates' columns tell of nobody where there was none of their name."""
    alone = World(specs_of(), ACTOR).groups(2)
    world = World(SPECS, ACTOR, 1)
    few, crane, many = ([world.group(most=6, over=False)[0] for _ in range(2)] for _ in range(3))
    for group in crane:
        group.members = [one for one in group.members if one.name != "Driver"]
    for group in many:
        assert {one.name for one in group.members} == {OWN, *TEAMMATES}
    for parts in ([alone, crane, many], [many, alone], [crane, few, alone], [alone, alone]):
        groups = [group for part in parts for group in part]
        got = filled(parts).take_all()
        same_batch(got, whole(groups))
        for name, members in got.teammates.items():
            assert members.members.tolist() == [len(group.of(name)) for group in groups]
    assert not filled([alone]).take_all().teammates


def test_chunks_with_and_without_masks_join():
    first, second = told([2, 2])
    buffer = GroupBuffer()
    for part, masked in ((first, False), (second, True)):
        buffer.add(record(part, SPECS, masked=masked))
    masks, rows = buffer.take_all().masks, sum(group.steps for group in first)
    assert not masks[:rows].any()
    np.testing.assert_array_equal(masks[rows:], record(second, SPECS).masks)
    buffer.add(record(first, SPECS, masked=False))
    assert buffer.take_all().masks is None


def test_lives_are_those_of_sources_and_group_numbers_those_of_origins():
    """An assembly that starts anew counts groups anew; agents keep the numbers of their source."""
    (groups,) = told([2])
    buffer = GroupBuffer()
    for source, origin in (("a", "1"), ("a", "2"), ("b", "1"), ("a", "1")):
        buffer.add(record(groups, SPECS, source=source, origin=origin))
    batch = buffer.take_all()
    numbers, agent_episodes = batch.numbers.reshape(4, -1), batch.agent_episodes.reshape(4, -1)
    assert len(np.unique(numbers)) == 3 * len(np.unique(numbers[0]))
    assert len(np.unique(agent_episodes)) == 2 * len(np.unique(agent_episodes[0]))
    assert numbers[0].tolist() == numbers[3].tolist()
    assert agent_episodes[0].tolist() == agent_episodes[1].tolist() == agent_episodes[3].tolist()


# ---------------------------------------------------------------- what is refused


def test_segments_that_tell_nothing_of_groups_are_refused():
    (groups,) = told([1])
    with pytest.raises(ServiceError, match="tell nothing of groups; expected them to"):
        GroupBuffer().add(record(groups, SPECS, shared=None))


@pytest.mark.parametrize("change", [lambda carried: carried[1:], lambda carried: None])
def test_another_number_of_memories_than_of_sequences_is_refused(change):
    (groups,) = told([2])
    right, buffer = record(groups, SPECS, length=LENGTH), GroupBuffer(LENGTH)
    with pytest.raises(ServiceError, match=f"expected {len(right.carried)}, one for each sequence"):
        buffer.add(record(groups, SPECS, length=LENGTH, carried=change(right.carried)))
    assert buffer.steps == 0
    buffer.add(right)


def test_memories_that_nobody_asked_for_are_left_out():
    (groups,) = told([2])
    buffer = GroupBuffer()
    buffer.add(record(groups, SPECS, length=LENGTH))
    assert buffer.take_all().carried is None


@pytest.mark.parametrize("length", [0, LENGTH])
def test_an_empty_record_adds_nothing(length):
    buffer = GroupBuffer(length)
    buffer.add(record([], SPECS))
    assert buffer.steps == 0


# ---------------------------------------------------------------- age


def aged(parts, ages):
    """Every step of a group segment is old, but one of them of the given version."""
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
def test_stale_group_segments_are_dropped_whole_oldest_first_until_too_little_would_remain(messages, keep, seed, ages):
    parts = told(messages, seed)
    drawn = [ages.randint(1, 8) for part in parts for _ in part]
    buffer, groups = filled(aged(parts, drawn)), [group for part in parts for group in part]
    remaining, left = buffer.steps, []
    for group, newest in zip(groups, drawn, strict=True):
        if newest < 8 - 3 and remaining - group.steps >= keep:
            remaining -= group.steps
        else:
            left.append(group)
    before = buffer.steps
    assert buffer.drop_stale(version=8, max_lag=3, keep_at_least=keep) == before - remaining
    assert buffer.steps == remaining
    if left:
        same_batch(buffer.take_all(), whole(left))
