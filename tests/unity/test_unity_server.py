"""Who may call on a player's port, with clients by hand; time is as the tests say."""

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
from sparring.pipeline.bridges.unity.server import PATH, STRANGER_S, Server, check_free
from sparring.pipeline.errors import SettingsError
from tests.unity.unity_client import grpc_message

LONG_S = 20.0
T = TypeVar("T")


class Loop(asyncio.SelectorEventLoop):
    """Its timers go by `now`."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def finish(self, work: Awaitable[T]) -> T:
        return self.run_until_complete(work)


class Ended(Exception):
    """The server has closed the connection. Args: the last that came."""


@dataclass
class Caller:
    """A client, one call after the other."""

    loop: Loop
    stream: socket.socket
    http2: H2Connection = field(default_factory=lambda: H2Connection(H2Configuration(header_encoding="utf-8")))
    call: int = -1

    def begin(self) -> None:
        """Sends what comes before a message."""
        if self.call < 0:
            self.http2.initiate_connection()
        self.call += 2
        fields = [(":method", "POST"), (":scheme", "http"), (":path", PATH), (":authority", "here"), ("te", "trailers")]
        self.http2.send_headers(self.call, fields)
        self.send()

    def bring(self, data: bytes, end: bool = True) -> None:
        """Sends of a message what `data` holds."""
        self.http2.send_data(self.call, data, end_stream=end)
        self.send()

    def ask(self, content: bytes) -> None:
        self.begin()
        self.bring(grpc_message(content))

    def send(self) -> None:
        self.loop.finish(self.loop.sock_sendall(self.stream, self.http2.data_to_send()))

    def until(self, *kinds: type[Event]) -> list[Event]:
        """What comes, until something of each kind has come."""
        seen: list[Event] = []
        while not all(any(isinstance(one, kind) for one in seen) for kind in kinds):
            data = self.loop.finish(self.loop.sock_recv(self.stream, 2**16))
            if not data:
                raise Ended(*seen[-1:])
            seen += self.http2.receive_data(data)
        return seen

    def answer(self) -> bytes | tuple[int, str]:
        """To the last call: a message, or the status and text of its refusal."""
        seen = self.until(StreamEnded)
        data = b"".join(one.data for one in seen if isinstance(one, DataReceived))
        if any(isinstance(one, TrailersReceived) for one in seen):
            return data[5:]
        told = {key: value for one in seen for key, value in getattr(one, "headers", ())}
        return int(told["grpc-status"]), told["grpc-message"]

    def ended(self) -> Any:
        """What the server has said last, before it ended the connection."""
        with pytest.raises(Ended) as raised:
            self.until(Caller)  # type: ignore[arg-type]  # no such event
        (last,) = raised.value.args
        return last


@dataclass
class Port:
    """A server, and what has happened there."""

    loop: Loop
    stack: ExitStack
    heard: list[bytes] = field(default_factory=list)
    broken: int = 0

    def __post_init__(self) -> None:
        self.server = Server(0, self.heard.append, self._note_broken, self.loop)
        self.stack.callback(self.server.close)

    def _note_broken(self) -> None:
        self.broken += 1

    def connect(self) -> Caller:
        """A client that the server knows of."""
        stream = self.stack.enter_context(socket.create_connection(("127.0.0.1", self.server.port)))
        stream.setblocking(False)
        caller, known = Caller(self.loop, stream), stream.getsockname()
        self.until(lambda: any(line._stream.getpeername() == known for line in self.server._lines))
        return caller

    def player(self) -> Caller:
        """One that has called, and was answered."""
        caller = self.connect()
        self.play(caller, b"hello")
        return caller

    def play(self, caller: Caller, content: bytes) -> None:
        """A call that is heard and answered."""
        caller.ask(content)
        self.until(lambda: self.heard)
        assert self.heard.pop() == content
        self.server.answer(b"answer")
        assert caller.answer() == b"answer"

    def until(self, condition: Callable[[], object]) -> None:
        """Has the loop go on until something holds."""
        while not condition():
            self.loop.finish(asyncio.sleep(0))


@pytest.fixture
def port() -> Iterator[Port]:
    loop = Loop()
    with ExitStack() as stack:
        stack.callback(loop.close)
        yield Port(loop, stack)


def test_only_this_machine_can_call(port: Port) -> None:
    """On 127.0.0.1, and no other address of its own either."""
    assert port.server._listener.getsockname() == ("127.0.0.1", port.server.port)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port.server.port)).close()


def test_a_player_whose_connection_ended_may_connect_anew(port: Port) -> None:
    """Between two calls nothing is lost by that. So may another, once the first has gone."""
    for _ in range(3):
        player = port.player()
        player.stream.close()
        port.until(lambda: not port.server._lines)
    assert port.broken == 0


def test_a_player_whose_connection_ends_while_its_call_is_open_is_told_of(port: Port) -> None:
    """Once; the next that calls is heard, and nobody gets what was for the first."""
    player = port.connect()
    player.ask(b"hello")
    port.until(lambda: port.heard)
    assert port.heard.pop() == b"hello"
    player.stream.close()
    port.until(lambda: port.broken)
    port.server.answer(b"too late")
    port.player()
    assert port.broken == 1


def test_while_there_is_a_player_others_are_refused_before_they_bring_a_message(port: Port) -> None:
    """Also on connections that were there before it. When it has gone they may call."""
    first, player = port.connect(), port.player()
    second = port.connect()
    for other in (first, second, first):
        other.begin()
        assert other.answer() == OTHER
    port.play(player, b"not disturbed")
    player.stream.close()
    port.until(lambda: len(port.server._lines) == 2)
    port.play(second, b"now")
    first.begin()
    assert first.answer() == OTHER


def test_who_was_not_first_loses_what_it_has_brought(port: Port) -> None:
    """As soon as there is a player."""
    late = port.connect()
    late.begin()
    late.bring(grpc_message(bytes(1000))[:-1], end=False)
    port.until(lambda: _kept(port))
    port.player()
    assert late.answer() == OTHER
    assert _kept(port) == 0


def _kept(port: Port) -> int:
    """Bytes of messages that are not here whole."""
    return sum(line.connection.kept() for line in port.server._lines)


def test_all_that_call_together_keep_no_more_than_the_player_may(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message with which somebody becomes the player is smaller than later ones."""
    assert module._FIRST * module._MOST_STRANGERS <= module._LARGEST
    monkeypatch.setattr(module, "_FIRST", 1000)
    caller = port.connect()
    caller.begin()
    caller.bring(grpc_message(bytes(1001))[:5], end=False)
    assert caller.answer() == (RESOURCE_EXHAUSTED, "too large a message")
    port.play(caller, bytes(1000))
    port.play(caller, bytes(10_000))


