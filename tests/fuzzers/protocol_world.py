"""A server without an event loop, a well-behaved simulator, and simulators that a fuzzer drives."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace, coroutine
from typing import Any, Final

import numpy as np

from sparring.pipeline.errors import CodecError, LocalProtocolError, ProtocolError
from sparring.pipeline.messages import codec
from sparring.pipeline.messages.matches import Matchup, MatchupAssignment
from sparring.pipeline.messages.simulator import (
    VERSION,
    Act,
    BehaviorReport,
    Bye,
    Decisions,
    Ends,
    Hello,
    Step,
)
from sparring.pipeline.messages.state import StepAllowance
from sparring.pipeline.messages.steps import StepBatch
from sparring.pipeline.monitoring.metrics import Registry
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec, SpecError
from sparring.pipeline.stepping.settings import SteppingSettings
from sparring.pipeline.stepping.stepper import Stepper
from sparring.pipeline.stepping.steps import SampledActions
from sparring.services.endpoint.admission import fault_of
from sparring.services.endpoint.peers import ServerContext, SimulatorPeer
from sparring.services.endpoint.simulators import Simulators
from tests.fuzzers.target import Violation

SPEC: Final = BehaviorSpec(
    observations=(ObservationSpec(name="o", shape=(2,)),), actions=ActionSpec(continuous=1, discrete=(3,))
)
MUCH: Final = 2**40
_MOST_UNREAD: Final = 2 * 2**20
"""Bytes that may wait for a simulator that does not read."""
_MOST_NAMES: Final = 5000
"""Metrics that a world may publish."""
_MATCHUPS: Final = (
    Matchup(number=1, team=0, ghosts={"B?team=1": 5}),
    Matchup(number=2, team=1, ghosts={"B?team=0": 5}),
)
_LOG: Final = SimpleNamespace(warning=lambda *_, **__: None, info=lambda *_, **__: None)


class FakeOutgoing:
    """Collects what is sent to one simulator, in place of its socket."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.waiting_bytes = 0

    def put(self, data: bytes, received_at: float = 0.0, backpressured_s: float = 0.0) -> None:
        """Replaces `Outgoing.put`."""
        del received_at, backpressured_s
        self.sent.append(data)
        self.waiting_bytes += len(data)
        if self.waiting_bytes > _MOST_UNREAD:
            raise Violation(f"{self.waiting_bytes} bytes wait for one simulator")

    async def wait_until_below(self, limit: int) -> None:
        """Replaces `Outgoing.wait_until_below`."""
        while self.waiting_bytes > limit:
            await _pause()

    def read(self) -> list[Any]:
        """Returns everything sent since the last call, as messages."""
        sent, self.sent, self.waiting_bytes = self.sent, [], 0
        return [codec.from_bytes(one) for one in sent]


class FakeStream:
    """Delivers the bytes of one simulator once the driver has some."""

    def __init__(self) -> None:
        self.arrived = b""

    async def receive(self, most: int) -> bytes:
        """Replaces `ByteStream.receive`."""
        while not self.arrived:
            await _pause()
        taken, self.arrived = self.arrived[:most], self.arrived[most:]
        return taken


class DrivenSimulators(Simulators):
    """The server with conversations that the test drives in virtual time."""

    now = 0.0

    async def _slow_down(self, peer: SimulatorPeer, delay_s: float) -> None:
        del peer
        self.now += delay_s

    def converse(self) -> tuple[SimulatorPeer, Coroutine[Any, Any, None], FakeStream, FakeOutgoing]:
        """Begins a conversation, as `serve` does."""
        ends: Any = FakeStream(), FakeOutgoing(), SimpleNamespace(cancel=lambda: None)
        stream, outgoing, scope = ends
        peer = SimulatorPeer(stream, scope=scope)
        self.add(peer)
        peer.outgoing = outgoing
        return peer, self.read(peer), stream, outgoing

    def end(self, peer: SimulatorPeer) -> None:
        """Ends a conversation, as `serve` does."""
        peer.throttle.close()
        del self.peers[peer.key]
        if peer.key in self._stepper.connections:
            self._stepper.disconnect(peer.key)


@coroutine
def _pause() -> Generator[None, None, None]:
    yield


class ZeroPolicy:
    """A policy whose actions are always 0."""

    version = 1
    script = ""
    carried = 0

    def act(self, observations: tuple[Any, ...], masks: Any, carried: Any) -> SampledActions:
        """Returns zeros for all rows."""
        del masks, carried
        n = len(observations[0])
        nothing, none = np.zeros((n, 1), np.float32), np.zeros((n, 1), np.int32)
        return SampledActions(continuous=nothing, executed=nothing, discrete=none, log_probs=np.zeros(n, np.float32))


