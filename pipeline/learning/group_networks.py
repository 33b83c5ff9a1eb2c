"""This module holds the actor and group critic of one behavior, and evaluates whole batches before an update.

Timesteps are the group times of all segments one after the other: each segment's own, then the one after it. A token is
a member that is present at a timestep, with the row of its last observation and action. No row is copied.

g group segments; s segments of members; r rows of our own members; K timesteps; U windows of group time, of one
timestep each without memory; q sequences, of one row each without memory; S reward signals; M values of a recurrent
memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparring.pipeline.assembly import sequences
from sparring.pipeline.learning.actor_critic import ActorCritic
from sparring.pipeline.learning.buffer import Batch
from sparring.pipeline.learning.minibatches import Memories, RecurrentState, Tracks, in_parts
from sparring.pipeline.learning.settings import TrainerSettings
from sparring.pipeline.messages.segments import TeammateSegments
from sparring.pipeline.networks.arrays import previous_features
from sparring.pipeline.networks.device import back, over
from sparring.pipeline.networks.encoders import Encoder, Inputs
from sparring.pipeline.networks.group_critic import GroupCritic, GroupTimesteps
from sparring.pipeline.networks.layers import Layout
from sparring.pipeline.networks.settings import HEADS
from sparring.pipeline.specs import BehaviorSpec, Floats, Numbers

_BYTES_AT_ONCE: Final = 16 * 2**20
_TIMESTEPS_AT_ONCE: Final = 256


class GroupIndex:
    """Indexes the group timesteps of a batch.

    Rows of a behavior name are numbered: its decisions first, then the observation after each segment.

    Attributes:
        first: [g] first timestep of each group segment.
        last: [g] the timestep after it.
        counts: [K] members present.
        own: [K] of these, with our own behavior name.
        decisions: [K] rows of our own that were decided then.
        timesteps: [r] timestep of each row.
        places: [r] position of its member among those present then; our own come first.
        in_series: [T] timesteps within the segments, in the order of `GroupSegments.rewards`.

    Args:
        batch: group segments.
        names: behavior names in the critic's order, our own first.
    """

    def __init__(self, batch: Batch, names: list[str]) -> None:
        assert batch.groups is not None
        members, spans = batch.members(names[0]), batch.groups.spans
        self.last: Numbers = np.cumsum(spans + 1, dtype=np.int64) - 1
        self.first: Numbers = self.last - spans
        self.in_series = sequences.rows_of(self.first, spans)
        found = [(at, members[name]) for at, name in enumerate(names) if name in members]
        tokens = [self._tokens(one) for _, one in found]
        sizes = [len(rows) for rows, _, _ in tokens]
        timesteps = np.concatenate([at for _, at, _ in tokens])
        order = np.argsort(timesteps, kind="stable")
        most = int(self.last[-1]) + 1
        self.counts: Numbers = np.bincount(timesteps, minlength=most)
        self.own: Numbers = np.bincount(timesteps[: sizes[0]], minlength=most)
        self._starts = np.cumsum(self.counts) - self.counts
        self._token_rows = np.concatenate([rows for rows, _, _ in tokens])[order]
        self._token_names = np.repeat([at for at, _ in found], sizes)[order]
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        decided = tokens[0][2]
        self.timesteps = timesteps[decided]
        self.places = rank[decided] - self._starts[self.timesteps]
        self.decisions: Numbers = np.bincount(self.timesteps, minlength=most)

    def tokens(self, timesteps: Numbers) -> tuple[Numbers, Numbers]:
        """Returns the rows and behavior name numbers of the members present at some timesteps, one after the other."""
        at = sequences.rows_of(self._starts[timesteps], self.counts[timesteps])
        return self._token_rows[at], self._token_names[at]

    def _tokens(self, members: TeammateSegments) -> tuple[Numbers, Numbers, Numbers]:
        """Returns row and timestep of each token, and the first token of each decision."""
        group_s = np.repeat(np.arange(len(members.members)), members.members)
        group_r = np.repeat(group_s, members.lengths)
        end_r = np.empty_like(members.times)
        end_r[:-1] = members.times[1:]
        stepped = members.lengths > 0
        end_r[np.cumsum(members.lengths)[stepped] - 1] = members.next_times[stepped]
        begin = np.concatenate([members.times, members.next_times]).astype(np.int64)
        length = np.concatenate([end_r, members.until]) - begin
        timesteps = sequences.rows_of(self.first[np.concatenate([group_r, group_s])] + begin, length)
        first = np.cumsum(length) - length
        return np.repeat(np.arange(len(begin)), length), timesteps, first[: len(members.times)]


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

    Args:
        batch: group segments.
        index: the members present.
    """

    def __init__(self, batch: Batch, index: GroupIndex) -> None:
        spans, length = index.last - index.first, max(1, batch.sequence_length)
        counts_g = sequences.counts(spans, length)
        first, self.lengths = sequences.divide(spans, length)
        count = len(first)
        window_of = np.zeros(int(index.last[-1]) + 1, np.int64)
        window_of[index.in_series] = np.repeat(np.arange(count), self.lengths)
        self.group = np.repeat(np.arange(len(counts_g)), counts_g)
        self.first: Numbers = first + self.group  # each earlier segment has one more timestep: the one after it
        first_q = batch.starts()
        window_q = window_of[index.timesteps[first_q]]
        self.by_window: Numbers = np.argsort(window_q, kind="stable")
        self.first_q = first_q[self.by_window]
        self.lengths_q: Numbers = np.diff(first_q, append=batch.steps)[self.by_window]
        self.sequences: Numbers = np.bincount(window_q, minlength=count)
        rows = np.bincount(window_of[index.timesteps], minlength=count)
        occupied = np.bincount(window_of[index.in_series], index.counts[index.in_series], count) > 0
        self.weights: Numbers = np.maximum(rows, occupied)

    def of_windows(self, which: Numbers) -> Numbers:
        """Returns the sequences of some windows, one window after the other, in the order of `first_q`."""
        starts = np.cumsum(self.sequences) - self.sequences
        return sequences.rows_of(starts[which], self.sequences[which])


