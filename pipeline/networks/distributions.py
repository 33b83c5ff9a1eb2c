# ruff: noqa: N803, N806 (names end in their shape)
"""Distributions over actions: a diagonal Gaussian, one categorical per branch, or both.

All are pure functions of an actor's outputs: its head holds the means of the continuous actions
and, beside them, the logits of all branches; log sigma does not depend on the observation. The
probability of an action is that of all its parts together.

B rows, C continuous actions, D branches, K choices of all branches, H = C + K, k choices of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pipeline.specs import ActionSpec

FORBIDDEN: Final = -1e8
"""Added to the logit of a masked choice: its probability is exactly 0, its logarithm finite."""

_LOG_2PI: Final = math.log(2 * math.pi)


def sample(
    actions: ActionSpec,
    head_BH: Tensor,
    log_sigma_C: Tensor,
    masks_BK: Tensor | None,
    generator: torch.Generator,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws an action per row, or takes the most likely one.

    Args:
        actions: spec of the actions.
        head_BH: means and logits.
        log_sigma_C: logarithm of the standard deviations.
        masks_BK: True = forbidden; None allows everything.
        generator: random source.
        deterministic: take the mode.

    Returns:
        continuous [B, C] raw samples, discrete [B, D] int64 choices, [B] log-probability of both together.
    """
    mean_BC = head_BH[:, : actions.continuous]
    noise_BC = torch.zeros_like(mean_BC) if deterministic else torch.empty_like(mean_BC).normal_(generator=generator)
    log_prob_B = _gaussian_log_prob(noise_BC.square(), log_sigma_C)
    discrete_BD = head_BH.new_empty((len(head_BH), len(actions.discrete)), dtype=torch.int64)
    if actions.discrete:
        logits_BK = _logits(actions, head_BH, masks_BK)
        scores_BK = logits_BK if deterministic else logits_BK + _gumbel(logits_BK, generator)
        for branch, (logits_Bk, scores_Bk) in enumerate(_split(actions, logits_BK, scores_BK)):
            choice_B1 = torch.argmax(scores_Bk, dim=1, keepdim=True, out=discrete_BD[:, branch : branch + 1])
            log_prob_B += logits_Bk.log_softmax(1).gather(1, choice_B1).squeeze(1)
    return torch.addcmul(mean_BC, noise_BC, log_sigma_C.exp()), discrete_BD, log_prob_B


@dataclass(frozen=True, slots=True)
class Branch:
    """One branch of an `Evaluation`.

    Attributes:
        log_p: [B, k] log-probability of each choice.
        p: [B, k] probability of each choice.
        chosen: [B, 1] index of the choice.
        entropy: [B, 1].
    """

    log_p: Tensor
    p: Tensor
    chosen: Tensor
    entropy: Tensor


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a distribution says of given actions, and what a loss of that says to the network.

    Attributes:
        log_prob: [B] log-probability of each joint action.
        entropy: mean over rows of the sum of the branches' entropies plus the mean over the continuous dimensions'.
        noise: [B, C] continuous actions, in standard deviations from the mean.
        squares: [B, C] of the noise.
        sigma: [C] standard deviations.
        branches: one per branch.
    """

    log_prob: Tensor
    entropy: Tensor
    noise: Tensor
    squares: Tensor
    sigma: Tensor
    branches: tuple[Branch, ...]

    def gradient(self, log_prob_gradient_B: Tensor, entropy_gradient: float) -> tuple[Tensor, Tensor]:
        """Gradient of a loss for the head [B, H] and for log sigma [C].

        Args:
            log_prob_gradient_B: of the loss for `log_prob`.
            entropy_gradient: of the loss for `entropy`.
        """
        gradient_B1 = log_prob_gradient_B.unsqueeze(1)
        rows, dimensions = self.noise.shape
        parts = [self.noise.div(self.sigma).mul_(gradient_B1)] if dimensions else []
        for branch in self.branches:
            # d log p_chosen = one_hot - p;  d entropy = -p (log p + entropy)
            factor_Bk = branch.log_p.add(branch.entropy).mul_(entropy_gradient / rows).add_(gradient_B1)
            part_Bk = factor_Bk.mul_(branch.p).neg_()
            parts.append(part_Bk.scatter_add_(1, branch.chosen, gradient_B1))
        # d log p / d log sigma = noise^2 - 1;  d entropy / d log sigma = 1 / C
        log_sigma_C = self.squares.sub(1.0).mul_(gradient_B1).sum(0)
        log_sigma_C += entropy_gradient / max(1, dimensions)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), log_sigma_C


def evaluate(
    actions: ActionSpec,
    head_BH: Tensor,
    log_sigma_C: Tensor,
    continuous_BC: Tensor,
    discrete_BD: Tensor,
    masks_BK: Tensor | None,
) -> Evaluation:
    """Log-probability and entropy of given actions, without autograd: `Evaluation.gradient` is its derivative.

    Args:
        actions: spec of the actions.
        head_BH: means and logits.
        log_sigma_C: logarithm of the standard deviations.
        continuous_BC: raw samples.
        discrete_BD: int64 choices.
        masks_BK: True = forbidden; None allows everything.
    """
    sigma_C = log_sigma_C.exp()
    noise_BC = continuous_BC.sub(head_BH[:, : actions.continuous]).div_(sigma_C)
    squares_BC = noise_BC.square()
    log_prob_B = _gaussian_log_prob(squares_BC, log_sigma_C)
    entropy = log_sigma_C.mean() + 0.5 * (1 + _LOG_2PI) if actions.continuous else log_sigma_C.sum()
    branches = []
    logits_BK = _logits(actions, head_BH, masks_BK)
    for number, (logits_Bk,) in enumerate(_split(actions, logits_BK)):
        log_p_Bk, chosen_B1 = logits_Bk.log_softmax(1), discrete_BD[:, number : number + 1]
        p_Bk = log_p_Bk.exp()
        entropy_B1 = p_Bk.mul(log_p_Bk).sum(1, keepdim=True).neg_()
        log_prob_B += log_p_Bk.gather(1, chosen_B1).squeeze(1)
        entropy = entropy + entropy_B1.mean()
        branches.append(Branch(log_p_Bk, p_Bk, chosen_B1, entropy_B1))
    return Evaluation(log_prob_B, entropy, noise_BC, squares_BC, sigma_C, tuple(branches))


def _gaussian_log_prob(squares_BC: Tensor, log_sigma_C: Tensor) -> Tensor:
    """[B] log-probability of mean + sigma x noise, of the squared noise."""
    constant = log_sigma_C.sum().add_(0.5 * _LOG_2PI * squares_BC.shape[1])
    return constant.neg_().sub(squares_BC.sum(1), alpha=0.5)


def _gumbel(like_BK: Tensor, generator: torch.Generator) -> Tensor:
    """Noise under which the largest of logits + noise falls on each choice with its probability, [B, K]."""
    return torch.empty_like(like_BK).exponential_(generator=generator).clamp_(min=1e-30).log_().neg_()


def _logits(actions: ActionSpec, head_BH: Tensor, masks_BK: Tensor | None) -> Tensor:
    """[B, K] logits of all branches, those of forbidden choices far below all others."""
    logits_BK = head_BH[:, actions.continuous :]
    return logits_BK if masks_BK is None else logits_BK.masked_fill(masks_BK, FORBIDDEN)


def _split(actions: ActionSpec, *columns_BK: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """[B, k] views of each branch's choices."""
    sizes = list(actions.discrete)
    return zip(*(torch.split(column_BK, sizes, dim=1) for column_BK in columns_BK), strict=True) if sizes else iter(())
