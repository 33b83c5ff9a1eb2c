"""An endpoint on loopback that asks simulators for their credentials."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from anyio.abc import SocketAttribute

from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.simulation import Client
from sparring.pipeline.stepping.settings import Accepted
from sparring.services.endpoint.admission import credentials
from sparring.services.endpoint.sockets import listen
from tests.security.security_endpoint import SPECS, Endpoint, endpoint


@dataclass
class GuardedEndpoint:
    """An endpoint on loopback that asks for credentials."""

    endpoint: Endpoint
    address: tuple[str, int]

    async def connect(
        self, keys: Path | str, certificate: str = "", credential: str = "", number: int | None = None
    ) -> Client:
        """Returns a client of our own library whose handshake has succeeded."""

        def connect() -> Client:
            return Client.connect(
                f"tcp://127.0.0.1:{self.address[1]}",
                name="visitor",
                behaviors=SPECS,
                keys=keys,
                certificate=certificate,
                credential=credential,
                number=number,
                connect_timeout_s=20,
                reconnect=False,
            )

        return await anyio.to_thread.run_sync(connect)

    async def connect_refused(self, *credentials: Any) -> RemoteProtocolError:
        """Returns the error with which a client is refused."""
        with pytest.raises(RemoteProtocolError) as error:
            await self.connect(*credentials)
        return error.value

    async def exchange(self, context: ssl.SSLContext | None, first: bytes) -> bytes:
        """Returns what an unauthenticated peer receives after it sends `first`, over TLS unless `context` is None."""

        def exchange() -> bytes:
            connected = socket.create_connection(self.address, 20)
            received = b""
            with connected, contextlib.suppress(OSError):
                stream = connected if context is None else context.wrap_socket(connected, server_hostname="127.0.0.1")
                with stream:
                    stream.sendall(first)
                    while data := stream.recv(2**16):
                        received += data
            return received

        return await anyio.to_thread.run_sync(exchange)


@asynccontextmanager
async def guarded_endpoint(
    keys: Path | None, accepted: Accepted = "either", *, encrypt: bool = True
) -> AsyncIterator[GuardedEndpoint]:
    """Runs an endpoint that accepts the credentials of `keys`."""
    expected = credentials("tcp://127.0.0.1:1", keys, accepted, encrypt=encrypt)
    async with endpoint(expected) as running:
        listener = await listen("tcp://127.0.0.1:0")
        address = listener.extra(SocketAttribute.local_address)
        running.tasks.start_soon(running.acceptor.run, listener, running.tasks)
        yield GuardedEndpoint(running, ("127.0.0.1", address[1]))
