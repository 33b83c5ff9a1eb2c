"""The ends of a topic add waiting to the rules in `topic`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TypeVar

import anyio
import anyio.lowlevel

from sparring.pipeline.errors import QueueClosed
from sparring.pipeline.messages.channels import Topic
from sparring.pipeline.messages.fields import Value
from sparring.pipeline.queues.ends import End
from sparring.pipeline.queues.topic import PublisherState, SubscriberState
from sparring.pipeline.queues.wire import (
    Message,
    PublisherHeartbeat,
    SubscriberStatus,
    Timing,
    TopicUpdate,
    incarnation_of,
    misdirected,
)

T = TypeVar("T")


class Publisher(End):
    """Publishes the latest record of each topic of a service.

    After `aclose`, subscribers keep the records they have.

    Args:
        name: "topic:" and the service.
        end_id: id of this end.
        timing: intervals.
        clock: gives rising seconds.
    """

    def __init__(self, name: str, end_id: str, timing: Timing, clock: Callable[[], float]) -> None:
        super().__init__(name, end_id, timing, clock)
        self._state = PublisherState(end_id, timing)

    @property
    def subscribers(self) -> int:
        """Returns the number of present subscribers."""
        return self._state.subscribers

    def publish(self, topic: Topic[T], record: T) -> None:
        """Makes `record` the latest of `topic` for all subscribers, without waiting.

        Its arrays must not change until long after the topic is published again: pass copies.

        Raises:
            QueueClosed: this end is closed.
            CodecError: a field's value does not match its annotation.
        """
        if self.closed:
            raise QueueClosed(f"got {topic.key!r} for {self.id}, which is closed; expected an open end; open a new one")
        self._state.publish(topic.key, self._link.pack(record))
        self.settle()

    @property
    def _deadline(self) -> float:
        return float("inf")

    def received(self, message: Message, route: Hashable) -> None:
        """Handles the status of a subscriber."""
        if not isinstance(message, SubscriberStatus):
            raise misdirected(message)
        self._state.on_status(self._clock(), message, route)

    def settle(self) -> None:
        """Sends all due messages."""
        self._send(self._state.outgoing(self._clock()))

    def _last_messages(self) -> Iterable[tuple[Hashable, Message]]:
        return self._state.final_updates()


class Subscription(End):
    """Receives the latest record of each topic of a service.

    Args:
        name: "topic:" and the service.
        end_id: id of this end.
        timing: intervals.
        clock: gives rising seconds.
        pace: least seconds between updates.
    """

    def __init__(
        self,
        name: str,
        end_id: str,
        timing: Timing,
        clock: Callable[[], float],
        pace: float = 0.0,
    ) -> None:
        super().__init__(name, end_id, timing, clock)
        self._state = SubscriberState(timing, pace)

    @property
    def records(self) -> Mapping[str, Value]:
        """Returns the latest record of each key."""
        return self._state.latest

    def latest(self, topic: Topic[T]) -> T | None:
        """Returns the latest record of a topic, which must not be changed; None before the first."""
        record = self._state.latest.get(topic.key)
        return record if isinstance(record, topic.record) else None

    def every(self, record: type[T]) -> list[T]:
        """Returns the latest records of all topics of this type."""
        return [one for one in self._state.latest.values() if isinstance(one, record)]

    @property
    def publisher(self) -> str:
        """Returns the incarnation of the service that publishes, "" before its first message."""
        return incarnation_of(self._state.publisher)

    @property
    def heartbeat_age(self) -> float:
        """Returns the seconds since the publisher last answered, infinity before its first message."""
        return self._clock() - self._state.last_seen_at

    async def changed(self) -> None:
        """Waits until a record has arrived since the last call.

        Raises:
            QueueClosed: this end is closed.
        """
        await anyio.lowlevel.checkpoint()
        await self._changed.wait()
        if self.closed:
            raise QueueClosed("got a wait on a subscription that is closed; expected an open end; subscribe again")
        self._changed = anyio.Event()

    @property
    def _deadline(self) -> float:
        return self._state.deadline

    def received(self, message: Message, route: Hashable) -> None:
        """Handles a message of the publisher."""
        if isinstance(message, TopicUpdate):
            if self._state.on_update(self._clock(), message):
                self._changed.set()
        elif isinstance(message, PublisherHeartbeat):
            self._state.on_heartbeat(self._clock(), message)
        else:
            raise misdirected(message)

    def malformed(self) -> None:
        """Asks for the latest updates: one of them could not be read."""
        self.linked()

    def linked(self) -> None:
        """Introduces this end to the publisher that listens now."""
        self._state.linked()
        self.settle()

    def settle(self) -> None:
        """Sends a status if one is due."""
        if not self.closed:
            status = self._state.outgoing(self._clock())
            self._send([] if status is None else [(None, status)])
            self.timer.advance(self._state.deadline)

    def _last_messages(self) -> Iterable[tuple[Hashable, Message]]:
        return [(None, SubscriberStatus(serial=0, publisher="", revision=0, answer=False, leaving=True))]
