"""Concatenates and slices columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparring.pipeline.specs import Array


def joined(columns: list[Any], dtype: Any) -> Any:
    """Returns the columns concatenated, an empty one if there are none."""
    if not columns:
        return np.empty(0, dtype)
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def slice_rows(record: Any, part: slice | Array) -> Any:
    """Returns some rows of a record of columns."""
    values: dict[str, Any] = {}
    for name in type(record).__slots__:
        value = getattr(record, name)
        if isinstance(value, tuple):
            values[name] = tuple(column[part] for column in value)
        else:
            values[name] = None if value is None else value[part]
    return type(record)(**values)
