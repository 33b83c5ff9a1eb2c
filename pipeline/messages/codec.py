"""The codec is the one place where bytes become records, and it enforces all limits on them.

A message is a MessagePack map, followed by raw arrays:

    {"type": tag, "body": {field: value}, "arrays": [[dtype, shape], ...]}

An array field holds its index in `arrays`. Between services the map is frame 0 of a ZeroMQ message and each array has
a frame of its own. Between the trainer and simulators both travel in one stream:

    uint32 total length | uint32 header length | header | padding to 8 | (array | padding to 8)*

All numbers are little-endian, and the total length includes both lengths. A decoded array is a read-only view of the
received bytes, not a copy.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final, NamedTuple

import msgpack
import numpy as np

from sparring.pipeline.errors import CodecError, LimitExceeded
from sparring.pipeline.messages.schema import DTYPES, Arrays, Value, decode_record, describe, encode_record, shorten
from sparring.pipeline.messages.steady import NUMBER, Shape, shape_of
from sparring.pipeline.specs import Array

Buffer = bytes | bytearray | memoryview

PREFIX: Final = struct.Struct("<II")
_SHORT: Final = 1024
"""Bytes up to which a header's lists cannot claim much memory, even where each one contains the next."""


class Limits(NamedTuple):
    """Limits bound the size of a message; they are checked before anything of that size is allocated.

    Attributes:
        total: bytes of the whole message.
        header: bytes of the MessagePack header.
        arrays: number of arrays.
        ndim: dimensions of an array.
        items: entries of any map or list, and characters of any text, in the header.
    """

    total: int = 256 * 2**20
    header: int = 2**20
    arrays: int = 4096
    ndim: int = 8
    items: int = 2**16


SERVICES: Final = Limits()
SIMULATORS: Final = Limits(total=64 * 2**20, header=2**18, arrays=1024)


# ---------------------------------------------------------------- frames (between services)


def encode(value: Value) -> list[Buffer]:
    """Encodes a record as frames: the header, then one frame for each array.

    Raises:
        CodecError: a field's annotation does not allow its value.
    """
    arrays: Arrays = []
    header = encode_record(value, arrays)
    header["arrays"] = [[array.dtype.str, array.shape] for array in arrays]
    packed = msgpack.packb(header, unicode_errors="backslashreplace")  # an error of a game may quote broken text
    return [packed, *(array.data.cast("B") if array.size else b"" for array in arrays)]


def decode(frames: Sequence[Buffer], limits: Limits = SERVICES) -> Value:
    """Decodes the record that `frames` hold.

    Raises:
        LimitExceeded: more is claimed or held than `limits` allow.
        CodecError: anything else is wrong with it.
    """
    total = sum(len(frame) for frame in frames)
    if total > limits.total:
        raise _limit_exceeded("bytes in a message", total, limits.total)
    if not frames:
        raise _malformed("no frames", "a header frame")
    header, layouts = _parse_header(frames[0], limits)
    if len(layouts) != len(frames) - 1:
        got = f"{len(frames) - 1} array frames for {len(layouts)} described arrays"
        raise _malformed(got, "one frame for each array")
    arrays: Arrays = []
    for frame, layout in zip(frames[1:], layouts, strict=True):
        if len(frame) != layout.size:
            got = f"{len(frame)} bytes for an array {describe(layout.dtype, layout.shape)}"
            raise _malformed(got, f"{layout.size} bytes")
        arrays.append(_view(frame, 0, layout))
    return decode_record(header, arrays)


# ---------------------------------------------------------------- one stream (to simulators)


def to_bytes(value: Value) -> bytes:
    """Encodes a record as one length-prefixed message for a byte stream."""
    return join(encode(value))


def join(frames: Sequence[Buffer]) -> bytes:
    """Returns the one message that frames make in a byte stream."""
    header, *arrays = frames
    parts: list[Buffer] = [b"", header, bytes(-(PREFIX.size + len(header)) % 8)]
    for array in arrays:
        parts += (array, bytes(-len(array) % 8))
    total = PREFIX.size + sum(len(part) for part in parts)
    parts[0] = PREFIX.pack(total, len(header))
    return b"".join(parts)


