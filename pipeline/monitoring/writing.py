"""Handles a full disk: failed writes are logged and counted, and essential ones repeated up to a time limit."""

import errno
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import anyio
from structlog.typing import FilteringBoundLogger

from sparring.pipeline.errors import DiskFull
from sparring.pipeline.monitoring.metrics import Registry
from sparring.pipeline.monitoring.progress import ALL, DISK, ProgressTracker

T = TypeVar("T")

COUNTER: Final = "writes_failed"
"""Counter of a service's failed writes."""

_RETRY_S: Final = 0.5
_NO_ROOM: Final = errno.ENOSPC, errno.EDQUOT
_LOG_S: Final = 30.0


@dataclass(slots=True)
class Writing:
    """Counts and logs failed writes of a service, and repeats the essential ones.

    Attributes:
        registry: numbers of the service.
        log: logger of the service.
        clock: gives rising seconds.
        limit_s: seconds without success after which `until_done` gives up.
        progress: tracker of the service, which records waits for disk space.
    """

    registry: Registry
    log: FilteringBoundLogger
    clock: Callable[[], float]
    limit_s: float
    progress: ProgressTracker
    _logged_at: float = field(default=-math.inf, init=False)

    def failed(self, error: OSError, what: str) -> None:
        """Counts a failed write, and logs it at a limited rate."""
        self.registry.add(COUNTER)
        now = self.clock()
        if now - self._logged_at >= _LOG_S:
            self._logged_at = now
            self.log.warning("not_written", what=what, error=str(error), notice=True)

    async def until_done(self, write: Callable[[], Awaitable[T]], what: str, limit_s: float | None = None) -> T:
        """Writes, and repeats that while it fails.

        Args:
            write: raises OSError if it fails, without having changed anything.
            what: name of what it writes, for the log.
            limit_s: seconds after which to give up, by default those of the service.

        Raises:
            DiskFull: the write failed for too long.
        """
        began, limit_s = self.clock(), self.limit_s if limit_s is None else limit_s
        waited = False
        while True:
            try:
                done = await write()
            except OSError as error:
                self.failed(error, what)
                self.progress.waits(ALL, "room", DISK, text=f"room on the disk for {what}")
                waited = True
                if self.clock() - began >= limit_s:
                    remedy = "free disk space" if error.errno in _NO_ROOM else "correct what is there"
                    raise DiskFull(
                        f"got {error} for {limit_s:g} s; expected to write {what}, without which the run cannot "
                        f"continue; {remedy}, then continue with --resume"
                    ) from error
            else:
                if waited:
                    self.progress.works()
                return done
            await anyio.sleep(_RETRY_S)
