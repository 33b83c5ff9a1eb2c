# ruff: noqa: N806 (names end in their shape)
"""What an action is to a simulator, and to a network that is shown the last one.

B rows, C continuous actions, D branches.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.specs import ActionSpec

LIMIT: Final = 3.0
"""`network_settings.action_limit` where it is left out (ML-Agents)."""


def to_environment(continuous: NDArray[np.float32], limit: float = LIMIT) -> NDArray[np.float32]:
    """Actions in [-1, 1] for a simulator, of raw samples [B, C]: clipped to +-`limit`, divided by it."""
    bound = np.float32(limit)
    executed = np.minimum(continuous, bound)  # np.clip is one call, but a slower one
    np.maximum(executed, -bound, out=executed)
    executed /= bound
    return executed


def previous_features(
    actions: ActionSpec, continuous: NDArray[np.float32], discrete: NDArray[np.int32], limit: float = LIMIT
) -> NDArray[np.float32]:
    """What a network is shown of actions, [B, P]: continuous ones as simulators get them, one 1 for each branch.

    Args:
        actions: spec of the actions.
        continuous: [B, C] raw samples.
        discrete: [B, D] choices.
        limit: of the raw samples.
    """
    return shown_features(actions, to_environment(continuous, limit), discrete)


def shown_features(
    actions: ActionSpec, executed: NDArray[np.float32], discrete: NDArray[np.int32]
) -> NDArray[np.float32]:
    """As `previous_features`, of continuous actions as simulators get them."""
    shown = np.zeros((len(executed), actions.continuous + actions.mask_size), np.float32)
    shown[:, : actions.continuous] = executed
    first_D = actions.continuous + np.cumsum((0, *actions.discrete))[: len(actions.discrete)]
    np.put_along_axis(shown, first_D + discrete, 1.0, 1)
    return shown
