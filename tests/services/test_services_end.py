"""What the supervisor makes of services that start, answer and end badly, and of what they say of their checkpoints."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from trio.testing import MockClock

from sparring.pipeline import files
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.messages.state import AssemblyState, BehaviorSpecs, LearnerState, RunState, SteppingState
from sparring.pipeline.queues.memory import MemoryHub, MemoryTransport
from sparring.pipeline.settings import parse_settings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from sparring.services.supervision import supervisor as supervisors
from sparring.services.supervision.ports import Ports
from sparring.services.supervision.supervisor import EXPORT_S, START_S, Supervisor
from sparring.services.supervision.topology import ServicePlan, Topology, build
from tests.services.services_graph import settings_text


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return ("trio", {"clock": MockClock(autojump_threshold=0)})


FINISHED = RunState(
    start="coordination.1",
    finished=True,
    specs={},
    step_counts={},
    routed={},
    versions={},
    reward_mean_last100={},
    episodes={},
)


class Fake:
    """A service that ends when it is asked to, one way or another."""

    pid = None
    hopeless = False

    def __init__(self, failure: str) -> None:
        self._failure = failure
        self._ended = anyio.Event()

    async def wait(self) -> str:
        await self._ended.wait()
        return self._failure

    def stop(self) -> None:
        self._ended.set()

    kill = stop


class Host:
    """Starts fakes."""

    topology: Topology | None = None

    def adopt(self, topology: Topology) -> None:
        self.topology = topology

    def __init__(self, failures: dict[str, str]) -> None:
        self.starts: dict[str, list[float]] = {}
        self.latest: dict[str, Fake] = {}
        self._failures = failures

    def service(self, plan: ServicePlan, start: str, *, first: bool) -> Fake:
        return self._started(plan.name)

    def watched(self, name: str, command: object, environment: object) -> Fake:
        return self._started(name)

    def _started(self, name: str) -> Fake:
        self.starts.setdefault(name, []).append(anyio.current_time())
        self.latest[name] = Fake(self._failures.get(name, ""))
        return self.latest[name]


async def ended(folder: Path, failures: dict[str, str]) -> tuple[str, dict[str, Any] | None]:
    """Status and summary of a run that coordination calls finished."""
    settings = parse_settings(settings_text(), "test").settings
    topology = build(settings, run_id="test", directory=folder, seed=1)
    hub = MemoryHub()
    async with MemoryTransport(hub, start="coordination.1") as own, MemoryTransport(hub, start="supervisor.1") as other:
        topic = await own.topic("coordination")
        topic.publish("run", FINISHED)
        supervisor = Supervisor(topology, Host(failures), None, other, clock=anyio.current_time)  # type: ignore[arg-type]
        with anyio.fail_after(300):
            status = await supervisor.supervise()
    path = folder / "summary.json"
    return status, json.loads(path.read_text()) if path.exists() else None


NO_ROOM = "exit status 28, no room on the disk"


@pytest.mark.anyio
@pytest.mark.parametrize("part", ["learning-Goal", "coordination"])
async def test_what_could_not_be_kept_fails_the_run(tmp_path: Path, part: str) -> None:
    status, summary = await ended(tmp_path, {part: NO_ROOM})
    assert status == "failed"
    assert summary is not None
    assert summary["status"] == "failed"
    assert summary["error"] == f"{part} failed at the end: {NO_ROOM}"


@pytest.mark.anyio
async def test_curves_that_could_not_be_drawn_do_not(tmp_path: Path) -> None:
    status, summary = await ended(tmp_path, {"monitor": "exit status 1"})
    assert status == "completed"
    assert summary is not None
    assert summary["error"] is None


@pytest.mark.anyio
async def test_a_summary_that_has_no_room_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "put", full)
    assert await ended(tmp_path, {}) == ("failed", None)


@pytest.mark.anyio
async def test_a_start_that_took_too_long_is_followed_by_one_with_twice_the_time(tmp_path: Path) -> None:
    """Else nothing would ever start where the machine is slower than we thought."""
    settings = parse_settings(settings_text(), "test").settings
    topology = build(settings, run_id="test", directory=tmp_path, seed=1)
    host = Host({"assembly": "killed"})
    async with MemoryTransport(MemoryHub(), start="supervisor.1") as transport:
        supervisor = Supervisor(topology, host, None, transport, clock=anyio.current_time)  # type: ignore[arg-type]
        with anyio.move_on_after(START_S * 16):
            await supervisor.supervise()
    times = host.starts["assembly"]
    gaps = [(after - before) / START_S for before, after in itertools.pairwise(times)]
    assert [math.floor(gap) for gap in gaps] == [1, 2, 4, 8]
    assert all(gap - math.floor(gap) < 0.1 for gap in gaps)


KNOWN_S = 10.0
"""A dead learner is known within this."""


@pytest.mark.anyio
@pytest.mark.parametrize("hangs_after_s", [20.0, 20.2, 20.4, 20.6, 20.8])
async def test_a_learner_that_hangs_is_known_within_10_seconds_whenever_it_does(
    tmp_path: Path, hangs_after_s: float
) -> None:
    """Its process lives, but does not answer. Not much sooner, either: a pause of some seconds is no death."""
    topology = build(parse_settings(settings_text(), "test").settings, run_id="test", directory=tmp_path, seed=1)
    name, host, hub = "learning-Goal", Host({}), MemoryHub()
    learner = MemoryTransport(hub, start=f"{name}.1")
    async with learner, MemoryTransport(hub, start="supervisor.1") as other:
        await learner.topic(name)
        supervisor = Supervisor(topology, host, None, other, clock=anyio.current_time)  # type: ignore[arg-type]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.supervise)
            await anyio.sleep(hangs_after_s)
            assert len(host.starts[name]) == 1, "one that answers is left alone"
            learner.abandon()
            with anyio.move_on_after(2 * KNOWN_S) as known:
                await host.latest[name].wait()
            assert 8 < anyio.current_time() - (known.deadline - 2 * KNOWN_S) <= KNOWN_S
            tasks.cancel_scope.cancel()


class ExportResult:
    """In the place of a run's exports: what the supervisor said to them."""

    def __init__(self, *_: object, **__: object) -> None:
        self.running = False
        self.said: list[object] = []

    async def run(self) -> None:
        self.running = True

    def saw(self, _behavior: str, checkpoint: str) -> None:
        if checkpoint not in self.said:
            self.said.append(checkpoint)

    async def finish(self, timeout_s: float) -> None:
        self.said.append(timeout_s)


