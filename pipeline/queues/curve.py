"""Who may connect: CURVE keys of a service's ends, and what is refused. ZeroMQ asks here, and tells what happened.

ZeroMQ asks about each client that has shown a key (ZAP, rfc.zeromq.org/spec/27). What fails before that
(no key, the wrong server's key, no ZeroMQ at all, silence) it only reports as events of the socket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from sparring.pipeline.messages.codec import Buffer

HANDSHAKE_S: Final = 5.0
"""A client that has not shown its key after so long is dropped."""

INTERVAL_S: Final = 60.0
_MOST_PEERS: Final = 256
_VERSION: Final = b"1.0"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Keys of one service, each of 40 characters in Z85.

    Attributes:
        public: its own.
        secret: its own; not shown.
        servers: public key of who listens at each queue or board ("topic:NAME"), by its name.
        clients: public keys of those that may connect there, by its name.
    """

    public: str
    secret: str = field(repr=False)
    servers: Mapping[str, str]
    clients: Mapping[str, frozenset[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Protection:
    """How a service's TCP ends are protected; Unix sockets need none.

    Attributes:
        curve: keys; None: it listens on loopback only.
        insecure: it listens without keys where other machines can connect, too.
        machines: addresses of all machines of the run, its own first, which it connects from: who calls from another is
            not listened to. None where all is on this machine.
    """

    curve: Curve | None = None
    insecure: bool = False
    machines: tuple[str, ...] = ()


UNPROTECTED: Final = Protection()


class HandshakeRejections:
    """Counts what was refused, and logs it once for each peer and interval.

    Args:
        clock: seconds, rising.
        logger: gets the lines.
    """

    def __init__(self, clock: Callable[[], float], logger: Any = log) -> None:
        self.total = 0
        self._clock = clock
        self._log = logger
        self._peers: dict[tuple[str, str], tuple[float, int]] = {}

    def count(self, name: str, peer: str, cause: str) -> None:
        """A connection was refused.

        Args:
            name: of the queue or board.
            peer: its address.
            cause: why.
        """
        self.total += 1
        now = self._clock()
        key = (name, peer)
        if key not in self._peers and len(self._peers) >= _MOST_PEERS:
            self._peers = {one: seen for one, seen in self._peers.items() if now - seen[0] < INTERVAL_S}
            if len(self._peers) >= _MOST_PEERS:
                key = (name, "others")
        told, unsaid = self._peers.get(key, (float("-inf"), 0))
        if now - told < INTERVAL_S:
            self._peers[key] = (told, unsaid + 1)
            return
        self._peers[key] = (now, 0)
        self._log.warning("refused", endpoint=name, peer=key[1], cause=cause, before=unsaid, total=self.total)


class CurveAuthenticator:
    """Answers ZeroMQ's questions about clients.

    Args:
        clients: public keys, in bytes of Z85, that may connect to each queue or board.
        refusals: counts the others.
        text: brings a key into Z85.
    """

    def __init__(
        self, clients: Mapping[str, frozenset[str]], refusals: HandshakeRejections, text: Callable[[bytes], bytes]
    ) -> None:
        self._clients = clients
        self._known = frozenset().union(*clients.values())
        self._refusals = refusals
        self._text = text

    def answer(self, question: Sequence[Buffer]) -> list[Buffer]:
        """Answers a question: a delimiter, version, serial, domain, address, identity, mechanism and key."""
        delimiter, version, serial, domain, address, _, mechanism, *shown = map(bytes, question)
        name = domain.decode(errors="replace")
        key = self._text(shown[0]).decode() if mechanism == b"CURVE" and shown and len(shown[0]) == 32 else ""
        allowed = version == _VERSION and key in self._clients.get(name, ())
        if not allowed:
            cause = "its key is not allowed here" if key in self._known else "its key is unknown"
            self._refusals.count(name, address.decode(errors="replace"), cause)
        status: list[Buffer] = [b"200", b"OK"] if allowed else [b"400", b"not allowed"]
        return [delimiter, _VERSION, serial, *status, b"", b""]


class Handshakes:
    """Finds the refused connections among the events of a listening socket.

    Events name a connection by its descriptor when it begins and ends, but not when its handshake succeeds or fails.
    A failure comes right before the end. A connection older than the time for handshakes has succeeded.

    Args:
        refused: called with the peer's address and the cause.
        peer_of: the address at the other end of a descriptor.
        clock: seconds, rising.
    """

    def __init__(
        self, refused: Callable[[str, str], None], peer_of: Callable[[int], str], clock: Callable[[], float]
    ) -> None:
        self._refused = refused
        self._peer_of = peer_of
        self._clock = clock
        self._connections: dict[int, tuple[str, float]] = {}  # peer and time of arrival, by descriptor
        self._succeeded = 0
        self._failure: str | None = None

    def saw(self, event: str, value: int) -> None:
        """An event of the socket, in ZeroMQ's words."""
        if event == "ACCEPTED":
            self._connections[value] = (self._peer_of(value), self._clock())
        elif event == "HANDSHAKE_SUCCEEDED":
            self._succeeded += 1
        elif event in _FAILURES:
            self._failure = _FAILURES[event]
        elif event == "ACCEPT_FAILED":
            self._refused("another address", "none of the run's machines has its address, or too many files are open")
        elif event == "DISCONNECTED":
            self._ended(value)

    def _ended(self, descriptor: int) -> None:
        failure, self._failure = self._failure, None
        young = [one for one in self._connections if self._clock() - self._connections[one][1] < HANDSHAKE_S]
        old = len(self._connections) - len(young)
        self._succeeded = max(self._succeeded, old)
        peer, _ = self._connections.pop(descriptor, ("unknown", 0.0))
        if failure is not None:
            if failure:
                self._refused(peer, failure)
        elif descriptor in young and self._succeeded == old:
            self._refused(peer, "it left before it had shown a key")
        else:
            self._succeeded = max(0, self._succeeded - 1)


_FAILURES: Final[Mapping[str, str]] = {
    "HANDSHAKE_FAILED_AUTH": "",  # counted where it was decided
    "HANDSHAKE_FAILED_PROTOCOL": "it has no key, expects another one here, or speaks something else",
    "HANDSHAKE_FAILED_NO_DETAIL": f"it said too little within {HANDSHAKE_S:g} s",
}

REFUSED: Final = frozenset({"HANDSHAKE_FAILED_AUTH", "HANDSHAKE_FAILED_PROTOCOL"})
"""Events of a connecting socket after which ZeroMQ tries no more."""
