"""This module hashes and checks weights in the form of arrays by name, without loading torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from sparring.pipeline.specs import Array

Arrays = dict[str, Array]


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