def at(checkpoint: str) -> LearnerState:
    start = "learning-Goal.1"
    return LearnerState(behavior="Goal", start=start, version=1, updates=1, trained=1, checkpoint=checkpoint)


@pytest.mark.anyio
async def test_every_checkpoint_of_a_run_is_exported_and_the_last_one_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exports = ExportResult()
    monkeypatch.setattr(supervisors, "Exports", lambda *_, **__: exports)
    topology = build(parse_settings(settings_text(), "test").settings, run_id="test", directory=tmp_path, seed=1)
    host, hub = Host({}), MemoryHub()
    async with (
        MemoryTransport(hub, start="coordination.1") as own,
        MemoryTransport(hub, start="learning-Goal.1") as learner,
        MemoryTransport(hub, start="supervisor.1") as other,
    ):
        run, topic = await own.topic("coordination"), await learner.topic("learning-Goal")
        supervisor = Supervisor(topology, host, None, other, clock=anyio.current_time)  # type: ignore[arg-type]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.supervise)
            for checkpoint in ("", "Goal/first", "Goal/second"):
                topic.publish("state", at(checkpoint))
                await anyio.sleep(2)
                assert exports.said[-1] == checkpoint
            run.publish("run", FINISHED)
            await anyio.lowlevel.checkpoint()
            await host.latest["learning-Goal"].wait()  # it saves what it has when it is told to stop
            topic.publish("state", at("Goal/last"))
    assert exports.running
    assert exports.said == ["", "Goal/first", "Goal/second", "Goal/last", EXPORT_S]


@pytest.mark.anyio
@pytest.mark.parametrize(("part", "again"), [("assembly", True), ("simulator-0", False)])
async def test_a_service_that_is_dead_when_a_run_ends_is_started_once_more(
    tmp_path: Path, part: str, again: bool
) -> None:
    """What it held is counted by its next start, and its turn to stop comes later. A simulator holds nothing."""
    text = settings_text() + "simulators: [{name: balance}]\n"
    topology = build(parse_settings(text, "test").settings, run_id="test", directory=tmp_path, seed=1)
    host, hub = Host({part: "killed"}), MemoryHub()
    async with MemoryTransport(hub, start="coordination.1") as own, MemoryTransport(hub, start="supervisor.1") as other:
        topic = await own.topic("coordination")
        supervisor = Supervisor(topology, host, host, other, clock=anyio.current_time)  # type: ignore[arg-type]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.supervise)
            await anyio.sleep(5)
            host.latest[part].stop()
            await anyio.sleep(0.01)
            topic.publish("run", FINISHED)
    assert len(host.starts[part]) == (2 if again else 1)
    if again:
        assert host.starts[part][1] - host.starts[part][0] < 5.5, "nobody waits any more"


