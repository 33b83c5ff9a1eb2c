"""Connects the processes of a run over ZeroMQ; no other module imports zmq.

Receivers and publishers bind ROUTER sockets, senders and subscribers connect DEALER sockets.
ZeroMQ's own limits never act: credit bounds the messages in transit, and the rules in `sending` and
`topic` find and repeat what a broken connection loses. While a receiver is away, one small message per
heartbeat waits for it. (`IMMEDIATE` would prevent that, and lose the last acknowledgements of a
receiver that closes.)

The sockets are plain ones that the event loop's reader callback drains, without a task or future
for each message. A ZeroMQ file descriptor announces changes only, and any call on the socket may
swallow the announcement, so its events are read again after every send (`ZmqSocket.poll`).
"""

import asyncio
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import anyio
import anyio.to_thread
import structlog
import zmq
import zmq.backend
import zmq.utils.monitor
import zmq.utils.z85

from sparring.pipeline.errors import CodecError, QueueError
from sparring.pipeline.messages.codec import SERVICES, Buffer
from sparring.pipeline.queues import curve as keys
from sparring.pipeline.queues import endpoints as addresses
from sparring.pipeline.queues.bounds import BoundedListener
from sparring.pipeline.queues.ends import End
from sparring.pipeline.queues.interface import Publisher, Transport
from sparring.pipeline.queues.rejections import RejectionLog
from sparring.pipeline.queues.wire import DEFAULT_TIMING, Message, Packed, Timing, decode, encode, pack

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

_MAX_BYTES: Final = SERVICES.total
_MAX_STATUS_BYTES: Final = 2**20
"""Bytes of a subscriber's message: an unauthenticated client can make a topic allocate that much."""

T = TypeVar("T")
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
        malformed: Callable[[CodecError], None] = lambda _: None,
    ) -> None:
        """Begins to deliver messages.

        Args:
            received: called with the frames of each message and its route (b"" except on a ROUTER).
            settled: called after the last message that has arrived.
            malformed: called with the CodecError that `received` has raised.
        """
        self._received = received
        self._settled = settled
        self._malformed = malformed
        self._loop.add_reader(self._fd, self._readable)
        self._loop.call_soon(self._readable)

    def send(self, frames: Sequence[Buffer], route: bytes = b"") -> None:
        """Sends a message: a DEALER as soon as it is connected, a ROUTER if its peer is still connected.

        Frames of 64 KiB and more are shared with ZeroMQ until they are sent, others copied.
        """
        *first, last = [route, *frames] if self._routed else frames
        try:
            for frame in first:
                _send(self.socket, frame, _MORE, False)
            _send(self.socket, last, _NOBLOCK, False)
        except zmq.Again:  # a DEALER that was rejected: it has no connection and opens none
            self._failed(keys.key_rejected(self._name))

    def poll(self) -> None:
        """Delivers all messages that have arrived."""
        if self._draining or self._closed:
            return
        self._draining = True
        try:
            while self._has_arrival():
                while self._has_arrival():
                    self._deliver()
                self._settled()
        finally:
            self._draining = False

    def _has_arrival(self) -> bool:
        return not self._closed and bool(_option(self.socket, _EVENTS) & _READABLE)

    def _deliver(self) -> None:
        socket = self.socket
        route = _receive(socket, _NOBLOCK) if self._routed else b""
        frames: list[Buffer] = []
        while not frames or _option(socket, _RCVMORE):  # the first two may be small, and are not aligned unless copied
            copied = len(frames) < 2
            frames.append(_receive(socket, _NOBLOCK) if copied else _receive(socket, _NOBLOCK, False).buffer)
        try:
            self._received(frames, route)
        except CodecError as error:
            self._malformed(error)

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


class ZmqLink:
    """Links one end to those of the same name, over a socket."""

    def __init__(self, socket: ZmqSocket, end: End, rejections: RejectionLog) -> None:
        self._socket = socket
        self._end = end
        self._rejections = rejections
        self.close = socket.close
        self.poll = socket.poll
        self._socket.open(lambda frames, route: end.received(decode(frames), route), end.settle, self._discard)

    def _discard(self, error: CodecError) -> None:
        self._rejections.log_event("discarded", "any peer", self._end.name, queue=self._end.name, error=str(error))
        self._end.malformed()

    def pack(self, record: T) -> Packed:
        """Returns a record as frames."""
        return pack(record)

    def send(self, message: Message, route: Hashable) -> None:
        """Sends a message to one peer, or to the end that listens."""
        self._socket.send(encode(message), route if isinstance(route, bytes) else b"")


