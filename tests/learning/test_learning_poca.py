"""MA-POCA's update compared with slow twins that follow the paper, one group timestep at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.learning import group_networks, losses
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.minibatches import RecurrentState
from sparring.pipeline.learning.poca import shuffled
from sparring.pipeline.learning.settings import Coefficients
from sparring.pipeline.networks.device import to_arrays
from tests.learning.group_helpers import (
    GAMMA,
    LAMBDA,
    STRENGTH,
    batch_of,
    decisions_of,
    estimated,
    learning,
    log_prob_and_entropy,
    prepared_row,
    record,
    surrogate_of,
    targets_by_hand,
    timestep,
    timesteps_of,
)
from tests.learning.random_groups import OWN, PLAIN, RICH, World, specs_of

VARIANTS = {
    "plain": {},
    "teammates": {"teammates": 2},
    "previous": {"teammates": 1, "previous": True},
    "rich": {"own": RICH, "teammates": 1},
    "raw": {"teammates": 1, "normalize": False},
}
ALL = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


def played(variant, seed=0, *, count=5, **hyper):
    """Returns a learner, group segments that its actor played, and their batch."""
    how = dict(variant)
    specs = specs_of(how.pop("own", PLAIN), how.pop("teammates", 0))
    poca = learning(specs, **how, **hyper)
    groups = World(specs, poca.actor, seed).groups(count, horizon=5, most=4)
    return poca, groups, batch_of(groups, specs, length=poca.settings.network_settings.sequence_length)


def targets_of(poca, batch, epsilon=0.2):
    return poca._targets(batch, epsilon)


# ---------------------------------------------------------------- values and baselines


@torch.no_grad()
def walked(poca, groups):
    """Returns the value at each group timestep and the baseline of each decision, computed one by one."""
    values, baselines = {}, {}
    for group in groups:
        for time in range(group.span + 1):
            values[group, time] = 0.0
            if group.there(time):
                group_timesteps, ours = timestep(poca, group, time)
                value, expected = poca.networks.critic(group_timesteps)
                values[group, time] = value.item()
                for one, found in zip(ours, expected, strict=True):
                    baselines |= {step: found.item() for step in one.steps if step.time == time}
    return values, baselines


@ALL
def test_values_and_baselines_equal_those_computed_one_by_one(variant, monkeypatch):
    monkeypatch.setattr(group_networks, "_TIMESTEPS_AT_ONCE", 3)
    poca, groups, batch = played(variant)
    found = estimated(poca, batch)[1]
    values, baselines = walked(poca, groups)
    np.testing.assert_allclose(found.values[:, 0], list(values.values()), atol=1e-5)
    expected = [baselines[step] for _, one, step in decisions_of(groups)]
    np.testing.assert_allclose(found.baselines[:, 0], expected, atol=1e-5)
    assert np.std(expected) > 0.01
    assert poca.networks.critic.largest == max(len(group.there(at)) for group in groups for at in range(group.span + 1))


@given(seed=st.integers(0, 999))
@settings(max_examples=8, deadline=None)
def test_a_group_is_evaluated_alike_wherever_it_stands(seed):
    """Other groups in the batch and their order change nothing."""
    poca, groups, batch = played({"teammates": 1}, seed)
    order = np.random.default_rng(seed).permutation(len(groups)).tolist()
    moved = [groups[at] for at in order]
    whole, other = estimated(poca, batch)[1], estimated(poca, batch_of(moved, poca.networks.specs))[1]
    spans = np.array([group.span + 1 for group in groups])
    parts = np.split(whole.values, np.cumsum(spans)[:-1])
    np.testing.assert_allclose(other.values, np.concatenate([parts[at] for at in order]), atol=1e-6)
    parts = np.split(whole.baselines, np.cumsum(batch.sizes)[:-1])
    np.testing.assert_allclose(other.baselines, np.concatenate([parts[at] for at in order]), atol=1e-6)


# ---------------------------------------------------------------- returns and advantages


def changed_returns(poca, groups, group, time):
    """Returns the change of each decision's return when a group earns 1 more after a time."""
    specs = poca.networks.specs
    before = targets_of(poca, batch_of(groups, specs)).rows.returns[:, 0].numpy()
    group.rewards = group.rewards.copy()
    group.rewards[time] += 1.0
    return targets_of(poca, batch_of(groups, specs)).rows.returns[:, 0].numpy() - before


