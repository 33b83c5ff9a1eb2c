"""The port on which a Unity player calls."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from ipaddress import ip_address

import grpc
import psutil
import pytest

from sparring.pipeline.bridges.unity.game_server import Calls, PlayerGone
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.registry import make
from tests.simulation.unity_bridge import LONG_S, player_by_hand
from tests.simulation.unity_player_schema import METHOD


@pytest.fixture
def calls() -> Iterator[Calls]:
    made = Calls(0)
    yield made
    made.close()


def exchange(port: int) -> grpc.UnaryUnaryMultiCallable[bytes, bytes]:
    """The method as bytes, on a connection that is never closed by this side."""
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.insecure_channel(f"127.0.0.1:{port}", options=unlimited).unary_unary(METHOD)


def test_each_call_is_answered_in_turn(calls: Calls) -> None:
    """A call is open until it is answered."""
    ask = exchange(calls.port)
    for number in range(50):
        call = ask.future(b"%d" % number, wait_for_ready=True)
        assert calls.receive(LONG_S) == b"%d" % number
        assert calls.open
        calls.answer(b"answer %d" % number)
        assert call.result(LONG_S) == b"answer %d" % number
        assert not calls.open


def test_messages_of_many_megabytes_pass_both_ways(calls: Calls) -> None:
    """Images of many agents; gRPC's own limit is four megabytes."""
    large = bytes(range(256)) * 2**16
    call = exchange(calls.port).future(large, wait_for_ready=True)
    assert calls.receive(LONG_S) == large
    calls.answer(large)
    assert call.result(LONG_S) == large


def test_the_first_message_may_not_be_as_large_as_later_ones(calls: Calls) -> None:
    """Of who may be no player; the client is told so, and may call again."""
    ask = exchange(calls.port)
    call = ask.future(bytes(2**24 + 1), wait_for_ready=True)
    with pytest.raises(grpc.RpcError):
        call.result(LONG_S)
    assert (call.code(), call.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too large a message")
    call = ask.future(b"hello", wait_for_ready=True)
    assert calls.receive(LONG_S) == b"hello"


def test_a_message_that_is_compressed_is_refused(calls: Calls) -> None:
    """As gRPC has it; the next goes on."""
    ask = exchange(calls.port)
    for content in (bytes(10_000), bytes(10**6)):
        call = ask.future(content, wait_for_ready=True, compression=grpc.Compression.Gzip)
        with pytest.raises(grpc.RpcError):
            call.result(LONG_S)
        assert (call.code(), call.details()) == (grpc.StatusCode.UNIMPLEMENTED, "a message that is compressed")
        call = ask.future(b"hello", wait_for_ready=True)
        assert calls.receive(LONG_S) == b"hello"
        calls.answer(b"answer")
        assert call.result(LONG_S) == b"answer"


def test_what_a_client_says_of_a_call_changes_nothing(calls: Calls) -> None:
    """How long it waits, what kind of answer it would take, and what others may want to know."""
    call = exchange(calls.port).future(
        b"hello", wait_for_ready=True, timeout=LONG_S, metadata=[("own", "x" * 5000), ("own-bin", b"\0\1")]
    )
    assert calls.receive(LONG_S) == b"hello"
    calls.answer(b"answer")
    assert call.result(LONG_S) == b"answer"
    assert call.code() == grpc.StatusCode.OK
    assert not call.initial_metadata()


def test_a_player_may_connect_anew_between_two_calls(calls: Calls) -> None:
    for number in range(3):
        with player_by_hand(calls.port) as doll:
            call = doll.channel.unary_unary(METHOD).future(b"%d" % number, wait_for_ready=True)
            assert calls.receive(LONG_S) == b"%d" % number
            calls.answer(b"answer")
            assert call.result(LONG_S) == b"answer"
            doll.channel.close()
        while calls._server._lines:
            pass


def test_only_this_machine_can_call(calls: Calls) -> None:
    """It listens on loopback, and on one port."""
    listening = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN" and one.laddr]
    own = [ip_address(address.ip) for address in listening if address.port == calls.port]
    assert own
    assert all((getattr(ip, "ipv4_mapped", None) or ip).is_loopback for ip in own)


def test_a_port_that_is_taken_is_refused_and_not_shared() -> None:
    """Not even with another of our own; what to do is said."""
    first = Calls(0)
    with pytest.raises(SettingsError, match=rf"got port {first.port} on 127\.0\.0\.1, .*; .* --base-port"):
        make("unity", 1, path="/bin/true", port=first.port)
    first.close()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        with pytest.raises(SettingsError, match=f"got port {taken}"):
            make("unity", 1, port=taken)


def test_a_port_is_free_again_at_once() -> None:
    """For the next start of the same player, also where calls were under way."""
    first = Calls(0)
    with player_by_hand(first.port):
        call = exchange(first.port).future(b"hello", wait_for_ready=True)
        assert first.receive(LONG_S) == b"hello"
        first.close()
        with pytest.raises(grpc.RpcError):
            call.result(LONG_S)
        assert call.details() == "the trainer has ended"
        Calls(first.port).close()


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is started."""
    monkeypatch.setitem(sys.modules, "h2.connection", None)
    with pytest.raises(SettingsError, match=r"without the library h2; expected it; pip install 'h2"):
        make("unity", 1)


def test_nothing_in_time_is_none(calls: Calls) -> None:
    assert calls.receive(0.0) is None
    assert calls.receive(-1.0) is None


def test_gone_comes_after_what_was_said_before(calls: Calls) -> None:
    """The last words of a player that has ended are heard first."""
    call = exchange(calls.port).future(b"last words", wait_for_ready=True)
    assert calls.receive(LONG_S) == b"last words"
    calls.gone("why")
    gone = calls.receive(0.0)
    assert not call.done()
    assert isinstance(gone, PlayerGone)
    assert gone.why == "why"


def test_a_call_that_is_broken_off_while_it_is_open_is_told_of(calls: Calls) -> None:
    call = exchange(calls.port).future(b"hello", wait_for_ready=True)
    assert calls.receive(LONG_S) == b"hello"
    call.cancel()
    gone = calls.receive(LONG_S)
    assert isinstance(gone, PlayerGone)
    assert gone.why == "the player broke the connection off"


def test_strangers_are_turned_away_whenever_they_call(calls: Calls) -> None:
    """Many of them, one after the other, while the player's call is open and while it is not; it is not disturbed."""
    own = exchange(calls.port)
    for number in range(3):
        call = own.future(b"%d" % number, wait_for_ready=True)
        assert calls.receive(LONG_S) == b"%d" % number
        for _ in range(5):
            _turned_away(calls.port)
        calls.answer(b"good")
        assert call.result(LONG_S) == b"good"
        _turned_away(calls.port)
    assert calls.receive(0.0) is None


def _turned_away(port: int) -> None:
    stranger = exchange(port).future(b"stranger", wait_for_ready=True)
    with pytest.raises(grpc.RpcError):
        stranger.result(LONG_S)
    assert (stranger.code(), stranger.details()) == (
        grpc.StatusCode.UNAVAILABLE,
        "another player plays on this port",
    )
