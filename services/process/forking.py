"""A fork server imports what services and simulators need, torch above all, once, and forks their processes (Linux).

    supervisor                                          fork server
    ForkServer(modules)  ------------ starts ---------> imports the modules of its command line
    ForkServer.fork      -- arguments, descriptors ---> forks a child, which runs `sparring ARGUMENTS`
                         <------------ pid ------------
    ForkedProcess.wait   <---- exit status (pipe) ----- reaps the child

It has one thread and no state of a run. When it dies, its children live on: the supervisor adopts them, and starts
another server for the next child. When the supervisor dies, the server kills all children, stopped ones included, and
what children that have ended have left behind. A server that is stopped is continued as soon as a child ends.

A simulator that is forked beside stepping has its code at the same addresses. Where the two take turns on a core, a
frame then costs a quarter less, because the core predicts the branches of both alike.
"""

import atexit
import gc
import importlib
import json
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

from setproctitle import setproctitle

from sparring.pipeline import plugins
from sparring.services.process import watcher
from sparring.services.process.lifeline import (
    adopt_orphans,
    end_at_close,
    end_children,
    ending_at_hangup,
    resume_with_parent,
)

MODULES: Final = (
    "sparring.services.commands.service",
    "sparring.services.commands.writer",
    *(
        f"sparring.services.stages.{name}"
        for name in ("stepping", "assembly", "coordination", "learning", "monitor", "simulator")
    ),
)
"""What every service of a run, and every simulator of this package, imports."""
_THREADS: Final = "OMP_NUM_THREADS"
_OWN_THREADS: Final = "SPARRING_OMP_NUM_THREADS"
"""What the variable above is for simulators: as it was for the supervisor."""
_LARGEST: Final = 2**16
_IMPORTS_S: Final = 300.0
"""The time for the first answer of a server, which imports first; a machine that is too busy needs long for that."""
_ANSWER_S: Final = 10.0


