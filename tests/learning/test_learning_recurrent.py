"""Values and memories of recurrent networks compared with a slow evaluation of each agent episode."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.assembly import sequences
from sparring.pipeline.learning import minibatches
from sparring.pipeline.learning.buffer import Batch
from sparring.pipeline.learning.minibatches import Minibatch, Recurrence, recurrent_minibatches
from sparring.pipeline.learning.ranks import Ranks
from sparring.pipeline.networks.layers import Layout
from tests.learning.recurrent_helpers import ALL, FIRST, SECOND, Walk, estimated, learning, played


def compare(found, walked):
    values, following, starts = walked
    np.testing.assert_allclose(found.values, values, atol=1e-5)
    np.testing.assert_allclose(found.next_values, following, atol=1e-5)
    if found.recurrence.critic is not None:
        np.testing.assert_allclose(found.recurrence.critic, starts, atol=1e-5)
    else:
        np.testing.assert_array_equal(found.recurrence.actor, starts)


@ALL
@pytest.mark.parametrize("rows_at_once", [4, 1024])
def test_values_equal_those_computed_episode_by_episode(variant, rows_at_once, monkeypatch):
    """A batch has several segments of an agent episode; memories are kept until the episode ends."""
    monkeypatch.setattr(minibatches, "_ROWS_AT_ONCE", rows_at_once)
    ppo, standing = learning(**variant), {}
    walk = Walk(ppo)
    for seed, parts in enumerate((FIRST, SECOND)):
        batch = played(ppo, parts, standing, seed)
        compare(estimated(ppo, batch), walk(batch))
    memories = ppo.networks._memories
    assert len(memories) == (0 if variant.get("shared") else 2), (
        "of episodes 3 and 5, which are open; those of shared networks are stored in batches"
    )
    fresh = played(ppo, [(2, 2, False)], seed=9)
    walk.memories.clear()
    compare(estimated(ppo, fresh), walk(fresh))


@given(
    rounds=st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8), st.booleans()), min_size=1, max_size=5),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=12, deadline=None)
def test_any_order_of_segments_gives_the_same_values(rounds):
    """After its end the number of an agent episode may be used again."""
    ppo, standing, agent_episodes = learning(), {}, {}
    walk = Walk(ppo)
    for seed, parts in enumerate(rounds):
        named = []
        for agent, rows, ended in parts:
            named.append((agent + 10 * agent_episodes.get(agent, 0), rows, ended))
            agent_episodes[agent] = agent_episodes.get(agent, 0) + ended
        batch = played(ppo, named, standing, seed)
        compare(estimated(ppo, batch), walk(batch))


def chosen(batch, which):
    """Returns some segments of a batch, in the given order."""
    starts = np.cumsum(batch.lengths) - batch.lengths
    rows = np.concatenate([np.arange(starts[one], starts[one] + batch.lengths[one]) for one in which])
    counts = sequences.counts(batch.lengths, batch.sequence_length)
    firsts = np.cumsum(counts) - counts
    of_q = np.concatenate([np.arange(firsts[one], firsts[one] + counts[one]) for one in which])
    per_row = ("continuous", "discrete", "log_probs", "masks", "rewards", "group_rewards", "versions")
    per_segment = ("lengths", "terminated", "ended", "agent_episodes")
    picked = Batch(
        **{name: getattr(batch, name)[rows] for name in per_row},
        **{name: getattr(batch, name)[list(which)] for name in per_segment},
        observations=tuple(column[rows] for column in batch.observations),
        next_observations=tuple(column[list(which)] for column in batch.next_observations),
        sequence_length=batch.sequence_length,
        carried=batch.carried[of_q],
    )
    return picked, rows, of_q


@ALL
@given(order=st.permutations(range(len(FIRST))), size=st.integers(1, len(FIRST)))
@settings(max_examples=5, deadline=None)
def test_segments_of_other_agents_do_not_affect_values(variant, order, size):
    """Only the order of segments within an agent episode matters."""
    agent_episodes = np.array([episode for episode, _, _ in FIRST])
    among = set(agent_episodes[list(order[:size])].tolist())
    places = {episode: iter(np.flatnonzero(agent_episodes == episode).tolist()) for episode in among}
    which = [next(places[episode]) for episode in agent_episodes[list(order)].tolist() if episode in among]
    batch = played(learning(**variant), FIRST)
    complete = estimated(learning(**variant), batch)
    picked, rows, of_q = chosen(batch, which)
    got = estimated(learning(**variant), picked)
    np.testing.assert_allclose(got.values, complete.values[rows], atol=1e-5)
    np.testing.assert_allclose(got.next_values, complete.next_values[which], atol=1e-5)
    np.testing.assert_array_equal(got.recurrence.actor, complete.recurrence.actor[of_q])
    if complete.recurrence.critic is not None:
        np.testing.assert_allclose(got.recurrence.critic, complete.recurrence.critic[of_q], atol=1e-5)


# ---------------------------------------------------------------- minibatches


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    length=st.integers(1, 4),
    size=st.integers(-1, 9),
    seed=st.integers(0, 999),
    shared=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_minibatches_have_complete_sequences_and_none_twice(lengths, length, size, seed, shared):
    first, counts = sequences.divide(np.array(lengths, np.int32), length)
    steps, count = sum(lengths), len(first)
    number = torch.arange(steps, dtype=torch.float32)
    wide, deep = number.unsqueeze(1), number.repeat_interleave(12).reshape(steps, 3, 2, 2)
    rows = Minibatch((wide, deep), wide, wide.long(), None, number, number, number, wide, wide)
    starts = np.stack([first, first + 0.5], 1).astype(np.float32)
    recurrence = Recurrence(first=first, lengths=counts, actor=starts, critic=None if shared else -starts)
    sequences_seen = []
    parts = list(recurrent_minibatches(rows, recurrence, size, torch.Generator().manual_seed(seed), Ranks()))
    size = min(max(1, size), count)
    assert len(parts) == count // size
    for part, recalled, at, weight, _ in parts:
        assert weight == 1.0
        assert at.tolist() == part.log_prob.tolist()
        assert part.masks is None
        for column in (*part.inputs, *(column for column in part[1:] if column is not None)):
            assert torch.equal(column.reshape(len(part.log_prob), -1)[:, -1].float(), part.log_prob)
        begins = recalled.actor[:, 0].long().tolist()
        order = [begins.index(begin) for begin in begins]
        which = [first.tolist().index(begin) for begin in begins]
        expected = [int(first[one]) + at for one in which for at in range(counts[one])]
        assert len(which) == len(set(order)) == size
        assert part.log_prob.tolist() == expected
        assert recalled.layout.order.tolist() == Layout(counts[which]).order.tolist()
        assert recalled.actor.tolist() == starts[which].tolist()
        assert recalled.critic is None if shared else recalled.critic.tolist() == (-starts[which]).tolist()
        sequences_seen += which
    assert len(set(sequences_seen)) == len(sequences_seen) == count // size * size
