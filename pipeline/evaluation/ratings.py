"""This module rates players by their results against each other, and gives intervals.

Ratings are the maximum a posteriori of Bradley and Terry's model (1952, doi 10.1093/biomet/39.3-4.324), a tied match as
half a win, on Elo's scale, with mean 0. A normal prior of 800 points keeps the rating of a player that never lost
finite. Their intervals use the curvature there (Laplace). The interval of a share is Wilson's (1927, doi
10.1080/01621459.1927.10502953), which stays within 0..1 and is valid for few matches.
"""

import math
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

CONFIDENCE: Final = 0.95
DEVIATIONS: Final = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
"""Deviations of a normal distribution on each side of its interval."""
SCALE: Final = 400 / math.log(10)
"""Points of Elo's scale for one unit of log-odds."""
_PRIOR: Final = 800.0
_ROUNDS: Final = 100
_CLOSE: Final = 1e-10


def rated(points: Matrix) -> tuple[Matrix, Matrix]:
    """Returns ratings and half the widths of their intervals.

    Args:
        points: [p, p] of each against each.
    """
    theta, count = np.zeros(len(points)), len(points)
    prior, matches = (SCALE / _PRIOR) ** 2, points + points.T
    for _ in range(_ROUNDS):  # Newton's, with steps of at most 1, because the likelihood of a clear win is nearly flat
        chance = 1 / (1 + np.exp(theta[None] - theta[:, None]))
        weight = matches * chance * (1 - chance)
        curvature = np.diag(weight.sum(1) + prior) - weight
        step = np.linalg.solve(curvature, (points - matches * chance).sum(1) - theta * prior)
        theta += step / max(1.0, float(np.abs(step).max(initial=0)))
        if np.abs(step).max(initial=0) < _CLOSE:
            break
    center = np.eye(count) - 1 / max(1, count)
    covariance = center @ np.linalg.inv(curvature) @ center
    return SCALE * (theta - theta.mean()), DEVIATIONS * SCALE * np.sqrt(np.diag(covariance))


def wilson(points: float, matches: int) -> tuple[float, float]:
    """Returns Wilson's interval of a share; tied matches count as half a win, which makes it a little too wide."""
    share, more = points / matches, DEVIATIONS**2 / matches
    middle = (share + more / 2) / (1 + more)
    half = DEVIATIONS / (1 + more) * math.sqrt(share * (1 - share) / matches + more / (4 * matches))
    return max(0.0, min(middle - half, share)), min(1.0, max(middle + half, share))  # rounding keeps the share inside
