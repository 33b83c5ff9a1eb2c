"""Curiosity and RND compared with networks in numpy (float64)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sparring.pipeline.learning.settings import CuriositySettings, RndSettings
from sparring.pipeline.learning.signals import Steps
from sparring.pipeline.learning.signals.novelty import Curiosity, Rnd
from sparring.pipeline.specs import BehaviorSpec
from tests.learning.signals_helpers import (
    PARTS,
    SPECS,
    Weights,
    actions_by_hand,
    add_noise,
    dense,
    finite,
    linear,
    moments,
    network,
    slope,
    some_places,
    state,
    steps_from,
    steps_of,
    weights_of,
)

HYBRID = SPECS["hybrid"]
VECTORS = pytest.mark.parametrize("name", ["hybrid", "continuous", "discrete"])
EVERY = pytest.mark.parametrize("name", list(SPECS))


def curiosity(spec: BehaviorSpec = HYBRID, *, updated: bool = True, normalize: bool = False, **how: Any) -> Curiosity:
    settings = CuriositySettings(
        **({"network_settings": network(normalize=normalize), "learning_rate": 1e-3, "strength": 1e-4} | how)
    )
    made = Curiosity(spec, settings, torch.Generator().manual_seed(0))
    add_noise(made.module)
    made.module.updated.fill_(float(updated))
    return made


def rnd(spec: BehaviorSpec = HYBRID, *, normalize: bool = False) -> Rnd:
    settings = RndSettings(network_settings=network(normalize=normalize), learning_rate=1e-3)
    return Rnd(spec, settings, torch.Generator().manual_seed(0))


# ---------------------------------------------------------------- the twin


def observations_of(steps: Steps) -> np.ndarray:
    """Returns all observations [n, F]; those after ends of segments are last."""
    return np.concatenate([column.astype(np.float64) for column in steps.observations], axis=1)


def errors(weights: Weights, spec: BehaviorSpec, before: Any, after: Any, done: Any) -> tuple[Any, Any]:
    """Returns forward and inverse loss of each row."""
    now, later = dense(weights, "features.layers", before), dense(weights, "features.layers", after)
    predicted = linear(weights, "forward_head", dense(weights, "forward_model", np.concatenate([now, done], 1)))
    forward = 0.5 * ((predicted - later) ** 2).sum(1)
    guessed = linear(weights, "inverse_head", dense(weights, "inverse", np.concatenate([now, later], 1)))
    inverse, at = np.zeros(len(before)), 0
    for _ in range(spec.actions.continuous):
        inverse += (guessed[:, at] - done[:, at]) ** 2
        at += 1
    for size in spec.actions.discrete:
        part, chosen = guessed[:, at : at + size], done[:, at : at + size]
        inverse -= ((part - np.logaddexp.reduce(part, axis=1)[:, None]) * chosen).sum(1)
        at += size
    return forward, inverse


def both_errors(weights: Weights, spec: BehaviorSpec, steps: Steps, at: Any) -> tuple[Any, Any]:
    every, done = observations_of(steps), actions_by_hand(spec.actions, steps.continuous, steps.discrete)
    return errors(weights, spec, every[at], every[steps.following[at]], done[at])


# ---------------------------------------------------------------- curiosity


@VECTORS
def test_reward_is_the_forward_error(name: str) -> None:
    """The reward is half the squared error of the forward model, summed over the encoding."""
    spec = SPECS[name]
    made, steps = curiosity(spec), steps_of(spec)
    forward, _ = both_errors(weights_of(made.module), spec, steps, np.arange(len(steps)))
    rewards = made.begin(steps)
    assert rewards.dtype == np.float32
    np.testing.assert_allclose(rewards, forward, rtol=1e-3)
    assert len(np.unique(rewards)) > 10


def test_reward_of_a_last_step_uses_the_observation_after_its_segment() -> None:
    """Another observation after a segment changes the reward of its last step only."""
    made, steps, changed = curiosity(), steps_of(HYBRID), steps_of(HYBRID)
    rows, last = len(steps), np.cumsum([length for _, length, _ in PARTS]) - 1
    changed.observations[0][rows + 2] += 1.0
    one, other = made.begin(steps), made.begin(changed)
    np.testing.assert_array_equal(np.flatnonzero(one != other), [last[2]])


@pytest.mark.parametrize("strength", [0.05, 0.5, 4.0])
def test_reward_is_clipped_at_one_over_strength(strength: float) -> None:
    """Multiplied by the strength, no reward exceeds 1."""
    made, steps = curiosity(strength=strength), steps_of(HYBRID)
    forward, _ = both_errors(weights_of(made.module), HYBRID, steps, np.arange(len(steps)))
    np.testing.assert_allclose(made.begin(steps), np.minimum(forward, 1 / strength), rtol=1e-3)


def test_clipping_depends_on_strength() -> None:
    """Some of these steps are clipped with strength 4, and some are not with 0.05."""
    steps = steps_of(HYBRID)
    assert (curiosity(strength=4.0).begin(steps) == 0.25).any()
    assert (curiosity(strength=0.05).begin(steps) < 20).any()


def test_strength_zero_gives_no_reward() -> None:
    """A strength of 0 gives no reward and no division by zero."""
    assert not curiosity(strength=0.0).begin(steps_of(HYBRID)).any()


def test_no_reward_until_the_first_update() -> None:
    """Untrained models cannot measure novelty, so rewards begin after the first update."""
    made, steps = curiosity(updated=False), steps_of(HYBRID)
    assert not made.begin(steps).any()
    assert not made.begin(steps).any()
    made.learn(torch.arange(5))
    assert made.module.updated.item() == 1
    assert made.begin(steps).all()


@VECTORS
def test_losses_and_gradient(name: str) -> None:
    """A step reports its losses and follows the gradient of 10 (0.2 forward + 0.8 inverse)."""
    spec = SPECS[name]
    made, steps = curiosity(spec), steps_of(spec)
    at = np.array([0, 3, 9, 11, 20, 14])
    weights = weights_of(made.module)
    made.begin(steps)
    made.learn(torch.from_numpy(at))
    gradients = made.optimizer.named(made.optimizer.gradient)
    forward, inverse = both_errors(weights, spec, steps, at)
    found = made.statistics()
    assert found["Losses/Curiosity Forward Loss"] == pytest.approx(forward.mean(), rel=1e-4)
    assert found["Losses/Curiosity Inverse Loss"] == pytest.approx(inverse.mean(), rel=1e-4)
    assert set(found) == {"Losses/Curiosity Forward Loss", "Losses/Curiosity Inverse Loss"}

    def total(moved: Weights) -> float:
        one, other = both_errors(moved, spec, steps, at)
        return 10 * (0.2 * one.mean() + 0.8 * other.mean())

    for key, place in some_places(weights, [one for one in weights if one != "updated"], each=3):
        slow = slope(total, weights, key, place)
        assert gradients[key][place].item() == pytest.approx(slow, rel=2e-3, abs=2e-4), (key, place)


def test_losses_are_means_over_the_steps_of_a_batch() -> None:
    """Losses are means over the minibatches since `begin`."""
    made, steps = curiosity(), steps_of(HYBRID)
    made.begin(steps)
    every = []
    for at in (np.arange(4), np.arange(4, 13)):
        every.append([part.mean() for part in both_errors(weights_of(made.module), HYBRID, steps, at)])
        made.learn(torch.from_numpy(at))
    found = made.statistics()
    assert found["Losses/Curiosity Forward Loss"] == pytest.approx(np.mean([one for one, _ in every]), rel=1e-4)
    assert found["Losses/Curiosity Inverse Loss"] == pytest.approx(np.mean([one for _, one in every]), rel=1e-4)
    made.begin(steps)
    assert made.statistics() == {}


def test_inverse_model_sees_executed_actions() -> None:
    """Raw samples above 3 are the same action as 3."""
    results = []
    for size in (3.0, 30.0):
        spec = SPECS["continuous"]
        plain = steps_of(spec, [(1, 6, True)])
        raw = np.full((6, 2), size, np.float32)
        steps = steps_from(
            spec.actions, np.array([6]), [plain.observations[0][:6]], [plain.observations[0][6:]], raw,
            plain.discrete, np.array([True]), np.array([1]),
        )  # fmt: skip
        made = curiosity(spec)
        rewards = made.begin(steps)
        made.learn(torch.arange(6))
        results.append((rewards.tobytes(), state(made.module)))
    assert results[0] == results[1]


def test_curiosity_about_repeated_steps_falls() -> None:
    """Rewards of repeated steps fall, and those of new ones are higher."""
    made, steps = curiosity(updated=False), steps_of(HYBRID)
    made.begin(steps)
    made.learn(torch.arange(len(steps)))
    first = made.begin(steps).mean()
    for _ in range(150):
        made.learn(torch.arange(len(steps)))
    later = made.begin(steps).mean()
    new = steps_of(HYBRID, seed=5)
    new.observations[0][:] += 4
    assert later < 0.5 * first
    assert made.begin(new).mean() > 3 * later


# ---------------------------------------------------------------- RND


def test_reward_is_the_squared_error_to_the_target() -> None:
    """The error is summed over the features of the step's own observations."""
    made, steps = rnd(), steps_of(HYBRID)
    add_noise(made.module.predictor)
    weights, x = weights_of(made.module), observations_of(steps)[: len(steps)]
    expected = ((dense(weights, "predictor.layers", x) - dense(weights, "target.layers", x)) ** 2).sum(1)
    rewards = made.begin(steps)
    assert rewards.dtype == np.float32
    np.testing.assert_allclose(rewards, expected, rtol=1e-4)


