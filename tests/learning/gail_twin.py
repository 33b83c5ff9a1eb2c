"""A discriminator in numpy (float64) with derivatives by hand, and small discriminators to compare with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sparring.pipeline.learning.settings import GailSettings
from sparring.pipeline.learning.signals import Steps
from sparring.pipeline.learning.signals.gail import Gail
from sparring.pipeline.specs import BehaviorSpec
from tests.learning.signals_helpers import (
    SPECS,
    Weights,
    actions_by_hand,
    add_noise,
    demonstrations_of,
    linear,
    network,
    recorded,
    sigmoid,
    silu,
)

HYBRID = SPECS["hybrid"]
EPISODES = [3, 4, 1, 2, 5, 6]
KINDS = pytest.mark.parametrize(
    ("use_actions", "use_vail"), [(False, False), (True, False), (False, True), (True, True)]
)


def gail(spec=HYBRID, *, lengths=EPISODES, seed=0, columns=None, shake=True, normalize=False, **how) -> Gail:
    """Returns a small discriminator with demonstrations in memory."""
    settings = GailSettings(demo_path="none", network_settings=network(normalize=normalize), learning_rate=1e-3, **how)
    demonstrations = demonstrations_of(spec, recorded(spec, lengths, seed=seed) if columns is None else columns)
    made = Gail(spec, settings, demonstrations, torch.Generator().manual_seed(seed))
    if shake:
        add_noise(made.module)
    return made


def copy_of(generator: torch.Generator) -> torch.Generator:
    """Returns another generator with the same state."""
    other = torch.Generator()
    other.set_state(generator.get_state())
    return other


# ---------------------------------------------------------------- the twin


def hidden(weights: Weights, x: np.ndarray) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """Returns features, and the weights and derivative of the activation of each layer."""
    passed, layer = [], 0
    while f"features.layers.{layer}.weight" in weights:
        before = linear(weights, f"features.layers.{layer}", x)
        share = sigmoid(before)
        passed.append((weights[f"features.layers.{layer}.weight"], share * (1 + before * (1 - share))))
        x, layer = silu(before), layer + 2
    assert layer
    return x, passed


def logits(weights: Weights, x: np.ndarray, noise: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the logits and the mean code if there is one; without noise, logits are those of the mean code."""
    features, _ = hidden(weights, x)
    if "code.weight" not in weights:
        return linear(weights, "head", features)[:, 0], None
    mean = linear(weights, "code", features)
    code = mean if noise is None else mean + weights["sigma"] * noise
    return linear(weights, "head", code)[:, 0], mean


def input_gradient(weights: Weights, x: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
    """Returns the derivative of D, not of its logit, with respect to its inputs."""
    d = sigmoid(logits(weights, x, noise)[0])
    back = np.repeat(weights["head.weight"], len(x), axis=0)
    if "code.weight" in weights:
        back = back @ weights["code.weight"]
    for matrix, derivative in reversed(hidden(weights, x)[1]):
        back = (back * derivative) @ matrix
    return (d * (1 - d))[:, None] * back


def divergence(weights: Weights, policy: np.ndarray, expert: np.ndarray) -> float:
    """Returns the KL divergence of both codes from N(0, 1), summed over codes and averaged over rows."""
    total = 0.0
    for row in range(len(policy)):
        for at, sigma in enumerate(weights["sigma"]):
            for mean in (policy[row, at], expert[row, at]):
                total += 0.5 * (mean**2 + sigma**2 - 1) - np.log(sigma)
    return total / len(policy)


def parts_of(
    weights: Weights, policy: np.ndarray, expert: np.ndarray, sampled: dict[str, np.ndarray], penalty: float
) -> dict:
    """Returns the parts of the loss of a step."""
    rows = len(policy)
    both, means = logits(weights, np.concatenate([policy, expert]), sampled.get("noise"))
    of_policy, of_expert = both[:rows], both[rows:]
    # -log D = log(1 + exp(-logit)), -log(1 - D) = log(1 + exp(logit))
    found = {
        "loss": (np.logaddexp(0, -of_expert) + np.logaddexp(0, of_policy)).mean(),
        "policy": sigmoid(of_policy).mean(),
        "expert": sigmoid(of_expert).mean(),
    }
    between = sampled["share"][:, None] * policy + (1 - sampled["share"][:, None]) * expert
    gradient = input_gradient(weights, between, sampled.get("between_noise"))
    norms = np.sqrt((gradient**2).sum(1) + 1e-7)
    found["penalty"] = ((norms - 1) ** 2).mean()
    found["total"] = found["loss"] + penalty * found["penalty"]
    if means is not None:
        found["kl"] = divergence(weights, means[:rows], means[rows:])
        found["total"] += weights["beta"] * (found["kl"] - 0.5)
    return found


def inputs_of(spec: BehaviorSpec, steps: Any, use_actions: bool) -> np.ndarray:
    """Returns the inputs of a discriminator of vectors: observations, then actions, then the end."""
    rows = len(steps.ended)
    columns = [column[:rows].astype(np.float64) for column in steps.observations]
    if use_actions:
        columns += [actions_by_hand(spec.actions, steps.continuous, steps.discrete), steps.ended[:, None].astype(float)]
    return np.concatenate(columns, axis=1)


def learned_of(made: Gail, use_actions: bool) -> np.ndarray:
    """Returns the demonstrations to train on as inputs of the discriminator."""
    learned = made.prepare(made._learned)
    assert len(learned) == 1 + use_actions
    return torch.cat(learned, 1).double().numpy()


def prepared(made: Gail, steps: Steps) -> tuple[torch.Tensor, ...]:
    """Returns steps as the discriminator reads them."""
    return made.module.prepare([column[: len(steps)] for column in steps.observations], steps.done, steps.ended)


def samples_of(generator: torch.Generator, rows: int, use_vail: bool) -> dict[str, np.ndarray]:
    """Returns what a step will sample, in its order."""
    sampled = {}
    if use_vail:
        sampled["noise"] = torch.randn((2 * rows, 128), generator=generator).double().numpy()
    sampled["share"] = torch.rand(rows, generator=generator).double().numpy()
    if use_vail:
        sampled["between_noise"] = torch.randn((rows, 128), generator=generator).double().numpy()
    return sampled
