"""GAIL and VAIL compared with a discriminator in numpy (float64) with derivatives by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from tests.learning.gail_twin import (
    EPISODES,
    HYBRID,
    KINDS,
    copy_of,
    gail,
    input_gradient,
    inputs_of,
    learned_of,
    logits,
    parts_of,
    prepared,
    samples_of,
)
from tests.learning.signals_helpers import (
    SPECS,
    actions_by_hand,
    demonstrations_of,
    finite,
    recorded,
    sigmoid,
    slope,
    some_places,
    state,
    steps_from,
    steps_of,
    weights_of,
)


@KINDS
def test_derivative_by_hand(use_actions: bool, use_vail: bool) -> None:
    """The derivative of D by hand equals central differences."""
    made = gail(use_actions=use_actions, use_vail=use_vail)
    weights, x = weights_of(made.module), inputs_of(HYBRID, steps_of(HYBRID), use_actions)[:4]
    noise = np.random.default_rng(0).standard_normal((4, 128))
    gradient = input_gradient(weights, x, noise)
    for column in range(x.shape[1]):
        step = np.zeros_like(x)
        step[:, column] = 1e-6
        sides = [sigmoid(logits(weights, x + sign * step, noise)[0]) for sign in (1, -1)]
        np.testing.assert_allclose(gradient[:, column], (sides[0] - sides[1]) / 2e-6, atol=1e-8)


# ---------------------------------------------------------------- inputs


def test_inputs_contain_actions_and_ends() -> None:
    """Observations are followed by executed continuous actions, one-hot branches and the end."""
    made, steps = gail(use_actions=True), steps_of(HYBRID)
    assert (np.abs(steps.continuous) == 1).any()  # some raw samples exceed the range
    _, more = prepared(made, steps)
    assert more.shape == (len(steps), 2 + 3 + 2 + 1)
    expected = np.concatenate(
        [actions_by_hand(HYBRID.actions, steps.continuous, steps.discrete), steps.ended[:, None]], 1
    )
    np.testing.assert_array_equal(more.numpy(), expected.astype(np.float32))


def test_raw_samples_are_clipped_to_three_and_divided() -> None:
    """Raw samples of a policy become executed actions: clip(a, -3, 3) / 3."""
    raw = np.array([[-7.0, -3.0], [-1.5, 0.0], [2.9, 31.0]], np.float32)
    empty = np.zeros((3, 0), np.int32)
    steps = steps_from(
        ActionSpec(continuous=2), np.array([3]), [np.zeros((3, 1))], [np.zeros((1, 1))], raw, empty,
        np.array([True]), np.array([1]),
    )  # fmt: skip
    np.testing.assert_allclose(steps.continuous, [[-1, -1], [-0.5, 0], [2.9 / 3, 1]], rtol=1e-6)
    np.testing.assert_allclose(steps.done.numpy(), steps.continuous)


def test_demonstrated_actions_are_not_rescaled() -> None:
    """Demonstrated actions are in [-1, 1] already and are not divided again."""
    columns = recorded(HYBRID, EPISODES)
    demonstrations = demonstrations_of(HYBRID, columns)
    _, more = gail(use_actions=True).prepare(demonstrations)
    ended = np.concatenate([[0.0] * (length - 1) + [1.0] for length in EPISODES])[:, None]
    expected = np.concatenate([actions_by_hand(HYBRID.actions, columns["continuous"], columns["discrete"]), ended], 1)
    np.testing.assert_allclose(more.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("use_vail", [False, True])
def test_without_use_actions_the_discriminator_ignores_actions_and_ends(use_vail: bool) -> None:
    """Neither rewards nor weights depend on actions or ends of episodes."""
    results = []
    for parts in ([(1, 8, True), (2, 9, False)], [(1, 8, False), (2, 9, True)]):
        made = gail(use_vail=use_vail)
        steps = steps_of(HYBRID, parts)
        if parts[0][2]:
            steps.done.neg_()
        assert len(prepared(made, steps)) == 1
        rewards = made.begin(steps)
        made.learn(torch.arange(9))
        results.append((rewards.tobytes(), state(made.module)))
    assert results[0] == results[1]
    assert weights_of(made.module)["features.layers.0.weight"].shape[1] == 5


def test_with_use_actions_the_discriminator_sees_actions_and_ends() -> None:
    """The reward depends on observations, continuous actions, branches and the end."""
    made = gail(use_actions=True)
    assert weights_of(made.module)["features.layers.0.weight"].shape[1] == 5 + 2 + 5 + 1
    steps = steps_of(HYBRID)
    before = made.begin(steps)
    for place in (0, 2, "ended"):  # the first continuous action, the first branch, the end
        changed = steps_of(HYBRID)
        if place == "ended":
            changed.ended[0] = ~changed.ended[0]
        else:
            changed.done[0, place] = (changed.done[0, place] + 1) % 2
        after = made.begin(changed)
        assert after[0] != before[0], place
        np.testing.assert_array_equal(after[1:], before[1:])


# ---------------------------------------------------------------- reward


@KINDS
def test_reward(use_actions: bool, use_vail: bool) -> None:
    """The reward is -log(1 - D (1 - 1e-7)); with VAIL it uses the mean code and samples nothing."""
    made = gail(use_actions=use_actions, use_vail=use_vail)
    steps, sampled = steps_of(HYBRID), made._generator.get_state()
    d = sigmoid(logits(weights_of(made.module), inputs_of(HYBRID, steps, use_actions))[0])
    rewards = made.begin(steps)
    assert rewards.dtype == np.float32
    np.testing.assert_allclose(rewards, -np.log(1 - d * (1 - 1e-7)), rtol=2e-5)
    assert torch.equal(made._generator.get_state(), sampled)


@pytest.mark.parametrize("logit", [-200.0, -20.0, -8.0, 0.0, 5.0, 9.0, 12.0, 30.0, 200.0])
def test_reward_of_large_logits(logit: float) -> None:
    """For every logit the reward is finite, not negative, and that of the formula."""
    made = gail(shake=False)
    with torch.no_grad():
        made.module.head.weight.zero_()
        made.module.head.bias.fill_(logit)
    rewards = made.begin(steps_of(HYBRID))
    assert np.isfinite(rewards).all()
    assert (rewards >= 0).all()
    expected = -np.log(1 - float(sigmoid(np.array(logit))) * (1 - 1e-7))
    np.testing.assert_allclose(rewards, expected, rtol=0.02, atol=1e-6)  # 1 - 1e-7 in float32 is 1 - 1.2e-7


def test_reward_over_many_rows() -> None:
    """Rewards do not depend on the division into chunks."""
    made, spec = gail(), HYBRID
    steps = steps_of(spec, [(episode, 500, True) for episode in range(10)])
    rewards = made.begin(steps)
    d = sigmoid(logits(weights_of(made.module), inputs_of(spec, steps, False))[0])
    np.testing.assert_allclose(rewards, -np.log(1 - d * (1 - 1e-7)), rtol=2e-5)


# ---------------------------------------------------------------- a step


@KINDS
def test_step_equals_that_of_the_twin(use_actions: bool, use_vail: bool) -> None:
    """A step reports its loss and follows the gradient of loss + weight x penalty + beta (KL - 0.5)."""
    made = gail(use_actions=use_actions, use_vail=use_vail, gradient_penalty=4.0)
    if use_vail:
        made.module.beta.fill_(0.3)
    steps = steps_of(HYBRID)
    made.begin(steps)
    at = torch.tensor([3, 0, 11, 7, 20, 5])
    twin = copy_of(made._generator)
    which = torch.randint(made._learned.steps, (len(at),), generator=twin)
    sampled = samples_of(twin, len(at), use_vail)
    weights = weights_of(made.module)
    policy = inputs_of(HYBRID, steps, use_actions)[at.numpy()]
    expert = learned_of(made, use_actions)[which.numpy()]
    made.learn(at)
    assert torch.equal(made._generator.get_state(), twin.get_state())

    gradients = made.optimizer.named(made.optimizer.gradient)
    expected = parts_of(weights, policy, expert, sampled, 4.0)
    found = made.statistics()
    assert found["Losses/GAIL Loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert found["Policy/GAIL Policy Estimate"] == pytest.approx(expected["policy"], rel=1e-4)
    assert found["Policy/GAIL Expert Estimate"] == pytest.approx(expected["expert"], rel=1e-4)
    assert found["Policy/GAIL Grad Mag Loss"] == pytest.approx(4 * expected["penalty"], rel=1e-4)
    if use_vail:
        assert found["Losses/GAIL KL Loss"] == pytest.approx(expected["kl"], rel=1e-4)
        assert made.module.beta.item() == pytest.approx(0.3 + 0.0005 * (expected["kl"] - 0.5), rel=1e-5)
        assert made.module.beta.item() != pytest.approx(0.3, rel=1e-5)
        assert found["Policy/GAIL Beta"] == made.module.beta.item()

    names = [name for name in weights if name != "beta"]
    for name, place in some_places(weights, names):
        slow = slope(lambda moved: parts_of(moved, policy, expert, sampled, 4.0)["total"], weights, name, place)
        assert gradients[name][place].item() == pytest.approx(slow, rel=2e-3, abs=2e-4), (name, place)


@pytest.mark.parametrize("logit", [-300.0, 300.0])
@pytest.mark.parametrize("use_vail", [False, True])
def test_loss_of_large_logits(logit: float, use_vail: bool) -> None:
    """The loss is computed from logits, so it and its gradient are finite."""
    made = gail(use_vail=use_vail, shake=False)
    with torch.no_grad():
        made.module.head.weight.zero_()
        made.module.head.bias.fill_(logit)
    made.begin(steps_of(HYBRID))
    made.learn(torch.arange(6))
    assert made.statistics()["Losses/GAIL Loss"] == pytest.approx(300, rel=1e-5)
    assert finite(made.module)
    assert made.optimizer.moments["step"] == 1


@KINDS
def test_penalty_is_finite_where_the_input_gradient_is_zero(use_actions: bool, use_vail: bool) -> None:
    """The gradient of the norm at 0 is finite."""
    made = gail(use_actions=use_actions, use_vail=use_vail, shake=False)
    with torch.no_grad():
        made.module.head.weight.zero_()
    made.begin(steps_of(HYBRID))
    made.learn(torch.arange(8))
    assert made.statistics()["Policy/GAIL Grad Mag Loss"] == pytest.approx(10 * (np.sqrt(1e-7) - 1) ** 2, rel=1e-5)
    assert bool(torch.isfinite(made.optimizer.gradient).all())
    assert made.optimizer.moments["step"] == 1
    assert finite(made.module)


@pytest.mark.parametrize("name", ["bytes", "floats", "entities", "goal"])
@pytest.mark.parametrize("zero", [False, True])
@KINDS
def test_penalty_through_encoders(name: str, zero: bool, use_actions: bool, use_vail: bool) -> None:
    """The gradient flows through images, entities and goals, and is finite even if it is 0."""
    spec = SPECS[name]
    made = gail(spec, use_actions=use_actions, use_vail=use_vail)
    if zero:
        with torch.no_grad():
            made.module.head.weight.zero_()
    made.begin(steps_of(spec))
    made.learn(torch.arange(9))
    gradients = made.optimizer.named(made.optimizer.gradient)
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values())
    assert made.optimizer.moments["step"] == 1
    assert finite(made.module)
    if not zero:
        encoded = [gradient for name, gradient in gradients.items() if name.startswith("features.")]
        assert all(bool(gradient.any()) for gradient in encoded)


def test_penalty_is_finite_without_entities() -> None:
    """Lists of entities that are all padding have finite gradients."""
    spec = SPECS["entities"]
    columns = recorded(spec, EPISODES)
    columns["observation.1"][:] = 0
    made = gail(spec, columns=columns)
    steps = steps_of(spec)
    steps.observations[1][:] = 0
    made.begin(steps)
    made.learn(torch.arange(9))
    assert made.optimizer.moments["step"] == 1
    assert finite(made.module)


def test_bytes_are_equivalent_to_floats_from_0_to_1() -> None:
    """A byte image has the same penalty as the same float image in 0..1."""
    spec = BehaviorSpec(
        observations=(ObservationSpec(name="eye", shape=(1, 6, 5), kind="image"),), actions=ActionSpec(discrete=(2,))
    )
    of_bytes = BehaviorSpec(
        observations=(ObservationSpec(name="eye", shape=(1, 6, 5), kind="image", dtype="uint8"),), actions=spec.actions
    )
    columns, found = recorded(of_bytes, EPISODES), []
    steps = steps_of(of_bytes)
    for one in (of_bytes, spec):
        if one is spec:
            columns = {
                name: column.astype(np.float32) / 255 if "observation." in name else column
                for name, column in columns.items()
            }
            steps.observations = tuple(column.astype(np.float32) / 255 for column in steps.observations)
        made = gail(one, columns=columns)
        rewards = made.begin(steps)
        made.learn(torch.arange(7))
        found.append((rewards, made.statistics()))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-5)
    for name, value in found[0][1].items():
        assert found[1][1][name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("rows", [1, 2, 40])
def test_step_has_equally_many_rows_of_both_sides(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step samples as many demonstrated rows as policy rows, even if there are fewer."""
    made, steps = gail(lengths=[2, 1]), steps_of(HYBRID, [(1, 50, True)])
    seen = []
    plain = made.step
    monkeypatch.setattr(
        made,
        "step",
        lambda policy, expert: seen.append((len(policy[0]), len(expert[0]))) or plain(policy, expert),
    )
    made.begin(steps)
    made.learn(torch.arange(rows))
    assert seen == [(rows, rows)]
