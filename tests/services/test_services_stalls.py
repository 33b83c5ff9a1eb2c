"""Stalls of the whole graph under a virtual clock: each has one root and the chain of waits that leads to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from sparring.pipeline.games.goal import Goal
from sparring.pipeline.monitoring.overview import STEP_COUNTS
from sparring.pipeline.monitoring.stalls import Stalls
from tests.services import inline
from tests.services.services_graph import Graph, begin
from tests.services.stalls_runs import stalls_after, supervised

pytestmark = pytest.mark.usefixtures("one_thread")

TIMEOUT_S = 12.0


class HangingGame(Goal):
    """A game that hangs after so many steps: its simulator sends neither Step nor Ping."""

    graph: Graph

    def __init__(self, steps: int) -> None:
        super().__init__(areas=4)
        self.left = steps

    def step(self, actions: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            self.graph.frame_s = 1e9
        return super().step(actions)


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["overlap", "lockstep"])
async def test_healthy_run_never_stalls(tmp_path: Path, mode: str) -> None:
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        graph = await begin(tasks, stack, tmp_path, [Goal(areas=4)], mode=mode, max_steps=10**9)
        graph.frame_s = 0.25  # slow: an update takes a while
        stalls = Stalls(graph.run.sinks, TIMEOUT_S)
        for _ in range(18):
            assert await stalls_after(stalls, graph.seen, 1) == []
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["overlap", "lockstep"])
async def test_simulators_that_do_not_answer_are_the_root_of_the_chain(tmp_path: Path, mode: str) -> None:
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        game = HangingGame(40)
        graph = await begin(tasks, stack, tmp_path, [game], mode=mode, max_steps=10**9)
        game.graph = graph
        stalls = Stalls(graph.run.sinks, TIMEOUT_S)
        assert await stalls_after(stalls, graph.seen, TIMEOUT_S - 2) == []
        (stall,) = await stalls_after(stalls, graph.seen, 8)
        assert (stall.root, stall.kind) == ("simulators", "outside")
        assert stall.chain == (
            "learning-Goal waits for segments of Goal from assembly",
            "assembly waits for steps from stepping-0",
            "stepping-0 waits for frames of Goal from simulator 0",
        )
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_stall_without_simulators_names_the_missing_simulator(tmp_path: Path) -> None:
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        graph = await begin(tasks, stack, tmp_path, [])
        (stall,) = await stalls_after(Stalls(graph.run.sinks, TIMEOUT_S), graph.seen, TIMEOUT_S + 5)
        assert stall.root == "simulators"
        assert stall.chain[-1] == "stepping-0 waits for a simulator of Goal"
        tasks.cancel_scope.cancel()


def hanging_learner(
    updates: int, released: anyio.Event, *, shielded: bool
) -> Callable[[str], Callable[[Callable[[], Any]], Any]]:
    """Returns `compute` for services: that of a learner's first incarnation hangs after so many updates.

    Cancellation does not end it if it is shielded.
    """
    starts: list[str] = []

    def of(service: str) -> Callable[[Callable[[], Any]], Any]:
        if not service.startswith("learning"):
            return inline
        starts.append(service)
        left = updates if len(starts) == 1 else 10**9

        async def compute(work: Callable[[], Any]) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                with anyio.CancelScope(shield=shielded):
                    await released.wait()
            return work()

        return compute

    return of


async def play(graph_like: Any, tasks: Any) -> None:
    """Starts a simulator for the services of a host."""
    await anyio.sleep(1)
    graph = Graph(run=graph_like.topology.run, tasks=tasks, frame_s=0.05, listener=graph_like.listener)
    tasks.start_soon(graph.simulate, 0, Goal(areas=4))


@pytest.mark.anyio
async def test_learner_whose_thread_hangs_is_restarted_and_the_run_completes(tmp_path: Path) -> None:
    with capture_logs() as lines:
        async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
            supervisor, host = await supervised(
                tasks,
                stack,
                tmp_path,
                hanging_learner(5, anyio.Event(), shielded=False),
                stall_timeout_s=TIMEOUT_S,
                max_steps=400,
            )
            tasks.start_soon(play, host, tasks)
            status = await supervisor.supervise()
            tasks.cancel_scope.cancel()
    (stalled,) = [line for line in lines if line["event"] == "stalled"]
    assert (stalled["root"], status) == ("learning-Goal", "completed")
    assert "learning-Goal answers, but makes no progress; " in stalled["cause"]
    assert "messages wait for it" in stalled["cause"]
    assert [line["part"] for line in lines if line["event"] == "failed"] == ["learning-Goal"]


@pytest.mark.anyio
async def test_stall_beyond_the_budget_ends_the_run_with_its_cause_and_newest_checkpoint(tmp_path: Path) -> None:
    released = anyio.Event()
    numbers = {"steps": 0, "steps_per_s": 0.0, "updates": 0, "episodes": 0, "reward_mean_last100": None}
    numbers |= {"step_counts": dict.fromkeys(STEP_COUNTS, 0), "lag": {"mean": None, "max": None}}
    (tmp_path / "status.json").write_text(json.dumps({"behaviors": {"Goal": {"figures": numbers}}}))
    with capture_logs() as lines:
        async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
            supervisor, host = await supervised(
                tasks,
                stack,
                tmp_path,
                hanging_learner(8, released, shielded=True),
                stall_timeout_s=TIMEOUT_S,
                stalls={"budget": 0},
                max_steps=10**6,
            )
            tasks.start_soon(play, host, tasks)
            status = await supervisor.supervise()
            released.set()
            tasks.cancel_scope.cancel()
    assert status == "stalled"
    assert [line["error"] for line in lines if line["event"] == "run_stalled"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "stalled"
    assert summary["error"].startswith("learning-Goal: nothing has moved for ")
    assert Path(summary["behaviors"]["Goal"]["checkpoint"]).name.startswith("recovery-")
    assert summary["behaviors"]["Goal"]["weights_sha256"] is None


@pytest.mark.anyio
async def test_run_that_is_being_stopped_does_not_stall(tmp_path: Path) -> None:
    """Its parts wait for each other until their time to stop is over."""
    released = anyio.Event()
    with capture_logs() as lines:
        async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
            supervisor, host = await supervised(
                tasks,
                stack,
                tmp_path,
                hanging_learner(3, released, shielded=True),
                stall_timeout_s=TIMEOUT_S,
                stop_timeout_s=4 * TIMEOUT_S,
                stalls={"budget": 0},
                max_steps=10**6,
            )

            async def stop() -> None:
                await play(host, tasks)
                await anyio.sleep(TIMEOUT_S / 2)
                supervisor.active.end("stopped")

            tasks.start_soon(stop)
            await supervisor.supervise()
            released.set()
            tasks.cancel_scope.cancel()
    assert [line["part"] for line in lines if line["event"] == "stopped_by_force"] == ["learning-Goal"]
    assert not [line for line in lines if line["event"] in ("stalled", "run_stalled")]


@pytest.mark.anyio
async def test_late_simulators_are_reported_and_do_not_end_the_run(tmp_path: Path) -> None:
    with capture_logs() as lines:
        async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
            supervisor, host = await supervised(
                tasks,
                stack,
                tmp_path,
                lambda _: inline,
                stall_timeout_s=TIMEOUT_S,
                stalls={"budget": 0},
                max_steps=500,
            )

            async def late() -> None:
                await anyio.sleep(2.5 * TIMEOUT_S)
                await play(host, tasks)

            tasks.start_soon(late)
            status = await supervisor.supervise()
            tasks.cancel_scope.cancel()
    stalled = [line for line in lines if line["event"] == "stalled"]
    assert status == "completed"
    assert [line["root"] for line in stalled] == ["simulators"] * len(stalled)
    assert len(stalled) in (1, 2)
    assert [line["root"] for line in lines if line["event"] == "stall_resolved"] == ["simulators"]
