"""A peer is one connected simulator with its socket and conversation."""

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
from sparring.services.endpoint.outgoing import Outgoing
from sparring.services.endpoint.players import PlayerConnection
from sparring.services.endpoint.throttling import ReadThrottle


@dataclass(eq=False)
class SimulatorPeer:
    """A SimulatorPeer holds the state of one connected simulator.

    Attributes:
        key: of the connection.
        stream: its socket.
        outgoing: writes to the socket.
        candidate: result of its handshake.
        throttle: limits the reading of the socket.
        name: name that its Hello gives.
        last_received_at: time of its last message; infinite while this process does not read it.
        reported_steps: steps that its Hello reports, by behavior name.
        scripts: by behavior name, scripts with which it can play agents itself.
        replaced: the same simulator has reconnected.
        player: connection to the player that it has launched, where this process speaks with the player.
        player_steps: number of frames of the player.
        awaits_reset: the player waits for its first Reset.
        fault: error that ends the conversation.
    """

    key: int
    stream: ByteStream
    outgoing: Outgoing
    candidate: HandshakingSimulator
    throttle: ReadThrottle
    name: str = "?"
    number: int | None = None
    last_received_at: float = 0.0
    reported_steps: dict[str, int] = field(default_factory=dict)
    scripts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    replaced: bool = False
    player: PlayerConnection | None = None
    player_steps: int = 0
    awaits_reset: bool = False
    fault: Fault | None = None
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    @property
    def conversation(self) -> Conversation:
        """Returns the state of the protocol."""
        return self.candidate.conversation

    @property
    def reader(self) -> FrameReader:
        """Returns the reader of its messages."""
        return self.candidate.reader

    def send(self, message: Any, received_at: float = 0.0, backpressured_s: float = 0.0) -> None:
        """Sends a message; the numbers describe the frame that it answers, 0 where it answers none."""
        self.conversation.sending(message)
        self.outgoing.put(to_bytes(message), received_at, backpressured_s)

    def needs_reset(self) -> bool:
        """Returns whether it waits for its first Reset."""
        return self.awaits_reset or self.conversation.state == "welcomed"

    def reset(self, message: Reset) -> None:
        """Sends the first Reset."""
        if self.player is None:
            self.send(message)
        else:
            self.awaits_reset = False
            self.player.answer(message)
