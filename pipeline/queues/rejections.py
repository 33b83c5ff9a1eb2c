"""Logs what peers did wrong, once per kind, peer and interval.

A peer that could cause a log line with each attempt would fill the disk and hide the other lines.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from structlog.typing import FilteringBoundLogger

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


@dataclass(slots=True)
class RejectionLog:
    """A RejectionLog logs events of the peers of one service, at a limited rate.

    Attributes:
        log: structlog logger.
        clock: seconds, monotonic.
        count: called with the name of the counter of each rejection.
    """

    log: FilteringBoundLogger
    clock: Callable[[], float]
    count: Callable[[str], None] = lambda _: None
    _lines: dict[tuple[str, str, str], _EventLog] = field(default_factory=dict)

    def reject(self, kind: str, peer: str, **facts: str) -> None:
        """Counts a rejection as `rejections` and `rejections.KIND`, and logs it as `log_event` does."""
        self.count("rejections")
        self.count(f"rejections.{kind}")
        self.log_event("simulator_rejected", peer, kind, most=1, level="warning", kind=kind, **facts)

    def log_event(
        self, event: str, peer: str, kind: str = "", /, *, most: int = 1, level: str = "warning", **facts: Fact
    ) -> None:
        """Logs an event, unless `most` of its kind and peer were logged in this interval.

        Args:
            event: name of the log event.
            peer: address, and name where the peer is authenticated.
            kind: of the event, one of few; never text of the peer.
            most: maximum number of lines in an interval.
            level: log level.
            facts: for the log; texts are truncated.
        """
        facts = {name: clip(value) if isinstance(value, str) else value for name, value in facts.items()}
        now, key = self.clock(), (event, kind, clip(peer, 100))
        if key not in self._lines and len(self._lines) >= PEERS:
            self.summarize()
            key = key if len(self._lines) < PEERS else (event, kind, "others")
        line = self._lines.setdefault(key, _EventLog(now))
        if now - line.since >= INTERVAL_S:
            self._summarize(key, line)
            line.since, line.logged = now, 0
        if line.logged < most:
            line.logged += 1
            getattr(self.log, level)(event, peer=key[2], **facts)
        else:
            line.suppressed += 1
            line.facts = facts

    def summarize(self, *, at_end: bool = False) -> None:
        """Logs the numbers of suppressed events of past intervals; at the end, of all."""
        now = self.clock()
        for key, line in list(self._lines.items()):
            if at_end or now - line.since >= INTERVAL_S:
                self._summarize(key, line)
                del self._lines[key]

    def _summarize(self, key: tuple[str, str, str], line: _EventLog) -> None:
        if line.suppressed:
            seconds = round(self.clock() - line.since, 1)
            self.log.warning(f"{key[0]}_again", peer=key[2], times=line.suppressed, seconds=seconds, **line.facts)
            line.suppressed, line.facts = 0, {}