class ZmqTransport(Transport):
    """Opens the ends of one incarnation of a service over ZeroMQ, under asyncio, in a ZeroMQ context of its own.

    Args:
        endpoints: address of each queue by its name ("segments:Ball") and of each topic by "topic:" and
            its service ("topic:stepping-0"): "ipc://" and a path of at most 107 bytes, or
            "tcp://127.0.0.1:" and a port.
        start: this incarnation of the service, such as "stepping-0.1"; a later one has a higher number.
        timing: intervals.
        reconnect: seconds between attempts to connect.
        bind: seconds for which a taken address is tried again, because its owner may be closing.
        protection: of TCP endpoints.

    Attributes:
        refused: number of rejected connections, to this service's ends or to those of others.

    Raises:
        QueueError: `start` is empty or contains "#".
    """

    def __init__(
        self,
        endpoints: Mapping[str, str],
        start: str,
        *,
        timing: Timing = DEFAULT_TIMING,
        reconnect: float = 0.05,
        bind: float = 1.0,
        protection: keys.Protection = keys.UNPROTECTED,
    ) -> None:
        super().__init__(start, timing, time.monotonic, time.time_ns)
        self.endpoints = dict(endpoints)
        self._reconnect = reconnect
        self._bind_s = bind
        self._protection = protection
        self.refused = 0
        self._rejections = RejectionLog(log, self._clock)

    async def __aenter__(self) -> Self:
        self._context = zmq.Context(io_threads=1)
        curve = self._protection.curve
        self._authentication = None if curve is None else self._authenticate(curve)
        return await super().__aenter__()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            return await super().__aexit__(exc_type, exc, traceback)
        finally:
            self._rejections.summarize(at_end=True)
            if self._authentication is not None:
                self._authentication.close()
            with anyio.CancelScope(shield=True):  # bounded by the sockets' linger time
                await anyio.to_thread.run_sync(self._context.destroy)

    def extend(self, endpoints: Mapping[str, str], protection: keys.Protection) -> None:
        """Adds further queues and topics of the run, which can be connected to from now on.

        Args:
            endpoints: addresses as at the start, with those of the new ones.
            protection: keys likewise.
        """
        self.endpoints.update(endpoints)
        self._protection = protection

    # ------------------------------------------------------------ sockets

    def _connect(self, end: End) -> ZmqLink:
        name, curve = end.name, self._protection.curve
        endpoint = addresses.endpoint_of(self.endpoints, name)
        link = self._socket(zmq.DEALER, name, endpoint, _MAX_BYTES)
        link.socket.setsockopt(zmq.RECONNECT_IVL, max(1, int(self._reconnect * 1000)))
        if curve is not None and addresses.ipc_path(endpoint) is None:
            _set_keys(link.socket, curve)
            link.socket.curve_serverkey = curve.servers[name].encode()
            self._watch(link, name, lambda event, _: self._on_client_event(event, name, endpoint))
        try:
            link.socket.connect(addresses.with_source_address(endpoint, self._protection.machines))
        except zmq.ZMQError as error:
            link.close()
            raise addresses.unavailable(endpoint, error.errno, error) from error
        return ZmqLink(link, end, self._rejections)

    async def _listen(self, end: End) -> ZmqLink:
        name, endpoint = end.name, addresses.endpoint_of(self.endpoints, end.name)
        if addresses.is_open(endpoint) and self._protection.curve is None and not self._protection.insecure:
            raise QueueError(
                f"got {name} at {endpoint}, which other machines can reach, without keys; expected keys; make them "
                "with `sparring keys DIR` and set pipeline.keys: DIR, use loopback, or say --insecure"
            )
        max_bytes = _MAX_STATUS_BYTES if isinstance(end, Publisher) else _MAX_BYTES
        link = self._socket(zmq.ROUTER, name, endpoint, max_bytes)
        deadline = anyio.current_time() + self._bind_s
        try:
            self._secure(link, name, endpoint)
            while True:
                try:
                    await self._bind(link, name, endpoint, max_bytes)
                except QueueError:
                    if anyio.current_time() >= deadline:
                        raise
                    await anyio.sleep(0.02)
                else:
                    return ZmqLink(link, end, self._rejections)
        except BaseException:
            link.close()
            raise

    async def _bind(self, link: ZmqSocket, name: str, endpoint: str, max_bytes: int) -> None:
        """Binds a listening socket: without keys behind a listener that bounds what clients send."""
        if addresses.ipc_path(endpoint) is not None or self._protection.curve is not None:
            _bind(link, endpoint)
            return
        bounded = BoundedListener(2 * max_bytes, self._protection.machines, partial(self._reject, name))
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        with ExitStack() as stack:
            stack.callback(bounded.close)
            try:
                await bounded.listen(host.strip("[]"), int(port), self._tasks)
            except (OSError, ValueError) as error:
                raise addresses.unavailable(
                    endpoint, error.errno if isinstance(error, OSError) else None, error
                ) from error
            _bind(link, f"ipc://{bounded.inner}")
            link.closing.enter_context(stack.pop_all())

    def _socket(self, kind: int, name: str, endpoint: str, max_bytes: int) -> ZmqSocket:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, int(LINGER_S * 1000))
        socket.setsockopt(zmq.SNDHWM, 0)  # credit bounds it
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        if addresses.ipc_path(endpoint) is None:  # a host may vanish without closing
            socket.setsockopt(zmq.IPV6, int("[" in endpoint))
            socket.setsockopt(zmq.HEARTBEAT_IVL, int(self._timing.heartbeat * 1000))
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(self._timing.peer_timeout * 1000))
        return ZmqSocket(socket, name, self._fail)

    # ------------------------------------------------------------ keys

    def _secure(self, link: ZmqSocket, name: str, endpoint: str) -> None:
        """Makes a listening socket reject unauthenticated clients, and counts those."""
        socket, curve = link.socket, self._protection.curve
        if addresses.ipc_path(endpoint) is not None:
            return
        for machine in self._protection.machines:
            socket.setsockopt(zmq.TCP_ACCEPT_FILTER, machine.encode())
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(keys.HANDSHAKE_S * 1000))
        if curve is None:
            return
        _set_keys(socket, curve)
        socket.curve_server = True
        socket.zap_domain = name.encode()
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer every client is rejected
        handshakes = keys.Handshakes(partial(self._reject, name), addresses.peer_address, self._clock)
        self._watch(link, name, handshakes.on_event)

    def _authenticate(self, curve: keys.Curve) -> ZmqSocket:
        """Answers the authentication requests of this context's sockets."""
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind("inproc://zeromq.zap.01")
        link = ZmqSocket(socket, "keys", self._fail)

        def received(request: Sequence[Buffer], route: bytes) -> None:
            link.send(keys.authenticate(request, curve.clients, self._reject, zmq.utils.z85.encode), route)

        link.open(received)
        return link

    def _on_client_event(self, event: str, name: str, endpoint: str) -> None:
        """Raises if the listener rejected our key: ZeroMQ does not try again, and the service cannot work."""
        if event in keys.REFUSED:
            raise keys.key_rejected(name)
        if event == "HANDSHAKE_FAILED_NO_DETAIL":  # ZeroMQ tries again
            self._reject(name, endpoint, "it closed the connection: it is shutting down, or has other keys")

    def _reject(self, name: str, peer: str, cause: str) -> None:
        """Counts and logs a rejected connection to a queue or topic."""
        self.refused += 1
        self._rejections.log_event("refused", peer, f"{name} {cause}", endpoint=name, cause=cause)

    def _watch(self, link: ZmqSocket, name: str, on_event: Callable[[str, int], None]) -> None:
        """Delivers the events of a socket until it closes."""
        monitor = ZmqSocket(link.socket.get_monitor_socket(), name, self._fail)

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
    path = addresses.ipc_path(endpoint)
    try:
        if path is not None:
            link.socket.setsockopt(zmq.USE_FD, addresses.listen(path).detach())
        link.socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise addresses.unavailable(endpoint, error.errno, error) from error
    if path is not None:
        link.closing.callback(path.unlink, missing_ok=True)


def _set_keys(socket: zmq.Socket[bytes], curve: keys.Curve) -> None:
    socket.curve_publickey, socket.curve_secretkey = curve.public.encode(), curve.secret.encode()
