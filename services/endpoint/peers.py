"""One connected simulator, as stepping knows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import ByteStream

from sparring.pipeline.messages.codec import FrameReader, to_bytes
from sparring.pipeline.messages.conversation import Conversation
from sparring.pipeline.messages.simulator import Fault, Reset
from sparring.services.endpoint.admission import HandshakingSimulator
from sparring.services.endpoint.flow import ReadThrottle
from sparring.services.endpoint.outgoing import Outgoing
from sparring.services.endpoint.players import PlayerConnection


@dataclass(eq=False)
class SimulatorPeer:
    """One connected simulator.

    Attributes:
        key: of the connection.
        stream: its socket.
        outgoing: writes to it.
        candidate: how it came in.
        flow: how fast it is read.
        name: what it calls itself.
        heard_at: when it last said something; infinite while it is not read, which is our doing.
        counted: steps it says it has reported, by behavior name, when it connected.
        scripts: by behavior name, what it can play agents with itself.
        replaced: the same simulator has connected anew.
        line: to the player that it has launched, where this process speaks with that.
        steps: frames of that so far.
        unset: that waits for its first Reset.
        fault: what ends the conversation.
    """

    key: int
    stream: ByteStream
    outgoing: Outgoing
    candidate: HandshakingSimulator
    flow: ReadThrottle
    name: str = "?"
    number: int | None = None
    heard_at: float = 0.0
    counted: dict[str, int] = field(default_factory=dict)
    scripts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    replaced: bool = False
    line: PlayerConnection | None = None
    steps: int = 0
    unset: bool = False
    fault: Fault | None = None
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    @property
    def conversation(self) -> Conversation:
        """Who may say what now."""
        return self.candidate.conversation

    @property
    def reader(self) -> FrameReader:
        """What it has sent."""
        return self.candidate.reader

    def say(self, message: Any, received_at: float = 0.0, backpressured_s: float = 0.0) -> None:
        """Sends a message, which may answer a frame that came at a time and was withheld for some seconds."""
        self.conversation.sending(message)
        self.outgoing.put(to_bytes(message), received_at, backpressured_s)

    def ready(self) -> bool:
        """Whether it waits for its first Reset."""
        return self.unset or self.conversation.state == "welcomed"

    def reset(self, message: Reset) -> None:
        """Sends the first Reset."""
        if self.line is None:
            self.say(message)
        else:
            self.unset = False
            self.line.answer(message)
