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
