"""gRPC over HTTP/2 with a hand-written client; tests of the bridge and of stepping use real clients."""

from __future__ import annotations

import pytest
from h2.events import ResponseReceived, WindowUpdated
from h2.settings import SettingCodes
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.bridges.unity.http2 import (
    INTERNAL,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    UNIMPLEMENTED,
    Call,
    Http2Connection,
    Violation,
)
from tests.unity.unity_client import FIRST, LARGEST, PATH, SECOND, Client, begun, grpc_message


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_call_is_reported_once_it_is_complete(size: int) -> None:
    """Chunks of the connection and frames of the message may have any sizes."""
    client = Client(Http2Connection(PATH, LARGEST))
    client.http2.initiate_connection()
    client.begin()
    for piece in (b"\0\0", b"", b"\0\0\5hel"):
        client.http2.send_data(FIRST, piece, pad_length=3)
    client.http2.send_data(FIRST, b"lo", end_stream=True)
    arriving = client.http2.data_to_send()
    calls = [one for at in range(0, len(arriving), size) for one in client.connection.feed(arriving[at : at + size])]
    assert calls == [Call(FIRST, b"hello")]


def test_the_answer_is_one_message_and_status_0() -> None:
    client = begun()
    for stream in (FIRST, SECOND):
        client.call(stream)
        assert client.send() == [Call(stream, b"hello")]
        client.connection.answer(stream, b"answer")
        first = client.read()[0]
        assert isinstance(first, ResponseReceived)
        assert dict(first.headers) == {":status": "200", "content-type": "application/grpc"}
        assert client.answer() == (grpc_message(b"answer"), {"grpc-status": "0"})
    client.connection.answer(SECOND, b"once more")
    assert client.connection.take() == b""


def test_an_answer_respects_flow_control_and_frame_size() -> None:
    """Windows of the stream and of the connection limit it."""
    client = begun()
    client.http2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 20_000})
    client.call()
    client.send()
    answer = bytes(range(250)) * 400
    client.connection.answer(FIRST, answer)
    assert client.lengths() == [2**14, 20_000 - 2**14]

    def more(size: int, stream: int | None = None) -> int:
        client.http2.increment_flow_control_window(size, stream)
        client.connection.feed(client.http2.data_to_send())
        return sum(client.lengths())

    assert more(10_000) == 0
    assert more(50_000, FIRST) == 50_000
    client.http2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 24_000})
    client.connection.feed(client.http2.data_to_send())
    assert sum(client.lengths()) == 4_000
    assert more(100_000, FIRST) == 65_535 + 10_000 - 74_000
    more(100_000)
    assert client.answer() == (grpc_message(answer), {"grpc-status": "0"})


def test_an_accepted_client_may_send_the_largest_message_at_once() -> None:
    """No part of a large message waits for a larger window."""
    client = begun()
    client.call()
    client.send()
    client.connection.admit(2**26)
    client.connection.answer(FIRST, b"")
    client.read()
    client.send()
    client.begin(SECOND)
    assert client.http2.local_flow_control_window(SECOND) == 2**31 - 1
    content = bytes(2**17)
    data = grpc_message(content)
    for at in range(0, len(data), 2**14):
        client.http2.send_data(SECOND, data[at : at + 2**14], end_stream=at + 2**14 >= len(data))
    assert client.send() == [Call(SECOND, content)]
    assert not any(isinstance(event, WindowUpdated) for event in client.read())


