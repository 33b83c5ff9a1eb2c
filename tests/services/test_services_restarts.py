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

    def __init__(self, failure: str = "signal SIGKILL") -> None:
        self._failure = failure

    async def wait(self) -> str:
        return self._failure

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


PLACE = "exit status 1: KeyError: 'speed' (/own/game.py:33)"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("failures", "trained", "starts", "why"),
    [
        ([PLACE], [0], 3, "failed 3 times in the same way, without a trained step in between"),
        (["exit status 1: KeyError: 'speed' (/own/a game.py:33)"], [8], 3, "failed 3 times in the same way"),
        (
            [f"exit status 1: KeyError: {n} (/own/game.py:33)" for n in (-17, 4, 18)],
            [0],
            3,
            "failed 3 times in the same way",
        ),
        ([PLACE, "exit status 2: KeyError: 'speed' (/own/game.py:33)"], [0], 6, "failed 6 times in 600 s"),
        ([PLACE, "exit status 1: KeyError: 'speed' (/own/game.py:34)"], [0], 6, "failed 6 times in 600 s"),
        ([PLACE], [0, 64, 128, 192, 256, 320], 6, "failed 6 times in 600 s"),
        (["exit status 1: KeyError: 'speed'"], [0], 6, "failed 6 times in 600 s"),
        (["signal SIGKILL: KeyError: 'speed' (/own/game.py:33)"], [0], 6, "failed 6 times in 600 s"),
    ],
    ids=["alike", "after training", "other numbers", "status", "line", "progress", "no line", "signal"],
)
async def test_failure_that_repeats_itself_without_a_trained_step_ends_the_run(
    tmp_path: Path, failures: list[str], trained: list[int], starts: int, why: str
) -> None:
    """The error in the code of a user, to which restarts make no difference."""
    settings = parse_settings("behaviors: {Ball: {}}\npipeline: {restarts: {budget: 5}}\n", "test").settings
    topology = build(settings, run_id="test", directory=tmp_path, seed=1)
    part, count = topology.services[0].name, 0

    async def start(*_: object, **__: object) -> FailingProcess:
        nonlocal count
        count += 1
        return FailingProcess(failures[(count - 1) % len(failures)])

    def latest(_: object) -> SimpleNamespace:
        steps = trained[(count - 1) % len(trained)]
        return SimpleNamespace(step_counts={"Ball": SimpleNamespace(trained=steps)})

    active = ActiveRun(SimpleNamespace(topology=topology, start=start), anyio.current_time, Log(), "s")  # type: ignore[arg-type]
    active.topics["coordination"] = SimpleNamespace(latest=latest)  # type: ignore[assignment]
    async with anyio.create_task_group() as tasks:
        active.keep(tasks, topology.services[0])
        await active.parts[part].ended.wait()
    assert active.error is not None
    assert active.error.startswith(f"{part} {why}")
    assert count == starts
    assert ("correct it there, and continue with --resume" in active.error) == ("same way" in why)


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
