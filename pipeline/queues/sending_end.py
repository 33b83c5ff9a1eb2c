"""The sender's end of a queue adds waiting to `SenderState`, for memory and ZeroMQ alike.

A transport gives the end a way to transmit, passes it arrived messages, and runs its timer. All logic is
in functions that never wait; `put` and `drain` only wait until these can act, and no await follows the
point at which a message changes hands: a cancellation can neither lose nor repeat one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import anyio
import anyio.lowlevel

from sparring.pipeline.errors import Full, QueueBroken, QueueClosed, TooLarge
from sparring.pipeline.queues.credit import SenderState
from sparring.pipeline.queues.interface import SenderStatistics
from sparring.pipeline.queues.timer import Timer
from sparring.pipeline.queues.wire import Data, Grant, SenderBye, SenderHello, Timing, incarnation_of

Acknowledged = Callable[[int, int], None]
T = TypeVar("T")


class SendingEnd(Generic[T]):
    """Sends records to the receiver of a queue; see `Sender`.

    Args:
        sender: id of this end.
        timing: intervals.
        clock: gives rising seconds.
        pack: turns a record into a payload and its size in bytes.
        transmit: sends one message to the receiver, or loses it; never waits.
        poll: delivers arrived messages; called after sending, which may have hidden an arrival.
        release: frees the transport's resources for this end; called once, when it closes.
    """

    def __init__(
        self,
        sender: str,
        timing: Timing,
        clock: Callable[[], float],
        pack: Callable[[T], tuple[Any, int]],
        transmit: Callable[[SenderHello | Data | SenderBye], None],
        poll: Callable[[], None],
        release: Callable[[], None],
    ) -> None:
        self._state = SenderState(sender, timing, self._new_receiver)
        self._clock = clock
        self._pack = pack
        self._transmit = transmit
        self._poll = poll
        self._release = release
        self._closed = False
        self._putters: deque[anyio.Event] = deque()  # puts that wait, first come first
        self._drained = anyio.Event()
        self._acknowledged_callbacks: list[Acknowledged] = []
        self._receiver_callbacks: list[Callable[[int], None]] = []
        self._put_bytes = 0
        self._waits = 0
        self._waited_s = 0.0
        self.timer = Timer(clock, lambda: self._state.deadline, self.flush)

    @property
    def maxlen(self) -> int:
        """Returns the most messages this end may have unacknowledged: its share, 0 until the receiver grants it."""
        return self._state.share_messages

    @property
    def receivers(self) -> int:
        """Returns the number of incarnations of the receiver seen so far."""
        return self._state.receivers

    @property
    def receiver(self) -> str:
        """Returns the incarnation of the service that receives, "" before its first message."""
        return incarnation_of(self._state.receiver)

    @property
    def closed(self) -> bool:
        """Returns whether this end is closed."""
        return self._closed

    # ------------------------------------------------------------ putting

    async def put(self, record: T, steps: int) -> None:
        """Sends a record as `Sender.put` does; waiting puts are served in order.

        Raises:
            TooLarge: there are more steps than the receiver's `Capacity.largest`.
            QueueClosed: this end is closed.
            QueueBroken: a later incarnation has replaced this sender.
            CodecError: a field's value does not match its annotation.
        """
        payload, size = self._pack(record)
        await anyio.lowlevel.checkpoint()
        if not self._may_put(steps):
            await self._turn(steps)
        self._put(steps, payload, size)

    def put_nowait(self, record: T, steps: int) -> None:
        """Sends a record as `put` does, but raises `Full` instead of waiting."""
        payload, size = self._pack(record)
        if not self._may_put(steps):
            state = self._state
            raise Full(
                f"got a message of {steps} steps with {state.unacknowledged_messages} messages and "
                f"{state.unacknowledged_steps} steps unacknowledged; expected at most {state.share_messages} and "
                f"{state.share_steps} together; wait with put() instead"
            )
        self._put(steps, payload, size)

    def _may_put(self, steps: int) -> bool:
        self._check(steps)
        return not self._putters and self._state.fits(steps)

    def _check(self, steps: int) -> None:
        state = self._state
        if self._closed:
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
        self._waits += 1
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
            self._waited_s += self._clock() - began
            self._putters.remove(event)
            self._wake_putter()

    def _put(self, steps: int, payload: Any, size: int) -> None:
        self._state.put(steps, payload)
        self._put_bytes += size
        self.flush()

    def _wake_putter(self) -> None:
        if self._putters:
            self._putters[0].set()

    # ------------------------------------------------------------ called by the transport

    def received(self, grant: Grant) -> None:
        """Handles a Grant."""
        state = self._state
        before = state.acknowledged_messages
        state.on_grant(self._clock(), grant)
        self.flush()
        if not state.unacknowledged_messages:
            self._drained.set()
        if state.acknowledged_messages != before:
            for callback in self._acknowledged_callbacks:
                callback(state.acknowledged_messages, state.acknowledged_steps)
        self._wake_all() if state.superseded else self._wake_putter()

    def linked(self) -> None:
        """Handles a new connection of the link to a receiver."""
        self._state.linked()
        self.flush()

    def flush(self) -> None:
        """Sends all due messages."""
        if not self._closed:
            for message in self._state.outgoing(self._clock()):
                self._transmit(message)
            self.timer.advance(self._state.deadline)
            self._poll()

    def _new_receiver(self) -> None:
        for callback in self._receiver_callbacks:
            callback(self._state.receivers)

    # ------------------------------------------------------------ callbacks, statistics, closing

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
        if self._state.receivers:
            callback(self._state.receivers)

    async def drain(self) -> None:
        """Waits until everything put has been acknowledged, or dropped with an incarnation of the receiver.

        Raises:
            QueueClosed, QueueBroken: an acknowledgement can no longer arrive.

        Cancelled: nothing is lost.
        """
        await anyio.lowlevel.checkpoint()
        while self._state.unacknowledged_messages:
            self._check(0)
            if self._drained.is_set():
                self._drained = anyio.Event()
            await self._drained.wait()

    def statistics(self) -> SenderStatistics:
        """Returns the counters."""
        state = self._state
        return SenderStatistics(
            put_messages=state.put_messages,
            put_steps=state.put_steps,
            put_bytes=self._put_bytes,
            acknowledged_messages=state.acknowledged_messages,
            acknowledged_steps=state.acknowledged_steps,
            unacknowledged_messages=state.unacknowledged_messages,
            unacknowledged_steps=state.unacknowledged_steps,
            resent_messages=state.resent,
            credit_messages=max(0, state.share_messages - state.unacknowledged_messages),
            credit_steps=max(0, state.share_steps - state.unacknowledged_steps),
            waits=self._waits,
            waited_s=self._waited_s,
            receivers=state.receivers,
            dropped_messages=state.dropped_messages,
            dropped_steps=state.dropped_steps,
        )

    def close(self, *, notify_peers: bool = True) -> None:
        """Closes this end at once; without `notify_peers` it sends nothing, as in a crash."""
        if self._closed:
            return
        if notify_peers:
            self._transmit(SenderBye(sender=self._state.sender))
        self._closed = True
        self.timer.stop()
        self._release()
        self._wake_all()

    async def aclose(self) -> None:
        """Closes this end and drops unacknowledged messages (drain first to keep them)."""
        self.close()
        await anyio.lowlevel.checkpoint()

    def _wake_all(self) -> None:
        for putter in self._putters:
            putter.set()
        self._drained.set()
