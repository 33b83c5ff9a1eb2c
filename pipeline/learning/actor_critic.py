# ruff: noqa: N806 (names end in their shape)
"""This module holds the actor and the critic of one behavior, and evaluates whole batches before an update.

`ActorCritic` is what all algorithms share, `AgentNetworks` adds a critic of single agents; for one of groups see
`group_networks`.

B rows of a minibatch, R rows of the batch, s segments, q sequences, F features, H means and logits, S reward signals, P
features of a previous action, M values of a recurrent memory.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sparring.pipeline.assembly import sequences
from sparring.pipeline.learning.buffer import Batch
from sparring.pipeline.learning.minibatches import Memories, Recurrence, RecurrentState, Tracks, in_parts, rows_at_once
from sparring.pipeline.learning.settings import TrainerSettings
from sparring.pipeline.networks.actor import Actor, Critic
from sparring.pipeline.networks.arrays import previous_features
from sparring.pipeline.networks.device import back, over
from sparring.pipeline.networks.encoders import Inputs
from sparring.pipeline.networks.layers import Layout
from sparring.pipeline.specs import BehaviorSpec, Floats, Numbers


class ActorCritic:
    """Combines the networks of one behavior.

    Attributes:
        actor: the policy.
        modules: all networks by name.
        memory: M; 0 for networks without memory.
        signals: S.

    Args:
        actor: the policy.
        critic: None if it is a part of the actor, or there is none.
        settings: the learner's settings.
    """

    def __init__(self, actor: Actor, critic: nn.Module | None, settings: TrainerSettings) -> None:
        memory = settings.network_settings.memory
        self.actor = actor
        self.modules = nn.ModuleDict({"actor": actor} if critic is None else {"actor": actor, "critic": critic})
        self.memory = 0 if memory is None else memory.memory_size
        self.signals = len(settings.reward_signals.named())

    @property
    def needs_graph(self) -> bool:
        """Returns whether autograd differentiates some of the networks."""
        return True

    def previous(self, batch: Batch, done: Floats) -> Tensor:
        """Returns [R + s, P] the action before each decision and before the observation after each segment.

        Args:
            batch: segments, of which some may have no row.
            done: [R, P] or more, features of the action of each decision.
        """
        assert batch.carried is not None
        rows, lengths = batch.steps, batch.lengths
        before = np.zeros((rows + len(lengths), done.shape[1]), done.dtype)
        before[1:rows] = done[: rows - 1]
        before[batch.starts()] = batch.carried[:, self.memory :]
        stepped = lengths > 0
        before[rows:][stepped] = done[np.cumsum(lengths)[stepped] - 1]
        return torch.from_numpy(before)


class Prepared(NamedTuple):
    """Holds a batch's observations as the networks read them.

    Attributes:
        joined: [R, ...] before normalization.
        inputs: [R, ...], on the device.
        following: [s, ...] the observations after each segment, on the device.
    """

    joined: Inputs
    inputs: Inputs
    following: Inputs


class Estimates(NamedTuple):
    """Holds the values of a batch's observations.

    Attributes:
        values: [R, S].
        next_values: [s, S] of the observations after each segment.
        recurrence: the sequences; None for networks without memory.
    """

    values: Floats
    next_values: Floats
    recurrence: Recurrence | None


class AgentNetworks(ActorCritic):
    """Combines an actor and a critic of single agents.

    Attributes:
        critic: None if it is shared: the actor's last outputs are the values then.

    Args:
        spec: observations and actions of the behavior.
        settings: the learner's settings.
        generator: random source of the initial weights.

    Raises:
        Unsupported: no network can be built for the spec or the settings.
    """

    def __init__(self, spec: BehaviorSpec, settings: TrainerSettings, generator: torch.Generator) -> None:
        signals = len(settings.reward_signals.named())
        network, shared = settings.network_settings, settings.hyperparameters.shares_critic
        actor = settings.hyperparameters.actor(spec, network, generator, signals if shared else 0)
        self.critic = None if shared else Critic(spec, network, signals, generator)
        super().__init__(actor, self.critic, settings)
        self._valuing: Actor | Critic = actor if self.critic is None else self.critic
        self._values_from = actor.outputs if self.critic is None else 0
        self._memories = Memories(self.memory)

    @property
    def needs_graph(self) -> bool:
        """Returns whether autograd differentiates some of the networks."""
        return self.actor.needs_graph or self._valuing.needs_graph

    def prepare(self, batch: Batch) -> Prepared:
        """Prepares a batch's observations: the part of the networks that no gradient flows through."""
        encoder = self.actor.encoder
        joined, following = encoder.join(batch.observations), encoder.join(batch.next_observations)
        before = after = None
        if encoder.previous:
            done = previous_features(self.actor.actions, batch.continuous, batch.discrete, self.actor.action_limit)
            before, after = torch.split(self.previous(batch, done), [batch.steps, len(batch.lengths)])
        inputs, following = encoder.prepare(joined, before), encoder.prepare(following, after)
        return Prepared(joined, *over((inputs, following), self.actor.device))

    def value(self, inputs: Inputs) -> Tensor:
        """Returns the values [B, S] of prepared observations, by networks without memory."""
        values_BS: Tensor = self._valuing(inputs)[:, self._values_from :]
        return values_BS

    def run(self, inputs: Inputs, state: RecurrentState) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor], object]]:
        """Evaluates means and logits [B, H], and values [B, S], for differentiation, under `no_grad`.

        The function propagates gradients of both to the parameters.
        """
        outputs_BO, to_actor = self.actor.traced(inputs, state.layout, state.actor)
        if self.critic is None:
            head_BH, values_BS = outputs_BO.tensor_split([self.actor.outputs], 1)
            return head_BH, values_BS, lambda *gradients: to_actor(torch.cat(gradients, 1))
        values_BS, to_critic = self.critic.traced(inputs, state.layout, state.critic)

        def backward_fn(to_head: Tensor, to_values: Tensor) -> None:
            to_actor(to_head)
            to_critic(to_values)

        return outputs_BO, values_BS, backward_fn

    @torch.no_grad()
    def estimate(self, prepared: Prepared, batch: Batch) -> Estimates:
        """Returns the values of all observations, and the critic's memory before each sequence if it has one."""
        if self.memory:
            return self._recurrent_estimate(prepared, batch)
        return Estimates(self._plain_values(prepared.inputs), self._plain_values(prepared.following), None)

    # ---------------------------------------------------------------- inside

    def _plain_values(self, inputs: Inputs) -> Floats:
        """Returns values [R, S], computed for `rows_at_once` of them at a time."""
        parts = zip(*(torch.split(column, rows_at_once(inputs)) for column in inputs), strict=True)
        values_RS: Floats = back(torch.cat([self.value(rows) for rows in parts]))
        return values_RS

    def _recurrent_estimate(self, prepared: Prepared, batch: Batch) -> Estimates:
        """Evaluates recurrent networks: the first sequences of all agents together, then all second ones, and so on."""
        assert batch.carried is not None
        length = batch.sequence_length
        first_q, lengths_q = sequences.divide(batch.lengths, length)
        counts_s = sequences.counts(batch.lengths, length)
        segment_q = np.repeat(np.arange(len(counts_s)), counts_s)
        last_q = np.isin(np.arange(len(segment_q)), np.cumsum(counts_s) - 1)
        values = np.empty((batch.steps, self.signals), np.float32)
        next_values = np.empty((len(counts_s), self.signals), np.float32)
        memory_qM = actor_qM = batch.carried[:, : self.memory]
        most, tracks = max(1, rows_at_once(prepared.inputs) // length), None
        if self.critic is not None:
            tracks, memory_qM = Tracks(batch.agent_episodes, batch.ended, segment_q, self._memories), actor_qM.copy()
        for which_q in in_parts(np.arange(len(segment_q)), most) if tracks is None else tracks.rounds(most):
            if tracks is not None:
                memory_qM[which_q] = tracks[which_q]
            rows = sequences.rows_of(first_q[which_q], lengths_q[which_q])
            values[rows], after_qM = self._run(prepared.inputs, rows, lengths_q[which_q], memory_qM[which_q])
            if tracks is not None:
                tracks[which_q] = after_qM
            ending = last_q[which_q]
            segments = segment_q[which_q][ending]
            if len(segments):
                single = np.ones(len(segments), np.int64)
                next_values[segments], _ = self._run(prepared.following, segments, single, after_qM[ending])
        if tracks is not None:
            tracks.keep()
        recurrence = Recurrence(first_q, lengths_q, actor_qM, None if tracks is None else memory_qM)
        return Estimates(values, next_values, recurrence)

    def _run(self, inputs: Inputs, rows: Numbers, lengths: Numbers, memory: Floats) -> tuple[Floats, Floats]:
        """Returns the values of some rows, sequence by sequence, and the memory after each sequence."""
        columns = torch.from_numpy(rows), Layout(lengths), torch.from_numpy(memory)
        (at, layout, before), body = over(columns, self.actor.device), self._valuing.recurrent
        assert body is not None
        selected = tuple(column.index_select(0, at) for column in inputs)
        outputs, after = body(self._valuing.encoder(selected), layout, before)
        return back(outputs[:, self._values_from :]), back(after)
