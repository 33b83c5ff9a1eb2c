"""Sequences of messages from simulators, against the code that serves them, without an event loop.

An input is one sequence: a byte for the kind of world, then up to 10 acts, each an operation and what it needs. Its
guests say hello, step, ping and so on, rightly or wrongly, or send any bytes; the trainer wakes up, grants permits or
takes them back; links break. In the same world a simulator lives that does everything right. In the end the
guests leave and the books are compared.

What must hold: no exception but what the server catches; who is waited for is answered, told what was wrong, or gone;
the other simulator gets exactly its actions; every count is what its parts add up to; nothing is kept of a guest that
has left; what is sent can be read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
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
    Behaviors,
    Bye,
    Decisions,
    Ends,
    Fault,
    Hello,
    Ping,
    Pong,
    Reset,
    Statistic,
    Step,
    Welcome,
)
from sparring.pipeline.messages.state import StepAllowance
from sparring.pipeline.messages.steps import StepBatch
from sparring.pipeline.monitoring.metrics import Registry
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec, SpecError
from sparring.pipeline.stepping.settings import SteppingSettings
from sparring.pipeline.stepping.stepper import Stepper
from sparring.pipeline.stepping.steps import SampledActions
from sparring.services.endpoint.admission import HandshakingSimulator as Arrived
from sparring.services.endpoint.admission import fault_of
from sparring.services.endpoint.peers import SimulatorPeer
from sparring.services.endpoint.simulators import ServerContext, Simulators
from tests.fuzzers import mutation
from tests.fuzzers.target import Target, Violation

SPEC: Final = BehaviorSpec(
    observations=(ObservationSpec(name="o", shape=(2,)),), actions=ActionSpec(continuous=1, discrete=(3,))
)
_IDS: Final = ("A", "A?team=0", "A?team=1", "B?team=0", "B?team=1", "B")
_BEHAVIOR_IDS: Final = ((1, 0), (4, 2), (8, 3), (24, 3), (24, 4))
"""Of the seeds: which ids a guest names, by bits, and which of them steps."""
_MOST_ACTS: Final = 10
_LIFE: Final = 256
"""Sequences in one world."""
_MUCH: Final = 2**40
_MOST_UNREAD: Final = 2 * 2**20
"""Bytes that may wait for a guest that does not read."""
_MOST_NAMES: Final = 5000
"""Names of numbers that a world may publish."""
_DRAWS: Final = (
    Matchup(number=1, team=0, ghosts={"B?team=1": 5}),
    Matchup(number=2, team=1, ghosts={"B?team=0": 5}),
)
_LOG: Final = SimpleNamespace(warning=lambda *_, **__: None, info=lambda *_, **__: None)


class Post:
    """What is sent to one simulator, in place of its socket."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.bytes = 0

    def put(self, data: bytes, received_at: float = 0.0, backpressured_s: float = 0.0) -> None:
        """As `Outgoing.put`."""
        del received_at, backpressured_s
        self.sent.append(data)
        self.bytes += len(data)
        if self.bytes > _MOST_UNREAD:
            raise Violation(f"{self.bytes} bytes wait for one simulator")

    async def room(self, limit: int) -> None:
        """As `Outgoing.room`."""
        while self.bytes > limit:
            await _pause()

    def read(self) -> list[Any]:
        """All of it, as messages."""
        sent, self.sent, self.bytes = self.sent, [], 0
        return [codec.from_bytes(one) for one in sent]


class Stream:
    """The bytes of one simulator, handed over when the driver has some."""

    def __init__(self) -> None:
        self.arrived = b""

    async def receive(self, most: int) -> bytes:
        """As `ByteStream.receive`."""
        while not self.arrived:
            await _pause()
        taken, self.arrived = self.arrived[:most], self.arrived[most:]
        return taken


