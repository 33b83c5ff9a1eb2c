"""Current policies act with the newest weights, and keep nothing of older ones."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sparring.pipeline.errors import CheckpointError
from sparring.pipeline.messages.simulator import BehaviorReport, Decisions, Ends, Step
from sparring.pipeline.messages.state import PolicyWeights, StepAllowance
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.networks.device import to_arrays
from sparring.pipeline.networks.settings import MemorySettings, NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from sparring.pipeline.stepping.policies import NetworkPolicy, Policies
from sparring.pipeline.stepping.stepper import Stepper

SPEC = BehaviorSpec(
    observations=(ObservationSpec(name="a", shape=(3,)),), actions=ActionSpec(continuous=2, discrete=(3,))
)
SMALL = NetworkSettings(hidden_units=8, normalize=True)
OBSERVATIONS = (np.linspace(-2, 2, 12, dtype=np.float32).reshape(4, 3),)


def weights(version, network=SMALL):
    """Returns weights that differ between versions in every array, statistics and sigma included."""
    actor = Actor(SPEC, network, torch.Generator().manual_seed(version))
    actor.encoder.update((torch.full((5, 3), float(version)),))
    with torch.no_grad():
        actor.log_sigma.fill_(-version / 4)
    return PolicyWeights(behavior="Test", version=version, arrays=to_arrays(actor))


def policy(*versions, network=SMALL):
    current = NetworkPolicy(SPEC, network, np.random.default_rng(7))
    for version in versions:
        current.load(weights(version, network))
    return current


def test_a_policy_acts_with_the_weights_loaded_last_and_keeps_nothing_of_earlier_ones():
    current, twin, earlier = policy(1, 2), policy(2), policy(1)
    assert current.version == 2
    got, expected, old = (each.act(OBSERVATIONS, None) for each in (current, twin, earlier))
    for name in ("continuous", "executed", "discrete", "log_probs"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
    assert not np.array_equal(got.continuous, old.continuous)


@pytest.mark.parametrize("previous", [False, True])
def test_simulators_and_the_next_decision_get_the_limited_action(previous):
    network = SMALL.model_copy(update={"action_limit": 0.5, "previous_action": previous})
    current = policy(1, network=network)
    carried = np.zeros((4, current.carried), np.float32)
    chosen = current.act(OBSERVATIONS, None, carried)
    np.testing.assert_array_equal(chosen.executed, np.clip(chosen.continuous, -0.5, 0.5) * 2)
    assert (np.abs(chosen.continuous) > 0.5).any()
    if previous:
        np.testing.assert_array_equal(carried[:, : chosen.executed.shape[1]], chosen.executed)


def test_weights_that_do_not_fit_leave_the_policy_as_it_was():
    current, twin = policy(1), policy(1)
    wrong = weights(2)
    del wrong.arrays["log_sigma"]
    with pytest.raises(CheckpointError):
        current.load(wrong)
    assert current.version == 1
    np.testing.assert_array_equal(current.act(OBSERVATIONS, None).continuous, twin.act(OBSERVATIONS, None).continuous)


def test_chosen_columns_have_the_records_shapes_and_survive_the_next_act():
    current = policy(1)
    chosen = current.act(OBSERVATIONS, None)
    columns = (chosen.continuous, chosen.executed, chosen.discrete, chosen.log_probs)
    copies = [column.copy() for column in columns]
    current.act((OBSERVATIONS[0] + 1,), np.ones((4, 3), np.bool_) & [True, False, True])
    assert [column.shape for column in columns] == [(4, 2), (4, 2), (4, 1), (4,)]
    assert [column.dtype for column in columns] == [np.float32, np.float32, np.int32, np.float32]
    for column, copy in zip(columns, copies, strict=True):
        np.testing.assert_array_equal(column, copy)
    np.testing.assert_allclose(chosen.executed, np.clip(chosen.continuous, -3, 3) / 3, rtol=1e-6)


# ---------------------------------------------------------------- with memory


def carrying(**more):
    """Returns settings of a deterministic network whose agents carry numbers."""
    return NetworkSettings(hidden_units=8, deterministic=True, **more)


MEMORY = MemorySettings(memory_size=6, sequence_length=4)
CARRYING = {
    "memory": (carrying(memory=MEMORY), 6),
    "previous_action": (carrying(previous_action=True), 5),
    "both": (carrying(memory=MEMORY, previous_action=True), 11),
}
every_kind = pytest.mark.parametrize(("network", "numbers"), CARRYING.values(), ids=CARRYING)


def observed(rows, seed=0):
    return (np.random.default_rng(seed).normal(size=(rows, 3)).astype(np.float32),)


def nothing(network, rows):
    return np.zeros((rows, network.carried(SPEC.actions)), np.float32)


def assert_close(chosen, expected):
    """Compares up to the rounding of matrix products of other sizes."""
    for name in ("continuous", "executed", "discrete", "log_probs"):
        np.testing.assert_allclose(getattr(chosen, name), getattr(expected, name), atol=1e-5)


@every_kind
def test_carried_numbers_are_updated_in_place_and_change_the_next_action(network, numbers):
    current, seen = policy(1, network=network), observed(9)
    carried = nothing(network, 9)
    assert current.carried == numbers == carried.shape[1]
    first = current.act(seen, None, carried)
    kept = carried.copy()
    assert np.isfinite(kept).all()
    assert kept.any(1).all()
    second = current.act(seen, None, carried)
    assert (second.continuous != first.continuous).all()
    assert (carried != kept).any(1).all()
    assert_close(current.act(seen, None, nothing(network, 9)), first)
    assert_close(current.act(seen, None, kept), second)


def test_agents_carry_the_action_that_the_simulator_gets():
    """The executed values and the one-hot choice of the branch follow the memory."""
    for name in ("previous_action", "both"):
        network, numbers = CARRYING[name]
        current = policy(1, network=network)
        for seed in range(3):
            carried = nothing(network, 9)
            chosen = current.act(observed(9, seed), None, carried)
            np.testing.assert_array_equal(carried[:, numbers - 5 : -3], chosen.executed)
            np.testing.assert_array_equal(carried[:, -3:], np.eye(3)[chosen.discrete[:, 0]])


@every_kind
def test_an_agents_action_does_not_depend_on_order_and_size_of_the_batch(network, numbers):
    current, order = policy(1, network=network), np.random.default_rng(3).permutation(12)
    together, shuffled, alone = (nothing(network, 12) for _ in range(3))
    for step in range(6):
        (seen,) = observed(12, step)
        expected = current.act((seen,), None, together)
        chosen = current.act((seen[order],), None, shuffled)
        np.testing.assert_allclose(chosen.continuous, expected.continuous[order], atol=1e-5)
        np.testing.assert_allclose(chosen.log_probs, expected.log_probs[order], atol=1e-5)
        for agent in range(12):
            one = slice(agent, agent + 1)
            got = current.act((seen[one],), None, alone[one])  # a view: the update stays in `alone`
            np.testing.assert_allclose(got.continuous, expected.continuous[one], atol=1e-5)
        np.testing.assert_allclose(shuffled, together[order], atol=1e-5)
        np.testing.assert_allclose(alone, together, atol=1e-5)


@every_kind
def test_newer_weights_keep_carried_numbers(network, numbers):
    """The next version begins with the numbers of the one before, and their count stays."""
    current, carried = policy(1, network=network), nothing(network, 4)
    current.act(observed(4), None, carried)
    twin = carried.copy()
    current.load(weights(2, network))
    assert current.carried == numbers
    assert_close(current.act(observed(4), None, carried), policy(2, network=network).act(observed(4), None, twin))
    np.testing.assert_array_equal(carried, twin)


def test_a_policy_without_memory_carries_nothing():
    assert policy(1).carried == 0


@every_kind
def test_policies_carry_what_their_settings_define(network, numbers):
    policies = Policies({"Test": SimpleNamespace(network_settings=network, trainer_type="ppo")}, seed=1)
    policies.build("Test", SPEC)
    assert not policies.current
    policies.learn(weights(1, network))
    policies.build("Test", SPEC)
    assert policies.current["Test"].carried == numbers
    carried = nothing(network, 4)
    policies.current["Test"].act(observed(4), None, carried)
    assert carried.any(1).all()


def decided(agents, seen, ended=()):
    n = len(ended)
    return BehaviorReport(
        behavior="Test",
        decisions=Decisions(
            agents=np.array(agents, np.int64), observations=(seen,), rewards=np.zeros(len(agents), np.float32)
        ),
        ends=Ends(
            agents=np.array(ended, np.int64),
            observations=(np.zeros((n, 3), np.float32),),
            rewards=np.zeros(n, np.float32),
            interrupted=np.zeros(n, bool),
        ),
    )


@pytest.mark.parametrize("lockstep", [False, True])
@every_kind
def test_an_agent_among_others_acts_as_it_would_alone(network, numbers, lockstep):
    """Other agents in the stepper join, end and change the order of rows."""
    rng, current, alone = np.random.default_rng(5), policy(1, network=network), policy(1, network=network)
    stepper = Stepper({"Test": current}, lockstep=lockstep)
    stepper.connect(1, 1, {"Test": SPEC})
    stepper.grant("Test", StepAllowance(serial=1, steps=10**6))
    own, decisions = {}, 0
    for sequence in range(25):
        ended = [agent for agent in own if rng.random() < 0.15]
        for agent in ended:
            del own[agent]
        agents = rng.permutation(30)[: rng.integers(1, 30)].tolist()
        decisions += len(agents)
        (seen,) = observed(len(agents), sequence)
        stepper.receive(1, Step(sequence=sequence, reports=(decided(agents, seen, ended),)), 0.0)
        ((_, act, _, _),) = stepper.tick(0.0).acts
        (steps,) = stepper.take_steps()
        carried = []
        for row, agent in enumerate(agents):
            mine = own.setdefault(agent, nothing(network, 1))
            carried.append(mine[0].copy())
            expected = alone.act((seen[row : row + 1],), None, mine)
            np.testing.assert_allclose(act.actions[0].continuous[row], expected.executed[0], atol=1e-5)
        order = np.argsort(agents) if lockstep else slice(None)
        np.testing.assert_allclose(steps.acted.carried, np.array(carried)[order], atol=1e-5)
    assert decisions > 200
