"""Sequences of messages from simulators, against the code that serves them, without an event loop.

An input is one sequence: a byte for the kind of world, then up to 10 acts, each an operation and its arguments. Fuzzed
simulators send valid and invalid messages or any bytes; the trainer ticks, raises allowances or takes them back;
connections break. The same world has a reference simulator that follows the protocol. At the end the fuzzed
simulators disconnect, and all step counts are compared.

The rules: no exception but those that the server catches; each waiting simulator gets an answer or a fault, or is
disconnected; the reference simulator gets exactly its actions; each count is the sum of its parts; nothing is kept of
a disconnected simulator; all sent messages can be decoded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

from sparring.pipeline.messages import codec
from sparring.pipeline.messages.simulator import (
    Act,
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
from tests.fuzzers import mutation
from tests.fuzzers.protocol_world import MUCH, SPEC, FuzzedSimulator, World, hello_message, step_message
from tests.fuzzers.target import Target

_IDS: Final = ("A", "A?team=0", "A?team=1", "B?team=0", "B?team=1", "B")
_BEHAVIOR_IDS: Final = ((1, 0), (4, 2), (8, 3), (24, 3), (24, 4))
"""Behavior ids of the seeds: those that a simulator registers, by bits, and the one that steps."""
_MOST_ACTS: Final = 10
_SEQUENCES_PER_WORLD: Final = 256
"""Sequences that are played in one world."""


# ---------------------------------------------------------------- acts


class Cursor:
    """Reads an input, and zeros after its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    @property
    def left(self) -> bool:
        """Returns whether bytes are left."""
        return self.at < len(self._data)

    def byte(self) -> int:
        """Reads the next byte."""
        self.at += 1
        return self._data[self.at - 1] if self.at <= len(self._data) else 0

    def bytes(self) -> bytes:
        """Reads a count, and then so many bytes."""
        size = self.byte()
        self.at += size
        return self._data[self.at - size : self.at]


NUMBERS: Final = (None, None, None, 0, 7, 7, -1, 2**31 - 1, 2**31, 2**63 - 1, 2**64 - 1, 2**20 + 1, 2**20, 2**40)


def _send_hello(world: World, simulator: FuzzedSimulator, cursor: Cursor) -> None:
    first, number = cursor.byte(), NUMBERS[cursor.byte() % len(NUMBERS)]
    ids = [text for bit, text in enumerate(_IDS) if first & 1 << bit] or ["A"]
    steps = {"A": cursor.byte(), "unknown": 3} if first & 64 else {}
    simulator.alive = {text: [] for text in ids}
    world.receive(simulator, hello_message(tuple(ids), number, tuple(steps.items())))


def _send_step(world: World, simulator: FuzzedSimulator, cursor: Cursor) -> None:
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
    message = step_message(simulator.sequence, behavior, tuple(agents), tuple(ended), groups, matches, bool(kind & 32))
    state = simulator.peer.conversation.state
    world.receive(simulator, message)
    if state == "simulating" and not simulator.gone:
        simulator.sequence += 1
        simulator.alive[behavior] = agents


def _send_statistics(world: World, simulator: FuzzedSimulator, cursor: Cursor) -> None:
    aggregation: Any = ("average", "sum", "most_recent", "histogram")[cursor.byte() % 4]
    names = [f"{cursor.byte()}-{number}" for number in range(cursor.byte() % 16)]
    value = (0.0, 1.7e308, -1.7e308, 3.0)[cursor.byte() % 4]
    statistics = tuple(Statistic(name=name, value=value, aggregation=aggregation) for name in names)
    state = simulator.peer.conversation.state
    world.receive(simulator, codec.to_bytes(Step(sequence=simulator.sequence, reports=(), statistics=statistics)))
    simulator.sequence += state == "simulating" and not simulator.gone


def _send_behaviors(world: World, simulator: FuzzedSimulator, cursor: Cursor) -> None:
    first, count = cursor.byte(), cursor.byte() % 64
    ids = [f"A?team={first * 256 + number}" for number in range(count)] if first else ["B?team=1"]
    world.receive(simulator, codec.to_bytes(Behaviors(behaviors=dict.fromkeys(ids, SPEC))))


def _send_record(world: World, simulator: FuzzedSimulator, cursor: Cursor) -> None:
    records = (
        Ping(number=cursor.byte()),
        Pong(),
        Bye(steps={"A": cursor.byte(), "x": 1}),
        Fault(code="c", got="g", expected="e", remedy="r"),
        Act(sequence=0, actions=()),
        Reset(),
        Welcome(version=1, connection=1, heartbeat_s=1.0, timeout_s=2.0),
        Hello(version=2, name="old", behaviors={}),
    )
    world.receive(simulator, codec.to_bytes(records[cursor.byte() % len(records)]))


def _flood(world: World, simulator: FuzzedSimulator, cursor: Cursor) -> None:
    world.receive(simulator, codec.to_bytes(Ping(number=1)) * (cursor.byte() % 64))


