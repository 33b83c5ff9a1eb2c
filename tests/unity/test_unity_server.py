"""Which clients may call on a player's port, with hand-written clients and a virtual clock."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, DataReceived, Event, PingAckReceived, StreamEnded, TrailersReceived

from sparring.pipeline.bridges.unity import http2
from sparring.pipeline.bridges.unity import server as module
from sparring.pipeline.bridges.unity.http2 import OTHER, RESOURCE_EXHAUSTED, UNAVAILABLE
from sparring.pipeline.bridges.unity.server import CANDIDATE_S, PATH, Server, check_free
from sparring.pipeline.errors import SettingsError
from tests.unity.unity_client import grpc_message

LONG_S = 20.0
T = TypeVar("T")


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose timers use `now`."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def finish(self, work: Awaitable[T]) -> T:
        return self.run_until_complete(work)


class ConnectionEnded(Exception):
    """The server has closed the connection; the argument is the last event."""


@dataclass
class Caller:
    """A client that makes one call after the other."""

    loop: Loop
    stream: socket.socket
    http2: H2Connection = field(default_factory=lambda: H2Connection(H2Configuration(header_encoding="utf-8")))
    call: int = -1

    def begin(self) -> None:
        """Sends what precedes a message."""
        if self.call < 0:
            self.http2.initiate_connection()
        self.call += 2
        fields = [(":method", "POST"), (":scheme", "http"), (":path", PATH), (":authority", "here"), ("te", "trailers")]
        self.http2.send_headers(self.call, fields)
        self.send()

    def send_message(self, data: bytes, end: bool = True) -> None:
        """Sends `data` as a part of a message."""
        self.http2.send_data(self.call, data, end_stream=end)
        self.send()

    def ask(self, content: bytes) -> None:
        self.begin()
        self.send_message(grpc_message(content))

    def send(self) -> None:
        self.loop.finish(self.loop.sock_sendall(self.stream, self.http2.data_to_send()))

    def until(self, *kinds: type[Event]) -> list[Event]:
        """Returns all events until one of each kind has arrived."""
        events: list[Event] = []
        while not all(any(isinstance(one, kind) for one in events) for kind in kinds):
            data = self.loop.finish(self.loop.sock_recv(self.stream, 2**16))
            if not data:
                raise ConnectionEnded(*events[-1:])
            events += self.http2.receive_data(data)
        return events

    def answer(self) -> bytes | tuple[int, str]:
        """Returns the answer to the last call: a message, or status and text of its refusal."""
        events = self.until(StreamEnded)
        data = b"".join(one.data for one in events if isinstance(one, DataReceived))
        if any(isinstance(one, TrailersReceived) for one in events):
            return data[5:]
        trailers = {key: value for one in events for key, value in getattr(one, "headers", ())}
        return int(trailers["grpc-status"]), trailers["grpc-message"]

    def ended(self) -> Any:
        """Returns the last event before the server ended the connection."""
        with pytest.raises(ConnectionEnded) as raised:
            self.until(Caller)  # type: ignore[arg-type]  # no such event
        (last,) = raised.value.args
        return last


@dataclass
class Port:
    """A server with the calls that it has received."""

    loop: Loop
    stack: ExitStack
    received: list[bytes] = field(default_factory=list)
    broken: int = 0

    def __post_init__(self) -> None:
        self.server = Server(0, self.received.append, self._note_broken, self.loop)
        self.loop.finish(self.server._accepting)
        self.stack.callback(self.server.close)

    def _note_broken(self) -> None:
        self.broken += 1

    def connect(self) -> Caller:
        """Returns a client that the server has accepted."""
        stream = self.stack.enter_context(socket.create_connection(("127.0.0.1", self.server.port)))
        stream.setblocking(False)
        caller, known = Caller(self.loop, stream), stream.getsockname()
        self.until(
            lambda: any(line._transport.get_extra_info("peername") == known for line in self.server._connections)
        )
        return caller

    def player(self) -> Caller:
        """Returns a client that has called and was answered."""
        caller = self.connect()
        self.play(caller, b"hello")
        return caller

    def play(self, caller: Caller, content: bytes) -> None:
        """Makes a call that the server receives and answers."""
        caller.ask(content)
        self.until(lambda: self.received)
        assert self.received.pop() == content
        self.server.answer(b"answer")
        assert caller.answer() == b"answer"

    def until(self, condition: Callable[[], object]) -> None:
        """Runs the loop until a condition holds."""
        while not condition():
            self.loop.finish(asyncio.sleep(0))


@pytest.fixture
def port() -> Iterator[Port]:
    loop = Loop()
    with ExitStack() as stack:
        stack.callback(loop.close)
        stack.callback(lambda: loop.finish(asyncio.sleep(0)))  # closed connections end
        yield Port(loop, stack)


def test_only_this_machine_can_call(port: Port) -> None:
    """The server listens on 127.0.0.1 and on no other address."""
    (listener,) = port.server._accepting.result().sockets
    assert listener.getsockname() == ("127.0.0.1", port.server.port)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port.server.port)).close()


def test_a_player_whose_connection_ended_may_reconnect(port: Port) -> None:
    """Nothing is lost between two calls. Another player may connect, too, once the first has disconnected."""
    for _ in range(3):
        player = port.player()
        player.stream.close()
        port.until(lambda: not port.server._connections)
    assert port.broken == 0


def test_a_connection_that_ends_during_a_call_is_reported_once(port: Port) -> None:
    """The next caller is accepted and does not receive the answer for the first."""
    player = port.connect()
    player.ask(b"hello")
    port.until(lambda: port.received)
    assert port.received.pop() == b"hello"
    player.stream.close()
    port.until(lambda: port.broken)
    port.server.answer(b"too late")
    port.player()
    assert port.broken == 1


def test_other_clients_are_refused_before_their_message_while_a_player_is_connected(port: Port) -> None:
    """This includes older connections; once the player has disconnected, they may call."""
    first, player = port.connect(), port.player()
    second = port.connect()
    for other in (first, second, first):
        other.begin()
        assert other.answer() == OTHER
    port.play(player, b"not disturbed")
    player.stream.close()
    port.until(lambda: len(port.server._connections) == 2)
    port.play(second, b"now")
    first.begin()
    assert first.answer() == OTHER


def test_incomplete_messages_of_other_clients_are_dropped_once_a_player_connects(port: Port) -> None:
    late = port.connect()
    late.begin()
    late.send_message(grpc_message(bytes(1000))[:-1], end=False)
    port.until(lambda: _buffered(port))
    port.player()
    assert late.answer() == OTHER
    assert _buffered(port) == 0


def _buffered(port: Port) -> int:
    """Returns the bytes of incomplete messages."""
    return sum(line.connection.buffered_bytes() for line in port.server._connections)


def test_all_callers_together_buffer_at_most_one_message(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message with which a client becomes the player is smaller than later ones."""
    assert module._FIRST * module._MOST_CANDIDATES <= module._LARGEST
    monkeypatch.setattr(module, "_FIRST", 1000)
    caller = port.connect()
    caller.begin()
    caller.send_message(grpc_message(bytes(1001))[:5], end=False)
    assert caller.answer() == (RESOURCE_EXHAUSTED, "too large a message")
    port.play(caller, bytes(1000))
    port.play(caller, bytes(10_000))


