"""Implements ML-Agents' communicator between Unity games and the trainer.

messages        the classes of `messages.proto`
observations    specs of sensors, and observations of one message
actions         action specs, and how actions are written
columns         all agents of a behavior as columns, and their actions back
channels        side channels
conversation    the order of the messages
http2           one connection of gRPC
steady          calls that differ from the one before in their message alone

None of these does I/O. Those that do:

server          the port that a player calls
connection      one player's calls, answered on an event loop
game            a player as a game of ours; `build` finds its program
"""

from typing import Final

from sparring.pipeline.errors import SparringError

RECORD_AGAIN: Final = "record it again, or leave the file out"

HOST: Final = "127.0.0.1"
"""A player gets a port and no address: it calls its own machine. Its protocol has no keys, so a server on another
address (in a container with forwarded ports) accepts any client that reaches the port."""


class UnreadableData(SparringError):
    """Reports a file or message that cannot be used.

    Args:
        got: what was found.
        remedy: what the reader can do about it.
    """

    def __init__(self, got: str, remedy: str = RECORD_AGAIN) -> None:
        self.remedy = remedy
        super().__init__(got)
