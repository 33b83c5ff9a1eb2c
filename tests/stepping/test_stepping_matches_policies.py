"""Ghosts as networks: each is held once, has its own shape and memory, and is released after use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sparring.pipeline.errors import CheckpointError
from sparring.pipeline.messages.matches import Matchup, MatchupAssignment
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
SMALL = NetworkSettings(hidden_units=8, deterministic=True)
OTHER = NetworkSettings(hidden_units=24, num_layers=1)
MEMORY = NetworkSettings(hidden_units=8, memory=MemorySettings(memory_size=6, sequence_length=4), deterministic=True)
LONGER = NetworkSettings(hidden_units=12, memory=MemorySettings(memory_size=10, sequence_length=8))
PREVIOUS = NetworkSettings(hidden_units=12, previous_action=True)


def weights(number: int, network: NetworkSettings = SMALL, *, included: bool = False) -> PolicyWeights:
    """Returns weights that differ between numbers; with `included` they name their network."""
    actor = Actor(SPEC, network, torch.Generator().manual_seed(100 + number))
    settings = network.model_dump_json() if included else ""
    return PolicyWeights(behavior="Test", version=number, arrays=to_arrays(actor), network=settings)


def policies(network: NetworkSettings = SMALL) -> Policies:
    return Policies({"Test": SimpleNamespace(network_settings=network, trainer_type="ppo")}, seed=1)


def alone(number: int, network: NetworkSettings) -> NetworkPolicy:
    """Returns a deterministic policy with these weights alone."""
    sure = network.model_copy(update={"deterministic": True})
    policy = NetworkPolicy(SPEC, sure, np.random.default_rng(0))
    policy.load(weights(number, network))
    return policy


def observed(rows: int, seed: int = 0) -> tuple[Any, ...]:
    return (np.random.default_rng(seed).normal(size=(rows, 3)).astype(np.float32),)


def test_a_ghost_is_held_once_and_does_not_change() -> None:
    """A repeated record keeps the same object, and newer weights of the learner do not change it."""
    held = policies()
    held.hold(SPEC, weights(2))
    ghost = held.ghosts["Test", 2]
    before = ghost.act(observed(4), None).continuous
    held.hold(SPEC, weights(2))
    held.learn(weights(5))
    held.build("Test", SPEC)
    assert held.ghosts == {("Test", 2): ghost}
    np.testing.assert_array_equal(ghost.act(observed(4), None).continuous, before)
    np.testing.assert_array_equal(alone(2, SMALL).act(observed(4), None).continuous, before)
    assert not np.array_equal(held.current["Test"].act(observed(4), None).continuous, before)


def test_an_unused_ghost_is_released_and_the_learner_stays() -> None:
    held = policies()
    held.learn(weights(5))
    held.build("Test", SPEC)
    for number in (1, 2, -3):
        held.hold(SPEC, weights(number))
    held.release({("Test", 2), ("Test", 9), ("Other", 1)})
    assert set(held.ghosts) == {("Test", 2)}
    assert set(held.current) == {"Test"}
    held.release(set())
    assert held.ghosts == {}


def test_an_opponent_uses_its_own_network_and_the_sampling_of_the_run() -> None:
    """Its weights bring the network; the run's settings decide whether actions are sampled."""
    held = policies(SMALL)
    held.hold(SPEC, weights(-1, OTHER, included=True))
    chosen = held.ghosts["Test", -1].act(observed(5), None)
    expected = alone(-1, OTHER).act(observed(5), None)
    np.testing.assert_array_equal(chosen.continuous, expected.continuous)
    np.testing.assert_array_equal(chosen.discrete, expected.discrete)


def test_weights_that_do_not_fit_are_refused_and_not_held() -> None:
    held = policies(SMALL)
    with pytest.raises(CheckpointError):
        held.hold(SPEC, weights(-1, OTHER))
    assert held.ghosts == {}


