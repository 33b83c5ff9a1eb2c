"""Where a Unity player calls: one gRPC method whose answers are ours.

The player is the client. Each of its messages is a call, and the next message of the trainer is its answer, so at most
one call is open at any time. The calls arrive on threads of gRPC's.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from pipeline.errors import SettingsError
from pipeline.unity import INSTALL

if TYPE_CHECKING:
    import grpc

SERVICE: Final = "communicator_objects.UnityToExternalProto"
METHOD: Final = "Exchange"

_CALLERS: Final = 4
"""Threads: one for the player's call, the others to turn strangers away."""
_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # a port that is taken is refused instead of shared
    ("grpc.max_receive_message_length", 256 * 2**20),  # images of many agents
    ("grpc.max_send_message_length", -1),
)


def library() -> Any:
    """The module grpc.

    Raises:
        SettingsError: it is not installed.
    """
    try:
        import grpc
    except ImportError as error:
        raise SettingsError(f"got a Unity player without the library grpcio; expected it; {INSTALL}") from error
    return grpc


def taken(port: int, host: str) -> SettingsError:
    """What is said of a port that is not free."""
    return SettingsError(
        f"got port {port} on {host}, which is not free; expected one on which a Unity player can call; "
        "stop what uses it, or choose another with --base-port"
    )


def check_free(port: int, host: str = "127.0.0.1") -> None:
    """Finds out early what a server would find out later.

    Raises:
        SettingsError: the port is not free, or gRPC is not installed.
    """
    library()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # calls that have just ended do not count
        try:
            probe.bind((host, port))
        except OSError as error:
            raise taken(port, host) from error


class Server:
    """Answers the calls of one player.

    Args:
        port: to listen on; 0 chooses one.
        answer: makes the answer to a message, on a thread of gRPC's; it may take its time; None refuses the call.
        broken: called, on a thread of gRPC's, when the player has broken off a call that was not answered.
        host: to listen on.

    Attributes:
        port: on which it listens.

    Raises:
        SettingsError: the port is not free, or gRPC is not installed.
    """

    def __init__(
        self,
        port: int,
        answer: Callable[[bytes], bytes | None],
        broken: Callable[[], None],
        host: str = "127.0.0.1",
    ) -> None:
        grpc = library()
        self._answer = answer
        self._broken = broken
        self._turn = threading.Lock()
        self._peer = ""  # who called first; nobody else is listened to
        self._called = 0  # calls so far
        self._open = 0  # the one that waits for its answer
        self._closing = False
        self._status = grpc.StatusCode
        self._server = grpc.server(ThreadPoolExecutor(_CALLERS, "unity call"), options=_OPTIONS)
        handler: Any = grpc.unary_unary_rpc_method_handler(self._exchange)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        try:
            self.port = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise taken(port, host) from error
        self._server.start()

    def refuse(self) -> None:
        """Turns every later call away, and does not tell of broken ones any more."""
        self._closing = True

    def close(self, grace_s: float | None = 0.5) -> None:
        """Ends the server: a call that is not answered in time is broken off, and the port is free."""
        self._closing = True
        self._server.stop(grace=grace_s).wait(2.0)

    def _exchange(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        """One call, on a thread of gRPC's."""
        with self._turn:
            self._peer = self._peer or context.peer()
            if self._closing or self._open or context.peer() != self._peer:
                return self._refuse(context, "another player plays on this port")
            self._called += 1
            self._open = call = self._called
        context.add_callback(lambda: self._ended(call))
        answer = self._answer(message)
        self._open = 0
        if answer is None:
            return self._refuse(context, "the trainer has ended")
        return answer

    def _ended(self, call: int) -> None:
        """A call is over: in order, or because the player broke it off while it was open."""
        if self._open == call and not self._closing:
            self._broken()

    def _refuse(self, context: Any, why: str) -> bytes:
        context.abort(self._status.UNAVAILABLE, why)
        return b""
