# ruff: noqa: N803, N806 (names end in their shape)
"""This module implements self-attention of a set, with a residual connection, and encodes lists of entities by it.

B rows, N members of a set, U units, H heads, u units of a head, E features of an entity, S of the agent itself.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from sparring.pipeline.networks.perceptron import linear
from sparring.pipeline.networks.settings import HEADS


class ResidualAttention(nn.Module):
    """Adds multi-head self-attention (Vaswani et al. 2017, arXiv 1706.03762, section 3.2.2) to its input.

    Its parts `before`, `project`, `attend`, `merge` and `after` can also be used separately.

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
        return self.continued(inputs_BNU, self.project(inputs_BNU), here_BN)

    def continued(self, inputs_BNU: Tensor, projected_BNX: Tensor, here_BN: Tensor | None) -> Tensor:
        """Returns `forward` of members whose inputs, queries, keys and values are known."""
        attended_BNU: Tensor = self.after(inputs_BNU + self.merge(attend(projected_BNX, here_BN)))
        return attended_BNU


def attend(projected_BNX: Tensor, here_BN: Tensor | None) -> Tensor:
    """Returns [B, N, U] from queries, keys and values [B, N, 3 U]. Mask as in `ResidualAttention.forward`."""
    mask = None
    if here_BN is not None:
        seen_BN = here_BN | ~here_BN.any(1, keepdim=True)
        mask = seen_BN[:, None, None].expand(-1, -1, here_BN.shape[1], -1)
    return scaled_dot_product_attention(*heads(projected_BNX), attn_mask=mask).transpose(1, 2).flatten(2)


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
        return mean_of(self.attention(torch.cat(embedded, 1), here_BN), here_BN)
