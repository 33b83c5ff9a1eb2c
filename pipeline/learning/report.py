"""What an update tells of itself, by ML-Agents' names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.learning.schedules import Coefficients


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateReport:
    """What an update did.

    Attributes:
        statistics: by ML-Agents' names; a loss is the mean over minibatches.
        steps: rows in the batch.
        minibatches: tried.
        skipped: of these, left out because the loss or gradient was not finite.
        lags: `lags[i]` rows were acted by a policy i versions older than the one that was updated.
        group_rewards: some group reward was not 0.
        groups: some agents shared a group.
        terminated: some episode ended by itself.
    """

    statistics: dict[str, float]
    steps: int
    minibatches: int
    skipped: int
    lags: tuple[int, ...]
    group_rewards: bool
    groups: bool = False
    terminated: bool = False


def lags(version: int, versions: NDArray[np.int64]) -> tuple[int, ...]:
    """How many rows were acted by a policy 0, 1, ... versions older than `version`."""
    return tuple(np.bincount(np.maximum(version - versions, 0)).tolist())


def general(coefficients: Coefficients, estimates: Mapping[str, Iterable[tuple[str, float]]]) -> dict[str, float]:
    """Coefficients of an update, and means of what its critic estimates.

    Args:
        coefficients: of the update.
        estimates: by kind ("Value", "Baseline"), mean of each reward signal.
    """
    statistics = {
        "Policy/Learning Rate": coefficients.learning_rate,
        "Policy/Epsilon": coefficients.epsilon,
        "Policy/Beta": coefficients.beta,
    }
    for kind, signals in estimates.items():
        for signal, mean in signals:
            statistics[f"Policy/{signal.capitalize()} {kind} Estimate"] = mean
    return statistics


def means(names: Iterable[str], taken: list[Any]) -> dict[str, Tensor]:
    """Of each kind of loss, its mean in every minibatch; minibatches may differ in size.

    Args:
        names: of the kinds.
        taken: for each minibatch, a tensor for each kind.
    """
    columns = zip(names, zip(*taken, strict=True), strict=True)
    return {name: _mean_of_each(column) for name, column in columns}


def _mean_of_each(parts: Sequence[Tensor]) -> Tensor:
    if len({part.shape for part in parts}) == 1:  # at once: the usual case, and a call for each takes longer
        return torch.stack(list(parts)).reshape(len(parts), -1).mean(1)
    return torch.stack([part.mean() for part in parts])