@pytest.mark.parametrize("learner", [MEMORY, SMALL, PREVIOUS], ids=["memory", "none", "previous action"])
@pytest.mark.parametrize("lockstep", [False, True])
def test_each_of_several_policies_has_its_own_memory(learner: NetworkSettings, lockstep: bool) -> None:
    """The learner and ghosts with other memories act in one tick and use each slot in turn.

    Assembly receives what the learner's agents carried, in the learner's own width.
    """
    learner = learner.model_copy(update={"deterministic": True})
    networks = {0: learner, 7: LONGER, -8: OTHER, 9: PREVIOUS}
    held = policies(learner)
    stepper = Stepper(held.current, lockstep=lockstep, self_play=["Test"], ghosts=held.ghosts)
    held.learn(weights(5, learner))
    held.build("Test", SPEC)
    for number in (7, -8, 9):
        held.hold(SPEC, weights(number, networks[number], included=True))
    behavior_ids = [f"Test?team={team}" for team in range(4)]
    stepper.connect(1, 0, dict.fromkeys(behavior_ids, SPEC))
    stepper.grant("Test", StepAllowance(serial=1, steps=10**6))
    rng, sequence = np.random.default_rng(3), 0
    own = {number: alone(5 if number == 0 else number, network) for number, network in networks.items()}
    for episode in range(4):
        players = dict(zip(behavior_ids, np.roll([0, 7, -8, 9], episode).tolist(), strict=True))
        learning = next(behavior_id for behavior_id, number in players.items() if number == 0)
        ghosts = {behavior_id: number for behavior_id, number in players.items() if number}
        matchup = Matchup(number=episode + 1, team=behavior_ids.index(learning), ghosts=ghosts)
        stepper.matches.assignment = MatchupAssignment(serial=episode + 1, matchups=(matchup,))
        memories = {
            (behavior_id, row): np.zeros((1, own[number].carried), np.float32)
            for behavior_id, number in players.items()
            for row in range(3)
        }
        for step in range(5):
            before = {key: memory.copy() for key, memory in memories.items()}
            seen = {behavior_id: observed(3, int(rng.integers(2**31))) for behavior_id in behavior_ids}
            restarted = episode > 0 and step == 0
            reports = tuple(
                _report(behavior_id, seen[behavior_id], restarted=restarted) for behavior_id in behavior_ids
            )
            stepper.receive(1, Step(sequence=sequence, reports=reports), 0.0)
            sequence += 1
            ((_, act, _, _),) = stepper.tick(0.0).acts
            for actions in act.actions:
                policy = own[players[actions.behavior]]
                for row in range(3):
                    memory = memories[actions.behavior, row] if policy.carried else None
                    expected = policy.act((seen[actions.behavior][0][row : row + 1],), None, memory)
                    np.testing.assert_allclose(actions.continuous[row], expected.executed[0], atol=1e-5)
                    np.testing.assert_array_equal(actions.discrete[row], expected.discrete[0])
            _check_steps(stepper, np.concatenate([before[learning, row] for row in range(3)]))


def _report(behavior_id: str, seen: Any, *, restarted: bool) -> BehaviorReport:
    """Returns decisions of three agents; with `restarted` their former episodes end in the same frame."""
    nothing = np.zeros(3, np.float32)
    return BehaviorReport(
        behavior=behavior_id,
        decisions=Decisions(agents=np.arange(3), observations=seen, rewards=nothing),
        ends=Ends(agents=np.arange(3), observations=seen, rewards=nothing, interrupted=nothing > 0)
        if restarted
        else None,
    )


def _check_steps(stepper: Stepper, carried: Any) -> None:
    """Checks that steps of the learner's agents alone are reported, with what they carried."""
    (part,) = stepper.take_steps()
    assert part.acted is not None
    assert part.acted.versions.tolist() == [5, 5, 5]
    if not carried.shape[1]:
        assert part.acted.carried is None
        return
    assert part.acted.carried is not None
    assert part.acted.carried.shape == carried.shape
    np.testing.assert_allclose(part.acted.carried, carried, atol=1e-5)


@pytest.mark.parametrize("lockstep", [False, True])
def test_scripts_are_named_by_their_number_in_each_simulator(lockstep: bool) -> None:
    """Rows of a scripted behavior get the number in the simulator's own order; other rows get none."""
    held = policies()
    held.hold(SPEC, PolicyWeights(behavior="Test", version=-1, arrays={}, script="keeper"))
    held.hold(SPEC, PolicyWeights(behavior="Test", version=-2, arrays={}, script="striker"))
    held.learn(weights(1))
    held.build("Test", SPEC)
    stepper = Stepper(held.current, self_play=["Test"], ghosts=held.ghosts, lockstep=lockstep, expected=1)
    matchups = tuple(Matchup(number=n, team=0, ghosts={"Test?team=1": -n}) for n in (1, 2))
    stepper.matches.assignment = MatchupAssignment(serial=1, matchups=matchups)
    specs = dict.fromkeys(("Test?team=0", "Test?team=1"), SPEC)
    stepper.connect(0, 0, specs, {"Test": ("striker", "winger", "keeper")})
    stepper.grant("Test", StepAllowance(serial=1, steps=10**6))
    agents, matches = [7, 3, 5], [20, 10, 20]

    def rows(ids: list[int]) -> Decisions:
        return Decisions(
            agents=np.array(ids, np.int64),
            observations=observed(3),
            rewards=np.zeros(3, np.float32),
            matches=np.array(matches, np.int64),
        )

    reports = tuple(BehaviorReport(behavior=f"Test?team={team}", decisions=rows(agents)) for team in (0, 1))
    stepper.receive(0, Step(sequence=0, reports=reports), 0.0)
    ((_, act, *_),) = stepper.tick(0.0).acts
    learned, scripted = act.actions
    assert learned.scripts is None
    number = {10: 3, 20: 1}  # match 10 has the first matchup, and its keeper is this simulator's third script
    assert scripted.agents.tolist() == agents
    assert scripted.scripts.tolist() == [number[match] for match in matches]
    assert scripted.continuous.shape == (3, 2)
    assert scripted.discrete.shape == (3, 1)
