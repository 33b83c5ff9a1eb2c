"""From a connection to a simulator that has said who it is: strangers are few, short of time, and told little.

    taken by the system -> TLS -> Hello -> credential -> room -> conversation
    '----------- a place among `limits.handshakes`, for `handshake_timeout_s` ----'

Where the endpoint asks for a credential, a peer without one learns nothing but that it has none.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
from anyio.abc import ByteStream, Listener, SocketAttribute, TaskGroup

from sparring.pipeline.errors import CodecError, Explained, LimitExceeded, ProtocolError, RemoteProtocolError
from sparring.pipeline.messages.codec import FrameReader, to_bytes
from sparring.pipeline.messages.conversation import Conversation
from sparring.pipeline.messages.simulator import Fault, Hello
from sparring.pipeline.specs import SpecError
from sparring.pipeline.stepping.limits import HELLO
from sparring.services.endpoint.credentials import Credentials
from sparring.services.endpoint.guard import ConnectionLimits
from sparring.services.endpoint.listening import PacedListener
from sparring.services.endpoint.refusals import INTERVAL_S

GONE: Final = (
    anyio.BrokenResourceError,
    anyio.EndOfStream,
    anyio.ClosedResourceError,
    anyio.BusyResourceError,  # TLS that answers by itself while an answer of ours is on its way
    OSError,
)
"""What a stream raises when the other side has gone, or broke its encryption."""

LAST_WORD_S: Final = 1.0
"""How long a Fault may take to leave."""


@dataclass(kw_only=True)
class HandshakingSimulator:
    """A simulator at the beginning of its conversation.

    Attributes:
        host: address of its machine.
        identity: name in its certificate; "" for none.
        accepted: it has shown what is asked for.
        hello: what it has said; None where it is still to say it.
        reader: holds what came after that.
        conversation: so far.
    """

    host: str = "here"
    identity: str = ""
    accepted: bool = False
    hello: Hello | None = None
    reader: FrameReader = field(default_factory=FrameReader)
    conversation: Conversation = field(default_factory=lambda: Conversation("trainer"))

    @property
    def near(self) -> bool:
        """Whether it runs on this machine."""
        return self.host in ("here", "::1") or self.host.startswith("127.")

    @property
    def peer(self) -> str:
        """For logs."""
        return f"{self.host} {self.identity}".rstrip()


@dataclass(eq=False)
class PendingConnection:
    """A connection that has not introduced itself yet."""

    candidate: HandshakingSimulator
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    secured: bool = False


class ConnectionAcceptor:
    """Lets simulators in.

    Args:
        credentials: what they have to show.
        guard: limits.
        serve: speaks with one that was let in, until its end.
    """

    def __init__(
        self,
        credentials: Credentials,
        guard: ConnectionLimits,
        serve: Callable[[ByteStream, HandshakingSimulator], Awaitable[None]],
    ) -> None:
        self._credentials = credentials
        self._guard = guard
        self._serve = serve
        self._pending: OrderedDict[str, OrderedDict[PendingConnection, None]] = (
            OrderedDict()
        )  # by host, the oldest first
        self._inside: Counter[str] = Counter()

    @property
    def pending(self) -> int:
        """Connections that have not introduced themselves."""
        return sum(map(len, self._pending.values()))

    async def run(self, listener: Listener[Any], tasks: TaskGroup) -> None:
        """Takes connections until cancelled, each with a task of its own in `tasks`."""
        tasks.start_soon(self._sum_up, listener)
        try:
            async with listener:
                await listener.serve(self.admit, tasks)
        finally:
            self._guard.refusals.sum_up(at_end=True)

    async def admit(self, stream: ByteStream) -> None:
        """Speaks with one connection until its end."""
        candidate = HandshakingSimulator(host=host_of(stream))
        try:
            secured = await self._introduce(stream, candidate)
            if secured is not None:
                await self._serve_inside(secured, candidate)
        finally:
            await anyio.aclose_forcefully(stream)

    async def _serve_inside(self, stream: ByteStream, candidate: HandshakingSimulator) -> None:
        self._inside[candidate.host] += 1
        try:
            await self._serve(stream, candidate)
        finally:
            self._inside[candidate.host] -= 1
            if not self._inside[candidate.host]:
                del self._inside[candidate.host]

    async def _introduce(self, stream: ByteStream, candidate: HandshakingSimulator) -> ByteStream | None:
        """The stream to go on with once the guest has said who it is; None where it may not come in."""
        pending_connection = self._enter(candidate)
        fault: Fault | None = None
        kind = "evicted"
        try:
            with pending_connection.scope:
                try:
                    with anyio.fail_after(self._guard.limits.handshake_timeout_s):
                        secured = stream = await self._credentials.secure(stream)
                        pending_connection.secured = True
                        await self._greet(stream, candidate)
                        return secured
                except TimeoutError:
                    kind, fault = "timeout", _late(self._guard.limits.handshake_timeout_s)
                except GONE:
                    kind = "left" if pending_connection.secured else "handshake"
                except (ProtocolError, CodecError, SpecError) as error:
                    fault = fault_of(error)
                    kind = fault.code
                await self._tell(stream, pending_connection, fault)
        finally:
            self._leave(pending_connection)
        self._refuse(kind, candidate, fault)
        return None

    async def _greet(self, stream: ByteStream, candidate: HandshakingSimulator) -> None:
        candidate.identity = self._credentials.certified(stream)
        reader = candidate.reader
        reader.allow(HELLO)
        while (message := reader.next()) is None:
            reader.feed(await stream.receive(HELLO.total))
        candidate.conversation.received(message)
        if not isinstance(message, Hello):  # Bye or Fault
            raise anyio.EndOfStream
        self._credentials.check(candidate.identity, message.credential)
        candidate.accepted = True
        self._credentials.check_number(candidate.identity, message.number)
        self._check_room(candidate)
        candidate.hello = message
        reader.allow(self._guard.limits.messages)

    def _check_room(self, candidate: HandshakingSimulator) -> None:
        limits = self._guard.limits
        for got, limit, where in (
            (self._inside.total(), limits.connections, "connections"),
            (self._inside[candidate.host], limits.connections_per_host, "connections_per_host"),
        ):
            if got >= limit:
                raise RemoteProtocolError(
                    "busy",
                    got=f"a simulator beside {got} others",
                    expected=f"at most {limit}",
                    remedy=f"start fewer, or raise pipeline.limits.{where}",
                )

    # ------------------------------------------------------------ strangers

    def _enter(self, candidate: HandshakingSimulator) -> PendingConnection:
        """A place for a newcomer, in place of the oldest of the host that has most of them where all are taken.

        An honest one needs milliseconds: it is through before those behind it push it out.
        """
        pending_connection = PendingConnection(candidate)
        self._pending.setdefault(candidate.host, OrderedDict())[pending_connection] = None
        if self.pending > self._guard.limits.handshakes:
            crowd = max(self._pending.values(), key=len)
            oldest = next(iter(crowd))
            self._leave(oldest)
            oldest.scope.cancel()
        return pending_connection

    def _leave(self, pending_connection: PendingConnection) -> None:
        own = self._pending.get(pending_connection.candidate.host)
        if own is not None:
            own.pop(pending_connection, None)
            if not own:
                del self._pending[pending_connection.candidate.host]

    async def _tell(self, stream: ByteStream, pending_connection: PendingConnection, fault: Fault | None) -> None:
        """Says what was wrong, where it helps nobody but those who may know."""
        known = (
            pending_connection.candidate.accepted
            or pending_connection.candidate.identity
            or not self._credentials.asked
        )
        may_hear = known or (pending_connection.secured and fault is not None and fault.code == "credential")
        if fault is None or not may_hear or pending_connection.candidate.conversation.state == "closed":
            return
        with anyio.move_on_after(LAST_WORD_S):
            try:
                await stream.send(to_bytes(fault))
            except GONE:
                return

    def _refuse(self, kind: str, candidate: HandshakingSimulator, fault: Fault | None) -> None:
        facts = {} if fault is None else {"got": fault.got, "expected": fault.expected}
        self._guard.refusals.refuse(kind, candidate.peer, **facts)

    async def _sum_up(self, listener: Listener[Any]) -> None:
        refusals, untaken = self._guard.refusals, 0
        while True:
            await anyio.sleep(INTERVAL_S)
            if isinstance(listener, PacedListener) and listener.untaken > untaken:
                refusals.say("connections_not_taken", "all", times=listener.untaken - untaken, cause=listener.cause)
                untaken = listener.untaken
            refusals.sum_up()


def host_of(stream: ByteStream) -> str:
    """Where a stream comes from: an IPv4 address, the network of an IPv6 address, or "here"."""
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
    # Whoever has one address of such a network has all of them.
    return str(address if address.is_loopback else ipaddress.ip_network((address, 64), strict=False))


def fault_of(error: Explained) -> Fault:
    """What the simulator is told about its mistake."""
    if isinstance(error, ProtocolError):
        code = error.code
    elif isinstance(error, LimitExceeded):
        code = "too_large"
    else:
        code = "specs" if isinstance(error, SpecError) else "malformed"
    return Fault(code=code, got=error.got, expected=error.expected, remedy=error.remedy)


def _late(limit_s: float) -> Fault:
    return Fault(
        code="timeout",
        got=f"no Hello in {limit_s:g} s",
        expected="a Hello within that time",
        remedy="connect when the simulator is ready to speak",
    )
