"""A run under way, as all see it that start, watch and stop its parts; a part is restarted until it fails too often."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import anyio
from anyio.abc import TaskGroup
from structlog.typing import FilteringBoundLogger

from sparring.pipeline.files import GONE, identity, is_gone
from sparring.pipeline.messages.channels import RUN, STEPPING_STATE, Topic
from sparring.pipeline.monitoring.summary import Status
from sparring.pipeline.queues.interface import Subscription
from sparring.pipeline.settings.model import PipelineSettings
from sparring.services.process import forking
from sparring.services.process.hosting import HostedService, Process
from sparring.services.supervision.hosts import Host, Plan
from sparring.services.supervision.topology import Restarts, SimulatorPlan, Topology

T = TypeVar("T")
_NEWS_S: Final = 0.5
"""Within this time the supervisor hears of a simulator's last step."""
_GOODBYE_S: Final = 5.0
"""Within this time a stepping process ends that has said goodbye to its simulators."""
_SHOWN_LINES: Final = 12
"""Lines of a failed process's output on the console: the end of a traceback."""
_ALIKE: Final = 3
"""A part that has failed so often in the same way, without a trained step in between, ends the run."""
_PLACE: Final = re.compile(r"[^\s(]+:\d+\)$|File \".+\", line \d+", re.MULTILINE)
"""A file and line in an error, or in the traceback before it."""
_NUMBER: Final = re.compile(r"-?\d+")
_CORRECT: Final = "; correct it there, and continue with --resume"


@dataclass
class Part:
    """A service or simulator that is kept running.

    Attributes:
        plan: what it is.
        restarts: how often it may fail.
        hosted: the present incarnation.
        starts: number of the present incarnation.
        started_at: when it began.
        cpu_s: CPU time that it had been given by `given_at`, while it started.
        starved_s: time without a core until it answered last.
        failures: times of its failures within the period.
        way: how it failed last: its error with file and line, and what was trained by then; empty for no such error.
        alike: how often it has failed in this way, one time after the other.
        stopping: it is being ended, so that its end is no failure.
        failure: what went wrong while it was being ended; "" for nothing.
        died: an incarnation failed, or ended without a request, while the run ended.
        reported: the log says why it is being killed.
        down: it has failed, and its next incarnation has not begun.
        ended: set when it is not started any more.
    """

    plan: Plan
    restarts: Restarts
    hosted: HostedService | None = None
    starts: int = 0
    started_at: float = 0.0
    cpu_s: float = 0.0
    given_at: float = 0.0
    starved_s: float = 0.0
    failures: list[float] = field(default_factory=list)
    way: tuple[object, ...] = ()
    alike: int = 0
    stopping: bool = False
    failure: str = ""
    died: bool = False
    reported: bool = False
    down: bool = False
    ended: anyio.Event = field(default_factory=anyio.Event)

    @property
    def name(self) -> str:
        """Returns its name, as "learning-Ball"."""
        return self.plan.name

    def kill(self) -> None:
        """Ends its present incarnation at once."""
        if self.hosted is not None:
            self.hosted.kill()


