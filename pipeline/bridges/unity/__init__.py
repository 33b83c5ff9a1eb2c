"""What Unity games say, and what they are told: the messages of ML-Agents' communicator, without I/O.

messages        the classes of `messages.proto`
observations    what a sensor is here, and what is seen in one message
sensing         one sensor of all agents as one array
actions         what a behavior can do, and how it is told
columns         all agents of a behavior, and their actions back
channels        side channels
conversation    who says what and when
"""

from __future__ import annotations

from typing import Final

from sparring.pipeline.errors import SparringError

RECORD_AGAIN: Final = "record it again, or leave the file out"


class Unreadable(SparringError):
    """What was found in a file or message that cannot be used.

    Args:
        got: what was found.
        remedy: what the reader can do about it.
    """

    def __init__(self, got: str, remedy: str = RECORD_AGAIN) -> None:
        self.remedy = remedy
        super().__init__(got)
