"""What the supervisor makes of services that start, answer and end badly."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import anyio
import pytest
from services_graph import settings_text
from trio.testing import MockClock

from pipeline import files
from pipeline.messages.service import RunState
from pipeline.queues.memory import MemoryHub, MemoryTransport
from pipeline.settings import parse_settings
from services.supervisor import START_S, Supervisor
from services.topology import ServicePlan, build


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return ("trio", {"clock": MockClock(autojump_threshold=0)})


FINISHED = RunState(
    start="coordination.1",
    finished=True,
    specs={},
    books={},
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

    def __init__(self, failures: dict[str, str]) -> None:
        self.starts: dict[str, list[float]] = {}
        self._failures = failures

    def service(self, plan: ServicePlan, start: str, *, first: bool) -> Fake:
        self.starts.setdefault(plan.name, []).append(anyio.current_time())
        return Fake(self._failures.get(plan.name, ""))


async def ended(folder: Path, failures: dict[str, str]) -> tuple[str, dict[str, Any] | None]:
    """Status and summary of a run that coordination calls finished."""
    settings = parse_settings(settings_text(), "test").settings
    topology = build(settings, run_id="test", directory=folder, seed=1)
    hub = MemoryHub()
    async with MemoryTransport(hub, start="coordination.1") as own, MemoryTransport(hub, start="supervisor.1") as other:
        board = await own.board("coordination")
        board.publish("run", FINISHED)
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
