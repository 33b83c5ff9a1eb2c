"""What is sent to one simulator: at once where its socket takes it, else by a task that waits for it.

An action that waits for a task to be scheduled costs its simulator a tenth of its time. The system's
buffer takes it at once, unless a simulator does not read; from then on the task writes to that one.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Self

import anyio
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.tls import TLSAttribute

Sent = Callable[[float, float], None]
"""Called with the time of the frame that a message answers and the seconds it was withheld; 0 for none."""


class Outgoing:
    """The sending half of a stream; a context manager that closes it, not the stream.

    Args:
        stream: nobody else writes to it.
        sent: called when the system has taken a message.

    Attributes:
        waiting_bytes: that the other side has not taken.
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
        """Sends a message, or leaves it to `run`; who reads the stream waits for `room`. Never waits, never fails."""
        taken = self._try(data)
        if taken == len(data):
            self._sent(received_at, backpressured_s)
            return
        self._waiting.append((data[taken:], received_at, backpressured_s))
        self.waiting_bytes += len(data) - taken
        self._ready.set()

    async def room(self, limit: int) -> None:
        """Waits until no more than `limit` bytes wait: who asks much and reads no answers is not read either."""
        while self.waiting_bytes > limit:
            self._taken = anyio.Event()
            await self._taken.wait()

    async def run(self) -> None:
        """Writes what had to wait, until cancelled.

        Raises:
            BrokenResourceError: the other side has gone.
        """
        while True:
            await self._ready.wait()
            self._ready = anyio.Event()
            await self.drain()

    async def drain(self) -> None:
        """Writes what had to wait; not while `run` does. Raises as `run`."""
        while self._waiting:
            data, received_at, backpressured_s = self._waiting.popleft()
            await self._stream.send(data)
            self.waiting_bytes -= len(data)
            self._taken.set()
            self._sent(received_at, backpressured_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the second handle: from here on all is left to `run` or `drain`."""
        if self._direct is not None:
            self._direct.close()
            self._direct = None

    def _try(self, data: bytes) -> int:
        """Bytes taken at once. A message that is not taken whole is the last one tried: none may overtake it."""
        if self._direct is None:
            return 0
        try:
            taken = self._direct.send(data)
        except OSError:  # full, or broken: then `run` finds out how
            taken = 0
        if taken < len(data):
            self.close()
        return taken


def _second_handle(stream: ByteStream) -> socket.socket | None:
    """The stream's socket, to write to beside the event loop; None where there is none, or what it carries is TLS."""
    if stream.extra(TLSAttribute.ssl_object, None) is not None:  # noqa: S610 (of a stream)
        return None
    raw = stream.extra(SocketAttribute.raw_socket, None)  # noqa: S610 (of a stream)
    if raw is None or os.name != "posix":
        return None
    direct = socket.socket(fileno=os.dup(raw.fileno()))
    direct.setblocking(False)
    return direct
