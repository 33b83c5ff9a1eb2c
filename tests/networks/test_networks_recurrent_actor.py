"""The recurrent state that agents carry between decisions: a memory, the previous action, or both."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.assembly import sequences
from sparring.pipeline.networks import distributions
from sparring.pipeline.networks.actor import Actor, Critic
from sparring.pipeline.networks.arrays import previous_features, to_environment
from sparring.pipeline.networks.device import load_arrays, to_arrays
from sparring.pipeline.networks.layers import Layout
from sparring.pipeline.networks.settings import MemorySettings, NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

ACTIONS = {
    "continuous": ActionSpec(continuous=2),
    "discrete": ActionSpec(discrete=(3, 2)),
    "hybrid": ActionSpec(continuous=1, discrete=(2, 4)),
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def randomly(seed=0):
    return np.random.default_rng(seed)


def spec_of(actions, mixed=False):
    observations = [ObservationSpec(name="state", shape=(3,))]
    if mixed:
        observations += [
            ObservationSpec(name="eye", shape=(1, 6, 5), kind="image", dtype="uint8"),
            ObservationSpec(name="others", shape=(3, 2), kind="entities"),
            ObservationSpec(name="aim", shape=(2,), kind="goal"),
        ]
    return BehaviorSpec(observations=tuple(observations), actions=actions)


def observed(spec, rows, random):
    return tuple(
        random.integers(0, 256, (rows, *one.shape), np.uint8)
        if one.dtype == "uint8"
        else random.standard_normal((rows, *one.shape), np.float32)
        for one in spec.observations
    )


def recurrent_actor(actions, memory, previous, *, mixed=False, **changes):
    """Returns an actor whose statistics and outputs are far from initial ones."""
    network = NetworkSettings(
        normalize=True,
        hidden_units=8,
        vis_encode_type="match3",
        memory=MemorySettings(memory_size=6, sequence_length=3) if memory else None,
        previous_action=previous,
    )
    actor = Actor(spec_of(actions, mixed), network, seeded(), **changes)
    with torch.no_grad():
        for parameter in actor.body.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=seeded(5)), alpha=0.3)
        actor.log_sigma.fill_(-0.5)
    random = np.random.default_rng(9)
    actor.encoder.update(actor.encoder.join(observed(actor.spec, 50, random)))
    return actor


def played(actor, agents, steps, seed=0):
    """Returns observations, masks, carried states, actions and log-probabilities; row is `step * agents + agent`."""
    acting, random, generator = actor.frozen(), randomly(seed), randomly(seed + 1)
    carried, width = np.zeros((agents, acting.carried), np.float32), actor.actions.mask_size
    first = np.cumsum((0, *actor.actions.discrete))[:-1]
    columns = []
    for _ in range(steps):
        observations, before = observed(actor.spec, agents, random), carried.copy()
        masks = random.random((agents, width)) < 0.3
        masks[:, first] = False
        columns.append((*observations, masks, before, *acting.act(observations, masks, generator, carried=carried)))
    columns = tuple(map(np.concatenate, zip(*columns, strict=True)))
    return columns[:-5], *columns[-5:]


CARRIED = pytest.mark.parametrize(("memory", "previous"), [(True, False), (False, True), (True, True)])


@CARRIED
@pytest.mark.parametrize("mixed", [False, True], ids=["vectors", "mixed"])
@pytest.mark.parametrize("actions", ACTIONS.values(), ids=ACTIONS)
def test_evaluated_sequences_give_the_stored_log_probabilities(actions, mixed, memory, previous):
    """Log-probabilities of sequences from their stored memories equal those of acting to 1e-5."""
    actor, agents, steps, length = recurrent_actor(actions, memory, previous, mixed=mixed), 4, 8, 3
    observations, masks, carried, continuous, discrete, log_probs = played(actor, agents, steps)
    by_agent = np.arange(agents * steps).reshape(steps, agents).T.ravel()
    first, lengths = sequences.divide(np.full(agents, steps), length)
    encoder, size = actor.encoder, 6 * memory
    previous_actions = torch.from_numpy(carried[by_agent][:, size:]) if previous else None
    prepared = encoder.prepare(encoder.join([column[by_agent] for column in observations]), previous_actions)
    memories = torch.from_numpy(carried[by_agent][first, :size])
    with torch.no_grad():
        head = actor(prepared, Layout(lengths), memories) if memory else actor(prepared)
        evaluated = distributions.evaluate(
            actions,
            head,
            actor.log_sigma,
            torch.from_numpy(continuous[by_agent]),
            torch.from_numpy(discrete[by_agent]).long(),
            torch.from_numpy(masks[by_agent]),
        )
    np.testing.assert_allclose(evaluated.log_prob.numpy(), log_probs[by_agent], atol=1e-5)
    assert carried.shape[1] == actor.carried == size + (actions.continuous + actions.mask_size) * previous
    assert not carried[:agents].any(), "the state at a first decision is 0"
    if previous:
        done = previous_features(actions, continuous, discrete)
        np.testing.assert_array_equal(carried[agents:, size:], done[:-agents])


def test_initial_weights_depend_on_the_generator_only():
    network, arrays = NetworkSettings(hidden_units=8, memory=MemorySettings(memory_size=6)), []
    for state, seed in ((1, 4), (2, 4), (2, 5)):
        torch.manual_seed(state)
        arrays.append(to_arrays(Actor(spec_of(ACTIONS["hybrid"]), network, seeded(seed))))
    for name, array in arrays[0].items():
        np.testing.assert_array_equal(arrays[1][name], array)
        assert "weight" not in name or not np.array_equal(arrays[2][name], array), name


@CARRIED
def test_actions_depend_on_the_carried_state(memory, previous):
    actor = recurrent_actor(ACTIONS["hybrid"], memory, previous)
    observations = observed(actor.spec, 5, np.random.default_rng(1))
    carried = np.random.default_rng(2).standard_normal((5, actor.carried)).astype(np.float32)
    with_carried = actor.frozen().act(observations, None, randomly(), carried=carried)
    assert not np.array_equal(with_carried[0], actor.frozen().act(observations, None, randomly())[0])


@CARRIED
def test_agents_without_carried_state_act_as_at_their_first_decision(memory, previous):
    actor = recurrent_actor(ACTIONS["hybrid"], memory, previous)
    observations = observed(actor.spec, 5, np.random.default_rng(1))
    zeros = np.zeros((5, actor.carried), np.float32)
    first = actor.frozen().act(observations, None, randomly(), carried=zeros)
    for got, expected in zip(actor.frozen().act(observations, None, randomly()), first, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert zeros.any(), "what it carries on takes the place of what it carried"


@CARRIED
def test_actions_of_an_agent_do_not_depend_on_other_agents(memory, previous):
    actor = recurrent_actor(ACTIONS["hybrid"], memory, previous)
    observations = observed(actor.spec, 6, np.random.default_rng(1))
    carried = np.random.default_rng(2).standard_normal((6, actor.carried)).astype(np.float32)
    together = carried.copy()
    modes = actor.frozen().act(observations, None, randomly(), deterministic=True, carried=together)
    for row in range(6):
        alone = carried[row : row + 1].copy()
        seen = [column[row : row + 1] for column in observations]
        got = actor.frozen().act(seen, None, randomly(), deterministic=True, carried=alone)
        for one, column in zip((*got, alone), (*modes, together), strict=True):
            np.testing.assert_allclose(one[0], column[row], atol=1e-5)


def test_frozen_recurrent_policy_does_not_change_with_its_actor():
    actor = recurrent_actor(ACTIONS["hybrid"], True, True, mixed=True)
    observations, frozen = observed(actor.spec, 3, np.random.default_rng(1)), actor.frozen()
    before = frozen.act(observations, None, randomly())
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(0.5)
    for got, expected in zip(frozen.act(observations, None, randomly()), before, strict=True):
        np.testing.assert_array_equal(got, expected)


@given(
    continuous=st.integers(0, 3),
    discrete=st.lists(st.integers(1, 4), max_size=3),
    rows=st.integers(0, 4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30, deadline=None)
def test_previous_action_features_are_executed_actions_and_one_hot_choices(continuous, discrete, rows, seed):
    if not continuous and not discrete:
        return
    actions, random = ActionSpec(continuous=continuous, discrete=tuple(discrete)), np.random.default_rng(seed)
    samples = (4 * random.standard_normal((rows, continuous))).astype(np.float32)
    choices = random.integers(0, discrete or 1, (rows, len(discrete)), np.int32)
    got = previous_features(actions, samples, choices)
    expected = []
    for row in range(rows):
        features = to_environment(samples[row]).tolist()
        for branch, size in enumerate(discrete):
            features += [float(choice == choices[row, branch]) for choice in range(size)]
        expected.append(features)
    assert got.dtype == np.float32
    assert got.tolist() == expected


@pytest.mark.parametrize("mixed", [False, True], ids=["perceptron", "conditioned"])
def test_published_weights_of_a_shared_critic_have_no_value_outputs(mixed):
    """They fit an actor without values, with the same actions and memories."""
    actor = recurrent_actor(ACTIONS["hybrid"], True, True, mixed=mixed, values=2)
    arrays, acting = actor.arrays(), recurrent_actor(ACTIONS["hybrid"], True, True, mixed=mixed)
    assert to_arrays(actor)["body.head.weight"].shape == (1 + 6 + 2, 3)
    assert (arrays["body.head.weight"].shape, arrays["body.head.bias"].shape) == ((7, 3), (7,))
    load_arrays(acting, arrays)
    observations = observed(actor.spec, 5, np.random.default_rng(1))
    carried = [np.ones((5, actor.carried), np.float32) for _ in range(2)]
    ours = actor.frozen().act(observations, None, randomly(), carried=carried[0])
    theirs = acting.frozen().act(observations, None, randomly(), carried=carried[1])
    for got, expected in zip((*theirs, carried[1]), (*ours, carried[0]), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)


def test_actor_without_memory_carries_no_state():
    actor = Actor(spec_of(ACTIONS["hybrid"]), NetworkSettings(hidden_units=8), seeded())
    assert (actor.carried, actor.frozen().carried, actor.recurrent) == (0, 0, None)


def test_critic_has_its_own_memory():
    """Its values follow from its own memories, and it has no normalizer."""
    network = NetworkSettings(normalize=True, hidden_units=8, memory=MemorySettings(memory_size=6))
    critic = Critic(spec_of(ACTIONS["hybrid"]), network, 2, seeded())
    rows, lengths = torch.randn(7, 3, generator=seeded(1)), np.array([3, 4])
    values = critic((rows,), Layout(lengths), torch.zeros(2, 6))
    assert values.shape == (7, 2)
    swapped = critic((rows[[3, 4, 5, 6, 0, 1, 2]],), Layout(lengths[::-1]), torch.zeros(2, 6))
    torch.testing.assert_close(swapped[4:], values[:3])
    assert not [name for name in to_arrays(critic) if "normalizer" in name]