class Served(Simulators):
    """The server, whose conversations are driven by hand: waiting is virtual."""

    now = 0.0

    async def _slow_down(self, peer: SimulatorPeer, delay_s: float) -> None:
        del peer
        self.now += delay_s

    def converse(self) -> tuple[SimulatorPeer, Coroutine[Any, Any, None], Stream, Post]:
        """A new conversation, as `serve` begins one."""
        self._keys += 1
        stream, post, scope = Stream(), Post(), SimpleNamespace(cancel=lambda: None)
        ends: Any = stream, post, scope
        peer = SimulatorPeer(
            self._keys, ends[0], ends[1], Arrived(), self.guard.flow(), heard_at=self.now, scope=ends[2]
        )
        self._peers[peer.key] = peer
        return peer, self._read(peer, _LOG), stream, post

    def end(self, peer: SimulatorPeer) -> None:
        """The conversation is over, as at the end of `serve`."""
        peer.flow.close()
        del self._peers[peer.key]
        if peer.key in self._stepper.connections:
            self._stepper.disconnect(peer.key)


@coroutine
def _pause() -> Generator[None, None, None]:
    yield


class Zeros:
    """A policy that always does the same."""

    version = 1
    script = ""
    carried = 0

    def act(self, observations: tuple[Any, ...], masks: Any, carried: Any) -> SampledActions:
        """Zeros for all rows."""
        del masks, carried
        n = len(observations[0])
        nothing, none = np.zeros((n, 1), np.float32), np.zeros((n, 1), np.int32)
        return SampledActions(continuous=nothing, executed=nothing, discrete=none, log_probs=np.zeros(n, np.float32))


@dataclass(eq=False)
class HandshakingSimulator:
    """A simulator that does what the input says.

    Attributes:
        peer: as the server knows it.
        reading: the server's part, which waits for bytes.
        sequence: of its next Step.
        alive: agents of each behavior id, as far as it told the truth.
        late: bytes that it has not sent yet.
    """

    peer: SimulatorPeer
    reading: Coroutine[Any, Any, None]
    stream: Stream
    post: Post
    sequence: int = 0
    alive: dict[str, list[int]] = field(default_factory=dict)
    late: bytes = b""
    gone: bool = False


