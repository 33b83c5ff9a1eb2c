"""Implements the ends of retained topics; all but `changed` never waits.

Each subscriber gets the latest record of each key, at its own pace. Each publication has a revision. A subscriber
reports the last revision it has (`SubscriberStatus`): at its start, after each update, and as a ping. The publisher
pushes newer records in the order of their revisions, and nothing more to that subscriber until it has confirmed them
all: a slow subscriber costs at most one copy of each key, and skips records that were replaced meanwhile. Each update
names the one it follows, so that a subscriber accepts none after a gap; an update that two pings have not confirmed is
sent again. A subscriber that names its topics gets no others.
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import anyio
import anyio.lowlevel

from sparring.pipeline.errors import QueueClosed
from sparring.pipeline.messages.channels import Topic
from sparring.pipeline.messages.schema import Value
from sparring.pipeline.queues.ends import End
from sparring.pipeline.queues.wire import Message, Payload, SubscriberStatus, Timing, TopicUpdate, misdirected

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Subscriber:
    """Holds a publisher's view of a subscriber.

    Attributes:
        has: the last revision that it confirmed; `sent` is the last one pushed to it.
        missed: number of pings that did not confirm the last push.
        echo: serial of its latest status.
        answer: it waits for an answer.
        keys: of the topics that it reads; none for all.
    """

    last_seen_at: float
    has: int = 0
    sent: int = 0
    missed: int = 0
    echo: int = 0
    answer: bool = False
    keys: tuple[str, ...] = ()


class Publisher(End):
    """Publishes the latest record of each topic of a service, and pushes it to subscribers.

    After `aclose`, subscribers keep the records they have. `confirmed` before it gives them the latest ones for sure.

    Args:
        name: "topic:" and the service.
        end_id: id of this end.
        timing: intervals.
        clock: gives rising seconds.
    """

    def __init__(self, name: str, end_id: str, timing: Timing, clock: Callable[[], float]) -> None:
        super().__init__(name, end_id, clock)
        self._timing = timing
        self._revision = 0
        self._latest: dict[str, tuple[int, Payload]] = {}  # key: revision and payload, in the order of revisions
        self._subscribers: dict[Hashable, Subscriber] = {}
        self._ready: dict[Hashable, Subscriber] = {}  # those that may be due an update or an answer
        self._is_closing = False

    def publish(self, topic: Topic[T], record: T) -> None:
        """Makes `record` the latest of `topic` for all subscribers, without waiting.

        Its arrays must not change until long after the topic is published again: pass copies.

        Raises:
            QueueClosed: this end is closed.
            CodecError: a field's value does not match its annotation.
        """
        if self.closed:
            raise QueueClosed(f"got {topic.key!r} for {self.id}, which is closed; expected an open end; open a new one")
        payload = self._link.pack(record)
        self._revision += 1
        self._latest.pop(topic.key, None)
        self._latest[topic.key] = self._revision, payload
        readers = self._subscribers.items()
        self._ready.update((route, one) for route, one in readers if not one.keys or topic.key in one.keys)
        self.settle()

    def received(self, message: Message, route: Hashable) -> None:
        """Handles the status of a subscriber."""
        if not isinstance(message, SubscriberStatus):
            raise misdirected(message)
        if message.leaving:
            self._subscribers.pop(route, None)
            self._ready.pop(route, None)
            return
        now = self._clock()
        subscriber = self._subscribers.setdefault(route, Subscriber(now))
        if message.serial <= subscriber.echo:
            return
        subscriber.last_seen_at = now
        subscriber.echo, subscriber.keys = message.serial, message.keys
        subscriber.has = message.revision if message.publisher == self.id else 0
        subscriber.answer |= message.answer
        if subscriber.has < subscriber.sent:
            subscriber.missed += message.answer  # the first may have crossed the push on the link
        if subscriber.has >= subscriber.sent or subscriber.missed > 1:
            subscriber.sent = subscriber.has
        self._ready[route] = subscriber
        self._changed.set()

    async def confirmed(self) -> None:
        """Waits until all subscribers have confirmed the latest records, which they do without a pause from now on.

        A subscriber that has died never does; so wait with a deadline.
        """
        if self.closed:
            return
        self._is_closing = True
        late = [(route, one) for route, one in self._subscribers.items() if one.sent > one.has]
        self._send([(route, TopicUpdate(self.id, one.echo, is_last=True)) for route, one in late])
        await self._until(lambda: self.closed or not any(map(self._lacks, self._subscribers.values())))

    def _lacks(self, subscriber: Subscriber) -> bool:
        latest = self._latest.items()
        return any(has > subscriber.has and key in (subscriber.keys or (key,)) for key, (has, _) in latest)

    def outgoing(self, now: float) -> list[tuple[Hashable, TopicUpdate]]:
        """Returns the messages to send now."""
        out: list[tuple[Hashable, TopicUpdate]] = []
        for route, subscriber in self._ready.items():
            if now - subscriber.last_seen_at >= self._timing.peer_timeout:
                del self._subscribers[route]
                continue
            pushed = [] if subscriber.sent > subscriber.has else self._push(route, subscriber)
            if subscriber.answer and not pushed:
                out.append((route, TopicUpdate(self.id, subscriber.echo)))
            subscriber.answer = False
            out += pushed
        self._ready.clear()
        return out

    def last_messages(self) -> list[tuple[Hashable, TopicUpdate]]:
        """Returns the updates to send before this end closes, without waiting for confirmations.

        An unconfirmed push may be lost, so it is repeated: after the close, subscribers could not request it.
        """
        for subscriber in self._subscribers.values():
            subscriber.sent = subscriber.has
        return [pushed for route, subscriber in self._subscribers.items() for pushed in self._push(route, subscriber)]

    def _push(self, route: Hashable, subscriber: Subscriber) -> list[tuple[Hashable, TopicUpdate]]:
        """Returns the updates that are newer than the last one sent."""
        pushed: list[tuple[Hashable, TopicUpdate]] = []
        for key, (revision, payload) in self._latest.items():
            if revision > subscriber.sent and (not subscriber.keys or key in subscriber.keys):
                sent, is_last = subscriber.sent, self._is_closing
                update = TopicUpdate(self.id, subscriber.echo, sent, revision, key, is_last, payload)
                pushed.append((route, update))
                subscriber.sent, subscriber.missed = revision, 0
        return pushed


class Subscription(End):
    """Receives the latest record of each topic of a service.

    Args:
        name: "topic:" and the service.
        end_id: id of this end.
        timing: intervals.
        clock: gives rising seconds.
        pace: seconds from an update to its confirmation, which permits the next one: 0 for no delay, more for a
            reader that looks only now and then.
        keys: of the topics that it receives; none for all.

    Attributes:
        records: the latest record of each key.
    """

    def __init__(
        self,
        name: str,
        end_id: str,
        timing: Timing,
        clock: Callable[[], float],
        pace: float = 0.0,
        keys: tuple[str, ...] = (),
    ) -> None:
        super().__init__(name, end_id, clock)
        self.records: dict[str, Value] = {}
        self._timing = timing
        self._pace = pace
        self._keys = keys
        self._publisher = ""  # id of the end that publishes
        self._last_seen_at = -math.inf
        self._revision = 0
        self._serial = 0
        self._believed = 0  # another publisher is accepted only if it echoes a later status than this
        self._pinged_at = -math.inf
        self._confirm_at = math.inf

    def latest(self, topic: Topic[T]) -> T | None:
        """Returns the latest record of a topic, which must not be changed; None before the first."""
        record = self.records.get(topic.key)
        return record if isinstance(record, topic.record) else None

    def every(self, record: type[T]) -> list[T]:
        """Returns the latest records of all topics of this type."""
        return [one for one in self.records.values() if isinstance(one, record)]

    @property
    def publisher(self) -> str:
        """Returns the incarnation of the service that publishes, "" before its first message."""
        return self._publisher.rpartition("#")[0]

    @property
    def heartbeat_age(self) -> float:
        """Returns the seconds since the publisher last answered, infinity before its first message."""
        return self._clock() - self._last_seen_at

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
    def deadline(self) -> float:
        """Returns the latest time at which `outgoing` has a message, if nothing else happens."""
        return min(self._confirm_at, self._pinged_at + self._timing.heartbeat)

    def received(self, message: Message, route: Hashable) -> None:
        """Handles a message of the publisher."""
        if not isinstance(message, TopicUpdate):
            raise misdirected(message)
        if message.publisher != self._publisher:
            if message.echo <= self._believed:
                return
            self._believed = self._serial
            self._publisher = message.publisher
            self._revision = 0
        self._last_seen_at = self._clock()
        if message.revision:
            self._confirm_at = min(self._confirm_at, self._last_seen_at + self._pace)
        if message.is_last:
            self._confirm_at = self._last_seen_at
        if message.revision > self._revision and message.after <= self._revision:
            self.records[message.key] = message.payload.unpack(object)
            self._revision = message.revision
            self._changed.set()

    def malformed(self) -> None:
        """Asks for the latest updates: one of them could not be read."""
        self.linked()

    def linked(self) -> None:
        """Introduces this end to the publisher that listens now."""
        self._pinged_at = -math.inf
        self.settle()

    def outgoing(self, now: float) -> list[tuple[None, SubscriberStatus]]:
        """Returns the status to send now, if one is due."""
        ping = self._pinged_at + self._timing.heartbeat <= now
        if not ping and self._confirm_at > now:
            return []
        self._confirm_at = math.inf
        self._serial += 1
        if ping:
            self._pinged_at = now
        status = SubscriberStatus(
            serial=self._serial, publisher=self._publisher, revision=self._revision, answer=ping, keys=self._keys
        )
        return [(None, status)]

    def last_messages(self) -> list[tuple[None, SubscriberStatus]]:
        """Returns the message by which this subscriber leaves."""
        return [(None, SubscriberStatus(serial=0, publisher="", revision=0, answer=False, leaving=True))]
