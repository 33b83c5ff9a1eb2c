"""A world is one run of all services under a virtual clock, with the faults of a plan and all invariants checked."""

from __future__ import annotations

import contextlib
import gc
import itertools
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, Final

import anyio
import torch
import trio
from trio.testing import MockClock

import sparring.pipeline.files
import sparring.pipeline.monitoring.metrics
import sparring.services.stages.learning
from sparring.pipeline.errors import CodecError, RemoteProtocolError, first_failure
from sparring.pipeline.messages.state import AssemblyState, RunState
from sparring.pipeline.queues.interface import Publisher, Receiver, Sender, Subscription
from sparring.pipeline.settings import parse_settings
from sparring.pipeline.simulation.counting import StepCounter
from sparring.services.process.runtime import Run
from sparring.services.supervision.supervisor import Supervisor
from sparring.services.supervision.topology import ServicePlan, Topology, build
from tests.world.world_faults import FaultInjector
from tests.world.world_game import NumberedGame
from tests.world.world_invariants import Watch
from tests.world.world_learner import RecordingLearner
from tests.world.world_links import Network
from tests.world.world_parts import HostedService, Log
from tests.world.world_plan import Plan, sample_plan
from tests.world.world_player import FaultReceived, Player
from tests.world.world_schedule import PART, seeded, take_over
from tests.world.world_streams import Listeners
from tests.world.world_transport import WorldTransport
from tests.world.world_waits import FLOW, WATCHED, endless

RESUMES_S: Final = 40.0
"""Time after the last fault until training resumes; a silent process or link is ended after 10 s."""
ENDS_S: Final = 120.0
"""Time after which a run ends, in addition to its usual duration."""
EPOCH: Final = 1.7e9
ROOM: Final = Path("/dev/shm") if Path("/dev/shm").is_dir() else None


