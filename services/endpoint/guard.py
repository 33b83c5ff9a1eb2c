"""What the conversations of one stepping process share against those that ask too much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from sparring.pipeline.monitoring.metrics import Registry
from sparring.pipeline.stepping.limits import LimitSettings
from sparring.services.endpoint.flow import Pool, ReadThrottle
from sparring.services.endpoint.refusals import RejectionLog

_NAME: Final = 200
"""Characters in the name of a statistic."""


class ConnectionLimits:
    """Limits, what of them is used, and the log of those that wanted more.

    Args:
        limits: of the stepping process.
        registry: its numbers.
        log: structlog logger.
        clock: seconds, only rising.
    """

    def __init__(self, limits: LimitSettings, registry: Registry, log: Any, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.refusals = RejectionLog(registry, log, clock)
        self.pool = Pool(limits.receiving_bytes)
        self._registry = registry
        self._clock = clock
        self._statistics: set[str] = set()

    def flow(self) -> ReadThrottle:
        """For the reading of a new simulator."""
        return ReadThrottle(self.limits, self.pool, self._clock)

    def takes_statistic(self, name: str, peer: str) -> bool:
        """Whether a number of a simulator's own is kept: each name costs memory for as long as the process runs."""
        if name in self._statistics:
            return True
        if len(name) <= _NAME and len(self._statistics) < self.limits.statistics:
            self._statistics.add(name)
            return True
        self._registry.add("statistics_refused")
        limit = f"{self.limits.statistics} names of at most {_NAME} characters"
        self.refusals.say("statistic_refused", peer, got=name, expected=limit)
        return False
