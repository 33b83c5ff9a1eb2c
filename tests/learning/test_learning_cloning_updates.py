"""Behavioral cloning in updates of PPO and MA-POCA, and imitation of demonstrations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sparring.pipeline.demonstrations.episodes import RecordingError
from sparring.pipeline.learning.poca import POCA
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from tests.learning.cloning_helpers import HYBRID, PRETRAINING, cloning, head_of, loss_of, settings_of
from tests.learning.group_helpers import batch_of
from tests.learning.learning_helpers import algorithm_of
from tests.learning.random_groups import OWN, specs_of
from tests.learning.signals_helpers import (
    SPECS,
    demonstrations_of,
    finite,
    moments,
    played,
    recorded,
    signals_of,
    state,
    trainer,
    weights_of,
    world,
    write,
)

# ---------------------------------------------------------------- with PPO and MA-POCA


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    return write(tmp_path, HYBRID, recorded(HYBRID, [4, 3, 5], masked=True))


@pytest.mark.parametrize("shared", [False, True])
def test_cloning_does_not_change_the_critic_or_the_optimizer_of_the_policy(demo: Path, shared: bool) -> None:
    """Cloning trains the actor only, with its own Adam."""
    settings = settings_of({}, demo, shared_critic=shared)
    ppo = algorithm_of("Test", HYBRID, settings, torch.Generator().manual_seed(0))
    cloning = ppo.cloning
    ppo.update(played(ppo), 1, 0)
    assert cloning is not None
    critic = state(ppo.networks.modules["critic"]) if not shared else None
    adam, actor = moments(ppo.optimizer), state(ppo.actor)
    values = {
        name: parameter.detach()[ppo.actor.outputs :].clone()
        for name, parameter in ppo.actor.named_parameters()
        if str(ppo.actor.body.output) in name and name.startswith("body.")
    }
    cloning.update(0)
    assert state(ppo.actor) != actor
    assert moments(ppo.optimizer) == adam
    if critic is not None:
        assert state(ppo.networks.modules["critic"]) == critic
    for name, before in values.items():
        after = dict(ppo.actor.named_parameters())[name].detach()[ppo.actor.outputs :]
        assert torch.equal(after, before)


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_ppo_clones_once_per_update(demo: Path, memory: bool, shared: bool) -> None:
    """An update clones after its last minibatch and reports the loss, until the steps of cloning are over."""
    settings = settings_of({"steps": 100, "batch_size": 6, "num_epoch": 1}, demo, memory=memory, shared_critic=shared)
    ppo = algorithm_of("Test", HYBRID, settings, torch.Generator().manual_seed(0))
    cloning = ppo.cloning
    batch = played(ppo)
    assert cloning is not None
    for update in range(1, 3):
        report = ppo.update(batch, update, 0)
        assert np.isfinite(report.statistics[PRETRAINING])
        steps = {tensor.item() for name, tensor in cloning.moments.items() if name.endswith(".step")}
        assert steps == {2.0 * update}
        assert finite(ppo.networks.modules)
    assert PRETRAINING not in ppo.update(batch, 3, 100).statistics


def test_cloning_with_ma_poca(demo: Path) -> None:
    """Cloning continues after teammates are registered, which replaces the optimizer's block."""
    poca = algorithm_of(OWN, HYBRID, settings_of({}, demo, kind="poca"), torch.Generator().manual_seed(0))
    cloning = poca.cloning
    assert isinstance(poca, POCA)
    specs = specs_of(HYBRID, teammates=1)
    poca.register({name: spec for name, spec in specs.items() if name != OWN})
    batch = batch_of(world(poca, specs).groups(5), specs)
    assert cloning is not None
    actor, critic = state(poca.actor), state(poca.networks.modules["critic"])
    cloning.update(0)
    assert state(poca.actor) != actor
    assert state(poca.networks.modules["critic"]) == critic
    report = poca.update(batch, 1, 0)
    assert report.skipped == 0
    assert PRETRAINING in report.statistics
    assert finite(poca.networks.modules)


