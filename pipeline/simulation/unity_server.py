"""The calls of a Unity player, taken one after the other by a thread that waits for them."""

from __future__ import annotations

import queue
from typing import Final

from pipeline.unity.server import Server

BROKEN: Final = "the player broke the connection off"


class Gone:
    """Takes the place of a message where the player has gone: `why`."""

    def __init__(self, why: str) -> None:
        self.why = why


class Calls:
    """The calls of one player.

    Args:
        port: to listen on; 0 chooses one.
        host: to listen on.

    Attributes:
        port: on which it listens.
        open: whether a call waits for its answer.

    Raises:
        SettingsError: the port is not free, or gRPC is not installed.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.open = False
        self._arrived: queue.SimpleQueue[bytes | Gone] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._server = Server(port, self._called, lambda: self.gone(BROKEN), host)
        self.port = self._server.port

    def receive(self, timeout_s: float) -> bytes | Gone | None:
        """The player's next message; `Gone` where it has gone; None where nothing came in time."""
        try:
            return self._arrived.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None

    def gone(self, why: str) -> None:
        """Says, from any thread, that no more calls will come."""
        self._arrived.put(Gone(why))

    def answer(self, message: bytes) -> None:
        """Answers the open call."""
        self.open = False
        self._answers.put(message)

    def close(self) -> None:
        """Ends the server; a call without an answer is broken off."""
        self._server.refuse()
        self._answers.put(None)
        self._server.close()

    def _called(self, message: bytes) -> bytes | None:
        """A call waits here, on its own thread, for its answer."""
        self.open = True
        self._arrived.put(message)
        return self._answers.get()