def from_bytes(message: Buffer, limits: Limits = SIMULATORS) -> Value:
    """Decodes one whole message, its length prefix included.

    Raises:
        LimitExceeded: more is claimed or held than `limits` allow.
        CodecError: anything else is wrong with it.
    """
    if len(message) < PREFIX.size:
        raise _malformed(f"{len(message)} bytes", "a length prefix of 8")
    total, header_size = PREFIX.unpack_from(message)
    check_prefix(total, header_size, limits)
    if len(message) != total:
        raise _malformed(f"{len(message)} bytes", f"exactly one message of {total}")
    header, layouts = _parse_header(memoryview(message)[PREFIX.size : PREFIX.size + header_size], limits)
    return decode_record(header, _views(message, header_size, layouts))


def check_prefix(total: int, header: int, limits: Limits) -> None:
    """Rejects a length prefix that claims too much or too little.

    Raises:
        LimitExceeded: a length exceeds `limits`.
        CodecError: the lengths contradict each other.
    """
    if total > limits.total:
        raise _limit_exceeded("bytes in a message", total, limits.total)
    if header > limits.header:
        raise _limit_exceeded("bytes in a header", header, limits.header)
    if total < PREFIX.size + header or header == 0:
        got = f"a total of {total} bytes with a header of {header}"
        raise _malformed(got, f"a header of at least 1 byte and a total of at least {PREFIX.size} more")


class FrameReader:
    """Splits a byte stream into messages, and reads steady ones without parsing them again.

    Holds at most one message and the bytes fed with it.
    """

    def __init__(self, limits: Limits = SIMULATORS) -> None:
        self._limits = limits
        self._buffer: bytes | bytearray = b""
        self._known: _SteadyMessages = {}

    @property
    def buffered(self) -> int:
        """Returns the number of bytes held."""
        return len(self._buffer)

    @property
    def begun(self) -> int:
        """Returns the size that the prefix of the incoming message claims; 0 before the prefix is complete."""
        return int(PREFIX.unpack_from(self._buffer)[0]) if len(self._buffer) >= PREFIX.size else 0

    def allow(self, limits: Limits) -> None:
        """Replaces the limits for the messages that follow."""
        self._limits = limits
        self._known.clear()

    def feed(self, data: Buffer) -> None:
        """Adds received bytes."""
        if self._buffer:
            self._growing().extend(data)
        else:
            self._buffer = bytes(data)  # usually one whole message

    def next(self) -> Value | None:
        """Returns the next record, or None until more bytes are fed.

        Raises:
            LimitExceeded: the message claims more than is allowed; the stream cannot continue.
            CodecError: the message is malformed; the stream cannot continue.
        """
        if len(self._buffer) < PREFIX.size:
            return None
        total, header = PREFIX.unpack_from(self._buffer)
        check_prefix(total, header, self._limits)
        if len(self._buffer) < total:
            return None
        if len(self._buffer) == total:
            message, self._buffer = bytes(self._buffer), b""
        else:
            message, rest = bytes(memoryview(self._buffer)[:total]), self._growing()
            del rest[:total]
        head, number, tail = _split(message[PREFIX.size : PREFIX.size + header])
        steady = self._known.get((head, tail))
        if steady is not None and (value := steady.read(message, header, number)) is not None:
            return value
        value = from_bytes(message, self._limits)
        _note(self._known, message, header, self._limits)
        return value

    def _growing(self) -> bytearray:
        """Returns the buffer as one that can change."""
        if isinstance(self._buffer, bytes):
            self._buffer = bytearray(self._buffer)
        return self._buffer


class FrameWriter:
    """Encodes the messages of one byte stream as `to_bytes` does, and steady ones from what was built before."""

    def __init__(self) -> None:
        self._known: _SteadyMessages = {}
        self._last: _SteadyMessage | None = None

    def to_bytes(self, value: Value) -> bytes:
        """Encodes a record. Raises as `encode`."""
        arrays: Arrays = []
        if self._last is not None and self._last.shape.collect(value, arrays):
            return self._last.write(arrays, value.sequence)
        message = to_bytes(value)
        self._last = _note(self._known, message, PREFIX.unpack_from(message)[1], SERVICES)
        return message


