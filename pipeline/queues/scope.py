"""Holds the open ends of one transport, and the task group in which their timers run."""

from __future__ import annotations

import itertools
from types import TracebackType
from typing import Protocol, Self

import anyio

from sparring.pipeline.queues.timer import Timer


class End(Protocol):
    """Stands for any end of a queue or topic."""

    def close(self, *, notify_peers: bool = True) -> None:
        """Closes the end at once; without `notify_peers` it sends nothing, as a crash would."""


class Scope:
    """Holds the open ends of a transport, and closes them when it is left."""

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
        """Reserves the lowest number that no open sender of this transport has on queue `name`."""
        index = next(index for index in itertools.count() if (name, index) not in self._senders)
        self._senders.add((name, index))
        return index

    def release_index(self, name: str, index: int) -> None:
        """Returns a number that `index` reserved."""
        self._senders.discard((name, index))

    def add(self, end: End, timer: Timer | None = None) -> None:
        """Adds an open end, and runs its timer until that stops."""
        self._ends.append(end)
        if timer is not None:
            self._tasks.start_soon(timer.run)

    def remove(self, end: End) -> None:
        """Removes a closed end."""
        self._ends.remove(end)

    def close(self, *, notify_peers: bool = True) -> None:
        """Closes all ends at once; without `notify_peers` they send nothing, as in a crash."""
        for end in [*self._ends]:
            end.close(notify_peers=notify_peers)

    def fail(self, error: Exception) -> None:
        """Cancels everything in the scope, which then raises a failure from outside any task."""
        self._failure = error
        self._tasks.cancel_scope.cancel()
