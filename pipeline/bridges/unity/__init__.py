"""Implements the messages of ML-Agents' communicator between Unity games and the trainer, without I/O.

messages        the classes of `messages.proto`
observations    specs of sensors, and observations of one message
actions         action specs, and how actions are written
columns         all agents of a behavior as columns, and their actions back
channels        side channels
conversation    the order of the messages
"""

from __future__ import annotations

from typing import Final

from sparring.pipeline.errors import SparringError

RECORD_AGAIN: Final = "record it again, or leave the file out"


class UnreadableData(SparringError):
    """Reports a file or message that cannot be used.

    Args:
        got: what was found.
        remedy: what the reader can do about it.
    """

    def __init__(self, got: str, remedy: str = RECORD_AGAIN) -> None:
        self.remedy = remedy
        super().__init__(got)
