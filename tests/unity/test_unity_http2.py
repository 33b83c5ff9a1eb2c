"""gRPC over HTTP/2, with a client by hand; real clients are among the tests of the bridge and of stepping."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    TrailersReceived,
    WindowUpdated,
)
from h2.settings import SettingCodes
from hyperframe.frame import HeadersFrame, SettingsFrame, WindowUpdateFrame
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.unity.http2 import INTERNAL, RESOURCE_EXHAUSTED, UNAVAILABLE, UNIMPLEMENTED, Call, Connection, Violation

PATH = "/service/Method"
LARGEST = 1000
FIRST, SECOND = 1, 3
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def message(content: bytes, compressed: int = 0) -> bytes:
    return bytes((compressed,)) + len(content).to_bytes(4, "big") + content


@dataclass
class Client:
    """The other side of a connection."""

    connection: Connection
    http2: H2Connection = field(default_factory=lambda: H2Connection(H2Configuration(header_encoding="utf-8")))
    seen: list[Event] = field(default_factory=list)

    def begin(self, stream: int = FIRST, path: str = PATH, method: str = "POST") -> None:
        fields = [(":method", method), (":scheme", "http"), (":path", path), (":authority", "here")]
        self.http2.send_headers(stream, fields)

    def call(
        self, stream: int = FIRST, data: bytes = message(b"hello"), path: str = PATH, method: str = "POST"
    ) -> None:
        self.begin(stream, path, method)
        self.http2.send_data(stream, data, end_stream=True)

    def send(self) -> list[Call]:
        """What is heard of what there is to send."""
        heard = self.connection.feed(self.http2.data_to_send())
        self.read()
        return heard

    def read(self) -> list[Event]:
        new = self.http2.receive_data(self.connection.take())
        self.seen += new
        return new

    def lengths(self) -> list[int]:
        """Bytes of each piece of an answer that is here now."""
        return [len(event.data) for event in self.read() if isinstance(event, DataReceived)]

    def answer(self) -> tuple[bytes, dict[str, str]]:
        """Data, and last headers, of all that was seen; it is at an end."""
        self.read()
        data = b"".join(event.data for event in self.seen if isinstance(event, DataReceived))
        last = [event for event in self.seen if isinstance(event, ResponseReceived | TrailersReceived)][-1]
        assert isinstance(self.seen[-1], StreamEnded)
        self.seen.clear()
        return data, dict(last.headers)


def begun(largest: int = LARGEST) -> Client:
    """A client that has read the connection's settings."""
    client = Client(Connection(PATH, largest))
    client.http2.initiate_connection()
    client.read()
    assert client.send() == []
    return client


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_call_is_heard_once_it_is_here_whole(size: int) -> None:
    """However the bytes of the connection come, and its message in pieces of its own."""
    client = Client(Connection(PATH, LARGEST))
    client.http2.initiate_connection()
    client.begin()
    for piece in (b"\0\0", b"", b"\0\0\5hel"):
        client.http2.send_data(FIRST, piece, pad_length=3)
    client.http2.send_data(FIRST, b"lo", end_stream=True)
    client.call(SECOND, message(b""))
    arriving = client.http2.data_to_send()
    heard = [one for at in range(0, len(arriving), size) for one in client.connection.feed(arriving[at : at + size])]
    assert heard == [Call(FIRST, b"hello"), Call(SECOND, b"")]


def test_the_answer_is_one_message_and_a_good_status() -> None:
    client = begun()
    for stream in (FIRST, SECOND):
        client.call(stream)
        assert client.send() == [Call(stream, b"hello")]
        client.connection.answer(stream, b"answer")
        first = client.read()[0]
        assert isinstance(first, ResponseReceived)
        assert dict(first.headers) == {":status": "200", "content-type": "application/grpc"}
        assert client.answer() == (message(b"answer"), {"grpc-status": "0"})
    client.connection.answer(SECOND, b"once more")
    assert client.connection.take() == b""


def test_an_answer_is_no_faster_than_the_other_side_takes_it() -> None:
    """Neither on its stream nor on all of the connection, and in frames of a size that it takes."""
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
    assert client.answer() == (message(answer), {"grpc-status": "0"})


def test_a_client_may_send_as_much_as_there_can_be() -> None:
    """Of a large message no piece waits for more of a window."""
    client = begun(2**26)
    client.begin()
    assert client.http2.local_flow_control_window(FIRST) == 2**31 - 1
    content = bytes(2**17)
    data = message(content)
    for at in range(0, len(data), 2**14):
        client.http2.send_data(FIRST, data[at : at + 2**14], end_stream=at + 2**14 >= len(data))
    assert client.send() == [Call(FIRST, content)]
    assert not any(isinstance(event, WindowUpdated) for event in client.read())


