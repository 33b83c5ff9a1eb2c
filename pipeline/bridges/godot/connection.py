"""Exchanges JSON texts with a Godot game, which connects to a port on loopback.

A message is a little-endian uint32, the number of bytes that follow, and a JSON object in UTF-8. This side requests,
the game answers. Every error of the game is a `PlayerFailed`; every wait has a deadline.
"""

import errno
import json
import re
import select
import socket
import struct
import sys
import time
from typing import Final

from sparring.pipeline.bridges.player import PlayerFailed, PlayerProgram
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.files import Json

HOST: Final = "127.0.0.1"
LAST_PORT: Final = 2**16 - 1
MOST_BYTES: Final = 64 * 2**20
"""Limit of a message, equal to that of a Step in our own protocol."""
CHECK_S: Final = 0.1
"""Time between two looks at the game's process while it has not connected."""
EXIT_WAIT_S: Final = 1.0
"""How long an ending game may take from the end of its connection to the end of its process."""

_SIZE: Final = struct.Struct("<I")
_NOT_FINITE: Final = re.compile(rb"(?<=[\[:,])(-?)(nan|inf)(?=[\],}])")
_JSON_NAMES: Final = {b"nan": b"NaN", b"inf": b"Infinity"}


class GameConnection:
    """Listens for one game, and represents its connection.

    Args:
        port: port to listen on; 0 chooses one.
        otherwise: take any free port if this one is in use.
        timeout_s: time for the game to connect, and for each answer.

    Attributes:
        port: the port in use.

    Raises:
        SettingsError: the port is in use, or is no port.
    """

    def __init__(self, port: int, *, otherwise: bool, timeout_s: float) -> None:
        self._player: PlayerProgram  # known once it is started with the port
        self._timeout_s = timeout_s
        self._socket = _listen(port, otherwise)
        self.port: int = self._socket.getsockname()[1]

    def accept(self, player: PlayerProgram) -> None:
        """Waits for the connection of the started game, and accepts no further ones.

        Raises:
            PlayerFailed: the game ended, or did not connect in time.
        """
        self._player = player
        if not player.launched:
            sys.stderr.write(
                f"{player.name}: waiting at {HOST}:{self.port} for {self._timeout_s:g} s; press Play in the Godot "
                f"editor, or start the game with --port={self.port}\n"
            )
            sys.stderr.flush()
        deadline = time.monotonic() + self._timeout_s
        while not select.select([self._socket], [], [], CHECK_S)[0]:
            player.check()
            if time.monotonic() > deadline:
                raise player.failure(
                    f"no connection to port {self.port} within {self._timeout_s:g} s",
                    "see that the scene has a Sync node in control mode Training, and agents; or raise timeout_s",
                )
        connected, _ = self._socket.accept()
        self._socket.close()
        self._socket = connected
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        player.phase = "connected"

    def send(self, message: dict[str, Json]) -> None:
        """Sends a message that has no answer.

        Raises:
            PlayerFailed: the game closed the connection, or does not read.
        """
        text = json.dumps(message, separators=(",", ":")).encode("ascii")
        self._socket.settimeout(self._timeout_s)
        try:
            self._socket.sendall(_SIZE.pack(len(text)) + text)
        except TimeoutError as error:
            raise self._stalled("space for a message") from error
        except OSError as error:
            raise self._gone(error) from error

    def request(self, message: dict[str, Json]) -> dict[str, Json]:
        """Sends a message and returns its answer, which has the same type; `action` is answered by `step`.

        Raises:
            PlayerFailed: the game closed the connection, is silent, or sends another message.
        """
        self.send(message)
        wanted = "step" if message["type"] == "action" else message["type"]
        answer = self._decoded(self._receive(wanted))
        if isinstance(answer, dict) and answer.get("type") == wanted:
            return answer
        is_map = isinstance(answer, dict)
        kind = f"an answer of type {answer.get('type')!r:.40}" if is_map else f"a {type(answer).__name__}"
        raise self._player.failure(
            f"{kind} where {wanted!r} was expected", "use a Godot RL Agents plugin of protocol 0.7 or earlier"
        )

    def close(self) -> None:
        """Frees the connection."""
        self._socket.close()

    def _receive(self, wanted: str) -> bytearray:
        deadline = time.monotonic() + self._timeout_s
        (size,) = _SIZE.unpack(self._read(_SIZE.size, deadline, wanted))
        if size > MOST_BYTES:
            raise self._player.failure(
                f"a message of {size:,} bytes, more than the limit of {MOST_BYTES:,}",
                "send less: smaller images or fewer agents; let only the Godot game connect to this port",
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

    def _decoded(self, text: bytearray) -> Json:
        """Returns the JSON of a text; accepts Godot's own spelling of NaN and infinity."""
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            pass
        try:
            return json.loads(_NOT_FINITE.sub(lambda found: found[1] + _JSON_NAMES[found[2]], text))
        except (ValueError, RecursionError) as error:
            raise self._player.failure(
                f"{bytes(text[:60])!r}, which is no JSON ({error})", "let only the game connect to this port"
            ) from error

    def _stalled(self, what: str) -> PlayerFailed:
        return self._player.failure(
            f"no {what} within {self._timeout_s:g} s",
            "see whether the game is paused or stuck at a breakpoint; where it is slow, raise timeout_s",
        )

    def _gone(self, cause: OSError | None) -> PlayerFailed:
        """Returns why the connection ended, with the exit status of a launched program that has one."""
        try:
            self._player.check(EXIT_WAIT_S)
        except PlayerFailed as failed:
            return failed
        how = "" if cause is None else f" ({cause.strerror or cause})"
        return self._player.failure(
            f"the end of the connection by the game{how}", "keep it running; it was closed, or its scene ended"
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
            f"got port {port}, which cannot be used ({error.strerror or error}); expected a free one; stop "
            "what uses it, or choose another with the option port"
        ) from error
