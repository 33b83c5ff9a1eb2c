"""This server holds the conversations with all simulators of one stepping process.

Valid reports go to the stepper; errors go to the simulator that caused them. Where a simulator has launched a player
and asks this process to speak with it, a player connection (`pipeline/bridges/unity/`) exists beside the socket.
"""

import asyncio
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Final

import anyio

from sparring.pipeline.bridges.unity.connection import Event, PlayerConnection, explanation
from sparring.pipeline.bridges.unity.conversation import PlayerMessage
from sparring.pipeline.errors import CodecError, ProtocolError, RemoteProtocolError, SettingsError
from sparring.pipeline.messages import simulator as messages
from sparring.pipeline.monitoring.metrics import SIMULATOR
from sparring.pipeline.queues.rejections import Fact, RejectionLog, clip
from sparring.pipeline.specs import BehaviorSpec, SpecError
from sparring.pipeline.stepping.limits import check_behaviors
from sparring.pipeline.stepping.stepper import Stepper
from sparring.pipeline.stepping.validation import describe_report, image_out_of_range
from sparring.services.endpoint.admission import DISCONNECTED, fault_of
from sparring.services.endpoint.peers import OWN_NUMBERS, ServerContext, SimulatorPeer, check_counts, check_hello
from sparring.services.endpoint.sockets import Outgoing, SocketBytes
from sparring.services.endpoint.throttling import Pool, ReadThrottle

