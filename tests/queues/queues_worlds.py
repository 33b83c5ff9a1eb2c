"""Implementations for the conformance suite: memory, ZeroMQ, and a link that loses, delays, repeats and reorders."""

from __future__ import annotations

import itertools
import random
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from sparring.pipeline.messages.channels import Queue, Topic
from sparring.pipeline.messages.simulator import Ping
from sparring.pipeline.queues.ends import End
from sparring.pipeline.queues.interface import Capacity, Receiver, Sender, Transport
from sparring.pipeline.queues.memory import MemoryHub, MemoryLink, MemoryTransport
from sparring.pipeline.queues.wire import Message, Timing
from sparring.pipeline.queues.zmq import ZmqTransport, new_secret

QUEUE = Queue("steps", Ping)
TEN = Capacity(messages=10, steps=100)
PUBLISHER = "stepping-0"


def topic(key: str) -> Topic[Ping]:
    """Returns a topic of the publisher."""
    return Topic(key, Ping)


VIRTUAL = Timing()
REAL = Timing(heartbeat=0.05, retry=0.03, peer_timeout=5.0, acknowledge=0.002)


class LossyHub:
    """A link with random faults from one seed."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.opened = itertools.count(1)
        self.receivers: dict[str, End] = {}

    async def carry(self, deliver: Callable[[], None]) -> None:
        """Delivers after a delay, or never, or twice."""
        for _ in range(self.rng.choice((0, 1, 1, 1, 1, 1, 1, 2))):
            await anyio.sleep(self.rng.uniform(0.0, 0.05))
            deliver()


class LossyLink(MemoryLink):
    """Loses, repeats and delays messages."""

    def __init__(self, hub: LossyHub, end: End, flights: TaskGroup, release: Callable[[], None]) -> None:
        self._lossy, self._end, self._flights, self.close = hub, end, flights, release

    def send(self, message: Message, route: Any) -> None:
        # A link joins two processes: messages under way when one of them dies reach no other. Messages
        # without a receiver wait for the next one.
        target = route or self._lossy.receivers.get(self._end.name)
        self._flights.start_soon(self._lossy.carry, lambda: self._arrive(message, target))

    def _arrive(self, message: Message, target: End | None) -> None:
        end = target or self._lossy.receivers.get(self._end.name)
        if end is not None and not end.closed:
            end.received(message, self._end)
            end.settle()


class LossyTransport(Transport):
    """Queues over a lossy link."""

    def __init__(self, hub: LossyHub, incarnation: str, timing: Timing) -> None:
        super().__init__(incarnation, timing, anyio.current_time, lambda: next(hub.opened))
        self._hub = hub

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._flights = anyio.create_task_group()
        await self._flights.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        self._close()
        self._flights.cancel_scope.cancel()
        await self._flights.__aexit__(None, None, None)
        return await super().__aexit__(exc_type, exc, traceback)

    def _connect(self, end: End) -> LossyLink:
        return LossyLink(self._hub, end, self._flights, lambda: None)

    async def _listen(self, end: End) -> LossyLink:
        self._hub.receivers[end.name] = end

        def release() -> None:
            del self._hub.receivers[end.name]

        return LossyLink(self._hub, end, self._flights, release)


class World:
    """One implementation to run on.

    Attributes:
        kind: "memory", "ipc", "tcp" (with keys) or "lossy".
        virtual: time is virtual.
        timing: intervals of its transports.
    """

    def __init__(self, kind: str, *, virtual: bool, folder: Path) -> None:
        self.kind = kind
        self.virtual = virtual
        self.timing = VIRTUAL if virtual else REAL
        self._hub = MemoryHub()
        self._lossy = LossyHub()
        self._endpoints = {
            name: f"ipc://{folder}/{index}" for index, name in enumerate((QUEUE.name, f"topic:{PUBLISHER}"))
        }
        self._secret = new_secret() if kind == "tcp" else None
        if kind == "tcp":
            self._endpoints = {
                name: f"tcp://127.0.0.1:{port}" for name, port in zip(self._endpoints, free_ports(2), strict=True)
            }

    def transport(self, incarnation: str, **timing: float) -> Any:
        """Returns a transport of one service incarnation, with some intervals changed."""
        intervals = self.timing._replace(**timing)
        if self.kind == "memory":
            return MemoryTransport(self._hub, start=incarnation, timing=intervals)
        if self.kind == "lossy":
            return LossyTransport(self._lossy, incarnation, intervals)
        return ZmqTransport(
            self._endpoints, incarnation, timing=intervals, reconnect=0.01, bind=0.3, secret=self._secret
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        """Lets other tasks run until `condition` holds; virtual time is moved by sleeping."""
        while not condition():
            if self.virtual:
                await anyio.sleep(0.001)
            else:
                await anyio.lowlevel.checkpoint()

    @asynccontextmanager
    async def pair(
        self, capacity: Capacity, queue: Queue[Any] = QUEUE
    ) -> AsyncIterator[tuple[Sender[Any], Receiver[Any]]]:
        """Opens a sender that has its share, and its receiver."""
        async with self.transport("sender.1") as ours, self.transport("receiver.1") as theirs:
            sender = await ours.sender(queue)
            receiver = await theirs.receiver(queue, capacity)
            await self.until(lambda: sender.maxlen > 0)
            yield sender, receiver


def free_ports(number: int) -> list[int]:
    """Returns free ports."""
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def short_folder() -> tempfile.TemporaryDirectory[str]:
    """Returns a folder whose path is short enough for a Unix socket."""
    return tempfile.TemporaryDirectory(prefix="q-", dir="/tmp")


async def put(queue: Sender[Ping], numbers: range, steps: int = 1) -> None:
    for number in numbers:
        await queue.put(Ping(number=number), steps)


async def take(queue: Receiver[Ping], count: int) -> list[int]:
    return [(await queue.get()).number for _ in range(count)]
