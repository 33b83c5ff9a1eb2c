"""Without keys, what clients send is bounded before ZeroMQ holds it, and costs few lines of the log."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.abc import SocketStream
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from sparring.pipeline.messages.channels import Queue, Topic
from sparring.pipeline.messages.simulator import Ping
from sparring.pipeline.queues.bounds import MOST_CONNECTIONS, MOST_PARTS, PART_BYTES, MessageMeter, TooMuch
from sparring.pipeline.queues.curve import Protection
from sparring.pipeline.queues.receiving import MOST_SENDERS, ReceiverState
from sparring.pipeline.queues.wire import Capacity, SenderHello, Timing
from sparring.pipeline.queues.zmq import ZmqTransport
from tests.queues.queues_worlds import free_ports

TOPIC = Topic("k", Ping)
QUEUE = Queue("steps", Ping)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity" + bytes(4)
HANDSHAKE = GREETING + b"\x04" + bytes([len(READY)]) + READY
REAL = Timing(heartbeat=0.05, retry=0.03, peer_timeout=5.0, acknowledge=0.002)


def frame(size: int, *, more: bool = False, command: bool = False) -> bytes:
    return struct.pack(">BQ", 2 | more | 4 * command, size) + bytes(size)


@given(
    messages=st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=5), max_size=5),
    cuts=st.lists(st.integers(1, 100), min_size=1),
)
def test_a_complete_message_holds_nothing_however_it_arrives(messages: list[list[int]], cuts: list[int]) -> None:
    sent = GREETING + frame(40, command=True)
    for sizes in messages:
        sent += b"".join(frame(size, more=True) + frame(3, command=True) for size in sizes[:-1]) + frame(sizes[-1])
    meter, most = MessageMeter(), max((sum(sizes) + 200 * len(sizes) for sizes in messages), default=104)
    at = 0
    while at < len(sent):
        for cut in cuts:
            meter.feed(sent[at : at + cut])
            at += cut
            assert meter.held <= max(most, 104)
    assert meter.held == 0


def test_parts_are_limited_however_small_and_older_protocols_refused() -> None:
    meter = MessageMeter()
    meter.feed(GREETING + b"\x01\x00" * MOST_PARTS)
    assert meter.held == PART_BYTES * MOST_PARTS
    with pytest.raises(TooMuch, match="parts"):
        meter.feed(b"\x01\x00")
    for former in (GREETING.replace(b"\x7f\x03", b"\x7f\x01"), b"GET / HTTP/1.1\r\n" * 4):
        with pytest.raises(TooMuch, match="another protocol"):
            MessageMeter().feed(former)


def test_names_of_senders_are_limited_and_a_successor_is_not_one_more() -> None:
    state = ReceiverState("assembly.1#1~0", Ping, Capacity(messages=4, steps=40), REAL)
    for number in range(MOST_SENDERS + 5):
        state.on_hello(0.0, SenderHello(sender=f"stepping-{number}.1#1~0", serial=1, oldest=0), number)
    assert (state.senders, state.counts.refused) == (MOST_SENDERS, 5)
    state.on_hello(1.0, SenderHello(sender="stepping-0.2#1~0", serial=1, oldest=0), 0)
    assert (state.senders, state.counts.refused) == (MOST_SENDERS, 5)
    state.tick(REAL.peer_timeout)
    assert state.senders == 1


@asynccontextmanager
async def stranger(port: int) -> AsyncIterator[SocketStream]:
    """Connects as a client of ZeroMQ that has no key."""
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(HANDSHAKE)
        received = b""
        while b"READY" not in received:
            received += await stream.receive()
        yield stream


async def rejected(stream: SocketStream, parts: bytes, most: int) -> bool:
    """Sends `parts` again and again; returns whether the connection is closed before `most` bytes are sent."""
    try:
        with anyio.fail_after(30):
            for _ in range(most // len(parts)):
                await stream.send(parts)
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        return True
    return False


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [0, 100, 65536])
async def test_an_endless_message_ends_its_connection_and_no_other(size: int) -> None:
    (port,) = free_ports(1)
    endpoints = {"topic:b": f"tcp://127.0.0.1:{port}"}
    async with (
        ZmqTransport(endpoints, "learning.1", timing=REAL) as server,
        ZmqTransport(endpoints, "honest.1", timing=REAL, reconnect=0.01) as honest,
    ):
        topic, subscription = await server.publisher("b"), await honest.subscribe("b")
        async with stranger(port) as stream:
            assert await rejected(stream, frame(size, more=True) * (1 + 2**16 // (size + 9)), 2**26)
        topic.publish(TOPIC, Ping(number=7))
        with anyio.fail_after(10):
            while subscription.latest(TOPIC) is None:
                await subscription.changed()
        assert server.refused == 1


@pytest.mark.asyncio
async def test_many_connections_with_parts_of_messages_hold_no_more_than_one() -> None:
    (port,) = free_ports(1)
    async with ZmqTransport({"topic:b": f"tcp://127.0.0.1:{port}"}, "learning.1", timing=REAL) as server:
        await server.publisher("b")
        async with anyio.create_task_group() as tasks:
            for _ in range(8):  # each alone is within the limit
                tasks.start_soon(hold, port, frame(900_000, more=True))
            await until(lambda: server.refused >= 6)
            tasks.cancel_scope.cancel()


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not condition():  # noqa: ASYNC110 - it changes in a thread of ZeroMQ
            await anyio.sleep(0.01)


async def connect(port: int) -> None:
    async with await anyio.connect_tcp("127.0.0.1", port):
        await anyio.sleep_forever()


async def hold(port: int, data: bytes) -> None:
    async with stranger(port) as stream:
        await stream.send(data)
        await anyio.sleep_forever()


@pytest.mark.asyncio
async def test_malformed_messages_and_connections_cost_few_lines_and_harm_nobody() -> None:
    (port,) = free_ports(1)
    endpoints = {"steps": f"tcp://127.0.0.1:{port}"}
    with capture_logs() as lines:
        async with (
            ZmqTransport(endpoints, "assembly.1", timing=REAL) as server,
            ZmqTransport(endpoints, "stepping.1", timing=REAL, reconnect=0.01) as honest,
        ):
            receiver = await server.receiver(QUEUE, Capacity(messages=4, steps=40))
            sender = await honest.sender(QUEUE)
            for _ in range(20):
                with socket.create_connection(("127.0.0.1", port)) as reset:  # before it is accepted
                    reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            async with stranger(port) as stream:
                await stream.send((frame(5) + frame(0) + frame(30, more=True) + frame(0)) * 100)
                await until(lambda: receiver.statistics().discarded == 300)
            for _ in range(20):
                async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                    await stream.send(b"GET / HTTP/1.0\r\n\r\n" * 10)
                    with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                        while True:
                            await stream.receive()
            await sender.put(Ping(number=3), 1)
            assert (await receiver.get()).number == 3
            assert server.refused == 20
    assert [line["event"] for line in lines] == ["discarded", "refused", "discarded_again", "refused_again"]


@pytest.mark.asyncio
async def test_connections_are_limited() -> None:
    (port,) = free_ports(1)
    async with ZmqTransport({"topic:b": f"tcp://127.0.0.1:{port}"}, "learning.1", timing=REAL) as server:
        await server.publisher("b")
        async with anyio.create_task_group() as tasks:
            for _ in range(MOST_CONNECTIONS + 5):
                tasks.start_soon(connect, port)
            await until(lambda: server.refused == 5)
            tasks.cancel_scope.cancel()


@pytest.mark.asyncio
async def test_only_the_machines_of_the_run_connect_without_keys() -> None:
    (port,) = free_ports(1)
    endpoints = {"steps": f"tcp://127.0.0.1:{port}"}
    protection = Protection(insecure=True, machines=("127.0.0.2",))
    async with ZmqTransport(endpoints, "assembly.1", timing=REAL, protection=protection) as server:
        await server.receiver(QUEUE, Capacity(messages=4, steps=40))
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()
        assert server.refused == 1
