"""Writes the few bytes of protobuf's wire format that are encoded by hand here."""

from __future__ import annotations


def varint(value: int) -> bytes:
    """Encodes a number from 0 with seven bits per byte, the lowest first."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def block(number: int, size: int) -> bytes:
    """Returns the head of a field of `size` bytes: a message, text, bytes or packed numbers."""
    return varint(number << 3 | 2) + varint(size)
