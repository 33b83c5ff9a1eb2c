"""Messages leave in order, whether the caller or the task writes them."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest

from sparring.pipeline.messages.simulator import Fault
from sparring.services.endpoint.peers import SimulatorPeer
from sparring.services.endpoint.sockets import Outgoing, SocketBytes

Pair = tuple[SocketBytes, SocketBytes]


@asynccontextmanager
async def connected() -> AsyncIterator[Pair]:
    """Returns both ends of a loopback connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = SocketBytes(socket.create_connection(server.getsockname()))
        ours = SocketBytes(*server.accept())
    with anyio.fail_after(30):
        async with ours, theirs:
            yield ours, theirs


async def read(stream: SocketBytes, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        data += await stream.receive()
    return bytes(data)


@pytest.mark.asyncio
@pytest.mark.parametrize("messages", [3, 400])
async def test_messages_arrive_in_order_although_the_reader_is_slow(messages: int) -> None:
    """The socket takes what it can at once; the rest waits for the task, and no message overtakes another."""
    async with connected() as (ours, theirs):
        sent: list[tuple[float, float]] = []
        messages_sent = [bytes([number % 251]) * 50_000 for number in range(messages)]
        outgoing = Outgoing(ours, lambda *stamp: sent.append(stamp))
        for number, data in enumerate(messages_sent):
            outgoing.put(data, number, 0.5)
        at_once = len(sent)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(outgoing.run)
            assert await read(theirs, 50_000 * messages) == b"".join(messages_sent)
            outgoing.put(b"last", messages, 0.5)
            assert await read(theirs, 4) == b"last"
            tasks.cancel_scope.cancel()
        assert sent == [(number, 0.5) for number in range(messages + 1)]
        assert (at_once == messages) == (messages == 3)
        outgoing.put(b"again", 1, 2)  # the socket has caught up: the caller writes again
        assert (outgoing.waiting_bytes, sent[-1]) == (0, (1, 2))


@pytest.mark.asyncio
async def test_the_task_and_not_the_caller_gets_the_error_of_a_broken_connection() -> None:
    """`put` never fails; the task raises the error."""
    async with connected() as (ours, theirs):
        outgoing = Outgoing(ours, lambda *_: None)
        await theirs.aclose()

        async def send() -> None:
            while True:
                outgoing.put(b"unread" * 1000)
                await outgoing.drain()
                await anyio.lowlevel.checkpoint()

        with pytest.raises(anyio.BrokenResourceError):
            await send()


@pytest.mark.asyncio
async def test_any_other_stream_is_written_by_the_task() -> None:
    """TLS has no socket that a caller may write to."""
    async with connected() as (ours, theirs):

        class Wrapped:
            send = ours.send

        wrapped: Any = Wrapped()
        outgoing = Outgoing(wrapped, lambda *_: None)
        outgoing.put(b"first")
        outgoing.put(b" and last")
        assert outgoing.waiting_bytes == 14
        await outgoing.drain()
        assert await read(theirs, 14) == b"first and last"


@pytest.mark.asyncio
async def test_nothing_follows_a_message_that_was_given_up_in_its_middle() -> None:
    async with connected() as (ours, theirs):
        peer = SimulatorPeer(ours)
        peer.outgoing = Outgoing(ours, lambda *_: None)
        peer.outgoing.put(bytes(20_000_000))
        with anyio.move_on_after(0.01):
            await peer.outgoing.run()
        assert peer.outgoing.is_torn
        waiting = peer.outgoing.waiting_bytes
        await peer.send_fault(Fault(code="timeout", got="", expected="", remedy=""))
        assert peer.outgoing.waiting_bytes == waiting
        await ours.aclose()
        received = bytearray()
        with suppress(anyio.EndOfStream):
            while True:
                received += await theirs.receive()
        assert len(received) < 20_000_000
        assert not any(received)
