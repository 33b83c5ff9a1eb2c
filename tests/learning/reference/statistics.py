# ruff: noqa: N803, N806 (names end in their shape)
"""Statistics of the references' updates.

R rows of the update, K timesteps or rows, S reward signals.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from sparring.pipeline.learning.settings import TrainerSettings


def statistics(
    settings: TrainerSettings,
    coefficients: tuple[float, float, float],
    taken: list[dict[str, Any]],
    estimates: Mapping[str, Tensor],
    returns_KS: Tensor,
    values_KS: Tensor,
    weight_R: Tensor,
) -> dict[str, float]:
    """Returns the statistics of an update by the names of its report."""
    rate, epsilon, beta = coefficients
    found = {"Policy/Learning Rate": rate, "Policy/Epsilon": epsilon, "Policy/Beta": beta}
    for kind, every_KS in estimates.items():
        for name, mean in zip(settings.reward_signals.named(), every_KS.mean(0).tolist(), strict=True):
            found[f"Policy/{name.capitalize()} {kind} Estimate"] = mean
    names = {"Losses/Value Loss": "values", "Losses/Baseline Loss": "baselines", "Policy/Entropy": "entropy"}
    found |= {name: fmean(one[key].item() for one in taken) for name, key in names.items() if key in taken[0]}
    found["Losses/Policy Loss"] = fmean(abs(one["objective"].item()) for one in taken)
    log_ratio = torch.cat([one["log_ratio"] for one in taken])
    joint = log_ratio.sum(1)
    found["Update/Approximate KL"] = (joint.exp() - 1 - joint).mean().item()  # Schulman 2020
    found["Update/Clip Fraction"] = ((log_ratio.exp() - 1).abs() > epsilon).double().mean().item()
    found["Update/Gradient Norm"] = fmean(one["norm"] for one in taken)
    explained_S = 1 - (returns_KS - values_KS).var(0, correction=0) / returns_KS.var(0, correction=0)
    if (finite_S := explained_S.isfinite()).any():  # a single return has no variance
        found["Update/Explained Variance"] = explained_S[finite_S].mean().item()
    found["Update/Stale Weight"] = weight_R.mean().item()
    found["Update/Effective Sample Size"] = (weight_R.sum() ** 2 / weight_R.square().sum() / len(weight_R)).item()
    return found
