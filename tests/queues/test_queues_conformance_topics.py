"""Rules of every topic, over memory and over ZeroMQ."""

from __future__ import annotations

import math

import anyio
import pytest

from sparring.pipeline.errors import QueueClosed, QueueError
from sparring.pipeline.messages.simulator import Ping
from sparring.pipeline.queues.interface import Subscription
from tests.queues.queues_worlds import PUBLISHER, World, topic

pytestmark = pytest.mark.anyio


def number_of(subscription: Subscription, key: str) -> int:
    """Returns the number of the latest record of a topic."""
    record = subscription.latest(topic(key))
    assert record is not None
    return record.number


async def test_a_subscriber_gets_what_is_published(topic_world: World) -> None:
    with anyio.fail_after(30):
        async with topic_world.transport("stepping-0.1") as ours, topic_world.transport("reader.1") as theirs:
            subscription = await theirs.subscribe(PUBLISHER)
            assert (subscription.records, subscription.publisher, subscription.heartbeat_age) == ({}, "", math.inf)
            publisher = await ours.publisher(PUBLISHER)
            publisher.publish(topic("a"), Ping(number=1))
            await subscription.changed()
            assert number_of(subscription, "a") == 1
            assert subscription.publisher == "stepping-0.1"
            assert subscription.heartbeat_age < 10


@pytest.mark.parametrize("pace", [0.0, 60.0])
async def test_the_final_updates_of_a_topic_arrive(topic_world: World, pace: float) -> None:
    """A record published just before closing reaches every subscriber, whatever its pace."""
    with anyio.fail_after(30):
        async with topic_world.transport("stepping-0.1") as ours, topic_world.transport("reader.1") as theirs:
            publisher, subscription = await ours.publisher(PUBLISHER), await theirs.subscribe(PUBLISHER, pace=pace)
            publisher.publish(topic("a"), Ping(number=0))
            await subscription.changed()
            for number in range(1, 50):
                publisher.publish(topic("a"), Ping(number=number))
            await publisher.aclose()
            while number_of(subscription, "a") < 49:
                await subscription.changed()
            assert number_of(subscription, "a") == 49


@pytest.mark.parametrize("pace", [0.0, 60.0])
async def test_transport_that_closes_in_order_waits_until_subscribers_have_the_latest(
    topic_world: World, pace: float
) -> None:
    with anyio.fail_after(30):
        async with topic_world.transport("reader.1") as theirs:
            async with topic_world.transport("stepping-0.1") as ours:
                publisher, subscription = await ours.publisher(PUBLISHER), await theirs.subscribe(PUBLISHER, pace=pace)
                publisher.publish(topic("a"), Ping(number=0))
                await subscription.changed()
                for number in range(1, 50):
                    publisher.publish(topic("a"), Ping(number=number))
            assert number_of(subscription, "a") == 49


async def test_no_older_record_follows_the_latest(topic_world: World) -> None:
    with anyio.fail_after(30):
        async with topic_world.transport("stepping-0.1") as ours, topic_world.transport("reader.1") as theirs:
            publisher, subscription = await ours.publisher(PUBLISHER), await theirs.subscribe(PUBLISHER)
            received = [0]
            for number in range(1, 200):
                publisher.publish(topic("a"), Ping(number=number))
                if number % 20 == 0:
                    await subscription.changed()
                    received.append(number_of(subscription, "a"))
            await topic_world.until(lambda: number_of(subscription, "a") == 199)
            assert received == sorted(received)


async def test_a_late_subscriber_gets_the_latest_of_every_key_at_once(topic_world: World) -> None:
    with anyio.fail_after(30):
        async with topic_world.transport("stepping-0.1") as ours, topic_world.transport("reader.1") as theirs:
            publisher = await ours.publisher(PUBLISHER)
            for number in range(10):
                publisher.publish(topic(f"key-{number % 3}"), Ping(number=number))
            subscription = await theirs.subscribe(PUBLISHER)
            await topic_world.until(lambda: len(subscription.records) == 3)
            assert {key: ping.number for key, ping in subscription.records.items()} == {
                "key-0": 9,
                "key-1": 7,
                "key-2": 8,
            }


