"""Converts lists of a Godot game's JSON to columns, [n, ...] for n agents, and explains errors by agent.

A reader takes the values of n agents at once. Only if it fails does it read them one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.specs import Array

Read = Callable[[Sequence[Any]], Array]
"""Converts the values of n agents to [n, ...]; raises ValueError with the reason if they are wrong."""


class UnreadableMessage(Exception):
    """Reports a part of a message that cannot be used."""


def column(agents: Sequence[int], values: Sequence[Any], read: Read, what: str) -> Array:
    """Returns the values of n agents as `read` converts them.

    Args:
        agents: [n] ids, for messages.
        values: [n] one value for each agent.
        read: raises ValueError for values that it cannot read.
        what: name of the values, for messages.

    Raises:
        UnreadableMessage: `read` fails; the message names the first agent whose value it rejects alone.
    """
    try:
        return read(values)
    except ValueError as error:
        for agent, value in zip(agents, values, strict=True):
            try:
                read([value])
            except ValueError as reason:
                raise UnreadableMessage(f"agent {agent}'s {what}: {reason}") from reason
        raise UnreadableMessage(f"{what} of another form for some agents than for others") from error


def pick(rows: Sequence[Any], key: str) -> list[Any]:
    """Returns the observation `key` of each agent; None if it is missing."""
    try:
        return [row[key] for row in rows]
    except (KeyError, TypeError):
        return [row.get(key) if isinstance(row, dict) else None for row in rows]


def one_number(values: Sequence[Any]) -> NDArray[np.float32]:
    """Returns one finite number for each of n agents, [n]. Raises as `numbers`."""
    return numbers(values, 1)[:, 0]


def flags(values: Sequence[Any]) -> NDArray[np.bool_]:
    """Returns true or false for each of n agents, [n]; 1 and 0 are accepted.

    Raises:
        ValueError: a value is something else.
    """
    if not all(type(one) in (bool, int) and one in (0, 1) for one in values):
        raise ValueError(f"{short(values[0])} where true or false was expected")
    return np.array(values, np.bool_)


def numbers(values: Sequence[Any], size: int) -> NDArray[np.float32]:
    """Returns the numbers of n agents, [n, size].

    Raises:
        ValueError: a number is not finite, or their count is wrong; the message says what was got.
    """
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{short(values[0])} where numbers were expected")
    if array.size != len(values) * size:
        raise ValueError(f"{array.size // len(values)} numbers where {size} were expected")
    with np.errstate(over="ignore"):  # the next check finds it
        rows = array.astype(np.float32).reshape(len(values), size)
    if not np.isfinite(rows).all():
        raise ValueError("NaN or infinity")
    return rows


def one_hot(values: Sequence[Any], size: int) -> NDArray[np.float32]:
    """Returns the choices of n agents, [n, size], 1 for the chosen one.

    Raises:
        ValueError: a choice is no whole number from 0 to size - 1.
    """
    chosen = one_number(values)
    places = chosen.astype(np.int64)
    if (places != chosen).any() or not ((places >= 0) & (places < size)).all():
        raise ValueError(f"{chosen[0]:g} where a whole number from 0 to {size - 1} was expected")
    rows = np.zeros((len(values), size), np.float32)
    rows[np.arange(len(values)), places] = 1
    return rows


def pixels(values: Sequence[Any], height: int, width: int, channels: int) -> NDArray[np.uint8]:
    """Returns the images of n agents, [n, channels, height, width], from hexadecimal texts row by row and pixel by
    pixel.

    Raises:
        ValueError: a value is no such text.
    """
    digits = 2 * height * width * channels
    if not all(isinstance(text, str) and len(text) == digits for text in values):
        raise ValueError(f"{short(values[0])} where {digits} hexadecimal digits were expected")
    rows = np.frombuffer(bytes.fromhex("".join(values)), np.uint8).reshape(len(values), height, width, channels)
    return np.ascontiguousarray(rows.transpose(0, 3, 1, 2))


def short(value: object) -> str:
    """Returns the beginning of a value, for messages."""
    return repr(value)[:40]
