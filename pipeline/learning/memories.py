"""What a critic remembers of each agent from one segment to the next.

An actor's memory travels with the steps, because acting made it. A critic acts nowhere: its memory of an agent is made
here when values are estimated, in the order of the agent's segments, as in ML-Agents.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

MOST_AGENTS: Final = 65536
"""Agents remembered. Those of a simulator that went away without a last segment are never heard of again."""

Floats = NDArray[np.float32]
AgentEpisodes = NDArray[np.int64]


class Memories:
    """Memories by the number of an agent's life; those of agents longest unheard of go first.

    Args:
        size: values in each memory.
        limit: most agents.
    """

    def __init__(self, size: int, limit: int = MOST_AGENTS) -> None:
        self._limit = limit
        self._agent_episodes: AgentEpisodes = np.empty(0, np.int64)
        self._heard: AgentEpisodes = np.empty(0, np.int64)
        self._memories: Floats = np.empty((0, size), np.float32)
        self._now = 0

    def __len__(self) -> int:
        """Agents remembered."""
        return len(self._agent_episodes)

    def recall(self, lives: AgentEpisodes) -> Floats:
        """[n, size] memory of each agent, zeros where there is none."""
        found: Floats = np.zeros((len(lives), self._memories.shape[1]), np.float32)
        if len(self):
            at = np.minimum(np.searchsorted(self._agent_episodes, lives), len(self) - 1)
            known = self._agent_episodes[at] == lives
            found[known] = self._memories[at[known]]
        return found

    def keep(self, lives: AgentEpisodes, memories: Floats, ended: NDArray[np.bool_]) -> None:
        """Remembers agents anew, and forgets those whose life has ended.

        Args:
            lives: [n] each once.
            memories: [n, size].
            ended: [n] the life is over.
        """
        self._now += 1
        others = ~np.isin(self._agent_episodes, lives)
        lives, memories = lives[~ended], memories[~ended]
        heard = np.concatenate([self._heard[others], np.full(len(lives), self._now)])
        lives = np.concatenate([self._agent_episodes[others], lives])
        memories = np.concatenate([self._memories[others], memories])
        latest = np.argsort(-heard, kind="stable")[: self._limit]
        kept = latest[np.argsort(lives[latest], kind="stable")]
        self._agent_episodes, self._heard, self._memories = lives[kept], heard[kept], memories[kept]
