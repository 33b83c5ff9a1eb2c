"""Where a Unity player calls: one method of gRPC whose answers are ours.

The player is the client. Each of its messages is a call, and the next message of the trainer is its answer, so at most
one call is open at any time. All of it happens on an event loop, which is never kept waiting.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from pipeline.errors import SettingsError
from pipeline.unity.http2 import UNAVAILABLE, Connection, Violation, library

PATH: Final = "/communicator_objects.UnityToExternalProto/Exchange"

_LARGEST: Final = 256 * 2**20
"""Bytes of a message: images of many agents."""
_RECEIVE: Final = 256 * 1024
_MOST_STRANGERS: Final = 16
"""Connections beside the player's."""


def taken(port: int, host: str) -> SettingsError:
    """What is said of a port that is not free."""
    return SettingsError(
        f"got port {port} on {host}, which is not free; expected one on which a Unity player can call; "
        "stop what uses it, or choose another with --base-port"
    )


def check_free(port: int, host: str = "127.0.0.1") -> None:
    """Finds out early what a server would find out later.

    Raises:
        SettingsError: the port is not free, or a library is not installed.
    """
    library()
    _listen(port, host).close()


class Server:
    """Takes the calls of one player, on an event loop that can watch sockets.

    Args:
        port: to listen on; 0 chooses one.
        called: gets each message; `answer` answers it, sooner or later.
        broken: called when the player has broken off a call that was not answered.
        loop: on which all of this happens.
        host: to listen on.

    Attributes:
        port: on which it listens.

    Raises:
        SettingsError: the port is not free, or a library is not installed.
    """

    def __init__(
        self,
        port: int,
        called: Callable[[bytes], None],
        broken: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
        host: str = "127.0.0.1",
    ) -> None:
        library()
        self._called = called
        self._broken = broken
        self._loop = loop
        self._lines: list[_Line] = []
        self._player: _Line | None = None  # who called first; nobody else is listened to
        self._open: int | None = None  # stream of the call that waits for its answer
        self._listener = _listen(port, host)
        self.port: int = self._listener.getsockname()[1]
        loop.add_reader(self._listener, self._accept)

    def answer(self, message: bytes | None) -> None:
        """Answers the open call; None refuses it. Nothing happens where none is open."""
        stream, self._open = self._open, None
        if stream is None or self._player is None:
            return
        if message is None:
            self._player.connection.refuse(stream, UNAVAILABLE, "the trainer has ended")
        else:
            self._player.connection.answer(stream, message)
        self._player.send()

    def close(self) -> None:
        """Refuses the open call, and frees the port. More than once does no harm."""
        if self._listener.fileno() < 0:
            return
        self.answer(None)
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for line in list(self._lines):
            line.close()

    def _accept(self) -> None:
        try:
            stream, _ = self._listener.accept()
        except OSError:  # who called has gone again
            return
        if len(self._lines) > _MOST_STRANGERS:
            stream.close()
            return
        self._lines.append(_Line(self, stream, self._loop))

    def hear(self, line: _Line, stream: int, message: bytes | None) -> None:
        """For the lines: a call has come, or was broken off."""
        if message is None:
            if line is self._player and stream == self._open:
                self._open = None
                self._broken()
            return
        self._player = self._player or line
        if line is not self._player or self._open is not None:
            line.connection.refuse(stream, UNAVAILABLE, "another player plays on this port")
            return
        self._open = stream
        self._called(message)

    def lost(self, line: _Line) -> None:
        """For the lines: one has ended."""
        self._lines.remove(line)
        if line is self._player and self._open is not None:
            self._open = None
            self._broken()


class _Line:
    """One connection on an event loop. It is not read while the other side does not read."""

    def __init__(self, server: Server, stream: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        stream.setblocking(False)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = Connection(PATH, _LARGEST)
        self._server = server
        self._stream = stream
        self._loop = loop
        self._unsent = b""
        self._ended = False
        loop.add_reader(stream, self._read)

    def send(self) -> None:
        """Sends what there is to send, now or as soon as it can be sent."""
        self._unsent += self.connection.take()
        if not self._unsent or self._ended:
            return
        try:
            sent = self._stream.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._lose()
            return
        waited, self._unsent = len(self._unsent) > sent, self._unsent[sent:]
        if waited:
            self._loop.remove_reader(self._stream)
            self._loop.add_writer(self._stream, self._go_on)

    def close(self) -> None:
        """Ends the connection; what could not be sent at once is lost."""
        if not self._ended:
            self._ended = True
            self._loop.remove_reader(self._stream)
            self._loop.remove_writer(self._stream)
            self._stream.close()

    def _go_on(self) -> None:
        self._loop.remove_writer(self._stream)
        self._loop.add_reader(self._stream, self._read)
        self.send()

    def _read(self) -> None:
        try:
            data = self._stream.recv(_RECEIVE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose()
            return
        try:
            calls = self.connection.feed(data)
        except Violation:
            self.send()
            self._lose()
            return
        for stream, message in calls:
            self._server.hear(self, stream, message)
        self.send()

    def _lose(self) -> None:
        if not self._ended:
            self.close()
            self._server.lost(self)


def _listen(port: int, host: str) -> socket.socket:
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise taken(port, host) from error
    listener.setblocking(False)
    return listener
