"""What the ends say, as frames: a head and the codec's frames of a record.

The head of a queue's data is a struct, for speed; all other heads are records of the codec. The
first byte tells them apart: a record is a MessagePack map.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeVar

from sparring.pipeline.errors import CodecError
from sparring.pipeline.messages import codec
from sparring.pipeline.messages.codec import Buffer, Limits
from sparring.pipeline.queues.wire import (
    Data,
    Grant,
    PublisherHeartbeat,
    SenderBye,
    SenderHello,
    SubscriberStatus,
    TopicUpdate,
)

LARGE: Final = 262144
"""Bytes from which a message's frames are shared with the socket instead of copied."""

_HEAD: Final = struct.Struct("<cQQ")  # kind, sequence, steps; the sender's id follows
_SMALL_DATA: Final = b"D"
_LARGE_DATA: Final = b"L"

T = TypeVar("T")


class Payload(NamedTuple):
    """A packed record.

    Attributes:
        frames: of the codec.
        size: bytes in them.
    """

    frames: Sequence[Buffer]
    size: int


def pack(record: Any) -> Payload:
    """Packs a record without copying its arrays.

    Raises:
        CodecError: a field holds what its annotation does not allow.
    """
    frames = codec.encode(record)
    size = sum(map(len, frames))
    return Payload(frames if size >= LARGE else [_join(frames)], size)


def _join(frames: Sequence[Buffer]) -> bytes:
    """The codec's stream form: one frame instead of many small ones."""
    header, *arrays = frames
    parts: list[Buffer] = [b"", header, bytes(-(codec.PREFIX.size + len(header)) % 8)]
    for array in arrays:
        parts += (array, bytes(-len(array) % 8))
    parts[0] = codec.PREFIX.pack(codec.PREFIX.size + sum(map(len, parts)), len(header))
    return b"".join(parts)


def unpack(payload: Payload, limits: Limits) -> Any:
    """The record in a payload; its arrays are views of the frames.

    Raises:
        CodecError: the frames are not a record, or beyond the limits.
    """
    frames = payload.frames
    return codec.from_bytes(frames[0], limits) if len(frames) == 1 else codec.decode(frames, limits)


def is_large(head: Buffer) -> bool:
    """Whether the frames after this head are worth sharing with the socket."""
    return head[:1] == _LARGE_DATA


def to_receiver(message: SenderHello | Data | SenderBye) -> list[Buffer]:
    """A sender's message; its payload is a `Payload`."""
    if isinstance(message, Data):
        payload: Payload = message.payload
        kind = _SMALL_DATA if payload.size < LARGE else _LARGE_DATA
        return [_HEAD.pack(kind, message.sequence, message.steps) + message.sender.encode(), *payload.frames]
    return codec.encode(message)


def from_sender(frames: Sequence[Buffer]) -> SenderHello | Data | SenderBye:
    """What a sender said. The payload of Data is not looked at yet.

    Raises:
        CodecError: this is no message of a sender.
    """
    head = frames[0] if frames else b""
    if head[:1] not in (_SMALL_DATA, _LARGE_DATA):
        message = codec.decode(frames)
        return message if isinstance(message, SenderHello) else _only(message, SenderBye)
    try:
        _, sequence, steps = _HEAD.unpack_from(head)
        sender = bytes(head[_HEAD.size :]).decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise CodecError(
            got=f"a data head of {len(head)} bytes ({error})",
            expected=f"{_HEAD.size} bytes and the sender's id",
            remedy="speak the same version",
        ) from error
    return Data(sender, sequence, steps, Payload(frames[1:], 0))


def to_sender(grant: Grant) -> list[Buffer]:
    """A receiver's message."""
    return codec.encode(grant)


def from_receiver(frames: Sequence[Buffer]) -> Grant:
    """What a receiver said.

    Raises:
        CodecError: this is no message of a receiver.
    """
    return _only(codec.decode(frames), Grant)


def to_subscriber(message: TopicUpdate | PublisherHeartbeat, payload: Payload | None) -> list[Buffer]:
    """A publisher's message."""
    frames = codec.encode(message)
    return frames if payload is None else [*frames, *payload.frames]


def from_publisher(frames: Sequence[Buffer], limits: Limits) -> tuple[TopicUpdate | PublisherHeartbeat, Any]:
    """What a publisher said, and the record in it, None for Alive.

    Raises:
        CodecError: this is no message of a publisher.
    """
    message = codec.decode(frames[:1])
    if isinstance(message, TopicUpdate):
        return message, unpack(Payload(frames[1:], 0), limits)
    return _only(message, PublisherHeartbeat), None


def to_publisher(have: SubscriberStatus) -> list[Buffer]:
    """A subscriber's message."""
    return codec.encode(have)


def from_subscriber(frames: Sequence[Buffer]) -> SubscriberStatus:
    """What a subscriber said.

    Raises:
        CodecError: this is no message of a subscriber.
    """
    return _only(codec.decode(frames), SubscriberStatus)


def _only(message: Any, kind: type[T]) -> T:
    if not isinstance(message, kind):
        raise CodecError(
            got=f"{type(message).__name__}",
            expected=f"{kind.__name__} on this connection",
            remedy="connect each kind of end to the endpoint of its counterpart",
        )
    return message
