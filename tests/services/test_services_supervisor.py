"""The supervisor: services that fail at any time, checkpoints to export, behaviors that are added."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import structlog.testing

from sparring.pipeline import files
from sparring.pipeline.coordination.settings import SelfPlaySettings
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.messages.channels import ADDED, LEARNER_STATE, METRICS, RUN, SPECS, STEPPING_STATE
from sparring.pipeline.messages.matches import RatedLearner
from sparring.pipeline.messages.metrics import Metrics
from sparring.pipeline.messages.state import BehaviorSpecs, LearnerState, RunState, StepCounts, SteppingState
from sparring.pipeline.monitoring.overview import STEP_COUNTS
from sparring.pipeline.monitoring.summary import BehaviorSummary
from sparring.pipeline.queues.interface import Publisher
from sparring.pipeline.queues.memory import MemoryHub, MemoryTransport
from sparring.pipeline.settings import parse_settings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from sparring.services.process import interrupts
from sparring.services.process.runtime import Playback
from sparring.services.supervision import ending
from sparring.services.supervision import supervisor as supervisors
from sparring.services.supervision.active_run import ActiveRun
from sparring.services.supervision.exports import Exports
from sparring.services.supervision.hosts import Plan
from sparring.services.supervision.ports import Ports
from sparring.services.supervision.supervisor import EXPORT_S, Grow, Supervisor
from sparring.services.supervision.topology import Topology, build
from sparring.services.supervision.watchdog import START_S
from tests.services.services_graph import settings_text

FINISHED = RunState(
    start="coordination.1",
    finished=True,
    specs={},
    step_counts={},
    losses={},
    unaccounted={},
    versions={},
    reward_mean_last100={},
    episodes={},
)


LISTENING = SteppingState(source="stepping-0.1", behaviors={}, simulators=0)


class FakeService:
    """A service that ends when it is stopped, with a failure or without, and is given a share of a CPU."""

    pid = None
    hopeless = False

    def __init__(self, failure: str, share: float = 0.0, starved: float = 0.0) -> None:
        self._failure = failure
        self._share, self._starved, self._began = share, starved, anyio.current_time()
        self._ended = anyio.Event()

    @property
    def cpu_s(self) -> float:
        return self._share * (anyio.current_time() - self._began)

    @property
    def starved_s(self) -> float:
        return self._starved * (anyio.current_time() - self._began)

    async def wait(self) -> str:
        await self._ended.wait()
        return self._failure

    def stop(self) -> None:
        self._ended.set()

    kill = stop


class FakeHost:
    """Starts fake services."""

    topology: Topology | None = None

    def __init__(self, failures: dict[str, str], share: float = 0.0, starved: float = 0.0) -> None:
        self._share, self._starved = share, starved
        self.starts: dict[str, list[float]] = {}
        self.latest: dict[str, FakeService] = {}
        self._failures = failures

    async def start(self, plan: Plan, incarnation: str, *, first: bool) -> FakeService:
        return self._started(plan.name)

    async def adopt(self, topology: Topology) -> None:
        self.topology = topology

    def _started(self, name: str) -> FakeService:
        self.starts.setdefault(name, []).append(anyio.current_time())
        self.latest[name] = FakeService(self._failures.get(name, ""), self._share, self._starved)
        return self.latest[name]


def topology_of(folder: Path, text: str = "") -> Topology:
    """Returns the processes of a small run; `text` is added to its configuration."""
    settings = parse_settings(settings_text() + text, "test").settings
    return build(settings, run_id="test", directory=folder, seed=1)


def supervisor_of(
    topology: Topology, host: FakeHost, transport: MemoryTransport, grow: Grow | None = None
) -> Supervisor:
    """Returns a supervisor under the virtual clock."""
    host.topology = topology
    return Supervisor(host, transport, grow, clock=anyio.current_time)  # type: ignore[arg-type]


async def ended(
    folder: Path, failures: dict[str, str], run: RunState = FINISHED, state: LearnerState | None = None
) -> tuple[str, dict[str, Any] | None]:
    """Runs a supervisor to the end of a finished run, with the last states that are given; returns status, summary."""
    topology = topology_of(folder)
    hub = MemoryHub()
    async with (
        MemoryTransport(hub, start="coordination.1") as own,
        MemoryTransport(hub, start="supervisor.1") as transport,
    ):
        (await own.publisher("coordination")).publish(RUN, run)
        if state is not None:
            (await own.publisher("learning-Goal")).publish(LEARNER_STATE, state)
        supervisor = supervisor_of(topology, FakeHost(failures), transport)
        with anyio.fail_after(300):
            status = await supervisor.supervise()
    path = folder / "summary.json"
    return status, json.loads(path.read_text()) if path.exists() else None


class StoppedSimulator(FakeService):
    """A simulator that SIGSTOP has stopped: it ends when it is killed."""

    killed = False

    def stop(self) -> None:
        pass

    def kill(self) -> None:
        self.killed = True
        super().stop()


class StoppedHost(FakeHost):
    """Starts such simulators, and fake services."""

    def _started(self, name: str) -> FakeService:
        started = super()._started(name)
        if name.startswith("simulator"):
            started = self.latest[name] = StoppedSimulator("", 0.0)
        return started


SIMULATOR = "simulators: [{name: goal}]\n"


@pytest.mark.anyio
async def test_simulator_that_does_not_end_is_killed(tmp_path: Path) -> None:
    """Otherwise the thread that waits for it keeps the process of the run alive for ever."""
    hub = MemoryHub()
    async with (
        MemoryTransport(hub, start="stepping-0.1") as own,
        MemoryTransport(hub, start="supervisor.1") as transport,
    ):
        (await own.publisher("stepping-0")).publish(STEPPING_STATE, LISTENING)
        supervisor = supervisor_of(topology_of(tmp_path, SIMULATOR), host := StoppedHost({}), transport)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.supervise)
            await anyio.sleep(5)
            supervisor.active.end("stopped")
    simulator = host.latest["simulator-0"]
    assert isinstance(simulator, StoppedSimulator)
    assert simulator.killed


@pytest.mark.anyio
async def test_simulators_are_waited_for_once_stepping_listens(tmp_path: Path) -> None:
    """Whoever starts one when the run says so finds an address at which somebody listens."""
    async with (
        MemoryTransport(hub := MemoryHub(), start="stepping-0.1") as own,
        MemoryTransport(hub, start="supervisor.1") as transport,
        anyio.create_task_group() as tasks,
    ):
        supervisor = supervisor_of(topology_of(tmp_path), FakeHost({}), transport)
        with structlog.testing.capture_logs() as lines:
            tasks.start_soon(supervisor.supervise)
            await anyio.sleep(30)
            assert "waiting_for_simulators" not in [line["event"] for line in lines]
            (await own.publisher("stepping-0")).publish(STEPPING_STATE, LISTENING)
            await anyio.sleep(5)
            assert "waiting_for_simulators" in [line["event"] for line in lines]
            supervisor.active.end("stopped")


class DrawingMonitor(FakeService):
    """A monitor that gets little CPU time for its curves."""

    def __init__(self) -> None:
        super().__init__("")
        self._killed = anyio.Event()

    async def wait(self) -> str:
        await super().wait()
        with anyio.move_on_after(45):
            await self._killed.wait()
        return ""

    def kill(self) -> None:
        self._killed.set()


class DrawingHost(FakeHost):
    """Starts such a monitor, and fake services."""

    def _started(self, name: str) -> FakeService:
        started = super()._started(name)
        return DrawingMonitor() if name == "monitor" else started


@pytest.mark.anyio
async def test_monitor_has_time_to_draw_its_curves_on_a_busy_machine(tmp_path: Path) -> None:
    async with (
        MemoryTransport(hub := MemoryHub(), start="coordination.1") as own,
        MemoryTransport(hub, start="supervisor.1") as transport,
    ):
        (await own.publisher("coordination")).publish(RUN, FINISHED)
        with structlog.testing.capture_logs() as lines:
            assert await supervisor_of(topology_of(tmp_path), DrawingHost({}), transport).supervise() == "completed"
    assert not [line for line in lines if line["event"] == "stopped_by_force"]
    (waiting,) = [line for line in lines if line["event"] == "waiting_for"]
    assert (waiting["parts"], waiting["at_most_s"], waiting["notice"]) == (["monitor"], 60, True)


@pytest.mark.anyio
async def test_stop_that_waits_for_the_report_of_a_restarted_service_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "_has_reported", lambda _active, part: part.name != "coordination")
    async with (
        MemoryTransport(hub := MemoryHub(), start="coordination.1") as own,
        MemoryTransport(hub, start="supervisor.1") as transport,
    ):
        (await own.publisher("coordination")).publish(RUN, FINISHED)
        with structlog.testing.capture_logs() as lines:
            assert await supervisor_of(topology_of(tmp_path), FakeHost({}), transport).supervise() == "completed"
    (waiting,) = [line for line in lines if line["event"] == "waiting_for"]
    assert (waiting["parts"], waiting["at_most_s"], waiting["notice"]) == (["coordination"], 20, True)


@pytest.mark.anyio
async def test_resumed_run_does_not_end_before_coordination_has_told_what_it_knows(tmp_path: Path) -> None:
    """A monitor that knows less, or nothing, does not matter; a learner tells nothing before a simulator comes."""
    topology = topology_of(tmp_path)
    topology = dataclasses.replace(topology, run=dataclasses.replace(topology.run, resumed=True))
    counts = StepCounts(produced=90, trained=80, ghost=0, stale=0, lost=10, open=0)
    known = dataclasses.replace(FINISHED, step_counts={"Goal": counts}, losses={"Goal": {"learning": 10}})
    async with (
        MemoryTransport(hub := MemoryHub(), start="coordination.1") as own,
        MemoryTransport(hub, start="supervisor.1") as transport,
        anyio.create_task_group() as tasks,
    ):
        supervisor = supervisor_of(topology, FakeHost({}), transport)

        async def stop_and_tell() -> None:
            await anyio.sleep(1.0)
            supervisor.active.end("stopped")
            await anyio.sleep(3.0)
            (await own.publisher("coordination")).publish(RUN, known)

        tasks.start_soon(stop_and_tell)
        began = anyio.current_time()
        assert await supervisor.supervise() == "stopped"
        assert anyio.current_time() - began < 15.0
    assert json.loads((tmp_path / "summary.json").read_text())["behaviors"]["Goal"]["steps"] == 80


@pytest.mark.anyio
async def test_hangup_that_was_ignored_at_the_start_ends_no_run(tmp_path: Path) -> None:
    """So does `nohup`, for a run that goes on without its terminal."""
    hub, statuses = MemoryHub(), list[str]()
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    async with MemoryTransport(hub, start="supervisor.1") as transport, anyio.create_task_group() as tasks:
        supervisor = supervisor_of(topology_of(tmp_path), FakeHost({}), transport)

        async def supervise() -> None:
            statuses.append(await supervisor.supervise())

        tasks.start_soon(supervise)
        await anyio.sleep(1)
        os.kill(os.getpid(), signal.SIGHUP)
        await anyio.sleep(1)
        assert not supervisor.active.over.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGHUP, former)
    assert statuses == ["stopped"]


@pytest.mark.anyio
async def test_interrupt_that_a_library_has_swallowed_at_the_start_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(interrupts, "_has_come", False)
    try:
        interrupts.watch()
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        async with MemoryTransport(MemoryHub(), start="supervisor.1") as transport:
            with anyio.fail_after(300):
                assert await supervisor_of(topology_of(tmp_path), FakeHost({}), transport).supervise() == "stopped"
    finally:
        signal.signal(signal.SIGINT, former)


DISK_FULL = "exit status 28, could not write its files (no room on the disk?)"


@pytest.mark.anyio
@pytest.mark.parametrize("part", ["learning-Goal", "coordination"])
async def test_service_that_fails_while_saving_fails_the_run(tmp_path: Path, part: str) -> None:
    status, summary = await ended(tmp_path, {part: DISK_FULL})
    assert status == "failed"
    assert summary is not None
    assert summary["status"] == "failed"
    assert summary["error"] == f"{part} failed at the end: {DISK_FULL}"


@pytest.mark.anyio
async def test_training_that_no_checkpoint_holds_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner was killed: a resumed run continues from the newest checkpoint on the disk."""
    monkeypatch.setattr(supervisors, "Exports", FakeExports)
    monkeypatch.setattr(FakeExports, "calls", [], raising=False)
    (tmp_path / "Goal" / "recovery-000000000300-0004").mkdir(parents=True)
    (tmp_path / "Goal" / "checkpoint-000000000200").mkdir()
    status = {"behaviors": {"Goal": {"figures": dataclasses.asdict(BehaviorSummary())}}}
    (tmp_path / "status.json").write_text(json.dumps(status))
    hub = MemoryHub()
    async with (
        MemoryTransport(hub, start="coordination.1") as own,
        MemoryTransport(hub, start="learning-Goal.1") as learner,
        MemoryTransport(hub, start="supervisor.1") as transport,
    ):
        (await own.publisher("coordination")).publish(RUN, FINISHED)
        state = dataclasses.replace(state_of("Goal/checkpoint-000000000200"), trained=1000)
        (await learner.publisher("learning-Goal")).publish(LEARNER_STATE, state)
        supervisor = supervisor_of(topology_of(tmp_path), FakeHost({}), transport)
        with structlog.testing.capture_logs() as lines:
            await supervisor.supervise()
    (lost,) = [line for line in lines if line["event"] == "training_lost"]
    assert (lost["behavior"], lost["steps"]) == ("Goal", 700)
    assert lost["newest"] == str(tmp_path / "Goal" / "recovery-000000000300-0004")


