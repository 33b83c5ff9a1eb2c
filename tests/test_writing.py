"""What nothing goes on without is written again until there is room, and who waits for that says so."""

from __future__ import annotations

import errno
from typing import Any

import anyio
import pytest
import structlog
from trio.testing import MockClock

from sparring.pipeline.errors import NoRoom
from sparring.pipeline.monitoring.metrics import Registry
from sparring.pipeline.monitoring.progress import ProgressTracker
from sparring.pipeline.monitoring.writing import COUNTER, Writing


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return ("trio", {"clock": MockClock(autojump_threshold=0)})


class Disk:
    """A disk that has room from some time on."""

    def __init__(self, room_at: float) -> None:
        self.registry = Registry("learning-Walk", "learning-Walk.1")
        self.progress = ProgressTracker(self.registry, anyio.current_time)
        self.writing = Writing(self.registry, structlog.get_logger(), anyio.current_time, 20.0, self.progress)
        self.said: list[str] = []
        self._room_at = room_at

    async def write(self) -> str:
        self.said.append(self.progress.waiting_for)
        if anyio.current_time() < self._room_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return "written"


@pytest.mark.anyio
async def test_it_says_what_it_waits_for_until_there_is_room() -> None:
    disk = Disk(room_at=anyio.current_time() + 1.7)
    disk.progress.waits("segments", "steps", "stepping-0")
    assert await disk.writing.until_done(disk.write, "the books") == "written"
    waits = "room on the disk for the books"
    assert disk.said == ["steps", waits, waits, waits, waits]
    assert disk.progress.waiting_for == "steps"
    assert disk.registry.snapshot(0.0, "", ()).counters[COUNTER] == 4


@pytest.mark.anyio
async def test_without_room_it_gives_up_in_time() -> None:
    disk, began = Disk(room_at=float("inf")), anyio.current_time()
    with pytest.raises(NoRoom, match=r"got .*No space left.*for 5 s; expected to write the books.*make room"):
        await disk.writing.until_done(disk.write, "the books", 5.0)
    assert 5.0 <= anyio.current_time() - began < 6.0
