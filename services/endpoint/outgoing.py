"""Messages to a simulator are written at once where its socket accepts them, else by a task that waits for it.

An action that waits for a task to be scheduled costs its simulator a tenth of its time. The system's buffer accepts it
at once, unless a simulator does not read; from then on the task writes to that one.
"""

from collections import deque
from collections.abc import Callable

import anyio
from anyio.abc import ByteStream

from sparring.services.endpoint.sockets import SocketBytes

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
