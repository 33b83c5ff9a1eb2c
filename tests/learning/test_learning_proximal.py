"""The correction for stale data compared with a slow twin that acts on every row again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Normal

import tests.learning.recurrent_helpers as recurrent
from sparring.pipeline.learning import losses
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.losses import Losses, diagnostics
from sparring.pipeline.learning.optimizer import StepTaken
from sparring.pipeline.networks import distributions
from sparring.pipeline.networks.device import to_arrays
from sparring.pipeline.networks.layers import Layout
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from tests.learning.group_helpers import LENGTH, batch_of
from tests.learning.group_helpers import learning as group_learning
from tests.learning.learning_helpers import segments, small_settings
from tests.learning.random_groups import PLAIN, World, specs_of

KINDS = {
    "continuous": ActionSpec(continuous=2),
    "discrete": ActionSpec(discrete=(3, 2)),
    "hybrid": ActionSpec(continuous=2, discrete=(3, 2)),
}
ACTIONS = pytest.mark.parametrize("actions", KINDS.values(), ids=KINDS)


def plain(actions=KINDS["hybrid"], **changes):
    """Returns a small PPO."""
    spec = BehaviorSpec(observations=(ObservationSpec(name="state", shape=(3,)),), actions=actions)
    return Learner("Test", spec, small_settings(**changes), 0)._algorithm, spec


def batch_for(algorithm, spec, versions=0):
    """Returns 64 rows that the actor of the algorithm played."""
    learner = Learner("Test", spec, small_settings(), 1)
    learner.add(segments([32, 20, 12], spec=spec, versions=versions))
    batch = learner._buffer.take()
    acted = algorithm.actor.frozen().act(batch.observations, None, np.random.default_rng(3))
    return replace(batch, **dict(zip(("continuous", "discrete", "log_probs"), acted, strict=True)))


def move(algorithm, by=0.1):
    """Changes the actor as an update does."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in algorithm.actor.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=by)


def mixed(batch, now=1):
    """Returns the same rows, every third of the current version."""
    versions = np.where(np.arange(batch.steps) % 3 == 0, now, now - 1).astype(np.int64)
    return replace(batch, versions=versions)


def by_torch(actions, head, log_sigma, row):
    """Returns the log-probability of each part of one action."""
    c = actions.continuous
    parts = list(Normal(head[:c], log_sigma.exp()).log_prob(row.continuous))
    logits = head[c : c + actions.mask_size]
    if row.masks is not None:
        logits = logits.masked_fill(row.masks, -1e8)
    branches = logits.split(list(actions.discrete)) if actions.discrete else ()
    parts += [Categorical(logits=part).log_prob(one) for part, one in zip(branches, row.discrete, strict=True)]
    return torch.stack(parts)


def twin(algorithm, rows, batch):
    """Returns log-probabilities [R, P] of the current actor, row by row, from stored recurrent states."""
    actor, found = algorithm.actor, []
    memory = None
    starts = {}
    if actor.recurrent is not None:
        begins = np.cumsum(batch.lengths) - batch.lengths
        at = [b + k for b, n in zip(begins, batch.lengths, strict=True) for k in range(0, n, recurrent.LENGTH)]
        starts = dict(zip(at, torch.from_numpy(batch.carried[:, : recurrent.MEMORY]), strict=True))
    for row in range(len(rows.log_prob)):
        one = rows.at(torch.tensor([row]))
        memory = starts[row][None] if row in starts else memory
        if memory is None:
            head = actor(one.inputs)
        else:
            head, memory = actor.recurrent(actor.encoder(one.inputs), Layout(np.array([1])), memory)
        single = one._replace(
            continuous=one.continuous[0], discrete=one.discrete[0], masks=None if one.masks is None else one.masks[0]
        )
        found.append(by_torch(actor.actions, head[0], actor.log_sigma, single).detach())
    return torch.stack(found)


@pytest.fixture
def corrections(monkeypatch):
    """Records the arguments and results of the correction in updates."""
    seen, real = [], losses.correct

    def correct(actor, rows, *others, **options):
        out = real(actor, rows, *others, **options)
        seen.append((rows, *out))
        return out

    monkeypatch.setattr(losses, "correct", correct)
    return seen


