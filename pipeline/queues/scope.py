"""What one transport has open, and the task group its timers run in."""

from __future__ import annotations

import itertools
from types import TracebackType
from typing import Protocol, Self

import anyio

from sparring.pipeline.queues.timer import Timer


class End(Protocol):
    """Any end of a queue or board."""

    def close(self, *, farewell: bool = True) -> None:
        """Closes it at once; without `farewell` as a crash would."""


class Scope:
    """Open ends. Leaving the scope closes them."""

    def __init__(self) -> None:
        self._ends: list[End] = []
        self._senders: set[tuple[str, int]] = set()
        self._failure: Exception | None = None

    async def __aenter__(self) -> Self:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        self.close()
        handled = await self._tasks.__aexit__(exc_type, exc, traceback)
        if self._failure is not None:
            raise self._failure
        return handled

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
        """Cancels all that runs in the scope, and has it raise a failure from outside any task."""
        self._failure = error
        self._tasks.cancel_scope.cancel()
