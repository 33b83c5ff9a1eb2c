"""Recognizes the steady calls of a player in the bytes of its HTTP/2 connection, and writes their answers.

A call of a player differs from the one before in its stream and its message alone: the same headers are compressed to
the same bytes. RFC 9113 defines the frames (sections 4.1, 6.1, 6.2 and 6.9), RFC 7541 the compression of headers, gRPC
the prefix of a message.
"""

from struct import Struct
from typing import Final, NamedTuple

from hpack import Encoder

PREFIX: Final = 5
"""Bytes before a message of gRPC: a compression flag, and its length."""
BEGIN: Final = ((b":status", b"200"), (b"content-type", b"application/grpc"))
"""Headers before an answer."""
END: Final = ((b"grpc-status", b"0"),)
"""Headers after an answer."""
LARGEST_FRAME: Final = 2**14
"""Bytes in a frame of which the other side is not informed of another limit (section 4.2)."""

_HEAD: Final = 9
_FRAME: Final = Struct(">HBBBI")  # upper and lower bytes of the length, kind, flags, stream
_MESSAGE: Final = Struct(">BI")
_DATA, _HEADERS, _PUSH_PROMISE, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 5, 8, 9
_END_STREAM, _END_HEADERS = 1, 4
_INDEXES: Final = bytes(range(0x81, 0xFF))
"""Bytes that are each a whole header in a table (RFC 7541, section 6.1)."""


def _stateless(headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
    """Compresses headers to bytes that neither use nor change the table of a connection (section 6.2.3)."""
    return Encoder().encode([(name, value, True) for name, value in headers])


_BEGIN, _END = _stateless(BEGIN), _stateless(END)


class WholeCall(NamedTuple):
    """A WholeCall is a call whose frames are read at once, and none but windows with them.

    Attributes:
        stream: stream of the call.
        headers: its headers as they are compressed.
        message: its message.
        size: bytes of the message that count for the windows.
        window: bytes by which they enlarge the window of the stream.
        windows: bytes by which they enlarge that of the connection.
        data: all bytes that were read.
    """

    stream: int
    headers: bytes
    message: bytes
    size: int
    window: int
    windows: int
    data: bytes

    def is_stateless(self) -> bool:
        """Returns whether reading the headers leaves the table of the connection as it is."""
        return not self.headers.translate(None, _INDEXES)


def whole_call(data: bytes) -> WholeCall | None:
    """Returns the call if the bytes, which begin with a frame, are one call with an uncompressed message."""
    if len(data) < _HEAD:
        return None
    upper, lower, kind, flags, stream = _FRAME.unpack_from(data)
    if (kind, flags) != (_HEADERS, _END_HEADERS) or stream >= 2**31:
        return None
    at = start = _HEAD + (upper << 8) + lower
    windows, pieces, ended = {stream: 0, 0: 0}, [], False
    while at + _HEAD <= len(data):
        upper, lower, kind, flags, of = _FRAME.unpack_from(data, at)
        size = (upper << 8) + lower
        body = data[at + _HEAD : at + _HEAD + size]
        at += _HEAD + size
        if kind == _DATA and of == stream and flags <= _END_STREAM and size <= LARGEST_FRAME and not ended:
            pieces.append(body)
            ended = flags == _END_STREAM
        elif kind == _WINDOW_UPDATE and of in windows and size == len(body) == 4 and body != bytes(4):
            windows[of] += int.from_bytes(body, "big")
        else:
            return None
    content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    if at != len(data) or not ended or len(content) < PREFIX:
        return None
    if _MESSAGE.unpack_from(content) != (0, len(content) - PREFIX):
        return None
    return WholeCall(stream, data[_HEAD:start], content[PREFIX:], len(content), windows[stream], windows[0], data)


def answer(stream: int, message: bytes) -> bytes:
    """Returns the frames that answer a call with a message, of which they hold `PREFIX` bytes more."""
    return b"".join(
        (
            _frame(_HEADERS, _END_HEADERS, stream, len(_BEGIN)),
            _BEGIN,
            _frame(_DATA, 0, stream, PREFIX + len(message)),
            _MESSAGE.pack(0, len(message)),
            message,
            _frame(_HEADERS, _END_HEADERS | _END_STREAM, stream, len(_END)),
            _END,
        )
    )


def acknowledgement(size: int) -> bytes:
    """Returns the frame that enlarges the window of a connection by bytes that it has read."""
    return _frame(_WINDOW_UPDATE, 0, 0, 4) + size.to_bytes(4, "big")


def _frame(kind: int, flags: int, stream: int, size: int) -> bytes:
    return _FRAME.pack(size >> 8, size & 0xFF, kind, flags, stream)


class FrameReader:
    """A FrameReader follows the frames in the bytes of a connection.

    Args:
        preface: bytes before the first frame.
    """

    def __init__(self, preface: int) -> None:
        self._ahead = preface  # bytes until the next frame begins
        self._part = b""  # of the head of a frame

    def is_between_frames(self) -> bool:
        """Returns whether the next byte begins a frame."""
        return not self._ahead and not self._part

    def read(self, data: bytes) -> bool:
        """Reads the next bytes, and returns whether frames of headers begin in them."""
        data, at, headers = self._part + data, self._ahead, False
        while at + _HEAD <= len(data):
            upper, lower, kind, _, _ = _FRAME.unpack_from(data, at)
            headers |= kind in (_HEADERS, _PUSH_PROMISE, _CONTINUATION)
            at += _HEAD + (upper << 8) + lower
        self._part, self._ahead = data[at:], max(0, at - len(data))
        return headers