@pytest.mark.parametrize(
    ("path", "method", "data", "status", "why"),
    [
        ("/other/Method", "POST", message(b""), UNIMPLEMENTED, "no such method"),
        (PATH, "GET", message(b""), UNIMPLEMENTED, "no such method"),
        (PATH, "POST", message(b"", compressed=1), UNIMPLEMENTED, "a message that is compressed"),
        (PATH, "POST", message(b"hello")[:-1], INTERNAL, "a message that was cut off"),
        (PATH, "POST", message(b"hello") * 2, INTERNAL, "a message that was cut off"),
        (PATH, "POST", b"", INTERNAL, "a message that was cut off"),
        (PATH, "POST", message(bytes(LARGEST + 1)), RESOURCE_EXHAUSTED, "too large a message"),
    ],
)
def test_what_is_no_call_of_ours_is_refused(path: str, method: str, data: bytes, status: int, why: str) -> None:
    """And the connection goes on."""
    client = begun()
    client.call(data=data, path=path, method=method)
    assert client.send() == []
    _, told = client.answer()
    assert (told["grpc-status"], told["grpc-message"].replace("%20", " ")) == (str(status), why)
    client.call(SECOND)
    assert client.send() == [Call(SECOND, b"hello")]


def test_what_is_too_large_is_not_kept() -> None:
    client = begun()
    client.begin()
    for _ in range(100):
        client.http2.send_data(FIRST, bytes(LARGEST))
        client.send()
        assert len(client.connection._streams[FIRST].message) <= LARGEST


@pytest.mark.parametrize("at_once", [True, False])
def test_a_call_that_is_broken_off_is_told_of_once(at_once: bool) -> None:
    """It may be over before it is known to have begun; to answer it does nothing."""
    client = begun()
    client.call()
    heard = [] if at_once else client.send()
    client.http2.reset_stream(FIRST)
    assert heard + client.send() == [Call(FIRST, b"hello"), Call(FIRST, None)]
    client.connection.answer(FIRST, b"too late")
    client.connection.refuse(FIRST, UNAVAILABLE, "too late")
    assert client.connection.take() == b""


def test_a_client_that_parts_breaks_its_calls_off() -> None:
    """Also one that would have been refused."""
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


def spoiled() -> Iterator[tuple[str, bytes]]:
    block = b"\x83\x86\x84"
    change = SettingsFrame(0, settings={SettingCodes.HEADER_TABLE_SIZE: 1}).serialize()
    back = SettingsFrame(0, settings={SettingCodes.HEADER_TABLE_SIZE: 4096}).serialize()
    yield "not HTTP/2", b"GET / HTTP/1.1\r\n\r\n"
    yield "an unreadable header", PREFACE + HeadersFrame(FIRST, b"\xff" * 9, flags=["END_HEADERS"]).serialize()
    calls = [HeadersFrame(2 * one + 1, block, flags=["END_HEADERS"]).serialize() for one in range(5)]
    yield "five calls at once", PREFACE + b"".join(calls)
    bomb = b"\x40\1a\x7f\x81\1" + b"b" * 256 + b"\xbe" * 300  # a header of 256 bytes, and then the same again and again
    yield "headers without end", PREFACE + HeadersFrame(FIRST, bomb, flags=["END_HEADERS"]).serialize()
    window = WindowUpdateFrame(0, window_increment=2**31 - 1).serialize()
    yield "too large a window", PREFACE + window
    yield "settings without end", PREFACE + (change + back) * 300


@pytest.mark.parametrize(("what", "wrong"), [pytest.param(*one, id=one[0]) for one in spoiled()])
def test_what_is_not_http2_or_too_much_ends_the_connection(what: str, wrong: bytes) -> None:
    """The other side is told so, where it speaks HTTP/2; what had been heard of is over."""
    client = Client(Connection(PATH, LARGEST))
    client.http2.initiate_connection()
    client.http2.clear_outbound_data_buffer()
    with pytest.raises(Violation):
        client.connection.feed(wrong)
    told = client.read()
    assert isinstance(told[-1], ConnectionTerminated) == (what != "not HTTP/2")
    client.connection.answer(FIRST, b"too late")
    assert client.connection.take() == b""
    with pytest.raises(Violation):
        client.connection.feed(HeadersFrame(SECOND, b"\x83\x86\x84", flags=["END_HEADERS"]).serialize())


@settings(max_examples=60)
@given(st.data())
def test_anything_is_a_call_or_a_violation(data: st.DataObject) -> None:
    """Bytes of a connection, some of them changed."""
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
