"""A watcher runs one simulator and ends it, with all its children, when the supervisor has ended.

A shell, or a program that starts others, does not take them with it: the watcher adopts them (on Linux), and kills
them after the end of the program, also those that have left its process group. Elsewhere, who started the watcher kills
that group after its end.

`python -m sparring.services.process.watcher CMD ...` starts a program; one variable names the pipe of `lifeline.py`,
and another the cores that it may run on, as "0,1". It needs only the standard library, so that it stays small. A
simulator of this package is forked (`watch_fork`).
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time

from sparring.services.process.lifeline import (
    CORES_VARIABLE,
    PIPE_VARIABLE,
    adopt_orphans,
    end_children,
    end_with_parent,
    resume_with_parent,
)

_GRACE_S = 3.0
_AWAITED = signal.SIGTERM, signal.SIGHUP


def main(command: list[str]) -> int:
    """Runs the program; returns its exit status."""
    pipe = int(os.environ.pop(PIPE_VARIABLE))
    _prepare()
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=end_with_parent)
    except OSError as error:
        sys.stderr.write(f"got {command[0]!r}, which cannot be started ({error}); expected a program; correct it\n")
        return 127  # `CANNOT_START` of sparring.pipeline.errors
    child.returncode = _watch(child.pid, pipe)
    return child.returncode


def watch_fork(pipe: int) -> None:
    """Forks this process, and returns in its child alone, which this process watches.

    Args:
        pipe: of `lifeline.py`.
    """
    _prepare()
    if program := os.fork():
        os._exit(_watch(program, pipe))
    os.close(pipe)
    end_with_parent()


def _prepare() -> None:
    """Makes this process the one that Ctrl-C does not reach, and below which everything stays that it starts."""
    if cores := os.environ.pop(CORES_VARIABLE, ""):
        os.sched_setaffinity(0, map(int, cores.split(",")))
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resume_with_parent()
    adopt_orphans()


def _watch(program: int, pipe: int) -> int:
    """Waits for the end of a program, and ends what it leaves behind; returns its exit status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)  # a handler might run only after the end that it is to bring
    threading.Thread(target=_obey, args=(program,), name="signals", daemon=True).start()
    threading.Thread(target=_end_with, args=(pipe, program), name="supervisor pipe", daemon=True).start()
    status = _wait(program)
    end_children(_GRACE_S)  # that it has left behind
    if status < 0:
        _end_by(-status)
    return status


def _wait(program: int) -> int:
    """Waits for the end of the program, and for that of every process that it leaves behind until then."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == program:
            return os.waitstatus_to_exitcode(status)


def _obey(program: int) -> None:
    """Stops the program at SIGTERM; SIGHUP comes to a group with a stopped process when the supervisor ends."""
    while True:
        if signal.sigwait(_AWAITED) == signal.SIGTERM:
            _stop(program)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _end_by(number: int) -> None:
    """Ends with the signal that ended the program, so that the parent process sees it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has written its own core file
    with contextlib.suppress(OSError):  # some signals cannot be changed
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    signal.pthread_kill(threading.get_ident(), number)


def _end_with(pipe: int, program: int) -> None:
    """Kills the program once the supervisor has ended, and with it the rest; the whole group if that takes too long."""
    os.read(pipe, 1)
    _kill(program)
    time.sleep(2 * _GRACE_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _stop(program: int) -> None:
    """Asks the program to end, and kills one that ignores SIGTERM."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(program, signal.SIGTERM)
    timer = threading.Timer(_GRACE_S, _kill, (program,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