@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_does_not_become_the_player_in_time_is_disconnected(begun: bool, port: Port) -> None:
    """It may be silent or leave its message incomplete. The player has no such limit."""
    idle = port.connect()
    if begun:
        idle.begin()
        idle.send_message(grpc_message(b"hello")[:-1], end=False)
        port.until(lambda: _buffered(port))
    else:
        idle.http2.initiate_connection()
    port.loop.now = CANDIDATE_S - 1
    player = port.player()
    port.loop.now += 2
    last = idle.ended()
    assert isinstance(last, ConnectionTerminated)
    assert last.error_code == 0
    for _ in range(3):
        port.loop.now += CANDIDATE_S
        port.play(player, b"still here")
    assert len(port.server._connections) == 1


def test_a_player_that_waits_for_long_may_send_keepalives(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many pings at once would be too many, but not within an hour."""
    monkeypatch.setattr(http2, "_MOST_OVERHEAD", 3000)
    player = port.player()
    player.ask(b"open")
    for _ in range(3):
        for _ in range(100):
            player.http2.ping(b"12345678")
        player.send()
        player.until(PingAckReceived)
        port.loop.now += CANDIDATE_S
        port.until(lambda: port.server._connections[0].connection._overhead == 0)
    port.server.answer(b"answer")
    assert player.answer() == b"answer"


def test_the_oldest_of_too_many_connections_is_closed(port: Port) -> None:
    """The player's connection stays, and a client that calls is accepted at once."""
    player = port.player()
    others = [port.connect() for _ in range(module._MOST_CANDIDATES)]
    others[0].http2.initiate_connection()
    port.connect().begin()
    assert isinstance(others[0].ended(), ConnectionTerminated)
    assert len(port.server._connections) == 1 + module._MOST_CANDIDATES
    port.play(player, b"not disturbed")


def test_a_connection_that_violates_http2_is_closed_without_effect_on_the_player(port: Port) -> None:
    player, other = port.player(), port.connect()
    port.loop.finish(port.loop.sock_sendall(other.stream, b"GET / HTTP/1.1\r\n\r\n"))
    port.until(lambda: len(port.server._connections) == 1)
    port.play(player, b"not disturbed")


def test_a_connection_beyond_the_file_descriptor_limit_is_accepted_later(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server retries at intervals, not in a busy loop."""
    tries = 0

    def full(_: socket.socket) -> None:
        nonlocal tries
        tries += 1
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", full)
        stream = port.stack.enter_context(socket.create_connection(("127.0.0.1", port.server.port)))
        port.until(lambda: tries)
        first = tries
        port.loop.finish(asyncio.sleep(0))
        port.loop.finish(asyncio.sleep(0))
        assert tries == first
    port.loop.now += 1.0
    port.until(lambda: port.server._connections)
    assert port.server._connections[0]._transport.get_extra_info("peername") == stream.getsockname()


def test_closing_refuses_the_open_call_and_disconnects_all_clients(port: Port) -> None:
    player, other = port.player(), port.connect()
    other.begin()
    assert other.answer() == OTHER
    player.ask(b"open")
    port.until(lambda: port.received)
    port.server.close()
    assert player.answer() == (UNAVAILABLE, "the trainer has ended")
    assert isinstance(other.ended(), ConnectionTerminated)
    assert port.broken == 0
    port.server.close()


# ---------------------------------------------------------------- address


def test_the_server_listens_at_its_address_only(port: Port) -> None:
    """Another loopback address belongs to this machine, too, but the server listens there only if asked."""
    server = Server(0, lambda _: None, lambda: None, port.loop, "127.0.0.2")
    port.loop.finish(server._accepting)
    socket.create_connection(("127.0.0.2", server.port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
    with pytest.raises(SettingsError, match=f"got port {server.port} on 127.0.0.2, which is not free"):
        check_free(server.port, "127.0.0.2")
    server.close()
    check_free(server.port, "127.0.0.2")


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"got address 192\.0\.2\.1 .*correct pipeline\.player_host"):
        check_free(0, "192.0.2.1")
