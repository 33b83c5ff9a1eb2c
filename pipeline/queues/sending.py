"""The states of both ends hold the rules of a queue without I/O: credit, acknowledgement, resending, fairness.

`SenderState` and `ReceiverState` (in `receiving`) never wait, send or read a clock. An end passes them the time and
the messages that arrive, and sends what `outgoing` returns at `deadline` at the latest. The link
between them may lose, delay, duplicate and reorder messages; a message is still handed out once and
in its sender's order, as long as both ends run.

A receiver grants each sender one of `Capacity.senders` equal shares. A share bounds what its sender
has put and the receiver has not acknowledged, so the messages that are queued, handed out and in
transit never exceed the capacity together. What a sender that has left leaves there stays charged to its
share: the next owner gets the rest, and more with each acknowledgement.

A receiver accepts a sender's messages in sequence only. One that arrives early reveals a loss: the
receiver asks for a Hello, and a Grant that replies to a Hello sent after the lost messages makes the
sender repeat them. Tying the repetition to that reply prevents messages that crossed on the link from
being sent twice.

`Sender` is the end of a queue that adds waiting to these rules.
"""

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import anyio
import anyio.lowlevel

from sparring.pipeline.errors import Full, QueueBroken, QueueClosed, TooLarge
from sparring.pipeline.queues.ends import End, Waits
from sparring.pipeline.queues.wire import Data, Grant, Message, Payload, SenderHello, Timing, misdirected

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class SenderStatistics(Waits):
    """Counts the messages of a sending end since it was opened.

    Attributes:
        put_messages: messages put, with `put_steps` steps and `put_bytes` bytes in them (bytes 0 in memory).
        acknowledged_messages: messages that the receiver has acknowledged.
        dropped_messages: messages that earlier incarnations of the receiver had not acknowledged.
        resent_messages: messages sent again after a loss.
        share_messages: messages that may be unacknowledged at the same time, with at most `share_steps` steps in them.
        waits: puts that had to wait, for `waited_s` seconds in total.
        receivers: incarnations of the receiver seen so far.
    """

    put_messages: int = 0
    put_steps: int = 0
    put_bytes: int = 0
    acknowledged_messages: int = 0
    acknowledged_steps: int = 0
    dropped_messages: int = 0
    dropped_steps: int = 0
    resent_messages: int = 0
    share_messages: int = 0
    share_steps: int = 0
    receivers: int = 0

    @property
    def unacknowledged_messages(self) -> int:
        """Returns the number of messages held for the receiver now."""
        return self.put_messages - self.acknowledged_messages - self.dropped_messages

    @property
    def unacknowledged_steps(self) -> int:
        """Returns the steps held for the receiver now."""
        return self.put_steps - self.acknowledged_steps - self.dropped_steps