@dataclass(eq=False)
class FuzzedSimulator:
    """A simulator whose messages the input decides.

    Attributes:
        peer: the server's record of it.
        reading: the server's coroutine, which waits for bytes.
        sequence: of its next Step.
        alive: agents of each behavior id, as far as its messages were valid.
        late: bytes that it has not sent yet.
    """

    peer: SimulatorPeer
    reading: Coroutine[Any, Any, None]
    stream: FakeStream
    outgoing: FakeOutgoing
    sequence: int = 0
    alive: dict[str, list[int]] = field(default_factory=dict)
    late: bytes = b""
    gone: bool = False


class World:
    """A server, the reference simulator, which follows the protocol, and fuzzed simulators.

    Args:
        lockstep: act in rounds.
    """

    def __init__(self, *, lockstep: bool) -> None:
        self.lockstep = lockstep
        self.registry = Registry("stepping-0", "stepping-0.1")
        policy: Any = ZeroPolicy()
        self.stepper = Stepper(
            {"A": policy, "B": policy},
            lockstep=lockstep,
            self_play=("B",),
            ghosts={("B", 5): policy},
            max_agents=64,
        )
        self.stepper.matches.assignment = MatchupAssignment(serial=1, matchups=_MATCHUPS)
        behavior: Any = SimpleNamespace(network_settings=NetworkSettings())
        self.simulators = DrivenSimulators(
            self.stepper,
            ServerContext(
                settings=SteppingSettings(),
                behaviors={"A": behavior, "B": behavior},
                scripts={},
                seed=1,
                clock=lambda: self.simulators.now,
                registry=self.registry,
                log=_LOG,
                arrived=lambda: None,
                frame_arrived=lambda: None,
                known=lambda: None,
            ),
        )
        self._serial = 0
        self._departed: list[Any] = []  # connections of fuzzed simulators, for their counts
        self.completed: dict[str, int] = {"A": 0, "B": 0}
        self.fuzzed: list[FuzzedSimulator] = []
        self.reference = self.connect()
        self.fuzzed.clear()
        self._sequences = 0
        self._reference_steps = 0
        self.receive(self.reference, hello_message(("A",), None))
        self.stepper.grant("A", self._allowance(MUCH))
        self.reference.outgoing.read()

    def _allowance(self, allowance: int) -> StepAllowance:
        self._serial += 1
        return StepAllowance(serial=self._serial, steps=allowance, version=1)

    # ---------------------------------------------------------------- events

    def connect(self) -> FuzzedSimulator:
        """Connects a fuzzed simulator."""
        simulator = FuzzedSimulator(*self.simulators.converse())
        self.fuzzed.append(simulator)
        self._read(simulator)
        return simulator

    def receive(self, simulator: FuzzedSimulator, data: bytes) -> None:
        """Delivers bytes of a simulator; a protocol error ends its conversation."""
        if simulator.gone:
            return
        simulator.stream.arrived += simulator.late + data
        simulator.late = b""
        self._read(simulator)
        for other in [*self.fuzzed, self.reference]:
            if other.peer.replaced:
                self.disconnect(other)

    def _read(self, simulator: FuzzedSimulator) -> None:
        """Runs the server until it waits for bytes."""
        try:
            simulator.reading.send(None)
        except StopIteration:
            self.disconnect(simulator)
        except (ProtocolError, CodecError, SpecError) as error:
            fault = fault_of(error)
            if isinstance(error, LocalProtocolError):
                raise Violation(f"a simulator received a fault of the trainer: {fault}") from error
            if simulator.peer.conversation.state != "closed":
                simulator.peer.send(fault)
            self.disconnect(simulator)

    def disconnect(self, simulator: FuzzedSimulator) -> None:
        """Ends the connection of a simulator."""
        if not simulator.gone:
            simulator.gone = True
            connection = self.stepper.connections.get(simulator.peer.key)
            if connection is not None:
                self._departed.append(connection)
            simulator.reading.close()
            self.simulators.end(simulator.peer)
            for one in simulator.outgoing.sent[-1:]:
                codec.from_bytes(one)
            if simulator is self.reference:
                raise Violation(f"the reference simulator was disconnected: {simulator.outgoing.read()}")

    def tick(self) -> None:
        """Runs a tick of the trainer."""
        self.simulators.now += 0.01
        for key, answer, received_at, backpressured in self.stepper.tick(self.simulators.now).acts:
            self.simulators.answer(key, answer, received_at, backpressured)

    def grant(self, allowance: int) -> None:
        """Changes the allowances of both behaviors."""
        for name in ("A", "B"):
            self.stepper.grant(name, self._allowance(allowance))

    # ---------------------------------------------------------------- the end of a sequence

    def settle(self) -> None:
        """Answers and disconnects all fuzzed simulators, steps the reference simulator, and compares step counts."""
        self.grant(MUCH)
        self.simulators.send_first_resets()
        self.tick()
        for simulator in self.fuzzed:
            if not simulator.gone and simulator.peer.conversation.state == "deciding" and not self.lockstep:
                connection = self.stepper.connections[simulator.peer.key]
                if self.stepper.matches.covers(connection):
                    raise Violation("a Step is not answered")
            self.disconnect(simulator)
        self.fuzzed.clear()
        self.receive(self.reference, step_message(self._reference_steps, "A", (1, 2)))
        self.tick()
        self._check_reference()
        self._check_step_counts()

    def _check_reference(self) -> None:
        answers = [one for one in self.reference.outgoing.read() if not isinstance(one, Bye)]
        good = len(answers) == 1 and isinstance(answers[0], Act) and answers[0].sequence == self._reference_steps
        if not good or [list(one.agents) for one in answers[0].actions] != [[1, 2]]:
            raise Violation(f"the reference simulator received {answers}")
        self._reference_steps += 1

    def _check_step_counts(self) -> None:
        stepper = self.stepper
        if list(stepper.connections) != [self.reference.peer.key]:
            raise Violation(f"connections of disconnected simulators: {list(stepper.connections)}")
        reference = stepper.connections[self.reference.peer.key]
        for connection in self._departed:
            for name, count in connection.completed.items():
                self.completed[name] += count
        self._departed.clear()
        for name, behavior in stepper.behaviors.items():
            live = 2 if name == "A" else 0
            counted = behavior.produced + behavior.ghosts
            expected = self.completed[name] + reference.completed.get(name, 0)
            actual = (behavior.table.taken, int(behavior.table.live.sum()), behavior.running, counted)
            if actual != (live, live, live, expected):
                raise Violation(
                    f"{name}: slots taken, live, running, steps are {actual}, not {(live, live, live, expected)}"
                )
        if stepper.matches.under_way:
            raise Violation("matches under way without agents")
        self._sequences += 1
        if self._sequences % 16:
            return
        batch = StepBatch(source="stepping-0.1", parts=stepper.take_steps())
        codec.decode([bytes(one) for one in codec.encode(batch)])
        metrics = self.registry.snapshot(self.simulators.now)
        if len(metrics.counters) + len(metrics.gauges) > _MOST_NAMES:
            raise Violation(f"{len(metrics.counters) + len(metrics.gauges)} metrics")


