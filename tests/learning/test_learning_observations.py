"""Updates with observations of every kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.learning.buffer import Batch
from sparring.pipeline.learning.minibatches import Minibatch, RecurrentState, minibatches
from sparring.pipeline.learning.ranks import Ranks
from sparring.pipeline.learning.settings import Hyperparameters, TrainerSettings
from sparring.pipeline.networks import distributions
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.networks.device import load_arrays, to_arrays
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from tests.learning.learning_helpers import algorithm_of

SPEC = BehaviorSpec(
    observations=(
        ObservationSpec(name="eye", shape=(3, 40, 40), kind="image", dtype="uint8"),
        ObservationSpec(name="state", shape=(3,)),
        ObservationSpec(name="others", shape=(4, 2), kind="entities"),
        ObservationSpec(name="aim", shape=(2,), kind="goal"),
    ),
    actions=ActionSpec(continuous=1, discrete=(2,)),
)
TRAINER = TrainerSettings(
    hyperparameters=Hyperparameters(batch_size=8, buffer_size=32, learning_rate=1e-3),
    network_settings=NetworkSettings(normalize=True, hidden_units=8, num_layers=2),
    max_steps=1000,
)


def observed(rows, random):
    return tuple(
        random.integers(0, 256, (rows, *one.shape), np.uint8)
        if one.dtype == "uint8"
        else random.standard_normal((rows, *one.shape), np.float32)
        for one in SPEC.observations
    )


def batch(ppo, lengths=(20, 12)):
    random, rows = np.random.default_rng(1), sum(lengths)
    observations = observed(rows, random)
    continuous, discrete, log_probs = ppo.actor.frozen().act(observations, None, np.random.default_rng(1))
    return Batch(
        lengths=np.array(lengths, np.int32),
        terminated=np.array([True, False]),
        ended=np.array([True, False]),
        agent_episodes=np.arange(len(lengths)),
        next_observations=observed(len(lengths), random),
        observations=observations,
        continuous=continuous,
        discrete=discrete,
        log_probs=log_probs,
        masks=None,
        rewards=random.standard_normal(rows, np.float32),
        group_rewards=np.zeros(rows, np.float32),
        versions=np.zeros(rows, np.int64),
    )


def test_update_changes_every_part_of_the_network_and_no_byte_image():
    ppo = algorithm_of("Test", SPEC, TRAINER, torch.Generator().manual_seed(0))
    steps = batch(ppo)
    images = steps.observations[0].copy()
    before = [to_arrays(ppo.actor), to_arrays(ppo.networks.critic)]
    report = ppo.update(steps, 0, 0)
    assert (report.minibatches, report.skipped) == (12, 0)
    for old, network in zip(before, (ppo.actor, ppo.networks.critic), strict=True):
        same = [name for name, array in to_arrays(network).items() if np.array_equal(array, old[name])]
        assert not same, "every parameter has a gradient, every statistic new rows"
    np.testing.assert_array_equal(steps.observations[0], images)


@pytest.mark.parametrize("conditioning", ["hyper", "none"])
def test_shared_critic_is_one_network_whose_values_are_not_published(conditioning):
    """One pass computes both; the published weights fit an actor without values, which acts the same."""
    network = TRAINER.network_settings.model_copy(update={"goal_conditioning_type": conditioning})
    hyper = TRAINER.hyperparameters.model_copy(update={"shared_critic": True})
    trainer = TRAINER.model_copy(update={"hyperparameters": hyper, "network_settings": network})
    ppo = algorithm_of("Test", SPEC, trainer, torch.Generator().manual_seed(0))
    separate = algorithm_of(
        "Test", SPEC, TRAINER.model_copy(update={"network_settings": network}), torch.Generator().manual_seed(0)
    )
    assert ppo.networks.critic is None
    assert ppo.optimizer.flat.numel() < 0.6 * separate.optimizer.flat.numel()
    steps = batch(ppo)
    inputs = ppo.actor.encoder.prepare(ppo.actor.encoder.join(steps.observations))
    with torch.no_grad():
        head, values, _ = ppo.networks.run(inputs, RecurrentState())
    assert torch.equal(values, ppo.networks.value(inputs))
    assert (head.shape, values.shape) == ((32, 3), (32, 1))
    before = to_arrays(ppo.networks.modules)
    assert ppo.update(steps, 0, 0).skipped == 0
    after = to_arrays(ppo.networks.modules)
    assert not [name for name in before if np.array_equal(before[name], after[name])]
    acting = Actor(SPEC, network)
    load_arrays(acting, ppo.actor.arrays())
    for one, other in zip(
        acting.frozen().act(steps.observations, None, np.random.default_rng(3)),
        ppo.actor.frozen().act(steps.observations, None, np.random.default_rng(3)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_log_probabilities_of_fresh_rows_equal_the_stored_ones():
    """The ratio of an update is 1 at first, because log-probabilities of a batch equal those of acting."""
    ppo = algorithm_of("Test", SPEC, TRAINER, torch.Generator().manual_seed(0))
    steps = batch(ppo)
    encoder = ppo.actor.encoder
    with torch.no_grad():
        head = ppo.actor(encoder.prepare(encoder.join(steps.observations)))
        evaluated = distributions.evaluate(
            SPEC.actions,
            head,
            ppo.actor.log_sigma,
            torch.from_numpy(steps.continuous),
            torch.from_numpy(steps.discrete).long(),
            None,
        )
    np.testing.assert_allclose(evaluated.log_prob.numpy(), steps.log_probs, atol=1e-5)


@given(steps=st.integers(1, 40), size=st.integers(1, 40), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_wide_and_narrow_columns_are_shuffled_in_the_same_order(steps, size, seed):
    """A row of a minibatch is the same row of the batch in all columns, and no row occurs twice."""
    size = min(size, steps)
    number = torch.arange(steps, dtype=torch.float32)
    wide = number.repeat_interleave(1200).reshape(steps, 3, 20, 20)
    rows = Minibatch(
        inputs=(number.unsqueeze(1), wide),
        continuous=number.unsqueeze(1),
        discrete=number.long().unsqueeze(1),
        masks=None,
        log_prob=number,
        advantage=number,
        limit=number,
        returns=number.unsqueeze(1),
        values=number.unsqueeze(1),
    )
    found = list(minibatches(rows, size, torch.Generator().manual_seed(seed), Ranks()))
    assert all((one.state, one.weight) == (RecurrentState(), 1.0) for one in found)
    assert all(one.at.tolist() == one.rows.log_prob.tolist() for one in found)
    parts = [one.rows for one in found]
    assert [len(part.log_prob) for part in parts] == [size] * (steps // size)
    for part in parts:
        assert part.masks is None
        for column in (*part.inputs, *(column for column in part[1:] if column is not None)):
            assert torch.equal(column.reshape(size, -1)[:, -1].float(), part.log_prob)
    log_probs = torch.cat([part.log_prob for part in parts]).tolist()
    assert len(set(log_probs)) == len(log_probs) == steps // size * size
