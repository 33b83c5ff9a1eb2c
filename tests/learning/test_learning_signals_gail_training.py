"""Training of GAIL and VAIL over several steps, and held-out episodes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.learning.gail_twin import HYBRID, KINDS, gail, inputs_of, logits
from tests.learning.signals_helpers import (
    finite,
    moments,
    recorded,
    sigmoid,
    state,
    steps_of,
    weights_of,
)

# ---------------------------------------------------------------- VAIL


def test_vail_begins_with_sigma_1_and_beta_0() -> None:
    """sigma is a trainable vector of 128 ones, and beta is 0."""
    made = gail(use_vail=True, shake=False)
    assert torch.equal(made.module.sigma, torch.ones(128))
    assert made.module.sigma.requires_grad
    assert made.module.beta.item() == 0.0
    assert made.module.code is not None
    assert made.module.code.weight.shape[0] == 128


def test_beta_follows_the_divergence() -> None:
    """After each step beta = max(0, beta + 0.0005 (KL - 0.5)), which rises, falls and is never negative."""
    made = gail(use_vail=True, shake=False)
    assert made.module.code is not None
    beta, seen = 0.0, []
    for size in (0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0):
        with torch.no_grad():
            made.module.sigma.fill_(1.0)
            made.module.code.weight.zero_()
            made.module.code.bias.fill_(size)
        made.begin(steps_of(HYBRID))
        made.learn(torch.arange(5))
        kl = 128 * size**2  # half of it from each side
        beta = max(0.0, beta + 0.0005 * (kl - 0.5))
        seen.append(beta)
        found = made.statistics()
        assert found["Losses/GAIL KL Loss"] == pytest.approx(kl, abs=1e-4)
        assert found["Policy/GAIL Beta"] == pytest.approx(beta, abs=1e-7)
        assert made.module.beta.item() == pytest.approx(beta, abs=1e-7)
    assert seen[0] == 0.0
    assert max(seen) > 0.18


def test_beta_weights_the_divergence() -> None:
    """A large beta keeps the codes near N(0, I)."""
    found = []
    for beta in (0.0, 10.0):
        made, steps = gail(use_vail=True), steps_of(HYBRID)
        for _ in range(60):
            made.module.beta.fill_(beta)
            made.begin(steps)
            made.learn(torch.arange(16))
        found.append(made.statistics()["Losses/GAIL KL Loss"])
    assert found[1] < 0.8 * found[0]


# ---------------------------------------------------------------- training


@KINDS
def test_discriminator_learns_to_distinguish_both_sides(use_actions: bool, use_vail: bool) -> None:
    """If observations differ, demonstrations get the larger estimates."""
    made, steps = gail(use_actions=use_actions, use_vail=use_vail, shake=False), steps_of(HYBRID)
    steps.observations[0][:] += 3.0
    random = np.random.default_rng(0)
    for _ in range(100):
        made.begin(steps)
        made.learn(torch.from_numpy(random.integers(0, len(steps), 16)))
    made.statistics()
    made.begin(steps)
    for _ in range(10):
        made.learn(torch.from_numpy(random.integers(0, len(steps), 16)))
    found = made.statistics()
    assert found["Policy/GAIL Expert Estimate"] > 0.05 + found["Policy/GAIL Policy Estimate"]


def test_one_step_per_minibatch_on_its_rows() -> None:
    """Other rows of the batch do not affect the step, and statistics are means over the steps since `begin`."""
    results = []
    for other in (0.0, 100.0):
        made, steps = gail(), steps_of(HYBRID)
        steps.observations[0][5:] += other
        made.begin(steps)
        made.learn(torch.tensor([4, 2, 0]))
        results.append(state(made.module))
        assert made.optimizer.moments["step"] == 1
    assert results[0] == results[1]
    once = made.statistics()["Losses/GAIL Loss"]
    made.begin(steps)
    made.learn(torch.tensor([4, 2, 0]))
    assert made.optimizer.moments["step"] == 2
    again = made.statistics()["Losses/GAIL Loss"]
    assert once != again


@KINDS
def test_non_finite_minibatch_is_skipped(use_actions: bool, use_vail: bool) -> None:
    """Weights, beta and Adam do not change, bit for bit, and statistics stay finite."""
    made, steps = gail(use_actions=use_actions, use_vail=use_vail), steps_of(HYBRID)
    steps.observations[0][6] = np.nan
    made.begin(steps)
    made.learn(torch.tensor([1, 2, 3]))
    before = state(made.module), moments(made.optimizer)
    made.learn(torch.tensor([4, 6, 8]))
    assert (state(made.module), moments(made.optimizer)) == before
    assert all(np.isfinite(value) for value in made.statistics().values())
    made.learn(torch.tensor([4, 5, 8]))
    assert made.optimizer.moments["step"] == 2
    assert finite(made.module)


def test_skipped_minibatches_report_nothing() -> None:
    """If all minibatches are skipped, there is no loss to publish."""
    made, steps = gail(lengths=[2, 3]), steps_of(HYBRID)
    steps.observations[0][:] = np.inf
    made.begin(steps)
    made.learn(torch.arange(4))
    assert made.statistics() == {}


def test_both_sides_are_normalized_by_the_demonstrations() -> None:
    """With `normalize` the statistics are those of the demonstrations, and the policy does not change them."""
    columns = recorded(HYBRID, [8, 9, 10])
    columns["observation.0"] = 4 + 7 * columns["observation.0"]
    made = gail(columns=columns, normalize=True)
    seen = np.concatenate([columns["observation.0"], columns["observation.1"]], 1).astype(np.float64)
    count = len(seen) + 1  # includes one prior row of mean 0 and variance 1
    mean = seen.sum(0) / count
    variance = (((seen - mean) ** 2).sum(0) + mean**2 + 1) / count
    normalizer = made.module.features.encoder.normalizer
    assert normalizer is not None
    np.testing.assert_allclose(normalizer.mean.numpy(), mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(normalizer.variance.numpy(), variance, rtol=1e-4)
    expected = np.clip((seen - mean) / np.sqrt(variance), -5, 5)
    np.testing.assert_allclose(made.prepare(made._learned)[0].numpy(), expected, rtol=1e-3, atol=1e-4)
    steps = steps_of(HYBRID)
    weights, x = weights_of(made.module), inputs_of(HYBRID, steps, False)
    d = sigmoid(logits(weights, np.clip((x - mean) / np.sqrt(variance), -5, 5))[0])
    np.testing.assert_allclose(made.begin(steps), -np.log(1 - d * (1 - 1e-7)), rtol=1e-3)
    before = normalizer.mean.clone()
    made.learn(torch.arange(5))
    made.statistics()
    assert torch.equal(normalizer.mean, before)


# ---------------------------------------------------------------- held-out episodes


@pytest.mark.parametrize("episodes", [5, 6, 10])
def test_held_out_accuracy_is_of_episodes_that_are_not_trained_on(episodes: int) -> None:
    """Held-out episodes are complete, and the accuracy is the share of their steps with D > 0.5."""
    lengths = [2 + number % 3 for number in range(episodes)]
    columns = recorded(HYBRID, lengths)
    columns["observation.0"][:, 0] = np.repeat(np.arange(episodes), lengths)
    made = gail(columns=columns)
    learned = made.prepare(made._learned)[0][:, 0].numpy()
    held_out_rows = made.prepare(made._held_out)[0][:, 0].numpy()
    assert set(learned.tolist()).isdisjoint(held_out_rows.tolist())
    assert sorted([*learned.tolist(), *held_out_rows.tolist()]) == columns["observation.0"][:, 0].tolist()
    assert len(set(held_out_rows.tolist())) == round(0.2 * episodes)
    made.begin(steps_of(HYBRID))
    for _ in range(10):
        made.learn(torch.arange(8))
    d = sigmoid(logits(weights_of(made.module), made.prepare(made._held_out)[0].double().numpy())[0])
    assert made.statistics()["Policy/GAIL Held-Out Accuracy"] == pytest.approx((d > 0.5).mean())


def test_held_out_accuracy_reveals_overfitting() -> None:
    """A discriminator that has memorized its demonstrations rejects the held-out ones."""
    columns = recorded(HYBRID, [1] * 5)
    made, steps = gail(columns=columns, shake=False), steps_of(HYBRID)
    held_out = made.prepare(made._held_out)[0].numpy()[0]
    for column in (steps.observations[0], steps.observations[1]):
        column[:] = held_out[:3] if column.shape[1] == 3 else held_out[3:]
    made.begin(steps)  # the policy acts like the held-out episode
    for _ in range(400):
        made.learn(torch.arange(16))
    found = made.statistics()
    assert found["Policy/GAIL Held-Out Accuracy"] == 0.0


@pytest.mark.parametrize("episodes", [1, 4])
def test_fewer_than_five_episodes_have_no_held_out_part(episodes: int) -> None:
    """Then all of them are trained on, and there is no such accuracy."""
    made = gail(lengths=[3] * episodes)
    assert made._learned.steps == 3 * episodes
    made.begin(steps_of(HYBRID))
    made.learn(torch.arange(4))
    assert "Policy/GAIL Held-Out Accuracy" not in made.statistics()


def test_statistics_have_the_names_of_ml_agents() -> None:
    """The curves have the names of ML-Agents."""
    plain, vail = gail(), gail(use_vail=True)
    for made in (plain, vail):
        made.begin(steps_of(HYBRID))
        made.learn(torch.arange(4))
    always = {
        "Policy/GAIL Policy Estimate",
        "Policy/GAIL Expert Estimate",
        "Losses/GAIL Loss",
        "Policy/GAIL Grad Mag Loss",
    }
    with_code = {"Policy/GAIL Beta", "Losses/GAIL KL Loss"}
    assert always <= plain.statistics().keys()
    assert with_code.isdisjoint(plain.statistics())
    assert always | with_code <= vail.statistics().keys()
