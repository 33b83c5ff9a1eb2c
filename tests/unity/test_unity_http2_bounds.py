"""The memory and work that the other side of a connection can cause are bounded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from h2.events import ConnectionTerminated, StreamReset
from h2.settings import SettingCodes
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    ExtensionFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from sparring.pipeline.bridges.unity import http2
from sparring.pipeline.bridges.unity.http2 import RESOURCE_EXHAUSTED, UNAVAILABLE, Call, Http2Connection, Violation
from tests.unity.unity_client import FIRST, LARGEST, PATH, PREFACE, SECOND, Client, begun, grpc_message

CALM = (11).to_bytes(4, "big")
HEADERS = b"\x83\x86\x84"


def spoiled() -> Iterator[tuple[str, bytes]]:
    block = b"\x83\x86\x84"
    change = SettingsFrame(0, settings={SettingCodes.HEADER_TABLE_SIZE: 1}).serialize()
    back = SettingsFrame(0, settings={SettingCodes.HEADER_TABLE_SIZE: 4096}).serialize()
    yield "not HTTP/2", b"GET / HTTP/1.1\r\n\r\n"
    yield "an unreadable header", PREFACE + HeadersFrame(FIRST, b"\xff" * 9, flags=["END_HEADERS"]).serialize()
    calls = [HeadersFrame(2 * number + 1, block, flags=["END_HEADERS"]).serialize() for number in range(5)]
    yield "five calls at once", PREFACE + b"".join(calls)
    bomb = b"\x40\1a\x7f\x81\1" + b"b" * 256 + b"\xbe" * 300  # a header of 256 bytes, repeated many times
    yield "headers without end", PREFACE + HeadersFrame(FIRST, bomb, flags=["END_HEADERS"]).serialize()
    window = WindowUpdateFrame(0, window_increment=2**31 - 1).serialize()
    first, more = HeadersFrame(FIRST, b"\x83").serialize(), ContinuationFrame(FIRST, b"").serialize()
    yield "a header without end", PREFACE + first + more * 65
    yield "too large a window", PREFACE + window
    yield "settings without end", PREFACE + (change + back) * 300


@pytest.mark.parametrize(("what", "wrong"), [pytest.param(*one, id=one[0]) for one in spoiled()])
def test_bytes_that_are_not_http2_or_too_many_end_the_connection(what: str, wrong: bytes) -> None:
    """A peer that speaks HTTP/2 is notified; its open calls end."""
    client = Client(Http2Connection(PATH, LARGEST))
    client.http2.initiate_connection()
    client.http2.clear_outbound_data_buffer()
    with pytest.raises(Violation):
        client.connection.feed(wrong)
    frames = client.read()
    assert isinstance(frames[-1], ConnectionTerminated) == (what != "not HTTP/2")
    client.connection.answer(FIRST, b"too late")
    assert client.connection.take() == b""
    with pytest.raises(Violation):
        client.connection.feed(HeadersFrame(SECOND, b"\x83\x86\x84", flags=["END_HEADERS"]).serialize())


def status(client: Client) -> tuple[int, str]:
    """Returns the status of the call that was just refused before its message arrived."""
    end = client.events.pop()
    assert isinstance(end, StreamReset)
    assert end.error_code == 0
    _, trailers = client.answer()
    return int(trailers["grpc-status"]), trailers["grpc-message"]


def test_calls_of_a_client_that_is_not_accepted_are_refused_before_their_message() -> None:
    """Further calls are refused too, until the client is accepted."""
    client = begun(0)
    client.begin()
    client.http2.send_data(FIRST, bytes(10_000))
    assert client.send() == []
    assert status(client) == (UNAVAILABLE, "another player is connected to this port")
    assert client.connection.buffered_bytes() == 0
    client.connection.limit(LARGEST)
    client.call(SECOND)
    assert client.send() == [Call(SECOND, b"hello")]


def test_a_client_that_is_no_longer_accepted_loses_its_incomplete_call() -> None:
    """An incomplete call is refused at once; a complete one is left to the server."""
    client = begun()
    client.begin()
    client.http2.send_data(FIRST, grpc_message(bytes(LARGEST))[:-1])
    client.send()
    assert client.connection.buffered_bytes() == LARGEST + 4
    client.connection.limit(0)
    client.read()
    assert status(client) == (UNAVAILABLE, "another player is connected to this port")
    assert client.connection.buffered_bytes() == 0


@pytest.mark.parametrize("claimed", [True, False])
def test_a_message_that_is_too_large_is_refused_before_it_arrived(claimed: bool) -> None:
    """The declared size decides; declaring less does not help."""
    client = begun()
    client.begin()
    data = grpc_message(bytes(LARGEST + 1))
    client.http2.send_data(FIRST, data[:5] if claimed else grpc_message(b"")[:4] + data[4:])
    client.send()
    assert status(client) == (RESOURCE_EXHAUSTED, "too large a message")


def test_the_rest_of_a_message_that_is_too_large_is_discarded() -> None:
    """An accepted client has sent it already; none of it is stored."""
    client = begun()
    client.connection.admit(LARGEST)
    client.read()
    client.send()
    client.begin()
    for _ in range(100):
        client.http2.send_data(FIRST, bytes(10_000))
        assert client.send() == []
        assert client.connection.buffered_bytes() <= LARGEST
    client.http2.end_stream(FIRST)
    client.send()
    _, trailers = client.answer()
    assert int(trailers["grpc-status"]) == RESOURCE_EXHAUSTED


def test_only_one_call_at_a_time_may_send_a_message() -> None:
    """Another call is refused, also while the first one waits for its answer."""
    client = begun()
    client.begin()
    client.http2.send_data(FIRST, grpc_message(b"hello")[:-1])
    client.begin(SECOND)
    client.send()
    assert status(client) == (UNAVAILABLE, "a call that is not answered yet")
    client.http2.send_data(FIRST, b"o", end_stream=True)
    assert client.send() == [Call(FIRST, b"hello")]
    client.begin(SECOND + 2)
    client.send()
    assert status(client) == (UNAVAILABLE, "a call that is not answered yet")


def floods() -> Iterator[tuple[str, Callable[[int], list[Frame]]]]:
    """Yields functions that return frames for the number of an unused call."""
    yield "pings", lambda _: [PingFrame(0, b"12345678")]
    yield "answers to no ping", lambda _: [PingFrame(0, b"12345678", flags=["ACK"])]
    yield "answers to no settings", lambda _: [SettingsFrame(0, flags=["ACK"])]
    yield "windows", lambda _: [WindowUpdateFrame(0, window_increment=1)]
    yield "priorities", lambda _: [PriorityFrame(FIRST, depends_on=5)]
    yield "resets of what is over", lambda _: [RstStreamFrame(FIRST)]
    yield "unknown frames", lambda _: [ExtensionFrame(0xFF, 0, body=b"1234")]
    yield "data that is empty", lambda _: [DataFrame(FIRST, b"")]
    yield "data that is padding", lambda _: [DataFrame(FIRST, b"", pad_length=200, flags=["PADDED"])]
    yield "data after a reset", lambda _: [RstStreamFrame(FIRST), DataFrame(FIRST, bytes(100))]
    yield "calls broken off", lambda call: [HeadersFrame(call, HEADERS, flags=["END_HEADERS"]), RstStreamFrame(call)]
    yield "calls", lambda call: [HeadersFrame(call, HEADERS, flags=["END_HEADERS", "END_STREAM"])]


@pytest.mark.parametrize(("what", "frames"), [pytest.param(*one, id=one[0]) for one in floods()])
def test_floods_end_the_connection(
    what: str, frames: Callable[[int], list[Frame]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer receives the cause; counts decrease with time."""
    monkeypatch.setattr(http2, "_MOST_OVERHEAD", 3000)
    client = begun()
    client.begin()
    client.send()
    calls = itertools.count(SECOND, 2)

    def many(size: int) -> None:
        while size > 0:
            data = b"".join(frame.serialize() for frame in frames(next(calls)))
            size -= len(data)
            client.connection.feed(data)

    many(2000)
    client.connection.reset_overhead()
    many(2000)
    with pytest.raises(Violation, match="not of messages"):
        many(2000)
    sent = client.connection.take()
    assert sent.endswith(CALM)


def test_answered_calls_do_not_count_as_a_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do large messages in the frames that clients make."""
    monkeypatch.setattr(http2, "_MOST_OVERHEAD", 3000)
    client = begun(10**6)
    client.connection.admit(10**6)
    client.read()
    for call in range(FIRST, 200, 2):
        client.begin(call, more=[("anything", "x" * 100)])
        client.http2.send_data(call, grpc_message(bytes(10_000)))
        client.http2.end_stream(call)
        assert client.send() == [Call(call, bytes(10_000))]
        client.connection.answer(call, b"")
        client.read()
