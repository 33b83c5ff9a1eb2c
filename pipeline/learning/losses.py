# ruff: noqa: N803, N806 (names end in their shape)
"""This module holds the mathematics of an update: advantages, the correction for stale data, losses with gradients, and
the report of them by ML-Agents' names.

The losses are those of PPO (Schulman et al. 2017, arXiv 1707.06347). Each function returns the terms whose mean is the
loss, and by explicit formulas the loss's gradient for the network's outputs, which autograd then propagates. Tests
compare these gradients with autograd's.

Advantages are estimated (Schulman et al. 2016) over segments of any lengths. A non-finite reward or value passes
through without a warning: the update that contains it is skipped and counted.

Decoupled PPO corrects for stale data (Hilton, Cobbe and Schulman 2021, arXiv 2110.00641, "Batch size-invariance for
policy optimization", section 3). It distinguishes two policies of a step: the behavior policy chose its action, the
proximal policy is the center of the clip. PPO does not, so a step which is one version old arrives with most of its
clip range used up by the update in between. Here the ratio is `pi / pi_proximal`, and each normalized advantage is
weighted by `pi_proximal / pi_behavior` of the joint action.

1. The proximal policy is the actor at the start of the update, not a moving average (AReaL, Fu et al. 2025, arXiv
   2505.24298).
2. The weight is capped at 2, and weights are not normalized (AReaL).
3. A step of the current version keeps its stored log-probability and the weight 1: at lag 0 this is PPO to the bit.
4. Entropy, value and baseline losses are not weighted.

R rows of all segments, one segment after the other, B of some of them; C continuous actions, D branches, H means and
logits, P = C + D parts of an action, K timesteps or rows of the batch. S is reward signals, of `advantages` segments.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparring.pipeline.assembly import sequences
from sparring.pipeline.learning.minibatches import Minibatch, Recurrence, RecurrentState, in_parts, rows_at_once
from sparring.pipeline.learning.optimizer import StepTaken
from sparring.pipeline.learning.settings import Hyperparameters
from sparring.pipeline.networks import distributions
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.networks.device import constant, over
from sparring.pipeline.specs import Array, Flags, Floats, Numbers

WEIGHT_CAP: Final = 2.0


class PolicyTerms(NamedTuple):
    """Holds the surrogate and the entropy bonus of some rows.

    Attributes:
        objective: [B], or [B, P], clipped surrogate.
        log_ratio: logarithm of the ratio, in the same shape.
        entropy: scalar, as published.
    """

    objective: Tensor
    log_ratio: Tensor
    entropy: Tensor


def evaluate(actor: Actor, head_BH: Tensor, rows: Minibatch, per_dimension: bool) -> distributions.Evaluation:
    """Evaluates the actions of some rows under the actor's means and logits."""
    return distributions.evaluate(
        actor.actions, head_BH, actor.log_sigma, rows.continuous, rows.discrete, rows.masks, per_dimension=per_dimension
    )


def policy_loss(actor: Actor, head_BH: Tensor, rows: Minibatch, beta: float) -> tuple[PolicyTerms, Tensor, Tensor]:
    """Computes minus the mean of the clipped surrogate (equation 7), minus the entropy bonus, without autograd.

    Args:
        actor: the policy.
        head_BH: its means and logits for the rows.
        rows: actions and their advantages.
        beta: weight of the entropy bonus; with a ratio of joint actions, weight for each dimension and branch.

    Returns:
        Its terms, and its derivatives for means and logits [B, H] and for log sigma [C].
    """
    per_dimension = rows.log_prob.dim() == 2
    chosen = evaluate(actor, head_BH, rows, per_dimension)
    objective, to_log_prob, log_ratio = surrogate(chosen.log_prob, rows.log_prob, rows.advantage, rows.limit)
    parts = 1 if per_dimension else actor.actions.parts
    return PolicyTerms(objective, log_ratio, chosen.entropy), *chosen.gradient(to_log_prob, -beta * parts)


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
    to_log_prob_B = free_B.masked_fill_(free_B > limit_B, 0.0).mul_(constant(-1.0 / free_B.numel(), free_B))
    return objective_B, to_log_prob_B, log_ratio_B


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
    squares_BS, factor = error_BS * error_BS, constant(2.0 * weight / error_BS.numel(), error_BS)
    if old_values_BS is None:
        return squares_BS, error_BS.mul_(factor)
    moved_BS = values_BS - old_values_BS
    beyond_BS = moved_BS.abs() > epsilon  # within the range, value and clipped value are equal, except for rounding
    clipped_squares_BS = moved_BS.clamp_(-epsilon, epsilon).add_(old_values_BS).sub_(returns_BS).square_()
    # In clipped rows the error does not depend on the value.
    error_BS.masked_fill_(beyond_BS & (clipped_squares_BS > squares_BS), 0.0).mul_(factor)
    return torch.maximum(squares_BS, clipped_squares_BS), error_BS