_RECEIVE: Final = 256 * 1024
_LONGEST_DESCRIPTION: Final = 1000
_NAME: Final = 200
"""Maximum number of characters in the name of a statistic; each name uses memory until the process ends."""
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
        rejections: log of what they did wrong.
        pool: memory of large messages, shared by all.
        given_up: by number of the simulator, how often it was disconnected because it was silent.
    """

    def __init__(self, stepper: Stepper, context: ServerContext) -> None:
        self.stopping = False
        self.given_up: dict[str, int] = {}
        self._stepped: set[int] = set()
        self.described: dict[str, str] = {}
        self.peers: dict[int, SimulatorPeer] = {}
        self.rejections = RejectionLog(context.log, context.clock, context.registry.add)
        self.pool = Pool(context.settings.limits.receiving_bytes)
        self._limits = context.settings.limits
        self._statistics: set[str] = set()  # names of those that are recorded
        self._stepper = stepper
        self._context = context
        self._keys = 0
        self._all_left = anyio.Event()

    def answer(
        self, key: int, answer: messages.Act | messages.Reset, received_at: float, backpressured_s: float
    ) -> None:
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
            if connection is not None and peer.needs_reset:
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
                connection = self._stepper.connections.get(peer.key)
                steps = {} if peer.player is None or connection is None else dict(connection.completed)
                peer.send(messages.Bye(reason="the run ended", steps=steps))
        if self.peers:
            self._all_left = anyio.Event()  # all may have left before, and reconnected
            await self._all_left.wait()

    def that_stepped(self) -> tuple[int, ...]:
        """Returns the numbers of the simulators that have completed a step, whether they are still connected or not."""
        connections = self._stepper.connections.values()
        self._stepped.update(one.number for one in connections if any(one.completed.values()))
        return tuple(sorted(self._stepped))

    def add(self, peer: SimulatorPeer) -> None:
        """Adds a simulator whose handshake is complete."""
        self._keys += 1
        peer.key = self._keys
        peer.throttle = ReadThrottle(self._limits, self.pool, self._context.clock)
        peer.last_received_at = self._context.clock()
        self.peers[peer.key] = peer

    def refuse(self, key: int, error: ProtocolError) -> None:
        """Ends the conversation with a simulator."""
        if (peer := self.peers.get(key)) is not None:
            peer.fault = fault_of(error)
            peer.scope.cancel()

    async def serve(self, peer: SimulatorPeer) -> None:
        """Handles one simulator until its end."""
        peer.scope, peer.outgoing = anyio.CancelScope(), Outgoing(peer.stream, self._note_sent)
        self.add(peer)
        try:
            async with peer.stream:
                with peer.scope:
                    await self._converse(peer)
                await self._explain_end(peer)
        except* DISCONNECTED as failure:
            if not self.stopping:
                self._log_event("simulator_lost", peer, cause=repr(failure.exceptions[0]))
        finally:
            await self._remove(peer)

    async def _explain_end(self, peer: SimulatorPeer) -> None:
        """Reports what has ended the conversation: its fault, another connection of the simulator, or its silence."""
        limit_s = self._context.settings.simulator_timeout_s
        if peer.fault is not None:
            fault = peer.fault
            for counter in ("faults", f"faults.{fault.code}"):
                self._context.registry.add(counter)
            facts = {"kind": fault.code, "got": fault.got, "expected": fault.expected, "remedy": fault.remedy}
            self._log_event("simulator_fault", peer, fault.code, **facts)
            await peer.send_fault(fault)
        elif peer.replaced:
            self._log_event("simulator_replaced", peer)
        elif peer.scope.cancelled_caught:
            self._log_event("simulator_silent", peer, limit_s=limit_s)
            if peer.number is not None:
                self.given_up[str(peer.number)] = self.given_up.get(str(peer.number), 0) + 1
            got, expected = f"silence for {limit_s:g} s", "a message or a Ping in that time"
            remedy = "send Ping every Welcome.heartbeat_s seconds while the simulator computes"
            await peer.send_fault(messages.Fault(code="timeout", got=got, expected=expected, remedy=remedy))

    async def _remove(self, peer: SimulatorPeer) -> None:
        peer.throttle.close()
        if peer.player is not None:
            await peer.player.close()
        del self.peers[peer.key]
        if not self.peers:
            self._all_left.set()
        if not self.stopping and peer.key in self._stepper.connections:
            self.that_stepped()
            self._stepper.disconnect(peer.key)
            self._context.registry.add("simulators.lost")
            self._context.arrived()

    def _log_event(
        self, event: str, peer: SimulatorPeer, kind: str = "", /, *, level: str = "warning", **facts: Fact
    ) -> None:
        """Logs an event of a simulator, a limited number of times per interval so that none can fill the log."""
        facts = {"simulator": peer.name, "number": peer.number, "connection": peer.key, **facts}
        self.rejections.log_event(event, peer.address, kind, most=_MAX_LINES, level=level, **facts)

    async def _converse(self, peer: SimulatorPeer) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(peer.outgoing.run)
            try:
                await self.read(peer)
            except (ProtocolError, CodecError, SpecError) as error:
                peer.fault = fault_of(error)
            tasks.cancel_scope.cancel()

    async def read(self, peer: SimulatorPeer) -> None:
        """Handles the messages of a simulator until one of them ends the conversation.

        Raises:
            ProtocolError, CodecError, SpecError: a message violates the protocol.
        """
        if peer.hello is not None:
            self._react(peer, peer.hello)
        while not peer.has_left:
            if self._handle(peer):
                if isinstance(peer.stream, SocketBytes):
                    await peer.stream.receive_while(partial(self._receive, peer))
                else:
                    self._receive(peer, await peer.stream.receive(_RECEIVE))
            elif not peer.has_left:
                await self._catch_up(peer)

    def _receive(self, peer: SimulatorPeer, data: bytes) -> bool:
        """Handles received bytes; returns whether more may be received at once."""
        self._context.registry.add("received_bytes", len(data))
        peer.reader.feed(data)
        peer.delay_s = max(peer.throttle.note_bytes(len(data)), peer.throttle.note_asides(peer.take_asides()))
        return self._handle(peer)

    def _handle(self, peer: SimulatorPeer) -> bool:
        """Handles the messages that have arrived, unless the simulator must be slowed down or has left."""
        while not peer.delay_s:
            if (message := peer.reader.next()) is None:
                waits = peer.outgoing.waiting_bytes > self._limits.sending_bytes
                return not (waits or peer.throttle.needs_reservation(peer.incoming))
            peer.last_received_at = self._context.clock()
            peer.conversation.received(message)
            if not self._react(peer, message):
                peer.has_left = True
                break
            peer.delay_s = peer.throttle.note_message(message)
        return False

    async def _catch_up(self, peer: SimulatorPeer) -> None:
        """Waits until more of a simulator may be received."""
        if delay_s := peer.delay_s:
            peer.delay_s = 0.0
            await self._slow_down(peer, delay_s)
        await peer.outgoing.wait_until_below(self._limits.sending_bytes)
        if peer.throttle.needs_reservation(peer.incoming):
            peer.last_received_at = math.inf
            await peer.throttle.reserve(peer.incoming)
            peer.last_received_at = self._context.clock()

    def _receive_step(self, peer: SimulatorPeer, step: messages.Step, at: float) -> None:
        """Passes a Step to the stepper, and warns of images in the first one that may be scaled wrongly."""
        self._stepper.receive(peer.key, step, at)
        self._record(peer, step.statistics)
        behaviors = self._stepper.connections[peer.key].behaviors
        for report in step.reports:
            if report.behavior not in self.described:
                spec = behaviors[report.behavior].behavior.spec
                self.described[report.behavior] = clip(describe_report(report, spec), _LONGEST_DESCRIPTION)
        if not step.sequence:
            for report in step.reports:
                if got := image_out_of_range(report, behaviors[report.behavior].behavior.spec):
                    expected = "0 (dark) to 1 (bright), or bytes as uint8"
                    self._log_event("image_out_of_range", peer, got=got, expected=expected)
        self._context.frame_arrived()

    async def _slow_down(self, peer: SimulatorPeer, delay_s: float) -> None:
        self._context.registry.add("slowed_down_s", delay_s)
        self._log_event("simulator_slowed_down", peer, cause="it sends more than pipeline.limits allows")
        peer.last_received_at = math.inf
        await anyio.sleep(delay_s)
        peer.last_received_at = self._context.clock()

    def _react(self, peer: SimulatorPeer, message: messages.SimulatorMessage) -> bool:
        """Handles a message; returns whether the conversation continues."""
        if isinstance(message, messages.Step):
            self._receive_step(peer, message, peer.last_received_at)
        elif isinstance(message, messages.Hello | messages.Ping) and peer.conversation.state == "parting":
            return True  # it crossed our Bye: the simulator needs no answer any more
        elif isinstance(message, messages.Hello):
            self._on_hello(peer, message)
            self._log_event("simulator_connected", peer, level="info", behaviors=sorted(message.behaviors))
        elif isinstance(message, messages.Behaviors):
            self._add_behaviors(peer, message.behaviors)
        elif isinstance(message, messages.Ping):
            peer.send(messages.Pong(number=message.number))
        elif isinstance(message, messages.Bye):
            check_counts(message.steps)
            self._compare_counts(peer, message.steps)
            return False
        elif isinstance(message, messages.Fault):
            self._log_event("simulator_gave_up", peer, code=message.code, got=message.got, remedy=message.remedy)
            return False
        return True

    def _on_hello(self, peer: SimulatorPeer, hello: messages.Hello) -> None:
        check_hello(hello)
        check_behaviors(hello.behaviors, 0, self._limits)
        check_counts(hello.steps)
        new = self._context.check_known(hello.behaviors, hello.scripts)
        peer.name, peer.reported_steps, peer.scripts = clip(hello.name, 100), dict(hello.steps), hello.scripts
        # A simulator that the supervisor did not start comes after the supervisor's.
        number = hello.number if hello.number is not None else OWN_NUMBERS + peer.key
        settings = self._context.settings
        self._context.check_number(peer, number, self.peers.values())
        replaced = self._stepper.connect(
            peer.key, number, hello.behaviors, hello.scripts, process=clip(hello.process, 100), reported=hello.steps
        )
        self._context.add_names(new)
        if (former := self.peers.get(replaced or 0)) is not None:
            former.replaced = True
            former.scope.cancel()
        peer.number = number
        welcome = messages.Welcome(
            version=messages.VERSION,
            connection=peer.key,
            heartbeat_s=settings.heartbeat_s,
            timeout_s=settings.simulator_timeout_s,
        )
        # A simulator on another machine speaks with its player itself.
        if hello.player is not None and hello.player.protocol == "unity" and peer.is_local:
            peer.player = self._connect_player(peer, hello.player)
            peer.send(messages.Adopted(**asdict(welcome), port=peer.player.port))
        else:
            peer.send(welcome)
        self.send_first_resets()
        self._context.registry.add("simulators.connected")
        self._context.known()

    # ---------------------------------------------------------------- players

    def _connect_player(self, peer: SimulatorPeer, player: messages.Player) -> PlayerConnection:
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
            got, expected, remedy = explanation(error)
            raise RemoteProtocolError("specs", got=got, expected=expected, remedy=remedy) from error

    def _on_player_event(self, peer: SimulatorPeer, event: Event) -> None:
        """Handles an event of a player."""
        if self.stopping or peer.key not in self.peers or peer.fault is not None:
            return
        try:
            if isinstance(event, str):
                peer.send(messages.Progress(phase=event))
            elif isinstance(event, messages.Fault):
                peer.fault = event
            else:
                self._on_player_message(peer, event)
        except (ProtocolError, SpecError) as error:
            peer.fault = fault_of(error)
        if peer.fault is not None:
            peer.scope.cancel()

    def _on_player_message(self, peer: SimulatorPeer, message: PlayerMessage) -> None:
        """Handles a message of a player as Behaviors and a Step."""
        if message.behaviors:
            self._add_behaviors(peer, message.behaviors)
        for behavior, goals in message.plain_goals.items():
            for name, kind in goals:
                got = f"goal signal {name!r} of {behavior}, read as any other {kind}"
                expected = "a goal signal of one axis (numbers)"
                self._log_event("goal_not_conditioned_on", peer, got=got, expected=expected)
        if message.reports:
            step = messages.Step(sequence=peer.player_steps, reports=message.reports, statistics=message.statistics)
            peer.player_steps += 1
            self._receive_step(peer, step, self._context.clock())
            return
        self._record(peer, message.statistics)
        if message.kind == "ready":
            peer.awaits_reset = True
            self.send_first_resets()

    # ---------------------------------------------------------------- checks and metrics

    def _add_behaviors(self, peer: SimulatorPeer, behaviors: Mapping[str, BehaviorSpec]) -> None:
        check_behaviors(behaviors, len(self._stepper.connection(peer.key).behaviors), self._limits)
        new = self._context.check_known(behaviors, peer.scripts)
        self._stepper.add_behaviors(peer.key, behaviors)
        self._context.add_names(new)
        self._context.known()

    def _record(self, peer: SimulatorPeer, statistics: Iterable[messages.Statistic]) -> None:
        """Records a simulator's own numbers as metrics, under a limited number of names; gauges are simulator 0's."""
        registry, limit = self._context.registry, self._limits.statistics
        for name, value, aggregation in ((one.name, one.value, one.aggregation) for one in statistics):
            if name not in self._statistics and (len(name) > _NAME or len(self._statistics) >= limit):
                registry.add("statistics_rejected")
                expected = f"{limit} names of at most {_NAME} characters"
                self.rejections.log_event("statistic_rejected", peer.address, got=name, expected=expected)
                continue
            self._statistics.add(name)
            if aggregation == "sum":
                registry.add(f"{SIMULATOR}{name}.total", value)
            elif aggregation != "most_recent":
                registry.observe_moments(SIMULATOR + name, [value])
            elif peer.number == 0:
                registry.gauge(SIMULATOR + name, value)

    def _compare_counts(self, peer: SimulatorPeer, counts: Mapping[str, int]) -> None:
        """Compares the simulator's own step counts with ours."""
        connection = self._stepper.connections.get(peer.key)
        if connection is None or not counts:
            return
        self._stepper.processes.end(connection, counts)
        frame = connection.frame
        for name, total in counts.items():
            own, counted = total - peer.reported_steps.get(name, 0), connection.completed.get(name, 0)
            if own != counted and not self.stopping and (frame is None or frame.reported):
                self._log_event("step_counts_differ", peer, behavior=name, simulator_says=own, counted=counted)

    def _note_sent(self, received_at: float, backpressured_s: float) -> None:
        if received_at:
            registry = self._context.registry
            registry.observe("action_latency_s", max(0.0, self._context.clock() - received_at - backpressured_s))
            registry.observe("backpressured_s", backpressured_s)

    async def watch_silence(self) -> None:
        """Disconnects simulators that have been silent for too long."""
        interval_s, before = self._context.settings.heartbeat_s / 2, self._context.clock()
        while True:
            await anyio.sleep(interval_s)
            now = self._context.clock()
            # While this process was paused, what simulators sent waited in their sockets.
            paused_s, before = max(0.0, now - before - interval_s), now
            for peer in list(self.peers.values()):
                peer.last_received_at += paused_s
                if now - peer.last_received_at > self._context.settings.simulator_timeout_s:
                    peer.scope.cancel()
                elif peer.player is not None and (fault := peer.player.overdue(now)) is not None:
                    self._on_player_event(peer, fault)