@pytest.mark.parametrize(
    ("path", "method", "data", "status", "why"),
    [
        ("/other/Method", "POST", grpc_message(b""), UNIMPLEMENTED, "no such method"),
        (PATH, "GET", grpc_message(b""), UNIMPLEMENTED, "no such method"),
        (PATH, "POST", grpc_message(b"", compressed=1), UNIMPLEMENTED, "a message that is compressed"),
        (PATH, "POST", grpc_message(b"hello")[:-1], INTERNAL, "a truncated message"),
        (PATH, "POST", grpc_message(b"hello") * 2, INTERNAL, "a truncated message"),
        (PATH, "POST", b"", INTERNAL, "a truncated message"),
        (PATH, "POST", grpc_message(bytes(LARGEST + 1)), RESOURCE_EXHAUSTED, "too large a message"),
    ],
)
def test_an_unknown_call_is_refused_and_the_connection_continues(
    path: str, method: str, data: bytes, status: int, why: str
) -> None:
    client = begun()
    client.call(data=data, path=path, method=method)
    assert client.send() == []
    _, trailers = client.answer()
    assert (trailers["grpc-status"], trailers["grpc-message"]) == (str(status), why)
    assert trailers["grpc-accept-encoding"] == "identity"
    client.call(SECOND)
    assert client.send() == [Call(SECOND, b"hello")]


@pytest.mark.parametrize(
    "headers",
    [
        [("te", "trailers"), ("content-type", "application/grpc+proto"), ("user-agent", "grpc-dotnet/2.60")],
        [("grpc-encoding", "gzip"), ("grpc-accept-encoding", "identity,deflate,gzip")],
        [("grpc-timeout", "1n"), ("own", "anything"), ("own-bin", "AAA"), ("own", "once more")],
    ],
    ids=["kind", "compression that is not used", "others"],
)
def test_optional_headers_of_a_call_are_ignored(headers: list[tuple[str, str]]) -> None:
    """A client cancels a call at its own timeout, and a message may be uncompressed if the call allows others."""
    client = begun()
    client.call(more=headers)
    assert client.send() == [Call(FIRST, b"hello")]
    client.connection.answer(FIRST, b"answer")
    assert client.answer() == (grpc_message(b"answer"), {"grpc-status": "0"})


@pytest.mark.parametrize("at_once", [True, False])
def test_a_cancelled_call_is_reported_once(at_once: bool) -> None:
    """It may end before it was reported; answering it has no effect."""
    client = begun()
    client.call()
    calls = [] if at_once else client.send()
    client.http2.reset_stream(FIRST)
    assert calls + client.send() == [Call(FIRST, b"hello"), Call(FIRST, None)]
    client.connection.answer(FIRST, b"too late")
    client.connection.refuse(FIRST, UNAVAILABLE, "too late")
    assert client.connection.take() == b""


def test_a_client_that_disconnects_cancels_its_calls() -> None:
    """This includes a call that would have been refused."""
    client = begun()
    client.call()
    client.call(SECOND, b"")
    client.http2.close_connection()
    assert client.connection.feed(client.http2.data_to_send()) == [
        Call(FIRST, b"hello"),
        Call(FIRST, None),
        Call(SECOND, None),
    ]
    client.connection.answer(FIRST, b"too late")
    assert client.connection.take() == b""


@settings(max_examples=30)
@given(st.data())
def test_damaged_bytes_are_a_call_or_a_violation(data: st.DataObject) -> None:
    """Some bytes of a connection are changed."""
    client = begun()
    client.http2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 9})
    client.call()
    client.http2.increment_flow_control_window(5, FIRST)
    client.call(SECOND)
    changed = bytearray(client.http2.data_to_send())
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, len(changed) - 1), st.integers(0, 255)), max_size=4)):
        changed[at] = value
    try:
        for stream, content in client.connection.feed(bytes(changed)):
            assert content is None or len(content) <= LARGEST
            client.connection.answer(stream, b"answer")
    except Violation:
        pass


def test_accepting_a_client_that_disconnected_after_its_call_has_no_effect() -> None:
    client = begun()
    client.call()
    client.http2.close_connection()
    assert client.connection.feed(client.http2.data_to_send()) == [Call(FIRST, b"hello"), Call(FIRST, None)]
    client.connection.admit(LARGEST)
    client.connection.limit(0)
    client.connection.end()