class ForkServer:
    """A ForkServer forks processes. All methods may block, and may be called in any thread.

    Args:
        modules: what the server imports before it forks.

    Attributes:
        is_closed: it was ended on purpose, and no other is to take over.
        has_forked: its imports are done.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self.has_forked = False
        self.is_closed = False
        adopt_orphans()
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_IMPORTS_S)
        with theirs:
            command = [sys.executable, "-P", "-m", "sparring.services.process.forking", str(theirs.fileno()), *modules]
            # No pool of threads may exist when it forks.
            environment = {**os.environ, _THREADS: "1", _OWN_THREADS: os.environ.get(_THREADS, "")}
            # The server inherits this, until it ignores the signal: Python's own imports would show a traceback.
            former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self._server = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, env=environment, pass_fds=[theirs.fileno()], process_group=0
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, former)

    def fork(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        descriptors: Sequence[int],
        *,
        watched: bool = False,
    ) -> "ForkedProcess":
        """Starts `sparring ARGUMENTS` in a process group of its own.

        Args:
            arguments: of the command.
            environment: variables in addition to those of the server.
            descriptors: that become standard output and standard error, and the pipe of its supervisor.
            watched: the command runs below a watcher, which is the process that is returned.

        Raises:
            OSError: the server has died, or does not answer.
        """
        reader, writer = os.pipe()
        held, release = os.pipe()
        try:
            folder = ""
            with suppress(OSError):  # it was removed
                folder = str(Path.cwd())
            plain = {"arguments": arguments, "environment": environment, "folder": folder, "watched": watched}
            request = json.dumps(plain).encode()
            if len(request) > _LARGEST:
                raise OSError(f"got {len(request)} bytes of arguments and variables; expected at most {_LARGEST}")
            with self._lock:
                socket.send_fds(self._socket, [request], [*descriptors, held, writer])
                answer = self._socket.recv(_LARGEST)
                self._socket.settimeout(_ANSWER_S)
                self.has_forked = True
            if not answer:
                raise ConnectionResetError("the fork server has ended")
            os.write(release, b"1")
            return ForkedProcess(int(answer), reader, self._server)
        except OSError:
            os.close(reader)
            raise
        finally:
            for one in (writer, held, release):
                os.close(one)

    def close(self) -> None:
        """Ends the server, and with it all its children."""
        self._socket.close()
        self._server.send_signal(signal.SIGCONT)
        if self.has_forked:
            with suppress(subprocess.TimeoutExpired):
                self._server.wait(_ANSWER_S)
        self.kill()

    def kill(self) -> None:
        """Ends the server; its children live on."""
        self._server.kill()
        self._server.wait()


class Abandoned(OSError):
    """Reports that nothing is started any more."""


class ForkedProcess:
    """A ForkedProcess was forked by a server; it has the members of `subprocess.Popen` that its users need.

    Args:
        pid: of the process.
        status: reading end of the pipe to which the server writes its exit status.
        server: its parent.

    Attributes:
        pid: of the process.
        returncode: its exit status, negative for a signal; None while it runs, or as long as nothing has waited.
    """

    def __init__(self, pid: int, status: int, server: "subprocess.Popen[bytes]") -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        self._server = server
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, status)  # several threads may wait
        self._ended = status
        with suppress(OSError):  # Linux before 5.3 has none; its exit status alone is waited for then
            self._ended = os.pidfd_open(pid)
            weakref.finalize(self, os.close, self._ended)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end, and returns its exit status.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self.returncode is None:
            if not _is_ready(timeout, self._status, self._ended):
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            self._server.send_signal(signal.SIGCONT)
            if not _is_ready(_ANSWER_S, self._status):
                self._server.kill()
            with self._lock:
                if self.returncode is None:
                    text = os.read(self._status, 32)
                    self.returncode = int(text) if text else self._wait_for_adopted()
        return self.returncode

    def _wait_for_adopted(self) -> int:
        """Waits for the end of a process that this one has adopted from a dead server."""
        self._server.wait()  # only then it is a child of this process
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # the server has reaped it, and died before it could say so
            return -signal.SIGKILL

    def terminate(self) -> None:
        """Sends SIGTERM."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGTERM)


def _is_ready(timeout_s: float | None, *descriptors: int) -> bool:
    """Returns whether one of some descriptors, which may have any number, can be read in time."""
    ready = select.poll()
    for one in descriptors:
        ready.register(one, select.POLLIN)
    return bool(ready.poll(None if timeout_s is None else timeout_s * 1000))


_current: ForkServer | None = None
_lock = threading.Lock()


def server() -> ForkServer:
    """Returns the fork server of this process, which begins its imports with the first call."""
    global _current
    with _lock:
        if _current is None:
            _current = ForkServer(MODULES)
            atexit.register(_end_at_exit)
        return _current


def fork(
    arguments: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int], *, watched: bool = False
) -> ForkedProcess:
    """Starts a process with the server of this process; one that has died is replaced. Raises as `ForkServer.fork`."""
    former = server()
    try:
        return former.fork(arguments, environment, descriptors, watched=watched)
    except OSError:  # it has died, or another thread has just replaced it for that
        if former.is_closed:
            raise Abandoned("the fork server was ended") from None
        former.kill()
        end(former)
        return server().fork(arguments, environment, descriptors, watched=watched)


def abandon() -> None:
    """Kills the server of this process where it still imports, so that what waits for it fails at once."""
    if (present := _current) is not None and not present.has_forked:
        present.is_closed = True
        present.kill()


def end(former: ForkServer | None = None) -> None:
    """Ends the server of this process, where there is one (or only if it is `former`)."""
    global _current
    with _lock:
        if _current is not None and former in (None, _current):
            _current.is_closed = former is None
            _current.close()
            _current = None


def _end_at_exit() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would leave a traceback
    end()


# ---------------------------------------------------------------- the server


