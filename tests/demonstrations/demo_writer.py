"""Writes `.demo` files byte by byte: tags, varints and lengths of the wire format, without the reader's schema.

Numbers are field numbers of the messages. As in proto3, a field with its default value is left out.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.demonstrations.episodes import ActionsOf
from tests.unity.protobuf_writer import (
    NONE,
    block,
    integer,
    integers,
    real,
    reals,
    text,
    varint,
)


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
    """Returns an observation with one axis."""
    return floats(values, shape if shape is not None else [len(values)], [NONE], name=name, kind=kind)


def floats(
    values: Iterable[float], shape: Sequence[int], axes: Sequence[int] = (), *, name: str = "", kind: int = 0
) -> bytes:
    """Returns an uncompressed observation."""
    data = block(4, reals(1, values))
    return integers(1, shape) + data + integers(6, axes) + integer(7, kind) + text(8, name)


def packed(
    data: bytes, shape: Sequence[int], axes: Sequence[int] = (), mapping: Sequence[int] = (), compression: int = 1
) -> bytes:
    """Returns an observation that consists of PNG files."""
    return integers(1, shape) + integer(2, compression) + block(3, data) + integers(5, mapping) + integers(6, axes)


def png(pixels: NDArray[np.uint8], mode: str = "RGB") -> bytes:
    """Returns a PNG file of pixels [height, width, channels]."""
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
    interrupted: bool = False,
    agent: int = 0,
    mask: Sequence[bool] = (),
    group: int = 0,
    group_reward: float = 0.0,
) -> bytes:
    info = real(7, reward) + integer(8, done) + integer(9, interrupted) + integer(10, agent) + integers(11, mask)
    info += (
        b"".join(block(13, observation) for observation in observations) + integer(14, group) + real(15, group_reward)
    )
    return block(1, info) + block(2, act)


def demo(brain: bytes, pairs: Sequence[bytes], *, version: int = 1, closed: bool = True) -> bytes:
    """Returns a whole file as a recorder leaves it, closed or not."""
    meta = metadata(version=version, steps=len(pairs), episodes=1) if closed else metadata(version=version)
    head = delimited(meta).ljust(33, b"\0") + delimited(brain)
    return head + b"".join(delimited(pair) for pair in pairs) + (meta if closed else b"")


@dataclass(kw_only=True)
class Episode:
    """An episode of n steps with n + 1 observations.

    Attributes:
        observations: shape [n + 1, size].
        masks: shape [n, K], or None.
        done: whether the episode ended before the file did.
        interrupted: whether a time limit ended it.
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
    interrupted: bool = False
    before: float = 0.0

    def action_of(self, decision: int) -> bytes:
        """Returns the action of a decision: zeros before the first decision, nothing after the last."""
        if decision == len(self.rewards):
            return b""
        if decision < 0:
            return action([0.0] * self.continuous.shape[1], [0] * self.discrete.shape[1])
        return action(self.continuous[decision].tolist(), self.discrete[decision].tolist())

    def pairs(self, actions: ActionsOf = "previous") -> list[bytes]:
        """Returns the pairs of a recorder: each observation with the reward before it and one of the two actions."""
        out = []
        last = len(self.rewards)
        for at, seen in enumerate(self.observations):
            out.append(
                pair(
                    [vector(seen.tolist())],
                    self.action_of(at - 1 if actions == "previous" else at),
                    reward=float(self.rewards[at - 1]) if at else self.before,
                    group_reward=float(self.group_rewards[at - 1]) if at else 0.0,
                    done=self.done and at == last,
                    interrupted=self.interrupted and at == last,
                    agent=self.agent,
                    group=self.group,
                    mask=() if self.masks is None or at == last else self.masks[at].tolist(),
                )
            )
        return out


def reset_pairs(episodes: Sequence[Episode]) -> list[bytes]:
    """Returns the pairs, with their own actions, of an agent that resets before it observes the end of its episode."""
    out: list[bytes] = []
    for number, episode in enumerate(episodes):
        before = episodes[number - 1] if number else None
        first = pair(
            [vector(episode.observations[0].tolist())],
            episode.action_of(0),
            reward=float(before.rewards[-1]) if before else 0.0,
            group_reward=float(before.group_rewards[-1]) if before else 0.0,
            done=before is not None,
            interrupted=before is not None and before.interrupted,
            mask=() if episode.masks is None else episode.masks[0].tolist(),
        )
        inner = episode.pairs("own")[1:]
        out += [first, *(inner if episode is episodes[-1] else inner[:-1])]
    return out