@np.errstate(invalid="ignore", over="ignore")
def advantages(
    rewards_R: Floats, values_R: Floats, next_values_S: Floats, lengths_S: Array, gamma: float, lambd: float
) -> Floats:
    """Returns [R] `A_t = delta_t + gamma lambda A_{t+1}` with `delta_t = r_t + gamma V_{t+1} - V_t`.

    All segments are summed side by side from their ends, in as many Python steps as the longest segment has rows,
    whatever the number of segments.

    Args:
        rewards_R: reward of each step.
        values_R: value of each step's observation.
        next_values_S: value of the observation after each segment; 0 if the agent terminated.
        lengths_S: rows of each segment, at least 1, in the order of the rows.
        gamma: discount of a later reward.
        lambd: lambda of the estimate.
    """
    last_S = np.cumsum(lengths_S) - 1
    following_R = np.empty_like(values_R)
    following_R[:-1] = values_R[1:]
    following_R[last_S] = next_values_S
    advantages_R = rewards_R + np.float32(gamma) * following_R - values_R
    longest_first = np.argsort(-lengths_S, kind="stable")
    rows_S, sorted_S = last_S[longest_first], lengths_S[longest_first]
    reaching = len(lengths_S) - np.searchsorted(sorted_S[::-1], np.arange(1, sorted_S[0]), side="right")
    decay, running_S = np.float32(gamma * lambd), advantages_R[rows_S]
    for steps_back, segments in enumerate(reaching.tolist(), start=1):
        rows = rows_S[:segments] - steps_back
        running_S = advantages_R[rows] + decay * running_S[:segments]
        advantages_R[rows] = running_S
    return advantages_R


@np.errstate(invalid="ignore", over="ignore")
def normalized(advantages_R: Floats) -> Floats:
    """Returns [R] advantages minus their mean, divided by their standard deviation + 1e-10."""
    scaled: Floats = (advantages_R - advantages_R.mean()) / (advantages_R.std() + np.float32(1e-10))
    return scaled


class Staleness(NamedTuple):
    """Measures the correction of an update.

    Attributes:
        weight: mean weight of the steps, from 0 to 2; 1 if no step is stale.
        sample_size: effective share of the steps, `(sum w)^2 / (n sum w^2)` (Kish 1965), from 0 to 1.
    """

    weight: float
    sample_size: float


NONE_STALE: Final = Staleness(weight=1.0, sample_size=1.0)


def correct(
    actor: Actor, rows: Minibatch, stale_R: Flags, recurrence: Recurrence | None, epsilon: float, hyper: Hyperparameters
) -> tuple[Minibatch, Staleness]:
    """Centers the clip of stale rows on the current actor, and weights their advantages.

    Args:
        actor: the actor at the start of the update.
        rows: all rows, with the log-probabilities of the behavior policies and normalized advantages.
        stale_R: rows that an older version acted.
        recurrence: the sequences and the memories stored at their starts; None for an actor without memory.
        epsilon: clip range.
        hyper: without `decoupled_objective` all weights are 1, and the clip of joint ratios stays on the behavior
            policy; with `ratio: per_dimension` the rows get the actor's log-probabilities [R, P], unless an action of
            a single part is a joint action.

    Returns:
        The rows with corrected `log_prob`, `advantage` and `limit`, and measures of the correction.
    """
    stale_R = stale_R & hyper.decoupled_objective
    per_dimension = hyper.ratio == "per_dimension" and actor.actions.parts > 1
    if not per_dimension and not stale_R.any():
        return rows, NONE_STALE
    proximal_RP = _proximal(actor, rows, stale_R | per_dimension, recurrence, per_dimension)
    stale = over(torch.from_numpy(stale_R), actor.device)
    joint_R = proximal_RP.sum(1)
    weight_R = (joint_R - rows.log_prob).exp_().clamp_(max=WEIGHT_CAP).masked_fill_(~stale, 1.0)
    advantage = rows.advantage * weight_R
    if per_dimension:
        rows, advantage = rows._replace(log_prob=proximal_RP), advantage.unsqueeze(1)
    else:
        rows = rows._replace(log_prob=torch.where(stale, joint_R, rows.log_prob))
    rows = rows._replace(advantage=advantage, limit=clip_limit(advantage, epsilon))
    if not stale_R.any():
        return rows, NONE_STALE
    total, squares = weight_R.sum().item(), weight_R.square().sum().item()
    return rows, Staleness(total / len(weight_R), total**2 / (len(weight_R) * squares) if squares else 0.0)


