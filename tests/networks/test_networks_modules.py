"""Normalizer, perceptron, actor, critic and arrays of weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparring.pipeline.errors import CheckpointError
from sparring.pipeline.messages import codec
from sparring.pipeline.messages.state import PolicyWeights
from sparring.pipeline.networks import distributions
from sparring.pipeline.networks.actor import Actor, Critic
from sparring.pipeline.networks.arrays import non_finite, to_environment, weights_sha256
from sparring.pipeline.networks.device import load_arrays, to_arrays
from sparring.pipeline.networks.encoders import Normalizer
from sparring.pipeline.networks.perceptron import Perceptron
from sparring.pipeline.networks.settings import MemorySettings, NetworkSettings, Unsupported
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

SPEC = BehaviorSpec(
    observations=(ObservationSpec(name="a", shape=(3,)), ObservationSpec(name="b", shape=(2,))),
    actions=ActionSpec(continuous=2, discrete=(3,)),
)
SMALL = NetworkSettings(hidden_units=8, normalize=True)
ACTIVATIONS = pytest.mark.parametrize("activation", ["silu", "tanh", "relu"])


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def randomly(seed=0):
    return np.random.default_rng(seed)


def observed(rows=5, seed=0):
    random = np.random.default_rng(seed)
    arrays = tuple(random.standard_normal((rows, *o.shape), np.float32) for o in SPEC.observations)
    for array in arrays:
        array.flags.writeable = False  # as from the codec
    return arrays


# ---------------------------------------------------------------- normalizer


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6), seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_merged_statistics_equal_those_of_all_rows_and_a_unit_prior(sizes, seed):
    normalizer, random = Normalizer(2), np.random.default_rng(seed)
    batches = [(random.standard_normal((size, 2)) * [3, 0.1] + [5, -2]).astype(np.float32) for size in sizes]
    for batch in batches:
        normalizer.update(torch.from_numpy(batch))
    rows = np.concatenate(batches).astype(np.float64)
    mean = rows.sum(0) / (len(rows) + 1)
    squares = ((rows - mean) ** 2).sum(0) + mean**2 + 1  # the prior: one row at 0 with variance 1
    np.testing.assert_allclose(normalizer.mean, mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(normalizer.variance, squares / (len(rows) + 1), rtol=1e-4)
    assert normalizer.count.item() == len(rows) + 1


def test_statistics_of_the_largest_numbers_stay_finite():
    """Simulators may send numbers up to 1e18; their squares exceed float32 when many are summed."""
    normalizer, rows = Normalizer(1), torch.tensor([[1e18], [-1e18]]).repeat(32, 1)
    for _ in range(80):
        normalizer.update(rows)
    assert normalizer.count.item() == 80 * len(rows) + 1
    assert normalizer.variance.item() == pytest.approx(1e36, rel=1e-3)
    assert normalizer(rows).abs().max().item() == pytest.approx(1, rel=1e-3)


def test_normalized_rows_are_clipped_to_5():
    rows = torch.tensor([[100.0, -100.0, 2.0]])
    assert Normalizer(3)(rows).tolist() == [[5.0, -5.0, 2.0]]
    assert rows[0, 0] == 100, "the rows themselves are not changed"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_row_never_affects_the_statistics(bad):
    normalizer = Normalizer(1)
    before = to_arrays(normalizer)
    normalizer.update(torch.tensor([[1.0], [bad]]))
    assert weights_sha256(to_arrays(normalizer)) == weights_sha256(before)


# ---------------------------------------------------------------- perceptron


def plain_twin(perceptron: Perceptron) -> nn.Sequential:
    parts: list[nn.Module] = []
    for layer in perceptron.layers:
        linear = nn.Linear(layer.in_features, layer.out_features, dtype=layer.weight.dtype)
        linear.load_state_dict(layer.state_dict())
        parts += [linear, {"silu": nn.SiLU, "tanh": nn.Tanh, "relu": nn.ReLU}[perceptron.activation]()]
    return nn.Sequential(*parts[:-1])


@ACTIVATIONS
@pytest.mark.parametrize("layers", [0, 1, 3])
def test_perceptron_and_its_gradient_equal_those_of_torch_layers(layers, activation):
    perceptron = Perceptron([4, *[6] * layers], [1.0, 0.2], NetworkSettings(activation=activation), seeded()).double()
    twin = plain_twin(perceptron)
    rows = torch.randn(5, 4, generator=seeded(1), dtype=torch.float64, requires_grad=True)
    twin_rows = rows.detach().clone().requires_grad_(True)
    outputs, expected = perceptron(rows), twin(twin_rows)
    torch.testing.assert_close(outputs, expected)
    for _ in range(2):  # gradients accumulate
        perceptron(rows).square().sum().backward()
        twin(twin_rows).square().sum().backward()
    torch.testing.assert_close(rows.grad, twin_rows.grad)
    for own, other in zip(perceptron.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    with torch.no_grad():
        torch.testing.assert_close(perceptron(rows), expected)
        torch.testing.assert_close(perceptron.frozen()(rows), expected)


@ACTIVATIONS
@pytest.mark.parametrize("layers", [0, 1, 3])
def test_outputs_and_gradients_without_autograd_are_the_same_bit_for_bit(layers, activation):
    perceptron = Perceptron([4, *[6] * layers], [1.0, 0.2], NetworkSettings(activation=activation), seeded())
    rows, gradient = torch.randn(5, 4, generator=seeded(1)), torch.randn(5, 2, generator=seeded(2))
    expected = perceptron(rows)
    torch.autograd.backward(perceptron(rows), gradient)
    by_autograd = [parameter.grad.clone() for parameter in perceptron.parameters()]
    perceptron.zero_grad(set_to_none=False)
    with torch.no_grad():
        outputs, backward_fn = perceptron.traced(rows)
        backward_fn(gradient)  # adds to the gradient, as autograd does
    assert torch.equal(outputs, expected)
    for parameter, other in zip(perceptron.parameters(), by_autograd, strict=True):
        assert torch.equal(parameter.grad, other)
        assert not parameter.grad.requires_grad


def test_second_derivative_is_refused():
    rows = torch.ones(1, 2, requires_grad=True)
    outputs = Perceptron([2, 3], [1.0], SMALL, seeded())(rows)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(outputs.sum(), rows, create_graph=True)


def test_initial_weights_are_he_normal_with_a_linear_gain():
    first, second = Perceptron([400, 300], [0.2] * 50, SMALL, seeded()).layers
    assert first.weight.std().item() == pytest.approx(1 / 20, rel=0.02)
    assert second.weight.std().item() == pytest.approx(0.2 / 300**0.5, rel=0.05)
    assert not first.bias.any()


@pytest.mark.parametrize(("inputs", "units"), [(3, 8), (8, 3)])
def test_orthogonal_weights_scale_lengths_by_their_gain(inputs, units):
    settings = NetworkSettings(activation="tanh", initialization="orthogonal")
    first, last = Perceptron([inputs, units], [0.5, 2.0], settings, seeded()).layers
    narrow = first.weight.T if inputs < units else first.weight
    torch.testing.assert_close(narrow @ narrow.T, 2 * torch.eye(3))
    torch.testing.assert_close(last.weight @ last.weight.T, torch.diag(torch.tensor([0.25, 4.0])))
    assert not first.bias.any()
    assert not last.bias.any()


def test_uniform_weights_and_biases_are_distributed_as_those_of_torch():
    torch.manual_seed(1)
    own = Perceptron([100, 300], [1.0] * 300, NetworkSettings(initialization="uniform"), seeded()).layers[0]
    for found, like in zip(own.parameters(), nn.Linear(100, 300).parameters(), strict=True):
        assert found.abs().max().item() <= 0.1
        tenths = [one.flatten().quantile(torch.linspace(0.1, 0.9, 9)) for one in (found, like)]
        torch.testing.assert_close(*tenths, rtol=0, atol=0.02)


@pytest.mark.parametrize("more", [{}, {"memory": MemorySettings(memory_size=16, sequence_length=4)}])
@pytest.mark.parametrize("shared", [0, 1])
def test_orthogonal_actor_has_small_initial_outputs_and_its_critic_does_not(shared, more):
    network = NetworkSettings(hidden_units=16, activation="tanh", initialization="orthogonal", **more)
    actor = Actor(SPEC, network, seeded(), values=shared)
    arrays = to_arrays(actor)
    head = arrays[f"body.{actor.body.output}.weight"]
    lengths = np.linalg.norm(head, axis=1)
    np.testing.assert_allclose(lengths[: actor.outputs], 0.01, rtol=1e-5)
    np.testing.assert_allclose(lengths[actor.outputs :], 1.0, rtol=1e-5)
    if more:  # the last layer of the trunk is a hidden layer
        trunk = arrays["body.trunk.layers.1.weight"]
        np.testing.assert_allclose(trunk @ trunk.T, 2 * np.eye(16), atol=1e-5)


# ---------------------------------------------------------------- actor and critic


def test_same_generator_gives_the_same_weights_without_the_global_one():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = weights_sha256(to_arrays(Actor(SPEC, SMALL, seeded(4))))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert weights_sha256(to_arrays(Actor(SPEC, SMALL, seeded(4)))) == first
    assert weights_sha256(to_arrays(Actor(SPEC, SMALL, seeded(5)))) != first


def test_act_returns_columns_with_dtypes_of_the_records():
    continuous, discrete, log_probs = Actor(SPEC, SMALL, seeded()).frozen().act(observed(), None, randomly())
    assert (continuous.shape, discrete.shape, log_probs.shape) == ((5, 2), (5, 1), (5,))
    assert (continuous.dtype, discrete.dtype, log_probs.dtype) == (np.float32, np.int32, np.float32)


def test_act_respects_masks_and_repeats_for_a_seed():
    actor = Actor(SPEC, SMALL, seeded())
    masks = np.zeros((200, 3), np.bool_)
    masks[:, 1] = True
    masks.flags.writeable = False
    first = actor.frozen().act(observed(200), masks, randomly(3))
    second = actor.frozen().act(observed(200), masks, randomly(3))
    assert not (first[1] == 1).any()
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("network", [SMALL, NetworkSettings(hidden_units=8, num_layers=1)], ids=["normalized", "plain"])
def test_frozen_actor_has_the_log_probabilities_that_the_learner_recomputes(network):
    """This covers continuous and discrete actions, masks, and statistics after training."""
    actor, masks = Actor(SPEC, network, seeded()), np.zeros((64, 3), np.bool_)
    masks[::2, 2] = True
    actor.encoder.update((actor.encoder.join(observed(50, seed=1))[0] * 3 + 1,))
    continuous, discrete, log_probs = actor.frozen().act(observed(64), masks, randomly(2))
    with torch.no_grad():
        head = actor(actor.encoder.prepare(actor.encoder.join(observed(64))))
        got = distributions.evaluate(
            actor.actions,
            head,
            actor.log_sigma,
            torch.from_numpy(continuous),
            torch.from_numpy(discrete).long(),
            torch.from_numpy(masks),
        )
    np.testing.assert_allclose(log_probs, got.log_prob, atol=1e-5)
    modes, _, _ = actor.frozen().act(observed(64), None, randomly(2), deterministic=True)
    np.testing.assert_array_equal(modes, head[:, :2])


def test_frozen_actor_does_not_change_while_the_actor_learns():
    actor = Actor(SPEC, SMALL, seeded())
    frozen = actor.frozen()
    before = frozen.act(observed(), None, randomly(3))
    actor.encoder.update((actor.encoder.join(observed(50, seed=1))[0] * 3 + 1,))
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter += 0.5
    after = frozen.act(observed(), None, randomly(3))
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(actor.frozen().act(observed(), None, randomly(3))[0], before[0])


def test_new_policy_has_means_near_0_and_sigma_1():
    actor = Actor(SPEC, NetworkSettings(), seeded())
    head = actor((torch.randn(500, 5, generator=seeded(1)),))
    assert head.abs().mean() < 0.3
    assert actor.log_sigma.tolist() == [0, 0]


def test_actions_for_the_simulator_are_clipped_to_3_and_divided_by_3():
    raw = np.float32([[-7, -3, -1.5, 0, 3, 4]])
    np.testing.assert_array_equal(to_environment(raw), np.float32([[-1, -1, -0.5, 0, 1, 1]]))
    np.testing.assert_array_equal(to_environment(raw, 4.0), np.float32([[-1, -0.75, -0.375, 0, 0.75, 1]]))


def test_critic_returns_a_value_per_signal():
    critic = Critic(SPEC, SMALL, 2, seeded())
    assert critic((torch.zeros(4, 5),)).shape == (4, 2)
    assert not [name for name in to_arrays(critic) if "normalizer" in name], "statistics are the actor's"


@pytest.mark.parametrize(
    ("observation", "network", "named"),
    [
        (ObservationSpec(name="eye", shape=(3, 8, 19), kind="image"), SMALL, "'eye' of 8 x 19"),
        (ObservationSpec(name="others", shape=(4, 2), kind="entities"), NetworkSettings(hidden_units=30), "'others'"),
        (ObservationSpec(name="others", shape=(1025, 2), kind="entities"), SMALL, "1,025 entities in 'others'"),
        (ObservationSpec(name="aim", shape=(2,), kind="goal"), SMALL, "goal_conditioning_type"),
    ],
)
def test_impossible_network_is_refused_by_name(observation, network, named):
    spec = BehaviorSpec(observations=(observation,), actions=ActionSpec(continuous=1))
    with pytest.raises(Unsupported, match=named) as refused:
        Actor(spec, network, seeded())
    assert refused.value.remedy


def test_goals_are_concatenated_with_vectors():
    spec = BehaviorSpec(
        observations=(ObservationSpec(name="a", shape=(2,)), ObservationSpec(name="aim", shape=(3,), kind="goal")),
        actions=ActionSpec(continuous=1),
    )
    actor = Actor(spec, NetworkSettings(goal_conditioning_type="none"), seeded())
    (joined,) = actor.encoder.join((np.float32([[1, 2]]), np.float32([[3, 4, 5]])))
    assert joined.tolist() == [[1, 2, 3, 4, 5]]


# ---------------------------------------------------------------- weights


def test_weights_are_arrays_including_the_normalizer():
    one, other = Actor(SPEC, SMALL, seeded(1)), Actor(SPEC, SMALL)
    one.encoder.update((torch.randn(9, 5, generator=seeded(2)),))
    arrays = to_arrays(one)
    load_arrays(other, arrays)
    assert {"encoder.normalizer.mean", "encoder.normalizer.count", "log_sigma"} <= arrays.keys()
    assert weights_sha256(to_arrays(other)) == weights_sha256(arrays)
    found = [actor.frozen().act(observed(), None, randomly()) for actor in (other, one)]
    for got, expected in zip(*found, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_arrays_are_copies():
    actor = Actor(SPEC, SMALL, seeded(1))
    arrays = to_arrays(actor)
    before = weights_sha256(arrays)
    with torch.no_grad():
        actor.log_sigma.fill_(9)
    assert weights_sha256(arrays) == before


@pytest.mark.parametrize("change", ["missing", "extra", "shape", "dtype"])
def test_arrays_of_another_network_are_refused_without_changes(change):
    actor = Actor(SPEC, SMALL, seeded(1))
    before, arrays = weights_sha256(to_arrays(actor)), to_arrays(Actor(SPEC, SMALL, seeded(2)))
    if change == "missing":
        del arrays["log_sigma"]
    elif change == "extra":
        arrays["more"] = np.zeros(1, np.float32)
    elif change == "shape":
        arrays["log_sigma"] = np.zeros(3, np.float32)
    else:
        arrays["log_sigma"] = np.zeros(2, np.int64)
    with pytest.raises(CheckpointError, match="more" if change == "extra" else "log_sigma"):
        load_arrays(actor, arrays)
    assert weights_sha256(to_arrays(actor)) == before


def test_hash_depends_on_names_shapes_dtypes_and_values_but_not_on_order():
    base = {"a": np.zeros(4, np.float32), "b": np.ones(2, np.int64)}
    others = [
        base | {"a": np.zeros((2, 2), np.float32)},
        base | {"a": np.zeros(4, np.int32)},
        base | {"a": np.ones(4, np.float32)},
        {"c": base["a"], "b": base["b"]},
    ]
    assert len({weights_sha256(arrays) for arrays in [base, *others]}) == 5
    assert weights_sha256(dict(reversed(base.items()))) == weights_sha256(base)


def test_non_finite_arrays_are_named():
    assert non_finite({"a": np.float32([1, np.nan]), "b": np.int64([1]), "c": np.float32([np.inf])}) == ["a", "c"]


@pytest.mark.parametrize("actions", [ActionSpec(continuous=2), ActionSpec(discrete=(3,))], ids=str)
def test_weights_pass_the_codec_unchanged(actions):
    """This includes scalars (the normalizer's count) and empty arrays (log sigma of a discrete policy)."""
    arrays = to_arrays(Actor(BehaviorSpec(observations=SPEC.observations, actions=actions), SMALL, seeded()))
    frames = codec.encode(PolicyWeights(behavior="Test", version=3, arrays=arrays))
    got = codec.decode([bytes(frame) for frame in frames])
    assert weights_sha256(got.arrays) == weights_sha256(arrays)
    load_arrays(Actor(BehaviorSpec(observations=SPEC.observations, actions=actions), SMALL), got.arrays)