@pytest.mark.parametrize("seed", range(4))
def test_ended_member_is_credited_with_later_group_rewards(seed):
    """A reward has weight `(gamma lambda)^k` k group times before, for members that are present or have ended."""
    poca, groups, _ = played({"teammates": 1}, seed, count=12)
    group = next(
        one for one in groups if any(mate.ended and mate.until < one.span and mate.steps for mate in one.of(OWN))
    )
    ended = [mate for mate in group.of(OWN) if mate.ended and mate.until < group.span]
    last = group.span - 1
    changes = changed_returns(poca, groups, group, last)
    after_the_end = 0
    for change, (where, one, step) in zip(changes, decisions_of(groups), strict=True):
        weight = STRENGTH * (GAMMA * LAMBDA) ** (last - step.time) if where is group else 0.0
        assert change == pytest.approx(weight, abs=1e-5)
        after_the_end += one in ended
    assert after_the_end


def test_rewards_before_a_decision_are_not_credited_to_it():
    poca, groups, _ = played({}, 1)
    group = max(groups, key=lambda one: one.span)
    changes = changed_returns(poca, groups, group, 1)
    decided = [(where is group, step.time) for where, _, step in decisions_of(groups)]
    assert any(mine and time > 1 for mine, time in decided)
    for change, (mine, time) in zip(changes, decided, strict=True):
        assert (abs(change) > 1e-3) == (mine and time <= 1)


def test_return_is_bootstrapped_unless_no_member_remains():
    """If interrupted or open members remain, the return is bootstrapped with their observations."""
    poca, groups, batch = played({"teammates": 1}, 3, count=40)
    prepared, found = estimated(poca, batch)
    kinds = set()
    for group, last in zip(groups, prepared.index.last, strict=True):
        interrupted = [one for one in group.members if one.interrupted and one.until == group.span + 1]
        kind = "interrupted" if interrupted else "over" if group.over else "open"
        kinds.add(kind)
        assert (found.values[last, 0] == 0.0) == (kind == "over")
        if kind == "interrupted":
            group_timesteps, _ = timestep(poca, group, group.span)
            assert group_timesteps.counts.item() == len(interrupted)
    assert kinds == {"interrupted", "over", "open"}


def test_group_rewards_reported_by_members_count_once():
    """The series of the group contains each of them once."""
    poca, groups, _ = played({}, 1)
    shas = []
    for scale in (0.0, 5.0):
        for _, _, step in decisions_of(groups):
            step.reward, step.group_reward = scale, scale
        one = Learner(OWN, PLAIN, poca.settings, 0)
        one.add(record(groups, {OWN: PLAIN}))
        assert one.update(everything=True).group_rewards == bool(scale)
        shas.append(one.weights_sha256)
    assert shas[0] == shas[1]


# ---------------------------------------------------------------- a step


def policy_part(poca, steps, advantage_of, epsilon):
    """Returns clipped surrogate and entropy of some decisions, computed one by one."""
    ratios, entropies = [], []
    for one, step in steps:
        log_prob, entropy = log_prob_and_entropy(poca.actor, poca.actor(prepared_row(poca, one, step))[0], step)
        ratios.append((log_prob - step.log_prob).exp())
        entropies.append(entropy)
    return surrogate_of(ratios, [advantage_of[step] for _, step in steps], epsilon), torch.stack(entropies).mean()


