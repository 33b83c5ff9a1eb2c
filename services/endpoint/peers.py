"""A peer is one simulator with its socket and conversation, from its connection to its end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import anyio
from anyio.abc import ByteStream

from sparring.pipeline.bridges.unity.connection import PlayerConnection
from sparring.pipeline.messages.codec import FrameReader, FrameWriter
from sparring.pipeline.messages.conversation import Conversation
from sparring.pipeline.messages.simulator import Fault, Hello, Reset, SimulatorMessage
from sparring.services.endpoint.sockets import Outgoing, SocketBytes
from sparring.services.endpoint.throttling import ReadThrottle

FAULT_TIMEOUT_S: Final = 1.0
"""Seconds within which a final Fault must be sent."""


@dataclass(eq=False)
class SimulatorPeer:
    """A SimulatorPeer holds the state of one simulator.

    Attributes:
        stream: its socket, encrypted where the endpoint encrypts.
        host: address of its machine; "here" for a Unix socket.
        identity: name in its certificate; "" for none.
        secured: its socket is encrypted, or need not be.
        authenticated: it has presented the required credential.
        hello: its Hello; None until that arrives.
        reader: holds the bytes that were received and not handled yet.
        writer: encodes what is sent.
        conversation: state of the protocol.
        scope: cancels its handshake, then its conversation.
        key: of the connection.
        outgoing: writes to the socket, once its handshake is complete.
        throttle: limits the reading of the socket, likewise.
        name: name that its Hello gives.
        last_received_at: time of its last message; infinite while this process does not read it.
        reported_steps: steps that its Hello reports, by behavior name.
        scripts: by behavior name, scripts with which it can play agents itself.
        delay_s: seconds to wait before more is handled.
        has_left: its last message has arrived.
        replaced: the same simulator has reconnected.
        player: connection to the player that it has launched, where this process speaks with the player.
        player_steps: number of frames of the player.
        awaits_reset: the player waits for its first Reset.
        fault: error that ends the conversation.
    """

    stream: ByteStream
    host: str = "here"
    identity: str = ""
    secured: bool = False
    authenticated: bool = False
    hello: Hello | None = None
    reader: FrameReader = field(default_factory=FrameReader)
    writer: FrameWriter = field(default_factory=FrameWriter)
    conversation: Conversation = field(default_factory=lambda: Conversation("trainer"))
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    key: int = 0
    outgoing: Outgoing = field(init=False)
    throttle: ReadThrottle = field(init=False)
    name: str = "?"
    number: int | None = None
    last_received_at: float = 0.0
    reported_steps: dict[str, int] = field(default_factory=dict)
    scripts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    delay_s: float = 0.0
    has_left: bool = False
    replaced: bool = False
    player: PlayerConnection | None = None
    player_steps: int = 0
    awaits_reset: bool = False
    fault: Fault | None = None

    def __post_init__(self) -> None:
        self._socket = self.stream

    @property
    def has_hung_up(self) -> bool:
        """Returns whether its socket is closed on the other side, although it may not have been read to its end."""
        return isinstance(self._socket, SocketBytes) and self._socket.has_hung_up

    @property
    def address(self) -> str:
        """Returns its host and identity, for logs."""
        return f"{self.host} {self.identity}".rstrip()

    @property
    def is_local(self) -> bool:
        """Returns whether it runs on this machine."""
        return self.host in ("here", "::1") or self.host.startswith("127.")

    @property
    def needs_reset(self) -> bool:
        """Returns whether it waits for its first Reset."""
        return self.awaits_reset or self.conversation.state == "welcomed"

    def send(self, message: SimulatorMessage, received_at: float = 0.0, backpressured_s: float = 0.0) -> None:
        """Sends a message; the numbers describe the frame that it answers, 0 where it answers none."""
        self.conversation.sending(message)
        self.outgoing.put(self.writer.to_bytes(message), received_at, backpressured_s)

    def reset(self, message: Reset) -> None:
        """Sends the first Reset."""
        if self.player is None:
            self.send(message)
        else:
            self.awaits_reset = False
            self.player.answer(message)

    async def send_fault(self, fault: Fault) -> None:
        """Sends the Fault that ends its conversation."""
        if self.conversation.state != "closed" and not self.outgoing.is_torn:
            self.send(fault)
            with anyio.move_on_after(FAULT_TIMEOUT_S, shield=True):
                await self.outgoing.drain()
