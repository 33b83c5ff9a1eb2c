"""Parts that are kept running, until they fail too often."""

from __future__ import annotations

import anyio
import pytest
from trio.testing import MockClock

from pipeline.settings.pipeline import RestartSettings
from services.parts import Parts


class Doomed:
    """A start that fails at once."""

    pid, hopeless = None, False

    async def wait(self) -> str:
        return "signal SIGKILL"

    def stop(self) -> None: ...

    def kill(self) -> None: ...


class Log:
    def info(self, *_: object, **__: object) -> None: ...

    warning = info


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


@pytest.mark.anyio
async def test_what_failed_too_often_is_gone_with_what_it_held() -> None:
    """So that the books of the run's end do not look for it."""
    over, told = anyio.Event(), []

    def fail(error: str) -> None:
        told.append(error)
        over.set()

    usual = RestartSettings(budget=2)
    parts = Parts(usual, over, lambda _: not over.is_set(), fail, anyio.current_time, Log())
    async with anyio.create_task_group() as tasks:
        parts.keep(tasks, "assembly", lambda _: Doomed())
        await parts["assembly"].ended.wait()
    assert told == ["assembly failed 3 times in 600 s: signal SIGKILL"]
    assert (parts["assembly"].died, parts["assembly"].gone) == (True, True)
