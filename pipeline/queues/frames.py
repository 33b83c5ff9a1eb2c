"""Encodes the messages between ends as frames: a head, and the codec's frames of a record.

The heads of messages with a record are structs, for speed; all others are records of the codec. The
first byte distinguishes them: a record of the codec is a MessagePack map.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

from sparring.pipeline.errors import CodecError
from sparring.pipeline.messages import codec
from sparring.pipeline.messages.codec import SERVICES, Buffer, Limits
from sparring.pipeline.messages.fields import Value
from sparring.pipeline.queues.wire import (
    Data,
    Grant,
    Message,
    PublisherHeartbeat,
    SenderBye,
    SenderHello,
    SubscriberStatus,
    TopicUpdate,
)

LARGE: Final = 262144
"""Bytes from which the frames of a message are shared with the socket instead of copied."""

_DATA: Final = struct.Struct("<cQQ")  # kind, sequence, steps; the sender's id follows
_SMALL_DATA: Final = b"D"
_LARGE_DATA: Final = b"L"
_UPDATE: Final = struct.Struct("<cQQQ")  # kind, echo, after, revision; the publisher's id and the key follow
_TOPIC_UPDATE: Final = b"U"

T = TypeVar("T")


class Packed(NamedTuple):
    """Holds a packed record: the codec's frames, the bytes in them, and the limits within which they are read."""

    frames: Sequence[Buffer]
    size: int = 0
    limits: Limits = SERVICES

    def unpack(self, kind: type[T]) -> T:
        """Returns the record, whose arrays are views of the frames; see `Payload.unpack`."""
        frames, limits = self.frames, self.limits
        value = codec.from_bytes(frames[0], limits) if len(frames) == 1 else codec.decode(frames, limits)
        return of_kind(value, kind)


def of_kind(value: Value, kind: type[T]) -> T:
    """Returns a decoded record of this kind.

    Raises:
        CodecError: it is of another kind.
    """
    if not isinstance(value, kind):
        raise CodecError(
            got=f"a record of type {type(value).__name__}",
            expected=kind.__name__,
            remedy="send each record through the queue or topic of its type",
        )
    return value


def pack(record: T) -> Packed:
    """Packs a record: a large one without copying its arrays, a small one as one frame instead of many.

    Raises:
        CodecError: a field's value does not match its annotation.
    """
    frames = codec.encode(record)
    size = sum(map(len, frames))
    return Packed(frames if size >= LARGE else [codec.join(frames)], size)


def is_large(head: Buffer) -> bool:
    """Returns whether the frames after this head are large enough to share with the socket."""
    return head[:1] == _LARGE_DATA


def encode(message: Message) -> list[Buffer]:
    """Encodes a message; the payload of one with a record is `Packed`."""
    if isinstance(message, Data):
        packed = of_kind(message.payload, Packed)
        kind = _SMALL_DATA if packed.size < LARGE else _LARGE_DATA
        return [_DATA.pack(kind, message.sequence, message.steps) + message.sender.encode(), *packed.frames]
    if isinstance(message, TopicUpdate):
        numbers = _UPDATE.pack(_TOPIC_UPDATE, message.echo, message.after, message.revision)
        names = f"{message.publisher}\0{message.key}".encode()
        return [numbers + names, *of_kind(message.payload, Packed).frames]
    return codec.encode(message)


def decode(frames: Sequence[Buffer], limits: Limits = SERVICES) -> Message:
    """Decodes a message, but not yet the record in it.

    Raises:
        CodecError: this is not a message.
    """
    head = frames[0] if frames else b""
    try:
        if head[:1] in (_SMALL_DATA, _LARGE_DATA):
            _, sequence, steps = _DATA.unpack_from(head)
            return Data(str(head[_DATA.size :], "utf-8"), sequence, steps, Packed(frames[1:], 0, limits))
        if head[:1] == _TOPIC_UPDATE:
            _, echo, after, revision = _UPDATE.unpack_from(head)
            publisher, key = str(head[_UPDATE.size :], "utf-8").split("\0")
            return TopicUpdate(publisher, echo, after, revision, key, Packed(frames[1:], 0, limits))
    except (struct.error, ValueError) as error:
        raise CodecError(
            got=f"a head of {len(head)} bytes ({error})", expected="numbers and names", remedy="speak the same version"
        ) from error
    message = codec.decode(frames)
    if isinstance(message, SenderHello | SenderBye | Grant | SubscriberStatus | PublisherHeartbeat):
        return message
    raise CodecError(
        got=f"a record of type {type(message).__name__}", expected="a head before it", remedy="speak the same version"
    )
