"""Opens sockets over ZeroMQ; no other module imports zmq.

Receivers and publishers bind ROUTER sockets, senders and subscribers connect DEALER sockets.
ZeroMQ's own limits never act: credit bounds the messages in transit, and the rules in `sending` and
`topic` find and repeat what a broken connection loses. While a receiver is away, one small message per
heartbeat waits for it. (`IMMEDIATE` would prevent that, and lose the last acknowledgements of a
receiver that closes.)

The sockets are plain ones that the event loop's reader callback drains, without a task or future
for each message. A ZeroMQ file descriptor announces changes only, and any call on the socket may
swallow the announcement, so its events are read again after every send (`ZmqSocket.poll`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final

import anyio
import structlog
import zmq
import zmq.backend
import zmq.utils.monitor
import zmq.utils.z85

from sparring.pipeline.errors import CodecError, QueueError
from sparring.pipeline.messages.codec import Buffer, Limits
from sparring.pipeline.queues import frames as framing
from sparring.pipeline.queues.curve import (
    HANDSHAKE_S,
    REFUSED,
    Curve,
    CurveAuthenticator,
    HandshakeRejections,
    Handshakes,
    Protection,
)
from sparring.pipeline.queues.endpoints import (
    ipc_path,
    is_open,
    listen,
    peer_address,
    unavailable,
    with_source_address,
)
from sparring.pipeline.queues.wire import Timing

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

LINGER_S: Final = 0.2
"""Seconds for which the final messages of a closed socket are kept for sending."""

log = structlog.get_logger(__name__)


class ZmqSocket:
    """Wraps a non-blocking ZeroMQ socket, and delivers its messages as soon as they arrive.

    Args:
        socket: is bound or connected.
        name: queue or topic of the socket, for logs.
        failed: called with any exception that the callbacks raise.

    Attributes:
        closing: what is done when the socket closes, the last first.
    """

    def __init__(self, socket: zmq.Socket[bytes], name: str, failed: Callable[[Exception], None]) -> None:
        self.closing = ExitStack()
        self.closing.callback(socket.close)
        self.socket = socket
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
        settled: Callable[[], None] = lambda: None,
        malformed: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins to deliver messages.

        Args:
            received: called with the frames of each message and its route (b"" except on a ROUTER).
            settled: called after the last message that has arrived.
            malformed: called when `received` raised a CodecError, which is logged.
        """
        self._received = received
        self._settled = settled
        self._malformed = malformed
        self._loop.add_reader(self._fd, self._readable)
        self._loop.call_soon(self._readable)

    def send(self, frames: Sequence[Buffer], route: bytes = b"") -> None:
        """Sends a message: a DEALER as soon as it is connected, a ROUTER if its peer is still connected."""
        try:
            self._send(frames, route)
        except zmq.Again:  # a DEALER that was rejected: it has no connection and opens none
            self._failed(_key_rejected(self._name))

    def _send(self, frames: Sequence[Buffer], route: bytes) -> None:
        socket, copy = self.socket, not framing.is_large(frames[0])
        if self._routed:
            _send(socket, route, _MORE)
        for frame in frames[:-1]:
            _send(socket, frame, _MORE, copy)
        _send(socket, frames[-1], _NOBLOCK, copy)

    def poll(self) -> None:
        """Delivers all messages that have arrived."""
        if self._draining or self._closed:
            return
        self._draining = True
        try:
            while self._drain():
                self._settled()
        finally:
            self._draining = False

    def _drain(self) -> bool:
        """Delivers message by message; returns whether there was one."""
        found = False
        while not self._closed and _option(self.socket, _EVENTS) & _READABLE:
            found = True
            self._deliver()
        return found and not self._closed

    def _deliver(self) -> None:
        socket = self.socket
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
        """Closes the socket; messages already sent go out within its linger time."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self.closing.close()


class ZmqSockets:
    """Opens the sockets of one transport, in a ZeroMQ context of its own.

    Args:
        protection: of TCP endpoints.
        timing: intervals.
        limits: bounds of a message.
        reconnect: seconds between attempts to connect.
        bind: seconds for which a taken address is tried again, because its owner may be closing.
        failed: called with an exception that a socket's callback raises.

    Attributes:
        rejections: counts rejected connections.
    """

    def __init__(
        self,
        protection: Protection,
        timing: Timing,
        limits: Limits,
        *,
        reconnect: float,
        bind: float,
        failed: Callable[[Exception], None],
    ) -> None:
        self.curve = protection.curve
        self._insecure = protection.insecure
        self._machines = protection.machines
        self._timing = timing
        self._clock = time.monotonic
        self.rejections = HandshakeRejections(self._clock)
        self._limits = limits
        self._reconnect = reconnect
        self._bind_s = bind
        self._failed = failed
        self._context = zmq.Context(io_threads=1)
        self._authentication = None if self.curve is None else self._authenticate(self.curve)

    def stop(self) -> None:
        """Stops answering authentication requests; called in the event loop, before `destroy`."""
        if self._authentication is not None:
            self._authentication.close()

    def destroy(self) -> None:
        """Closes the context; blocks for at most the linger time."""
        self._context.destroy()

    def connect(self, name: str, endpoint: str) -> ZmqSocket:
        """Returns a socket that connects to a listener.

        Raises:
            QueueError: the endpoint cannot be connected to.
        """
        link = self._open(zmq.DEALER, name, endpoint, self._limits.total)
        link.socket.setsockopt(zmq.RECONNECT_IVL, max(1, int(self._reconnect * 1000)))
        if self.curve is not None and ipc_path(endpoint) is None:
            _set_keys(link.socket, self.curve)
            link.socket.curve_serverkey = self.curve.servers[name].encode()
            self._watch(link, name, lambda event, _: self._on_client_event(event, name, endpoint))
        try:
            link.socket.connect(with_source_address(endpoint, self._machines))
        except zmq.ZMQError as error:
            link.close()
            raise unavailable(endpoint, error.errno, error) from error
        return link

    async def listen(self, name: str, endpoint: str, max_bytes: int) -> ZmqSocket:
        """Returns a socket that listens.

        Args:
            name: queue or topic.
            endpoint: address to listen at.
            max_bytes: most bytes of a message.

        Raises:
            QueueError: another process listens there, the address cannot be used, or it needs keys.
        """
        if is_open(endpoint) and self.curve is None and not self._insecure:
            raise QueueError(
                f"got {name} at {endpoint}, which other machines can reach, without keys; expected keys; make them "
                "with `sparring keys DIR` and set pipeline.keys: DIR, use loopback, or say --insecure"
            )
        link = self._open(zmq.ROUTER, name, endpoint, max_bytes)
        deadline = anyio.current_time() + self._bind_s
        try:
            self._secure(link, name, endpoint)
            while True:
                try:
                    _bind(link, endpoint)
                except QueueError:
                    if anyio.current_time() >= deadline:
                        raise
                    await anyio.sleep(0.02)
                else:
                    return link
        except BaseException:
            link.close()
            raise

    def _open(self, kind: int, name: str, endpoint: str, max_bytes: int) -> ZmqSocket:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, int(LINGER_S * 1000))
        socket.setsockopt(zmq.SNDHWM, 0)  # credit bounds it
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        if ipc_path(endpoint) is None:  # a host may vanish without closing
            socket.setsockopt(zmq.IPV6, int("[" in endpoint))
            socket.setsockopt(zmq.HEARTBEAT_IVL, int(self._timing.heartbeat * 1000))
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(self._timing.peer_timeout * 1000))
        return ZmqSocket(socket, name, self._failed)

    # ------------------------------------------------------------ keys

    def _secure(self, link: ZmqSocket, name: str, endpoint: str) -> None:
        """Makes a listening socket reject unauthenticated clients, and counts those."""
        if ipc_path(endpoint) is not None:
            return
        socket = link.socket
        for machine in self._machines:
            socket.setsockopt(zmq.TCP_ACCEPT_FILTER, machine.encode())
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        if self.curve is None:
            return
        _set_keys(socket, self.curve)
        socket.curve_server = True
        socket.zap_domain = name.encode()
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer every client is rejected
        handshakes = Handshakes(lambda peer, cause: self.rejections.count(name, peer, cause), peer_address, self._clock)
        self._watch(link, name, handshakes.on_event)

    def _authenticate(self, curve: Curve) -> ZmqSocket:
        """Answers the authentication requests of this context's sockets."""
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind("inproc://zeromq.zap.01")
        authenticator = CurveAuthenticator(curve.clients, self.rejections, zmq.utils.z85.encode)
        link = ZmqSocket(socket, "keys", self._failed)
        link.open(lambda frames, route: link.send(authenticator.answer(frames), route))
        return link

    def _on_client_event(self, event: str, name: str, endpoint: str) -> None:
        """Raises if the listener rejected our key: ZeroMQ does not try again, and the service cannot work."""
        if event in REFUSED:
            raise _key_rejected(name)
        if event == "HANDSHAKE_FAILED_NO_DETAIL":  # ZeroMQ tries again
            self.rejections.count(name, endpoint, "it closed the connection: it is shutting down, or has other keys")

    def _watch(self, link: ZmqSocket, name: str, on_event: Callable[[str, int], None]) -> None:
        """Delivers the events of a socket until it closes."""
        monitor = ZmqSocket(link.socket.get_monitor_socket(), name, self._failed)

        def received(frames: Sequence[Buffer], _route: bytes) -> None:
            event = zmq.utils.monitor.parse_monitor_message([bytes(frame) for frame in frames])
            on_event(zmq.Event(event["event"]).name or "", event["value"])

        link.closing.callback(monitor.close)
        link.closing.callback(link.socket.disable_monitor)
        monitor.open(received)


def new_curve_pair() -> tuple[str, str]:
    """Returns a new public and secret key, in Z85."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _bind(link: ZmqSocket, endpoint: str) -> None:
    path = ipc_path(endpoint)
    try:
        if path is not None:
            link.socket.setsockopt(zmq.USE_FD, listen(path).detach())
        link.socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise unavailable(endpoint, error.errno, error) from error
    if path is not None:
        link.closing.callback(path.unlink, missing_ok=True)


def _key_rejected(name: str) -> QueueError:
    return QueueError(
        f"got a rejected connection to {name}: its listener does not allow our key, or has another one than expected; "
        "expected the same keys and allowed.yaml on all machines; copy them again"
    )


def _set_keys(socket: zmq.Socket[bytes], curve: Curve) -> None:
    socket.curve_publickey, socket.curve_secretkey = curve.public.encode(), curve.secret.encode()