@pytest.mark.anyio
async def test_a_simulator_that_was_given_up_is_ended_and_started_again(tmp_path: Path) -> None:
    """One that hangs would never come back; one that is younger than the silence was not meant."""
    text = settings_text() + "simulators: [{name: balance, count: 2}]\n"
    settings = parse_settings(text, "test").settings
    topology = build(settings, run_id="test", directory=tmp_path, seed=1)
    host, hub = Host({}), MemoryHub()
    limit_s = settings.pipeline.simulator_timeout_s
    async with MemoryTransport(hub, start="stepping-0.1") as own, MemoryTransport(hub, start="supervisor.1") as other:
        topic = await own.topic("stepping-0")
        supervisor = Supervisor(topology, host, host, other, clock=anyio.current_time)  # type: ignore[arg-type]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.supervise)
            for after_s, given_up in (
                (limit_s / 2, {"0": 1}),
                (limit_s, {"0": 1, "1": 1, "7": 1}),
                (1.0, {"0": 1, "1": 2}),
            ):
                await anyio.sleep(after_s)
                topic.publish(
                    "state", SteppingState(source="stepping-0.1", behaviors={}, simulators=2, given_up=given_up)
                )
            await anyio.sleep(3)
            tasks.cancel_scope.cancel()
    assert len(host.starts["simulator-0"]) == 1
    (first, second) = host.starts["simulator-1"]
    assert second - first > limit_s


SPEC = BehaviorSpec(observations=(ObservationSpec(name="goal", shape=(1,)),), actions=ActionSpec(continuous=1))


@pytest.mark.anyio
@pytest.mark.parametrize("refused", [False, True])
async def test_a_behavior_that_only_a_simulator_names_gets_a_learner(tmp_path: Path, refused: bool) -> None:
    """What lies before it starts anew, and only then the learner comes. Where it cannot be prepared the run ends."""
    text = settings_text() + "default_settings: {max_steps: 7}\n"
    topology = build(parse_settings(text, "test").settings, run_id="test", directory=tmp_path, seed=1)
    host, hub, asked = Host({}), MemoryHub(), []

    def grow(before: Topology, names: Sequence[str]) -> Topology:
        asked.append(list(names))
        if refused:
            raise SettingsError("no checkpoint")
        return before.growing(names, None, ports)

    both = BehaviorSpecs(behaviors={"Late": SPEC, "Goal": SPEC}, teams={"Goal": (0,), "Late": (0,)})
    async with (
        MemoryTransport(hub, start="stepping-0.1") as own,
        MemoryTransport(hub, start="supervisor.1") as other,
        anyio.create_task_group() as tasks,
    ):
        topic = await own.topic("stepping-0")
        with Ports() as ports:
            supervisor = Supervisor(topology, host, None, other, clock=anyio.current_time, grow=grow)  # type: ignore[arg-type]
            tasks.start_soon(supervisor.supervise)
            topic.publish("specs", BehaviorSpecs(behaviors={"Goal": SPEC}, teams={"Goal": (0,)}))
            await anyio.sleep(5)
            assert not asked
            topic.publish("specs", both)
            await anyio.sleep(5)
        tasks.cancel_scope.cancel()
    assert asked == [["Late"]], "once"
    starts = 1 if refused else 2
    between = ("assembly", "coordination", "monitor")
    assert [len(host.starts[name]) for name in ("stepping-0", "learning-Goal")] == [1, 1]
    assert [len(host.starts[name]) for name in between] == [starts] * 3
    assert len(host.starts.get("learning-Late", [])) == (0 if refused else 1)
    if refused:
        return
    assert host.starts["learning-Late"][0] >= max(host.starts[name][1] for name in between)
    grown = host.topology
    assert grown is not None
    assert {name: one.max_steps for name, one in grown.run.settings.behaviors.items()} == {"Goal": 1000, "Late": 7}
    assert {"segments:Late", "updates:Late", "topic:policy-Late", "topic:learning-Late"} <= grown.endpoints.keys()
    assert topology.endpoints.items() <= grown.endpoints.items()
    assert len({*grown.endpoints.values()}) == len(grown.endpoints)


@pytest.mark.anyio
async def test_a_run_that_ends_while_a_learner_is_about_to_be_added_ends_in_order(tmp_path: Path) -> None:
    """It waits for assembly, which has not said anything since it was started anew."""
    text = settings_text() + "default_settings: {max_steps: 7}\n"
    topology = build(parse_settings(text, "test").settings, run_id="test", directory=tmp_path, seed=1)
    host, hub = Host({}), MemoryHub()
    async with (
        MemoryTransport(hub, start="stepping-0.1") as stepping,
        MemoryTransport(hub, start="assembly.1") as assembly,
        MemoryTransport(hub, start="coordination.1") as coordination,
        MemoryTransport(hub, start="supervisor.1") as other,
    ):
        topics = [await one.topic(one.start.partition(".")[0]) for one in (stepping, assembly, coordination)]
        topics[1].publish("state", AssemblyState(origin="assembly.1", held={}))
        with Ports() as ports:

            def grow(before: Topology, names: Sequence[str]) -> Topology:
                return before.growing(names, None, ports)

            supervisor = Supervisor(topology, host, None, other, clock=anyio.current_time, grow=grow)  # type: ignore[arg-type]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(supervisor.supervise)
                topics[0].publish("specs", BehaviorSpecs(behaviors={"Late": SPEC}, teams={"Late": (0,)}))
                await anyio.sleep(5)
                assert len(host.starts["assembly"]) == 2
                topics[2].publish("run", FINISHED)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "completed"
    assert "learning-Late" not in host.starts