@pytest.mark.anyio
async def test_folder_that_is_replaced_while_the_run_stops_fails_it_and_gets_no_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()

    async def stop(active: ActiveRun) -> None:
        await ending.stop_in_order(active)
        folder.rename(tmp_path / "moved")
        folder.mkdir()

    monkeypatch.setattr(supervisors, "stop_in_order", stop)
    with structlog.testing.capture_logs() as lines:
        assert await ended(folder, {}) == ("failed", None)
    (line,) = [line for line in lines if line["event"] == "end_failed"]
    assert f"got no folder {folder} any more" in line["error"]
    assert not [*folder.iterdir(), *(tmp_path / "moved").glob("summary.json")]


@pytest.mark.anyio
@pytest.mark.parametrize("learner", [True, False], ids=["learner", "no learner"])
@pytest.mark.parametrize("final", [True, False])
async def test_steps_are_compared_with_those_of_the_simulators_only_once_all_are_counted(
    tmp_path: Path, final: bool, learner: bool
) -> None:
    """A coordination that could not be restarted has not counted the last ones. No monitor has written anything.

    Nor has the learner of a run that ended before it had begun.
    """
    counts = StepCounts(produced=90, trained=80, ghost=0, stale=0, lost=10, open=0)
    run = dataclasses.replace(
        FINISHED, step_counts={"Goal": counts}, losses={"Goal": {"learning": 10}}, unaccounted={"Goal": 0}, final=final
    )
    _, summary = await ended(tmp_path, {}, run, dataclasses.replace(state_of(""), trained=80) if learner else None)
    assert summary is not None
    assert summary["behaviors"]["Goal"]["step_counts"] == dataclasses.asdict(counts)
    assert summary["behaviors"]["Goal"]["losses"] == {"learning": 10}
    assert summary["behaviors"]["Goal"]["unaccounted"] == (0 if final else None)


