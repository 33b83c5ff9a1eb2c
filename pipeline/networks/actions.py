# ruff: noqa: N806 (names end in their shape)
"""This module converts actions for simulators, and for networks that read the previous action.

B rows, C continuous actions, D branches.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.specs import ActionSpec

LIMIT: Final = 3.0
"""Default of `network_settings.action_limit` (ML-Agents)."""


def to_environment(continuous: NDArray[np.float32], limit: float = LIMIT) -> NDArray[np.float32]:
    """Converts raw samples [B, C] to actions in [-1, 1] for a simulator: clips them to +-`limit` and divides by it."""
    bound = np.float32(limit)
    executed = np.minimum(continuous, bound)  # faster than np.clip
    np.maximum(executed, -bound, out=executed)
    executed /= bound
    return executed


def previous_features(
    actions: ActionSpec, continuous: NDArray[np.float32], discrete: NDArray[np.int32], limit: float = LIMIT
) -> NDArray[np.float32]:
    """Returns [B, P] features of actions: continuous ones as simulators receive them, one 1 for each branch.

    Args:
        actions: spec of the actions.
        continuous: [B, C] raw samples.
        discrete: [B, D] choices.
        limit: of the raw samples.
    """
    return action_features(actions, to_environment(continuous, limit), discrete)


def action_features(
    actions: ActionSpec, executed: NDArray[np.float32], discrete: NDArray[np.int32]
) -> NDArray[np.float32]:
    """Returns `previous_features` of continuous actions in the form in which simulators receive them."""
    features = np.zeros((len(executed), actions.continuous + actions.mask_size), np.float32)
    features[:, : actions.continuous] = executed
    first_D = actions.continuous + np.cumsum((0, *actions.discrete))[: len(actions.discrete)]
    np.put_along_axis(features, first_D + discrete, 1.0, 1)
    return features
