"""Publishes the progress of a stage: its watermarks and its waits.

A *watermark* counts what a stage has passed on, and is published with the stage's numbers: counter `passed.PRODUCT`,
gauge `idle_s.PRODUCT` (seconds since the count last rose). A *wait* names what an activity of the stage needs, and from
which sources, before it can continue. `monitoring.stalls` evaluates both.

Products and activities are named like numbers: `segments/Walk` are the segments of behavior Walk.
"""

from collections.abc import Callable
from typing import Final

from sparring.pipeline.messages.metrics import Wait
from sparring.pipeline.monitoring.metrics import Registry

ALL: Final = "*"
"""The activity of a service that has only one."""

SIMULATORS: Final = "simulators"
"""The source of frames from outside the run."""

DISK: Final = "the disk"
"""The source of disk space."""

CREDIT: Final = "credit."
"""Prefix of waits for space in a queue."""

PASSED: Final = "passed."
IDLE: Final = "idle_s."


class ProgressTracker:
    """Tracks the watermarks and waits of one incarnation of a service.

    Args:
        registry: numbers of the service.
        clock: gives rising seconds.
    """

    def __init__(self, registry: Registry, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._clock = clock
        self._passed: dict[str, tuple[float, float]] = {}  # by product, the count and when it last rose
        self._waits: dict[str, tuple[Wait, str]] = {}  # by activity, with the text for readers

    def passed(self, product: str, count: float) -> None:
        """Adds `count` to what has been passed on of a product."""
        self.reach(product, self._passed.get(product, (0.0, 0.0))[0] + count)

    def reach(self, product: str, count: float) -> None:
        """Sets what has been passed on of a product since the start."""
        known = self._passed.get(product)
        if known is None or known[0] != count:
            self._passed[product] = count, self._clock()

    def waits(self, activity: str, what: str, *sources: str, text: str = "", who: str = "") -> None:
        """Records that an activity cannot continue.

        Args:
            activity: product that it passes on, or `ALL`.
            what: product that it needs.
            sources: services that provide it; none if no other stage can be the cause.
            text: description for readers, instead of `what`.
            who: the one of the sources that is missing, for readers.
        """
        wait = Wait(activity=activity, what=what, sources=sources, who=who)
        self._waits[activity] = wait, text or readable(what)

    def works(self, activity: str = ALL) -> None:
        """Records that an activity continues."""
        self._waits.pop(activity, None)

    def published(self) -> tuple[Wait, ...]:
        """Updates counters and gauges, and returns the waits."""
        now = self._clock()
        for product, (count, risen_at) in self._passed.items():
            self._registry.reach(PASSED + product, count)
            self._registry.gauge(IDLE + product, now - risen_at)
        return tuple(wait for wait, _ in self._waits.values())

    @property
    def waiting_for(self) -> str:
        """Returns what the service waits for, for readers; "" while it works."""
        waits = [self._waits[ALL]] if ALL in self._waits else self._waits.values()
        return ", ".join(dict.fromkeys(text for _, text in waits))


def readable(name: str) -> str:
    """Returns `credit.segments/Walk` as "credit for segments of Walk"."""
    text, _, behavior = name.partition("/")
    credit = text.startswith(CREDIT)
    text = ("credit for " if credit else "") + text.removeprefix(CREDIT)
    return f"{text} of {behavior}" if behavior else text
