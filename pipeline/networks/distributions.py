# ruff: noqa: N803, N806 (names end in their shape)
"""This module implements distributions over actions: a diagonal Gaussian, one categorical per branch, or both.

All take an actor's outputs: its head holds the means of the continuous actions, followed by the
logits of all branches; log sigma does not depend on the observation. The probability of an action is that of all its
parts together.

B rows, C continuous actions, D branches, P = C + D parts, K choices of all branches, H = C + K, k choices of one.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from sparring.pipeline.networks.device import constant
from sparring.pipeline.specs import ActionSpec, Array, Flags

FORBIDDEN: Final = -1e8
"""Logit of a masked choice: its probability is exactly 0, its logarithm finite."""

_LOG_2PI: Final = math.log(2 * math.pi)

Source = np.random.Generator
"""Random source of samples."""
_SHORTEST: Final = 1e-30
"""Least exponential time, by which a probability is divided."""


class Branches(NamedTuple):
    """Holds all branches of an `Evaluation`, each with as many choices as the largest; the additional ones have p = 0.

    Attributes:
        log_p: [B, D, k] log-probability of each choice.
        p: [B, D, k] probability of each choice.
        chosen: [B, D, 1] index of the choice.
        entropy: [B, D, 1].
    """

    log_p: Tensor
    p: Tensor
    chosen: Tensor
    entropy: Tensor


class Evaluation(NamedTuple):
    """Holds the log-probability and entropy of given actions, and differentiates losses of them.

    Attributes:
        log_prob: [B] log-probability of each joint action, or [B, P] of each of its parts.
        entropy: mean over rows of the sum of the branches' entropies plus the mean over the continuous dimensions'.
        noise: [B, C] continuous actions, in standard deviations from the mean.
        excess: [B, C] squared noise - 1.
        sigma: [C] standard deviations.
        branches: all of them; None if there are none.
        sizes: choices of each branch.
    """

    log_prob: Tensor
    entropy: Tensor
    noise: Tensor
    excess: Tensor
    sigma: Tensor
    branches: Branches | None
    sizes: tuple[int, ...]

    def gradient(self, log_prob_gradient: Tensor, entropy_gradient: float) -> tuple[Tensor, Tensor]:
        """Returns the gradient of a loss for the head [B, H] and for log sigma [C].

        Args:
            log_prob_gradient: of the loss for `log_prob`, of its shape.
            entropy_gradient: of the loss for `entropy`.
        """
        rows, dimensions = self.noise.shape
        # All parts of a joint action have the same gradient.
        joint = log_prob_gradient.dim() == 1
        gradient_BP = log_prob_gradient.unsqueeze(1) if joint else log_prob_gradient
        parts = []
        log_sigma_C = self.sigma  # of no dimension
        if dimensions:
            of_means_BC = gradient_BP if joint or not self.sizes else gradient_BP[:, :dimensions]
            parts.append(self.noise.div(self.sigma).mul_(of_means_BC))
            # d log p / d log sigma = noise^2 - 1;  d entropy / d log sigma = 1 / C
            of_entropy = constant(entropy_gradient / dimensions / rows, of_means_BC)
            log_sigma_C = torch.addcmul(of_entropy, self.excess, of_means_BC).sum(0)
        if self.branches is not None:
            gradient_BD1 = (
                gradient_BP.expand(-1, len(self.sizes)) if joint else gradient_BP[:, dimensions:]
            ).unsqueeze(2)
            # d log p_chosen = one_hot - p;  d entropy = -p (log p + entropy)
            factor_BDk = self.branches.log_p.add(self.branches.entropy)
            factor_BDk.mul_(constant(entropy_gradient / rows, factor_BDk)).add_(gradient_BD1)
            logits_BDk = factor_BDk.mul_(self.branches.p).neg_().scatter_add_(2, self.branches.chosen, gradient_BD1)
            places = _places(self.sizes, logits_BDk.device)
            logits_BK = logits_BDk.flatten(1)
            parts.append(logits_BK if places is None else logits_BK.index_select(1, places[1]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), log_sigma_C


def evaluate(
    actions: ActionSpec,
    head_BH: Tensor,
    log_sigma_C: Tensor,
    continuous_BC: Tensor,
    discrete_BD: Tensor,
    masks_BK: Tensor | None,
    *,
    per_dimension: bool = False,
) -> Evaluation:
    """Evaluates log-probability and entropy of actions without autograd; `Evaluation.gradient` differentiates them.

    Args:
        actions: spec of the actions.
        head_BH: means and logits.
        log_sigma_C: logarithm of the standard deviations.
        continuous_BC: raw samples.
        discrete_BD: int64 choices.
        masks_BK: True = forbidden; None allows everything.
        per_dimension: log-probabilities are those of each dimension and branch instead of the joint action's.
    """
    sigma_C = log_sigma_C.exp()
    means_BC = head_BH[:, : actions.continuous] if actions.discrete else head_BH
    noise_BC = continuous_BC.sub(means_BC).div_(sigma_C)
    excess_BC = torch.addcmul(constant(-1.0, noise_BC), noise_BC, noise_BC)
    # The logarithm of the density where the excess is 0, which is its mean.
    center_C = torch.sub(constant(-0.5 * (1 + _LOG_2PI), log_sigma_C), log_sigma_C)
    center, excess = (center_C, excess_BC) if per_dimension else (center_C.sum(), excess_BC.sum(1))
    log_prob = torch.sub(center, excess, alpha=0.5)
    entropy = center_C.mean().neg_() if actions.continuous else center_C.sum()
    if not actions.discrete:
        return Evaluation(log_prob, entropy, noise_BC, excess_BC, sigma_C, None, ())
    log_p_BDk = _logits(actions, head_BH, masks_BK).log_softmax(2)
    p_BDk = log_p_BDk.exp()
    chosen_BD1 = discrete_BD.unsqueeze(2)
    entropy_BD1 = p_BDk.mul(log_p_BDk).sum(2, keepdim=True).neg_()
    log_p_BD = log_p_BDk.gather(2, chosen_BD1).squeeze(2)
    log_prob = torch.cat((log_prob, log_p_BD), 1) if per_dimension else log_prob.add_(log_p_BD.sum(1))
    entropy = entropy + entropy_BD1.sum() / len(head_BH)
    branches = Branches(log_p_BDk, p_BDk, chosen_BD1, entropy_BD1)
    return Evaluation(log_prob, entropy, noise_BC, excess_BC, sigma_C, branches, actions.discrete)


@lru_cache(maxsize=64)
@torch.inference_mode(mode=False)  # a later caller may have a graph
def _places(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Returns the choice of each place [D * k], K if it has none, and the place of each choice [K].

    None stands for branches of equal size, whose choices have their places.
    """
    if len(set(sizes)) == 1:
        return None
    most, total = max(sizes), sum(sizes)
    choices = torch.arange(most) < torch.tensor(sizes).unsqueeze(1)
    places = choices.flatten().nonzero().squeeze(1)
    of_places = torch.full((len(sizes) * most,), total).index_copy(0, places, torch.arange(total))
    return of_places.to(device), places.to(device)


