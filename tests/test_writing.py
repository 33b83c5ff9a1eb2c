"""Indispensable files are written again until the disk has space, and progress reports the wait."""

from __future__ import annotations

import errno
import os

import anyio
import pytest
import structlog

from sparring.pipeline.errors import DiskFull
from sparring.pipeline.monitoring.metrics import Registry
from sparring.pipeline.monitoring.progress import ProgressTracker
from sparring.pipeline.monitoring.writing import COUNTER, Writing


class Disk:
    """A disk that is full until `free_at`."""

    def __init__(self, free_at: float, error: int = errno.ENOSPC) -> None:
        self.registry = Registry("learning-Walk", "learning-Walk.1")
        self.progress = ProgressTracker(self.registry, anyio.current_time)
        self.writing = Writing(self.registry, structlog.get_logger(), anyio.current_time, 20.0, self.progress)
        self.waits: list[str] = []
        self._free_at, self._error = free_at, error

    async def write(self) -> str:
        self.waits.append(self.progress.waiting_for)
        if anyio.current_time() < self._free_at:
            raise OSError(self._error, os.strerror(self._error))
        return "written"


@pytest.mark.anyio
async def test_progress_names_the_disk_until_the_write_succeeds() -> None:
    disk = Disk(free_at=anyio.current_time() + 1.7)
    disk.progress.waits("segments", "steps", "stepping-0")
    assert await disk.writing.until_done(disk.write, "the step counts") == "written"
    waiting = "room on the disk for the step counts"
    assert disk.waits == ["steps", *4 * [waiting]]
    assert disk.progress.waiting_for == "steps"
    assert disk.registry.snapshot(0.0, "", ()).counters[COUNTER] == 4


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("error", "remedy"), [(errno.ENOSPC, "free disk space, then"), (errno.EISDIR, "correct what is there, then")]
)
async def test_writing_that_fails_is_given_up_at_the_deadline(error: int, remedy: str) -> None:
    disk, began = Disk(float("inf"), error), anyio.current_time()
    expected = rf"got .*{os.strerror(error)} for 5 s; expected to write the step counts.*; {remedy} continue"
    with pytest.raises(DiskFull, match=expected):
        await disk.writing.until_done(disk.write, "the step counts", 5.0)
    assert 5.0 <= anyio.current_time() - began < 6.0
