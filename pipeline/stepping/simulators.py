"""The simulators of one stepping process: their sockets and conversations.

What they report goes to the stepper; what they did wrong is told to them alone. With a player that a simulator has
launched, and asks this process to speak with, there is a line beside the socket (`players.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.to_thread
from anyio.abc import ByteStream

from pipeline.errors import CodecError, Explained, LimitExceeded, ProtocolError, RemoteProtocolError, SettingsError
from pipeline.messages.codec import SIMULATORS, FrameReader, to_bytes
from pipeline.messages.conversation import Conversation
from pipeline.messages.simulator import (
    VERSION,
    Act,
    Adopted,
    Behaviors,
    Bye,
    Fault,
    Hello,
    Ping,
    Player,
    Pong,
    Progress,
    Reset,
    Statistic,
    Step,
    Welcome,
)
from pipeline.metrics import Registry
from pipeline.networks.limits import Unsupported, refuse_unsupported
from pipeline.specs import BehaviorId, BehaviorSpec, SpecError
from pipeline.stepping.outgoing import Outgoing
from pipeline.stepping.players import Event, Line, Said
from pipeline.stepping.settings import SteppingSettings
from pipeline.stepping.stepper import Stepper

_RECEIVE = 256 * 1024


@dataclass(eq=False)
class Peer:
    """One connected simulator.

    Attributes:
        key: of the connection.
        stream: its socket.
        outgoing: writes to it.
        name: what it calls itself.
        heard_at: when it last said something.
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
    conversation: Conversation = field(default_factory=lambda: Conversation("trainer"))
    name: str = "?"
    number: int | None = None
    heard_at: float = 0.0
    counted: dict[str, int] = field(default_factory=dict)
    scripts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    replaced: bool = False
    line: Line | None = None
    steps: int = 0
    unset: bool = False
    fault: Fault | None = None
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def say(self, message: Any, received_at: float = 0.0, withheld_s: float = 0.0) -> None:
        """Sends a message, which may answer a frame that came at a time and was withheld for some seconds."""
        self.conversation.sending(message)
        self.outgoing.put(to_bytes(message), received_at, withheld_s)

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


@dataclass(frozen=True, kw_only=True)
class House:
    """What all conversations share.

    Attributes:
        settings: times.
        behaviors: settings by name (anything with `network_settings`).
        scripts: by behavior name, those that every simulator must be able to play.
        seed: of the run; each simulator gets one of its own from it.
        clock: seconds, only rising.
        registry: the service's numbers.
        log: structlog logger.
        arrived: called when a frame came, or a simulator went.
        known: called when behaviors became known.
    """

    settings: SteppingSettings
    behaviors: Mapping[str, Any]
    scripts: Mapping[str, frozenset[str]]
    seed: int
    clock: Callable[[], float]
    registry: Registry
    log: Any
    arrived: Callable[[], None]
    known: Callable[[], None]