@pytest.mark.anyio
@pytest.mark.parametrize("seen", [40, 90, 95])
async def test_session_that_ends_before_it_counts_anything_keeps_the_results_of_the_one_before(
    tmp_path: Path, seen: int
) -> None:
    """The monitor may have been killed before that one's end, and then has seen fewer steps."""
    former = BehaviorSummary(
        steps=80,
        updates=4,
        step_counts=step_counts(90),
        losses={"learning": 10},
        unaccounted=0,
        self_play={"elo": 1234.0},
    )
    (tmp_path / "summary.json").write_text(json.dumps({"behaviors": {"Goal": dataclasses.asdict(former)}}))
    figures = dataclasses.asdict(BehaviorSummary(steps=70, step_counts=step_counts(seen)))
    (tmp_path / "status.json").write_text(json.dumps({"behaviors": {"Goal": {"figures": figures}}}))
    _, summary = await ended(tmp_path, {})
    assert summary is not None
    expected = dataclasses.asdict(former) if seen <= 90 else figures
    assert summary["behaviors"] == {"Goal": expected}
    assert not (tmp_path / "summary.former.json").exists()


@pytest.mark.anyio
@pytest.mark.parametrize("damaged", [None, {}, {"produced": "nine"}, [3]])
@pytest.mark.parametrize("name", ["Goal", "\x1b[31m", "../a"])
async def test_damaged_summary_of_the_session_before_is_not_taken_over(
    tmp_path: Path, damaged: object, name: str
) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"behaviors": {name: {"step_counts": damaged}}}))
    _, summary = await ended(tmp_path, {})
    assert summary is not None
    assert summary["behaviors"].keys() <= {"Goal"}
    assert not (tmp_path / "summary.former.json").exists()


