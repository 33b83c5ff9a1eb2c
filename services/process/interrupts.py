"""Keeps an interrupt that comes before a run listens for signals, though a library may swallow its exception.

Some libraries catch every exception while they are imported, or turn it into one of their own. A signal that the parent
has blocked, as programs do that wait for signals in a thread, is blocked in all its children, which nothing would stop.
Where the parent ignores the ends of children, so do its children, to which no child has an exit status. And the kernel
withholds a signal without a handler from the first process of a container.
"""

import os
import signal
from types import FrameType

_has_come = False


def watch() -> None:
    """Lets through the signals that end a process; notes each interrupt, and raises KeyboardInterrupt as before."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for one in (signal.SIGTERM, signal.SIGHUP) if os.getpid() == 1 else ():
        if signal.getsignal(one) is signal.SIG_DFL:
            signal.signal(one, _end)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _note)


def leave() -> None:
    """Lets an interrupt end the process, whose work is done, rather than raise in what Python does at its exit."""
    if signal.getsignal(signal.SIGINT) in (_note, signal.default_int_handler):
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def has_come() -> bool:
    """Returns whether an interrupt has come since `watch`."""
    return _has_come


def _end(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


def _note(_number: int, _frame: FrameType | None) -> None:
    global _has_come
    _has_come = True
    raise KeyboardInterrupt
