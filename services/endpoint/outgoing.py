"""Messages to a simulator are written at once where its socket accepts them, else by a task that waits for it.

An action that waits for a task to be scheduled costs its simulator a tenth of its time. The system's buffer accepts it
at once, unless a simulator does not read; from then on the task writes to that one.
"""

import os
import socket
from collections import deque
from collections.abc import Callable

import anyio
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.tls import TLSAttribute

Sent = Callable[[float, float], None]
"""Called with the arrival time of the frame that a message answers and the seconds it was backpressured; else 0."""


class Outgoing:
    """Outgoing is the sending half of a stream; `close` ends direct writing, not the stream.

    Args:
        stream: no other task writes to it.
        sent: called when the system has accepted a message.

    Attributes:
        waiting_bytes: bytes that the system has not accepted yet.
    """

    def __init__(self, stream: ByteStream, sent: Sent) -> None:
        self._stream = stream
        self._sent = sent
        self._waiting: deque[tuple[bytes, float, float]] = deque()
        self._ready = anyio.Event()
        self._taken = anyio.Event()
        self._direct = _second_handle(stream)
        self.waiting_bytes = 0

    def put(self, data: bytes, received_at: float = 0.0, backpressured_s: float = 0.0) -> None:
        """Sends a message or queues it for `run`, without waiting; a reader of the stream calls `wait_until_below`."""
        taken = self._try(data)
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
            await self._stream.send(data)
            self.waiting_bytes -= len(data)
            self._taken.set()
            self._sent(received_at, backpressured_s)

    def close(self) -> None:
        """Closes the second handle: from here on only `run` or `drain` write."""
        if self._direct is not None:
            self._direct.close()
            self._direct = None

    def _try(self, data: bytes) -> int:
        """Returns the bytes accepted at once. After a partial write none is tried again: messages keep their order."""
        if self._direct is None:
            return 0
        try:
            taken = self._direct.send(data)
        except OSError:  # full or broken: `run` finds out which
            taken = 0
        if taken < len(data):
            self.close()
        return taken


def _second_handle(stream: ByteStream) -> socket.socket | None:
    """Returns a second handle of the stream's socket; None where it has none or carries TLS."""
    try:
        if stream.extra(TLSAttribute.ssl_object, None) is not None:  # noqa: S610 (of a stream)
            return None
        raw = stream.extra(SocketAttribute.raw_socket, None)  # noqa: S610 (of a stream)
        if raw is None or os.name != "posix":
            return None
        direct = socket.socket(fileno=os.dup(raw.fileno()))
    except (OSError, ValueError):  # the peer has reset it and uvloop has closed it, or no descriptor is left
        return None
    direct.setblocking(False)
    return direct
