"""Starts the services of a run, restarts those that fail, and ends the run.

consumes       the topics of all services: the end of training, heartbeats, names of behaviors, checkpoints
produces       processes (or tasks); `summary.json`; log lines for all that happens
waits for      the end of the run, the end of a process, a signal
unblocked by   coordination's "finished"; SIGINT, SIGTERM or SIGHUP; a failure beyond the restart budget
"""

import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import anyio
from anyio.abc import TaskGroup, TaskStatus
from structlog.typing import FilteringBoundLogger

from sparring.pipeline.errors import SparringError
from sparring.pipeline.files import remove_unfinished
from sparring.pipeline.messages.channels import (
    ADDED,
    ASSEMBLY_STATE,
    LEARNER_STATE,
    METRICS,
    RUN,
    SPECS,
    STEPPING_STATE,
)
from sparring.pipeline.messages.state import AddedBehaviors, RunState
from sparring.pipeline.monitoring import logs
from sparring.pipeline.monitoring.metrics import Registry
from sparring.pipeline.monitoring.progress import ProgressTracker
from sparring.pipeline.monitoring.summary import Status
from sparring.pipeline.monitoring.writing import Writing
from sparring.pipeline.queues.interface import Subscription, Transport
from sparring.services.process import interrupts
from sparring.services.process.hosting import SAME_SIGNAL_S, endings
from sparring.services.process.runtime import SUPERVISOR, follow
from sparring.services.supervision.active_run import ActiveRun
from sparring.services.supervision.ending import TURN_S, set_former_aside, stop_in_order, write_summary
from sparring.services.supervision.exports import Exports
from sparring.services.supervision.hosts import Host
from sparring.services.supervision.topology import ServicePlan, Topology
from sparring.services.supervision.watchdog import LOOK_S, Watchdog, relay
from sparring.services.supervision.writers import Writers

EXPORT_S = 60.0
"""The time for the exports of the last checkpoints."""
NAMING_S = 30.0
"""Simulators have named their behaviors within this time after the first of them."""

TOPIC_PACE_S = 0.25
_TOPICS = (METRICS, RUN, SPECS, STEPPING_STATE, ASSEMBLY_STATE, LEARNER_STATE)
"""Topics change hundreds of times a second; the decisions that are made here can wait that long."""


Grow = Callable[[Topology, Sequence[str]], Topology]
"""Makes and writes the topology with further behaviors."""


