"""MA-POCA that remembers: a memory for each group and one for each member, against a walk moment by moment."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu

from sparring.pipeline.learning import group_networks
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.schedules import Coefficients
from sparring.pipeline.networks import distributions
from sparring.pipeline.networks.weights import to_arrays
from tests.learning.group_helpers import (
    LENGTH,
    MEMORY,
    batch_of,
    decisions_of,
    estimated,
    learning,
    log_prob_and_entropy,
    moments_of,
    prepared_row,
    record,
    surrogate_of,
    targets_by_hand,
    timestep,
)
from tests.learning.group_lives import OWN, PLAIN, TEAMMATES, Decision, Group, Member, World, specs_of

VARIANTS = {"plain": {}, "teammates": {"teammates": 2}, "previous": {"teammates": 1, "previous": True}}
ALL = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def played(variant, seed=0, count=4, horizon=5, **hyper):
    """A learner, and segments of groups that its actor played, several of most groups."""
    how = dict(variant)
    specs = specs_of(PLAIN, how.pop("teammates", 0))
    poca = learning(specs, memory=True, **how, **hyper)
    return poca, World(specs, poca.actor, seed).groups(count, times=14, horizon=horizon)


def told(poca, groups):
    return batch_of(groups, poca.networks.specs, length=LENGTH)


# ---------------------------------------------------------------- the twin


def criticised(critic, head, encoded, count, memory):
    """A value and the memory after it, of one row."""
    state = torch.lstm_cell(silu(critic.trunk(encoded)), memory.split(MEMORY // 2, 1), *critic.memory.parameters())
    scaled = torch.tensor([[2 * count / critic.largest.item() - 1]])
    return head(torch.cat([state[0], scaled], 1))[0, 0], torch.cat(state, 1)


def encodings(poca, group, time):
    """Of the group, of each of ours that is there, and how many are there."""
    shown, ours = timestep(poca, group, time)
    encoded, counts = poca.networks.critic.encode(shown)
    return encoded[:1], {one: encoded[at : at + 1] for at, one in enumerate(ours, 1)}, counts[0].item()


def deciding(members, time):
    """Who decides at a time, and the decision."""
    return [(one, step) for one in members for step in one.steps if step.time == time]


class Walk:
    """Through the groups' lives, from one batch to the next.

    Attributes:
        groups: what is remembered of each group that goes on.
        members: likewise of each of our members.
    """

    def __init__(self, poca):
        self.poca, self.groups, self.members = poca, {}, {}

    @torch.no_grad()
    def __call__(self, groups):
        """Values by (group, time), baselines by decision; memories at each window's and each sequence's start."""
        critic, nothing = self.poca.networks.critic, torch.zeros(1, MEMORY)
        values, baselines, at_windows, at_sequences = {}, {}, {}, {}
        for group in groups:
            memory = self.groups.get(group.number, nothing)
            windows = dict.fromkeys(group.of(OWN), -1)
            for time in range(group.span + 1):
                values[group, time] = 0.0
                if not group.there(time):
                    continue
                encoded, each, count = encodings(self.poca, group, time)
                value, after = criticised(critic, critic.value, encoded, count, memory)
                values[group, time] = value.item()
                if time == group.span:
                    continue  # the next segment begins with it
                if time % LENGTH == 0:
                    at_windows[group, time] = memory
                memory = after
                for one, step in deciding(each, time):
                    before = self.members.get(one.life, nothing)
                    if windows[one] != time // LENGTH:
                        windows[one], at_sequences[step] = time // LENGTH, before
                    value, self.members[one.life] = criticised(critic, critic.baseline, each[one], count, before)
                    baselines[step] = value.item()
            self._end(group, memory)
        return values, baselines, at_windows, at_sequences

    def _end(self, group, memory):
        self.groups[group.number] = memory
        if group.over:
            del self.groups[group.number]
        for one in group.of(OWN):
            if one.ended:
                self.members.pop(one.life, None)


def compare(poca, groups, walk):
    prepared, found = estimated(poca, told(poca, groups))
    values, baselines, at_windows, at_sequences = walk(groups)
    np.testing.assert_allclose(found.values[:, 0], list(values.values()), atol=1e-5)
    expected = [baselines[step] for _, _, step in decisions_of(groups)]
    np.testing.assert_allclose(found.baselines[:, 0], expected, atol=1e-5)
    starts = [(group, time) for group in groups for time in range(0, group.span, LENGTH)]
    np.testing.assert_allclose(found.groups, torch.cat([at_windows[one] for one in starts]), atol=1e-5)
    decided = [step for _, _, step in decisions_of(groups)]
    first = [decided[row] for row in prepared.windows.first_q]
    np.testing.assert_allclose(found.members, torch.cat([at_sequences[step] for step in first]), atol=1e-5)


# ---------------------------------------------------------------- estimates


@ALL
@pytest.mark.parametrize("at_once", [1, 1024])
def test_values_and_memories_are_those_of_a_walk_from_one_batch_to_the_next(variant, at_once, monkeypatch):
    """Several segments of a group in a batch; what a batch left is where the next goes on; nothing of what ended."""
    monkeypatch.setattr(group_networks, "_TIMESTEPS_AT_ONCE", at_once)
    poca, groups = played(variant)
    poca.networks.critic.see(4)
    walk, half, memories = Walk(poca), len(groups) // 2, (poca.networks._groups, poca.networks._members)
    assert {one.number for one in groups[:half]} & {one.number for one in groups[half:]}
    for part in (groups[:half], groups[half:]):
        compare(poca, part, walk)
        kept, members = ({one % 2**40 for one in found._agent_episodes.tolist()} for found in memories)
        assert kept == set(walk.groups)
        assert set(walk.members) <= members
        assert not members & {one.life for group in part for one in group.of(OWN) if one.ended}


@given(seed=st.integers(0, 999), parts=st.integers(1, 4), horizon=st.integers(1, 9))
@settings(max_examples=10, deadline=None)
def test_any_division_into_batches_is_walked_alike(seed, parts, horizon):
    poca, groups = played({"teammates": 1}, seed, count=3, horizon=horizon)
    poca.networks.critic.see(4)
    walk = Walk(poca)
    for part in np.array_split(np.arange(len(groups)), parts):
        if part.size:
            compare(poca, [groups[at] for at in part], walk)


def test_a_group_and_a_member_that_ended_are_forgotten():
    """The same numbers, for another group of other members, are as of a fresh learner."""
    world = World(specs_of())
    first, other = (world.group(times=6, most=2, over=True) for _ in range(2))
    fresh = learning(specs_of(), memory=True)
    fresh.networks.critic.see(2)
    expected = estimated(fresh, told(fresh, _carrying(other)))[1]
    poca = learning(specs_of(), memory=True)
    poca.networks.critic.see(2)
    estimated(poca, told(poca, _carrying(first)))
    assert (len(poca.networks._groups), len(poca.networks._members)) == (0, 0)
    agent_episodes = dict(
        zip([one.life for one in other[0].members], [one.life for one in first[0].members], strict=False)
    )
    for group in other:
        group.number = first[0].number
        for one in group.members:
            one.life = agent_episodes.get(one.life, one.life)
    found = estimated(poca, told(poca, other))[1]
    np.testing.assert_array_equal(found.values, expected.values)
    np.testing.assert_array_equal(found.baselines, expected.baselines)


def _carrying(groups):
    """Members that remember nothing."""
    for _, _, step in decisions_of(groups):
        step.carried = np.zeros(MEMORY, np.float32)
    return groups


def test_a_groups_memory_reaches_from_one_batch_to_the_next():
    """Without the first batch the second would be judged otherwise."""
    poca, groups = played({})
    first, second = groups[: len(groups) // 2], groups[len(groups) // 2 :]
    went_on = {one.number for one in first} & {one.number for one in second}
    fresh = estimated(learning(specs_of(), memory=True), told(poca, second))[1]
    estimated(poca, told(poca, first))
    poca.networks.critic.largest.fill_(1)
    found = estimated(poca, told(poca, second))[1]
    for (group, time), one, other in zip(moments_of(second), found.values, fresh.values, strict=True):
        if group.number not in went_on or not group.there(time):
            assert one == other
        elif time == 0:
            assert one != other


# ---------------------------------------------------------------- replay


@ALL
def test_a_replay_from_stored_memories_gives_the_same_values_and_the_actors_stored_log_probs(variant):
    """Before the first step: sequences for the actor, whole windows of group time for the critic."""
    poca, groups = played(variant, batch_size=7)
    half = len(groups) // 2
    estimated(poca, told(poca, groups[:half]))
    poca.networks.critic.see(4)
    batch, actions, later = told(poca, groups[half:]), poca.actor.actions, groups[half:]
    prepared, found = estimated(poca, batch)
    targets, timesteps, judged = poca._targets(batch, prepared, found, 0.2), moments_of(later), set()
    recurrence = poca._recurrence(batch, prepared)
    for (rows, recalled, _), part in poca._minibatches(prepared, found, targets, recurrence):
        with torch.no_grad():
            values, baselines, _ = poca.networks.critic.remember(part.shown, part.remembered)
            head = poca.actor(rows.inputs, recalled.layout, recalled.actor)
            said = distributions.evaluate(
                actions, head, poca.actor.log_sigma, rows.continuous, rows.discrete, rows.masks
            )
        torch.testing.assert_close(values, targets.values[part.timesteps], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(baselines, targets.rows.values[part.rows], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(said.log_prob, rows.log_prob, rtol=1e-4, atol=1e-4)
        judged |= set(part.rows.tolist())
        shown = [timesteps[at] for at in part.timesteps.tolist()]
        for group, time in shown:
            start = time - time % LENGTH
            assert all((group, at) in shown for at in range(start, min(start + LENGTH, group.span)))
    assert judged == set(range(batch.steps))


# ---------------------------------------------------------------- updates


def acted(actor, row, memory):
    """Means and logits of one row, and the actor's memory after it."""
    body = actor.body
    state = torch.lstm_cell(silu(body.trunk(actor.encoder(row))), memory.split(MEMORY // 2, 1), *body.lstm.parameters())
    return body.head(state[0])[0], torch.cat(state, 1)


def policy_part(poca, sequences, advantage_of, epsilon):
    """Clipped surrogate and entropy of some sequences, from what was carried to their first steps, step by step."""
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
    """Value and baseline loss of some windows (group, first time), from the memories at their starts, step by step."""
    critic, (_, _, at_windows, at_sequences) = poca.networks.critic, walked
    values, baselines = [], []
    for group, start in windows:
        memory, of_members = at_windows[group, start], {}
        for time in range(start, min(start + LENGTH, group.span)):
            encoded, each, count = encodings(poca, group, time)
            value, memory = criticised(critic, critic.value, encoded, count, memory)
            values.append((value - returns[group, time]) ** 2)
            for one, step in deciding(each, time):
                before = of_members.get(one, at_sequences.get(step))
                value, of_members[one] = criticised(critic, critic.baseline, each[one], count, before)
                baselines.append((value - returns[group, time]) ** 2)
    return torch.stack(values).mean(), torch.stack(baselines).mean() if baselines else torch.zeros(())


def sequences_of(groups):
    """Steps of a member in a window, by their first log-probability."""
    found = {}
    for group in groups:
        for one in group.of(OWN):
            windows = {}
            for step in one.steps:
                windows.setdefault(step.time // LENGTH, []).append(step)
            found |= {np.float32(steps[0].log_prob).item(): (one, steps) for steps in windows.values()}
    return found


@ALL
def test_every_step_follows_the_gradient_of_the_loss_within_each_window(variant):
    """In a second batch, whose memories come from the first; no gradient flows beyond a window's start."""
    poca, groups = played(variant, learning_rate=0.02, batch_size=9, num_epoch=2)
    poca.networks.critic.see(4)
    walk, half = Walk(poca), len(groups) // 2
    compare(poca, groups[:half], walk)
    groups = groups[half:]
    walked, named, timesteps = walk(groups), sequences_of(groups), moments_of(groups)
    returns, of_step = targets_by_hand(groups, walked[0], walked[1])
    coefficients, parts = Coefficients.at(poca.settings, 0), poca.actor.actions.continuous + 2
    real, gradient, met = poca._step, poca.optimizer.parameters.gradient, []

    def compared(rows, recalled, part, *others):
        gradient.zero_()
        said = rows.log_prob.tolist()
        sequences = [named[one] for one in said if one in named]
        assert sum(len(steps) for _, steps in sequences) == len(said)
        windows = [one for one in (timesteps[at] for at in part.timesteps.tolist()) if one[1] % LENGTH == 0]
        surrogate, entropy = policy_part(poca, sequences, of_step, coefficients.epsilon)
        value, baseline = critic_part(poca, windows, walked, returns)
        (-surrogate + 0.5 * (value + 0.5 * baseline) - coefficients.beta * parts * entropy).backward()
        expected = gradient.clone()
        out = real(rows, recalled, part, *others)
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=2e-5)
        assert expected.abs().max() > 0.01
        met.append(len(sequences))
        return out

    poca._step = compared
    report = poca.update(told(poca, groups), 0, 0)
    assert report.minibatches == len(met) >= 4
    assert set(met) == {9 // LENGTH}
    assert report.skipped == 0


@ALL
def test_an_update_reaches_every_weight_of_both_memories(variant):
    poca, groups = played(variant, count=9)
    before = to_arrays(poca.modules)
    assert poca.update(told(poca, groups), 1, 0).skipped == 0
    after = to_arrays(poca.modules)
    assert not [name for name, array in before.items() if np.array_equal(array, after[name])]
    assert all(np.isfinite(array).all() for array in after.values())


def test_two_updates_go_on_from_each_other_to_the_bit():
    """The same batches give the same weights; without the first one's memories the second gives others."""
    hashes = []
    for forgets in (False, False, True):
        poca, groups = played({"teammates": 2})
        one = Learner(OWN, PLAIN, poca.settings, 5)
        one.meet(TEAMMATES)
        for part in (groups[: len(groups) // 2], groups[len(groups) // 2 :]):
            one.add(record(part, poca.networks.specs, length=LENGTH))
            one.update(everything=True)
            if forgets:
                fresh = Learner(OWN, PLAIN, poca.settings, 6)
                fresh.restore(one.checkpoint())
                one = fresh
        hashes.append(one.weights_sha256)
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_resumed_learner_goes_on_to_the_bit_with_groups_whose_life_begins():
    poca, groups = played({"teammates": 2}, count=6)
    agent_episodes = sorted({group.number for group in groups})
    through, resumed = (Learner(OWN, PLAIN, poca.settings, seed) for seed in (3, 99))

    def updated(one, numbers):
        part = [group for group in groups if group.number in numbers]
        one.add(record(part, poca.networks.specs, length=LENGTH))
        return one.update(everything=True)

    through.meet(TEAMMATES)
    updated(through, agent_episodes[:2])
    resumed.restore(through.checkpoint())
    for numbers in (agent_episodes[2:4], agent_episodes[4:]):
        assert updated(through, numbers) == updated(resumed, numbers)
    assert resumed.weights_sha256 == through.weights_sha256


# ---------------------------------------------------------------- moments at which nobody is there


def lonely(waits):
    """One that ends at 3, one of which something is known only from `waits` on."""

    def decision(time):
        seen = tuple(np.full((1, *one.shape), time, np.float32) for one in PLAIN.observations)
        carried, mask = np.zeros(MEMORY, np.float32), np.zeros(5, bool)
        return Decision(time, seen, np.ones(2, np.float32), np.zeros(2, np.int32), -3.0, mask, carried)

    first = Member(OWN, 1, [decision(0), decision(1), decision(2)], decision(3), 3, terminated=True)
    second = Member(OWN, 2, [], decision(waits), waits + 1)
    return Group(1, waits, False, np.ones(waits, np.float32), [first, second])


@pytest.mark.parametrize("waits", [4, 5])
@pytest.mark.parametrize("others", [0, 2])
def test_a_window_in_which_nobody_is_there_is_worth_nothing_and_stops_nothing(waits, others):
    """A member may have joined of which this assembly has heard nothing yet, and all others may end before it does."""
    poca, groups = played({}, count=others) if others else played({})
    groups = [replace(lonely(waits), number=99), *(groups if others else [])]
    batch = told(poca, groups)
    found = estimated(poca, batch)[1]
    assert not found.values[3:waits].any()
    assert found.values[[0, 1, 2, waits]].all()
    report = poca.update(batch, 0, 0)
    assert (report.skipped, np.isfinite(list(report.statistics.values())).all()) == (0, True)
