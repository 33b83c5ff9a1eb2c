"""Small actors with behavioral cloning, and its loss in numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparring.pipeline.demonstrations.library import Demonstrations
from sparring.pipeline.learning.cloning import Cloning
from sparring.pipeline.learning.settings import BehavioralCloningSettings, TrainerSettings
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.specs import ActionSpec, BehaviorSpec
from tests.learning.learning_helpers import algorithm_of
from tests.learning.signals_helpers import (
    SPECS,
    Weights,
    add_noise,
    demonstrations_of,
    linear,
    recorded,
    signals_of,
    silu,
    trainer,
)

HYBRID = SPECS["hybrid"]
PRETRAINING = "Losses/Pretraining Loss"


def settings_of(cloning: dict[str, Any], path: Path | str = "none", **how: Any) -> TrainerSettings:
    wanted = BehavioralCloningSettings(**({"demo_path": str(path)} | cloning))
    return trainer(signals_of(["extrinsic"]), cloning=wanted, **how)


def cloning(
    spec: BehaviorSpec = HYBRID,
    demonstrations: Demonstrations | None = None,
    *,
    how: Any = (),
    seed: int = 0,
    **wanted: Any,
) -> tuple[Actor, Cloning]:
    """Returns an actor and its cloning."""
    settings = settings_of(wanted, **dict(how))
    generator = torch.Generator().manual_seed(seed)
    ppo = algorithm_of("Test", spec, settings.model_copy(update={"behavioral_cloning": None}), generator)
    add_noise(ppo.actor)
    demonstrations = demonstrations_of(spec, recorded(spec, [4, 3, 5])) if demonstrations is None else demonstrations
    return ppo.actor, Cloning(ppo.actor, settings, demonstrations, generator)


def record_minibatches(one: Cloning, monkeypatch: pytest.MonkeyPatch) -> list[tuple[np.ndarray, float]]:
    """Returns a list that records rows and learning rate of each following minibatch."""
    seen: list[tuple[np.ndarray, float]] = []
    plain = one._step

    def step(inputs: Any, rows: Any, layout: Any) -> Any:
        seen.append((rows.numpy(), one.learning_rate))
        return plain(inputs, rows, layout)

    monkeypatch.setattr(one, "_step", step)
    return seen


# ---------------------------------------------------------------- loss


def loss_of(actions: ActionSpec, head: np.ndarray, demonstrations: Demonstrations) -> float:
    """Returns the mean over rows of squared errors of mean / 3 minus log-probabilities of choices."""
    total = 0.0
    for row in range(len(head)):
        for at in range(actions.continuous):
            total += (head[row, at] / 3 - float(demonstrations.continuous[row, at])) ** 2
        first = actions.continuous
        for branch, size in enumerate(actions.discrete):
            scores = head[row, first : first + size].copy()
            if demonstrations.masks is not None:
                offset = first - actions.continuous
                scores[demonstrations.masks[row, offset : offset + size]] = -np.inf
            total -= scores[demonstrations.discrete[row, branch]] - np.logaddexp.reduce(scores)
            first += size
    return total / len(head)


def head_of(weights: Weights, x: np.ndarray) -> np.ndarray:
    """Returns means and logits of a body with vector inputs."""
    layers = sorted({name.rsplit(".", 1)[0] for name in weights if name.startswith("body.")})
    for layer in layers[:-1]:
        x = silu(linear(weights, layer, x))
    return linear(weights, layers[-1], x)