def skip(*_):
    """Replaces a step of the optimizer."""
    return StepTaken(skipped=torch.ones(()), square=torch.zeros(()))


def check(algorithm, batch, before, after, staleness, *, per_dimension=False):
    """Compares each row with the formulas."""
    stale = torch.from_numpy(batch.versions == 0)
    parts = twin(algorithm, before, batch)
    joint = parts.sum(1)
    weight = torch.where(stale, (joint - before.log_prob).exp().clamp(max=2.0), torch.ones(()))
    assert (weight[stale] == 2).any(), "some weights reach the cap"
    expected = parts if per_dimension else torch.where(stale, joint, before.log_prob)
    torch.testing.assert_close(after.log_prob, expected, rtol=1e-4, atol=1e-4)
    advantage = after.advantage.squeeze(1) if per_dimension else after.advantage
    torch.testing.assert_close(advantage, before.advantage * weight, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(after.limit, after.advantage + 0.2 * after.advantage.abs())
    if not per_dimension:
        assert torch.equal(after.log_prob[~stale], before.log_prob[~stale]), "to the bit"
    assert torch.equal(advantage[~stale], before.advantage[~stale]), "to the bit"
    assert torch.equal(after.returns, before.returns), "values are not corrected"
    assert staleness.weight == pytest.approx(weight.mean().item(), rel=1e-3)
    share = weight.sum() ** 2 / weight.square().sum() / len(weight)
    assert staleness.sample_size == pytest.approx(share.item(), rel=1e-3)
    assert 0.1 < staleness.sample_size < 1


@ACTIONS
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("ratio", ["joint", "per_dimension"])
def test_stale_rows_get_the_log_probability_of_the_current_actor(actions, shared, ratio, corrections, monkeypatch):
    monkeypatch.setattr(losses, "rows_at_once", lambda _: 7)  # so that there are several chunks
    algorithm, spec = plain(actions, shared_critic=shared, ratio=ratio)
    batch = mixed(batch_for(algorithm, spec))
    move(algorithm, 0.3)
    monkeypatch.setattr(algorithm.optimizer, "step", skip)  # so that the actor does not change
    algorithm.update(batch, 1, 0)
    check(algorithm, batch, *corrections[0], per_dimension=ratio == "per_dimension")


@pytest.mark.parametrize("variant", ["memory", "shared_previous"])
def test_recurrent_actors_act_again_from_stored_memories(variant, corrections, monkeypatch):
    monkeypatch.setattr(losses, "rows_at_once", lambda _: 7)
    algorithm = recurrent.learning(**recurrent.VARIANTS[variant])
    batch = mixed(recurrent.played(algorithm, recurrent.FIRST))
    move(algorithm, 0.8)
    monkeypatch.setattr(algorithm.optimizer, "step", skip)
    algorithm.update(batch, 1, 0)
    check(algorithm, batch, *corrections[0])


@pytest.mark.parametrize("memory", [False, True])
def test_decisions_of_groups_are_corrected_one_by_one(memory, corrections, monkeypatch):
    """With an unchanged policy the recomputed log-probabilities are the stored ones and all weights are 1."""
    specs = specs_of(PLAIN, 1)
    algorithm = group_learning(specs, memory=memory)
    groups = World(specs, algorithm.actor, 0).groups(5, horizon=5)
    batch = mixed(batch_of(groups, specs, length=LENGTH if memory else 0))
    monkeypatch.setattr(algorithm.optimizer, "step", skip)
    algorithm.update(batch, 1, 0)
    ((before, after, staleness),) = corrections
    torch.testing.assert_close(after.log_prob, before.log_prob, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after.advantage, before.advantage, rtol=1e-3, atol=1e-3)
    assert staleness.sample_size == pytest.approx(1, abs=1e-4)
    corrections.clear()
    move(algorithm, 0.5)
    algorithm.update(batch, 1, 0)
    ((before, after, staleness),) = corrections
    stale = torch.from_numpy(batch.versions == 0)
    weight = torch.where(stale, (after.log_prob - before.log_prob).exp().clamp(max=2.0), torch.ones(()))
    assert (after.log_prob - before.log_prob)[stale].abs().min() > 0
    assert torch.equal(after.log_prob[~stale], before.log_prob[~stale])
    torch.testing.assert_close(after.advantage, before.advantage * weight, rtol=1e-3, atol=1e-3)
    assert staleness.weight == pytest.approx(weight.mean().item(), rel=1e-3)


@pytest.mark.parametrize("memory", [False, True])
def test_without_stale_rows_the_correction_changes_no_bit(memory):
    weights = []
    for decoupled in (False, True):
        if memory:
            algorithm = recurrent.learning(decoupled_objective=decoupled)
            batch = recurrent.played(algorithm, recurrent.FIRST)
        else:
            algorithm, spec = plain(decoupled_objective=decoupled)
            batch = batch_for(algorithm, spec)
        report = algorithm.update(batch, 0, 0)
        assert report.staleness == (1.0, 1.0)
        weights.append(to_arrays(algorithm.networks.modules))
    for name, array in weights[0].items():
        np.testing.assert_array_equal(array, weights[1][name])


def test_setting_disables_the_correction():
    after = {}
    for decoupled in (False, True):
        for version in (0, 1):
            algorithm, spec = plain(decoupled_objective=decoupled)
            batch = batch_for(algorithm, spec)
            move(algorithm)
            report = algorithm.update(batch, version, 0)
            after[decoupled, version] = algorithm.optimizer.flat.detach().clone()
            assert (report.staleness.sample_size < 1) == (decoupled and version == 1)
    assert torch.equal(after[False, 0], after[False, 1])
    assert torch.equal(after[False, 0], after[True, 0])
    assert not torch.equal(after[True, 0], after[True, 1])


def test_log_probabilities_of_parts_add_up_to_the_joint_one():
    algorithm, spec = plain()
    batch = batch_for(algorithm, spec)
    head = algorithm.actor(algorithm.networks.prepare(batch).inputs).detach()
    done = (torch.from_numpy(batch.continuous), torch.from_numpy(batch.discrete).long(), None)
    joint, each = (
        distributions.evaluate(spec.actions, head, algorithm.actor.log_sigma.detach(), *done, per_dimension=one)
        for one in (False, True)
    )
    torch.testing.assert_close(each.log_prob.sum(1), joint.log_prob)


# ---------------------------------------------------------------- diagnostics


def test_diagnostics_follow_their_formulas():
    ratios = torch.tensor([0.5, 1.0, 1.1, 1.5])
    nothing = torch.zeros(())
    minibatches = [
        Losses(
            losses.PolicyTerms(nothing, log_ratio, nothing),
            {},
            StepTaken(skipped=nothing, square=torch.tensor(norm**2)),
        )
        for log_ratio, norm in zip(ratios.log().split(2), (1.0, 3.0), strict=True)
    ]
    targets, values = np.array([[1.0], [2.0], [4.0]], np.float32), np.array([[1.0], [1.0], [4.0]], np.float32)
    found = diagnostics(minibatches, targets, values, 0.2, losses.Staleness(weight=0.9, sample_size=0.7))
    assert found["Update/Approximate KL"] == pytest.approx((ratios - 1 - ratios.log()).mean().item(), rel=1e-5)
    assert found["Update/Clip Fraction"] == 0.5
    assert found["Update/Gradient Norm"] == 2.0
    assert found["Update/Explained Variance"] == pytest.approx(1 - np.var([0, 1, 0]) / np.var([1, 2, 4]))
    assert (found["Update/Stale Weight"], found["Update/Effective Sample Size"]) == (0.9, 0.7)


def test_diagnostics_are_omitted_without_minibatches_or_variance_of_returns():
    still = np.ones((3, 1), np.float32)
    found = diagnostics([], still, still, 0.2, losses.NONE_STALE)
    assert set(found) == {"Update/Stale Weight", "Update/Effective Sample Size"}
