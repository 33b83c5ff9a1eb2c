# ruff: noqa: N803, N806 (names end in their shape)
"""The group critic computes one value from all members' observations, and each member's baseline from its teammates.

Members of groups attend to each other, once for the value of the group and once for the baseline of each member. A
*set* is a choice of one token for each member, with its action or without: the value's set has no actions, that of a
member's baseline all actions but its own. A token that is not in the set leaves no trace, not even by rounding. Each
token is projected once for all sets.

This attention is one step with its own derivative. The formulas are the textbook's. Between the two projections the
timesteps are the innermost dimension, so that loops are long even where groups have two members.

M timesteps (of one group each), N most members in one, D decisions with baselines; K rows of members' observations and
actions, each embedded once; A = 1 (without actions) or 2 (without, then with) embeddings of each, T = A N tokens, V
sets; S reward signals; U units, H heads, u units of a head; Q sequences, E values of a recurrent memory.
"""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from sparring.pipeline.networks import perceptron
from sparring.pipeline.networks.actor import VALUE_GAIN
from sparring.pipeline.networks.encoders import Encoder, Inputs
from sparring.pipeline.networks.layers import Layout, Memory, ResidualAttention
from sparring.pipeline.networks.perceptron import BackwardFn, Function, Perceptron
from sparring.pipeline.networks.settings import HEADS, NetworkSettings
from sparring.pipeline.specs import BehaviorSpec

FEW_MEMBERS: Final = 4
"""Up to this number of members, products of vectors take less time elementwise than as products of small matrices."""


class GroupTimesteps(NamedTuple):
    """Describes members at some timesteps, their last observations and actions, and decisions that need baselines.

    Attributes:
        inputs: by behavior name, prepared observations of the rows, our own name first.
        actions: by behavior name, [K of the name, features] of the actions.
        rows: [N * M] row of each member at each timestep, member by member; any row where none is present. None if the
            rows have that order.
        here: [N, M] which members are present; None for all.
        counts: [M] members present.
        decided: [D] member * M + timestep of the decisions whose baselines are wanted.
        shape: M, N, and how many of the N may have a baseline, which come first.
    """

    inputs: tuple[Inputs, ...]
    actions: tuple[Tensor, ...]
    rows: Tensor | None
    here: Tensor | None
    counts: Tensor
    decided: Tensor
    shape: tuple[int, int, int]

    @property
    def embeddings(self) -> int:
        """Returns A: 1 if no baseline depends on an action."""
        return 2 if self.shape[1] > 1 and len(self.decided) else 1

    def encoding(self, hidden: Tensor, largest: Tensor) -> Tensor:
        """Returns hidden units of timesteps, then of decisions, followed by their scaled numbers of members."""
        counts = torch.cat([self.counts, self.counts.index_select(0, self.decided % len(self.counts))])
        return torch.cat([hidden, (counts * (2 / largest) - 1).unsqueeze(1)], 1)


