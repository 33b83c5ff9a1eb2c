"""Carries queues and topics within one process, under any event loop and any clock.

The ends and their rules are the same as over ZeroMQ; here the link is a list of calls. Records are
passed by reference: neither side may change one after it was put or published.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import anyio

from sparring.pipeline.errors import QueueError
from sparring.pipeline.messages.channels import Queue
from sparring.pipeline.queues.interface import Capacity, T
from sparring.pipeline.queues.receiving_end import ReceivingEnd
from sparring.pipeline.queues.scope import Scope
from sparring.pipeline.queues.sending_end import SendingEnd
from sparring.pipeline.queues.topic_ends import SubscriptionEnd, TopicEnd
from sparring.pipeline.queues.wire import (
    DEFAULT_TIMING,
    Data,
    Grant,
    PublisherHeartbeat,
    SenderBye,
    SenderHello,
    SubscriberStatus,
    Timing,
    TopicUpdate,
    make_id,
)


class MemoryHub:
    """Shares open ends and messages in transit among the transports of one process.

    A call caused by an arrival is made after the call that sent the message has returned, never inside it.
    """

    def __init__(self) -> None:
        self.opened = itertools.count(1)
        self.senders: dict[str, list[SendingEnd[Any]]] = {}
        self.receivers: dict[str, ReceivingEnd[Any]] = {}
        self.topics: dict[str, TopicEnd] = {}
        self.subscriptions: dict[str, list[SubscriptionEnd]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._running = False

    def post(self, call: Callable[[], None]) -> None:
        """Makes a call as soon as the earlier ones have returned."""
        self._calls.append(call)
        if self._running:
            return
        self._running = True
        try:
            while self._calls:
                self._calls.popleft()()
        finally:
            self._running = False

    def to_receiver(self, name: str, message: SenderHello | Data | SenderBye, route: SendingEnd[Any]) -> None:
        """Delivers a message to the receiver of a queue, or loses it if none is open."""
        end = self.receivers.get(name)
        if end is not None:
            end.received(message, route)
            end.settle()

    def to_sender(self, end: SendingEnd[Any], grant: Grant) -> None:
        """Delivers a Grant to a sender, or loses it if the end is closed."""
        if not end.closed:
            end.received(grant)

    def to_publisher(self, service: str, status: SubscriberStatus, route: SubscriptionEnd) -> None:
        """Delivers a message to a publisher, or loses it if none is open."""
        end = self.topics.get(service)
        if end is not None:
            end.received(status, route)
            end.settle()

    def to_subscriber(self, end: SubscriptionEnd, message: TopicUpdate | PublisherHeartbeat, record: Any) -> None:
        """Delivers a message to a subscriber, or loses it if the end is closed."""
        if not end.closed:
            end.received(message, record)
            end.flush()


class MemoryTransport:
    """Opens the ends of one incarnation of a service, in memory.

    Args:
        hub: shared by all transports that exchange messages; a new one by default.
        start: this incarnation of the service, such as "stepping-0.1".
        timing: intervals.
        clock: seconds, rising.
    """

    def __init__(
        self,
        hub: MemoryHub | None = None,
        *,
        start: str = "memory.1",
        timing: Timing = DEFAULT_TIMING,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        self.hub = MemoryHub() if hub is None else hub
        self.start = start
        self._timing = timing
        self._clock = clock
        self._scope = Scope()

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._scope.__aexit__(exc_type, exc, traceback)

    def abandon(self) -> None:
        """Drops all ends without notifying their peers, as a crash would."""
        self._scope.close(notify_peers=False)

    # ------------------------------------------------------------ queues

    async def sender(self, queue: Queue[T]) -> SendingEnd[T]:
        """Opens a sending end of a queue; ends open at the same time are different senders."""
        name, hub, scope = queue.name, self.hub, self._scope
        peers = hub.senders.setdefault(name, [])
        index = scope.index(name)

        def release() -> None:
            scope.remove(end)
            scope.release_index(name, index)
            peers.remove(end)

        end: SendingEnd[T] = SendingEnd(
            make_id(self.start, next(hub.opened), index),
            self._timing,
            self._clock,
            pack=lambda record: (record, 0),
            transmit=lambda message: hub.post(lambda: hub.to_receiver(name, message, end)),
            poll=_nothing,
            release=release,
        )
        peers.append(end)
        scope.add(end, end.timer)
        end.flush()
        return end

    async def receiver(self, queue: Queue[T], capacity: Capacity) -> ReceivingEnd[T]:
        """Opens the receiving end of a queue, which `capacity` bounds exactly.

        Raises:
            QueueError: the queue already has a receiver, or a sender's share would hold nothing.
        """
        name, hub, scope = queue.name, self.hub, self._scope
        _refuse_second("receiver of queue", name, hub.receivers)

        def release() -> None:
            scope.remove(end)
            del hub.receivers[name]

        end: ReceivingEnd[T] = ReceivingEnd(
            make_id(self.start, next(hub.opened)),
            capacity,
            self._timing,
            self._clock,
            unpack=lambda payload: payload,
            on_discard=lambda _sender, _error: None,
            transmit=lambda route, grant: hub.post(lambda: hub.to_sender(route, grant)),
            poll=_nothing,
            release=release,
        )
        hub.receivers[name] = end
        scope.add(end, end.timer)
        for sender in [*hub.senders.get(name, ())]:
            sender.linked()
        return end

    # ------------------------------------------------------------ topics

    async def publisher(self, service: str) -> TopicEnd:
        """Opens the publishing end of `service`'s topic.

        Raises:
            QueueError: the topic already has a publisher.
        """
        hub, scope = self.hub, self._scope
        _refuse_second("publisher of topic", service, hub.topics)

        def release() -> None:
            scope.remove(end)
            del hub.topics[service]

        end = TopicEnd(
            make_id(self.start, next(hub.opened)),
            self._timing,
            self._clock,
            pack=lambda record: record,
            transmit=lambda route, message, record: hub.post(lambda: hub.to_subscriber(route, message, record)),
            poll=_nothing,
            release=release,
        )
        hub.topics[service] = end
        scope.add(end)
        for subscription in [*hub.subscriptions.get(service, ())]:
            subscription.linked()
        return end

    async def subscribe(self, service: str, pace: float = 0.0) -> SubscriptionEnd:
        """Opens a subscription to `service`'s topic, which receives updates at most every `pace` seconds."""
        hub, scope = self.hub, self._scope
        peers = hub.subscriptions.setdefault(service, [])

        def release() -> None:
            scope.remove(end)
            peers.remove(end)

        end = SubscriptionEnd(
            self._timing,
            self._clock,
            transmit=lambda status: hub.post(lambda: hub.to_publisher(service, status, end)),
            poll=_nothing,
            release=release,
            pace=pace,
        )
        peers.append(end)
        scope.add(end, end.timer)
        end.flush()
        return end


def _nothing() -> None:
    """Does nothing: memory delivers every message at once."""


def _refuse_second(what: str, name: str, opened: Mapping[str, object]) -> None:
    if name in opened:
        raise QueueError(f"got a second {what} {name!r}; expected one at a time; close the first, or use another name")
