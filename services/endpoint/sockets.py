"""Simulators connect at a limited rate. Their sockets are read and written in callbacks of the event loop: no task
is scheduled for a message.

A task between a frame and its answer costs a simulator with few agents a tenth of its time. The system's buffer accepts
an answer at once, unless a simulator does not read; from then on a task writes to that one.
"""

import asyncio
import errno
import os
import resource
import select
import socket
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
from anyio.abc import ByteStream, Listener, SocketAttribute, SocketListener, TaskGroup

from sparring.pipeline.errors import ServiceError
from sparring.pipeline.queues.endpoints import refuse_used_path
from sparring.services.endpoint.throttling import LeakyBucket

_RECEIVE: Final = 256 * 1024
"""Bytes received at once."""

ACCEPTS_PER_S: Final = 500
"""Connections accepted per second: each costs the time of an action or two. Further ones wait in the system's queue,
without delay for connected simulators."""
_BURST_S: Final = 0.02
"""Seconds whose connections may be accepted at once after a pause: simultaneous handshakes delay each other."""
_PAUSE_S: Final = 0.1
"""Pause after a failed accept: most likely no file descriptors are left."""

_HUNG_UP: Final = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


class SocketBytes(ByteStream):
    """SocketBytes is one connected socket; one task reads it, and one writes to it.

    Args:
        raw: the connected socket, which this object owns.
        peer: address of its other end.
    """

    def __init__(self, raw: socket.socket, peer: object = "") -> None:
        raw.setblocking(False)
        if raw.family != socket.AF_UNIX:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._raw = raw
        self._peer = peer

    async def receive(self, max_bytes: int = _RECEIVE) -> bytes:
        """Returns the next bytes.

        Raises:
            EndOfStream: the other side has closed the connection.
            BrokenResourceError: the connection is broken.
        """
        while True:
            await anyio.lowlevel.checkpoint()
            try:
                return self._receive_now(max_bytes)
            except BlockingIOError:
                await anyio.wait_readable(self._raw)

    async def receive_while(self, handle: Callable[[bytes], bool]) -> None:
        """Passes bytes to `handle` as they arrive, until it returns False.

        Args:
            handle: called by the event loop; what it raises ends this call.

        Raises:
            EndOfStream, BrokenResourceError: as `receive`.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def read() -> None:
            try:
                continues = handle(self._receive_now(_RECEIVE))
                # A reset that came with these bytes is announced once: libuv stops watching a socket with an error.
                if error := self._raw.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise anyio.BrokenResourceError from OSError(error, os.strerror(error))
                if continues:
                    return
            except BlockingIOError:
                return
            except Exception as error:  # the task that waits raises it
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(None)
            loop.remove_reader(self._raw)

        loop.add_reader(self._raw, read)
        try:
            await done
        finally:
            loop.remove_reader(self._raw)

    def _receive_now(self, max_bytes: int) -> bytes:
        try:
            data = self._raw.recv(max_bytes)
        except BlockingIOError:
            raise
        except OSError as error:
            raise anyio.BrokenResourceError from error
        if not data:
            raise anyio.EndOfStream
        return data

    async def send(self, item: bytes) -> None:
        """Sends all bytes.

        Raises:
            BrokenResourceError: the other side has disconnected.
        """
        await anyio.lowlevel.checkpoint()
        rest = memoryview(item)
        while rest:
            try:
                rest = rest[self._raw.send(rest) :]
            except BlockingIOError:
                await anyio.wait_writable(self._raw)
            except OSError as error:
                raise anyio.BrokenResourceError from error

    def send_now(self, data: bytes) -> int:
        """Returns the number of bytes that the system accepts without waiting; 0 where the connection is broken."""
        try:
            return self._raw.send(data)
        except OSError:  # `send` finds out which
            return 0

    @property
    def has_hung_up(self) -> bool:
        """Returns whether the other side has closed or reset the connection, although unread bytes may come first."""
        if self._raw.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self._raw, _HUNG_UP)
        return bool(poll.poll(0))

    async def send_eof(self) -> None:
        """Ends what is sent."""
        try:
            self._raw.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise anyio.BrokenResourceError from error

    async def aclose(self) -> None:
        """Closes the socket."""
        if self._raw.fileno() >= 0:
            anyio.notify_closing(self._raw)
            self._raw.close()

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        return {SocketAttribute.raw_socket: lambda: self._raw, SocketAttribute.remote_address: lambda: self._peer}


Sent = Callable[[float, float], None]
"""Called with the arrival time of the frame that a message answers and the seconds it was backpressured; else 0."""


class Outgoing:
    """Outgoing is the sending half of a stream.

    Args:
        stream: no other task writes to it.
        sent: called when the system has accepted a message.

    Attributes:
        waiting_bytes: bytes that the system has not accepted yet.
        is_torn: a message was sent in part and given up; nothing can follow it.
    """

    def __init__(self, stream: ByteStream, sent: Sent) -> None:
        self._stream = stream
        self._sent = sent
        self._waiting: deque[tuple[bytes, float, float]] = deque()
        self._ready = anyio.Event()
        self._taken = anyio.Event()
        self._direct = stream if isinstance(stream, SocketBytes) else None
        self.waiting_bytes = 0
        self.is_torn = False

    def put(self, data: bytes, received_at: float = 0.0, backpressured_s: float = 0.0) -> None:
        """Sends a message or queues it for `run`, without waiting; a reader of the stream calls `wait_until_below`."""
        taken = 0 if self._direct is None or self.waiting_bytes else self._direct.send_now(data)
        if taken == len(data):
            self._sent(received_at, backpressured_s)
            return
        self._waiting.append((data[taken:], received_at, backpressured_s))
        self.waiting_bytes += len(data) - taken
        self._ready.set()

    async def wait_until_below(self, limit: int) -> None:
        """Waits until at most `limit` bytes wait: a peer that reads no answers is not read either."""
        while self.waiting_bytes > limit:
            self._taken = anyio.Event()
            await self._taken.wait()

    async def run(self) -> None:
        """Writes queued messages until cancelled.

        Raises:
            BrokenResourceError: the other side has disconnected.
        """
        while True:
            await self._ready.wait()
            self._ready = anyio.Event()
            await self.drain()

    async def drain(self) -> None:
        """Writes queued messages; must not run beside `run`. Raises as `run`."""
        while self._waiting:
            data, received_at, backpressured_s = self._waiting.popleft()
            self.is_torn = True
            await self._stream.send(data)
            self.is_torn = False
            self.waiting_bytes -= len(data)
            self._taken.set()
            self._sent(received_at, backpressured_s)


def allow_descriptors(wanted: int) -> int:
    """Raises the limit of file descriptors towards `wanted`; returns how many the process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = (soft, hard).count(resource.RLIM_INFINITY)
    if soft < wanted and not unlimited:
        soft = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if unlimited else soft


