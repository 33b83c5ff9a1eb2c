"""Serves the calls of a Unity player: one method of gRPC.

The player is the client. Each of its messages is a call, and the next message of the trainer is the answer, so at most
one call is open at any time. All of it runs on an event loop, which never blocks.

The first connection with a complete message is the player's until it ends; then the player, or another one, may
connect. Calls on other connections, the candidates, are rejected before their message arrives. Without a player, each
candidate may send one message of `_FIRST` bytes, so that all of them together buffer no more than the player may. A
candidate is closed after `CANDIDATE_S`, or if there are too many.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Final

from sparring.pipeline.bridges.unity import HOST
from sparring.pipeline.bridges.unity.http2 import UNAVAILABLE, Http2Connection, Violation
from sparring.pipeline.errors import SettingsError

PATH: Final = "/communicator_objects.UnityToExternalProto/Exchange"

_LARGEST: Final = 256 * 2**20
"""Bytes of a message, which may hold images of many agents."""
_RECEIVE: Final = 256 * 1024
_MOST_CANDIDATES: Final = 16
"""Connections beside the player's; a further one closes the oldest."""
_FIRST: Final = _LARGEST // _MOST_CANDIDATES
"""Bytes of the message that makes a candidate the player: an introduction, or the next message after a reconnect."""
_RECEIVE_FIRST: Final = 16 * 1024
"""Bytes per read of a candidate, so that other connections get their turn."""
_FLUSH_S: Final = 1.0
"""Time for the last bytes of a connection that this side closes."""
CANDIDATE_S: Final = 30.0
"""Time for a candidate to become the player. A player that calls later connects again."""


def check_free(port: int, host: str = HOST) -> None:
    """Checks early that a server can listen.

    Raises:
        SettingsError: the port is in use, or the address is not of this machine.
    """
    _listen(port, host).close()


class Server:
    """Serves the calls of one player on an event loop.

    Args:
        port: to listen on; 0 chooses one.
        called: receives each message; `answer` answers it at any later time.
        broken: called if the player breaks off a call before its answer.
        loop: event loop for all of this.
        host: IP address to listen on.

    Attributes:
        port: the port in use.
        player: the connection of the player; None without one.

    Raises:
        SettingsError: the port is in use.
    """

    def __init__(
        self,
        port: int,
        called: Callable[[bytes], None],
        broken: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
        host: str = HOST,
    ) -> None:
        self._called = called
        self._broken = broken
        self._loop = loop
        self._connections: list[_PlayerSocket] = []  # oldest first
        self.player: _PlayerSocket | None = None
        self._open: int | None = None  # stream of the call that waits for its answer
        listener = _listen(port, host)
        self.port: int = listener.getsockname()[1]
        self._accepting = loop.create_task(
            loop.create_server(lambda: _PlayerSocket(self, loop), sock=listener, backlog=_MOST_CANDIDATES)
        )

    def answer(self, message: bytes | None) -> None:
        """Answers the open call; None rejects it. Does nothing if no call is open."""
        player, stream, self._open = self.player, self._open, None
        if stream is None or player is None:
            return
        if message is None:
            player.connection.refuse(stream, UNAVAILABLE, "the trainer has ended")
        else:
            player.connection.answer(stream, message)
        player.send()

    def close(self) -> None:
        """Rejects the open call, and frees the port. Further calls do nothing."""
        self.answer(None)
        if self._accepting.done():
            self._accepting.result().close()
        else:
            self._accepting.add_done_callback(lambda accepting: accepting.result().close())
        for client in list(self._connections):
            client.end()

    # ------------------------------------------------------------ for the connections

    def on_connect(self, client: _PlayerSocket) -> None:
        """Handles a new connection, which closes the oldest one if there are too many."""
        candidates = [client for client in self._connections if client is not self.player]
        if len(candidates) >= _MOST_CANDIDATES:
            candidates[0].end()
        client.connection.limit(_FIRST if self.player is None else 0)
        self._connections.append(client)

    def on_call(self, client: _PlayerSocket, stream: int, message: bytes | None) -> None:
        """Handles a call that came or, with None, was broken off; candidates cannot break one off."""
        if message is not None:
            if self.player is None:
                client.connection.admit(_LARGEST)
                self._set_player(client)
            self._open = stream
            self._called(message)
        elif client is self.player and stream == self._open:
            self._open = None
            self._broken()

    def on_end(self, client: _PlayerSocket) -> None:
        """Handles the end of a connection. Further calls do nothing."""
        if client not in self._connections:
            return
        self._connections.remove(client)
        if client is self.player:
            broken, self._open = self._open is not None, None
            self._set_player(None)
            if broken:
                self._broken()

    def _set_player(self, player: _PlayerSocket | None) -> None:
        """Takes calls from one connection only, or from all if there is no player."""
        self.player = player
        for client in list(self._connections):
            if client is not player:
                client.connection.limit(_FIRST if player is None else 0)
                client.send()


class _PlayerSocket(asyncio.BufferedProtocol):
    """Represents one connection on an event loop. It is not read while the other side does not read."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self.connection = Http2Connection(PATH, 0)
        self._server = server
        self._loop = loop
        self._received = bytearray(_RECEIVE)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # of a stream socket
        """Begins to receive."""
        self._transport = transport
        transport.set_write_buffer_limits(0)
        self._watch = self._loop.call_later(CANDIDATE_S, self._check)
        self._server.on_connect(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns the buffer for the next bytes."""
        return memoryview(self._received)[: _RECEIVE if self is self._server.player else _RECEIVE_FIRST]

    def buffer_updated(self, nbytes: int) -> None:
        """Handles received bytes."""
        try:
            calls = self.connection.feed(bytes(memoryview(self._received)[:nbytes]))
        except Violation:
            self.send()
            self._lose()
            return
        for stream, message in calls:
            if not self._transport.is_closing():
                self._server.on_call(self, stream, message)
        self.send()

    def send(self) -> None:
        """Sends the pending bytes, now or as soon as possible."""
        if (data := self.connection.take()) and not self._transport.is_closing():
            self._transport.write(data)

    def end(self) -> None:
        """Ends the connection with HTTP/2's GOAWAY."""
        self.connection.end()
        self.send()
        self._lose()

    def pause_writing(self) -> None:
        """Stops reading while the other side does not read."""
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Reads again."""
        self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handles the end of the connection."""
        self._watch.cancel()
        self._server.on_end(self)

    def _lose(self) -> None:
        """Closes the connection once its last bytes are sent, or after `_FLUSH_S`."""
        self._transport.close()
        self._loop.call_later(_FLUSH_S, self._transport.abort)
        self.connection_lost(None)

    def _check(self) -> None:
        """Checks the connection periodically."""
        if self is self._server.player:
            self.connection.reset_overhead()
            self._watch = self._loop.call_later(CANDIDATE_S, self._check)
        else:
            self.end()


def _listen(port: int, host: str) -> socket.socket:
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise SettingsError(
                f"got address {host} for Unity players, which this machine does not have; expected one of its own; "
                "correct pipeline.player_host"
            ) from error
        raise SettingsError(
            f"got port {port} on {host}, which is not free; expected a free one for a Unity player; "
            "stop what uses it, or choose another for a build with --base-port; the editor always calls port 5004"
        ) from error
    return listener
