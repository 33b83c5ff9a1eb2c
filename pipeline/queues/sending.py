"""Implements the sender's half of a queue without I/O; `credit` explains the rules."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

from sparring.pipeline.queues.wire import Data, Grant, SenderHello, Timing


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
        self.receivers = 0
        self.superseded = False
        self.share_messages = 0
        self.share_steps = 0
        self.largest = 0
        self.whole = 0
        self.put_steps = 0
        self.acknowledged_messages = 0
        self.acknowledged_steps = 0
        self.dropped_messages = 0
        self.dropped_steps = 0
        self.resent = 0
        self._kept: deque[Data] = deque()  # put and not acknowledged
        self._next = 0  # sequence number of the next put
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
    def put_messages(self) -> int:
        """Returns the number of messages put so far."""
        return self._next

    @property
    def oldest(self) -> int:
        """Returns the sequence number of the oldest message kept, or of the next put."""
        return self._next - len(self._kept)

    @property
    def unacknowledged_messages(self) -> int:
        """Returns the number of messages kept for the receiver."""
        return len(self._kept)

    @property
    def unacknowledged_steps(self) -> int:
        """Returns the steps kept for the receiver."""
        return self.put_steps - self.acknowledged_steps - self.dropped_steps

    def fits(self, steps: int) -> bool:
        """Returns whether a message of `steps` can be put now."""
        return (
            len(self._kept) < self.share_messages
            and self.unacknowledged_steps + steps <= self.share_steps
            and not self.superseded
        )

    @property
    def deadline(self) -> float:
        """Returns the latest time at which `outgoing` has a message, if nothing else happens."""
        if self.superseded:
            return math.inf
        due = self._hello_at + self._timing.heartbeat
        if self._sent > self.oldest or not self.share_messages:
            unanswered = self._serial - self._answered  # the longer the receiver is away, the rarer the Hellos
            due = min(due, max(self._hello_at, self._granted_at) + self._timing.retry * max(1, unanswered))
        if self._asked:
            outstanding = self._serial > self._answered
            due = min(due, self._hello_at + self._timing.retry) if outstanding else -math.inf
        return due

    # ------------------------------------------------------------ events

    def put(self, steps: int, payload: Any) -> None:
        """Accepts a message that `fits`."""
        assert self.fits(steps)
        self._kept.append(Data(self.sender, self._next, steps, payload))
        self._next += 1
        self.put_steps += steps

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
        self.share_messages, self.share_steps = grant.messages, grant.steps
        self.largest, self.whole = grant.largest, grant.whole
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
        self.receivers += 1
        self.dropped_messages += len(self._kept)
        self.dropped_steps += self.unacknowledged_steps
        self._kept.clear()
        self._sent, self._sent_steps = self._next, 0
        self.share_messages = self.share_steps = 0
        self._asked, self._answered = True, self._serial  # it takes messages after a Hello that names it
        self._on_receiver()
        return True

    def _forget(self, acknowledged: int) -> None:
        kept = self._kept
        while kept and kept[0].sequence < acknowledged:
            data = kept.popleft()
            self.acknowledged_messages += 1
            self.acknowledged_steps += data.steps
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
            out.append(self._hello())
        while self._sent < self._next and not self.superseded:
            index = self._sent - self.oldest
            data = self._kept[index]
            if index >= self.share_messages or self._sent_steps + data.steps > self.share_steps:
                break
            self._sent += 1
            self._sent_steps += data.steps
            self.resent += self._sent <= self._farthest
            self._farthest = max(self._farthest, self._sent)
            out.append(data)
        return out

    def _hello(self) -> SenderHello:
        return SenderHello(
            sender=self.sender, serial=self._serial, oldest=self.oldest, sent=self._sent, receiver=self.receiver
        )
