"""The calls of a Unity player, taken one after the other by a thread that waits for them."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Final

from sparring.pipeline.bridges.unity.server import HOST, Server

BROKEN: Final = "the player broke the connection off"

_END_S: Final = 2.0


class PlayerGone:
    """Takes the place of a message where the player has gone: `why`."""

    def __init__(self, why: str) -> None:
        self.why = why


class Calls:
    """The calls of one player. They arrive on a thread of their own, so that the player's connection lives on.

    Args:
        port: to listen on; 0 chooses one.
        host: IP address to listen on.

    Attributes:
        port: on which it listens.
        open: whether a call waits for its answer.

    Raises:
        SettingsError: the port is not free, or a library is not installed.
    """

    def __init__(self, port: int, host: str = HOST) -> None:
        self.open = False
        self._arrived: queue.SimpleQueue[bytes | PlayerGone] = queue.SimpleQueue()
        self._loop = asyncio.SelectorEventLoop()
        try:
            self._server = Server(port, self._called, lambda: self.gone(BROKEN), self._loop, host)
        except BaseException:
            self._loop.close()
            raise
        self.port = self._server.port
        self._thread = threading.Thread(target=self._run, name="unity calls", daemon=True)
        self._thread.start()

    def receive(self, timeout_s: float) -> bytes | PlayerGone | None:
        """The player's next message; `PlayerGone` where it has gone; None where nothing came in time."""
        try:
            return self._arrived.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None

    def gone(self, why: str) -> None:
        """Says, from any thread, that no more calls will come."""
        self._arrived.put(PlayerGone(why))

    def answer(self, message: bytes) -> None:
        """Answers the open call."""
        self.open = False
        self._loop.call_soon_threadsafe(self._server.answer, message)

    def close(self) -> None:
        """Ends the server; a call without an answer is refused."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end)
            self._thread.join(_END_S)

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _end(self) -> None:
        self._server.close()
        self._loop.stop()

    def _called(self, message: bytes) -> None:
        self.open = True
        self._arrived.put(message)
