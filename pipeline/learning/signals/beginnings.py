"""Where episodes begin: rewards for what is new ignore the end of an episode and go on with the next one.

What is new is so in whatever episode (Burda et al. 2018, arXiv 1810.12894, section 2.3: non-episodic
returns): the end of one leads to the beginning of another, and what follows an end has the value of a beginning.
(ML-Agents: that of the last observation, at which nobody ever acts: nothing holds it to anything, and it can run away.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.learning.memories import Memories


class EpisodeStarts:
    """Knows the lives that are under way, and the mean value of their beginnings by reward signal."""

    def __init__(self) -> None:
        self._under_way = Memories(1)  # 1 for each
        self._means: dict[str, np.float32] = {}

    def find(self, lives_s: NDArray[np.int64], ended_s: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """[s] Which segments are the first of their lives; those of one life stand in their order.

        Args:
            lives_s: number of each segment's life.
            ended_s: the life ended with it.
        """
        agent_episodes, at = np.unique(lives_s, return_index=True)
        first = np.zeros(len(lives_s), bool)
        first[at] = self._under_way.recall(agent_episodes)[:, 0] == 0
        over = np.isin(agent_episodes, lives_s[ended_s])
        self._under_way.keep(agent_episodes, np.ones((len(agent_episodes), 1), np.float32), over)
        return first

    def value(self, signal: str, values_b: NDArray[np.float32]) -> np.float32:
        """Mean value of the beginnings of a batch, or of the last batch that had any.

        Args:
            signal: name of the reward signal.
            values_b: of each beginning in the batch; where one is not finite, the batch is as if it had none.
        """
        if values_b.size and np.isfinite(mean := values_b.mean()):
            self._means[signal] = mean
        return self._means.get(signal, np.float32(0.0))
