"""Updates of recurrent MA-POCA compared with the loss step by step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import silu

from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.settings import Coefficients
from sparring.pipeline.networks.device import to_arrays
from tests.learning.group_helpers import (
    LENGTH,
    MEMORY,
    estimated,
    log_prob_and_entropy,
    prepared_row,
    record,
    surrogate_of,
    targets_by_hand,
    timesteps_of,
)
from tests.learning.random_groups import OWN, PLAIN, TEAMMATES, Decision, Group, Member
from tests.learning.recurrent_groups import ALL, Walk, batch_for, compare, deciding, encodings, evaluate_row, played

# ---------------------------------------------------------------- updates


def acted(actor, row, memory):
    """Returns means and logits of one row, and the memory of the actor after it."""
    body = actor.body
    state = torch.lstm_cell(silu(body.trunk(actor.encoder(row))), memory.split(MEMORY // 2, 1), *body.lstm.parameters())
    return body.head(state[0])[0], torch.cat(state, 1)


def policy_part(poca, sequences, advantage_of, epsilon):
    """Returns clipped surrogate and entropy of some sequences, step by step from their carried memories."""
    ratios, advantages, entropies = [], [], []
    for one, steps in sequences:
        memory = torch.from_numpy(steps[0].carried[None, :MEMORY])
        for step in steps:
            head, memory = acted(poca.actor, prepared_row(poca, one, step), memory)
            log_prob, entropy = log_prob_and_entropy(poca.actor, head, step)
            ratios.append((log_prob - step.log_prob).exp())
            advantages.append(advantage_of[step])
            entropies.append(entropy)
    return surrogate_of(ratios, advantages, epsilon), torch.stack(entropies).mean()


def critic_part(poca, windows, walked, returns):
    """Returns value and baseline loss of some windows (group, first time), step by step from their memories."""
    critic, (_, _, at_windows, at_sequences) = poca.networks.critic, walked
    values, baselines = [], []
    for group, start in windows:
        memory, of_members = at_windows[group, start], {}
        for time in range(start, min(start + LENGTH, group.span)):
            encoded, each, count = encodings(poca, group, time)
            value, memory = evaluate_row(critic, critic.value, encoded, count, memory)
            values.append((value - returns[group, time]) ** 2)
            for one, step in deciding(each, time):
                before = of_members.get(one, at_sequences.get(step))
                value, of_members[one] = evaluate_row(critic, critic.baseline, each[one], count, before)
                baselines.append((value - returns[group, time]) ** 2)
    return torch.stack(values).mean(), torch.stack(baselines).mean() if baselines else torch.zeros(())


def sequences_of(groups):
    """Returns the steps of each member in each window, by their first log-probability."""
    found = {}
    for group in groups:
        for one in group.of(OWN):
            windows = {}
            for step in one.steps:
                windows.setdefault(step.time // LENGTH, []).append(step)
            found |= {np.float32(steps[0].log_prob).item(): (one, steps) for steps in windows.values()}
    return found


@ALL
def test_every_step_follows_the_gradient_within_each_window(variant):
    """Memories of the second batch come from the first, and no gradient flows beyond the start of a window."""
    poca, groups = played(variant, learning_rate=0.02, batch_size=9, num_epoch=2)
    poca.networks.critic.largest.clamp_(min=4)
    walk, half = Walk(poca), len(groups) // 2
    compare(poca, groups[:half], walk)
    groups = groups[half:]
    walked, named, timesteps = walk(groups), sequences_of(groups), timesteps_of(groups)
    returns, of_step = targets_by_hand(groups, walked[0], walked[1])
    coefficients, parts = Coefficients.at(poca.hyper, 0), poca.actor.actions.continuous + 2
    real, gradient, counts = poca._step, poca.optimizer.gradient, []

    @torch.enable_grad()
    def compared(targets, part, *others):
        gradient.zero_()
        rows, inputs = part.rows, poca.networks.inputs(targets.prepared, part.windows, targets.estimates)
        log_probs = rows.log_prob.tolist()
        sequences = [named[one] for one in log_probs if one in named]
        assert sum(len(steps) for _, steps in sequences) == len(log_probs)
        windows = [one for one in (timesteps[at] for at in inputs.timesteps.tolist()) if one[1] % LENGTH == 0]
        surrogate, entropy = policy_part(poca, sequences, of_step, coefficients.epsilon)
        value, baseline = critic_part(poca, windows, walked, returns)
        (-surrogate + 0.5 * (value + 0.5 * baseline) - coefficients.beta * parts * entropy).backward()
        expected = gradient.clone()
        out = torch.no_grad()(real)(targets, part, *others)
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=2e-5)
        assert expected.abs().max() > 0.01
        counts.append(len(sequences))
        return out

    poca._step = compared
    report = poca.update(batch_for(poca, groups), 0, 0)
    assert report.minibatches == len(counts) >= 4
    assert set(counts) == {9 // LENGTH}
    assert report.skipped == 0


@ALL
def test_update_changes_every_weight_of_both_memories(variant):
    poca, groups = played(variant, count=9)
    before = to_arrays(poca.networks.modules)
    assert poca.update(batch_for(poca, groups), 1, 0).skipped == 0
    after = to_arrays(poca.networks.modules)
    assert not [name for name, array in before.items() if np.array_equal(array, after[name])]
    assert all(np.isfinite(array).all() for array in after.values())


def test_second_update_depends_on_memories_of_the_first():
    """The same batches give the same weights; without the memories of the first batch the weights differ."""
    hashes = []
    for forgets in (False, False, True):
        poca, groups = played({"teammates": 2})
        one = Learner(OWN, PLAIN, poca.settings, 5)
        one.register(TEAMMATES)
        for part in (groups[: len(groups) // 2], groups[len(groups) // 2 :]):
            one.add(record(part, poca.networks.specs, length=LENGTH))
            one.update(everything=True)
            if forgets:
                fresh = Learner(OWN, PLAIN, poca.settings, 6)
                fresh.restore(one.checkpoint())
                one = fresh
        hashes.append(one.weights_sha256)
    assert hashes[0] == hashes[1] != hashes[2]


def test_resumed_learner_continues_bit_for_bit_with_new_groups():
    poca, groups = played({"teammates": 2}, count=6)
    agent_episodes = sorted({group.number for group in groups})
    through, resumed = (Learner(OWN, PLAIN, poca.settings, seed) for seed in (3, 99))

    def updated(one, numbers):
        part = [group for group in groups if group.number in numbers]
        one.add(record(part, poca.networks.specs, length=LENGTH))
        return one.update(everything=True)

    through.register(TEAMMATES)
    updated(through, agent_episodes[:2])
    resumed.restore(through.checkpoint())
    for numbers in (agent_episodes[2:4], agent_episodes[4:]):
        assert updated(through, numbers) == updated(resumed, numbers)
    assert resumed.weights_sha256 == through.weights_sha256


# ---------------------------------------------------------------- timesteps without members


def interrupted_presence(waits):
    """Returns a group with a member that ends at 3 and another that is known only from `waits` on."""

    def decision(time):
        seen = tuple(np.full((1, *one.shape), time, np.float32) for one in PLAIN.observations)
        carried, mask = np.zeros(MEMORY, np.float32), np.zeros(5, bool)
        return Decision(time, seen, np.ones(2, np.float32), np.zeros(2, np.int32), -3.0, mask, carried)

    first = Member(OWN, 1, [decision(0), decision(1), decision(2)], decision(3), 3, terminated=True)
    second = Member(OWN, 2, [], decision(waits), waits + 1)
    return Group(1, waits, False, np.ones(waits, np.float32), [first, second])


@pytest.mark.parametrize("waits", [4, 5])
@pytest.mark.parametrize("others", [0, 2])
def test_window_without_members_has_value_0_and_does_not_stop_an_update(waits, others):
    """All known members may end before a member that has joined makes its first decision."""
    poca, groups = played({}, count=others) if others else played({})
    groups = [replace(interrupted_presence(waits), number=99), *(groups if others else [])]
    batch = batch_for(poca, groups)
    found = estimated(poca, batch)[1]
    assert not found.values[3:waits].any()
    assert found.values[[0, 1, 2, waits]].all()
    report = poca.update(batch, 0, 0)
    assert (report.skipped, np.isfinite(list(report.statistics.values())).all()) == (0, True)
