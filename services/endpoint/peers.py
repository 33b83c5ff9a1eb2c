"""A peer is one simulator with its socket and conversation. What it registers is checked before stepping uses it."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import anyio
from anyio.abc import ByteStream
from structlog.typing import FilteringBoundLogger

from sparring.pipeline.bridges.unity.connection import PlayerConnection
from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.codec import FrameReader, FrameWriter, Limits
from sparring.pipeline.messages.conversation import Conversation
from sparring.pipeline.messages.simulator import VERSION, Fault, Hello, Player, Reset, SimulatorMessage
from sparring.pipeline.monitoring.metrics import Registry
from sparring.pipeline.settings.model import BehaviorSettings
from sparring.pipeline.specs import BehaviorId, BehaviorSpec
from sparring.pipeline.stepping.limits import check_network, check_scripts, check_unnamed, unknown_behavior
from sparring.pipeline.stepping.settings import SteppingSettings
from sparring.services.endpoint.sockets import Outgoing, SocketBytes
from sparring.services.endpoint.throttling import ReadThrottle
from sparring.services.endpoint.websocket import WebSocketBytes

FAULT_TIMEOUT_S: Final = 1.0
"""Seconds within which a final Fault must be sent."""
_HEX: Final = re.compile("(?:[0-9a-fA-F]{2})*")
_MOST_STEPS: Final = 2**53
OWN_NUMBERS: Final = 2**20
"""First number of simulators whose Hello gives none."""


@dataclass(eq=False)
class SimulatorPeer:
    """A SimulatorPeer holds the state of one simulator.

    Attributes:
        stream: its socket, encrypted where the endpoint encrypts, with the WebSocket on it where it is one.
        host: address of its machine; "here" for a Unix socket.
        identity: name in its certificate; "" for none.
        secured: its socket is encrypted, or need not be, and messages can be sent.
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
    def incoming(self) -> int:
        """Returns the bytes of the message that is arriving, 0 where they are not known yet."""
        return self.stream.awaited if isinstance(self.stream, WebSocketBytes) else self.reader.begun

    def allow(self, limits: Limits) -> None:
        """Replaces the limits for the messages that follow."""
        self.reader.allow(limits)
        if isinstance(self.stream, WebSocketBytes):
            self.stream.allow(limits.total)

    def take_asides(self) -> int:
        """Returns the number of frames of its WebSocket, since the last call, that were no message."""
        return self.stream.take_asides() if isinstance(self.stream, WebSocketBytes) else 0

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


# ---------------------------------------------------------------- registration


@dataclass(frozen=True, kw_only=True)
class DefaultBehaviors:
    """DefaultBehaviors describe the behaviors that the configuration does not name.

    Attributes:
        settings: of each.
        added: names of those registered so far; the run prepares their learners.
    """

    settings: BehaviorSettings
    added: set[str] = field(default_factory=set)

    @property
    def scripts(self) -> frozenset[str]:
        """Returns the scripts that every simulator must be able to play."""
        return frozenset(() if self.settings.self_play is None else self.settings.self_play.scripts)