async def test_changed_returns_at_once_after_an_earlier_change(topic_world: World) -> None:
    with anyio.fail_after(30):
        async with topic_world.transport("stepping-0.1") as ours, topic_world.transport("reader.1") as theirs:
            publisher, subscription = await ours.publisher(PUBLISHER), await theirs.subscribe(PUBLISHER)
            publisher.publish(topic("a"), Ping(number=1))
            await topic_world.until(lambda: "a" in subscription.records)
            await subscription.changed()
            with anyio.move_on_after(0.01) as waited:
                await subscription.changed()
            assert waited.cancelled_caught, "nothing has changed since"


async def test_every_subscriber_gets_each_record(topic_world: World) -> None:
    with anyio.fail_after(30):
        async with topic_world.transport("stepping-0.1") as ours, topic_world.transport("reader.1") as theirs:
            publisher = await ours.publisher(PUBLISHER)
            subscriptions = [await theirs.subscribe(PUBLISHER) for _ in range(3)]
            publisher.publish(topic("a"), Ping(number=1))
            for subscription in subscriptions:
                await subscription.changed()
                assert number_of(subscription, "a") == 1
            await topic_world.until(lambda: len(publisher._subscribers) == 3)
            await subscriptions[0].aclose()
            await topic_world.until(lambda: len(publisher._subscribers) == 2)


async def test_a_restarted_publisher_replaces_key_by_key(topic_world: World) -> None:
    """Subscribers keep a key's record until the new incarnation publishes that key."""
    with anyio.fail_after(30):
        async with topic_world.transport("reader.1") as theirs:
            subscription = await theirs.subscribe(PUBLISHER)
            async with topic_world.transport("stepping-0.1") as ours:
                publisher = await ours.publisher(PUBLISHER)
                publisher.publish(topic("a"), Ping(number=1))
                publisher.publish(topic("b"), Ping(number=2))
                await topic_world.until(lambda: len(subscription.records) == 2)
                ours.abandon()
            async with topic_world.transport("stepping-0.2") as ours:
                publisher = await ours.publisher(PUBLISHER)
                publisher.publish(topic("a"), Ping(number=3))
                await topic_world.until(lambda: subscription.publisher == "stepping-0.2")
                await topic_world.until(lambda: number_of(subscription, "a") == 3)
                assert number_of(subscription, "b") == 2


async def test_a_restarted_subscriber_gets_the_latest_at_once(topic_world: World) -> None:
    with anyio.fail_after(30):
        async with topic_world.transport("stepping-0.1") as ours:
            publisher = await ours.publisher(PUBLISHER)
            publisher.publish(topic("a"), Ping(number=1))
            for incarnation in range(1, 4):
                async with topic_world.transport(f"reader.{incarnation}") as theirs:
                    subscription = await theirs.subscribe(PUBLISHER)
                    await subscription.changed()
                    assert number_of(subscription, "a") == 1
                    theirs.abandon()


async def test_heartbeat_age_distinguishes_a_live_publisher_from_a_dead_one(topic_world: World) -> None:
    """It stays small while nothing is published, and grows once the publisher is gone."""
    beat = topic_world.timing.heartbeat
    with anyio.fail_after(60):
        async with topic_world.transport("reader.1") as theirs:
            subscription = await theirs.subscribe(PUBLISHER)
            async with topic_world.transport("stepping-0.1") as ours:
                await ours.publisher(PUBLISHER)
                for _ in range(4):
                    await topic_world.until(lambda: subscription.heartbeat_age > beat / 4)
                    await topic_world.until(lambda: subscription.heartbeat_age < beat / 4)
                ours.abandon()
            await topic_world.until(lambda: subscription.heartbeat_age > 4 * beat)
            assert subscription.publisher == "stepping-0.1"


async def test_a_closed_end_of_a_topic_raises_closed(topic_world: World) -> None:
    with anyio.fail_after(30):
        async with topic_world.transport("stepping-0.1") as ours, topic_world.transport("reader.1") as theirs:
            publisher, subscription = await ours.publisher(PUBLISHER), await theirs.subscribe(PUBLISHER)
            with pytest.raises(QueueError, match="expected"):
                await theirs.publisher(PUBLISHER)
            await publisher.aclose()
            with pytest.raises(QueueClosed):
                publisher.publish(topic("a"), Ping())
            await subscription.aclose()
            with pytest.raises(QueueClosed):
                await subscription.changed()
