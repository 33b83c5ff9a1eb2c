"""Seeded scheduling: the order of tasks, and parts that do not run for a while.

trio runs tasks that are ready together in an order of its own random source, which each run seeds. The tasks of a part
(a service or a simulator) that hangs stay off the run queue, as in a stopped process: its deadlines pass, messages to
it wait, and the part handles both when it resumes.
"""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import trio._core._run as scheduler

PART: ContextVar[str] = ContextVar("part", default="")
"""The part that a task belongs to, which tasks inherit from the task that starts them."""


class RunQueue(deque[Any]):
    """trio's queue of ready tasks, without those of parts that hang.

    Args:
        ready: tasks that are ready now.
    """

    def __init__(self, ready: Any = ()) -> None:
        super().__init__(ready)
        self._held: dict[str, list[Any]] = {}
        self._inboxes: dict[str, list[Callable[[], None]]] = {}

    def append(self, task: Any) -> None:
        """Adds a task that is ready."""
        held = self._held.get(task.context.get(PART, "")) if self._held else None
        if held is None:
            super().append(task)
        else:
            held.append(task)

    def hangs(self, part: str) -> bool:
        """Returns whether a part hangs."""
        return part in self._held

    def hang(self, part: str) -> None:
        """Stops a part."""
        if part not in self._held:
            own = [task for task in self if task.context.get(PART, "") == part]
            for task in own:
                self.remove(task)
            self._held[part] = own
            self._inboxes[part] = []

    def keep(self, part: str, arrival: Callable[[], None]) -> None:
        """Keeps an arrival at a part that hangs."""
        self._inboxes[part].append(arrival)

    def resume(self, part: str, *, forget: bool = False) -> None:
        """Resumes a part with its kept arrivals, or without them if `forget`."""
        inbox = self._inboxes.pop(part, [])
        for task in self._held.pop(part, []):
            super().append(task)
        for arrival in [] if forget else inbox:
            arrival()

    def resume_all(self) -> None:
        """Resumes all parts without their kept arrivals."""
        for part in list(self._held):
            self.resume(part, forget=True)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Makes the order of trio's tasks depend on the seed alone."""
    before, state = scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r.getstate()
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True
    scheduler._r.seed(seed)
    collecting = gc.isenabled()
    gc.disable()  # what it closes would depend on earlier runs
    try:
        yield
    finally:
        vars(scheduler.GLOBAL_RUN_CONTEXT).clear()  # left by a run that was interrupted
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = before
        scheduler._r.setstate(state)
        if collecting:
            gc.enable()


def take_over() -> RunQueue:
    """Replaces the queue of the running loop."""
    runner = scheduler.GLOBAL_RUN_CONTEXT.runner
    runner.runq = RunQueue(runner.runq)
    return runner.runq
