"""The real ends of queues and topics over the faulty network, with the frames of ZeroMQ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import trio

from sparring.pipeline.errors import CodecError, QueueError
from sparring.pipeline.messages.codec import Buffer
from sparring.pipeline.queues.ends import End, EndLink
from sparring.pipeline.queues.interface import Transport
from sparring.pipeline.queues.wire import DEFAULT_TIMING, Message, Packed, decode, encode, pack
from tests.world.world_links import Lane, Network


class WorldLink:
    """Links an end to those of the same name over the network, as the sockets of the real transport do."""

    def __init__(self, transport: WorldTransport, end: End, release: Callable[[], None]) -> None:
        self.transport = transport
        self.end = end
        self.close = release
        self._lanes: dict[str, Lane] = {}

    def pack(self, record: Any) -> Packed:
        return pack(record)

    def poll(self) -> None:
        """Does nothing: the network delivers every message."""

    def send(self, message: Message, route: Any) -> None:
        """Sends a message to the end of a route, or to the one that listens."""
        self._post(encode(message), route)

    def _post(self, frames: list[Buffer], route: WorldLink | None) -> None:
        network = self.transport.network
        there = route or network.listening.get(self.end.name)
        if there is None:
            network.later(self.end.name, self._again, frames)
            return
        source, target = self.transport.part, there.transport.part
        lane = self._lanes.setdefault(target, Lane(source, target))
        network.post(lane, lambda frames: there.take(frames, self), frames)

    def _again(self, frames: list[Buffer]) -> None:
        if not self.end.closed:  # otherwise its socket is closed and its content lost
            self._post(frames, None)

    def reconnected(self, _frames: Sequence[Buffer]) -> None:
        """Lets the end introduce itself to the one that listens now; any failure ends the part."""
        if self.end.closed:
            return
        try:
            self.end.linked()
        except Exception as error:
            self.transport._fail(error)

    def take(self, frames: Sequence[Buffer], source: WorldLink) -> None:
        """Passes frames to the end and discards malformed ones; any failure but a CodecError ends the part."""
        if self.end.closed:
            return
        try:
            try:
                self.end.received(decode(frames), source)
            except CodecError as error:
                self.transport.network.watcher.event("malformed", self.end.name, type(error).__name__)
                self.end.malformed()
            self.end.settle()
        except Exception as error:
            self.transport._fail(error)


class WorldTransport(Transport):
    """Opens the ends of one incarnation of a part.

    Args:
        network: network of the world.
        part: name of the part.
        start: incarnation of the part.
        opened: returns the numbers of ends, which come from the wall clock in the real transport.
        created: called with each new end.
    """

    def __init__(
        self, network: Network, part: str, start: str, opened: Callable[[], int], created: Callable[[str, Any], None]
    ) -> None:
        super().__init__(start, DEFAULT_TIMING, trio.current_time, opened)
        self.network = network
        self.part = part
        self._created = created

    def _connect(self, end: End) -> WorldLink:
        """Returns a link to the end that listens."""
        connected = self.network.connected.setdefault(end.name, [])
        connected.append(end)
        self._created(end.name, end)
        return WorldLink(self, end, lambda: connected.remove(end))

    async def _listen(self, end: End) -> WorldLink:
        """Returns a link to all that connect, once the address is free; waits as long as the real transport does."""
        taken, name = self.network.listening, end.name
        with anyio.move_on_after(1.0):
            while name in taken:  # noqa: ASYNC110 (another process would not report it)
                await anyio.sleep(0.02)
        if name in taken:
            raise QueueError(
                f"got {name!r}, where another end listens; expected a free address; try to stop that process"
            )

        def release() -> None:
            del taken[name]

        taken[name] = link = WorldLink(self, end, release)
        self._created(name, end)
        return link

    def _open(self, end: End, link: EndLink) -> None:
        super()._open(end, link)
        if self.network.listening.get(end.name) is link:
            self.network.opened(end.name)
