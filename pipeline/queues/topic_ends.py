"""The ends of a topic add waiting to the rules in `topic`, for memory and ZeroMQ alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import anyio
import anyio.lowlevel

from sparring.pipeline.errors import QueueClosed
from sparring.pipeline.messages.channels import Topic
from sparring.pipeline.queues.timer import Timer
from sparring.pipeline.queues.topic import PublisherState, SubscriberState
from sparring.pipeline.queues.wire import PublisherHeartbeat, SubscriberStatus, Timing, TopicUpdate, incarnation_of

T = TypeVar("T")


class TopicEnd:
    """Publishes the records of a topic; see `Publisher`.

    Args:
        publisher: id of this end.
        timing: intervals.
        clock: gives rising seconds.
        pack: turns a record into a payload, once for all subscribers.
        transmit: sends one message and its payload along a route, or loses it; never waits.
        poll: delivers arrived messages; called after sending, which may have hidden an arrival.
        release: frees the transport's resources for this end; called once, when it closes.
    """

    def __init__(
        self,
        publisher: str,
        timing: Timing,
        clock: Callable[[], float],
        pack: Callable[[Any], Any],
        transmit: Callable[[Any, TopicUpdate | PublisherHeartbeat, Any], None],
        poll: Callable[[], None],
        release: Callable[[], None],
    ) -> None:
        self._state = PublisherState(publisher, timing)
        self._clock = clock
        self._pack = pack
        self._transmit = transmit
        self._poll = poll
        self._release = release
        self._closed = False

    @property
    def subscribers(self) -> int:
        """Returns the number of present subscribers."""
        return self._state.subscribers

    @property
    def closed(self) -> bool:
        """Returns whether this end is closed."""
        return self._closed

    def publish(self, topic: Topic[T], record: T) -> None:
        """Makes `record` the latest of `topic` for all subscribers, without waiting.

        Its arrays must not change until long after the topic is published again: pass copies.

        Raises:
            QueueClosed: this end is closed.
            CodecError: a field's value does not match its annotation.
        """
        if self._closed:
            raise QueueClosed(
                f"got {topic.key!r} for {self._state.publisher}, which is closed; expected an open end; open a new one"
            )
        self._state.publish(topic.key, self._pack(record))
        self.settle()

    def received(self, status: SubscriberStatus, route: Any) -> None:
        """Handles an arrived message; the transport calls `settle` after the last one."""
        self._state.on_status(self._clock(), status, route)

    def settle(self) -> None:
        """Sends all due messages."""
        for route, message, payload in self._state.outgoing(self._clock()):
            self._transmit(route, message, payload)
        self._poll()

    def close(self, *, notify_peers: bool = True) -> None:
        """Closes this end at once; without `notify_peers` it sends no final updates, as in a crash."""
        if self._closed:
            return
        if notify_peers:
            for route, message, payload in self._state.final_updates():
                self._transmit(route, message, payload)
        self._closed = True
        self._release()

    async def aclose(self) -> None:
        """Closes this end; subscribers keep the records they have."""
        self.close()
        await anyio.lowlevel.checkpoint()


class SubscriptionEnd:
    """Receives the records of a topic; see `Subscription`.

    Args:
        timing: intervals.
        clock: gives rising seconds.
        transmit: sends one message to the publisher, or loses it; never waits.
        poll: delivers arrived messages; called after sending, which may have hidden an arrival.
        release: frees the transport's resources for this end; called once, when it closes.
        pace: least seconds between updates.
    """

    def __init__(
        self,
        timing: Timing,
        clock: Callable[[], float],
        transmit: Callable[[SubscriberStatus], None],
        poll: Callable[[], None],
        release: Callable[[], None],
        pace: float = 0.0,
    ) -> None:
        self._state = SubscriberState(timing, pace)
        self._clock = clock
        self._transmit = transmit
        self._poll = poll
        self._release = release
        self._closed = False
        self._fresh = anyio.Event()
        self.timer = Timer(clock, lambda: self._state.deadline, self.flush)

    @property
    def records(self) -> Mapping[str, Any]:
        """Returns the latest record of each key seen so far."""
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

    @property
    def closed(self) -> bool:
        """Returns whether this end is closed."""
        return self._closed

    async def changed(self) -> None:
        """Waits until a record has arrived since the last call.

        Raises:
            QueueClosed: this end is closed.
        """
        await anyio.lowlevel.checkpoint()
        await self._fresh.wait()
        if self._closed:
            raise QueueClosed("got a wait on a subscription that is closed; expected an open end; subscribe again")
        self._fresh = anyio.Event()

    def received(self, message: TopicUpdate | PublisherHeartbeat, record: Any) -> None:
        """Handles an arrived message; the transport calls `flush` after the last one."""
        now = self._clock()
        if isinstance(message, PublisherHeartbeat):
            self._state.on_heartbeat(now, message)
        elif self._state.on_update(now, message, record):
            self._fresh.set()

    def linked(self) -> None:
        """Handles a new connection of the link to a publisher."""
        self._state.linked()
        self.flush()

    def flush(self) -> None:
        """Sends a status if one is due."""
        if self._closed:
            return
        status = self._state.outgoing(self._clock())
        if status is not None:
            self._transmit(status)
            self._poll()
        self.timer.advance(self._state.deadline)

    def close(self, *, notify_peers: bool = True) -> None:
        """Closes this end at once; without `notify_peers` it sends nothing, as in a crash."""
        if self._closed:
            return
        if notify_peers:
            self._transmit(SubscriberStatus(serial=0, publisher="", revision=0, answer=False, leaving=True))
        self._closed = True
        self.timer.stop()
        self._release()
        self._fresh.set()

    async def aclose(self) -> None:
        """Closes this end."""
        self.close()
        await anyio.lowlevel.checkpoint()
