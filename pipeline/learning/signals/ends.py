"""What follows the end of an episode, for a discriminator: as much of a beginning as demonstrations end too.

The discriminator's reward is above 0 at every step. If nothing followed an end, who imitates would stay alive,
demonstrated or not; if a beginning followed every end, ends would hardly matter. Kostrikov et al. (2019, arXiv
1809.02925, section 4.2) let an episode go on in an absorbing state, which the discriminator sees like others. All that
it can learn of a state without content is how often either side is there, and its best answer is known (Goodfellow et
al. 2014, arXiv 1406.2661, proposition 1): D = e / (e + p), with e ends per step of the demonstrations and p of the
policy. So no network is asked. The reward there is -log(1 - D), where that of a step in which nothing tells the two
apart is log 2: what follows an end is worth log2(1 + e / p) of what follows a beginning, at most all of it.

(More would let values grow without bound, because each beginning leads to an end. A value of its own, instead of a
share, is far from all others until these are learned, and the policy learns to end in any way first.)
"""

from __future__ import annotations

import math
from typing import Final

_HORIZON: Final = 2000
"""Steps over which the policy's ends are counted; of a larger batch, all."""


class EndCounts:
    """Counts the ends of both sides.

    Args:
        ends: of the demonstrated episodes, those that were not cut.
        steps: in all of them.
    """

    def __init__(self, ends: int, steps: int) -> None:
        self._shown = ends / max(steps, 1)
        self._ends = 0.0
        self._steps = 0.0

    def count(self, ends: int, steps: int) -> None:
        """Takes note of a batch of the policy's steps, and forgets as many former ones beyond the horizon."""
        kept = 0.0 if steps >= _HORIZON else min(1.0, (_HORIZON - steps) / max(self._steps, 1.0))
        self._ends = kept * self._ends + ends
        self._steps = kept * self._steps + steps

    @property
    def share(self) -> float:
        """Of the value of a beginning, 0 to 1, that follows an end."""
        if not self._ends:
            return 1.0
        return min(1.0, math.log2(1.0 + self._shown * self._steps / self._ends))
