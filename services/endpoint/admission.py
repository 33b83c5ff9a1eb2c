"""Admission turns a connection into an authenticated simulator: pending handshakes are few, short and get few errors.

    accepted by the system -> TLS -> WebSocket -> Hello -> credential -> capacity -> conversation
    '-------- one of `limits.handshakes` pending ones, for `handshake_timeout_s` --'

Simulators authenticate with a certificate of the keys' authority over TLS, or with the token in their Hello. Where the
endpoint requires a credential, a peer without one learns only that it is missing.
"""

import hmac
import ipaddress
import re
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
from anyio.abc import ByteStream, Listener, SocketAttribute, TaskGroup
from anyio.streams.tls import TLSAttribute, TLSStream

from sparring.pipeline.errors import ExplainedError, LimitExceeded, ProtocolError, RemoteProtocolError, SettingsError
from sparring.pipeline.messages.codec import to_bytes
from sparring.pipeline.messages.simulator import Fault, Hello
from sparring.pipeline.queues.endpoints import is_open
from sparring.pipeline.queues.rejections import INTERVAL_S, RejectionLog
from sparring.pipeline.security import allowed, server_tls, token
from sparring.pipeline.specs import SpecError
from sparring.pipeline.stepping.limits import HELLO, LimitSettings
from sparring.pipeline.stepping.settings import Accepted
from sparring.services.endpoint.peers import FAULT_TIMEOUT_S, SimulatorPeer
from sparring.services.endpoint.sockets import PacedListener, SocketBytes

