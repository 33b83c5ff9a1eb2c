"""The one place where bytes become records, and all limits on them.

A message is a MessagePack map and raw arrays that follow it:

    {"type": tag, "body": {field: value}, "arrays": [[dtype, shape], ...]}

where an array field holds its index in `arrays`. Between services the map is frame 0 of a ZeroMQ
message and each array a frame of its own. To simulators both travel in one stream:

    uint32 total length | uint32 header length | header | padding to 8 | (array | padding to 8)*

little-endian, the total counting all of it. Encoders and decoders are compiled once per record
from its annotations. A decoded array is a read-only view of the received bytes: no copy.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
import struct
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np

from sparring.pipeline.errors import CodecError, LimitExceeded, SparringError
from sparring.pipeline.messages.schema import TAGS, Columns, tag_of

Buffer = bytes | bytearray | memoryview
Arrays = list[np.ndarray[Any, Any]]
Encode = Callable[[Any, Arrays], Any]
Decode = Callable[[Any, Arrays], Any]

PREFIX: Final = struct.Struct("<II")
_INT: Final = {int}
_SHORT: Final = 1024
"""Bytes of a header whose lists cannot claim much even where each holds the next."""
_DTYPES: Final = {text: np.dtype(text) for text in ("<f4", "|u1", "|b1", "<i4", "<i8")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a message may hold at most; checked before anything of that size is allocated.

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


def encode(value: Any) -> list[Buffer]:
    """A record as frames: the header, then one frame for each array.

    Raises:
        CodecError: a field holds what its annotation does not allow.
    """
    arrays: Arrays = []
    body = _encoder(value.__class__)(value, arrays)
    described = [[array.dtype.str, array.shape] for array in arrays]
    header: bytes = msgpack.packb({"type": tag_of(value), "body": body, "arrays": described})
    return [header, *(array.data.cast("B") if array.size else b"" for array in arrays)]


def decode(frames: Sequence[Buffer], limits: Limits = SERVICES) -> Any:
    """The record that `frames` hold.

    Raises:
        LimitExceeded: more is claimed or held than `limits` allow.
        CodecError: anything else is wrong with it.
    """
    total = sum(len(frame) for frame in frames)
    if total > limits.total:
        raise _too_much("bytes in a message", total, limits.total)
    if not frames:
        raise CodecError(got="no frames", expected="a header frame", remedy="send a header first")
    header, described = _open(frames[0], limits)
    if len(described) != len(frames) - 1:
        raise CodecError(
            got=f"{len(frames) - 1} array frames for {len(described)} described arrays",
            expected="one frame for each array",
            remedy="send exactly the arrays that the header describes",
        )
    arrays: Arrays = []
    for claim, frame in zip(described, frames[1:], strict=True):
        layout = _described(claim, limits)
        if len(frame) != layout.size:
            raise CodecError(
                got=f"{len(frame)} bytes for an array {layout}",
                expected=f"{layout.size} bytes",
                remedy="send the array that the header describes",
            )
        arrays.append(_view(frame, 0, layout))
    return _record(header, arrays)


# ---------------------------------------------------------------- one stream (to simulators)


def to_bytes(value: object) -> bytes:
    """A record as one length-prefixed message for a byte stream."""
    header, *arrays = encode(value)
    parts: list[Buffer] = [b"", header, bytes(-(PREFIX.size + len(header)) % 8)]
    for array in arrays:
        parts += (array, bytes(-len(array) % 8))
    total = PREFIX.size + sum(len(part) for part in parts)
    parts[0] = PREFIX.pack(total, len(header))
    return b"".join(parts)


def from_bytes(message: Buffer, limits: Limits = SIMULATORS) -> Any:
    """The record of one whole message, its length prefix included.

    Raises:
        LimitExceeded: more is claimed or held than `limits` allow.
        CodecError: anything else is wrong with it.
    """
    if len(message) < PREFIX.size:
        raise CodecError(got=f"{len(message)} bytes", expected="a length prefix of 8", remedy="send whole messages")
    total, header_size = PREFIX.unpack_from(message)
    check_prefix(total, header_size, limits)
    if len(message) != total:
        raise CodecError(got=f"{len(message)} bytes", expected=f"{total}", remedy="hand over exactly one message")
    at = PREFIX.size + header_size
    header, described = _open(memoryview(message)[PREFIX.size : at], limits)
    arrays: Arrays = []
    for claim in described:
        at += -at % 8
        layout = _described(claim, limits)
        if layout.size > total - at:
            raise CodecError(
                got=f"an array of {layout.size} bytes where {max(0, total - at)} remain",
                expected="arrays that fill the message exactly",
                remedy="send each array's bytes after the header, padded to 8",
            )
        arrays.append(_view(message, at, layout))
        at += layout.size
    if at + -at % 8 != total:
        raise CodecError(
            got=f"{total - at} bytes after the last array",
            expected="arrays that fill the message exactly",
            remedy="describe every array in the header and pad to 8 with zeros",
        )
    return _record(header, arrays)


def check_prefix(total: int, header: int, limits: Limits) -> None:
    """Refuses a length prefix that claims too much or too little.

    Raises:
        LimitExceeded: above `limits`.
        CodecError: the lengths contradict each other.
    """
    if total > limits.total:
        raise _too_much("bytes in a message", total, limits.total)
    if header > limits.header:
        raise _too_much("bytes in a header", header, limits.header)
    if total < PREFIX.size + header or header == 0:
        raise CodecError(
            got=f"a total of {total} bytes with a header of {header}",
            expected=f"a header of at least 1 byte and a total of at least {PREFIX.size} more",
            remedy="count the whole message in the total, both lengths included",
        )


class FrameReader:
    """Cuts a byte stream into messages. Holds at most one message and what was fed with it."""

    def __init__(self, limits: Limits = SIMULATORS) -> None:
        self._limits = limits
        self._buffer = bytearray()

    @property
    def buffered(self) -> int:
        """Bytes held."""
        return len(self._buffer)

    @property
    def begun(self) -> int:
        """Bytes of the message that has begun to come, as its prefix claims; 0 where that is not known."""
        return int(PREFIX.unpack_from(self._buffer)[0]) if len(self._buffer) >= PREFIX.size else 0

    def allow(self, limits: Limits) -> None:
        """Other limits, for the messages that follow."""
        self._limits = limits

    def feed(self, data: Buffer) -> None:
        """Adds received bytes."""
        self._buffer += data

    def next(self) -> Any | None:
        """The next record, or None until more bytes are fed.

        Raises:
            LimitExceeded: the message claims more than is allowed; the stream cannot go on.
            CodecError: the message is malformed; the stream cannot go on.
        """
        if len(self._buffer) < PREFIX.size:
            return None
        total, header = PREFIX.unpack_from(self._buffer)
        check_prefix(total, header, self._limits)
        if len(self._buffer) < total:
            return None
        message = bytes(memoryview(self._buffer)[:total])
        del self._buffer[:total]
        return from_bytes(message, self._limits)


# ---------------------------------------------------------------- headers and arrays


def _open(header: Buffer, limits: Limits) -> tuple[dict[str, Any], list[Any]]:
    """The header map, its array descriptions checked for form."""
    if len(header) > limits.header:
        raise _too_much("bytes in a header", len(header), limits.header)
    try:
        if len(header) > _SHORT:
            _check_whole(header)
        opened = msgpack.unpackb(
            header,
            max_str_len=limits.items,
            max_bin_len=limits.items,
            max_array_len=min(limits.items, len(header)),  # an entry takes a byte at least: no nest of claims
            max_map_len=min(limits.items, len(header)),
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise CodecError(
            got=f"a header that is not MessagePack ({type(error).__name__}: {error})",
            expected="one MessagePack map within the limits",
            remedy="check the length prefix and the encoder",
        ) from error
    if not isinstance(opened, dict) or opened.keys() != {"type", "body", "arrays"}:
        found = _shown(list(opened)) if isinstance(opened, dict) else type(opened).__name__
        raise CodecError(
            got=f"a header of {found}", expected="a map of type, body and arrays", remedy="see docs/protocol.md"
        )
    described = opened["arrays"]
    if not isinstance(described, list):
        raise CodecError(
            got="arrays that are no list", expected="a list of [dtype, shape]", remedy="see docs/protocol.md"
        )
    if len(described) > limits.arrays:
        raise _too_much("arrays", len(described), limits.arrays)
    return opened, described


def _check_whole(header: Buffer) -> None:
    """Refuses a header whose lists and maps claim more entries than it holds, before any is made.

    A list is made with room for all that it claims. Lists inside each other could claim a thousand times the header.
    """
    walker = msgpack.Unpacker(read_size=len(header), max_buffer_size=len(header))
    walker.feed(header)
    walker.skip()


class _Layout(NamedTuple):
    """What an array's description says."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    size: int

    def __str__(self) -> str:
        return f"{self.dtype.str}{list(self.shape)}"


