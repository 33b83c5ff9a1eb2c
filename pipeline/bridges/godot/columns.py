"""Lists of a Godot game's JSON as columns, [n, ...] for n agents; and what is wrong with them, by agent.

A reader takes the values of n agents at once. Only where it refuses them are they looked at one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Read = Callable[[Sequence[Any]], Array]
"""Values of n agents -> [n, ...]; a ValueError says what is wrong with them."""


class UnreadableMessage(Exception):
    """Something of a message that cannot be used; says what."""


def column(agents: Sequence[int], values: Sequence[Any], read: Read, what: str) -> Array:
    """What `read` makes of the values of n agents.

    Args:
        agents: [n] their ids, for messages.
        values: [n] one of each agent.
        read: raises ValueError for what it cannot read.
        what: the values are, for messages.

    Raises:
        Unreadable: `read` refuses; names the first agent whose value it refuses alone.
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


def picked(rows: Sequence[Any], key: str) -> list[Any]:
    """The observation `key` of each agent; None where it is missing."""
    try:
        return [row[key] for row in rows]
    except (KeyError, TypeError):
        return [row.get(key) if isinstance(row, dict) else None for row in rows]


def one_number(values: Sequence[Any]) -> NDArray[np.float32]:
    """One finite number of each of n agents, as [n]; raises as `numbers`."""
    return numbers(values, 1)[:, 0]


def flags(values: Sequence[Any]) -> NDArray[np.bool_]:
    """True or false of each of n agents, as [n]; 1 and 0 will do.

    Raises:
        ValueError: something else.
    """
    if not all(type(one) in (bool, int) and one in (0, 1) for one in values):
        raise ValueError(f"{short(values[0])} where true or false was due")
    return np.array(values, np.bool_)


def numbers(values: Sequence[Any], size: int) -> NDArray[np.float32]:
    """Numbers of n agents as [n, size].

    Raises:
        ValueError: there are others than finite numbers, or not as many; says what was got.
    """
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{short(values[0])} where numbers were due")
    if array.size != len(values) * size:
        raise ValueError(f"{array.size // len(values)} numbers where {size} were due")
    with np.errstate(over="ignore"):  # found by what comes next
        rows = array.astype(np.float32).reshape(len(values), size)
    if not np.isfinite(rows).all():
        raise ValueError("NaN or infinity")
    return rows


def one_hot(values: Sequence[Any], size: int) -> NDArray[np.float32]:
    """Choices of n agents as [n, size], 1 where chosen.

    Raises:
        ValueError: there are others than whole numbers from 0 to size - 1.
    """
    chosen = one_number(values)
    places = chosen.astype(np.int64)
    if (places != chosen).any() or not ((places >= 0) & (places < size)).all():
        raise ValueError(f"{chosen[0]:g} where a whole number from 0 to {size - 1} was due")
    rows = np.zeros((len(values), size), np.float32)
    rows[np.arange(len(values)), places] = 1
    return rows


def pixels(values: Sequence[Any], height: int, width: int, channels: int) -> NDArray[np.uint8]:
    """Pictures of n agents as [n, channels, height, width], from hexadecimal texts row by row and pixel by pixel.

    Raises:
        ValueError: one is no such text.
    """
    digits = 2 * height * width * channels
    if not all(isinstance(text, str) and len(text) == digits for text in values):
        raise ValueError(f"{short(values[0])} where {digits} hexadecimal digits were due")
    rows = np.frombuffer(bytes.fromhex("".join(values)), np.uint8).reshape(len(values), height, width, channels)
    return np.ascontiguousarray(rows.transpose(0, 3, 1, 2))


def short(value: object) -> str:
    """The beginning of a value, for messages."""
    return repr(value)[:40]