class Supervisor:
    """Runs one run.

    Args:
        host: starts the parts of the run.
        transport: carries the topics of the services.
        grow: adds behaviors to the topology, in a run that may get some.
        clock: seconds, only rising.
        session: distinguishes the incarnations of this run's services from those of an earlier session.
        log: of the supervisor.

    Attributes:
        active: the run.
    """

    def __init__(
        self,
        host: Host,
        transport: Transport,
        grow: Grow,
        clock: Callable[[], float] = time.monotonic,
        *,
        session: str = "",
        log: FilteringBoundLogger | None = None,
    ) -> None:
        self._transport = transport
        self._grow = grow
        self._log: FilteringBoundLogger = log or logs.get(service="supervisor")
        self.active = ActiveRun(host, clock, self._log, session or secrets.token_hex(3))
        self._shown: set[str] = set()  # behavior ids whose description was shown
        self._teams: dict[str, set[int]] = {}  # by behavior name, teams of all simulators so far
        self._is_warned = False  # of self-play without opponents
        self._exports = Exports(host.topology, self.active.topics, self._log)
        self._writers = Writers(self.active)

    async def supervise(self) -> Status:
        """Runs everything to its end, and writes the summary.

        Cancelled, it leaves nothing running and writes no summary.
        """
        active, began, run = self.active, self.active.clock(), self.active.topology.run
        set_former_aside(run.directory)
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._follow_signals)
            await self._add_services(tasks, active.topology.services)
            tasks.start_soon(relay, self._files_of_notices, self._log)
            tasks.start_soon(self._writers.run)
            tasks.start_soon(self._exports.run)
            if active.topics:  # and no signal has come before the services
                tasks.start_soon(self._start_simulators, tasks)
                tasks.start_soon(follow, active.topics["coordination"], self._on_run_state)
                for name in run.stepping:
                    tasks.start_soon(follow, active.topics[name], self._show_behaviors)
                if run.grows:
                    tasks.start_soon(self._follow_names, tasks)
                if run.playing is None:
                    tasks.start_soon(self._warn_of_unnamed)
            watchdog = Watchdog(active)
            tasks.start_soon(watchdog.watch)
            tasks.start_soon(watchdog.watch_folder)
            tasks.start_soon(watchdog.measure)
            self._log.info("run_started", folder=str(run.directory), addresses=dict(run.addresses), notice=True)
            await active.over.wait()
            with anyio.CancelScope(shield=True):
                await stop_in_order(active)
                if active.status in ("completed", "stopped"):
                    await self._exports.finish(0.0 if active.hurried else EXPORT_S, active.wait_scope)
                write_summary(active, active.clock() - began)
                await self._writers.finish()
                if not active.gone:
                    remove_unfinished(run.directory)
            tasks.cancel_scope.cancel()
        return active.status

    async def _start_simulators(self, tasks: TaskGroup) -> None:
        """Starts the simulators once stepping listens: the time in which they must connect begins then."""
        active = self.active
        for name in active.topology.run.stepping:
            while active.latest(name, STEPPING_STATE) is None:  # noqa: ASYNC110 (retained topics)
                await anyio.sleep(TURN_S)
        if not active.topology.simulators and not active.over.is_set():
            addresses = list(active.topology.run.addresses.values())
            self._log.info("waiting_for_simulators", addresses=addresses, notice=True)
        for plan in active.topology.simulators if not active.over.is_set() else ():
            active.keep(tasks, plan)

    def _files_of_notices(self) -> list[Path]:
        topology = self.active.topology
        names = [plan.name for plan in topology.simulators] + [plan.name for plan in topology.writers]
        names = [f"{name}.stderr" for name in names]
        names += [f"{logs.file_name(plan.name)}.jsonl" for plan in topology.services]
        return [topology.run.directory / "logs" / name for name in names]

    async def _add_services(self, tasks: TaskGroup, plans: Sequence[ServicePlan]) -> None:
        subscribe = self._transport.subscribe
        topics = {plan.name: await subscribe(plan.name, *_TOPICS, pace=TOPIC_PACE_S) for plan in plans}
        if not self.active.over.is_set():
            self.active.topics |= topics
            for plan in plans:
                self.active.keep(tasks, plan)

    # ---------------------------------------------------------------- behaviors that simulators name

    async def _follow_names(self, tasks: TaskGroup) -> None:
        """Starts learners for behaviors that simulators name and the configuration does not.

        A behavior for which no learner can be started keeps only its own simulators waiting. They also wait while the
        folder of the run cannot be written, most likely because the disk is full.
        """
        active, refused = self.active, set[str]()
        registry, limit_s = Registry(SUPERVISOR, active.session), active.settings.stall_timeout_s
        writing = Writing(registry, self._log, active.clock, limit_s, ProgressTracker(registry, active.clock))
        topic = await self._transport.publisher(SUPERVISOR)
        while not active.over.is_set():
            await anyio.sleep(LOOK_S)
            run = active.topology.run
            names = sorted(self._named() - run.settings.behaviors.keys() - refused)
            most = max(0, active.settings.limits.unnamed_behaviors - len(run.added))
            if len(names) > most:  # each stepping process applies the limit to its own simulators only
                self._log.error("too_many_behaviors", behaviors=names[most:], most=most, notice=True)
                refused.update(names[most:])
            if not (names := names[:most]):
                continue
            try:
                topology = await writing.until_done(partial(self._add, names), f"the settings of {', '.join(names)}")
            except SparringError as error:
                refused.update(names)
                self._log.error("no_learner", behaviors=names, error=str(error), notice=True)
                if not run.settings.behaviors:
                    active.fail(f"no learner for {', '.join(names)}: {error}")
                continue
            if active.over.is_set():  # while there was no room on the disk
                return
            await active.host.adopt(topology)
            await self._add_services(tasks, [plan for plan in topology.services if plan.name not in active.topics])
            topic.publish(ADDED, AddedBehaviors(names=topology.run.added))
            self._log.info("behaviors_added", behaviors=names, cause="default_settings count for them", notice=True)

    async def _add(self, names: Sequence[str]) -> Topology:
        return self._grow(self.active.topology, names)

    def _named(self) -> set[str]:
        """Returns the behaviors that simulators have named so far."""
        specs = [self.active.latest(name, SPECS) for name in self.active.topology.run.stepping]
        return {name for one in specs if one is not None for name in one.behaviors}

    async def _warn_of_unnamed(self) -> None:
        """Warns once of behaviors of the configuration that no simulator has named a while after the first one."""
        while not (first := self._named()):  # noqa: ASYNC110 (retained topics)
            await anyio.sleep(LOOK_S)
        await anyio.sleep(NAMING_S)
        run, named = self.active.topology.run, self._named() | first  # a restarted stepping process knows none yet
        if missing := sorted(run.settings.behaviors.keys() - named - {*run.added}):
            cause, effect = "no simulator has named them", "the run does not end without them"
            remedy = (
                "correct the names, or remove them; pettingzoo has the option behaviors: per_type for types of agents"
            )
            details = {"named": sorted(named), "cause": cause, "effect": effect, "remedy": remedy}
            self._log.warning("behaviors_missing", behaviors=missing, **details, notice=True)

    def _show_behaviors(self, topics: Subscription) -> None:
        """Shows what each behavior id is like, once."""
        specs = topics.latest(SPECS)
        if specs is None:
            return
        for text in sorted(specs.described.keys() - self._shown):
            self._shown.add(text)
            self._log.info("behavior", id=text, read_as=specs.described[text], notice=True)
        for name, teams in specs.teams.items():
            self._teams.setdefault(name, set()).update(teams)

    def _warn_without_opponents(self, state: RunState) -> None:
        """Warns once of self-play whose simulators have one team only, after the first update, or of a tournament.

        At once where the other teams are behaviors without self-play.
        """
        run = self.active.topology.run
        names = [name for name in run.self_play if name in state.step_counts]
        teams = {team for name in names for team in self._teams.get(name, ())}
        remedy = "give the opponents another team in the simulator"
        if run.playing is not None:
            effect, is_due = "no match is played until a second team plays", True
        else:
            effect = "self_play has no rating and no win rate until a second team plays"
            remedy += ", or remove self_play"
            is_due = any(state.step_counts[name].trained for name in names) and not state.ratings
        cause = "all agents are in one team"
        others = sorted(name for name, own in self._teams.items() if name not in run.self_play and own - teams)
        if others and run.playing is None:
            cause, is_due = f"only behaviors without self_play are in other teams: {', '.join(others)}", True
            effect = "they play with their newest weights, and never with past ones"
            remedy = "give them self_play as well, if they are opponents"
        if is_due and len(teams) == 1 and not self._is_warned:
            self._is_warned = True
            self._log.warning("no_opponents", behaviors=names, cause=cause, effect=effect, remedy=remedy, notice=True)

    # ---------------------------------------------------------------- the end

    def _on_run_state(self, topics: Subscription) -> None:
        state = topics.latest(RUN)
        if state is not None:
            self._warn_without_opponents(state)
        if state is not None and state.finished:
            self.active.end("completed")

    async def _follow_signals(self, *, task_status: TaskStatus[None]) -> None:
        """Ends the run at SIGINT, SIGTERM or SIGHUP, and at once where a second signal follows."""
        with anyio.open_signal_receiver(*endings()) as signals:
            task_status.started()
            if not interrupts.has_come():  # during the start
                await anext(signals)
            first_at = self.active.clock()
            self._log.info("stopping", cause="signal", notice=True)
            self.active.end("stopped")
            self.active.abandon_start()
            async for _ in signals:
                if self.active.clock() - first_at < SAME_SIGNAL_S:
                    continue
                self._log.warning("stopped_at_once", notice=True)
                self.active.hurry()
