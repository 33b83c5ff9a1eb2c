"""The simulators of one stepping process: their sockets and conversations.

What they report goes to the stepper; what they did wrong is told to them alone. With a player that a simulator has
launched, and asks this process to speak with, there is a line beside the socket (`players.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import anyio
from anyio.abc import ByteStream

from sparring.pipeline.errors import CodecError, ProtocolError, RemoteProtocolError, SettingsError
from sparring.pipeline.messages.simulator import (
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
from sparring.pipeline.monitoring.metrics import SIMULATOR, Registry
from sparring.pipeline.networks.limits import Unsupported, refuse_unsupported
from sparring.pipeline.specs import BehaviorId, BehaviorSpec, SpecError
from sparring.pipeline.stepping.limits import check_behaviors, check_unnamed
from sparring.pipeline.stepping.settings import SteppingSettings
from sparring.pipeline.stepping.stepper import Stepper
from sparring.pipeline.stepping.validation import beyond_light
from sparring.services.endpoint.admission import GONE, LAST_WORD_S, HandshakingSimulator, fault_of
from sparring.services.endpoint.guard import ConnectionLimits
from sparring.services.endpoint.outgoing import Outgoing
from sparring.services.endpoint.peers import SimulatorPeer
from sparring.services.endpoint.players import Event, PlayerConnection, PlayerEvent
from sparring.services.endpoint.refusals import clip

_RECEIVE: Final = 256 * 1024
_OWN_NUMBERS: Final = 2**20
"""From here on, the numbers of simulators that come without one."""
_LINES: Final = 50
"""Of one kind about simulators of one machine and certificate, in one interval of the log."""


@dataclass(frozen=True, kw_only=True)
class DefaultBehaviors:
    """Behaviors that the configuration does not name: what counts for all of them.

    Attributes:
        settings: of each.
        scripts: that every simulator must be able to play.
        added: names of those that have come; the run prepares what else they need.
    """

    settings: Any
    scripts: frozenset[str]
    added: set[str] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class ServerContext:
    """What all conversations share.

    Attributes:
        settings: times.
        behaviors: settings by name (anything with `network_settings`); gets those that simulators add.
        scripts: by behavior name, those that every simulator must be able to play.
        seed: of the run; each simulator gets one of its own from it.
        clock: seconds, only rising.
        registry: the service's numbers.
        log: structlog logger.
        arrived: called when a frame came, or a simulator went.
        known: called when behaviors became known.
        unnamed: what counts for behaviors that are not among these; None where such a one is refused.
    """

    settings: SteppingSettings
    behaviors: dict[str, Any]
    scripts: Mapping[str, frozenset[str]]
    seed: int
    clock: Callable[[], float]
    registry: Registry
    log: Any
    arrived: Callable[[], None]
    known: Callable[[], None]
    unnamed: DefaultBehaviors | None = None


class Simulators:
    """The connected simulators.

    Args:
        stepper: that acts for them.
        context: what their conversations share.

    Attributes:
        guard: what they are held to.
        given_up: by number of the simulator, how often it was given up because it was silent.
    """

    def __init__(self, stepper: Stepper, context: ServerContext) -> None:
        self.stopping = False
        self.given_up: dict[str, int] = {}
        self.guard = ConnectionLimits(context.settings.limits, context.registry, context.log, context.clock)
        self._stepper = stepper
        self._context = context
        self._peers: dict[int, SimulatorPeer] = {}
        self._keys = 0
        self._deserted = anyio.Event()

    def answer(self, key: int, answer: Act | Reset, received_at: float, backpressured_s: float) -> None:
        """Answers a Step, unless its simulator has gone or is parting."""
        peer = self._peers.get(key)
        if peer is not None and peer.line is not None:
            peer.line.answer(answer)
            self._note_sent(received_at, backpressured_s)
        elif peer is not None and peer.conversation.state == "deciding":
            peer.say(answer, received_at, backpressured_s)

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
        return (self._context.seed + number) % 2**31

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
            self._deserted = anyio.Event()  # all may have gone before, and come back
            await self._deserted.wait()

    async def serve(self, stream: ByteStream, candidate: HandshakingSimulator | None = None) -> None:
        """Speaks with one simulator until its end; None for a guest that is not known yet, from this machine."""
        self._keys += 1
        outgoing = Outgoing(stream, self._note_sent)
        peer = SimulatorPeer(
            self._keys,
            stream,
            outgoing,
            candidate or HandshakingSimulator(),
            self.guard.flow(),
            heard_at=self._context.clock(),
        )
        log = self._context.log.bind(connection=peer.key)
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
                    limit_s = self._context.settings.simulator_timeout_s
                    self._say("simulator_silent", peer, limit_s=limit_s)
                    if peer.number is not None:
                        self.given_up[str(peer.number)] = self.given_up.get(str(peer.number), 0) + 1
                    await _part(peer, _silence(limit_s))
        except* GONE as failure:
            if not self.stopping:
                self._say("simulator_lost", peer, cause=repr(failure.exceptions[0]))
        finally:
            peer.flow.close()
            if peer.line is not None:
                await peer.line.close()
            del self._peers[peer.key]
            if not self._peers:
                self._deserted.set()
            if not self.stopping and peer.key in self._stepper.connections:
                self._stepper.disconnect(peer.key)
                self._context.registry.add("simulators.lost")
                self._context.arrived()

    def _say(self, event: str, peer: SimulatorPeer, kind: str = "", *, level: str = "warning", **facts: Any) -> None:
        """Logs what a simulator did: the first times in an interval, so that none can fill the log."""
        facts = {"simulator": peer.name, "number": peer.number, "connection": peer.key, **facts}
        self.guard.refusals.say(event, peer.candidate.peer, kind, most=_LINES, level=level, **facts)

    async def _converse(self, peer: SimulatorPeer, log: Any) -> None:
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

    def _note_fault(self, peer: SimulatorPeer, fault: Fault) -> None:
        self._context.registry.add("faults")
        self._context.registry.add(f"faults.{fault.code}")
        self._say("simulator_fault", peer, fault.code, got=fault.got, expected=fault.expected, remedy=fault.remedy)

    async def _read(self, peer: SimulatorPeer, log: Any) -> None:
        reader, flow = peer.reader, peer.flow
        if peer.candidate.hello is not None:
            self._react(peer, peer.candidate.hello, log)
        while True:
            while (message := reader.next()) is not None:
                peer.heard_at = now = self._context.clock()
                peer.conversation.received(message)
                if isinstance(message, Step):
                    self._stepper.receive(peer.key, message, now)
                    self._note_statistics(peer, message.statistics)
                    if not message.sequence:
                        self._look(peer, message)
                    self._context.arrived()
                elif not self._react(peer, message, log):
                    return
                if (delay_s := flow.note_message(message)) > 0:
                    await self._slow_down(peer, delay_s)
            await peer.outgoing.room(self.guard.limits.sending_bytes)
            if flow.needs_room(reader):
                peer.heard_at = math.inf
                await flow.make_room(reader)
                peer.heard_at = self._context.clock()
            received = await peer.stream.receive(_RECEIVE)
            self._context.registry.add("received_bytes", len(received))
            reader.feed(received)
            if (delay_s := flow.note_bytes(len(received))) > 0:
                await self._slow_down(peer, delay_s)

    def _look(self, peer: SimulatorPeer, first: Step) -> None:
        """Says what of a simulator's first Step may be a mistake, and may be meant."""
        behaviors = self._stepper.connections[peer.key].behaviors
        for report in first.reports:
            if got := beyond_light(report, behaviors[report.behavior].spec):
                self._say("image_beyond_light", peer, got=got, expected="0 (dark) to 1 (bright), or bytes as uint8")

    async def _slow_down(self, peer: SimulatorPeer, delay_s: float) -> None:
        self._context.registry.add("slowed_down_s", delay_s)
        self._say("simulator_slowed_down", peer, cause="it sends more than pipeline.limits allows")
        peer.heard_at = math.inf
        await anyio.sleep(delay_s)
        peer.heard_at = self._context.clock()

    def _react(self, peer: SimulatorPeer, message: Any, log: Any) -> bool:
        """Answers what is not a Step; returns whether the conversation goes on."""
        if peer.conversation.state == "parting" and isinstance(message, Hello | Ping):
            return True  # it crossed our Bye: nobody waits for the answer any more
        if isinstance(message, Hello):
            self._greet(peer, message)
            self._say("simulator_connected", peer, level="info", behaviors=sorted(message.behaviors))
        elif isinstance(message, Behaviors):
            self._add_behaviors(peer, message.behaviors)
        elif isinstance(message, Ping):
            peer.say(Pong(number=message.number))
        elif isinstance(message, Bye):
            self._compare(peer, message.steps, log)
            return False
        elif isinstance(message, Fault):
            self._say("simulator_gave_up", peer, code=message.code, got=message.got, remedy=message.remedy)
            return False
        return True

    def _greet(self, peer: SimulatorPeer, hello: Hello) -> None:
        if hello.version != VERSION:
            raise RemoteProtocolError(
                "version",
                got=f"protocol version {hello.version}",
                expected=str(VERSION),
                remedy="use a client of the same version as the trainer",
            )
        check_behaviors(hello.behaviors, 0, self.guard.limits)
        new = self._check_known(hello.behaviors, hello.scripts)
        peer.name, peer.counted, peer.scripts = clip(hello.name, 100), dict(hello.steps), hello.scripts
        # A simulator that dialled in by itself comes after the supervisor's.
        number = hello.number if hello.number is not None else _OWN_NUMBERS + peer.key
        self._check_number(peer, hello.number, number)
        former = self._peers.get(self._stepper.connect(peer.key, number, hello.behaviors, hello.scripts) or 0)
        self._add_names(new)
        if former is not None:
            former.replaced = True
            former.scope.cancel()
        peer.number = number
        heartbeat_s, timeout_s = self._context.settings.heartbeat_s, self._context.settings.simulator_timeout_s
        # Of a simulator on another machine nothing is listened for here: it speaks with its player itself.
        if hello.player is not None and hello.player.protocol == "unity" and peer.candidate.near:
            peer.line = self._connect_line(peer, hello.player)
            port = peer.line.port
            peer.say(
                Adopted(version=VERSION, connection=peer.key, heartbeat_s=heartbeat_s, timeout_s=timeout_s, port=port)
            )
        else:
            peer.say(Welcome(version=VERSION, connection=peer.key, heartbeat_s=heartbeat_s, timeout_s=timeout_s))
        self.begin()
        self._context.registry.add("simulators.connected")
        self._context.known()

    # ---------------------------------------------------------------- players

    def _connect_line(self, peer: SimulatorPeer, player: Player) -> PlayerConnection:
        try:
            return PlayerConnection(
                player,
                seed=self._seed(peer.number or 0),
                hear=partial(self._heard, peer),
                clock=self._context.clock,
                loop=asyncio.get_running_loop(),
                host=self._context.settings.player_host,
            )
        except SettingsError as error:
            got, _, rest = str(error).removeprefix("got ").partition("; expected ")
            expected, _, remedy = rest.partition("; ")
            raise RemoteProtocolError("specs", got=got, expected=expected, remedy=remedy) from error

    def _completed(self, peer: SimulatorPeer) -> dict[str, int]:
        connection = self._stepper.connections.get(peer.key)
        return {} if connection is None else dict(connection.completed)

    def _heard(self, peer: SimulatorPeer, event: Event) -> None:
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

    def _frame(self, peer: SimulatorPeer, said: PlayerEvent) -> None:
        """What a player said stands for Behaviors and a Step."""
        self._note_statistics(peer, said.statistics)
        if said.behaviors:
            self._add_behaviors(peer, said.behaviors)
        for behavior, goals in said.plain_goals.items():
            for name, kind in goals:
                got = f"goal signal {name!r} of {behavior}, read as any other {kind}"
                self._say("goal_not_conditioned_on", peer, got=got, expected="a goal signal of one axis (numbers)")
        if not said.reports:
            peer.unset = True
            self.begin()
            return
        step = Step(sequence=peer.steps, reports=said.reports)
        peer.steps += 1
        self._stepper.receive(peer.key, step, said.at)
        if not step.sequence:
            self._look(peer, step)
        self._context.arrived()

    def _give_up(self, peer: SimulatorPeer, fault: Fault) -> None:
        peer.fault = fault
        peer.scope.cancel()

    # ---------------------------------------------------------------- what simulators may say

    def _add_behaviors(self, peer: SimulatorPeer, behaviors: Mapping[str, BehaviorSpec]) -> None:
        check_behaviors(behaviors, len(self._stepper.connection(peer.key).behaviors), self.guard.limits)
        new = self._check_known(behaviors, peer.scripts)
        self._stepper.add_behaviors(peer.key, behaviors)
        self._add_names(new)
        self._context.known()

    def _check_number(self, peer: SimulatorPeer, told: int | None, number: int) -> None:
        """Refuses a second simulator of one number, unless it may be the first one, back from a broken link."""
        if told is not None and not 0 <= told < _OWN_NUMBERS:
            raise RemoteProtocolError(
                "number",
                got=f"simulator number {told}",
                expected=f"0 to {_OWN_NUMBERS - 1}",
                remedy="leave the number out, or use $SPARRING_NUMBER",
            )
        for other in self._peers.values():
            alive = self._context.clock() - other.heard_at < self._context.settings.heartbeat_s
            if other.number == number and (alive or other.candidate.identity != peer.candidate.identity):
                raise RemoteProtocolError(
                    "number",
                    got=f"simulator number {number} twice",
                    expected="a number of its own for each simulator",
                    remedy="leave the number out, or start each simulator with another",
                )

    def _check_known(
        self, behaviors: Mapping[str, BehaviorSpec], scripts: Mapping[str, Sequence[str]]
    ) -> Sequence[str]:
        """Refuses behaviors that nobody can train; returns the names that are new."""
        known, unnamed = self._context.behaviors, self._context.unnamed
        new = sorted({BehaviorId.parse(text).name for text in behaviors} - known.keys())
        for text, spec in behaviors.items():
            name = BehaviorId.parse(text).name
            if name in known:
                settings, wanted = known[name], self._context.scripts.get(name, frozenset())
                if unnamed is not None and name in unnamed.added:
                    wanted = unnamed.scripts
            elif unnamed is not None:
                check_unnamed(name, len(unnamed.added) + new.index(name), self.guard.limits.unnamed_behaviors)
                settings, wanted = unnamed.settings, unnamed.scripts
            else:
                raise RemoteProtocolError(
                    "unknown_behavior",
                    got=f"behavior {text!r}",
                    expected=f"one of {sorted(known)}",
                    remedy=f"write `{name}: {{}}` below `behaviors` of the configuration, or default_settings, which "
                    "count for any other name; or correct the name in the simulator",
                )
            if missing := wanted - {*scripts.get(name, ())}:
                raise RemoteProtocolError(
                    "scripts",
                    got=f"behavior {name} with scripts {sorted(scripts.get(name, ()))}",
                    expected=f"{sorted(missing)} too, which self_play.opponents names",
                    remedy="name them in Hello and play them when asked, or take them from the configuration",
                )
            try:
                refuse_unsupported(spec, settings.network_settings)
            except Unsupported as error:
                got, expected, remedy = f"{error.got} in behavior {name}", error.expected, error.remedy
                raise RemoteProtocolError("specs", got=got, expected=expected, remedy=remedy) from error
        return new

    def _add_names(self, names: Sequence[str]) -> None:
        """Behaviors that the configuration does not name are here to stay."""
        unnamed = self._context.unnamed
        if unnamed is not None:
            self._context.behaviors.update(dict.fromkeys(names, unnamed.settings))
            unnamed.added.update(names)

    def _compare(self, peer: SimulatorPeer, counts: Mapping[str, int], log: Any) -> None:
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

    def _note_sent(self, received_at: float, backpressured_s: float) -> None:
        if received_at:
            registry = self._context.registry
            registry.observe("action_latency_s", max(0.0, self._context.clock() - received_at - backpressured_s))
            registry.observe("backpressured_s", backpressured_s)

    async def watch_silence(self) -> None:
        """Gives simulators up that have been silent for too long."""
        while True:
            await anyio.sleep(self._context.settings.heartbeat_s / 2)
            now = self._context.clock()
            for peer in list(self._peers.values()):
                if now - peer.heard_at > self._context.settings.simulator_timeout_s:
                    peer.scope.cancel()
                elif peer.line is not None and (fault := peer.line.overdue(now)) is not None:
                    self._heard(peer, fault)

    def _note_statistics(self, peer: SimulatorPeer, statistics: tuple[Statistic, ...]) -> None:
        registry = self._context.registry
        for statistic in statistics:
            if not self.guard.takes_statistic(statistic.name, peer.candidate.peer):
                continue
            name = SIMULATOR + statistic.name
            if statistic.aggregation == "sum":
                registry.add(f"{name}.total", statistic.value)
            elif statistic.aggregation != "most_recent":
                registry.observe_moments(name, [statistic.value])
            elif peer.number == 0:  # of several, the first one's
                registry.gauge(name, statistic.value)


def _silence(limit_s: float) -> Fault:
    return Fault(
        code="timeout",
        got=f"silence for {limit_s:g} s",
        expected="a message or a Ping in that time",
        remedy="send Ping every Welcome.heartbeat_s seconds while the simulator computes",
    )


async def _part(peer: SimulatorPeer, fault: Fault) -> None:
    """Sends a last word without waiting long for it to leave."""
    if peer.conversation.state == "closed":
        return
    peer.say(fault)
    with anyio.move_on_after(LAST_WORD_S, shield=True):
        await peer.outgoing.drain()
