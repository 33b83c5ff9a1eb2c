"""The receiver's end of a queue adds waiting to `ReceiverState`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

import anyio
import anyio.lowlevel
import structlog

from sparring.pipeline.errors import CodecError, QueueClosed
from sparring.pipeline.queues.ends import End
from sparring.pipeline.queues.receiving import ReceivedMessage, ReceiverState, ReceiverStatistics
from sparring.pipeline.queues.rejections import RejectionLog
from sparring.pipeline.queues.wire import Capacity, Data, Message, SenderHello, Timing, misdirected

T = TypeVar("T")
log = structlog.get_logger(__name__)


class Delivery(NamedTuple, Generic[T]):
    """Holds a record that was handed out, and counts against the capacity until it is acknowledged.

    Attributes:
        record: the record.
        steps: agent-steps in it.
        sender: incarnation of the service that sent it.
        acknowledge: lets the sender forget the record and returns the credit; a second call does nothing. Deliveries
            of one sender are acknowledged in order: an early call takes effect after those before it.
    """

    record: T
    steps: int
    sender: str
    acknowledge: Callable[[], None]


class Receiver(End, Generic[T]):
    """Receives the records of all senders of a queue.

    Once another end replaces this one, senders drop what it has not acknowledged.

    Args:
        name: name of the queue.
        end_id: id of this end.
        record: type of the records; another one is discarded as if it could not be decoded.
        capacity: never exceeded.
        timing: intervals.
        clock: gives rising seconds.

    Raises:
        QueueError: a sender's share would hold no message or no step.
    """

    def __init__(
        self, name: str, end_id: str, record: type[T], capacity: Capacity, timing: Timing, clock: Callable[[], float]
    ) -> None:
        super().__init__(name, end_id, clock)
        self._rejections = RejectionLog(log, clock)
        self._state = ReceiverState(end_id, record, capacity, timing, self._on_discard)

    @property
    def maxlen(self) -> int:
        """Returns the capacity in messages."""
        return self._state.capacity.messages

    def qsize(self) -> int:
        """Returns the number of messages that `get_nowait` could return now."""
        return self._state.counts.queued_messages

    def empty(self) -> bool:
        """Returns whether `qsize` is 0."""
        return not self.qsize()

    def statistics(self) -> ReceiverStatistics:
        """Returns the counters."""
        return replace(self._state.counts, senders=self._state.senders)

    # ------------------------------------------------------------ getting

    async def get(self) -> T:
        """Waits for the next record, acknowledges it and returns it.

        Raises:
            QueueClosed: this end is closed.

        Cancelled: no record was taken.
        """
        await self._arrival()
        return self.get_nowait()

    async def receive(self) -> Delivery[T]:
        """Waits for the next record, which the caller acknowledges; raises and cancels as `get` does."""
        await self._arrival()
        return self.receive_nowait()

    def get_nowait(self) -> T:
        """Returns the next record as `get` does, but raises `Empty` instead of waiting."""
        delivery = self.receive_nowait()
        delivery.acknowledge()
        return delivery.record

    def receive_nowait(self) -> Delivery[T]:
        """Returns the next record as `receive` does, but raises `Empty` instead of waiting."""
        if self.closed:
            raise QueueClosed(f"got a get from {self.id}, which is closed; expected an open end; open a new one")
        entry = self._state.take()
        return Delivery(entry.record, entry.steps, entry.peer.end_id.incarnation, lambda: self._acknowledge(entry))

    async def _arrival(self) -> None:
        """Waits until a message is queued, or the end is closed."""
        await anyio.lowlevel.checkpoint()
        if not self._is_ready():
            with self._waiting(self._state.counts):
                await self._until(self._is_ready)

    def _is_ready(self) -> bool:
        return self.closed or not self.empty()

    def _acknowledge(self, entry: ReceivedMessage[T]) -> None:
        """Acknowledges a message, unless it already is or the end is closed."""
        if self.closed or entry.acknowledged:
            return
        self._state.acknowledge(self._clock(), entry)
        self.settle()

    # ------------------------------------------------------------ called by the transport

    @property
    def deadline(self) -> float:
        """Returns the time at which `_tick` must be called."""
        return self._state.deadline

    def received(self, message: Message, route: Hashable) -> None:
        """Handles a message of a sender."""
        if isinstance(message, Data):
            self._state.on_data(self._clock(), message, route)
        elif isinstance(message, SenderHello):
            self._state.on_hello(self._clock(), message, route)
        else:
            raise misdirected(message)

    def settle(self) -> None:
        """Sends due Grants after arrivals, and wakes the callers that wait for a record."""
        if not self.empty():
            self._changed.set()
        super().settle()

    def malformed(self) -> None:
        """Counts an arrival that was not a message of a sender."""
        self._state.counts.discarded += 1

    def _on_discard(self, sender: str, error: CodecError) -> None:
        self._rejections.log_event("discarded", "any peer", queue=self.name, sender=sender, error=str(error))

    def _tick(self) -> None:
        self._link.poll()
        self._state.tick(self._clock())
        self.settle()

    def outgoing(self, now: float) -> Sequence[tuple[Hashable, Message]]:
        """Returns the messages to send now, each with its route."""
        return self._state.outgoing(now)

    def last_messages(self) -> Sequence[tuple[Hashable, Message]]:
        """Returns what is sent before the end closes in order."""
        return self._state.outgoing(float("inf"))
