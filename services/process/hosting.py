"""A host runs a service as a process of its own or as a task beside others.

Both hosts start services and report how these ended. A process holds the reading end of a pipe whose writing end only
the supervisor has (`services/process/lifeline.py`).
"""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Final, Protocol

import anyio
import anyio.to_thread
import psutil

from sparring.pipeline.bridges.explain import described_with_place
from sparring.pipeline.errors import (
    CANNOT_START,
    DISK_FULL,
    FOREIGN,
    UNUSABLE,
    SparringError,
    described,
    first_failure,
    how_ended,
)
from sparring.pipeline.files import regular
from sparring.pipeline.monitoring import logs
from sparring.services.process import forking
from sparring.services.process.forking import ForkedProcess
from sparring.services.process.lifeline import PIPE_VARIABLE

PYTHON: Final = (sys.executable, "-P", "-m")
"""Runs a module without the working directory on its path: files of the user are not imported by accident."""
SPARRING: Final = (*PYTHON, "sparring")
"""Runs the `sparring` command in another process."""
_WATCHER: Final = (*PYTHON, "sparring.services.process.watcher")

LOOP_OPTIONS: Final = {"use_uvloop": sys.implementation.name == "cpython"}
"""Options of the event loop of every process of a run."""

SAME_SIGNAL_S: Final = 1.0
"""Signals that come within this time are one: a terminal, a container or an IDE signals a group and its parent."""
_TAIL: Final = 8192
_SHOWN: Final = 40


async def follow_signals(react: Callable[[], None]) -> None:
    """Calls `react` at each signal that ends a process, until it is cancelled."""
    with anyio.open_signal_receiver(*endings()) as signals:
        async for _ in signals:
            react()


