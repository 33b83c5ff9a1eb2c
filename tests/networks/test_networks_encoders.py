"""Encoders of images, entities and goals, compared with slow twins."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.networks.actor import Actor, Critic
from sparring.pipeline.networks.encoders import Encoder, ImageEncoder
from sparring.pipeline.networks.layers import EntityEncoder
from sparring.pipeline.networks.perceptron import ConditionedLayers
from sparring.pipeline.networks.settings import HEADS, NetworkSettings, Unsupported
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

MIXED = BehaviorSpec(
    observations=(
        ObservationSpec(name="near", shape=(5, 3), kind="entities"),
        ObservationSpec(name="eye", shape=(3, 20, 22), kind="image", dtype="uint8"),
        ObservationSpec(name="state", shape=(4,)),
        ObservationSpec(name="aim", shape=(2,), kind="goal"),
        ObservationSpec(name="far", shape=(2, 6), kind="entities"),
        ObservationSpec(name="back", shape=(1, 24, 20), kind="image"),
        ObservationSpec(name="feel", shape=(2,)),
    ),
    actions=ActionSpec(continuous=2, discrete=(3, 2)),
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def randomly(seed=0):
    return np.random.default_rng(seed)


def observed(spec, rows, seed=0):
    """Returns random observations, read-only as from the codec; about half of the entities are padding."""
    random = np.random.default_rng(seed)
    arrays = []
    for one in spec.observations:
        shape = (rows, *one.shape)
        array = (
            random.integers(0, 256, shape, np.uint8) if one.dtype == "uint8" else random.random(shape, dtype=np.float32)
        )
        if one.kind == "entities":
            array[random.random(shape[:2]) < 0.5] = 0
        array.flags.writeable = False
        arrays.append(array)
    return tuple(arrays)


def randomized(module, seed=7):
    """Sets all weights and biases at random, so that no zero hides an error; returns the module."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3, generator=seeded(seed))
            seed += 1
    return module.double()


# ---------------------------------------------------------------- images

SMALLEST = {"simple": 20, "nature_cnn": 36, "resnet": 15, "match3": 5, "fully_connected": 1}
"""Fewest pixels of an image's height and width."""


@pytest.mark.parametrize("kind", SMALLEST)
def test_smallest_image_is_accepted_and_one_pixel_less_is_refused(kind):
    settings = NetworkSettings(vis_encode_type=kind, hidden_units=8)
    for height, width in ((SMALLEST[kind], 40), (40, SMALLEST[kind])):
        encoder = ImageEncoder((3, height, width), kind, 8, seeded())
        assert encoder(torch.rand(2, 3, height, width, generator=seeded())).shape == (2, 8)
    if SMALLEST[kind] == 1:
        return
    spec = BehaviorSpec(
        observations=(ObservationSpec(name="eye", shape=(3, 40, SMALLEST[kind] - 1), kind="image"),),
        actions=ActionSpec(continuous=1),
    )
    with pytest.raises(Unsupported, match=f"at least {SMALLEST[kind]} x {SMALLEST[kind]}") as refused:
        Encoder(spec, settings, seeded())
    assert "'eye'" in refused.value.got
    assert kind in refused.value.got
    assert "fully_connected" in refused.value.remedy


@pytest.mark.parametrize("kind", SMALLEST)
def test_byte_images_equal_floats_from_0_to_1(kind):
    encoder = ImageEncoder((3, 40, 40), kind, 8, seeded())
    image = torch.randint(0, 256, (4, 3, 40, 40), generator=seeded(1)).to(torch.uint8)
    before = image.clone()
    torch.testing.assert_close(encoder(image), encoder(image.float() / 255))
    assert torch.equal(image, before)


@pytest.mark.parametrize("kind", SMALLEST)
def test_features_of_a_new_encoder_have_the_scale_of_its_inputs(kind):
    """The mean square stays within a factor of 20, whatever the number of layers."""
    encoder = ImageEncoder((3, 40, 40), kind, 256, seeded())
    features = encoder(torch.rand(16, 3, 40, 40, generator=seeded(1)))
    assert 1 / 20 < features.square().mean().item() / (1 / 3) < 20


