"""GAIL and VAIL against a discriminator written out in numpy (float64), its derivatives by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparring.pipeline.learning.settings import GailSettings
from sparring.pipeline.learning.signals.gail import Gail
from sparring.pipeline.learning.signals.steps import Steps
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from tests.learning.signals_helpers import (
    SPECS,
    Weights,
    done_by_hand,
    finite,
    linear,
    moments,
    network,
    recorded,
    shaken,
    shown_of,
    sigmoid,
    silu,
    slope,
    some_places,
    state,
    steps_of,
    weights_of,
)

HYBRID = SPECS["hybrid"]
EPISODES = [3, 4, 1, 2, 5, 6]
KINDS = pytest.mark.parametrize(
    ("use_actions", "use_vail"), [(False, False), (True, False), (False, True), (True, True)]
)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def gail(spec=HYBRID, *, lengths=EPISODES, seed=0, columns=None, shake=True, normalize=False, **how) -> Gail:
    """A small discriminator with demonstrations in memory."""
    settings = GailSettings(demo_path="none", network_settings=network(normalize=normalize), learning_rate=1e-3, **how)
    shown = shown_of(spec, recorded(spec, lengths, seed=seed) if columns is None else columns)
    made = Gail(spec, settings, shown, torch.Generator().manual_seed(seed))
    if shake:
        shaken(made.module)
    return made


def copied(generator: torch.Generator) -> torch.Generator:
    """Another one that will draw the same."""
    other = torch.Generator()
    other.set_state(generator.get_state())
    return other


# ---------------------------------------------------------------- written out


def hidden(weights: Weights, x: np.ndarray) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """Features, and for each layer its weights and the derivative of its activation."""
    passed, layer = [], 0
    while f"features.layers.{layer}.weight" in weights:
        before = linear(weights, f"features.layers.{layer}", x)
        share = sigmoid(before)
        passed.append((weights[f"features.layers.{layer}.weight"], share * (1 + before * (1 - share))))
        x, layer = silu(before), layer + 2
    assert layer
    return x, passed


def logits(weights: Weights, x: np.ndarray, noise: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray | None]:
    """Logits, and the mean code where there is one; without noise of the mean code."""
    features, _ = hidden(weights, x)
    if "code.weight" not in weights:
        return linear(weights, "head", features)[:, 0], None
    mean = linear(weights, "code", features)
    code = mean if noise is None else mean + weights["sigma"] * noise
    return linear(weights, "head", code)[:, 0], mean


def input_gradient(weights: Weights, x: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
    """Derivative of D, not of its logit, for its inputs."""
    d = sigmoid(logits(weights, x, noise)[0])
    back = np.repeat(weights["head.weight"], len(x), axis=0)
    if "code.weight" in weights:
        back = back @ weights["code.weight"]
    for matrix, derivative in reversed(hidden(weights, x)[1]):
        back = (back * derivative) @ matrix
    return (d * (1 - d))[:, None] * back


def divergence(weights: Weights, policy: np.ndarray, expert: np.ndarray) -> float:
    """Sum over the code of both sides' KL from N(0, 1), number by number, mean over rows."""
    total = 0.0
    for row in range(len(policy)):
        for at, sigma in enumerate(weights["sigma"]):
            for mean in (policy[row, at], expert[row, at]):
                total += 0.5 * (mean**2 + sigma**2 - 1) - np.log(sigma)
    return total / len(policy)


def parts_of(weights: Weights, policy: np.ndarray, expert: np.ndarray, drawn: dict[str, np.ndarray]) -> dict:
    """Everything that a step is made of."""
    rows = len(policy)
    both, means = logits(weights, np.concatenate([policy, expert]), drawn.get("noise"))
    of_policy, of_expert = both[:rows], both[rows:]
    # -log D = log(1 + exp(-logit)), -log(1 - D) = log(1 + exp(logit))
    found = {
        "loss": (np.logaddexp(0, -of_expert) + np.logaddexp(0, of_policy)).mean(),
        "policy": sigmoid(of_policy).mean(),
        "expert": sigmoid(of_expert).mean(),
    }
    between = drawn["share"][:, None] * policy + (1 - drawn["share"][:, None]) * expert
    gradient = input_gradient(weights, between, drawn.get("between_noise"))
    norms = np.sqrt((gradient**2).sum(1) + 1e-7)
    found["penalty"] = ((norms - 1) ** 2).mean()
    found["total"] = found["loss"] + 10 * found["penalty"]
    if means is not None:
        found["kl"] = divergence(weights, means[:rows], means[rows:])
        found["total"] += weights["beta"] * (found["kl"] - 0.5)
    return found