class GroupCritic(nn.Module):
    """Combines embeddings for every behavior name, attention over the members that are present, and two heads.

    A member is embedded twice: by its observation, and by observation and action. The second embedding adds a learned
    term to the first, so both train the observation's part. The value attends to all members without their actions. The
    baseline of a member attends to itself without its action and to its teammates with theirs (Cohen et al. 2021, arXiv
    2111.05992): embeddings, queries, keys and values are computed once for each member, and shared by the baselines of
    all its teammates.

    Args:
        specs: specs of the behavior names in the groups, our own first.
        settings: the network's settings.
        signals: S.
        generator: random source of the initial weights.

    Attributes:
        names: behavior names with embeddings, our own first.
        largest: most members of any group so far.

    Raises:
        Unsupported: no network can be built for the spec or the settings.
    """

    largest: Tensor

    def __init__(
        self, specs: Mapping[str, BehaviorSpec], settings: NetworkSettings, signals: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        units, kind = settings.hidden_units, settings.initialization
        self._settings = settings
        self._function = perceptron.FUNCTIONS[settings.activation]
        self.names: list[str] = []
        self.encoders = nn.ModuleList()
        self.observed = nn.ModuleList()
        self.acted = nn.ModuleList()
        for name, spec in specs.items():
            self.add(name, spec, generator)
        self.attention = ResidualAttention(units, generator)
        gains = [perceptron.HIDDEN_GAINS[kind]] * units
        self.trunk = Perceptron([units] * settings.num_layers, gains, settings, generator)
        self.memory = None if settings.memory is None else Memory(units, settings.memory.memory_size, generator)
        encoding = units if settings.memory is None else settings.memory.memory_size // 2
        self.value = perceptron.linear(encoding + 1, signals, VALUE_GAIN, generator, kind)
        self.baseline = perceptron.linear(encoding + 1, signals, VALUE_GAIN, generator, kind)
        self._heads = tuple(tuple(layer.parameters()) for layer in (self.value, self.baseline))
        self.register_buffer("largest", torch.ones((), dtype=torch.int64))

    def add(self, name: str, spec: BehaviorSpec, generator: torch.Generator) -> Encoder:
        """Adds embeddings for a behavior name, and returns the encoder that prepares its observations.

        Those of our own name, the first, are prepared by the actor's encoder, which has the statistics.
        """
        changes: dict[str, Any] = {"previous_action": False} if self.encoders else {"normalize": False}
        seen = {one.name for one in spec.observations}
        changes["encoders"] = {name: one for name, one in self._settings.encoders.items() if name in seen}
        encoder = Encoder(spec, self._settings.model_copy(update=changes), generator)
        units, done = self._settings.hidden_units, spec.actions.continuous + spec.actions.mask_size
        self.encoders.append(encoder)
        self.observed.append(perceptron.hidden_layer(encoder.size, units, self._settings, generator))
        self.acted.append(perceptron.hidden_layer(done, units, self._settings, generator))
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
        attend = partial(attend_in_sets, self.attention, self._function, timesteps)
        sums = self._embed(timesteps)
        return perceptron.Node.apply(sums, sums, attend) if torch.is_grad_enabled() else attend(sums)[0]  # type: ignore[no-untyped-call]

    @property
    def needs_graph(self) -> bool:
        """Returns whether autograd differentiates it; without memory, of vectors alone, it has its own derivative."""
        return self.memory is not None or not all(encoder.plain for encoder in self.encoders)

    def traced(
        self, timesteps: GroupTimesteps, state: tuple[Layout, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor], object]]:
        """Returns values and baselines, and a function that propagates their gradients to the parameters."""
        if self.needs_graph:
            with torch.enable_grad():
                values, baselines, _ = self.remember(timesteps, state)
            return values, baselines, partial(perceptron.backpropagate, (values, baselines))
        sums, to_layers = self._trace_embeddings(timesteps)
        encoded, to_sums = attend_in_sets(self.attention, self._function, timesteps, sums)
        sums_of_trunk, to_encoded = self.trunk.traced(encoded, to_rows=True)
        hidden, slopes = self._function.traced(sums_of_trunk)
        parts = torch.tensor_split(timesteps.encoding(hidden, self.largest), [len(timesteps.counts)])
        (values, to_value), (baselines, to_baseline) = (
            perceptron.trace_layers(head, self._function, part, to_rows=True)
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
            if len(done):
                sums = observed(encoder(rows))
                embedded.append(torch.stack([sums, sums + acted(done)] if timesteps.embeddings > 1 else [sums]))
        if not embedded:  # no member decides in a window of a critic with memory: this row stands for all
            return self.value.weight.new_zeros(timesteps.embeddings, 1, self._settings.hidden_units)
        return embedded[0] if len(embedded) == 1 else torch.cat(embedded, 1)

    def _trace_embeddings(self, timesteps: GroupTimesteps) -> tuple[Tensor, BackwardFn]:
        """Returns `_embed` of vectors without a graph, and a function that propagates its gradient."""
        bounds = [0, *accumulate(map(len, timesteps.actions))]
        sums = self.value.weight.new_empty(timesteps.embeddings, bounds[-1], self._settings.hidden_units)
        of_names = zip(timesteps.inputs, timesteps.actions, self.observed, self.acted, strict=True)
        to_layers = []
        for (first, last), (rows, actions, *layers) in zip(pairwise(bounds), of_names, strict=True):
            for version, (layer, inputs) in enumerate(zip(layers[: len(sums)], (rows[0], actions), strict=False)):
                parameters = tuple(layer.parameters())
                outputs, to_layer = perceptron.trace_layers(parameters, self._function, inputs, to_rows=False)
                combine = Tensor.add_ if version else Tensor.copy_
                combine(sums[version:, first:last], outputs)
                to_layers.append((to_layer, version, first, last))

        def backward_fn(gradient: Tensor) -> None:
            parts = gradient.sum(0) if len(gradient) > 1 else gradient[0], gradient[-1]
            for to_layer, version, first, last in to_layers:
                to_layer(parts[version][first:last])

        return sums, backward_fn


# ---------------------------------------------------------------- attention


def attend_in_sets(
    attention: ResidualAttention, function: Function, members: GroupTimesteps, sums_AKU: Tensor
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Returns the means over members of the attention's output, first of all timesteps, then of decisions [M + D, U].

    The second result is a function that adds to the parameters' `grad` from the gradient of the means, and returns that
    of the sums.

    Args:
        attention: its layers.
        function: of the sums.
        members: who is present.
        sums_AKU: embeddings of the rows before the function is applied, which overwrites them; without those with
            actions (A = 1) every baseline is the value of its timestep, as in groups of one.
    """
    (m, n, own), (versions, count, units) = members.shape, sums_AKU.shape
    chosen, pairs = _sets(n, own if versions > 1 else 0, sums_AKU.device)
    sets, width, scale = len(chosen) // n, units // HEADS, 1 / math.sqrt(units // HEADS)
    sums = sums_AKU.reshape(-1, units)
    embedded, slopes = function.traced(sums)
    inputs, *before = _normalize(attention.before, embedded)
    projected = torch.addmm(attention.project.bias.unsqueeze(1), attention.project.weight, inputs.t())
    tokens, of_tokens, rows = inputs, projected, members.rows
    if rows is not None:
        rows = torch.cat([rows + version * count for version in range(versions)])
        tokens, of_tokens = inputs.index_select(0, rows), projected.index_select(1, rows)
    parts = of_tokens.view(3, HEADS, width, 1, versions * n, m)
    queries, keys, values = parts[0], parts[1], parts[2]  # [H, u, 1, T, M]
    logits = _dots(queries, keys, n).view(HEADS, -1, m).index_select(1, pairs)
    logits = logits.mul_(scale).view(HEADS, sets, n, n, m)
    share_NM1 = None
    if members.here is not None:
        seen_NM = members.here | ~members.here.any(0)  # a softmax over nothing is not a number
        logits.masked_fill_(~seen_NM, -torch.inf)
        share_NM1 = (members.here / members.here.sum(0).clamp(min=1)).unsqueeze(2)
    weights = logits.softmax(3)
    of_sets = values.view(units, -1, m).index_select(1, chosen).view(HEADS, width, sets, n, m)
    attended = _mix(weights, of_sets, n).view(units, -1)
    merged = torch.addmm(attention.merge.bias, attended.t(), attention.merge.weight.t())
    merged.add_(tokens.view(-1, m * units).index_select(0, chosen).view(-1, units))
    result, *after = _normalize(attention.after, merged)
    result = result.view(sets, n, m, units)
    mean_VMU = result.mean(1) if share_NM1 is None else (result * share_NM1).sum(1)
    of_members = mean_VMU[min(1, sets - 1) :].view(-1, units)
    found = torch.cat([mean_VMU[0], of_members.index_select(0, members.decided)])

    def backward_fn(gradient: Tensor) -> Tensor:
        to_mean = torch.zeros_like(mean_VMU)
        to_mean[0] = gradient[:m]
        to_mean[min(1, sets - 1) :].view(-1, units).index_add_(0, members.decided, gradient[m:])
        spread = to_mean.mul_(1 / n) if share_NM1 is None else to_mean
        to_result = spread.unsqueeze(1).expand(-1, n, -1, -1) if share_NM1 is None else spread.unsqueeze(1) * share_NM1
        to_merged = _to_normalized(attention.after, merged, after, to_result.reshape(-1, units))
        perceptron.gradient_of(attention.merge.weight).addmm_(to_merged.t(), attended.t())
        perceptron.accumulate_rows(attention.merge.bias, to_merged.t())
        to_attended = attention.merge.weight.t().mm(to_merged.t()).view(HEADS, width, sets, n, m)
        to_weights = _dots(to_attended, of_sets, n)
        to_logits = torch.ops.aten._softmax_backward_data(to_weights, weights, 3, weights.dtype).mul_(scale)  # noqa: SLF001
        products = to_logits.new_zeros(HEADS, len(tokens) // m * (len(tokens) // m), m)
        products.index_add_(1, pairs, to_logits.view(HEADS, -1, m))
        products = products.view(HEADS, 1, versions * n, versions * n, m)
        to_parts = torch.zeros_like(parts)
        to_parts[0] = _mix(products, keys, n)
        to_parts[1] = _mix(products.transpose(2, 3), queries, n)
        to_values = _mix(weights.transpose(2, 3), to_attended, n).view(units, -1, m)
        to_parts[2].view(units, -1, m).index_add_(1, chosen, to_values)
        to_tokens = to_parts.view(3 * units, -1)
        to_inputs = tokens.new_zeros(versions * n, m * units).index_add_(0, chosen, to_merged.view(-1, m * units))
        to_inputs = to_inputs.view(-1, units)
        if rows is not None:
            to_tokens = torch.zeros_like(projected).index_add_(1, rows, to_tokens)
            to_inputs = torch.zeros_like(inputs).index_add_(0, rows, to_inputs)
        perceptron.gradient_of(attention.project.weight).addmm_(to_tokens, inputs)
        perceptron.accumulate_rows(attention.project.bias, to_tokens)
        to_inputs.addmm_(to_tokens.t(), attention.project.weight)
        to_embedded = _to_normalized(attention.before, embedded, before, to_inputs)
        return to_embedded.mul_(slopes).view_as(sums_AKU)

    return found, backward_fn


@lru_cache(maxsize=64)
@torch.inference_mode(mode=False)  # a later caller may have a graph
def _sets(n: int, own: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the token of each member in each set, [V * N], and of each pair in a set, [V * N * N], as T * T."""
    without, acted = torch.arange(n), torch.arange(n, 2 * n)
    baselines = torch.where(torch.eye(n, dtype=torch.bool)[:own], without, acted)
    sets_VN = torch.cat([without.unsqueeze(0), baselines])
    tokens = 2 * n if own else n
    pairs = sets_VN.unsqueeze(2) * tokens + sets_VN.unsqueeze(1)
    return sets_VN.flatten().to(device), pairs.flatten().to(device)


def _dots(left: Tensor, right: Tensor, members: int) -> Tensor:
    """Returns the products [H, V, L, R, M] of vectors [H, u, V, L, M] and [H, u, V, R, M]."""
    if members > FEW_MEMBERS:
        return torch.einsum("huvlm,huvrm->hvlrm", left, right).contiguous()
    return (left.unsqueeze(4) * right.unsqueeze(3)).sum(1)


def _mix(weights: Tensor, vectors: Tensor, members: int) -> Tensor:
    """Returns the sums [H, u, V, L, M] of vectors [H, u, V, R, M] times weights [H, V, L, R, M]."""
    if members > FEW_MEMBERS:
        return torch.einsum("hvlrm,huvrm->huvlm", weights, vectors).contiguous()
    first, *others = zip(weights.unsqueeze(1).unbind(4), vectors.unsqueeze(3).unbind(4), strict=True)
    found = first[0] * first[1]
    for weight, vector in others:
        found.addcmul_(weight, vector)
    return found


def _normalize(layer: nn.LayerNorm, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns normalized rows, their means and reciprocal standard deviations."""
    return torch.native_layer_norm(rows, layer.normalized_shape, layer.weight, layer.bias, layer.eps)


def _to_normalized(layer: nn.LayerNorm, rows: Tensor, moments: list[Tensor], gradient: Tensor) -> Tensor:
    """Adds the gradient of a normalization to its parameters, and returns that of its inputs."""
    to_rows, to_weight, to_bias = torch.ops.aten.native_layer_norm_backward(
        gradient, rows, layer.normalized_shape, *moments, layer.weight, layer.bias, [True, True, True]
    )
    perceptron.accumulate(layer.weight, to_weight)
    perceptron.accumulate(layer.bias, to_bias)
    found: Tensor = to_rows
    return found
