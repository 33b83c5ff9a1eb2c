"""Returns, losses and schedules compared with slow twins."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparring.pipeline.learning import losses
from sparring.pipeline.learning.ppo import hyperparameters_of
from sparring.pipeline.learning.settings import Coefficients, Hyperparameters, scheduled
from tests.learning.learning_helpers import small_settings


def test_advantages_by_hand():
    got = losses.advantages(
        np.float32([1, 2, 4]), np.float32([1, 1, 1]), np.float32([0, 3]), np.int32([2, 1]), gamma=0.5, lambd=0.5
    )
    # the first segment terminated: 2 - 1 = 1; 1 + 0.5 - 1 + 0.25 = 0.75. The second bootstraps: 4 + 1.5 - 1.
    assert got.tolist() == [0.75, 1.0, 4.5]


def test_normalized_advantages_have_mean_0_and_deviation_1_and_equal_ones_are_0():
    scaled = losses.normalized(np.float32([1, 2, 3, 6]))
    assert scaled.mean() == pytest.approx(0, abs=1e-6)
    assert scaled.std() == pytest.approx(1, abs=1e-6)
    assert losses.normalized(np.full(4, 2, np.float32)).tolist() == [0, 0, 0, 0]


def random_rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_surrogate_and_its_gradient_equal_the_formula_of_the_paper():
    log_prob, old, advantage = (random_rows(200, seed=seed) * 0.4 for seed in range(3))
    objective, gradient, _ = losses.surrogate(log_prob, old, advantage, losses.clip_limit(advantage, 0.2))
    log_prob.requires_grad_(True)
    ratio = (log_prob - old).exp()
    expected = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    torch.testing.assert_close(objective, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(-expected.mean(), log_prob)[0])
    assert (gradient == 0).any(), "some rows are clipped"


def test_value_loss_and_its_gradient_equal_those_of_the_squared_error():
    values, targets = random_rows(50, 2), random_rows(50, 2, seed=1)
    squares, gradient = losses.value_loss(values, targets, 0.5)
    values.requires_grad_(True)
    expected = (values - targets) ** 2
    torch.testing.assert_close(squares, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(0.5 * expected.mean(), values)[0])


def test_clipped_value_loss_and_its_gradient_equal_those_of_the_authors_code():
    values, targets, old = (random_rows(200, 2, seed=seed) for seed in range(3))
    squares, gradient = losses.value_loss(values, targets, 0.5, old, 0.2)
    values.requires_grad_(True)
    clipped = old + (values - old).clamp(-0.2, 0.2)
    expected = torch.maximum((values - targets) ** 2, (clipped - targets) ** 2)
    torch.testing.assert_close(squares, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(0.5 * expected.mean(), values)[0])


def test_linear_schedule_goes_from_start_to_end_and_stays_there():
    assert scheduled("linear", 0.3, 0.1, 0.0) == pytest.approx(0.3)
    assert scheduled("linear", 0.3, 0.1, 0.5) == pytest.approx(0.2)
    assert scheduled("linear", 0.3, 0.1, 1.0) == scheduled("linear", 0.3, 0.1, 7.0) == 0.1
    assert scheduled("constant", 0.3, 0.1, 1.0) == 0.3


def test_schedule_never_rises():
    assert scheduled("linear", 0.05, 0.1, 0.5) == 0.05
    assert scheduled("linear", 0.0, 1e-5, 1.0) == 0.0


def test_schedules_end_at_the_documented_values():
    settings_ = small_settings()
    start, end = (Coefficients.at(hyperparameters_of(settings_), progress) for progress in (0, 1))
    assert (start.learning_rate, start.epsilon, start.beta) == pytest.approx((1e-3, 0.2, 5e-3))
    assert (end.learning_rate, end.epsilon, end.beta) == (1e-10, 0.1, 1e-5)


def test_each_schedule_has_its_own_switch():
    hyper = Hyperparameters(beta_schedule="constant")
    half = Coefficients.at(hyper, 0.5)
    assert half.beta == hyper.beta
    assert half.epsilon == pytest.approx(0.15)
