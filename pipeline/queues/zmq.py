"""Queues and boards between processes, over ZeroMQ. The only module that imports zmq, and long for that.

Receivers and publishers bind ROUTER sockets, senders and subscribers connect DEALER sockets.
ZeroMQ's own limits never act: credit bounds what is under way, and what a broken connection loses
is found and sent again by the rules in `credit` and `topic`. While a receiver is away, one small
message a heartbeat waits for it. (`IMMEDIATE` would prevent that, and lose the last
acknowledgements of a receiver that closes.)

The sockets are plain ones that the event loop's reader callback drains, without a task or future
for each message. A ZeroMQ file descriptor announces changes only, and any call on the socket may
swallow the announcement; so after every send its events are looked at again (`ZmqSocket.poll`).
"""

from __future__ import annotations

import asyncio
import os
import socket as sockets
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

import anyio
import anyio.to_thread
import structlog
import zmq
import zmq.backend
import zmq.utils.monitor
import zmq.utils.z85

from sparring.pipeline.errors import CodecError, QueueError
from sparring.pipeline.messages.codec import SERVICES, Buffer, Limits
from sparring.pipeline.queues import frames as framing
from sparring.pipeline.queues.curve import (
    HANDSHAKE_S,
    REFUSED,
    UNPROTECTED,
    Curve,
    CurveAuthenticator,
    HandshakeRejections,
    Handshakes,
    Protection,
)
from sparring.pipeline.queues.endpoints import ipc_path, is_open, listen, unavailable
from sparring.pipeline.queues.interface import Capacity
from sparring.pipeline.queues.receiving_end import ReceivingEnd
from sparring.pipeline.queues.scope import Scope
from sparring.pipeline.queues.sending_end import SendingEnd
from sparring.pipeline.queues.topic_ends import SubscriptionEnd, TopicEnd
from sparring.pipeline.queues.wire import DEFAULT_TIMING, Timing, make_id

# The methods of pyzmq's compiled base class, with plain numbers: the public ones spend most of their
# time on enumerations.
_send: Any = zmq.backend.Socket.send
_receive: Any = zmq.backend.Socket.recv
_option: Any = zmq.backend.Socket.get
_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_RCVMORE: Final = int(zmq.RCVMORE)
_EVENTS: Final = int(zmq.EVENTS)
_READABLE: Final = int(zmq.POLLIN)

_MOST_ASKED: Final = 2**20
"""Bytes of what a subscriber says; a stranger can make a board take that much memory before it is known."""

log = structlog.get_logger(__name__)


