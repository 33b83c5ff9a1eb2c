"""What every board must do, over memory and over ZeroMQ."""

from __future__ import annotations

import math

import anyio
import pytest

from sparring.pipeline.errors import Closed, QueueError
from sparring.pipeline.messages.simulator import Ping
from tests.queues.queues_worlds import BOARD, World

pytestmark = pytest.mark.anyio


async def test_a_subscriber_gets_what_is_published(board_world: World) -> None:
    with anyio.fail_after(30):
        async with board_world.transport("stepping-0.1") as ours, board_world.transport("reader.1") as theirs:
            subscription = await theirs.subscribe(BOARD)
            assert (subscription.latest, subscription.publisher, subscription.heard_age) == ({}, "", math.inf)
            topic = await ours.topic(BOARD)
            topic.publish("a", Ping(number=1))
            await subscription.changed()
            assert subscription.latest["a"].number == 1
            assert subscription.publisher == "stepping-0.1"
            assert subscription.heard_age < 10


@pytest.mark.parametrize("pace", [0.0, 60.0])
async def test_the_last_words_of_a_board_arrive(board_world: World, pace: float) -> None:
    """What was published just before the end was closed reaches every subscriber, whatever its pace."""
    with anyio.fail_after(30):
        async with board_world.transport("stepping-0.1") as ours, board_world.transport("reader.1") as theirs:
            topic, subscription = await ours.topic(BOARD), await theirs.subscribe(BOARD, pace)
            topic.publish("a", Ping(number=0))
            await subscription.changed()
            for number in range(1, 50):
                topic.publish("a", Ping(number=number))
            await topic.aclose()
            while subscription.latest["a"].number < 49:
                await subscription.changed()
            assert subscription.latest["a"].number == 49


async def test_the_latest_wins_and_nothing_old_comes_after_it(board_world: World) -> None:
    with anyio.fail_after(30):
        async with board_world.transport("stepping-0.1") as ours, board_world.transport("reader.1") as theirs:
            topic, subscription = await ours.topic(BOARD), await theirs.subscribe(BOARD)
            seen = [0]
            for number in range(1, 200):
                topic.publish("a", Ping(number=number))
                if number % 20 == 0:
                    await subscription.changed()
                    seen.append(subscription.latest["a"].number)
            await board_world.until(lambda: subscription.latest["a"].number == 199)
            assert seen == sorted(seen)


async def test_a_late_subscriber_gets_the_latest_of_every_key_at_once(board_world: World) -> None:
    with anyio.fail_after(30):
        async with board_world.transport("stepping-0.1") as ours, board_world.transport("reader.1") as theirs:
            topic = await ours.topic(BOARD)
            for number in range(10):
                topic.publish(f"key-{number % 3}", Ping(number=number))
            subscription = await theirs.subscribe(BOARD)
            await board_world.until(lambda: len(subscription.latest) == 3)
            assert {key: ping.number for key, ping in subscription.latest.items()} == {
                "key-0": 9,
                "key-1": 7,
                "key-2": 8,
            }


async def test_changed_returns_at_once_for_what_came_before_it_was_called(board_world: World) -> None:
    with anyio.fail_after(30):
        async with board_world.transport("stepping-0.1") as ours, board_world.transport("reader.1") as theirs:
            topic, subscription = await ours.topic(BOARD), await theirs.subscribe(BOARD)
            topic.publish("a", Ping(number=1))
            await board_world.until(lambda: "a" in subscription.latest)
            await subscription.changed()
            with anyio.move_on_after(0.01) as waited:
                await subscription.changed()
            assert waited.cancelled_caught, "nothing has changed since"


async def test_every_subscriber_gets_it(board_world: World) -> None:
    with anyio.fail_after(30):
        async with board_world.transport("stepping-0.1") as ours, board_world.transport("reader.1") as theirs:
            topic = await ours.topic(BOARD)
            subscriptions = [await theirs.subscribe(BOARD) for _ in range(3)]
            topic.publish("a", Ping(number=1))
            for subscription in subscriptions:
                await subscription.changed()
                assert subscription.latest["a"].number == 1
            await board_world.until(lambda: topic.subscribers == 3)
            await subscriptions[0].aclose()
            await board_world.until(lambda: topic.subscribers == 2)


async def test_a_restarted_publisher_replaces_key_by_key(board_world: World) -> None:
    """Subscribers keep what they have until the new start publishes that key."""
    with anyio.fail_after(30):
        async with board_world.transport("reader.1") as theirs:
            subscription = await theirs.subscribe(BOARD)
            async with board_world.transport("stepping-0.1") as ours:
                topic = await ours.topic(BOARD)
                topic.publish("a", Ping(number=1))
                topic.publish("b", Ping(number=2))
                await board_world.until(lambda: len(subscription.latest) == 2)
                ours.abandon()
            async with board_world.transport("stepping-0.2") as ours:
                topic = await ours.topic(BOARD)
                topic.publish("a", Ping(number=3))
                await board_world.until(lambda: subscription.publisher == "stepping-0.2")
                await board_world.until(lambda: subscription.latest["a"].number == 3)
                assert subscription.latest["b"].number == 2


async def test_a_restarted_subscriber_is_served_at_once(board_world: World) -> None:
    with anyio.fail_after(30):
        async with board_world.transport("stepping-0.1") as ours:
            topic = await ours.topic(BOARD)
            topic.publish("a", Ping(number=1))
            for start in range(1, 4):
                async with board_world.transport(f"reader.{start}") as theirs:
                    subscription = await theirs.subscribe(BOARD)
                    await subscription.changed()
                    assert subscription.latest["a"].number == 1
                    theirs.abandon()


async def test_heard_age_tells_a_living_publisher_from_a_dead_one(board_world: World) -> None:
    """It is a ping: it stays small while nothing is published, and grows when nobody answers."""
    beat = board_world.timing.heartbeat
    with anyio.fail_after(60):
        async with board_world.transport("reader.1") as theirs:
            subscription = await theirs.subscribe(BOARD)
            async with board_world.transport("stepping-0.1") as ours:
                await ours.topic(BOARD)
                for _ in range(4):
                    await board_world.until(lambda: subscription.heard_age > beat / 4)
                    await board_world.until(lambda: subscription.heard_age < beat / 4)
                ours.abandon()
            await board_world.until(lambda: subscription.heard_age > 4 * beat)
            assert subscription.publisher == "stepping-0.1"


async def test_a_closed_end_of_a_board_raises_closed(board_world: World) -> None:
    with anyio.fail_after(30):
        async with board_world.transport("stepping-0.1") as ours, board_world.transport("reader.1") as theirs:
            topic, subscription = await ours.topic(BOARD), await theirs.subscribe(BOARD)
            with pytest.raises(QueueError, match="expected"):
                await theirs.topic(BOARD)
            await topic.aclose()
            with pytest.raises(Closed):
                topic.publish("a", Ping())
            await subscription.aclose()
            with pytest.raises(Closed):
                await subscription.changed()
