"""Carries queues and topics within one process, under any event loop and any clock.

The ends and their rules are the same as over ZeroMQ; here the link is a list of calls. Records are
passed by reference: neither side may change one after it was put or published.
"""

import itertools
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import anyio

from sparring.pipeline.errors import QueueError
from sparring.pipeline.queues.ends import End, EndLink
from sparring.pipeline.queues.interface import Transport
from sparring.pipeline.queues.wire import DEFAULT_TIMING, Message, Timing, of_kind

T = TypeVar("T")
K = TypeVar("K")


@dataclass(slots=True)
class Reference(Generic[T]):
    """Holds a record that is passed by reference."""

    record: T
    size: int = 0

    def unpack(self, kind: type[K]) -> K:
        """Returns the record; see `Payload.unpack`."""
        return of_kind(self.record, kind)


class MemoryHub:
    """Shares open ends and messages in transit among the transports of one process.

    A call caused by an arrival is made after the call that sent the message has returned, never inside it.

    Attributes:
        listening: receivers and publishers by name.
        connected: senders and subscriptions by name.
    """

    def __init__(self) -> None:
        self.opened = itertools.count(1)
        self.listening: dict[str, End] = {}
        self.connected: dict[str, list[End]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._running = False

    def post(self, call: Callable[[], None]) -> None:
        """Makes a call as soon as the earlier ones have returned."""
        self._calls.append(call)
        if self._running:
            return
        self._running = True
        try:
            while self._calls:
                self._calls.popleft()()
        finally:
            self._running = False


class MemoryLink:
    """Links one end to those of the same name.

    Args:
        hub: that all ends share.
        end: this end.
        release: removes the end from the hub.
    """

    def __init__(self, hub: MemoryHub, end: End, release: Callable[[], None]) -> None:
        self._hub = hub
        self._end = end
        self.close = release

    def pack(self, record: T) -> Reference[T]:
        """Returns a reference to a record."""
        return Reference(record)

    def send(self, message: Message, route: Hashable) -> None:
        """Delivers a message to the end that is the route, or to the one that listens; loses it if none is open."""
        self._hub.post(lambda: self._deliver(message, route))

    def _deliver(self, message: Message, route: Hashable) -> None:
        target = self._hub.listening.get(self._end.name) if route is None else route
        if isinstance(target, End) and not target.closed:
            target.received(message, self._end)
            target.settle()

    def poll(self) -> None:
        """Does nothing: every message is delivered at once."""


class MemoryTransport(Transport):
    """Opens the ends of one incarnation of a service, in memory.

    Args:
        hub: shared by all transports that exchange messages; a new one by default.
        start: this incarnation of the service, such as "stepping-0.1".
        timing: intervals.
        clock: seconds, rising.
    """

    def __init__(
        self,
        hub: MemoryHub | None = None,
        *,
        start: str = "memory.1",
        timing: Timing = DEFAULT_TIMING,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        self.hub = MemoryHub() if hub is None else hub
        super().__init__(start, timing, clock, lambda: next(self.hub.opened))

    def _connect(self, end: End) -> MemoryLink:
        peers = self.hub.connected.setdefault(end.name, [])
        peers.append(end)
        return MemoryLink(self.hub, end, lambda: peers.remove(end))

    async def _listen(self, end: End) -> MemoryLink:
        name, listening = end.name, self.hub.listening
        if name in listening:
            raise QueueError(f"got a second end that listens to {name!r}; expected one; close the first, or rename it")
        listening[name] = end

        def release() -> None:
            del listening[name]

        return MemoryLink(self.hub, end, release)

    def _open(self, end: End, link: EndLink) -> None:
        super()._open(end, link)
        if self.hub.listening.get(end.name) is end:
            for peer in [*self.hub.connected.get(end.name, ())]:
                peer.linked()
