"""A Unity player's messages byte by byte, and the trainer's taken apart: nothing of the schema that is tested.

Numbers are those of the messages' fields. As in proto3, a field that holds its default is left out.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

VARINT, BLOCK, FOUR_BYTES = 0, 2, 5

NONE, TRANSLATION, VARIABLE = 1, 2, 4
"""Properties of an axis."""

CHW, HWC = (NONE, TRANSLATION, TRANSLATION), (TRANSLATION, TRANSLATION, NONE)


# ---------------------------------------------------------------- wire format


def varint(value: int) -> bytes:
    value &= 2**64 - 1  # negative numbers as their complement
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


# ---------------------------------------------------------------- the player


def vector(values: Sequence[float], *, name: str = "", goal: bool = False) -> bytes:
    return floats(np.array(values, np.float32), [NONE], name=name, goal=goal)


def floats(values: NDArray[np.float32], axes: Sequence[int] = (), *, name: str = "", goal: bool = False) -> bytes:
    data = block(4, block(1, np.ascontiguousarray(values, "<f4").tobytes()))
    return integers(1, values.shape) + data + integers(6, axes) + integer(7, goal) + text(8, name)


def packed(
    pngs: bytes, shape: Sequence[int], axes: Sequence[int] = CHW, *, mapping: Sequence[int] = (), name: str = ""
) -> bytes:
    return (
        integers(1, shape) + integer(2, 1) + block(3, pngs) + integers(5, mapping) + integers(6, axes) + text(8, name)
    )


def as_pngs(image: NDArray[np.uint8]) -> bytes:
    """[channels, height, width] as files of three channels, the last filled up with black."""
    from PIL import Image

    filled = np.concatenate([image, np.zeros((-len(image) % 3, *image.shape[1:]), np.uint8)])
    out = io.BytesIO()
    for at in range(0, len(filled), 3):
        pixels = np.ascontiguousarray(filled[at : at + 3].transpose(1, 2, 0))
        Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def agent(
    observations: Iterable[bytes],
    *,
    number: int = 0,
    reward: float = 0.0,
    done: bool = False,
    interrupted: bool = False,
    mask: Sequence[bool] = (),
    group: int = 0,
    group_reward: float = 0.0,
) -> bytes:
    head = real(7, reward) + integer(8, done) + integer(9, interrupted) + integer(10, number) + integers(11, mask)
    seen = b"".join(block(13, one) for one in observations)
    return head + seen + integer(14, group) + real(15, group_reward)


def brain(name: str = "B?team=0", continuous: int = 0, branches: Sequence[int] = ()) -> bytes:
    actions = integer(1, continuous) + integer(2, len(branches)) + integers(3, branches)
    return text(7, name) + integer(8, 1) + block(9, actions)


def old_brain(name: str, sizes: Sequence[int], *, continuous: bool) -> bytes:
    """Of a player before version 1.3."""
    return integers(3, sizes) + text(5, "described") + integer(6, int(continuous)) + text(7, name) + integer(8, 1)


def header(status: int = 200, why: str = "") -> bytes:
    return block(1, integer(1, status) + text(2, why))


READY = header()


def introduction(version: str = "1.5.0", package: str = "4.0.0", capabilities: Iterable[int] = range(1, 8)) -> bytes:
    has = block(8, b"".join(integer(number, 1) for number in capabilities))
    told = text(1, "Academy") + text(2, version) + text(3, "a/log") + text(7, package) + has
    return header() + block(2, block(2, told))


def output(
    agents: Mapping[str, Sequence[bytes]] | None = None, brains: Iterable[bytes] = (), side_channel: bytes = b""
) -> bytes:
    """A message with agents of each behavior, new behaviors and side channel bytes."""
    said = b""
    for name, of_one in (agents or {}).items():
        said += block(2, text(1, name) + block(2, b"".join(block(1, one) for one in of_one)))
    said += block(3, side_channel) if side_channel else b""
    new = b"".join(block(5, one) for one in brains)
    return header() + block(2, block(1, said) + (block(2, new) if new else b""))


# ---------------------------------------------------------------- the trainer


def fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field: an int, or bytes."""
    at = 0
    while at < len(content):
        tag, at = _varint(content, at)
        if tag & 7 == VARINT:
            value, at = _varint(content, at)
            yield tag >> 3, value
            continue
        size = 4
        if tag & 7 == BLOCK:
            size, at = _varint(content, at)
        assert tag & 7 in (BLOCK, FOUR_BYTES)
        assert at + size <= len(content)
        yield tag >> 3, content[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (content[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if content[at - 1] < 0x80:
            return value, at


def varints(content: bytes) -> list[int]:
    values, at = [], 0
    while at < len(content):
        value, at = _varint(content, at)
        values.append(value)
    return values


@dataclass(kw_only=True)
class Act:
    """What one agent is told."""

    old: list[float] = field(default_factory=list)
    continuous: list[float] = field(default_factory=list)
    discrete: list[int] = field(default_factory=list)


def acts(content: bytes) -> list[Act]:
    """A ListAgentActionProto."""
    told = []
    for number, one in fields(content):
        assert number == 1
        found = dict(fields(one))
        assert set(found) <= {1, 6, 7}
        old, new = (np.frombuffer(found.get(at, b""), "<f4").tolist() for at in (1, 6))
        told.append(Act(old=old, continuous=new, discrete=varints(found.get(7, b""))))
    return told


@dataclass(kw_only=True)
class Answer:
    """What a message of the trainer says: command 0 step, 1 reset, 2 quit."""

    status: int
    command: int = 0
    side_channel: bytes = b""
    actions: dict[str, list[Act]] = field(default_factory=dict)
    initial: dict[int, Any] | None = None


def answer(content: bytes) -> Answer:
    parts = dict(fields(content))
    said = dict(fields(parts[3]))
    found = Answer(status=dict(fields(parts[1]))[1])
    found.initial = dict(fields(said[2])) if 2 in said else None
    for number, value in fields(said.get(1, b"")):
        if number == 1:
            entry = dict(fields(value))
            assert entry[1].decode() not in found.actions
            found.actions[entry[1].decode()] = acts(entry[2])
        elif number == 4:
            found.command = value
        else:
            assert number == 5
            found.side_channel = value
    return found
