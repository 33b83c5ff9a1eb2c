"""Defines every failure that sparring raises on purpose.

    SparringError
    |-- SettingsError            a configuration or command line that cannot be run
    |-- CheckpointError          a checkpoint that is missing, damaged, or of another run
    |-- CodecError               bytes that are not a record of sparring
    |   `-- LimitExceeded        ... because they claim or hold more than is allowed
    |-- ProtocolError            the simulator conversation was broken
    |   |-- LocalProtocolError   ... by this side, which is a bug
    |   `-- RemoteProtocolError  ... by the other side
    |-- QueueError               an operation of a queue or topic failed
    |   |-- Empty                no message is available now
    |   |-- Full                 there is no credit now
    |   |-- TooLarge             the message can never fit and must be split
    |   |-- QueueClosed          this end was closed in order
    |   `-- QueueBroken          the other end no longer accepts this one
    `-- ServiceError             a process of the run failed, stalled or gave up
        `-- DiskFull             ... because it could not write essential data

A message states what was got, what was expected and what to try.
"""

import contextlib
import difflib
import errno
import signal
from collections.abc import Iterable
from typing import Final

NOTICE: Final = "notice: "
"""The beginning of a line on a simulator's standard error that the run shows to its user."""


_NO_FILE: Final = errno.ENXIO, errno.ELOOP
"""Of a named pipe, a socket or a device (`files.regular`), and of a link to itself."""


class SparringError(Exception):
    """A failure was raised on purpose; this class is the base of all such failures."""


class ExplainedError(SparringError):
    """A failure is explained in three parts: got, expected, remedy.

    Args:
        got: found value, with names.
        expected: correct value.
        remedy: action for the reader.
    """

    def __init__(self, *, got: str, expected: str, remedy: str) -> None:
        self.got = got
        self.expected = expected
        self.remedy = remedy
        super().__init__(f"got {got}; expected {expected}; {remedy}")


class SettingsError(SparringError):
    """The configuration or command line cannot be run."""


class CheckpointError(ExplainedError):
    """The checkpoint is missing, damaged, or from another run."""


class CodecError(ExplainedError):
    """The bytes are not a record of sparring."""


class LimitExceeded(CodecError):
    """The bytes claim or hold more than is allowed; they are rejected before any allocation."""


class ProtocolError(ExplainedError):
    """The simulator conversation was broken.

    Args:
        code: short machine-readable cause, listed in `docs/protocol.md`.
    """

    def __init__(self, code: str, *, got: str, expected: str, remedy: str) -> None:
        self.code = code
        super().__init__(got=got, expected=expected, remedy=remedy)


class LocalProtocolError(ProtocolError):
    """This side violated the conversation, which is a bug."""


class RemoteProtocolError(ProtocolError):
    """The other side violated the conversation."""


class QueueError(SparringError):
    """An operation of a queue or topic failed."""


class Empty(QueueError):
    """No message is available now."""


class Full(QueueError):
    """There is no credit to put a message now."""


class TooLarge(QueueError):
    """The message can never fit and must be split."""


class QueueClosed(QueueError):
    """This end was closed in order."""


class QueueBroken(QueueError):
    """The other end no longer accepts this one."""


class ServiceError(SparringError):
    """A process of the run failed, stalled or gave up."""


class Restartable(SparringError):
    """A process failed in a way that its restart repairs."""


class DiskFull(ServiceError):
    """A process could not write essential data."""


# Exit statuses of all commands and processes; 0 is success. `docs/operations.md` lists them.

FAILED: Final = 1
"""The run or the check failed."""

BAD_INPUT: Final = 2
"""The command line or configuration cannot be run, and no process was started."""

UNUSABLE: Final = 3
"""A process failed in a way that a restart cannot repair."""

BELOW: Final = 4
"""The policy is below `sparring evaluate --at-least`."""

STALLED: Final = 5
"""The run made no progress and was ended."""

DISK_FULL: Final = 28
"""A process could not write essential data; on a full disk its log may not contain the reason."""

CANNOT_START: Final = 127
"""A program could not be started; shells use the same status."""


FOREIGN: Final = Exception, SystemExit, BaseExceptionGroup
"""What code of others raises, in a task also as a group. An interrupt or a cancellation alone comes from elsewhere."""


def described(failure: BaseException) -> str:
    """Returns a failure in words: the message of an error of this package, that of others after their class."""
    if isinstance(failure, SparringError):
        return str(failure)
    text = ""
    with contextlib.suppress(Exception):  # an error of others may have no text
        text = shortened(str(failure))
    return f"{type(failure).__name__}: {text}" if text else type(failure).__name__


def undefined(plugin: object, method: str) -> ServiceError:
    """Returns the error of a plug-in that lacks a method, which no restart adds."""
    return ServiceError(f"got {type(plugin).__name__} without {method}(); expected one; define it in its package")


def shortened(text: str, most: int = 2000) -> str:
    """Returns the beginning of a text of others, which may hold a whole file, for a line of a log."""
    return text if len(text) <= most else f"{text[:most]} [{len(text) - most:,} more characters]"


def first_failure(failure: BaseException) -> BaseException:
    """Returns the first failure inside nested groups; what has the place of a file, or of a folder, is explained."""
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    if isinstance(failure, IsADirectoryError | NotADirectoryError):  # a restart would repeat it
        found, expected = ("folder", "file") if isinstance(failure, IsADirectoryError) else ("file", "folder")
        place = failure.filename2 or failure.filename  # of a file that replaces another, the other
        return ServiceError(f"got a {found} at {place}; expected a {expected}; move it away")
    if isinstance(failure, OSError) and failure.errno in _NO_FILE and failure.filename:
        return ServiceError(f"got {failure.filename}: {failure.strerror}; expected a file; move it away")
    return failure


def how_ended(status: int) -> str:
    """Returns how a process ended, given its exit status, or a signal below 0."""
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):  # real-time signals have no names
        return f"signal {signal.Signals(-status).name}"
    return f"signal {-status}"


def install_command(extra: str = "") -> str:
    """Returns the command that installs the libraries of an extra, or the required ones, with their version bounds."""
    from importlib import metadata  # which takes a tenth of a second, in every process of a run

    parts = [requirement.partition(";") for requirement in metadata.requires("sparring") or ()]
    wanted = [library for library, _, of in parts if (f'extra == "{extra}"' in of if extra else not of)]
    return "pip install " + " ".join(repr(library.strip()) for library in wanted)


def too_large(got: str, limit: int | str, key: str, remedy: str) -> RemoteProtocolError:
    """Returns the error of a simulator that exceeds a limit, which is `pipeline.KEY` in the settings."""
    return RemoteProtocolError(
        "too_large", got=got, expected=f"at most {limit}", remedy=f"{remedy}, or raise pipeline.{key}"
    )


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Returns a question with the most similar of the `known` words; None if none is similar."""
    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {nearest[0]}?" if nearest else None