def inputs_of(spec: BehaviorSpec, steps: Steps, use_actions: bool) -> np.ndarray:
    """What a discriminator of vectors reads: observations, then what was done, then the end."""
    rows = len(steps.ended)
    columns = [column[:rows].astype(np.float64) for column in steps.observations]
    if use_actions:
        columns += [done_by_hand(spec.actions, steps.continuous, steps.discrete), steps.ended[:, None].astype(float)]
    return np.concatenate(columns, axis=1)


def learned_of(made: Gail, use_actions: bool) -> np.ndarray:
    """The demonstrations that it learns from, as it reads them."""
    shown = made._expert
    columns = [shown.inputs[0]] if shown.more is None else [shown.inputs[0], shown.more]
    assert (shown.more is not None) == use_actions
    return torch.cat(columns, 1).double().numpy()


def drawn_of(generator: torch.Generator, rows: int, use_vail: bool) -> dict[str, np.ndarray]:
    """What a step will draw, in its order."""
    drawn = {}
    if use_vail:
        drawn["noise"] = torch.randn((2 * rows, 128), generator=generator).double().numpy()
    drawn["share"] = torch.rand(rows, generator=generator).double().numpy()
    if use_vail:
        drawn["between_noise"] = torch.randn((rows, 128), generator=generator).double().numpy()
    return drawn


@KINDS
def test_derivative_by_hand(use_actions: bool, use_vail: bool) -> None:
    """The twin's derivative of D for its inputs is that of differences."""
    made = gail(use_actions=use_actions, use_vail=use_vail)
    weights, x = weights_of(made.module), inputs_of(HYBRID, steps_of(HYBRID), use_actions)[:4]
    noise = np.random.default_rng(0).standard_normal((4, 128))
    gradient = input_gradient(weights, x, noise)
    for column in range(x.shape[1]):
        step = np.zeros_like(x)
        step[:, column] = 1e-6
        sides = [sigmoid(logits(weights, x + sign * step, noise)[0]) for sign in (1, -1)]
        np.testing.assert_allclose(gradient[:, column], (sides[0] - sides[1]) / 2e-6, atol=1e-8)


# ---------------------------------------------------------------- what it sees


def test_what_was_done_and_the_end_stand_in_their_places() -> None:
    """Beside the observations: continuous actions clipped to 3 over 3, one 1 for each branch, then the end."""
    made, steps = gail(use_actions=True), steps_of(HYBRID)
    assert (np.abs(steps.continuous) == 1).any()  # some raw samples reach beyond
    more = made.module.show(steps).more
    assert more is not None
    assert more.shape == (len(steps), 2 + 3 + 2 + 1)
    expected = np.concatenate([done_by_hand(HYBRID.actions, steps.continuous, steps.discrete), steps.ended[:, None]], 1)
    np.testing.assert_array_equal(more.numpy(), expected.astype(np.float32))


def test_raw_samples_are_clipped_to_three_and_divided() -> None:
    """A policy's raw samples become what a simulator got: clip(a, -3, 3) / 3."""
    raw = np.array([[-7.0, -3.0], [-1.5, 0.0], [2.9, 31.0]], np.float32)
    empty = np.zeros((3, 0), np.int32)
    steps = Steps.of_segments(
        ActionSpec(continuous=2), np.array([3]), [np.zeros((3, 1))], [np.zeros((1, 1))], raw, empty,
        np.array([True]), np.array([1]),
    )  # fmt: skip
    np.testing.assert_allclose(steps.continuous, [[-1, -1], [-0.5, 0], [2.9 / 3, 1]], rtol=1e-6)
    np.testing.assert_allclose(steps.done.numpy(), steps.continuous)


