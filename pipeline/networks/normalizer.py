# ruff: noqa: N803, N806 (names end in their shape)
"""This module keeps the running mean and variance of vector observations.

B rows, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from sparring.pipeline.specs import Array

CLIP: Final = 5.0
"""Largest absolute value after normalization."""


class Normalizer(nn.Module):
    """Subtracts a running mean, divides by a running standard deviation, clips to +-5.

    The statistics start as one observation of mean 0 and variance 1, so that the variance is never 0. The three buffers
    belong to the weights. Only `update` changes them: an update trains on the same numbers that acting used.

    Args:
        size: number of features.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("variance", torch.ones(size))
        self.register_buffer("count", torch.ones((), dtype=torch.int64))

    def forward(self, rows_BF: Tensor) -> Tensor:
        """Returns normalized rows [B, F]."""
        return _normalize(self.mean, self.variance.sqrt(), rows_BF)

    def frozen(self) -> Callable[[Array], Array]:
        """Returns a NumPy function, whose calls cost less, that normalizes rows by the current statistics in place."""
        return partial(_normalize_few, self.mean.numpy().copy(), self.variance.sqrt().numpy())

    @torch.no_grad()
    def update(self, rows_BF: Tensor) -> bool:
        """Merges the statistics of `rows_BF` into the running ones (Chan et al. 1979), in float64.

        Returns:
            False if the rows hold a non-finite number: nothing was changed.
        """
        rows = rows_BF.double()
        n, seen = len(rows), self.count.item()
        total = seen + n
        mean_F = rows.mean(0)
        shift_F = mean_F - self.mean
        squares_F = rows.sub_(mean_F).square_().sum(0) + seen * self.variance + shift_F.square() * (seen * n / total)
        if n == 0 or not bool(torch.isfinite(squares_F).all()):
            return False
        self.mean += shift_F * (n / total)
        self.variance.copy_(squares_F / total)
        self.count += n
        return True


def _normalize_few(mean_F: Array, deviation_F: Array, rows_BF: Array) -> Array:
    rows_BF -= mean_F
    rows_BF /= deviation_F
    np.maximum(rows_BF, -CLIP, out=rows_BF)
    np.minimum(rows_BF, CLIP, out=rows_BF)
    return rows_BF


def _normalize(mean_F: Tensor, deviation_F: Tensor, rows_BF: Tensor) -> Tensor:
    return rows_BF.sub(mean_F).div_(deviation_F).clamp_(-CLIP, CLIP)
