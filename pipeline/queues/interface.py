"""Defines what queues and topics guarantee, whatever carries them.

A queue moves records from one or more senders to one receiver, in each sender's order. The
receiver's capacity is exact, in messages and in agent-steps: it is divided among the senders as
credit, and what a sender has put and the receiver has not acknowledged never exceeds it. `get`
acknowledges; arrival does not; `receive` hands out the record and leaves the acknowledgement to
the caller. While both ends live, delivery is once and in order: a sender keeps what is not acknowledged
and sends it again after a loss. What an incarnation of the receiver has not acknowledged when another
takes its place is dropped and counted: a stage that must not lose it puts it again.

A topic is for state: subscribers get the publisher's latest record of each key, never a history,
and a late or restarted subscriber gets it at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """Bounds what a receiving queue holds.

    Attributes:
        messages: from all senders together.
        steps: agent-steps in them.
        senders: most senders that share the capacity; each gets an equal share.
    """

    messages: int
    steps: int
    senders: int = 1

    @property
    def largest(self) -> int:
        """Returns the steps of the largest message: a quarter of the queue, or a sender's share if that is less."""
        return max(1, min(self.steps // 4, self.steps // self.senders))


@dataclass(frozen=True, kw_only=True, slots=True)
class SenderStatistics:
    """Counts the messages of a sending end since it was opened.

    Attributes:
        put_messages: messages put, with `put_steps` steps and `put_bytes` bytes in them (bytes 0 in memory).
        acknowledged_messages: messages that the receiver has acknowledged.
        unacknowledged_messages: messages held for the receiver now.
        resent_messages: messages sent again after a loss.
        credit_messages: messages that may be put now without waiting.
        waits: puts that had to wait, for `waited_s` seconds in total.
        receivers: incarnations of the receiver seen so far.
        dropped_messages: messages, with `dropped_steps` steps in them, that earlier incarnations of the receiver had
            not acknowledged.
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
    dropped_messages: int
    dropped_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiverStatistics:
    """Counts the messages of a receiving end since it was opened.

    Attributes:
        queued_messages: messages that have arrived and are not handed out, with `queued_steps` steps in them.
        unacknowledged_messages: messages handed out by `receive` and not yet acknowledged.
        got_messages: messages handed out.
        duplicates: messages dropped because they had been seen.
        discarded: copies that could not be decoded; requested again, and logged after several failures.
        senders: senders present now.
        waits: gets that had to wait, for `waited_s` seconds in total.
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
    """Holds a record from `receive`, which counts against the capacity until it is acknowledged."""

    @property
    def record(self) -> Any:
        """Returns the record."""

    @property
    def steps(self) -> int:
        """Returns the agent-steps in the record."""

    @property
    def sender(self) -> str:
        """Returns the incarnation of the service that sent it."""

    def acknowledge(self) -> None:
        """Lets the sender forget the record and returns the credit; a second call does nothing.

        Deliveries of one sender are acknowledged in order: an early one takes effect after those before it.
        """


class SendingQueue(Protocol):
    """Sends records to the receiver of a queue."""

    @property
    def behavior_id(self) -> str:
        """Returns the behavior name that the queue carries, "*" for all."""

    @property
    def maxlen(self) -> int:
        """Returns the most messages this end may have unacknowledged: its share, 0 until the receiver grants it."""

    @property
    def receiver(self) -> str:
        """Returns the incarnation of the service that receives, "" before its first message."""

    async def put(self, record: Any, steps: int) -> None:
        """Sends a record, waiting for credit.

        Args:
            record: any registered record; the caller must not change it afterwards.
            steps: agent-steps in it.

        Raises:
            TooLarge: there are more steps than the receiver's `Capacity.largest`.
            QueueClosed: this end is closed.

        Cancelled: the record was not put.
        """

    def put_nowait(self, record: Any, steps: int) -> None:
        """Sends a record as `put` does, but raises `Full` instead of waiting."""

    def on_acknowledged(self, callback: Callable[[int, int], None]) -> None:
        """Calls `callback(messages, steps)` with the cumulative acknowledged counts after each change."""

    def on_receiver(self, callback: Callable[[int], None]) -> None:
        """Calls `callback(receivers)` when a new incarnation of the receiver appears, before its credit is used.

        `receivers` is the number of incarnations seen so far, this one included.
        """

    async def drain(self) -> None:
        """Waits until everything put is acknowledged, or dropped with its receiver. Cancelled: nothing is lost."""

    def statistics(self) -> SenderStatistics:
        """Returns the counters."""

    async def aclose(self) -> None:
        """Closes this end and drops unacknowledged messages (drain first to keep them)."""


class ReceivingQueue(Protocol):
    """Receives the records of all senders of a queue."""

    @property
    def behavior_id(self) -> str:
        """Returns the behavior name that the queue carries, "*" for all."""

    @property
    def maxlen(self) -> int:
        """Returns the capacity in messages."""

    async def get(self) -> Any:
        """Waits for the next record, acknowledges it and returns it.

        Raises:
            QueueClosed: this end is closed.

        Cancelled: no record was taken.
        """

    def get_nowait(self) -> Any:
        """Returns the next record as `get` does, but raises `Empty` instead of waiting."""

    async def receive(self) -> Delivery:
        """Waits for the next record, which the caller acknowledges; raises and cancels as `get` does."""

    def receive_nowait(self) -> Delivery:
        """Returns the next record as `receive` does, but raises `Empty` instead of waiting."""

    def qsize(self) -> int:
        """Returns the number of messages that `get_nowait` could return now."""

    def empty(self) -> bool:
        """Returns whether `qsize` is 0."""

    def statistics(self) -> ReceiverStatistics:
        """Returns the counters."""

    async def aclose(self) -> None:
        """Closes this end; senders drop its unacknowledged messages once another end replaces it."""


class Topic(Protocol):
    """Publishes the latest record of each key."""

    def publish(self, key: str, record: Any) -> None:
        """Makes `record` the latest of `key` for all subscribers, without waiting."""

    async def aclose(self) -> None:
        """Closes this end; subscribers keep what they have."""


class Subscription(Protocol):
    """Receives the latest record of each key of a topic."""

    @property
    def latest(self) -> dict[str, Any]:
        """Returns the latest record of each key seen so far, which must not be changed."""

    @property
    def publisher(self) -> str:
        """Returns the incarnation of the service that publishes, "" before its first message."""

    @property
    def heartbeat_age(self) -> float:
        """Returns the seconds since the publisher last answered, infinity before its first message."""

    async def changed(self) -> None:
        """Waits until a record has arrived since the last call."""

    async def aclose(self) -> None:
        """Closes this end."""


class Transport(Protocol):
    """Opens the ends of a run's queues and topics by name, over memory or ZeroMQ.

    Each end belongs to the task group in which the transport was entered, and is open until closed.
    """

    async def sender(self, name: str, behavior_id: str = "*") -> SendingQueue:
        """Opens the sending end of queue `name` for this incarnation of the service."""

    async def receiver(self, name: str, capacity: Capacity, behavior_id: str = "*") -> ReceivingQueue:
        """Opens the receiving end of queue `name`, which `capacity` bounds exactly."""

    async def topic(self, service: str) -> Topic:
        """Opens the publishing end of `service`'s topic."""

    async def subscribe(self, service: str, pace: float = 0.0) -> Subscription:
        """Opens a subscription to `service`'s topic, which receives updates at most every `pace` seconds."""