def test_demonstrated_actions_stay_as_they_were_executed() -> None:
    """What was demonstrated is in [-1, 1] already, and is not divided again; its end is each episode's last step."""
    columns = recorded(HYBRID, EPISODES)
    shown = shown_of(HYBRID, columns)
    steps = Steps.of_demonstrations(HYBRID.actions, shown)
    made = gail(use_actions=True)
    more = made.module.show(steps).more
    assert more is not None
    ended = np.concatenate([[0.0] * (length - 1) + [1.0] for length in EPISODES])[:, None]
    expected = np.concatenate([done_by_hand(HYBRID.actions, columns["continuous"], columns["discrete"]), ended], 1)
    np.testing.assert_allclose(more.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("use_vail", [False, True])
def test_without_use_actions_nothing_of_actions_or_ends_is_seen(use_vail: bool) -> None:
    """Neither rewards nor what is learned change with what was done or with when episodes end."""
    results = []
    for parts in ([(1, 8, True), (2, 9, False)], [(1, 8, False), (2, 9, True)]):
        made = gail(use_vail=use_vail)
        steps = steps_of(HYBRID, parts)
        if parts[0][2]:
            steps.continuous[:] = -steps.continuous
            steps.discrete[:] = 0
        assert made.module.show(steps).more is None
        rewards = made.begin(steps)
        made.learn(torch.arange(9))
        results.append((rewards.tobytes(), state(made.module)))
    assert results[0] == results[1]
    assert weights_of(made.module)["features.layers.0.weight"].shape[1] == 5


def test_with_use_actions_all_of_them_are_seen() -> None:
    """The first layer reads observations, actions, branches and the end; each of these moves the reward."""
    made = gail(use_actions=True)
    assert weights_of(made.module)["features.layers.0.weight"].shape[1] == 5 + 2 + 5 + 1
    steps = steps_of(HYBRID)
    before = made.begin(steps)
    for name in ("continuous", "discrete", "ended"):
        changed = steps_of(HYBRID)
        column = getattr(changed, name)
        column[0] = ~column[0] if name == "ended" else (column[0] + 1) % 2
        after = made.begin(changed)
        assert after[0] != before[0], name
        np.testing.assert_array_equal(after[1:], before[1:])


# ---------------------------------------------------------------- reward


@KINDS
def test_reward(use_actions: bool, use_vail: bool) -> None:
    """-log(1 - D (1 - 1e-7)), with VAIL of the mean code, whatever is drawn."""
    made = gail(use_actions=use_actions, use_vail=use_vail)
    steps, drawn = steps_of(HYBRID), made._generator.get_state()
    d = sigmoid(logits(weights_of(made.module), inputs_of(HYBRID, steps, use_actions))[0])
    rewards = made.begin(steps)
    assert rewards.dtype == np.float32
    np.testing.assert_allclose(rewards, -np.log(1 - d * (1 - 1e-7)), rtol=2e-5)
    assert torch.equal(made._generator.get_state(), drawn)


@pytest.mark.parametrize("logit", [-200.0, -20.0, -8.0, 0.0, 5.0, 9.0, 12.0, 30.0, 200.0])
def test_reward_of_large_logits(logit: float) -> None:
    """However sure the discriminator is, the reward is finite, not negative, and that of the formula."""
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
    """More rows than are worked out at once get the rewards that they would get alone."""
    made, spec = gail(), HYBRID
    steps = steps_of(spec, [(life, 500, True) for life in range(10)])
    rewards = made.begin(steps)
    d = sigmoid(logits(weights_of(made.module), inputs_of(spec, steps, False))[0])
    np.testing.assert_allclose(rewards, -np.log(1 - d * (1 - 1e-7)), rtol=2e-5)


# ---------------------------------------------------------------- a step


@KINDS
def test_step_against_the_twin(use_actions: bool, use_vail: bool) -> None:
    """What a step reports, and the gradient of loss + 10 penalty + beta (KL - 0.5) for all kinds of weights."""
    made = gail(use_actions=use_actions, use_vail=use_vail)
    if use_vail:
        made.module.beta.fill_(0.3)
    steps = steps_of(HYBRID)
    made.begin(steps)
    at = torch.tensor([3, 0, 11, 7, 20, 5])
    twin = copied(made._generator)
    which = torch.randint(len(made._learned), (len(at),), generator=twin)
    drawn = drawn_of(twin, len(at), use_vail)
    weights = weights_of(made.module)
    policy = inputs_of(HYBRID, steps, use_actions)[at.numpy()]
    expert = learned_of(made, use_actions)[which.numpy()]
    made.learn(at)
    assert torch.equal(made._generator.get_state(), twin.get_state())

    gradients = made.optimizer.parameters.named(made.optimizer.parameters.gradient)
    expected = parts_of(weights, policy, expert, drawn)
    found = made.statistics()
    assert found["Losses/GAIL Loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert found["Policy/GAIL Policy Estimate"] == pytest.approx(expected["policy"], rel=1e-4)
    assert found["Policy/GAIL Expert Estimate"] == pytest.approx(expected["expert"], rel=1e-4)
    assert found["Policy/GAIL Grad Mag Loss"] == pytest.approx(10 * expected["penalty"], rel=1e-4)
    if use_vail:
        assert found["Losses/GAIL KL Loss"] == pytest.approx(expected["kl"], rel=1e-4)
        assert made.module.beta.item() == pytest.approx(0.3 + 0.0005 * (expected["kl"] - 0.5), rel=1e-5)
        assert made.module.beta.item() != pytest.approx(0.3, rel=1e-5)
        assert found["Policy/GAIL Beta"] == made.module.beta.item()

    names = [name for name in weights if name != "beta"]
    for name, place in some_places(weights, names):
        slow = slope(lambda moved: parts_of(moved, policy, expert, drawn)["total"], weights, name, place)
        assert gradients[name][place].item() == pytest.approx(slow, rel=2e-3, abs=2e-4), (name, place)


@pytest.mark.parametrize("logit", [-300.0, 300.0])
@pytest.mark.parametrize("use_vail", [False, True])
def test_loss_of_large_logits(logit: float, use_vail: bool) -> None:
    """The loss is worked out from logits: it grows with them and is never infinite, nor is its gradient."""
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
def test_penalty_where_the_input_gradient_is_zero(use_actions: bool, use_vail: bool) -> None:
    """The norm is safe at 0: its gradient is finite, and 0."""
    made = gail(use_actions=use_actions, use_vail=use_vail, shake=False)
    with torch.no_grad():
        made.module.head.weight.zero_()
    made.begin(steps_of(HYBRID))
    made.learn(torch.arange(8))
    assert made.statistics()["Policy/GAIL Grad Mag Loss"] == pytest.approx(10 * (np.sqrt(1e-7) - 1) ** 2, rel=1e-5)
    assert bool(torch.isfinite(made.optimizer.parameters.gradient).all())
    assert made.optimizer.moments["step"] == 1
    assert finite(made.module)


@pytest.mark.parametrize("name", ["bytes", "floats", "entities", "goal"])
@pytest.mark.parametrize("zero", [False, True])
@KINDS
def test_penalty_through_encoders(name: str, zero: bool, use_actions: bool, use_vail: bool) -> None:
    """The gradient reaches through images, entities and goals, and is finite even where all of it is 0."""
    spec = SPECS[name]
    made = gail(spec, use_actions=use_actions, use_vail=use_vail)
    if zero:
        with torch.no_grad():
            made.module.head.weight.zero_()
    made.begin(steps_of(spec))
    made.learn(torch.arange(9))
    gradients = made.optimizer.parameters.named(made.optimizer.parameters.gradient)
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values())
    assert made.optimizer.moments["step"] == 1
    assert finite(made.module)
    if not zero:
        encoded = [gradient for name, gradient in gradients.items() if name.startswith("features.")]
        assert all(bool(gradient.any()) for gradient in encoded)


def test_penalty_where_nobody_is_there() -> None:
    """Lists of entities that are all padding have finite gradients too."""
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


def test_bytes_are_as_their_shares_of_255() -> None:
    """An image of bytes gets the penalty of the same image in floats 0 to 1: the gradient is that of floats."""
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
            shown = tuple(column.astype(np.float32) / 255 for column in steps.observations)
            steps = Steps(**{**vars(steps), "observations": shown})
        made = gail(one, columns=columns)
        rewards = made.begin(steps)
        made.learn(torch.arange(7))
        found.append((rewards, made.statistics()))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-5)
    for name, value in found[0][1].items():
        assert found[1][1][name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("rows", [1, 2, 40])
def test_as_many_rows_of_both_sides(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demonstrations give as many rows as the policy, even where there are fewer of them."""
    made, steps = gail(lengths=[2, 1]), steps_of(HYBRID, [(1, 50, True)])
    seen = []
    plain = made.step
    monkeypatch.setattr(
        made,
        "step",
        lambda policy, expert: seen.append((len(policy.inputs[0]), len(expert.inputs[0]))) or plain(policy, expert),
    )
    made.begin(steps)
    made.learn(torch.arange(rows))
    assert seen == [(rows, rows)]


# ---------------------------------------------------------------- VAIL


def test_vail_begins_with_deviation_one_and_multiplier_zero() -> None:
    """sigma is one learned vector of 128 ones, beta 0; the mean divergence is then that of the means alone."""
    made = gail(use_vail=True, shake=False)
    assert torch.equal(made.module.sigma, torch.ones(128))
    assert made.module.sigma.requires_grad
    assert made.module.beta.item() == 0.0
    assert made.module.code is not None
    assert made.module.code.weight.shape[0] == 128


def test_beta_follows_the_divergence() -> None:
    """After each step beta = max(0, beta + 0.0005 (KL - 0.5)): it rises from 0, falls, and never below 0."""
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
        kl = 128 * size**2  # both sides' half each
        beta = max(0.0, beta + 0.0005 * (kl - 0.5))
        seen.append(beta)
        assert made.statistics()["Losses/GAIL KL Loss"] == pytest.approx(kl, abs=1e-4)
        assert made.statistics()["Policy/GAIL Beta"] == pytest.approx(beta, abs=1e-7)
        assert made.module.beta.item() == pytest.approx(beta, abs=1e-7)
    assert seen[0] == 0.0
    assert max(seen) > 0.18


def test_multiplier_weighs_the_divergence() -> None:
    """A large beta holds the codes near N(0, I)."""
    found = []
    for beta in (0.0, 10.0):
        made, steps = gail(use_vail=True), steps_of(HYBRID)
        for _ in range(60):
            made.module.beta.fill_(beta)
            made.begin(steps)
            made.learn(torch.arange(16))
        found.append(made.statistics()["Losses/GAIL KL Loss"])
    assert found[1] < 0.8 * found[0]


# ---------------------------------------------------------------- learning


@KINDS
def test_it_learns_to_tell_the_sides_apart(use_actions: bool, use_vail: bool) -> None:
    """Where the sides differ, demonstrations come to get the larger estimates."""
    made, steps = gail(use_actions=use_actions, use_vail=use_vail, shake=False), steps_of(HYBRID)
    steps.observations[0][:] += 3.0
    random = np.random.default_rng(0)
    for _ in range(300):
        made.begin(steps)
        made.learn(torch.from_numpy(random.integers(0, len(steps), 16)))
    made.begin(steps)
    for _ in range(10):
        made.learn(torch.from_numpy(random.integers(0, len(steps), 16)))
    found = made.statistics()
    assert found["Policy/GAIL Expert Estimate"] > 0.05 + found["Policy/GAIL Policy Estimate"]


def test_one_step_for_each_minibatch_on_its_rows() -> None:
    """What else is in the batch does not matter for the step; the means are over the steps since `begin`."""
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
def test_a_minibatch_that_is_not_finite_is_skipped(use_actions: bool, use_vail: bool) -> None:
    """Weights, beta and Adam stay as they were, bit by bit, and what is reported stays finite."""
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


def test_nothing_taken_is_nothing_reported() -> None:
    """Where all minibatches were skipped there is no loss to publish."""
    made, steps = gail(lengths=[2, 3]), steps_of(HYBRID)
    steps.observations[0][:] = np.inf
    made.begin(steps)
    made.learn(torch.arange(4))
    assert made.statistics() == {}


def test_both_sides_are_normalised_by_the_demonstrations() -> None:
    """With `normalize` the running statistics are those of what is learned from, and no policy moves them."""
    columns = recorded(HYBRID, [8, 9, 10])
    columns["observation.0"] = 4 + 7 * columns["observation.0"]
    made = gail(columns=columns, normalize=True)
    seen = np.concatenate([columns["observation.0"], columns["observation.1"]], 1).astype(np.float64)
    count = len(seen) + 1  # the statistics begin as one row of mean 0 and variance 1
    mean = seen.sum(0) / count
    variance = (((seen - mean) ** 2).sum(0) + mean**2 + 1) / count
    normalizer = made.module.features.encoder.normalizer
    assert normalizer is not None
    np.testing.assert_allclose(normalizer.mean.numpy(), mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(normalizer.variance.numpy(), variance, rtol=1e-4)
    expected = np.clip((seen - mean) / np.sqrt(variance), -5, 5)
    np.testing.assert_allclose(made._expert.inputs[0].numpy(), expected, rtol=1e-3, atol=1e-4)
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
def test_held_out_accuracy_is_of_episodes_that_are_not_learned_from(episodes: int) -> None:
    """Whole episodes are kept away: the accuracy is the share of their steps with D > 0.5."""
    lengths = [2 + number % 3 for number in range(episodes)]
    columns = recorded(HYBRID, lengths)
    columns["observation.0"][:, 0] = np.repeat(np.arange(episodes), lengths)
    made = gail(columns=columns)
    assert made._held_out is not None
    learned = made._expert.inputs[0][:, 0].numpy()
    kept = made._held_out.inputs[0][:, 0].numpy()
    assert set(learned.tolist()).isdisjoint(kept.tolist())
    assert sorted([*learned.tolist(), *kept.tolist()]) == columns["observation.0"][:, 0].tolist()
    assert len(set(kept.tolist())) == round(0.2 * episodes)
    made.begin(steps_of(HYBRID))
    for _ in range(10):
        made.learn(torch.arange(8))
    d = sigmoid(logits(weights_of(made.module), made._held_out.inputs[0].double().numpy())[0])
    assert made.statistics()["Policy/GAIL Held-Out Accuracy"] == pytest.approx((d > 0.5).mean())


def test_held_out_accuracy_shows_what_was_learned_by_heart() -> None:
    """Learned from a few and asked of others: a discriminator that knows its own by heart refuses the others."""
    columns = recorded(HYBRID, [1] * 5)
    made, steps = gail(columns=columns, shake=False), steps_of(HYBRID)
    assert made._held_out is not None
    held = made._held_out.inputs[0].numpy()[0]
    for column in (steps.observations[0], steps.observations[1]):
        column[:] = held[:3] if column.shape[1] == 3 else held[3:]
    made.begin(steps)  # the policy does what only the held-out episode shows
    for _ in range(400):
        made.learn(torch.arange(16))
    found = made.statistics()
    assert found["Policy/GAIL Held-Out Accuracy"] == 0.0


@pytest.mark.parametrize("episodes", [1, 4])
def test_of_fewer_than_five_episodes_none_is_held_out(episodes: int) -> None:
    """Then all are learned from, and there is no such accuracy."""
    made = gail(lengths=[3] * episodes)
    assert len(made._learned) == 3 * episodes
    made.begin(steps_of(HYBRID))
    made.learn(torch.arange(4))
    assert "Policy/GAIL Held-Out Accuracy" not in made.statistics()


def test_names_are_those_of_ml_agents() -> None:
    """A summary of ML-Agents shows the same curves."""
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