@dataclass
class ActiveRun:
    """A run under way.

    Attributes:
        host: starts the parts of its topology.
        clock: seconds, only rising.
        log: of the supervisor.
        session: distinguishes the incarnations of this run's services from those of an earlier session.
        topics: of the services, by name.
        parts: that are kept running, by name.
        over: set when the run ends; pauses before restarts end then.
        hurried: a second signal came, or the folder is gone: nothing is restarted any more, and what fails is not
            reported.
        gone: its folder was removed or replaced: nothing is written to its path any more.
        status: how the run ended, once `over` is set.
        error: why it failed.
    """

    host: Host
    clock: Callable[[], float]
    log: FilteringBoundLogger
    session: str
    topics: dict[str, Subscription] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    over: anyio.Event = field(default_factory=anyio.Event)
    hurried: bool = False
    gone: bool = False
    status: Status = "completed"
    error: str | None = None
    _folder: int | None = None  # its number on the disk
    _wait_scope: anyio.CancelScope | None = None

    @property
    def topology(self) -> Topology:
        """Returns the topology of the run; a later one has more behaviors."""
        return self.host.topology

    @property
    def settings(self) -> PipelineSettings:
        """Returns the settings of the pipeline."""
        return self.topology.run.settings.pipeline

    def latest(self, service: str, topic: Topic[T]) -> T | None:
        """Returns the latest record that a service has published on a topic; None before the first."""
        subscription = self.topics.get(service)  # a tournament has no learners
        return None if subscription is None else subscription.latest(topic)

    def incarnation(self, service: str, number: int) -> str:
        """Returns the name of an incarnation of a service, given its number from 1."""
        return f"{service}.{self.session}-{number}"

    # ---------------------------------------------------------------- its end

    def end(self, status: Status, error: str | None = None) -> None:
        """Ends the run; does nothing where it ends already."""
        if not self.over.is_set():
            self.status, self.error = status, error
            self.over.set()

    def fail(self, error: str) -> None:
        """Ends the run with a failure that a restart cannot repair."""
        self.log.error("run_failed", error=error, notice=True)
        self.end("failed", error)

    def fail_late(self, error: str) -> None:
        """Fails a run whose end went wrong, so that something may not have been saved."""
        self.log.error("end_failed", error=error, notice=True)
        if self.status != "failed":
            self.status, self.error = "failed", error

    def abandon_start(self) -> None:
        """Ends a start that still waits for imports, once the run is over: what has not begun has nothing to save."""
        if all(part.hosted is None for part in self.parts.values()):
            forking.abandon()

    def wait_scope(self, limit_s: float) -> anyio.CancelScope:
        """Returns the scope of a wait at the end, which ends after so many seconds, or once the run is hurried."""
        self._wait_scope = anyio.move_on_after(0.0 if self.hurried else limit_s)
        return self._wait_scope

    def hurry(self) -> None:
        """Kills all parts, which are not started again, and ends the start of others and a wait at the end."""
        self.hurried = True
        if self._wait_scope is not None:
            self._wait_scope.cancel()
        forking.abandon()
        for part in self.parts.values():
            part.stopping = True
            part.kill()

    def check_folder(self) -> None:
        """Abandons the run where its folder is no longer the one of the first call; another may be in its place."""
        folder = self.topology.run.directory
        if self._folder is None:
            self._folder = identity(folder)
        if self.gone or not is_gone(folder, self._folder):
            return
        self.gone = True
        error = GONE.format(folder=folder)
        self.fail_late(error) if self.over.is_set() else self.fail(error)
        self.hurry()

    def fail_at_the_end(self, part: Part, failure: str) -> None:
        """Notes that a part has failed while the run ends: one that saves something then fails the run."""
        if part.name == "coordination" or part.name.startswith("learning-"):
            self.fail_late(f"{part.name} failed at the end: {failure}")
        else:
            self.log.warning("failed_at_the_end", part=part.name, error=failure, notice=True)

    # ---------------------------------------------------------------- its parts

    def keep(self, tasks: TaskGroup, plan: Plan) -> None:
        """Keeps a part running, by a task of `tasks`."""
        usual = self.settings.restarts
        restarts = plan.restarts if isinstance(plan, SimulatorPlan) else None
        part = Part(plan, restarts or Restarts(budget=usual.budget, period_s=usual.period_s))
        self.parts[plan.name] = part
        tasks.start_soon(self._keep_running, part)

    def is_wanted(self, part: Part) -> bool:
        """Returns whether a part is to run: at the end of a run, a service is until its turn to stop has come.

        What a service held when it died is counted once its next incarnation is known.
        """
        if part.stopping:
            return False
        in_order = self.status in ("completed", "stopped") and not self.hurried
        return not self.over.is_set() or (in_order and part.name in self.topology.run.services)

    async def _keep_running(self, part: Part) -> None:
        """Restarts a part until it is stopped or fails too often."""
        try:
            while self.is_wanted(part):
                part.starts += 1
                part.started_at, part.cpu_s, part.starved_s, part.reported = self.clock(), 0.0, 0.0, False
                try:
                    incarnation = self.incarnation(part.name, part.starts)
                    part.hosted = await self.host.start(part.plan, incarnation, first=part.starts == 1)
                except OSError as error:
                    if not self.hurried and not isinstance(error, forking.Abandoned):
                        self.fail(f"{part.name} cannot be started: {error}")
                    return
                part.down, part.started_at = False, self.clock()  # a place on a cluster may have taken its time
                if part.stopping:
                    part.hosted.stop()
                self.log.info("started", part=part.name, start=part.starts, pid=part.hosted.pid)
                failure = await part.hosted.wait()
                part.died |= self.over.is_set() and (bool(failure) or not part.stopping)
                if part.stopping:
                    part.failure = failure
                    return
                part.down = True
                if not self.is_wanted(part) or not await self._may_restart(part, part.hosted, failure):
                    return
        finally:
            part.ended.set()

    async def _may_restart(self, part: Part, hosted: HostedService, failure: str) -> bool:
        """Waits before a restart; returns False where there is none."""
        limits, usual = part.restarts, self.settings.restarts
        error = failure or "ended without a request to stop"
        now = self.clock()
        part.failures = [at for at in part.failures if now - at <= limits.period_s] + [now]
        count, why, remedy = len(part.failures), "", ""
        if hosted.hopeless:
            why = "failed"
        elif count > limits.budget:
            why = f"failed {count} times in {limits.period_s:g} s"
        elif part.starts > limits.lifetime:
            why = f"failed {part.starts} times"
        elif await self._never_worked(part, hosted):
            why = "failed before its first step"
        elif min(self._count_alike(part, hosted, error), count) >= _ALIKE:
            why, remedy = f"failed {_ALIKE} times in the same way, without a trained step in between", _CORRECT
        known = part.reported or bool(why)  # an incident has one line on the console
        wait_s = min(usual.backoff_max_s, usual.backoff_s * 2 ** (count - 1))
        further = {} if why else {"restart_in_s": wait_s, "most_failures": limits.budget}
        (self.log.info if known else self.log.warning)("failed", part=part.name, error=error, failures=count, **further)
        if why:
            part.died = True
            if self.over.is_set():
                self.fail_at_the_end(part, error)
            else:
                self.fail(f"{part.name} {why}: {error}{remedy}{_explanation(part, hosted)}")
            return False
        with anyio.move_on_after(wait_s):
            await self.over.wait()
        return self.is_wanted(part)

    def _count_alike(self, part: Part, hosted: HostedService, error: str) -> int:
        """Returns how often a part has failed as it does now: with the same error of the same file and line.

        A restart would most likely repeat that, also where the error names another number. It is 0 for a signal, and
        without file and line: what was killed, or has lost another process, may well work next time. A trained step is
        progress; so may a restart of stepping be.
        """
        run = self.topology.run
        output = hosted.last_lines(_SHOWN_LINES) if isinstance(hosted, Process) else ""
        places = _PLACE.findall(f"{error}\n{output}")
        state = self.latest("coordination", RUN)
        trained = sum(one.trained for one in state.step_counts.values()) if state is not None else 0
        others = [self.parts[name].starts for name in run.stepping if name in self.parts and name != part.name]
        status, _, text = error.partition(": ")
        is_own = bool(places) and not error.startswith("signal")
        way = (status, _NUMBER.sub("#", text), *places, trained, *others) if is_own else ()
        part.way, part.alike = way, 0 if not way or run.playing else part.alike + 1 if way == part.way else 1
        return part.alike

    async def _never_worked(self, part: Part, hosted: HostedService) -> bool:
        """Returns whether the first incarnation of a simulator has ended with an error before its first step.

        A restart would most likely repeat that. A signal is no such error, nor is an end after stepping has failed; and
        limits of its own (`env_settings`) are the user's wish for restarts.
        """
        if part.starts > 1 or not isinstance(part.plan, SimulatorPlan) or part.plan.restarts is not None:
            return False
        if not isinstance(hosted, Process) or hosted.process.wait() < 0:
            return False
        stepping, number = self.topology.run.stepping, int(part.name.rpartition("-")[2])
        with anyio.move_on_after(_NEWS_S):
            await self.over.wait()
        # A stepping process that was told to end says goodbye to its simulators, which end in order, before it does.
        wait_until = self.clock() + (_GOODBYE_S if hosted.process.returncode == 0 else 0.0)
        while not (has_left := any(self.parts[name].starts > 1 or self.parts[name].down for name in stepping)):
            if self.clock() >= wait_until or self.over.is_set():
                break
            await anyio.sleep(_NEWS_S)
        if has_left:
            return False
        states = [self.latest(name, STEPPING_STATE) for name in stepping]
        return not any(state is not None and number in state.stepped for state in states)


def _explanation(part: Part, hosted: HostedService) -> str:
    """Returns the end of the output of a process, and where the whole is; "" for a task, whose log has all."""
    if not isinstance(hosted, Process):
        return ""
    lines = hosted.last_lines(_SHOWN_LINES)
    log = "" if isinstance(part.plan, SimulatorPlan) else f" and {part.name}.jsonl"
    return f"; all that it wrote is in {hosted.errors}{log}" + (f", at the end:\n{lines}" if "\n" in lines else "")