class Simulators:
    """The connected simulators.

    Args:
        stepper: that acts for them.
        house: what their conversations share.
    """

    def __init__(self, stepper: Stepper, house: House) -> None:
        self.stopping = False
        self._stepper = stepper
        self._house = house
        self._peers: dict[int, Peer] = {}
        self._keys = 0
        self._deserted = anyio.Event()

    def answer(self, key: int, answer: Act | Reset, received_at: float, withheld_s: float) -> None:
        """Answers a Step, unless its simulator has gone or is parting."""
        peer = self._peers.get(key)
        if peer is not None and peer.line is not None:
            peer.line.answer(answer)
            self._note_sent(received_at, withheld_s)
        elif peer is not None and peer.conversation.state == "deciding":
            peer.say(answer, received_at, withheld_s)

    def begin(self) -> None:
        """Sends the first Reset to those that wait for it, once it is known what parameters it has."""
        if not self._stepper.parameters.known:
            return
        for peer in self._peers.values():
            connection = self._stepper.connections.get(peer.key)
            if connection is not None and peer.ready():
                peer.reset(self._stepper.begin(peer.key, self._seed(connection.number)))

    def _seed(self, number: int) -> int:
        """Of a simulator."""
        return (self._house.seed + number) % 2**31

    def hush(self) -> None:
        """Nobody is answered any more; what players say from now on does not count."""
        self.stopping = True
        for peer in self._peers.values():
            if peer.line is not None:
                peer.line.part()

    async def part(self) -> None:
        """Says Bye to every simulator; returns when all have left."""
        self.hush()
        for peer in list(self._peers.values()):
            if peer.conversation.state not in ("parting", "closed"):
                peer.say(Bye(reason="the run ended", steps={} if peer.line is None else self._completed(peer)))
        if self._peers:
            await self._deserted.wait()

    async def serve(self, stream: ByteStream) -> None:
        """Speaks with one simulator until its end."""
        self._keys += 1
        peer = Peer(self._keys, stream, Outgoing(stream, self._note_sent), heard_at=self._house.clock())
        log = self._house.log.bind(connection=peer.key)
        self._peers[peer.key] = peer
        try:
            async with stream:
                with peer.outgoing, peer.scope:
                    await self._converse(peer, log)
                if peer.replaced:
                    log.warning("simulator_replaced", simulator=peer.name, number=peer.number)
                elif peer.fault is not None:
                    self._note_fault(peer, peer.fault)
                    await _part(peer, peer.fault)
                elif peer.scope.cancelled_caught:
                    log.warning(
                        "simulator_silent", simulator=peer.name, limit_s=self._house.settings.simulator_timeout_s
                    )
                    await _part(peer, _silence(self._house.settings.simulator_timeout_s))
        except* (anyio.BrokenResourceError, anyio.EndOfStream, anyio.ClosedResourceError, OSError) as failure:
            if not self.stopping:
                log.warning("simulator_lost", simulator=peer.name, cause=repr(failure.exceptions[0]))
        finally:
            if peer.line is not None:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(peer.line.close)
            del self._peers[peer.key]
            if not self._peers:
                self._deserted.set()
            if not self.stopping and peer.key in self._stepper.connections:
                self._stepper.disconnect(peer.key)
                self._house.registry.add("simulators.lost")
                self._house.arrived()

    async def _converse(self, peer: Peer, log: Any) -> None:
        fault = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(peer.outgoing.run)
            try:
                await self._read(peer, log)
            except (ProtocolError, CodecError, SpecError) as error:
                fault = fault_of(error)
                self._note_fault(peer, fault)
            tasks.cancel_scope.cancel()
        if fault is not None:
            await _part(peer, fault)

    def _note_fault(self, peer: Peer, fault: Fault) -> None:
        self._house.registry.add("faults")
        self._house.log.warning(
            "simulator_fault",
            connection=peer.key,
            simulator=peer.name,
            code=fault.code,
            got=fault.got,
            expected=fault.expected,
        )

    async def _read(self, peer: Peer, log: Any) -> None:
        reader = FrameReader(SIMULATORS)
        while True:
            received = await peer.stream.receive(_RECEIVE)
            self._house.registry.add("received_bytes", len(received))
            reader.feed(received)
            peer.heard_at = now = self._house.clock()
            while (message := reader.next()) is not None:
                peer.conversation.received(message)
                if isinstance(message, Step):
                    self._stepper.receive(peer.key, message, now)
                    self._note_statistics(message.statistics)
                    self._house.arrived()
                elif not self._react(peer, message, log):
                    return

    def _react(self, peer: Peer, message: Any, log: Any) -> bool:
        """Answers what is not a Step; returns whether the conversation goes on."""
        if isinstance(message, Hello):
            self._greet(peer, message)
            log.info(
                "simulator_connected", simulator=peer.name, number=peer.number, behaviors=sorted(message.behaviors)
            )
        elif isinstance(message, Behaviors):
            self._check_known(message.behaviors, peer.scripts)
            self._stepper.add_behaviors(peer.key, message.behaviors)
            self._house.known()
        elif isinstance(message, Ping):
            peer.say(Pong(number=message.number))
        elif isinstance(message, Bye):
            self._compare(peer, message.steps, log)
            return False
        elif isinstance(message, Fault):
            log.warning(
                "simulator_gave_up", simulator=peer.name, code=message.code, got=message.got, remedy=message.remedy
            )
            return False
        return True

    def _greet(self, peer: Peer, hello: Hello) -> None:
        if hello.version != VERSION:
            raise RemoteProtocolError(
                "version",
                got=f"protocol version {hello.version}",
                expected=str(VERSION),
                remedy="use a client of the same version as the trainer",
            )
        self._check_known(hello.behaviors, hello.scripts)
        peer.name, peer.counted, peer.scripts = hello.name, dict(hello.steps), hello.scripts
        # A simulator that dialled in by itself comes after the supervisor's.
        number = hello.number if hello.number is not None else 2**20 + peer.key
        self._check_number(number)
        former = self._peers.get(self._stepper.connect(peer.key, number, hello.behaviors, hello.scripts) or 0)
        if former is not None:
            former.replaced = True
            former.scope.cancel()
        peer.number = number
        heartbeat_s, timeout_s = self._house.settings.heartbeat_s, self._house.settings.simulator_timeout_s
        if hello.player is not None and hello.player.protocol == "unity":
            peer.line = self._connect_line(peer, hello.player)
            port = peer.line.port
            peer.say(
                Adopted(version=VERSION, connection=peer.key, heartbeat_s=heartbeat_s, timeout_s=timeout_s, port=port)
            )
        else:
            peer.say(Welcome(version=VERSION, connection=peer.key, heartbeat_s=heartbeat_s, timeout_s=timeout_s))
        self.begin()
        self._house.registry.add("simulators.connected")
        self._house.known()

    # ---------------------------------------------------------------- players

    def _connect_line(self, peer: Peer, player: Player) -> Line:
        loop = asyncio.get_running_loop()

        def hear(event: Event) -> None:
            loop.call_soon_threadsafe(self._heard, peer, event)

        try:
            return Line(player, seed=self._seed(peer.number or 0), hear=hear, clock=self._house.clock)
        except SettingsError as error:
            raise RemoteProtocolError("specs", got=str(error), expected="a player", remedy="see above") from error

    def _completed(self, peer: Peer) -> dict[str, int]:
        connection = self._stepper.connections.get(peer.key)
        return {} if connection is None else dict(connection.completed)

    def _heard(self, peer: Peer, event: Event) -> None:
        """Something happened on the line to a player."""
        if self.stopping or peer.key not in self._peers or peer.fault is not None:
            return
        if isinstance(event, str):
            peer.say(Progress(phase=event))
        elif isinstance(event, Fault):
            self._give_up(peer, event)
        else:
            try:
                self._frame(peer, event)
            except (ProtocolError, SpecError) as error:
                self._give_up(peer, fault_of(error))

    def _frame(self, peer: Peer, said: Said) -> None:
        """What a player said stands for Behaviors and a Step."""
        if said.behaviors:
            self._check_known(said.behaviors, peer.scripts)
            self._stepper.add_behaviors(peer.key, said.behaviors)
            self._house.known()
        if not said.reports:
            peer.unset = True
            self.begin()
            return
        step = Step(sequence=peer.steps, reports=said.reports, statistics=said.statistics)
        peer.steps += 1
        self._stepper.receive(peer.key, step, said.at)
        self._note_statistics(step.statistics)
        self._house.arrived()

    def _give_up(self, peer: Peer, fault: Fault) -> None:
        peer.fault = fault
        peer.scope.cancel()

    # ---------------------------------------------------------------- what simulators may say

    def _check_number(self, number: int) -> None:
        """Refuses a second simulator of one number, unless it may be the first one, back from a broken link."""
        for other in self._peers.values():
            if other.number == number and self._house.clock() - other.heard_at < self._house.settings.heartbeat_s:
                raise RemoteProtocolError(
                    "number",
                    got=f"simulator number {number} twice",
                    expected="a number of its own for each simulator",
                    remedy="leave the number out, or start each simulator with another",
                )

    def _check_known(self, behaviors: Mapping[str, BehaviorSpec], scripts: Mapping[str, Sequence[str]]) -> None:
        known = self._house.behaviors
        for text, spec in behaviors.items():
            name = BehaviorId.parse(text).name
            if name not in known:
                raise RemoteProtocolError(
                    "unknown_behavior",
                    got=f"behavior {text!r}",
                    expected=f"one of {sorted(known)}",
                    remedy="add it under `behaviors` of the configuration, or correct the name in the simulator",
                )
            if missing := self._house.scripts.get(name, frozenset()) - {*scripts.get(name, ())}:
                raise RemoteProtocolError(
                    "scripts",
                    got=f"behavior {name} with scripts {sorted(scripts.get(name, ()))}",
                    expected=f"{sorted(missing)} too, which self_play.opponents names",
                    remedy="name them in Hello and play them when asked, or take them from the configuration",
                )
            try:
                refuse_unsupported(spec, known[name].network_settings)
            except Unsupported as error:
                got, expected, remedy = f"{error.got} in behavior {name}", error.expected, error.remedy
                raise RemoteProtocolError("specs", got=got, expected=expected, remedy=remedy) from error

    def _compare(self, peer: Peer, counts: Mapping[str, int], log: Any) -> None:
        """Holds the simulator's own count against ours."""
        connection = self._stepper.connections.get(peer.key)
        if connection is None or not counts:
            return
        frame = connection.frame
        for name, total in counts.items():
            own = total - peer.counted.get(name, 0)
            ours = connection.completed.get(name, 0)
            if own != ours and not self.stopping and (frame is None or frame.reported):
                log.warning("step_counts_differ", simulator=peer.name, behavior=name, simulator_says=own, counted=ours)

    def _note_sent(self, received_at: float, withheld_s: float) -> None:
        if received_at:
            registry = self._house.registry
            registry.observe("action_latency_s", max(0.0, self._house.clock() - received_at - withheld_s))
            registry.observe("withheld_s", withheld_s)

    async def watch_silence(self) -> None:
        """Gives simulators up that have been silent for too long."""
        while True:
            await anyio.sleep(self._house.settings.heartbeat_s / 2)
            now = self._house.clock()
            for peer in list(self._peers.values()):
                if now - peer.heard_at > self._house.settings.simulator_timeout_s:
                    peer.scope.cancel()
                elif peer.line is not None and (fault := peer.line.overdue(now)) is not None:
                    self._heard(peer, fault)

    def _note_statistics(self, statistics: tuple[Statistic, ...]) -> None:
        registry = self._house.registry
        for statistic in statistics:
            if statistic.aggregation == "sum":
                registry.add(f"simulator.{statistic.name}", statistic.value)
            elif statistic.aggregation == "most_recent":
                registry.gauge(f"simulator.{statistic.name}", statistic.value)
            else:
                registry.observe_moments(f"simulator.{statistic.name}", [statistic.value])


def fault_of(error: Explained) -> Fault:
    """What the simulator is told about its mistake."""
    if isinstance(error, ProtocolError):
        code = error.code
    elif isinstance(error, LimitExceeded):
        code = "too_large"
    else:
        code = "specs" if isinstance(error, SpecError) else "malformed"
    return Fault(code=code, got=error.got, expected=error.expected, remedy=error.remedy)


def _silence(limit_s: float) -> Fault:
    return Fault(
        code="timeout",
        got=f"silence for {limit_s:g} s",
        expected="a message or a Ping in that time",
        remedy="send Ping every Welcome.heartbeat_s seconds while the simulator computes",
    )


async def _part(peer: Peer, fault: Fault) -> None:
    """Sends a last word without waiting long for it to leave."""
    if peer.conversation.state == "closed":
        return
    peer.say(fault)
    with anyio.move_on_after(1.0, shield=True):
        await peer.outgoing.drain()
