"""A socket is read in the event loop's callbacks until what handles the bytes has had enough."""

import gc
import math
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from anyio.abc import SocketAttribute

from sparring.pipeline.errors import RemoteProtocolError
from sparring.services.endpoint.peers import ServerContext, SimulatorPeer
from sparring.services.endpoint.sockets import SocketBytes, listen

pytestmark = pytest.mark.asyncio

Pair = tuple[SocketBytes, socket.socket]


@asynccontextmanager
async def connected() -> AsyncIterator[Pair]:
    """Returns the stream that a listener has accepted, and the socket of its other end."""
    accepted: list[SocketBytes] = []
    arrived = anyio.Event()

    async def keep(stream: SocketBytes) -> None:
        accepted.append(stream)
        arrived.set()

    with anyio.fail_after(30):
        async with await listen("tcp://127.0.0.1:0") as listener, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, keep)
            with socket.create_connection(("127.0.0.1", listener.extra(SocketAttribute.local_port))) as theirs:
                await arrived.wait()
                async with accepted[0]:
                    yield accepted[0], theirs
            tasks.cancel_scope.cancel()


async def test_bytes_are_handled_as_they_arrive_and_none_is_lost_between_two_ways_of_reading() -> None:
    """What arrives between two reads stays in the system until the next one, of either kind."""
    async with connected() as (ours, theirs):
        got: list[bytes] = []

        def handle(data: bytes) -> bool:
            got.append(data)
            if data == b"a":
                theirs.sendall(b"b")  # the answer to a callback's answer
            return data != b"b"

        theirs.sendall(b"a")
        await ours.receive_while(handle)
        assert got == [b"a", b"b"]
        theirs.sendall(b"c")
        assert await ours.receive(1) == b"c"
        theirs.sendall(b"b")
        await ours.receive_while(handle)
        assert got == [b"a", b"b", b"b"]


async def test_the_waiting_task_gets_what_the_handler_raises_and_may_read_on() -> None:
    async with connected() as (ours, theirs):

        def refuse(data: bytes) -> bool:
            raise ValueError(data)

        theirs.sendall(b"bad")
        with pytest.raises(ValueError, match="bad"):
            await ours.receive_while(refuse)
        theirs.sendall(b"good")
        assert await ours.receive() == b"good"


async def test_a_cancelled_read_takes_nothing_more() -> None:
    async with connected() as (ours, theirs):
        got: list[bytes] = []
        with anyio.CancelScope() as scope:
            scope.cancel()
            await ours.receive_while(lambda data: bool(got.append(data)))
        theirs.sendall(b"later")
        assert await ours.receive() == b"later"
        assert got == []


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("in_callback", [False, True])
async def test_the_end_and_a_reset_of_a_connection_reach_the_reader(reset: bool, in_callback: bool) -> None:
    async with connected() as (ours, theirs):
        if reset:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        with pytest.raises(anyio.BrokenResourceError if reset else anyio.EndOfStream):
            await (ours.receive_while(lambda _: True) if in_callback else ours.receive())
        await ours.aclose()
        await ours.aclose()
        gc.collect()


@pytest.mark.parametrize("uses_uvloop", [True, False])
async def test_a_reset_that_comes_with_bytes_reaches_the_reader_after_them(uses_uvloop: bool) -> None:
    """libuv announces the error of a socket once, together with the bytes, and watches that socket no more."""
    got: list[bytes] = []

    async def read() -> None:
        async with connected() as (ours, theirs):
            theirs.sendall(b"last")
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            theirs.close()
            assert ours.has_hung_up
            with pytest.raises(anyio.BrokenResourceError):
                await ours.receive_while(lambda data: bool(got.append(data)) or True)

    await anyio.to_thread.run_sync(lambda: anyio.run(read, backend_options={"use_uvloop": uses_uvloop}))
    assert got in ([b"last"], [])  # a system may drop what was not read before the reset


async def test_a_hang_up_is_noticed_although_nothing_is_read() -> None:
    async with connected() as (ours, theirs):
        assert not ours.has_hung_up
        theirs.sendall(b"unread")
        assert not ours.has_hung_up
        theirs.close()
        assert ours.has_hung_up
        await ours.aclose()
        assert ours.has_hung_up


async def test_the_number_of_a_simulator_that_hung_up_while_it_was_not_read_is_free() -> None:
    """It was slowed down: stepping neither reads it nor counts its silence, and its supervisor has restarted it."""
    context: Any = SimpleNamespace(clock=anyio.current_time, settings=SimpleNamespace(heartbeat_s=5.0))
    async with connected() as (ours, theirs):
        former = SimulatorPeer(ours, number=3, last_received_at=math.inf)
        newcomer = SimulatorPeer(ours)
        with pytest.raises(RemoteProtocolError, match="simulator number 3 twice"):
            ServerContext.check_number(context, newcomer, 3, [former])
        theirs.close()
        ServerContext.check_number(context, newcomer, 3, [former])


async def test_the_file_of_a_unix_socket_is_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with await listen(f"unix://{path}"):
        assert path.is_socket()
    assert not path.exists()


async def test_more_than_the_system_buffers_is_sent_as_the_other_side_reads() -> None:
    async with connected() as (ours, theirs):
        data = bytes(range(256)) * 80_000
        async with anyio.create_task_group() as tasks, SocketBytes(theirs.dup()) as reader:
            tasks.start_soon(ours.send, data)
            got = bytearray()
            await reader.receive_while(lambda part: got.extend(part) or len(got) < len(data))
        assert got == data
        await ours.send_eof()
        assert theirs.recv(1) == b""