def test_loss_and_gradient_of_distillation() -> None:
    """The loss is the mean of that error, and its gradient is that of the predictor."""
    made, steps = rnd(), steps_of(HYBRID)
    add_noise(made.module.predictor)
    at, weights = np.array([2, 5, 7, 19]), weights_of(made.module)
    x = observations_of(steps)[at]
    made.begin(steps)
    made.learn(torch.from_numpy(at))
    gradients = made.optimizer.named(made.optimizer.gradient)

    def loss(moved: Weights) -> float:
        difference = dense(moved, "predictor.layers", x) - dense(weights, "target.layers", x)
        return float((difference**2).sum(1).mean())

    assert made.statistics() == {"Losses/RND Loss": pytest.approx(loss(weights), rel=1e-4)}
    names = [name for name in weights if name.startswith("predictor.")]
    for name, place in some_places(weights, names):
        slow = slope(loss, weights, name, place)
        assert gradients[name.removeprefix("predictor.")][place].item() == pytest.approx(slow, rel=2e-3, abs=2e-4)


@EVERY
def test_target_network_never_changes(name: str) -> None:
    """Only the predictor is trained, and its error falls."""
    spec = SPECS[name]
    made, steps = rnd(spec), steps_of(spec)
    target, predictor = state(made.module.target), state(made.module.predictor)
    first = made.begin(steps).mean()
    for _ in range(60):
        made.learn(torch.arange(len(steps)))
    made.statistics()
    assert state(made.module.target) == target
    assert state(made.module.predictor) != predictor
    assert made.begin(steps).mean() < 0.7 * first
    assert not any(parameter.requires_grad for parameter in made.module.target.parameters())


