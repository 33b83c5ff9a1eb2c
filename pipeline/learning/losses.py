# ruff: noqa: N803, N806 (names end in their shape)
"""This module computes the losses of PPO (Schulman et al. 2017) and their gradients by explicit formulas.

Each function returns the terms whose mean is the loss, and the loss's gradient for the network's outputs, which
autograd then propagates. Tests compare these gradients with autograd's.

B rows of a minibatch, S reward signals.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clip_limit(advantage_B: Tensor, epsilon: float) -> Tensor:
    """Returns the largest value [B] to which the clip limits the objective of each row.

    `min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon) A)` is `min(ratio A, A + epsilon |A|)`: for A > 0 only the upper
    end of the clip can decide, for A < 0 only the lower.
    """
    return advantage_B.abs().mul_(epsilon).add_(advantage_B)


def surrogate(
    log_prob_B: Tensor, old_log_prob_B: Tensor, advantage_B: Tensor, limit_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the clipped surrogate objective, whose mean is to be maximized.

    Log-probabilities may be [B, P], of each part of an action; then advantage and limit are [B, 1].

    Args:
        log_prob_B: of the joint actions, under the current policy.
        old_log_prob_B: of the same actions, under the policy that the clip is centered on.
        advantage_B: advantage of each action.
        limit_B: `clip_limit` of the advantages.

    Returns:
        The objective of each row [B], the derivative of minus its mean for `log_prob_B`, and its log ratio.
    """
    log_ratio_B = log_prob_B.sub(old_log_prob_B)
    free_B = log_ratio_B.exp().mul_(advantage_B)
    objective_B = torch.minimum(free_B, limit_B)
    # In clipped rows the objective does not depend on the ratio; in all others d ratio / d log p = ratio.
    return objective_B, free_B.masked_fill_(free_B > limit_B, 0.0).mul_(-1.0 / free_B.numel()), log_ratio_B


def value_loss(values_BS: Tensor, returns_BS: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Returns squared errors [B, S], and the derivative of `weight` times their mean for the values."""
    error_BS = values_BS - returns_BS
    return error_BS.square(), error_BS.mul_(2.0 * weight / error_BS.numel())


def clipped_value_loss(
    values_BS: Tensor, returns_BS: Tensor, old_values_BS: Tensor, epsilon: float, weight: float
) -> tuple[Tensor, Tensor]:
    """Returns the larger of the squared errors of the value and of the value clipped to its old one +- epsilon.

    Args:
        values_BS: from the critic now.
        returns_BS: targets.
        old_values_BS: from the critic before the update.
        epsilon: clip range.
        weight: factor of the derivative.

    Returns:
        The squared errors [B, S], and the derivative of `weight` times their mean for the values.
    """
    moved_BS = values_BS - old_values_BS
    beyond_BS = moved_BS.abs() > epsilon  # within the range, value and clipped value are equal, except for rounding
    moved_BS.clamp_(-epsilon, epsilon)
    error_BS, clipped_BS = values_BS - returns_BS, moved_BS.add_(old_values_BS).sub_(returns_BS)
    squares_BS, clipped_squares_BS = error_BS.square(), clipped_BS.square_()
    # In clipped rows the error does not depend on the value.
    error_BS.masked_fill_(beyond_BS & (clipped_squares_BS > squares_BS), 0.0).mul_(2.0 * weight / error_BS.numel())
    return torch.maximum(squares_BS, clipped_squares_BS), error_BS


def value_loss_of(
    values_BS: Tensor, returns_BS: Tensor, old_values_BS: Tensor | None, epsilon: float, weight: float
) -> tuple[Tensor, Tensor]:
    """Returns `clipped_value_loss` if old values are given, else `value_loss`."""
    if old_values_BS is None:
        return value_loss(values_BS, returns_BS, weight)
    return clipped_value_loss(values_BS, returns_BS, old_values_BS, epsilon, weight)
