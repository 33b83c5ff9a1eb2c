"""Services and simulators that are kept running: restarted with growing pauses, within a budget."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import anyio
from anyio.abc import TaskGroup
from structlog.typing import FilteringBoundLogger

from sparring.pipeline.settings.pipeline import RestartSettings
from sparring.services.process.hosting import HostedService


@dataclass(frozen=True, kw_only=True, slots=True)
class Restarts:
    """How often a part may be restarted before the run ends.

    Attributes:
        budget: times within `period_s`.
        period_s: seconds.
        lifetime: times in all.
    """

    budget: float
    period_s: float
    lifetime: float = math.inf


@dataclass
class Part:
    """A service or simulator that is kept running.

    Attributes:
        name: as "learning-Ball".
        start: starts an incarnation, given its number from 1.
        restarts: how often it may fail.
        hosted: the present incarnation.
        starts: number of the present incarnation.
        failures: times of its failures within the period.
        slow: incarnations in a row that took too long to answer.
        stopping: it is being ended, so that its end is no failure.
        failure: what went wrong while it was being ended; "" for nothing.
        gone: its last incarnation failed, or ended without a request, while the run ended.
        died: that is true of any of its incarnations.
        down: it has failed, and its next incarnation has not begun.
        ended: set when it is not started any more.
    """

    name: str
    start: Callable[[int], HostedService]
    restarts: Restarts
    hosted: HostedService | None = None
    starts: int = 0
    started_at: float = 0.0
    failures: deque[float] = field(default_factory=deque)
    slow: int = 0
    stopping: bool = False
    failure: str = ""
    gone: bool = False
    died: bool = False
    down: bool = False
    ended: anyio.Event = field(default_factory=anyio.Event)


class Parts:
    """The parts of a run.

    Args:
        usual: default limits of restarts, and the pauses before them.
        over: set when the run ends; pauses end then.
        keeps: whether a part is still to run.
        fail: called with a failure that a restart cannot repair.
        clock: seconds, only rising.
        log: of the supervisor.
    """

    def __init__(
        self,
        usual: RestartSettings,
        over: anyio.Event,
        keeps: Callable[[Part], bool],
        fail: Callable[[str], None],
        clock: Callable[[], float],
        log: FilteringBoundLogger,
    ) -> None:
        self._usual = usual
        self._over = over
        self._keeps = keeps
        self._fail = fail
        self._clock = clock
        self._log = log
        self._parts: dict[str, Part] = {}

    def __getitem__(self, name: str) -> Part:
        """Returns a part by its name."""
        return self._parts[name]

    def get(self, name: str) -> Part | None:
        """Returns a part by its name; None where there is none."""
        return self._parts.get(name)

    def __iter__(self) -> Iterator[Part]:
        """Iterates over all parts."""
        return iter(self._parts.values())

    def keep(
        self, tasks: TaskGroup, name: str, start: Callable[[int], HostedService], restarts: Restarts | None = None
    ) -> None:
        """Keeps a part running.

        Args:
            tasks: group that keeps it running.
            name: of the part.
            start: starts an incarnation, given its number from 1.
            restarts: how often it may fail; None for the usual limits.
        """
        part = Part(name, start, restarts or Restarts(budget=self._usual.budget, period_s=self._usual.period_s))
        self._parts[name] = part
        tasks.start_soon(self._run, part)

    async def _run(self, part: Part) -> None:
        """Restarts a part until it is stopped or fails too often."""
        try:
            while self._keeps(part):
                part.starts += 1
                part.started_at = self._clock()
                try:
                    part.hosted = part.start(part.starts)
                except OSError as error:
                    self._fail(f"{part.name} cannot be started: {error}")
                    return
                part.down = False
                self._log.info("started", part=part.name, start=part.starts, pid=part.hosted.pid)
                failure = await part.hosted.wait()
                part.gone = self._over.is_set() and (bool(failure) or not part.stopping)
                part.died |= part.gone
                if part.stopping:
                    part.failure = failure
                    return
                part.down = True
                if not self._keeps(part) or not await self._may_restart(part, failure):
                    return
        finally:
            part.ended.set()

    async def _may_restart(self, part: Part, failure: str) -> bool:
        """Waits before a restart; returns False where there is none."""
        assert part.hosted is not None
        limits, usual = part.restarts, self._usual
        error = failure or "ended without a request to stop"
        now = self._clock()
        part.failures.append(now)
        while part.failures and now - part.failures[0] > limits.period_s:
            part.failures.popleft()
        self._log.warning("failed", part=part.name, error=error, failures=len(part.failures), notice=True)
        if part.hosted.hopeless or len(part.failures) > limits.budget or part.starts > limits.lifetime:
            within = len(part.failures) <= limits.budget
            times = f" {part.starts} times" if within else f" {len(part.failures)} times in {limits.period_s:g} s"
            often = "" if part.hosted.hopeless else times
            part.gone = part.died = True
            self._fail(f"{part.name} failed{often}: {error}")
            return False
        wait_s = min(usual.backoff_max_s, usual.backoff_s * 2 ** (len(part.failures) - 1))
        with anyio.move_on_after(wait_s):
            await self._over.wait()
        return self._keeps(part)
