"""Each endpoint of a service accepts only the keys on its list; it refuses, counts and logs all others once."""

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
from sparring.pipeline.messages.channels import Queue, Topic
from sparring.pipeline.messages.simulator import Ping
from sparring.pipeline.queues.curve import HANDSHAKE_S, Handshakes, authenticate
from sparring.pipeline.queues.endpoints import peer_address
from sparring.pipeline.queues.interface import Capacity
from sparring.pipeline.queues.wire import Timing
from sparring.pipeline.queues.zmq import ZmqTransport, new_secret

TOPIC = Topic("k", Ping)
TEN = Capacity(messages=10, steps=100)
REAL = Timing(heartbeat=0.05, retry=0.03, peer_timeout=5.0, acknowledge=0.002)
QUEUE = "segments:Ball"
OURS, OTHERS = new_secret(), new_secret()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def endpoints() -> dict[str, str]:
    return {QUEUE: f"tcp://127.0.0.1:{free_port()}", "topic:b": f"tcp://127.0.0.1:{free_port()}"}


def transport(endpoints: Mapping[str, str], start: str, secret: str | None) -> ZmqTransport:
    return ZmqTransport(endpoints, start, timing=REAL, reconnect=0.01, secret=secret)


async def wait_until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - it changes in a thread of ZeroMQ
            await anyio.sleep(0.01)


# ---------------------------------------------------------------- over sockets


@pytest.mark.asyncio
async def test_a_service_with_the_key_of_the_run_is_accepted(endpoints: dict[str, str]) -> None:
    async with (
        transport(endpoints, "learning.1", OURS) as server,
        transport(endpoints, "assembly.1", OURS) as client,
    ):
        receiver = await server.receiver(Queue(QUEUE, Ping), TEN)
        sender = await client.sender(Queue(QUEUE, Ping))
        with anyio.fail_after(10):
            await sender.put(Ping(number=1), 1)
            assert (await receiver.get()).number == 1
        assert server.refused == 0


@pytest.mark.asyncio
async def test_a_service_with_another_key_is_refused_and_both_sides_say_so(endpoints: dict[str, str]) -> None:
    async with (
        transport(endpoints, "learning.1", OURS) as server,
        transport(endpoints, "assembly.1", OTHERS) as client,
    ):
        receiver = await server.receiver(Queue(QUEUE, Ping), TEN)
        with capture_logs() as lines:
            await client.sender(Queue(QUEUE, Ping))
            await wait_until(lambda: server.refused > 1 and client.refused > 1)
        assert receiver.empty()
    assert [line["peer"] for line in lines if "closed the connection" in line.get("cause", "")] == [endpoints[QUEUE]]
    assert any("it has no key or another one" in line.get("cause", "") for line in lines)
    assert OURS not in str(lines)
    assert OTHERS not in str(lines)


@pytest.mark.asyncio
async def test_a_client_that_knows_the_public_key_without_the_secret_is_refused(endpoints: dict[str, str]) -> None:
    async with transport(endpoints, "learning.1", OURS) as server:
        receiver = await server.receiver(Queue(QUEUE, Ping), TEN)
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer, capture_logs() as lines:
            peer.linger = 0
            peer.curve_publickey, peer.curve_secretkey = zmq.curve_keypair()
            peer.curve_serverkey = zmq.curve_public(OURS.encode())
            peer.connect(endpoints[QUEUE])
            await wait_until(lambda: server.refused > 0)
        assert receiver.empty()
    assert [(line["endpoint"], line["peer"], line["cause"]) for line in lines if line["event"] == "refused"] == [
        (QUEUE, "127.0.0.1", "it has another key")
    ]


@pytest.mark.asyncio
async def test_a_client_without_key_is_refused(endpoints: dict[str, str]) -> None:
    async with transport(endpoints, "learning.1", OURS) as server:
        receiver = await server.receiver(Queue(QUEUE, Ping), TEN)
        with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
            plain.linger = 0
            plain.connect(endpoints[QUEUE])
            await wait_until(lambda: server.refused > 0)
        assert receiver.empty()


