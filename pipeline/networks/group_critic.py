"""The group critic computes one value from all members' observations, and each member's baseline from its teammates.

M timesteps (of one group each), D decisions with baselines; K rows of members' observations and actions, each embedded
once; A = 1 or 2 embeddings of each; S reward signals; U units, Q sequences, E values of a recurrent memory.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparring.pipeline.networks.actor import VALUE_GAIN
from sparring.pipeline.networks.encoders import Encoder, Inputs
from sparring.pipeline.networks.group_attention import Members, attend_in_sets
from sparring.pipeline.networks.layers import Layout, Memory, ResidualAttention
from sparring.pipeline.networks.perceptron import (
    FUNCTIONS,
    HIDDEN_GAINS,
    BackwardFn,
    Node,
    Perceptron,
    hidden_layer,
    linear,
    trace_layers,
)
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import BehaviorSpec

_BackwardFn = Callable[[Tensor, Tensor], object]
"""Propagates gradients of values and baselines to the parameters."""


class GroupTimesteps(NamedTuple):
    """Describes members at some timesteps, their last observations and actions, and decisions that need baselines.

    Attributes:
        inputs: by behavior name, prepared observations of the rows, our own name first; None without rows.
        actions: by behavior name, [K of the name, features] of the actions; None without rows.
        members: the rows that are present at each timestep, and the decisions.
        counts: [M] members present.
    """

    inputs: tuple[Inputs | None, ...]
    actions: tuple[Tensor | None, ...]
    members: Members
    counts: Tensor

    @property
    def embeddings(self) -> int:
        """Returns A: 1 if no baseline depends on an action."""
        return 2 if self.members.shape[1] > 1 and len(self.members.decided) else 1

    def encoding(self, hidden: Tensor, largest: Tensor) -> Tensor:
        """Returns hidden units of timesteps, then of decisions, followed by their scaled numbers of members."""
        counts = torch.cat([self.counts, self.counts.index_select(0, self.members.decided % len(self.counts))])
        return torch.cat([hidden, (counts * (2 / largest) - 1).unsqueeze(1)], 1)


class GroupCritic(nn.Module):
    """Combines embeddings for every behavior name, attention over the members that are present, and two heads.

    A member is embedded twice: by its observation, and by observation and action. The second embedding adds a learned
    term to the first, so both train the observation's part. The value attends to all members without their actions. The
    baseline of a member attends to itself without its action and to its teammates with theirs (Cohen et al. 2021, arXiv
    2111.05992): embeddings, queries, keys and values are computed once for each member, and shared by the baselines of
    all its teammates.

    Args:
        own: our behavior name.
        specs: specs of the behavior names in the groups, including our own.
        settings: the network's settings.
        signals: names of the reward signals, in the order of the heads.
        generator: random source of the initial weights.

    Attributes:
        names: behavior names with embeddings, our own first.
        largest: most members of any group so far.

    Raises:
        Unsupported: no network can be built for the spec or the settings.
    """

    largest: Tensor

    def __init__(
        self,
        own: str,
        specs: Mapping[str, BehaviorSpec],
        settings: NetworkSettings,
        signals: tuple[str, ...],
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        units, kind = settings.hidden_units, settings.initialization
        self._settings = settings
        self._function = FUNCTIONS[settings.activation]
        self.names: list[str] = []
        self.encoders = nn.ModuleList()
        self.observed = nn.ModuleList()
        self.acted = nn.ModuleList()
        for name in (own, *(name for name in specs if name != own)):
            self.add(name, specs[name], generator)
        self.attention = ResidualAttention(units, generator)
        hidden, gains = [units] * (settings.num_layers - 1), [HIDDEN_GAINS[kind]] * units
        self.trunk = Perceptron(units, hidden, gains, settings, generator)
        self.memory = None if settings.memory is None else Memory(units, settings.memory.memory_size, generator)
        encoding = units if settings.memory is None else settings.memory.memory_size // 2
        self.value = linear(encoding + 1, len(signals), VALUE_GAIN, generator, kind)
        self.baseline = linear(encoding + 1, len(signals), VALUE_GAIN, generator, kind)
        self._heads = tuple(tuple(layer.parameters()) for layer in (self.value, self.baseline))
        self.register_buffer("largest", torch.ones((), dtype=torch.int64))

    def add(self, name: str, spec: BehaviorSpec, generator: torch.Generator) -> Encoder:
        """Adds embeddings for a behavior name, and returns the encoder that prepares its observations.

        Those of our own name, the first, are prepared by the actor's encoder, which has the statistics.
        """
        changes = {"previous_action": False} if self.encoders else {"normalize": False}
        encoder = Encoder(spec, self._settings.model_copy(update=changes), generator)
        units, done = self._settings.hidden_units, spec.actions.continuous + spec.actions.mask_size
        self.encoders.append(encoder)
        self.observed.append(hidden_layer(encoder.size, units, self._settings, generator))
        self.acted.append(hidden_layer(done, units, self._settings, generator))
        self.names.append(name)
        return encoder

    def forward(self, timesteps: GroupTimesteps) -> tuple[Tensor, Tensor]:
        """Returns values [M, S] and baselines [D, S] of a critic without memory."""
        return self.remember(timesteps, None)[:2]

    def remember(self, timesteps: GroupTimesteps, state: tuple[Layout, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns values [M, S], baselines [D, S], and the memory after each sequence [Q, E], empty without memory.

        Args:
            timesteps: the members present.
            state: of a critic with memory: the sequences of the timesteps, then of the decisions, and the memory [Q, E]
                before each.
        """
        hidden, after = self._function.forward(self.trunk(self.encode(timesteps))), timesteps.counts.new_zeros(0)
        if self.memory is not None and state is not None:
            hidden, after = self.memory.through(hidden, *state)
        encoding, groups = timesteps.encoding(hidden, self.largest), len(timesteps.counts)
        return self.value(encoding[:groups]), self.baseline(encoding[groups:]), after

    def encode(self, timesteps: GroupTimesteps) -> Tensor:
        """Returns means over the members of timesteps, then of decisions, [M + D, U]."""
        attend = partial(attend_in_sets, self.attention, self._function, timesteps.members)
        sums = self._embed(timesteps)
        return Node.apply(sums, sums, attend) if torch.is_grad_enabled() else attend(sums)[0]  # type: ignore[no-untyped-call]

    @property
    def plain(self) -> bool:
        """Returns whether `traced` is possible: there is no memory, and all observations are vectors."""
        return self.memory is None and all(encoder.plain for encoder in self.encoders)

    def traced(self, timesteps: GroupTimesteps) -> tuple[Tensor, Tensor, _BackwardFn]:
        """Returns `forward` without a graph, and a function that propagates the gradients of both results."""
        sums, to_layers = self._trace_embeddings(timesteps)
        encoded, to_sums = attend_in_sets(self.attention, self._function, timesteps.members, sums)
        sums_of_trunk, to_encoded = self.trunk.traced(encoded, to_rows=True)
        hidden, slopes = self._function.traced(sums_of_trunk)
        parts = torch.tensor_split(timesteps.encoding(hidden, self.largest), [len(timesteps.counts)])
        (values, to_value), (baselines, to_baseline) = (
            trace_layers(head, self._function, part, to_rows=True)
            for head, part in zip(self._heads, parts, strict=True)
        )

        def backward_fn(of_values: Tensor, of_baselines: Tensor) -> None:
            to_hidden = torch.cat([to_value(of_values), to_baseline(of_baselines)])[:, :-1]
            to_layers(to_sums(to_encoded(to_hidden * slopes)))

        return values, baselines, backward_fn

    # ---------------------------------------------------------------- inside

    def _embed(self, timesteps: GroupTimesteps) -> Tensor:
        """Returns sums [A, K, U] of the embeddings: of observations, then of observations and actions."""
        embedded = []
        for encoder, observed, acted, rows, done in zip(
            self.encoders, self.observed, self.acted, timesteps.inputs, timesteps.actions, strict=True
        ):
            if rows is not None and done is not None:
                sums = observed(encoder(rows))
                embedded.append(torch.stack([sums, sums + acted(done)] if timesteps.embeddings > 1 else [sums]))
        if not embedded:  # no member decides in a window of a critic with memory: this row stands for all
            return self.value.weight.new_zeros(timesteps.embeddings, 1, self._settings.hidden_units)
        return embedded[0] if len(embedded) == 1 else torch.cat(embedded, 1)

    def _trace_embeddings(self, timesteps: GroupTimesteps) -> tuple[Tensor, BackwardFn]:
        """Returns `_embed` of vectors without a graph, and a function that propagates its gradient."""
        done = [0 if actions is None else len(actions) for actions in timesteps.actions]
        bounds = [sum(done[:at]) for at in range(len(done) + 1)]
        sums = self.value.weight.new_empty(timesteps.embeddings, bounds[-1], self._settings.hidden_units)
        traced = []
        for observed, acted, rows, actions, (first, last) in zip(
            self.observed, self.acted, timesteps.inputs, timesteps.actions, pairwise(bounds), strict=True
        ):
            if rows is None or actions is None:
                continue
            every = [
                trace_layers(tuple(layer.parameters()), self._function, inputs, to_rows=False)
                for layer, inputs in zip((observed, acted)[: len(sums)], (rows[0], actions), strict=False)
            ]
            sums[:, first:last] = every[0][0]
            for outputs, _ in every[1:]:
                sums[1, first:last] += outputs
            traced.append((first, last, [backward_fn for _, backward_fn in every]))

        def backward_fn(gradient: Tensor) -> Tensor:
            of_observed = gradient.sum(0) if len(gradient) > 1 else gradient[0]
            for first, last, (to_observed, *to_acted) in traced:
                to_observed(of_observed[first:last])
                for to_layer in to_acted:
                    to_layer(gradient[1, first:last])
            return gradient

        return sums, backward_fn