def serve(requests: socket.socket) -> list[str]:
    """Forks until the supervisor ends; returns only in a child, with the arguments of its command."""
    adopt_orphans()
    writers: dict[int, int] = {}  # of exit statuses, by child
    wake, waker = os.pipe()
    for end_of_pipe in (wake, waker):
        os.set_blocking(end_of_pipe, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, _ignore)
    while True:
        ready, _, _ = select.select([requests.fileno(), wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            _reap(writers)
        if requests.fileno() not in ready:
            continue
        text = b""
        with suppress(ConnectionError):
            text, descriptors, _, _ = socket.recv_fds(requests, _LARGEST, 8)
        if not text:
            end_children(_ANSWER_S)
            os._exit(0)
        *streams, lifeline, held, writer = descriptors
        if child := os.fork():
            writers[child] = writer
            for one in (*streams, lifeline, held):
                os.close(one)
            with suppress(OSError):  # the supervisor has ended, which the next round notices
                requests.send(b"%d" % child)
            continue
        os.setpgid(0, 0)
        resume_with_parent()  # that of the server, and then that of the supervisor, which adopts this process
        if (legacy := sys.modules.get("numpy.random")) is not None:
            legacy.seed()  # as Python's `random` does by itself: all children would draw the same numbers
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        requests.close()
        for one in (wake, waker, writer, *writers.values()):
            os.close(one)
        for number, stream in enumerate(streams, 1):
            os.dup2(stream, number)
            os.close(stream)
        request = json.loads(text)
        with suppress(OSError):  # it was removed
            os.chdir(request["folder"])
        os.environ.update(request["environment"])
        if not request["watched"]:
            end_at_close(lifeline)
        if not os.read(held, 1):  # the supervisor does not know of this process, because the server died too early
            os._exit(0)
        os.close(held)
        title = " ".join(["sparring", *request["arguments"]])
        title = os.fsencode(title).decode(errors="replace")  # a path need not be UTF-8
        if request["watched"]:
            setproctitle(f"{watcher.__name__} {title}")
            watcher.watch_fork(lifeline)
        setproctitle(title)
        return [str(one) for one in request["arguments"]]


def _reap(writers: dict[int, int]) -> None:
    """Writes the exit statuses of the children that have ended; those of adopted ones are dropped."""
    with suppress(ChildProcessError):
        while True:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                return
            if (writer := writers.pop(child, None)) is not None:
                with suppress(BrokenPipeError):
                    os.write(writer, b"%d" % os.waitstatus_to_exitcode(status))
                os.close(writer)


def _ignore(_signal: int, _frame: object) -> None:
    """Does nothing: the loop that reads the signal pipe handles signals."""


def main(arguments: Sequence[str]) -> list[str]:
    """Runs the server; returns only in a child, with the arguments of its command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when it ends
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    resume_with_parent()
    os.chdir("/")  # torch's libraries cannot be loaded in a working folder that was removed
    with ending_at_hangup(int(arguments[0])):
        for module in arguments[1:]:
            importlib.import_module(module)
    del os.environ[_THREADS]
    if own := os.environ.pop(_OWN_THREADS, ""):
        os.environ[_THREADS] = own
    plugins.names(plugins.TRAINERS)  # children need not read the metadata of all installed packages
    gc.collect()
    gc.freeze()  # imported modules stay: a collection that visits them would copy their pages into each child
    return serve(socket.socket(fileno=int(arguments[0])))


def run(arguments: Sequence[str]) -> NoReturn:
    """Runs a command and ends this process without taking its modules apart: that would copy all their memory.

    A simulator or writer ends as any process does, because modules of users may hold open files, and ask for work at
    their exit.
    """
    sys.argv[1:] = arguments
    try:
        runpy.run_module("sparring", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, int) and arguments[0] not in ("simulator", "writer"):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code)
        raise
    raise AssertionError("a command ends with its status")


if __name__ == "__main__":
    run(main(sys.argv[1:]))
