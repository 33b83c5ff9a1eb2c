"""Whole updates of PPO and MA-POCA compared with the one-page references: same weights, same statistics.

The references compute in float64 and the product in float32, whose gradients here differ from theirs by about 1e-7.
Adam divides a gradient by at least `adam_epsilon`, 1e-3 here, and multiplies it by the learning rate of 1e-2: a weight
differs by about 1e-6 for each step at most, and by 1e-6 in all where signs vary. (With Adam's usual epsilon of 1e-8, a
gradient near 0 could move a weight by the learning rate in either direction.)
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.settings import (
    CuriositySettings,
    ExtrinsicSettings,
    Hyperparameters,
    RewardSignals,
    TrainerSettings,
)
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from tests.learning.group_helpers import record
from tests.learning.learning_helpers import segments
from tests.learning.random_groups import OWN, PLAIN, World, specs_of
from tests.learning.reference import poca, ppo

TOLERANCE = 5e-6
VERSION = 3
NEAR_FAR = (ObservationSpec(name="near", shape=(3,)), ObservationSpec(name="far", shape=(2,)))
ACTIONS = [
    ActionSpec(continuous=2),
    ActionSpec(discrete=(3, 2)),
    ActionSpec(continuous=2, discrete=(3,)),
    ActionSpec(continuous=1),
]
HYPER = {
    "batch_size": st.sampled_from([5, 16, 40]),
    "lambd": st.sampled_from([0.0, 0.8, 1.0]),
    "beta": st.sampled_from([0.0, 0.05]),
    "epsilon": st.sampled_from([0.1, 0.3]),
    "learning_rate_schedule": st.sampled_from(["linear", "constant"]),
    "clip_value_loss": st.booleans(),
    "decoupled_objective": st.booleans(),
    "ratio": st.sampled_from(["joint", "per_dimension"]),
    "max_grad_norm": st.sampled_from([None, 0.3]),
}


def settings_of(kind: str, hyper: dict, *, normalize: bool, curious: bool, gamma: float = 0.9) -> TrainerSettings:
    """Returns settings of a small learner whose schedules fall by a tenth in an update."""
    hyper = {"buffer_size": 40, "num_epoch": 2, "learning_rate": 1e-2, "adam_epsilon": 1e-3} | hyper
    return TrainerSettings(
        trainer_type=kind,
        hyperparameters=Hyperparameters(**hyper),
        network_settings=NetworkSettings(normalize=normalize, hidden_units=8, num_layers=2),
        reward_signals=RewardSignals(
            extrinsic=ExtrinsicSettings(gamma=gamma, strength=1.5),
            curiosity=CuriositySettings(gamma=0.7) if curious else None,
        ),
        max_steps=400,
    )


def state_of(learner: Learner) -> tuple[dict[str, np.ndarray], torch.Generator]:
    """Returns a learner's weights, without those of reward signals, and a generator in the state of its own."""
    checkpoint = learner.checkpoint()
    generator = torch.Generator()
    generator.set_state(torch.from_numpy(checkpoint.optimizer["generator"]))
    return {name: one for name, one in checkpoint.weights.items() if not name.startswith("signals.")}, generator


def same(learner: Learner, reference: ppo.PPO | poca.POCA, statistics: dict[str, float], expected: dict[str, float]):
    """Checks that weights and statistics are equal."""
    weights, _ = state_of(learner)
    assert weights.keys() == reference.weights.keys()
    for name, weight in weights.items():
        np.testing.assert_allclose(weight, reference.weights[name].detach(), TOLERANCE, TOLERANCE, err_msg=name)
    assert all("Curiosity" in name for name in statistics.keys() - expected.keys())
    for name, number in expected.items():
        assert statistics[name] == pytest.approx(number, rel=1e-4, abs=TOLERANCE), name


@given(
    actions=st.sampled_from(ACTIONS),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    seed=st.integers(0, 999),
    hyper=st.fixed_dictionaries(HYPER | {"shared_critic": st.booleans()}),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    normalize=st.booleans(),
    curious=st.booleans(),
)
@settings(max_examples=15)
def test_updates_of_ppo_equal_those_of_the_reference(actions, lengths, seed, hyper, gamma, normalize, curious):
    spec, random = BehaviorSpec(observations=NEAR_FAR, actions=actions), np.random.default_rng(seed)
    learner = Learner("Test", spec, settings_of("ppo", hyper, normalize=normalize, curious=curious, gamma=gamma), seed)
    weights, generator = state_of(learner)
    reference = ppo.PPO(spec, learner.settings, weights)
    learner.version = VERSION
    for number in range(1 if curious else 2):
        ends = random.integers(0, 3, len(lengths))
        sent = segments(
            lengths, spec=spec, seed=seed + number, terminated=ends == 1, interrupted=ends == 2,
            masked=bool(actions.discrete and random.integers(2)),
            versions=random.integers(VERSION - 1, VERSION + 1, sum(lengths)),
            group_rewards=random.standard_normal(sum(lengths), np.float32),
        )  # fmt: skip
        learner.add(sent)
        trained, version = learner.trained, learner.version
        report = learner.update(everything=True)
        same(learner, reference, report.statistics, reference.update(sent, generator, version, trained))


def test_flushed_segment_bootstraps_in_ppo_with_the_observation_at_its_boundary():
    """An update of exactly `buffer_size` steps splits a segment, even one that terminates after the boundary."""
    spec = BehaviorSpec(observations=NEAR_FAR, actions=ACTIONS[2])
    learner = Learner("Test", spec, settings_of("ppo", {"batch_size": 8}, normalize=True, curious=False), 0)
    weights, generator = state_of(learner)
    reference = ppo.PPO(spec, learner.settings, weights)
    sent = segments([30, 20, 30], spec=spec, terminated=[False, True, True], versions=1)
    learner.add(sent)
    for first, last in ((0, 40), (40, 80)):
        trained, version = learner.trained, learner.version
        report = learner.update()
        same(learner, reference, report.statistics, reference.update(sent, generator, version, trained, first, last))


@given(
    teammates=st.integers(0, 2),
    count=st.integers(1, 4),
    most=st.integers(1, 4),
    horizon=st.integers(1, 9),
    seed=st.integers(0, 999),
    hyper=st.fixed_dictionaries(HYPER),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    normalize=st.booleans(),
    curious=st.booleans(),
)
@settings(max_examples=10)
def test_updates_of_poca_equal_those_of_the_reference(
    teammates, count, most, horizon, seed, hyper, gamma, normalize, curious
):
    specs = specs_of(teammates=teammates)
    learner = Learner(OWN, PLAIN, settings_of("poca", hyper, normalize=normalize, curious=curious, gamma=gamma), seed)
    learner.register({name: spec for name, spec in specs.items() if name != OWN})
    weights, generator = state_of(learner)
    reference = poca.POCA(specs, learner.settings, weights)
    learner.version, world = VERSION, World(specs, seed=seed)
    for _ in range(1 if curious else 2):
        while not (groups := world.groups(count, times=5, most=most, horizon=horizon)):
            pass
        for step in (step for group in groups for one in group.of(OWN) for step in one.steps):
            step.version = VERSION - int(world.random.integers(2))
        sent = record(groups, specs)
        learner.add(sent)
        trained, version = learner.trained, learner.version
        report = learner.update(everything=True)
        same(learner, reference, report.statistics, reference.update(sent, generator, version, trained))
