"""Connects the processes of a run: opens the ends of queues and topics over ZeroMQ's sockets."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from types import TracebackType
from typing import Final, Self, TypeVar

import anyio
import anyio.to_thread

from sparring.pipeline.messages.codec import SERVICES, Limits
from sparring.pipeline.queues import frames as framing
from sparring.pipeline.queues.curve import UNPROTECTED, Protection
from sparring.pipeline.queues.endpoints import endpoint_of
from sparring.pipeline.queues.ends import End
from sparring.pipeline.queues.interface import Publisher, Transport
from sparring.pipeline.queues.wire import DEFAULT_TIMING, Message, Timing
from sparring.pipeline.queues.zmq import ZmqSocket, ZmqSockets

_MAX_STATUS_BYTES: Final = 2**20
"""Bytes of a subscriber's message: an unauthenticated client can make a topic allocate that much."""

T = TypeVar("T")


class ZmqLink:
    """Links one end to those of the same name, over a socket.

    Args:
        socket: that is connected or bound.
        end: this end.
        limits: bounds of a message.
    """

    def __init__(self, socket: ZmqSocket, end: End, limits: Limits) -> None:
        self._socket = socket
        self.close = socket.close
        self.poll = socket.poll
        self._socket.open(
            lambda frames, route: end.received(framing.decode(frames, limits), route), end.settle, end.malformed
        )

    def pack(self, record: T) -> framing.Packed:
        """Returns a record as frames."""
        return framing.pack(record)

    def send(self, message: Message, route: Hashable) -> None:
        """Sends a message to one peer, or to the end that listens."""
        self._socket.send(framing.encode(message), route if isinstance(route, bytes) else b"")


class ZmqTransport(Transport):
    """Opens the ends of one incarnation of a service over ZeroMQ, under asyncio.

    Args:
        endpoints: address of each queue by its name ("segments:Ball") and of each topic by "topic:" and
            its service ("topic:stepping-0"): "ipc://" and a path of at most 107 bytes, or
            "tcp://127.0.0.1:" and a port.
        start: this incarnation of the service, such as "stepping-0.1"; a later one has a higher number.
        timing: intervals.
        limits: bounds of a message.
        reconnect: seconds between attempts to connect.
        bind: seconds for which a taken address is tried again, because its owner may be closing.
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
        limits: Limits = SERVICES,
        reconnect: float = 0.05,
        bind: float = 1.0,
        protection: Protection = UNPROTECTED,
    ) -> None:
        super().__init__(start, timing, time.monotonic, time.time_ns)
        self.endpoints = dict(endpoints)
        self._limits = limits
        self._reconnect = reconnect
        self._bind = bind
        self._protection = protection

    async def __aenter__(self) -> Self:
        self._sockets = ZmqSockets(
            self._protection,
            self._timing,
            self._limits,
            reconnect=self._reconnect,
            bind=self._bind,
            failed=self._fail,
        )
        return await super().__aenter__()

    @property
    def refused(self) -> int:
        """Returns the number of rejected connections, to this service's ends or to those of others."""
        return self._sockets.rejections.total

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            return await super().__aexit__(exc_type, exc, traceback)
        finally:
            self._sockets.stop()
            with anyio.CancelScope(shield=True):  # bounded by the sockets' linger time
                await anyio.to_thread.run_sync(self._sockets.destroy)

    def extend(self, endpoints: Mapping[str, str], protection: Protection) -> None:
        """Adds further queues and topics of the run, which can be connected to from now on.

        Args:
            endpoints: addresses as at the start, with those of the new ones.
            protection: keys likewise.
        """
        self.endpoints.update(endpoints)
        self._sockets.curve = protection.curve

    def _connect(self, end: End) -> ZmqLink:
        socket = self._sockets.connect(end.name, endpoint_of(self.endpoints, end.name))
        return ZmqLink(socket, end, self._limits)

    async def _listen(self, end: End) -> ZmqLink:
        max_bytes = _MAX_STATUS_BYTES if isinstance(end, Publisher) else self._limits.total
        socket = await self._sockets.listen(end.name, endpoint_of(self.endpoints, end.name), max_bytes)
        return ZmqLink(socket, end, self._limits)
