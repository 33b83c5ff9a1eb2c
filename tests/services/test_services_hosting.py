"""How a process ended, as it is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from sparring.pipeline.errors import NO_ROOM
from sparring.services.process.hosting import Process, ProcessHost


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ProcessHost]:
    made = ProcessHost(tmp_path)
    yield made
    made.close()


def start(host: ProcessHost, code: str) -> Process:
    return host.start("one", [sys.executable, "-c", code], {})


@pytest.mark.anyio
async def test_the_last_words_are_those_of_this_start(host: ProcessHost) -> None:
    assert await start(host, "raise SystemExit('no such file')").wait() == "exit status 1: no such file"
    assert await start(host, "import os; os.kill(os.getpid(), 9)").wait() == "signal SIGKILL"


@pytest.mark.anyio
async def test_a_simulators_end_is_told_as_if_nobody_watched_it(host: ProcessHost) -> None:
    for code, told in (("os.kill(os.getpid(), 9)", "signal SIGKILL"), ("os._exit(3)", "exit status 3"), ("0", "")):
        process = host.watched("one", [sys.executable, "-c", f"import os; {code}"], {})
        with anyio.fail_after(30):
            assert await process.wait() == told


@pytest.mark.anyio
async def test_one_that_is_stopped_before_it_listens_has_ended_as_asked(host: ProcessHost) -> None:
    process = start(host, "import time; time.sleep(50)")
    process.stop()
    with anyio.fail_after(30):
        assert await process.wait() == ""
    other = start(host, "import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert await other.wait() == "signal SIGTERM"


@pytest.mark.anyio
async def test_one_without_room_is_told_by_its_status_and_not_started_again(host: ProcessHost) -> None:
    process = start(host, f"raise SystemExit({NO_ROOM})")
    assert await process.wait() == "exit status 28, no room on the disk"
    assert process.hopeless
