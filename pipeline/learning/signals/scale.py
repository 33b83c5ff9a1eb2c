"""Rewards of about one size, whatever a simulator counts in.

1. Each reward is divided by the running standard deviation of the discounted sum `R_t = r_t + gamma R_{t-1}` of an
   agent's rewards so far, then clipped to +-10 (Engstrom et al. 2020, arXiv 2005.12729, section 3, "reward scaling").
   The mean is not subtracted: that would change what is optimal.
2. The sum starts at 0 with each life of an agent, or of a group, and goes on from one of its segments to the next,
   across batches. What was dropped as stale is not in it, and lives under way at a checkpoint start at 0 after it.
3. The sums of a batch enter the statistics before its rewards are divided, so that the first batch is of that size too.
   The statistics start as one sum of variance 1, and are part of the weights that a checkpoint holds.

r steps of s segments, one segment after the other.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from sparring.pipeline.assembly import sequences
from sparring.pipeline.learning import returns
from sparring.pipeline.learning.memories import Memories
from sparring.pipeline.networks.normalizer import Normalizer

CLIP: Final = np.float32(10.0)
"""Largest reward, either sign."""

Floats = NDArray[np.float32]


class RewardScale:
    """Divides the rewards of one signal.

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
        self, rewards_r: Floats, lengths_s: NDArray[Any], lives_s: NDArray[np.int64], ended_s: NDArray[np.bool_]
    ) -> Floats:
        """[r] Rewards of a batch, divided and clipped.

        Args:
            rewards_r: of each step.
            lengths_s: steps of each segment, at least 1; those of one life stand in their order.
            lives_s: number of each segment's life.
            ended_s: the life ended with it.
        """
        sums_r = self._discounted(rewards_r, lengths_s, lives_s, ended_s)
        self.module.update(torch.from_numpy(sums_r).unsqueeze(1))
        divided: Floats = rewards_r / self.module.variance.sqrt().numpy()
        return np.clip(divided, -CLIP, CLIP, out=divided)

    def _discounted(
        self, rewards_r: Floats, lengths_s: NDArray[Any], lives_s: NDArray[np.int64], ended_s: NDArray[np.bool_]
    ) -> Floats:
        """[r] Discounted sums of each life so far, life by life: an advantage of value 0, from the last step back."""
        by_life_s = np.argsort(lives_s, kind="stable")
        agent_episodes, first = np.unique(lives_s[by_life_s], return_index=True)
        steps = np.add.reduceat(lengths_s[by_life_s], first)
        rows = sequences.rows_of((np.cumsum(lengths_s) - lengths_s)[by_life_s], lengths_s[by_life_s])
        back = rewards_r[rows][::-1].copy()
        before = self._sums.recall(agent_episodes)[::-1, 0]
        sums_back = returns.advantages(back, np.zeros_like(back), before, steps[::-1], self._gamma, 1.0)
        sums_r: Floats = sums_back[::-1].copy()
        last = sums_r[np.cumsum(steps) - 1, None]
        self._sums.keep(
            agent_episodes, np.where(np.isfinite(last), last, np.float32(0)), np.isin(agent_episodes, lives_s[ended_s])
        )
        return sums_r
