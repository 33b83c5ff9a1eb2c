"""Services and simulators that are kept running: started again and again, with time between, within a budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import TaskGroup

from sparring.pipeline.settings.pipeline import RestartSettings
from sparring.services.process.hosting import HostedService
from sparring.services.supervision.topology import Restarts


@dataclass
class Part:
    """A service or simulator that is kept running.

    Attributes:
        name: as "learning-Ball".
        start: starts it once; gets the number of the start.
        restarts: how often it may fail.
        hosted: its present start.
        starts: how often it was started.
        failures: when it failed lately.
        slow: starts in a row that took too long.
        stopping: it is being ended: its end is no failure.
        failure: what went wrong while it was being ended; "" for nothing.
        gone: its last start ended while the run did, without having been asked to or in another way than that.
        died: some start of it did.
        renewed: the start that ends because another one is wanted.
        down: it has failed, and its next start has not begun.
        ended: it is not started any more.
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
    renewed: int = 0
    down: bool = False
    ended: anyio.Event = field(default_factory=anyio.Event)


class Parts:
    """The parts of a run.

    Args:
        usual: how often a part may fail where nothing else is said, and how long to wait before the next start.
        over: set when the run ends: nobody waits any more.
        keeps: whether a part is still to run.
        fail: called with what cannot be mended by another start.
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
        log: Any,
    ) -> None:
        self._usual = usual
        self._over = over
        self._keeps = keeps
        self._fail = fail
        self._clock = clock
        self._log = log
        self._parts: dict[str, Part] = {}

    def __getitem__(self, name: str) -> Part:
        """A part by its name."""
        return self._parts[name]

    def get(self, name: str) -> Part | None:
        """A part by its name; None where there is none."""
        return self._parts.get(name)

    def __iter__(self) -> Iterator[Part]:
        """All of them."""
        return iter(self._parts.values())

    def keep(
        self, tasks: TaskGroup, name: str, start: Callable[[int], HostedService], restarts: Restarts | None = None
    ) -> None:
        """Keeps a part running.

        Args:
            tasks: where the task that does so lives.
            name: of the part.
            start: starts it once; gets the number of the start.
            restarts: how often it may fail; None for the usual.
        """
        part = Part(name, start, restarts or Restarts(budget=self._usual.budget, period_s=self._usual.period_s))
        self._parts[name] = part
        tasks.start_soon(self._run, part)

    def renew(self, name: str) -> None:
        """Ends the present start of a part, and starts it again at once; that is no failure."""
        part = self._parts[name]
        part.renewed = part.starts
        if part.hosted is not None:
            part.hosted.kill()

    async def _run(self, part: Part) -> None:
        """Starts a part again and again, until it is stopped or fails too often."""
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
                if part.renewed == part.starts and not self._over.is_set():
                    continue
                if not self._keeps(part) or not await self._may_restart(part, failure):
                    return
        finally:
            part.ended.set()

    async def _may_restart(self, part: Part, failure: str) -> bool:
        """Waits before the next start; False where there is none."""
        assert part.hosted is not None
        limits, usual = part.restarts, self._usual
        said = failure or "ended without being asked to"
        now = self._clock()
        part.failures.append(now)
        while part.failures and now - part.failures[0] > limits.period_s:
            part.failures.popleft()
        self._log.warning("failed", part=part.name, error=said, failures=len(part.failures), notice=True)
        if part.hosted.hopeless or len(part.failures) > limits.budget or part.starts > limits.lifetime:
            within = len(part.failures) <= limits.budget
            times = f" {part.starts} times" if within else f" {len(part.failures)} times in {limits.period_s:g} s"
            often = "" if part.hosted.hopeless else times
            part.gone = part.died = True
            self._fail(f"{part.name} failed{often}: {said}")
            return False
        wait_s = min(usual.backoff_max_s, usual.backoff_s * 2 ** (len(part.failures) - 1))
        with anyio.move_on_after(wait_s):
            await self._over.wait()
        return self._keeps(part)