def _described(claim: Any, limits: Limits) -> _Layout:
    """Checks one [dtype, shape]."""
    if not (isinstance(claim, list) and len(claim) == 2 and isinstance(claim[0], str) and isinstance(claim[1], list)):
        raise CodecError(got=f"array {_shown(claim)}", expected="[dtype, shape]", remedy="see docs/protocol.md")
    text, shape = claim
    if not {*map(type, shape)} <= _INT:
        raise CodecError(got=f"shape {_shown(shape)}", expected="whole numbers from 0", remedy="correct the shape")
    return _layout(text, tuple(shape), limits)


@lru_cache(maxsize=1024)
def _layout(text: str, shape: tuple[int, ...], limits: Limits) -> _Layout:
    """The layout of a description; remembered, because the same ones come again and again."""
    dtype = _DTYPES.get(text)
    if dtype is None:
        raise CodecError(got=f"dtype {text!r:.40}", expected=f"one of {sorted(_DTYPES)}", remedy="convert the array")
    if len(shape) > limits.ndim:
        raise _too_much("dimensions in an array", len(shape), limits.ndim)
    if min(shape, default=0) < 0:
        raise CodecError(got=f"shape {shape!r:.80}", expected="whole numbers from 0", remedy="correct the shape")
    if max(shape, default=0) > limits.total:
        raise _too_much("entries in a dimension", max(shape), limits.total)
    full = math.prod(length or 1 for length in shape) * dtype.itemsize
    if full > limits.total:  # an empty one too: numpy refuses strides of more than 63 bits
        raise _too_much("bytes in an array", full, limits.total)
    return _Layout(dtype, shape, full if all(shape) else 0)


