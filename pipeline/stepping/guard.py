"""What the conversations of one stepping process share against those that ask too much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pipeline.metrics import Registry
from pipeline.stepping.flow import Flow, Pool
from pipeline.stepping.limits import LimitSettings
from pipeline.stepping.refusals import Refusals

_NAME: Final = 200
"""Characters in the name of a statistic."""


class Guard:
    """Limits, what of them is used, and the log of those that wanted more.

    Args:
        limits: of the stepping process.
        registry: its numbers.
        log: structlog logger.
        clock: seconds, only rising.
    """

    def __init__(self, limits: LimitSettings, registry: Registry, log: Any, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.refusals = Refusals(registry, log, clock)
        self.pool = Pool(limits.receiving_bytes)
        self._registry = registry
        self._clock = clock
        self._statistics: set[str] = set()

    def flow(self) -> Flow:
        """For the reading of a new simulator."""
        return Flow(self.limits, self.pool, self._clock)

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
