"""What the fork server of the tests imports: all that runs import, so that a run starts without seconds of imports.

A command that it forks is a process like any other, and so is the fork server of its services, which it forks too
before it does anything else. Tests of the start itself use `python -m sparring`.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading

from sparring.services import main as command
from sparring.services.process import forking, lifeline
from sparring.services.process.forking import ForkServer

for _name in (
    *forking.MODULES,
    *(f"sparring.services.commands.{name}" for name in ("train", "evaluate", "tournament")),
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "sparring.pipeline.queues.memory",
    "sparring.services.stages.playing",
    "sparring.services.supervision.exports",
):
    importlib.import_module(_name)

_main = command.main


class _Server:
    """A fork server that this process has forked, with the members of `subprocess.Popen` that its user needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = False
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> None:
        """Waits for its end."""
        if self._ended:
            return
        end = select.poll()
        end.register(descriptor := os.pidfd_open(self.pid), select.POLLIN)
        try:
            if not end.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("a fork server", timeout or 0.0)
        finally:
            os.close(descriptor)
        with self._lock:  # several threads may wait
            if not self._ended:
                os.waitpid(self.pid, 0)
                self._ended = True

    def send_signal(self, number: int) -> None:
        """Signals it."""
        with self._lock:
            if not self._ended:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)


class _Forked(ForkServer):
    """The fork server of a command, which has imported what its own server had."""

    def __init__(self, requests: socket.socket, server: _Server) -> None:
        lifeline.adopt_orphans()
        self._lock = threading.Lock()
        self.has_forked = self.is_closed = False
        self._socket, self._server = requests, server  # type: ignore[assignment]
        self._socket.settimeout(forking._ANSWER_S)


def run() -> int:
    """Runs the command, once its own fork server is forked where it starts services."""
    arguments = sys.argv[1:]
    if arguments[0] in command._FORKING and "--in-process" not in arguments:
        ours, theirs = socket.socketpair()
        if pid := os.fork():
            theirs.close()
            forking._current = _Forked(ours, _Server(pid))
        else:
            ours.close()
            os.setpgid(0, 0)
            lifeline.resume_with_parent()
            sys.argv[1:] = forking.serve(theirs)  # returns in the process of a service
    return _main()


command.main = run
