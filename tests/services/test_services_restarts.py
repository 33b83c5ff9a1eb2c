"""Parts of a run are restarted until they fail too often."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest

from sparring.pipeline.settings import parse_settings
from sparring.services.supervision.active_run import ActiveRun
from sparring.services.supervision.topology import build


class FailingProcess:
    """A process that fails at once."""

    pid, hopeless = None, False

    async def wait(self) -> str:
        return "signal SIGKILL"

    def stop(self) -> None: ...

    def kill(self) -> None: ...


class Log:
    def __init__(self) -> None:
        self.shown: list[str] = []

    def info(self, *_: object, **__: object) -> None: ...

    def warning(self, event: str, **_: object) -> None:
        self.shown.append(event)

    error = warning


@pytest.mark.anyio
async def test_part_that_fails_too_often_ends_with_the_steps_it_held(tmp_path: Path) -> None:
    """Its steps are then not expected in the step counts of the run's end."""
    settings = parse_settings("behaviors: {Ball: {}}\npipeline: {restarts: {budget: 2}}\n", "test").settings
    topology = build(settings, run_id="test", directory=tmp_path, seed=1)

    async def start(*_: object, **__: object) -> FailingProcess:
        return FailingProcess()

    host, log = SimpleNamespace(topology=topology, start=start), Log()
    active = ActiveRun(host, anyio.current_time, log, "s")  # type: ignore[arg-type]
    async with anyio.create_task_group() as tasks:
        active.keep(tasks, next(plan for plan in topology.services if plan.name == "assembly"))
        await active.parts["assembly"].ended.wait()
    assert (active.status, active.error) == ("failed", "assembly failed 3 times in 600 s: signal SIGKILL")
    assert active.parts["assembly"].died
    assert log.shown == ["failed", "failed", "run_failed"], "one line for each incident"


@pytest.mark.anyio
async def test_part_that_was_killed_for_a_reported_cause_has_no_second_line(tmp_path: Path) -> None:
    topology = build(parse_settings("behaviors: {Ball: {}}", "test").settings, run_id="t", directory=tmp_path, seed=1)
    log = Log()

    async def start(*_: object, first: bool) -> FailingProcess:
        active.parts["assembly"].reported = first
        return FailingProcess()

    active = ActiveRun(SimpleNamespace(topology=topology, start=start), anyio.current_time, log, "s")  # type: ignore[arg-type]
    async with anyio.create_task_group() as tasks:
        active.keep(tasks, next(plan for plan in topology.services if plan.name == "assembly"))
        while active.parts["assembly"].starts < 3:  # noqa: ASYNC110 (virtual time)
            await anyio.sleep(0.1)
        assert log.shown == ["failed"] * (active.parts["assembly"].starts - 1), "of all but the first incarnation"
        tasks.cancel_scope.cancel()
