"""An end of a queue or topic adds waiting to rules without I/O, for memory and ZeroMQ alike.

A transport gives an end its link, passes it the messages that arrive, and runs its timer. All logic is in functions
that never wait; the coroutines only wait until these can act, and no await follows the point at which a message
changes hands: a cancellation can neither lose nor repeat one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from typing import Protocol, TypeVar

import anyio
import anyio.lowlevel

from sparring.pipeline.queues.timer import Timer
from sparring.pipeline.queues.wire import Message, Payload, Timing

T = TypeVar("T")


class EndLink(Protocol):
    """Connects an end to those on the other side."""

    def pack(self, record: T) -> Payload:
        """Returns a record as the link carries it.

        Raises:
            CodecError: a field's value does not match its annotation.
        """

    def send(self, message: Message, route: Hashable) -> None:
        """Sends a message along a route, or loses it; never waits. The route is None towards the end that listens."""

    def poll(self) -> None:
        """Delivers arrived messages: called before the clock is read, and after sending, which may hide an arrival."""

    def close(self) -> None:
        """Frees what the transport holds for the end."""


class End(ABC):
    """Stands for any end of a queue or topic.

    Args:
        name: name of the queue, or "topic:" and the service.
        end_id: id of this end.
        timing: intervals.
        clock: gives rising seconds.
    """

    def __init__(self, name: str, end_id: str, timing: Timing, clock: Callable[[], float]) -> None:
        self.name = name
        self.id = end_id
        self.closed = False
        self.timer = Timer(clock, lambda: self._deadline, self._tick)
        self._timing = timing
        self._clock = clock
        self._link: EndLink
        self._changed = anyio.Event()  # wakes the callers that wait

    def open(self, link: EndLink) -> None:
        """Begins to use a link."""
        self._link = link
        self.settle()

    @property
    @abstractmethod
    def _deadline(self) -> float:
        """Returns the time at which `_tick` must be called."""

    def _tick(self) -> None:
        self.settle()

    @abstractmethod
    def received(self, message: Message, route: Hashable) -> None:
        """Handles an arrived message; the transport calls `settle` after the last one.

        Raises:
            CodecError: it is not for such an end, or the record in it cannot be read.
        """

    @abstractmethod
    def settle(self) -> None:
        """Sends what is due, after arrivals."""

    def malformed(self) -> None:
        """Handles an arrival that was not a message for this end."""
        self.settle()

    def linked(self) -> None:
        """Handles a new connection of the link to the end that listens."""
        self.settle()

    def _send(self, messages: Iterable[tuple[Hashable, Message]]) -> None:
        """Sends messages along their routes."""
        sent = False
        for route, message in messages:
            self._link.send(message, route)
            sent = True
        if sent:
            self._link.poll()

    def close(self, *, notify_peers: bool = True) -> None:
        """Closes this end at once; without `notify_peers` it sends nothing, as in a crash."""
        if self.closed:
            return
        if notify_peers:
            for route, message in self._last_messages():
                self._link.send(message, route)
        self.closed = True
        self.timer.stop()
        self._link.close()
        self._wake_all()

    @abstractmethod
    def _last_messages(self) -> Iterable[tuple[Hashable, Message]]:
        """Returns what is sent before the end closes in order."""

    def _wake_all(self) -> None:
        """Wakes the callers that wait, after the end was closed."""
        self._changed.set()

    async def aclose(self) -> None:
        """Closes this end in order."""
        self.close()
        await anyio.lowlevel.checkpoint()
