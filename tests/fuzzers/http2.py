"""A client's side of an HTTP/2 connection: each call is heard whole and answered, or the connection is refused.

An input is a number of bytes that come at once, less one, and then those that come. Whatever they are, no message is
larger than allowed, nor is what is kept of those that are not here whole; what is sent back are frames, and no more
data than the client lets pass. Who has called is welcome.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import hpack
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from sparring.pipeline.bridges.unity import http2
from sparring.pipeline.bridges.unity.http2 import Http2Connection
from tests.fuzzers import mutation
from tests.fuzzers.target import Target, Violation

PATH: Final = "/service/Method"
LARGEST: Final = 1000
ANSWER: Final = bytes(100_000)
"""More than a connection lets pass at first."""

_HEAD: Final = 9
_PREFIX: Final = 5
_MORE: Final = bytes((0, 0, 4, WindowUpdateFrame.type))


def one_input(data: bytes) -> None:
    """Holds a connection."""
    connection, at_once, arriving = Http2Connection(PATH, LARGEST), 1 + (data[0] if data else 0), data[1:]
    sent, welcome = bytearray(connection.take()), False
    try:
        for at in range(0, len(arriving), at_once):
            for stream, message in connection.feed(arriving[at : at + at_once]):
                if message is not None and len(message) > LARGEST:
                    raise Violation(f"a message of {len(message)} bytes, at most {LARGEST}")
                if not welcome:
                    connection.welcome(LARGEST)
                    welcome = True
                connection.answer(stream, ANSWER)
            if connection.kept() > LARGEST + _PREFIX:
                raise Violation(f"{connection.kept()} bytes of messages are kept, at most {LARGEST + _PREFIX}")
            sent += connection.take()
    except http2.Violation:
        sent += connection.take()
    data_sent = sum(len(one.data) for one in frames(bytes(sent)) if isinstance(one, DataFrame))
    allowed = 2**16 - 1 + arriving.count(_MORE) * (2**31 - 1)
    if data_sent > allowed:
        raise Violation(f"{data_sent} bytes of data, at most {allowed}")


def frames(sent: bytes) -> Iterator[Frame]:
    """Those that are in some bytes."""
    while sent:
        if len(sent) < _HEAD:
            raise Violation(f"{len(sent)} bytes after the last frame")
        one, size = Frame.parse_frame_header(memoryview(sent[:_HEAD]))
        body, sent = sent[_HEAD : _HEAD + size], sent[_HEAD + size :]
        if len(body) < size:
            raise Violation(f"a frame of {len(body)} bytes, of {size}")
        one.parse_body(memoryview(body))
        yield one


def seeds() -> list[bytes]:
    """Calls that come whole, in pieces, with padding, broken off; windows, settings, pings."""
    block = hpack.Encoder().encode([(":method", "POST"), (":path", PATH), ("te", "trailers")])
    message = b"\0" + (5).to_bytes(4, "big") + b"hello"
    head, data = HeadersFrame(1, block, flags=["END_HEADERS"]), DataFrame(1, message, flags=["END_STREAM"])
    pieces = (
        HeadersFrame(1, block[:3], pad_length=1, depends_on=3, flags=["PADDED", "PRIORITY"]),
        ContinuationFrame(1, block[3:], flags=["END_HEADERS"]),
        DataFrame(1, message[:3]),
        DataFrame(1, message[3:], pad_length=2, flags=["PADDED", "END_STREAM"]),
    )
    settings = SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 200_000, SettingsFrame.MAX_FRAME_SIZE: 2**15})
    more = settings, SettingsFrame(0, flags=["ACK"]), PingFrame(0, b"12345678"), PriorityFrame(3, depends_on=1)
    window = WindowUpdateFrame(0, 50_000), WindowUpdateFrame(1, 50_000)
    reset, goaway = RstStreamFrame(1), GoAwayFrame(0)
    said: tuple[tuple[Frame, ...], ...] = (
        (head, data),
        pieces,
        (*more, head, data, *window),
        (head, data, reset, *window),
        (head, data, goaway),
        (head, reset, goaway),
    )
    talks = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"".join(frame.serialize() for frame in one) for one in said]
    return [bytes((at_once,)) + one for one in talks for at_once in (2, 255)]


TARGET: Final = Target(unit="connection", seeds=seeds, one_input=one_input, mutate=mutation.of_bytes)
