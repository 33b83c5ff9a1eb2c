# ruff: noqa: N803, N806 (names end in their shape)
"""This module computes the losses of PPO (Schulman et al. 2017, arXiv 1707.06347) and their gradients.

Each function returns the terms whose mean is the loss, and by explicit formulas the loss's gradient for the network's
outputs, which autograd then propagates. Tests compare these gradients with autograd's.

B rows of a minibatch, C continuous actions, D branches, H means and logits, S reward signals, P = C + D parts of an
action.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparring.pipeline.learning.minibatches import Minibatch
from sparring.pipeline.networks import distributions
from sparring.pipeline.networks.actor import Actor


class PolicyLoss(NamedTuple):
    """Holds the surrogate and the entropy bonus of some rows.

    Attributes:
        objective: [B], or [B, P], clipped surrogate.
        log_ratio: logarithm of the ratio, in the same shape.
        entropy: scalar, as published.
        to_head: [B, H] derivative of the loss for means and logits.
        to_log_sigma: [C] derivative of the loss for log sigma.
    """

    objective: Tensor
    log_ratio: Tensor
    entropy: Tensor
    to_head: Tensor
    to_log_sigma: Tensor


def evaluate(actor: Actor, head_BH: Tensor, rows: Minibatch, per_dimension: bool) -> distributions.Evaluation:
    """Evaluates the actions of some rows under the actor's means and logits."""
    return distributions.evaluate(
        actor.actions, head_BH, actor.log_sigma, rows.continuous, rows.discrete, rows.masks, per_dimension=per_dimension
    )


def policy_loss(actor: Actor, head_BH: Tensor, rows: Minibatch, beta: float) -> PolicyLoss:
    """Computes minus the mean of the clipped surrogate (equation 7), minus the entropy bonus, without autograd.

    Args:
        actor: the policy.
        head_BH: its means and logits for the rows.
        rows: actions and their advantages.
        beta: weight of the entropy bonus; with a ratio of joint actions, weight for each dimension and branch.
    """
    per_dimension = rows.log_prob.dim() == 2
    chosen = evaluate(actor, head_BH, rows, per_dimension)
    advantage, limit = (
        (rows.advantage.unsqueeze(1), rows.limit.unsqueeze(1)) if per_dimension else (rows.advantage, rows.limit)
    )
    objective, to_log_prob, log_ratio = surrogate(chosen.log_prob, rows.log_prob, advantage, limit)
    parts = 1 if per_dimension else actor.actions.parts
    to_head_BH, to_log_sigma_C = chosen.gradient(to_log_prob, -beta * parts)
    return PolicyLoss(objective, log_ratio, chosen.entropy, to_head_BH, to_log_sigma_C)


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


def value_loss(
    values_BS: Tensor, returns_BS: Tensor, weight: float, old_values_BS: Tensor | None = None, epsilon: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Returns squared errors of the values, and the derivative of `weight` times their mean; both are 0 of no row.

    Args:
        values_BS: from the critic now.
        returns_BS: targets.
        weight: factor of the derivative.
        old_values_BS: from the critic before the update: where the squared error of the value clipped to the old one
            +- epsilon is larger, it counts instead; None for no clip.
        epsilon: clip range.
    """
    if not values_BS.shape[0]:
        return values_BS.new_zeros(1, values_BS.shape[1]), torch.zeros_like(values_BS)
    error_BS = values_BS - returns_BS
    squares_BS, factor = error_BS.square(), 2.0 * weight / error_BS.numel()
    if old_values_BS is None:
        return squares_BS, error_BS.mul_(factor)
    moved_BS = values_BS - old_values_BS
    beyond_BS = moved_BS.abs() > epsilon  # within the range, value and clipped value are equal, except for rounding
    clipped_squares_BS = moved_BS.clamp_(-epsilon, epsilon).add_(old_values_BS).sub_(returns_BS).square_()
    # In clipped rows the error does not depend on the value.
    error_BS.masked_fill_(beyond_BS & (clipped_squares_BS > squares_BS), 0.0).mul_(factor)
    return torch.maximum(squares_BS, clipped_squares_BS), error_BS
