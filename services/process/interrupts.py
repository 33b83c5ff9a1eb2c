"""Keeps an interrupt that comes before a run listens for signals, though a library may swallow its exception.

Some libraries catch every exception while they are imported, or turn it into one of their own.
"""

import signal
from types import FrameType

_has_come = False


def watch() -> None:
    """Notes each interrupt from now on, and raises KeyboardInterrupt as before."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _note)


def has_come() -> bool:
    """Returns whether an interrupt has come since `watch`."""
    return _has_come


def _note(_number: int, _frame: FrameType | None) -> None:
    global _has_come
    _has_come = True
    raise KeyboardInterrupt
