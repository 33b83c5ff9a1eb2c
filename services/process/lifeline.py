"""Processes end with their supervisor. This module loads only the standard library, so that it runs before any other.

A process holds the reading end of a pipe whose writing end only the supervisor has: when that closes, however the
supervisor died, the process ends at once.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

PIPE_VARIABLE: Final = "SPARRING_SUPERVISOR_PIPE"
CORES_VARIABLE: Final = "SPARRING_CORES"
_BAD_INPUT: Final = 2
_POLL_S: Final = 0.01


def end_with_supervisor() -> bool:
    """Makes this process end with its supervisor; returns whether it has one."""
    text = os.environ.pop(PIPE_VARIABLE, "")
    if not text:
        return False
    try:
        os.fstat(pipe := int(text))
    except (ValueError, OverflowError, OSError):
        sys.stderr.write(f"sparring: got {PIPE_VARIABLE}={text!r}, which only a supervisor sets; unset it\n")
        raise SystemExit(_BAD_INPUT) from None
    end_with_parent()  # also where it is stopped and cannot read its pipe
    end_at_close(pipe)
    return True


@contextlib.contextmanager
def ending_with_caller() -> Iterator[dict[str, Any]]:
    """Yields arguments of `subprocess.Popen` for a command that ends at once with this process, however it ends."""
    reader, writer = os.pipe()
    try:
        yield {"env": {**os.environ, PIPE_VARIABLE: str(reader)}, "pass_fds": (reader,)}
    finally:
        os.close(reader)
        os.close(writer)


def end_at_close(descriptor: int) -> None:
    """Makes this process end when the writing end of a pipe is closed."""
    threading.Thread(target=_end_at_close, args=(descriptor,), name="supervisor pipe", daemon=True).start()


@contextlib.contextmanager
def ending_at_hangup(descriptor: int) -> Iterator[None]:
    """Ends this process meanwhile as soon as the other end of a socket is closed, by a thread that is gone then."""
    reader, writer = os.pipe()

    def watch() -> None:
        closed = select.poll()
        closed.register(descriptor, 0)  # a hangup is reported anyway
        closed.register(reader, 0)
        if descriptor in dict(closed.poll()):
            os._exit(0)

    watching = threading.Thread(target=watch, name="supervisor")
    watching.start()
    try:
        yield
    finally:
        os.close(writer)
        watching.join()
        os.close(reader)


def end_with_parent() -> None:
    """Makes this process end with the one that started it (Linux only; elsewhere the pipe must suffice)."""
    _control(_PARENT_DEATH, signal.SIGKILL)


def resume_with_parent() -> None:
    """Lets this process run again, should it be stopped, when the one that started it ends (Linux only)."""
    _control(_PARENT_DEATH, signal.SIGCONT)


def adopt_orphans() -> None:
    """Makes this process the parent of those below it whose own parent has ended (Linux only)."""
    _control(_ADOPT, 1)


def end_children(limit_s: float) -> None:
    """Kills all children of this process, adopted ones too, until none is left or the time is over (Linux only)."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for pid in children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:  # what it has left behind is a child of this process now
                pass
        except ChildProcessError:
            return
        time.sleep(_POLL_S)


def children() -> set[int]:
    """Returns the children of this process, adopted ones too (Linux only)."""
    found: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):  # of each thread
        with contextlib.suppress(OSError):
            found.update(map(int, task.read_text().split()))
    return found


def end_strays(spared: Collection[int], limit_s: float) -> list[str]:
    """Kills the children of this process that are not spared, and what they leave behind (Linux only).

    Helpers of `multiprocessing` end with this process, and clean up after it; its workers do not.

    Returns:
        Names of those that still ran.
    """
    found, deadline = dict[int, str](), time.monotonic() + limit_s
    while time.monotonic() < deadline:
        left = set[int]()
        for pid in children().difference(spared):
            with contextlib.suppress(OSError):
                folder = Path("/proc", str(pid))
                command = (folder / "cmdline").read_bytes()
                if not any(one in command for one in _HELPERS) and not os.waitpid(pid, os.WNOHANG)[0]:
                    found.setdefault(pid, (folder / "comm").read_text().strip())
                    left.add(pid)
                    os.kill(pid, signal.SIGKILL)
        if not left:
            break
        time.sleep(_POLL_S)
    return sorted(found.values())


_HELPERS: Final = b"from multiprocessing.resource_tracker", b"from multiprocessing.forkserver"
_PARENT_DEATH: Final = 1  # of <sys/prctl.h>
_ADOPT: Final = 36


def _control(operation: int, argument: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(operation, argument)


def _end_at_close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.read(descriptor, 1)
    os._exit(1)
