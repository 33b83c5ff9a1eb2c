"""Starts the services of a run, watches them, restarts them, stops them in order.

consumes       the boards of all services: what coordination says of the end, that each answers
produces       processes (or tasks); `summary.json`; log lines for all that happens
waits for      the end of the run, the end of a process, a signal
unblocked by   coordination's "finished"; SIGINT or SIGTERM; a failure beyond the restart budget
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from sparring.pipeline.errors import SparringError
from sparring.pipeline.messages.metrics import Metrics
from sparring.pipeline.messages.state import AssemblyState, BehaviorSpecs, LearnerState, RunState, SteppingState
from sparring.pipeline.monitoring import logs
from sparring.pipeline.monitoring.progress import SIMULATORS
from sparring.pipeline.monitoring.rotation import full, trim
from sparring.pipeline.monitoring.stalls import Stall, StallBudget, Stalls
from sparring.pipeline.monitoring.summary import Status
from sparring.pipeline.monitoring.writing import COUNTER
from sparring.pipeline.queues.interface import Subscription, Transport
from sparring.pipeline.settings import started_by_hand
from sparring.services.process.hosting import HostedService
from sparring.services.process.machines import RemotePart
from sparring.services.supervision.byhand import relay
from sparring.services.supervision.exports import Exports
from sparring.services.supervision.outcome import FinalReports, SummaryWriter
from sparring.services.supervision.parts import Part, Parts
from sparring.services.supervision.topology import ServicePlan, SimulatorPlan, Topology

HANG_S = 9.0
"""A service that answered once and then not for this long is taken for dead: known within 10 s."""

LOOKER_S = 30.0
"""The same for the monitor, which nobody waits for and which lets all others go first."""

START_S = 90.0
"""A service that has not answered this long after its start is taken for dead; the next start gets twice the time."""

EXPORT_S = 60.0
"""For the exports of the last checkpoints."""

WRITES_S = 10.0
"""How often a service that cannot write is told of."""

_STANDS: Final = (
    ("state", SteppingState, "source"),
    ("state", AssemblyState, "origin"),
    ("run", RunState, "start"),
    ("state", LearnerState, "start"),
)
"""What services say of where they stand: key, record, and which of its values is the start of the service."""
_LOOK_S = 0.5
_TURN_S = 0.05
_PAUSE_S = 5.0
"""Who looks less often than this was paused itself, with the machine or alone."""
_TRIM_S = 2.0
"""A file that others write can pass its bound by what they write in that time."""
BOARD_PACE_S = 0.25
"""Boards change hundreds of times a second; what is decided here can wait that long."""


class Host(Protocol):
    """Starts services, as processes or tasks."""

    def service(self, plan: ServicePlan, start: str, *, first: bool) -> HostedService:
        """Starts one service."""

    def adopt(self, topology: Topology) -> None:
        """Starts services of another topology from now on."""


class Launcher(Protocol):
    """Starts simulators."""

    def watched(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> HostedService:
        """Starts a foreign program that ends with us."""


class Supervisor:
    """One run.

    Args:
        topology: what to run.
        host: where the services run.
        processes: where simulators run.
        transport: to hear the services.
        clock: seconds, only rising.
        grow: makes and writes the topology with further behaviors; None where there will be none.
    """

    def __init__(
        self,
        topology: Topology,
        host: Host,
        processes: Launcher,
        transport: Transport,
        clock: Callable[[], float] = time.monotonic,
        grow: Callable[[Topology, Sequence[str]], Topology] | None = None,
    ) -> None:
        self._grow = grow
        self._topology = topology
        self._run = topology.run
        self._settings = topology.run.settings.pipeline
        self._host = host
        self._processes = processes
        self._transport = transport
        self._clock = clock
        self._log = logs.get(service="supervisor")
        self._session = secrets.token_hex(3)
        self._boards: dict[str, Subscription] = {}
        self._words = FinalReports(self._boards)
        self._over = anyio.Event()
        self._parts = Parts(self._settings.restarts, self._over, self._keeps, self._fail, clock, self._log)
        self._status: Status = "completed"
        self._error: str | None = None
        self._signals = 0
        self._given_up: dict[tuple[str, str], int] = {}  # by start of stepping and number of the simulator
        self._stopping_since = 0.0
        self._unwritten: dict[str, tuple[float, float]] = {}  # by service, failed writes told of, and when
        self._by_hand = len(started_by_hand(topology.run.settings))
        self._launches = len(topology.simulators) > self._by_hand  # others come when they like
        limits = self._settings.stalls
        self._stalls = Stalls(self._run.sinks, self._settings.stall_timeout_s)
        self._patience = StallBudget(self._settings.stall_timeout_s, limits.budget, limits.period_s)
        wanted = self._settings.export and topology.run.playing is None
        self._exports = Exports(topology.run.directory, log=self._log) if wanted else None

    async def supervise(self) -> Status:
        """Runs everything to its end, and writes the summary.

        Cancelled: nothing is left running; no summary is written.
        """
        began = self._clock()
        async with anyio.create_task_group() as tasks:
            for plan in self._topology.services:
                self._boards[plan.name] = await self._transport.subscribe(plan.name, BOARD_PACE_S)
            tasks.start_soon(self._signalled)
            for plan in self._topology.services:
                self._parts.keep(tasks, plan.name, partial(self._start_service, plan))
            if self._by_hand:
                folder = self._run.directory / "logs"
                tasks.start_soon(relay, [folder / f"{one.name}.stderr" for one in self._topology.simulators], self._log)
            for simulator in self._topology.simulators:
                self._parts.keep(tasks, simulator.name, partial(self._start_simulator, simulator), simulator.restarts)
            if self._exports is not None:
                tasks.start_soon(self._exports.run)
                tasks.start_soon(self._follow_checkpoints, self._exports)
            tasks.start_soon(self._follow_end)
            if self._grow is not None:
                tasks.start_soon(self._follow_names, tasks, self._grow)
            tasks.start_soon(self._watch)
            tasks.start_soon(self._trim)
            self._log.info(
                "run_started",
                folder=str(self._run.directory),
                addresses=dict(self._run.addresses),
                notice=True,
            )
            if not self._topology.simulators:
                self._log.info("waiting_for_simulators", addresses=list(self._run.addresses.values()), notice=True)
            await self._over.wait()
            with anyio.CancelScope(shield=True):
                await self._stop_in_order()
                await self._last_exports()
            tasks.cancel_scope.cancel()
        self._tell(self._clock() - began)
        return self._status

    # ---------------------------------------------------------------- parts

    def _start_service(self, plan: ServicePlan, number: int) -> HostedService:
        return self._host.service(plan, self._label(plan.name, number), first=number == 1)

    def _label(self, name: str, number: int) -> str:
        return f"{name}.{self._session}-{number}"

    def _start_simulator(self, plan: SimulatorPlan, _number: int) -> HostedService:
        return self._processes.watched(plan.name, plan.command, plan.environment)

    def _keeps(self, part: Part) -> bool:
        """Whether a part is to run: at the end of a run a service still is until its turn has come to be stopped.

        What one that died had held is counted when the next start of it is heard of.
        """
        if part.stopping:
            return False
        in_order = self._status in ("completed", "stopped") and self._signals < 2
        return not self._over.is_set() or (in_order and part.name in self._run.services)

    # ---------------------------------------------------------------- what ends a run

    async def _follow_end(self) -> None:
        topic = self._boards["coordination"]
        while True:
            await topic.changed()
            state = topic.latest.get("run")
            if isinstance(state, RunState) and state.finished:
                self._end("completed", None)
                return

    async def _follow_names(self, tasks: TaskGroup, grow: Callable[[Topology, Sequence[str]], Topology]) -> None:
        """Starts learners for behaviors that simulators name and the configuration does not.

        One that can have none keeps its simulators waiting, and nobody else.
        """
        refused: set[str] = set()
        while not self._over.is_set():
            await anyio.sleep(_LOOK_S)
            said = [self._words.of(name, "specs", BehaviorSpecs) for name in self._run.stepping]
            named = {name for specs in said if specs is not None for name in specs.behaviors}
            names = sorted(named - self._run.settings.behaviors.keys() - refused)
            room = max(0, self._settings.limits.unnamed_behaviors - len(self._run.added))
            if len(names) > room:  # of several stepping processes, which know of each other's only now
                self._log.error("too_many_behaviors", behaviors=names[room:], most=room, notice=True)
                refused.update(names[room:])
            if names := names[:room]:
                try:
                    topology = grow(self._topology, names)
                except (OSError, SparringError) as error:
                    refused.update(names)
                    self._log.error("no_learner", behaviors=names, error=str(error), notice=True)
                    if not self._run.settings.behaviors:
                        self._fail(f"no learner for {', '.join(names)}: {error}")
                    continue
                await self._adopt(topology, tasks)
                self._log.info("behaviors_added", behaviors=names, cause="default_settings count for them", notice=True)

    async def _adopt(self, topology: Topology, tasks: TaskGroup) -> None:
        """Goes on with a topology that has grown.

        What lies between stepping and the learners is started anew, as after a crash: it then knows of all queues. The
        new learners come after it, so that no step is on its way to a start that ends.
        """
        known = {plan.name for plan in self._topology.services}
        new = [plan for plan in topology.services if plan.name not in known]
        topics = {plan.name: await self._transport.subscribe(plan.name, BOARD_PACE_S) for plan in new}
        between = [self._parts[name] for name in ("assembly", "coordination", "monitor")]
        former = [part.starts for part in between]
        if self._over.is_set():
            return
        self._topology, self._run = topology, topology.run
        self._stalls = Stalls(self._run.sinks, self._settings.stall_timeout_s)
        self._host.adopt(topology)
        for part in between:
            self._parts.renew(part.name)
        with anyio.move_on_after(START_S):
            for part, starts in zip(between, former, strict=True):
                while part.starts == starts or not self._is_counted(part):  # noqa: ASYNC110 (boards)
                    await anyio.sleep(_TURN_S)
        if not self._over.is_set():
            self._boards |= topics
            for plan in new:
                self._parts.keep(tasks, plan.name, partial(self._start_service, plan))

    async def _follow_checkpoints(self, exports: Exports) -> None:
        """Has every new checkpoint exported."""
        while True:
            self._show_checkpoints(exports)
            await anyio.sleep(_LOOK_S)

    def _show_checkpoints(self, exports: Exports) -> None:
        for name in self._run.learners:
            if self._topology.place(f"learning-{name}") != self._topology.host:
                continue  # exported where it is
            state = self._words.of(f"learning-{name}", "state", LearnerState)
            if state is not None:
                exports.saw(name, state.checkpoint)

    async def _last_exports(self) -> None:
        """The learners have saved their last weights: these are exported too, unless the user is in a hurry."""
        if self._exports is not None and self._status in ("completed", "stopped"):
            self._show_checkpoints(self._exports)
            await self._exports.finish(0.0 if self._signals > 1 else EXPORT_S)

    async def _signalled(self) -> None:
        try:
            receiver = anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM)
        except (NotImplementedError, RuntimeError):
            return
        with receiver as signals:
            async for _ in signals:
                self._signals += 1
                if self._signals > 1:
                    self._log.warning("stopped_at_once", notice=True)
                    for part in self._parts:
                        part.stopping = True
                        if part.hosted is not None:
                            part.hosted.kill()
                else:
                    self._log.info("stopping", cause="signal", notice=True)
                    self._end("stopped", None)

    def _spoil(self, error: str) -> None:
        """The end itself failed: what was to be kept may not have been."""
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

    async def _watch(self) -> None:
        """Kills services that do not answer, and deals with what does not go on."""
        looked = awake = self._clock()
        while True:
            await anyio.sleep(_LOOK_S)
            now = self._clock()
            if now - looked > _PAUSE_S:  # paused ourselves: what the others said meanwhile is still to be read
                awake = now
            looked = now
            for name, topic in self._boards.items():
                self._check_answers(self._parts[name], topic, now, awake)
                self._check_writes(name, topic, now)
                metrics = topic.latest.get("metrics")
                if isinstance(metrics, Metrics) and name in self._run.services:
                    self._stalls.update(metrics, now)
            self._check_simulators(now)
            self._check_progress(self._stalls.look(now), now)

    async def _trim(self) -> None:
        """Keeps within their bounds the files that others write: standard error of all parts, logs of Unity players."""
        bounds, folder = self._settings.logs, self._run.directory
        while True:
            await anyio.sleep(_TRIM_S)
            for path in (*folder.glob("logs/*.stderr"), *folder.glob("run_logs/*.log")):
                if full(path, bounds.most_bytes):
                    await self._trim_one(path, bounds.kept)

    async def _trim_one(self, path: Path, kept: int) -> None:
        try:
            lost = await anyio.to_thread.run_sync(trim, path, kept)
        except OSError as error:
            self._log.warning("not_put_aside", file=str(path), error=str(error))
        else:
            self._log.info("put_aside", file=str(path), lost_bytes=lost)

    def _check_answers(self, part: Part, topic: Subscription, now: float, awake: float) -> None:
        if isinstance(part.hosted, RemotePart) and not part.hosted.ordered:
            part.started_at = now  # its machine is not here yet, which has a deadline of its own
            return
        since = min(topic.heard_age, now - part.started_at, now - awake)
        usual = HANG_S if part.name in self._run.services else LOOKER_S
        starting = topic.heard_age >= now - part.started_at
        # A machine that is too busy for the start has been no faster for the next one: each is given twice the time.
        limit = START_S * 2**part.slow if starting else usual
        part.slow = part.slow if starting else 0
        if part.hosted is not None and since > limit and not part.stopping:
            self._log.warning("silent", part=part.name, seconds=round(since, 1), notice=True)
            part.started_at = now
            part.slow += starting
            part.hosted.kill()

    def _check_simulators(self, now: float) -> None:
        """Ends simulators of ours that stepping has given up: one that hangs would never come back by itself."""
        for name in self._run.stepping:
            state = self._words.of(name, "state", SteppingState)
            for number, times in {} if state is None else state.given_up.items():
                key = (state.source, number)
                fresh, self._given_up[key] = times > self._given_up.get(key, 0), times
                part = self._parts.get(f"simulator-{number}")  # none that was started by hand
                limit_s = self._settings.simulator_timeout_s
                if fresh and part is not None and part.hosted is not None and now - part.started_at > limit_s:
                    self._log.warning("silent", part=part.name, seconds=limit_s, notice=True)
                    part.hosted.kill()

    def _check_writes(self, name: str, topic: Subscription, now: float) -> None:
        """Tells of a service that cannot write: on a full disk its own log cannot either."""
        metrics = topic.latest.get("metrics")
        count = metrics.counters.get(COUNTER, 0) if isinstance(metrics, Metrics) else 0
        told, at = self._unwritten.get(name, (0, -WRITES_S))
        if count > told and now - at >= WRITES_S:
            self._unwritten[name] = count, now
            self._log.warning("not_written", part=name, times=count, folder=str(self._run.directory), notice=True)

    def _check_progress(self, stalls: list[Stall], now: float) -> None:
        """Reports stalls, restarts a service that is stuck, and ends a run with too many of them."""
        for root in self._patience.over(stalls):
            self._log.info("goes_on", root=root, notice=True)
        for stall in self._patience.news(stalls, now):
            count = self._patience.count(now) if stall.root != SIMULATORS or self._launches else 0
            self._log.warning("stalled", root=stall.root, cause=stall.text, count=count, notice=True)
            if self._patience.exhausted:
                self._log.error("run_stalled", error=stall.text, notice=True)
                self._end("stalled", stall.text)
            elif stall.kind == "stuck" and (hosted := self._parts[stall.root].hosted) is not None:
                hosted.kill()

    # ---------------------------------------------------------------- the end

    async def _stop_in_order(self) -> None:
        """Stops along the flow, so that each stage can hand on what it holds.

        Learners before coordination: an update that was under way then ends in its books too.
        """
        self._stopping_since = self._clock()
        stepping = [plan.name for plan in self._topology.services if plan.name in self._run.stepping]
        simulators = [plan.name for plan in self._topology.simulators]
        await self._stop(stepping, self._settings.stop_timeout_s)
        await self._stop(simulators, 5.0, ask=False)
        rest = [plan.name for plan in self._topology.services if plan.name not in stepping]
        for name in sorted(rest, key=_stopped_late):
            await self._stop([name], self._settings.stop_timeout_s)

    def _has_said(self, part: Part) -> bool:
        """Whether a service that is to run has said where it stands since it died last."""
        return part.ended.is_set() or not self._keeps(part) or self._is_counted(part)

    def _is_counted(self, part: Part) -> bool:
        """Whether the present start of a service has said where it stands, and is counted with, if a former one was."""
        if part.starts < 2:
            return not part.down
        said = [self._words.of(part.name, key, kind) for key, kind, _ in _STANDS]
        starts = [getattr(one, start) for one, (*_, start) in zip(said, _STANDS, strict=True) if one is not None]
        run = self._words.of("coordination", "run", RunState)
        if run is not None and part.name in run.heard:
            starts.append(run.heard[part.name])
        return not part.down and all(start == self._label(part.name, part.starts) for start in starts)

    async def _stop(self, names: list[str], timeout_s: float, *, ask: bool = True) -> None:
        """Stops some parts, when all that are still to run have said where they stand."""
        with anyio.move_on_after(self._settings.stop_timeout_s - (self._clock() - self._stopping_since)):
            services = [part for part in self._parts if part.name in self._run.services]
            while not all(map(self._has_said, services)):  # noqa: ASYNC110 (boards)
                await anyio.sleep(_TURN_S)
        parts = [part for part in self._parts if part.name in names]  # one that was about to be added has none
        for part in parts:
            part.stopping = True
            if part.hosted is not None and ask:
                part.hosted.stop()
        with anyio.move_on_after(timeout_s):
            for part in parts:
                await part.ended.wait()
        late = [part for part in parts if not part.ended.is_set()]
        for part in late:
            self._log.warning("stopped_by_force", part=part.name, seconds=timeout_s)
            if part.hosted is not None:
                part.hosted.stop() if not ask else part.hosted.kill()
        with anyio.move_on_after(5.0):
            for part in late:
                await part.ended.wait()
        for part in parts if ask else ():
            if part.failure and part not in late and self._signals < 2:
                self._failed_at_end(part)

    def _failed_at_end(self, part: Part) -> None:
        """Learners and coordination had to keep what they hold."""
        if part.name == "coordination" or part.name.startswith("learning-"):
            self._spoil(f"{part.name} failed at the end: {part.failure}")
        else:
            self._log.warning("failed_at_the_end", part=part.name, error=part.failure, notice=True)

    def _tell(self, wall_s: float) -> None:
        """Writes the summary; where that fails, so has the run."""
        lost = (part for part in self._parts if part.died or not self._is_counted(part))
        died = {part.name: part.gone for part in lost if part.name in self._run.services}
        if failure := SummaryWriter(self._topology, self._words, self._log).write(
            self._status, self._error, wall_s, died
        ):
            self._spoil(failure)
        path = self._run.directory / "summary.json"
        self._log.info("run_ended", status=self._status, summary=str(path), wall_s=round(wall_s, 1), notice=True)


def _stopped_late(name: str) -> int:
    """Rank of a service among those that are stopped one after the other."""
    return {"coordination": 1, "monitor": 2}.get(name, 0)
