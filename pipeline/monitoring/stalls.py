"""Which stage keeps all others, judged from what they publish.

Every stage says what it waits for and from whom (`Metrics.waits`), and what it has passed on (counters `passed.*`).
Who needs something asks down that chain, from a learner on, until there is one that waits for nobody: it is *stuck*
where its watermarks stand still although it works; or for the simulators or the disk, which are *outside*; or for one
that is in the chain already, a *ring*. A chain whose end has not moved for a set time is a stall. A stage that merely
waits for another is never to blame, and one that nobody waits for is not looked at.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from sparring.pipeline.messages.metrics import Metrics, Wait
from sparring.pipeline.monitoring.progress import ALL, CREDIT, DISK, PASSED, SIMULATORS, readable

Kind = Literal["stuck", "ring", "outside"]
_WORST: Final = ("stuck", "ring", "outside")

PAUSE_S: Final = 5.0
"""Who looks less often than this was paused itself, and has to hear the others first."""

_QUEUED: Final = ".messages"
_Link = tuple[str, Wait]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """Something has not gone on for too long.

    Attributes:
        root: the service that is to blame, `SIMULATORS`, `DISK`, or the services of a ring with commas between.
        kind: it is stuck, a ring, or outside.
        seconds: since anything moved there.
        chain: who waits for what from whom, the first one being a learner.
    """

    root: str
    kind: Kind
    seconds: float
    chain: tuple[str, ...]

    @property
    def text(self) -> str:
        """In one line for a reader."""
        return f"{self.root}: nothing has moved for {self.seconds:.0f} s; " + "; ".join(self.chain)


@dataclass(slots=True)
class _Stage:
    """What is known of a service.

    Attributes:
        waits: by activity.
        passed: counts by product.
        moved: when each activity or product last changed.
        queued: messages that have arrived for it and that it has not taken.
    """

    start: str
    born: float
    waits: dict[str, Wait] = field(default_factory=dict)
    passed: dict[str, float] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)
    queued: int = 0

    def update(self, metrics: Metrics, now: float) -> None:
        waits = {wait.activity: wait for wait in metrics.waits}
        passed = {
            name.removeprefix(PASSED): count for name, count in metrics.counters.items() if name.startswith(PASSED)
        }
        for activity in waits.keys() | self.waits.keys():
            if _demand(waits.get(activity)) != _demand(self.waits.get(activity)):
                self.moved[activity] = now
        for product in passed:
            if passed[product] != self.passed.get(product):
                self.moved[product] = now
        self.waits, self.passed, self.queued = waits, passed, _queued(metrics.gauges)

    def wait_of(self, what: str, behavior: str) -> Wait | None:
        """The wait that keeps it from giving `what`, in the end for a behavior; None where it works."""
        kind = what.partition("/")[0]
        names = (ALL, what, f"{kind}/{behavior}", kind)
        return next((self.waits[name] for name in names if name in self.waits), None)

    def last_moved(self, names: Iterable[str] | None = None) -> float:
        """When one of the activities or products last changed; of all by default."""
        wanted = self.moved if names is None else [name for name in names if name in self.moved]
        return max((self.moved[name] for name in wanted), default=self.born)


@dataclass(frozen=True, slots=True)
class _StallEnd:
    kind: Kind
    root: str
    moved: float
    chain: tuple[str, ...]


class Stalls:
    """Judges all stages of a run.

    Args:
        sinks: services at the end of the flow: the learners, or who takes their place.
        timeout_s: seconds without a move that make a stall.
    """

    def __init__(self, sinks: Sequence[str], timeout_s: float) -> None:
        self._sinks = sinks
        self._timeout_s = timeout_s
        self._stages: dict[str, _Stage] = {}
        self._looked: float | None = None

    def update(self, metrics: Metrics, now: float) -> None:
        """Takes in what a service has published, as often as is liked.

        Args:
            metrics: of it.
            now: seconds, only rising.
        """
        stage = self._stages.get(metrics.service)
        if stage is None or stage.start != metrics.start:
            stage = self._stages[metrics.service] = _Stage(metrics.start, born=now)
        stage.update(metrics, now)

    def look(self, now: float) -> list[Stall]:
        """What is stalled now, one for each root. To be asked every second or so: a longer gap was our own pause."""
        gap = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        if gap > PAUSE_S:
            for stage in self._stages.values():
                stage.born += gap
                stage.moved = {name: min(now, moved + gap) for name, moved in stage.moved.items()}
        found: dict[str, Stall] = {}
        for sink in self._sinks:
            ends = list(self._ends(sink, ALL, "", ()))
            if not ends or any(now - end.moved <= self._timeout_s for end in ends):
                continue
            end = min(ends, key=lambda end: _WORST.index(end.kind))
            found.setdefault(end.root, Stall(root=end.root, kind=end.kind, seconds=now - end.moved, chain=end.chain))
        return list(found.values())

    # ---------------------------------------------------------------- inside

    def _ends(self, service: str, what: str, behavior: str, links: tuple[_Link, ...]) -> Iterator[_StallEnd]:
        """Where the chains end that begin with `links` and go on with what `service` needs to give `what`.

        What is asked for last of a named behavior is meant for that one further on too.
        """
        stage = self._stages.get(service)
        if stage is None:
            return  # not heard of yet: who starts services watches that
        wait = stage.wait_of(what, behavior)
        if wait is None:
            chain = (*map(_sentence, links), _stuck(service, stage.queued))
            yield _StallEnd("stuck", service, stage.last_moved(), chain)
            return
        ring = [
            place for place, (name, before) in enumerate(links) if (name, before.activity) == (service, wait.activity)
        ]
        if ring:
            yield self._ring(links, ring[0])
            return
        links = (*links, (service, wait))
        if wait.sources in ((SIMULATORS,), (DISK,)):
            moved = stage.last_moved((wait.activity, what))
            yield _StallEnd("outside", wait.sources[0], moved, tuple(map(_sentence, links)))
            return
        for source in wait.sources:
            named = wait.what.partition("/")[2] or behavior
            yield from self._ends(source, wait.what.removeprefix(CREDIT), named, links)

    def _ring(self, links: tuple[_Link, ...], first: int) -> _StallEnd:
        names = list(dict.fromkeys(name for name, _ in links[first:]))
        moved = max(self._stages[name].last_moved() for name in names)
        return _StallEnd("ring", ", ".join(names), moved, (*map(_sentence, links), "which closes the ring"))


class StallBudget:
    """When a stall is reported, and when there were too many.

    Args:
        again_s: a stall that goes on is reported again after so many seconds, and counts again.
        budget: how many may count within `period_s` seconds.
        period_s: these seconds.
    """

    def __init__(self, again_s: float, budget: int, period_s: float) -> None:
        self._again_s = again_s
        self._budget = budget
        self._period_s = period_s
        self._told: dict[str, float] = {}  # by root, when it was reported last
        self._counted: deque[float] = deque()

    def news(self, stalls: Sequence[Stall], now: float) -> list[Stall]:
        """Those of the present stalls that are to be reported now."""
        new = [one for one in stalls if now - self._told.get(one.root, -math.inf) > self._again_s]
        self._told |= {one.root: now for one in new}
        return new

    def over(self, stalls: Sequence[Stall]) -> list[str]:
        """Roots that were reported and are no longer among the present stalls; told once."""
        gone = [root for root in self._told if root not in {one.root for one in stalls}]
        for root in gone:
            del self._told[root]
        return gone

    def count(self, now: float) -> int:
        """Counts one stall; returns how many there were within the period."""
        self._counted.append(now)
        while now - self._counted[0] > self._period_s:
            self._counted.popleft()
        return len(self._counted)

    @property
    def exhausted(self) -> bool:
        """Whether more were counted than the budget allows."""
        return len(self._counted) > self._budget


def _demand(wait: Wait | None) -> tuple[str, tuple[str, ...]] | None:
    return None if wait is None else (wait.what, wait.sources)


def _queued(gauges: Mapping[str, float]) -> int:
    """Messages in the queues that a service takes from."""
    ends = [name for name in gauges if name.startswith("queue.") and name.endswith(_QUEUED)]
    return sum(int(gauges[name]) for name in ends if not name.endswith(f".out{_QUEUED}"))


def _sentence(link: _Link) -> str:
    service, wait = link
    return f"{service} waits for {readable(wait.what)} from {wait.who or ' or '.join(wait.sources)}"


def _stuck(service: str, queued: int) -> str:
    return f"{service} answers, but gets no further" + (f"; {queued} messages wait for it" if queued else "")
