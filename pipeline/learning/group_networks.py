# ruff: noqa: N806 (names end in their shape)
"""Actor and group critic of one behavior, and what they make of a batch before an update.

g group segments; s segments of members; r rows of our own members; K moments; U windows of group time, of one moment
each where nothing is remembered; q sequences, of one row each where nothing is remembered; S reward signals; M values
of a recurrent memory.
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
from sparring.pipeline.networks.actions import previous_features
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.networks.device import back, over
from sparring.pipeline.networks.encoders import Encoder, Inputs
from sparring.pipeline.networks.group_critic import GroupCritic, GroupRecurrentState, GroupTimesteps
from sparring.pipeline.networks.limits import HEADS
from sparring.pipeline.networks.recurrent import Layout
from sparring.pipeline.specs import BehaviorSpec

_BYTES_AT_ONCE: Final = 16 * 2**20
_TIMESTEPS_AT_ONCE: Final = 1024

Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GroupWindows:
    """A batch's moments and rows by windows of group time, the units of a minibatch.

    Attributes:
        group: [U] group segment of each.
        first: [U] its first moment.
        lengths: [U] its moments.
        weights: [U] rows of our own that were decided in it; at least 1 where anybody is there, 0 where nobody is.
        first_q: [q] first row of each sequence, window by window.
        lengths_q: [q] its rows.
        sequences: [U] how many sequences each has.
        by_window: [q] number that each sequence has in the order of the rows.
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
        """Windows of `length` group times."""
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
        somebody = np.bincount(window_of[index.in_series], index.counts[index.in_series], len(lengths)) > 0
        return cls(
            group=group,
            first=first + group,  # each segment before has one moment more, that which followed
            lengths=lengths,
            weights=np.maximum(rows, somebody),
            first_q=first_q[by_window],
            lengths_q=lengths_q[by_window],
            sequences=np.bincount(window_q, minlength=len(lengths)),
            by_window=by_window,
        )

    def timesteps(self, which: Numbers) -> Numbers:
        """Moments of some windows, one window after the other."""
        return sequences.rows_of(self.first[which], self.lengths[which])

    def of_windows(self, which: Numbers) -> Numbers:
        """[q of these] sequences of some windows, one window after the other, in the order of `first_q`."""
        starts = np.cumsum(self.sequences) - self.sequences
        return sequences.rows_of(starts[which], self.sequences[which])


