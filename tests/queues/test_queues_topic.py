"""The rules of a topic under any interleaving, loss and restart."""

from __future__ import annotations

import random
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.messages.channels import Topic
from sparring.pipeline.queues.memory import Reference
from sparring.pipeline.queues.topic import Publisher, Subscription
from sparring.pipeline.queues.wire import SubscriberStatus, Timing, TopicUpdate

TIMING = Timing(heartbeat=1.0, peer_timeout=5.0)
A = Topic("a", object)


class Clock:
    """A time that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Link:
    """What an end has sent."""

    pack = staticmethod(Reference)

    def __init__(self) -> None:
        self._sent: list[Any] = []

    def send(self, message: Any, route: Any) -> None:
        self._sent.append((route, message))

    def poll(self) -> None:
        """Nothing arrives by itself."""

    def take(self) -> list[Any]:
        sent, self._sent = self._sent, []
        return sent


def publisher_with(clock: Clock, end_id: str = "p.1#1~0", timing: Timing = TIMING) -> Any:
    """Returns an open publisher."""
    end: Any = Publisher("topic:p", end_id, timing, clock)
    end.open(Link())
    return end


def subscription_with(clock: Clock, timing: Timing = TIMING, pace: float = 0.0, keys: tuple[str, ...] = ()) -> Any:
    """Returns an open subscription."""
    end: Any = Subscription("topic:p", "s.1#1~0", timing, clock, pace, keys)
    end.open(Link())
    return end


class World:
    """One topic, its subscribers, and an ordered link that may break."""

    def __init__(self, seed: int, subscribers: int) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.incarnations = 0
        self.routes = 0
        self.published: dict[str, int] = {}
        self.subscribers: dict[int, Any] = {}
        self.up: list[tuple[int, SubscriberStatus]] = []
        self.down: list[tuple[Any, TopicUpdate]] = []
        self.restart_publisher()
        for _ in range(subscribers):
            self.subscribe()

    def restart_publisher(self) -> None:
        self.incarnations += 1
        self.publisher = publisher_with(self.clock, f"p.{self.incarnations}#{self.incarnations}~0")
        self.published = {}
        self.up.clear()

    def subscribe(self) -> None:
        self.routes += 1
        pace, keys = self.rng.choice([0.0, 0.0, 0.4, 3.0]), tuple(self.rng.choice(["", "", "b", "ac"]))
        self.subscribers[self.routes] = subscription_with(self.clock, pace=pace, keys=keys)

    def publish(self, key: str, number: int) -> None:
        self.publisher.publish(Topic(key, object), number)
        self.published[key] = number

    def flush(self) -> None:
        for route, subscriber in self.subscribers.items():
            subscriber.settle()
            self.up += [(route, status) for _, status in subscriber._link.take()]
        self.publisher.settle()
        self.down += self.publisher._link.take()

    def arrive(self) -> None:
        if self.up:
            route, status = self.up.pop(0)
            self.publisher.received(status, route)
        self.flush()
        if self.down:
            route, message = self.down.pop(0)
            if route in self.subscribers:
                self.subscribers[route].received(message, None)

    def step(self) -> None:
        roll, rng = self.rng.random(), self.rng
        if roll < 0.3:
            self.publish(rng.choice("abc"), self.routes * 1000 + rng.randrange(1000))
        elif roll < 0.75:
            self.arrive()
        elif roll < 0.85:
            self.clock.now += rng.random()
        elif roll < 0.9 and self.down:
            self.down.pop(rng.randrange(len(self.down)))
        elif roll < 0.95 and self.up:
            self.up.pop(rng.randrange(len(self.up)))
        elif roll < 0.97:
            self.restart_publisher()
        elif self.subscribers:
            del self.subscribers[rng.choice([*self.subscribers])]
            self.subscribe()
        self.flush()

    def heal(self) -> None:
        for _ in range(60):
            self.clock.now += 0.25
            self.flush()
            while self.up or self.down:
                self.arrive()


@settings(max_examples=75, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 300))
def test_every_subscriber_ends_with_the_latest_of_every_key(seed: int, subscribers: int, steps: int) -> None:
    """After losses and restarts all subscribers get the latest records that they read once the link is good."""
    world = World(seed, subscribers)
    for _ in range(steps):
        world.step()
    world.heal()
    for subscriber in world.subscribers.values():
        assert subscriber._publisher == world.publisher.id
        wanted = {key: one for key, one in world.published.items() if key in (subscriber._keys or key)}
        assert {key: subscriber.records[key] for key in wanted} == wanted
        assert not subscriber._keys or subscriber.records.keys() <= {*subscriber._keys}


def exchange(publisher: Any, subscriber: Any, now: float = 0.0) -> int:
    """Carries everything both ways until nothing is due; returns the number of updates."""
    updates = 0
    subscriber._clock.now = now
    subscriber.settle()
    while statuses := subscriber._link.take():
        for _, status in statuses:
            publisher.received(status, "route")
        publisher.settle()
        for _, message in publisher._link.take():
            subscriber.received(message, None)
            updates += message.revision > 0
        subscriber.settle()
    return updates


@pytest.mark.anyio
@pytest.mark.parametrize("has_arrived", [True, False])
async def test_slow_subscriber_confirms_without_a_pause_what_a_closing_publisher_asks_for(has_arrived: bool) -> None:
    clock = Clock()
    publisher, subscriber = publisher_with(clock, "p.1#1~0"), subscription_with(clock, pace=60.0)
    publisher.publish(Topic("a", object), 1)
    exchange(publisher, subscriber)
    if has_arrived:
        assert publisher._subscribers["route"].has == 0, "it pauses"
    else:
        exchange(publisher, subscriber, now=60.0)
        publisher.publish(Topic("a", object), 2)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publisher.confirmed)
            await anyio.wait_all_tasks_blocked()
            publisher.publish(Topic("b", object), 3)
            for _, message in publisher._link.take():
                subscriber.received(message, None)
            exchange(publisher, subscriber, now=clock.now)
    assert subscriber.records["b"] == 3


def arrives(subscriber: Any, message: TopicUpdate) -> bool:
    """Returns whether a message brings a new record."""
    before = subscriber._revision
    subscriber.received(message, None)
    return bool(subscriber._revision > before)


def test_a_slow_subscriber_skips_replaced_records() -> None:
    """At most one push of each key is under way to a subscriber."""
    clock = Clock()
    publisher, subscriber = publisher_with(clock), subscription_with(clock)
    exchange(publisher, subscriber)
    for number in range(100):
        publisher.publish(A, number)
    assert len(publisher._link.take()) == 1
    exchange(publisher, subscriber, 1.0)
    assert exchange(publisher, subscriber, 2.0) + exchange(publisher, subscriber, 3.0) >= 1
    assert subscriber.records == {"a": 99}


def test_a_subscriber_with_a_pace_gets_one_push_in_that_time() -> None:
    """It is not woken by every change, and still gets the latest record."""
    clock, timing = Clock(), Timing(heartbeat=60.0)
    publisher, subscriber = publisher_with(clock, timing=timing), subscription_with(clock, timing, pace=0.5)
    exchange(publisher, subscriber)
    updates = 0
    for tick in range(1, 21):
        clock.now = tick / 10
        publisher.publish(A, tick)
        updates += sum(arrives(subscriber, message) for _, message in publisher._link.take())
        updates += exchange(publisher, subscriber, tick / 10)
    assert updates == 4
    assert subscriber.deadline <= 2.5
    exchange(publisher, subscriber, 2.5)
    assert subscriber.records == {"a": 20}


def test_final_updates_do_not_wait_for_the_subscriber() -> None:
    """Records published since the last push reach a subscriber that has not confirmed that push."""
    clock, timing = Clock(), Timing(heartbeat=60.0)
    publisher, subscriber = publisher_with(clock, timing=timing), subscription_with(clock, timing, pace=0.5)
    exchange(publisher, subscriber)
    for number in range(3):
        publisher.publish(A, number)
    sent = publisher._link.take()
    clock.now = 0.1
    for _, message in [*sent, *publisher.last_messages()]:
        subscriber.received(message, None)
    assert len(sent) == 1
    assert subscriber.records == {"a": 2}


def test_a_push_that_crossed_a_ping_is_not_sent_twice() -> None:
    clock = Clock()
    publisher, subscriber = publisher_with(clock), subscription_with(clock)
    exchange(publisher, subscriber)
    clock.now = 0.5
    publisher.publish(A, 1)
    ((_, update),) = publisher._link.take()
    clock.now = 1.0
    subscriber.settle()
    ((_, ping),) = subscriber._link.take()
    publisher.received(ping, "route")
    publisher.settle()
    assert not any(message.revision for _, message in publisher._link.take())
    assert arrives(subscriber, update)
    assert exchange(publisher, subscriber, 1.0) == 0


def test_a_silent_subscriber_is_dropped() -> None:
    clock = Clock()
    publisher, subscriber = publisher_with(clock), subscription_with(clock)
    exchange(publisher, subscriber)
    assert len(publisher._subscribers) == 1
    clock.now = TIMING.peer_timeout
    publisher.publish(A, 1)
    assert publisher._link.take() == []
    assert len(publisher._subscribers) == 0


def test_a_late_update_of_an_earlier_publisher_changes_nothing() -> None:
    clock = Clock()
    old, new, subscriber = publisher_with(clock), publisher_with(clock, "p.2#2~0"), subscription_with(clock)
    exchange(old, subscriber)
    old.publish(A, "old")
    ((_, late),) = old._link.take()
    new.publish(A, "new")
    exchange(new, subscriber, 1.0)
    assert not arrives(subscriber, late)
    assert (subscriber.records, subscriber.publisher) == ({"a": "new"}, "p.2")


def test_final_updates_repeat_unconfirmed_records() -> None:
    """A push that was lost shortly before the end leaves no gap."""
    clock = Clock()
    publisher, subscriber = publisher_with(clock), subscription_with(clock)
    ((_, status),) = subscriber._link.take()
    publisher.received(status, 1)
    publisher.publish(Topic("state", object), 1)
    assert len(publisher._link.take()) == 1  # the link loses it
    publisher.publish(Topic("state", object), 2)
    publisher.publish(Topic("end", object), 3)
    for _, message in publisher.last_messages():
        subscriber.received(message, None)
    assert subscriber.records == {"state": 2, "end": 3}
