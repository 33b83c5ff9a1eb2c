"""Parts of a run are restarted until they fail too often."""

from __future__ import annotations

import anyio
import pytest

from sparring.pipeline.settings.pipeline import RestartSettings
from sparring.services.supervision.parts import Parts


class FailingProcess:
    """A process that fails at once."""

    pid, hopeless = None, False

    async def wait(self) -> str:
        return "signal SIGKILL"

    def stop(self) -> None: ...

    def kill(self) -> None: ...


class RunningProcess:
    """A process that runs until it is killed."""

    pid, hopeless = None, False

    def __init__(self) -> None:
        self._ended = anyio.Event()

    async def wait(self) -> str:
        await self._ended.wait()
        return "signal SIGKILL"

    def stop(self) -> None: ...

    def kill(self) -> None:
        self._ended.set()


class Log:
    def info(self, *_: object, **__: object) -> None: ...

    warning = info


@pytest.mark.anyio
async def test_part_that_fails_too_often_ends_with_the_steps_it_held() -> None:
    """Its steps are then not expected in the step counts of the run's end."""
    over, errors = anyio.Event(), list[str]()

    def fail(error: str) -> None:
        errors.append(error)
        over.set()

    usual = RestartSettings(budget=2)
    parts = Parts(usual, over, lambda _: not over.is_set(), fail, anyio.current_time, Log())
    async with anyio.create_task_group() as tasks:
        parts.keep(tasks, "assembly", lambda _: FailingProcess())
        await parts["assembly"].ended.wait()
    assert errors == ["assembly failed 3 times in 600 s: signal SIGKILL"]
    assert (parts["assembly"].died, parts["assembly"].gone) == (True, True)


@pytest.mark.anyio
async def test_renewed_part_restarts_at_once_without_a_failure() -> None:
    """A renewal uses none of the restart budget; a part that fails is down until its next incarnation."""
    over, errors, times = anyio.Event(), list[str](), list[float]()

    def fail(error: str) -> None:
        errors.append(error)
        over.set()

    def start(_number: int) -> RunningProcess:
        times.append(anyio.current_time())
        return RunningProcess()

    usual = RestartSettings(budget=1, backoff_s=5)
    parts = Parts(usual, over, lambda _: not over.is_set(), fail, anyio.current_time, Log())
    async with anyio.create_task_group() as tasks:
        parts.keep(tasks, "assembly", start)
        part = parts["assembly"]
        for _ in range(3):
            await anyio.sleep(1)
            parts.renew("assembly")
        await anyio.sleep(1)
        assert (times, part.starts, part.down) == ([0, 1, 2, 3], 4, False)
        assert not part.failures
        part.hosted.kill()  # type: ignore[union-attr]
        await anyio.sleep(1)
        assert part.down
        parts.renew("assembly")  # without effect: a restart is already due
        await anyio.sleep(5)
        assert (times[4:], part.down, len(part.failures)) == ([9], False, 1)
        part.hosted.kill()  # type: ignore[union-attr]
        await part.ended.wait()
    assert errors == ["assembly failed 2 times in 600 s: signal SIGKILL"]
