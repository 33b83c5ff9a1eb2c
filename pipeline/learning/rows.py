# ruff: noqa: N803, N806 (names end in their shape)
"""This module holds the rows of a minibatch and the policy's loss (Schulman et al. 2017, arXiv 1707.06347, equation 7).

B rows, C continuous actions, D branches, H means and logits, S reward signals, P = C + D parts of an action.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sparring.pipeline.learning import losses
from sparring.pipeline.networks import distributions
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.networks.encoders import Inputs


class Minibatch(NamedTuple):
    """Holds the columns of a minibatch.

    Attributes:
        inputs: prepared observations, [B, F] of the vectors first.
        continuous: [B, C] raw samples.
        discrete: [B, D] int64 choices.
        masks: [B, choices of all branches] True = forbidden; None if every choice was allowed.
        log_prob: under the policy that the clip is centered on: [B] of the joint action, or [B, P] of each part of it
            if the ratio is that of each part.
        advantage: [B] normalized, then weighted (`proximal`).
        limit: [B] `losses.clip_limit` of the advantage.
        returns: [B, S] targets of the critic, per signal.
        values: [B, S] the critic's estimates before the update.
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

    def at(self, which_B: Tensor) -> Minibatch:
        """Returns some of the rows."""
        others = (None if column is None else column.index_select(0, which_B) for column in self[1:])
        return Minibatch(tuple(column.index_select(0, which_B) for column in self.inputs), *others)  # type: ignore[arg-type]


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

    def losses(self) -> dict[str, Tensor]:
        """Returns the parts that a report needs."""
        return {"objective": self.objective, "log_ratio": self.log_ratio, "entropy": self.entropy}


def evaluate(actor: Actor, head_BH: Tensor, rows: Minibatch, per_dimension: bool) -> distributions.Evaluation:
    """Evaluates the actions of some rows under the actor's means and logits."""
    return distributions.evaluate(
        actor.actions,
        head_BH,
        actor.log_sigma,
        rows.continuous,
        rows.discrete,
        rows.masks,
        per_dimension=per_dimension,
    )


def policy_loss(actor: Actor, head_BH: Tensor, rows: Minibatch, beta: float) -> PolicyLoss:
    """Computes minus the mean of the clipped surrogate, minus the entropy bonus, without autograd.

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
    objective, to_log_prob, log_ratio = losses.surrogate(chosen.log_prob, rows.log_prob, advantage, limit)
    parts = 1 if per_dimension else actor.actions.parts
    to_head_BH, to_log_sigma_C = chosen.gradient(to_log_prob, -beta * parts)
    return PolicyLoss(objective, log_ratio, chosen.entropy, to_head_BH, to_log_sigma_C)
