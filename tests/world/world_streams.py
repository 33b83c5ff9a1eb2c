"""Sockets of simulators: byte streams that are delayed, split, damaged or broken, but never lose or reorder bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import anyio
import trio
from anyio.abc import ByteStream, TaskGroup

from tests.world.world_links import CALM, Lane, Network

_RESET = b"\0reset"


class Stream(ByteStream):
    """One end of a connection."""

    def __init__(self, network: Network, here: str, there: str) -> None:
        self._network = network
        self._lane = Lane(here, there)
        self.other: Stream
        self._chunks: list[bytes] = []
        self._arrived = anyio.Event()
        self._ended = self._broken = self._closed = self._begun = False

    async def send(self, item: bytes) -> None:
        await anyio.lowlevel.checkpoint()
        if self._closed:
            raise anyio.ClosedResourceError
        if self._broken:
            raise anyio.BrokenResourceError
        self._post(bytes(item))

    def _post(self, data: bytes) -> None:
        network, lane = self._network, self._lane
        conditions = network.between(lane.source, lane.target)
        delay = 0.0002
        if conditions is not CALM:
            delay += network.chance.random() * conditions.delay_s
            if len(data) > 1 and network.chance.random() < conditions.repeated:  # in pieces
                at = network.chance.randrange(1, len(data))
                self._fly(data[:at], delay)
                data, delay = data[at:], delay + network.chance.random() * conditions.delay_s
            if data and network.chance.random() < conditions.damaged:
                at = network.chance.randrange(min(len(data), 200))
                # Bytes that no message contains: a Hello must not become one with another valid spec.
                noise = network.chance.randbytes(4) if self._begun else b"\xc1" * 4
                data = data[:at] + noise + data[at + 4 :]
                network.watcher.event("damaged", lane.source, lane.target)
        self._begun = True
        self._fly(data, delay)

    def _fly(self, data: bytes, delay: float) -> None:
        self._network.fly(self._lane, self.other.arrive, [data], delay)

    def arrive(self, frames: Any) -> None:
        """Adds bytes that arrived, or the end of the stream."""
        (data,) = frames
        self._network.watcher.event("bytes", self._lane.target, self._lane.source, len(data))
        self._ended |= not data
        self._broken |= data is _RESET
        if data and data is not _RESET:
            self._chunks.append(data)
        self._arrived.set()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        await anyio.lowlevel.checkpoint()
        while not self._chunks:
            if self._closed:
                raise anyio.ClosedResourceError
            if self._broken:
                raise anyio.BrokenResourceError
            if self._ended:
                raise anyio.EndOfStream
            self._arrived = anyio.Event()
            await self._arrived.wait()
        chunk = self._chunks.pop(0)
        if len(chunk) > max_bytes:
            self._chunks.insert(0, chunk[max_bytes:])
            chunk = chunk[:max_bytes]
        return chunk

    async def send_eof(self) -> None:
        self._fly(b"", 0.0002)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._arrived.set()
            self._fly(b"", 0.0002)
        await anyio.lowlevel.checkpoint()

    def reset(self) -> None:
        """Breaks the connection at both ends."""
        self._fly(_RESET, 0.0)
        self.other._fly(_RESET, 0.0)


def connection(network: Network, first: str, second: str) -> tuple[Stream, Stream]:
    """Returns both ends of a new connection."""
    here, there = Stream(network, first, second), Stream(network, second, first)
    here.other, there.other = there, here
    return here, there


class Listeners:
    """The listeners for simulators by address."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._open: dict[str, tuple[str, Listener]] = {}
        self.links: dict[str, Stream] = {}

    def listen(self, part: str) -> Callable[[str], Any]:
        """Returns the function with which the context of a part listens."""

        async def listen(address: str) -> Listener:
            await trio.lowlevel.checkpoint()
            listener = Listener(lambda: self._open.pop(address, None))
            self._open[address] = part, listener
            return listener

        return listen

    def connect(self, part: str, address: str) -> Stream:
        """Returns a new connection of a simulator.

        Raises:
            BrokenResourceError: no part listens, or the network is down.
        """
        found = self._open.get(address)
        if found is None or self._network.between(part, found[0]).down:
            raise anyio.BrokenResourceError
        here, there = connection(self._network, part, found[0])
        found[1].arrive(there)
        self.links[part] = here
        return here


class Listener:
    """Passes connections to the part that listens."""

    def __init__(self, closed: Callable[[], Any]) -> None:
        self._closed = closed
        self._waiting: list[Stream] = []
        self._arrived = anyio.Event()

    def arrive(self, stream: Stream) -> None:
        """Adds a connection of a simulator."""
        self._waiting.append(stream)
        self._arrived.set()

    async def serve(self, handler: Callable[[Any], Any], tasks: TaskGroup) -> None:
        while True:
            await self._arrived.wait()
            self._arrived = anyio.Event()
            while self._waiting:
                tasks.start_soon(handler, self._waiting.pop(0))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed()
        for stream in self._waiting:
            await stream.aclose()
