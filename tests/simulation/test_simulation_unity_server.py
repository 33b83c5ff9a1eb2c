"""The port for Unity players accepts one player over real gRPC."""

from __future__ import annotations

import asyncio
import queue
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from typing import Final

import grpc
import psutil
import pytest
import uvloop

from sparring.pipeline.bridges.unity.http2 import Http2Connection
from sparring.pipeline.bridges.unity.server import Server
from sparring.pipeline.bridges.unity.steady import WholeCall
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.registry import make
from tests.simulation.unity_bridge import LONG_S, manual_player
from tests.simulation.unity_player_schema import METHOD

LOOPS: Final[tuple[Callable[[], asyncio.AbstractEventLoop], ...]] = (asyncio.SelectorEventLoop, uvloop.new_event_loop)
"""Loops of the bridge and of stepping."""


class Calls:
    """A server on a thread of its own; `broken` is received after a call that the player has broken off."""

    def __init__(self, port: int, make_loop: Callable[[], asyncio.AbstractEventLoop] = LOOPS[0]) -> None:
        self._loop = make_loop()
        self._arrived: queue.SimpleQueue[bytes | str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.server = asyncio.run_coroutine_threadsafe(self._serve(port), self._loop).result(LONG_S)
        self.port = self.server.port

    async def _serve(self, port: int) -> Server:
        return Server(port, self._arrived.put, lambda: self._arrived.put("broken"), self._loop)

    def receive(self) -> bytes | str:
        return self._arrived.get(timeout=LONG_S)

    def answer(self, message: bytes) -> None:
        self._loop.call_soon_threadsafe(self.server.answer, message)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self.server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LONG_S)
        self._loop.run_until_complete(asyncio.sleep(0))  # closed connections end
        self._loop.close()


@pytest.fixture(params=LOOPS, ids=["asyncio", "uvloop"])
def calls(request: pytest.FixtureRequest) -> Iterator[Calls]:
    made = Calls(0, request.param)
    yield made
    made.close()


def exchange(port: int) -> grpc.UnaryUnaryMultiCallable[bytes, bytes]:
    """Returns the method with bytes, on a connection that this side never closes."""
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.insecure_channel(f"127.0.0.1:{port}", options=unlimited).unary_unary(METHOD)


