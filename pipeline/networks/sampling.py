# ruff: noqa: N803, N806 (names end in their shape)
"""Samples the actions of a few agents at a time, with NumPy, whose calls cost less than PyTorch's.

B rows, C continuous actions, D branches, K choices of all branches, H = C + K, k choices of one.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.networks.distributions import FORBIDDEN
from sparring.pipeline.specs import ActionSpec, Array, Flags

Source = np.random.Generator
"""Random source of samples."""
_SHORTEST: Final = 1e-30
"""Least exponential time, by which a probability is divided."""


class ActionSampler:
    """Samples actions from an actor's outputs with a fixed log sigma; distributions are those of `distributions`.

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
        self._offset = -float(log_sigma_C.sum()) - 0.5 * math.log(2 * math.pi) * actions.continuous

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
