# ruff: noqa: N803, N806 (names end in their shape)
"""This module encodes lists of entities: any number up to a maximum, in any order.

B rows, N most entities, E features of an entity, S features of the agent itself, U units, H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparring.pipeline.networks.attention import ResidualAttention, initialize_linear, mean_of


class EntityEncoder(nn.Module):
    """Encodes several lists of entities independently of their order and number.

    Each entity is embedded together with the agent's own features; then all entities of all lists attend to each other
    (Vaswani et al. 2017, arXiv 1706.03762, section 3.2.2) with a residual connection, as in Baker et al. 2019 (arXiv
    1909.07528), and their mean is the result. A row of zeros is padding: it is neither attended to nor averaged.
    Without any entity the result is 0.

    Args:
        sizes: E of each list.
        own: S.
        units: U, a multiple of 4.
        generator: random source of the initial weights.
    """

    def __init__(self, sizes: tuple[int, ...], own: int, units: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Linear(size + own, units) for size in sizes)
        self.attention = ResidualAttention(units)
        initialize_linear(self, generator)

    def forward(self, lists: list[Tensor], own_BS: Tensor) -> Tensor:
        """Returns features [B, U].

        Args:
            lists: one [B, N, E] per list.
            own_BS: of the agent itself.
        """
        embedded_BNU = torch.cat(
            [
                embed(torch.cat([one_BNE, own_BS.unsqueeze(1).expand(-1, one_BNE.shape[1], -1)], 2))
                for embed, one_BNE in zip(self.embeddings, lists, strict=True)
            ],
            1,
        )
        here_BN = torch.cat([one_BNE.any(2) for one_BNE in lists], 1)
        return mean_of(self.attention(embedded_BNU, here_BN), here_BN)
