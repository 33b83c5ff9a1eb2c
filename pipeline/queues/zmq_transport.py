"""Connects the processes of a run: opens the ends of queues and topics over ZeroMQ's sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self

import anyio
import anyio.to_thread
import structlog

from sparring.pipeline.messages.channels import Queue
from sparring.pipeline.messages.codec import SERVICES, Limits
from sparring.pipeline.queues import frames as framing
from sparring.pipeline.queues.curve import UNPROTECTED, HandshakeRejections, Protection
from sparring.pipeline.queues.endpoints import endpoint_of
from sparring.pipeline.queues.interface import Capacity, T
from sparring.pipeline.queues.receiving_end import ReceivingEnd
from sparring.pipeline.queues.scope import Scope
from sparring.pipeline.queues.sending_end import SendingEnd
from sparring.pipeline.queues.topic_ends import SubscriptionEnd, TopicEnd
from sparring.pipeline.queues.wire import DEFAULT_TIMING, Timing, make_id
from sparring.pipeline.queues.zmq import ZmqSockets

_MAX_STATUS_BYTES: Final = 2**20
"""Bytes of a subscriber's message: an unauthenticated client can make a topic allocate that much."""

log = structlog.get_logger(__name__)


class ZmqTransport:
    """Opens the ends of one incarnation of a service over ZeroMQ, under asyncio.

    Args:
        endpoints: address of each queue by its name ("segments:Ball") and of each topic by "topic:" and
            its service ("topic:stepping-0"): "ipc://" and a path of at most 107 bytes, or
            "tcp://127.0.0.1:" and a port.
        start: this incarnation of the service, such as "stepping-0.1"; a later one has a higher number.
        timing: intervals.
        clock: gives rising seconds; by default that of the event loop.
        limits: bounds of a message.
        opened: gives numbers that rise with each end opened, over all incarnations of the service.
        reconnect: seconds between attempts to connect.
        bind: seconds for which a taken address is tried again, because its owner may be closing.
        linger: seconds for which the final messages of a closed end are kept for sending.
        protection: of TCP endpoints.

    Raises:
        QueueError: `start` is empty or contains "#".
    """

    def __init__(
        self,
        endpoints: Mapping[str, str],
        start: str,
        *,
        timing: Timing = DEFAULT_TIMING,
        clock: Callable[[], float] | None = None,
        limits: Limits = SERVICES,
        opened: Callable[[], int] = time.time_ns,
        reconnect: float = 0.05,
        bind: float = 1.0,
        linger: float = 0.2,
        protection: Protection = UNPROTECTED,
    ) -> None:
        make_id(start, 0)  # rejects a malformed incarnation
        self.endpoints = dict(endpoints)
        self.start = start
        self._timing = timing
        self._own_clock = clock
        self._limits = limits
        self._opened = opened
        self._reconnect = reconnect
        self._bind = bind
        self._linger = linger
        self._protection = protection
        self._scope = Scope()

    async def __aenter__(self) -> Self:
        self._clock = self._own_clock or asyncio.get_running_loop().time
        self._rejections = HandshakeRejections(self._clock)
        self._sockets = ZmqSockets(
            self._protection,
            self._rejections,
            self._timing,
            self._clock,
            self._limits,
            reconnect=self._reconnect,
            bind=self._bind,
            linger=self._linger,
            failed=self._scope.fail,
        )
        await self._scope.__aenter__()
        return self

    @property
    def refused(self) -> int:
        """Returns the number of rejected connections, to this service's ends or to those of others."""
        return self._rejections.total

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            return await self._scope.__aexit__(exc_type, exc, traceback)
        finally:
            self._sockets.stop()
            with anyio.CancelScope(shield=True):  # bounded by linger
                await anyio.to_thread.run_sync(self._sockets.destroy)

    def abandon(self) -> None:
        """Drops all ends without notifying their peers, as a crash would."""
        self._scope.close(notify_peers=False)

    def extend(self, endpoints: Mapping[str, str], protection: Protection) -> None:
        """Adds further queues and topics of the run, which can be connected to from now on.

        Args:
            endpoints: addresses as at the start, with those of the new ones.
            protection: keys likewise.
        """
        self.endpoints.update(endpoints)
        self._sockets.curve = protection.curve

    # ------------------------------------------------------------ queues

    async def sender(self, queue: Queue[T]) -> SendingEnd[T]:
        """Opens a sending end of a queue; ends open at the same time are different senders.

        Raises:
            QueueError: there is no endpoint of that name, or it cannot be connected to.
        """
        name = queue.name
        link, close = self._sockets.connect(name, endpoint_of(self.endpoints, name))
        index = self._scope.index(name)

        def release() -> None:
            self._scope.release_index(name, index)
            self._scope.remove(end)
            close()

        end: SendingEnd[T] = SendingEnd(
            make_id(self.start, self._opened(), index),
            self._timing,
            self._clock,
            pack=_pack,
            transmit=lambda message: link.send(framing.to_receiver(message)),
            poll=link.poll,
            release=release,
        )
        link.open(lambda frames, _: end.received(framing.from_receiver(frames)), _nothing)
        self._scope.add(end, end.timer)
        return end

    async def receiver(self, queue: Queue[T], capacity: Capacity) -> ReceivingEnd[T]:
        """Opens the receiving end of a queue, which `capacity` bounds exactly.

        Raises:
            QueueError: there is no endpoint of that name, another process listens there, the address cannot be
                used, or a sender's share would hold nothing.
        """
        name = queue.name

        def release() -> None:
            self._scope.remove(end)
            close()

        end: ReceivingEnd[T] = ReceivingEnd(
            make_id(self.start, self._opened()),
            capacity,
            self._timing,
            self._clock,
            unpack=lambda payload: framing.only(framing.unpack(payload, self._limits), queue.record),
            on_discard=lambda sender, error: log.warning("discarded", queue=name, sender=sender, error=str(error)),
            transmit=lambda route, grant: link.send(framing.to_sender(grant), route),
            poll=lambda: link.poll(),
            release=release,
        )
        link, close = await self._sockets.listen(name, endpoint_of(self.endpoints, name))
        link.open(
            lambda frames, route: end.received(framing.from_sender(frames), route), end.settle, malformed=end.discard
        )
        self._scope.add(end, end.timer)
        return end

    # ------------------------------------------------------------ topics

    async def publisher(self, service: str) -> TopicEnd:
        """Opens the publishing end of `service`'s topic.

        Raises:
            QueueError: there is no endpoint named "topic:" and the service, another process listens there, or the
                address cannot be used.
        """
        name = f"topic:{service}"
        link, close = await self._sockets.listen(name, endpoint_of(self.endpoints, name), _MAX_STATUS_BYTES)

        def release() -> None:
            self._scope.remove(end)
            close()

        end = TopicEnd(
            make_id(self.start, self._opened()),
            self._timing,
            self._clock,
            pack=framing.pack,
            transmit=lambda route, message, payload: link.send(framing.to_subscriber(message, payload), route),
            poll=link.poll,
            release=release,
        )
        link.open(lambda frames, route: end.received(framing.from_subscriber(frames), route), end.settle)
        self._scope.add(end)
        return end

    async def subscribe(self, service: str, pace: float = 0.0) -> SubscriptionEnd:
        """Opens a subscription to `service`'s topic, which receives updates at most every `pace` seconds.

        Raises:
            QueueError: there is no endpoint named "topic:" and the service, or it cannot be connected to.
        """
        name = f"topic:{service}"
        link, close = self._sockets.connect(name, endpoint_of(self.endpoints, name))

        def release() -> None:
            self._scope.remove(end)
            close()

        end = SubscriptionEnd(
            self._timing,
            self._clock,
            transmit=lambda status: link.send(framing.to_publisher(status)),
            poll=link.poll,
            release=release,
            pace=pace,
        )
        link.open(lambda frames, _: end.received(*framing.from_publisher(frames, self._limits)), end.flush, end.linked)
        self._scope.add(end, end.timer)
        return end


def _pack(record: Any) -> tuple[framing.Payload, int]:
    payload = framing.pack(record)
    return payload, payload.size


def _nothing() -> None:
    """Does nothing."""
