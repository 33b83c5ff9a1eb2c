"""A simulator's end of a WebSocket, over any stream."""

from __future__ import annotations

import anyio
from anyio.abc import ByteStream
from websockets.client import ClientProtocol
from websockets.frames import Opcode
from websockets.http11 import Response
from websockets.typing import Origin
from websockets.uri import parse_uri

from tests.security.security_endpoint import Endpoint, Peer

_SENT = 2**15


class WebSocketClient(ByteStream):
    """A WebSocket client whose messages are the items that are sent and received."""

    def __init__(self, stream: ByteStream, origin: str | None = None) -> None:
        self.stream = stream
        self.protocol = ClientProtocol(
            parse_uri("ws://trainer/"), origin=None if origin is None else Origin(origin), max_size=None
        )
        self.pongs = 0

    async def connect(self) -> Response:
        """Sends the handshake and returns the answer."""
        self.protocol.send_request(self.protocol.connect())
        await self.flush()
        while True:
            for event in await self._events():
                assert isinstance(event, Response)
                return event

    async def send(self, item: bytes) -> None:
        self.protocol.send_binary(item)
        await self.flush()

    async def flush(self) -> None:
        """Sends what the protocol has to send."""
        data = b"".join(self.protocol.data_to_send())
        for at in range(0, len(data), _SENT):
            await self.stream.send(data[at : at + _SENT])

    async def receive(self, max_bytes: int = 65536) -> bytes:
        del max_bytes
        while True:
            received = b""
            for event in await self._events():
                if event.opcode is Opcode.CLOSE:
                    raise anyio.EndOfStream
                self.pongs += event.opcode is Opcode.PONG
                received += bytes(event.data) if event.opcode is Opcode.BINARY else b""
            if received:
                return received

    async def _events(self) -> list:
        self.protocol.receive_data(await self.stream.receive(2**20))
        return self.protocol.events_received()

    async def send_eof(self) -> None:
        await self.stream.send_eof()

    async def aclose(self) -> None:
        await self.stream.aclose()


async def connect(server: Endpoint, origin: str | None = None, host: str = "192.0.2.1") -> tuple[Peer, WebSocketClient]:
    """Returns a peer whose WebSocket handshake has succeeded, and its WebSocket."""
    client = WebSocketClient(server.connect(host).stream, origin)
    assert (await client.connect()).status_code == 101
    return Peer(client), client
