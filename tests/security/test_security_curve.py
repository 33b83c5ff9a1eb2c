"""Between services only those on the list of an endpoint get in; the others are refused, counted, and logged once."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from sparring.pipeline.errors import QueueError
from sparring.pipeline.messages.simulator import Ping
from sparring.pipeline.queues.curve import (
    HANDSHAKE_S,
    INTERVAL_S,
    Curve,
    CurveAuthenticator,
    HandshakeRejections,
    Handshakes,
    Protection,
)
from sparring.pipeline.queues.interface import Capacity
from sparring.pipeline.queues.wire import Timing
from sparring.pipeline.queues.zmq import ZmqTransport, _peer, new_curve_pair

TEN = Capacity(messages=10, steps=100)
REAL = Timing(heartbeat=0.05, retry=0.03, peer_timeout=5.0, acknowledge=0.002)
QUEUE = "updates:Ball"
PAIRS = {role: new_curve_pair() for role in ("learning", "coordination", "stepping", "stranger")}


def curve(role: str, *, server: str = "learning", clients: tuple[str, ...] = ("coordination",)) -> Curve:
    public, secret = PAIRS[role]
    allowed = frozenset(PAIRS[name][0] for name in clients)
    others = frozenset({PAIRS["stepping"][0]})
    return Curve(
        public=public,
        secret=secret,
        servers={QUEUE: PAIRS[server][0], "topic:b": PAIRS[server][0]},
        clients={QUEUE: allowed, "topic:b": others},
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def endpoints() -> dict[str, str]:
    return {QUEUE: f"tcp://127.0.0.1:{free_port()}", "topic:b": f"tcp://127.0.0.1:{free_port()}"}


def transport(endpoints: Mapping[str, str], start: str, **options: Any) -> ZmqTransport:
    return ZmqTransport(endpoints, start, timing=REAL, reconnect=0.01, protection=Protection(**options))


async def until(true: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not true():  # noqa: ASYNC110 - what it waits for happens in a thread of ZeroMQ
            await anyio.sleep(0.01)


async def knock(endpoints: Mapping[str, str], keys: Curve, name: str = QUEUE) -> None:
    """Connects, and waits for what comes of it."""
    async with transport(endpoints, "knocking.1", curve=keys) as client:
        await (client.subscribe("b") if name == "topic:b" else client.sender(name))
        await anyio.sleep(10)


# ---------------------------------------------------------------- over sockets


@pytest.mark.asyncio
async def test_who_is_on_the_list_gets_in(endpoints: dict[str, str]) -> None:
    async with (
        transport(endpoints, "learning.1", curve=curve("learning")) as server,
        transport(endpoints, "coordination.1", curve=curve("coordination")) as client,
    ):
        receiver = await server.receiver(QUEUE, TEN)
        sender = await client.sender(QUEUE)
        with anyio.fail_after(10):
            await sender.put(Ping(number=1), 1)
            assert (await receiver.get()).number == 1
        assert server.refused == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("role", ["stepping", "stranger"])
async def test_a_key_that_is_not_on_the_list_is_refused_and_its_owner_is_told(
    endpoints: dict[str, str], role: str
) -> None:
    async with transport(endpoints, "learning.1", curve=curve("learning")) as server:
        receiver = await server.receiver(QUEUE, TEN)
        with pytest.raises(QueueError, match=f"got no entrance to {QUEUE}"), capture_logs() as lines:
            await knock(endpoints, curve(role))
        assert server.refused == 1
        assert receiver.empty()
    cause = "its key is not allowed here" if role == "stepping" else "its key is unknown"
    said = [line for line in lines if line["event"] == "refused"]
    assert [(line["endpoint"], line["peer"], line["cause"]) for line in said] == [(QUEUE, "127.0.0.1", cause)]
    assert PAIRS[role][1] not in str(lines)


@pytest.mark.asyncio
async def test_who_expects_another_server_does_not_talk_to_this_one(endpoints: dict[str, str]) -> None:
    other = curve("coordination", server="stranger")
    async with (
        transport(endpoints, "learning.1", curve=curve("learning")) as server,
        transport(endpoints, "coordination.1", curve=other) as client,
    ):
        receiver = await server.receiver(QUEUE, TEN)
        with capture_logs() as lines:
            await client.sender(QUEUE)
            await until(lambda: server.refused > 1 and client.refused > 1)
        assert receiver.empty()
    assert [line["peer"] for line in lines if "hung up on us" in line.get("cause", "")] == [endpoints[QUEUE]]


@pytest.mark.asyncio
async def test_a_client_without_key_is_refused(endpoints: dict[str, str]) -> None:
    async with transport(endpoints, "learning.1", curve=curve("learning")) as server:
        receiver = await server.receiver(QUEUE, TEN)
        with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
            plain.linger = 0
            plain.connect(endpoints[QUEUE])
            await until(lambda: server.refused > 0)
        assert receiver.empty()


@pytest.mark.asyncio
async def test_who_does_not_speak_zeromq_is_counted_and_logged_once_for_its_address(endpoints: dict[str, str]) -> None:
    async with transport(endpoints, "learning.1", curve=curve("learning")) as server:
        await server.receiver(QUEUE, TEN)
        with capture_logs() as lines:
            for _ in range(3):
                async with await anyio.connect_tcp("127.0.0.1", int(endpoints[QUEUE].rpartition(":")[2])) as stranger:
                    await stranger.send(b"GET / HTTP/1.0\r\n\r\n" * 10)
                    with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                        while True:
                            await stranger.receive()
            await until(lambda: server.refused == 3)
    peers = [line["peer"] for line in lines if line["event"] == "refused"]
    assert set(peers) <= {"127.0.0.1", "unknown"}  # one that is gone already has no address any more
    assert len(peers) == len(set(peers))


def test_the_peer_of_a_connection_is_named_while_it_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.connect(server.getsockname())
        accepted, _ = server.accept()
        descriptor = accepted.fileno()
        assert _peer(descriptor) == "127.0.0.1"
        accepted.close()
        assert _peer(descriptor) == "unknown"


@pytest.mark.asyncio
async def test_a_list_holds_for_its_endpoint_only(endpoints: dict[str, str]) -> None:
    async with transport(endpoints, "learning.1", curve=curve("learning")) as server:
        topic = await server.topic("b")
        topic.publish("k", Ping(number=7))
        async with transport(endpoints, "s.1", curve=curve("stepping")) as welcome:
            subscription = await welcome.subscribe("b")
            with anyio.fail_after(10):
                while "k" not in subscription.latest:
                    await subscription.changed()
        with pytest.raises(QueueError, match="got no entrance to topic:b"):
            await knock(endpoints, curve("coordination"), "topic:b")


@pytest.mark.asyncio
async def test_beyond_loopback_nothing_listens_without_keys() -> None:
    endpoints = {QUEUE: f"tcp://0.0.0.0:{free_port()}"}
    async with transport(endpoints, "learning.1") as server:
        with pytest.raises(QueueError, match="which other machines can reach, without keys; expected keys; make them"):
            await server.receiver(QUEUE, TEN)
    async with transport(endpoints, "learning.1", insecure=True) as server:
        await server.receiver(QUEUE, TEN)


@pytest.mark.asyncio
async def test_a_run_on_several_machines_listens_to_no_other_address() -> None:
    endpoints = {QUEUE: f"tcp://127.0.0.2:{free_port()}"}
    async with (
        transport(endpoints, "learning.1", curve=curve("learning"), machines=("127.0.0.2", "127.0.0.3")) as server,
        transport(endpoints, "c.1", curve=curve("coordination"), machines=("127.0.0.3", "127.0.0.2")) as near,
        transport(endpoints, "c.2", curve=curve("coordination"), machines=("127.0.0.4", "127.0.0.2")) as far,
    ):
        receiver = await server.receiver(QUEUE, TEN)
        await far.sender(QUEUE)
        await until(lambda: server.refused > 0)
        sender = await near.sender(QUEUE)
        with anyio.fail_after(10):
            await sender.put(Ping(number=1), 1)
            assert (await receiver.get()).number == 1


# ---------------------------------------------------------------- rules


def question(domain: bytes, key: bytes, mechanism: bytes = b"CURVE") -> list[bytes]:
    return [b"", b"1.0", b"5", domain, b"10.0.0.9", b"", mechanism, key]


@settings(max_examples=50)
@given(
    domain=st.binary(max_size=20),
    mechanism=st.sampled_from([b"CURVE", b"NULL", b"PLAIN", b""]),
    key=st.binary(max_size=40),
)
def test_the_guard_answers_no_to_whatever_is_not_on_its_list(domain: bytes, mechanism: bytes, key: bytes) -> None:
    refusals = HandshakeRejections(lambda: 0.0)
    guard = CurveAuthenticator({"a": frozenset({"ff" * 32})}, refusals, lambda raw: raw.hex().encode())
    answer = guard.answer(question(domain, key, mechanism))
    good = domain == b"a" and mechanism == b"CURVE" and key == b"\xff" * 32
    assert answer[:4] == [b"", b"1.0", b"5", b"200" if good else b"400"]
    assert refusals.total == (not good)
    assert guard.answer(question(b"a", b"\xff" * 32))[3] == b"200"


def test_a_peer_is_logged_once_an_interval_and_many_peers_fill_no_memory() -> None:
    now = [0.0]
    refusals = HandshakeRejections(lambda: now[0])
    with capture_logs() as lines:
        for _ in range(5):
            refusals.count("q", "10.0.0.9", "unknown")
        now[0] = INTERVAL_S
        refusals.count("q", "10.0.0.9", "unknown")
    assert [(line["total"], line["before"]) for line in lines] == [(1, 0), (6, 4)]
    with capture_logs() as lines:
        for number in range(2000):
            refusals.count("q", f"peer {number}", "unknown")
    assert len(lines) <= 257
    assert refusals.total == 2006


class Events:
    """The events of a listening socket."""

    def __init__(self) -> None:
        self.refused: list[tuple[str, str]] = []
        self.now = 0.0
        self.handshakes = Handshakes(
            lambda peer, cause: self.refused.append((peer, cause)), lambda fd: f"peer {fd}", lambda: self.now
        )

    def saw(self, *events: tuple[str, int]) -> list[str]:
        for event, value in events:
            self.handshakes.saw(event, value)
        return [peer for peer, _ in self.refused]


def test_a_failed_handshake_is_that_of_the_connection_that_ends_with_it() -> None:
    events = Events()
    many = [("ACCEPTED", 4), ("ACCEPTED", 5), ("HANDSHAKE_FAILED_PROTOCOL", 0), ("DISCONNECTED", 4)]
    assert events.saw(*many) == ["peer 4"]
    assert events.saw(("HANDSHAKE_SUCCEEDED", 0), ("DISCONNECTED", 5)) == ["peer 4"]


def test_who_was_let_in_and_leaves_is_not_called_refused_and_who_says_nothing_is() -> None:
    events = Events()
    assert events.saw(("ACCEPTED", 4), ("HANDSHAKE_SUCCEEDED", 0)) == []
    events.now = HANDSHAKE_S
    assert events.saw(("ACCEPTED", 5), ("DISCONNECTED", 5)) == ["peer 5"]
    assert events.saw(("ACCEPTED", 5), ("HANDSHAKE_SUCCEEDED", 0), ("DISCONNECTED", 4)) == ["peer 5"]
    assert events.saw(("DISCONNECTED", 5)) == ["peer 5"]
    assert events.saw(("ACCEPTED", 6), ("HANDSHAKE_FAILED_AUTH", 400), ("DISCONNECTED", 6)) == ["peer 5"]