class PreparedMembers(NamedTuple):
    """Holds the members of one behavior name as the networks read them: decisions, then what follows each segment.

    Attributes:
        joined: observations before normalization.
        inputs: the same after normalization, on the device.
        actions: the features of the actions in these rows, on the device.
        decisions: how many rows are decisions.
    """

    joined: Inputs
    inputs: Inputs
    actions: Tensor
    decisions: int


@dataclass(frozen=True, slots=True)
class PreparedGroups:
    """Holds a group batch as the networks read it.

    Attributes:
        index: the members present at each timestep.
        windows: units of a minibatch.
        rows: members by behavior name, our own first.
        device: of their inputs and actions, and of what is gathered.
    """

    index: GroupIndex
    windows: GroupWindows
    rows: list[PreparedMembers]
    device: torch.device

    def gather(self, timesteps: Numbers, rows: Numbers) -> GroupTimesteps:
        """Returns the critic's inputs at some timesteps.

        Args:
            timesteps: at each of them a member is present.
            rows: our own decisions at these timesteps, whose baselines are wanted.
        """
        index, counts = self.index, self.index.counts[timesteps]
        m, n, j = len(timesteps), max(1, int(counts.max())), int(index.own[timesteps].max())
        token_rows, token_names = index.tokens(timesteps)
        inputs, actions = [], []
        dense = bool((counts == n).all())
        places = np.arange(n * m).reshape(n, m).T.ravel()
        if not dense:
            places = places[(np.arange(n) < counts[:, None]).ravel()]
        slots = np.zeros(n * m, np.int64)
        alone = dense and len(self.rows) == 1 and bool((np.bincount(token_rows) < 2).all())
        if alone:
            slots[places] = token_rows
        before = 0
        for name, columns in enumerate(self.rows):
            if alone:
                needed = slots
            else:
                mine = token_names == name if len(self.rows) > 1 else slice(None)
                needed, back = np.unique(token_rows[mine], return_inverse=True)
                slots[places[mine]] = back + before
                before += len(needed)
            at = over(torch.from_numpy(needed), self.device)
            inputs.append(tuple(column.index_select(0, at) for column in columns.inputs))
            actions.append(columns.actions.index_select(0, at))
        timestep_places = np.empty(len(index.counts), np.int64)
        timestep_places[timesteps] = np.arange(m)
        columns_m = (
            None if alone else torch.from_numpy(slots),
            None if dense else torch.from_numpy(np.arange(n)[:, None] < counts),
            torch.from_numpy(counts.astype(np.float32)),
            torch.from_numpy(timestep_places[index.timesteps[rows]] + index.places[rows] * m),
        )
        return GroupTimesteps(tuple(inputs), tuple(actions), *over(columns_m, self.device), (m, n, j))


class GroupEstimates(NamedTuple):
    """Holds the critic's outputs for a batch.

    Attributes:
        values: [K, S] of all timesteps, 0 if no member is present.
        baselines: [r, S].
        groups: [U, M] memory at the start of each window; M is 0 without memory.
        members: [q, M] memory at the start of each sequence, ordered as `GroupWindows.first_q`.
    """

    values: Floats
    baselines: Floats
    groups: Floats
    members: Floats


