# ruff: noqa: N803, N806 (names end in their shape)
"""This module implements layers that relate rows: attention over the members of a set, and memory over time.

Of attention: B rows, N members of a set, U units, H heads, u units of a head, E features of an entity, S of the agent
itself.

Of memory: B rows of all sequences, F inputs, U hidden units, Q sequences, M values of a memory (hidden state and cell
state, half each), O outputs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import PackedSequence

from sparring.pipeline.networks.perceptron import FUNCTIONS, ConditionedLayers, Perceptron, linear, output_layer
from sparring.pipeline.networks.settings import HEADS, NetworkSettings
from sparring.pipeline.specs import Array

FORGET_BIAS: Final = 1.0
"""An LSTM that initially keeps its memory learns long gaps (Jozefowicz et al. 2015, "An Empirical Exploration of
Recurrent Network Architectures", section 2.2)."""


Trunk = Perceptron | ConditionedLayers


class ResidualAttention(nn.Module):
    """Adds multi-head self-attention (Vaswani et al. 2017, arXiv 1706.03762, section 3.2.2) to its input.

    Args:
        units: U, a multiple of 4.
        generator: random source of the initial weights.
    """

    def __init__(self, units: int, generator: torch.Generator) -> None:
        super().__init__()
        self.before = nn.LayerNorm(units)
        self.project = linear(units, 3 * units, 1.0, generator)
        self.merge = linear(units, units, 1.0, generator)
        self.after = nn.LayerNorm(units)

    def forward(self, embedded_BNU: Tensor, here_BN: Tensor | None) -> Tensor:
        """Returns the attention of each member to all that are present, [B, N, U].

        Args:
            embedded_BNU: the members.
            here_BN: True for members that are present; None if all are. In a row without any, all are attended to: a
                softmax over nothing is not a number.
        """
        inputs_BNU = self.before(embedded_BNU)
        attended_BNU: Tensor = self.after(inputs_BNU + self.merge(attend(self.project(inputs_BNU), here_BN)))
        return attended_BNU


def attend(projected_BNX: Tensor, here_BN: Tensor | None) -> Tensor:
    """Returns [B, N, U] from queries, keys and values [B, N, 3 U]. Mask as in `ResidualAttention.forward`."""
    rows, members, width = projected_BNX.shape
    parts = projected_BNX.view(rows, members, 3, HEADS, width // (3 * HEADS)).permute(2, 0, 3, 1, 4)
    mask = None
    if here_BN is not None:
        seen_BN = here_BN | ~here_BN.any(1, keepdim=True)
        mask = seen_BN[:, None, None].expand(-1, -1, here_BN.shape[1], -1)
    return scaled_dot_product_attention(parts[0], parts[1], parts[2], attn_mask=mask).transpose(1, 2).flatten(2)


class EntityEncoder(nn.Module):
    """Encodes several lists of entities independently of their order and number.

    Each entity is embedded together with the agent's own features; then all entities of all lists attend to each other
    with a residual connection, as in Baker et al. 2019 (arXiv 1909.07528), and their mean is the result. A row of zeros
    is padding: it is neither attended to nor averaged. Without any entity the result is 0.

    Args:
        sizes: E of each list.
        own: S.
        units: U, a multiple of 4.
        generator: random source of the initial weights.
    """

    def __init__(self, sizes: tuple[int, ...], own: int, units: int, generator: torch.Generator) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(linear(size + own, units, 1.0, generator) for size in sizes)
        self.attention = ResidualAttention(units, generator)

    def forward(self, lists: list[Tensor], own_BS: Tensor) -> Tensor:
        """Returns features [B, U].

        Args:
            lists: one [B, N, E] per list.
            own_BS: of the agent itself.
        """
        embedded = [
            embed(torch.cat([one_BNE, own_BS.unsqueeze(1).expand(-1, one_BNE.shape[1], -1)], 2))
            for embed, one_BNE in zip(self.embeddings, lists, strict=True)
        ]
        here_BN = torch.cat([one_BNE.any(2) for one_BNE in lists], 1)
        result_BNU = self.attention(torch.cat(embedded, 1), here_BN)
        weights_BN = here_BN.to(result_BNU.dtype)
        weights_BN = weights_BN / weights_BN.sum(1, keepdim=True).clamp(min=1)
        return torch.einsum("bn,bnu->bu", weights_BN, result_BNU)


class Layout:
    """Orders the rows of sequences so that a recurrent layer takes one time step of all of them at once.

    Sequences of different lengths are packed, never padded, so that no padding can enter a loss or a statistic.

    Attributes:
        order: [B] the rows by time, at each time the longest sequence first.
        inverse: [B] place of each row in that order.
        sizes: [T] rows at each time.
        by_length: [Q] the sequences, the longest first.
        by_number: [Q] place of each sequence in that order.

    Args:
        lengths_Q: rows of each sequence, at least 1; sequences follow one another.
    """

    def __init__(self, lengths_Q: Array) -> None:
        by_length_Q = np.argsort(-lengths_Q, kind="stable")
        first_Q = (np.cumsum(lengths_Q, dtype=np.int64) - lengths_Q)[by_length_Q]
        shortest_first_Q = lengths_Q[by_length_Q][::-1]
        times = np.arange(int(shortest_first_Q[-1]))
        sizes_T = len(lengths_Q) - np.searchsorted(shortest_first_Q, times, side="right")
        places_B = np.arange(int(sizes_T.sum())) - np.repeat(np.cumsum(sizes_T) - sizes_T, sizes_T)
        order_B = first_Q[places_B] + np.repeat(times, sizes_T)
        self.order = torch.from_numpy(order_B)
        self.inverse = torch.from_numpy(np.argsort(order_B, kind="stable"))
        self.sizes = torch.from_numpy(sizes_T)
        self.by_length = torch.from_numpy(by_length_Q)
        self.by_number = torch.from_numpy(np.argsort(by_length_Q, kind="stable"))

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Layout:
        """Returns the same layout on a device, except for the sizes, which PyTorch requires on the CPU."""
        moved = copy.copy(self)
        for name in ("order", "inverse", "by_length", "by_number"):
            setattr(moved, name, getattr(self, name).to(device, non_blocking=non_blocking))
        return moved


class Memory(nn.LSTM):
    """Implements a long short-term memory (Hochreiter and Schmidhuber 1997, with the forget gates of Gers et al. 2000).

    Args:
        units: U.
        memory: M.
        generator: random source of the initial weights.
    """

    def __init__(self, units: int, memory: int, generator: torch.Generator) -> None:
        super().__init__(units, memory // 2)
        with torch.no_grad():
            *weights, bias, recurrent_bias = self.parameters()
            for weight in weights:
                weight.normal_(0.0, 1 / math.sqrt(weight.shape[1]), generator=generator)
            recurrent_bias.zero_()
            bias.zero_()[memory // 2 : memory] = FORGET_BIAS  # gates: input, forget, cell, output

    def through(self, hidden_BU: Tensor, layout: Layout, memory_QM: Tensor) -> tuple[Tensor, Tensor]:
        """Processes sequences.

        Args:
            hidden_BU: inputs, one sequence after the other.
            layout: how the rows form sequences.
            memory_QM: memory before the first row of each.

        Returns:
            Hidden states [B, M / 2] in the order of the rows, and the memory after each sequence, [Q, M].
        """
        before = [half.unsqueeze(0) for half in memory_QM.index_select(0, layout.by_length).chunk(2, 1)]
        # Built directly, because the layout has already sorted the rows.
        packed = PackedSequence(hidden_BU.index_select(0, layout.order), layout.sizes)
        outputs, after = self(packed, (before[0].contiguous(), before[1].contiguous()))
        after_QM = torch.cat([half[0] for half in after], 1).index_select(0, layout.by_number)
        return outputs.data.index_select(0, layout.inverse), after_QM


class Recurrent(nn.Module):
    """Combines a trunk, a recurrent layer, and a linear layer of outputs.

    Args:
        trunk: maps features [B, F] to the sums of the last hidden layer, [B, U].
        output_gains: O factors on the initial weights of each output.
        settings: with U, M and the distribution of the outputs' initial weights.
        generator: random source of the initial weights.

    Attributes:
        output: name of the layer of outputs.
        activation: function of the trunk's last hidden layer.
    """

    def __init__(
        self, trunk: Trunk, output_gains: Sequence[float], settings: NetworkSettings, generator: torch.Generator
    ) -> None:
        super().__init__()
        assert settings.memory is not None
        memory = settings.memory.memory_size
        self.trunk = trunk
        self.activation = trunk.activation
        self.output = "head"
        self.head = output_layer(memory // 2, output_gains, settings, generator)
        self.lstm = Memory(settings.hidden_units, memory, generator)

    def forward(self, rows_BF: Tensor, layout: Layout, memory_QM: Tensor) -> tuple[Tensor, Tensor]:
        """Processes sequences.

        Args:
            rows_BF: features, one sequence after the other.
            layout: how the rows form sequences.
            memory_QM: memory before the first row of each.

        Returns:
            Outputs [B, O] in the order of the rows, and the memory after the last row of each sequence, [Q, M].
        """
        hidden_BU = FUNCTIONS[self.activation].forward(self.trunk(rows_BF))
        outputs, after_QM = self.lstm.through(hidden_BU, layout, memory_QM)
        return self.head(outputs), after_QM

    def frozen(self, outputs: int | None = None) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Returns the first `outputs`, or all, as a plain function of one row per agent, on a copy of the weights.

        It takes features [B, F] and memories [B, M], and returns outputs [B, O] and the memories after them.
        """
        cell = [parameter.detach().clone() for parameter in self.lstm.parameters()]
        head = self.head.bias[:outputs].detach().clone(), self.head.weight[:outputs].detach().clone().t()
        trunk, activate = self.trunk.frozen(), FUNCTIONS[self.activation].forward

        def step(rows_BF: Tensor, memory_BM: Tensor) -> tuple[Tensor, Tensor]:
            after = torch.lstm_cell(activate(trunk(rows_BF)), memory_BM.chunk(2, 1), *cell)
            return torch.addmm(head[0], after[0], head[1]), torch.cat(after, 1)

        return step
