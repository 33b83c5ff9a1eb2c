"""Updates of recurrent networks compared with the loss of the paper, row by row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Normal
from torch.nn.functional import linear, silu

from sparring.pipeline.assembly import sequences
from sparring.pipeline.learning import losses
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.networks.device import to_arrays
from tests.learning.learning_helpers import segments
from tests.learning.recurrent_helpers import (
    ALL,
    FIRST,
    LENGTH,
    MEMORY,
    SECOND,
    VARIANTS,
    Walk,
    estimated,
    learning,
    played,
)

# ---------------------------------------------------------------- updates


@ALL
def test_update_changes_every_weight_of_both_memories(variant):
    ppo = learning(**variant)
    batch, before = played(ppo, FIRST), to_arrays(ppo.networks.modules)
    report = ppo.update(batch, 2, 0)
    count = int(sequences.counts(batch.lengths, LENGTH).sum())
    assert (report.steps, report.skipped, report.lags) == (28, 0, (0, 0, 28))
    assert report.minibatches == 3 * (count // 3), "three epochs; three sequences of three steps are nine"
    after = to_arrays(ppo.networks.modules)
    same = [name for name in before if np.array_equal(before[name], after[name])]
    assert not same, "every parameter has a gradient, every statistic new rows"
    assert all(np.isfinite(array).all() for array in after.values())
    assert all(map(math.isfinite, report.statistics.values()))
    lstms = [name for name in before if ".lstm.weight" in name]
    assert len(lstms) == (2 if variant.get("shared") else 4)


@pytest.mark.parametrize("variant", [*VARIANTS.values(), {"previous": True, "memory": False}])
def test_ratio_of_an_update_is_1_at_first(variant, monkeypatch):
    """Log-probabilities of sequences from stored memories equal those of acting step by step."""
    ppo, standing, ratios, real = learning(**variant), {}, [], losses.surrogate
    played(ppo, [(1, 4, False), (2, 5, False)], standing)
    batch = played(ppo, FIRST[2:], standing, seed=1)

    def surrogate(log_prob, old, *others):
        ratios.append((log_prob - old).numpy().copy())
        return real(log_prob, old, *others)

    monkeypatch.setattr(losses, "surrogate", surrogate)
    assert ppo.update(batch, 0, 0).skipped == 0
    np.testing.assert_allclose(ratios[0], 0, atol=1e-5)
    assert max(abs(later).max() for later in ratios[1:]) > 1e-4, "and then it moves"


def test_network_with_previous_action_only_trains_on_single_rows():
    ppo = learning(previous=True, memory=False)
    batch, before = played(ppo, FIRST), to_arrays(ppo.networks.modules)
    assert batch.sequence_length == 1
    assert estimated(ppo, batch).recurrence is None
    report = ppo.update(batch, 0, 0)
    assert (report.steps, report.skipped, report.minibatches) == (28, 0, 9)
    after = to_arrays(ppo.networks.modules)
    assert not [name for name in before if np.array_equal(before[name], after[name])]


@pytest.mark.parametrize("shared", [False, True])
def test_same_batches_give_the_same_weights_bit_for_bit(shared):
    arrays = []
    for _ in range(2):
        ppo, standing = learning(shared=shared, previous=True), {}
        for seed, parts in enumerate((FIRST, SECOND)):
            ppo.update(played(ppo, parts, standing, seed), 0, 0)
        arrays.append(to_arrays(ppo.networks.modules))
    for name, array in arrays[0].items():
        np.testing.assert_array_equal(arrays[1][name], array)


# ---------------------------------------------------------------- the paper's loss


def unrolled(body, rows, lengths, memories):
    """Returns the outputs of a recurrent body, row by row, with torch's own layers and autograd."""
    cell, outputs, row = body.lstm, [], 0
    for length, memory in zip(lengths.tolist(), memories, strict=True):
        hidden, state = memory[: MEMORY // 2], memory[MEMORY // 2 :]
        for _ in range(length):
            seen = rows[row]
            for layer in body.trunk.layers:
                seen = silu(linear(seen, layer.weight, layer.bias))
            sums = linear(seen, cell.weight_ih_l0, cell.bias_ih_l0) + linear(hidden, cell.weight_hh_l0, cell.bias_hh_l0)
            i, f, g, o = sums.chunk(4)
            state = f.sigmoid() * state + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * state.tanh()
            outputs.append(linear(hidden, body.head.weight, body.head.bias))
            row += 1
    return torch.stack(outputs)


def plain_loss(ppo, batch, prepared, walked, epsilon, beta):
    """Returns the loss of a single minibatch as in the paper, of sequences from stored memories."""
    values, following, starts = walked
    advantages, row = [], 0
    for length, bootstrap, terminated in zip(batch.lengths, following[:, 0], batch.terminated, strict=True):
        running, later, part = 0.0, 0.0 if terminated else float(bootstrap), []
        for at in reversed(range(row, row + length)):
            running = batch.rewards[at] + 0.99 * later - values[at, 0] + 0.99 * 0.95 * running
            later = values[at, 0]
            part.append(running)
        advantages += part[::-1]
        row += length
    advantages = np.array(advantages)
    target = torch.tensor(advantages + values[:, 0], dtype=torch.float32)
    advantage = torch.tensor((advantages - advantages.mean()) / advantages.std(), dtype=torch.float32)
    _, lengths = sequences.divide(batch.lengths, LENGTH)
    actor, critic = ppo.actor, ppo.networks.critic
    outputs = unrolled(actor.body, prepared.inputs[0], lengths, torch.from_numpy(batch.carried[:, :MEMORY]))
    if critic is None:
        value = outputs[:, -1]
    else:
        value = unrolled(critic.body, prepared.inputs[0], lengths, torch.from_numpy(starts))[:, 0]
    normal = Normal(outputs[:, :1], actor.log_sigma.exp())
    logits = outputs[:, 1:6] + torch.from_numpy(batch.masks) * -1e8
    log_prob, entropy = normal.log_prob(torch.from_numpy(batch.continuous)).sum(1), normal.entropy().mean(1)
    for number, part in enumerate(logits.split([2, 3], dim=1)):
        branch = Categorical(logits=part)
        log_prob = log_prob + branch.log_prob(torch.from_numpy(batch.discrete[:, number]))
        entropy = entropy + branch.entropy()
    ratio = (log_prob - torch.from_numpy(batch.log_probs)).exp()
    policy = -torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage).mean()
    return policy + 0.5 * (value - target).square().mean() - beta * 3 * entropy.mean()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("previous", [False, True])