class World:
    """One simulated run.

    Args:
        plan: the run and its faults.
        folder: folder of the run.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.chance = Random(f"world {plan.seed}")
        damage = any(fault.conditions.damaged for fault in plan.faults)
        self.watch = Watch(real=plan.setting.real, damage=damage)
        self.hosted: dict[str, HostedService] = {}
        self.counted: dict[str, int] = {}
        self.status = ""
        self.died: set[str] = set()
        self.failed_stages: Counter[str] = Counter()
        self.parted: set[int] = set()  # simulators that ended with Bye
        self.unparted = 0  # processes of simulators that ended otherwise
        self._opened = itertools.count(1)
        self._numbers = itertools.count(1)
        self.agent_episodes: dict[str, anyio.CancelScope] = {}
        self.faults = FaultInjector(self)

    # ---------------------------------------------------------------- services of the environment

    def wall(self, part: str) -> float:
        """Returns the time of a part's wall clock."""
        return EPOCH + trio.current_time() + self.faults.jumps.get(part, 0.0)

    def opened(self, part: str) -> int:
        """Returns the number of an end, which is the wall clock in nanoseconds as over ZeroMQ."""
        return int(self.wall(part) * 1e6) * 1000 + next(self._opened)

    def created(self, name: str, end: Any) -> None:
        """Lets the watch observe an end that was opened."""
        if isinstance(end, Publisher):
            publish, topic = end.publish, name.removeprefix("topic:")

            def observed_publish(published: Any, record: Any) -> None:
                publish(published, record)
                self.watch.published(topic, published.key, record)

            end.publish = observed_publish  # type: ignore[method-assign]
        elif isinstance(end, Subscription):
            received, part = end.received, PART.get()

            def observed_received(message: Any, route: Any) -> None:
                received(message, route)
                self.watch.received(part, name, end.records)

            end.received = observed_received  # type: ignore[method-assign]
        else:
            self._observe_queue(name, end)

    def _observe_queue(self, name: str, end: Any) -> None:
        send = end._send

        def checked(messages: Any) -> None:
            send(messages)
            self.look(name)

        end._send = checked
        if isinstance(end, Receiver):
            settle = end.settle

            def settled() -> None:
                settle()
                self.look(name)

            end.settle = settled  # type: ignore[method-assign]

    def look(self, name: str) -> None:
        """Lets the watch check a queue."""
        link = self.network.listening.get(name)
        senders = [end for end in self.network.connected.get(name, ()) if isinstance(end, Sender)]
        self.watch.queue(name, link and link.end, senders)

    # ---------------------------------------------------------------- the run

    async def run_to_end(self) -> None:
        """Runs from the start to the end."""
        self.queue = take_over()
        self.network = Network(self.chance, self.watch, self.queue)
        self.listeners = Listeners(self.network)
        self.run, self.topology = self._make_topology()
        async with anyio.create_task_group() as self.tasks:
            self.watch.on_violation = self._abandon
            self.tasks.start_soon(self.network.timer.run)
            self.tasks.start_soon(self.faults.run)
            self.tasks.start_soon(self.faults.end, self.watch.finished)
            for number in range(self.plan.setting.simulators):
                self.tasks.start_soon(self._simulate, number)
            self.tasks.start_soon(self._watch_progress)
            await self._supervise()
            self.faults.stop()
            self.tasks.cancel_scope.cancel()
        if not self.watch.violations:
            self._check_end()

    def _abandon(self) -> None:
        """Ends all parts after a violation, including those that hang."""
        self.tasks.cancel_scope.cancel()
        self.queue.resume_all()

    async def _supervise(self) -> None:
        transport = WorldTransport(
            self.network, "supervisor", "supervisor.1", lambda: self.opened("supervisor"), lambda *_: None
        )
        async with transport:
            supervisor = _Supervisor(
                self,  # type: ignore[arg-type]
                transport,
                None,  # type: ignore[arg-type]
                trio.current_time,
                session="s",
                log=Log(self, "supervisor"),
            )
            self.status = await supervisor.supervise()
            self.died = {part.name for part in supervisor.active.parts.values() if part.died}

    async def start(self, plan: ServicePlan, start: str, *, first: bool) -> HostedService:
        """Starts a service for the supervisor."""
        hosted = self.hosted[plan.name] = HostedService(self, plan, start, first=first)
        self.tasks.start_soon(hosted.serve)
        return hosted

    def _make_topology(self) -> tuple[Run, Topology]:
        setting = self.plan.setting
        settings = _settings(setting.text())
        topology = build(settings, run_id="world", directory=self.folder, seed=self.plan.seed)
        shared = {
            name: len(range(index, setting.simulators, setting.stepping))
            for index, name in enumerate(topology.run.stepping)
        }
        run = replace(topology.run, simulators=shared)
        plans = tuple(plan for plan in topology.services if plan.name != "monitor")
        return run, replace(topology, run=run, services=plans, simulators=(), writers=())

    async def _simulate(self, number: int) -> None:
        setting, part = self.plan.setting, f"simulator-{number}"
        PART.set(part)
        address = self.run.addresses[self.run.stepping[number % setting.stepping]]
        for attempt in itertools.count():
            chance = Random(f"game {self.plan.seed} {number} {attempt}")
            game = NumberedGame(setting.rules, chance, lambda: next(self._numbers))
            player = Player(number, attempt, self.listeners, address, game, setting.frame_s, self._stepped)
            with anyio.CancelScope() as scope:
                self.agent_episodes[part] = scope
                try:
                    await player.run()
                    self.parted.add(number)
                    return
                except FaultReceived as error:
                    self._on_fault(part, error)
                except (CodecError, RemoteProtocolError) as error:
                    self.watch.require(self.watch.damage, "failures", f"{part} cannot read: {error}")
                finally:
                    self._count(part, player.counter)
            self.unparted += 1
            await anyio.sleep(0.3)

    def _count(self, part: str, counter: StepCounter) -> None:
        self.watch.line(f"{part} ended")
        for name, steps in counter.steps.items():
            self.counted[name] = self.counted.get(name, 0) + steps

    def _stepped(self) -> None:
        self.watch.event("step")

    def _on_fault(self, part: str, error: FaultReceived) -> None:
        self.watch.line(f"{part} received {error}")
        if error.fault.code not in ("number", "timeout"):
            self.watch.require(self.watch.damage, "failures", f"{part} received {error}")

    async def _watch_progress(self) -> None:
        watch, plan = self.watch, self.plan
        last = plan.calm_from + ENDS_S + 4 * plan.setting.usual_s
        while True:
            await anyio.sleep(1.0)
            now = trio.current_time()
            idle = now - max(watch.progress_at, plan.calm_from)
            watch.require(idle <= RESUMES_S, "progress", f"nothing for {idle:.0f} s; {self._waits()}")
            watch.require(now <= last, "progress", f"no end after {now:.0f} s; {self._waits()}")
            self._check_waits()

    def _check_waits(self) -> None:
        """Checks that each wait has a deadline or a watcher."""
        for part, place in endless():
            watched = WATCHED.get(place)
            self.watch.require(watched is not None, "deadlines", f"{part} may wait for ever in {place}")
            if watched is FLOW:
                cause = self.hosted[part].waiting_for
                self.watch.require(bool(cause), "deadlines", f"{part} waits in {place} and does not report for what")

    def _waits(self) -> str:
        states = {name: self.watch.latest_records.get((name, "metrics")) for name in self.plan.setting.services}
        waits = "; ".join(f"{name}: {state.waiting_for}" for name, state in states.items() if state is not None)
        run = self.watch.latest_records.get(("coordination", "run"))
        return waits + (f"; {run.step_counts} {run.losses}" if isinstance(run, RunState) else "")

    def _check_end(self) -> None:
        plan, watch = self.plan, self.watch
        keepers = [
            part for part in self.died if part.startswith(("coordination", "learning"))
        ]  # hold steps that must survive
        good = self.status == "completed" or (self.status == "failed" and keepers)
        watch.violations += [] if good else [f"progress: the run ended as {self.status!r}"]
        if not watch.violations and "coordination" not in self.died:
            rows = plan.setting.simulators * plan.setting.rules.areas * plan.setting.rules.members
            # A new assembly does not know the observations of decisions that wait: one more step of each agent.
            settings = self.run.settings
            most = max(settings.step_budget(settings.behaviors[name]) for name in plan.setting.names) + 2 * rows
            run: RunState = watch.latest_records["coordination", "run"]
            links = sum(fault.kind in ("link", "reset", "hang", "slow", "crash") for fault in plan.faults)
            # Where a link has lost the last report of assembly, what that held counts as lost with it.
            ends, heard = {"assembly", "coordination"}, watch.assembly_heard
            impaired = any(
                fault.kind == "link" and (not fault.parts or ends == {*fault.parts}) for fault in plan.faults
            )
            unheard = int(impaired and not (isinstance(heard, AssemblyState) and heard.final))
            failed = self.failed_stages + Counter(link=links, assembly=unheard)
            for name in plan.setting.names:
                watch.check_losses(name, run.losses[name], failed, most)
            complete = len(self.parted) == plan.setting.simulators and not self.unparted
            complete &= not any(part.startswith("stepping") for part in self.died)  # with what simulators said last
            watch.check_end(
                plan.setting.names,
                self.counted,
                counts="nothing" if watch.damage else "all" if complete else "no more",
            )