class _SteadyMessage(NamedTuple):
    """A message without its number and the contents of its arrays.

    Attributes:
        head: bytes of the header before the number.
        tail: bytes after it.
        arrays: dtype, shape and place of each, relative to the first.
        pads: bytes between each array and the next.
        size: bytes of all arrays, with these.
        shape: of the record.
    """

    head: bytes
    tail: bytes
    arrays: tuple[tuple[np.dtype[np.generic], tuple[int, ...], int], ...]
    pads: tuple[bytes, ...]
    size: int
    shape: Shape

    @classmethod
    def of(cls, head: bytes, tail: bytes, message: bytes, header_size: int, limits: Limits) -> _SteadyMessage | None:
        """Returns the steady part of a valid message; None where anything else in it changes with the number."""
        try:
            header, layouts = _parse_header(head + b"\0" + tail, limits)
            other, _ = _parse_header(head + b"\1" + tail, limits)
        except CodecError:  # the bytes after the key are no number, or inside a text
            return None
        body = header["body"]
        if not isinstance(body, dict) or body.get(NUMBER) != 0 or other != {**header, "body": {**body, NUMBER: 1}}:
            return None
        views = _views(message, header_size, layouts)
        shape = shape_of(decode_record(header, views), views)
        if shape is None:
            return None
        pads = tuple(bytes(-layout.size % 8) for layout in layouts)
        places = accumulate((layout.size + len(pad) for layout, pad in zip(layouts, pads, strict=True)), initial=0)
        *starts, size = places
        arrays = tuple((one.dtype, one.shape, at) for one, at in zip(layouts, starts, strict=True))
        return cls(head, tail, arrays, pads, size, shape)

    def read(self, message: bytes, header_size: int, number: int) -> Value | None:
        """Returns the record of a message that has this header; None where its size contradicts it."""
        begin = (PREFIX.size + header_size + 7) // 8 * 8
        if len(message) != begin + self.size:
            return None
        ndarray = np.ndarray  # over bytes, and so read-only
        return self.shape.build(
            [ndarray(shape, dtype, message, begin + at) for dtype, shape, at in self.arrays], number
        )

    def write(self, arrays: Arrays, number: int) -> bytes:
        """Returns the message of a record of this shape."""
        header = b"".join((self.head, msgpack.packb(number), self.tail))
        begin = PREFIX.size + len(header)
        prefix = PREFIX.pack((begin + 7) // 8 * 8 + self.size, len(header))
        parts: list[Value] = [prefix, header, bytes(-begin % 8)]  # and arrays, which are buffers
        for array, pad in zip(arrays, self.pads, strict=True):
            parts.append(array)
            parts.append(pad)
        return b"".join(parts)


_SteadyMessages = dict[tuple[bytes, bytes], _SteadyMessage | None]
"""Headers that recur but for the number of the message, by what is before and after it; None where seen once."""


def _note(known: _SteadyMessages, message: bytes, header_size: int, limits: Limits) -> _SteadyMessage | None:
    """Notes a valid message, and returns its steady part once it has recurred."""
    head, number, tail = _split(message[PREFIX.size : PREFIX.size + header_size])
    if number < 0:
        return None
    if len(known) >= _KEPT:
        known.clear()
    if (head, tail) in known and known[head, tail] is None:
        known[head, tail] = _SteadyMessage.of(head, tail, message, header_size, limits)
    return known.setdefault((head, tail), None)


_KEPT: Final = 16
"""Steady headers that are kept for each direction of a connection."""
_SEQUENCE: Final = msgpack.packb(NUMBER)
_NUMBERS: Final = {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}
"""Bytes of a whole number by its first byte; one below 128 is that byte."""


def _split(header: bytes) -> tuple[bytes, int, bytes]:
    """Returns the bytes before and after the number of a message, and the number; -1 where there is none."""
    before, key, after = header.partition(_SEQUENCE)
    if not key or not after:
        return header, -1, b""
    first = after[0]
    length = 1 if first < 0x80 else _NUMBERS.get(first, 0)
    if not length or length > len(after):
        return header, -1, b""
    return before + key, first if length == 1 else int.from_bytes(after[1:length], "big"), after[length:]


# ---------------------------------------------------------------- headers and arrays


def unpack(packed: Buffer, limits: Limits) -> Value:
    """Returns the MessagePack value that bytes hold.

    Raises:
        CodecError: they hold none within the limits.
    """
    most = min(limits.items, len(packed))  # an entry takes at least a byte
    try:
        if len(packed) > _SHORT:  # decoding allocates a list for all claimed entries: nested ones claim a thousandfold
            walker = msgpack.Unpacker(read_size=len(packed), max_buffer_size=len(packed))
            walker.feed(packed)
            walker.skip()
        bounds = {"max_str_len": limits.items, "max_bin_len": limits.items, "max_array_len": most, "max_map_len": most}
        return msgpack.unpackb(packed, max_ext_len=0, **bounds)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        got = f"a header that is not MessagePack ({type(error).__name__}: {error})"
        raise _malformed(got, "one MessagePack value within the limits") from error


def _parse_header(header: Buffer, limits: Limits) -> tuple[dict[str, Value], list[_ArrayLayout]]:
    """Parses a header into its map and the layouts of the arrays."""
    if len(header) > limits.header:
        raise _limit_exceeded("bytes in a header", len(header), limits.header)
    opened = unpack(header, limits)
    if not isinstance(opened, dict) or opened.keys() != {"type", "body", "arrays"}:
        found = shorten(list(opened)) if isinstance(opened, dict) else type(opened).__name__
        raise _malformed(f"a header of {found}", "a map of type, body and arrays")
    described = opened["arrays"]
    if not isinstance(described, list):
        raise _malformed("arrays that are no list", "a list of [dtype, shape]")
    if len(described) > limits.arrays:
        raise _limit_exceeded("arrays", len(described), limits.arrays)
    return opened, [_parse_layout(claim, limits) for claim in described]


class _ArrayLayout(NamedTuple):
    """The layout of an array follows from its description; `size` is in bytes."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    size: int


def _parse_layout(claim: Value, limits: Limits) -> _ArrayLayout:
    """Parses one [dtype, shape] description."""
    if not (isinstance(claim, list) and len(claim) == 2 and isinstance(claim[0], str) and isinstance(claim[1], list)):
        raise _malformed(f"array {shorten(claim)}", "[dtype, shape]")
    text, shape = claim
    if not {*map(type, shape)} <= {int}:
        raise _malformed(f"shape {shorten(shape)}", "whole numbers from 0")
    return _layout(text, tuple(shape), limits)


@lru_cache(maxsize=1024)
def _layout(text: str, shape: tuple[int, ...], limits: Limits) -> _ArrayLayout:
    """Returns the layout of a description; cached, because the same descriptions recur."""
    dtype = DTYPES.get(text)
    if dtype is None:
        raise CodecError(got=f"dtype {text!r:.40}", expected=f"one of {sorted(DTYPES)}", remedy="convert the array")
    if len(shape) > limits.ndim:
        raise _limit_exceeded("dimensions in an array", len(shape), limits.ndim)
    if min(shape, default=0) < 0:
        raise _malformed(f"shape {shape!r:.80}", "whole numbers from 0")
    if max(shape, default=0) > limits.total:
        raise _limit_exceeded("entries in a dimension", max(shape), limits.total)
    full = math.prod(length or 1 for length in shape) * dtype.itemsize
    if full > limits.total:  # empty arrays too: numpy rejects strides above 63 bits
        raise _limit_exceeded("bytes in an array", full, limits.total)
    return _ArrayLayout(dtype, shape, full if all(shape) else 0)


def _view(source: Buffer, at: int, layout: _ArrayLayout) -> Array:
    """Returns a read-only array over the bytes of `source` from `at` on."""
    dtype, shape, size = layout
    array: Array = np.ndarray(shape, dtype, source, at) if size else np.empty(shape, dtype)
    array.flags.writeable = False
    return array


def _views(message: Buffer, header_size: int, layouts: Sequence[_ArrayLayout]) -> Arrays:
    """Returns the arrays that follow the header of a whole message, each padded to 8 bytes."""
    at = PREFIX.size + header_size
    end = (at + 7) // 8 * 8 + sum((layout.size + 7) // 8 * 8 for layout in layouts)
    if end != len(message):
        raise _malformed(f"{len(message)} bytes", f"{end}: the header and its arrays, each padded to 8")
    arrays: Arrays = []
    for layout in layouts:
        at += -at % 8
        arrays.append(_view(message, at, layout))
        at += layout.size
    return arrays


def _malformed(got: str, expected: str) -> CodecError:
    return CodecError(got=got, expected=expected, remedy="send messages in the format of docs/protocol.md")


def _limit_exceeded(what: str, got: int, most: int) -> LimitExceeded:
    return LimitExceeded(got=f"{got} {what}", expected=f"at most {most}", remedy="send less at once or raise the limit")