def step_counts(produced: int) -> dict[str, int]:
    return dict.fromkeys(STEP_COUNTS, 0) | {"produced": produced, "open": produced}


@pytest.mark.anyio
async def test_monitor_that_fails_at_the_end_does_not_fail_the_run(tmp_path: Path) -> None:
    status, summary = await ended(tmp_path, {"monitor": "exit status 1"})
    assert status == "completed"
    assert summary is not None
    assert summary["error"] is None


@pytest.mark.anyio
async def test_summary_that_cannot_be_written_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "put", full)
    assert await ended(tmp_path, {}) == ("failed", None)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("share", "starts", "cause"),
    [
        pytest.param(0.0, [0, 1, 2, 3], "does not start, and uses no CPU time", id="blocked"),
        pytest.param(0.01, [0], None, id="starved"),
        pytest.param(0.5, [0, 2], "does not answer after 90 s of CPU time", id="endless"),
    ],
)
async def test_service_that_has_never_answered_is_killed_after_enough_cpu_time(
    tmp_path: Path, share: float, starts: list[int], cause: str | None
) -> None:
    """A machine that is too busy gives it little time, which is no fault of the service: it must come to its start."""
    topology = topology_of(tmp_path)
    host = FakeHost({"assembly": "killed"}, share)
    async with MemoryTransport(MemoryHub(), start="supervisor.1") as transport:
        supervisor = supervisor_of(topology, host, transport)
        with anyio.move_on_after(START_S * 3.5), structlog.testing.capture_logs() as lines:
            await supervisor.supervise()
    begun = host.starts["assembly"]
    assert [math.floor((one - begun[0]) / START_S) for one in begun] == starts
    missed = [line for line in lines if line["event"] == "heartbeat_missed" and line["part"] == "assembly"]
    assert {line["cause"] for line in missed} == ({cause} if cause else set())


