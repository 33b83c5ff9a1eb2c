"""Where a Unity player calls: one method of gRPC whose answers are ours.

The player is the client. Each of its messages is a call, and the next message of the trainer is its answer, so at most
one call is open at any time. All of it happens on an event loop, which is never kept waiting.

Whose first message comes whole is the player until its connection ends; then it may connect anew, or another in its
place. Calls of others are refused before they bring a message. While there is no player, each connection may bring one
message of `_FIRST` bytes, so that together they keep no more than the player may. A connection that is not the player's
ends after `STRANGER_S`, or when there are too many.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable
from typing import Final

from sparring.pipeline.bridges.unity.http2 import UNAVAILABLE, Http2Connection, Violation, library
from sparring.pipeline.errors import SettingsError

HOST: Final = "127.0.0.1"
"""A player is told a port and no address: it calls its own machine. Its protocol knows no keys, so who listens
elsewhere (in a container, whose ports are handed on to it) takes whoever reaches the port."""
PATH: Final = "/communicator_objects.UnityToExternalProto/Exchange"

_LARGEST: Final = 256 * 2**20
"""Bytes of a message: images of many agents."""
_RECEIVE: Final = 256 * 1024
_MOST_STRANGERS: Final = 16
"""Connections beside the player's; the oldest makes room for one more."""
_FIRST: Final = _LARGEST // _MOST_STRANGERS
"""Bytes of the message with which somebody becomes the player: an introduction, or the next of one that comes back."""
_RECEIVE_FIRST: Final = 16 * 1024
"""Of who is not the player: others have their turn in between."""
STRANGER_S: Final = 30.0
"""For a connection to become the player's. It loses nothing by that: who calls later connects anew."""
_RETRY_S: Final = 1.0
"""After the system had no room for a connection."""


def taken(port: int, host: str = HOST) -> SettingsError:
    """What is said of a port that is not free."""
    return SettingsError(
        f"got port {port} on {host}, which is not free; expected one on which a Unity player can call; "
        "stop what uses it, or choose another with --base-port"
    )


def check_free(port: int, host: str = HOST) -> None:
    """Finds out early what a server would find out later.

    Raises:
        SettingsError: the port is not free, no address of this machine, or a library is not installed.
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
        host: IP address on which it listens.

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
        host: str = HOST,
    ) -> None:
        library()
        self._called = called
        self._broken = broken
        self._loop = loop
        self._lines: list[_PlayerSocket] = []  # oldest first
        self._player: _PlayerSocket | None = None
        self._open: int | None = None  # stream of the call that waits for its answer
        self._listener = _listen(port, host)
        self.port: int = self._listener.getsockname()[1]
        self._listen()

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
            line.end()

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            stream, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # who called has gone again
            return
        except OSError:  # there is no room for it: it would be asked for again and again
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_RETRY_S, self._listen)
            return
        strangers = [line for line in self._lines if line is not self._player]
        if len(strangers) >= _MOST_STRANGERS:
            strangers[0].end()
        self._lines.append(_PlayerSocket(self, stream, self._loop, _FIRST if self._player is None else 0))

    # ------------------------------------------------------------ for the lines

    def is_player(self, line: _PlayerSocket) -> bool:
        """Whether a line is the player's."""
        return line is self._player

    def hear(self, line: _PlayerSocket, stream: int, message: bytes | None) -> None:
        """A call has come, or was broken off; of others than the player none comes."""
        if message is None:
            if line is self._player and stream == self._open:
                self._open = None
                self._broken()
            return
        if self._player is None:
            line.connection.welcome(_LARGEST)
            self._play(line)
        self._open = stream
        self._called(message)

    def lost(self, line: _PlayerSocket) -> None:
        """One has ended."""
        self._lines.remove(line)
        if line is self._player:
            broken, self._open = self._open is not None, None
            self._play(None)
            if broken:
                self._broken()

    def _play(self, player: _PlayerSocket | None) -> None:
        """Listens to one, or to all until one has called."""
        self._player = player
        for line in list(self._lines):
            if line is not player:
                line.connection.limit(_FIRST if player is None else 0)
                line.send()


class _PlayerSocket:
    """One connection on an event loop. It is not read while the other side does not read."""

    def __init__(self, server: Server, stream: socket.socket, loop: asyncio.AbstractEventLoop, largest: int) -> None:
        stream.setblocking(False)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = Http2Connection(PATH, largest)
        self._server = server
        self._stream = stream
        self._loop = loop
        self._unsent = b""
        self._ended = False
        self._watch = loop.call_later(STRANGER_S, self._look)
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

    def end(self) -> None:
        """Takes leave, and ends the connection; what cannot be sent at once is lost."""
        if not self._ended:
            self.connection.end()
            self.send()
            self._lose()

    def _look(self) -> None:
        """From time to time."""
        if self._server.is_player(self):
            self.connection.pardon()
            self._watch = self._loop.call_later(STRANGER_S, self._look)
        else:
            self.end()

    def _go_on(self) -> None:
        self._loop.remove_writer(self._stream)
        self._loop.add_reader(self._stream, self._read)
        self.send()

    def _read(self) -> None:
        try:
            data = self._stream.recv(_RECEIVE if self._server.is_player(self) else _RECEIVE_FIRST)
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
            if not self._ended:
                self._server.hear(self, stream, message)
        self.send()

    def _lose(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._watch.cancel()
        self._loop.remove_reader(self._stream)
        self._loop.remove_writer(self._stream)
        with contextlib.suppress(OSError):
            self._stream.recv(_RECEIVE)  # where something is unread, the other side may not read our last word
        self._stream.close()
        self._server.lost(self)


def _listen(port: int, host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise taken(port, host) from error
        raise SettingsError(
            f"got address {host} for Unity players, which this machine does not have; expected one of its own; "
            "correct pipeline.player_host"
        ) from error
    listener.setblocking(False)
    return listener
