"""The real ends of queues and topics over the faulty network, with the frames of ZeroMQ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import anyio
import trio

from sparring.pipeline.errors import CodecError, QueueError
from sparring.pipeline.messages.channels import Queue
from sparring.pipeline.messages.codec import SERVICES, Buffer
from sparring.pipeline.queues import frames as framing
from sparring.pipeline.queues.interface import Capacity
from sparring.pipeline.queues.receiving_end import ReceivingEnd
from sparring.pipeline.queues.scope import Scope
from sparring.pipeline.queues.sending_end import SendingEnd
from sparring.pipeline.queues.topic_ends import SubscriptionEnd, TopicEnd
from sparring.pipeline.queues.wire import DEFAULT_TIMING, make_id
from tests.world.world_links import Lane, Network


class Receiving:
    """Passes frames to an end of a part and discards malformed ones, as `Link` of the real transport does."""

    def __init__(self, network: Network, part: str, name: str, scope: Scope) -> None:
        self._network = network
        self.part = part
        self._name = name
        self._scope = scope

    def take(self, read: Callable[[], None], settle: Callable[[], None], malformed: Callable[[], None]) -> None:
        """Reads a message; any failure but a CodecError ends the part."""
        try:
            try:
                read()
            except CodecError as error:
                self._network.watcher.event("malformed", self._name, type(error).__name__)
                malformed()
            settle()
        except Exception as error:
            self._scope.fail(error)


class WorldTransport:
    """Opens the ends of one incarnation of a part.

    Args:
        network: network of the world.
        part: name of the part.
        start: incarnation of the part.
        opened: returns the numbers of ends, which come from the wall clock in the real transport.
        created: called with each new end.
    """

    def __init__(
        self, network: Network, part: str, start: str, opened: Callable[[], int], created: Callable[[str, Any], None]
    ) -> None:
        self._network = network
        self._part = part
        self._start = start
        self._opened = opened
        self._created = created
        self._scope = Scope()

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._scope.__aexit__(exc_type, exc, traceback)

    def abandon(self) -> None:
        """Drops all ends, as a crash would."""
        self._scope.close(notify_peers=False)

    def _receiving(self, name: str) -> Receiving:
        return Receiving(self._network, self._part, name, self._scope)

    # ---------------------------------------------------------------- queues

    async def sender(self, queue: Queue[Any]) -> SendingEnd[Any]:
        """Returns the sending end of a queue."""
        name = queue.name
        network, scope, here = self._network, self._scope, self._receiving(name)
        index = scope.index(name)
        lanes: dict[str, Lane] = {}

        def post(frames: list[Buffer]) -> None:
            known = network.receivers.get(name)
            if known is None:
                network.later(name, again, frames)
                return
            end_there, there = known
            lane = lanes.setdefault(there.part, Lane(here.part, there.part))
            network.post(lane, lambda frames: _to_receiver(end_there, there, end, answer, frames), frames)

        def again(frames: list[Buffer]) -> None:
            if not end.closed:  # otherwise its socket is closed and its content lost
                post(frames)

        back = Lane("", here.part)

        def answer(frames: list[Buffer], source: str) -> None:
            back.source = source
            network.post(back, lambda frames: _to_sender(end, here, frames), frames)

        def release() -> None:
            scope.release_index(name, index)
            scope.remove(end)
            network.senders[name].remove(end)

        end = SendingEnd(
            make_id(self._start, self._opened(), index),
            DEFAULT_TIMING,
            trio.current_time,
            pack=_pack,
            transmit=lambda message: post(framing.to_receiver(message)),
            poll=_nothing,
            release=release,
        )
        network.senders.setdefault(name, []).append(end)
        self._created(name, end)
        scope.add(end, end.timer)
        return end

    async def receiver(self, queue: Queue[Any], capacity: Capacity) -> ReceivingEnd[Any]:
        """Returns the receiving end of a queue."""
        name = queue.name
        network, scope, here = self._network, self._scope, self._receiving(name)
        await self._free(network.receivers, name)

        def release() -> None:
            scope.remove(end)
            del network.receivers[name]

        end = ReceivingEnd(
            make_id(self._start, self._opened()),
            capacity,
            DEFAULT_TIMING,
            trio.current_time,
            unpack=lambda payload: framing.unpack(payload, SERVICES),
            on_discard=lambda sender, error: network.watcher.event("discarded", name, sender, str(error)),
            transmit=lambda route, grant: route.answer(framing.to_sender(grant), here.part),
            poll=_nothing,
            release=release,
        )
        network.receivers[name] = end, here
        self._created(name, end)
        scope.add(end, end.timer)
        network.opened(name)
        return end

    # ---------------------------------------------------------------- topics

    async def publisher(self, service: str) -> TopicEnd:
        """Returns the publishing end of a topic."""
        network, scope, here = self._network, self._scope, self._receiving(f"topic:{service}")
        await self._free(network.topics, service)

        def release() -> None:
            scope.remove(end)
            del network.topics[service]

        end = TopicEnd(
            make_id(self._start, self._opened()),
            DEFAULT_TIMING,
            trio.current_time,
            pack=framing.pack,
            transmit=lambda route, message, payload: route.answer(framing.to_subscriber(message, payload), here.part),
            poll=_nothing,
            release=release,
        )
        network.topics[service] = end, here
        self._created(f"topic:{service}", end)
        scope.add(end)
        network.opened(f"topic:{service}")
        return end

    async def subscribe(self, service: str, pace: float = 0.0) -> SubscriptionEnd:
        """Returns a subscription to a topic."""
        network, scope, here = self._network, self._scope, self._receiving(f"topic:{service}")
        lanes: dict[str, Lane] = {}

        def post(frames: list[Buffer]) -> None:
            known = network.topics.get(service)
            if known is None:
                network.later(f"topic:{service}", again, frames)
                return
            end_there, there = known
            lane = lanes.setdefault(there.part, Lane(here.part, there.part))
            network.post(lane, lambda frames: _to_publisher(end_there, there, end, answer, frames), frames)

        def again(frames: list[Buffer]) -> None:
            if not end.closed:  # otherwise its socket is closed and its content lost
                post(frames)

        back = Lane("", here.part)

        def answer(frames: list[Buffer], source: str) -> None:
            back.source = source
            network.post(back, lambda frames: _to_subscriber(end, here, frames), frames)

        end = SubscriptionEnd(
            DEFAULT_TIMING,
            trio.current_time,
            transmit=lambda have: post(framing.to_publisher(have)),
            poll=_nothing,
            release=lambda: scope.remove(end),
            pace=pace,
        )
        self._created(f"topic:{service}", end)
        scope.add(end, end.timer)
        return end

    async def _free(self, taken: dict[str, Any], name: str) -> None:
        """Waits for an address to become free, as long as the real transport does."""
        with anyio.move_on_after(1.0):
            while name in taken:  # noqa: ASYNC110 (another process would not report it)
                await anyio.sleep(0.02)
        if name in taken:
            raise QueueError(
                f"got {name!r}, where another end listens; expected a free address; try to stop that process"
            )


class _Route:
    """The destination of an answer, equal for the same end."""

    __slots__ = ("answer", "end")

    def __init__(self, end: Any, answer: Callable[[list[Buffer], str], None]) -> None:
        self.end = end
        self.answer = answer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Route) and other.end is self.end

    def __hash__(self) -> int:
        return id(self.end)


def _to_receiver(end: ReceivingEnd, there: Receiving, sender: Any, answer: Any, frames: Sequence[Buffer]) -> None:
    if not end.closed:
        there.take(
            lambda: end.received(framing.from_sender(frames), _Route(sender, answer)), end.settle, malformed=end.discard
        )


def _to_sender(end: SendingEnd, here: Receiving, frames: Sequence[Buffer]) -> None:
    if not end.closed:
        here.take(lambda: end.received(framing.from_receiver(frames)), _nothing, malformed=_nothing)


def _to_publisher(end: TopicEnd, there: Receiving, subscriber: Any, answer: Any, frames: Sequence[Buffer]) -> None:
    if not end.closed:
        there.take(
            lambda: end.received(framing.from_subscriber(frames), _Route(subscriber, answer)),
            end.settle,
            malformed=_nothing,
        )


def _to_subscriber(end: SubscriptionEnd, here: Receiving, frames: Sequence[Buffer]) -> None:
    if not end.closed:
        here.take(lambda: end.received(*framing.from_publisher(frames, SERVICES)), end.flush, malformed=end.linked)


def _pack(record: Any) -> tuple[framing.Payload, int]:
    payload = framing.pack(record)
    return payload, payload.size


def _nothing() -> None:
    """Does nothing."""
