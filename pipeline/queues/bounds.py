"""Bounds what clients without keys can make ZeroMQ hold.

ZeroMQ bounds the bytes of a part, but neither the number of parts nor the bytes of a message, and holds a message until
its last part arrives. So where no keys authenticate clients, their connections are accepted here; what they send is
measured (ZMTP 3, rfc.zeromq.org/spec/23) and passed on to ZeroMQ at a Unix socket in a private folder.
"""

import asyncio
import ipaddress
import math
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Final

import anyio
from anyio.abc import Listener, SocketAttribute, SocketStream, TaskGroup

from sparring.pipeline.messages.codec import SERVICES, Buffer
from sparring.pipeline.queues.endpoints import socket_folder

MOST_CONNECTIONS: Final = 256
MOST_PARTS: Final = SERVICES.arrays + 2
"""Parts of a message: its own, and the header and arrays of the record beside it."""
PART_BYTES: Final = 64
"""Memory that ZeroMQ needs for a part, however short."""

CLOSING_S: Final = 1.0
"""Seconds for which what is on its way is still passed on after the end has closed."""
_PAUSE_S: Final = 0.1
_CHUNK: Final = 2**18
_GREETING: Final = 64
_MORE, _LONG, _COMMAND = 1, 2, 4
"""Flags of a frame."""


class TooMuch(Exception):
    """A client has sent more than it may, or does not speak ZeroMQ's protocol; the text is the cause."""


class MessageMeter:
    """A MessageMeter measures the message that a client is sending.

    Attributes:
        held: bytes that ZeroMQ holds until the message is complete.
    """

    def __init__(self) -> None:
        self.held = 0
        self._parts = 0
        self._greeting = bytearray()
        self._head = bytearray()
        self._flags = 0
        self._left = 0  # bytes of the frame's body

    def feed(self, data: Buffer) -> None:
        """Measures received bytes.

        Raises:
            TooMuch: this is no ZMTP 3, or the message has too many parts.
        """
        at = _GREETING - len(self._greeting)
        if at:
            self._greeting += data[:at]
            if len(self._greeting) == _GREETING and (self._greeting[0] != 0xFF or self._greeting[10] < 3):
                raise TooMuch("it speaks another protocol")
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                self.held += step
                at += step
            else:
                self._head.append(data[at])
                at += 1
                if len(self._head) == (9 if self._head[0] & _LONG else 2):
                    self._begin(self._head[0], int.from_bytes(self._head[1:], "big"))
                    self._head.clear()
                else:
                    continue
            if not self._left and not self._flags & _MORE and not (self._flags & _COMMAND and self._parts):
                self.held = self._parts = 0

    def _begin(self, flags: int, size: int) -> None:
        self._flags, self._left = flags, size
        self.held += PART_BYTES
        self._parts += not flags & _COMMAND
        if self._parts > MOST_PARTS:
            raise TooMuch(f"its message has more than {MOST_PARTS} parts")


class BoundedListener:
    """A BoundedListener passes on what the clients of an end send, until it is closed.

    Args:
        most_bytes: held by all incomplete messages together; beyond it the client with the largest one is disconnected.
        machines: addresses from which clients may connect; empty for any.
        on_rejected: called with a client's address and the cause.

    Attributes:
        inner: Unix socket at which ZeroMQ has to listen.
    """

    def __init__(self, most_bytes: int, machines: tuple[str, ...], on_rejected: Callable[[str, str], None]) -> None:
        self._most_bytes = most_bytes
        self._machines = {str(ipaddress.ip_address(machine)) for machine in machines}
        self._on_rejected = on_rejected
        self._closing = ExitStack()
        self.inner = self._closing.enter_context(socket_folder()) / "0"
        self._clients: dict[MessageMeter, anyio.CancelScope] = {}

    async def listen(self, host: str, port: int, tasks: TaskGroup) -> None:
        """Begins to accept connections, each with a task of its own in `tasks`.

        Raises:
            OSError: the address cannot be listened at.
        """
        listener = await anyio.create_tcp_listener(local_host=host, local_port=port)
        scope = anyio.CancelScope()
        self._closing.callback(scope.cancel)
        tasks.start_soon(self._serve, listener, tasks, scope)

    def close(self) -> None:
        """Ends the listening; connected clients get what ZeroMQ still sends to them."""
        self._closing.close()
        for scope in self._clients.values():
            scope.deadline = anyio.current_time() + CLOSING_S

    async def _serve(self, listener: Listener[SocketStream], tasks: TaskGroup, scope: anyio.CancelScope) -> None:
        with scope:
            async with listener:
                while True:
                    try:
                        await listener.serve(self._forward, tasks)
                    except* OSError:  # most likely no file descriptors are left
                        await anyio.sleep(_PAUSE_S)

    async def _forward(self, client: SocketStream) -> None:
        address = str(client.extra(SocketAttribute.remote_address, ("unknown",))[0])  # noqa: S610 (it may be reset)
        meter = MessageMeter()
        try:
            async with client:
                if self._machines and address not in self._machines:
                    raise TooMuch("none of the run's machines has its address")
                if len(self._clients) >= MOST_CONNECTIONS:
                    raise TooMuch(f"there are {MOST_CONNECTIONS} connections")
                with anyio.CancelScope() as self._clients[meter]:
                    # Not a stream of anyio: a cancelled read of its Unix sockets may raise in the event loop.
                    reader, writer = await asyncio.open_unix_connection(self.inner)
                    with closing(writer):
                        async with anyio.create_task_group() as tasks:
                            tasks.start_soon(self._receive, client, writer, meter, tasks.cancel_scope)
                            while data := await reader.read(_CHUNK):
                                await client.send(data)
                            tasks.cancel_scope.cancel()
                if self._clients[meter].cancelled_caught and self._clients[meter].deadline == math.inf:
                    raise TooMuch(f"its message and those of others have more than {self._most_bytes} bytes")
        except* TooMuch as excess:
            self._on_rejected(address, str(excess.exceptions[0]))
        except* (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        finally:
            self._clients.pop(meter, None)

    async def _receive(
        self, client: SocketStream, inner: asyncio.StreamWriter, meter: MessageMeter, scope: anyio.CancelScope
    ) -> None:
        """Passes on what a client sends, until it disconnects."""
        try:
            while True:
                data = await client.receive(_CHUNK)
                meter.feed(data)
                self._make_room()
                inner.write(data)
                await inner.drain()
        except anyio.EndOfStream:
            scope.cancel()

    def _make_room(self) -> None:
        living = [meter for meter, scope in self._clients.items() if not scope.cancel_called]
        if sum(meter.held for meter in living) > self._most_bytes:
            self._clients[max(living, key=lambda meter: meter.held)].cancel()