class World:
    """A server, the simulator that does everything right, and guests.

    Args:
        lockstep: act in rounds.
    """

    def __init__(self, *, lockstep: bool) -> None:
        self.lockstep = lockstep
        self.registry = Registry("stepping-0", "stepping-0.1")
        policy: Any = Zeros()
        self.stepper = Stepper(
            {"A": policy, "B": policy},
            lockstep=lockstep,
            self_play=("B",),
            ghosts={("B", 5): policy},
            max_agents=64,
        )
        self.stepper.matches.assignment = MatchupAssignment(serial=1, matchups=_DRAWS)
        behavior = SimpleNamespace(network_settings=NetworkSettings())
        self.simulators = Served(
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
                known=lambda: None,
            ),
        )
        self._serial = 0
        self._met: list[Any] = []  # connections of guests, for their counts
        self.completed: dict[str, int] = {"A": 0, "B": 0}
        self.candidates: list[HandshakingSimulator] = []
        self.host = self.enter()
        self.candidates.clear()
        self._ages = 0
        self._hosted = 0
        self.hear(self.host, _hello(("A",), None))
        self.stepper.grant("A", self._allowance(_MUCH))
        self.host.post.read()

    def _allowance(self, allowance: int) -> StepAllowance:
        self._serial += 1
        return StepAllowance(serial=self._serial, steps=allowance, version=1)

    # ---------------------------------------------------------------- what happens

    def enter(self) -> HandshakingSimulator:
        """A guest connects."""
        simulator = HandshakingSimulator(*self.simulators.converse())
        self.candidates.append(simulator)
        self._read(simulator)
        return simulator

    def hear(self, simulator: HandshakingSimulator, data: bytes) -> None:
        """Bytes of a guest arrive; what it did wrong ends the conversation."""
        if simulator.gone:
            return
        simulator.stream.arrived += simulator.late + data
        simulator.late = b""
        self._read(simulator)
        for other in [*self.candidates, self.host]:
            if other.peer.replaced:
                self.leave(other)

    def _read(self, simulator: HandshakingSimulator) -> None:
        """Lets the server read until it waits."""
        try:
            simulator.reading.send(None)
        except StopIteration:
            self.leave(simulator)
        except (ProtocolError, CodecError, SpecError) as error:
            fault = fault_of(error)
            if isinstance(error, LocalProtocolError):
                raise Violation(f"told a simulator of a mistake of the trainer: {fault}") from error
            if simulator.peer.conversation.state != "closed":
                simulator.peer.say(fault)
            self.leave(simulator)

    def leave(self, simulator: HandshakingSimulator) -> None:
        """A guest's link ends."""
        if not simulator.gone:
            simulator.gone = True
            connection = self.stepper.connections.get(simulator.peer.key)
            if connection is not None:
                self._met.append(connection)
            simulator.reading.close()
            self.simulators.end(simulator.peer)
            for one in simulator.post.sent[-1:]:
                codec.from_bytes(one)
            if simulator is self.host:
                raise Violation(f"the good simulator was sent away: {simulator.post.read()}")

    def wake(self) -> None:
        """The trainer acts."""
        self.simulators.now += 0.01
        for key, answer, received_at, backpressured in self.stepper.wake(self.simulators.now).acts:
            self.simulators.answer(key, answer, received_at, backpressured)

    def grant(self, allowance: int) -> None:
        """Permits of both behaviors change."""
        for name in ("A", "B"):
            self.stepper.grant(name, self._allowance(allowance))

    # ---------------------------------------------------------------- the end of a sequence

    def settle(self) -> None:
        """Everybody gets what they wait for; guests leave; the good simulator takes a step; the books are compared."""
        self.grant(_MUCH)
        self.simulators.begin()
        self.wake()
        for simulator in self.candidates:
            if not simulator.gone and simulator.peer.conversation.state == "deciding" and not self.lockstep:
                connection = self.stepper.connections[simulator.peer.key]
                if self.stepper.matches.covers(connection):
                    raise Violation("a Step is not answered")
            self.leave(simulator)
        self.candidates.clear()
        self.hear(self.host, _step(self._hosted, "A", (1, 2)))
        self.wake()
        self._check_host()
        self._check_step_counts()

    def _check_host(self) -> None:
        answers = [one for one in self.host.post.read() if not isinstance(one, Bye)]
        good = len(answers) == 1 and isinstance(answers[0], Act) and answers[0].sequence == self._hosted
        if not good or [list(one.agents) for one in answers[0].actions] != [[1, 2]]:
            raise Violation(f"the good simulator was told {answers}")
        self._hosted += 1

    def _check_step_counts(self) -> None:
        stepper = self.stepper
        if list(stepper.connections) != [self.host.peer.key]:
            raise Violation(f"connections of guests that left: {list(stepper.connections)}")
        host = stepper.connections[self.host.peer.key]
        for connection in self._met:
            for name, count in connection.completed.items():
                self.completed[name] += count
        self._met.clear()
        for name, behavior in stepper.behaviors.items():
            here = 2 if name == "A" else 0
            counted = behavior.produced + behavior.ghosts
            wanted = self.completed[name] + host.completed.get(name, 0)
            found = (behavior.table.taken, int(behavior.table.live.sum()), behavior.running, counted)
            if found != (here, here, here, wanted):
                raise Violation(
                    f"{name}: slots taken, live, running, steps are {found}, not {(here, here, here, wanted)}"
                )
        if stepper.matches.under_way:
            raise Violation("matches under way that nobody plays")
        self._ages += 1
        if self._ages % 16:
            return
        batch = StepBatch(source="stepping-0.1", parts=stepper.take_steps())
        codec.decode([bytes(one) for one in codec.encode(batch)])
        metrics = self.registry.snapshot(self.simulators.now)
        if len(metrics.counters) + len(metrics.gauges) > _MOST_NAMES:
            raise Violation(f"{len(metrics.counters) + len(metrics.gauges)} names of numbers")


# ---------------------------------------------------------------- acts


