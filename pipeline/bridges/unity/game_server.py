"""Receives the calls of a Unity player, one after the other, for a thread that waits for them."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Final

from sparring.pipeline.bridges.unity.build import HOST
from sparring.pipeline.bridges.unity.server import Server

BROKEN: Final = "the player broke the connection"

_END_S: Final = 2.0


class PlayerExit:
    """Takes the place of a message if the player has ended or its connection has broken; `why` says the reason."""

    def __init__(self, why: str) -> None:
        self.why = why


class Calls:
    """Receives the calls of one player on its own thread, so that the player's connection stays alive.

    Args:
        port: port to listen on; 0 chooses one.
        host: IP address to listen on.

    Attributes:
        port: the port in use.
        open: whether a call waits for its answer.

    Raises:
        SettingsError: the port is in use, or a library is not installed.
    """

    def __init__(self, port: int, host: str = HOST) -> None:
        self.open = False
        self._arrived: queue.SimpleQueue[bytes | PlayerExit] = queue.SimpleQueue()
        self._loop = asyncio.SelectorEventLoop()
        try:
            self._server = Server(port, self._called, lambda: self.report_exit(BROKEN), self._loop, host)
        except BaseException:
            self._loop.close()
            raise
        self.port = self._server.port
        self._thread = threading.Thread(target=self._run, name="unity calls", daemon=True)
        self._thread.start()

    def receive(self, timeout_s: float) -> bytes | PlayerExit | None:
        """Returns the player's next message; `PlayerExit` if no more will come; None after `timeout_s`."""
        try:
            return self._arrived.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None

    def report_exit(self, why: str) -> None:
        """Reports, from any thread, that no more calls will come."""
        self._arrived.put(PlayerExit(why))

    def answer(self, message: bytes) -> None:
        """Answers the open call."""
        self.open = False
        self._loop.call_soon_threadsafe(self._server.answer, message)

    def close(self) -> None:
        """Ends the server; a call without an answer is rejected."""
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
