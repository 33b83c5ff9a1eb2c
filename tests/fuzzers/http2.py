"""The client's side of an HTTP/2 connection: each call is read whole and answered, or the connection is refused.

An input is the size of a chunk, less one, or 255 for chunks of one call each; and then the bytes. No message, and no
sum of incomplete messages, may exceed the limit; the answers are frames, with no more data than the client's windows
allow. A client is accepted with its first call. A short message has a short answer, as a steady call has.
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
"""Larger than the initial window of a connection."""

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_CALLS: Final = 256
_HEAD: Final = 9
_PREFIX: Final = 5
_WINDOW_UPDATE: Final = bytes((0, 0, 4, WindowUpdateFrame.type))


def one_input(data: bytes) -> None:
    """Feeds a connection."""
    connection, arriving = Http2Connection(PATH, LARGEST), data[1:]
    sent, welcome = bytearray(connection.take()), False
    try:
        for chunk in chunks(arriving, 1 + (data[0] if data else 0)):
            for stream, message in connection.feed(chunk):
                if message is not None and len(message) > LARGEST:
                    raise Violation(f"a message of {len(message)} bytes, at most {LARGEST}")
                if not welcome:
                    connection.admit(LARGEST)
                    welcome = True
                connection.answer(stream, ANSWER[: len(message or ANSWER) ** 8])
            if connection.buffered_bytes() > LARGEST + _PREFIX:
                raise Violation(f"{connection.buffered_bytes()} buffered bytes, expected at most {LARGEST + _PREFIX}")
            sent += connection.take()
    except http2.Violation:
        sent += connection.take()
    data_sent = sum(len(one.data) for one in frames(bytes(sent)) if isinstance(one, DataFrame))
    allowed = 2**16 - 1 + arriving.count(_WINDOW_UPDATE) * (2**31 - 1)
    if data_sent > allowed:
        raise Violation(f"{data_sent} bytes of data, at most {allowed}")


def chunks(arriving: bytes, size: int) -> Iterator[bytes]:
    """Yields the bytes in chunks of a size, or the calls in them."""
    if size < _CALLS:
        yield from (arriving[at : at + size] for at in range(0, len(arriving), size))
        return
    begin, at = 0, len(_PREFACE)
    while at + _HEAD <= len(arriving):
        ends = arriving[at + 4] == 1
        at += _HEAD + int.from_bytes(arriving[at : at + 3], "big")
        if ends:
            yield arriving[begin:at]
            begin = at
    yield arriving[begin:]


def frames(sent: bytes) -> Iterator[Frame]:
    """Yields the frames in some bytes."""
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
    """Returns calls that are whole, steady, in pieces, padded or cancelled, with windows, settings and pings."""
    encoder = hpack.Encoder()
    block, again = (encoder.encode([(":method", "POST"), (":path", PATH), ("te", "trailers")]) for _ in range(2))
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
    steady: list[Frame] = []
    for number in (1, 3, 5, 7, 9):
        steady.append(HeadersFrame(number, block if number == 1 else again, flags=["END_HEADERS"]))
        steady.append(DataFrame(number, b"\0\0\0\0\2hi", flags=["END_STREAM"]))
    sequences: tuple[tuple[Frame, ...], ...] = (
        (head, data),
        pieces,
        (*more, head, data, *window),
        (head, data, reset, *window),
        (head, data, goaway),
        (head, reset, goaway),
        (*steady, RstStreamFrame(9)),
    )
    talks = [_PREFACE + b"".join(frame.serialize() for frame in one) for one in sequences]
    return [bytes((chunk,)) + one for one in talks for chunk in (2, 254, 255)]


TARGET: Final = Target(unit="connection", seeds=seeds, one_input=one_input, mutate=mutation.of_bytes)
