"""This module is what networks need of NumPy alone: actions as simulators and networks read them, weights as arrays.

B rows, C continuous actions, D branches.
"""

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.networks.settings import ACTION_LIMIT
from sparring.pipeline.specs import ActionSpec, Array, Floats

Arrays = dict[str, Array]
"""Weights by name."""


def to_environment(continuous: Floats, limit: float = ACTION_LIMIT) -> Floats:
    """Converts raw samples [B, C] to actions in [-1, 1] for a simulator: clips them to +-`limit` and divides by it."""
    bound = np.float32(limit)
    executed = np.minimum(continuous, bound)  # faster than np.clip
    np.maximum(executed, -bound, out=executed)
    executed /= bound
    return executed


def previous_features(
    actions: ActionSpec, continuous: Floats, discrete: NDArray[np.int32], limit: float = ACTION_LIMIT
) -> Floats:
    """Returns `action_features` of raw samples [B, C] and choices [B, D]."""
    return action_features(actions, to_environment(continuous, limit), discrete)


def action_features(actions: ActionSpec, executed: Floats, discrete: NDArray[np.int32]) -> Floats:
    """Returns features of actions: continuous ones [B, C] as simulators receive them, one 1 for each branch."""
    features = np.zeros((len(executed), actions.continuous + actions.mask_size), np.float32)
    features[:, : actions.continuous] = executed
    first_D = actions.continuous + np.cumsum((0, *actions.discrete))[: len(actions.discrete)]  # noqa: N806
    np.put_along_axis(features, first_D + discrete, 1.0, 1)
    return features


def weights_sha256(arrays: Mapping[str, Array]) -> str:
    """Returns a hash of names, dtypes, shapes and bytes, the same for the same weights in any order."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.asarray(arrays[name], order="C")
        digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def non_finite(arrays: Mapping[str, Array]) -> list[str]:
    """Returns the names of arrays that hold a NaN or an infinity."""
    return sorted(name for name, array in arrays.items() if not np.isfinite(array).all())