NOTICED_S = 10.0
"""Limit within which a dead learner is noticed."""


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("hangs_after_s", "starved"), [(20.0, 0.0), (20.2, 0.0), (20.4, 0.0), (20.6, 0.0), (20.8, 0.0), (20.0, -0.5)]
)
async def test_hanging_learner_is_noticed_within_10_seconds(
    tmp_path: Path, hangs_after_s: float, starved: float
) -> None:
    """Its process runs but does not answer. A pause of a few seconds is accepted, so not much earlier either.

    Threads that end take the time along for which they were starved.
    """
    topology = topology_of(tmp_path)
    name, host, hub = "learning-Goal", FakeHost({}, starved=starved), MemoryHub()
    learner = MemoryTransport(hub, start=f"{name}.1")
    async with learner, MemoryTransport(hub, start="supervisor.1") as transport:
        await learner.publisher(name)
        supervisor = supervisor_of(topology, host, transport)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.supervise)
            await anyio.sleep(hangs_after_s)
            assert len(host.starts[name]) == 1, "a learner that answers keeps running"
            learner.abandon()
            with anyio.move_on_after(2 * NOTICED_S) as noticed:
                await host.latest[name].wait()
            assert 8 < anyio.current_time() - (noticed.deadline - 2 * NOTICED_S) <= NOTICED_S
            tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_silence_counts_only_while_a_service_is_given_a_core(tmp_path: Path) -> None:
    """On a machine that is too busy, a restart would take from the others what it needs itself."""
    name, host, hub = "learning-Goal", FakeHost({}, starved=0.9), MemoryHub()
    learner = MemoryTransport(hub, start=f"{name}.1")
    async with learner, MemoryTransport(hub, start="supervisor.1") as transport:
        await learner.publisher(name)
        supervisor = supervisor_of(topology_of(tmp_path), host, transport)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.supervise)
            await anyio.sleep(20)
            learner.abandon()
            with anyio.move_on_after(60):
                await host.latest[name].wait()
                pytest.fail("killed after a few seconds with a core")
            with anyio.fail_after(60):
                await host.latest[name].wait()
            tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_new_incarnation_is_not_judged_by_the_last_report_of_a_dead_one(tmp_path: Path) -> None:
    """The first learner answers and makes no progress; the second has not published anything yet."""
    name, host, hub, stall_s = "learning-Goal", FakeHost({"learning-Goal": "killed"}), MemoryHub(), 12.0
    settings = parse_settings(settings_text(), "test").settings
    settings = settings.model_copy(
        update={"pipeline": settings.pipeline.model_copy(update={"stall_timeout_s": stall_s})}
    )
    topology = build(settings, run_id="test", directory=tmp_path, seed=1)
    learner = MemoryTransport(hub, start=f"{name}.1")
    async with learner, MemoryTransport(hub, start="supervisor.1") as transport:
        supervisor = supervisor_of(topology, host, transport)
        own = supervisor.active.incarnation(name, 1)
        (await learner.publisher(name)).publish(METRICS, Metrics(service=name, start=own, sequence=1, time_s=0.0))
        with structlog.testing.capture_logs() as lines:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(supervisor.supervise)
                await anyio.sleep(1)
                await host.latest[name].wait()
                learner.abandon()
                await anyio.sleep(4 * stall_s)
                tasks.cancel_scope.cancel()
    assert len(host.starts[name]) == 2
    assert [line["root"] for line in lines if line["event"] == "stalled"] == [name]


class HopelessHost(FakeHost):
    """Starts an assembly that a restart would not mend, and a stepping that takes its time at the end."""

    def _started(self, name: str) -> FakeService:
        started = super()._started(name)
        started.hopeless = name == "assembly"
        return DrawingMonitor() if name == "stepping-0" else started


@pytest.mark.anyio
async def test_service_that_has_ended_for_good_misses_no_heartbeat(tmp_path: Path) -> None:
    host, hub = HopelessHost({"assembly": "exit status 3"}), MemoryHub()
    assembly = MemoryTransport(hub, start="assembly.1")
    async with assembly, MemoryTransport(hub, start="supervisor.1") as transport:
        await assembly.publisher("assembly")
        supervisor = supervisor_of(topology_of(tmp_path), host, transport)
        with structlog.testing.capture_logs() as lines:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(supervisor.supervise)
                await anyio.sleep(5)
                assembly.abandon()
                host.latest["assembly"].stop()
    assert [line["part"] for line in lines if line["event"] == "failed"] == ["assembly"]
    assert not [line for line in lines if line["event"] == "heartbeat_missed" and line["part"] == "assembly"]


