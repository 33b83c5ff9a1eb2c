"""Encodes the messages between ends as frames: a head, and the codec's frames of a record.

The head of a queue's data is a struct, for speed; all other heads are records of the codec. The
first byte distinguishes them: a record is a MessagePack map.
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
"""Bytes from which the frames of a message are shared with the socket instead of copied."""

_HEAD: Final = struct.Struct("<cQQ")  # kind, sequence, steps; the sender's id follows
_SMALL_DATA: Final = b"D"
_LARGE_DATA: Final = b"L"

T = TypeVar("T")


class Payload(NamedTuple):
    """Holds a packed record: the codec's frames, and the bytes in them."""

    frames: Sequence[Buffer]
    size: int


def pack(record: Any) -> Payload:
    """Packs a record without copying its arrays.

    Raises:
        CodecError: a field's value does not match its annotation.
    """
    frames = codec.encode(record)
    size = sum(map(len, frames))
    return Payload(frames if size >= LARGE else [_join(frames)], size)


def _join(frames: Sequence[Buffer]) -> bytes:
    """Returns the codec's stream form: one frame instead of many small ones."""
    header, *arrays = frames
    parts: list[Buffer] = [b"", header, bytes(-(codec.PREFIX.size + len(header)) % 8)]
    for array in arrays:
        parts += (array, bytes(-len(array) % 8))
    parts[0] = codec.PREFIX.pack(codec.PREFIX.size + sum(map(len, parts)), len(header))
    return b"".join(parts)


def unpack(payload: Payload, limits: Limits) -> Any:
    """Returns the record in a payload; its arrays are views of the frames.

    Raises:
        CodecError: the frames are not a record, or exceed the limits.
    """
    frames = payload.frames
    return codec.from_bytes(frames[0], limits) if len(frames) == 1 else codec.decode(frames, limits)


def is_large(head: Buffer) -> bool:
    """Returns whether the frames after this head are large enough to share with the socket."""
    return head[:1] == _LARGE_DATA


def to_receiver(message: SenderHello | Data | SenderBye) -> list[Buffer]:
    """Encodes a sender's message; the payload of Data is a `Payload`."""
    if isinstance(message, Data):
        payload: Payload = message.payload
        kind = _SMALL_DATA if payload.size < LARGE else _LARGE_DATA
        return [_HEAD.pack(kind, message.sequence, message.steps) + message.sender.encode(), *payload.frames]
    return codec.encode(message)


def from_sender(frames: Sequence[Buffer]) -> SenderHello | Data | SenderBye:
    """Decodes a sender's message; the payload of Data is not decoded yet.

    Raises:
        CodecError: this is not a sender's message.
    """
    head = frames[0] if frames else b""
    if head[:1] not in (_SMALL_DATA, _LARGE_DATA):
        message = codec.decode(frames)
        return message if isinstance(message, SenderHello) else only(message, SenderBye)
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
    """Encodes a receiver's message."""
    return codec.encode(grant)


def from_receiver(frames: Sequence[Buffer]) -> Grant:
    """Decodes a receiver's message.

    Raises:
        CodecError: this is not a receiver's message.
    """
    return only(codec.decode(frames), Grant)


def to_subscriber(message: TopicUpdate | PublisherHeartbeat, payload: Payload | None) -> list[Buffer]:
    """Encodes a publisher's message."""
    frames = codec.encode(message)
    return frames if payload is None else [*frames, *payload.frames]


def from_publisher(frames: Sequence[Buffer], limits: Limits) -> tuple[TopicUpdate | PublisherHeartbeat, Any]:
    """Decodes a publisher's message, and the record in it, None for a heartbeat.

    Raises:
        CodecError: this is not a publisher's message.
    """
    message = codec.decode(frames[:1])
    if isinstance(message, TopicUpdate):
        return message, unpack(Payload(frames[1:], 0), limits)
    return only(message, PublisherHeartbeat), None


def to_publisher(status: SubscriberStatus) -> list[Buffer]:
    """Encodes a subscriber's message."""
    return codec.encode(status)


def from_subscriber(frames: Sequence[Buffer]) -> SubscriberStatus:
    """Decodes a subscriber's message.

    Raises:
        CodecError: this is not a subscriber's message.
    """
    return only(codec.decode(frames), SubscriberStatus)


def only(message: Any, kind: type[T]) -> T:
    """Returns a message of this kind.

    Raises:
        CodecError: it is of another kind.
    """
    if not isinstance(message, kind):
        raise CodecError(
            got=f"{type(message).__name__}",
            expected=f"{kind.__name__} on this connection",
            remedy="connect each kind of end to the endpoint of its counterpart",
        )
    return message
