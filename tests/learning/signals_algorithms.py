"""Algorithms with reward signals, batches for them, and checks of their reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparring.pipeline.demonstrations.library import files_of, read_any
from sparring.pipeline.learning.signals import Steps
from sparring.pipeline.specs import BehaviorSpec
from tests.learning.group_helpers import batch_of
from tests.learning.learning_helpers import algorithm_of
from tests.learning.random_groups import OWN, specs_of
from tests.learning.signals_helpers import (
    NAMES,
    SPECS,
    finite,
    played,
    signals_of,
    trainer,
    world,
)

PLAIN = SPECS["hybrid"]
LOSSES = {
    "gail": {
        "Policy/GAIL Policy Estimate", "Policy/GAIL Expert Estimate", "Losses/GAIL Loss", "Policy/GAIL Grad Mag Loss",
    },
    "curiosity": {"Losses/Curiosity Forward Loss", "Losses/Curiosity Inverse Loss"},
    "rnd": {"Losses/RND Loss"},
    "extrinsic": set(),
}  # fmt: skip


def steps_of_batch(spec: BehaviorSpec, batch: Any) -> Steps:
    return Steps(batch, spec.actions)


def share_of(folder: Path, ends: int, steps: int) -> float:
    """Returns GAIL's terminal bootstrap fraction for the demonstrations in a folder."""
    lengths = np.concatenate([read_any(file).columns["lengths"] for file in files_of(folder)])
    over = np.concatenate([read_any(file).columns["terminated"] for file in files_of(folder)])
    return min(1.0, np.log2(1 + (over.sum() / lengths.sum()) / (ends / steps)))


def made(
    kind: str, name: str, demo: Path, names: Any, *, memory: bool = False, previous: bool = False, **how: Any
) -> tuple[Any, Any]:
    """Returns an algorithm and a batch for it."""
    spec = SPECS[name]
    settings = trainer(signals_of(names, demo / name, **how), kind=kind, memory=memory, previous=previous)
    generator = torch.Generator().manual_seed(0)
    if kind == "ppo":
        ppo = algorithm_of("Test", spec, settings, generator)
        return ppo, played(ppo)
    poca = algorithm_of(OWN, spec, settings, generator)
    specs = specs_of(spec)
    length = settings.network_settings.sequence_length
    return poca, batch_of(world(poca, specs).groups(4), specs, length=length)


def check(algorithm: Any, report: Any, names: Any) -> None:
    """Checks that every minibatch was trained on and that statistics are finite and complete."""
    assert report.skipped == 0
    assert finite(algorithm.networks.modules)
    assert finite(algorithm.signals.modules)
    for name, value in report.statistics.items():
        assert np.isfinite(value), name
    for name in names:
        assert f"Policy/{name.capitalize()} Value Estimate" in report.statistics
        assert LOSSES[name] <= report.statistics.keys()
    for name in set(NAMES) - set(names):
        assert LOSSES[name].isdisjoint(report.statistics)
        assert f"Policy/{name.capitalize()} Value Estimate" not in report.statistics
