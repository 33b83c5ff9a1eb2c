"""What a queue and a board promise, whatever carries them.

A queue moves records from one or more senders to one receiver, in each sender's order. The
receiver's capacity is exact, in messages and in agent-steps: it is divided among the senders as
credit, and what a sender has put and the receiver has not acknowledged never exceeds it. `get`
acknowledges; arrival does not; `receive` hands out the record and leaves the acknowledgement to
the caller. Nothing here drops a message: a sender keeps what is not acknowledged and sends it
again to a restarted receiver, which drops what it has already seen.

A board is for state: the publisher's latest record of each key wins, and a late or restarted
subscriber is served at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """How much a receiving queue holds at most.

    Attributes:
        messages: messages, from all senders together.
        steps: agent-steps in them.
        senders: how many senders share it at most; each gets an equal share.
    """

    messages: int
    steps: int
    senders: int = 1

    @property
    def largest(self) -> int:
        """Steps of the largest message: a quarter of the queue, or a sender's share where that is less."""
        return max(1, min(self.steps // 4, self.steps // self.senders))


@dataclass(frozen=True, kw_only=True, slots=True)
class SenderStatistics:
    """Counters of a sending end, since it was opened.

    Attributes:
        put_messages: messages put, `put_steps` steps and `put_bytes` bytes in them (bytes 0 in memory).
        acknowledged_messages: of these, what the receiver has acknowledged.
        unacknowledged_messages: held for the receiver now.
        resent_messages: sent again after a loss or a receiver's restart.
        credit_messages: what may be put right now without waiting.
        waits: puts that had to wait, for `waited_s` seconds together.
        receivers: starts of the receiver seen so far.
        acknowledged_steps_earlier: steps acknowledged by receivers before the present one.
    """

    put_messages: int
    put_steps: int
    put_bytes: int
    acknowledged_messages: int
    acknowledged_steps: int
    unacknowledged_messages: int
    unacknowledged_steps: int
    resent_messages: int
    credit_messages: int
    credit_steps: int
    waits: int
    waited_s: float
    receivers: int
    acknowledged_steps_earlier: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiverStatistics:
    """Counters of a receiving end, since it was opened.

    Attributes:
        queued_messages: arrived and not yet got, `queued_steps` steps in them.
        unacknowledged_messages: handed out by `receive` and not yet acknowledged.
        got_messages: handed out in all.
        duplicates: messages dropped because they had been seen.
        discarded: copies of messages that could not be decoded; asked for again, and logged where several do not read.
        senders: live senders now.
        waits: gets that had to wait, for `waited_s` seconds together.
        fullest_messages: most messages ever held at once; never above the capacity.
    """

    queued_messages: int
    queued_steps: int
    unacknowledged_messages: int
    unacknowledged_steps: int
    got_messages: int
    got_steps: int
    duplicates: int
    discarded: int
    senders: int
    waits: int
    waited_s: float
    fullest_messages: int
    fullest_steps: int


class Delivery(Protocol):
    """A record handed out by `receive`, counted against the capacity until it is acknowledged."""

    @property
    def record(self) -> Any:
        """The record."""

    @property
    def steps(self) -> int:
        """Agent-steps in it."""

    @property
    def sender(self) -> str:
        """Id of the sender, as given to its end: a new one at each start."""

    def acknowledge(self) -> None:
        """Lets the sender forget it and returns the credit. A second call does nothing.

        Deliveries of one sender are acknowledged in their order; one acknowledged early waits
        for those before it.
        """


class SendingQueue(Protocol):
    """One sender's end."""

    @property
    def behavior_id(self) -> str:
        """Behavior name that the queue carries, "*" for all."""

    @property
    def maxlen(self) -> int:
        """Most messages this end may have unacknowledged: its share, 0 until the receiver grants it."""

    @property
    def receiver(self) -> str:
        """Service start of the present receiver as given to its transport, "" until one was heard."""

    async def put(self, record: Any, steps: int) -> None:
        """Hands a record over, waiting for credit.

        Args:
            record: any registered record; not changed afterwards by the caller.
            steps: agent-steps in it, 0 for none.

        Raises:
            TooLarge: more steps than `Capacity.largest` of the receiver.
            Closed: this end is closed.

        Cancelled: the record was not put.
        """

    def put_nowait(self, record: Any, steps: int) -> None:
        """As `put`, but raises `Full` where that would wait."""

    def on_acknowledged(self, callback: Callable[[int, int], None]) -> None:
        """Calls `callback(messages, steps)` with the cumulative acknowledged counts after each change."""

    def on_receiver(self, callback: Callable[[int], None]) -> None:
        """Calls `callback(receivers)` when a start of the receiver is first heard of, before its credit is used.

        `receivers` is the number of starts seen so far, this one included.
        """

    async def drain(self) -> None:
        """Returns when everything put has been acknowledged. Cancelled: nothing is lost."""

    def statistics(self) -> SenderStatistics:
        """The counters."""

    async def aclose(self) -> None:
        """Closes this end; what is unacknowledged is given up (drain first to keep it)."""


class ReceivingQueue(Protocol):
    """The receiver's end."""

    @property
    def behavior_id(self) -> str:
        """Behavior name that the queue carries, "*" for all."""

    @property
    def maxlen(self) -> int:
        """Capacity in messages."""

    async def get(self) -> Any:
        """The next record, acknowledged. Waits for one.

        Raises:
            Closed: this end is closed.

        Cancelled: no record was taken.
        """

    def get_nowait(self) -> Any:
        """As `get`, but raises `Empty` where that would wait."""

    async def receive(self) -> Delivery:
        """The next record, to be acknowledged by the caller. Waits, raises and cancels as `get`."""

    def receive_nowait(self) -> Delivery:
        """As `receive`, but raises `Empty` where that would wait."""

    def qsize(self) -> int:
        """Messages that `get_nowait` could return now."""

    def empty(self) -> bool:
        """Whether `qsize` is 0."""

    def statistics(self) -> ReceiverStatistics:
        """The counters."""

    async def aclose(self) -> None:
        """Closes this end. Senders keep what is unacknowledged for the next receiver."""


class Topic(Protocol):
    """The publisher's end of a board."""

    def publish(self, key: str, record: Any) -> None:
        """Makes `record` the latest of `key`, for all subscribers. Never waits."""

    async def aclose(self) -> None:
        """Closes this end; subscribers keep what they have."""


class Subscription(Protocol):
    """One subscriber's end of one board."""

    @property
    def latest(self) -> dict[str, Any]:
        """The latest record of each key seen so far; not to be changed."""

    @property
    def publisher(self) -> str:
        """Id of the publisher's present start, "" until one was heard."""

    @property
    def heard_age(self) -> float:
        """Seconds since the publisher last answered; infinite until it did."""

    async def changed(self) -> None:
        """Returns when some record arrived since this was last called (at once if one has)."""

    async def aclose(self) -> None:
        """Closes this end."""


class Transport(Protocol):
    """Opens the ends of a run's queues and boards by name, over memory or ZeroMQ.

    Each end lives in the task group the transport was entered in; an end is open until closed.
    """

    async def sender(self, name: str, behavior_id: str = "*") -> SendingQueue:
        """The sending end of queue `name` for this service start."""

    async def receiver(self, name: str, capacity: Capacity, behavior_id: str = "*") -> ReceivingQueue:
        """The receiving end of queue `name`. `capacity` bounds it exactly."""

    async def topic(self, service: str) -> Topic:
        """The publishing end of `service`'s board."""

    async def subscribe(self, service: str, pace: float = 0.0) -> Subscription:
        """A subscription to `service`'s board, which is told of changes every `pace` seconds at most."""
