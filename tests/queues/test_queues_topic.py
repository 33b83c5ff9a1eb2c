"""The rules of a topic under any interleaving, loss and restart."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.queues.memory import Reference
from sparring.pipeline.queues.topic import PublisherState, SubscriberState
from sparring.pipeline.queues.wire import SubscriberStatus, Timing, TopicUpdate

TIMING = Timing(heartbeat=1.0, peer_timeout=5.0)


class World:
    """One topic, its subscribers, and an ordered link that may break."""

    def __init__(self, seed: int, subscribers: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.incarnations = 0
        self.routes = 0
        self.published: dict[str, int] = {}
        self.subscribers: dict[int, SubscriberState] = {}
        self.up: list[tuple[int, SubscriberStatus]] = []
        self.down: list[tuple[Any, TopicUpdate]] = []
        self.restart_publisher()
        for _ in range(subscribers):
            self.subscribe()

    def restart_publisher(self) -> None:
        self.incarnations += 1
        self.publisher = PublisherState(f"p.{self.incarnations}#{self.incarnations}~0", TIMING)
        self.published = {}
        self.up.clear()

    def subscribe(self) -> None:
        self.routes += 1
        self.subscribers[self.routes] = SubscriberState(TIMING, pace=self.rng.choice([0.0, 0.0, 0.4, 3.0]))

    def publish(self, key: str, number: int) -> None:
        self.publisher.publish(key, Reference(number))
        self.published[key] = number

    def flush(self) -> None:
        for route, subscriber in self.subscribers.items():
            status = subscriber.outgoing(self.now)
            if status is not None:
                self.up.append((route, status))
        self.down += self.publisher.outgoing(self.now)

    def arrive(self) -> None:
        if self.up:
            route, status = self.up.pop(0)
            self.publisher.on_status(self.now, status, route)
        self.flush()
        if self.down:
            route, message = self.down.pop(0)
            if route in self.subscribers:
                self.subscribers[route].on_update(self.now, message)

    def step(self) -> None:
        roll, rng = self.rng.random(), self.rng
        if roll < 0.3:
            self.publish(rng.choice("abc"), self.routes * 1000 + rng.randrange(1000))
        elif roll < 0.75:
            self.arrive()
        elif roll < 0.85:
            self.now += rng.random()
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
            self.now += 0.25
            self.flush()
            while self.up or self.down:
                self.arrive()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 300))
def test_every_subscriber_ends_with_the_latest_of_every_key(seed: int, subscribers: int, steps: int) -> None:
    """After losses and restarts all subscribers get the latest records once the link is good."""
    world = World(seed, subscribers)
    for _ in range(steps):
        world.step()
    world.heal()
    for subscriber in world.subscribers.values():
        assert subscriber.publisher == world.publisher.publisher
        assert {key: subscriber.latest[key] for key in world.published} == world.published


def exchange(publisher: PublisherState, subscriber: SubscriberState, now: float = 0.0) -> int:
    """Carries everything both ways until nothing is due; returns the number of updates."""
    updates = 0
    while (status := subscriber.outgoing(now)) is not None:
        publisher.on_status(now, status, "route")
        for _, message in publisher.outgoing(now):
            subscriber.on_update(now, message)
            updates += message.revision > 0
    return updates


def test_a_slow_subscriber_skips_replaced_records() -> None:
    """At most one push of each key is under way to a subscriber."""
    publisher, subscriber = PublisherState("p.1#1~0", TIMING), SubscriberState(TIMING)
    exchange(publisher, subscriber)
    pushed = 0
    for number in range(100):
        publisher.publish("a", Reference(number))
        pushed += len(publisher.outgoing(0.0))
    assert pushed == 1
    exchange(publisher, subscriber, 1.0)
    assert exchange(publisher, subscriber, 2.0) + exchange(publisher, subscriber, 3.0) >= 1
    assert subscriber.latest == {"a": 99}


def test_a_subscriber_with_a_pace_gets_one_push_in_that_time() -> None:
    """It is not woken by every change, and still gets the latest record."""
    timing = Timing(heartbeat=60.0)
    publisher, subscriber = PublisherState("p.1#1~0", timing), SubscriberState(timing, pace=0.5)
    exchange(publisher, subscriber)
    updates = 0
    for tick in range(1, 21):
        publisher.publish("a", Reference(tick))
        for _, message in publisher.outgoing(tick / 10):
            updates += subscriber.on_update(tick / 10, message)
        updates += exchange(publisher, subscriber, tick / 10)
    assert updates == 4
    assert subscriber.deadline <= 2.5
    exchange(publisher, subscriber, 2.5)
    assert subscriber.latest == {"a": 20}


def test_final_updates_do_not_wait_for_the_subscriber() -> None:
    """Records published since the last push reach a subscriber that has not confirmed that push."""
    timing = Timing(heartbeat=60.0)
    publisher, subscriber = PublisherState("p.1#1~0", timing), SubscriberState(timing, pace=0.5)
    exchange(publisher, subscriber)
    sent = []
    for number in range(3):
        publisher.publish("a", Reference(number))
        sent += publisher.outgoing(0.0)
    for _, message in [*sent, *publisher.final_updates()]:
        subscriber.on_update(0.1, message)
    assert len(sent) == 1
    assert subscriber.latest == {"a": 2}


def test_a_push_that_crossed_a_ping_is_not_sent_twice() -> None:
    publisher, subscriber = PublisherState("p.1#1~0", TIMING), SubscriberState(TIMING)
    exchange(publisher, subscriber)
    publisher.publish("a", Reference(1))
    ((_, update),) = publisher.outgoing(0.5)
    ping = subscriber.outgoing(1.0)
    assert ping is not None
    publisher.on_status(1.0, ping, "route")
    assert not any(message.revision for _, message in publisher.outgoing(1.0))
    assert subscriber.on_update(1.0, update)
    assert exchange(publisher, subscriber, 1.0) == 0


def test_a_silent_subscriber_is_dropped() -> None:
    publisher, subscriber = PublisherState("p.1#1~0", TIMING), SubscriberState(TIMING)
    exchange(publisher, subscriber)
    assert publisher.subscribers == 1
    publisher.publish("a", Reference(1))
    assert publisher.outgoing(TIMING.peer_timeout) == []
    assert publisher.subscribers == 0


def test_a_late_update_of_an_earlier_publisher_changes_nothing() -> None:
    old, new, subscriber = PublisherState("p.1#1~0", TIMING), PublisherState("p.2#2~0", TIMING), SubscriberState(TIMING)
    exchange(old, subscriber)
    old.publish("a", Reference("old"))
    ((_, late),) = old.outgoing(0.0)
    new.publish("a", Reference("new"))
    exchange(new, subscriber, 1.0)
    assert not subscriber.on_update(1.0, late)
    assert (subscriber.latest, subscriber.publisher) == ({"a": "new"}, "p.2#2~0")


def test_final_updates_repeat_unconfirmed_records() -> None:
    """A push that was lost shortly before the end leaves no gap."""
    publisher, subscriber = PublisherState("p.1#1~0", TIMING), SubscriberState(TIMING)
    status = subscriber.outgoing(0.0)
    assert status is not None
    publisher.on_status(0.0, status, 1)
    publisher.publish("state", Reference(1))
    assert len(publisher.outgoing(0.0)) == 1  # the link loses it
    publisher.publish("state", Reference(2))
    publisher.publish("end", Reference(3))
    for _, message in publisher.final_updates():
        subscriber.on_update(0.0, message)
    assert subscriber.latest == {"state": 2, "end": 3}
