# ruff: noqa: N803, N806 (names end in their shape)
"""Members of groups attend to each other, once for the value of the group and once for the baseline of each member.

A *set* is a choice of one token for each member, with its action or without: the value's set has no actions, that of a
member's baseline all actions but its own. A token that is not in the set leaves no trace, not even by rounding. Each
token is projected once for all sets.

All of this is one step with its own derivative. The formulas are the textbook's. Between the two projections the
timesteps are the innermost dimension, so that loops are long even where groups have two members.

M timesteps, N most members in one, K rows of observations and actions, A = 1 (without actions) or 2 (without, then
with), T = A N tokens, V sets, D decisions, U units, H heads, u units of a head.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from sparring.pipeline.networks.layers import ResidualAttention
from sparring.pipeline.networks.perceptron import Function, accumulate, accumulate_rows, gradient_of
from sparring.pipeline.networks.settings import HEADS

FEW_MEMBERS: Final = 4
"""Up to this number of members, products of vectors take less time elementwise than as products of small matrices."""


class Members(NamedTuple):
    """Describes which members are present at some timesteps, and whose baselines are wanted.

    Attributes:
        rows: [N * M] row of each member at each timestep, member by member; any row where none is present. None if the
            rows have that order.
        here: [N, M] which are present; None for all.
        shape: M, N, and how many of the N may have a baseline, which come first.
        decided: [D] member * M + timestep of the decisions whose baselines are wanted.
    """

    rows: Tensor | None
    here: Tensor | None
    shape: tuple[int, int, int]
    decided: Tensor


def attend_in_sets(
    attention: ResidualAttention, function: Function, members: Members, sums_AKU: Tensor
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
        gradient_of(attention.merge.weight).addmm_(to_merged.t(), attended.t())
        accumulate_rows(attention.merge.bias, to_merged.t())
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
        gradient_of(attention.project.weight).addmm_(to_tokens, inputs)
        accumulate_rows(attention.project.bias, to_tokens)
        to_inputs.addmm_(to_tokens.t(), attention.project.weight)
        to_embedded = _to_normalized(attention.before, embedded, before, to_inputs)
        return to_embedded.mul_(slopes).view_as(sums_AKU)

    return found, backward_fn


@lru_cache(maxsize=64)
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
    return (weights.unsqueeze(1) * vectors.unsqueeze(3)).sum(4)


def _normalize(layer: nn.LayerNorm, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns normalized rows, their means and reciprocal standard deviations."""
    return torch.native_layer_norm(rows, layer.normalized_shape, layer.weight, layer.bias, layer.eps)


def _to_normalized(layer: nn.LayerNorm, rows: Tensor, moments: list[Tensor], gradient: Tensor) -> Tensor:
    """Adds the gradient of a normalization to its parameters, and returns that of its inputs."""
    to_rows, to_weight, to_bias = torch.ops.aten.native_layer_norm_backward(
        gradient, rows, layer.normalized_shape, *moments, layer.weight, layer.bias, [True, True, True]
    )
    accumulate(layer.weight, to_weight)
    accumulate(layer.bias, to_bias)
    found: Tensor = to_rows
    return found
