"""The rules of a queue under any interleaving of senders, receivers, losses and restarts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.errors import Empty
from sparring.pipeline.queues.memory import Reference
from sparring.pipeline.queues.receiving import ReceivedMessage, ReceiverState
from sparring.pipeline.queues.sending import SenderState
from sparring.pipeline.queues.wire import Capacity, Data, Grant, SenderHello, Timing, make_id

TIMING = Timing(heartbeat=1.0, retry=0.25, peer_timeout=4.0, acknowledge=0.01)


@dataclass(eq=False)
class Sender:
    """One incarnation of a sender, the number of its next message, and those that it dropped with a receiver."""

    state: SenderState
    next: int = 0
    dropped: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Receiver:
    """One incarnation of a receiver, and what it delivered by sender."""

    state: ReceiverState[int]
    taken: dict[str, list[int]] = field(default_factory=dict)
    held: list[tuple[str, int, ReceivedMessage[int]]] = field(default_factory=list)


class World:
    """Senders, one receiver and a link whose faults the test chooses."""

    def __init__(self, capacity: Capacity, names: int, rng: random.Random) -> None:
        self.capacity = capacity
        self.rng = rng
        self.now = 0.0
        self.opened = 0
        self.senders: dict[str, Sender] = {}
        self.up: list[tuple[Sender, SenderHello | Data]] = []
        self.down: list[tuple[Sender, Grant]] = []
        self.receivers: list[Receiver] = []
        self.retired: list[Sender] = []
        self.timed_out = False
        self.restart_receiver()
        for index in range(names):
            self.restart_sender(f"sender-{index}")

    @property
    def receiver(self) -> Receiver:
        return self.receivers[-1]

    def id(self, name: str) -> str:
        self.opened += 1
        return make_id(f"{name}.1", self.opened)

    # ------------------------------------------------------------ events

    def restart_sender(self, name: str) -> None:
        if name in self.senders:
            self.retired.append(self.senders[name])
        self.senders[name] = Sender(SenderState(self.id(name), TIMING))

    def restart_receiver(self) -> None:
        self.receivers.append(Receiver(ReceiverState(self.id("receiver"), int, self.capacity, TIMING)))

    def put(self, name: str, steps: int) -> None:
        sender = self.senders[name]
        if steps <= sender.state.largest and sender.state.fits(steps):
            sender.state.put(steps, Reference(sender.next))
            sender.next += 1

    def flush(self, *, lossless: bool = False) -> None:
        for sender in self.senders.values():
            self.up += [(sender, message) for message in sender.state.outgoing(self.now)]
        if not lossless:
            self.receiver.state.tick(self.now)
        self.down += self.receiver.state.outgoing(self.now)

    def arrive_up(self, index: int) -> None:
        sender, message = self.up.pop(index)
        state = self.receiver.state
        if isinstance(message, SenderHello):
            state.on_hello(self.now, message, sender)
        elif isinstance(message, Data):
            state.on_data(self.now, message, sender)

    def arrive_down(self, index: int) -> None:
        sender, grant = self.down.pop(index)
        receivers, kept = sender.state.counts.receivers, {data.payload.unpack(int) for data in sender.state._kept}
        sender.state.on_grant(self.now, grant)
        if sender.state.counts.receivers > receivers:
            sender.dropped |= kept

    def take(self) -> None:
        receiver = self.receiver
        try:
            entry = receiver.state.take()
        except Empty:
            return
        receiver.taken.setdefault(entry.peer.id, []).append(entry.record)
        receiver.held.append((entry.peer.id, entry.record, entry))

    def acknowledge(self, index: int) -> None:
        receiver = self.receiver
        if receiver.held:
            receiver.state.acknowledge(self.now, receiver.held.pop(index % len(receiver.held))[2])

    def elapse(self, seconds: float) -> None:
        self.now += seconds

    def step(self, *, restarts: bool, pauses: bool) -> None:
        """Does one random event."""
        rng, roll = self.rng, self.rng.random()
        name = rng.choice([*self.senders])
        if roll < 0.25:
            self.put(name, rng.randint(0, max(1, self.capacity.largest)))
        elif roll < 0.45 and self.up:
            self.arrive_up(rng.randrange(len(self.up)))
        elif roll < 0.60 and self.down:
            self.arrive_down(rng.randrange(len(self.down)))
        elif roll < 0.65 and self.up:
            self.up.pop(rng.randrange(len(self.up)))
        elif roll < 0.68 and self.up:
            self.up.append(rng.choice(self.up))
        elif roll < 0.71 and self.down:
            self.down.append(rng.choice(self.down))
        elif roll < 0.74 and self.down:
            self.down.pop(rng.randrange(len(self.down)))
        elif roll < 0.82:
            self.take()
        elif roll < 0.90:
            self.acknowledge(rng.randrange(100))
        elif roll < 0.985:
            self.elapse(rng.random() * 0.3)
            self.flush()
        elif restarts and roll < 0.992:
            self.restart_sender(name)
        elif restarts and roll < 0.994:
            self.restart_receiver()
        elif pauses:
            self.elapse(TIMING.peer_timeout)
            self.receiver.state.tick(self.now)

    def heal(self) -> None:
        """Delivers everything in order, while the receiver takes and acknowledges all messages."""
        for _ in range(400):
            self.flush(lossless=True)
            while self.up:
                self.arrive_up(0)
            while self.down:
                self.arrive_down(0)
            while self.receiver.state.counts.queued_messages:
                self.take()
            while self.receiver.held:
                self.acknowledge(0)
            self.elapse(0.05)

    # ------------------------------------------------------------ checks

    def check_capacity(self) -> None:
        state, capacity = self.receiver.state, self.capacity
        assert state.counts.held_messages <= capacity.messages
        assert state.counts.held_steps <= capacity.steps

    def check_under_way(self) -> None:
        """Checks that messages held by the receiver and by live senders are together within the capacity."""
        messages, steps = self.receiver.state.counts.held_messages, self.receiver.state.counts.held_steps
        for sender in self.senders.values():
            peer = self.receiver.state._peers.get(sender.state.sender)
            expected = peer.expected if peer is not None else 0
            absent = [data for data in sender.state._kept if data.sequence >= expected]
            messages += len(absent)
            steps += sum(data.steps for data in absent)
        assert messages <= self.capacity.messages
        assert steps <= self.capacity.steps

    def check_order(self) -> None:
        """Checks that each receiver incarnation delivered each sender's messages once and in order."""
        for receiver in self.receivers:
            for taken in receiver.taken.values():
                assert taken == sorted(set(taken))

    def check_complete(self) -> None:
        """Checks that every message of a live sender was acknowledged or dropped, and delivered at most once."""
        for sender in self.senders.values():
            assert not sender.state.counts.unacknowledged_messages
            assert sender.state.counts.dropped_messages == len(sender.dropped)
            assert sender.state.counts.acknowledged_messages == sender.next - len(sender.dropped)
            delivered = [value for receiver in self.receivers for value in receiver.taken.get(sender.state.sender, ())]
            assert len(delivered) == len(set(delivered)), "no message goes to two incarnations of the receiver"
            assert set(delivered) | sender.dropped == set(range(sender.next))