@dataclass(frozen=True, kw_only=True)
class ServerContext:
    """A ServerContext holds what all conversations share.

    Attributes:
        settings: of stepping.
        behaviors: settings by name; gets those that simulators add.
        scripts: by behavior name, scripts that every simulator must be able to play.
        seed: of the run; each simulator gets its own seed from it.
        clock: seconds, monotonic.
        registry: metrics of the service.
        log: log of the service.
        arrived: called when a simulator disconnected.
        frame_arrived: called when a frame arrived; may answer it at once.
        known: called when behaviors were registered.
        unnamed: defaults of behaviors that are not among `behaviors`; None where these are rejected.
    """

    settings: SteppingSettings
    behaviors: dict[str, BehaviorSettings]
    scripts: Mapping[str, frozenset[str]]
    seed: int
    clock: Callable[[], float]
    registry: Registry
    log: FilteringBoundLogger
    arrived: Callable[[], None]
    frame_arrived: Callable[[], None]
    known: Callable[[], None]
    unnamed: DefaultBehaviors | None = None

    def check_number(self, peer: SimulatorPeer, number: int, peers: Iterable[SimulatorPeer]) -> None:
        """Rejects a second simulator with one number, unless it may be the first one, reconnected after a broken link.

        Args:
            peer: the simulator.
            number: number that it gets.
            peers: all connected simulators; the link of one that is silent for a heartbeat may be broken, and one that
                is not read at present may have hung up.

        Raises:
            RemoteProtocolError: the number is taken.
        """
        for other in peers:
            is_silent = self.clock() - other.last_received_at >= self.settings.heartbeat_s
            is_alive = not (is_silent or other.has_hung_up)
            if other.number == number and (is_alive or other.identity != peer.identity):
                raise RemoteProtocolError(
                    "number",
                    got=f"simulator number {number} twice",
                    expected="a number of its own for each simulator",
                    remedy="leave the number out, or start each simulator with another",
                )

    def check_known(self, behaviors: Mapping[str, BehaviorSpec], scripts: Mapping[str, Sequence[str]]) -> list[str]:
        """Rejects behaviors that the run cannot train; returns the names that are new.

        Args:
            behaviors: specs by behavior id.
            scripts: scripts of the simulator by behavior name.

        Raises:
            RemoteProtocolError: a behavior is unknown, exceeds the limits, lacks a script, or needs an unsupported
                network.
        """
        new, unnamed = sorted({BehaviorId.parse(text).name for text in behaviors} - self.behaviors.keys()), self.unnamed
        for text, spec in behaviors.items():
            name = BehaviorId.parse(text).name
            settings, required = self.behaviors.get(name), self.scripts.get(name, frozenset())
            if unnamed is not None and (settings is None or name in unnamed.added):
                if settings is None:
                    most = self.settings.limits.unnamed_behaviors
                    check_unnamed(name, len(unnamed.added) + new.index(name), most)
                settings, required = unnamed.settings, unnamed.scripts
            if settings is None:
                raise unknown_behavior(text, self.behaviors)
            check_scripts(name, scripts.get(name, ()), required)
            check_network(name, spec, settings.network_settings)
        return new

    def add_names(self, names: Sequence[str]) -> None:
        """Adds behaviors that the configuration does not name, for the rest of the run."""
        if self.unnamed is not None:
            self.behaviors.update(dict.fromkeys(names, self.unnamed.settings))
            self.unnamed.added.update(names)


def check_hello(hello: Hello) -> None:
    """Rejects a Hello of another protocol version, or with a number or player out of range.

    Raises:
        RemoteProtocolError: the Hello is rejected.
    """
    version, number, numbers = hello.version, hello.number, f"0 to {OWN_NUMBERS - 1}"
    correct, number_remedy = "correct it in the simulator", "leave the number out, or use $SPARRING_NUMBER"
    player = hello.player or Player(protocol="", port=0, settings="", areas=1, connect_s=0.0, timeout_s=0.0)
    port, areas, digits = player.port, player.areas, player.settings
    for is_sound, code, got, expected, remedy in (
        (version == VERSION, "version", f"protocol version {version}", str(VERSION), "use a client of this version"),
        (number is None or 0 <= number < OWN_NUMBERS, "number", f"simulator number {number}", numbers, number_remedy),
        (0 <= port < 2**16, "specs", f"a player at port {port}", "0 to 65535", correct),
        (0 < areas <= 2**20, "specs", f"a player with {areas} areas", f"1 to {2**20}", correct),
        (_HEX.fullmatch(digits), "specs", f"player settings {digits!r:.40}", "pairs of hexadecimal digits", correct),
    ):
        if not is_sound:
            raise RemoteProtocolError(code, got=got, expected=expected, remedy=remedy)


def check_counts(steps: Mapping[str, int]) -> None:
    """Rejects step counts that no simulator can have.

    Raises:
        RemoteProtocolError: one is below 0, or above all whole numbers that every language reads from JSON.
    """
    for name, count in steps.items():
        if not 0 <= count <= _MOST_STEPS:
            got, expected = f"{count} steps of {name!r}", f"a count from 0 to {_MOST_STEPS}"
            raise RemoteProtocolError("malformed", got=got, expected=expected, remedy="count the reported steps")
