"""A hand-written client of the server on which players call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event, ResponseReceived, StreamEnded, TrailersReceived

from sparring.pipeline.bridges.unity.http2 import Call, Http2Connection

PATH = "/service/Method"
LARGEST = 1000
FIRST, SECOND = 1, 3
Fields = Sequence[tuple[str, str]]
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def grpc_message(content: bytes, compressed: int = 0) -> bytes:
    return bytes((compressed,)) + len(content).to_bytes(4, "big") + content


@dataclass
class Client:
    """A client with its connection."""

    connection: Http2Connection
    http2: H2Connection = field(default_factory=lambda: H2Connection(H2Configuration(header_encoding="utf-8")))
    events: list[Event] = field(default_factory=list)

    def begin(self, stream: int = FIRST, path: str = PATH, method: str = "POST", more: Fields = ()) -> None:
        fields = [(":method", method), (":scheme", "http"), (":path", path), (":authority", "here"), *more]
        self.http2.send_headers(stream, fields)

    def call(
        self,
        stream: int = FIRST,
        data: bytes = grpc_message(b"hello"),
        path: str = PATH,
        method: str = "POST",
        more: Fields = (),
    ) -> None:
        self.begin(stream, path, method, more)
        self.http2.send_data(stream, data, end_stream=True)

    def send(self) -> list[Call]:
        """Sends all pending data and returns the calls that the server reports."""
        calls = self.connection.feed(self.http2.data_to_send())
        self.read()
        return calls

    def read(self) -> list[Event]:
        new = self.http2.receive_data(self.connection.take())
        self.events += new
        return new

    def lengths(self) -> list[int]:
        """Returns the sizes of the pieces of an answer that have arrived."""
        return [len(event.data) for event in self.read() if isinstance(event, DataReceived)]

    def answer(self) -> tuple[bytes, dict[str, str]]:
        """Returns data and last headers of an answer that is complete."""
        self.read()
        data = b"".join(event.data for event in self.events if isinstance(event, DataReceived))
        last = [event for event in self.events if isinstance(event, ResponseReceived | TrailersReceived)][-1]
        assert isinstance(self.events[-1], StreamEnded)
        self.events.clear()
        return data, dict(last.headers)


def begun(largest: int = LARGEST) -> Client:
    """Returns a client that has read the settings of the connection."""
    client = Client(Http2Connection(PATH, largest))
    client.http2.initiate_connection()
    client.read()
    assert client.send() == []
    return client
