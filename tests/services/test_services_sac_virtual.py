"""SAC in the whole graph under a virtual clock: budget, accounting, and what a killed learner trains on."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import numpy as np
import pytest

from sparring.pipeline.games.goal import Goal
from sparring.pipeline.learning.checkpoints import CheckpointFolder
from sparring.pipeline.monitoring.metrics import mean
from tests.services.services_graph import begin
from tests.services.services_helpers import balanced

pytestmark = pytest.mark.usefixtures("one_thread")

SAC = {"trainer": "sac", "buffer_size": 600}


def hyper(**changes: object) -> str:
    return ", ".join(f"{name}: {value}" for name, value in ({"steps_per_update": 16} | changes).items())


@pytest.mark.anyio
@pytest.mark.parametrize("part", ["stepping-0", "assembly", "coordination", "learning-Goal"])
async def test_killed_service_restarts_and_the_step_counts_balance(tmp_path: Path, part: str) -> None:
    """The kept replay then holds the steps that its checkpoint had, and of all others only those that arrived since."""
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        games = [Goal(areas=4) for _ in range(2)]
        graph = await begin(tasks, stack, tmp_path, games, hyper=hyper(save_replay_buffer="true"), **SAC)
        await graph.until("Goal", lambda state: state.trained >= 500)
        await graph.kill(part)
        step_counts = await graph.finish()
        assert balanced(step_counts), step_counts
        assert step_counts["trained"] >= 1000
        assert step_counts["stale"] == 0
        assert step_counts["lost"] <= (1000 if part == "learning-Goal" else 2 * 4 * 66)
        first_slot, first_step, reached = np.load(tmp_path / "Goal" / "replay" / "counts.npy")
        left = np.load(tmp_path / "Goal" / "replay" / "left.npy")
        assert first_slot == first_step == 0
        assert step_counts["trained"] < reached
        assert len(left) == 600
        last = CheckpointFolder(tmp_path, "Goal").load_latest()
        assert last.optimizer["replay.counters"][1] == last.trained == step_counts["trained"]
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_lockstep_has_no_lag_and_repeats_its_weights(tmp_path: Path) -> None:
    digests = []
    for attempt, frame_s in enumerate((0.001, 0.03)):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
            games = [Goal(areas=4) for _ in range(3)]
            graph = await begin(tasks, stack, folder, games, mode="lockstep", hyper=hyper(), **SAC)
            graph.frame_s = frame_s
            step_counts = await graph.finish()
            assert balanced(step_counts), step_counts
            assert mean(graph.latest("learning-Goal", "metrics").histograms["lag/Goal"]) == 0
            digests.append(graph.latest("learning-Goal", "state").weights_sha256)
            tasks.cancel_scope.cancel()
    assert digests[0] == digests[1]
