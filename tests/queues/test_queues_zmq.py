"""Rules of the ZeroMQ transport: addresses, malformed frames, native cancellation, failures in callbacks."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import numpy as np
import pytest
import structlog.testing
import zmq

from sparring.pipeline.errors import CodecError, QueueError
from sparring.pipeline.messages import codec
from sparring.pipeline.messages.channels import Queue
from sparring.pipeline.messages.simulator import BehaviorActions, Ping
from sparring.pipeline.queues import wire
from sparring.pipeline.queues.ends import End
from sparring.pipeline.queues.interface import Capacity, Publisher, Receiver, Sender, Subscription
from sparring.pipeline.queues.wire import (
    Data,
    Grant,
    Message,
    Packed,
    SenderHello,
    SubscriberStatus,
    TopicUpdate,
)
from sparring.pipeline.queues.zmq import ZmqTransport, new_secret
from tests.queues.queues_worlds import QUEUE, REAL, free_ports, short_folder, topic

TEN = Capacity(messages=10, steps=100)
KEY = new_secret()


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as name:
        yield Path(name)


def transport(endpoint: str, incarnation: str, **options: object) -> ZmqTransport:
    return ZmqTransport(
        {QUEUE.name: endpoint, "topic:b": endpoint + "b"},
        incarnation,
        timing=REAL,
        reconnect=0.01,
        secret=KEY,
        **options,
    )  # type: ignore[arg-type]


# ---------------------------------------------------------------- addresses


@pytest.mark.asyncio
async def test_a_name_without_endpoint_is_refused_by_name(folder: Path) -> None:
    async with transport(f"ipc://{folder}/q", "a.1") as ours:
        with pytest.raises(QueueError, match=r"got 'nowhere'; expected one of \['steps', 'topic:b'\]"):
            await ours.sender(Queue("nowhere", Ping))
        with pytest.raises(QueueError, match="topic:unknown"):
            await ours.subscribe("unknown")


@pytest.mark.asyncio
async def test_an_ipc_path_in_use_is_refused_and_its_owner_keeps_it(folder: Path) -> None:
    endpoint = f"ipc://{folder}/q"
    with anyio.fail_after(20):
        async with transport(endpoint, "a.1") as first, transport(endpoint, "b.1", bind=0.0) as second:
            receiver = await first.receiver(QUEUE, TEN)
            with pytest.raises(QueueError, match=f"got endpoint {endpoint}, where another process listens"):
                await second.receiver(QUEUE, TEN)
            sender = await second.sender(QUEUE)
            await sender.put(Ping(number=1), 1)
            assert (await receiver.get()).number == 1


@pytest.mark.asyncio
async def test_a_tcp_port_in_use_is_refused() -> None:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        endpoint = f"tcp://127.0.0.1:{owner.getsockname()[1]}"
        async with transport(endpoint, "a.1", bind=0.0) as ours:
            with pytest.raises(QueueError, match=f"got endpoint {endpoint}, where another process listens"):
                await ours.receiver(QUEUE, TEN)


@pytest.mark.asyncio
async def test_the_file_of_a_dead_receiver_is_replaced(folder: Path) -> None:
    path = folder / "q"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.is_socket()
    with anyio.fail_after(20):
        async with transport(f"ipc://{path}", "a.1", bind=0.0) as ours:
            receiver = await ours.receiver(QUEUE, TEN)
            await (await ours.sender(QUEUE)).put(Ping(number=1), 1)
            assert (await receiver.get()).number == 1
    assert not path.exists()


@pytest.mark.asyncio
async def test_a_file_of_another_kind_is_left_alone(folder: Path) -> None:
    path = folder / "q"
    path.write_text("precious")
    async with transport(f"ipc://{path}", "a.1", bind=0.0) as ours:
        with pytest.raises(QueueError):
            await ours.receiver(QUEUE, TEN)
    assert path.read_text() == "precious"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("endpoint", "problem"),
    [
        ("ipc:///tmp/" + "x" * 120, "expected a path of at most 107"),
        ("ipc:///no/such/folder/q", "correct the endpoint"),
        ("tcp://localhost:x", "correct the endpoint"),
    ],
)
async def test_an_invalid_address_to_listen_on_is_refused(endpoint: str, problem: str) -> None:
    async with transport(endpoint, "a.1", bind=0.0) as ours:
        with pytest.raises(QueueError, match=problem):
            await ours.receiver(QUEUE, TEN)


@pytest.mark.asyncio
async def test_an_invalid_address_to_connect_to_is_refused() -> None:
    async with transport("nonsense", "a.1") as ours:
        with pytest.raises(QueueError, match="got endpoint nonsense"):
            await ours.sender(QUEUE)


@pytest.mark.asyncio
async def test_a_refused_capacity_leaves_the_address_free(folder: Path) -> None:
    async with transport(f"ipc://{folder}/q", "a.1", bind=0.0) as ours:
        with pytest.raises(QueueError, match="at least one sender"):
            await ours.receiver(QUEUE, Capacity(messages=1, steps=1, senders=2))
        await ours.receiver(QUEUE, TEN)


@pytest.mark.parametrize("incarnation", ["", "a#1"])
def test_an_invalid_incarnation_is_refused(incarnation: str) -> None:
    with pytest.raises(QueueError, match="service incarnation"):
        transport("ipc:///tmp/q", incarnation)


# ---------------------------------------------------------------- malformed frames


@pytest.mark.asyncio
async def test_malformed_frames_are_counted_and_change_nothing(folder: Path) -> None:
    """They have one line in the log: a peer that sends many fills no disk."""
    endpoint = f"ipc://{folder}/q"
    rng = random.Random(0)
    with anyio.fail_after(20), structlog.testing.capture_logs() as lines:
        async with transport(endpoint, "a.1") as ours:
            receiver = await ours.receiver(QUEUE, TEN)
            with zmq.Context() as context, context.socket(zmq.DEALER) as socket_:
                socket_.setsockopt(zmq.LINGER, 0)
                socket_.connect(endpoint)
                for size in range(40):
                    socket_.send_multipart([rng.randbytes(size), b"x"][: 1 + size % 2])
                socket_.send(codec.encode(Ping())[0])
                sender = await ours.sender(QUEUE)
                await sender.put(Ping(number=1), 1)
                assert (await receiver.get()).number == 1
                while (
                    receiver.statistics().discarded + receiver.statistics().refused < 41
                ):  # `D` and 17 bytes may be a header
                    await anyio.lowlevel.checkpoint()
        assert receiver.statistics().senders == 1
    assert len([line for line in lines if line["event"] == "discarded"]) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["ipc", "tcp"])
async def test_a_new_publisher_reaches_its_subscribers_before_the_next_heartbeat(folder: Path, kind: str) -> None:
    endpoint = f"ipc://{folder}/q" if kind == "ipc" else f"tcp://127.0.0.1:{free_ports(1)[0]}"
    rare = REAL._replace(heartbeat=600.0, retry=600.0, peer_timeout=6000.0)

    def opened(incarnation: str) -> ZmqTransport:
        return ZmqTransport({"topic:b": endpoint}, incarnation, timing=rare, reconnect=0.01, secret=KEY)

    with anyio.fail_after(30):
        async with opened("reader.1") as theirs:
            subscription = await theirs.subscribe("b")
            for number in range(1, 4):
                async with opened(f"b.{number}") as ours:
                    (await ours.publisher("b")).publish(topic("a"), Ping(number=number))
                    await subscription.changed()
                    assert subscription.publisher == f"b.{number}"
                    ours.abandon()


@pytest.mark.asyncio
async def test_an_undecodable_record_is_sent_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt is counted, and later records wait until it can be decoded."""
    copies = 0
    whole = Packed.unpack

    def damaged(payload: Packed, kind: type[Ping]) -> Ping:
        nonlocal copies
        record = whole(payload, kind)
        copies += record.number == 2
        if record.number == 2 and copies <= 4:
            raise CodecError(got="half of it", expected="all of it", remedy="send it again")
        return record

    monkeypatch.setattr(Packed, "unpack", damaged)
    with anyio.fail_after(20):
        async with transport(f"ipc://{folder}/q", "a.1") as ours:
            receiver, sender = await ours.receiver(QUEUE, TEN), await ours.sender(QUEUE)
            for number in (1, 2, 3):
                await sender.put(Ping(number=number), 1)
            assert [(await receiver.get()).number for _ in range(3)] == [1, 2, 3]
            await sender.drain()
            assert receiver.statistics().discarded == 4


