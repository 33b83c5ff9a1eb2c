"""The wire format of protobuf, written byte by byte without a schema; a field with its default value is left out."""

from __future__ import annotations

import struct
from collections.abc import Iterable

VARINT, BLOCK, FOUR_BYTES = 0, 2, 5

NONE, TRANSLATION, VARIABLE = 1, 2, 4
"""Dimension properties of an axis."""


def varint(value: int) -> bytes:
    value &= 2**64 - 1  # two's complement of negative numbers
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def integer(number: int, value: int) -> bytes:
    return varint(number << 3 | VARINT) + varint(value) if value else b""


def real(number: int, value: float) -> bytes:
    return varint(number << 3 | FOUR_BYTES) + struct.pack("<f", value) if value else b""


def block(number: int, content: bytes) -> bytes:
    return varint(number << 3 | BLOCK) + varint(len(content)) + content


def text(number: int, value: str) -> bytes:
    return block(number, value.encode()) if value else b""


def integers(number: int, values: Iterable[int]) -> bytes:
    content = b"".join(varint(int(value)) for value in values)
    return block(number, content) if content else b""


def reals(number: int, values: Iterable[float]) -> bytes:
    content = b"".join(struct.pack("<f", value) for value in values)
    return block(number, content) if content else b""
