"""The few bytes of protobuf's wire format that are written here by hand."""

from __future__ import annotations


def varint(value: int) -> bytes:
    """A number from 0, seven bits a byte, the lowest first."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def block(number: int, size: int) -> bytes:
    """What stands before a field of `size` bytes: of a message, text, bytes or packed numbers."""
    return varint(number << 3 | 2) + varint(size)
