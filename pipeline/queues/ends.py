"""An end of a queue or topic adds waiting to rules without I/O, for memory and ZeroMQ alike.

A transport gives an end its link, passes it the messages that arrive, and runs its timer. All logic is in functions
that never wait; the coroutines only wait until these can act, and no await follows the point at which a message
changes hands: a cancellation can neither lose nor repeat one.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import anyio
import anyio.lowlevel

from sparring.pipeline.queues.wire import Message, Payload

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


@dataclass(eq=False)
class Timer:
    """Calls `fire` whenever the time `due` has come; that time can be advanced meanwhile.

    Attributes:
        clock: gives rising seconds: those of the event loop, but also outside any task.
        due: gives the next time to fire; called again after each firing.
        fire: is called when due, and must move `due` on.
    """

    clock: Callable[[], float]
    due: Callable[[], float]
    fire: Callable[[], None]
    _scope: anyio.CancelScope | None = None
    _stopped: bool = False

    async def run(self) -> None:
        """Runs the timer until it is stopped."""
        while not self._stopped:
            with anyio.CancelScope(deadline=self.due()) as self._scope:
                await anyio.sleep_forever()
            if not self._stopped and self.due() <= self.clock():
                self.fire()

    def advance(self, due: float) -> None:
        """Fires at `due` if that is earlier than the time that the timer waits for."""
        if self._scope is not None and due < self._scope.deadline:
            self._scope.deadline = due

    def stop(self) -> None:
        """Ends `run`."""
        self._stopped = True
        if self._scope is not None:
            self._scope.cancel()


@dataclass(kw_only=True, slots=True)
class Waits:
    """Counts how often and how long callers of an end waited."""

    waits: int = 0
    waited_s: float = 0.0


class End(ABC):
    """Stands for any end of a queue or topic.

    Args:
        name: name of the queue, or "topic:" and the service.
        end_id: id of this end.
        clock: gives rising seconds.
    """

    def __init__(self, name: str, end_id: str, clock: Callable[[], float]) -> None:
        self.name = name
        self.id = end_id
        self.closed = False
        self.timer = Timer(clock, lambda: self.deadline, self._tick)
        self._clock = clock
        self._link: EndLink
        self._changed = anyio.Event()  # wakes the callers that wait, who look again

    def open(self, link: EndLink) -> None:
        """Begins to use a link."""
        self._link = link
        self.settle()

    @property
    def deadline(self) -> float:
        """Returns the time at which `_tick` must be called."""
        return math.inf

    def _tick(self) -> None:
        self.settle()

    @abstractmethod
    def received(self, message: Message, route: Hashable) -> None:
        """Handles an arrived message; the transport calls `settle` after the last one.

        Raises:
            CodecError: it is not for such an end, or the record in it cannot be read.
        """

    def settle(self) -> None:
        """Sends what is due, after arrivals and other changes."""
        if not self.closed:
            self._send(self.outgoing(self._clock()))
            self.timer.advance(self.deadline)

    @abstractmethod
    def outgoing(self, now: float) -> Sequence[tuple[Hashable, Message]]:
        """Returns the messages to send now, each with its route."""

    def malformed(self) -> None:
        """Handles an arrival that was not a message for this end."""
        self.settle()

    def linked(self) -> None:
        """Handles a new connection of the link to the end that listens."""
        self.settle()

    def _send(self, messages: Sequence[tuple[Hashable, Message]]) -> None:
        """Sends messages along their routes."""
        for route, message in messages:
            self._link.send(message, route)
        if messages:
            self._link.poll()

    def close(self, *, notify_peers: bool = True) -> None:
        """Closes this end at once; without `notify_peers` it sends nothing, as in a crash."""
        if self.closed:
            return
        if notify_peers:
            for route, message in self.last_messages():
                self._link.send(message, route)
        self.closed = True
        self.timer.stop()
        self._link.close()
        self._changed.set()

    @abstractmethod
    def last_messages(self) -> Sequence[tuple[Hashable, Message]]:
        """Returns what is sent before the end closes in order."""

    @contextmanager
    def _waiting(self, counts: Waits) -> Iterator[None]:
        """Counts a wait, and its time."""
        counts.waits += 1
        began = self._clock()
        try:
            yield
        finally:
            counts.waited_s += self._clock() - began

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds, which is true still when this returns."""
        while not condition():
            if self._changed.is_set():
                self._changed = anyio.Event()
            await self._changed.wait()

    async def aclose(self) -> None:
        """Closes this end in order."""
        self.close()
        await anyio.lowlevel.checkpoint()
