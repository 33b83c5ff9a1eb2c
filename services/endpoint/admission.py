"""Admission turns a connection into an authenticated simulator: pending handshakes are few, short and get few errors.

    accepted by the system -> TLS -> Hello -> credential -> capacity -> conversation
    '-------- one of `limits.handshakes` pending ones, for `handshake_timeout_s` --'

Where the endpoint requires a credential, a peer without one learns only that it is missing.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
from anyio.abc import ByteStream, Listener, SocketAttribute, TaskGroup

from sparring.pipeline.errors import CodecError, ExplainedError, LimitExceeded, ProtocolError, RemoteProtocolError
from sparring.pipeline.messages.codec import FrameReader, to_bytes
from sparring.pipeline.messages.conversation import Conversation
from sparring.pipeline.messages.simulator import Fault, Hello
from sparring.pipeline.specs import SpecError
from sparring.pipeline.stepping.limits import HELLO
from sparring.services.endpoint.connection_limits import ConnectionLimits
from sparring.services.endpoint.credentials import Credentials
from sparring.services.endpoint.listening import PacedListener
from sparring.services.endpoint.rejections import INTERVAL_S

DISCONNECTED: Final = (
    anyio.BrokenResourceError,
    anyio.EndOfStream,
    anyio.ClosedResourceError,
    anyio.BusyResourceError,  # TLS answers by itself while an answer of ours is being sent
    OSError,
)
"""Errors of a stream whose peer has disconnected or broken its encryption."""

FAULT_TIMEOUT_S: Final = 1.0
"""Seconds within which a final Fault must be sent."""


@dataclass(kw_only=True)
class HandshakingSimulator:
    """A HandshakingSimulator is at the beginning of its conversation.

    Attributes:
        host: address of its machine; "here" for a Unix socket.
        identity: name in its certificate; "" for none.
        authenticated: it has presented the required credential.
        hello: its Hello; None until that arrives.
        reader: holds the bytes after Hello.
        conversation: state of the protocol.
    """

    host: str = "here"
    identity: str = ""
    authenticated: bool = False
    hello: Hello | None = None
    reader: FrameReader = field(default_factory=FrameReader)
    conversation: Conversation = field(default_factory=lambda: Conversation("trainer"))

    @property
    def is_local(self) -> bool:
        """Returns whether it runs on this machine."""
        return self.host in ("here", "::1") or self.host.startswith("127.")

    @property
    def peer(self) -> str:
        """Returns its address and name, for logs."""
        return f"{self.host} {self.identity}".rstrip()


@dataclass(eq=False)
class PendingConnection:
    """A PendingConnection has not completed its handshake."""

    candidate: HandshakingSimulator
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    secured: bool = False


class ConnectionAcceptor:
    """A ConnectionAcceptor admits simulators.

    Args:
        credentials: required of simulators.
        limits: of connections and handshakes.
        serve: handles an admitted simulator until its end.
    """

    def __init__(
        self,
        credentials: Credentials,
        limits: ConnectionLimits,
        serve: Callable[[ByteStream, HandshakingSimulator], Awaitable[None]],
    ) -> None:
        self._credentials = credentials
        self._limits = limits
        self._serve = serve
        # by host, the oldest first
        self._pending: OrderedDict[str, OrderedDict[PendingConnection, None]] = OrderedDict()
        self._connected: Counter[str] = Counter()

    @property
    def pending(self) -> int:
        """Returns the number of connections without a completed handshake."""
        return sum(map(len, self._pending.values()))

    @property
    def connected(self) -> dict[str, int]:
        """Returns the number of admitted connections by host."""
        return dict(self._connected)

    async def run(self, listener: Listener[Any], tasks: TaskGroup) -> None:
        """Accepts connections until cancelled, each with a task of its own in `tasks`."""
        tasks.start_soon(self._summarize, listener)
        try:
            async with listener:
                await listener.serve(self.admit, tasks)
        finally:
            self._limits.rejections.summarize(at_end=True)

    async def admit(self, stream: ByteStream) -> None:
        """Handles one connection until its end."""
        candidate = HandshakingSimulator(host=host_of(stream))
        try:
            secured = await self._handshake(stream, candidate)
            if secured is not None:
                await self._serve_connected(secured, candidate)
        finally:
            await anyio.aclose_forcefully(stream)

    async def _serve_connected(self, stream: ByteStream, candidate: HandshakingSimulator) -> None:
        self._connected[candidate.host] += 1
        try:
            await self._serve(stream, candidate)
        finally:
            self._connected[candidate.host] -= 1
            if not self._connected[candidate.host]:
                del self._connected[candidate.host]

    async def _handshake(self, stream: ByteStream, candidate: HandshakingSimulator) -> ByteStream | None:
        """Returns the stream, encrypted if required, of an admitted simulator; None of a rejected one."""
        pending_connection = self._add_pending(candidate)
        fault: Fault | None = None
        kind = "evicted"
        try:
            with pending_connection.scope:
                try:
                    with anyio.fail_after(self._limits.limits.handshake_timeout_s):
                        secured = stream = await self._credentials.secure(stream)
                        pending_connection.secured = True
                        await self._receive_hello(stream, candidate)
                        return secured
                except TimeoutError:
                    kind, fault = "timeout", _hello_timeout(self._limits.limits.handshake_timeout_s)
                except DISCONNECTED:
                    kind = "left" if pending_connection.secured else "handshake"
                except (ProtocolError, CodecError, SpecError) as error:
                    fault = fault_of(error)
                    kind = fault.code
                await self._send_fault(stream, pending_connection, fault)
        finally:
            self._remove_pending(pending_connection)
        self._reject(kind, candidate, fault)
        return None

    async def _receive_hello(self, stream: ByteStream, candidate: HandshakingSimulator) -> None:
        candidate.identity = self._credentials.certificate_name(stream)
        reader = candidate.reader
        reader.allow(HELLO)
        while (message := reader.next()) is None:
            reader.feed(await stream.receive(HELLO.total))
        candidate.conversation.received(message)
        if not isinstance(message, Hello):  # Bye or Fault
            raise anyio.EndOfStream
        self._credentials.check(candidate.identity, message.credential)
        candidate.authenticated = True
        self._credentials.check_number(candidate.identity, message.number)
        self._check_capacity(candidate)
        candidate.hello = message
        reader.allow(self._limits.limits.messages)

    def _check_capacity(self, candidate: HandshakingSimulator) -> None:
        limits = self._limits.limits
        for got, limit, key in (
            (self._connected.total(), limits.connections, "connections"),
            (self._connected[candidate.host], limits.connections_per_host, "connections_per_host"),
        ):
            if got >= limit:
                raise RemoteProtocolError(
                    "busy",
                    got=f"a simulator beside {got} others",
                    expected=f"at most {limit}",
                    remedy=f"start fewer, or raise pipeline.limits.{key}",
                )

    # ------------------------------------------------------------ handshakes

    def _add_pending(self, candidate: HandshakingSimulator) -> PendingConnection:
        """Adds a handshake; where there are too many, evicts the oldest of the host with the most.

        An honest simulator needs milliseconds: its handshake completes before later ones evict it.
        """
        pending_connection = PendingConnection(candidate)
        self._pending.setdefault(candidate.host, OrderedDict())[pending_connection] = None
        if self.pending > self._limits.limits.handshakes:
            crowd = max(self._pending.values(), key=len)
            oldest = next(iter(crowd))
            self._remove_pending(oldest)
            oldest.scope.cancel()
        return pending_connection

    def _remove_pending(self, pending_connection: PendingConnection) -> None:
        own = self._pending.get(pending_connection.candidate.host)
        if own is not None:
            own.pop(pending_connection, None)
            if not own:
                del self._pending[pending_connection.candidate.host]

    async def _send_fault(self, stream: ByteStream, pending_connection: PendingConnection, fault: Fault | None) -> None:
        """Sends a Fault, unless its details would help an unauthenticated peer."""
        candidate = pending_connection.candidate
        is_known = candidate.authenticated or candidate.identity or not self._credentials.required
        may_know = is_known or (pending_connection.secured and fault is not None and fault.code == "credential")
        if fault is None or not may_know or candidate.conversation.state == "closed":
            return
        with anyio.move_on_after(FAULT_TIMEOUT_S):
            try:
                await stream.send(to_bytes(fault))
            except DISCONNECTED:
                return

    def _reject(self, kind: str, candidate: HandshakingSimulator, fault: Fault | None) -> None:
        facts = {} if fault is None else {"got": fault.got, "expected": fault.expected}
        self._limits.rejections.reject(kind, candidate.peer, **facts)

    async def _summarize(self, listener: Listener[Any]) -> None:
        rejections, failures = self._limits.rejections, 0
        while True:
            await anyio.sleep(INTERVAL_S)
            if isinstance(listener, PacedListener) and listener.failures > failures:
                rejections.log_event(
                    "connections_not_accepted", "all", times=listener.failures - failures, cause=listener.cause
                )
                failures = listener.failures
            rejections.summarize()


def host_of(stream: ByteStream) -> str:
    """Returns a stream's origin: an IPv4 address, the network of an IPv6 address, or "here"."""
    remote = stream.extra(SocketAttribute.remote_address, None)  # noqa: S610 (of a stream)
    if not isinstance(remote, tuple):
        return "here"
    try:
        address = ipaddress.ip_address(remote[0].partition("%")[0])
    except ValueError:
        return str(remote[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    # A peer with one address of such a network controls all of them.
    return str(address if address.is_loopback else ipaddress.ip_network((address, 64), strict=False))


def fault_of(error: ExplainedError) -> Fault:
    """Returns the Fault that reports an error to the simulator that caused it."""
    if isinstance(error, ProtocolError):
        code = error.code
    elif isinstance(error, LimitExceeded):
        code = "too_large"
    else:
        code = "specs" if isinstance(error, SpecError) else "malformed"
    return Fault(code=code, got=error.got, expected=error.expected, remedy=error.remedy)


def _hello_timeout(limit_s: float) -> Fault:
    return Fault(
        code="timeout",
        got=f"no Hello in {limit_s:g} s",
        expected="a Hello within that time",
        remedy="connect when the simulator is ready to send it",
    )
