"""Changes of inputs: bytes flipped, removed, inserted or spliced, and values inside a MessagePack header."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, Final

import msgpack

_WORTH_TRYING: Final = (
    b"\x00", b"\x01", b"\x7f", b"\x80", b"\xff", b"\x90", b"\x91", b"\xc0", b"\xc1", b"\xc7\xff\x00",
    b"\xca\x7f\xc0\x00\x00",
    b"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\x00" * 7, b"\xd9\xff",
    b"\xdb\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xde\xff\xff", b"\xdf\xff\xff\xff\xff",
    b"\xff\xff\xff\xff", b"\x00\x00\x00\x80", b"\xff\xff\xff\x7f", b"\x00\x00\x80\x7f", b"\x00\x00\xc0\x7f",
)  # fmt: skip
_VALUES: Final[tuple[Any, ...]] = (
    None, True, 0, 1, -1, 2**31, 2**32, 2**63, 2**64 - 1, -(2**63), 0.5, float("nan"), float("inf"), "", "A", "x" * 70,
    b"", b"\xff", [], [[]], {}, {"a": 1}, [0] * 70, "<f4", "<i8", "|b1", "|u1", "<f8", [0, 2**26, 2**26, 2**26], [2, 2],
    ["<f4", [0]], ["<i8", [1]],
)  # fmt: skip
LONGEST: Final = 4096
"""Bytes of an input; useful nested values are much shorter."""


def of_bytes(data: bytes, rng: Random, others: Sequence[bytes]) -> bytes:
    """Makes one to four changes anywhere."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        kind, at = rng.randrange(7), rng.randrange(len(out) + 1)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = rng.randrange(256)
        elif kind == 2:
            del out[at : at + rng.choice((1, 2, 4, 16, len(out)))]
        elif kind == 3:
            out[at:at] = rng.choice(_WORTH_TRYING) * rng.choice((1, 1, 1, 1, 2, 40, 1010))
        elif kind == 4:
            new = rng.choice(_WORTH_TRYING)
            out[at : at + len(new)] = new
        elif kind == 5:
            out[at:at] = out[at : at + rng.choice((1, 8, 64))]
        elif others:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            out[at:] = other[start : start + LONGEST]
    return bytes(out[:LONGEST])


def of_header(header: bytes, rng: Random) -> bytes:
    """Replaces, removes, nests or duplicates one node of a MessagePack value, unless it cannot be decoded."""
    try:
        tree = msgpack.unpackb(header, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException):
        return header
    holders = [*_holders(tree)]
    if not holders:
        return header
    holder, key = rng.choice(holders)
    _ACTS[rng.randrange(len(_ACTS))](holder, key, rng)
    try:
        packed: bytes = msgpack.packb(tree)
    except ValueError:  # nested too deeply for the writer
        return header
    return packed


def _holders(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the container and key of every node but the root."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict | list):
            for key in [*node] if isinstance(node, dict) else range(len(node)):
                yield node, key
                waiting.append(node[key])


def _replace(holder: Any, key: Any, rng: Random) -> None:
    holder[key] = rng.choice(_VALUES)


def _remove(holder: Any, key: Any, _rng: Random) -> None:
    del holder[key]


def _nest(holder: Any, key: Any, rng: Random) -> None:
    for _ in range(rng.choice((1, 2, 200))):
        holder[key] = [holder[key]]


def _duplicate(holder: Any, key: Any, rng: Random) -> None:
    if isinstance(holder, list):
        holder.insert(key, holder[key])
    else:
        holder[rng.choice(("number", "type", "x", "behavior"))] = holder[key]


def _shift(holder: Any, key: Any, rng: Random) -> None:
    if type(holder[key]) is int:
        holder[key] = max(-(2**63), min(2**64 - 1, holder[key] + rng.choice((-1, 1, 2**31, -(2**31)))))


_ACTS: Final[tuple[Callable[[Any, Any, Random], None], ...]] = (_replace, _replace, _remove, _nest, _duplicate, _shift)
