# ruff: noqa: N803, N806 (names end in their shape)
"""This module holds the actor and the critic of one behavior, and evaluates whole batches before an update.

B rows of a minibatch, R rows of the batch, s segments, q sequences, F features, H means and logits, S reward signals, P
features of a previous action, M values of a recurrent memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sparring.pipeline.assembly import sequences
from sparring.pipeline.learning.buffer import Batch
from sparring.pipeline.learning.memories import Memories
from sparring.pipeline.learning.parameters import BackwardFn
from sparring.pipeline.learning.settings import TrainerSettings
from sparring.pipeline.networks.actor import Actor, Critic
from sparring.pipeline.networks.arrays import previous_features
from sparring.pipeline.networks.device import back, over
from sparring.pipeline.networks.encoders import Inputs
from sparring.pipeline.networks.perceptron import Perceptron, accumulate
from sparring.pipeline.networks.recurrent import Layout
from sparring.pipeline.specs import Array, BehaviorSpec

_ROWS_AT_ONCE: Final = 1024
_BYTES_AT_ONCE: Final = 4 * 2**20

Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]


class RecurrentState(NamedTuple):
    """Holds the memories of the networks at the start of each sequence of a minibatch.

    Attributes:
        layout: how the rows form sequences.
        actor: [q, M].
        critic: [q, M]; None if actor and critic share a body.
    """

    layout: Layout
    actor: Tensor
    critic: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrence:
    """Describes the sequences of a batch.

    Attributes:
        first: [q] first row of each.
        lengths: [q] rows of each.
        actor: [q, M] memory of the actor at the start, stored when it acted.
        critic: [q, M] memory of the critic at the start; None if actor and critic share a body.
    """

    first: Numbers
    lengths: Numbers
    actor: Floats
    critic: Floats | None

    def holding(self, wanted_r: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Returns [q] which sequences contain a wanted row."""
        within = wanted_r[sequences.rows_of(self.first, self.lengths)]
        found: NDArray[np.bool_] = np.logical_or.reduceat(within, np.cumsum(self.lengths) - self.lengths)
        return found

    def select(self, which_q: Array) -> tuple[Tensor, RecurrentState]:
        """Returns the rows [B] of the given sequences, one after the other, and the memories at their starts."""
        lengths = self.lengths[which_q]
        critic = None if self.critic is None else torch.from_numpy(self.critic[which_q])
        state = RecurrentState(Layout(lengths), torch.from_numpy(self.actor[which_q]), critic)
        return torch.from_numpy(sequences.rows_of(self.first[which_q], lengths)), state


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Holds a batch's observations as the networks read them.

    Attributes:
        joined: [R, ...] before normalization.
        inputs: [R, ...].
        following: [s, ...] the observations after each segment.
    """

    joined: Inputs
    inputs: Inputs
    following: Inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimates:
    """Holds the values of a batch's observations.

    Attributes:
        values: [R, S].
        next_values: [s, S] of the observations after each segment.
        recurrence: the sequences; None for networks without memory.
    """

    values: Floats
    next_values: Floats
    recurrence: Recurrence | None


class ForwardPass(NamedTuple):
    """Holds the outputs of the networks for a minibatch, and their backward pass.

    Attributes:
        head: [B, H] means and logits.
        values: [B, S].
        backward_fn: propagates gradients of head, log sigma and values to the parameters.
    """

    head: Tensor
    values: Tensor
    backward_fn: BackwardFn


class ActorCritic:
    """Combines the networks of one behavior.

    Attributes:
        actor: its last outputs are the values if the critic is shared.
        critic: None if it is shared.
        modules: all networks by name.

    Args:
        spec: observations and actions of the behavior.
        settings: the learner's settings.
        generator: random source of the initial weights.

    Raises:
        Unsupported: no network can be built for the spec or the settings.
    """

    def __init__(self, spec: BehaviorSpec, settings: TrainerSettings, generator: torch.Generator) -> None:
        signals = tuple(settings.reward_signals.named())
        network, shared = settings.network_settings, settings.hyperparameters.shared_critic
        self.actor = Actor(spec, network, generator, values=len(signals) if shared else 0)
        self.critic = None if shared else Critic(spec, network, signals, generator)
        self.modules = nn.ModuleDict({"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic}))
        self._memory = 0 if network.memory is None else network.memory.memory_size
        self._memories = Memories(self._memory)
        self._signals = len(signals)

    def prepare(self, batch: Batch) -> Prepared:
        """Prepares a batch's observations: the part of the networks that no gradient flows through."""
        encoder = self.actor.encoder
        joined, following = encoder.join(batch.observations), encoder.join(batch.next_observations)
        before = after = None
        if encoder.previous:
            before, after = map(torch.from_numpy, self._previous(batch))
        return Prepared(
            joined=joined, inputs=encoder.prepare(joined, before), following=encoder.prepare(following, after)
        )

    def value(self, inputs: Inputs, state: RecurrentState | None = None) -> Tensor:
        """Returns the values [B, S] of prepared observations."""
        return self.both(inputs, state)[1] if self.critic is None else self._critic_values(self.critic, inputs, state)

    def both(self, inputs: Inputs, state: RecurrentState | None = None) -> tuple[Tensor, Tensor]:
        """Returns means and logits [B, H], and values [B, S], in one pass if the critic is shared."""
        layout, memory = (None, None) if state is None else (state.layout, state.actor)
        outputs_BO = self.actor(inputs, layout, memory)
        if self.critic is not None:
            return outputs_BO, self._critic_values(self.critic, inputs, state)
        return outputs_BO[:, : self.actor.outputs], outputs_BO[:, self.actor.outputs :]

    def run(self, inputs: Inputs, state: RecurrentState | None = None) -> ForwardPass:
        """Evaluates `both` for differentiation, under `no_grad`; perceptrons on vectors alone need no graph."""
        actor, critic = self.actor.body, None if self.critic is None else self.critic.body
        if self.actor.encoder.plain and isinstance(actor, Perceptron) and isinstance(critic, Perceptron | None):
            return self._run_perceptrons(actor, critic, inputs[0])
        with torch.enable_grad():
            return ForwardPass(*self.both(inputs, state), torch.autograd.backward)

    @torch.no_grad()
    def estimate(self, prepared: Prepared, batch: Batch) -> Estimates:
        """Returns the values of all observations, and the critic's memory before each sequence if it has one."""
        if self._memory:
            return self._recurrent_estimate(prepared, batch)
        return Estimates(
            values=self._plain_values(prepared.inputs),
            next_values=self._plain_values(prepared.following),
            recurrence=None,
        )

    # ---------------------------------------------------------------- inside

    def _run_perceptrons(self, actor: Perceptron, critic: Perceptron | None, rows_BF: Tensor) -> ForwardPass:
        outputs_BO, to_actor = actor.traced(rows_BF)
        log_sigma_C, own = self.actor.log_sigma, self.actor.outputs
        if critic is None:

            def backward_shared(_outputs: object, gradients: Sequence[Tensor]) -> None:
                to_head_BH, to_log_sigma_C, to_values_BS = gradients
                to_actor(torch.cat((to_head_BH, to_values_BS), 1))
                accumulate(log_sigma_C, to_log_sigma_C)

            return ForwardPass(outputs_BO[:, :own], outputs_BO[:, own:], backward_shared)
        values_BS, to_critic = critic.traced(rows_BF)

        def backward_fn(_outputs: object, gradients: Sequence[Tensor]) -> None:
            to_head_BH, to_log_sigma_C, to_values_BS = gradients
            to_actor(to_head_BH)
            to_critic(to_values_BS)
            accumulate(log_sigma_C, to_log_sigma_C)

        return ForwardPass(outputs_BO, values_BS, backward_fn)

    @staticmethod
    def _critic_values(critic: Critic, inputs: Inputs, state: RecurrentState | None) -> Tensor:
        layout, memory = (None, None) if state is None else (state.layout, state.critic)
        values_BS: Tensor = critic(inputs, layout, memory)
        return values_BS

    def _previous(self, batch: Batch) -> tuple[Floats, Floats]:
        """Returns [R, P] the action before each step and [s, P] the last action of each segment."""
        assert batch.carried is not None
        done_RP = previous_features(self.actor.actions, batch.continuous, batch.discrete, self.actor.action_limit)
        before_RP = np.empty_like(done_RP)
        before_RP[1:] = done_RP[:-1]
        first_q, _ = sequences.divide(batch.lengths, batch.sequence_length)
        before_RP[first_q] = batch.carried[:, self._memory :]
        return before_RP, done_RP[np.cumsum(batch.lengths) - 1]

    def _plain_values(self, inputs: Inputs) -> Floats:
        """Returns values [R, S], computed for as many rows at a time as fit in the CPU's cache."""
        parts = zip(*(torch.split(column, rows_at_once(inputs)) for column in inputs), strict=True)
        values_RS: Floats = back(torch.cat([self.value(over(rows, self.actor.device)) for rows in parts]))
        return values_RS

    def _recurrent_estimate(self, prepared: Prepared, batch: Batch) -> Estimates:
        """Evaluates recurrent networks: the first sequences of all agents together, then all second ones, and so on."""
        assert batch.carried is not None
        length = batch.sequence_length
        first_q, lengths_q = sequences.divide(batch.lengths, length)
        counts_s = sequences.counts(batch.lengths, length)
        segment_q = np.repeat(np.arange(len(counts_s)), counts_s)
        last_q = np.isin(np.arange(len(segment_q)), np.cumsum(counts_s) - 1)
        values = np.empty((batch.steps, self._signals), np.float32)
        next_values = np.empty((len(counts_s), self._signals), np.float32)
        actor_qM = batch.carried[:, : self._memory]
        tracks = (
            Tracks(batch.agent_episodes, batch.ended, segment_q, self._memories) if self.critic is not None else None
        )
        memory_qM = actor_qM if tracks is None else np.empty_like(actor_qM)
        together = [np.arange(len(segment_q))] if tracks is None else tracks.rounds()
        most = max(1, rows_at_once(prepared.inputs) // length)
        for which_q in (part_q for all_q in together for part_q in np.array_split(all_q, -(-len(all_q) // most))):
            if tracks is not None:
                memory_qM[which_q] = tracks.memories[tracks.of_q[which_q]]
            rows = sequences.rows_of(first_q[which_q], lengths_q[which_q])
            values[rows], after_qM = self._run(prepared.inputs, rows, lengths_q[which_q], memory_qM[which_q])
            if tracks is not None:
                tracks.memories[tracks.of_q[which_q]] = after_qM
            ending = last_q[which_q]
            segments = segment_q[which_q][ending]
            if len(segments):
                single = np.ones(len(segments), np.int64)
                next_values[segments], _ = self._run(prepared.following, segments, single, after_qM[ending])
        if tracks is not None:
            tracks.keep(self._memories)
        critic = None if tracks is None else memory_qM
        recurrence = Recurrence(first=first_q, lengths=lengths_q, actor=actor_qM, critic=critic)
        return Estimates(values=values, next_values=next_values, recurrence=recurrence)

    def _run(self, inputs: Inputs, rows: Numbers, lengths: Numbers, memory: Floats) -> tuple[Floats, Floats]:
        """Returns the values of some rows, sequence by sequence, and the memory after each sequence."""
        network, values_from = (self.actor, self.actor.outputs) if self.critic is None else (self.critic, 0)
        at, body = torch.from_numpy(rows), network.recurrent
        assert body is not None
        selected = tuple(column.index_select(0, at) for column in inputs)
        selected, layout, before = over((selected, Layout(lengths), torch.from_numpy(memory)), self.actor.device)
        outputs, after = body.run(network.encoder(selected), layout, before)
        return back(outputs[:, values_from:]), back(after)


class Tracks:
    """Orders the sequences of each agent (or group) of a batch by time.

    Attributes:
        of_q: [q] number of each sequence's agent.
        memories: [agents, M] current memories of the critic.

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
        self.of_q: Numbers = of_s[segment_q]
        self._ended = np.bincount(of_s, ended) > 0
        self.memories = kept.recall(self._agent_episodes)

    def rounds(self) -> Iterator[Numbers]:
        """Yields the first sequences of all agents, then all second ones, and so on."""
        by_agent_q = np.argsort(self.of_q, kind="stable")
        counts = np.bincount(self.of_q)
        rank_q = np.empty_like(self.of_q)
        rank_q[by_agent_q] = np.arange(len(by_agent_q)) - np.repeat(np.cumsum(counts) - counts, counts)
        by_rank_q = np.argsort(rank_q, kind="stable")
        return iter(np.split(by_rank_q, np.cumsum(np.bincount(rank_q))[:-1]))

    def keep(self, kept: Memories) -> None:
        """Stores the current memory of each agent."""
        kept.keep(self._agent_episodes, self.memories, self._ended)


def row_bytes(column: Tensor) -> int:
    """Returns the number of bytes in a row."""
    return math.prod(column.shape[1:]) * column.element_size()


def rows_at_once(inputs: Inputs) -> int:
    """Returns how many rows fit in the CPU's cache."""
    return max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE // max(1, *map(row_bytes, inputs))))
