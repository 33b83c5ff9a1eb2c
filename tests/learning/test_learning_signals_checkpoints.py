"""Checkpoints of learners with reward signals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparring.pipeline.demonstrations.episodes import RecordingError
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.settings import BehavioralCloningSettings
from tests.learning.group_helpers import record
from tests.learning.random_groups import OWN, specs_of
from tests.learning.signals_algorithms import PLAIN
from tests.learning.signals_helpers import (
    NAMES,
    played,
    record_of,
    recorded,
    signals_of,
    state,
    trainer,
    world,
    write,
)


def learner(kind: str, demo: Path, *, learns: bool = True, cloning: bool = True, seed: int = 0, **how: Any) -> Learner:
    """Returns a learner with all signals, VAIL and cloning."""
    path = str(demo / "hybrid")
    settings = trainer(
        signals_of(NAMES, path, use_actions=True, use_vail=True, normalize=True),
        kind=kind,
        normalize=True,
        cloning=BehavioralCloningSettings(demo_path=path, steps=5000, batch_size=4) if cloning else None,
        **how,
    )
    return Learner("Test" if kind == "ppo" else OWN, PLAIN, settings, seed, learns=learns)


def fed(one: Learner, seed: int, source: str = "stepping-0.1") -> Learner:
    """Adds segments to a learner and returns it; a seed always gives the same segments."""
    if one.settings.trainer_type == "poca":
        specs = specs_of(PLAIN)
        groups = world(one._algorithm, specs, seed).groups(5)
        one.add(record(groups, specs, length=one.settings.network_settings.sequence_length, source=source))
    else:
        one.add(record_of(played(one._algorithm, seed=seed), source))
    return one


def everything(one: Learner) -> Any:
    checkpoint = one.checkpoint()
    return [
        {name: array.tobytes() for name, array in arrays.items()}
        for arrays in (checkpoint.weights, checkpoint.optimizer)
    ], (one.version, one.updates, one.trained)


@pytest.mark.parametrize(("kind", "how"), [("ppo", {"memory": True}), ("poca", {})], ids=["ppo-memory", "poca"])
def test_restored_learner_continues_bit_for_bit(demo: Path, kind: str, how: dict[str, bool]) -> None:
    """The checkpoint has discriminator, beta, `updated`, statistics, optimizers, cloning and random state."""
    one = learner(kind, demo, **how)
    fed(one, 0).update(everything=True)
    one._algorithm.signals.sources["gail"].module.beta.fill_(0.25)
    checkpoint = one.checkpoint()
    other = learner(kind, demo, seed=9, **how)
    assert everything(other) != everything(one)
    other.restore(checkpoint)
    assert other._algorithm.signals.sources["gail"].module.beta == 0.25
    assert everything(other) == everything(one)
    names = checkpoint.weights.keys()
    for part in ("gail.beta", "gail.sigma", "gail.head.weight", "curiosity.updated", "rnd.target.layers.0.weight"):
        assert f"signals.{part}" in names
    assert checkpoint.weights["signals.gail.beta"] == 0.25
    assert checkpoint.weights["signals.curiosity.updated"] == 1
    for signal in NAMES[1:]:
        assert checkpoint.optimizer[f"signals.{signal}.step"] > 0
    for learning in (one, other):  # of new agent episodes, because checkpoints have no recurrent state of the critic
        fed(learning, 2, source="stepping-0.2")
    reports = [learning.update(everything=True).statistics for learning in (one, other)]
    kept = {name for name in reports[0] if not name.endswith(" Reward")}  # returns of open episodes are not saved
    assert {name: reports[0][name] for name in kept} == {name: reports[1][name] for name in kept}
    assert everything(other) == everything(one)


@pytest.mark.parametrize("kind", ["ppo", "poca"])
def test_player_needs_no_demonstrations(demo: Path, kind: str, tmp_path: Path) -> None:
    """A player restores a checkpoint without the demonstrations."""
    one = fed(learner(kind, demo), 0)
    one.update(everything=True)
    other = learner(kind, tmp_path, learns=False, seed=5)
    other.restore(one.checkpoint())
    assert other.weights_sha256 == one.weights_sha256
    assert other.trained == one.trained
    ours, theirs = other.weights().arrays, one.weights().arrays
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    with pytest.raises(RecordingError):
        learner(kind, tmp_path)


def test_new_lineage_has_new_reward_networks(demo: Path) -> None:
    """`init_path` loads actor and critic, and reward networks start anew."""
    one = fed(learner("ppo", demo), 0)
    one.update(everything=True)
    other = learner("ppo", demo, seed=4)
    before = state(other._algorithm.signals.modules)
    other.load_weights(one.checkpoint())
    assert other.weights_sha256 == one.weights_sha256
    assert state(other._algorithm.signals.modules) == before


def test_resumed_gail_normalizes_new_demonstrations_by_its_checkpoint(tmp_path: Path) -> None:
    """Running statistics come from the checkpoint and also normalize the demonstrations."""
    columns = recorded(PLAIN, [4, 5])
    write(tmp_path, PLAIN, columns)
    settings = trainer(signals_of(["gail"], tmp_path, normalize=True))
    one = Learner("Test", PLAIN, settings, 0)
    far = recorded(PLAIN, [6, 6], seed=3)
    far["observation.0"] = 10 + 5 * far["observation.0"]
    write(tmp_path, PLAIN, far, "two")
    other = Learner("Test", PLAIN, settings, 0)
    other.restore(one.checkpoint())
    gail: Any = other._algorithm.signals.sources["gail"]
    raw = np.concatenate([columns["observation.0"], far["observation.0"]])
    normalizer = gail.module.features.encoder.normalizer
    mean, deviation = normalizer.mean.numpy()[:3], normalizer.variance.sqrt().numpy()[:3]
    batch = fed(other, 0)._buffer.take()
    other._algorithm.update(batch, 1, 0)
    np.testing.assert_allclose(
        gail._expert[0][:, :3].numpy(), np.clip((raw - mean) / deviation, -5, 5), rtol=1e-4, atol=1e-5
    )