class FakeExports(Exports):
    """Exports nothing, and records what it is to export."""

    calls: list[object]

    def on_checkpoint(self, _behavior: str, checkpoint: str) -> None:
        if checkpoint not in self.calls:
            self.calls.append(checkpoint)

    async def finish(self, timeout_s: float, *within: Any) -> None:
        await super().finish(timeout_s, *within)
        self.calls.append(timeout_s)


def state_of(checkpoint: str) -> LearnerState:
    start = "learning-Goal.1"
    return LearnerState(behavior="Goal", start=start, version=1, updates=1, trained=1, checkpoint=checkpoint)


@pytest.mark.anyio
@pytest.mark.parametrize("newest", ["checkpoint-000000000900", "recovery-000000000950-0004"])
async def test_every_checkpoint_is_exported_and_the_last_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newest: str
) -> None:
    """The last may be a recovery checkpoint, where the learner died before its final one."""
    monkeypatch.setattr(supervisors, "Exports", FakeExports)
    monkeypatch.setattr(FakeExports, "calls", calls := [], raising=False)
    topology, last = topology_of(tmp_path), f"Goal/{newest}"
    host, hub = FakeHost({}), MemoryHub()
    async with (
        MemoryTransport(hub, start="coordination.1") as own,
        MemoryTransport(hub, start="learning-Goal.1") as learner,
        MemoryTransport(hub, start="supervisor.1") as transport,
    ):
        run, topic = await own.publisher("coordination"), await learner.publisher("learning-Goal")
        supervisor = supervisor_of(topology, host, transport)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.supervise)
            for checkpoint in ("", "Goal/first", "Goal/second"):
                (tmp_path / checkpoint).mkdir(parents=True, exist_ok=True)
                topic.publish(LEARNER_STATE, state_of(checkpoint))
                await anyio.sleep(2)
                assert calls[-1] == checkpoint
            run.publish(RUN, FINISHED)
            await anyio.lowlevel.checkpoint()
            await host.latest["learning-Goal"].wait()  # it saves a checkpoint when it is stopped
            (tmp_path / "Goal" / "checkpoint-000000000800").mkdir(parents=True)
            (tmp_path / last).mkdir()
    assert calls == ["", "Goal/first", "Goal/second", last, EXPORT_S]


@pytest.mark.anyio
@pytest.mark.parametrize(("part", "status"), [("learning-Goal", "failed"), ("assembly", "completed")])
async def test_learner_that_cannot_save_while_the_run_ends_fails_the_run(
    tmp_path: Path, part: str, status: str
) -> None:
    """Its turn to stop has not come yet; what saves nothing is warned of."""
    host, hub = FakeHost({part: "exit status 28"}), MemoryHub()
    async with (
        MemoryTransport(hub, start="coordination.1") as own,
        MemoryTransport(hub, start="supervisor.1") as transport,
    ):
        topic = await own.publisher("coordination")
        supervisor = supervisor_of(topology_of(tmp_path), host, transport)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.supervise)
            await anyio.sleep(1)
            topic.publish(RUN, FINISHED)
            host.latest[part].hopeless = True
            supervisor.active.end("completed")
            host.latest[part].stop()
    assert supervisor.active.status == status


@pytest.mark.anyio
@pytest.mark.parametrize(("part", "again"), [("assembly", True), ("simulator-0", False)])
async def test_service_that_is_dead_when_the_run_ends_is_restarted_once(tmp_path: Path, part: str, again: bool) -> None:
    """Its next incarnation counts the steps that it held as lost; a simulator holds none and stays down."""
    topology = topology_of(tmp_path, "simulators: [{name: balance}]\n")
    host, hub = FakeHost({part: "killed"}), MemoryHub()
    async with (
        MemoryTransport(hub, start="stepping-0.1") as stepping,
        MemoryTransport(hub, start="coordination.1") as own,
        MemoryTransport(hub, start="supervisor.1") as transport,
    ):
        topic = await own.publisher("coordination")
        supervisor = supervisor_of(topology, host, transport)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.supervise)
            await anyio.sleep(2)
            assert "simulator-0" not in host.starts, "it would wait for an address at which nothing listens"
            (await stepping.publisher("stepping-0")).publish(STEPPING_STATE, LISTENING)
            await anyio.sleep(3)
            host.latest[part].stop()
            await anyio.sleep(0.01)
            topic.publish(RUN, FINISHED)
    assert len(host.starts[part]) == (2 if again else 1)
    if again:
        assert host.starts[part][1] - host.starts[part][0] < 5.5, "it is restarted without a pause"


