# ruff: noqa: N803, N806 (names end in their shape)
"""Networks of the references: plain functions of named weights, in float64.

B rows, F features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sparring.pipeline.learning.settings import TrainerSettings

Weights = dict[str, Tensor]


def trainable(weights: Mapping[str, np.ndarray], settings: TrainerSettings) -> tuple[Weights, torch.optim.Adam]:
    """Returns float64 copies of a learner's weights, and Adam (6) for those that are not running statistics."""
    copies = {name: torch.from_numpy(np.array(array)).double() for name, array in weights.items()}
    statistics = ("mean", "variance", "count", "largest")
    trained = [one.requires_grad_() for name, one in copies.items() if name.split(".")[-1] not in statistics]
    return copies, torch.optim.Adam(trained, eps=settings.hyperparameters.adam_epsilon)


def linear(weights: Weights, name: str, inputs: Tensor) -> Tensor:
    return functional.linear(inputs, weights[f"{name}.weight"], weights[f"{name}.bias"])


def perceptron(weights: Weights, name: str, inputs: Tensor) -> Tensor:
    """Returns a linear layer's outputs after hidden layers of SiLU units."""
    count = sum(key.startswith(f"{name}.layers.") and key.endswith(".weight") for key in weights)
    for layer in range(count - 1):
        inputs = functional.silu(linear(weights, f"{name}.layers.{layer}", inputs))
    return linear(weights, f"{name}.layers.{count - 1}", inputs)


def normalized(weights: Weights, encoder: str, seen_BF: Tensor) -> Tensor:
    """Subtracts the running mean, divides by the running deviation and clips to +-5, if normalization is enabled."""
    if f"{encoder}.normalizer.mean" not in weights:
        return seen_BF
    mean_F, variance_F = weights[f"{encoder}.normalizer.mean"], weights[f"{encoder}.normalizer.variance"]
    return ((seen_BF - mean_F) / variance_F.sqrt()).clamp(-5, 5)


def remember(weights: Weights, encoder: str, seen_BF: Tensor) -> None:
    """Adds rows to the running mean and variance, after the last minibatch of an update."""
    if f"{encoder}.normalizer.mean" not in weights:
        return
    mean_F, variance_F, count = (weights[f"{encoder}.normalizer.{name}"] for name in ("mean", "variance", "count"))
    sums_F, squares_F = count * mean_F + seen_BF.sum(0), count * (variance_F + mean_F**2) + (seen_BF**2).sum(0)
    count += len(seen_BF)
    mean_F.copy_(sums_F / count)
    variance_F.copy_(squares_F / count - mean_F**2)


def vectors(observations: Sequence[np.ndarray]) -> Tensor:
    """Returns all vector observations as one row of features."""
    return torch.from_numpy(np.concatenate(observations, axis=1)).double()
