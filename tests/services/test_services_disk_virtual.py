"""The whole graph on a disk that is full for a while or forever, under a virtual clock."""

from __future__ import annotations

import errno
from contextlib import AsyncExitStack
from pathlib import Path
from typing import BinaryIO

import anyio
import pytest

from sparring.pipeline import files
from sparring.pipeline.errors import DiskFull, first_failure
from sparring.pipeline.games.goal import Goal
from sparring.pipeline.learning.checkpoints import CheckpointFolder
from sparring.pipeline.monitoring.writing import COUNTER
from tests.services.services_graph import Graph, begin
from tests.services.services_helpers import balanced

AGENTS = 4


class Disk:
    """Replaces `files.put`; a full disk still accepts a part of the first write."""

    def __init__(self) -> None:
        self.full = False
        self._free_bytes = 3

    def put(self, file: BinaryIO, data: bytes) -> None:
        if self.full:
            file.write(data[: self._free_bytes])
            self._free_bytes = 0
            raise OSError(errno.ENOSPC, "No space left on device")
        file.write(data)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()
    monkeypatch.setattr(files, "put", made.put)
    return made


def failed_writes(graph: Graph) -> float:
    """Returns the number of failed writes that the services counted."""
    topics = [graph.latest(name, "metrics") for name in graph.services]
    return sum(topic.counters.get(COUNTER, 0) for topic in topics if topic is not None)


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["overlap", "lockstep"])
async def test_run_waits_for_disk_space_and_loses_nothing(tmp_path: Path, disk: Disk, mode: str) -> None:
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        graph = await begin(tasks, stack, tmp_path, [Goal(areas=AGENTS)], mode=mode, max_steps=2000)
        await graph.until("Goal", lambda state: state.updates >= 5)
        disk.full = True
        await anyio.sleep(20)
        before = graph.latest("learning-Goal", "state")
        assert failed_writes(graph) > 1
        await anyio.sleep(20)
        assert (
            graph.latest("learning-Goal", "state").updates <= before.updates + 1
        )  # no version is published before it is on disk
        disk.full = False
        step_counts = await graph.finish()
        assert balanced(step_counts), step_counts
        assert step_counts["lost"] == step_counts["stale"] == 0
        assert step_counts["trained"] >= 2000
        assert sum(graph.counts.values()) == step_counts["produced"]
        assert CheckpointFolder(tmp_path, "Goal").load_latest().trained == step_counts["trained"]
        tasks.cancel_scope.cancel()


@pytest.mark.slow
@pytest.mark.anyio
async def test_failed_checkpoint_is_counted_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions and step counts are small and still fit where a checkpoint does not."""

    def put(file: BinaryIO, data: bytes) -> None:
        file.write(data[:512])
        if len(data) > 512 and ".partial-" in str(file.name):
            raise OSError(errno.ENOSPC, "No space left on device")
        file.write(data[512:])

    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        with monkeypatch.context() as patched:
            patched.setattr(files, "put", put)
            graph = await begin(tasks, stack, tmp_path, [Goal(areas=AGENTS)], max_steps=100_000)
            graph.frame_s = 0.02
            await graph.until("Goal", lambda state: state.updates >= 40)
            await anyio.sleep(1.5)
            assert failed_writes(graph) >= 1
            folder = CheckpointFolder(tmp_path, "Goal")
            assert folder.newest_first() == []
            assert not list(folder.path.glob(".partial-*"))
        now = graph.latest("learning-Goal", "state").updates
        await graph.until("Goal", lambda state: state.updates >= now + 40)
        assert CheckpointFolder(tmp_path, "Goal").load_latest().updates >= now
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_disk_that_stays_full_ends_the_run_with_its_cause_and_an_intact_checkpoint(
    tmp_path: Path, disk: Disk
) -> None:
    with pytest.raises(ExceptionGroup) as failure:  # noqa: PT012 - the graph fails while it runs
        async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
            graph = await begin(tasks, stack, tmp_path, [Goal(areas=AGENTS)], max_steps=100_000)
            graph.frame_s = 0.02
            await graph.until("Goal", lambda _: bool(CheckpointFolder(tmp_path, "Goal").newest_first()))
            disk.full = True
            await anyio.sleep(2 * graph.run.settings.pipeline.stall_timeout_s)
            raise AssertionError("no service gave up")
    error = first_failure(failure.value)
    assert isinstance(error, DiskFull)
    assert "No space left on device" in str(error)
    assert CheckpointFolder(tmp_path, "Goal").load_latest().updates > 0
