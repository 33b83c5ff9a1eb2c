"""Exports during a training run: one checkpoint at a time, in a child process of the lowest priority.

    asyncio or trio: exports = Exports(run_folder, topics=topics)
                     tasks.start_soon(exports.run)        exports what the learners' states name
                     await exports.finish(30.0)           at the end, then `run` returns

The child ends when this process does, however that happens. A checkpoint waits until the one before is exported; a
newer one of its behavior replaces it. An export that fails is a warning, never an error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio
from structlog.typing import FilteringBoundLogger

from sparring.pipeline.errors import install_command
from sparring.pipeline.export import missing_packages
from sparring.pipeline.messages.channels import LEARNER_STATE
from sparring.pipeline.monitoring import logs
from sparring.pipeline.queues.interface import Subscription
from sparring.services.process.hosting import SPARRING, ProcessHost

NICENESS: Final = 19
LOOK_S: Final = 0.5


class Exports:
    """The exports of one run.

    Args:
        directory: folder of the run.
        python: interpreter of the child processes.
        log: of the caller.
        topics: of services, those of learners among them, by name; the caller may add further ones.
        is_here: tells whether a service runs on this machine, which exports only its checkpoints.

    Attributes:
        exported: number of exported checkpoints.
        skipped: number of checkpoints that a newer one replaced or that were removed.
        failed: number of checkpoints that could not be exported.
    """

    def __init__(
        self,
        directory: Path,
        python: str = sys.executable,
        log: FilteringBoundLogger | None = None,
        *,
        topics: Mapping[str, Subscription] | None = None,
        is_here: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._directory = directory
        self._python = python
        self._log = logs.get(service="supervisor") if log is None else log
        self._topics = {} if topics is None else topics
        self._is_here = is_here
        self._waiting: dict[str, str] = {}
        self._newest: dict[str, str] = {}
        self._changed = anyio.Event()
        self._done = anyio.Event()
        self._ending = False
        self._under_way: str | None = None
        self._scope: anyio.CancelScope | None = None
        self.exported = self.skipped = self.failed = 0
        self._missing = missing_packages()
        if self._missing:
            self._log.info("exports_disabled", missing=self._missing, remedy=install_command("onnx"))

    def on_checkpoint(self, behavior: str, checkpoint: str) -> None:
        """Schedules the newest checkpoint of a behavior for export; repeating the same one has no effect.

        Args:
            behavior: name.
            checkpoint: its folder within that of the run; "" for none yet.
        """
        if self._missing or self._ending or not checkpoint or self._newest.get(behavior) == checkpoint:
            return
        self._newest[behavior] = checkpoint
        if (before := self._waiting.get(behavior)) is not None:
            self._skip(behavior, before, "overtaken")
        self._waiting[behavior] = checkpoint
        self._changed.set()

    async def run(self) -> None:
        """Exports scheduled checkpoints until `finish`; cancelled, it kills the export under way."""
        processes = ProcessHost(self._directory / "logs")
        try:
            async with anyio.create_task_group() as tasks:
                self._scope = tasks.cancel_scope
                tasks.start_soon(self._follow)
                while self._waiting or not self._ending:
                    await self._next(processes)
                tasks.cancel_scope.cancel()
        finally:
            processes.close()
            self._done.set()

    async def _follow(self) -> None:
        while True:
            self._look()
            await anyio.sleep(LOOK_S)

    def _look(self) -> None:
        """Schedules the checkpoints that the states of the learners name."""
        for service, topic in self._topics.items():
            state = topic.latest(LEARNER_STATE) if service.startswith("learning-") else None
            if state is not None and self._is_here(service):
                self.on_checkpoint(state.behavior, state.checkpoint)

    async def finish(self, timeout_s: float) -> None:
        """Returns when the newest checkpoint of each behavior is exported, or after `timeout_s` seconds.

        A warning names the checkpoints that are not exported by then. `run` must have been started, and returns too.
        """
        self._look()
        self._ending = True
        self._changed.set()
        if left := self._left():
            self._log.info("waiting_for_exports", checkpoints=left, at_most_s=timeout_s, notice=True)
        with anyio.move_on_after(timeout_s):
            await self._done.wait()
        if self._done.is_set():
            return
        left = self._left()
        if self._scope is not None:
            self._scope.cancel()
        self._log.warning(
            "exports_given_up", checkpoints=left, after_s=timeout_s, remedy=f"sparring export {self._directory}"
        )
        with anyio.CancelScope(shield=True):
            await self._done.wait()

    def _left(self) -> list[str]:
        return [*([self._under_way] if self._under_way else []), *self._waiting.values()]

    async def _next(self, processes: ProcessHost) -> None:
        if not self._waiting:
            self._changed = anyio.Event()
            await self._changed.wait()
            return
        behavior = next(iter(self._waiting))
        checkpoint = self._waiting.pop(behavior)
        if not (self._directory / checkpoint).exists():
            self._skip(behavior, checkpoint, "removed")
            return
        self._under_way = checkpoint
        try:
            await self._export(processes, behavior, checkpoint)
        finally:
            self._under_way = None

    async def _export(self, processes: ProcessHost, behavior: str, checkpoint: str) -> None:
        command = [self._python, *SPARRING[1:], "export", str(self._directory), "--prune"]
        command += [f"--behavior={behavior}", f"--checkpoint={Path(checkpoint).name}"]
        status, last_line = -1, ""
        try:
            child = processes.start("export", command, {"OMP_NUM_THREADS": "1"})
            try:
                _lower_priority(child.pid)
                await child.wait()
            finally:
                child.kill()
                with anyio.CancelScope(shield=True):
                    await child.wait()
            status, last_line = child.status, child.last_line()
        except OSError as error:
            last_line = str(error)
        if status == 0:
            self.exported += 1
            self._log.info("exported", behavior=behavior, checkpoint=checkpoint, result=last_line)
        elif not (self._directory / checkpoint).exists():
            self._skip(behavior, checkpoint, "removed")
        else:
            self.failed += 1
            self._log.warning("export_failed", behavior=behavior, checkpoint=checkpoint, status=status, cause=last_line)

    def _skip(self, behavior: str, checkpoint: str, why: str) -> None:
        self.skipped += 1
        self._log.info("export_skipped", behavior=behavior, checkpoint=checkpoint, why=why, skipped=self.skipped)


def _lower_priority(pid: int) -> None:
    """Raises a child's niceness, before it has imported anything."""
    if os.name == "posix":
        with suppress(ProcessLookupError, PermissionError):
            os.setpriority(os.PRIO_PROCESS, pid, NICENESS)
