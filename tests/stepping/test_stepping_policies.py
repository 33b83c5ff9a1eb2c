"""Current policies: the newest weights act, and nothing of older ones is left in them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.errors import CheckpointError
from pipeline.messages.service import PolicyWeights
from pipeline.networks.actor import Actor
from pipeline.networks.settings import NetworkSettings
from pipeline.networks.weights import to_arrays
from pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.stepping.policies import CurrentPolicy

SPEC = BehaviorSpec(
    observations=(ObservationSpec(name="a", shape=(3,)),), actions=ActionSpec(continuous=2, discrete=(3,))
)
SMALL = NetworkSettings(hidden_units=8, normalize=True)
OBSERVATIONS = (np.linspace(-2, 2, 12, dtype=np.float32).reshape(4, 3),)


def weights(version):
    """Weights that differ between versions in every array, statistics and sigma included."""
    actor = Actor(SPEC, SMALL, torch.Generator().manual_seed(version))
    actor.encoder.update((torch.full((5, 3), float(version)),))
    with torch.no_grad():
        actor.log_sigma.fill_(-version / 4)
    return PolicyWeights(behavior="Test", version=version, arrays=to_arrays(actor))


def policy(*versions):
    current = CurrentPolicy(SPEC, SMALL, seed=7)
    for version in versions:
        current.load(weights(version))
    return current


def test_a_policy_acts_with_the_weights_loaded_last_and_keeps_nothing_of_earlier_ones():
    current, twin, earlier = policy(1, 2), policy(2), policy(1)
    assert current.version == 2
    got, expected, old = (each.act(OBSERVATIONS, None) for each in (current, twin, earlier))
    for name in ("continuous", "executed", "discrete", "log_probs"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
    assert not np.array_equal(got.continuous, old.continuous)


def test_weights_that_do_not_fit_leave_the_policy_as_it_was():
    current, twin = policy(1), policy(1)
    wrong = weights(2)
    del wrong.arrays["log_sigma"]
    with pytest.raises(CheckpointError):
        current.load(wrong)
    assert current.version == 1
    np.testing.assert_array_equal(current.act(OBSERVATIONS, None).continuous, twin.act(OBSERVATIONS, None).continuous)


def test_chosen_columns_have_the_records_shapes_and_outlive_the_next_act():
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