@lru_cache(2048)
def step_message(
    sequence: int,
    behavior: str,
    agents: tuple[int, ...],
    ended: tuple[int, ...] = (),
    groups: tuple[int, ...] | None = None,
    matches: tuple[int, ...] | None = None,
    masked: bool = False,
) -> bytes:
    n, m = len(agents), len(ended)
    masks = np.array([[one % 2, one % 3 > 0, False] for one in range(n)], bool).reshape(-1, 3)
    decisions = Decisions(
        agents=np.array(agents, np.int64),
        observations=(np.ones((n, 2), np.float32),),
        rewards=np.ones(n, np.float32),
        groups=None if groups is None else np.array(groups, np.int64),
        matches=None if matches is None else np.array(matches, np.int64),
        masks=masks if masked else None,
    )
    ends = Ends(
        agents=np.array(ended, np.int64),
        observations=(np.ones((m, 2), np.float32),),
        rewards=np.ones(m, np.float32),
        interrupted=np.zeros(m, bool),
    )
    report = BehaviorReport(behavior=behavior, decisions=decisions, ends=ends if m else None)
    return codec.to_bytes(Step(sequence=sequence, reports=(report,)))


@lru_cache(512)
def hello_message(ids: tuple[str, ...], number: int | None, steps: tuple[tuple[str, int], ...] = ()) -> bytes:
    specs = dict.fromkeys(ids, SPEC)
    return codec.to_bytes(Hello(version=VERSION, name="fuzzed", behaviors=specs, number=number, steps=dict(steps)))