def test_predictor_and_target_have_different_initial_weights() -> None:
    """The two networks have the same shape and different weights."""
    made = rnd()
    predictor, target = weights_of(made.module.predictor), weights_of(made.module.target)
    assert predictor.keys() == target.keys()
    assert all(predictor[name].shape == target[name].shape for name in target)
    assert any((predictor[name] != target[name]).any() for name in target)


def test_rnd_depends_on_own_observations_only() -> None:
    """The reward depends on observations only."""
    made, steps, other = rnd(), steps_of(HYBRID), steps_of(HYBRID)
    other.continuous[:] = 0
    other.observations[0][len(steps) :] = 9
    np.testing.assert_array_equal(made.begin(steps), made.begin(other))


# ---------------------------------------------------------------- both


def both(spec: BehaviorSpec, **how: Any) -> list[Any]:
    return [curiosity(spec, **how), rnd(spec, **how)]


@EVERY
def test_all_kinds_of_observations(name: str) -> None:
    """Rewards and weights are finite for every kind of observation, with one step per call."""
    spec = SPECS[name]
    for made in both(spec):
        steps = steps_of(spec)
        for update in range(2):
            rewards = made.begin(steps)
            assert rewards.shape == (len(steps),)
            assert np.isfinite(rewards).all()
            assert (rewards >= 0).all()
            made.learn(torch.arange(9))
            assert made.optimizer.moments["step"] == update + 1
            assert all(np.isfinite(value) for value in made.statistics().values())
        assert finite(made.module)


