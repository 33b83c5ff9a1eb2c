"""Exports during a training run: one checkpoint at a time, in a child process of the lowest priority (until the end).

    asyncio or trio: exports = Exports(topology, topics, log)
                     tasks.start_soon(exports.run)        exports what the learners' states name
                     await exports.finish(30.0)           at the end, then `run` returns

The child ends when this process does, however that happens. A checkpoint waits until the one before is exported; a
newer one of its behavior replaces it. An export that fails is a warning, never an error.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio
from structlog.typing import FilteringBoundLogger

from sparring.pipeline.errors import install_command
from sparring.pipeline.export import missing_packages
from sparring.pipeline.learning.checkpoints import CheckpointFolder, age
from sparring.pipeline.messages.channels import LEARNER_STATE
from sparring.pipeline.queues.interface import Subscription
from sparring.services.process.hosting import ProcessHost
from sparring.services.supervision.topology import Topology

NICENESS: Final = 19
LOOK_S: Final = 0.5


class Exports:
    """The exports of the checkpoints that a run saves; none where it only plays or is to export none.

    Args:
        topology: of the run.
        topics: of services, those of learners among them, by name; the caller may add further ones.
        log: of the caller.
    """

    def __init__(self, topology: Topology, topics: Mapping[str, Subscription], log: FilteringBoundLogger) -> None:
        self._topology = topology
        self._directory = topology.run.directory
        self._topics = topics
        self._log = log
        self._waiting: dict[str, str] = {}
        self._newest: dict[str, str] = {}
        self._under_way: list[str] = []
        self._skipped = 0  # those that a newer one replaced or that were removed
        self._ending = anyio.Event()
        self._done = anyio.Event()
        self._scope: anyio.CancelScope | None = None
        self._enabled = topology.run.settings.pipeline.export and topology.run.playing is None
        if self._enabled and (missing := missing_packages()):
            self._enabled = False
            log.info("exports_disabled", missing=missing, remedy=install_command("onnx"))

    def on_checkpoint(self, behavior: str, checkpoint: str) -> None:
        """Schedules the newest checkpoint of a behavior for export; repeating the same one has no effect.

        Args:
            behavior: name.
            checkpoint: its folder within that of the run; "" for none yet.
        """
        if self._ending.is_set() or not checkpoint or self._newest.get(behavior) == checkpoint:
            return
        self._newest[behavior] = checkpoint
        if behavior in self._waiting:
            self._skip(behavior, self._waiting[behavior], "overtaken")
        self._waiting[behavior] = checkpoint

    async def run(self) -> None:
        """Exports scheduled checkpoints until `finish`; cancelled, it kills the export under way."""
        if not self._enabled:
            return
        processes = ProcessHost(self._directory / "logs")
        try:
            async with anyio.create_task_group() as tasks:
                self._scope = tasks.cancel_scope
                tasks.start_soon(self._follow)
                while self._waiting or not self._ending.is_set():
                    if self._waiting:
                        await self._export_next(processes)
                    else:
                        with anyio.move_on_after(LOOK_S):
                            await self._ending.wait()
                tasks.cancel_scope.cancel()
        finally:
            processes.close()
            self._done.set()

    async def _follow(self) -> None:
        while True:
            self._look()
            await anyio.sleep(LOOK_S)

    def _look(self) -> None:
        """Schedules the checkpoints that the states of the learners name; one of another node may not be here yet."""
        for service, topic in self._topics.items():
            if service.startswith("learning-"):
                state = topic.latest(LEARNER_STATE)
                if state is not None and (self._directory / state.checkpoint).exists():
                    self.on_checkpoint(state.behavior, state.checkpoint)

    async def finish(
        self, timeout_s: float, within: Callable[[float], anyio.CancelScope] = anyio.move_on_after
    ) -> None:
        """Returns when the newest checkpoint of each behavior is exported, or after `timeout_s` seconds.

        A learner that died or hangs has named none: then the newest one in its folder counts.
        A warning names the checkpoints that are not exported by then. `run` must have been started, and ends then.

        Args:
            timeout_s: seconds.
            within: makes the scope of the wait, which may end it earlier.
        """
        if not self._enabled:
            return
        self._look()
        for name in self._topology.run.settings.behaviors:
            for newest in CheckpointFolder(self._directory, name).newest_first()[:1]:
                if name not in self._newest or age(Path(self._newest[name]))[0] < age(newest)[0]:
                    self.on_checkpoint(name, str(newest.relative_to(self._directory)))
        self._ending.set()
        if left := [*self._under_way, *self._waiting.values()]:
            self._log.info("waiting_for_exports", checkpoints=left, at_most_s=timeout_s, notice=True)
        began = anyio.current_time()
        with within(timeout_s):
            await self._done.wait()
        if self._scope is not None:
            self._scope.cancel()
        if not self._done.is_set() and (left := [*self._under_way, *self._waiting.values()]):
            remedy, waited_s = f"sparring export {self._directory}", round(anyio.current_time() - began, 1)
            self._log.warning("exports_given_up", checkpoints=left, after_s=waited_s, remedy=remedy)

    async def _export_next(self, processes: ProcessHost) -> None:
        behavior, checkpoint = next(iter(self._waiting.items()))
        del self._waiting[behavior]
        self._under_way = [checkpoint]
        failure, result = "", ""
        if exists := (self._directory / checkpoint).exists():
            failure, result = await self._export(processes, behavior, checkpoint)
        self._under_way = []
        if exists and not failure:
            self._log.info("exported", behavior=behavior, checkpoint=checkpoint, result=result)
        elif not (self._directory / checkpoint).exists():
            self._skip(behavior, checkpoint, "removed")
        else:
            self._log.warning("export_failed", behavior=behavior, checkpoint=checkpoint, cause=failure)

    async def _export(self, processes: ProcessHost, behavior: str, checkpoint: str) -> tuple[str, str]:
        """Returns what went wrong, "" for nothing, and the last line of the child."""
        arguments = ["export", str(self._directory), "--prune"]
        arguments += [f"--behavior={behavior}", f"--checkpoint={Path(checkpoint).name}"]
        try:
            child = await processes.forked("export", arguments, {"OMP_NUM_THREADS": "1"})
        except OSError as error:
            return str(error), ""
        try:
            if not self._ending.is_set():  # nothing waits for it yet
                with suppress(ProcessLookupError, PermissionError):
                    os.setpriority(os.PRIO_PROCESS, child.pid, NICENESS)
            failure = await child.wait()
        finally:
            child.kill()
            with anyio.CancelScope(shield=True):
                await child.wait()
        result = child.last_lines().strip()
        return failure or ("" if result else "exit status 0 before its end"), result

    def _skip(self, behavior: str, checkpoint: str, why: str) -> None:
        self._skipped += 1
        self._log.info("export_skipped", behavior=behavior, checkpoint=checkpoint, why=why, skipped=self._skipped)
