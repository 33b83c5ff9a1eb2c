"""For GAIL, an episode end bootstraps with a fraction of an episode start's value, by how often demonstrations end.

The discriminator's reward is above 0 at every step. If the value after an end were 0, the policy would learn to
survive, whether the demonstrations do or not; if it were that of an episode start, ends would hardly matter. Kostrikov
et al. (2019, arXiv 1809.02925, section 4.2) continue an episode in an absorbing state, which the discriminator
classifies like any other. In a state without content it can learn only how often either side is there, and its optimum
is known (Goodfellow et al. 2014, arXiv 1406.2661, proposition 1): D = e / (e + p), with e ends per step of the
demonstrations and p of the policy. So no network is needed. The reward there is -log(1 - D), and log 2 at a step where
the sides cannot be distinguished: the value after an end is log2(1 + e / p) times that after a start, at most all of
it.

(More would let values grow without bound, because each start leads to an end. A separate value is far from all others
until these are learned, and the policy first learns to end in any way.)
"""

from __future__ import annotations

import math
from typing import Final

_HORIZON: Final = 2000
"""Steps over which the policy's ends are counted; a larger batch counts as a whole."""


class EndCounts:
    """Counts the episode ends of demonstrations and policy.

    Args:
        ends: number of demonstrated episodes that terminated; interrupted ones do not count.
        steps: number of demonstrated steps.
    """

    def __init__(self, ends: int, steps: int) -> None:
        self._demonstrated = ends / max(steps, 1)
        self._ends = 0.0
        self._steps = 0.0

    def count(self, ends: int, steps: int) -> None:
        """Adds a batch of the policy's steps, and forgets as many earlier ones beyond the horizon."""
        kept = 0.0 if steps >= _HORIZON else min(1.0, (_HORIZON - steps) / max(self._steps, 1.0))
        self._ends = kept * self._ends + ends
        self._steps = kept * self._steps + steps

    @property
    def share(self) -> float:
        """Returns the fraction, 0 to 1, of an episode start's value that bootstraps an end."""
        if not self._ends:
            return 1.0
        return min(1.0, math.log2(1.0 + self._demonstrated * self._steps / self._ends))