def critic_part(poca, timesteps, returns, old_values, old_baselines, epsilon):
    """Returns value and baseline loss of some group timesteps, computed one by one."""
    clip, of_values, of_baselines = poca.settings.hyperparameters.clip_value_loss, [], []

    def squares(value, target, old):
        plain = (value - target).square()
        if not clip or abs(value.item() - old) <= epsilon:
            return plain
        return torch.maximum(plain, (old + (value - old).clamp(-epsilon, epsilon) - target).square())

    for group, time in timesteps:
        group_timesteps, ours = timestep(poca, group, time)
        value, expected = poca.networks.critic(group_timesteps)
        of_values.append(squares(value[0, 0], returns[group, time], old_values[group, time]))
        for one, baseline in zip(ours, expected, strict=True):
            of_baselines += [
                squares(baseline[0], returns[group, time], old_baselines[step])
                for step in one.steps
                if step.time == time
            ]
    return torch.stack(of_values).mean(), torch.stack(of_baselines).mean()


@pytest.mark.parametrize("variant", ["previous", "rich"])
@pytest.mark.parametrize("clip", [False, True])
def test_every_step_follows_the_gradient_of_the_loss(variant, clip):
    """Each minibatch has the loss surrogate + 0.5 (value + 0.5 baseline) - beta entropy, while weights change.

    `test_learning_reference` compares whole updates of networks of vectors alone.
    """
    poca, groups, batch = played(
        VARIANTS[variant], count=4, learning_rate=0.02, batch_size=8, clip_value_loss=clip, num_epoch=2
    )
    coefficients, parts = Coefficients.at(poca.hyper, 0), poca.actor.actions.continuous + 2
    estimated(poca, batch)  # the largest group must be known to the twin
    values, baselines = walked(poca, groups)
    returns, of_step = targets_by_hand(groups, values, baselines)
    decided = decisions_of(groups)
    named = {np.float32(step.log_prob).item(): (one, step) for _, one, step in decided}
    assert len(named) == len(decided)
    timesteps = timesteps_of(groups)
    real, gradient, losses = poca._step, poca.optimizer.gradient, []

    @torch.inference_mode(mode=False)
    @torch.enable_grad()
    def compared(targets, part, *others):
        gradient.zero_()
        rows, critic_rows = part.rows, poca.networks.inputs(targets.prepared, part.windows, targets.estimates)
        steps = [named[one] for one in rows.log_prob.tolist()]
        chosen = [timesteps[at] for at in critic_rows.timesteps.tolist()]
        surrogate, entropy = policy_part(poca, steps, of_step, coefficients.epsilon)
        value, baseline = critic_part(poca, chosen, returns, values, baselines, coefficients.epsilon)
        (-surrogate + 0.5 * (value + 0.5 * baseline) - coefficients.beta * parts * entropy).backward()
        expected = gradient.clone()
        losses.append([one.item() for one in (surrogate, value, baseline, entropy)])
        out = torch.no_grad()(real)(targets, part, *others)
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=2e-5)
        assert expected.abs().max() > 0.01
        return out

    poca._step = compared
    report = poca.update(batch, 0, 0)
    assert report.minibatches == len(losses) >= 4
    surrogate, value, baseline, entropy = zip(*losses, strict=True)
    statistics = report.statistics
    assert statistics["Losses/Policy Loss"] == pytest.approx(np.abs(surrogate).mean(), rel=1e-3, abs=1e-5)
    assert statistics["Losses/Value Loss"] == pytest.approx(np.mean(value), rel=1e-3)
    assert statistics["Losses/Baseline Loss"] == pytest.approx(np.mean(baseline), rel=1e-3)
    assert statistics["Policy/Entropy"] == pytest.approx(np.mean(entropy), rel=1e-3)
    assert statistics["Policy/Extrinsic Value Estimate"] == pytest.approx(
        np.mean([values[key] for key in returns]), abs=1e-4
    )
    each = [baselines[step] for _, one, step in decided]
    assert statistics["Policy/Extrinsic Baseline Estimate"] == pytest.approx(np.mean(each), abs=1e-4)


@ALL
def test_update_changes_every_weight_and_statistic(variant):
    poca, _, batch = played(variant, count=9)
    before = to_arrays(poca.networks.modules)
    report = poca.update(batch, 1, 0)
    after = to_arrays(poca.networks.modules)
    same = [name for name, array in before.items() if array.size and np.array_equal(array, after[name])]
    assert (report.skipped, same) == (0, [])
    assert all(np.isfinite(array).all() for array in after.values())


