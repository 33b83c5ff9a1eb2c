"""Exports during a training run: one checkpoint at a time, in a child process of the lowest priority.

    asyncio or trio: exports = Exports(run_folder, log=log)
                     tasks.start_soon(exports.run)
                     exports.on_checkpoint("Ball", state.checkpoint)    whenever a learner's state names another one
                     await exports.finish(30.0)                         at the end, then `run` returns

The child's standard input is a pipe from this process, so that the child ends when this process does, however that
happens. A checkpoint waits until the one before is exported; a newer one of its behavior replaces it. An export that
fails is a warning, never an error.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import anyio
from anyio.abc import ByteReceiveStream, Process

from sparring.pipeline.errors import install_command
from sparring.pipeline.export.packages import missing_packages
from sparring.pipeline.monitoring import logs
from sparring.services.process.hosting import SPARRING

NICENESS: Final = 19
_TAIL: Final = 4000


class Exports:
    """The exports of one run.

    Args:
        directory: folder of the run.
        python: interpreter of the child processes.
        log: of the caller.

    Attributes:
        exported: number of exported checkpoints.
        skipped: number of checkpoints that a newer one replaced or that were removed.
        failed: number of checkpoints that could not be exported.
    """

    def __init__(self, directory: Path, python: str = sys.executable, log: Any = None) -> None:
        self._directory = directory
        self._python = python
        self._log = logs.get(service="supervisor") if log is None else log
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
        try:
            with anyio.CancelScope() as self._scope:
                while self._waiting or not self._ending:
                    await self._next()
        finally:
            self._done.set()

    async def finish(self, timeout_s: float) -> None:
        """Returns when the newest checkpoint of each behavior is exported, or after `timeout_s` seconds.

        A warning names the checkpoints that are not exported by then. `run` must have been started, and returns too.
        """
        self._ending = True
        self._changed.set()
        if not self._done.is_set():
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

    async def _next(self) -> None:
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
            await self._export(behavior, checkpoint)
        finally:
            self._under_way = None

    async def _export(self, behavior: str, checkpoint: str) -> None:
        command = [self._python, *SPARRING[1:], "export", str(self._directory), "--attached", "--prune"]
        command += [f"--behavior={behavior}", f"--checkpoint={Path(checkpoint).name}"]
        try:
            status, result, cause = await _run(command)
        except OSError as error:
            status, result, cause = -1, "", str(error)
        if status == 0:
            self.exported += 1
            self._log.info("exported", behavior=behavior, checkpoint=checkpoint, result=result)
        elif status == -signal.SIGINT:  # Ctrl-C ends the whole run in order, which exports this one at its end
            self._waiting.setdefault(behavior, checkpoint)
        elif not (self._directory / checkpoint).exists():
            self._skip(behavior, checkpoint, "removed")
        else:
            self.failed += 1
            self._log.warning("export_failed", behavior=behavior, checkpoint=checkpoint, status=status, cause=cause)

    def _skip(self, behavior: str, checkpoint: str, why: str) -> None:
        self.skipped += 1
        self._log.info("export_skipped", behavior=behavior, checkpoint=checkpoint, why=why, skipped=self.skipped)


async def _run(command: list[str]) -> tuple[int, str, str]:
    """Runs a child to its end; returns its exit status and the last lines of its output and of its errors."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with anyio.CancelScope(shield=True):  # cancelled in the middle, it would leave a child that no task waits for
        process = await anyio.open_process(command, env=environment)
    async with process:
        _lower_priority(process)
        lines = ["", ""]
        async with anyio.create_task_group() as tasks:
            for at, stream in enumerate((process.stdout, process.stderr)):
                assert stream is not None
                tasks.start_soon(_keep_last, stream, lines, at)
        return await process.wait(), lines[0], lines[1]


def _lower_priority(process: Process) -> None:
    """Raises a child's niceness, before it has imported anything."""
    if os.name == "posix":
        with suppress(ProcessLookupError, PermissionError):
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)


async def _keep_last(stream: ByteReceiveStream, lines: list[str], at: int) -> None:
    """Puts the last line of a stream into `lines`, and discards all before it."""
    tail = b""
    async for chunk in stream:
        tail = (tail + chunk)[-_TAIL:]
    found = [line for line in tail.decode(errors="replace").splitlines() if line.strip()]
    lines[at] = found[-1].strip() if found else ""