# ---------------------------------------------------------------- entities


def slow_entities(encoder, lists, own):
    """Returns the features of one agent by the formulas of the paper, entity by entity and head by head."""
    entities = [
        (embed, row) for embed, rows in zip(encoder.embeddings, lists, strict=True) for row in rows if row.any()
    ]
    if not entities:
        return torch.zeros(encoder.attention.merge.out_features, dtype=own.dtype)
    inputs = [encoder.attention.before(embed(torch.cat([row, own]))) for embed, row in entities]
    units = len(inputs[0])
    size = units // HEADS
    results = []
    for one in inputs:
        attended = []
        for head in range(HEADS):
            part = slice(head * size, (head + 1) * size)
            query = encoder.attention.project(one)[:units][part]
            keys = [encoder.attention.project(other)[units : 2 * units][part] for other in inputs]
            values = [encoder.attention.project(other)[2 * units :][part] for other in inputs]
            scores = torch.stack([query @ key / math.sqrt(size) for key in keys]).softmax(0)
            attended.append(sum(score * value for score, value in zip(scores, values, strict=True)))
        results.append(encoder.attention.after(one + encoder.attention.merge(torch.cat(attended))))
    return sum(results) / len(results)


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 4), present=st.floats(0, 1))
@settings(max_examples=25, deadline=None)
def test_attention_equals_that_of_the_twin(seed, rows, present):
    encoder = randomized(EntityEncoder((3, 6), 2, 8, seeded()))
    random = seeded(seed)
    lists = [torch.randn(rows, n, size, generator=random, dtype=torch.float64) for n, size in ((4, 3), (2, 6))]
    for one in lists:
        one[torch.rand(one.shape[:2], generator=random) >= present] = 0
    own = torch.randn(rows, 2, generator=random, dtype=torch.float64)
    found = encoder(lists, own)
    slow = torch.stack([slow_entities(encoder, [one[row] for one in lists], own[row]) for row in range(rows)])
    torch.testing.assert_close(found, slow)


@given(seed=st.integers(0, 10**6), more=st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_order_of_entities_and_amount_of_padding_change_nothing(seed, more):
    encoder, random = randomized(EntityEncoder((3,), 2, 8, seeded())), seeded(seed)
    entities = torch.randn(3, 4, 3, generator=random, dtype=torch.float64)
    entities[torch.rand(3, 4, generator=random) < 0.4] = 0
    own = torch.randn(3, 2, generator=random, dtype=torch.float64)
    padded = torch.cat([entities, torch.zeros(3, more, 3, dtype=torch.float64)], 1)
    mixed = padded[:, torch.randperm(4 + more, generator=random)]
    torch.testing.assert_close(encoder([mixed], own), encoder([entities], own))


def test_gradients_of_attention_equal_differences():
    encoder = randomized(EntityEncoder((2,), 1, 4, seeded()))
    entities = torch.randn(2, 3, 2, generator=seeded(1), dtype=torch.float64)
    entities[0, 1:] = 0
    own = torch.randn(2, 1, generator=seeded(2), dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in encoder.named_parameters()]
    values = tuple(parameter.detach().requires_grad_() for parameter in encoder.parameters())

    def run(own_features, *parameters):
        changed = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(encoder, changed, ([entities], own_features))

    assert torch.autograd.gradcheck(run, (own, *values))


def test_empty_list_of_entities_gives_zero_features():
    encoder = EntityEncoder((3,), 2, 8, seeded())
    own = torch.randn(2, 2, generator=seeded(), requires_grad=True)
    found = encoder([torch.zeros(2, 4, 3)], own)
    assert not found.any()
    found.sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in encoder.parameters())


# ---------------------------------------------------------------- goals


