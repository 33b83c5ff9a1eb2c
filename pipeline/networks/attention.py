# ruff: noqa: N803, N806 (names end in their shape)
"""This module implements self-attention of a set, with a residual connection.

B rows, N members of a set, U units, H heads, u units of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from sparring.pipeline.networks.initialization import initialize_weights
from sparring.pipeline.networks.limits import HEADS


class ResidualAttention(nn.Module):
    """Adds multi-head self-attention (Vaswani et al. 2017, arXiv 1706.03762, section 3.2.2) to its input.

    Its parts `before`, `project`, `attend`, `merge` and `after` can also be used separately.

    Args:
        units: U, a multiple of 4.
    """

    def __init__(self, units: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(units)
        self.project = nn.Linear(units, 3 * units)
        self.merge = nn.Linear(units, units)
        self.after = nn.LayerNorm(units)

    def forward(self, embedded_BNU: Tensor, here_BN: Tensor | None) -> Tensor:
        """Returns the attention of each member to all that are present, [B, N, U].

        Args:
            embedded_BNU: the members.
            here_BN: True for members that are present; None if all are. In a row without any, all are attended to: a
                softmax over nothing is not a number.
        """
        inputs_BNU = self.before(embedded_BNU)
        return self.after(inputs_BNU + self.merge(attend(self.project(inputs_BNU), here_BN)))  # type: ignore[no-any-return]


def attend(projected_BNX: Tensor, here_BN: Tensor | None) -> Tensor:
    """Returns [B, N, U] from queries, keys and values [B, N, 3 U]. Mask as in `ResidualAttention.forward`."""
    queries, keys, values = heads(projected_BNX)
    mask = None
    if here_BN is not None:
        seen_BN = here_BN | ~here_BN.any(1, keepdim=True)
        mask = seen_BN[:, None, None].expand(-1, -1, here_BN.shape[1], -1)
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask).transpose(1, 2).flatten(2)


def heads(projected_BNX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Splits into queries, keys and values of each head, [B, H, N, u] each."""
    rows, members, width = projected_BNX.shape
    parts = projected_BNX.view(rows, members, 3, HEADS, width // (3 * HEADS)).permute(2, 0, 3, 1, 4)
    return parts[0], parts[1], parts[2]


def mean_of(result_BNU: Tensor, here_BN: Tensor | None) -> Tensor:
    """Returns the mean over members that are present, [B, U]; 0 if none is."""
    if here_BN is None:
        return result_BNU.mean(1)
    weights_BN = here_BN.to(result_BNU.dtype)
    weights_BN = weights_BN / weights_BN.sum(1, keepdim=True).clamp(min=1)
    return torch.einsum("bn,bnu->bu", weights_BN, result_BNU)


def initialize_linear(module: nn.Module, generator: torch.Generator | None) -> None:
    """Samples the weights of all linear layers in a module."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            initialize_weights(part, 1.0, generator)
