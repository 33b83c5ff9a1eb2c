"""Writes messages of a Unity player byte by byte, and parses those of the trainer, without the schema under test.

Numbers are field numbers of the messages. As in proto3, a field with its default value is left out.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.unity.protobuf_writer import (
    BLOCK,
    FOUR_BYTES,
    NONE,
    TRANSLATION,
    VARINT,
    block,
    integer,
    integers,
    real,
    text,
)

CHW, HWC = (NONE, TRANSLATION, TRANSLATION), (TRANSLATION, TRANSLATION, NONE)


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
    """Returns an image [channels, height, width] as PNG files of three channels; the last is padded with black."""
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
    content = b"".join(block(13, observation) for observation in observations)
    return head + content + integer(14, group) + real(15, group_reward)


def brain(name: str = "B?team=0", continuous: int = 0, branches: Sequence[int] = ()) -> bytes:
    actions = integer(1, continuous) + integer(2, len(branches)) + integers(3, branches)
    return text(7, name) + integer(8, 1) + block(9, actions)


def old_brain(name: str, sizes: Sequence[int], *, continuous: bool) -> bytes:
    """Returns the parameters of a behavior as players before version 1.3 send them."""
    return integers(3, sizes) + text(5, "described") + integer(6, int(continuous)) + text(7, name) + integer(8, 1)


def header(status: int = 200, why: str = "") -> bytes:
    return block(1, integer(1, status) + text(2, why))


READY = header()


def introduction(version: str = "1.5.0", package: str = "4.0.0", capabilities: Iterable[int] = range(1, 8)) -> bytes:
    has = block(8, b"".join(integer(number, 1) for number in capabilities))
    content = text(1, "Academy") + text(2, version) + text(3, "a/log") + text(7, package) + has
    return header() + block(2, block(2, content))


def output(
    agents: Mapping[str, Sequence[bytes]] | None = None, brains: Iterable[bytes] = (), side_channel: bytes = b""
) -> bytes:
    """Returns a message with agents of each behavior, new behaviors and side channel bytes."""
    content = b""
    for name, of_behavior in (agents or {}).items():
        content += block(2, text(1, name) + block(2, b"".join(block(1, one) for one in of_behavior)))
    content += block(3, side_channel) if side_channel else b""
    new = b"".join(block(5, one) for one in brains)
    return header() + block(2, block(1, content) + (block(2, new) if new else b""))


# ---------------------------------------------------------------- the trainer


def fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yields number and value of each field; the value is an int or bytes."""
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
    """The actions of one agent."""

    old: list[float] = field(default_factory=list)
    continuous: list[float] = field(default_factory=list)
    discrete: list[int] = field(default_factory=list)


def acts(content: bytes) -> list[Act]:
    """Parses a ListAgentActionProto."""
    found_acts = []
    for number, one in fields(content):
        assert number == 1
        found = dict(fields(one))
        assert set(found) <= {1, 6, 7}
        old, new = (np.frombuffer(found.get(at, b""), "<f4").tolist() for at in (1, 6))
        found_acts.append(Act(old=old, continuous=new, discrete=varints(found.get(7, b""))))
    return found_acts


@dataclass(kw_only=True)
class Answer:
    """A message of the trainer; command 0 is step, 1 is reset, 2 is quit."""

    status: int
    command: int = 0
    side_channel: bytes = b""
    actions: dict[str, list[Act]] = field(default_factory=dict)
    initial: dict[int, Any] | None = None


def answer(content: bytes) -> Answer:
    parts = dict(fields(content))
    unity_input = dict(fields(parts[3]))
    found = Answer(status=dict(fields(parts[1]))[1])
    found.initial = dict(fields(unity_input[2])) if 2 in unity_input else None
    for number, value in fields(unity_input.get(1, b"")):
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
