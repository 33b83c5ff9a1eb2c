"""Processes end with their supervisor. This module loads only the standard library, so that it runs before any other.

A process holds the reading end of a pipe whose writing end only the supervisor has: when that closes, however the
supervisor died, the process ends at once.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from typing import Final

PIPE_VARIABLE: Final = "SPARRING_SUPERVISOR_PIPE"


def end_with_supervisor() -> None:
    """Makes this process end with its supervisor; does nothing where it has none."""
    text = os.environ.pop(PIPE_VARIABLE, "")
    if not text:
        return
    end_with_parent()  # also where it is stopped and cannot read its pipe
    descriptor = int(text)
    threading.Thread(target=_end_at_close, args=(descriptor,), name="supervisor pipe", daemon=True).start()


def end_with_parent() -> None:
    """Makes this process end with the one that started it (Linux only; elsewhere the pipe must suffice)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _end_at_close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.read(descriptor, 1)
    os._exit(1)
