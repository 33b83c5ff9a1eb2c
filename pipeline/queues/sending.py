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
receiver asks for a Hello, and the Grant that replies to a Hello sent after the lost messages
(`missing`) makes the sender repeat them. Tying the repetition to that reply prevents messages that
crossed on the link from being sent twice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from sparring.pipeline.queues.wire import Data, Grant, Payload, SenderHello, Timing


@dataclass(kw_only=True, slots=True)
class SenderStatistics:
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
    waits: int = 0
    waited_s: float = 0.0
    receivers: int = 0

    @property
    def unacknowledged_messages(self) -> int:
        """Returns the number of messages held for the receiver now."""
        return self.put_messages - self.acknowledged_messages - self.dropped_messages

    @property
    def unacknowledged_steps(self) -> int:
        """Returns the steps held for the receiver now."""
        return self.put_steps - self.acknowledged_steps - self.dropped_steps

    @property
    def credit_messages(self) -> int:
        """Returns the number of messages that may be put now without waiting."""
        return max(0, self.share_messages - self.unacknowledged_messages)

    @property
    def credit_steps(self) -> int:
        """Returns the steps that may be put now without waiting."""
        return max(0, self.share_steps - self.unacknowledged_steps)


class SenderState:
    """Keeps and sends one sender's messages until they are acknowledged, or until their receiver is replaced.

    Args:
        sender: id of this end.
        timing: intervals.
        on_receiver: called at the first Grant of each incarnation of the receiver, after what its predecessor
            did not acknowledge is dropped and before the Grant is used.
    """

    def __init__(self, sender: str, timing: Timing, on_receiver: Callable[[], None] = lambda: None) -> None:
        self.sender = sender
        self._timing = timing
        self._on_receiver = on_receiver
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
        self._repaired = 0  # a loss is accepted only if reported for a later Hello than this
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
        return (
            len(self._kept) < self.counts.share_messages
            and self.counts.unacknowledged_steps + steps <= self.counts.share_steps
            and not self.superseded
        )

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
        self._kept.append(Data(self.sender, self.counts.put_messages, steps, payload))
        self.counts.put_messages += 1
        self.counts.put_steps += steps

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
        self._granted_at = now
        self._answered = max(self._answered, grant.echo)
        self._asked |= grant.ask
        self._forget(min(grant.acknowledged, self._farthest))
        self.counts.share_messages, self.counts.share_steps = grant.messages, grant.steps
        self.largest = grant.largest
        if grant.missing and grant.echo > self._repaired:
            self._repaired = self._serial
            self._rewind(grant.received)

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
        self._sent, self._sent_steps = counts.put_messages, 0
        self._asked, self._answered = True, self._serial  # it takes messages after a Hello that names it
        self._on_receiver()
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
        oldest = self.oldest
        self._sent = max(oldest, min(sequence, self._sent))
        self._sent_steps = sum(self._kept[index].steps for index in range(self._sent - oldest))

    def outgoing(self, now: float) -> list[SenderHello | Data]:
        """Returns the messages to send now."""
        out: list[SenderHello | Data] = []
        if self.deadline <= now:
            self._asked = False
            self._hello_at = now
            self._serial += 1
            out.append(
                SenderHello(
                    sender=self.sender,
                    serial=self._serial,
                    oldest=self.oldest,
                    sent=self._sent,
                    receiver=self.receiver,
                )
            )
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