@lru_cache(maxsize=256)
def _settings(text: str) -> Any:
    return parse_settings(text, "world").settings


class _Supervisor(Supervisor):
    """A supervisor whose run no signal ends: it runs in the process of the test."""

    async def _follow_signals(self, *, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a seed.

    Attributes:
        violations: descriptions of violated invariants.
        events: number of events.
        digest: digest of all events.
        virtual_s: duration in virtual time; `wall_s` in real time.
        lines: the last events.
    """

    plan: Plan
    violations: tuple[str, ...]
    events: int
    digest: str
    virtual_s: float
    wall_s: float
    lines: tuple[str, ...]


@contextlib.contextmanager
def _patched(world: World) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for place, name, value in (
            (sparring.pipeline.files, "put", world.faults.put),
            # The only numbers that do not depend on the seed:
            (sparring.pipeline.monitoring.metrics, "resources", lambda: (0.0, 0.0)),
            (sparring.services.stages.learning, "Learner", RecordingLearner),
        ):
            stack.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, value)
        yield


def run_seed(seed: int, mode: str | None = None) -> Outcome:
    """Runs one seed."""
    return run_plan(sample_plan(seed, mode))


def run_plan(plan: Plan) -> Outcome:
    """Runs a plan."""
    began = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="world-", dir=ROOM))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    clock = MockClock(autojump_threshold=0)
    world = World(plan, folder)
    try:
        with seeded(plan.seed), _patched(world):
            try:
                trio.run(world.run_to_end, clock=clock)
            except Exception as failure:
                error = first_failure(failure)
                trace = "".join(traceback.format_exception(error))
                world.watch.violations.append(f"failures: the world failed:\n{trace}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        torch.set_num_threads(threads)
        gc.collect(0)
    return Outcome(
        plan=plan,
        violations=tuple(world.watch.violations),
        events=world.watch.events,
        digest=world.watch.digest,
        virtual_s=clock.current_time(),
        wall_s=time.perf_counter() - began,
        lines=tuple(world.watch.lines),
    )
