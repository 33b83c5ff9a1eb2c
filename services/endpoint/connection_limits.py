"""The conversations of one stepping process share these limits and the log of their violations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from sparring.pipeline.messages.simulator import Statistic
from sparring.pipeline.monitoring.metrics import SIMULATOR, Registry
from sparring.pipeline.stepping.limits import LimitSettings
from sparring.services.endpoint.rejections import RejectionLog
from sparring.services.endpoint.throttling import Pool, ReadThrottle

_NAME: Final = 200
"""Maximum number of characters in the name of a statistic."""


class ConnectionLimits:
    """ConnectionLimits hold the limits, the memory that connections share, and the log of violations.

    Args:
        limits: of the stepping process.
        registry: metrics of the process.
        log: structlog logger.
        clock: seconds, monotonic.
    """

    def __init__(self, limits: LimitSettings, registry: Registry, log: Any, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.rejections = RejectionLog(registry, log, clock)
        self.pool = Pool(limits.receiving_bytes)
        self._registry = registry
        self._clock = clock
        self._statistics: set[str] = set()

    def new_throttle(self) -> ReadThrottle:
        """Returns a throttle for the reading of a new simulator."""
        return ReadThrottle(self.limits, self.pool, self._clock)

    def record_statistics(self, statistics: Iterable[Statistic], peer: str, number: int | None) -> None:
        """Records the statistics of a simulator as metrics.

        Args:
            statistics: of one message.
            peer: address and name, for the log.
            number: of the simulator; gauges are those of simulator 0.
        """
        for statistic in statistics:
            name = SIMULATOR + statistic.name
            if not self._accepts_statistic(statistic.name, peer):
                continue
            if statistic.aggregation == "sum":
                self._registry.add(f"{name}.total", statistic.value)
            elif statistic.aggregation != "most_recent":
                self._registry.observe_moments(name, [statistic.value])
            elif number == 0:
                self._registry.gauge(name, statistic.value)

    def _accepts_statistic(self, name: str, peer: str) -> bool:
        """Returns whether a simulator's statistic is kept: each name uses memory until the process ends."""
        if name in self._statistics:
            return True
        if len(name) <= _NAME and len(self._statistics) < self.limits.statistics:
            self._statistics.add(name)
            return True
        self._registry.add("statistics_rejected")
        limit = f"{self.limits.statistics} names of at most {_NAME} characters"
        self.rejections.log_event("statistic_rejected", peer, got=name, expected=limit)
        return False
