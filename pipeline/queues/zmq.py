"""Connects the processes of a run over ZeroMQ; no other module imports zmq.

Receivers and publishers bind ROUTER sockets, senders and subscribers connect DEALER sockets.
ZeroMQ's own limits never act: credit bounds the messages in transit, and the rules in `sending` and
`topic` find and repeat what a broken connection loses. An end that connects introduces itself at once, and again to
each later incarnation of the listener. While a receiver is away, one small message per
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
from sparring.pipeline.queues.ends import End
from sparring.pipeline.queues.interface import Publisher, Transport
from sparring.pipeline.queues.rejections import RejectionLog
from sparring.pipeline.queues.wire import DEFAULT_TIMING, Message, Timing, decode, encode, pack

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
        for frame in first:
            _send(self.socket, frame, _MORE, False)
        _send(self.socket, last, _NOBLOCK, False)

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

    pack = staticmethod(pack)

    def __init__(self, socket: ZmqSocket, end: End, rejections: RejectionLog) -> None:
        self._socket = socket
        self._end = end
        self._rejections = rejections
        self.close = socket.close
        self.poll = socket.poll
        self._socket.open(self._received, end.settle, self._discard)

    def _received(self, frames: Sequence[Buffer], route: bytes) -> None:
        if not (route or frames[0] or frames[1:]):
            self._end.linked()  # the empty message by which a listener answers a new connection (`PROBE_ROUTER`)
        else:
            self._end.received(decode(frames), route)

    def _discard(self, error: CodecError) -> None:
        self._rejections.log_event("discarded", "any peer", self._end.name, queue=self._end.name, error=str(error))
        self._end.malformed()

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
        secret: CURVE key of the run, in Z85, without which no TCP endpoint opens; Unix sockets need none.

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
        secret: str | None = None,
    ) -> None:
        super().__init__(start, timing, time.monotonic, time.time_ns)
        self.endpoints = dict(endpoints)
        self._outgoing: list[tuple[str, ZmqSocket]] = []  # name and socket of each end that connects
        self._reconnect = reconnect
        self._bind_s = bind
        self._secret = None if secret is None else secret.encode()
        self.refused = 0
        self._rejections = RejectionLog(log, self._clock)

    async def __aenter__(self) -> Self:
        self._context = zmq.Context(io_threads=1)
        self._authentication = None if self._secret is None else self._authenticate(zmq.curve_public(self._secret))
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

    # ------------------------------------------------------------ sockets

    def _connect(self, end: End) -> ZmqLink:
        name, endpoint = end.name, addresses.endpoint_of(self.endpoints, end.name)
        link = self._socket(zmq.DEALER, name, endpoint, _MAX_BYTES)
        link.socket.setsockopt(zmq.RECONNECT_IVL, max(1, int(self._reconnect * 1000)))
        if addresses.ipc_path(endpoint) is None:
            self._watch(link, name, lambda event, _: self._on_client_event(event, name, endpoint))
        try:
            link.socket.connect(endpoint)
        except zmq.ZMQError as error:
            link.close()
            raise addresses.unavailable(endpoint, error.errno, error) from error
        self._outgoing.append((name, link))
        link.closing.callback(self._outgoing.remove, (name, link))
        return ZmqLink(link, end, self._rejections)

    def move(self, endpoints: Mapping[str, str]) -> None:
        """Connects the ends of this transport to endpoints that have changed; a listener is not moved."""
        for name, link in self._outgoing:
            if (new := endpoints.get(name, self.endpoints[name])) != (old := self.endpoints[name]):
                link.socket.disconnect(old)
                link.socket.connect(new)
        self.endpoints |= endpoints

    async def _listen(self, end: End) -> ZmqLink:
        name, endpoint = end.name, addresses.endpoint_of(self.endpoints, end.name)
        max_bytes = _MAX_STATUS_BYTES if isinstance(end, Publisher) else _MAX_BYTES
        link = self._socket(zmq.ROUTER, name, endpoint, max_bytes)
        link.socket.setsockopt(zmq.PROBE_ROUTER, 1)  # so that a restarted service need not wait for heartbeats
        deadline = anyio.current_time() + self._bind_s
        try:
            if addresses.ipc_path(endpoint) is None:
                reject = partial(self._reject, name)
                self._watch(link, name, keys.Handshakes(reject, addresses.peer_address, self._clock).on_event)
            while True:
                try:
                    _bind(link, endpoint)
                except QueueError:
                    if anyio.current_time() >= deadline:
                        raise
                    await anyio.sleep(0.02)
                else:
                    return ZmqLink(link, end, self._rejections)
        except BaseException:
            link.close()
            raise

    def _socket(self, kind: int, name: str, endpoint: str, max_bytes: int) -> ZmqSocket:
        remote = addresses.ipc_path(endpoint) is None
        if remote and self._secret is None:
            raise QueueError(
                f"got {name} at {endpoint} without a key; expected the key of the run, as every user of a machine that "
                "reaches a TCP port could take part; use Unix sockets, or a key"
            )
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, int(LINGER_S * 1000))
        socket.setsockopt(zmq.SNDHWM, 0)  # credit bounds it
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        if self._secret is not None and remote:
            socket.setsockopt(zmq.IPV6, int("[" in endpoint))
            socket.setsockopt(zmq.HEARTBEAT_IVL, int(self._timing.heartbeat * 1000))  # a host may vanish
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(self._timing.peer_timeout * 1000))
            public = zmq.curve_public(self._secret)
            socket.curve_secretkey, socket.curve_publickey = self._secret, public
            if kind == zmq.ROUTER:
                socket.curve_server = True
                socket.zap_domain = name.encode()
                socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer every client is rejected
                socket.setsockopt(zmq.HANDSHAKE_IVL, int(keys.HANDSHAKE_S * 1000))
            else:
                socket.curve_serverkey = public
        return ZmqSocket(socket, name, self._fail)

    # ------------------------------------------------------------ keys

    def _authenticate(self, public: bytes) -> ZmqSocket:
        """Answers the authentication requests of this context's sockets."""
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind("inproc://zeromq.zap.01")
        link = ZmqSocket(socket, "keys", self._fail)

        def received(request: Sequence[Buffer], route: bytes) -> None:
            link.send(keys.authenticate(request, zmq.utils.z85.decode(public), self._reject), route)

        link.open(received)
        return link

    def _on_client_event(self, event: str, name: str, endpoint: str) -> None:
        """Counts and logs that a listener has closed the connection to it; ZeroMQ tries again."""
        if event == "HANDSHAKE_FAILED_NO_DETAIL":
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


def new_secret() -> str:
    """Returns a new CURVE key, in Z85; its public half follows from it."""
    return zmq.curve_keypair()[1].decode()


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