@pytest.mark.parametrize(("name", "activate"), [("silu", torch.nn.functional.silu), ("tanh", torch.tanh)])
@given(seed=st.integers(0, 10**6), layers=st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_goal_generates_the_last_hidden_layer(name, activate, seed, layers):
    """The output of the hypernetwork has the weights and biases of an ordinary layer, row by row."""
    body = randomized(ConditionedLayers([3, *[4] * layers], 2, [1.0, 1.0], NetworkSettings(activation=name), seeded()))
    rows = torch.randn(5, 5, generator=seeded(seed), dtype=torch.float64)
    slow = []
    for row in rows:
        hidden, goal = row[:3], row[3:]
        for layer in body.layers:
            hidden = activate(layer(hidden))
        code = activate(body.hyper.code(goal))
        made = body.hyper.weights(code).reshape(4, len(hidden)) @ hidden + body.hyper.biases(code)
        slow.append(body.head(activate(made)))
    torch.testing.assert_close(body(rows), torch.stack(slow))
    torch.testing.assert_close(body.frozen()(rows), body(rows))


def test_gradients_of_a_conditioned_body_equal_differences():
    body = randomized(ConditionedLayers([2, 3, 3], 1, [1.0], NetworkSettings(), seeded()))
    names = [name for name, _ in body.named_parameters()]
    values = tuple(parameter.detach().requires_grad_() for parameter in body.parameters())
    rows = torch.randn(2, 3, generator=seeded(3), dtype=torch.float64, requires_grad=True)

    def run(inputs, *parameters):
        return torch.func.functional_call(body, dict(zip(names, parameters, strict=True)), (inputs,))

    assert torch.autograd.gradcheck(run, (rows, *values))


def test_goal_without_other_observations_is_refused():
    spec = BehaviorSpec(
        observations=(ObservationSpec(name="aim", shape=(2,), kind="goal"),), actions=ActionSpec(continuous=1)
    )
    with pytest.raises(Unsupported, match="goal_conditioning_type"):
        Encoder(spec, NetworkSettings(), seeded())
    assert Encoder(spec, NetworkSettings(goal_conditioning_type="none"), seeded()).size == 2


# ---------------------------------------------------------------- combinations


@pytest.mark.parametrize("conditioning", ["hyper", "none"])
@pytest.mark.parametrize("normalize", [False, True])
def test_frozen_policy_with_all_kinds_of_observations_equals_its_actor(normalize, conditioning):
    """The frozen copy equals the module, for all rows together and for each alone."""
    network = NetworkSettings(hidden_units=8, normalize=normalize, goal_conditioning_type=conditioning)
    actor = Actor(MIXED, network, seeded())
    encoder, observations = actor.encoder, observed(MIXED, 6)
    encoder.update(encoder.join(observed(MIXED, 40, seed=1)))
    frozen = actor.encoder.frozen()
    with torch.no_grad():
        features = encoder(encoder.prepare(encoder.join(observations)))
    assert features.shape == (6, encoder.size) == (6, 4 + 2 + 3 * 8 + 2)
    torch.testing.assert_close(frozen(observations, None), features)
    for row in range(6):
        alone = frozen(tuple(column[row : row + 1] for column in observations), None)
        torch.testing.assert_close(alone[0], features[row], rtol=1e-4, atol=1e-5)
    continuous, discrete, log_probs = actor.frozen().act(observations, None, randomly(2))
    assert (continuous.shape, discrete.shape, log_probs.shape) == ((6, 2), (6, 2), (6,))


def test_frozen_policy_does_not_change_with_its_actor():
    actor, observations = Actor(MIXED, NetworkSettings(hidden_units=8), seeded()), observed(MIXED, 3)
    frozen = actor.frozen()
    before = frozen.act(observations, None, randomly(1))[0]
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(0.5)
    np.testing.assert_array_equal(frozen.act(observations, None, randomly(1))[0], before)
    assert not np.array_equal(actor.frozen().act(observations, None, randomly(1))[0], before)


def test_same_seed_gives_the_same_weights():
    one, same, other = (Critic(MIXED, NetworkSettings(hidden_units=8), 1, seeded(s)) for s in (1, 1, 2))
    for (name, left), right, third in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right), name
        constant = "bias" in name or "after" in name or "before" in name or "last.weight" in name
        assert constant or not torch.equal(left, third), name