@pytest.mark.anyio
async def test_simulator_that_was_given_up_is_restarted(tmp_path: Path) -> None:
    """A hanging simulator would never connect again; one that started since then is not the one given up."""
    topology = topology_of(tmp_path, "simulators: [{name: balance, count: 2}]\n")
    host, hub = FakeHost({}), MemoryHub()
    limit_s = topology.run.settings.pipeline.simulator_timeout_s
    async with (
        MemoryTransport(hub, start="stepping-0.1") as own,
        MemoryTransport(hub, start="supervisor.1") as transport,
    ):
        topic = await own.publisher("stepping-0")
        supervisor = supervisor_of(topology, host, transport)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.supervise)
            for after_s, given_up in (
                (limit_s / 2, {"0": 1}),
                (limit_s, {"0": 1, "1": 1, "7": 1}),
                (1.0, {"0": 1, "1": 2}),
            ):
                await anyio.sleep(after_s)
                topic.publish(
                    STEPPING_STATE, SteppingState(source="stepping-0.1", behaviors={}, simulators=2, given_up=given_up)
                )
            await anyio.sleep(3)
            tasks.cancel_scope.cancel()
    assert len(host.starts["simulator-0"]) == 1
    (first, second) = host.starts["simulator-1"]
    assert second - first > limit_s


SPEC = BehaviorSpec(observations=(ObservationSpec(name="goal", shape=(1,)),), actions=ActionSpec(continuous=1))


@asynccontextmanager
async def supervised(
    topology: Topology, host: FakeHost, grow: Callable[[Topology, Sequence[str], Ports], Topology]
) -> AsyncIterator[tuple[Supervisor, MemoryTransport, Publisher]]:
    """Yields a supervisor at work, and the transport and topic of a stepping service."""
    hub = MemoryHub()
    async with (
        MemoryTransport(hub, start="stepping-0.1") as own,
        MemoryTransport(hub, start="supervisor.1") as transport,
        anyio.create_task_group() as tasks,
    ):
        topic = await own.publisher("stepping-0")
        with Ports() as ports:
            supervisor = supervisor_of(topology, host, transport, grow=lambda before, names: grow(before, names, ports))
            tasks.start_soon(supervisor.supervise)
            yield supervisor, own, topic
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
@pytest.mark.parametrize("refused", [False, True])
async def test_behavior_that_only_a_simulator_names_gets_a_learner(tmp_path: Path, refused: bool) -> None:
    """The services hear of it and its learner starts, while none restarts; a learner may be refused."""
    topology = topology_of(tmp_path, "default_settings: {max_steps: 7}\n")
    host, requests, added = FakeHost({}), [], []

    def grow(before: Topology, names: Sequence[str], ports: Ports) -> Topology:
        requests.append(list(names))
        if refused:
            raise SettingsError("no checkpoint")
        return before.with_behaviors(names, ports)

    both = BehaviorSpecs(behaviors={"Late": SPEC, "Goal": SPEC}, teams={"Goal": (0,), "Late": (0,)})
    async with supervised(topology, host, grow) as (_, own, topic):
        topic.publish(SPECS, BehaviorSpecs(behaviors={"Goal": SPEC}, teams={"Goal": (0,)}))
        await anyio.sleep(5)
        assert not requests
        subscription = await own.subscribe("supervisor")
        topic.publish(SPECS, both)
        await anyio.sleep(5)
        added.append(subscription.latest(ADDED))
    assert requests == [["Late"]], "requested once"
    assert all(len(starts) == 1 for starts in host.starts.values())
    assert ("learning-Late" in host.starts) is not refused
    if refused:
        assert added == [None]
        return
    assert added[0].names == ("Late",)
    grown = host.topology
    assert grown is not None
    assert {name: one.max_steps for name, one in grown.run.settings.behaviors.items()} == {"Goal": 1000, "Late": 7}
    assert {"segments:Late", "topic:policy-Late", "topic:learning-Late"} <= grown.endpoints.keys()
    assert topology.endpoints.items() <= grown.endpoints.items()
    assert len({*grown.endpoints.values()}) == len(grown.endpoints)


@pytest.mark.anyio
@pytest.mark.parametrize("comes", [False, True])
async def test_behaviors_that_no_simulator_names_are_warned_of_once(tmp_path: Path, comes: bool) -> None:
    """The run would wait for them for ever, as where the configuration has another name."""
    topology = topology_of(tmp_path, "default_settings: {}\n")

    def grow(before: Topology, names: Sequence[str], ports: Ports) -> Topology:
        return before.with_behaviors(names, ports)

    with structlog.testing.capture_logs() as lines:
        async with supervised(topology, FakeHost({}), grow) as (_, _, topic):
            await anyio.sleep(100)
            topic.publish(SPECS, BehaviorSpecs(behaviors={"goal": SPEC}))
            await anyio.sleep(20)
            assert not [line for line in lines if line["event"] == "behaviors_missing"]
            topic.publish(SPECS, BehaviorSpecs(behaviors={"Goal": SPEC} if comes else {}))  # of a restarted process
            await anyio.sleep(100)
    found = [(one["behaviors"], one["named"], one["notice"]) for one in lines if one["event"] == "behaviors_missing"]
    assert found == ([] if comes else [(["Goal"], ["goal"], True)])


