"""Every failure that sparring raises on purpose.

    SparringError
    |-- SettingsError            a configuration or command line that cannot be run
    |-- CheckpointError          a checkpoint that is missing, damaged, or of another run
    |-- CodecError               bytes that are not one of our records
    |   `-- LimitExceeded        ... because they claim or hold more than is allowed
    |-- ProtocolError            the simulator conversation was broken
    |   |-- LocalProtocolError   ... by this side: a bug here
    |   `-- RemoteProtocolError  ... by the other side
    |-- QueueError               a queue or board cannot do what was asked
    |   |-- Empty                nothing to get right now
    |   |-- Full                 no credit right now
    |   |-- TooLarge             the message can never fit: its maker must split it
    |   |-- Closed               this end was closed in order
    |   `-- Broken               the other end is gone
    `-- ServiceError             a process of the run failed, stalled or gave up
        `-- NoRoom               ... because what it needs to keep could not be written

A message says what was got, what was expected and what to do about it.
"""

from __future__ import annotations

from importlib import metadata
from typing import Final


class SparringError(Exception):
    """Base of all failures raised on purpose."""


class Explained(SparringError):
    """A failure in three parts: what was got, what was expected, what to do.

    Args:
        got: what was found, with names and values.
        expected: what would have been right.
        remedy: what the reader can do about it.
    """

    def __init__(self, *, got: str, expected: str, remedy: str) -> None:
        self.got = got
        self.expected = expected
        self.remedy = remedy
        super().__init__(f"got {got}; expected {expected}; {remedy}")


class SettingsError(SparringError):
    """A configuration or command line that cannot be run."""


class CheckpointError(Explained):
    """A checkpoint that is missing, damaged, or of another run."""


class CodecError(Explained):
    """Bytes that are not one of our records."""


class LimitExceeded(CodecError):
    """Bytes that claim or hold more than is allowed; refused before anything was allocated."""


class ProtocolError(Explained):
    """The simulator conversation was broken.

    Args:
        code: short machine-readable cause, listed in `docs/protocol.md`.
    """

    def __init__(self, code: str, *, got: str, expected: str, remedy: str) -> None:
        self.code = code
        super().__init__(got=got, expected=expected, remedy=remedy)


class LocalProtocolError(ProtocolError):
    """This side tried something the conversation does not allow: a bug here."""


class RemoteProtocolError(ProtocolError):
    """The other side did something the conversation does not allow."""


class QueueError(SparringError):
    """A queue or board cannot do what was asked."""


class Empty(QueueError):
    """Nothing to get right now."""


class Full(QueueError):
    """No credit to put right now."""


class TooLarge(QueueError):
    """The message can never fit: its maker must split it."""


class Closed(QueueError):
    """This end was closed in order."""


class Broken(QueueError):
    """The other end is gone."""


class ServiceError(SparringError):
    """A process of the run failed, stalled or gave up."""


class NoRoom(ServiceError):
    """What a process needs to keep could not be written."""


# Exit statuses of all commands and processes; 0 is fine. `docs/operations.md` lists them.

FAILED: Final = 1
"""It went wrong: the run, or what was checked."""

BAD_INPUT: Final = 2
"""A command line or configuration that cannot be run: nothing was started."""

UNUSABLE: Final = 3
"""Of a process whose failure a restart cannot mend."""

BELOW: Final = 4
"""`sparring evaluate --at-least`: the policy is not good enough."""

STALLED: Final = 5
"""A run that did not go on, and was ended for that."""

NO_ROOM: Final = 28
"""Exit status of a process that could not write what it needs to keep: on a full disk it cannot say why."""

CAN_NOT_START: Final = 127
"""In the place of a program that could not be started, as shells have it."""


def first_failure(failure: BaseException) -> BaseException:
    """The first failure inside nested groups."""
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure


def install_command(extra: str = "") -> str:
    """The command that installs the libraries of an extra, or those of all simulators, from the oldest that work."""
    libraries = []
    for requirement in metadata.requires("sparring") or ():
        library, _, marker = requirement.partition(";")
        if f'extra == "{extra}"' in marker if extra else not marker:
            libraries.append(library.strip())
    return "pip install " + " ".join(map(repr, libraries))
