"""The index of members present at each group timestep, compared with a loop over groups, times and members."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.learning.group_networks import GroupIndex, GroupWindows
from tests.learning.group_helpers import LENGTH, batch_of, timesteps_of
from tests.learning.random_groups import OWN, PLAIN, Decision, Group, Member, World, specs_of


def rows_of(groups, name):
    """Returns the row of each decision: first all decisions of a behavior, then the one after each segment."""
    members = [one for group in groups for one in group.of(name)]
    decisions = [step for one in members for step in one.steps] + [one.following for one in members]
    return {decision: row for row, decision in enumerate(decisions)}


def index_of(groups, specs):
    return GroupIndex(batch_of(groups, specs), list(specs))


WORLDS = {
    "seed": st.integers(0, 10_000),
    "count": st.integers(1, 5),
    "teammates": st.integers(0, 2),
    "times": st.integers(1, 9),
    "most": st.integers(1, 6),
    "horizon": st.integers(1, 9),
}
MANY = settings(max_examples=15, deadline=None)


def made(seed, count, teammates, **how):
    specs = specs_of(teammates=teammates)
    world = World(specs, seed=seed)
    while not (groups := world.groups(count, **how)):
        pass
    return groups, specs


@given(**WORLDS)
@MANY
def test_tokens_are_present_members_with_their_latest_decisions(**how):
    groups, specs = made(**how)
    index, names = index_of(groups, specs), list(specs)
    rows = [rows_of(groups, name) for name in names]
    timesteps = timesteps_of(groups)
    assert len(index.counts) == len(timesteps)
    for number, (group, time) in enumerate(timesteps):
        there = group.there(time)
        expected = {(names.index(one.name), rows[names.index(one.name)][decision]) for one, decision in there}
        token_rows, token_names = index.tokens(np.array([number]))
        assert len(token_rows) == len(there) == index.counts[number]
        assert set(zip(token_names.tolist(), token_rows.tolist(), strict=True)) == expected
        assert index.own[number] == sum(one.name == OWN for one, _ in there)
        assert token_names.tolist() == sorted(token_names), "our own first, then the others by name"


@given(order=st.randoms(use_true_random=False), **WORLDS)
@MANY
def test_tokens_of_several_timesteps_are_in_the_requested_order(order, **how):
    groups, specs = made(**how)
    index = index_of(groups, specs)
    some = order.sample(range(len(index.counts)), order.randint(1, len(index.counts)))
    each = [index.tokens(np.array([number])) for number in some]
    for got, parts in zip(index.tokens(np.array(some)), zip(*each, strict=True), strict=True):
        assert got.tolist() == np.concatenate(parts).tolist()


@given(**WORLDS)
@MANY
def test_every_decision_has_its_timestep_and_place(**how):
    groups, specs = made(**how)
    index = index_of(groups, specs)
    timesteps, row = {(group, time): at for at, (group, time) in enumerate(timesteps_of(groups))}, 0
    decided = np.zeros(len(timesteps), int)
    for group in groups:
        for one in group.of(OWN):
            for step in one.steps:
                assert index.timesteps[row] == timesteps[group, step.time]
                decided[index.timesteps[row]] += 1
                token_rows, token_names = index.tokens(index.timesteps[row : row + 1])
                assert (token_names[index.places[row]], token_rows[index.places[row]]) == (0, row)
                row += 1
    assert row == len(index.timesteps) == len(index.places)
    assert index.decisions.tolist() == decided.tolist()


@given(**WORLDS)
@MANY
def test_timesteps_of_segments_exclude_the_one_after_each(**how):
    groups, specs = made(**how)
    index = index_of(groups, specs)
    timesteps = timesteps_of(groups)
    assert index.in_series.tolist() == [at for at, (group, time) in enumerate(timesteps) if time < group.span]
    assert index.first.tolist() == [at for at, (_, time) in enumerate(timesteps) if time == 0]
    assert index.last.tolist() == [at for at, (group, time) in enumerate(timesteps) if time == group.span]


def test_random_groups_cover_all_cases():
    """Members start, end, wait, have no step and belong to other behaviors, and groups become empty."""
    groups, _ = made(5, 40, teammates=2, times=8, most=5, horizon=4)
    members = [one for group in groups for one in group.members]
    ours = [one for one in members if one.name == OWN]
    sizes = [[len(group.there(time)) for time in range(group.span + 1)] for group in groups]
    assert any(not one.steps for one in ours)
    assert any(not one.steps for one in members if one.name != OWN)
    assert any(group.over and not group.there(group.span) for group in groups)
    assert any(group.over and group.there(group.span) for group in groups), "the last members were interrupted"
    assert any(one.ended and one.until < group.span for group in groups for one in group.members)
    assert any(one.following.time < group.span and not one.ended for group in groups for one in group.members)
    assert any(min(size) < size[0] < max(size) for size in sizes), "shrinks and grows"
    assert any(one.steps and one.steps[0].time > 0 for one in ours)
    assert any(
        later.time - step.time > 1 for one in ours for step, later in zip(one.steps, one.steps[1:], strict=False)
    )
    assert any(not any(one.at(time) for one in group.of(OWN)) for group in groups for time in range(group.span))


def by_hand(over=False):
    """Returns a group of three members: one ends at 2, one continues or is interrupted at 4, one starts at 3."""

    def decision(time):
        return Decision(time, tuple(np.zeros((1, *one.shape), np.float32) for one in PLAIN.observations),
                        np.zeros(2, np.float32), np.zeros(2, np.int32), mask=np.zeros(5, bool))  # fmt: skip

    first = Member(OWN, 1, [decision(0), decision(1)], decision(2), 2, terminated=True)
    second = Member(OWN, 2, [decision(0), decision(3)], decision(4), 5, interrupted=over)
    third = Member(OWN, 3, [], decision(3), 5)
    return [Group(1, 4, over, np.zeros(4, np.float32), [first, second, *([] if over else [third])])]


def test_index_of_a_group_by_hand():
    index = index_of(by_hand(), {OWN: PLAIN})
    assert index.counts.tolist() == [2, 2, 1, 2, 2]
    assert index.tokens(np.arange(5))[0].tolist() == [0, 2, 1, 2, 2, 3, 6, 5, 6]
    assert index.timesteps.tolist() == [0, 1, 0, 3]
    assert index.places.tolist() == [0, 0, 1, 0]
    assert index.decisions.tolist() == [2, 1, 0, 1, 0]
    over = index_of(by_hand(over=True), {OWN: PLAIN})
    assert over.counts.tolist() == [2, 2, 1, 1, 1], "the last interrupted member is present once more"


def test_behavior_without_members_in_a_batch_changes_nothing():
    groups, specs = made(3, 3, teammates=1, times=6, most=4, horizon=9)
    batch = batch_of(groups, specs)
    few, more = GroupIndex(batch, list(specs)), GroupIndex(batch, [*specs, "Unused"])
    every = np.arange(len(few.counts))
    for got, expected in zip(more.tokens(every), few.tokens(every), strict=True):
        assert got.tolist() == expected.tolist()


# ---------------------------------------------------------------- windows


@pytest.mark.parametrize("length", [1, LENGTH, 99])
@given(**WORLDS)
@settings(max_examples=15, deadline=None)
def test_windows_divide_group_time_and_sequences_are_steps_of_a_member_in_a_window(length, **how):
    groups, specs = made(**how)
    batch = replace(batch_of(groups, specs), sequence_length=length)
    index = GroupIndex(batch, list(specs))
    windows = GroupWindows(batch, index)
    timesteps = {(group, time): at for at, (group, time) in enumerate(timesteps_of(groups))}
    rows = rows_of(groups, OWN)
    expected = [(at, start) for at, group in enumerate(groups) for start in range(0, group.span, length)]
    assert windows.group.tolist() == [at for at, _ in expected]
    for number, (at, start) in enumerate(expected):
        group, which = groups[at], np.array([number])
        times = range(start, min(start + length, group.span))
        here = np.arange(windows.first[number], windows.first[number] + windows.lengths[number])
        assert here.tolist() == [timesteps[group, time] for time in times]
        inside = [[rows[step] for step in one.steps if step.time in times] for one in group.of(OWN)]
        inside = [one for one in inside if one]
        of_q = windows.of_windows(which)
        sequences = zip(windows.first_q[of_q], windows.lengths_q[of_q], strict=True)
        assert [list(range(first, first + size)) for first, size in sequences] == inside
        assert windows.weights[number] == max(
            sum(map(len, inside)),
            int(index.counts[here].any()),
        )
    assert windows.first_q.tolist() == batch.starts()[windows.by_window].tolist()
