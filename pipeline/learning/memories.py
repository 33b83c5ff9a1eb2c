"""This module stores the critic's memory of each agent from one segment to the next.

An actor's memory travels with the steps, because acting computed it. A critic never acts: its memory of an agent is
computed here when values are estimated, in the order of the agent's segments, as in ML-Agents.

s segments, q sequences, M values of a memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

MOST_AGENTS: Final = 65536
"""Most agents with a memory, because those of a simulator that disconnected may never send a last segment."""

Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]


class Memories:
    """Stores memories by agent episode; the least recently updated are dropped first.

    Args:
        size: values in each memory.
        limit: most agents.
    """

    def __init__(self, size: int, limit: int = MOST_AGENTS) -> None:
        self._limit = limit
        self._agent_episodes: Numbers = np.empty(0, np.int64)
        self._updated_at: Numbers = np.empty(0, np.int64)
        self._memories: Floats = np.empty((0, size), np.float32)
        self._now = 0

    def __len__(self) -> int:
        """Returns the number of agents with a memory."""
        return len(self._agent_episodes)

    def recall(self, episodes: Numbers) -> Floats:
        """Returns [n, size] the memory of each agent episode, zeros for unknown ones."""
        found: Floats = np.zeros((len(episodes), self._memories.shape[1]), np.float32)
        if len(self):
            at = np.minimum(np.searchsorted(self._agent_episodes, episodes), len(self) - 1)
            known = self._agent_episodes[at] == episodes
            found[known] = self._memories[at[known]]
        return found

    def keep(self, episodes: Numbers, memories: Floats, ended: NDArray[np.bool_]) -> None:
        """Stores the memories of agent episodes, and removes those that have ended.

        Args:
            episodes: [n] each once.
            memories: [n, size].
            ended: [n] the agent episode is over.
        """
        self._now += 1
        others = ~np.isin(self._agent_episodes, episodes)
        episodes, memories = episodes[~ended], memories[~ended]
        updated_at = np.concatenate([self._updated_at[others], np.full(len(episodes), self._now)])
        episodes = np.concatenate([self._agent_episodes[others], episodes])
        memories = np.concatenate([self._memories[others], memories])
        latest = np.argsort(-updated_at, kind="stable")[: self._limit]
        kept = latest[np.argsort(episodes[latest], kind="stable")]
        self._agent_episodes, self._updated_at, self._memories = episodes[kept], updated_at[kept], memories[kept]


class Tracks:
    """Orders the sequences of each agent (or group) of a batch by time, and holds the critic's memory of it meanwhile.

    Args:
        agent_episodes: [s] number of each segment's agent episode.
        ended: [s] the agent episode ended with the segment.
        segment_q: segment of each sequence.
        kept: memories from earlier batches.
    """

    def __init__(
        self, agent_episodes: NDArray[np.int64], ended: NDArray[np.bool_], segment_q: Numbers, kept: Memories
    ) -> None:
        self._agent_episodes, of_s = np.unique(agent_episodes, return_inverse=True)
        self._of_q: Numbers = of_s[segment_q]
        self._ended = np.bincount(of_s, ended) > 0
        self._kept = kept
        self._memories = kept.recall(self._agent_episodes)

    def rounds(self, most: int) -> Iterator[Numbers]:
        """Yields the first sequences of all agents, then all second ones, and so on, at most `most` at a time."""
        by_agent_q = np.argsort(self._of_q, kind="stable")
        counts = np.bincount(self._of_q)
        rank_q = np.empty_like(self._of_q)
        rank_q[by_agent_q] = np.arange(len(by_agent_q)) - np.repeat(np.cumsum(counts) - counts, counts)
        by_rank_q = np.argsort(rank_q, kind="stable")
        for which_q in np.split(by_rank_q, np.cumsum(np.bincount(rank_q))[:-1]):
            yield from in_parts(which_q, most)

    def __getitem__(self, which_q: Numbers) -> Floats:
        """Returns [sequences, M] the current memories of the agents of some sequences, each of another agent."""
        found: Floats = self._memories[self._of_q[which_q]]
        return found

    def __setitem__(self, which_q: Numbers, memories: Floats) -> None:
        self._memories[self._of_q[which_q]] = memories

    def keep(self) -> None:
        """Stores the current memory of each agent for later batches."""
        self._kept.keep(self._agent_episodes, self._memories, self._ended)


def in_parts(which: Numbers, most: int) -> list[Numbers]:
    """Divides numbers into as few parts of about equal size as have at most `most` each."""
    return np.array_split(which, -(-len(which) // most))