class CriticInputs(NamedTuple):
    """Holds whole timesteps for the critic.

    Attributes:
        timesteps: [m] their numbers.
        rows: [n] decisions of ours at these timesteps.
        members: those present, with observations and actions.
        state: sequences and the memories [q, M] at their starts; None without memory.
    """

    timesteps: Numbers
    rows: Numbers
    members: GroupTimesteps
    state: tuple[Layout, Tensor] | None


class GroupNetworks(ActorCritic):
    """Combines an actor and a critic of groups.

    Attributes:
        critic: estimates values of groups and baselines of members.
        specs: specs of the behavior names that the critic knows, our own first.

    Args:
        own: our behavior name.
        spec: its observations and actions.
        settings: the learner's settings.
        generator: random source of the initial weights.

    Raises:
        Unsupported: no network can be built for the spec or the settings.
    """

    def __init__(self, own: str, spec: BehaviorSpec, settings: TrainerSettings, generator: torch.Generator) -> None:
        network = settings.network_settings
        self.specs: dict[str, BehaviorSpec] = {own: spec}
        actor = settings.hyperparameters.actor(spec, network, generator)
        self.critic = GroupCritic(self.specs, network, len(settings.reward_signals.named()), generator)
        super().__init__(actor, self.critic, settings)
        self._encoders = {own: actor.encoder}
        self._units = network.hidden_units
        self._groups = Memories(self.memory)
        self._members = Memories(self.memory)
        self._generator = generator

    @property
    def needs_graph(self) -> bool:
        """Returns whether autograd differentiates some of the networks."""
        return self.actor.needs_graph or self.critic.needs_graph

    @property
    def teammates(self) -> dict[str, BehaviorSpec]:
        """Returns the specs of the other behavior names that the critic knows."""
        return dict(islice(self.specs.items(), 1, None))

    def register(self, specs: Mapping[str, BehaviorSpec]) -> None:
        """Registers other behavior names that share groups with ours.

        Raises:
            Unsupported: no encoder can be built for one of them.
        """
        for name, spec in specs.items():
            self._encoders[name] = self.critic.add(name, spec, self._generator)
            self.specs[name] = spec

    def prepare(self, batch: Batch) -> PreparedGroups:
        """Prepares a batch: the part of the networks that no gradient flows through."""
        index, members = GroupIndex(batch, list(self.specs)), batch.members(next(iter(self.specs)))
        rows = [self._prepare(name, members.get(name), batch) for name in self.specs]
        return PreparedGroups(index, GroupWindows(batch, index), rows, self.actor.device)

    def observed(self, prepared: PreparedGroups) -> list[tuple[Encoder, Inputs]]:
        """Returns the observations at decisions, for the running statistics of each encoder."""
        return [
            (self._encoders[name], tuple(column[: rows.decisions] for column in rows.joined))
            for name, rows in zip(self.specs, prepared.rows, strict=True)
            if rows.decisions
        ]

    def run(
        self, inputs: Inputs, state: RecurrentState, critic: CriticInputs
    ) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor, Tensor, Tensor], object]]:
        """Evaluates means and logits, values and baselines for differentiation, under `no_grad`.

        The function propagates their gradients to the parameters.
        """
        head, to_actor = self.actor.traced(inputs, state.layout, state.actor)
        values, baselines, to_critic = self.critic.traced(critic.members, critic.state)

        def backward_fn(to_head: Tensor, to_values: Tensor, to_baselines: Tensor) -> None:
            to_actor(to_head)
            to_critic(to_values, to_baselines)

        return head, values, baselines, backward_fn

    @torch.no_grad()
    def estimate(self, prepared: PreparedGroups, batch: Batch) -> GroupEstimates:
        """Returns values of all timesteps and baselines of all decisions, and the memories of recurrent networks."""
        index, windows = prepared.index, prepared.windows
        self.critic.largest.clamp_(min=int(index.counts.max()))  # between updates, never during one
        estimates = GroupEstimates(
            values=np.zeros((len(index.counts), self.signals), np.float32),
            baselines=np.zeros((batch.steps, self.signals), np.float32),
            groups=np.zeros((len(windows.first), self.memory), np.float32),
            members=np.zeros((len(windows.first_q), self.memory), np.float32),
        )
        if self.memory:
            self._recurrent_estimate(prepared, batch, estimates)
            return estimates
        by_timestep = np.argsort(index.timesteps, kind="stable")
        starts = np.cumsum(index.decisions) - index.decisions
        # By size, so that groups of different sizes need little padding.
        order = np.argsort(index.counts, kind="stable")[np.count_nonzero(index.counts == 0) :]
        for timesteps in in_parts(order, self._at_once(index)):
            rows = by_timestep[sequences.rows_of(starts[timesteps], index.decisions[timesteps])]
            found, expected = self.critic(prepared.gather(timesteps, rows))
            estimates.values[timesteps], estimates.baselines[rows] = back(found), back(expected)
        return estimates

    def inputs(self, prepared: PreparedGroups, which: Numbers, estimates: GroupEstimates) -> CriticInputs:
        """Returns the critic's inputs for some windows, with the memories of `estimates`."""
        windows, state = prepared.windows, None
        of_q = windows.of_windows(which)
        timesteps = sequences.rows_of(windows.first[which], windows.lengths[which])
        rows = sequences.rows_of(windows.first_q[of_q], windows.lengths_q[of_q])
        if self.memory:
            layout = Layout(np.concatenate([windows.lengths[which], windows.lengths_q[of_q]]))
            memory = torch.from_numpy(np.concatenate([estimates.groups[which], estimates.members[of_q]]))
            state = over((layout, memory), prepared.device)
        return CriticInputs(timesteps, rows, prepared.gather(timesteps, rows), state)

    def _prepare(self, name: str, members: TeammateSegments | None, batch: Batch) -> PreparedMembers:
        """Prepares the members of a behavior name, of which there may be none."""
        encoder, spec = self._encoders[name], self.specs[name]
        actions = spec.actions
        if members is None:
            joined = encoder.join([np.empty((0, *one.shape), one.dtype) for one in spec.observations])
            nothing = torch.zeros(0, actions.continuous + actions.mask_size)
            return PreparedMembers(joined, *over((encoder.prepare(joined), nothing), self.actor.device), 0)
        pairs = zip(members.observations, members.next_observations, strict=True)
        joined = encoder.join([np.concatenate(columns) for columns in pairs])
        continuous = np.concatenate([members.continuous, members.next_continuous])
        discrete = np.concatenate([members.discrete, members.next_discrete])
        done = np.zeros((len(continuous), actions.continuous + actions.mask_size), np.float32)
        if continuous.shape[1] + discrete.shape[1]:  # some of them have acted
            done = previous_features(actions, continuous, discrete, self.actor.action_limit)
        before = self.previous(batch, done) if encoder is self.actor.encoder and encoder.previous else None
        there = over((encoder.prepare(joined, before), torch.from_numpy(done)), self.actor.device)
        return PreparedMembers(joined, *there, len(members.times))

    def _at_once(self, index: GroupIndex) -> int:
        """Returns how many timesteps fit in memory at once."""
        n, j = int(index.counts.max(initial=1)), int(index.own.max(initial=1))
        of_timestep = 4 * max(1, j) * n * max(self._units, HEADS * n)
        return max(1, min(_TIMESTEPS_AT_ONCE, _BYTES_AT_ONCE // of_timestep))

    def _recurrent_estimate(self, prepared: PreparedGroups, batch: Batch, estimates: GroupEstimates) -> None:
        """Evaluates recurrent networks: the first windows of all groups together, then all second ones, and so on."""
        assert batch.groups is not None
        index, windows, values = prepared.index, prepared.windows, estimates.values
        segment_r = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
        groups = Tracks(batch.groups.numbers, batch.groups.ended, windows.group, self._groups)
        members = Tracks(batch.agent_episodes, batch.ended, segment_r[windows.first_q], self._members)
        last = np.isin(np.arange(len(windows.group)), np.cumsum(np.bincount(windows.group)) - 1)
        for which in groups.rounds(max(1, self._at_once(index) // batch.sequence_length)):
            of_q = windows.of_windows(which)
            estimates.groups[which], estimates.members[of_q] = groups[which], members[of_q]
            inputs = self.inputs(prepared, which, estimates)
            found, expected, after = self.critic.remember(inputs.members, inputs.state)
            values[inputs.timesteps], estimates.baselines[inputs.rows] = back(found), back(expected)
            groups[which], members[of_q] = np.split(back(after), [len(which)])
            ending = which[last[which]]
            following = index.last[windows.group[ending]]
            there = index.counts[following] > 0
            if there.any():  # stores no memory, because the next segment begins there
                at, members_there = following[there], prepared.gather(following[there], np.empty(0, np.int64))
                state = Layout(np.ones(len(at), np.int64)), torch.from_numpy(groups[ending[there]])
                values[at] = back(self.critic.remember(members_there, over(state, prepared.device))[0])
        values[index.counts == 0] = 0.0
        groups.keep()
        members.keep()
