"""Rules of every queue with one sender, over memory, over ZeroMQ, and over a link with random faults."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

from sparring.pipeline.errors import Empty, Full, TooLarge
from sparring.pipeline.messages.channels import Queue
from sparring.pipeline.messages.simulator import BehaviorActions, Ping
from sparring.pipeline.queues.interface import Capacity, Delivery, Receiver, Sender
from tests.queues.queues_worlds import QUEUE, TEN, World, put, take

pytestmark = pytest.mark.anyio


# ---------------------------------------------------------------- order, credit, capacity


async def test_records_arrive_once_and_in_order(world: World) -> None:
    with anyio.fail_after(30):
        async with world.pair(TEN) as (sender, receiver), anyio.create_task_group() as tasks:
            tasks.start_soon(put, sender, range(100))
            assert await take(receiver, 100) == [*range(100)]


async def test_arrays_arrive_as_they_were_put(world: World) -> None:
    record = BehaviorActions(
        behavior="Ball",
        agents=np.arange(3),
        continuous=np.arange(6, dtype=np.float32).reshape(3, 2),
        discrete=np.zeros((3, 0), np.int32),
    )
    large = BehaviorActions(
        behavior="Ball",
        agents=np.arange(3),
        continuous=np.arange(60_000, dtype=np.float32).reshape(3, 20_000),
        discrete=np.zeros((3, 0), np.int32),
    )
    with anyio.fail_after(30):
        async with world.pair(TEN, Queue(QUEUE.name, BehaviorActions)) as (sender, receiver):
            for sent in (record, large):
                await sender.put(sent, 3)
                got = await receiver.get()
                np.testing.assert_array_equal(got.continuous, sent.continuous)
                np.testing.assert_array_equal(got.agents, sent.agents)
                assert got.discrete.shape == (3, 0)


async def test_the_capacity_in_messages_is_exact(world: World) -> None:
    """Ten messages fit and the eleventh does not, wherever they wait."""
    with anyio.fail_after(30):
        async with world.pair(TEN) as (sender, receiver):
            assert (sender.maxlen, receiver.maxlen) == (10, 10)
            for number in range(10):
                sender.put_nowait(Ping(number=number), 0)
            with pytest.raises(Full, match="10 messages"):
                sender.put_nowait(Ping(), 0)
            await world.until(lambda: receiver.qsize() == 10)
            with pytest.raises(Full):
                sender.put_nowait(Ping(), 0)
            assert receiver.statistics().fullest_messages == 10


async def test_the_capacity_in_steps_is_exact(world: World) -> None:
    with anyio.fail_after(30):
        async with world.pair(TEN) as (sender, receiver):
            for _ in range(4):
                sender.put_nowait(Ping(), 24)
            with pytest.raises(Full, match="96 steps"):
                sender.put_nowait(Ping(), 5)
            sender.put_nowait(Ping(), 4)
            await world.until(lambda: receiver.qsize() == 5)
            assert receiver.statistics().fullest_steps == 100


async def test_a_message_without_steps_costs_only_a_message(world: World) -> None:
    with anyio.fail_after(30):
        async with world.pair(TEN) as (sender, _):
            for _ in range(4):
                sender.put_nowait(Ping(), 25)
            sender.put_nowait(Ping(), 0)
            here = sender.statistics()
            assert (here.unacknowledged_messages, here.unacknowledged_steps) == (5, here.share_steps)


async def test_put_waits_for_credit_and_get_gives_it(world: World) -> None:
    with anyio.fail_after(30):
        async with world.pair(TEN) as (sender, receiver), anyio.create_task_group() as tasks:
            await put(sender, range(10))
            tasks.start_soon(put, sender, range(10, 13))
            await world.until(lambda: sender.statistics().waits == 1)
            assert sender.statistics().put_messages == 10
            assert await take(receiver, 13) == [*range(13)]


async def test_puts_that_wait_are_served_in_their_order(world: World) -> None:
    with anyio.fail_after(30):
        async with world.pair(Capacity(messages=4, steps=100)) as (sender, receiver):
            await put(sender, range(4), 25)
            async with anyio.create_task_group() as tasks:
                for number, steps in ((4, 25), (5, 0), (6, 0)):
                    tasks.start_soon(sender.put, Ping(number=number), steps)
                    waits = number - 3
                    await world.until(lambda waits=waits: sender.statistics().waits == waits)
                with pytest.raises(Full):
                    sender.put_nowait(Ping(), 0)
                assert await take(receiver, 7) == [*range(7)]


async def test_a_message_above_a_quarter_of_the_queue_is_refused(world: World) -> None:
    with anyio.fail_after(30):
        async with world.pair(TEN) as (sender, _):
            with pytest.raises(TooLarge, match="26 steps"):
                await sender.put(Ping(), 26)
            with pytest.raises(TooLarge):
                sender.put_nowait(Ping(), 26)
            sender.put_nowait(Ping(), 25)


async def test_without_a_receiver_put_waits_and_put_nowait_is_full(world: World) -> None:
    """The order of start does not matter."""
    with anyio.fail_after(30):
        async with world.transport("sender.1") as ours, world.transport("receiver.1") as theirs:
            sender = await ours.sender(QUEUE)
            assert sender.maxlen == 0
            with pytest.raises(Full):
                sender.put_nowait(Ping(), 1000)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(put, sender, range(3))
                await world.until(lambda: sender.statistics().waits == 1)
                receiver = await theirs.receiver(QUEUE, TEN)
                assert await take(receiver, 3) == [0, 1, 2]


async def test_get_nowait_raises_empty_and_qsize_counts(world: World) -> None:
    with anyio.fail_after(30):
        async with world.pair(TEN) as (sender, receiver):
            for attempt in (receiver.get_nowait, receiver.receive_nowait):
                with pytest.raises(Empty):
                    attempt()
            assert receiver.empty()
            await put(sender, range(2))
            await world.until(lambda: receiver.qsize() == 2)
            assert not receiver.empty()
            assert [receiver.get_nowait().number, receiver.receive_nowait().record.number] == [0, 1]


# ---------------------------------------------------------------- cancellation and deadlines


async def test_a_cancelled_put_puts_nothing(world: World) -> None:
    with anyio.fail_after(30):
        async with world.pair(TEN) as (sender, receiver):
            await put(sender, range(10))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(sender.put, Ping(number=666), 1)
                await world.until(lambda: sender.statistics().waits == 1)
                tasks.cancel_scope.cancel()
            assert await take(receiver, 10) == [*range(10)]
            await sender.put(Ping(number=10), 1)
            assert await take(receiver, 1) == [10]
            assert sender.statistics().put_messages == 11


async def test_the_put_behind_a_cancelled_one_continues(world: World) -> None:
    with anyio.fail_after(30):
        async with world.pair(Capacity(messages=4, steps=100)) as (sender, receiver):
            await put(sender, range(4))
            async with anyio.create_task_group() as tasks:
                first = anyio.CancelScope()

                async def put_until_cancelled() -> None:
                    with first:
                        await sender.put(Ping(number=666), 25)

                tasks.start_soon(put_until_cancelled)
                await world.until(lambda: sender.statistics().waits == 1)
                tasks.start_soon(sender.put, Ping(number=4), 0)
                await world.until(lambda: sender.statistics().waits == 2)
                first.cancel()
                assert await take(receiver, 5) == [*range(5)]


async def test_cancelled_gets_lose_nothing(world: World) -> None:
    """Each message is received once although gets are cancelled repeatedly."""
    got: list[int] = []
    with anyio.fail_after(30):
        async with world.pair(TEN) as (sender, receiver), anyio.create_task_group() as tasks:
            tasks.start_soon(put, sender, range(60))
            while len(got) < 60:
                with anyio.move_on_after(0.0005):
                    while True:
                        got.append((await receiver.get()).number)
                await anyio.lowlevel.checkpoint()
    assert got == [*range(60)]


async def test_a_deadline_on_get_leaves_the_queue_usable(world: World) -> None:
    with anyio.fail_after(30):
        async with world.pair(TEN) as (sender, receiver):
            with pytest.raises(TimeoutError):
                with anyio.fail_after(0.01):
                    await receiver.get()
            await put(sender, range(1))
            assert await take(receiver, 1) == [0]


async def test_several_gets_share_arriving_messages(world: World) -> None:
    got: list[int] = []

    async def consume(queue: Receiver[Ping]) -> None:
        while True:
            got.append((await queue.get()).number)

    with anyio.fail_after(30):
        async with world.pair(TEN) as (sender, receiver), anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(consume, receiver)
            await put(sender, range(30))
            await world.until(lambda: len(got) == 30)
            tasks.cancel_scope.cancel()
    assert sorted(got) == [*range(30)]


# ---------------------------------------------------------------- acknowledgement


async def test_arrival_does_not_acknowledge_and_get_does(world: World) -> None:
    with anyio.fail_after(30):
        async with world.pair(TEN) as (sender, receiver):
            await put(sender, range(2))
            await world.until(lambda: receiver.qsize() == 2)
            assert sender.statistics().unacknowledged_messages == 2
            await take(receiver, 2)
            await sender.drain()
            assert sender.statistics().acknowledged_messages == 2


async def test_receive_leaves_the_acknowledgement_to_the_caller(world: World) -> None:
    """A delivered message counts against the capacity, and its acknowledgement waits for earlier ones."""
    counts: list[tuple[int, int]] = []
    with anyio.fail_after(30):
        async with world.pair(TEN) as (sender, receiver):
            sender.on_acknowledged(lambda messages, steps: counts.append((messages, steps)))
            await put(sender, range(3), 7)
            deliveries: list[Delivery[Ping]] = [await receiver.receive() for _ in range(3)]
            assert [delivery.record.number for delivery in deliveries] == [0, 1, 2]
            assert {(delivery.steps, delivery.sender) for delivery in deliveries} == {(7, "sender.1")}
            held = receiver.statistics()
            assert (held.queued_messages, held.held_messages, held.held_steps) == (0, 3, 21)
            deliveries[2].acknowledge()
            deliveries[1].acknowledge()
            assert receiver.statistics().held_messages == 3
            deliveries[0].acknowledge()
            deliveries[0].acknowledge()
            assert receiver.statistics().held_messages == 0
            await sender.drain()
            assert counts[-1] == (3, 21)
            assert counts == sorted(set(counts))


async def test_drain_waits_for_the_last_acknowledgement(world: World) -> None:
    drained = anyio.Event()

    async def drain(sender: Sender[Ping]) -> None:
        await sender.drain()
        drained.set()

    with anyio.fail_after(30):
        async with world.pair(TEN) as (sender, receiver), anyio.create_task_group() as tasks:
            await sender.drain()
            await put(sender, range(2))
            tasks.start_soon(drain, sender)
            first, second = await receiver.receive(), await receiver.receive()
            first.acknowledge()
            await world.until(lambda: sender.statistics().acknowledged_messages == 1)
            assert not drained.is_set()
            second.acknowledge()
            await drained.wait()


async def test_statistics_add_up(world: World) -> None:
    with anyio.fail_after(30):
        async with world.pair(TEN) as (sender, receiver):
            await put(sender, range(6), 3)
            await world.until(lambda: receiver.qsize() == 6)
            await take(receiver, 2)
            delivery = await receiver.receive()
            there = receiver.statistics()
            assert (there.got_messages, there.got_steps) == (3, 9)
            assert (there.queued_messages, there.queued_steps) == (3, 9)
            assert (there.held_messages, there.held_steps) == (4, 12)
            assert (there.senders, there.discarded) == (1, 0)
            assert (there.fullest_messages, there.fullest_steps) == (6, 18)
            await world.until(lambda: sender.statistics().acknowledged_messages == 2)
            here = sender.statistics()
            assert here.put_messages == here.acknowledged_messages + here.unacknowledged_messages == 6
            assert here.put_steps == here.acknowledged_steps + here.unacknowledged_steps == 18
            assert (here.share_messages, here.share_steps, here.receivers) == (10, 100, 1)
            assert (here.dropped_messages, here.dropped_steps) == (0, 0)
            assert (here.put_bytes > 0) == (world.kind in ("ipc", "tcp"))
            delivery.acknowledge()