def test_update_follows_the_gradient_of_the_paper_within_each_sequence(shared, previous):
    """One minibatch has all sequences, and no gradient flows beyond the start of a sequence."""
    ppo, standing = learning(shared=shared, previous=previous, batch_size=64, num_epoch=1), {}
    walk = Walk(ppo)
    walk(batch := played(ppo, FIRST, standing))
    estimated(ppo, batch)
    batch = played(ppo, SECOND, standing, seed=1)
    loss = plain_loss(ppo, batch, ppo.networks.prepare(batch), walk(batch), epsilon=0.2, beta=5e-3)
    ppo.optimizer.gradient.zero_()
    loss.backward()
    expected = ppo.optimizer.gradient.clone()
    assert ppo.update(batch, 0, 0).minibatches == 1
    torch.testing.assert_close(ppo.optimizer.gradient, expected, rtol=1e-3, atol=1e-5)
    assert expected.abs().max() > 0.01


# ---------------------------------------------------------------- the learner


def test_learner_takes_complete_sequences_and_predicts_their_steps():
    ppo = learning(buffer_size=32, batch_size=8)
    one = Learner("Test", ppo.actor.spec, ppo.settings, 0)
    lengths = [10, 10, 14]
    carried = np.zeros((int(sequences.counts(np.array(lengths), LENGTH).sum()), MEMORY), np.float32)
    one.add(segments(lengths, spec=ppo.actor.spec, carried=carried))
    assert one.ready
    assert (one.size_of_update(), one.size_of_update(everything=True)) == (32, 34)
    one.add(segments([1, 1], spec=ppo.actor.spec, carried=carried[:2]))
    assert one.update().steps == 32
    assert (one.buffered, one.size_of_update(), one.size_of_update(everything=True)) == (4, 4, 4)
    assert one.update(everything=True).steps == 4
    one.add(segments([34], spec=ppo.actor.spec, carried=carried[:12]))
    assert (one.size_of_update(), one.update().steps, one.buffered) == (30, 30, 4)


@pytest.mark.parametrize("shared", [False, True])
def test_resumed_learner_continues_bit_for_bit_with_new_agent_episodes(shared):
    ppo = learning(buffer_size=12, batch_size=8, shared=shared)

    def updated(one, episode):
        carried = np.zeros((4, MEMORY), np.float32)
        one.add(segments([12], seed=episode, spec=ppo.actor.spec, carried=carried, agents=np.array([episode])))
        return one.update()

    through, resumed = (Learner("Test", ppo.actor.spec, ppo.settings, seed) for seed in (3, 99))
    updated(through, 1)
    resumed.restore(through.checkpoint())
    for episode in (2, 3):
        assert updated(through, episode) == updated(resumed, episode)
    assert resumed.weights_sha256 == through.weights_sha256