@EVERY
def test_non_finite_minibatch_is_skipped(name: str) -> None:
    """Weights, `updated` and Adam do not change, bit for bit, and statistics stay finite."""
    spec = SPECS[name]
    steps = steps_of(spec)
    at = next((at for at, column in enumerate(steps.observations) if column.dtype == np.float32), None)
    assert at is not None
    steps.observations[at][2] = np.nan
    for made in both(spec):
        if isinstance(made, Curiosity):
            made.module.updated.zero_()
        before = state(made.module), moments(made.optimizer)
        made.begin(steps)
        made.learn(torch.tensor([1, 2, 3]))
        assert (state(made.module), moments(made.optimizer)) == before
        made.learn(torch.tensor([4, 5, 6]))
        assert made.optimizer.moments["step"] == 1
        assert all(np.isfinite(value) for value in made.statistics().values())
        assert finite(made.module)


def test_rewards_of_many_rows_equal_those_of_the_twin() -> None:
    """Rewards do not depend on the division into chunks."""
    parts = [(episode, 900, True) for episode in range(6)]
    steps = steps_of(HYBRID, parts)
    made = curiosity()
    forward, _ = both_errors(weights_of(made.module), HYBRID, steps, np.arange(len(steps)))
    np.testing.assert_allclose(made.begin(steps), forward, rtol=2e-3)
    other = rnd()
    weights, x = weights_of(other.module), observations_of(steps)[: len(steps)]
    expected = ((dense(weights, "predictor.layers", x) - dense(weights, "target.layers", x)) ** 2).sum(1)
    np.testing.assert_allclose(other.begin(steps), expected, rtol=1e-3)


def test_normalization_uses_statistics_of_earlier_batches() -> None:
    """With `normalize` a batch is normalized by the statistics before it, which then include its rows.

    Observations after a segment are not counted, because the next segment may contain them.
    """
    for made in both(HYBRID, normalize=True):
        encoder = made.module.features.encoder if isinstance(made, Curiosity) else made.module.predictor.encoder
        normalizer = encoder.normalizer
        steps = steps_of(HYBRID)
        steps.observations[0][:] = 2 + 5 * steps.observations[0]
        before = made.begin(steps)
        made.learn(torch.arange(5))
        assert normalizer.count.item() == 1
        assert not normalizer.mean.any()
        made.statistics()
        x = observations_of(steps)[: len(steps)]
        assert normalizer.count.item() == 1 + len(steps)
        np.testing.assert_allclose(normalizer.mean.numpy(), x.sum(0) / (len(x) + 1), rtol=1e-4)
        assert (made.begin(steps) != before).all()
