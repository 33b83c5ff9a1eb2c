# ruff: noqa: N803, N806 (names end in their shape)
"""This module defines the report of an update: losses by ML-Agents' names, and diagnostics.

B rows of a minibatch, P parts of an action, K timesteps or rows of the batch, S reward signals.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparring.pipeline.learning.losses import NONE_STALE, Staleness
from sparring.pipeline.learning.settings import Coefficients
from sparring.pipeline.specs import Floats, Numbers


class Losses(NamedTuple):
    """Holds the losses of one minibatch.

    Attributes:
        objective: [B], or [B, P], clipped surrogate.
        log_ratio: logarithm of the ratio, in the same shape.
        entropy: scalar.
        squares: [n, S] squared errors of the critic's estimates, by kind.
        gradient_norm: Euclidean norm of the gradient before clipping.
    """

    objective: Tensor
    log_ratio: Tensor
    entropy: Tensor
    squares: Mapping[str, Tensor]
    gradient_norm: float


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateReport:
    """Reports an update.

    Attributes:
        statistics: by ML-Agents' names; a loss is the mean over minibatches.
        steps: rows in the batch.
        minibatches: number tried.
        skipped: of these, left out because the loss or gradient was not finite.
        lags: `lags[i]` rows were acted by a policy i versions older than the one that was updated.
        group_rewards: some group reward was not 0.
        groups: some agents shared a group.
        terminated: some episode ended by itself.
        staleness: measures of the correction for stale data.
    """

    statistics: dict[str, float]
    steps: int
    minibatches: int
    skipped: int
    lags: tuple[int, ...]
    group_rewards: bool
    groups: bool = False
    terminated: bool = False
    staleness: Staleness = NONE_STALE


def lags(version: int, versions: Numbers) -> tuple[int, ...]:
    """Returns how many rows were acted by a policy 0, 1, ... versions older than `version`."""
    return tuple(np.bincount(np.maximum(version - versions, 0)).tolist())


def general(coefficients: Coefficients, signals: Sequence[str], means: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the coefficients of an update, and the means of its critic's estimates.

    Args:
        coefficients: of the update.
        signals: names of the reward signals.
        means: [S] mean estimate of each signal, by kind ("Value", "Baseline").
    """
    return {
        "Policy/Learning Rate": coefficients.learning_rate,
        "Policy/Epsilon": coefficients.epsilon,
        "Policy/Beta": coefficients.beta,
        **{
            f"Policy/{signal.capitalize()} {kind} Estimate": mean
            for kind, mean_S in means.items()
            for signal, mean in zip(signals, mean_S.tolist(), strict=True)
        },
    }


def losses_of(taken: Sequence[Losses]) -> dict[str, float]:
    """Returns the mean of each loss over minibatches, which may differ in size; none if every one was skipped."""
    if not taken:
        return {}
    return {
        "Losses/Policy Loss": _mean_of_each([one.objective for one in taken]).abs().mean().item(),
        "Policy/Entropy": _mean_of_each([one.entropy for one in taken]).mean().item(),
        **{
            f"Losses/{kind} Loss": _mean_of_each([one.squares[kind] for one in taken]).mean().item()
            for kind in taken[0].squares
        },
    }


def diagnostics(
    taken: Sequence[Losses],
    returns_KS: Floats,
    values_KS: Floats,
    epsilon: float,
    staleness: Staleness,
) -> dict[str, float]:
    """Returns statistics by which to judge whether an update was sound.

    The approximate KL divergence of the policy from the proximal one is the mean of `(ratio - 1) - log ratio` (Schulman
    2020, "Approximating KL divergence"), its clip fraction the share of ratios beyond `1 +- epsilon`. Both are means
    over all minibatches, the first of which uses the unchanged policy.

    Args:
        taken: losses of each minibatch.
        returns_KS: targets of the values.
        values_KS: estimates before the update.
        epsilon: clip range.
        staleness: measures of the correction for stale data.
    """
    found = {"Update/Stale Weight": staleness.weight, "Update/Effective Sample Size": staleness.sample_size}
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # such an update is skipped and counted
        explained_S = 1 - (returns_KS - values_KS).var(0) / returns_KS.var(0)
    if (finite_S := np.isfinite(explained_S)).any():
        found["Update/Explained Variance"] = float(explained_S[finite_S].mean())
    if taken:
        log_ratio = torch.cat([one.log_ratio for one in taken])
        joint = log_ratio.sum(1) if log_ratio.dim() == 2 else log_ratio
        found["Update/Approximate KL"] = (joint.exp() - 1 - joint).mean().item()
        found["Update/Clip Fraction"] = ((log_ratio.exp() - 1).abs() > epsilon).float().mean().item()
        found["Update/Gradient Norm"] = fmean(one.gradient_norm for one in taken)
    return found


def _mean_of_each(parts: Sequence[Tensor]) -> Tensor:
    if len({part.shape for part in parts}) == 1:  # the usual case: one call for all takes less time
        return torch.stack(list(parts)).reshape(len(parts), -1).mean(1)
    return torch.stack([part.mean() for part in parts])
