"""Keeps the writers of a run going, each in a process of its own; none of them ever ends the run.

consumes       the state that each writer saves; `summary.json`, once the run has ended
produces       processes, which it restarts, and kills where they hang; log lines for all that happens
waits for      the end of each process; a change of its state
unblocked by   these, or `pipeline.writer_limits.timeout_s`
"""

from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from sparring.pipeline.monitoring.events import unread
from sparring.pipeline.monitoring.writers.delivery import LOST, DeliveryState, load_state, state_path
from sparring.services.process import forking
from sparring.services.process.hosting import HostedService
from sparring.services.supervision.active_run import ActiveRun
from sparring.services.supervision.topology import RUN_FILE, WriterPlan

LOOK_S: Final = 0.5
START_S: Final = 30.0
"""Further seconds for the first sign of life of a process, which has the lowest priority."""
_SHOWN_S: Final = 2.0
"""The end of a run takes no longer than this without a word."""
_KILLED_S: Final = 5.0
_NEEDED: Final = RUN_FILE, "summary.json"
"""Files without which a writer cannot end."""


class Writers:
    """Runs the writers of a run.

    Args:
        active: the run.
    """

    def __init__(self, active: ActiveRun) -> None:
        self._active = active
        self._directory = active.topology.run.directory
        self._running: dict[str, HostedService | None] = {}  # None: it starts
        self._ending = anyio.Event()
        self._is_over = False
        self._done = anyio.Event()

    async def run(self) -> None:
        """Keeps all writers running until `finish`; cancelled, it kills them."""
        try:
            async with anyio.create_task_group() as tasks:
                for plan in self._active.topology.writers:
                    tasks.start_soon(self._keep, plan)
        finally:
            self._kill()
            self._done.set()

    async def finish(self) -> None:
        """Returns when the writers have written all of a run that has ended, or have no time left for it.

        What they leave unread is counted. `run` must have been started, and ends then.
        """
        active = self._active
        self._ending.set()
        limit_s = active.settings.writer_limits.timeout_s
        if not all((self._directory / name).exists() for name in _NEEDED):
            limit_s = 0.0
        with active.wait_scope(limit_s):
            with anyio.move_on_after(_SHOWN_S):
                await self._done.wait()
            if not self._done.is_set():
                active.log.info("waiting_for_writers", writers=[*self._running], at_most_s=limit_s, notice=True)
            await self._done.wait()
        self._kill()
        with anyio.move_on_after(_KILLED_S):
            await self._done.wait()
        for plan in active.topology.writers if not active.gone else ():
            await anyio.to_thread.run_sync(self._count, plan.writer)

    def _kill(self) -> None:
        self._is_over = True
        for hosted in self._running.values():
            hosted.kill() if hosted is not None else forking.abandon()

    def _count(self, writer: str) -> None:
        """Counts the events that a writer has not read, and reports all that it has not got."""
        path = state_path(self._directory, writer)
        state = load_state(path) or DeliveryState()
        state.add("interrupted", int(state.is_calling))  # it was killed with an event in hand
        state.is_calling = False
        if state.positions or not self._active.topology.run.resumed:
            state.add("unread", unread(self._directory, state.positions))
        if not any(state.counts.get(outcome) for outcome in LOST):
            return
        self._active.log.warning("events_not_written", writer=writer, **state.counts, notice=True)
        try:
            path.parent.mkdir(exist_ok=True)  # where no writer has begun
            state.save(path)
        except OSError as error:
            self._active.log.info("not_written", what=str(path), error=str(error))

    async def _keep(self, plan: WriterPlan) -> None:
        """Restarts a writer until the run has ended; one that fails too often is left alone for a while."""
        active, failures, starts = self._active, list[float](), 0
        usual, budget = active.settings.restarts, active.settings.writer_limits.failures
        while True:
            starts += 1
            self._running[plan.writer] = None
            try:
                incarnation = active.incarnation(plan.name, starts)
                hosted = await active.host.start(plan, incarnation, first=starts == 1)
            except OSError as error:
                del self._running[plan.writer]
                if not isinstance(error, forking.Abandoned):
                    active.log.warning("writer_not_started", writer=plan.writer, error=str(error), notice=True)
                return
            self._running[plan.writer] = hosted
            if self._is_over:
                hosted.kill()
            failure = await self._end_of(plan, hosted)
            if not failure and not (self._directory / "summary.json").exists():
                failure = "exit status 0 before the end of the run"
            del self._running[plan.writer]
            now = active.clock()
            failures = [at for at in failures if now - at <= usual.period_s] + [now]
            if not failure or self._is_over or (self._ending.is_set() and len(failures) > budget):
                return
            log = self._directory / "logs" / f"{plan.name}.jsonl"
            if hosted.hopeless:
                active.log.warning("writer_given_up", writer=plan.writer, error=failure, log=str(log), notice=True)
                return
            pause_s = min(usual.backoff_max_s, usual.backoff_s * 2 ** (len(failures) - 1))
            pause_s = pause_s if len(failures) <= budget else usual.period_s
            known = {"writer": plan.writer, "error": failure, "again_in_s": pause_s, "log": str(log)}
            active.log.warning("writer_failed", **known, notice=True)
            with anyio.move_on_after(pause_s):
                await self._ending.wait()

    async def _end_of(self, plan: WriterPlan, hosted: HostedService) -> str:
        """Returns how a process has ended, as `HostedService.wait` does."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, plan, hosted)
            failure = await hosted.wait()
            tasks.cancel_scope.cancel()
        return failure

    async def _watch(self, plan: WriterPlan, hosted: HostedService) -> None:
        """Kills a process that shows no life for too long. A pause of this process is not counted."""
        active, path = self._active, state_path(self._directory, plan.writer)
        limit_s = active.settings.writer_limits.timeout_s
        last, silent_s, looked = _changed(path), -START_S, active.clock()
        while True:
            await anyio.sleep(LOOK_S)
            now = active.clock()
            if (changed := _changed(path)) != last:
                last, silent_s = changed, 0.0
            silent_s += min(now - looked, 2 * LOOK_S)
            looked = now
            if silent_s > limit_s:
                active.log.warning("writer_hangs", writer=plan.writer, seconds=limit_s, notice=True)
                hosted.kill()
                return


def _changed(path: Path) -> int:
    """Returns the time of a file's last change; 0 where there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
