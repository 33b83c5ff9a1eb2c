"""Defines what queues and topics guarantee, whatever carries them.

A queue moves records from one or more senders to one receiver, in each sender's order. The
receiver's capacity is exact, in messages and in agent-steps: it is divided among the senders as
credit, and what a sender has put and the receiver has not acknowledged never exceeds it. `get`
acknowledges; arrival does not; `receive` hands out the record and leaves the acknowledgement to
the caller. While both ends live, delivery is once and in order: a sender keeps what is not acknowledged
and sends it again after a loss. What an incarnation of the receiver has not acknowledged when another
takes its place is dropped and counted: a stage that must not lose it puts it again.

A topic is for state: subscribers get the publisher's latest record, never a history, and a late or restarted
subscriber gets it at once. `messages.channels` names the queues and topics, and the type of the records of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from sparring.pipeline.messages.channels import Queue, Topic

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


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


class Delivery(Protocol[T_co]):
    """Holds a record from `receive`, which counts against the capacity until it is acknowledged."""

    @property
    def record(self) -> T_co:
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


class Sender(Protocol[T_contra]):
    """Sends records to the receiver of a queue."""

    @property
    def maxlen(self) -> int:
        """Returns the most messages this end may have unacknowledged: its share, 0 until the receiver grants it."""

    @property
    def receiver(self) -> str:
        """Returns the incarnation of the service that receives, "" before its first message."""

    async def put(self, record: T_contra, steps: int) -> None:
        """Sends a record, waiting for credit.

        Args:
            record: the caller must not change it afterwards.
            steps: agent-steps in it.

        Raises:
            TooLarge: there are more steps than the receiver's `Capacity.largest`.
            QueueClosed: this end is closed.

        Cancelled: the record was not put.
        """

    def put_nowait(self, record: T_contra, steps: int) -> None:
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


class Receiver(Protocol[T_co]):
    """Receives the records of all senders of a queue."""

    @property
    def maxlen(self) -> int:
        """Returns the capacity in messages."""

    async def get(self) -> T_co:
        """Waits for the next record, acknowledges it and returns it.

        Raises:
            QueueClosed: this end is closed.

        Cancelled: no record was taken.
        """

    def get_nowait(self) -> T_co:
        """Returns the next record as `get` does, but raises `Empty` instead of waiting."""

    async def receive(self) -> Delivery[T_co]:
        """Waits for the next record, which the caller acknowledges; raises and cancels as `get` does."""

    def receive_nowait(self) -> Delivery[T_co]:
        """Returns the next record as `receive` does, but raises `Empty` instead of waiting."""

    def qsize(self) -> int:
        """Returns the number of messages that `get_nowait` could return now."""

    def empty(self) -> bool:
        """Returns whether `qsize` is 0."""

    def statistics(self) -> ReceiverStatistics:
        """Returns the counters."""

    async def aclose(self) -> None:
        """Closes this end; senders drop its unacknowledged messages once another end replaces it."""


class Publisher(Protocol):
    """Publishes the latest record of each topic of a service."""

    def publish(self, topic: Topic[T], record: T) -> None:
        """Makes `record` the latest of `topic` for all subscribers, without waiting."""

    async def aclose(self) -> None:
        """Closes this end; subscribers keep what they have."""


class Subscription(Protocol):
    """Receives the latest record of each topic of a service."""

    def latest(self, topic: Topic[T]) -> T | None:
        """Returns the latest record of a topic, which must not be changed; None before the first."""

    def every(self, record: type[T]) -> list[T]:
        """Returns the latest records of all topics of this type."""

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

    async def sender(self, queue: Queue[T]) -> Sender[T]:
        """Opens a sending end of a queue for this incarnation of the service."""

    async def receiver(self, queue: Queue[T], capacity: Capacity) -> Receiver[T]:
        """Opens the receiving end of a queue, which `capacity` bounds exactly."""

    async def publisher(self, service: str) -> Publisher:
        """Opens the publishing end of `service`'s topics."""

    async def subscribe(self, service: str, pace: float = 0.0) -> Subscription:
        """Opens a subscription to `service`'s topics, which receives updates at most every `pace` seconds."""
