"""This module scales rewards to about one size, whatever unit a simulator uses.

1. Each reward is divided by the running standard deviation of the discounted sum `R_t = r_t + gamma R_{t-1}` of an
   agent's rewards so far, then clipped to +-10 (Engstrom et al. 2020, arXiv 2005.12729, section 3, "reward scaling").
   The mean is not subtracted: that would change what is optimal.
2. The sum starts at 0 with each agent episode, or group, and continues from one of its segments to the next, across
   batches. It omits steps that were dropped as stale, and after a checkpoint is restored all sums restart at 0.
3. The sums of a batch enter the statistics before its rewards are divided, so that the first batch is scaled too. The
   statistics start as one sum of variance 1, and are part of the weights in a checkpoint.

r steps of s segments, one segment after the other.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from sparring.pipeline.assembly import sequences
from sparring.pipeline.learning import returns
from sparring.pipeline.learning.memories import Memories
from sparring.pipeline.networks.normalizer import Normalizer
from sparring.pipeline.specs import Array

CLIP: Final = np.float32(10.0)
"""Largest absolute value of a reward."""

Floats = NDArray[np.float32]


class RewardScale:
    """Scales the rewards of one signal.

    Attributes:
        module: the statistics.

    Args:
        gamma: discount of the signal.
    """

    def __init__(self, gamma: float) -> None:
        self.module = Normalizer(1)
        self._gamma = gamma
        self._sums = Memories(1)

    def divide(
        self, rewards_r: Floats, lengths_s: Array, episodes_s: NDArray[np.int64], ended_s: NDArray[np.bool_]
    ) -> Floats:
        """Returns the rewards [r] of a batch, divided and clipped.

        Args:
            rewards_r: reward of each step.
            lengths_s: steps of each segment, at least 1; segments of one episode are in order.
            episodes_s: number of each segment's agent episode, or of its group.
            ended_s: the agent episode, or the group, ended with the segment.
        """
        sums_r = self._discounted(rewards_r, lengths_s, episodes_s, ended_s)
        self.module.update(torch.from_numpy(sums_r).unsqueeze(1))
        divided: Floats = rewards_r / self.module.variance.sqrt().numpy()
        return np.clip(divided, -CLIP, CLIP, out=divided)

    def _discounted(
        self, rewards_r: Floats, lengths_s: Array, episodes_s: NDArray[np.int64], ended_s: NDArray[np.bool_]
    ) -> Floats:
        """Returns [r] discounted sums so far, episode by episode: advantages of value 0, in reverse order."""
        by_episode_s = np.argsort(episodes_s, kind="stable")
        agent_episodes, first = np.unique(episodes_s[by_episode_s], return_index=True)
        steps = np.add.reduceat(lengths_s[by_episode_s], first)
        rows = sequences.rows_of((np.cumsum(lengths_s) - lengths_s)[by_episode_s], lengths_s[by_episode_s])
        back = rewards_r[rows][::-1].copy()
        before = self._sums.recall(agent_episodes)[::-1, 0]
        sums_back = returns.advantages(back, np.zeros_like(back), before, steps[::-1], self._gamma, 1.0)
        sums_r: Floats = sums_back[::-1].copy()
        last = sums_r[np.cumsum(steps) - 1, None]
        self._sums.keep(
            agent_episodes,
            np.where(np.isfinite(last), last, np.float32(0)),
            np.isin(agent_episodes, episodes_s[ended_s]),
        )
        return sums_r
