"""Finds the stage that blocks all others, from the numbers that they publish.

Every stage publishes what it waits for and from which sources (`Metrics.waits`), and what it has passed on (counters
`passed.*`). Each chain of waits is followed from a learner to its end: a stage that waits for no other and whose
watermarks do not rise is *stuck*; simulators and the disk are *outside*; a stage that is in the chain already closes a
*ring*. A chain whose end has not moved for a set time is a stall. A stage that merely waits for another is never the
cause, and a stage that no other waits for is not considered.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from sparring.pipeline.messages.metrics import Metrics, Wait
from sparring.pipeline.monitoring.progress import ALL, CREDIT, DISK, PASSED, SIMULATORS, readable

Kind = Literal["stuck", "ring", "outside"]
_WORST: Final = ("stuck", "ring", "outside")

PAUSE_S: Final = 5.0
"""A longer time between two looks means that this process was paused, and must first receive the others' numbers."""

_QUEUED: Final = ".messages"
_Link = tuple[str, Wait]
_State = tuple[str, tuple[str, ...]] | float


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """Describes a part of the run that has not moved for too long.

    Attributes:
        root: service that is the cause, `SIMULATORS`, `DISK`, or the services of a ring, separated by commas.
        kind: whether the root is stuck, a ring, or outside.
        seconds: seconds since the root last moved.
        chain: sentences about the waits of each service, beginning with a learner.
    """

    root: str
    kind: Kind
    seconds: float
    chain: tuple[str, ...]

    @property
    def text(self) -> str:
        """Returns the stall as one line for a reader."""
        return f"{self.root}: nothing has moved for {self.seconds:.0f} s; " + "; ".join(self.chain)


@dataclass(slots=True)
class _Stage:
    """Holds the published state of a service.

    Attributes:
        started_at: time of its first record.
        waits: waits by activity.
        state: what each activity waits for, and how much of each product has been passed on.
        moved: time of the last change by activity or product.
        queued: messages that have arrived for it and that it has not handled.
    """

    start: str
    started_at: float
    waits: dict[str, Wait] = field(default_factory=dict)
    state: set[tuple[str, _State]] = field(default_factory=set)
    moved: dict[str, float] = field(default_factory=dict)
    queued: int = 0

    def update(self, metrics: Metrics, now: float) -> None:
        passed = {name: count for name, count in metrics.counters.items() if name.startswith(PASSED)}
        state: set[tuple[str, _State]] = {(name.removeprefix(PASSED), count) for name, count in passed.items()}
        state |= {(wait.activity, (wait.what, wait.sources)) for wait in metrics.waits}
        self.moved |= {name: now for name, _ in state ^ self.state}
        self.state, self.queued = state, _queued(metrics.gauges)
        self.waits = {wait.activity: wait for wait in metrics.waits}

    def wait_of(self, what: str, behavior: str) -> Wait | None:
        """Returns the wait that blocks its output `what`, finally for a behavior; None while it works."""
        kind = what.partition("/")[0]
        names = (ALL, what, f"{kind}/{behavior}", kind)
        return next((self.waits[name] for name in names if name in self.waits), None)

    def last_moved(self, names: Iterable[str] | None = None) -> float:
        """Returns when one of the activities or products, by default of all, last changed."""
        wanted = self.moved if names is None else [name for name in names if name in self.moved]
        return max((self.moved[name] for name in wanted), default=self.started_at)


