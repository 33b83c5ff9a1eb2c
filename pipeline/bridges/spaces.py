"""Holds what the reading of observations and of actions shares: the values of Gymnasium's spaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import DTypeLike

from sparring.pipeline.specs import Array

if TYPE_CHECKING:
    from gymnasium import Space

Value = Any
"""An observation, an action or a mask of an environment: an array, a number, or a map or tuple of these."""

MASK: Final = "action_mask"

NUMERIC: Final = "biuf"
"""Kinds of arrays of numbers: truth values, integers with and without sign, floats."""

Option = bool | int | float | str
"""An option of an environment, as a configuration or a command line gives it."""


def numbers(items: Value, dtype: DTypeLike = np.float32) -> Array:
    """Returns values as an array of the given type: a copy, unless they are a list, whose array is new.

    Raises:
        TypeError: they are text, complex or masked, which numpy would read as something else.
        ValueError: they have several shapes.
    """
    values = np.asarray(items)
    if values.dtype.kind not in NUMERIC:
        raise TypeError(f"values of {values.dtype}")
    if isinstance(items[0] if isinstance(items, list) and items else items, np.ma.MaskedArray):
        raise TypeError("values that are masked")
    return values.astype(dtype, copy=not isinstance(items, list))


def kept(seen: Value) -> Value:
    """Returns a copy of an observation: an environment may write the next one, of a reset, to the same arrays."""
    if isinstance(seen, Mapping):
        return {key: kept(one) for key, one in seen.items()}
    if isinstance(seen, tuple | list):
        copies = map(kept, seen)
        return tuple(copies) if isinstance(seen, tuple) else list(copies)
    return seen.copy() if isinstance(seen, np.ndarray) else seen


def named(space: Space[Value]) -> str:
    """Returns a space in words, with its module where it is not one of Gymnasium, as those of the former gym."""
    module = type(space).__module__
    is_foreign = hasattr(space, "sample") and not module.startswith("gymnasium.")
    return f"{space}" + f" of {module}, not of gymnasium.spaces" * is_foreign
