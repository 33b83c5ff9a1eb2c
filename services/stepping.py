"""The process around stepping.

consumes       Step and others from simulators, over stream sockets; PolicyWeights from the policy
               boards; permits from coordination's board
produces       Act to simulators; StepBatch on "steps"; its state on its board
waits for      frames; permits and weights for those it has; credit for steps
unblocked by   a frame, a permit, new weights, assembly's acknowledgement
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream, TaskGroup

from pipeline.errors import CodecError, Explained, LimitExceeded, ProtocolError, RemoteProtocolError
from pipeline.messages.codec import SIMULATORS, FrameReader, to_bytes
from pipeline.messages.conversation import Conversation
from pipeline.messages.service import BehaviorSpecs, BehaviorSteps, Permits, PolicyWeights, StepBatch, SteppingState
from pipeline.messages.simulator import (
    VERSION,
    Behaviors,
    Bye,
    Fault,
    Hello,
    Ping,
    Pong,
    Reset,
    Statistic,
    Step,
    Welcome,
)
from pipeline.metrics import LATENCY_BOUNDS, ROW_BOUNDS
from pipeline.queues.interface import Board, SendingQueue
from pipeline.runtime import Context, follow, publish_metrics
from pipeline.specs import BehaviorId, BehaviorSpec, SpecError
from pipeline.stepping.policies import Policies
from pipeline.stepping.stepper import Stepper, Wake

_RECEIVE = 256 * 1024
_PARTING_S = 2.0
_BATCH_ROWS = 256  # steps that are worth a message
_GATHER_S = 0.01


@dataclass(eq=False)
class Peer:
    """One connected simulator.

    Attributes:
        key: of the connection.
        stream: its socket.
        name: what it calls itself.
        heard_at: when it last said something.
        counted: steps it says it has reported, by behavior name, when it connected.
        replaced: the same simulator has connected anew.
        outgoing: bytes that its writer is to send, with the time of the frame and the seconds withheld.
    """

    key: int
    stream: ByteStream
    conversation: Conversation = field(default_factory=lambda: Conversation("trainer"))
    name: str = "?"
    number: int | None = None
    heard_at: float = 0.0
    counted: dict[str, int] = field(default_factory=dict)
    outgoing: list[tuple[bytes, float, float]] = field(default_factory=list)
    ready: anyio.Event = field(default_factory=anyio.Event)
    replaced: bool = False
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def say(self, message: Any, received_at: float = 0.0, withheld_s: float = 0.0) -> None:
        """Queues a message for the peer's writer; the conversation bounds how many there are."""
        self.conversation.sending(message)
        self.outgoing.append((to_bytes(message), received_at, withheld_s))
        self.ready.set()