class Stalls:
    """Finds the stalls of a run.

    Args:
        sinks: services at the end of the flow: the learners, or the services in their place.
        timeout_s: seconds without a change that make a stall.
    """

    def __init__(self, sinks: Sequence[str], timeout_s: float) -> None:
        self.sinks = sinks
        self._timeout_s = timeout_s
        self._stages: dict[str, _Stage] = {}
        self._looked: float | None = None

    def update(self, metrics: Metrics, now: float) -> None:
        """Adds a record of a service.

        Args:
            metrics: published record.
            now: rising seconds.
        """
        stage = self._stages.get(metrics.service)
        if stage is None or stage.start != metrics.start:
            stage = self._stages[metrics.service] = _Stage(metrics.start, started_at=now)
        stage.update(metrics, now)

    def forget(self, service: str) -> None:
        """Removes the record of a service that has died: its next incarnation is judged by its own."""
        self._stages.pop(service, None)

    def look(self, now: float) -> list[Stall]:
        """Returns the present stalls, one for each root; must be called about once a second (`PAUSE_S`)."""
        gap = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        if gap > PAUSE_S:
            for stage in self._stages.values():
                stage.started_at += gap
                stage.moved = {name: min(now, moved + gap) for name, moved in stage.moved.items()}
        found: dict[str, Stall] = {}
        for sink in self.sinks:
            ends = list(self._ends(now, sink, ALL, "", ()))
            if ends and all(end.seconds > self._timeout_s for end in ends):
                end = min(ends, key=lambda end: _WORST.index(end.kind))
                found.setdefault(end.root, end)
        return list(found.values())

    # ---------------------------------------------------------------- inside

    def _ends(self, now: float, service: str, what: str, behavior: str, links: tuple[_Link, ...]) -> Iterator[Stall]:
        """Yields the ends of the chains that begin with `links` and continue with the waits of `service` for `what`.

        Each end is a stall if it lasts. A behavior that a wait names applies to the rest of the chain.
        """
        stage = self._stages.get(service)
        if stage is None:
            return  # it has not published yet; the supervisor watches for that
        wait = stage.wait_of(what, behavior)
        before = [(name, one.activity) for name, one in links]
        kind: Kind
        if wait is None:
            # A stage that was idle is not stuck before those who wait for it have waited that long themselves.
            asked = (self._stages[name].last_moved((one.activity,)) for name, one in links)
            moved = max(stage.last_moved(), *asked, -math.inf)
            root, kind, last = service, "stuck", _stuck(service, stage.queued)
        elif (service, wait.activity) in before:
            names = list(dict.fromkeys(name for name, _ in before[before.index((service, wait.activity)) :]))
            moved = max(self._stages[name].last_moved() for name in names)
            root, kind, last = ", ".join(names), "ring", "which closes the ring"
        elif wait.sources in ((SIMULATORS,), (DISK,)):
            moved = stage.last_moved((wait.activity, what))
            root, kind, last = wait.sources[0], "outside", _sentence((service, wait))
        else:
            for source in wait.sources:
                named = wait.what.partition("/")[2] or behavior
                yield from self._ends(now, source, wait.what.removeprefix(CREDIT), named, (*links, (service, wait)))
            return
        yield Stall(root=root, kind=kind, seconds=now - moved, chain=(*map(_sentence, links), last))


class StallHistory:
    """Counts the stalls of a period, and decides when each is reported.

    Args:
        again_s: seconds after which a lasting stall is reported again, and counts again.
        period_s: length of the period in seconds.
    """

    def __init__(self, again_s: float, period_s: float) -> None:
        self._again_s = again_s
        self._period_s = period_s
        self._reported: dict[str, float] = {}  # time of the last report by root
        self._counted: list[float] = []

    def news(self, stalls: Sequence[Stall], now: float) -> list[Stall]:
        """Returns those of the present stalls that must be reported now."""
        new = [one for one in stalls if now - self._reported.get(one.root, -math.inf) > self._again_s]
        self._reported |= {one.root: now for one in new}
        return new

    def over(self, stalls: Sequence[Stall]) -> list[str]:
        """Returns, once, the reported roots that are no longer among the present stalls."""
        resolved = [root for root in self._reported if root not in {one.root for one in stalls}]
        for root in resolved:
            del self._reported[root]
        return resolved

    def count(self, now: float) -> int:
        """Counts one stall; returns the number within the period."""
        self._counted = [at for at in (*self._counted, now) if now - at <= self._period_s]
        return len(self._counted)


def _queued(gauges: Mapping[str, float]) -> int:
    """Returns the messages in the queues that a service receives from."""
    ends = [name for name in gauges if name.startswith("queue.") and name.endswith(_QUEUED)]
    return sum(int(gauges[name]) for name in ends if not name.endswith(f".out{_QUEUED}"))


def _sentence(link: _Link) -> str:
    service, wait = link
    whence = wait.who or " or ".join(one for one in wait.sources if one != SIMULATORS)
    return f"{service} waits for {readable(wait.what)}" + (f" from {whence}" if whence else "")


def _stuck(service: str, queued: int) -> str:
    return f"{service} answers, but makes no progress" + (f"; {queued} messages wait for it" if queued else "")
