"""Keeps an interrupt that comes before a run listens for signals, though a library may swallow its exception.

Some libraries catch every exception while they are imported, or turn it into one of their own. A signal that the parent
has blocked, as programs do that wait for signals in a thread, is blocked in all its children, which nothing would stop.
"""

import signal
from types import FrameType

_has_come = False


def watch() -> None:
    """Lets through the signals that end a process; notes each interrupt, and raises KeyboardInterrupt as before."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _note)


def has_come() -> bool:
    """Returns whether an interrupt has come since `watch`."""
    return _has_come


def _note(_number: int, _frame: FrameType | None) -> None:
    global _has_come
    _has_come = True
    raise KeyboardInterrupt
