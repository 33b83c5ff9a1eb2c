"""This server holds the conversations with all simulators of one stepping process.

Valid reports go to the stepper; errors go to the simulator that caused them. Where a simulator has launched a player
and asks this process to speak with it, a player connection exists beside the socket (`players.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
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
    Step,
    Welcome,
)
from sparring.pipeline.specs import BehaviorSpec, SpecError
from sparring.pipeline.stepping.limits import check_behaviors
from sparring.pipeline.stepping.stepper import Stepper
from sparring.pipeline.stepping.validation import image_out_of_range
from sparring.services.endpoint.admission import DISCONNECTED, FAULT_TIMEOUT_S, HandshakingSimulator, fault_of
from sparring.services.endpoint.connection_limits import ConnectionLimits
from sparring.services.endpoint.context import ServerContext
from sparring.services.endpoint.outgoing import Outgoing
from sparring.services.endpoint.peers import SimulatorPeer
from sparring.services.endpoint.players import Event, PlayerConnection, PlayerEvent
from sparring.services.endpoint.registration import OWN_NUMBERS, add_names, check_known, check_number, check_version
from sparring.services.endpoint.rejections import clip

_RECEIVE: Final = 256 * 1024
_MAX_LINES: Final = 50
"""Maximum number of log lines of one kind about one machine and certificate, in one interval."""


class Simulators:
    """Simulators serve all connected simulators.

    Args:
        stepper: acts for them.
        context: shared by their conversations.

    Attributes:
        stopping: the run ends: no simulator is answered any more.
        peers: connected simulators by connection key.
        connection_limits: limits of their connections.
        given_up: by number of the simulator, how often it was disconnected because it was silent.
    """

    def __init__(self, stepper: Stepper, context: ServerContext) -> None:
        self.stopping = False
        self.given_up: dict[str, int] = {}
        self.peers: dict[int, SimulatorPeer] = {}
        self.connection_limits = ConnectionLimits(context.settings.limits, context.registry, context.log, context.clock)
        self._stepper = stepper
        self._context = context
        self._keys = 0
        self._all_left = anyio.Event()

    def answer(self, key: int, answer: Act | Reset, received_at: float, backpressured_s: float) -> None:
        """Answers a Step, unless its simulator has disconnected or is about to."""
        peer = self.peers.get(key)
        if peer is not None and peer.player is not None:
            peer.player.answer(answer)
            self._note_sent(received_at, backpressured_s)
        elif peer is not None and peer.conversation.state == "deciding":
            peer.send(answer, received_at, backpressured_s)

    def send_first_resets(self) -> None:
        """Sends the first Reset to simulators that wait for it, once the environment parameters are known."""
        if not self._stepper.parameters.known:
            return
        for peer in self.peers.values():
            connection = self._stepper.connections.get(peer.key)
            if connection is not None and peer.needs_reset():
                peer.reset(self._stepper.begin_episodes(peer.key, self._seed(connection.number)))

    def _seed(self, number: int) -> int:
        """Returns the seed of a simulator."""
        return (self._context.seed + number) % 2**31

    def stop_answering(self) -> None:
        """Stops answering simulators; messages of players no longer count."""
        self.stopping = True
        for peer in self.peers.values():
            if peer.player is not None:
                peer.player.part()

    async def disconnect_all(self) -> None:
        """Sends Bye to every simulator; returns when all have disconnected."""
        self.stop_answering()
        for peer in list(self.peers.values()):
            if peer.conversation.state not in ("parting", "closed"):
                peer.send(Bye(reason="the run ended", steps={} if peer.player is None else self._completed(peer)))
        if self.peers:
            self._all_left = anyio.Event()  # all may have left before, and reconnected
            await self._all_left.wait()

    async def serve(self, stream: ByteStream, candidate: HandshakingSimulator | None = None) -> None:
        """Handles one simulator until its end; without `candidate`, one on this machine that has not sent Hello."""
        self._keys += 1
        outgoing = Outgoing(stream, self._note_sent)
        peer = SimulatorPeer(
            self._keys,
            stream,
            outgoing,
            candidate or HandshakingSimulator(),
            self.connection_limits.new_throttle(),
            last_received_at=self._context.clock(),
        )
        log = self._context.log.bind(connection=peer.key)
        self.peers[peer.key] = peer
        try:
            async with stream:
                with peer.outgoing, peer.scope:
                    await self._converse(peer, log)
                if peer.replaced:
                    log.warning("simulator_replaced", simulator=peer.name, number=peer.number)
                elif peer.fault is not None:
                    self._note_fault(peer, peer.fault)
                    await _send_fault(peer, peer.fault)
                elif peer.scope.cancelled_caught:
                    limit_s = self._context.settings.simulator_timeout_s
                    self._log_event("simulator_silent", peer, limit_s=limit_s)
                    if peer.number is not None:
                        self.given_up[str(peer.number)] = self.given_up.get(str(peer.number), 0) + 1
                    await _send_fault(peer, _silence_fault(limit_s))
        except* DISCONNECTED as failure:
            if not self.stopping:
                self._log_event("simulator_lost", peer, cause=repr(failure.exceptions[0]))
        finally:
            peer.throttle.close()
            if peer.player is not None:
                await peer.player.close()
            del self.peers[peer.key]
            if not self.peers:
                self._all_left.set()
            if not self.stopping and peer.key in self._stepper.connections:
                self._stepper.disconnect(peer.key)
                self._context.registry.add("simulators.lost")
                self._context.arrived()

    def _log_event(
        self, event: str, peer: SimulatorPeer, kind: str = "", *, level: str = "warning", **facts: Any
    ) -> None:
        """Logs an event of a simulator, a limited number of times per interval so that none can fill the log."""
        facts = {"simulator": peer.name, "number": peer.number, "connection": peer.key, **facts}
        log = self.connection_limits.rejections
        log.log_event(event, peer.candidate.peer, kind, most=_MAX_LINES, level=level, **facts)

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
            await _send_fault(peer, fault)

    def _note_fault(self, peer: SimulatorPeer, fault: Fault) -> None:
        self._context.registry.add("faults")
        self._context.registry.add(f"faults.{fault.code}")
        self._log_event(
            "simulator_fault", peer, fault.code, got=fault.got, expected=fault.expected, remedy=fault.remedy
        )

    async def _read(self, peer: SimulatorPeer, log: Any) -> None:
        reader, throttle = peer.reader, peer.throttle
        if peer.candidate.hello is not None:
            self._react(peer, peer.candidate.hello, log)
        while True:
            while (message := reader.next()) is not None:
                peer.last_received_at = now = self._context.clock()
                peer.conversation.received(message)
                if isinstance(message, Step):
                    self._stepper.receive(peer.key, message, now)
                    self.connection_limits.record_statistics(message.statistics, peer.candidate.peer, peer.number)
                    if not message.sequence:
                        self._warn_of_images(peer, message)
                    self._context.arrived()
                elif not self._react(peer, message, log):
                    return
                if (delay_s := throttle.note_message(message)) > 0:
                    await self._slow_down(peer, delay_s)
            await peer.outgoing.wait_until_below(self.connection_limits.limits.sending_bytes)
            if throttle.needs_reservation(reader):
                peer.last_received_at = math.inf
                await throttle.reserve(reader)
                peer.last_received_at = self._context.clock()
            received = await peer.stream.receive(_RECEIVE)
            self._context.registry.add("received_bytes", len(received))
            reader.feed(received)
            if (delay_s := throttle.note_bytes(len(received))) > 0:
                await self._slow_down(peer, delay_s)

    def _warn_of_images(self, peer: SimulatorPeer, first: Step) -> None:
        """Warns of images in a simulator's first Step that may be scaled wrongly."""
        behaviors, expected = self._stepper.connections[peer.key].behaviors, "0 (dark) to 1 (bright), or bytes as uint8"
        for report in first.reports:
            if got := image_out_of_range(report, behaviors[report.behavior].behavior.spec):
                self._log_event("image_out_of_range", peer, got=got, expected=expected)

    async def _slow_down(self, peer: SimulatorPeer, delay_s: float) -> None:
        self._context.registry.add("slowed_down_s", delay_s)
        self._log_event("simulator_slowed_down", peer, cause="it sends more than pipeline.limits allows")
        peer.last_received_at = math.inf
        await anyio.sleep(delay_s)
        peer.last_received_at = self._context.clock()

    def _react(self, peer: SimulatorPeer, message: Any, log: Any) -> bool:
        """Handles a message other than Step; returns whether the conversation continues."""
        if peer.conversation.state == "parting" and isinstance(message, Hello | Ping):
            return True  # it crossed our Bye: the simulator needs no answer any more
        if isinstance(message, Hello):
            self._on_hello(peer, message)
            self._log_event("simulator_connected", peer, level="info", behaviors=sorted(message.behaviors))
        elif isinstance(message, Behaviors):
            self._add_behaviors(peer, message.behaviors)
        elif isinstance(message, Ping):
            peer.send(Pong(number=message.number))
        elif isinstance(message, Bye):
            self._compare_counts(peer, message.steps, log)
            return False
        elif isinstance(message, Fault):
            self._log_event("simulator_gave_up", peer, code=message.code, got=message.got, remedy=message.remedy)
            return False
        return True

    def _on_hello(self, peer: SimulatorPeer, hello: Hello) -> None:
        check_version(hello)
        check_behaviors(hello.behaviors, 0, self.connection_limits.limits)
        new = check_known(hello.behaviors, hello.scripts, self._context)
        peer.name, peer.reported_steps, peer.scripts = clip(hello.name, 100), dict(hello.steps), hello.scripts
        # A simulator that the supervisor did not start comes after the supervisor's.
        number = hello.number if hello.number is not None else OWN_NUMBERS + peer.key
        limit_s = self._context.settings.heartbeat_s
        check_number(peer, hello.number, number, self.peers.values(), self._context.clock(), limit_s)
        replaced = self._stepper.connect(
            peer.key, number, hello.behaviors, hello.scripts, process=clip(hello.process, 100), reported=hello.steps
        )
        former = self.peers.get(replaced or 0)
        add_names(new, self._context)
        if former is not None:
            former.replaced = True
            former.scope.cancel()
        peer.number = number
        heartbeat_s, timeout_s = self._context.settings.heartbeat_s, self._context.settings.simulator_timeout_s
        # A simulator on another machine speaks with its player itself.
        if hello.player is not None and hello.player.protocol == "unity" and peer.candidate.is_local:
            peer.player = self._connect_player(peer, hello.player)
            port = peer.player.port
            peer.send(
                Adopted(version=VERSION, connection=peer.key, heartbeat_s=heartbeat_s, timeout_s=timeout_s, port=port)
            )
        else:
            peer.send(Welcome(version=VERSION, connection=peer.key, heartbeat_s=heartbeat_s, timeout_s=timeout_s))
        self.send_first_resets()
        self._context.registry.add("simulators.connected")
        self._context.known()

    # ---------------------------------------------------------------- players

    def _connect_player(self, peer: SimulatorPeer, player: Player) -> PlayerConnection:
        try:
            return PlayerConnection(
                player,
                seed=self._seed(peer.number or 0),
                on_event=partial(self._on_player_event, peer),
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

    def _on_player_event(self, peer: SimulatorPeer, event: Event) -> None:
        """Handles an event of a player."""
        if self.stopping or peer.key not in self.peers or peer.fault is not None:
            return
        if isinstance(event, str):
            peer.send(Progress(phase=event))
        elif isinstance(event, Fault):
            self._end_with(peer, event)
        else:
            try:
                self._on_player_message(peer, event)
            except (ProtocolError, SpecError) as error:
                self._end_with(peer, fault_of(error))

    def _on_player_message(self, peer: SimulatorPeer, event: PlayerEvent) -> None:
        """Handles a message of a player as Behaviors and a Step."""
        self.connection_limits.record_statistics(event.statistics, peer.candidate.peer, peer.number)
        if event.behaviors:
            self._add_behaviors(peer, event.behaviors)
        for behavior, goals in event.plain_goals.items():
            for name, kind in goals:
                got = f"goal signal {name!r} of {behavior}, read as any other {kind}"
                expected = "a goal signal of one axis (numbers)"
                self._log_event("goal_not_conditioned_on", peer, got=got, expected=expected)
        if not event.reports:
            peer.awaits_reset = True
            self.send_first_resets()
            return
        step = Step(sequence=peer.player_steps, reports=event.reports)
        peer.player_steps += 1
        self._stepper.receive(peer.key, step, event.at)
        if not step.sequence:
            self._warn_of_images(peer, step)
        self._context.arrived()

    def _end_with(self, peer: SimulatorPeer, fault: Fault) -> None:
        peer.fault = fault
        peer.scope.cancel()

    # ---------------------------------------------------------------- checks and metrics

    def _add_behaviors(self, peer: SimulatorPeer, behaviors: Mapping[str, BehaviorSpec]) -> None:
        check_behaviors(behaviors, len(self._stepper.connection(peer.key).behaviors), self.connection_limits.limits)
        new = check_known(behaviors, peer.scripts, self._context)
        self._stepper.add_behaviors(peer.key, behaviors)
        add_names(new, self._context)
        self._context.known()

    def _compare_counts(self, peer: SimulatorPeer, counts: Mapping[str, int], log: Any) -> None:
        """Compares the simulator's own step counts with ours."""
        connection = self._stepper.connections.get(peer.key)
        if connection is None or not counts:
            return
        self._stepper.processes.end(connection, counts)
        frame = connection.frame
        for name, total in counts.items():
            own = total - peer.reported_steps.get(name, 0)
            ours = connection.completed.get(name, 0)
            if own != ours and not self.stopping and (frame is None or frame.reported):
                log.warning("step_counts_differ", simulator=peer.name, behavior=name, simulator_says=own, counted=ours)

    def _note_sent(self, received_at: float, backpressured_s: float) -> None:
        if received_at:
            registry = self._context.registry
            registry.observe("action_latency_s", max(0.0, self._context.clock() - received_at - backpressured_s))
            registry.observe("backpressured_s", backpressured_s)

    async def watch_silence(self) -> None:
        """Disconnects simulators that have been silent for too long."""
        while True:
            await anyio.sleep(self._context.settings.heartbeat_s / 2)
            now = self._context.clock()
            for peer in list(self.peers.values()):
                if now - peer.last_received_at > self._context.settings.simulator_timeout_s:
                    peer.scope.cancel()
                elif peer.player is not None and (fault := peer.player.overdue(now)) is not None:
                    self._on_player_event(peer, fault)


def _silence_fault(limit_s: float) -> Fault:
    return Fault(
        code="timeout",
        got=f"silence for {limit_s:g} s",
        expected="a message or a Ping in that time",
        remedy="send Ping every Welcome.heartbeat_s seconds while the simulator computes",
    )


async def _send_fault(peer: SimulatorPeer, fault: Fault) -> None:
    """Sends a final Fault, and waits for `FAULT_TIMEOUT_S` at most."""
    if peer.conversation.state == "closed":
        return
    peer.send(fault)
    with anyio.move_on_after(FAULT_TIMEOUT_S, shield=True):
        await peer.outgoing.drain()
