"""Messages leave in their order, whoever writes them."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream

from sparring.services.endpoint.outgoing import Outgoing


async def connected(stack: AsyncExitStack) -> tuple[SocketStream, SocketStream]:
    """Both ends of a loopback connection."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    ours: list[SocketStream] = []

    async def keep(stream: SocketStream) -> None:
        ours.append(stream)
        accepted.set()

    accepted = anyio.Event()
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, keep)
        theirs = await anyio.connect_tcp("127.0.0.1", port)
        await accepted.wait()
        tasks.cancel_scope.cancel()
    return await stack.enter_async_context(ours[0]), await stack.enter_async_context(theirs)


async def read(stream: SocketStream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += await stream.receive()
    return data


@pytest.mark.asyncio
@pytest.mark.parametrize("messages", [3, 400])
async def test_messages_arrive_in_their_order_though_the_reader_is_slow(messages: int) -> None:
    """What the socket takes goes at once; the rest waits for the task, and nothing overtakes it."""
    sent: list[tuple[float, float]] = []
    told = [bytes([number % 251]) * 50_000 for number in range(messages)]
    with anyio.fail_after(30):
        async with AsyncExitStack() as stack:
            ours, theirs = await connected(stack)
            outgoing = stack.enter_context(Outgoing(ours, lambda *stamp: sent.append(stamp)))
            for number, data in enumerate(told):
                outgoing.put(data, number, 0.5)
            at_once = len(sent)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(outgoing.run)
                assert await read(theirs, 50_000 * messages) == b"".join(told)
                outgoing.put(b"last", messages, 0.5)
                assert await read(theirs, 4) == b"last"
                tasks.cancel_scope.cancel()
    assert sent == [(number, 0.5) for number in range(messages + 1)]
    assert (at_once == messages) == (messages == 3)


@pytest.mark.asyncio
async def test_a_broken_connection_is_found_by_the_task_and_not_by_the_caller() -> None:
    """`put` never fails; who runs the task hears that the other side has gone."""
    with anyio.fail_after(30):
        async with AsyncExitStack() as stack:
            ours, theirs = await connected(stack)
            outgoing = stack.enter_context(Outgoing(ours, lambda *_: None))
            await theirs.aclose()

            async def speak() -> None:
                while True:
                    outgoing.put(b"nobody" * 1000)
                    await outgoing.drain()
                    await anyio.lowlevel.checkpoint()

            with pytest.raises(anyio.BrokenResourceError):
                await speak()


@pytest.mark.asyncio
async def test_the_last_words_after_the_end_are_drained() -> None:
    """Closed, it leaves everything to `drain`, in order."""
    with anyio.fail_after(30):
        async with AsyncExitStack() as stack:
            ours, theirs = await connected(stack)
            stamps: list[Any] = []
            with Outgoing(ours, lambda *stamp: stamps.append(stamp)) as outgoing:
                outgoing.put(b"first")
            outgoing.put(b" and last")
            assert len(stamps) == 1
            await outgoing.drain()
            assert await read(theirs, 14) == b"first and last"
