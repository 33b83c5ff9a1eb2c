"""How far a stage has come, and what keeps it: its watermarks and its waits.

A *watermark* is a count of what a stage has passed on, with the time of the last one. They are published with the
stage's numbers: counter `passed.PRODUCT`, gauge `idle_s.PRODUCT` (seconds since it last rose). A *wait* says what an
activity of the stage needs from whom before it can go on. Who judges them is `monitoring.stalls`.

Products and activities are named as numbers are: `segments/Walk` are the segments of behavior Walk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sparring.pipeline.messages.metrics import Wait
from sparring.pipeline.monitoring.metrics import Registry

ALL: Final = "*"
"""The activity of a service that can only do one thing at a time."""

SIMULATORS: Final = "simulators"
"""The source of what comes from outside."""

DISK: Final = "the disk"
"""The source of room for what has to be written."""

CREDIT: Final = "credit."
"""Begins what is waited for where a queue is full."""

PASSED: Final = "passed."
IDLE: Final = "idle_s."


@dataclass(slots=True)
class _Waiting:
    what: str
    sources: tuple[str, ...]
    since: float
    said: str
    who: str


class ProgressTracker:
    """Watermarks and waits of one start of a service.

    Args:
        registry: the service's numbers.
        clock: seconds, only rising.
    """

    def __init__(self, registry: Registry, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._clock = clock
        self._passed: dict[str, tuple[float, float]] = {}  # by product, the count and when it last rose
        self._waits: dict[str, _Waiting] = {}

    def passed(self, product: str, count: float) -> None:
        """Some more of a product has been passed on."""
        self.reach(product, self._passed.get(product, (0.0, 0.0))[0] + count)

    def reach(self, product: str, count: float) -> None:
        """Of a product, `count` have been passed on since the start."""
        known = self._passed.get(product)
        if known is None or known[0] != count:
            self._passed[product] = count, self._clock()

    def waits(self, activity: str, what: str, *sources: str, said: str = "", who: str = "") -> None:
        """An activity cannot go on.

        Args:
            activity: what it hands on when it goes on, or `ALL`.
            what: it needs.
            sources: who gives it; none where no other stage can be blamed.
            said: for readers, instead of `what`.
            who: which of the sources, for readers.
        """
        known = self._waits.get(activity)
        if known is not None and known.what == what and known.sources == sources:
            known.said, known.who = said, who
        else:
            self._waits[activity] = _Waiting(what, sources, self._clock(), said, who)

    def works(self, activity: str = ALL) -> None:
        """An activity goes on."""
        self._waits.pop(activity, None)

    def published(self) -> tuple[Wait, ...]:
        """Brings counters and gauges up to date; returns the waits."""
        now = self._clock()
        for product, (count, risen_at) in self._passed.items():
            self._registry.reach(PASSED + product, count)
            self._registry.gauge(IDLE + product, now - risen_at)
        return tuple(
            Wait(activity=activity, what=one.what, sources=one.sources, seconds=now - one.since, who=one.who)
            for activity, one in self._waits.items()
        )

    @property
    def waiting_for(self) -> str:
        """What it waits for, for readers; "" while it works."""
        whole = self._waits.get(ALL)
        waits = self._waits.values() if whole is None else (whole,)
        return ", ".join(dict.fromkeys(one.said or readable(one.what) for one in waits))


def readable(name: str) -> str:
    """`credit.segments/Walk` as "credit for segments of Walk"."""
    text, _, behavior = name.partition("/")
    credit = text.startswith(CREDIT)
    text = ("credit for " if credit else "") + text.removeprefix(CREDIT)
    return f"{text} of {behavior}" if behavior else text
