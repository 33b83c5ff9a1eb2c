"""The whole graph under a virtual clock, without processes, sockets or waiting."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

from sparring.pipeline.games.goal import Goal
from sparring.pipeline.monitoring.metrics import highest, mean
from tests.services.services_graph import Graph, begin
from tests.services.services_helpers import balanced

pytestmark = pytest.mark.usefixtures("one_thread")

AGENTS = 4


def lag_of(graph: Graph) -> Any:
    return graph.latest("learning-Goal", "metrics").histograms["lag/Goal"]


@pytest.mark.anyio
@pytest.mark.parametrize("count", [1, 3])
async def test_overlap_trains_to_the_end_with_balanced_step_counts(tmp_path: Path, count: int) -> None:
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        graph = await begin(tasks, stack, tmp_path, [Goal(areas=AGENTS) for _ in range(count)])
        step_counts = await graph.finish()
        assert balanced(step_counts), step_counts
        assert step_counts["trained"] >= 1000
        assert step_counts["lost"] == step_counts["stale"] == 0
        assert sum(graph.counts.values()) == step_counts["produced"]
        assert highest(lag_of(graph)) <= 2
        counters = graph.latest("assembly", "metrics").counters
        assert counters["step_reward.count/Goal"] == counters["segment_steps/Goal"] >= 1000
        assert not graph.faults
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_end_waits_for_no_learner_whose_behavior_no_simulator_has(tmp_path: Path) -> None:
    """Nothing but an announcement is on its way to it."""
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        graph = await begin(tasks, stack, tmp_path, [Goal(areas=AGENTS)], names=("Goal", "Never"), max_steps=100_000)
        await graph.until("Goal", lambda state: state.trained >= 100)
        began = anyio.current_time()
        step_counts = await graph.finish(early=lambda: True)
        assert balanced(step_counts), step_counts
        assert anyio.current_time() - began < 5.0
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_lockstep_has_no_lag_and_repeats_its_weights(tmp_path: Path) -> None:
    digests = []
    for attempt, frame_s in enumerate((0.001, 0.03)):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
            graph = await begin(tasks, stack, folder, [Goal(areas=AGENTS) for _ in range(3)], mode="lockstep")
            graph.frame_s = frame_s
            step_counts = await graph.finish()
            assert balanced(step_counts), step_counts
            assert mean(lag_of(graph)) == 0
            assert step_counts["open"] <= 3 * AGENTS  # of the last round of decisions
            digests.append(graph.latest("learning-Goal", "state").weights_sha256)
            tasks.cancel_scope.cancel()
    assert digests[0] == digests[1]


@pytest.mark.anyio
@pytest.mark.parametrize("part", ["stepping-0", "assembly", "coordination", "learning-Goal"])
@pytest.mark.parametrize(("mode", "trained"), [("overlap", 400), ("lockstep", 1)])
async def test_killed_service_restarts_and_the_step_counts_balance(
    tmp_path: Path, part: str, mode: str, trained: int
) -> None:
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        graph = await begin(tasks, stack, tmp_path, [Goal(areas=AGENTS) for _ in range(2)], mode=mode, max_steps=1000)
        await graph.until("Goal", lambda state: state.trained >= trained)
        await graph.kill(part)
        step_counts = await graph.finish()
        print(graph.describe())
        assert balanced(step_counts), step_counts
        assert step_counts["trained"] >= 1000
        bound = {
            "stepping-0": 2 * AGENTS * 66,
            "assembly": 2 * 64 + 2 * AGENTS,
            "coordination": 0,
            "learning-Goal": 1000,
        }
        assert step_counts["lost"] <= bound[part]
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_run_whose_simulators_never_came_ends_at_once(tmp_path: Path) -> None:
    """Its learner does not know its behavior, and takes nothing from its queue."""
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        graph = await begin(tasks, stack, tmp_path, [])
        await anyio.sleep(5)
        began = anyio.current_time()
        for name in graph.services:
            graph.stops[name].set()
            await graph.ended[name].wait()
        assert anyio.current_time() - began < 1
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_simulator_of_another_spec_is_refused_also_where_it_is_the_first_after_a_restart(tmp_path: Path) -> None:
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        graph = await begin(tasks, stack, tmp_path, [Goal(areas=AGENTS)])
        await graph.until("Goal", lambda state: state.trained >= 400)
        graph.scopes["stepping-0"].cancel()
        await graph.ended["stepping-0"].wait()
        graph.listener, graph.frame_s = None, 1.0
        graph.start("stepping-0")
        while graph.listener is None:  # noqa: ASYNC110 (virtual time)
            await anyio.sleep(0.001)
        await graph.simulate(1, Goal(areas=AGENTS, actions=2))
        assert [one.code for one in graph.faults] == ["specs"]
        graph.frame_s = 0.001
        step_counts = await graph.finish()
        assert (balanced(step_counts), step_counts["trained"] >= 1000) == (True, True), step_counts
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_what_only_a_dead_simulator_knew_is_unknown_and_not_negative(tmp_path: Path) -> None:
    """Coordination and stepping die, and no simulator comes to the new stepping process."""
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        graph = await begin(tasks, stack, tmp_path, [])
        playing = anyio.CancelScope()
        tasks.start_soon(_simulate_within, playing, graph)
        await graph.until("Goal", lambda state: state.trained >= 400)
        tasks.start_soon(graph.kill, "coordination")
        tasks.start_soon(graph.kill, "stepping-0")
        await anyio.sleep(0.01)
        playing.cancel()
        await anyio.sleep(3)
        step_counts = await graph.finish(early=lambda: True)
        assert balanced(step_counts), step_counts
        assert graph.latest("coordination", "run").unaccounted == {}
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_what_stepping_reported_to_a_dead_coordination_is_unknown_and_not_negative(tmp_path: Path) -> None:
    """Coordination hangs from the start, and the one that takes over at the end hears of stepping no more."""
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        graph = await begin(tasks, stack, tmp_path, [Goal(areas=AGENTS)], buffer_size=4096, max_steps=8192)
        await graph.until("Goal", lambda state: state.trained >= 4096)
        graph.stops["stepping-0"].set()
        graph.scopes["coordination"].cancel()
        for name in ("stepping-0", "coordination"):
            await graph.ended[name].wait()
        (graph.run.directory / "coordination.json").unlink()  # it has never written one
        graph.start("coordination")
        await anyio.sleep(1)
        step_counts = await graph.finish(early=lambda: True)
        assert step_counts["produced"] >= 4096
        assert graph.latest("coordination", "run").unaccounted == {}
        tasks.cancel_scope.cancel()


async def _simulate_within(scope: anyio.CancelScope, graph: Graph) -> None:
    with scope:
        await graph.simulate(0, Goal(areas=AGENTS))


@pytest.mark.anyio
async def test_steps_of_a_simulator_that_came_shortly_before_a_crash_are_counted(tmp_path: Path) -> None:
    """Its next Hello reports them, and coordination has to know that none of them is of an earlier run."""
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        graph = await begin(tasks, stack, tmp_path, [Goal(areas=AGENTS)], buffer_size=4096, max_steps=4096)
        await anyio.sleep(0.26)  # stepping has just reported
        tasks.start_soon(graph.simulate, 1, Goal(areas=AGENTS))
        await anyio.sleep(0.02)
        await graph.kill("stepping-0")
        step_counts = await graph.finish()
        assert balanced(step_counts), step_counts
        assert graph.latest("coordination", "run").unaccounted == {"Goal": 0}
        assert sum(graph.counts.values()) == step_counts["produced"]
        tasks.cancel_scope.cancel()
