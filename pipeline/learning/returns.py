# ruff: noqa: N803, N806 (names end in their shape)
"""Generalized advantage estimation (Schulman et al. 2016) runs over segments of any lengths here.

A non-finite reward or value passes through without a warning: the update that contains it is skipped and counted.

R rows of all segments, one segment after the other; S segments.
"""

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.specs import Array

Floats = NDArray[np.float32]


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
    for back, segments in enumerate(reaching.tolist(), start=1):
        rows = rows_S[:segments] - back
        running_S = advantages_R[rows] + decay * running_S[:segments]
        advantages_R[rows] = running_S
    return advantages_R


@np.errstate(invalid="ignore", over="ignore")
def normalized(advantages_R: Floats) -> Floats:
    """Returns [R] advantages minus their mean, divided by their standard deviation + 1e-10."""
    scaled: Floats = (advantages_R - advantages_R.mean()) / (advantages_R.std() + np.float32(1e-10))
    return scaled