class Stepping:
    """The simulators' sockets around a stepper."""

    def __init__(self, context: Context, board: Board, sender: SendingQueue) -> None:
        settings = context.run.settings
        lockstep = settings.overlap == 0
        self._context = context
        self._board = board
        self._sender = sender
        self._settings = settings.pipeline
        self._expected = context.run.simulators.get(context.service, 0)
        self.policies = Policies(settings.behaviors, seed=context.run.seed)
        self.stepper = Stepper(
            self.policies.current,
            lockstep=lockstep,
            expected=max(1, self._expected),
            max_agents=settings.pipeline.max_agents,
        )
        self._lockstep = lockstep
        self._parameters = settings.reset_parameters
        self._buffers = {name: one.hyperparameters.buffer_size for name, one in settings.behaviors.items()}
        self._peers: dict[int, Peer] = {}
        self._keys = 0
        self._wake = anyio.Event()
        self._told: dict[str, int] = {}
        self._told_agents: dict[str, bool] = {}
        self._specs_told = 0
        self._outbox: list[BehaviorSteps] = []
        self._outbox_rows = 0
        self._filled = anyio.Event()
        self._turn = anyio.Lock(fast_acquire=True)
        self._deserted = anyio.Event()
        self.stopping = False
        for name, bounds in (
            ("action_latency_s", LATENCY_BOUNDS),
            ("withheld_s", LATENCY_BOUNDS),
            ("batch_rows", ROW_BOUNDS),
        ):
            context.registry.histogram(name, bounds)

    # ---------------------------------------------------------------- state from elsewhere

    def permits(self, latest: Mapping[str, Any]) -> None:
        """Coordination has granted permits."""
        permits = latest.get(f"permits:{self._context.service}")
        if isinstance(permits, Permits) and permits.source == self._context.start:
            for name, permit in permits.behaviors.items():
                self.stepper.permit(name, permit)
            self._wake.set()

    def weights(self, latest: Mapping[str, Any]) -> None:
        """A learner has published weights."""
        weights = latest.get("weights")
        if isinstance(weights, PolicyWeights):
            self.policies.learn(weights)
            self._load()

    def reader_restarted(self, _starts: int) -> None:
        """Assembly is new: it needs to hear of every live agent."""
        self.stepper.rejoin()
        self._wake.set()

    def _load(self) -> None:
        for name, behavior in self.stepper.behaviors.items():
            self.policies.build(name, behavior.spec)
        self._wake.set()

    # ---------------------------------------------------------------- one simulator

    async def serve(self, stream: ByteStream) -> None:
        """Speaks with one simulator until its end."""
        self._keys += 1
        peer = Peer(key=self._keys, stream=stream, heard_at=self._context.clock())
        log = self._context.log.bind(connection=peer.key)
        self._peers[peer.key] = peer
        try:
            async with stream:
                with peer.scope:
                    await self._converse(peer, log)
                if peer.replaced:
                    log.warning("simulator_replaced", simulator=peer.name, number=peer.number)
                elif peer.scope.cancelled_caught:
                    log.warning("simulator_silent", simulator=peer.name, limit_s=self._settings.simulator_timeout_s)
                    await _part(peer, _silence(self._settings.simulator_timeout_s))
        except* (anyio.BrokenResourceError, anyio.EndOfStream, anyio.ClosedResourceError, OSError) as failure:
            if not self.stopping:
                log.warning("simulator_lost", simulator=peer.name, cause=repr(failure.exceptions[0]))
        finally:
            del self._peers[peer.key]
            if not self._peers:
                self._deserted.set()
            if not self.stopping and peer.key in self.stepper.connections:
                self.stepper.disconnect(peer.key)
                self._context.registry.add("simulators.lost")
                self._wake.set()

    async def _converse(self, peer: Peer, log: Any) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._write, peer)
            try:
                await self._read(peer, log)
            except (ProtocolError, CodecError, SpecError) as error:
                fault = fault_of(error)
                self._context.registry.add("faults")
                log.warning(
                    "simulator_fault", simulator=peer.name, code=fault.code, got=fault.got, expected=fault.expected
                )
                await _part(peer, fault)
            tasks.cancel_scope.cancel()

    async def _read(self, peer: Peer, log: Any) -> None:
        reader = FrameReader(SIMULATORS)
        while True:
            reader.feed(await peer.stream.receive(_RECEIVE))
            peer.heard_at = now = self._context.clock()
            while (message := reader.next()) is not None:
                peer.conversation.received(message)
                if isinstance(message, Step):
                    self.stepper.receive(peer.key, message, now)
                    self._note_statistics(message.statistics)
                    self._wake.set()
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
            self._check_known(message.behaviors)
            self.stepper.add_behaviors(peer.key, message.behaviors)
            self._load()
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
        self._check_known(hello.behaviors)
        peer.name, peer.counted = hello.name, dict(hello.steps)
        # A simulator that dialled in by itself comes after the supervisor's.
        number = hello.number if hello.number is not None else 2**20 + peer.key
        self._check_number(number)
        former = self._peers.get(self.stepper.connect(peer.key, number, hello.behaviors) or 0)
        if former is not None:
            former.replaced = True
            former.scope.cancel()
        peer.number = number
        settings = self._settings
        peer.say(
            Welcome(
                version=VERSION,
                connection=peer.key,
                heartbeat_s=settings.heartbeat_s,
                timeout_s=settings.simulator_timeout_s,
            )
        )
        peer.say(Reset(parameters=self._parameters, seed=(self._context.run.seed + number) % 2**31))
        self._context.registry.add("simulators.connected")
        self._load()

    def _check_number(self, number: int) -> None:
        """Refuses a second simulator of one number, unless it may be the first one, back from a broken link."""
        for other in self._peers.values():
            if other.number == number and self._context.clock() - other.heard_at < self._settings.heartbeat_s:
                raise RemoteProtocolError(
                    "number",
                    got=f"simulator number {number} twice",
                    expected="a number of its own for each simulator",
                    remedy="leave the number out, or start each simulator with another",
                )

    def _check_known(self, behaviors: Mapping[str, BehaviorSpec]) -> None:
        known = self._context.run.settings.behaviors
        for text in behaviors:
            if BehaviorId.parse(text).name not in known:
                raise RemoteProtocolError(
                    "unknown_behavior",
                    got=f"behavior {text!r}",
                    expected=f"one of {sorted(known)}",
                    remedy="add it under `behaviors` of the configuration, or correct the name in the simulator",
                )

    def _compare(self, peer: Peer, counts: Mapping[str, int], log: Any) -> None:
        """Holds the simulator's own count against ours."""
        connection = self.stepper.connections.get(peer.key)
        if connection is None or not counts:
            return
        frame = connection.frame
        for name, total in counts.items():
            own = total - peer.counted.get(name, 0)
            ours = connection.completed.get(name, 0)
            if own != ours and not self.stopping and (frame is None or frame.reported):
                log.warning("step_counts_differ", simulator=peer.name, behavior=name, simulator_says=own, counted=ours)

    async def _write(self, peer: Peer) -> None:
        registry, clock = self._context.registry, self._context.clock
        while True:
            await peer.ready.wait()
            peer.ready = anyio.Event()
            outgoing, peer.outgoing = peer.outgoing, []
            for data, received_at, withheld_s in outgoing:
                await peer.stream.send(data)
                if received_at:
                    registry.observe("action_latency_s", max(0.0, clock() - received_at - withheld_s))
                    registry.observe("withheld_s", withheld_s)

    async def watch_silence(self) -> None:
        """Gives simulators up that have been silent for too long."""
        while True:
            await anyio.sleep(self._settings.heartbeat_s / 2)
            now = self._context.clock()
            for peer in list(self._peers.values()):
                if now - peer.heard_at > self._settings.simulator_timeout_s:
                    peer.scope.cancel()

    # ---------------------------------------------------------------- the loop

    async def loop(self) -> None:
        """Wakes up whenever something arrived, acts, and hands the steps on."""
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            await self._step()

    async def _step(self) -> None:
        async with self._turn:
            wake = self.stepper.wake(self._context.clock(), acting=not self.stopping)
            self._answer(wake)
            if wake.acts:  # the writers go first: simulators compute while the steps are handed on
                await anyio.lowlevel.checkpoint()
            if wake.parts:
                self._outbox += wake.parts
                self._outbox_rows += max(1, wake.rows)
                self._filled.set()
            if self._outbox_rows >= _BATCH_ROWS or not wake.acts or self.stepper.withheld:
                await self._hand_on()
            self._tell()
            self._context.waiting_for = self._waits_for()

    async def _hand_on(self) -> None:
        """Sends assembly what has gathered."""
        if self._outbox:
            batch, rows = StepBatch(source=self._context.start, parts=tuple(self._outbox)), self._outbox_rows
            self._outbox, self._outbox_rows = [], 0
            self._context.waiting_for = "credit for steps"
            await self._sender.put(batch, rows)

    async def hand_on_in_time(self) -> None:
        """Sends what has gathered at the latest after a moment, however little it is."""
        while True:
            await self._filled.wait()
            await anyio.sleep(_GATHER_S)
            self._filled = anyio.Event()
            async with self._turn:
                await self._hand_on()

    def _answer(self, wake: Wake) -> None:
        for key, act, received_at, withheld_s in wake.acts:
            peer = self._peers.get(key)
            if peer is not None and peer.conversation.state == "deciding":
                peer.say(act, received_at, withheld_s)
        if wake.acts:
            self._context.registry.add("frames", len(wake.acts))
            self._context.registry.observe("batch_rows", wake.rows)

    def _tell(self) -> None:
        """Publishes the state where coordination needs it: enough progress, a stall, agents come or gone."""
        news = False
        for name, behavior in self.stepper.behaviors.items():
            fresh = behavior.produced - self._told.get(name, -1)
            populated = bool(behavior.table.live.any())
            quantum = 2**62 if self._lockstep else max(1, self._buffers[name] // 32)
            if fresh >= quantum or (fresh > 0 and behavior.remaining <= 0) or populated != self._told_agents.get(name):
                news = True
        if news:
            self.publish()

    def publish(self) -> None:
        """Publishes the state."""
        behaviors = self.stepper.state()
        if len(behaviors) != self._specs_told:
            self._specs_told = len(behaviors)
            specs = {name: behavior.spec for name, behavior in self.stepper.behaviors.items()}
            self._board.publish("specs", BehaviorSpecs(behaviors=specs))
        for name, produced in behaviors.items():
            self._told[name] = produced.steps
            self._told_agents[name] = produced.agents > 0
        self._board.publish(
            "state",
            SteppingState(
                source=self._context.start,
                behaviors=behaviors,
                simulators=len(self.stepper.connections),
                deterministic=self.stepper.deterministic,
            ),
        )

    def refresh(self) -> None:
        """Brings gauges up to date."""
        registry = self._context.registry
        self.publish()
        registry.gauge("simulators", len(self.stepper.connections))
        registry.gauge("outbox", self._outbox_rows)
        for name, behavior in self.stepper.behaviors.items():
            registry.gauge(f"agents/{name}", float(behavior.table.live.sum()))
            registry.reach(f"steps/{name}", behavior.produced)
        self._context.note_sender("steps", self._sender)

    async def introduce(self) -> None:
        """Tells assembly of this start, so that what a former one left can be closed."""
        parts = tuple(BehaviorSteps(behavior=name, tick=0, produced_before=0) for name in self._buffers)
        await self._sender.put(StepBatch(source=self._context.start, parts=parts), 0)

    async def part(self, timeout_s: float) -> None:
        """Says Bye to every simulator, and takes over what they had sent before they heard it."""
        self.stopping = True
        with anyio.move_on_after(timeout_s):
            for peer in list(self._peers.values()):
                if peer.conversation.state not in ("parting", "closed"):
                    peer.say(Bye(reason="the run ended"))
            if self._peers:
                await self._deserted.wait()
        await self._step()
        async with self._turn:
            await self._hand_on()

    def _waits_for(self) -> str:
        if not self.stepper.connections:
            return "simulators"
        return "a permit or weights" if self.stepper.withheld else "frames"

    def _note_statistics(self, statistics: tuple[Statistic, ...]) -> None:
        registry = self._context.registry
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
    peer.conversation.sending(fault)
    with anyio.move_on_after(1.0, shield=True):
        await peer.stream.send(to_bytes(fault))


async def run(context: Context) -> None:
    """Steps until stopped; then says Bye to the simulators and hands on the last steps."""
    transport = context.transport
    settings = context.run.settings
    board = await transport.board(context.service)
    sender = await transport.sender("steps")
    stepping = Stepping(context, board, sender)
    sender.on_receiver(stepping.reader_restarted)
    coordination = await transport.subscribe("coordination")
    learners = [await transport.subscribe(f"policy-{name}") for name in settings.behaviors]
    listener = await context.listen(context.run.addresses[context.service])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_accept, listener, stepping, tasks)
        tasks.start_soon(follow, coordination, stepping.permits)
        for subscription in learners:
            tasks.start_soon(follow, subscription, stepping.weights)
        tasks.start_soon(stepping.watch_silence)
        tasks.start_soon(stepping.loop)
        tasks.start_soon(stepping.hand_on_in_time)
        tasks.start_soon(publish_metrics, context, board, stepping.refresh)
        tasks.start_soon(stepping.introduce)
        context.waiting_for = "simulators"
        await context.stop.wait()
        with anyio.move_on_after(settings.pipeline.stop_timeout_s / 2):
            await stepping.part(_PARTING_S)
            await sender.drain()
        tasks.cancel_scope.cancel()
    stepping.refresh()
    board.publish("metrics", context.registry.snapshot(context.wall_clock()))


async def _accept(listener: Any, stepping: Stepping, tasks: TaskGroup) -> None:
    async with listener:
        await listener.serve(stepping.serve, tasks)
