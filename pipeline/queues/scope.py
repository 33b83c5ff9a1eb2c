"""What one transport has open, and the task group its timers run in."""

from __future__ import annotations

import itertools
from types import TracebackType
from typing import Protocol, Self

import anyio

from pipeline.queues.timer import Timer


class End(Protocol):
    """Any end of a queue or board."""

    def close(self, *, farewell: bool = True) -> None:
        """Closes it at once; without `farewell` as a crash would."""


class Scope:
    """Open ends. Leaving the scope closes them."""

    def __init__(self) -> None:
        self._ends: list[End] = []
        self._senders: set[tuple[str, int]] = set()

    async def __aenter__(self) -> Self:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        self.close()
        return await self._tasks.__aexit__(exc_type, exc, traceback)

    def index(self, name: str) -> int:
        """Takes the lowest number that no open sender of this transport has on queue `name`."""
        index = next(index for index in itertools.count() if (name, index) not in self._senders)
        self._senders.add((name, index))
        return index

    def release_index(self, name: str, index: int) -> None:
        """Gives that number back."""
        self._senders.discard((name, index))

    def add(self, end: End, timer: Timer | None = None) -> None:
        """An end is open; its timer runs until it stops."""
        self._ends.append(end)
        if timer is not None:
            self._tasks.start_soon(timer.run)

    def remove(self, end: End) -> None:
        """An end is closed."""
        self._ends.remove(end)

    def close(self, *, farewell: bool = True) -> None:
        """Closes all ends at once; without `farewell` as a crash would."""
        for end in [*self._ends]:
            end.close(farewell=farewell)

    def fail(self, error: Exception) -> None:
        """Has a failure outside any task come out of the scope, as one inside would."""
        self._tasks.start_soon(_raise, error)


async def _raise(error: Exception) -> None:
    raise error
