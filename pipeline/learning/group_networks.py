# ruff: noqa: N806 (names end in their shape)
"""This module holds the actor and group critic of one behavior, and evaluates whole batches before an update.

g group segments; s segments of members; r rows of our own members; K timesteps; U windows of group time, of one
timestep each without memory; q sequences, of one row each without memory; S reward signals; M values of a recurrent
memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sparring.pipeline.assembly import sequences
from sparring.pipeline.learning.actor_critic import Tracks
from sparring.pipeline.learning.group_buffer import GroupBatch, GroupMembers
from sparring.pipeline.learning.group_index import GroupIndex
from sparring.pipeline.learning.memories import Memories
from sparring.pipeline.learning.settings import TrainerSettings
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.networks.arrays import previous_features
from sparring.pipeline.networks.device import back, over
from sparring.pipeline.networks.encoders import Encoder, Inputs
from sparring.pipeline.networks.group_critic import GroupCritic, GroupRecurrentState, GroupTimesteps
from sparring.pipeline.networks.recurrent import Layout
from sparring.pipeline.networks.settings import HEADS
from sparring.pipeline.specs import BehaviorSpec

_BYTES_AT_ONCE: Final = 16 * 2**20
_TIMESTEPS_AT_ONCE: Final = 1024

Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GroupWindows:
    """Divides a batch's timesteps and rows into windows of group time, the units of a minibatch.

    Attributes:
        group: [U] group segment of each.
        first: [U] its first timestep.
        lengths: [U] its timesteps.
        weights: [U] rows of our own that were decided in it; at least 1 if a member is present, 0 if none is.
        first_q: [q] first row of each sequence, window by window.
        lengths_q: [q] its rows.
        sequences: [U] number of sequences in each.
        by_window: [q] number of each sequence in the order of the rows.
    """

    group: Numbers
    first: Numbers
    lengths: Numbers
    weights: Numbers
    first_q: Numbers
    lengths_q: Numbers
    sequences: Numbers
    by_window: Numbers

    @classmethod
    def of(cls, batch: GroupBatch, index: GroupIndex, length: int) -> GroupWindows:
        """Divides a batch into windows of `length` group times."""
        counts_g = sequences.counts(batch.spans, length)
        first, lengths = sequences.divide(batch.spans, length)
        window_of = np.zeros(int(index.last[-1]) + 1, np.int64)
        window_of[index.in_series] = np.repeat(np.arange(len(lengths)), lengths)
        group = np.repeat(np.arange(len(counts_g)), counts_g)
        first_q = batch.starts()
        lengths_q = np.diff(first_q, append=batch.steps)
        window_q = window_of[index.timesteps[first_q]]
        by_window = np.argsort(window_q, kind="stable")
        rows = np.bincount(window_of[index.timesteps], minlength=len(lengths))
        occupied = np.bincount(window_of[index.in_series], index.counts[index.in_series], len(lengths)) > 0
        return cls(
            group=group,
            first=first + group,  # each earlier segment has one more timestep: the one after it
            lengths=lengths,
            weights=np.maximum(rows, occupied),
            first_q=first_q[by_window],
            lengths_q=lengths_q[by_window],
            sequences=np.bincount(window_q, minlength=len(lengths)),
            by_window=by_window,
        )

    def timesteps(self, which: Numbers) -> Numbers:
        """Returns the timesteps of some windows, one window after the other."""
        return sequences.rows_of(self.first[which], self.lengths[which])

    def of_windows(self, which: Numbers) -> Numbers:
        """Returns the sequences of some windows, one window after the other, in the order of `first_q`."""
        starts = np.cumsum(self.sequences) - self.sequences
        return sequences.rows_of(starts[which], self.sequences[which])


@dataclass(frozen=True, slots=True)
class PreparedGroups:
    """Holds a group batch as the networks read it.

    Attributes:
        index: the members present at each timestep.
        windows: units of a minibatch.
        joined: by behavior name, observations before normalization: of decisions, then after each segment.
        inputs: the same after normalization.
        actions: the features of the actions in these rows.
        decisions: by behavior name, how many rows are decisions.
    """

    index: GroupIndex
    windows: GroupWindows
    joined: list[Inputs | None]
    inputs: list[Inputs | None]
    actions: list[Tensor | None]
    decisions: list[int]
    _places: Numbers = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_places", np.zeros(len(self.index.counts), np.int64))

    def gather(self, timesteps: Numbers, rows: Numbers) -> GroupTimesteps:
        """Returns the critic's inputs at some timesteps.

        Args:
            timesteps: at each of them a member is present.
            rows: our own decisions at these timesteps, whose baselines are wanted.
        """
        index, counts = self.index, self.index.counts[timesteps]
        m, n, j = len(timesteps), max(1, int(counts.max())), int(index.own[timesteps].max())
        place = None
        if not (counts == n).all():
            place = np.arange(int(counts.sum())) + np.repeat(np.arange(m) * n - (np.cumsum(counts) - counts), counts)
        token_rows, token_names = index.tokens(timesteps)
        inputs: list[Inputs | None] = []
        actions: list[Tensor | None] = []
        gathered, before = np.empty_like(token_rows), 0
        for name, (columns, done) in enumerate(zip(self.inputs, self.actions, strict=True)):
            mine = token_names == name if len(self.inputs) > 1 else slice(None)
            needed, back = np.unique(token_rows[mine], return_inverse=True)
            gathered[mine] = back + before
            before += len(needed)
            at = torch.from_numpy(needed)
            here = columns is not None and done is not None and len(needed) > 0
            inputs.append(tuple(column.index_select(0, at) for column in columns or ()) if here else None)
            actions.append(done.index_select(0, at) if here and done is not None else None)
        self._places[timesteps] = np.arange(m)
        return GroupTimesteps(
            inputs=tuple(inputs),
            actions=tuple(actions),
            rows=torch.from_numpy(gathered),
            places=None if place is None else torch.from_numpy(place),
            shape=(m, n, j),
            counts=torch.from_numpy(counts.astype(np.float32)),
            decided=torch.from_numpy(self._places[index.timesteps[rows]] * j + index.places[rows]),
        )


@dataclass(frozen=True, slots=True)
class GroupEstimates:
    """Holds the critic's outputs for a batch.

    Attributes:
        values: [K, S] of all timesteps, 0 if no member is present.
        baselines: [r, S].
        groups: [U, M] memory at the start of each window; None without memory.
        members: [q, M] memory at the start of each sequence, ordered as `GroupWindows.first_q`; None likewise.
    """

    values: Floats
    baselines: Floats
    groups: Floats | None = None
    members: Floats | None = None


class GroupNetworks:
    """Combines the networks of one behavior.

    Attributes:
        actor: the policy.
        critic: estimates values of groups and baselines of members.
        modules: both networks by name.
        specs: specs of the behavior names that the critic knows, our own first.

    Args:
        behavior: our own name.
        spec: its observations and actions.
        settings: the learner's settings.
        generator: random source of the initial weights.

    Raises:
        Unsupported: no network can be built for the spec or the settings.
    """

    def __init__(
        self, behavior: str, spec: BehaviorSpec, settings: TrainerSettings, generator: torch.Generator
    ) -> None:
        network = settings.network_settings
        self.specs: dict[str, BehaviorSpec] = {behavior: spec}
        self.actor = Actor(spec, network, generator)
        self.critic = GroupCritic(behavior, self.specs, network, tuple(settings.reward_signals.named()), generator)
        self.modules = nn.ModuleDict({"actor": self.actor, "critic": self.critic})
        self.memory = 0 if network.memory is None else network.memory.memory_size
        self._units = network.hidden_units
        self._signals = len(settings.reward_signals.named())
        self._groups = Memories(self.memory)
        self._members = Memories(self.memory)
        self._generator = generator

    def register(self, specs: Mapping[str, BehaviorSpec]) -> None:
        """Registers other behavior names that share groups with ours.

        Raises:
            Unsupported: no encoder can be built for one of them.
        """
        for name, spec in specs.items():
            self.critic.add(name, spec, self._generator)
            self.specs[name] = spec

    def prepare(self, batch: GroupBatch) -> PreparedGroups:
        """Prepares a batch: the part of the networks that no gradient flows through."""
        index = GroupIndex(batch, list(self.specs))
        prepared = PreparedGroups(index, GroupWindows.of(batch, index, max(1, batch.sequence_length)), [], [], [], [])
        for name, spec in self.specs.items():
            own = name == self.critic.names[0]
            members = batch.own if own else batch.teammates.get(name)
            if members is None or not len(members.lengths):
                prepared.joined.append(None)
                prepared.inputs.append(None)
                prepared.actions.append(None)
                prepared.decisions.append(0)
                continue
            encoder = self.actor.encoder if own else self.critic.encoder(name)
            joined = encoder.join(_both(members.observations, members.next_observations))
            done = _done(members, spec, self.actor.action_limit)
            before = self._before(batch, done) if own and encoder.previous else None
            prepared.joined.append(joined)
            prepared.inputs.append(encoder.prepare(joined, before))
            prepared.actions.append(torch.from_numpy(done))
            prepared.decisions.append(len(members.times))
        return prepared

    def update(self, prepared: PreparedGroups) -> None:
        """Adds a batch to the running statistics; it is called after the last minibatch."""
        for name, joined, decisions in zip(self.specs, prepared.joined, prepared.decisions, strict=True):
            encoder: Encoder = self.actor.encoder if name == self.critic.names[0] else self.critic.encoder(name)
            if joined is not None and decisions:
                encoder.update(tuple(column[:decisions] for column in joined))

    @torch.no_grad()
    def estimate(self, prepared: PreparedGroups, batch: GroupBatch) -> GroupEstimates:
        """Returns values of all timesteps and baselines of all decisions, and the memories of recurrent networks."""
        self.critic.raise_largest(int(prepared.index.counts.max()))
        if self.memory:
            return self._recurrent_estimate(prepared, batch)
        index = prepared.index
        values = np.zeros((len(index.counts), self._signals), np.float32)
        baselines = np.zeros((batch.steps, self._signals), np.float32)
        by_timestep = np.argsort(index.timesteps, kind="stable")
        starts = np.cumsum(index.decisions) - index.decisions
        # By size, so that groups of different sizes need little padding.
        order = np.argsort(index.counts, kind="stable")[np.count_nonzero(index.counts == 0) :]
        for timesteps in np.array_split(order, -(-len(order) // self._at_once(index))):
            rows = by_timestep[sequences.rows_of(starts[timesteps], index.decisions[timesteps])]
            found, expected = self.critic(over(prepared.gather(timesteps, rows), self.actor.device))
            values[timesteps], baselines[rows] = back(found), back(expected)
        return GroupEstimates(values, baselines)

    # ---------------------------------------------------------------- inside

    def _at_once(self, index: GroupIndex) -> int:
        """Returns how many timesteps fit in memory at once."""
        n, j = int(index.counts.max(initial=1)), int(index.own.max(initial=1))
        of_timestep = 4 * max(1, j) * n * max(self._units, HEADS * n)
        return max(1, min(_TIMESTEPS_AT_ONCE, _BYTES_AT_ONCE // of_timestep))

    def _before(self, batch: GroupBatch, done: Floats) -> Tensor:
        """Returns [r + s, P] the action before each decision and before the observation after each segment."""
        assert batch.carried is not None
        rows, lengths = batch.steps, batch.own.lengths
        before = np.zeros_like(done)
        before[1:rows] = done[: rows - 1]
        before[batch.starts()] = batch.carried[:, self.memory :]
        stepped = lengths > 0
        before[rows:][stepped] = done[np.cumsum(lengths)[stepped] - 1]
        return torch.from_numpy(before)

    def _recurrent_estimate(self, prepared: PreparedGroups, batch: GroupBatch) -> GroupEstimates:
        """Evaluates recurrent networks: the first windows of all groups together, then all second ones, and so on."""
        index, windows = prepared.index, prepared.windows
        values = np.zeros((len(index.counts), self._signals), np.float32)
        baselines = np.zeros((batch.steps, self._signals), np.float32)
        segment_r = np.repeat(np.arange(len(batch.own.lengths)), batch.own.lengths)
        groups = Tracks(batch.numbers, batch.over, windows.group, self._groups)
        members = Tracks(batch.agent_episodes, batch.ended, segment_r[windows.first_q], self._members)
        at_windows = np.zeros((len(windows.first), self.memory), np.float32)
        at_sequences = np.zeros((len(windows.first_q), self.memory), np.float32)
        last = np.isin(np.arange(len(windows.group)), np.cumsum(np.bincount(windows.group)) - 1)
        most = max(1, self._at_once(index) // batch.sequence_length)
        for which in (some for every in groups.rounds() for some in np.array_split(every, -(-len(every) // most))):
            of_q = windows.of_windows(which)
            at_windows[which] = groups.memories[groups.of_q[which]]
            at_sequences[of_q] = members.memories[members.of_q[of_q]]
            inputs, state, timesteps, rows = self.recall(prepared, which, at_windows, at_sequences)
            found, expected, after = self.critic.remember(*over((inputs, state), self.actor.device))
            values[timesteps], baselines[rows] = back(found), back(expected)
            of_groups, of_members = np.split(back(after), [state.baselines])
            groups.memories[groups.of_q[which]], members.memories[members.of_q[of_q]] = of_groups, of_members
            ending = which[last[which]]
            following = index.last[windows.group[ending]]
            there = index.counts[following] > 0
            if there.any():
                after_M = groups.memories[groups.of_q[ending[there]]]
                values[following[there]] = self._following(prepared, following[there], after_M)
        values[index.counts == 0] = 0.0
        groups.keep(self._groups)
        members.keep(self._members)
        return GroupEstimates(values, baselines, at_windows, at_sequences)

    def _following(self, prepared: PreparedGroups, timesteps: Numbers, memory: Floats) -> Floats:
        """Returns the values after each segment; stores no memory, because the next segment begins there."""
        inputs = prepared.gather(timesteps, np.empty(0, np.int64))
        layout = Layout(np.ones(len(timesteps), np.int64))
        state = GroupRecurrentState(layout, torch.from_numpy(memory), len(timesteps))
        found, _, _ = self.critic.remember(*over((inputs, state), self.actor.device))
        values: Floats = back(found)
        return values

    def recall(
        self, prepared: PreparedGroups, which: Numbers, at_windows: Floats, at_sequences: Floats
    ) -> tuple[GroupTimesteps, GroupRecurrentState, Numbers, Numbers]:
        """Returns a recurrent critic's inputs for some windows, its memories there, their timesteps and rows."""
        windows = prepared.windows
        timesteps, of_q = windows.timesteps(which), windows.of_windows(which)
        rows = sequences.rows_of(windows.first_q[of_q], windows.lengths_q[of_q])
        layout = Layout(np.concatenate([windows.lengths[which], windows.lengths_q[of_q]]))
        memory = torch.from_numpy(np.concatenate([at_windows[which], at_sequences[of_q]]))
        return prepared.gather(timesteps, rows), GroupRecurrentState(layout, memory, len(which)), timesteps, rows


def _both(rows: tuple[NDArray[np.float32], ...], following: tuple[NDArray[np.float32], ...]) -> list[Floats]:
    return [np.concatenate(columns) for columns in zip(rows, following, strict=True)]


def _done(members: GroupMembers, spec: BehaviorSpec, limit: float) -> Floats:
    """Returns [r + s, features] the action of each decision and the one after each segment; zeros without actions."""
    actions, rows = spec.actions, len(members.times) + len(members.next_times)
    continuous = np.concatenate([members.continuous, members.next_continuous])
    discrete = np.concatenate([members.discrete, members.next_discrete])
    if not continuous.shape[1] + discrete.shape[1]:
        return np.zeros((rows, actions.continuous + actions.mask_size), np.float32)
    return previous_features(actions, continuous, discrete, limit)