@pytest.mark.parametrize("begun", [False, True])
def test_who_does_not_become_the_player_in_time_is_let_go(begun: bool, port: Port) -> None:
    """Whether it says nothing at all or does not end its message. The player may take its time."""
    idle = port.connect()
    if begun:
        idle.begin()
        idle.bring(grpc_message(b"hello")[:-1], end=False)
        port.until(lambda: _kept(port))
    else:
        idle.http2.initiate_connection()
    port.loop.now = STRANGER_S - 1
    player = port.player()
    port.loop.now += 2
    last = idle.ended()
    assert isinstance(last, ConnectionTerminated)
    assert last.error_code == 0
    for _ in range(3):
        port.loop.now += STRANGER_S
        port.play(player, b"still here")
    assert len(port.server._lines) == 1


def test_a_player_that_waits_for_long_may_say_that_it_is_there(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """So often as clients do; what is too much at once is not too much in an hour."""
    monkeypatch.setattr(http2, "_MOST_OVERHEAD", 3000)
    player = port.player()
    player.ask(b"open")
    for _ in range(3):
        for _ in range(100):
            player.http2.ping(b"12345678")
        player.send()
        player.until(PingAckReceived)
        port.loop.now += STRANGER_S
        port.until(lambda: port.server._lines[0].connection._overhead == 0)
    port.server.answer(b"answer")
    assert player.answer() == b"answer"


def test_where_there_are_too_many_the_oldest_makes_room(port: Port) -> None:
    """The player does not, and one that calls now is heard of at once."""
    player = port.player()
    others = [port.connect() for _ in range(module._MOST_STRANGERS)]
    others[0].http2.initiate_connection()
    port.connect().begin()
    assert isinstance(others[0].ended(), ConnectionTerminated)
    assert len(port.server._lines) == 1 + module._MOST_STRANGERS
    port.play(player, b"not disturbed")


def test_what_is_not_http2_or_too_much_is_closed(port: Port) -> None:
    """The player is not disturbed."""
    player, other = port.player(), port.connect()
    port.loop.finish(port.loop.sock_sendall(other.stream, b"GET / HTTP/1.1\r\n\r\n"))
    port.until(lambda: len(port.server._lines) == 1)
    port.play(player, b"not disturbed")


def test_a_connection_that_the_system_has_no_room_for_is_taken_later(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for once in a while, not all the time."""
    tries = 0

    def full(_: socket.socket) -> None:
        nonlocal tries
        tries += 1
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", full)
        stream = port.stack.enter_context(socket.create_connection(("127.0.0.1", port.server.port)))
        port.until(lambda: tries)
        port.loop.finish(asyncio.sleep(0))
        port.loop.finish(asyncio.sleep(0))
        assert tries == 1
    port.loop.now += 1.0
    port.until(lambda: port.server._lines)
    assert port.server._lines[0]._stream.getpeername() == stream.getsockname()


def test_at_the_end_the_open_call_is_refused_and_all_are_let_go(port: Port) -> None:
    player, other = port.player(), port.connect()
    other.begin()
    assert other.answer() == OTHER
    player.ask(b"open")
    port.until(lambda: port.heard)
    port.server.close()
    assert player.answer() == (UNAVAILABLE, "the trainer has ended")
    assert isinstance(other.ended(), ConnectionTerminated)
    assert port.broken == 0
    port.server.close()


# ---------------------------------------------------------------- where it listens


def test_it_is_reached_at_its_address_only(port: Port) -> None:
    """Another address of loopback is one of this machine's, and not that on which it listens unless told so."""
    server = Server(0, lambda _: None, lambda: None, port.loop, "127.0.0.2")
    socket.create_connection(("127.0.0.2", server.port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
    with pytest.raises(SettingsError, match=f"got port {server.port} on 127.0.0.2, which is not free"):
        check_free(server.port, "127.0.0.2")
    server.close()
    check_free(server.port, "127.0.0.2")


def test_an_address_that_this_machine_does_not_have_is_told_so() -> None:
    with pytest.raises(SettingsError, match=r"got address 192\.0\.2\.1 .*correct pipeline\.player_host"):
        check_free(0, "192.0.2.1")
