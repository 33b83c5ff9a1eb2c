"""The sender's end of a queue adds waiting to `SenderState`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Generic, TypeVar

import anyio
import anyio.lowlevel

from sparring.pipeline.errors import Full, QueueBroken, QueueClosed, TooLarge
from sparring.pipeline.queues.ends import End
from sparring.pipeline.queues.sending import SenderState, SenderStatistics
from sparring.pipeline.queues.wire import (
    Grant,
    Message,
    Payload,
    SenderBye,
    Timing,
    misdirected,
)

Acknowledged = Callable[[int, int], None]
T = TypeVar("T")


class Sender(End, Generic[T]):
    """Sends records to the receiver of a queue.

    `aclose` drops unacknowledged messages: drain first to keep them.

    Args:
        name: name of the queue.
        end_id: id of this end.
        timing: intervals.
        clock: gives rising seconds.
    """

    def __init__(self, name: str, end_id: str, timing: Timing, clock: Callable[[], float]) -> None:
        super().__init__(name, end_id, timing, clock)
        self._state = SenderState(end_id, timing, self._new_receiver)
        self._putters: deque[anyio.Event] = deque()  # puts that wait, first come first
        self._acknowledged_callbacks: list[Acknowledged] = []
        self._receiver_callbacks: list[Callable[[int], None]] = []

    @property
    def maxlen(self) -> int:
        """Returns the most messages this end may have unacknowledged: its share, 0 until the receiver grants it."""
        return self._state.counts.share_messages

    def statistics(self) -> SenderStatistics:
        """Returns the counters."""
        return replace(self._state.counts)

    # ------------------------------------------------------------ putting

    async def put(self, record: T, steps: int) -> None:
        """Sends a record, waiting for credit; waiting puts are served in order.

        Args:
            record: the caller must not change it afterwards.
            steps: agent-steps in it.

        Raises:
            TooLarge: there are more steps than the receiver's `Capacity.largest`.
            QueueClosed: this end is closed.
            QueueBroken: a later incarnation has replaced this sender.
            CodecError: a field's value does not match its annotation.

        Cancelled: the record was not put.
        """
        payload = self._link.pack(record)
        await anyio.lowlevel.checkpoint()
        if not self._may_put(steps):
            await self._turn(steps)
        self._put(steps, payload)

    def put_nowait(self, record: T, steps: int) -> None:
        """Sends a record as `put` does, but raises `Full` instead of waiting."""
        payload = self._link.pack(record)
        if not self._may_put(steps):
            counts = self._state.counts
            raise Full(
                f"got a message of {steps} steps with {counts.unacknowledged_messages} messages and "
                f"{counts.unacknowledged_steps} steps unacknowledged; expected at most {counts.share_messages} and "
                f"{counts.share_steps} together; wait with put() instead"
            )
        self._put(steps, payload)

    def _may_put(self, steps: int) -> bool:
        self._check(steps)
        return not self._putters and self._state.fits(steps)

    def _check(self, steps: int) -> None:
        state = self._state
        if self.closed:
            raise QueueClosed(f"got a put to {state.sender}, which is closed; expected an open end; open a new one")
        if state.superseded:
            raise QueueBroken(
                f"got {state.sender}, which a later process of the same name has replaced; expected one running "
                "process of each name; stop this one"
            )
        if steps < 0 or (state.largest and steps > state.largest):
            raise TooLarge(
                f"got a message of {steps} steps; expected 0 to {state.largest}, a quarter of the receiving queue or "
                "a sender's share; split it, or raise the receiver's capacity"
            )

    async def _turn(self, steps: int) -> None:
        """Waits behind earlier puts until a message of `steps` fits."""
        event = anyio.Event()
        self._putters.append(event)
        self._state.counts.waits += 1
        began = self._clock()
        try:
            while True:
                await event.wait()
                self._check(steps)
                if self._putters[0] is event and self._state.fits(steps):
                    return
                place = self._putters.index(event)
                event = self._putters[place] = anyio.Event()
        finally:
            self._state.counts.waited_s += self._clock() - began
            self._putters.remove(event)
            self._wake_putter()

    def _put(self, steps: int, payload: Payload) -> None:
        self._state.put(steps, payload)
        self._state.counts.put_bytes += payload.size
        self.settle()

    def _wake_putter(self) -> None:
        if self._putters:
            self._putters[0].set()

    async def drain(self) -> None:
        """Waits until everything put has been acknowledged, or dropped with an incarnation of the receiver.

        Raises:
            QueueClosed, QueueBroken: an acknowledgement can no longer arrive.

        Cancelled: nothing is lost.
        """
        await anyio.lowlevel.checkpoint()
        while self._state.counts.unacknowledged_messages:
            self._check(0)
            if self._changed.is_set():
                self._changed = anyio.Event()
            await self._changed.wait()

    # ------------------------------------------------------------ callbacks

    def on_acknowledged(self, callback: Acknowledged) -> None:
        """Calls `callback(messages, steps)` with the cumulative acknowledged counts after each change.

        It runs outside any task: it must be short, and must not ask for the current task or time.
        """
        self._acknowledged_callbacks.append(callback)

    def on_receiver(self, callback: Callable[[int], None]) -> None:
        """Calls `callback(receivers)` with the number of incarnations of the receiver whenever a new one appears.

        At that time what its predecessors did not acknowledge is dropped, and no message can be put yet. If a receiver
        is already known, the call is made at once. The limits of `on_acknowledged` apply.
        """
        self._receiver_callbacks.append(callback)
        if self._state.counts.receivers:
            callback(self._state.counts.receivers)

    def _new_receiver(self) -> None:
        for callback in self._receiver_callbacks:
            callback(self._state.counts.receivers)

    # ------------------------------------------------------------ called by the transport

    @property
    def _deadline(self) -> float:
        return self._state.deadline

    def received(self, message: Message, route: Hashable) -> None:
        """Handles a Grant."""
        if not isinstance(message, Grant):
            raise misdirected(message)
        state, counts = self._state, self._state.counts
        before = counts.acknowledged_messages
        state.on_grant(self._clock(), message)
        if not counts.unacknowledged_messages:
            self._changed.set()
        if counts.acknowledged_messages != before:
            for callback in self._acknowledged_callbacks:
                callback(counts.acknowledged_messages, counts.acknowledged_steps)
        self._wake_all() if state.superseded else self._wake_putter()

    def linked(self) -> None:
        """Introduces this end to the receiver that listens now."""
        self._state.linked()
        self.settle()

    def settle(self) -> None:
        """Sends all due messages."""
        if not self.closed:
            self._send((None, message) for message in self._state.outgoing(self._clock()))
            self.timer.advance(self._state.deadline)

    def _last_messages(self) -> Iterable[tuple[Hashable, Message]]:
        return [(None, SenderBye(sender=self._state.sender))]

    def _wake_all(self) -> None:
        super()._wake_all()
        for putter in self._putters:
            putter.set()