class SenderState:
    """Keeps and sends one sender's messages until they are acknowledged, or until their receiver is replaced.

    Args:
        sender: id of this end.
        timing: intervals.

    Attributes:
        on_receiver: called with the number of incarnations of the receiver at the first Grant of each, after what its
            predecessor did not acknowledge is dropped and before the Grant is used.
        on_acknowledged: called with the cumulative acknowledged messages and steps after each change.
    """

    def __init__(self, sender: str, timing: Timing) -> None:
        self.sender = sender
        self._timing = timing
        self.on_receiver: Callable[[int], None] = lambda _receivers: None
        self.on_acknowledged: Callable[[int, int], None] = lambda _messages, _steps: None
        self.receiver = ""
        self.superseded = False
        self.largest = 0
        self.counts = SenderStatistics()
        self._kept: deque[Data] = deque()  # put and not acknowledged
        self._sent = 0  # ... of the next message to send to this receiver
        self._sent_steps = 0  # steps sent to this receiver and not acknowledged
        self._farthest = 0  # ... after the last message ever sent
        self._serial = 0  # of the last Hello
        self._answered = 0  # highest serial echoed
        self._believed = 0  # another receiver is accepted only if it echoes a later Hello than this
        self._sent_before = 0  # ... after the last message sent before that Hello
        self._asked = False  # a receiver asked for a Hello
        self._hello_at = -math.inf
        self._granted_at = -math.inf

    # ------------------------------------------------------------ state

    @property
    def oldest(self) -> int:
        """Returns the sequence number of the oldest message kept, or of the next put."""
        return self.counts.put_messages - len(self._kept)

    def fits(self, steps: int) -> bool:
        """Returns whether a message of `steps` can be put now."""
        has_room = len(self._kept) < self.counts.share_messages and not self.superseded
        return has_room and self.counts.unacknowledged_steps + steps <= self.counts.share_steps

    @property
    def deadline(self) -> float:
        """Returns the latest time at which `outgoing` has a message, if nothing else happens."""
        if self.superseded:
            return math.inf
        due = self._hello_at + self._timing.heartbeat
        if self._sent > self.oldest or not self.counts.share_messages:
            unanswered = self._serial - self._answered  # the longer the receiver is away, the rarer the Hellos
            due = min(due, max(self._hello_at, self._granted_at) + self._timing.retry * max(1, unanswered))
        if self._asked:
            outstanding = self._serial > self._answered
            due = min(due, self._hello_at + self._timing.retry) if outstanding else -math.inf
        return due

    # ------------------------------------------------------------ events

    def put(self, steps: int, payload: Payload) -> None:
        """Accepts a message that `fits`."""
        assert self.fits(steps)
        self._kept.append(Data(sender=self.sender, sequence=self.counts.put_messages, steps=steps, payload=payload))
        self.counts.put_messages += 1
        self.counts.put_steps += steps
        self.counts.put_bytes += payload.size

    def linked(self) -> None:
        """Handles a new connection of the link: messages in transit are lost, an unanswered Hello included."""
        self._asked = True
        self._answered = self._serial

    def on_grant(self, now: float, grant: Grant) -> None:
        """Handles a Grant, which reports this sender's share and the messages that have arrived."""
        if grant.superseded:
            self.superseded = True
            return
        if grant.receiver != self.receiver and not self._believe(grant):
            return
        counts, before = self.counts, self.counts.acknowledged_messages
        self._granted_at = now
        self._answered = max(self._answered, grant.echo)
        self._asked |= grant.ask
        self._forget(min(grant.acknowledged, self._farthest))
        counts.share_messages, counts.share_steps = grant.messages, grant.steps
        self.largest = grant.largest
        if grant.echo == self._serial and grant.received < self._sent_before:
            self._sent_before = 0  # once for each Hello
            self._rewind(grant.received)
        if counts.acknowledged_messages != before:
            self.on_acknowledged(counts.acknowledged_messages, counts.acknowledged_steps)

    def _believe(self, grant: Grant) -> bool:
        """Returns whether another receiver has taken over; a late Grant of an earlier one echoes no later Hello."""
        if grant.echo <= self._believed:
            self._asked = True
            return False
        self._believed = self._serial
        self.receiver = grant.receiver
        counts = self.counts
        counts.receivers += 1
        counts.dropped_messages += len(self._kept)
        counts.dropped_steps += counts.unacknowledged_steps
        counts.share_messages = counts.share_steps = 0
        self._kept.clear()
        self._sent, self._sent_before, self._sent_steps = counts.put_messages, 0, 0
        self._asked, self._answered = True, self._serial  # it takes messages after a Hello that names it
        self.on_receiver(counts.receivers)
        return True

    def _forget(self, acknowledged: int) -> None:
        kept = self._kept
        while kept and kept[0].sequence < acknowledged:
            data = kept.popleft()
            self.counts.acknowledged_messages += 1
            self.counts.acknowledged_steps += data.steps
            if data.sequence < self._sent:
                self._sent_steps -= data.steps
        self._sent = max(self._sent, self.oldest)

    def _rewind(self, sequence: int) -> None:
        """Makes `sequence`, or the oldest message kept, the next message to send."""
        self._sent = max(self.oldest, min(sequence, self._sent))
        self._sent_steps = sum(self._kept[index].steps for index in range(self._sent - self.oldest))

    def hello(self, *, leaving: bool = False) -> SenderHello:
        """Returns an introduction, or the last message of this sender."""
        return SenderHello(
            sender=self.sender, serial=self._serial, oldest=self.oldest, receiver=self.receiver, leaving=leaving
        )

    def outgoing(self, now: float) -> list[SenderHello | Data]:
        """Returns the messages to send now."""
        out: list[SenderHello | Data] = []
        if self.deadline <= now:
            self._asked = False
            self._hello_at = now
            self._serial += 1
            self._sent_before = self._sent
            out.append(self.hello())
        counts = self.counts
        while self._sent < counts.put_messages and not self.superseded:
            index = self._sent - self.oldest
            data = self._kept[index]
            if index >= counts.share_messages or self._sent_steps + data.steps > counts.share_steps:
                break
            self._sent += 1
            self._sent_steps += data.steps
            counts.resent_messages += self._sent <= self._farthest
            self._farthest = max(self._farthest, self._sent)
            out.append(data)
        return out


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
        super().__init__(name, end_id, clock)
        self._state = SenderState(end_id, timing)
        self._turn = anyio.Lock()  # puts that wait, first come first

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
        if self._may_put(steps):
            self._put(steps, payload)
            return
        with self._waiting(self._state.counts):
            async with self._turn:
                await self._until(lambda: self._fits(steps))
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
        return self._fits(steps) and not self._turn.locked()

    def _fits(self, steps: int) -> bool:
        self._check(steps)
        return self._state.fits(steps)

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

    def _put(self, steps: int, payload: Payload) -> None:
        self._state.put(steps, payload)
        self.settle()

    async def drain(self) -> None:
        """Waits until everything put has been acknowledged, or dropped with an incarnation of the receiver.

        Raises:
            QueueClosed, QueueBroken: an acknowledgement can no longer arrive.

        Cancelled: nothing is lost.
        """
        await anyio.lowlevel.checkpoint()
        await self._until(self._is_drained)

    def _is_drained(self) -> bool:
        if self._state.counts.unacknowledged_messages:
            self._check(0)
        return not self._state.counts.unacknowledged_messages

    # ------------------------------------------------------------ callbacks

    def on_acknowledged(self, callback: Callable[[int, int], None]) -> None:
        """Sets `callback(messages, steps)`, which gets the cumulative acknowledged counts after each change.

        It runs outside any task: it must be short, and must not ask for the current task or time.
        """
        self._state.on_acknowledged = callback

    def on_receiver(self, callback: Callable[[int], None]) -> None:
        """Sets `callback(receivers)`, which gets the number of incarnations of the receiver whenever a new one appears.

        At that time what its predecessors did not acknowledge is dropped, and no message can be put yet. If a receiver
        is already known, the call is made at once. The limits of `on_acknowledged` apply.
        """
        self._state.on_receiver = callback
        if self._state.counts.receivers:
            callback(self._state.counts.receivers)

    # ------------------------------------------------------------ called by the transport

    @property
    def deadline(self) -> float:
        """Returns the time at which `_tick` must be called."""
        return self._state.deadline

    def received(self, message: Message, route: Hashable) -> None:
        """Handles a Grant."""
        if not isinstance(message, Grant):
            raise misdirected(message)
        self._state.on_grant(self._clock(), message)
        self._changed.set()

    def linked(self) -> None:
        """Introduces this end to the receiver that listens now."""
        self._state.linked()
        self.settle()

    def outgoing(self, now: float) -> Sequence[tuple[Hashable, Message]]:
        """Returns the messages to send now, each with its route."""
        return [(None, message) for message in self._state.outgoing(now)]

    def last_messages(self) -> Sequence[tuple[Hashable, Message]]:
        """Returns what is sent before the end closes in order."""
        return [(None, self._state.hello(leaving=True))]
