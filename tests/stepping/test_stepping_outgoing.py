"""Messages leave in order, whether the caller or the task writes them."""

from __future__ import annotations

from contextlib import AsyncExitStack, closing
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream

from sparring.services.endpoint.outgoing import Outgoing


async def connected(stack: AsyncExitStack) -> tuple[SocketStream, SocketStream]:
    """Returns both ends of a loopback connection."""
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
    data = bytearray()
    while len(data) < size:
        data += await stream.receive()
    return bytes(data)


@pytest.mark.asyncio
@pytest.mark.parametrize("messages", [3, 400])
async def test_messages_arrive_in_order_although_the_reader_is_slow(messages: int) -> None:
    """The socket takes what it can at once; the rest waits for the task, and no message overtakes another."""
    sent: list[tuple[float, float]] = []
    messages_sent = [bytes([number % 251]) * 50_000 for number in range(messages)]
    with anyio.fail_after(30):
        async with AsyncExitStack() as stack:
            ours, theirs = await connected(stack)
            outgoing = stack.enter_context(closing(Outgoing(ours, lambda *stamp: sent.append(stamp))))
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


@pytest.mark.asyncio
async def test_the_task_and_not_the_caller_gets_the_error_of_a_broken_connection() -> None:
    """`put` never fails; the task raises the error."""
    with anyio.fail_after(30):
        async with AsyncExitStack() as stack:
            ours, theirs = await connected(stack)
            outgoing = stack.enter_context(closing(Outgoing(ours, lambda *_: None)))
            await theirs.aclose()

            async def send() -> None:
                while True:
                    outgoing.put(b"unread" * 1000)
                    await outgoing.drain()
                    await anyio.lowlevel.checkpoint()

            with pytest.raises(anyio.BrokenResourceError):
                await send()


@pytest.mark.asyncio
async def test_a_stream_whose_socket_is_gone_or_has_no_second_handle_is_written_by_the_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """uvloop closes a socket that the other side has reset; and descriptors may run out."""

    class Gone:
        def extra(self, *_: Any) -> None:
            raise ValueError("negative file descriptor")

    def refuse(_: int) -> int:
        raise OSError(24, "Too many open files")

    gone: Any = Gone()
    outgoing = Outgoing(gone, lambda *_: None)
    outgoing.put(b"unheard")
    assert outgoing.waiting_bytes == 7
    with anyio.fail_after(30):
        async with AsyncExitStack() as stack:
            ours, theirs = await connected(stack)
            monkeypatch.setattr("os.dup", refuse)
            outgoing = stack.enter_context(closing(Outgoing(ours, lambda *_: None)))
            outgoing.put(b"first")
            await outgoing.drain()
            assert await read(theirs, 5) == b"first"


@pytest.mark.asyncio
async def test_messages_after_the_end_are_drained() -> None:
    """A closed `Outgoing` leaves later messages to `drain`, in order."""
    with anyio.fail_after(30):
        async with AsyncExitStack() as stack:
            ours, theirs = await connected(stack)
            stamps: list[Any] = []
            with closing(Outgoing(ours, lambda *stamp: stamps.append(stamp))) as outgoing:
                outgoing.put(b"first")
            outgoing.put(b" and last")
            assert len(stamps) == 1
            await outgoing.drain()
            assert await read(theirs, 14) == b"first and last"