@pytest.mark.asyncio
async def test_a_record_beyond_the_limits_is_discarded_before_it_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = BehaviorActions(
        behavior="x",
        agents=np.arange(5),
        continuous=np.zeros((5, 800), np.float32),
        discrete=np.zeros((5, 0), np.int32),
    )
    with anyio.fail_after(20):
        async with transport(f"ipc://{folder}/q", "a.1") as ours:
            monkeypatch.setattr("sparring.pipeline.queues.zmq._MAX_BYTES", 10_000)
            receiver = await ours.receiver(QUEUE, TEN)
            async with transport(f"ipc://{folder}/q", "b.1") as theirs:
                sender = await theirs.sender(QUEUE)
                await sender.put(Ping(number=1), 1)
                assert (await receiver.get()).number == 1
                sender.put_nowait(big, 1)
                while not sender.statistics().resent_messages:  # the limit on frames has broken the connection
                    await anyio.lowlevel.checkpoint()
                assert receiver.empty()


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"D123"],
        codec.encode(Ping()),
        [*codec.encode(SenderHello(sender="a", serial=1, oldest=2)), b"x"],
    ],
)
def test_frames_that_are_no_message_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(CodecError):
        wire.decode(frames)


ENDS: dict[str, Callable[[], End]] = {
    "sender": lambda: Sender("q", "a.1#1~0", REAL, time.monotonic),
    "receiver": lambda: Receiver("q", "a.1#1~0", Ping, TEN, REAL, time.monotonic),
    "publisher": lambda: Publisher("topic:q", "a.1#1~0", REAL, time.monotonic),
    "subscription": lambda: Subscription("topic:q", "a.1#1~0", REAL, time.monotonic),
}
MESSAGES: dict[str, Message] = {
    "receiver": SenderHello(sender="x", serial=1, oldest=0, leaving=True),
    "sender": Grant(receiver="r", echo=1, messages=2, steps=3, largest=4, received=6, acknowledged=7),
    "publisher": SubscriberStatus(serial=1, publisher="p", revision=2, answer=True),
    "subscription": TopicUpdate(publisher="p", echo=1),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("target", MESSAGES)
def test_a_message_of_another_end_is_refused(end: str, target: str) -> None:
    if end == target:
        ENDS[end]().received(MESSAGES[target], b"route")
    else:
        with pytest.raises(CodecError, match="expected one for this end"):
            ENDS[end]().received(MESSAGES[target], b"route")


def test_an_update_without_its_record_is_refused() -> None:
    sent = wire.encode(TopicUpdate(publisher="p.1#1~0", echo=1, revision=1, key="k", payload=wire.pack(Ping())))
    with pytest.raises(CodecError):
        ENDS["subscription"]().received(wire.decode(sent[:1]), b"")


@pytest.mark.parametrize("columns", [1, 100_000])
def test_data_survives_its_frames(columns: int) -> None:
    """Small records travel in one frame, large ones with their arrays as frames of their own."""
    record = BehaviorActions(
        behavior="Ball",
        agents=np.arange(2),
        continuous=np.ones((2, columns), np.float32),
        discrete=np.zeros((2, 0), np.int32),
    )
    sent = wire.encode(Data(sender="a.1#1~0", sequence=7, steps=3, payload=wire.pack(record)))
    assert len(sent) == (2 if columns == 1 else 5)
    data = wire.decode(sent)
    assert isinstance(data, Data)
    assert (data.sender, data.sequence, data.steps) == ("a.1#1~0", 7, 3)
    got = data.payload.unpack(BehaviorActions)
    np.testing.assert_array_equal(got.continuous, record.continuous)
    assert all(array.flags.aligned for array in (got.agents, got.continuous))


def test_control_messages_survive_their_frames() -> None:
    hello = wire.decode(wire.encode(SenderHello(sender="a", serial=1, oldest=2, receiver="r")))
    assert isinstance(hello, SenderHello)
    assert (hello.sender, hello.serial, hello.oldest, hello.receiver, hello.leaving) == ("a", 1, 2, "r", False)
    status = wire.decode(wire.encode(SubscriberStatus(serial=1, publisher="p", revision=2, answer=True)))
    assert (status.serial, status.publisher, status.revision, status.answer, status.leaving) == (1, "p", 2, True, False)
    grant = Grant(receiver="r", echo=1, messages=2, steps=3, largest=4, received=6, acknowledged=7)
    back = wire.decode(wire.encode(grant))
    assert (back.messages, back.steps, back.ask, back.superseded) == (2, 3, False, False)


# ---------------------------------------------------------------- tasks and callbacks


@pytest.mark.asyncio
async def test_native_cancellation_of_a_pending_get_loses_nothing(folder: Path) -> None:
    """Every message is received once, wherever a native cancellation interrupts `get`."""
    got: list[int] = []
    rng = random.Random(1)

    with anyio.fail_after(30):
        async with transport(f"ipc://{folder}/q", "a.1") as ours, anyio.create_task_group() as tasks:
            receiver, sender = await ours.receiver(QUEUE, TEN), await ours.sender(QUEUE)

            async def produce() -> None:
                for number in range(300):
                    await sender.put(Ping(number=number), 1)

            async def consume() -> None:
                while True:
                    got.append((await receiver.get()).number)

            tasks.start_soon(produce)
            while len(got) < 300:
                consumer = asyncio.create_task(consume())
                for _ in range(rng.randrange(12)):
                    await asyncio.sleep(0)
                consumer.cancel()
                await asyncio.wait([consumer])
    assert got == [*range(300)]


@pytest.mark.asyncio
async def test_an_exception_of_a_callback_leaves_the_transport(folder: Path) -> None:
    """No failure is only logged by the event loop."""

    def fail(messages: int, steps: int) -> None:
        raise ZeroDivisionError(messages, steps)

    async def run() -> None:
        async with transport(f"ipc://{folder}/q", "a.1") as ours:
            receiver, sender = await ours.receiver(QUEUE, TEN), await ours.sender(QUEUE)
            sender.on_acknowledged(fail)
            await sender.put(Ping(), 1)
            await receiver.get()
            await anyio.Event().wait()

    with anyio.fail_after(20), pytest.raises(ZeroDivisionError):
        await run()


@pytest.mark.asyncio
async def test_leaving_a_transport_closes_its_ends_and_frees_its_addresses() -> None:
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    with anyio.fail_after(20):
        for number in range(1, 4):
            async with transport(endpoint, f"a.{number}") as ours:
                receiver, sender = await ours.receiver(QUEUE, TEN), await ours.sender(QUEUE)
                await sender.put(Ping(number=number), 1)
                assert (await receiver.get()).number == number
            assert receiver.closed
            assert sender.closed
