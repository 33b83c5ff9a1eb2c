"""Starts the services of a run, restarts those that fail, and ends the run.

consumes       the topics of all services: the end of training, heartbeats, names of behaviors, checkpoints
produces       processes (or tasks); `summary.json`; log lines for all that happens
waits for      the end of the run, the end of a process, a signal
unblocked by   coordination's "finished"; SIGINT or SIGTERM; a failure beyond the restart budget
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial

import anyio
from anyio.abc import TaskGroup
from structlog.typing import FilteringBoundLogger

from sparring.pipeline.errors import SparringError
from sparring.pipeline.messages.channels import ADDED, RUN, SPECS
from sparring.pipeline.messages.state import AddedBehaviors
from sparring.pipeline.monitoring import logs
from sparring.pipeline.monitoring.summary import Status
from sparring.pipeline.queues.interface import Publisher, Subscription, Transport
from sparring.pipeline.settings import started_by_hand
from sparring.services.process.hosting import HostedService
from sparring.services.process.runtime import SUPERVISOR
from sparring.services.supervision.byhand import relay
from sparring.services.supervision.exports import Exports
from sparring.services.supervision.hosts import Host, Launcher
from sparring.services.supervision.outcome import FinalReports, write_summary
from sparring.services.supervision.parts import Part, Parts
from sparring.services.supervision.shutdown import Shutdown
from sparring.services.supervision.simulators import SimulatorPlan
from sparring.services.supervision.topology import ServicePlan, Topology
from sparring.services.supervision.watchdog import LOOK_S, Watchdog

EXPORT_S = 60.0
"""The time for the exports of the last checkpoints."""

TOPIC_PACE_S = 0.25
"""Topics change hundreds of times a second; the decisions that are made here can wait that long."""


class Supervisor:
    """One run.

    Args:
        topology: what to run.
        host: starts the services.
        processes: starts the simulators.
        transport: carries the topics of the services.
        clock: seconds, only rising.
        grow: makes and writes the topology with further behaviors; None where there will be none.
        session: distinguishes the incarnations of this run's services from those of an earlier session.
        log: of the supervisor.
        handles_signals: SIGINT and SIGTERM end the run.
    """

    def __init__(
        self,
        topology: Topology,
        host: Host,
        processes: Launcher,
        transport: Transport,
        clock: Callable[[], float] = time.monotonic,
        grow: Callable[[Topology, Sequence[str]], Topology] | None = None,
        *,
        session: str = "",
        log: FilteringBoundLogger | None = None,
        handles_signals: bool = True,
    ) -> None:
        self._grow = grow
        self._topology = topology
        self._run = topology.run
        self._settings = topology.run.settings.pipeline
        self._host = host
        self._processes = processes
        self._transport = transport
        self._clock = clock
        self._log: FilteringBoundLogger = logs.get(service="supervisor") if log is None else log
        self._session = session or secrets.token_hex(3)
        self._handles_signals = handles_signals
        self._topics: dict[str, Subscription] = {}
        self._reports = FinalReports(self._topics)
        self._over = anyio.Event()
        self._status: Status = "completed"
        self._error: str | None = None
        self._signals = 0
        self.parts = Parts(self._settings.restarts, self._over, self._keeps, self._fail, clock, self._log)
        self._watchdog = Watchdog(topology, self.parts, self._topics, self._end, clock, self._log)
        steps = (self._keeps, self._incarnation, self._fail_late)
        self._shutdown = Shutdown(topology, self.parts, self._reports, *steps, clock, self._log)
        wanted = self._settings.export and topology.run.playing is None
        self._exports = (
            Exports(topology.run.directory, log=self._log, topics=self._topics, is_here=self._is_here)
            if wanted
            else None
        )

    async def supervise(self) -> Status:
        """Runs everything to its end, and writes the summary.

        Cancelled, it leaves nothing running and writes no summary.
        """
        began = self._clock()
        async with anyio.create_task_group() as tasks:
            for plan in self._topology.services:
                self._topics[plan.name] = await self._transport.subscribe(plan.name, TOPIC_PACE_S)
            if self._handles_signals:
                tasks.start_soon(self._follow_signals)
            for plan in self._topology.services:
                self.parts.keep(tasks, plan.name, partial(self._start_service, plan))
            if started_by_hand(self._run.settings):
                folder = self._run.directory / "logs"
                tasks.start_soon(relay, [folder / f"{one.name}.stderr" for one in self._topology.simulators], self._log)
            for simulator in self._topology.simulators:
                self.parts.keep(tasks, simulator.name, partial(self._start_simulator, simulator), simulator.restarts)
            if self._exports is not None:
                tasks.start_soon(self._exports.run)
            tasks.start_soon(self._follow_end)
            if self._grow is not None:
                tasks.start_soon(self._follow_names, tasks, self._grow)
            tasks.start_soon(self._watchdog.watch)
            tasks.start_soon(self._watchdog.trim)
            addresses = dict(self._run.addresses)
            self._log.info("run_started", folder=str(self._run.directory), addresses=addresses, notice=True)
            if not self._topology.simulators:
                self._log.info("waiting_for_simulators", addresses=list(addresses.values()), notice=True)
            await self._over.wait()
            with anyio.CancelScope(shield=True):
                await self._shutdown.stop_in_order()
                await self._last_exports()
            tasks.cancel_scope.cancel()
        self._write_summary(self._clock() - began)
        return self._status

    # ---------------------------------------------------------------- parts

    def _start_service(self, plan: ServicePlan, number: int) -> HostedService:
        return self._host.service(plan, self._incarnation(plan.name, number), first=number == 1)

    def _incarnation(self, name: str, number: int) -> str:
        return f"{name}.{self._session}-{number}"

    def _start_simulator(self, plan: SimulatorPlan, _number: int) -> HostedService:
        return self._processes.watched(plan.name, plan.command, plan.environment)

    def _keeps(self, part: Part) -> bool:
        """Returns whether a part is to run: at the end of a run, a service is until its turn to stop has come.

        What a service held when it died is counted once its next incarnation is known.
        """
        if part.stopping:
            return False
        in_order = self._status in ("completed", "stopped") and self._signals < 2
        return not self._over.is_set() or (in_order and part.name in self._run.services)

    # ---------------------------------------------------------------- behaviors that simulators name

    async def _follow_names(self, tasks: TaskGroup, grow: Callable[[Topology, Sequence[str]], Topology]) -> None:
        """Starts learners for behaviors that simulators name and the configuration does not.

        A behavior for which no learner can be started keeps only its own simulators waiting.
        """
        refused: set[str] = set()
        topic = await self._transport.publisher(SUPERVISOR)
        while not self._over.is_set():
            await anyio.sleep(LOOK_S)
            specs = [self._reports.of(name, SPECS) for name in self._run.stepping]
            named = {name for one in specs if one is not None for name in one.behaviors}
            names = sorted(named - self._run.settings.behaviors.keys() - refused)
            most = max(0, self._settings.limits.unnamed_behaviors - len(self._run.added))
            if len(names) > most:  # each stepping process applies the limit to its own simulators only
                self._log.error("too_many_behaviors", behaviors=names[most:], most=most, notice=True)
                refused.update(names[most:])
            if names := names[:most]:
                try:
                    topology = grow(self._topology, names)
                except (OSError, SparringError) as error:
                    refused.update(names)
                    self._log.error("no_learner", behaviors=names, error=str(error), notice=True)
                    if not self._run.settings.behaviors:
                        self._fail(f"no learner for {', '.join(names)}: {error}")
                    continue
                await self._adopt(topology, tasks, topic)
                self._log.info("behaviors_added", behaviors=names, cause="default_settings count for them", notice=True)

    async def _adopt(self, topology: Topology, tasks: TaskGroup, topic: Publisher) -> None:
        """Continues with a topology that has more behaviors: tells the services, and starts the new learners."""
        new = [plan for plan in topology.services if plan.name not in self._topics]
        topics = {plan.name: await self._transport.subscribe(plan.name, TOPIC_PACE_S) for plan in new}
        if self._over.is_set():
            return
        self._topology, self._run = topology, topology.run
        self._topics |= topics
        self._watchdog.adopt(topology)
        self._shutdown.adopt(topology)
        self._host.adopt(topology)
        topic.publish(ADDED, AddedBehaviors(names=topology.run.added))
        for plan in new:
            self.parts.keep(tasks, plan.name, partial(self._start_service, plan))

    # ---------------------------------------------------------------- exports

    def _is_here(self, service: str) -> bool:
        """Returns whether a service runs on this machine; `sparring join` exports the checkpoints of other learners."""
        return self._topology.place(service) == self._topology.host

    async def _last_exports(self) -> None:
        """Exports the last weights that the learners have saved, unless a second signal came."""
        if self._exports is not None and self._status in ("completed", "stopped"):
            await self._exports.finish(0.0 if self._signals > 1 else EXPORT_S)

    # ---------------------------------------------------------------- the end

    async def _follow_end(self) -> None:
        topic = self._topics["coordination"]
        while True:
            await topic.changed()
            state = topic.latest(RUN)
            if state is not None and state.finished:
                self._end("completed", None)
                return

    async def _follow_signals(self) -> None:
        try:
            receiver = anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM)
        except (NotImplementedError, RuntimeError):
            return
        with receiver as signals:
            async for _ in signals:
                self._signals += 1
                if self._signals > 1:
                    self._log.warning("stopped_at_once", notice=True)
                    self._shutdown.hurried = True
                    for part in self.parts:
                        part.stopping = True
                        if part.hosted is not None:
                            part.hosted.kill()
                else:
                    self._log.info("stopping", cause="signal", notice=True)
                    self._end("stopped", None)

    def _fail_late(self, error: str) -> None:
        """Fails a run whose end went wrong, so that something may not have been saved."""
        self._log.error("end_failed", error=error, notice=True)
        if self._status != "failed":
            self._status, self._error = "failed", error

    def _fail(self, error: str) -> None:
        self._log.error("run_failed", error=error, notice=True)
        self._end("failed", error)

    def _end(self, status: Status, error: str | None) -> None:
        if not self._over.is_set():
            self._status, self._error = status, error
            self._over.set()

    def _write_summary(self, wall_s: float) -> None:
        """Writes the summary; the run has failed where that fails."""
        if failure := write_summary(self._topology, self._reports, self._log, self._status, self._error, wall_s):
            self._fail_late(failure)
        path = self._run.directory / "summary.json"
        self._log.info("run_ended", status=self._status, summary=str(path), wall_s=round(wall_s, 1), notice=True)
