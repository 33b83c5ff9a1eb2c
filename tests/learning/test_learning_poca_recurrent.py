"""Recurrent MA-POCA, with memories of groups and members, compared with an evaluation step by step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.learning import group_networks
from sparring.pipeline.networks import distributions
from tests.learning.group_helpers import (
    LENGTH,
    MEMORY,
    decisions_of,
    estimated,
    learning,
    timesteps_of,
)
from tests.learning.random_groups import OWN, World, specs_of
from tests.learning.recurrent_groups import ALL, Walk, batch_for, compare, played

# ---------------------------------------------------------------- estimates


@ALL
@pytest.mark.parametrize("at_once", [1, 1024])
def test_values_and_memories_equal_those_of_the_twin_over_several_batches(variant, at_once, monkeypatch):
    """A batch continues from the memories of the batch before, and memories of ended groups are dropped."""
    monkeypatch.setattr(group_networks, "_TIMESTEPS_AT_ONCE", at_once)
    poca, groups = played(variant)
    poca.networks.critic.largest.clamp_(min=4)
    walk, half, memories = Walk(poca), len(groups) // 2, (poca.networks._groups, poca.networks._members)
    assert {one.number for one in groups[:half]} & {one.number for one in groups[half:]}
    for part in (groups[:half], groups[half:]):
        compare(poca, part, walk)
        open_groups, members = ({one % 2**40 for one in found._by_episode} for found in memories)
        assert open_groups == set(walk.groups)
        assert set(walk.members) <= members
        assert not members & {one.episode for group in part for one in group.of(OWN) if one.ended}


@given(seed=st.integers(0, 999), parts=st.integers(1, 4), horizon=st.integers(1, 9))
@settings(max_examples=5, deadline=None)
def test_any_division_into_batches_gives_the_values_of_the_twin(seed, parts, horizon):
    poca, groups = played({"teammates": 1}, seed, count=3, horizon=horizon)
    poca.networks.critic.largest.clamp_(min=4)
    walk = Walk(poca)
    for part in np.array_split(np.arange(len(groups)), parts):
        if part.size:
            compare(poca, [groups[at] for at in part], walk)


def test_memories_of_ended_groups_and_members_are_dropped():
    """Another group with the same numbers is evaluated as by a new learner."""
    world = World(specs_of())
    first, other = (world.group(times=6, most=2, over=True) for _ in range(2))
    fresh = learning(specs_of(), memory=True)
    fresh.networks.critic.largest.clamp_(min=2)
    expected = estimated(fresh, batch_for(fresh, without_memory(other)))[1]
    poca = learning(specs_of(), memory=True)
    poca.networks.critic.largest.clamp_(min=2)
    estimated(poca, batch_for(poca, without_memory(first)))
    assert (len(poca.networks._groups), len(poca.networks._members)) == (0, 0)
    agent_episodes = dict(
        zip([one.episode for one in other[0].members], [one.episode for one in first[0].members], strict=False)
    )
    for group in other:
        group.number = first[0].number
        for one in group.members:
            one.episode = agent_episodes.get(one.episode, one.episode)
    found = estimated(poca, batch_for(poca, other))[1]
    np.testing.assert_array_equal(found.values, expected.values)
    np.testing.assert_array_equal(found.baselines, expected.baselines)


def without_memory(groups):
    """Sets the carried memories of decisions to zero; returns the groups."""
    for _, _, step in decisions_of(groups):
        step.carried = np.zeros(MEMORY, np.float32)
    return groups


def test_memory_of_a_group_continues_in_the_next_batch():
    """The second batch has other values without the first."""
    poca, groups = played({})
    first, second = groups[: len(groups) // 2], groups[len(groups) // 2 :]
    continued = {one.number for one in first} & {one.number for one in second}
    fresh = estimated(learning(specs_of(), memory=True), batch_for(poca, second))[1]
    estimated(poca, batch_for(poca, first))
    poca.networks.critic.largest.fill_(1)
    found = estimated(poca, batch_for(poca, second))[1]
    for (group, time), one, other in zip(timesteps_of(second), found.values, fresh.values, strict=True):
        if group.number not in continued or not group.there(time):
            assert one == other
        elif time == 0:
            assert one != other


# ---------------------------------------------------------------- replay


@ALL
def test_replay_from_stored_memories_gives_the_same_values_and_log_probabilities(variant):
    """Before the first step the actor replays sequences, and the critic complete windows of group time."""
    poca, groups = played(variant, batch_size=7)
    half = len(groups) // 2
    estimated(poca, batch_for(poca, groups[:half]))
    poca.networks.critic.largest.clamp_(min=4)
    batch, actions, later = batch_for(poca, groups[half:]), poca.actor.actions, groups[half:]
    targets, timesteps, rows_seen = poca._targets(batch, 0.2), timesteps_of(later), set()
    for rows, recurrent_state, _, _, windows in poca._minibatches(targets):
        part = poca.networks.inputs(targets.prepared, windows, targets.estimates)
        with torch.no_grad():
            values, baselines, _ = poca.networks.critic.remember(part.members, part.state)
            head = poca.actor(rows.inputs, recurrent_state.layout, recurrent_state.actor)
            evaluated = distributions.evaluate(
                actions, head, poca.actor.log_sigma, rows.continuous, rows.discrete, rows.masks
            )
        torch.testing.assert_close(values, targets.of_timesteps[1][part.timesteps], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(baselines, targets.rows.values[part.rows], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(evaluated.log_prob, rows.log_prob, rtol=1e-4, atol=1e-4)
        rows_seen |= set(part.rows.tolist())
        timesteps_shown = [timesteps[at] for at in part.timesteps.tolist()]
        for group, time in timesteps_shown:
            start = time - time % LENGTH
            assert all((group, at) in timesteps_shown for at in range(start, min(start + LENGTH, group.span)))
    assert rows_seen == set(range(batch.steps))
