"""The line to a Godot game: it dials in to a port on loopback, and the two exchange JSON texts.

A message is a little-endian uint32, the number of bytes that follow, and a JSON object in UTF-8. We ask, the game
answers. Whatever is wrong with the other end is a `PlayerFailed`; every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import select
import socket
import struct
import sys
import time
from typing import Any, Final

from sparring.pipeline.bridges.player import PlayerFailed, PlayerProgram
from sparring.pipeline.errors import SettingsError

HOST: Final = "127.0.0.1"
LAST_PORT: Final = 2**16 - 1
MOST_BYTES: Final = 64 * 2**20
"""Of a message: what one Step of our own protocol may hold."""
LAST_WORDS_S: Final = 1.0
"""How long an ending game may take from the end of its connection to the end of its process."""

_SIZE: Final = struct.Struct("<I")
_SPELLED: Final = re.compile(rb"(?<=[\[:,])(-?)(nan|inf)(?=[\],}])")
_JSON_WORDS: Final = {b"nan": b"NaN", b"inf": b"Infinity"}


class GameListener:
    """Where one game dials in.

    Args:
        port: to listen on; 0 chooses one.
        otherwise: take any free port where this one is taken.
        timeout_s: how long the game may take to dial in, and for each answer.

    Attributes:
        port: on which it listens.

    Raises:
        SettingsError: the port is not free, or is none.
    """

    def __init__(self, port: int, *, otherwise: bool, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._listener = _listen(port, otherwise)
        self.port: int = self._listener.getsockname()[1]

    def accept(self, player: PlayerProgram) -> GameConnection:
        """Waits for the started game.

        Raises:
            PlayerFailed: it ended, or did not dial in in time.
        """
        if not player.launched:
            sys.stderr.write(
                f"{player.name}: waiting at {HOST}:{self.port} for {self._timeout_s:g} s; press Play in the Godot "
                f"editor, or start the game with --port={self.port}\n"
            )
            sys.stderr.flush()
        end = _GameEnd(player)
        try:
            return GameConnection(player, self._accepted(player, end), end, self._timeout_s)
        except BaseException:
            end.close()
            raise

    def close(self) -> None:
        """Refuses further games."""
        self._listener.close()

    def _accepted(self, player: PlayerProgram, end: _GameEnd) -> socket.socket:
        waiting: list[socket.socket | _GameEnd] = [self._listener, end]
        ready, _, _ = select.select(waiting, [], [], self._timeout_s)
        if self._listener not in ready:
            player.check()
            raise player.failure(
                f"no connection to port {self.port} within {self._timeout_s:g} s",
                "see that the scene has a Sync node in control mode Training, and agents; or raise timeout_s",
            )
        connected, _ = self._listener.accept()
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        player.phase = "connected"
        return connected


class _GameEnd:
    """Becomes readable at the end of a launched game."""

    def __init__(self, player: PlayerProgram) -> None:
        self._reader, self._writer = socket.socketpair()
        player.watch(self._tell)

    def _tell(self) -> None:
        with contextlib.suppress(OSError):  # closed meanwhile
            self._writer.send(b"\0")

    def fileno(self) -> int:
        """For select."""
        return self._reader.fileno()

    def close(self) -> None:
        """Frees the sockets."""
        self._reader.close()
        self._writer.close()


class GameConnection:
    """A connected game.

    Args:
        player: for messages about it.
        connected: to it; owned from here on.
        end: of the launched program; owned from here on.
        timeout_s: how long the game may take for each answer.
    """

    def __init__(self, player: PlayerProgram, connected: socket.socket, end: _GameEnd, timeout_s: float) -> None:
        self._player = player
        self._socket = connected
        self._end = end
        self._timeout_s = timeout_s

    def say(self, message: dict[str, Any]) -> None:
        """Sends a message that nothing answers.

        Raises:
            PlayerFailed: the game is gone, or takes nothing.
        """
        text = json.dumps(message, separators=(",", ":")).encode("ascii")
        self._socket.settimeout(self._timeout_s)
        try:
            self._socket.sendall(_SIZE.pack(len(text)) + text)
        except TimeoutError as error:
            raise self._stalled("room for a message") from error
        except OSError as error:
            raise self._gone(error) from error

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Sends a message and returns its answer, which has the same type; of `action` it is `step`.

        Raises:
            PlayerFailed: the game is gone, silent, or says something else.
        """
        self.say(message)
        wanted = "step" if message["type"] == "action" else message["type"]
        answer = self._decoded(self._receive(wanted))
        kind = answer.get("type") if isinstance(answer, dict) else None
        if not isinstance(answer, dict) or kind != wanted:
            got = f"an answer of type {repr(kind)[:40]}" if isinstance(answer, dict) else f"a {type(answer).__name__}"
            raise self._player.failure(
                f"{got} where {wanted!r} was due", "use a Godot RL Agents plugin of protocol 0.7 or earlier"
            )
        return answer

    def close(self) -> None:
        """Frees the connection."""
        self._socket.close()
        self._end.close()

    def _receive(self, wanted: str) -> bytearray:
        deadline = time.monotonic() + self._timeout_s
        (size,) = _SIZE.unpack(self._read(_SIZE.size, deadline, wanted))
        if size > MOST_BYTES:
            raise self._player.failure(
                f"a message of {size:,} bytes, more than the {MOST_BYTES:,} that are allowed",
                "send less: smaller images or fewer agents; a program that is no Godot game must not dial in here",
            )
        return self._read(size, deadline, wanted)

    def _read(self, size: int, deadline: float, wanted: str) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._stalled(f"answer {wanted!r}")
            self._socket.settimeout(left)
            try:
                count = self._socket.recv_into(rest)
            except TimeoutError:
                continue
            except OSError as error:
                raise self._gone(error) from error
            if not count:
                raise self._gone(None)
            rest = rest[count:]
        return data

    def _decoded(self, text: bytearray) -> Any:
        """The JSON of a text; Godot writes what is no number in its own way, and that is read as what it means."""
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            pass
        try:
            return json.loads(_SPELLED.sub(lambda found: found[1] + _JSON_WORDS[found[2]], text))
        except (ValueError, RecursionError) as error:
            raise self._player.failure(
                f"{bytes(text[:60])!r}, which is no JSON ({error})", "let only the game dial in at this port"
            ) from error

    def _stalled(self, what: str) -> PlayerFailed:
        return self._player.failure(
            f"no {what} within {self._timeout_s:g} s",
            "see whether the game is paused or stuck at a breakpoint; where it is slow, raise timeout_s",
        )

    def _gone(self, cause: OSError | None) -> PlayerFailed:
        """Why the connection ended: with the program's exit status where it was launched and has one."""
        if self._player.launched:
            select.select([self._end], [], [], LAST_WORDS_S)
        try:
            self._player.check()
        except PlayerFailed as failed:
            return failed
        how = "" if cause is None else f" ({cause.strerror or cause})"
        return self._player.failure(
            f"the end of the connection by the game{how}", "let it run on; it was closed, or its scene ended"
        )


def _listen(port: int, otherwise: bool) -> socket.socket:
    if not 0 <= port <= LAST_PORT:
        raise SettingsError(f"got port {port}; expected 0 to {LAST_PORT}; correct the option port")
    try:
        return socket.create_server((HOST, port), backlog=1)
    except OSError as error:
        if otherwise and error.errno == errno.EADDRINUSE:
            return socket.create_server((HOST, 0), backlog=1)
        raise SettingsError(
            f"got port {port}, on which nothing can listen ({error.strerror or error}); expected a free one; stop "
            "what uses it, or choose another with the option port"
        ) from error