def _view(source: Buffer, at: int, layout: _Layout) -> np.ndarray[Any, Any]:
    """A read-only array over bytes of `source`, which hold it."""
    if not layout.size:
        array: np.ndarray[Any, Any] = np.empty(layout.shape, layout.dtype)
    else:
        array = np.ndarray(layout.shape, layout.dtype, source, at)
    if array.flags.writeable:
        array.flags.writeable = False
    return array


def _too_much(what: str, got: int, limit: int) -> LimitExceeded:
    return LimitExceeded(
        got=f"{got} {what}", expected=f"at most {limit}", remedy="send less at once, or raise the limit"
    )


_repr = reprlib.Repr()
_repr.maxstring, _repr.maxother, _repr.maxlist, _repr.maxdict = 60, 200, 8, 8


def _shown(value: Any) -> str:
    """A received value for a message: short, and never looked into so deeply that Python gives up."""
    return f"{value:.400}" if isinstance(value, _Plain) else _repr.repr(value)


def _record(header: dict[str, Any], arrays: Arrays) -> Any:
    tag = header["type"]
    cls = TAGS.get(tag) if isinstance(tag, str) else None
    if cls is None:
        raise CodecError(got=f"type {_shown(tag)}", expected=f"one of {sorted(TAGS)}", remedy="speak the same version")
    try:
        return _decoder(typing.cast("Any", cls))(header["body"], arrays)
    except _Misfit as misfit:
        raise misfit.as_error(tag) from None


# ---------------------------------------------------------------- compiled from annotations


@cache
def _encoder(cls: Any) -> Encode:
    """Turns a dataclass into a map, its arrays moved to the list."""
    parts = [(name, _encode_value(hint)) for name, hint in _hints(cls).items()]

    def run(value: Any, arrays: Arrays) -> Any:
        return {name: part(getattr(value, name), arrays) for name, part in parts}

    return run


