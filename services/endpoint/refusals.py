"""What is said of peers that are turned away: counted by kind, logged once for each peer and interval.

A peer that can make us write a line for each of its attempts fills the disk, and hides what else is in the log.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from sparring.pipeline.monitoring.metrics import Registry

INTERVAL_S: Final = 60.0
PEERS: Final = 1024
"""Most peers that are told apart; those beyond share a line."""
_TEXT: Final = 300


def clip(text: str, most: int = _TEXT) -> str:
    """Words of a peer, no longer than a line of a log should be."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


@dataclass(slots=True)
class _PeerLog:
    """What is known of one kind of event of one peer.

    Attributes:
        since: when its interval began.
        said: lines in it.
        unsaid: events that have not been logged.
        facts: of the last of them.
    """

    since: float
    said: int = 0
    unsaid: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


class RejectionLog:
    """The log of peers, of one service.

    Args:
        registry: gets the counters `strangers.KIND`.
        log: structlog logger.
        clock: seconds, only rising.
    """

    def __init__(self, registry: Registry, log: Any, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._log = log
        self._clock = clock
        self._lines: dict[tuple[str, str, str], _PeerLog] = {}

    def refuse(self, kind: str, peer: str, **facts: Any) -> None:
        """Counts a refusal, and logs the first of its kind and peer in an interval.

        Args:
            kind: of the refusal, as in the counter.
            peer: address, and name where it has shown who it is.
            facts: for the log.
        """
        self._registry.add("strangers")
        self._registry.add(f"strangers.{kind}")
        self.say("simulator_refused", peer, kind, **facts)

    def say(
        self, event: str, peer: str, kind: str = "", *, most: int = 1, level: str = "warning", **facts: Any
    ) -> None:
        """Logs an event, unless `most` of its kind and peer were logged in this interval.

        Args:
            event: of the log.
            peer: as in `refuse`.
            kind: of the event, one of few; never a word of the peer's.
            most: lines in an interval.
            level: of the log.
            facts: for the log; texts are shortened.
        """
        facts = {name: clip(value) if isinstance(value, str) else value for name, value in facts.items()}
        facts = {"kind": kind, **facts} if kind else facts
        now, key = self._clock(), (event, kind, clip(peer, 100))
        if key not in self._lines and len(self._lines) >= PEERS:
            self.sum_up()
            key = key if len(self._lines) < PEERS else (event, kind, "others")
        line = self._lines.setdefault(key, _PeerLog(now))
        if now - line.since >= INTERVAL_S:
            self._sum_up(key, line)
            line.since, line.said = now, 0
        if line.said < most:
            line.said += 1
            getattr(self._log, level)(event, peer=key[2], **facts)
        else:
            line.unsaid += 1
            line.facts = facts

    def sum_up(self, *, at_end: bool = False) -> None:
        """Says how often what was not logged has happened, of intervals that are over; at the end of all."""
        now = self._clock()
        for key, line in list(self._lines.items()):
            if at_end or now - line.since >= INTERVAL_S:
                self._sum_up(key, line)
                del self._lines[key]

    def _sum_up(self, key: tuple[str, str, str], line: _PeerLog) -> None:
        if line.unsaid:
            seconds = round(self._clock() - line.since, 1)
            self._log.warning(f"{key[0]}_again", peer=key[2], times=line.unsaid, seconds=seconds, **line.facts)
            line.unsaid, line.facts = 0, {}
