# ruff: noqa: N803, N806 (names end in their shape)
"""This module divides the rows of a batch into minibatches, for recurrent networks by whole sequences.

B rows of a minibatch, R rows of the batch, s segments, q sequences, F features, C continuous actions, D branches, P = C
+ D parts of an action, S reward signals, M values of a recurrent memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparring.pipeline.assembly import sequences
from sparring.pipeline.learning.ranks import Ranks
from sparring.pipeline.networks.device import CPU, over
from sparring.pipeline.networks.encoders import Inputs
from sparring.pipeline.networks.layers import Layout
from sparring.pipeline.specs import Array, Flags, Floats, Numbers

_ROWS_AT_ONCE: Final = 1024
_BYTES_AT_ONCE: Final = 4 * 2**20
_BYTES_THERE: Final = 64 * 2**20
_WIDE: Final = 4096
"""Bytes of a row from which a column is shuffled one minibatch at a time instead of all at once."""


class Minibatch(NamedTuple):
    """Holds the columns of a minibatch.

    Attributes:
        inputs: prepared observations, [B, F] of the vectors first.
        continuous: [B, C] raw samples.
        discrete: [B, D] int64 choices.
        masks: [B, choices of all branches] True = forbidden; None if every choice was allowed.
        log_prob: under the policy that the clip is centered on: [B] of the joint action, or [B, P] of each part of it
            if the ratio is that of each part.
        advantage: normalized, then weighted (`losses.correct`): [B], or [B, 1] beside [B, P].
        limit: `losses.clip_limit` of the advantage, in the same shape.
        returns: [B, S] targets of the critic, per signal.
        values: [B, S] the critic's estimates before the update.
    """

    inputs: Inputs
    continuous: Tensor
    discrete: Tensor
    masks: Tensor | None
    log_prob: Tensor
    advantage: Tensor
    limit: Tensor
    returns: Tensor
    values: Tensor

    def at(self, which_B: Tensor) -> Minibatch:
        """Returns some of the rows."""
        others = (None if column is None else column.index_select(0, which_B) for column in self[1:])
        return Minibatch(tuple(column.index_select(0, which_B) for column in self.inputs), *others)  # type: ignore[arg-type]


class RecurrentState(NamedTuple):
    """Holds the memories of the networks at the start of each sequence of a minibatch.

    Attributes:
        layout: how the rows form sequences; all is None for networks without memory.
        actor: [q, M].
        critic: [q, M]; None if actor and critic share a body, or the critic has sequences of its own.
    """

    layout: Layout | None = None
    actor: Tensor | None = None
    critic: Tensor | None = None


class Recurrence(NamedTuple):
    """Describes the sequences of a batch.

    Attributes:
        first: [q] first row of each.
        lengths: [q] rows of each.
        actor: [q, M] memory of the actor at the start, stored when it acted.
        critic: [q, M] memory of the critic at the start; None as in `RecurrentState`.
    """

    first: Numbers
    lengths: Numbers
    actor: Floats
    critic: Floats | None

    def select(self, which_q: Array) -> tuple[Tensor, RecurrentState]:
        """Returns the rows [B] of the given sequences, one after the other, and the memories at their starts."""
        lengths = self.lengths[which_q]
        critic = None if self.critic is None else torch.from_numpy(self.critic[which_q])
        state = RecurrentState(Layout(lengths), torch.from_numpy(self.actor[which_q]), critic)
        return torch.from_numpy(sequences.rows_of(self.first[which_q], lengths)), state


class Part(NamedTuple):
    """Holds the part of a minibatch that one rank differentiates.

    Attributes:
        rows: our rows.
        state: memories of the actor at the start of our sequences.
        at: [B] numbers of the rows of the whole minibatch.
        weight: factor of the mean over our rows in that over the whole minibatch.
        windows: of group time, for the critic, of the whole minibatch; empty in PPO.
    """

    rows: Minibatch
    state: RecurrentState
    at: Tensor
    weight: float
    windows: Numbers = np.empty(0, np.int64)


def minibatches(rows: Minibatch, size: int, generator: torch.Generator, ranks: Ranks) -> Iterator[Part]:
    """Yields minibatches of `size` shuffled rows, or one of all; incomplete ones are left out."""
    which = over(torch.from_numpy(shuffled_parts(len(rows.log_prob), size, generator)), rows.log_prob.device)
    ours = which[:, ranks.part(which.shape[1])]
    inputs = zip(*(_shuffled(column, ours) for column in rows.inputs), strict=True)
    others = ([None] * len(ours) if column is None else _shuffled(column, ours) for column in rows[1:])
    weight, state = ranks.weight(which.shape[1], ours.shape[1], which.shape[1]), RecurrentState()
    return (Part(Minibatch(*one), state, at_B, weight) for at_B, *one in zip(which, inputs, *others, strict=True))


def recurrent_minibatches(
    rows: Minibatch, recurrence: Recurrence, size: int, generator: torch.Generator, ranks: Ranks
) -> Iterator[Part]:
    """Yields minibatches of `size` (at least one) shuffled sequences, or one of all; incomplete ones are left out."""
    for which_q in shuffled_parts(len(recurrence.lengths), size, generator):
        ours_q = which_q[ranks.part(len(which_q))]
        whole_B = torch.from_numpy(sequences.rows_of(recurrence.first[which_q], recurrence.lengths[which_q]))
        whole_B, (at_B, state) = over((whole_B, recurrence.select(ours_q)), rows.log_prob.device)
        yield Part(rows.at(at_B), state, whole_B, ranks.weight(len(which_q), len(at_B), len(whole_B)))


def shuffled_parts(count: int, size: int, generator: torch.Generator) -> Numbers:
    """Returns [parts, size] the numbers below `count` in a random order; `size` is limited to 1 to `count`."""
    size = min(max(1, size), count)
    order: Numbers = torch.randperm(count, generator=generator)[: count // size * size].numpy()
    return order.reshape(-1, size)


def rows_at_once(inputs: Inputs) -> int:
    """Returns how many rows fit in the CPU's cache, or at once on another device, which has more memory than that."""
    if inputs[0].device != CPU:
        return max(1, _BYTES_THERE // max(1, *map(_row_bytes, inputs)))
    return max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE // max(1, *map(_row_bytes, inputs))))


def _row_bytes(column: Tensor) -> int:
    return math.prod(column.shape[1:]) * column.element_size()


def _shuffled(column: Tensor, which: Tensor) -> Iterable[Tensor]:
    """Yields the rows of each minibatch: views of one gather, unless that would copy a lot of memory."""
    if _row_bytes(column) < _WIDE:
        return torch.split(column.index_select(0, which.flatten()), which.shape[1])
    return (column.index_select(0, at_B) for at_B in which)


MOST_AGENTS: Final = 65536
"""Most agents with a memory, because those of a simulator that disconnected may never send a last segment."""


class Memories:
    """Stores the critic's memory of each agent from one segment to the next; the least recently updated go first.

    An actor's memory travels with the steps, because acting computed it. A critic never acts: its memory of an agent is
    computed when values are estimated, in the order of the agent's segments, as in ML-Agents.

    Args:
        size: values in each memory.
        limit: most agents.
    """

    def __init__(self, size: int, limit: int = MOST_AGENTS) -> None:
        self._size = size
        self._limit = limit
        self._by_episode: dict[int, Floats] = {}  # in the order of their updates

    def __len__(self) -> int:
        """Returns the number of agents with a memory."""
        return len(self._by_episode)

    def recall(self, episodes: Numbers) -> Floats:
        """Returns [n, size] the memory of each agent episode, zeros for unknown ones."""
        found = np.zeros((len(episodes), self._size), np.float32)
        for row, episode in enumerate(episodes.tolist()):
            found[row] = self._by_episode.get(episode, 0.0)
        return found

    def keep(self, episodes: Numbers, memories: Floats, ended: Flags) -> None:
        """Stores the memories of agent episodes, and removes those that have ended.

        Args:
            episodes: [n] each once.
            memories: [n, size].
            ended: [n] the agent episode is over.
        """
        for episode, memory, is_over in zip(episodes.tolist(), memories.copy(), ended.tolist(), strict=True):
            self._by_episode.pop(episode, None)
            if not is_over:
                self._by_episode[episode] = memory
        for episode in list(self._by_episode)[: max(0, len(self) - self._limit)]:
            del self._by_episode[episode]


class Tracks:
    """Orders the sequences of each agent (or group) of a batch by time, and holds the critic's memory of it meanwhile.

    Args:
        agent_episodes: [s] number of each segment's agent episode.
        ended: [s] the agent episode ended with the segment.
        segment_q: segment of each sequence.
        kept: memories from earlier batches.
    """

    def __init__(self, agent_episodes: Numbers, ended: Flags, segment_q: Numbers, kept: Memories) -> None:
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