def endings() -> list[signal.Signals]:
    """Returns the signals that end a process; a hangup that is ignored, as by nohup, stays ignored."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [one for one in numbers if one != signal.SIGHUP or signal.getsignal(one) is not signal.SIG_IGN]


@contextlib.contextmanager
def ending_signals(handler: Callable[[int, FrameType | None], object] | int) -> Iterator[None]:
    """Handles the signals that end a process meanwhile."""
    former = [(one, signal.signal(one, handler)) for one in endings()]
    try:
        yield
    finally:
        for one, before in former:
            signal.signal(one, before)


def interrupting() -> Callable[[int, FrameType | None], None]:
    """Returns a handler that raises KeyboardInterrupt, once for the signals that are one."""
    raised_at = -math.inf

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal raised_at
        if (now := time.monotonic()) - raised_at > SAME_SIGNAL_S:
            raised_at = now
            raise KeyboardInterrupt

    return handle


class HostedService(Protocol):
    """A HostedService runs as a process or a task."""

    @property
    def pid(self) -> int | None:
        """Returns its process id; None for a task."""

    @property
    def cpu_s(self) -> float | None:
        """Returns the CPU time that it was given, in seconds; None where that is unknown."""

    @property
    def starved_s(self) -> float:
        """Returns the seconds for which its threads could run and were given no core; 0 where that is unknown."""

    async def wait(self) -> str:
        """Waits for its end; returns "" where it ended in order, else what went wrong."""

    @property
    def hopeless(self) -> bool:
        """Returns whether it ended in a way that a restart cannot repair."""

    def stop(self) -> None:
        """Asks it to end in order."""

    def kill(self) -> None:
        """Ends it at once."""


def group_cpu_s(groups: Collection[int]) -> dict[int, float]:
    """Returns the CPU time of those processes of some groups that run, in seconds, by the id of the group."""
    used = dict.fromkeys(groups, 0.0)
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):  # it has ended meanwhile
            if (group := os.getpgid(pid)) in used:
                times = psutil.Process(pid).cpu_times()
                used[group] += times.user + times.system
    return used


@dataclass
class Process:
    """A Process runs a command.

    Attributes:
        process: started, the first of a process group of its own.
        errors: file with its standard error, whose last line names the failure.
        offset: where the output of this process begins.
    """

    process: subprocess.Popen[bytes] | ForkedProcess
    errors: Path
    offset: int = 0
    _asked: bool = field(default=False, init=False)
    _standing: dict[Path, tuple[str, float]] = field(default_factory=dict, init=False)
    """By thread that could run: its times on and off a core as it was last seen, and since when they are the same."""

    @property
    def pid(self) -> int:
        """Returns its process id."""
        return self.process.pid

    @property
    def cpu_s(self) -> float | None:
        """Returns the CPU time that it was given, in seconds; None where it has ended."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.Error:
            return None
        return float(times.user + times.system)

    @property
    def starved_s(self) -> float:
        """Returns the seconds for which its threads could run and were given no core; 0 beyond Linux.

        One that is starved of its sockets' thread is as silent as one that is starved of its main thread. The system
        counts a wait once it is over; one that lasts is counted from the first of two calls between which it lasted.
        """
        waited_s, now, before, self._standing = 0.0, time.monotonic(), self._standing, {}
        for thread in Path(f"/proc/{self.pid}/task").glob("*"):
            with contextlib.suppress(OSError, IndexError):  # it has ended meanwhile
                times = (thread / "schedstat").read_text()
                waited_s += int(times.split()[1]) / 1e9
                if (thread / "stat").read_text().rpartition(")")[2].startswith(" R"):
                    former, since = before.get(thread, ("", now))
                    self._standing[thread] = times, since if times == former else now
                    waited_s += now - self._standing[thread][1]
        return waited_s

    @property
    def hopeless(self) -> bool:
        """Returns whether its exit status says that a restart would not help."""
        return self.process.returncode in (UNUSABLE, DISK_FULL, CANNOT_START)

    async def wait(self) -> str:
        """Waits for its end; returns "" where it ended in order, else what went wrong."""
        own = anyio.CapacityLimiter(1)  # so that waiting for processes does not use up the threads of others
        return await anyio.to_thread.run_sync(self.join, abandon_on_cancel=True, limiter=own) or ""

    def join(self, timeout_s: float | None = None) -> str | None:
        """Waits in this thread and returns the same as `wait`; None where it still runs after `timeout_s`."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self._kill_group()  # what a shell has started outlives the shell
        if status == 0 or (self._asked and status == -signal.SIGTERM):  # asked before it handled signals
            return ""
        how = how_ended(status)
        how += ", could not write its files (no room on the disk?)" if status == DISK_FULL else ""
        return ": ".join(filter(None, (how, self._error())))

    def stop(self) -> None:
        """Sends SIGTERM."""
        self._asked = True
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def kill(self) -> None:
        """Sends SIGKILL to its group, and to all processes below it, which may have left the group."""
        if self.process.returncode is None:  # later, the number of the group may be that of another
            below: list[psutil.Process] = []
            with contextlib.suppress(psutil.Error):
                below = psutil.Process(self.pid).children(recursive=True)
            self._kill_group()
            for one in below:
                with contextlib.suppress(psutil.Error):
                    one.kill()

    def _kill_group(self) -> None:
        for kill in (os.killpg, os.kill) if self.process.returncode is None else (os.killpg,):
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it may have no group yet
                kill(self.process.pid, signal.SIGKILL)

    def _error(self) -> str:
        """Returns the line of its standard error that names its failure: the last one.

        Node writes its stack, further facts and its version behind that line, Python a frame around groups of errors.
        """
        lines = [line for line in self.last_lines(_SHOWN).splitlines() if line.strip(" |+-")]
        if lines and lines[-1].startswith("Node.js v"):
            lines = [line for line in lines[:-1] if not line.startswith((" ", "}"))] or lines
        return lines[-1].strip(" |") if lines else ""

    def last_lines(self, most: int = 1) -> str:
        """Returns the end of its standard error, without empty lines."""
        try:
            with regular(self.errors).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                begin = self.offset if size >= self.offset else 0  # it was rotated meanwhile
                file.seek(max(begin, size - _TAIL))
                text = file.read(_TAIL).decode(errors="replace")
        except OSError:
            return ""
        return "\n".join([line.rstrip() for line in text.splitlines() if line.strip()][-most:])


class ProcessHost:
    """A ProcessHost starts processes that end with this one.

    Args:
        logs: folder for their standard error.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._reader, self._writer = os.pipe()
        os.set_inheritable(self._reader, True)

    def close(self) -> None:
        """Closes the pipe: whatever still runs ends."""
        for descriptor in (self._reader, self._writer):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | None = None
    ) -> Process:
        """Starts `command`.

        Args:
            name: names the file for its standard error.
            command: program and arguments.
            environment: variables in addition to this process's own.
            output: file for its standard output; None for the same file.

        Raises:
            OSError: the command cannot be started.
        """
        with self._errors(name) as errors:
            offset = errors.tell()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=errors if output is None else output,
                stderr=errors,
                env={**os.environ, **environment, PIPE_VARIABLE: str(self._reader)},
                pass_fds=(self._reader,),
                # A group of its own: Ctrl-C is for the supervisor, which stops the others in order. The session stays
                # the same, because Linux compares niceness only within one (sched_autogroup).
                process_group=0,
            )
            return Process(process, Path(errors.name), offset)

    async def forked(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: IO[bytes] | None = None,
        *,
        watched: bool = False,
    ) -> Process:
        """Starts `sparring ARGUMENTS` without its imports, where the system can; as `start` or `watched` otherwise."""

        def start() -> Process:
            command = [*_WATCHER, *SPARRING] if watched else SPARRING
            return self.start(name, [*command, *arguments], environment, output)

        if sys.platform != "linux":
            return start()
        with self._errors(name) as errors:
            offset, descriptors = errors.tell(), [(output or errors).fileno(), errors.fileno(), self._reader]
            try:
                fork = partial(forking.fork, watched=watched)
                child = await anyio.to_thread.run_sync(fork, arguments, environment, descriptors)
            except forking.Abandoned:
                raise
            except OSError:  # the server has died twice
                return start()
            return Process(child, Path(errors.name), offset)

    def _errors(self, name: str) -> IO[bytes]:
        """Opens the file for the standard error of a process; without it, where its folder has no place for it.

        Users remove, move and replace what is in the folder of a run, and a restart must not fail because of that.
        """
        try:
            self._logs.mkdir(exist_ok=True)
            return regular(self._logs / f"{name}.stderr").open("ab")
        except OSError:
            return Path(os.devnull).open("ab")

    def watched(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Process:
        """Starts a foreign program under a watcher that ends it with this process. Raises as `start`."""
        return self.start(name, [*_WATCHER, *command], environment)


@dataclass
class Task:
    """A Task runs a service as a task.

    Attributes:
        name: of the service, for its log.
        hopeless: it failed with an error of this package, which a restart would repeat.
        pid: None, because it has no process of its own; so is `cpu_s`.
        starved_s: 0, likewise.
        stopping: its stop signal.
        ended: set at its end.
    """

    name: str
    hopeless: bool = field(default=False, init=False)
    pid: None = field(default=None, init=False)
    cpu_s: None = field(default=None, init=False)
    starved_s: float = field(default=0.0, init=False)
    stopping: anyio.Event = field(default_factory=anyio.Event, init=False)
    ended: anyio.Event = field(default_factory=anyio.Event, init=False)
    _scope: anyio.CancelScope = field(default_factory=anyio.CancelScope, init=False)
    _failure: str = field(default="", init=False)

    async def run(self, work: Callable[[anyio.Event], Awaitable[None]]) -> None:
        """Runs `work` and stores how it ended."""
        try:
            with self._scope:
                await work(self.stopping)
            if self._scope.cancelled_caught:
                self._failure = "killed"
        except FOREIGN as error:
            first = first_failure(error)
            self._failure = described_with_place(first)
            self.hopeless = isinstance(first, SparringError)
            if not self.hopeless:  # the supervisor logs those of ours in one line
                logs.get(service=self.name).error("failed", error=described(first), exc_info=first)
        finally:
            self.ended.set()

    async def wait(self) -> str:
        """Waits for its end; returns "" where it ended in order, else what went wrong."""
        await self.ended.wait()
        return self._failure

    def stop(self) -> None:
        """Sets its stop signal."""
        self.stopping.set()

    def kill(self) -> None:
        """Cancels it."""
        self._scope.cancel()