@dataclass(frozen=True, slots=True)
class PreparedGroups:
    """A group batch as the networks read it.

    Attributes:
        index: who was there when.
        windows: units of a minibatch.
        joined: by behavior name, observations before normalisation, of decisions and then of what followed.
        inputs: likewise, as the networks read them.
        actions: likewise, what was done.
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

    def show(self, timesteps: Numbers, rows: Numbers) -> GroupTimesteps:
        """What a critic is shown.

        Args:
            timesteps: at each of which some member is there.
            rows: of our own, decided at these moments: whose baselines are asked for.
        """
        index, counts = self.index, self.index.counts[timesteps]
        m, n, j = len(timesteps), max(1, int(counts.max())), int(index.own[timesteps].max())
        place = None
        if not (counts == n).all():
            place = np.arange(int(counts.sum())) + np.repeat(np.arange(m) * n - (np.cumsum(counts) - counts), counts)
        token_rows, token_names = index.tokens(timesteps)
        inputs: list[Inputs | None] = []
        actions: list[Tensor | None] = []
        shown, before = np.empty_like(token_rows), 0
        for name, (columns, done) in enumerate(zip(self.inputs, self.actions, strict=True)):
            mine = token_names == name if len(self.inputs) > 1 else slice(None)
            needed, back = np.unique(token_rows[mine], return_inverse=True)
            shown[mine] = back + before
            before += len(needed)
            at = torch.from_numpy(needed)
            here = columns is not None and done is not None and len(needed) > 0
            inputs.append(tuple(column.index_select(0, at) for column in columns or ()) if here else None)
            actions.append(done.index_select(0, at) if here and done is not None else None)
        self._places[timesteps] = np.arange(m)
        return GroupTimesteps(
            inputs=tuple(inputs),
            actions=tuple(actions),
            rows=torch.from_numpy(shown),
            places=None if place is None else torch.from_numpy(place),
            shape=(m, n, j),
            counts=torch.from_numpy(counts.astype(np.float32)),
            decided=torch.from_numpy(self._places[index.timesteps[rows]] * j + index.places[rows]),
        )


@dataclass(frozen=True, slots=True)
class GroupEstimates:
    """What a critic makes of a batch.

    Attributes:
        values: [K, S] of all moments, 0 where nobody is there.
        baselines: [r, S].
        groups: [U, M] memory at the start of each window; None where nothing is remembered.
        members: [q, M] memory at the start of each sequence, in the order of `GroupWindows.first_q`; likewise.
    """

    values: Floats
    baselines: Floats
    groups: Floats | None = None
    members: Floats | None = None


class GroupNetworks:
    """The networks of one behavior.

    Attributes:
        actor: acts.
        critic: of groups.
        modules: both.
        specs: of the behavior names that the critic knows, our own first.

    Args:
        behavior: our own name.
        spec: of it.
        settings: of the learner.
        generator: random source of initial weights.

    Raises:
        Unsupported: the spec or the settings ask for what cannot be built.
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

    def meet(self, specs: Mapping[str, BehaviorSpec]) -> None:
        """Mates of other behavior names are in our groups from now on.

        Raises:
            Unsupported: no encoder can be built for one of them.
        """
        for name, spec in specs.items():
            self.critic.add(name, spec, self._generator)
            self.specs[name] = spec

    def prepare(self, batch: GroupBatch) -> PreparedGroups:
        """What no gradient flows through."""
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
        """Takes a batch into the running statistics, after its last minibatch."""
        for name, joined, decisions in zip(self.specs, prepared.joined, prepared.decisions, strict=True):
            encoder: Encoder = self.actor.encoder if name == self.critic.names[0] else self.critic.encoder(name)
            if joined is not None and decisions:
                encoder.update(tuple(column[:decisions] for column in joined))

    @torch.no_grad()
    def estimate(self, prepared: PreparedGroups, batch: GroupBatch) -> GroupEstimates:
        """Values of all moments and baselines of all decisions; and what was remembered, where something is."""
        self.critic.see(int(prepared.index.counts.max()))
        if self.memory:
            return self._recurrent_estimate(prepared, batch)
        index = prepared.index
        values = np.zeros((len(index.counts), self._signals), np.float32)
        baselines = np.zeros((batch.steps, self._signals), np.float32)
        by_timestep = np.argsort(index.timesteps, kind="stable")
        starts = np.cumsum(index.decisions) - index.decisions
        # By size, so that little room is left over where groups differ.
        order = np.argsort(index.counts, kind="stable")[np.count_nonzero(index.counts == 0) :]
        for timesteps in np.array_split(order, -(-len(order) // self._at_once(index))):
            rows = by_timestep[sequences.rows_of(starts[timesteps], index.decisions[timesteps])]
            found, expected = self.critic(over(prepared.show(timesteps, rows), self.actor.device))
            values[timesteps], baselines[rows] = back(found), back(expected)
        return GroupEstimates(values, baselines)

    # ---------------------------------------------------------------- inside

    def _at_once(self, index: GroupIndex) -> int:
        """Moments for which there is room in memory."""
        n, j = int(index.counts.max(initial=1)), int(index.own.max(initial=1))
        of_timestep = 4 * max(1, j) * n * max(self._units, HEADS * n)
        return max(1, min(_TIMESTEPS_AT_ONCE, _BYTES_AT_ONCE // of_timestep))

    def _before(self, batch: GroupBatch, done: Floats) -> Tensor:
        """[r + s, P] previous action of each decision and of what followed."""
        assert batch.carried is not None
        rows, lengths = batch.steps, batch.own.lengths
        before = np.zeros_like(done)
        before[1:rows] = done[: rows - 1]
        before[batch.starts()] = batch.carried[:, self.memory :]
        stepped = lengths > 0
        before[rows:][stepped] = done[np.cumsum(lengths)[stepped] - 1]
        return torch.from_numpy(before)

    def _recurrent_estimate(self, prepared: PreparedGroups, batch: GroupBatch) -> GroupEstimates:
        """As `estimate`: the first windows of all groups side by side, then the second ones, and so on."""
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
            shown, remembered, timesteps, rows = self.recall(prepared, which, at_windows, at_sequences)
            found, expected, after = self.critic.remember(*over((shown, remembered), self.actor.device))
            values[timesteps], baselines[rows] = back(found), back(expected)
            of_groups, of_members = np.split(back(after), [remembered.baselines])
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
        """Values of what followed, which nothing is remembered of: the next segment begins with it."""
        shown = prepared.show(timesteps, np.empty(0, np.int64))
        layout = Layout(np.ones(len(timesteps), np.int64))
        remembered = GroupRecurrentState(layout, torch.from_numpy(memory), len(timesteps))
        found, _, _ = self.critic.remember(*over((shown, remembered), self.actor.device))
        values: Floats = back(found)
        return values

    def recall(
        self, prepared: PreparedGroups, which: Numbers, at_windows: Floats, at_sequences: Floats
    ) -> tuple[GroupTimesteps, GroupRecurrentState, Numbers, Numbers]:
        """Some windows, as a critic that remembers is shown them; their moments, and their rows."""
        windows = prepared.windows
        timesteps, of_q = windows.timesteps(which), windows.of_windows(which)
        rows = sequences.rows_of(windows.first_q[of_q], windows.lengths_q[of_q])
        layout = Layout(np.concatenate([windows.lengths[which], windows.lengths_q[of_q]]))
        memory = torch.from_numpy(np.concatenate([at_windows[which], at_sequences[of_q]]))
        return prepared.show(timesteps, rows), GroupRecurrentState(layout, memory, len(which)), timesteps, rows


def _both(rows: tuple[NDArray[np.float32], ...], following: tuple[NDArray[np.float32], ...]) -> list[Floats]:
    return [np.concatenate(columns) for columns in zip(rows, following, strict=True)]


def _done(members: GroupMembers, spec: BehaviorSpec, limit: float) -> Floats:
    """[r + s, features] what was done at each decision, and at that which followed; nothing where nobody has acted."""
    actions, rows = spec.actions, len(members.times) + len(members.next_times)
    continuous = np.concatenate([members.continuous, members.next_continuous])
    discrete = np.concatenate([members.discrete, members.next_discrete])
    if not continuous.shape[1] + discrete.shape[1]:
        return np.zeros((rows, actions.continuous + actions.mask_size), np.float32)
    return previous_features(actions, continuous, discrete, limit)