class ZmqSocket:
    """A non-blocking ZeroMQ socket that hands over what arrives as soon as it does.

    Args:
        socket: bound or connected.
        name: of the queue or board, for logs.
        failed: called with what any of the functions below raised.
    """

    def __init__(self, socket: zmq.Socket[bytes], name: str, failed: Callable[[Exception], None]) -> None:
        self._socket = socket
        self._name = name
        self._failed = failed
        self._routed = socket.type == zmq.ROUTER
        self._closed = False
        self._draining = False
        self._loop = asyncio.get_running_loop()
        self._fd: int = _option(socket, int(zmq.FD))

    def open(
        self,
        received: Callable[[Sequence[Buffer], bytes], None],
        settled: Callable[[], None],
        malformed: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins to hand over.

        Args:
            received: called with the frames of each message and where it came from (b"" without a ROUTER).
            settled: called when that was all for now.
            malformed: called when `received` raised a CodecError, which is logged.
        """
        self._received = received
        self._settled = settled
        self._malformed = malformed
        self._loop.add_reader(self._fd, self._readable)
        self._loop.call_soon(self._readable)

    def send(self, frames: Sequence[Buffer], route: bytes = b"") -> None:
        """Sends a message: a DEALER as soon as it is connected, a ROUTER if its peer still is."""
        try:
            self._send(frames, route)
        except zmq.Again:  # a DEALER that was refused: it has no connection and makes none
            self._failed(_no_entrance(self._name))

    def _send(self, frames: Sequence[Buffer], route: bytes) -> None:
        socket, copy = self._socket, not framing.is_large(frames[0])
        if self._routed:
            _send(socket, route, _MORE)
        for frame in frames[:-1]:
            _send(socket, frame, _MORE, copy)
        _send(socket, frames[-1], _NOBLOCK, copy)

    def poll(self) -> None:
        """Hands over what has arrived."""
        if self._draining or self._closed:
            return
        self._draining = True
        try:
            while self._drain():
                self._settled()
        finally:
            self._draining = False

    def _drain(self) -> bool:
        """Hands over message by message; returns whether there was one."""
        found = False
        while not self._closed and _option(self._socket, _EVENTS) & _READABLE:
            found = True
            self._take()
        return found and not self._closed

    def _take(self) -> None:
        socket = self._socket
        route = _receive(socket, _NOBLOCK) if self._routed else b""
        frames: list[Buffer] = []
        large = False
        while not frames or _option(socket, _RCVMORE):
            frames.append(_receive(socket, _NOBLOCK, False).buffer if large else _receive(socket, _NOBLOCK))
            large = large or framing.is_large(frames[0])
        try:
            self._received(frames, route)
        except CodecError as error:
            log.warning("discarded", queue=self._name, error=str(error))
            self._malformed()

    def _readable(self) -> None:
        try:
            self.poll()
        except Exception as error:  # the event loop would only log it
            self._failed(error)

    def close(self) -> None:
        """Closes the socket; what was sent goes out within its linger time."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close()


class ZmqTransport:
    """Opens the ends of one service start over ZeroMQ, under asyncio.

    Args:
        endpoints: address of each queue by its name ("segments:Ball") and of each board by "topic:" and
            its service ("topic:stepping-0"): "ipc://" and a path of at most 107 bytes, or
            "tcp://127.0.0.1:" and a port.
        start: this start of the service, as "stepping-0.1"; a later start has a higher number.
        timing: intervals.
        clock: seconds, rising; by default that of the event loop.
        limits: of a message.
        opened: numbers that rise with each opening of an end, over all starts of the service.
        reconnect: seconds between attempts to connect.
        bind: seconds for which a taken address is tried again: its owner may be on its way out.
        linger: seconds for which a closed end's last words are kept for sending.
        protection: of TCP endpoints.

    Raises:
        QueueError: `start` is empty or holds "#".
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
        make_id(start, 0)  # refuses what cannot be a start
        self.endpoints = dict(endpoints)
        self.start = start
        self._timing = timing
        self._own_clock = clock
        self._limits = limits
        self._opened = opened
        self._reconnect = reconnect
        self._bind = bind
        self._linger = linger
        self._curve = protection.curve
        self._insecure = protection.insecure
        self._machines = protection.machines
        self._scope = Scope()

    async def __aenter__(self) -> Self:
        self._context = zmq.Context(io_threads=1)
        self._clock = self._own_clock or asyncio.get_running_loop().time
        self._refusals = HandshakeRejections(self._clock)
        self._questions = None if self._curve is None else self._answering(self._curve)
        await self._scope.__aenter__()
        return self

    @property
    def refused(self) -> int:
        """Connections that were refused, to this service's ends or by those of others."""
        return self._refusals.total

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            return await self._scope.__aexit__(exc_type, exc, traceback)
        finally:
            if self._questions is not None:
                self._questions.close()
            with anyio.CancelScope(shield=True):  # bounded by linger
                await anyio.to_thread.run_sync(self._context.destroy)

    def abandon(self) -> None:
        """Drops all ends as a crash would: the other sides are told nothing."""
        self._scope.close(farewell=False)

    def extend(self, endpoints: Mapping[str, str], protection: Protection) -> None:
        """The run has got further queues and boards, which can be connected to from now on.

        Args:
            endpoints: as at the start, with those of the others.
            protection: likewise.
        """
        self.endpoints.update(endpoints)
        self._curve = protection.curve

    # ------------------------------------------------------------ queues

    async def sender(self, name: str, behavior_id: str = "*") -> SendingEnd:
        """The sending end of queue `name`. Ends open at the same time are different senders.

        Raises:
            QueueError: no endpoint of that name, or none that can be connected to.
        """
        link, close = self._connected(name)
        index = self._scope.index(name)

        def release() -> None:
            self._scope.release_index(name, index)
            self._scope.remove(end)
            close()

        end = SendingEnd(
            make_id(self.start, self._opened(), index),
            behavior_id,
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

    async def receiver(self, name: str, capacity: Capacity, behavior_id: str = "*") -> ReceivingEnd:
        """The receiving end of queue `name`. `capacity` bounds it exactly.

        Raises:
            QueueError: no endpoint of that name, somebody else listens there, nobody can, or a sender's
                share would hold nothing.
        """

        def release() -> None:
            self._scope.remove(end)
            close()

        end = ReceivingEnd(
            make_id(self.start, self._opened()),
            capacity,
            behavior_id,
            self._timing,
            self._clock,
            unpack=lambda payload: framing.unpack(payload, self._limits),
            on_discard=lambda sender, error: log.warning("discarded", queue=name, sender=sender, error=str(error)),
            transmit=lambda route, grant: link.send(framing.to_sender(grant), route),
            poll=lambda: link.poll(),
            release=release,
        )
        link, close = await self._listening(name)
        link.open(
            lambda frames, route: end.received(framing.from_sender(frames), route), end.settle, malformed=end.discard
        )
        self._scope.add(end, end.timer)
        return end

    # ------------------------------------------------------------ boards

    async def topic(self, service: str) -> TopicEnd:
        """The publishing end of `service`'s board.

        Raises:
            QueueError: no endpoint named "topic:" and the service, somebody else listens there, or nobody can.
        """
        link, close = await self._listening(f"topic:{service}", _MOST_ASKED)

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
        """A subscription to `service`'s board, which is told of changes every `pace` seconds at most.

        Raises:
            QueueError: no endpoint named "topic:" and the service, or none that can be connected to.
        """
        link, close = self._connected(f"topic:{service}")

        def release() -> None:
            self._scope.remove(end)
            close()

        end = SubscriptionEnd(
            self._timing,
            self._clock,
            transmit=lambda have: link.send(framing.to_publisher(have)),
            poll=link.poll,
            release=release,
            pace=pace,
        )
        link.open(lambda frames, _: end.received(*framing.from_publisher(frames, self._limits)), end.flush, end.linked)
        self._scope.add(end, end.timer)
        return end

    # ------------------------------------------------------------ sockets

    def _endpoint(self, name: str) -> str:
        try:
            return self.endpoints[name]
        except KeyError:
            raise QueueError(
                f"got {name!r}; expected one of {sorted(self.endpoints)}; give it an endpoint in the topology"
            ) from None

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, int(self._linger * 1000))
        socket.setsockopt(zmq.SNDHWM, 0)  # credit bounds it
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, self._limits.total)
        if ipc_path(endpoint) is None:  # a host may vanish without closing
            socket.setsockopt(zmq.IPV6, int("[" in endpoint))
            socket.setsockopt(zmq.HEARTBEAT_IVL, int(self._timing.heartbeat * 1000))
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(self._timing.peer_timeout * 1000))
        return socket

    def _connected(self, name: str) -> tuple[ZmqSocket, Callable[[], None]]:
        """A link to who listens there, and what ends it."""
        endpoint = self._endpoint(name)
        socket = self._socket(zmq.DEALER, endpoint)
        socket.setsockopt(zmq.RECONNECT_IVL, max(1, int(self._reconnect * 1000)))
        watched = _nothing
        if self._curve is not None and ipc_path(endpoint) is None:
            _show(socket, self._curve)
            socket.curve_serverkey = self._curve.servers[name].encode()
            watched = self._watch(socket, name, lambda event, _: self._answered(event, name, endpoint))
        try:
            socket.connect(_from(endpoint, self._machines))
        except zmq.ZMQError as error:
            watched()
            socket.close()
            raise unavailable(endpoint, error.errno, error) from error
        link = ZmqSocket(socket, name, self._scope.fail)

        def close() -> None:
            watched()
            link.close()

        return link, close

    async def _listening(self, name: str, most: int | None = None) -> tuple[ZmqSocket, Callable[[], None]]:
        """A link whose address is ours, and what ends it and gives the address back."""
        endpoint = self._endpoint(name)
        if is_open(endpoint) and self._curve is None and not self._insecure:
            raise QueueError(
                f"got {name} at {endpoint}, which other machines can reach, without keys; expected keys; make them "
                "with `sparring keys DIR` and set pipeline.keys: DIR, use loopback, or say --insecure"
            )
        socket = self._socket(zmq.ROUTER, endpoint)
        if most is not None:
            socket.setsockopt(zmq.MAXMSGSIZE, most)
        deadline = anyio.current_time() + self._bind
        watched = self._guarded(socket, name, endpoint)
        while True:
            try:
                free = _bind(socket, endpoint)
                break
            except QueueError:
                if anyio.current_time() >= deadline:
                    watched()
                    socket.close()
                    raise
            except BaseException:
                watched()
                socket.close()
                raise
            await anyio.sleep(0.02)
        link = ZmqSocket(socket, name, self._scope.fail)

        def close() -> None:
            watched()
            link.close()
            free()

        return link, close

    # ------------------------------------------------------------ keys

    def _guarded(self, socket: zmq.Socket[bytes], name: str, endpoint: str) -> Callable[[], None]:
        """Has a socket that will listen refuse strangers; returns what ends the watch over it."""
        if ipc_path(endpoint) is not None:
            return _nothing
        for machine in self._machines:
            socket.setsockopt(zmq.TCP_ACCEPT_FILTER, machine.encode())
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        if self._curve is None:
            return _nothing
        _show(socket, self._curve)
        socket.curve_server = True
        socket.zap_domain = name.encode()
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer nobody is let in
        handshakes = Handshakes(lambda peer, cause: self._refusals.count(name, peer, cause), _peer, self._clock)
        return self._watch(socket, name, handshakes.saw)

    def _answering(self, curve: Curve) -> ZmqSocket:
        """Answers what this context's sockets ask about clients."""
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind("inproc://zeromq.zap.01")
        guard = CurveAuthenticator(curve.clients, self._refusals, zmq.utils.z85.encode)
        link = ZmqSocket(socket, "keys", self._scope.fail)
        link.open(lambda frames, route: link.send(guard.answer(frames), route), _nothing)
        return link

    def _answered(self, event: str, name: str, endpoint: str) -> None:
        """What came of our knocking. A service that is not let in cannot work, and ZeroMQ does not try again."""
        if event in REFUSED:
            raise _no_entrance(name)
        if event == "HANDSHAKE_FAILED_NO_DETAIL":  # it is going down, or expects another key: ZeroMQ tries again
            self._refusals.count(name, endpoint, "it hung up on us: it is on its way out, or has other keys than ours")

    def _watch(self, socket: zmq.Socket[bytes], name: str, saw: Callable[[str, int], None]) -> Callable[[], None]:
        """Hands over the events of a socket; returns what ends that."""
        link = ZmqSocket(socket.get_monitor_socket(), name, self._scope.fail)

        def received(frames: Sequence[Buffer], _route: bytes) -> None:
            event = zmq.utils.monitor.parse_monitor_message([bytes(frame) for frame in frames])
            saw(zmq.Event(event["event"]).name or "", event["value"])

        def close() -> None:
            socket.disable_monitor()
            link.close()

        link.open(received, _nothing)
        return close


