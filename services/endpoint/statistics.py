"""Simulators' own numbers become metrics of the process, under a limited number of names."""

from collections.abc import Iterable
from typing import Final

from sparring.pipeline.messages.simulator import Statistic
from sparring.pipeline.monitoring.metrics import SIMULATOR, Registry
from sparring.pipeline.queues.rejections import RejectionLog

_NAME: Final = 200
"""Maximum number of characters in the name of a statistic."""


class SimulatorStatistics:
    """SimulatorStatistics record the statistics of all simulators of one stepping process.

    Args:
        limit: maximum number of names: each uses memory until the process ends.
        registry: metrics of the process.
        rejections: log of further names.
    """

    def __init__(self, limit: int, registry: Registry, rejections: RejectionLog) -> None:
        self._limit = limit
        self._registry = registry
        self._rejections = rejections
        self._names: set[str] = set()

    def record(self, statistics: Iterable[Statistic], peer: str, number: int | None) -> None:
        """Records the statistics of a simulator as metrics.

        Args:
            statistics: of one message.
            peer: address and name, for the log.
            number: of the simulator; gauges are those of simulator 0.
        """
        for statistic in statistics:
            name = SIMULATOR + statistic.name
            if not self._accepts(statistic.name, peer):
                continue
            if statistic.aggregation == "sum":
                self._registry.add(f"{name}.total", statistic.value)
            elif statistic.aggregation != "most_recent":
                self._registry.observe_moments(name, [statistic.value])
            elif number == 0:
                self._registry.gauge(name, statistic.value)

    def _accepts(self, name: str, peer: str) -> bool:
        """Returns whether a statistic of this name is kept."""
        if name in self._names:
            return True
        if len(name) <= _NAME and len(self._names) < self._limit:
            self._names.add(name)
            return True
        self._registry.add("statistics_rejected")
        limit = f"{self._limit} names of at most {_NAME} characters"
        self._rejections.log_event("statistic_rejected", peer, got=name, expected=limit)
        return False
