"""Rules of every queue for several senders, restarts and closing, on all implementations."""

from __future__ import annotations

import anyio
import pytest

from sparring.pipeline.errors import QueueBroken, QueueClosed, QueueError
from sparring.pipeline.messages.simulator import Ping
from sparring.pipeline.queues.interface import Capacity
from tests.queues.queues_worlds import QUEUE, TEN, World, put, take

pytestmark = pytest.mark.anyio


# ---------------------------------------------------------------- many senders


async def test_shares_sum_to_the_capacity(world: World) -> None:
    with anyio.fail_after(30):
        async with world.transport("senders.1") as ours, world.transport("receiver.1") as theirs:
            receiver = await theirs.receiver(QUEUE, Capacity(messages=10, steps=100, senders=3))
            senders = [await ours.sender(QUEUE) for _ in range(3)]
            await world.until(lambda: all(sender.maxlen for sender in senders))
            assert [sender.maxlen for sender in senders] == [3, 3, 3]
            for sender in senders:
                for _ in range(3):
                    sender.put_nowait(Ping(), 11)
            await world.until(lambda: receiver.qsize() == 9)
            assert receiver.statistics().fullest_steps == 99


async def test_no_sender_waits_for_more_than_one_round(world: World) -> None:
    with anyio.fail_after(30):
        async with world.transport("senders.1") as ours, world.transport("receiver.1") as theirs:
            receiver = await theirs.receiver(QUEUE, Capacity(messages=40, steps=400, senders=4))
            senders = [await ours.sender(QUEUE) for _ in range(4)]
            for number, sender in enumerate(senders):
                await put(sender, range(10 * number, 10 * number + 5))
            await world.until(lambda: receiver.qsize() == 20)
            numbers = await take(receiver, 20)
            for turn in range(5):
                assert sorted(number // 10 for number in numbers[4 * turn : 4 * turn + 4]) == [0, 1, 2, 3]


async def test_a_sender_that_closes_returns_its_share(world: World) -> None:
    """The share returns at once, or after the timeout where the final message is lost."""
    with anyio.fail_after(60):
        async with world.transport("receiver.1", peer_timeout=2.0 if world.kind == "lossy" else 1000.0) as theirs:
            receiver = await theirs.receiver(QUEUE, TEN)
            async with world.transport("first.1") as ours:
                await (await ours.sender(QUEUE)).put(Ping(number=1), 1)
                await world.until(lambda: receiver.qsize() == 1)
            async with world.transport("second.1") as ours:
                second = await ours.sender(QUEUE)
                await second.put(Ping(number=2), 1)
                assert await take(receiver, 2) == [1, 2]
                assert receiver.statistics().senders == 1


async def test_a_dead_senders_share_returns_after_the_timeout(world: World) -> None:
    """Its messages are delivered first, and count until they are acknowledged."""
    with anyio.fail_after(60):
        async with world.transport("receiver.1", peer_timeout=2.0 if world.virtual else 0.3) as theirs:
            receiver = await theirs.receiver(QUEUE, TEN)
            async with world.transport("first.1") as ours, world.transport("second.1") as others:
                first = await ours.sender(QUEUE)
                await put(first, range(4), 10)
                await world.until(lambda: receiver.qsize() == 4)
                second = await others.sender(QUEUE)
                ours.abandon()
                await world.until(lambda: second.maxlen > 0)
                assert second.maxlen == 6
                await put(second, range(4, 10), 10)
                assert receiver.statistics().fullest_messages <= 10
                assert await take(receiver, 10) == [*range(10)]
                await world.until(lambda: second.maxlen == 10)


# ---------------------------------------------------------------- restarts


async def test_a_restarted_receiver_gets_no_message_of_its_predecessor(world: World) -> None:
    """What the former one had not acknowledged is dropped and counted, before the new one's credit is used."""
    incarnations: list[tuple[int, int, int, int]] = []
    with anyio.fail_after(60):
        async with world.transport("sender.1") as ours:
            sender = await ours.sender(QUEUE)

            def note(receivers: int) -> None:
                here = sender.statistics()
                incarnations.append((receivers, here.acknowledged_steps, here.dropped_steps, here.share_messages))

            sender.on_receiver(note)
            async with world.transport("receiver.1") as theirs:
                receiver = await theirs.receiver(QUEUE, TEN)
                await put(sender, range(8), 5)
                assert await take(receiver, 3) == [0, 1, 2]
                unfinished = await receiver.receive()
                await world.until(lambda: sender.statistics().acknowledged_messages == 3)
                theirs.abandon()
                unfinished.acknowledge()
            async with world.transport("receiver.2") as theirs:
                receiver = await theirs.receiver(QUEUE, TEN)
                await world.until(lambda: sender.statistics().receivers == 2)
                await sender.drain()
                await put(sender, range(8, 12), 5)
                assert await take(receiver, 4) == [8, 9, 10, 11]
                await sender.drain()
                assert receiver.empty()
                assert receiver.statistics().got_messages == 4
        assert incarnations == [(1, 0, 0, 0), (2, 15, 25, 0)]
        here = sender.statistics()
        assert (here.put_messages, here.acknowledged_messages, here.dropped_messages) == (12, 7, 5)
        assert (here.put_steps, here.acknowledged_steps, here.dropped_steps) == (60, 35, 25)


async def test_a_put_that_waits_for_credit_goes_to_the_next_receiver(world: World) -> None:
    with anyio.fail_after(60):
        async with world.transport("sender.1") as ours, anyio.create_task_group() as tasks:
            sender = await ours.sender(QUEUE)
            async with world.transport("receiver.1") as theirs:
                await theirs.receiver(QUEUE, TEN)
                await put(sender, range(10))
                tasks.start_soon(put, sender, [10])
                await world.until(lambda: sender.statistics().unacknowledged_messages == 10)
                theirs.abandon()
            async with world.transport("receiver.2") as theirs:
                assert await take(await theirs.receiver(QUEUE, TEN), 1) == [10]
        assert sender.statistics().dropped_messages == 10


async def test_a_receiver_that_closes_sends_its_last_acknowledgements(world: World) -> None:
    """After an orderly restart only messages that were not acknowledged are dropped."""
    if world.kind == "lossy":
        pytest.skip("the final grant of a receiver may be lost")
    with anyio.fail_after(60):
        async with world.transport("sender.1") as ours:
            sender = await ours.sender(QUEUE)
            async with world.transport("receiver.1", acknowledge=5.0) as theirs:
                receiver = await theirs.receiver(QUEUE, TEN)
                await put(sender, range(5))
                assert await take(receiver, 1) == [0]
                await receiver.aclose()
                await world.until(lambda: sender.statistics().acknowledged_messages == 1)
                await theirs.receiver(QUEUE, TEN)
                await world.until(lambda: sender.statistics().dropped_messages == 4)
                assert sender.statistics().acknowledged_messages == 1


async def test_a_restarted_sender_keeps_its_share_and_old_messages_come_first(world: World) -> None:
    with anyio.fail_after(60):
        async with world.transport("receiver.1", peer_timeout=1000.0) as theirs:
            receiver = await theirs.receiver(QUEUE, TEN)
            async with world.transport("sender.1") as ours:
                await put(await ours.sender(QUEUE), range(4))
                await world.until(lambda: receiver.qsize() == 4)
                ours.abandon()
            async with world.transport("sender.2") as ours:
                sender = await ours.sender(QUEUE)
                await put(sender, range(4, 10))
                assert sender.maxlen == 6
                deliveries = [await receiver.receive() for _ in range(10)]
                assert [delivery.record.number for delivery in deliveries] == [*range(10)]
                assert [delivery.sender for delivery in deliveries] == ["sender.1"] * 4 + ["sender.2"] * 6
                for delivery in deliveries:
                    delivery.acknowledge()
                await world.until(lambda: sender.maxlen == 10)
                assert receiver.statistics().senders == 1


async def test_a_superseded_sender_raises_queue_broken(world: World) -> None:
    with anyio.fail_after(60):
        async with world.pair(TEN) as (sender, receiver), world.transport("sender.2") as later:
            await sender.put(Ping(), 1)
            await (await later.sender(QUEUE)).put(Ping(), 1)

            async def keep_putting() -> None:
                while True:
                    await sender.put(Ping(), 1)

            with pytest.raises(QueueBroken, match="later process"):
                await keep_putting()
            with pytest.raises(QueueBroken):
                await sender.drain()
            assert receiver.statistics().senders == 1


# ---------------------------------------------------------------- closing


async def test_a_closed_end_raises_closed(world: World) -> None:
    with anyio.fail_after(30):
        async with world.pair(TEN) as (sender, receiver):
            await put(sender, range(2))
            await sender.aclose()
            await sender.aclose()
            with pytest.raises(QueueClosed):
                await sender.put(Ping(), 1)
            with pytest.raises(QueueClosed):
                sender.put_nowait(Ping(), 1)
            with pytest.raises(QueueClosed):
                await sender.drain()
            await receiver.aclose()
            await receiver.aclose()
            with pytest.raises(QueueClosed):
                await receiver.get()
            with pytest.raises(QueueClosed):
                receiver.receive_nowait()


async def test_closing_ends_waiting_calls(world: World) -> None:
    closed: list[str] = []

    async def expect(name: str, waiting: object) -> None:
        try:
            await waiting  # type: ignore[misc]
        except QueueClosed:
            closed.append(name)

    with anyio.fail_after(30):
        async with world.pair(TEN) as (sender, receiver), anyio.create_task_group() as tasks:
            tasks.start_soon(expect, "get", receiver.get())
            await world.until(lambda: receiver.statistics().waits == 1)
            await receiver.aclose()
            await put(sender, range(10))
            tasks.start_soon(expect, "put", sender.put(Ping(), 1))
            tasks.start_soon(expect, "drain", sender.drain())
            await world.until(lambda: sender.statistics().waits == 1)
            await sender.aclose()
    assert sorted(closed) == ["drain", "get", "put"]


async def test_a_second_receiver_is_refused_while_the_first_is_open(world: World) -> None:
    if world.kind == "lossy":
        pytest.skip("the lossy link exists in tests only")
    with anyio.fail_after(30):
        async with world.transport("receiver.1") as theirs:
            first = await theirs.receiver(QUEUE, TEN)
            with pytest.raises(QueueError, match="expected"):
                await theirs.receiver(QUEUE, TEN)
            await first.aclose()
            await theirs.receiver(QUEUE, TEN)