@cache
def _decoder(cls: Any) -> Decode:
    """Turns a map into a dataclass, every field checked."""
    parts = {name: _decode_value(hint) for name, hint in _hints(cls).items()}
    required = {
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    hidden = {field.name for field in dataclasses.fields(cls) if not field.repr}

    def run(body: Any, arrays: Arrays) -> Any:
        if not isinstance(body, dict):
            raise _Misfit(body, "a map")
        values: dict[str, Any] = {}
        name = ""
        try:
            for name, plain in body.items():
                values[name] = parts[name](plain, arrays)
        except KeyError:
            raise _Misfit(_Plain(f"field {name!r:.60}"), f"one of {sorted(parts)}") from None
        except _Misfit as misfit:
            raise (misfit.hidden() if name in hidden else misfit).within(f".{name}") from None
        if len(values) < len(parts) and (missing := required - values.keys()):
            raise _Misfit(_Plain(f"nothing for {sorted(missing)}"), "all fields without a default")
        try:
            return cls(**values)
        except SparringError as error:  # a spec that refuses its own values
            raise _Misfit(_Plain(str(error)), "a valid record") from error

    return run


class _Plain(str):
    """Words for a message, shown without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


class _Misfit(Exception):
    """A value that its field does not allow; finds out where it stands on its way up."""

    def __init__(self, got: Any, expected: str) -> None:
        self._got, self._expected, self._path = got, expected, ""
        super().__init__()

    def hidden(self) -> _Misfit:
        """Without the value, which may be a secret."""
        return _Misfit(_Plain("something else"), self._expected)

    def within(self, step: str) -> _Misfit:
        self._path = step + self._path
        return self

    def as_error(self, tag: str) -> CodecError:
        where = f"{tag}{self._path}"
        return CodecError(got=f"{_shown(self._got)} in {where}", expected=self._expected, remedy="correct the field")


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _encode_value(hint: Any) -> Encode:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if columns := _columns(hint):
        return _encode_array(columns)
    if dataclasses.is_dataclass(hint):
        return _encoder(typing.cast("Any", hint))
    if origin in (types.UnionType, typing.Union):
        inner = _encode_value(next(arg for arg in args if arg is not type(None)))
        return lambda value, arrays: None if value is None else inner(value, arrays)
    if origin is tuple:
        item = _encode_value(args[0])
        return lambda value, arrays: [item(one, arrays) for one in value]
    if origin is dict:
        entry = _encode_value(args[1])
        return lambda value, arrays: {key: entry(one, arrays) for key, one in value.items()}
    return lambda value, arrays: value


def _encode_array(columns: Columns) -> Encode:
    dtypes = {_DTYPES[text] for text in columns.dtypes}
    ndim = columns.ndim

    def run(value: Any, arrays: Arrays) -> int:
        if not isinstance(value, np.ndarray) or value.dtype not in dtypes or (ndim is not None and value.ndim != ndim):
            got = f"{value.dtype.str}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
            raise CodecError(got=got, expected=_expected(columns), remedy="convert the array before it is sent")
        arrays.append(value if value.flags.c_contiguous else np.ascontiguousarray(value))
        return len(arrays) - 1

    return run


def _decode_value(hint: Any) -> Decode:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if columns := _columns(hint):
        return _decode_array(columns)
    if dataclasses.is_dataclass(hint):
        return _decoder(typing.cast("Any", hint))
    if origin in (types.UnionType, typing.Union):
        inner = _decode_value(next(arg for arg in args if arg is not type(None)))
        return lambda plain, arrays: None if plain is None else inner(plain, arrays)
    if origin is tuple:
        return _decode_tuple(_decode_value(args[0]))
    if origin is dict:
        return _decode_dict(_decode_value(args[1]))
    if origin is typing.Literal:
        return _decode_literal(args)
    return _decode_plain(hint)


def _decode_array(columns: Columns) -> Decode:
    dtypes = {_DTYPES[text] for text in columns.dtypes}
    ndim = columns.ndim

    def run(plain: Any, arrays: Arrays) -> Any:
        if type(plain) is not int or not 0 <= plain < len(arrays):
            raise _Misfit(plain, f"an index below {len(arrays)} into arrays")
        array = arrays[plain]
        if array.dtype not in dtypes or (ndim is not None and array.ndim != ndim):
            raise _Misfit(_Plain(f"{array.dtype.str}{list(array.shape)}"), _expected(columns))
        return array

    return run


def _decode_tuple(item: Decode) -> Decode:
    def run(plain: Any, arrays: Arrays) -> Any:
        if not isinstance(plain, list):
            raise _Misfit(plain, "a list")
        values: list[Any] = []
        try:
            for one in plain:
                values.append(item(one, arrays))  # noqa: PERF401 (its length says where it stopped)
        except _Misfit as misfit:
            raise misfit.within(f"[{len(values)}]") from None
        return tuple(values)

    return run


def _decode_dict(entry: Decode) -> Decode:
    def run(plain: Any, arrays: Arrays) -> Any:
        if not isinstance(plain, dict) or not all(isinstance(key, str) for key in plain):
            raise _Misfit(plain, "a map with text keys")
        values: dict[str, Any] = {}
        key = ""
        try:
            for key, one in plain.items():
                values[key] = entry(one, arrays)
        except _Misfit as misfit:
            raise misfit.within(f"[{key!r:.40}]") from None
        return values

    return run


def _decode_literal(allowed: tuple[Any, ...]) -> Decode:
    def run(plain: Any, _arrays: Arrays) -> Any:
        if not isinstance(plain, str) or plain not in allowed:
            raise _Misfit(plain, f"one of {allowed}")
        return plain

    return run


def _decode_plain(hint: type[Any]) -> Decode:
    def run(plain: Any, _arrays: Arrays) -> Any:
        if type(plain) is hint:
            if hint is float and not math.isfinite(plain):
                raise _Misfit(plain, "a finite number")
            return plain
        if hint is float and type(plain) is int:
            return float(plain)
        raise _Misfit(plain, hint.__name__)

    return run


def _columns(hint: Any) -> Columns | None:
    if typing.get_origin(hint) is typing.Annotated:
        return next((mark for mark in hint.__metadata__ if isinstance(mark, Columns)), None)
    return None


def _expected(columns: Columns) -> str:
    rank = "any shape" if columns.ndim is None else f"{columns.ndim} dimension(s)"
    return f"an array of {' or '.join(columns.dtypes)} with {rank}"