def test_cloning_is_off_by_default() -> None:
    """A run without cloning has no such loss."""
    ppo = algorithm_of("Test", HYBRID, trainer(signals_of(["extrinsic"])), torch.Generator().manual_seed(0))
    cloning = ppo.cloning
    assert cloning is None
    assert PRETRAINING not in ppo.update(played(ppo), 1, 0).statistics


def test_demonstrations_of_another_spec_are_refused(tmp_path: Path) -> None:
    """They are refused at the start of training; a player does not read them."""
    write(tmp_path, SPECS["discrete"], recorded(SPECS["discrete"], [3]))
    with pytest.raises(RecordingError):
        algorithm_of("Test", HYBRID, settings_of({}, tmp_path), torch.Generator())
    assert algorithm_of("Test", HYBRID, settings_of({}, tmp_path), torch.Generator(), learns=False).cloning is None


def test_non_finite_gradient_is_skipped() -> None:
    """Weights and Adam do not change, bit for bit, and the next step is finite."""
    demonstrations = demonstrations_of(HYBRID, recorded(HYBRID, [4, 3, 5]))
    demonstrations.continuous[3] = np.nan
    actor, one = cloning(HYBRID, demonstrations, batch_size=12, num_epoch=2)
    before = state(actor), moments(one)
    assert one.update(0) == {}
    assert (state(actor), moments(one)) == before
    demonstrations.continuous[3] = 0
    assert one.update(0)
    assert finite(actor)


# ---------------------------------------------------------------- imitation


@pytest.mark.parametrize("name", ["bytes", "floats", "entities", "goal", "hybrid"])
@pytest.mark.parametrize("memory", [False, True])
def test_loss_falls(name: str, memory: bool) -> None:
    """The loss falls for every kind of observation; with memory the actions are constant."""
    spec = SPECS[name]
    columns = recorded(spec, [4, 3, 5], masked=not memory)
    if memory:
        columns["continuous"][:], columns["discrete"][:] = 0.4, 1
    _, one = cloning(
        spec, demonstrations_of(spec, columns), how={"memory": memory, "learning_rate": 0.02}, batch_size=6, num_epoch=1
    )
    first = one.update(0)[PRETRAINING]
    for _ in range(25):
        last = one.update(0)[PRETRAINING]
    assert last < 0.6 * first


def test_mode_of_the_policy_becomes_the_demonstrated_action() -> None:
    """The policy learns a deterministic task, in which the sign of the observation decides the action."""
    spec = BehaviorSpec(
        observations=(ObservationSpec(name="goal", shape=(1,)),), actions=ActionSpec(continuous=1, discrete=(2,))
    )
    seen = np.array([-1, 1] * 10, np.float32)[:, None]
    columns = recorded(spec, [20])
    columns |= {"observation.0": seen, "continuous": 0.5 * seen, "discrete": (seen > 0).astype(np.int32)}
    actor, one = cloning(
        spec, demonstrations_of(spec, columns), how={"learning_rate": 0.01}, batch_size=10, num_epoch=1
    )
    first = one.update(0)[PRETRAINING]
    for _ in range(150):
        last = one.update(0)[PRETRAINING]
    assert last < 0.05 * first
    continuous, discrete, _ = actor.frozen().act((seen[:2],), None, torch.Generator(), deterministic=True)
    np.testing.assert_allclose(continuous[:, 0] / 3, [-0.5, 0.5], atol=0.05)
    assert discrete[:, 0].tolist() == [0, 1]


def test_demonstrations_are_normalized_by_the_statistics_of_the_policy() -> None:
    """With `normalize` the policy's statistics normalize demonstrations and do not include them."""
    actor, one = cloning(how={"normalize": True}, batch_size=12, num_epoch=1)
    normalizer = actor.encoder.normalizer
    assert normalizer is not None
    normalizer.mean.fill_(0.5)
    normalizer.variance.fill_(4.0)
    demonstrations, before = one.demonstrations, normalizer.count.item()
    x = (np.concatenate(demonstrations.observations, 1).astype(np.float64) - 0.5) / 2
    expected = loss_of(HYBRID.actions, head_of(weights_of(actor), x), demonstrations)
    assert one.update(0) == {PRETRAINING: pytest.approx(expected, rel=1e-4)}
    assert normalizer.count.item() == before