class Cursor:
    """Reads an input; zeros after its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    @property
    def left(self) -> bool:
        """Whether there is more."""
        return self.at < len(self._data)

    def byte(self) -> int:
        """The next byte."""
        self.at += 1
        return self._data[self.at - 1] if self.at <= len(self._data) else 0

    def bytes(self) -> bytes:
        """Some, after their number."""
        size = self.byte()
        self.at += size
        return self._data[self.at - size : self.at]


@lru_cache(2048)
def _step(
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


_NUMBERS: Final = (None, None, None, 0, 7, 7, -1, 2**31 - 1, 2**31, 2**63 - 1, 2**64 - 1, 2**20 + 1, 2**20, 2**40)


def _say_hello(world: World, simulator: HandshakingSimulator, cursor: Cursor) -> None:
    first, number = cursor.byte(), _NUMBERS[cursor.byte() % len(_NUMBERS)]
    ids = [text for bit, text in enumerate(_IDS) if first & 1 << bit] or ["A"]
    steps = {"A": cursor.byte(), "nobody": 3} if first & 64 else {}
    simulator.alive = {text: [] for text in ids}
    world.hear(simulator, _hello(tuple(ids), number, tuple(steps.items())))


@lru_cache(512)
def _hello(ids: tuple[str, ...], number: int | None, steps: tuple[tuple[str, int], ...] = ()) -> bytes:
    specs = dict.fromkeys(ids, SPEC)
    return codec.to_bytes(Hello(version=VERSION, name="guest", behaviors=specs, number=number, steps=dict(steps)))


def _say_step(world: World, simulator: HandshakingSimulator, cursor: Cursor) -> None:
    behavior = _IDS[cursor.byte() % len(_IDS)]
    if behavior not in simulator.alive and simulator.alive:
        behavior = next(iter(simulator.alive))
    alive = simulator.alive.setdefault(behavior, [])
    kind, mask = cursor.byte(), cursor.byte()
    ended = [one for bit, one in enumerate(alive) if mask & 1 << bit]
    kept = [one for one in alive if one not in ended]
    new = [cursor.byte() - 100 for _ in range(kind % 4)]
    agents = list(dict.fromkeys([*kept, *new, *(ended if kind & 4 else [])]))
    groups = tuple(cursor.byte() % 3 for _ in agents) if kind & 8 else None
    matches = tuple(cursor.byte() % 3 for _ in agents) if kind & 16 else None
    message = _step(simulator.sequence, behavior, tuple(agents), tuple(ended), groups, matches, bool(kind & 32))
    state = simulator.peer.conversation.state
    world.hear(simulator, message)
    if state == "simulating" and not simulator.gone:
        simulator.sequence += 1
        simulator.alive[behavior] = agents


def _say_statistics(world: World, simulator: HandshakingSimulator, cursor: Cursor) -> None:
    aggregation: Any = ("average", "sum", "most_recent", "histogram")[cursor.byte() % 4]
    names = [f"{cursor.byte()}-{number}" for number in range(cursor.byte() % 16)]
    value = (0.0, 1.7e308, -1.7e308, 3.0)[cursor.byte() % 4]
    told = tuple(Statistic(name=name, value=value, aggregation=aggregation) for name in names)
    state = simulator.peer.conversation.state
    world.hear(simulator, codec.to_bytes(Step(sequence=simulator.sequence, reports=(), statistics=told)))
    simulator.sequence += state == "simulating" and not simulator.gone


def _say_behaviors(world: World, simulator: HandshakingSimulator, cursor: Cursor) -> None:
    first, count = cursor.byte(), cursor.byte() % 64
    ids = [f"A?team={first * 256 + number}" for number in range(count)] if first else ["B?team=1"]
    world.hear(simulator, codec.to_bytes(Behaviors(behaviors=dict.fromkeys(ids, SPEC))))


def _say_word(world: World, simulator: HandshakingSimulator, cursor: Cursor) -> None:
    words = (
        Ping(number=cursor.byte()),
        Pong(),
        Bye(steps={"A": cursor.byte(), "x": 1}),
        Fault(code="c", got="g", expected="e", remedy="r"),
        Act(sequence=0, actions=()),
        Reset(),
        Welcome(version=1, connection=1, heartbeat_s=1.0, timeout_s=2.0),
        Hello(version=2, name="old", behaviors={}),
    )
    world.hear(simulator, codec.to_bytes(words[cursor.byte() % len(words)]))


def _flood(world: World, simulator: HandshakingSimulator, cursor: Cursor) -> None:
    world.hear(simulator, codec.to_bytes(Ping(number=1)) * (cursor.byte() % 64))


def _say_damaged(world: World, simulator: HandshakingSimulator, cursor: Cursor) -> None:
    message = bytearray(_step(simulator.sequence, "A", (1, 2, 3), (1,) if cursor.byte() % 2 else ()))
    for _ in range(cursor.byte() % 4):
        message[(cursor.byte() * 256 + cursor.byte()) % len(message)] = cursor.byte()
    world.hear(simulator, bytes(message))
    simulator.sequence += 1


def _say_bytes(world: World, simulator: HandshakingSimulator, cursor: Cursor) -> None:
    world.hear(simulator, cursor.bytes())


def _delay(_world: World, simulator: HandshakingSimulator, cursor: Cursor) -> None:
    message = codec.to_bytes(Ping(number=cursor.byte()))
    simulator.late += message[: cursor.byte() % (len(message) + 1)]


def _wake(world: World, _simulator: HandshakingSimulator, _cursor: Cursor) -> None:
    world.wake()


def _grant(world: World, _simulator: HandshakingSimulator, cursor: Cursor) -> None:
    world.grant((0, 1, 5, _MUCH)[cursor.byte() % 4])


def _wait(world: World, _simulator: HandshakingSimulator, cursor: Cursor) -> None:
    world.simulators.now += cursor.byte() / 8


def _break(world: World, simulator: HandshakingSimulator, _cursor: Cursor) -> None:
    world.leave(simulator)


def _enter(world: World, _simulator: HandshakingSimulator, _cursor: Cursor) -> None:
    if len(world.candidates) < 4:
        world.enter()


def _dismiss(world: World, simulator: HandshakingSimulator, _cursor: Cursor) -> None:
    if not simulator.gone and simulator.peer.conversation.state not in ("parting", "closed"):
        simulator.peer.say(Bye(reason="the run ended"))


def _read(_world: World, simulator: HandshakingSimulator, _cursor: Cursor) -> None:
    simulator.post.read()


_ACTS: Final[tuple[Callable[[World, HandshakingSimulator, Cursor], None], ...]] = (
    _say_hello, _say_step, _say_step, _say_step, _wake, _wake, _say_statistics, _say_behaviors, _say_word, _flood,
    _say_damaged, _say_bytes, _delay, _grant, _wait, _break, _enter, _dismiss, _read,
)  # fmt: skip
_NUMBER_OF: Final = {act.__name__: number for number, act in enumerate(_ACTS)}

_worlds: dict[bool, tuple[World, int]] = {}


def one_input(data: bytes) -> None:
    """Plays a sequence in a world that has seen others."""
    cursor = Cursor(data)
    lockstep = cursor.byte() % 4 == 3
    world, age = _worlds.pop(lockstep, (None, 0))
    if world is None or age >= _LIFE:
        world, age = World(lockstep=lockstep), 0
    world.enter()
    for _ in range(_MOST_ACTS):
        if not cursor.left:
            break
        act = cursor.byte()
        simulator = world.candidates[(act >> 5) % len(world.candidates)]
        _ACTS[act % 32 % len(_ACTS)](world, simulator, cursor)
    world.settle()
    _worlds[lockstep] = world, age + 1


def sequence(*acts: tuple[str, bytes], kind: int = 0) -> bytes:
    """The input that holds acts by their names."""
    return bytes([kind]) + b"".join(bytes([_NUMBER_OF[name]]) + needs for name, needs in acts)


def seeds() -> list[bytes]:
    """A guest of each kind that does everything right for some steps, and each other act after its hello."""
    good = []
    for (bits, behavior), number, kind in itertools.product(_BEHAVIOR_IDS, (0, 4), (0, 8, 16, 32)):
        said = bytes([1, 1] if kind in (8, 16) else [])  # the group or match of both agents
        acts = [
            ("_say_hello", bytes([bits, number])),
            ("_say_step", bytes([behavior, 2 + kind, 0, 101, 102]) + said),
            ("_wake", b""),
            ("_say_step", bytes([behavior, 4 + kind, 1]) + said),  # one ends and begins anew
            ("_wake", b""),
            ("_say_step", bytes([behavior, kind, 3])),  # both end
            ("_wake", b""),
            ("_say_word", bytes([0, 2, 2])),
        ]
        good += [sequence(*acts), sequence(*acts, kind=3), sequence(*acts[:3], ("_grant", b"\0"), *acts[3:])]
    begun = [("_say_hello", bytes([1, 0])), ("_wake", b"")]
    return good + [sequence(*begun, (name, bytes([3, 2, 1, 2])), ("_wake", b"")) for name in _NUMBER_OF]


def mutate(data: bytes, rng: Random, others: Sequence[bytes]) -> bytes:
    """Changes bytes; sequences are short, and so is what is spliced."""
    return mutation.of_bytes(data, rng, others)[:512]


TARGET: Final = Target(unit="sequence of messages", seeds=seeds, one_input=one_input, mutate=mutate)