@pytest.mark.anyio
@pytest.mark.parametrize("full", [False, True])
async def test_behavior_that_comes_while_the_disk_is_full_gets_its_learner_once_there_is_room(
    tmp_path: Path, full: bool
) -> None:
    """A run without other behaviors does not end before the time in which others wait for room either."""
    text = "default_settings: {}\npipeline: {stall_timeout_s: 60, address: 'tcp://127.0.0.1:0'}\n"
    topology = build(parse_settings(text, "test").settings, run_id="test", directory=tmp_path, seed=1)
    host, requests = FakeHost({}), []

    def grow(before: Topology, names: Sequence[str], ports: Ports) -> Topology:
        requests.append(list(names))
        if full or len(requests) < 4:
            raise OSError(28, "No space left on device")
        return before.with_behaviors(names, ports)

    async with supervised(topology, host, grow) as (supervisor, _, topic):
        topic.publish(SPECS, BehaviorSpecs(behaviors={"Late": SPEC}, teams={"Late": (0,)}))
        await anyio.sleep(40)
        assert not supervisor.active.over.is_set()
        assert ("learning-Late" in host.starts) is not full
        await anyio.sleep(40)
        assert supervisor.active.over.is_set() is full
    assert full or len(requests) == 4


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("teams", "others", "trained", "rated", "playing", "warned"),
    [
        ((0,), (), 64, False, None, "all agents are in one team"),
        ((0,), (), 0, False, None, None),
        ((0, 1), (), 64, False, None, None),
        ((0,), (), 64, True, None, None),
        ((0,), (1,), 0, True, None, "only behaviors without self_play are in other teams: Other"),
        ((0,), (0,), 64, True, None, None),
        ((0, 1), (2,), 64, True, None, None),
        ((0,), (), 0, True, Playback(checkpoints={}, players=["a", "b"]), "all agents are in one team"),
        ((0, 1), (), 0, True, Playback(checkpoints={}, players=["a", "b"]), None),
    ],
)
async def test_behaviors_are_shown_once_and_self_play_without_opponents_is_warned_of(
    tmp_path: Path,
    teams: tuple[int, ...],
    others: tuple[int, ...],
    trained: int,
    rated: bool,
    playing: Playback | None,
    warned: str | None,
) -> None:
    """The warning comes once an update has trained, and not where the simulator itself plays the other team.

    It comes at once in a tournament, which trains nothing, and where behaviors without self-play are the opponents.
    """
    topology = topology_of(tmp_path)
    settings = topology.run.settings
    goal = settings.behaviors["Goal"].model_copy(update={"self_play": SelfPlaySettings()})
    settings = settings.model_copy(update={"behaviors": {"Goal": goal}})
    topology = build(settings, run_id="test", directory=tmp_path, seed=1, playing=playing)
    counts = StepCounts(produced=trained, trained=trained, ghost=0, stale=0, lost=0, open=0)
    learner = RatedLearner(team=0, learning=True, elo=1200, mu=25, sigma=8, ghost_steps=0, opponents={})
    state = dataclasses.replace(
        FINISHED, finished=False, step_counts={"Goal": counts}, ratings={"Goal": learner} if rated else {}
    )
    hub = MemoryHub()
    with structlog.testing.capture_logs() as lines:
        async with (
            MemoryTransport(hub, start="stepping-0.1") as own,
            MemoryTransport(hub, start="supervisor.1") as transport,
            anyio.create_task_group() as tasks,
        ):
            stepping, coordination = await own.publisher("stepping-0"), await own.publisher("coordination")
            tasks.start_soon(supervisor_of(topology, FakeHost({}), transport).supervise)
            read = {"Goal?team=0": "agents 1; observations goal: vector 1"}
            for episodes in (1, 2):
                present = {"Goal": teams, **({"Other": others} if others else {})}
                specs = dict.fromkeys(present, SPEC)
                stepping.publish(SPECS, BehaviorSpecs(behaviors=specs, teams=present, described=read))
                await anyio.sleep(2)
                coordination.publish(RUN, dataclasses.replace(state, episodes={"Goal": episodes}))
                await anyio.sleep(2)
            tasks.cancel_scope.cancel()
    shown = [line for line in lines if line["event"] == "behavior"]
    assert [(line["id"], line["read_as"]) for line in shown] == [*read.items()]
    found = [(line["behaviors"], line["cause"]) for line in lines if line["event"] == "no_opponents"]
    assert found == ([(["Goal"], warned)] if warned else [])
