"""Novelty rewards ignore the end of an episode: their returns continue with the start of the next one.

An observation is novel or not whatever the episode (Burda et al. 2018, arXiv 1810.12894, section 2.3: non-episodic
returns). The end of one episode leads to the start of another, so the value after an end is that of an episode start.
(ML-Agents uses the value of the last observation, where no agent ever acts: it is never trained and can diverge.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.learning.memories import Memories


class EpisodeStarts:
    """Tracks the agent episodes under way, and the mean value of their starts by reward signal."""

    def __init__(self) -> None:
        self._under_way = Memories(1)  # 1 for each of them
        self._means: dict[str, np.float32] = {}

    def find(self, episodes_s: NDArray[np.int64], ended_s: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Returns [s] which segments are the first of their episodes; segments of one episode are in order.

        Args:
            episodes_s: number of each segment's agent episode.
            ended_s: the agent episode ended with the segment.
        """
        agent_episodes, at = np.unique(episodes_s, return_index=True)
        first = np.zeros(len(episodes_s), bool)
        first[at] = self._under_way.recall(agent_episodes)[:, 0] == 0
        over = np.isin(agent_episodes, episodes_s[ended_s])
        self._under_way.keep(agent_episodes, np.ones((len(agent_episodes), 1), np.float32), over)
        return first

    def value(self, signal: str, values_b: NDArray[np.float32]) -> np.float32:
        """Returns the mean value of the episode starts of this batch, or of the last batch that had any.

        Args:
            signal: name of the reward signal.
            values_b: value of each start in the batch; if one is not finite, the batch counts as having none.
        """
        if values_b.size and np.isfinite(mean := values_b.mean()):
            self._means[signal] = mean
        return self._means.get(signal, np.float32(0.0))
