"""Implements retained topics: the rules without I/O, and the ends that add waiting to them.

Each subscriber gets the latest record of each key, at its own pace. Each publication has a revision. A subscriber
reports the last revision it has (`SubscriberStatus`): at its start, after each update, and as a ping. The publisher
pushes newer records in the order of their revisions, and nothing more to that subscriber until it has confirmed them
all: a slow subscriber costs at most one copy of each key, and skips records that were replaced meanwhile. Each update
names the one it follows, so that a subscriber accepts none after a gap; an update that two pings have not confirmed is
sent again.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import anyio
import anyio.lowlevel

from sparring.pipeline.errors import QueueClosed
from sparring.pipeline.messages.channels import Topic
from sparring.pipeline.messages.fields import Value
from sparring.pipeline.queues.ends import End
from sparring.pipeline.queues.wire import (
    Message,
    Payload,
    SubscriberStatus,
    Timing,
    TopicUpdate,
    incarnation_of,
    misdirected,
)

T = TypeVar("T")

ToSubscriber = tuple[Hashable, TopicUpdate]
"""A route, and a message along it."""


@dataclass(slots=True, eq=False)
class Subscriber:
    """Holds a publisher's view of a subscriber.

    Attributes:
        has: the last revision that it confirmed; `sent` is the last one pushed to it.
        missed: number of pings that did not confirm the last push.
        echo: serial of its latest status.
        answer: it waits for an answer.
    """

    last_seen_at: float
    has: int = 0
    sent: int = 0
    missed: int = 0
    echo: int = 0
    answer: bool = False


class PublisherState:
    """Keeps the latest record of each key, and pushes it to subscribers.

    Args:
        publisher: id of this end.
        timing: intervals.
    """

    def __init__(self, publisher: str, timing: Timing) -> None:
        self.publisher = publisher
        self._timing = timing
        self._revision = 0
        self._latest: dict[str, tuple[int, Payload]] = {}  # key: revision and payload, in the order of revisions
        self._subscribers: dict[Hashable, Subscriber] = {}
        self._ready: dict[Hashable, Subscriber] = {}  # those that may be due an update or an answer

    @property
    def subscribers(self) -> int:
        """Returns the number of present subscribers."""
        return len(self._subscribers)

    def publish(self, key: str, payload: Payload) -> None:
        """Makes `payload` the latest of `key`."""
        self._revision += 1
        self._latest.pop(key, None)
        self._latest[key] = self._revision, payload
        self._ready.update(self._subscribers)

    def on_status(self, now: float, status: SubscriberStatus, route: Hashable) -> None:
        """Handles the status of a subscriber."""
        if status.leaving:
            self._subscribers.pop(route, None)
            self._ready.pop(route, None)
            return
        subscriber = self._subscribers.setdefault(route, Subscriber(now))
        if status.serial <= subscriber.echo:
            return
        subscriber.last_seen_at = now
        subscriber.echo = status.serial
        subscriber.has = status.revision if status.publisher == self.publisher else 0
        subscriber.answer |= status.answer
        if subscriber.has < subscriber.sent:
            subscriber.missed += status.answer  # the first may have crossed the push on the link
        if subscriber.has >= subscriber.sent or subscriber.missed > 1:
            subscriber.sent = subscriber.has
        self._ready[route] = subscriber

    def outgoing(self, now: float) -> list[ToSubscriber]:
        """Returns the messages to send now."""
        out: list[ToSubscriber] = []
        for route, subscriber in self._ready.items():
            if now - subscriber.last_seen_at >= self._timing.peer_timeout:
                del self._subscribers[route]
                continue
            pushed = [] if subscriber.sent > subscriber.has else self._push(route, subscriber)
            if subscriber.answer and not pushed:
                out.append((route, TopicUpdate(publisher=self.publisher, echo=subscriber.echo)))
            subscriber.answer = False
            out += pushed
        self._ready.clear()
        return out

    def final_updates(self) -> list[ToSubscriber]:
        """Returns the updates to send before this end closes, without waiting for confirmations.

        An unconfirmed push may be lost, so it is repeated: after the close, subscribers could not request it.
        """
        for subscriber in self._subscribers.values():
            subscriber.sent = subscriber.has
        return [pushed for route, subscriber in self._subscribers.items() for pushed in self._push(route, subscriber)]

    def _push(self, route: Hashable, subscriber: Subscriber) -> list[ToSubscriber]:
        """Returns the updates that are newer than the last one sent."""
        pushed: list[ToSubscriber] = []
        for key, (revision, payload) in self._latest.items():
            if revision > subscriber.sent:
                update = TopicUpdate(
                    publisher=self.publisher,
                    echo=subscriber.echo,
                    after=subscriber.sent,
                    revision=revision,
                    key=key,
                    payload=payload,
                )
                pushed.append((route, update))
                subscriber.sent, subscriber.missed = revision, 0
        return pushed


class SubscriberState:
    """Keeps the latest records that a publisher has pushed.

    Args:
        timing: intervals.
        pace: seconds from an update to its confirmation, which permits the next one: 0 for no delay, more for a
            reader that looks only now and then.
    """

    def __init__(self, timing: Timing, pace: float = 0.0) -> None:
        self._timing = timing
        self._pace = pace
        self.publisher = ""
        self.latest: dict[str, object] = {}
        self.last_seen_at = -math.inf
        self._revision = 0
        self._serial = 0
        self._believed = 0  # another publisher is accepted only if it echoes a later status than this
        self._pinged_at = -math.inf
        self._confirm_at = math.inf

    @property
    def deadline(self) -> float:
        """Returns the latest time at which `outgoing` has a message, if nothing else happens."""
        return min(self._confirm_at, self._pinged_at + self._timing.heartbeat)

    def linked(self) -> None:
        """Handles a new connection of the link."""
        self._pinged_at = -math.inf

    def on_update(self, now: float, update: TopicUpdate) -> bool:
        """Handles a message of a publisher; returns whether it brought a new record.

        Raises:
            CodecError: the record cannot be read.
        """
        if update.publisher != self.publisher:
            if update.echo <= self._believed:
                return False
            self._believed = self._serial
            self.publisher = update.publisher
            self._revision = 0
        self.last_seen_at = now
        if update.revision:
            self._confirm_at = min(self._confirm_at, now + self._pace)
        if update.revision <= self._revision or update.after > self._revision:
            return False
        self.latest[update.key] = update.payload.unpack(object)
        self._revision = update.revision
        return True

    def outgoing(self, now: float) -> SubscriberStatus | None:
        """Returns the status to send now, if one is due."""
        ping = self._pinged_at + self._timing.heartbeat <= now
        if not ping and self._confirm_at > now:
            return None
        self._confirm_at = math.inf
        self._serial += 1
        if ping:
            self._pinged_at = now
        return SubscriberStatus(serial=self._serial, publisher=self.publisher, revision=self._revision, answer=ping)


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

    def received(self, message: Message, route: Hashable) -> None:
        """Handles the status of a subscriber."""
        if not isinstance(message, SubscriberStatus):
            raise misdirected(message)
        self._state.on_status(self._clock(), message, route)

    def _outgoing(self, now: float) -> Iterable[tuple[Hashable, Message]]:
        return self._state.outgoing(now)

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
        if not isinstance(message, TopicUpdate):
            raise misdirected(message)
        if self._state.on_update(self._clock(), message):
            self._changed.set()

    def malformed(self) -> None:
        """Asks for the latest updates: one of them could not be read."""
        self.linked()

    def linked(self) -> None:
        """Introduces this end to the publisher that listens now."""
        self._state.linked()
        self.settle()

    def _outgoing(self, now: float) -> Iterable[tuple[Hashable, Message]]:
        status = self._state.outgoing(now)
        return [] if status is None else [(None, status)]

    def _last_messages(self) -> Iterable[tuple[Hashable, Message]]:
        return [(None, SubscriberStatus(serial=0, publisher="", revision=0, answer=False, leaving=True))]
