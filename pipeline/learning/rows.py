# ruff: noqa: N803, N806 (names end in their shape)
"""Rows of a minibatch, and what the policy loses on them (Schulman et al. 2017, arXiv 1707.06347, equation 7).

B rows, C continuous actions, D branches, H means and logits, S reward signals.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from pipeline.learning import losses
from pipeline.networks import distributions
from pipeline.networks.actor import Actor
from pipeline.networks.encoders import Inputs


class Rows(NamedTuple):
    """Columns that a minibatch is made of.

    Attributes:
        inputs: prepared observations, [B, F] of the vectors first.
        continuous: [B, C] raw samples.
        discrete: [B, D] int64 choices.
        masks: [B, choices of all branches] True = forbidden; None where nothing was.
        log_prob: [B] of the joint action when it was chosen.
        advantage: [B] normalised.
        limit: [B] `losses.clip_limit` of the advantage.
        returns: [B, S] what the critic is to estimate, per signal.
        values: [B, S] what it estimated before the update.
    """

    inputs: Inputs
    continuous: Tensor
    discrete: Tensor
    masks: Tensor | None
    log_prob: Tensor
    advantage: Tensor
    limit: Tensor
    returns: Tensor
    values: Tensor


class PolicyLoss(NamedTuple):
    """Surrogate and entropy bonus of some rows.

    Attributes:
        objective: [B] clipped surrogate.
        entropy: [B] as published.
        to_head: [B, H] derivative of the loss for means and logits.
        to_log_sigma: [C] likewise.
    """

    objective: Tensor
    entropy: Tensor
    to_head: Tensor
    to_log_sigma: Tensor


def policy_loss(actor: Actor, head_BH: Tensor, rows: Rows, beta: float) -> PolicyLoss:
    """Minus the mean of the clipped surrogate, minus the entropy bonus; without autograd.

    Args:
        actor: whose.
        head_BH: what it makes of the rows.
        rows: what was done, and how good it was.
        beta: weight of the entropy bonus, of each dimension and branch.
    """
    actions = actor.actions
    chosen = distributions.evaluate(actions, head_BH, actor.log_sigma, rows.continuous, rows.discrete, rows.masks)
    objective_B, to_log_prob_B = losses.surrogate(chosen.log_prob, rows.log_prob, rows.advantage, rows.limit)
    parts = actions.continuous + len(actions.discrete)
    to_head_BH, to_log_sigma_C = chosen.gradient(to_log_prob_B, -beta * parts)
    return PolicyLoss(objective_B, chosen.entropy, to_head_BH, to_log_sigma_C)