class PacedListener(Listener[SocketBytes]):
    """A PacedListener accepts connections at a limited rate and survives failures of single ones.

    Args:
        listeners: have opened the sockets, and close them.
        path: file of a Unix socket, removed at the end; None for other sockets.

    Attributes:
        failures: number of connections that could not be accepted.
        cause: of the last failure.
    """

    def __init__(self, *listeners: SocketListener, path: Path | None = None) -> None:
        self._listeners = listeners
        self._path = path
        self.failures = 0
        self.cause = ""

    async def serve(self, handler: Callable[[SocketBytes], Any], task_group: TaskGroup | None = None) -> None:
        """Starts `handler` for each connection, in `task_group` if given, until cancelled."""
        async with anyio.create_task_group() as tasks:
            for one in self._listeners:
                tasks.start_soon(self._serve, one, handler, task_group or tasks)

    async def _serve(self, one: SocketListener, handler: Callable[[SocketBytes], Any], tasks: TaskGroup) -> None:
        pace = LeakyBucket(ACCEPTS_PER_S, ACCEPTS_PER_S * _BURST_S, anyio.current_time())
        while True:
            try:
                stream = await self.accept(one)
            except anyio.ClosedResourceError:
                return
            except (OSError, anyio.BrokenResourceError) as error:
                self.failures, self.cause = self.failures + 1, repr(error.__cause__ or error)
                await anyio.sleep(_PAUSE_S)
                continue
            tasks.start_soon(handler, stream)
            await anyio.sleep(pace.take(1, anyio.current_time()))

    async def accept(self, one: SocketListener) -> SocketBytes:
        """Returns the next connection.

        Raises:
            OSError: it failed; a next one may succeed.
            ClosedResourceError: the socket is closed.
        """
        raw = one.extra(SocketAttribute.raw_socket)  # noqa: S610 (of a listener)
        while True:
            try:
                return SocketBytes(*raw.accept())
            except BlockingIOError:
                await anyio.wait_readable(raw)

    async def aclose(self) -> None:
        for one in self._listeners:
            await one.aclose()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        return self._listeners[0].extra_attributes


async def listen(address: str) -> Listener[SocketBytes]:
    """Listens on `tcp://HOST:PORT` or `unix:///PATH`.

    Raises:
        ServiceError: the address is in use or cannot be bound.
    """
    parts = urlsplit(address)
    try:
        if parts.scheme == "unix":
            path = Path(parts.path)
            refuse_used_path(path)  # anyio replaces the socket of a dead predecessor
            return PacedListener(await anyio.create_unix_listener(path, mode=0o600), path=path)
        several = await anyio.create_tcp_listener(
            local_host=parts.hostname, local_port=parts.port or 0, reuse_port=False
        )
        return PacedListener(*(one for one in several.listeners if isinstance(one, SocketListener)))
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be bound ({error})"
        raise ServiceError(
            f"got {address!r} for simulators, which {reason}; expected a free address; stop what uses it, or "
            "set pipeline.address or websocket_address to another"
        ) from error