def test_value_within_the_clip_range_keeps_its_gradient_despite_rounding():
    """The clip changes nothing there, so rounding cannot select it."""
    generator = torch.Generator().manual_seed(0)
    values, returns, old = (torch.randn(2000, 1, generator=generator) * 0.1 for _ in range(3))
    inside = (values - old).abs() < 0.19
    _, gradient = losses.value_loss(values, returns, 0.5, old, 0.2)
    _, expected = losses.value_loss(values, returns, 0.5)
    assert torch.equal(gradient[inside], expected[inside])


# ---------------------------------------------------------------- minibatches


@given(
    rows=st.lists(st.integers(0, 6), min_size=1, max_size=30).filter(any),
    parts=st.integers(1, 20),
    seed=st.integers(0, 999),
)
@settings(max_examples=100, deadline=None)
def test_parts_of_timesteps_have_about_equal_size_and_omit_nothing(rows, parts, seed):
    """No unit occurs twice and no part is empty; there are as many parts as requested if units suffice."""
    found = [part.tolist() for part in shuffled(np.array(rows), parts, torch.Generator().manual_seed(seed))]
    assert sorted(unit for part in found for unit in part) == [unit for unit, held in enumerate(rows) if held]
    assert 1 <= len(found) <= parts
    if max(rows) * parts <= sum(rows):
        assert len(found) == parts
        for part in found:
            assert abs(sum(rows[unit] for unit in part) - sum(rows) / parts) < max(rows)


def test_parts_of_timesteps_are_in_random_order():
    generator, units = torch.Generator().manual_seed(0), np.ones(30, np.int64)
    orders = [np.concatenate(list(shuffled(units, 4, generator))).tolist() for _ in range(3)]
    assert len({tuple(order) for order in orders}) == 3


@ALL
@pytest.mark.parametrize("size", [1, 7, 500])
def test_epoch_has_decisions_for_the_actor_and_whole_timesteps_for_the_critic(variant, size):
    """There are as many minibatches as in PPO, no decision occurs twice, and the critic omits nothing."""
    poca, groups, batch = played(variant, batch_size=size, buffer_size=500)
    targets = poca._targets(batch, 0.2)
    prepared = targets.prepared
    numbers = replace(targets, rows=targets.rows._replace(log_prob=torch.arange(float(batch.steps))))
    timesteps, decided = timesteps_of(groups), {}
    for row, (group, _, step) in enumerate(decisions_of(groups)):
        decided.setdefault((group, step.time), set()).add(row)
    acted, evaluated, valued = [], [], set()
    for rows, recalled, _, _, windows in poca._minibatches(numbers):
        critic_rows = poca.networks.inputs(prepared, windows, targets.estimates)
        acted.append([int(one) for one in rows.log_prob.tolist()])
        evaluated.append(critic_rows.rows.tolist())
        valued.update(critic_rows.timesteps.tolist())
        assert recalled == RecurrentState()
        assert set(evaluated[-1]) == set().union(
            *(decided.get(timesteps[at], set()) for at in critic_rows.timesteps.tolist())
        )
        for number, at in enumerate(acted[-1]):
            assert torch.equal(rows.advantage[number], targets.rows.advantage[at])
            assert rows.discrete[number].tolist() == batch.discrete[at].tolist()
    size = min(size, batch.steps)
    assert [len(rows) for rows in acted] == [size] * (batch.steps // size)
    assert len({row for rows in acted for row in rows}) == batch.steps // size * size
    assert {row for rows in evaluated for row in rows} == set(range(batch.steps))
    occupied = prepared.index.in_series[prepared.index.counts[prepared.index.in_series] > 0]
    if size > 1:  # else no minibatch is left for timesteps without a decision of ours
        assert valued == set(occupied.tolist())
    if size > 1:
        assert sum(map(len, evaluated)) == batch.steps
