"""Writes `.demo` files byte by byte: tags, varints and lengths of the wire format, nothing of the reader's schema.

Numbers are those of the messages' fields. As in proto3, a field that holds its default is left out.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.demonstrations.pairing import ActionsOf

VARINT, BLOCK, FOUR_BYTES = 0, 2, 5

NONE, TRANSLATION, VARIABLE = 1, 2, 4
"""Properties of an axis."""


def varint(value: int) -> bytes:
    value &= 2**64 - 1  # negative numbers as their complement
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def tag(number: int, wire: int) -> bytes:
    return varint(number << 3 | wire)


def integer(number: int, value: int) -> bytes:
    return tag(number, VARINT) + varint(value) if value else b""


def real(number: int, value: float) -> bytes:
    return tag(number, FOUR_BYTES) + struct.pack("<f", value) if value else b""


def block(number: int, content: bytes) -> bytes:
    return tag(number, BLOCK) + varint(len(content)) + content


def text(number: int, value: str) -> bytes:
    return block(number, value.encode()) if value else b""


def integers(number: int, values: Iterable[int]) -> bytes:
    content = b"".join(varint(int(value)) for value in values)
    return block(number, content) if content else b""


def reals(number: int, values: Iterable[float]) -> bytes:
    content = b"".join(struct.pack("<f", value) for value in values)
    return block(number, content) if content else b""


def delimited(content: bytes) -> bytes:
    return varint(len(content)) + content


def metadata(*, version: int = 1, steps: int = 0, episodes: int = 0) -> bytes:
    return integer(1, version) + text(2, "Demo") + integer(3, steps) + integer(4, episodes) + real(5, 1.5)


def behavior(name: str = "B?team=0", continuous: int = 0, branches: Sequence[int] = ()) -> bytes:
    actions = integer(1, continuous) + integer(2, len(branches)) + integers(3, branches)
    return text(7, name) + integer(8, 1) + block(9, actions)


def old_behavior(name: str, sizes: Sequence[int], *, continuous: bool) -> bytes:
    return integers(3, sizes) + text(5, "described") + integer(6, int(continuous)) + text(7, name)


def vector(values: Sequence[float], *, name: str = "", kind: int = 0, shape: Sequence[int] | None = None) -> bytes:
    """An observation of one axis."""
    return floats(values, shape if shape is not None else [len(values)], [NONE], name=name, kind=kind)


def floats(
    values: Iterable[float], shape: Sequence[int], axes: Sequence[int] = (), *, name: str = "", kind: int = 0
) -> bytes:
    """An observation that is not compressed."""
    data = block(4, reals(1, values))
    return integers(1, shape) + data + integers(6, axes) + integer(7, kind) + text(8, name)


def packed(
    data: bytes, shape: Sequence[int], axes: Sequence[int] = (), mapping: Sequence[int] = (), compression: int = 1
) -> bytes:
    """An observation of PNG files."""
    return integers(1, shape) + integer(2, compression) + block(3, data) + integers(5, mapping) + integers(6, axes)


def png(pixels: NDArray[np.uint8], mode: str = "RGB") -> bytes:
    """A file of [height, width, channels]."""
    from PIL import Image

    out = io.BytesIO()
    height, width = pixels.shape[:2]
    Image.frombytes(mode, (width, height), np.ascontiguousarray(pixels).tobytes()).save(out, "PNG")
    return out.getvalue()


def action(continuous: Sequence[float] = (), discrete: Sequence[int] = (), old: Sequence[float] = ()) -> bytes:
    return reals(1, old) + reals(6, continuous) + integers(7, discrete)


def pair(
    observations: Iterable[bytes],
    act: bytes = b"",
    *,
    reward: float = 0.0,
    done: bool = False,
    cut: bool = False,
    agent: int = 0,
    mask: Sequence[bool] = (),
    group: int = 0,
    group_reward: float = 0.0,
) -> bytes:
    info = real(7, reward) + integer(8, done) + integer(9, cut) + integer(10, agent) + integers(11, mask)
    info += b"".join(block(13, one) for one in observations) + integer(14, group) + real(15, group_reward)
    return block(1, info) + block(2, act)


def demo(brain: bytes, pairs: Sequence[bytes], *, version: int = 1, closed: bool = True) -> bytes:
    """A whole file, as the recorder leaves it when it is closed, or when it was not."""
    meta = metadata(version=version, steps=len(pairs), episodes=1) if closed else metadata(version=version)
    head = delimited(meta).ljust(33, b"\0") + delimited(brain)
    return head + b"".join(delimited(one) for one in pairs) + (meta if closed else b"")


@dataclass(kw_only=True)
class Played:
    """An episode as it was played: n + 1 observations and n of the rest.

    Attributes:
        observations: [n + 1, size] each.
        masks: [n, K], or none.
        done: it ended before the file did.
        cut: by a limit of time.
        before: reward before the first decision, which belongs to no step.
    """

    observations: NDArray[np.float32]
    continuous: NDArray[np.float32]
    discrete: NDArray[np.int32]
    rewards: NDArray[np.float32]
    group_rewards: NDArray[np.float32]
    masks: NDArray[np.bool_] | None = None
    agent: int = 0
    group: int = 0
    done: bool = True
    cut: bool = False
    before: float = 0.0

    def chosen(self, decision: int) -> bytes:
        """The action of a decision: of the one before the first zeros, of one that was never made nothing."""
        if decision == len(self.rewards):
            return b""
        if decision < 0:
            return action([0.0] * self.continuous.shape[1], [0] * self.discrete.shape[1])
        return action(self.continuous[decision].tolist(), self.discrete[decision].tolist())

    def pairs(self, actions: ActionsOf = "previous") -> list[bytes]:
        """What a recorder writes: with each observation the reward that led to it, and one of the two actions."""
        out = []
        last = len(self.rewards)
        for at, seen in enumerate(self.observations):
            out.append(
                pair(
                    [vector(seen.tolist())],
                    self.chosen(at - 1 if actions == "previous" else at),
                    reward=float(self.rewards[at - 1]) if at else self.before,
                    group_reward=float(self.group_rewards[at - 1]) if at else 0.0,
                    done=self.done and at == last,
                    cut=self.cut and at == last,
                    agent=self.agent,
                    group=self.group,
                    mask=() if self.masks is None or at == last else self.masks[at].tolist(),
                )
            )
        return out


def reset_pairs(episodes: Sequence[Played]) -> list[bytes]:
    """The pairs, with their own actions, of an agent that is reset before it sees what ended its episode."""
    out: list[bytes] = []
    for number, one in enumerate(episodes):
        before = episodes[number - 1] if number else None
        first = pair(
            [vector(one.observations[0].tolist())],
            one.chosen(0),
            reward=float(before.rewards[-1]) if before else 0.0,
            group_reward=float(before.group_rewards[-1]) if before else 0.0,
            done=before is not None,
            cut=before is not None and before.cut,
            mask=() if one.masks is None else one.masks[0].tolist(),
        )
        inner = one.pairs("own")[1:]
        out += [first, *(inner if one is episodes[-1] else inner[:-1])]
    return out