capacities = st.builds(
    lambda senders, messages, steps: Capacity(messages=messages * senders, steps=steps * senders, senders=senders),
    st.integers(1, 3),
    st.integers(1, 8),
    st.integers(1, 40),
)


@settings(max_examples=75, deadline=None)
@given(capacities, st.integers(1, 3), st.integers(0, 2**32), st.integers(1, 400))
def test_one_receiver_gets_every_message_once_and_in_order(
    capacity: Capacity, names: int, seed: int, steps: int
) -> None:
    """The link loses, duplicates, delays and reorders messages until it heals."""
    world = World(capacity, min(names, capacity.senders), random.Random(seed))
    for _ in range(steps):
        world.step(restarts=False, pauses=False)
        world.check_capacity()
        world.check_under_way()
    world.heal()
    world.check_order()
    world.check_complete()
    for sender in world.senders.values():
        assert world.receiver.taken.get(sender.state.sender, []) == [*range(sender.next)]


@settings(max_examples=75, deadline=None)
@given(capacities, st.integers(1, 5), st.integers(0, 2**32), st.integers(1, 600))
def test_restarts_and_pauses_lose_only_what_a_receiver_had_not_acknowledged(
    capacity: Capacity, names: int, seed: int, steps: int
) -> None:
    """Held messages stay within the capacity, also with more senders than shares."""
    world = World(capacity, names, random.Random(seed))
    for _ in range(steps):
        world.step(restarts=True, pauses=True)
        world.check_capacity()
    while len(world.senders) > capacity.senders:
        removed = world.senders.pop(next(iter(world.senders)))
        world.receiver.state.on_hello(world.now, removed.state.hello(leaving=True), removed)
        world.retired.append(removed)
    world.up = [(sender, message) for sender, message in world.up if sender not in world.retired]
    world.elapse(2 * TIMING.peer_timeout)
    world.flush()
    world.heal()
    world.check_order()
    world.check_complete()


@settings(max_examples=50, deadline=None)
@given(capacities, st.integers(0, 2**32), st.integers(1, 300))
def test_a_receiver_restart_drops_only_unacknowledged_messages(capacity: Capacity, seed: int, steps: int) -> None:
    """The next receiver gets what is put after the sender knows it, and nothing else."""
    rng = random.Random(seed)
    world = World(capacity, 1, rng)
    (sender,) = world.senders.values()
    for _ in range(steps):
        world.put("sender-0", rng.randint(0, capacity.largest))
        world.flush()
        for _ in range(rng.randint(0, 3)):
            if world.up:
                world.arrive_up(0)
            if world.down:
                world.arrive_down(0)
        if rng.random() < 0.5:
            world.take()
        if rng.random() < 0.5:
            world.acknowledge(0)
        world.elapse(0.02)
        if rng.random() < 0.03:
            world.down.clear()
            world.restart_receiver()  # messages that were sent to its predecessor arrive here
            state = sender.state
            before = state.counts.acknowledged_messages, state.counts.acknowledged_steps
            after = state.counts.put_messages - before[0], state.counts.put_steps - before[1]
            world.heal()
            assert world.receiver.taken.get(state.sender, []) == []
            assert (state.counts.acknowledged_messages, state.counts.acknowledged_steps) == before
            assert (state.counts.dropped_messages, state.counts.dropped_steps) == after
    world.heal()
    world.check_complete()