def _logits(actions: ActionSpec, head_BH: Tensor, masks_BK: Tensor | None) -> Tensor:
    """Returns [B, D, k] logits of all branches, those of forbidden choices far below all others."""
    logits_BK = head_BH[:, actions.continuous :]
    if masks_BK is not None:
        logits_BK = logits_BK.masked_fill(masks_BK, FORBIDDEN)
    if (places := _places(actions.discrete, head_BH.device)) is not None:
        # Below forbidden choices, which share the probability where all are forbidden.
        logits_BK = pad(logits_BK, (0, 1), value=2 * FORBIDDEN).index_select(1, places[0])
    return logits_BK.reshape(len(head_BH), len(actions.discrete), -1)


def logits_of(actions: ActionSpec, logits_BK: Tensor, masks_BK: Tensor | None) -> Sequence[Tensor]:
    """Returns [B, k] logits of each branch, those of forbidden choices far below all others."""
    if not actions.discrete:
        return ()
    allowed_BK = logits_BK if masks_BK is None else logits_BK.masked_fill(masks_BK, FORBIDDEN)
    return allowed_BK.split_with_sizes(list(actions.discrete), dim=1)


class ActionSampler:
    """Samples the actions of a few agents at a time with a fixed log sigma.

    It uses NumPy, whose calls cost less than PyTorch's.

    Args:
        actions: spec of the actions.
        log_sigma_C: logarithm of the standard deviations.
    """

    def __init__(self, actions: ActionSpec, log_sigma_C: Array) -> None:
        sizes = actions.discrete
        self._sizes = np.array(sizes, np.intp)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._alike = (len(sizes), sizes[0]) if len(set(sizes)) == 1 else None
        self._sigma_C = np.exp(log_sigma_C)
        self._minus_half_C = np.full_like(self._sigma_C, -0.5)
        self._offset = -float(log_sigma_C.sum()) - 0.5 * _LOG_2PI * actions.continuous

    def sample(
        self, head_BH: Array, masks_BK: Flags | None, source: Source, deterministic: bool = False
    ) -> tuple[Array, NDArray[np.int32], Array]:
        """Samples an action per row, or takes the most likely one.

        Args:
            head_BH: means and logits.
            masks_BK: True = forbidden; None allows everything.
            source: random source.
            deterministic: take the mode.

        Returns:
            continuous [B, C] raw samples, discrete [B, D] choices, [B] log-probability of both together.
        """
        random = None if deterministic else source
        continuous_BC, log_prob_B = self._gaussian(head_BH, random)
        if not len(self._sizes):
            return continuous_BC, np.empty((len(continuous_BC), 0), np.int32), log_prob_B
        logits_BK = head_BH[:, len(self._sigma_C) :]
        if masks_BK is not None:
            logits_BK = np.where(masks_BK, logits_BK.dtype.type(FORBIDDEN), logits_BK)
        discrete_BD, log_p_B = self._categorical(logits_BK, random)
        log_prob_B += log_p_B
        return continuous_BC, discrete_BD, log_prob_B

    def _gaussian(self, head_BH: Array, random: Source | None) -> tuple[Array, Array]:
        """Returns samples, or means without a source, and their log-probability."""
        rows, continuous = len(head_BH), len(self._sigma_C)
        if not continuous:
            return np.empty((rows, 0), head_BH.dtype), np.zeros(rows, head_BH.dtype)
        if random is None:
            return head_BH[:, :continuous].copy(), np.full(rows, self._offset, head_BH.dtype)
        noise_BC = random.standard_normal((rows, continuous), head_BH.dtype.type)
        continuous_BC = noise_BC * self._sigma_C
        continuous_BC += head_BH[:, :continuous]
        noise_BC *= noise_BC
        log_prob_B = noise_BC @ self._minus_half_C
        log_prob_B += self._offset
        return continuous_BC, log_prob_B

    def _categorical(self, logits_BK: Array, random: Source | None) -> tuple[NDArray[np.int32], Array]:
        """Returns choices of all branches, the most likely ones without a source, and their log-probability."""
        peaks_BD = np.maximum.reduceat(logits_BK, self._starts, axis=1)
        logits_BK = logits_BK - np.repeat(peaks_BD, self._sizes, axis=1)
        p_BK = scores_BK = np.exp(logits_BK)
        if random is not None:
            # With exponential times of mean 1, the largest p / time falls on each choice with its probability.
            times_BK = random.standard_exponential(p_BK.shape, p_BK.dtype.type)
            scores_BK = p_BK / np.maximum(times_BK, _SHORTEST)
        if self._alike:
            discrete_BD = scores_BK.reshape(len(p_BK), *self._alike).argmax(2)
        else:
            branches = np.split(scores_BK, self._starts[1:], axis=1)
            discrete_BD = np.stack([branch_Bk.argmax(1) for branch_Bk in branches], axis=1)
        log_p_BD = np.take_along_axis(logits_BK, discrete_BD + self._starts, 1)
        log_p_BD -= np.log(np.add.reduceat(p_BK, self._starts, axis=1))
        return discrete_BD.astype(np.int32), log_p_BD.sum(1)