def new_curve_pair() -> tuple[str, str]:
    """A new public and secret key, in Z85."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> Callable[[], None]:
    path = ipc_path(endpoint)
    try:
        if path is None:
            socket.bind(endpoint)
            return _nothing
        socket.setsockopt(zmq.USE_FD, listen(path).detach())
        socket.bind(endpoint)
        return lambda: path.unlink(missing_ok=True)
    except zmq.ZMQError as error:
        raise unavailable(endpoint, error.errno, error) from error


def _no_entrance(name: str) -> QueueError:
    return QueueError(
        f"got no entrance to {name}: who listens there does not allow our key, or has another one than we expect; "
        "expected the same keys and allowed.yaml on all machines; copy them anew"
    )


def _show(socket: zmq.Socket[bytes], curve: Curve) -> None:
    socket.curve_publickey, socket.curve_secretkey = curve.public.encode(), curve.secret.encode()


def _from(endpoint: str, machines: Sequence[str]) -> str:
    """An endpoint to connect to, from the address of this machine."""
    if not machines or ipc_path(endpoint) is not None:
        return endpoint
    own = f"[{machines[0]}]" if ":" in machines[0] else machines[0]
    return endpoint.replace("tcp://", f"tcp://{own}:0;", 1)


def _peer(descriptor: int) -> str:
    """The address at the other end of a connection, if it still is there."""
    try:
        with sockets.socket(fileno=os.dup(descriptor)) as connection:
            return str(connection.getpeername()[0])
    except (OSError, IndexError):
        return "unknown"


def _pack(record: Any) -> tuple[framing.Payload, int]:
    payload = framing.pack(record)
    return payload, payload.size


def _nothing() -> None:
    """Nothing to do."""
