"""The receiver's end of a queue adds waiting to `ReceiverState`, for memory and ZeroMQ alike.

As in `sending_end`, all logic is in functions that never wait, and no await follows the point at which a
message is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import anyio
import anyio.lowlevel

from sparring.pipeline.errors import CodecError, QueueClosed
from sparring.pipeline.queues.credit import ReceivedMessage, ReceiverState
from sparring.pipeline.queues.interface import Capacity, Delivery, ReceiverStatistics
from sparring.pipeline.queues.timer import Timer
from sparring.pipeline.queues.wire import Data, Grant, SenderBye, SenderHello, Timing

T = TypeVar("T")


class _Delivery(Generic[T]):
    """Holds a record that was handed out and can be acknowledged."""

    __slots__ = ("_end", "_entry")

    def __init__(self, end: ReceivingEnd[T], entry: ReceivedMessage) -> None:
        self._end = end
        self._entry = entry

    @property
    def record(self) -> T:
        """Returns the record."""
        record: T = self._entry.record
        return record

    @property
    def steps(self) -> int:
        """Returns the agent-steps in the record."""
        return self._entry.steps

    @property
    def sender(self) -> str:
        """Returns the incarnation of the service that sent it."""
        return self._entry.peer.end_id.incarnation

    def acknowledge(self) -> None:
        """Acknowledges the record, unless the end is closed: then the next receiver gets the record again."""
        self._end.acknowledge(self._entry)


class ReceivingEnd(Generic[T]):
    """Receives the records of a queue; see `Receiver`.

    Args:
        receiver: id of this end.
        capacity: never exceeded.
        timing: intervals.
        clock: gives rising seconds.
        unpack: turns a payload into a record; a CodecError discards the message.
        on_discard: called with the sender's id and that error.
        transmit: sends a Grant along a route, or loses it; never waits.
        poll: delivers arrived messages; called before the clock is read, and after sending, which may have hidden
            an arrival.
        release: frees the transport's resources for this end; called once, when it closes.

    Raises:
        QueueError: a sender's share would hold no message or no step.
    """

    def __init__(
        self,
        receiver: str,
        capacity: Capacity,
        timing: Timing,
        clock: Callable[[], float],
        unpack: Callable[[Any], T],
        on_discard: Callable[[str, CodecError], None],
        transmit: Callable[[Any, Grant], None],
        poll: Callable[[], None],
        release: Callable[[], None],
    ) -> None:
        self._state = ReceiverState(receiver, capacity, timing, unpack, on_discard)
        self._timing = timing
        self._clock = clock
        self._transmit = transmit
        self._poll = poll
        self._release = release
        self._closed = False
        self._arrived = anyio.Event()
        self._getters = 0
        self._waits = 0
        self._waited_s = 0.0
        self.timer = Timer(clock, lambda: self._state.deadline, self._tick)

    @property
    def maxlen(self) -> int:
        """Returns the capacity in messages."""
        return self._state.capacity.messages

    @property
    def closed(self) -> bool:
        """Returns whether this end is closed."""
        return self._closed

    # ------------------------------------------------------------ getting

    async def get(self) -> T:
        """Returns the next record as `Receiver.get` does."""
        await self._arrival()
        return self.get_nowait()

    async def receive(self) -> Delivery[T]:
        """Returns the next record as `Receiver.receive` does."""
        await self._arrival()
        return self.receive_nowait()

    def get_nowait(self) -> T:
        """Returns the next record as `get` does, but raises `Empty` instead of waiting."""
        entry = self._take()
        self.acknowledge(entry)
        record: T = entry.record
        return record

    def receive_nowait(self) -> Delivery[T]:
        """Returns the next record as `receive` does, but raises `Empty` instead of waiting."""
        return _Delivery(self, self._take())

    def _take(self) -> ReceivedMessage:
        self._check()
        return self._state.take()

    def _check(self) -> None:
        if self._closed:
            raise QueueClosed(
                f"got a get from {self._state.receiver}, which is closed; expected an open end; open a new one"
            )

    async def _arrival(self) -> None:
        """Waits until a message is queued."""
        if self._closed or self._state.queued_messages:
            await anyio.lowlevel.checkpoint()
        if self._closed or self._state.queued_messages:
            return
        self._waits += 1
        began = self._clock()
        self._getters += 1
        try:
            while not (self._closed or self._state.queued_messages):
                if self._arrived.is_set():
                    self._arrived = anyio.Event()
                await self._arrived.wait()
        finally:
            self._getters -= 1
            self._waited_s += self._clock() - began

    def acknowledge(self, entry: ReceivedMessage) -> None:
        """Acknowledges a message, unless it already is or the end is closed."""
        if self._closed or entry.acknowledged:
            return
        now = self._clock()
        self._state.acknowledge(now, entry)
        self._send_grants(now)

    def qsize(self) -> int:
        """Returns the number of messages that `get_nowait` could return now."""
        return self._state.queued_messages

    def empty(self) -> bool:
        """Returns whether `qsize` is 0."""
        return not self._state.queued_messages

    # ------------------------------------------------------------ called by the transport

    def received(self, message: SenderHello | Data | SenderBye, route: Any) -> None:
        """Handles an arrived message; the transport calls `settle` after the last one."""
        if isinstance(message, Data):
            self._state.on_data(self._clock(), message, route)
        elif isinstance(message, SenderHello):
            self._state.on_hello(self._clock(), message, route)
        else:
            self._state.on_bye(message)

    def settle(self) -> None:
        """Sends due Grants after arrivals, and wakes the callers that wait for a record."""
        if self._getters and self._state.queued_messages:
            self._arrived.set()
        now = self._clock()
        self._send_grants(now)
        self.timer.advance(now + self._timing.peer_timeout)  # so that the first sender's silence is noticed too

    def discard(self) -> None:
        """Counts an arrival that was not a message."""
        self._state.discarded += 1

    def _send_grants(self, now: float) -> None:
        if self._state.next_grant <= now:
            for route, grant in self._state.outgoing(now):
                self._transmit(route, grant)
            self._poll()
        self.timer.advance(self._state.next_grant)

    def _tick(self) -> None:
        self._poll()
        now = self._clock()
        self._state.tick(now)
        self._send_grants(now)

    # ------------------------------------------------------------ statistics, closing

    def statistics(self) -> ReceiverStatistics:
        """Returns the counters."""
        state = self._state
        return ReceiverStatistics(
            queued_messages=state.queued_messages,
            queued_steps=state.queued_steps,
            unacknowledged_messages=state.shares.messages - state.queued_messages,
            unacknowledged_steps=state.shares.steps - state.queued_steps,
            got_messages=state.got_messages,
            got_steps=state.got_steps,
            duplicates=state.duplicates,
            discarded=state.discarded,
            senders=state.senders,
            waits=self._waits,
            waited_s=self._waited_s,
            fullest_messages=state.shares.fullest_messages,
            fullest_steps=state.shares.fullest_steps,
        )

    def close(self, *, notify_peers: bool = True) -> None:
        """Closes this end at once; without `notify_peers` it sends nothing, as in a crash."""
        if self._closed:
            return
        if notify_peers:
            for route, grant in self._state.outgoing(float("inf")):
                self._transmit(route, grant)
        self._closed = True
        self.timer.stop()
        self._release()
        self._arrived.set()

    async def aclose(self) -> None:
        """Closes this end; senders drop its unacknowledged messages once another end replaces it."""
        self.close()
        await anyio.lowlevel.checkpoint()
