"""Rejected peers are counted by kind and logged once per peer and interval.

A peer that could cause a log line with each attempt would fill the disk and hide the other lines.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from structlog.typing import FilteringBoundLogger

from sparring.pipeline.messages.simulator import Statistic
from sparring.pipeline.monitoring.metrics import SIMULATOR, Registry

Fact = str | float | Sequence[str] | None
"""A value of a log line."""

INTERVAL_S: Final = 60.0
PEERS: Final = 1024
"""Maximum number of peers with lines of their own; further ones share a line."""
_TEXT: Final = 300


def clip(text: str, most: int = _TEXT) -> str:
    """Truncates text of a peer for the log."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


@dataclass(slots=True)
class _EventLog:
    """An _EventLog counts one kind of event of one peer.

    Attributes:
        since: start of the interval.
        logged: lines in the interval.
        suppressed: events that have not been logged.
        facts: of the last suppressed event.
    """

    since: float
    logged: int = 0
    suppressed: int = 0
    facts: dict[str, Fact] = field(default_factory=dict)


class RejectionLog:
    """A RejectionLog logs events of the peers of one service, at a limited rate.

    Args:
        registry: gets the counters `rejections.KIND`.
        log: structlog logger.
        clock: seconds, monotonic.
    """

    def __init__(self, registry: Registry, log: FilteringBoundLogger, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._log = log
        self._clock = clock
        self._lines: dict[tuple[str, str, str], _EventLog] = {}

    def reject(self, kind: str, peer: str, **facts: str) -> None:
        """Counts a rejection, and logs the first of its kind and peer in an interval.

        Args:
            kind: of the rejection, as in the counter.
            peer: address, and name where the peer is authenticated.
            facts: for the log.
        """
        self._registry.add("rejections")
        self._registry.add(f"rejections.{kind}")
        self.log_event("simulator_rejected", peer, kind, most=1, level="warning", **facts)

    def log_event(
        self, event: str, peer: str, kind: str = "", *, most: int = 1, level: str = "warning", **facts: Fact
    ) -> None:
        """Logs an event, unless `most` of its kind and peer were logged in this interval.

        Args:
            event: name of the log event.
            peer: as in `reject`.
            kind: of the event, one of few; never text of the peer.
            most: maximum number of lines in an interval.
            level: log level.
            facts: for the log; texts are truncated.
        """
        facts = {name: clip(value) if isinstance(value, str) else value for name, value in facts.items()}
        facts = {"kind": kind, **facts} if kind else facts
        now, key = self._clock(), (event, kind, clip(peer, 100))
        if key not in self._lines and len(self._lines) >= PEERS:
            self.summarize()
            key = key if len(self._lines) < PEERS else (event, kind, "others")
        line = self._lines.setdefault(key, _EventLog(now))
        if now - line.since >= INTERVAL_S:
            self._summarize(key, line)
            line.since, line.logged = now, 0
        if line.logged < most:
            line.logged += 1
            getattr(self._log, level)(event, peer=key[2], **facts)
        else:
            line.suppressed += 1
            line.facts = facts

    def summarize(self, *, at_end: bool = False) -> None:
        """Logs the numbers of suppressed events of past intervals; at the end, of all."""
        now = self._clock()
        for key, line in list(self._lines.items()):
            if at_end or now - line.since >= INTERVAL_S:
                self._summarize(key, line)
                del self._lines[key]

    def _summarize(self, key: tuple[str, str, str], line: _EventLog) -> None:
        if line.suppressed:
            seconds = round(self._clock() - line.since, 1)
            self._log.warning(f"{key[0]}_again", peer=key[2], times=line.suppressed, seconds=seconds, **line.facts)
            line.suppressed, line.facts = 0, {}


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
