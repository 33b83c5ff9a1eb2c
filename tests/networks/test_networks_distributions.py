"""Distributions compared with `torch.distributions`."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical, Normal

from sparring.pipeline.networks import distributions
from sparring.pipeline.specs import ActionSpec

SPECS = [
    ActionSpec(continuous=1),
    ActionSpec(continuous=3),
    ActionSpec(discrete=(4,)),
    ActionSpec(discrete=(3, 2, 1)),
    ActionSpec(continuous=2, discrete=(3, 2)),
]


def sample(actions, head, log_sigma, masks, source, deterministic=False):
    """Returns samples in the form that `evaluate` takes."""
    sampler = distributions.ActionSampler(actions, log_sigma.numpy())
    arrays = sampler.sample(head.numpy(), None if masks is None else masks.numpy(), source, deterministic)
    continuous, discrete, log_prob = map(torch.from_numpy, arrays)
    return continuous, discrete.long(), log_prob


def case(actions, rows=7, seed=0, dtype=torch.float64, masked=True, deterministic=False):
    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(rows, actions.continuous + actions.mask_size, generator=generator, dtype=dtype)
    log_sigma = torch.randn(actions.continuous, generator=generator, dtype=dtype) * 0.5
    masks = None
    if masked and actions.discrete:
        masks = torch.rand(rows, actions.mask_size, generator=generator) < 0.4
        for branch in masks.split(list(actions.discrete), dim=1):
            branch[:, 0] = False
    continuous, discrete, log_prob = sample(actions, head, log_sigma, masks, np.random.default_rng(seed), deterministic)
    return head, log_sigma, masks, continuous, discrete, log_prob


def twin(actions, head, log_sigma, masks, continuous, discrete):
    """Returns log-probability [B] and mean entropy, computed part by part."""
    normal = Normal(head[:, : actions.continuous], log_sigma.exp())
    log_prob = normal.log_prob(continuous).sum(1)
    entropy = normal.entropy().mean(1) if actions.continuous else torch.zeros(len(head), dtype=head.dtype)
    logits = head[:, actions.continuous :]
    if masks is not None:
        logits = logits + masks * -1e8
    for number, branch in enumerate(logits.split(list(actions.discrete), dim=1) if actions.discrete else ()):
        categorical = Categorical(logits=branch)
        log_prob = log_prob + categorical.log_prob(discrete[:, number])
        entropy = entropy + categorical.entropy()
    return log_prob, entropy.mean()


@pytest.mark.parametrize("actions", SPECS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_log_probability_and_entropy_equal_those_of_torch(actions, masked):
    head, log_sigma, masks, continuous, discrete, sampled = case(actions, masked=masked)
    got = distributions.evaluate(actions, head, log_sigma, continuous, discrete, masks)
    log_prob, entropy = twin(actions, head, log_sigma, masks, continuous, discrete)
    torch.testing.assert_close(got.log_prob, log_prob)
    torch.testing.assert_close(got.entropy, entropy)
    torch.testing.assert_close(sampled, log_prob)


@pytest.mark.parametrize("actions", SPECS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_sampled_log_probability_equals_the_evaluated_one(actions, masked, deterministic):
    sizes = {"rows": 64, "masked": masked, "deterministic": deterministic}
    for seed in range(10):
        *parts, sampled = case(actions, seed=seed, dtype=torch.float32, **sizes)
        head, log_sigma, masks, continuous, discrete = parts
        got = distributions.evaluate(actions, head, log_sigma, continuous, discrete, masks)
        torch.testing.assert_close(sampled, got.log_prob, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("actions", SPECS, ids=str)
def test_sampling_changes_neither_the_head_nor_earlier_samples(actions):
    head, generator = torch.randn(5, actions.continuous + actions.mask_size).numpy(), np.random.default_rng(0)
    sampler, before = distributions.ActionSampler(actions, np.zeros(actions.continuous, np.float32)), head.copy()
    for deterministic in (False, True):
        first = sampler.sample(head, None, generator, deterministic)
        copies = [array.copy() for array in first]
        sampler.sample(-head, None, generator, deterministic)
        for array, copy in zip(first, copies, strict=True):
            np.testing.assert_array_equal(array, copy)
            assert not np.shares_memory(array, head)
    np.testing.assert_array_equal(head, before)


@pytest.mark.parametrize("actions", SPECS, ids=str)
def test_analytic_gradient_equals_that_of_autograd(actions):
    head, log_sigma, masks, continuous, discrete, _ = case(actions)
    weights = torch.linspace(-1, 1, len(head), dtype=torch.float64)
    got = distributions.evaluate(actions, head, log_sigma, continuous, discrete, masks).gradient(weights, -0.3)
    head.requires_grad_(True)
    log_sigma.requires_grad_(True)
    log_prob, entropy = twin(actions, head, log_sigma, masks, continuous, discrete)
    loss = (weights * log_prob).sum() - 0.3 * entropy
    expected = torch.autograd.grad(loss, (head, log_sigma), allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(got[0], expected[0])
    if actions.continuous:
        torch.testing.assert_close(got[1], expected[1])


@given(seed=st.integers(0, 2**31), deterministic=st.booleans())
@settings(max_examples=25, deadline=None)
def test_masked_choice_is_never_sampled(seed, deterministic):
    actions = ActionSpec(discrete=(4, 3))
    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(200, 7, generator=generator) * 20
    masks = torch.rand(200, 7, generator=generator) < 0.7
    masks[:, 1] = masks[:, 5] = False
    _, discrete, log_prob = sample(actions, head, torch.zeros(0), masks, np.random.default_rng(seed), deterministic)
    masked_choices = torch.stack([masks[:, :4].gather(1, discrete[:, :1]), masks[:, 4:].gather(1, discrete[:, 1:])])
    assert not masked_choices.any()
    assert torch.isfinite(log_prob).all()


def test_choices_of_branches_have_their_probabilities_and_are_independent():
    actions, logits = ActionSpec(discrete=(3, 2)), torch.tensor([0.5, 0.3, 0.2, 0.9, 0.1]).log()
    head = logits.expand(40_000, 5)
    _, discrete, _ = sample(actions, head, torch.zeros(0), None, np.random.default_rng(0))
    shares = torch.bincount(discrete[:, 0] * 2 + discrete[:, 1]) / 40_000
    expected = torch.tensor([0.45, 0.05, 0.27, 0.03, 0.18, 0.02])
    torch.testing.assert_close(shares, expected, atol=0.01, rtol=0)


def test_continuous_samples_have_the_mean_and_sigma():
    actions, log_sigma = ActionSpec(continuous=2), torch.tensor([0.0, -1.0])
    head = torch.tensor([[1.0, -2.0]]).expand(40_000, 2)
    continuous, _, _ = sample(actions, head, log_sigma, None, np.random.default_rng(0))
    torch.testing.assert_close(continuous.mean(0), torch.tensor([1.0, -2.0]), atol=0.02, rtol=0)
    torch.testing.assert_close(continuous.std(0), log_sigma.exp(), atol=0.02, rtol=0)


def test_deterministic_sampling_returns_the_mode():
    actions = ActionSpec(continuous=1, discrete=(3,))
    head = torch.tensor([[0.7, 0.0, 2.0, 1.0]])
    masks = torch.tensor([[False, True, False]])
    continuous, discrete, log_prob = sample(
        actions, head, torch.zeros(1), masks, np.random.default_rng(0), deterministic=True
    )
    assert continuous.item() == pytest.approx(0.7)
    assert discrete.item() == 2
    choice = 1 / (1 + math.exp(-1))
    assert log_prob.item() == pytest.approx(math.log(choice) - 0.5 * math.log(2 * math.pi))
