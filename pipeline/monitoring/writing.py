"""What a service does where the disk is full: says so, goes on as far as it may, tries again, gives up in time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import anyio

from sparring.pipeline.errors import NoRoom
from sparring.pipeline.monitoring.metrics import Registry
from sparring.pipeline.monitoring.progress import ALL, DISK, ProgressTracker

T = TypeVar("T")

COUNTER: Final = "writes_failed"
"""Name under which a service counts what it could not write."""

_AGAIN_S: Final = 0.5
_SAY_S: Final = 30.0


class Writing:
    """Counts failed writes of a service, tells of them, and repeats those that nothing goes on without.

    Args:
        registry: of the service.
        log: of the service.
        clock: seconds, only rising.
        limit_s: seconds without success after which `until_done` gives up.
        progress: of the service: what waits for room is said there.
    """

    def __init__(
        self,
        registry: Registry,
        log: Any,
        clock: Callable[[], float],
        limit_s: float,
        progress: ProgressTracker | None = None,
    ) -> None:
        self._registry = registry
        self._log = log
        self._clock = clock
        self._limit_s = limit_s
        self._progress = ProgressTracker(registry, clock) if progress is None else progress
        self._said_at: float | None = None

    def failed(self, error: OSError, what: str) -> None:
        """Counts a write that failed, and says so, though not each time while it goes on."""
        self._registry.add(COUNTER)
        now = self._clock()
        if self._said_at is None or now - self._said_at >= _SAY_S:
            self._said_at = now
            self._log.warning("not_written", what=what, error=str(error), notice=True)

    async def until_done(self, write: Callable[[], Awaitable[T]], what: str, limit_s: float | None = None) -> T:
        """Writes, and again while that fails.

        Args:
            write: raises OSError where it fails; it then has left everything as it was.
            what: it writes, for the log.
            limit_s: seconds after which to give up; None for those of the service.

        Raises:
            NoRoom: it failed for too long.
        """
        began, limit_s = self._clock(), self._limit_s if limit_s is None else limit_s
        waited = False
        while True:
            try:
                done = await write()
            except OSError as error:
                self.failed(error, what)
                self._progress.waits(ALL, "room", DISK, said=f"room on the disk for {what}")
                waited = True
                if self._clock() - began >= limit_s:
                    raise NoRoom(
                        f"got {error} for {limit_s:g} s; expected to write {what}, without which nothing goes on; "
                        "make room, then go on with --resume"
                    ) from error
            else:
                if waited:
                    self._progress.works()
                return done
            await anyio.sleep(_AGAIN_S)
