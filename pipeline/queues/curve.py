"""Authenticates the clients of a service's ends by the run's CURVE key, and finds rejected connections.

ZeroMQ asks about each client that has presented a key (ZAP, rfc.zeromq.org/spec/27). What fails earlier (no key,
another key, another protocol than ZeroMQ, silence) it only reports as events of the socket.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from sparring.pipeline.messages.codec import Buffer

HANDSHAKE_S: Final = 5.0
"""Seconds after which a client that has not presented its key is dropped."""

_VERSION: Final = b"1.0"


def authenticate(
    request: Sequence[Buffer], public: bytes, on_rejected: Callable[[str, str, str], None]
) -> list[Buffer]:
    """Answers an authentication request of ZeroMQ.

    Args:
        request: a delimiter, version, serial, domain, address, identity, mechanism and key.
        public: the 32 bytes of the key that all services of the run present.
        on_rejected: called with the queue or topic, the peer's address and the cause.
    """
    delimiter, version, serial, domain, address, _, mechanism, *keys = map(bytes, request)
    allowed = version == _VERSION and mechanism == b"CURVE" and keys == [public]
    if not allowed:
        on_rejected(domain.decode(errors="replace"), address.decode(errors="replace"), "it has another key")
    status: list[Buffer] = [b"200", b"OK"] if allowed else [b"400", b"not allowed"]
    return [delimiter, _VERSION, serial, *status, b"", b""]


@dataclass(slots=True)
class Handshakes:
    """Finds the rejected connections among the events of a listening socket.

    Events name a connection by its descriptor when it opens and closes, but not when its handshake succeeds or fails.
    A failure immediately precedes the close. A connection older than the time for handshakes has succeeded.

    Attributes:
        on_rejected: called with the peer's address and the cause.
        peer_of: returns the address at the other end of a descriptor.
        clock: gives rising seconds.
    """

    on_rejected: Callable[[str, str], None]
    peer_of: Callable[[int], str]
    clock: Callable[[], float]
    _connections: dict[int, tuple[str, float]] = field(default_factory=dict)  # peer and arrival, by descriptor
    _succeeded: int = 0
    _failure: str | None = None

    def on_event(self, event: str, value: int) -> None:
        """Handles an event of the socket, by ZeroMQ's name."""
        if event == "ACCEPTED":
            self._connections[value] = (self.peer_of(value), self.clock())
        elif event == "HANDSHAKE_SUCCEEDED":
            self._succeeded += 1
        elif event in _FAILURES:
            self._failure = _FAILURES[event]
        elif event == "ACCEPT_FAILED":
            self.on_rejected("any peer", "too many files are open")
        elif event == "DISCONNECTED":
            self._on_closed(value)

    def _on_closed(self, descriptor: int) -> None:
        failure, self._failure = self._failure, None
        young = [one for one in self._connections if self.clock() - self._connections[one][1] < HANDSHAKE_S]
        old = len(self._connections) - len(young)
        self._succeeded = max(self._succeeded, old)
        peer, _ = self._connections.pop(descriptor, ("unknown", 0.0))
        if failure:
            self.on_rejected(peer, failure)
        elif failure is not None:
            return  # counted by the authenticator
        elif descriptor in young and self._succeeded == old:
            self.on_rejected(peer, "it left before it had presented a key")
        else:
            self._succeeded = max(0, self._succeeded - 1)


_FAILURES: Final[Mapping[str, str]] = {
    "HANDSHAKE_FAILED_AUTH": "",  # counted by the authenticator
    "HANDSHAKE_FAILED_PROTOCOL": "it has no key or another one, or speaks another protocol",
    "HANDSHAKE_FAILED_NO_DETAIL": f"it sent too little within {HANDSHAKE_S:g} s",
}