@torch.no_grad()
def _proximal(
    actor: Actor, rows: Minibatch, wanted_R: Flags, recurrence: Recurrence | None, per_dimension: bool
) -> Tensor:
    """Returns log-probabilities [R, P], or [R, 1] of joint actions, computed in chunks; 0 for unwanted rows."""
    parts = actor.actions.parts if per_dimension else 1
    found_RP = torch.zeros(len(wanted_R), parts, device=actor.device)
    for at_B, state in _chunks(rows, wanted_R, recurrence):
        at_B, there = over((at_B, state), actor.device)
        some = rows.at(at_B)
        head_BH = actor(some.inputs, there.layout, there.actor)[:, : actor.outputs]
        log_prob = evaluate(actor, head_BH, some, per_dimension).log_prob
        found_RP[at_B] = log_prob.reshape(len(at_B), parts)
    return found_RP


def _chunks(rows: Minibatch, wanted_R: Flags, recurrence: Recurrence | None) -> Iterator[tuple[Tensor, RecurrentState]]:
    """Yields wanted rows, with their whole sequences for recurrent actors, as many as fit in the cache."""
    most = rows_at_once(rows.inputs)
    if recurrence is None:
        for at_B in torch.split(torch.from_numpy(np.flatnonzero(wanted_R)), most):
            yield at_B, RecurrentState()
        return
    lengths_q = recurrence.lengths
    within = wanted_R[sequences.rows_of(recurrence.first, lengths_q)]
    wanted_q = np.flatnonzero(np.logical_or.reduceat(within, np.cumsum(lengths_q) - lengths_q))
    for which_q in in_parts(wanted_q, max(1, most // int(lengths_q.max()))):
        yield recurrence.select(which_q)


# ---------------------------------------------------------------- report


class Losses(NamedTuple):
    """Holds the losses of one minibatch.

    Attributes:
        policy: of the actor.
        squares: [n, S] squared errors of the critic's estimates, by kind.
        step: of the optimizer.
    """

    policy: PolicyTerms
    squares: Mapping[str, Tensor]
    step: StepTaken


class UpdateReport(NamedTuple):
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


def losses_of(taken: Sequence[Losses]) -> dict[str, float]:
    """Returns the mean of each loss over minibatches, which may differ in size; none if every one was skipped."""
    if not taken:
        return {}
    objectives = _mean_of_each([one.policy.objective for one in taken])
    columns = {"Policy/Entropy": [one.policy.entropy for one in taken]}
    columns |= {f"Losses/{kind} Loss": [one.squares[kind] for one in taken] for kind in taken[0].squares}
    means = {name: _mean_of_each(column).mean().item() for name, column in columns.items()}
    return {"Losses/Policy Loss": objectives.abs().mean().item()} | means


def diagnostics(
    taken: Sequence[Losses], returns_KS: Floats, values_KS: Floats, epsilon: float, staleness: Staleness
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
        log_ratio = torch.cat([one.policy.log_ratio for one in taken])
        joint = log_ratio.sum(1) if log_ratio.dim() == 2 else log_ratio
        found["Update/Approximate KL"] = (joint.exp() - 1 - joint).mean().item()
        found["Update/Clip Fraction"] = ((log_ratio.exp() - 1).abs() > epsilon).float().mean().item()
        squares = torch.stack([one.step.square for one in taken])
        found["Update/Gradient Norm"] = squares.double().sqrt().mean().item()
    return found


def _mean_of_each(parts: Sequence[Tensor]) -> Tensor:
    if len({part.shape for part in parts}) == 1:  # the usual case: one call for all takes less time
        return torch.stack(list(parts)).reshape(len(parts), -1).mean(1)
    return torch.stack([part.mean() for part in parts])
