"""A WebSocket listener beside that of plain sockets: the same admission, the same limits, the same conversations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import anyio
from anyio.abc import ByteStream

from sparring.pipeline.errors import ExplainedError
from sparring.pipeline.stepping.limits import HELLO
from sparring.services.endpoint.throttling import OWN_BYTES

if TYPE_CHECKING:  # it needs the extra `websocket`
    from sparring.pipeline.messages.websocket import WebSocket

_RECEIVE: Final = 2**16
"""Bytes received at once: thousands of the smallest frames, which take tens of milliseconds."""
_ANSWER_S: Final = 1.0
"""Seconds within which a peer must receive why it is refused."""


class WebSocketBytes(ByteStream):
    """WebSocketBytes are the messages of the protocol within a WebSocket.

    Args:
        stream: its socket, encrypted where the endpoint encrypts.
        websocket: its state.
    """

    def __init__(self, stream: ByteStream, websocket: WebSocket) -> None:
        self._stream = stream
        self._socket = websocket
        self._most = HELLO.total
        self._sending = anyio.Lock()  # Pongs are sent by the task that receives

    @property
    def awaited(self) -> int:
        """Returns the most that the incoming message may hold, once it is large; its own length is masked."""
        return self._most if self._socket.held > OWN_BYTES else 0

    def allow(self, most: int) -> None:
        """Replaces the limit of a message."""
        self._most = most
        self._socket.allow(most)

    def take_asides(self) -> int:
        """Returns the number of frames since the last call that were no message."""
        asides, self._socket.asides = self._socket.asides, 0
        return asides

    async def upgrade(self) -> None:
        """Receives the handshake of the other side and answers it. Raises as `receive`."""
        while not self._socket.is_open:
            await self.receive()

    async def receive(self, max_bytes: int = _RECEIVE) -> bytes:
        """Returns the whole messages that the next bytes complete, b"" for none; they may exceed `max_bytes`.

        Raises:
            EndOfStream: the other side has closed the connection.
            BrokenResourceError: the connection is broken.
            RemoteProtocolError, LimitExceeded: it violates the WebSocket protocol; the answer is sent.
        """
        if self._socket.is_closed:
            raise anyio.EndOfStream
        data = await self._stream.receive(min(max_bytes, _RECEIVE))
        try:
            messages = self._socket.receive(data)
        except ExplainedError:
            with anyio.move_on_after(_ANSWER_S):
                await self._send(self._socket.to_send())
            raise
        await self._send(self._socket.to_send())
        return messages

    async def send(self, item: bytes) -> None:
        """Sends one message of the protocol, unless the other side has closed the connection.

        Raises:
            BrokenResourceError: the other side has disconnected.
        """
        await self._send(self._socket.wrap(item))

    async def send_eof(self) -> None:
        """Ends what is sent with a Close frame."""
        await self._send(self._socket.close())

    async def aclose(self) -> None:
        """Closes the connection, after a Close frame where the other side receives it in time."""
        try:
            with anyio.move_on_after(_ANSWER_S, shield=True):
                await self.send_eof()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.BusyResourceError, OSError):
            return
        finally:
            await anyio.aclose_forcefully(self._stream)

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        return self._stream.extra_attributes

    async def _send(self, data: bytes) -> None:
        if data:
            async with self._sending:
                await self._stream.send(data)


def upgrade_from(origins: Sequence[str]) -> Callable[[ByteStream], Awaitable[WebSocketBytes]]:
    """Returns a function that completes the WebSocket handshake on a stream.

    Args:
        origins: origins of pages whose scripts may connect.
    """
    from sparring.pipeline.messages.websocket import WebSocket

    async def upgrade(stream: ByteStream) -> WebSocketBytes:
        upgraded = WebSocketBytes(stream, WebSocket(origins, HELLO.total))
        await upgraded.upgrade()
        return upgraded

    return upgrade