@pytest.mark.asyncio
async def test_a_peer_that_does_not_speak_zeromq_is_counted_and_logged_once_per_address(
    endpoints: dict[str, str],
) -> None:
    async with transport(endpoints, "learning.1", OURS) as server:
        await server.receiver(Queue(QUEUE, Ping), TEN)
        with capture_logs() as lines:
            for _ in range(3):
                async with await anyio.connect_tcp("127.0.0.1", int(endpoints[QUEUE].rpartition(":")[2])) as foreign:
                    await foreign.send(b"GET / HTTP/1.0\r\n\r\n" * 10)
                    with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                        while True:
                            await foreign.receive()
            await wait_until(lambda: server.refused == 3)
    peers = [line["peer"] for line in lines if line["event"] == "refused"]
    assert set(peers) <= {"127.0.0.1", "unknown"}  # a socket that is closed already has no address
    assert len(peers) == len(set(peers))


def test_the_address_of_a_peer_is_known_while_it_is_connected() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.connect(server.getsockname())
        accepted, _ = server.accept()
        descriptor = accepted.fileno()
        assert peer_address(descriptor) == "127.0.0.1"
        accepted.close()
        assert peer_address(descriptor) == "unknown"


@pytest.mark.asyncio
async def test_no_tcp_endpoint_opens_without_a_key(endpoints: dict[str, str]) -> None:
    async with transport(endpoints, "learning.1", None) as server:
        with pytest.raises(QueueError, match="without a key; expected the key of the run"):
            await server.receiver(Queue(QUEUE, Ping), TEN)
        with pytest.raises(QueueError, match="without a key; expected the key of the run"):
            await server.subscribe("b")


# ---------------------------------------------------------------- rules


def zap_request(domain: bytes, key: bytes, mechanism: bytes = b"CURVE") -> list[bytes]:
    return [b"", b"1.0", b"5", domain, b"10.0.0.9", b"", mechanism, key]


@settings(max_examples=25)
@given(
    domain=st.binary(max_size=20),
    mechanism=st.sampled_from([b"CURVE", b"NULL", b"PLAIN", b""]),
    key=st.binary(max_size=40),
)
def test_the_authenticator_refuses_any_key_but_that_of_the_run(domain: bytes, mechanism: bytes, key: bytes) -> None:
    rejected: list[tuple[str, str, str]] = []
    rest: Any = b"\xff" * 32, lambda *call: rejected.append(call)
    answer = authenticate(zap_request(domain, key, mechanism), *rest)
    good = mechanism == b"CURVE" and key == b"\xff" * 32
    assert answer[:4] == [b"", b"1.0", b"5", b"200" if good else b"400"]
    assert len(rejected) == (not good)
    assert authenticate(zap_request(b"a", b"\xff" * 32), *rest)[3] == b"200"


class MonitoredHandshakes:
    """The handshakes of a listening socket, fed with its monitor events."""

    def __init__(self) -> None:
        self.refused: list[tuple[str, str]] = []
        self.now = 0.0
        self.handshakes = Handshakes(
            lambda peer, cause: self.refused.append((peer, cause)), lambda fd: f"peer {fd}", lambda: self.now
        )

    def feed(self, *events: tuple[str, int]) -> list[str]:
        for event, value in events:
            self.handshakes.on_event(event, value)
        return [peer for peer, _ in self.refused]


def test_a_failed_handshake_belongs_to_the_connection_that_ends_with_it() -> None:
    handshakes = MonitoredHandshakes()
    many = [("ACCEPTED", 4), ("ACCEPTED", 5), ("HANDSHAKE_FAILED_PROTOCOL", 0), ("DISCONNECTED", 4)]
    assert handshakes.feed(*many) == ["peer 4"]
    assert handshakes.feed(("HANDSHAKE_SUCCEEDED", 0), ("DISCONNECTED", 5)) == ["peer 4"]


def test_an_accepted_peer_that_leaves_is_not_counted_as_refused_and_a_silent_one_is() -> None:
    handshakes = MonitoredHandshakes()
    assert handshakes.feed(("ACCEPTED", 4), ("HANDSHAKE_SUCCEEDED", 0)) == []
    handshakes.now = HANDSHAKE_S
    assert handshakes.feed(("ACCEPTED", 5), ("DISCONNECTED", 5)) == ["peer 5"]
    assert handshakes.feed(("ACCEPTED", 5), ("HANDSHAKE_SUCCEEDED", 0), ("DISCONNECTED", 4)) == ["peer 5"]
    assert handshakes.feed(("DISCONNECTED", 5)) == ["peer 5"]
    assert handshakes.feed(("ACCEPTED", 6), ("HANDSHAKE_FAILED_AUTH", 400), ("DISCONNECTED", 6)) == ["peer 5"]
