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
from sparring.pipeline.queues.curve import (
    HANDSHAKE_S,
    Curve,
    Handshakes,
    Protection,
    authenticate,
)
from sparring.pipeline.queues.endpoints import peer_address
from sparring.pipeline.queues.interface import Capacity
from sparring.pipeline.queues.wire import Timing
from sparring.pipeline.queues.zmq import ZmqTransport, new_curve_pair

TOPIC = Topic("k", Ping)
TEN = Capacity(messages=10, steps=100)
REAL = Timing(heartbeat=0.05, retry=0.03, peer_timeout=5.0, acknowledge=0.002)
QUEUE = "segments:Ball"
PAIRS = {role: new_curve_pair() for role in ("learning", "assembly", "stepping", "unlisted")}


def curve(role: str, *, server: str = "learning", clients: tuple[str, ...] = ("assembly",)) -> Curve:
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


async def wait_until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - it changes in a thread of ZeroMQ
            await anyio.sleep(0.01)


async def connect_and_wait(endpoints: Mapping[str, str], keys: Curve, name: str = QUEUE) -> None:
    """Connects and waits until that is refused."""
    async with transport(endpoints, "client.1", curve=keys) as client:
        await (client.subscribe("b") if name == "topic:b" else client.sender(Queue(name, Ping)))
        await anyio.sleep(10)


# ---------------------------------------------------------------- over sockets


@pytest.mark.asyncio
async def test_a_key_on_the_list_is_accepted(endpoints: dict[str, str]) -> None:
    async with (
        transport(endpoints, "learning.1", curve=curve("learning")) as server,
        transport(endpoints, "coordination.1", curve=curve("assembly")) as client,
    ):
        receiver = await server.receiver(Queue(QUEUE, Ping), TEN)
        sender = await client.sender(Queue(QUEUE, Ping))
        with anyio.fail_after(10):
            await sender.put(Ping(number=1), 1)
            assert (await receiver.get()).number == 1
        assert server.refused == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("role", ["stepping", "unlisted"])
async def test_a_key_that_is_not_on_the_list_is_refused_and_its_owner_gets_an_error(
    endpoints: dict[str, str], role: str
) -> None:
    async with transport(endpoints, "learning.1", curve=curve("learning")) as server:
        receiver = await server.receiver(Queue(QUEUE, Ping), TEN)
        with pytest.raises(QueueError, match=f"got a rejected connection to {QUEUE}"), capture_logs() as lines:
            await connect_and_wait(endpoints, curve(role))
        assert server.refused == 1
        assert receiver.empty()
    cause = "its key is not allowed here" if role == "stepping" else "its key is unknown"
    refused = [line for line in lines if line["event"] == "refused"]
    assert [(line["endpoint"], line["peer"], line["cause"]) for line in refused] == [(QUEUE, "127.0.0.1", cause)]
    assert PAIRS[role][1] not in str(lines)


@pytest.mark.asyncio
async def test_a_client_that_expects_another_server_sends_this_one_nothing(endpoints: dict[str, str]) -> None:
    other = curve("assembly", server="unlisted")
    async with (
        transport(endpoints, "learning.1", curve=curve("learning")) as server,
        transport(endpoints, "coordination.1", curve=other) as client,
    ):
        receiver = await server.receiver(Queue(QUEUE, Ping), TEN)
        with capture_logs() as lines:
            await client.sender(Queue(QUEUE, Ping))
            await wait_until(lambda: server.refused > 1 and client.refused > 1)
        assert receiver.empty()
    assert [line["peer"] for line in lines if "closed the connection" in line.get("cause", "")] == [endpoints[QUEUE]]


@pytest.mark.asyncio
async def test_a_client_without_key_is_refused(endpoints: dict[str, str]) -> None:
    async with transport(endpoints, "learning.1", curve=curve("learning")) as server:
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
    async with transport(endpoints, "learning.1", curve=curve("learning")) as server:
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
async def test_a_list_applies_to_its_endpoint_only(endpoints: dict[str, str]) -> None:
    async with transport(endpoints, "learning.1", curve=curve("learning")) as server:
        topic = await server.publisher("b")
        topic.publish(TOPIC, Ping(number=7))
        async with transport(endpoints, "s.1", curve=curve("stepping")) as client:
            subscription = await client.subscribe("b")
            with anyio.fail_after(10):
                while subscription.latest(TOPIC) is None:
                    await subscription.changed()
        with pytest.raises(QueueError, match="got a rejected connection to topic:b"):
            await connect_and_wait(endpoints, curve("assembly"), "topic:b")


@pytest.mark.asyncio
async def test_a_service_does_not_listen_beyond_loopback_without_keys() -> None:
    endpoints = {QUEUE: f"tcp://0.0.0.0:{free_port()}"}
    async with transport(endpoints, "learning.1") as server:
        with pytest.raises(QueueError, match="which other machines can reach, without keys; expected keys; make them"):
            await server.receiver(Queue(QUEUE, Ping), TEN)
    async with transport(endpoints, "learning.1", insecure=True) as server:
        await server.receiver(Queue(QUEUE, Ping), TEN)


@pytest.mark.asyncio
async def test_a_run_on_several_machines_accepts_no_other_address() -> None:
    endpoints = {QUEUE: f"tcp://127.0.0.2:{free_port()}"}
    async with (
        transport(endpoints, "learning.1", curve=curve("learning"), machines=("127.0.0.2", "127.0.0.3")) as server,
        transport(endpoints, "c.1", curve=curve("assembly"), machines=("127.0.0.3", "127.0.0.2")) as near,
        transport(endpoints, "c.2", curve=curve("assembly"), machines=("127.0.0.4", "127.0.0.2")) as far,
    ):
        receiver = await server.receiver(Queue(QUEUE, Ping), TEN)
        await far.sender(Queue(QUEUE, Ping))
        await wait_until(lambda: server.refused > 0)
        sender = await near.sender(Queue(QUEUE, Ping))
        with anyio.fail_after(10):
            await sender.put(Ping(number=1), 1)
            assert (await receiver.get()).number == 1


# ---------------------------------------------------------------- rules


def zap_request(domain: bytes, key: bytes, mechanism: bytes = b"CURVE") -> list[bytes]:
    return [b"", b"1.0", b"5", domain, b"10.0.0.9", b"", mechanism, key]


@settings(max_examples=25)
@given(
    domain=st.binary(max_size=20),
    mechanism=st.sampled_from([b"CURVE", b"NULL", b"PLAIN", b""]),
    key=st.binary(max_size=40),
)
def test_the_authenticator_refuses_any_key_that_is_not_on_its_list(domain: bytes, mechanism: bytes, key: bytes) -> None:
    rejected: list[tuple[str, str, str]] = []
    rest: Any = {"a": frozenset({"ff" * 32})}, lambda *call: rejected.append(call), lambda raw: raw.hex().encode()
    answer = authenticate(zap_request(domain, key, mechanism), *rest)
    good = domain == b"a" and mechanism == b"CURVE" and key == b"\xff" * 32
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