DISCONNECTED: Final = (
    anyio.BrokenResourceError,
    anyio.EndOfStream,
    anyio.ClosedResourceError,
    anyio.BusyResourceError,  # TLS answers by itself while an answer of ours is being sent
    OSError,
)
"""Errors of a stream whose peer has disconnected or broken its encryption."""
_NUMBERED: Final = re.compile(r"simulator-\d+")


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Credentials are what an endpoint requires of simulators.

    Attributes:
        tls: context of the endpoint; None where it does not encrypt.
        names: names whose certificates are accepted.
        token: accepted token; "" where none is accepted.
    """

    tls: ssl.SSLContext | None = None
    names: Collection[str] = ()
    token: str = field(default="", repr=False)

    @property
    def required(self) -> bool:
        """Returns whether a simulator must authenticate."""
        return self.tls is not None or bool(self.token)

    async def secure(self, stream: ByteStream) -> ByteStream:
        """Returns the stream, encrypted where the endpoint encrypts.

        Raises:
            OSError: the other side does not speak TLS, or its certificate is not of this authority.
        """
        if self.tls is None:
            return stream
        # Without the closing alert of TLS: messages have lengths, so truncation is noticed.
        return await TLSStream.wrap(stream, server_side=True, ssl_context=self.tls, standard_compatible=False)

    def certificate_name(self, stream: ByteStream) -> str:
        """Returns the name in the peer's certificate; "" for none.

        Raises:
            RemoteProtocolError: the name is not accepted.
        """
        if self.tls is None:
            return ""
        certificate: Any = stream.extra(TLSAttribute.peer_certificate, None) or {}  # noqa: S610 (of a stream)
        names = [value for parts in certificate.get("subject", ()) for key, value in parts if key == "commonName"]
        name = str(names[0]) if names else ""
        if certificate and name not in self.names:
            raise _unknown("a certificate that is not accepted here", "one of a simulator on the list of the keys")
        return name

    def check(self, identity: str, credential: str) -> None:
        """Rejects a simulator without a certificate or the right token.

        Raises:
            RemoteProtocolError: it has neither.
        """
        if identity or not self.required:
            return
        # In constant time; a token that is not ASCII is compared as bytes.
        if not self.token or not hmac.compare_digest(credential.encode(), self.token.encode()):
            raise _unknown("no valid credential", "a certificate or the token of the keys of this run")

    def check_number(self, identity: str, number: int | None) -> None:
        """Rejects another simulator's number: number N belongs to the certificate `simulator-N`, if there is one.

        Raises:
            RemoteProtocolError: the number belongs to another simulator.
        """
        if number is None or identity == (owner := f"simulator-{number}"):
            return
        if owner in self.names or _NUMBERED.fullmatch(identity):
            raise RemoteProtocolError(
                "number",
                got=f"simulator number {number} with {f'the certificate {identity}' if identity else 'a token'}",
                expected=f"the certificate {owner}",
                remedy="leave the number out, or use the certificate of that number",
            )


def credentials(address: str, keys: Path | None, accepted: Accepted, *, encrypt: bool) -> Credentials:
    """Returns the credentials that the endpoint at an address requires.

    Args:
        address: of the endpoint. A Unix socket requires none: its mode admits only its owner.
        keys: folder of the keys; None requires none.
        accepted: kinds of credentials that simulators may use.
        encrypt: False leaves TCP unencrypted: then only the token is possible.

    Raises:
        SettingsError: a file of the keys cannot be used, or a token would leave this machine unencrypted.
    """
    if keys is None or urlsplit(address).scheme == "unix":
        return Credentials()
    if not encrypt and is_open(address):
        raise SettingsError(
            f"got encrypt: false for {address}, which other machines can reach; expected loopback, where a token may "
            "be sent unencrypted; leave encrypt out"
        )
    return Credentials(
        tls=server_tls(keys) if encrypt else None,
        names=allowed(keys) if encrypt and accepted != "token" else (),
        token=token(keys) if accepted != "certificate" else "",
    )


def _unknown(got: str, expected: str) -> RemoteProtocolError:
    remedy = "use the keys that were made for this run (docs/security.md)"
    return RemoteProtocolError("credential", got=got, expected=expected, remedy=remedy)


@dataclass
class ConnectionAcceptor:
    """A ConnectionAcceptor admits simulators.

    Attributes:
        credentials: required of simulators.
        limits: of connections and handshakes.
        rejections: log of those not admitted.
        serve: handles an admitted simulator until its end.
        upgrade: completes the WebSocket handshake on a stream; None where plain sockets connect.
        connected: number of admitted connections by host; the acceptors of an endpoint share it.
        pending: those without a completed handshake, the oldest first; shared too.
    """

    credentials: Credentials
    limits: LimitSettings
    rejections: RejectionLog
    serve: Callable[[SimulatorPeer], Awaitable[None]]
    upgrade: Callable[[ByteStream], Awaitable[ByteStream]] | None = None
    connected: Counter[str] = field(default_factory=Counter)
    pending: dict[SimulatorPeer, None] = field(default_factory=dict)

    async def run(self, listener: Listener[SocketBytes], tasks: TaskGroup) -> None:
        """Accepts connections until cancelled, each with a task of its own in `tasks`."""
        tasks.start_soon(self._summarize, listener)
        try:
            async with listener:
                await listener.serve(self.admit, tasks)
        finally:
            self.rejections.summarize(at_end=True)

    async def admit(self, stream: ByteStream) -> None:
        """Handles one connection until its end."""
        peer = SimulatorPeer(stream, host_of(stream))
        try:
            if not await self._handshake(peer):
                return
            self.connected[peer.host] += 1
            try:
                await self.serve(peer)
            finally:
                self.connected[peer.host] -= 1
                self.connected += Counter()  # without hosts that have no connection
        finally:
            await anyio.aclose_forcefully(stream)

    async def _handshake(self, peer: SimulatorPeer) -> bool:
        """Encrypts the stream if required, and returns whether the simulator is admitted."""
        fault: Fault | None = None
        kind = "evicted"
        self.pending[peer] = None
        self._evict_surplus()
        try:
            with peer.scope:
                try:
                    with anyio.fail_after(self.limits.handshake_timeout_s):
                        peer.stream = await self.credentials.secure(peer.stream)
                        if self.upgrade is not None:
                            peer.stream = await self.upgrade(peer.stream)
                        peer.secured = True
                        await self._receive_hello(peer)
                        return True
                except TimeoutError:
                    got = f"no Hello in {self.limits.handshake_timeout_s:g} s"
                    remedy = "connect when the simulator is ready to send it"
                    fault = Fault(code="timeout", got=got, expected="a Hello within that time", remedy=remedy)
                    kind = fault.code
                except DISCONNECTED:
                    kind = "left" if peer.secured else "handshake"
                except ExplainedError as error:
                    fault = fault_of(error)
                    kind = fault.code
                await self._send_fault(peer, fault)
        finally:
            self.pending.pop(peer, None)
        facts = {} if fault is None else {"got": fault.got, "expected": fault.expected}
        self.rejections.reject(kind, peer.address, **facts)
        return False

    async def _receive_hello(self, peer: SimulatorPeer) -> None:
        peer.identity = self.credentials.certificate_name(peer.stream)
        peer.allow(HELLO)
        while (message := peer.reader.next()) is None:
            peer.reader.feed(await peer.stream.receive(HELLO.total))
        peer.conversation.received(message)
        if not isinstance(message, Hello):  # Bye or Fault
            raise anyio.EndOfStream
        self.credentials.check(peer.identity, message.credential)
        peer.authenticated = True
        self.credentials.check_number(peer.identity, message.number)
        self._check_capacity(peer)
        peer.hello = message
        peer.allow(self.limits.messages)

    def _check_capacity(self, peer: SimulatorPeer) -> None:
        for got, limit, key in (
            (self.connected.total(), self.limits.connections, "connections"),
            (self.connected[peer.host], self.limits.connections_per_host, "connections_per_host"),
        ):
            if got >= limit:
                raise RemoteProtocolError(
                    "busy",
                    got=f"a simulator beside {got} others",
                    expected=f"at most {limit}",
                    remedy=f"start fewer, or raise pipeline.limits.{key}",
                )

    def _evict_surplus(self) -> None:
        """Ends the oldest handshake of the host with the most, where there are too many.

        An honest simulator needs milliseconds: its handshake completes before later ones evict it.
        """
        if len(self.pending) > self.limits.handshakes:
            ((crowd, _),) = Counter(peer.host for peer in self.pending).most_common(1)
            oldest = next(peer for peer in self.pending if peer.host == crowd)
            del self.pending[oldest]
            oldest.scope.cancel()

    async def _send_fault(self, peer: SimulatorPeer, fault: Fault | None) -> None:
        """Sends a Fault, unless its details would help an unauthenticated peer."""
        is_known = peer.authenticated or peer.identity or not self.credentials.required
        may_know = is_known or (peer.secured and fault is not None and fault.code == "credential")
        if fault is None or not (may_know and peer.secured) or peer.conversation.state == "closed":
            return
        with anyio.move_on_after(FAULT_TIMEOUT_S):
            try:
                await peer.stream.send(to_bytes(fault))
            except DISCONNECTED:
                return

    async def _summarize(self, listener: Listener[SocketBytes]) -> None:
        failures = 0
        while True:
            await anyio.sleep(INTERVAL_S)
            if isinstance(listener, PacedListener) and (new := listener.failures - failures):
                failures = listener.failures
                self.rejections.log_event("connections_not_accepted", "all", times=new, cause=listener.cause)
            self.rejections.summarize()


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