def _send_damaged(world: World, simulator: FuzzedSimulator, cursor: Cursor) -> None:
    message = bytearray(step_message(simulator.sequence, "A", (1, 2, 3), (1,) if cursor.byte() % 2 else ()))
    for _ in range(cursor.byte() % 4):
        message[(cursor.byte() * 256 + cursor.byte()) % len(message)] = cursor.byte()
    world.receive(simulator, bytes(message))
    simulator.sequence += 1


def _send_bytes(world: World, simulator: FuzzedSimulator, cursor: Cursor) -> None:
    world.receive(simulator, cursor.bytes())


def _delay(_world: World, simulator: FuzzedSimulator, cursor: Cursor) -> None:
    message = codec.to_bytes(Ping(number=cursor.byte()))
    simulator.late += message[: cursor.byte() % (len(message) + 1)]


def _tick(world: World, _simulator: FuzzedSimulator, _cursor: Cursor) -> None:
    world.tick()


def _grant(world: World, _simulator: FuzzedSimulator, cursor: Cursor) -> None:
    world.grant((0, 1, 5, MUCH)[cursor.byte() % 4])


def _wait(world: World, _simulator: FuzzedSimulator, cursor: Cursor) -> None:
    world.simulators.now += cursor.byte() / 8


def _break(world: World, simulator: FuzzedSimulator, _cursor: Cursor) -> None:
    world.disconnect(simulator)


def _connect(world: World, _simulator: FuzzedSimulator, _cursor: Cursor) -> None:
    if len(world.fuzzed) < 4:
        world.connect()


def _dismiss(world: World, simulator: FuzzedSimulator, _cursor: Cursor) -> None:
    if not simulator.gone and simulator.peer.conversation.state not in ("parting", "closed"):
        simulator.peer.send(Bye(reason="the run ended"))


def _read(_world: World, simulator: FuzzedSimulator, _cursor: Cursor) -> None:
    simulator.outgoing.read()


ACTS: Final[tuple[Callable[[World, FuzzedSimulator, Cursor], None], ...]] = (
    _send_hello, _send_step, _send_step, _send_step, _tick, _tick, _send_statistics, _send_behaviors, _send_record,
    _flood, _send_damaged, _send_bytes, _delay, _grant, _wait, _break, _connect, _dismiss, _read,
)  # fmt: skip
NUMBER_OF: Final = {act.__name__: number for number, act in enumerate(ACTS)}

worlds: dict[bool, tuple[World, int]] = {}


def one_input(data: bytes) -> None:
    """Plays a sequence in a world that may have had others before."""
    cursor = Cursor(data)
    lockstep = cursor.byte() % 4 == 3
    world, age = worlds.pop(lockstep, (None, 0))
    if world is None or age >= _SEQUENCES_PER_WORLD:
        world, age = World(lockstep=lockstep), 0
    world.connect()
    for _ in range(_MOST_ACTS):
        if not cursor.left:
            break
        act = cursor.byte()
        simulator = world.fuzzed[(act >> 5) % len(world.fuzzed)]
        ACTS[act % 32 % len(ACTS)](world, simulator, cursor)
    world.settle()
    worlds[lockstep] = world, age + 1


def sequence(*acts: tuple[str, bytes], kind: int = 0) -> bytes:
    """Returns the input with the acts of given names."""
    return bytes([kind]) + b"".join(bytes([NUMBER_OF[name]]) + needs for name, needs in acts)


def seeds() -> list[bytes]:
    """Returns a valid simulator of each kind for some steps, and each other act after a hello."""
    good = []
    for (bits, behavior), number, kind in itertools.product(_BEHAVIOR_IDS, (0, 4), (0, 8, 16, 32)):
        keys = bytes([1, 1] if kind in (8, 16) else [])  # the group or match of both agents
        acts = [
            ("_send_hello", bytes([bits, number])),
            ("_send_step", bytes([behavior, 2 + kind, 0, 101, 102]) + keys),
            ("_tick", b""),
            ("_send_step", bytes([behavior, 4 + kind, 1]) + keys),  # one ends and begins again
            ("_tick", b""),
            ("_send_step", bytes([behavior, kind, 3])),  # both end
            ("_tick", b""),
            ("_send_record", bytes([0, 2, 2])),
        ]
        good += [sequence(*acts), sequence(*acts, kind=3), sequence(*acts[:3], ("_grant", b"\0"), *acts[3:])]
    begun = [("_send_hello", bytes([1, 0])), ("_tick", b"")]
    return good + [sequence(*begun, (name, bytes([3, 2, 1, 2])), ("_tick", b"")) for name in NUMBER_OF]


def mutate(data: bytes, rng: Random, others: Sequence[bytes]) -> bytes:
    """Changes bytes, and keeps sequences short."""
    return mutation.of_bytes(data, rng, others)[:512]


TARGET: Final = Target(unit="sequence of messages", seeds=seeds, one_input=one_input, mutate=mutate)
