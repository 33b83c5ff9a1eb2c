"""A timer calls a function when it is due; the due time can be advanced while it waits."""

from __future__ import annotations

import math
from collections.abc import Callable

import anyio
import anyio.lowlevel


class Timer:
    """Calls `fire` whenever the time `due` has come.

    Args:
        clock: gives rising seconds; need not be the event loop's own.
        due: gives the next time to fire; called again after each firing.
        fire: is called when due, and must move `due` on.
    """

    def __init__(self, clock: Callable[[], float], due: Callable[[], float], fire: Callable[[], None]) -> None:
        self._clock = clock
        self._due = due
        self._fire = fire
        self._armed = -math.inf
        self._offset = 0.0  # from `clock` to the event loop's clock, which a callback cannot read
        self._scope: anyio.CancelScope | None = None
        self._stopped = False

    async def run(self) -> None:
        """Runs the timer until it is stopped."""
        while not self._stopped:
            self._armed = self._due()
            await self._sleep()
            if not self._stopped and self._due() <= self._clock():
                self._fire()

    async def _sleep(self) -> None:
        now = self._clock()
        if self._armed <= now:
            await anyio.lowlevel.checkpoint()
            return
        self._offset = anyio.current_time() - now
        with anyio.CancelScope(deadline=self._armed + self._offset) as self._scope:
            await anyio.sleep_forever()
        self._scope = None

    def advance(self, due: float) -> None:
        """Fires at `due` if that is earlier than the time that the timer waits for."""
        if due < self._armed:
            self._armed = due
            if self._scope is not None:
                self._scope.deadline = due + self._offset

    def stop(self) -> None:
        """Ends `run`."""
        self._stopped = True
        if self._scope is not None:
            self._scope.cancel()