def test_each_call_is_answered_in_turn_and_most_are_steady(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call stays open until it is answered. The first ones, and those with news of the connection, are not steady."""
    steady: list[WholeCall] = []
    take = Http2Connection._take_steady

    def note(self: Http2Connection, call: WholeCall) -> None:
        steady.append(call)
        take(self, call)

    monkeypatch.setattr(Http2Connection, "_take_steady", note)
    ask = exchange(calls.port)
    for number in range(100):
        content = b"message %d" % number
        call = ask.future(content, wait_for_ready=True)
        assert calls.receive() == content
        calls.answer(b"answer %d" % number)
        assert call.result(LONG_S) == b"answer %d" % number
    assert len(steady) > 90


def test_messages_of_many_megabytes_pass_both_ways(calls: Calls) -> None:
    """Images of many agents need more than gRPC's default limit of four megabytes."""
    large = bytes(range(256)) * 2**16
    call = exchange(calls.port).future(large, wait_for_ready=True)
    assert calls.receive() == large
    calls.answer(large)
    assert call.result(LONG_S) == large


def test_the_first_message_has_a_lower_size_limit(calls: Calls) -> None:
    """Its client may be no player; it receives an error and may call again."""
    ask = exchange(calls.port)
    call = ask.future(bytes(2**24 + 1), wait_for_ready=True)
    with pytest.raises(grpc.RpcError):
        call.result(LONG_S)
    assert (call.code(), call.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too large a message")
    call = ask.future(b"hello", wait_for_ready=True)
    assert calls.receive() == b"hello"


def test_a_compressed_message_is_refused(calls: Calls) -> None:
    """The error is that of gRPC, and the next call works."""
    ask = exchange(calls.port)
    for content in (bytes(10_000), bytes(10**6)):
        call = ask.future(content, wait_for_ready=True, compression=grpc.Compression.Gzip)
        with pytest.raises(grpc.RpcError):
            call.result(LONG_S)
        assert (call.code(), call.details()) == (grpc.StatusCode.UNIMPLEMENTED, "a message that is compressed")
        call = ask.future(b"hello", wait_for_ready=True)
        assert calls.receive() == b"hello"
        calls.answer(b"answer")
        assert call.result(LONG_S) == b"answer"


def test_optional_headers_of_a_call_are_ignored(calls: Calls) -> None:
    """They are timeouts, accepted encodings and custom metadata."""
    call = exchange(calls.port).future(
        b"hello", wait_for_ready=True, timeout=LONG_S, metadata=[("own", "x" * 5000), ("own-bin", b"\0\1")]
    )
    assert calls.receive() == b"hello"
    calls.answer(b"answer")
    assert call.result(LONG_S) == b"answer"
    assert call.code() == grpc.StatusCode.OK
    assert not call.initial_metadata()


def test_a_player_may_reconnect_between_two_calls(calls: Calls) -> None:
    for number in range(3):
        with manual_player(calls.port) as manual:
            call = manual.channel.unary_unary(METHOD).future(b"%d" % number, wait_for_ready=True)
            assert calls.receive() == b"%d" % number
            calls.answer(b"answer")
            assert call.result(LONG_S) == b"answer"
            manual.channel.close()
        while calls.server._connections:
            pass


def test_only_this_machine_can_call(calls: Calls) -> None:
    """The server listens on loopback only, on one port."""
    listening = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN" and one.laddr]
    own = [ip_address(address.ip) for address in listening if address.port == calls.port]
    assert own
    assert all((getattr(ip, "ipv4_mapped", None) or ip).is_loopback for ip in own)


def test_a_port_in_use_is_refused_and_not_shared() -> None:
    """This includes ports of our own processes; the error has a remedy."""
    first = Calls(0)
    with pytest.raises(SettingsError, match=rf"got port {first.port} on 127\.0\.0\.1, .*; .* --base-port"):
        make("unity", 1, path="/bin/true", port=first.port)
    first.close()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        with pytest.raises(SettingsError, match=f"got port {taken}"):
            make("unity", 1, port=taken)


def test_a_port_is_free_again_at_once() -> None:
    """The same player can restart, even if calls were open."""
    first = Calls(0)
    with manual_player(first.port):
        call = exchange(first.port).future(b"hello", wait_for_ready=True)
        assert first.receive() == b"hello"
        first.close()
        with pytest.raises(grpc.RpcError):
            call.result(LONG_S)
        assert call.details() == "the trainer has ended"
        Calls(first.port).close()


def test_a_missing_library_is_reported_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens before anything starts."""
    monkeypatch.delitem(sys.modules, "sparring.pipeline.bridges.unity.server")
    monkeypatch.delitem(sys.modules, "sparring.pipeline.bridges.unity.http2")
    monkeypatch.setitem(sys.modules, "h2.connection", None)
    with pytest.raises(
        SettingsError, match=r"without the library h2; expected it to be installed; try: pip install 'h2"
    ):
        make("unity", 1)


def test_a_cancelled_open_call_is_reported(calls: Calls) -> None:
    call = exchange(calls.port).future(b"hello", wait_for_ready=True)
    assert calls.receive() == b"hello"
    call.cancel()
    assert calls.receive() == "broken"


def test_other_clients_are_refused_whenever_they_call(calls: Calls) -> None:
    """Many call one after the other, with and without an open call of the player, which is not disturbed."""
    own = exchange(calls.port)
    for number in range(3):
        call = own.future(b"%d" % number, wait_for_ready=True)
        assert calls.receive() == b"%d" % number
        for _ in range(5):
            _expect_refused(calls.port)
        calls.answer(b"good")
        assert call.result(LONG_S) == b"good"
        _expect_refused(calls.port)
    assert calls._arrived.empty()


def _expect_refused(port: int) -> None:
    other = exchange(port).future(b"other", wait_for_ready=True)
    with pytest.raises(grpc.RpcError):
        other.result(LONG_S)
    assert (other.code(), other.details()) == (
        grpc.StatusCode.UNAVAILABLE,
        "another player is connected to this port",
    )
