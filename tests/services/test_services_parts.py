"""Parts that are kept running, until they fail too often."""

from __future__ import annotations

import anyio
import pytest
from trio.testing import MockClock

from sparring.pipeline.settings.pipeline import RestartSettings
from sparring.services.supervision.parts import Parts


class Doomed:
    """A start that fails at once."""

    pid, hopeless = None, False

    async def wait(self) -> str:
        return "signal SIGKILL"

    def stop(self) -> None: ...

    def kill(self) -> None: ...


class Start:
    """A start that lives until it is killed."""

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


@pytest.mark.anyio
async def test_what_is_renewed_starts_again_at_once_and_has_not_failed() -> None:
    """With a budget of none; one that dies by itself is down until its next start, and has."""
    over, told, times = anyio.Event(), [], []

    def fail(error: str) -> None:
        told.append(error)
        over.set()

    def start(_number: int) -> Start:
        times.append(anyio.current_time())
        return Start()

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
        parts.renew("assembly")  # it is about to be
        await anyio.sleep(5)
        assert (times[4:], part.down, len(part.failures)) == ([9], False, 1)
        part.hosted.kill()  # type: ignore[union-attr]
        await part.ended.wait()
    assert told == ["assembly failed 2 times in 600 s: signal SIGKILL"]
