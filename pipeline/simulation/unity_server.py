"""Where a Unity player calls: one gRPC method whose answers are ours.

The player is the client. Each of its messages is a call, and the next message of the trainer is its answer, so at most
one call is open at any time. The calls arrive on threads of gRPC's; one thread takes them here, in turn.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from pipeline.errors import SettingsError

if TYPE_CHECKING:
    import grpc

SERVICE: Final = "communicator_objects.UnityToExternalProto"
METHOD: Final = "Exchange"
INSTALL: Final = "pip install 'sparring[unity]'"

_CALLERS: Final = 4
"""Threads: one for the player's call, the others to turn strangers away."""
_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # a port that is taken is refused instead of shared
    ("grpc.max_receive_message_length", 256 * 2**20),  # images of many agents
    ("grpc.max_send_message_length", -1),
)


class Gone:
    """Takes the place of a message where the player has gone: `why`."""

    def __init__(self, why: str) -> None:
        self.why = why


class Calls:
    """The calls of one player.

    Args:
        port: to listen on; 0 chooses one.
        host: to listen on.

    Attributes:
        port: on which it listens.

    Raises:
        SettingsError: the port is not free, or gRPC is not installed.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        try:
            import grpc
        except ImportError as error:
            raise SettingsError(f"got a Unity player without the library grpcio; expected it; {INSTALL}") from error
        self._arrived: queue.SimpleQueue[bytes | Gone] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
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
            raise SettingsError(
                f"got port {port} on {host}, which is not free; expected one on which a Unity player can call; "
                "stop what uses it, or choose another with --base-port"
            ) from error
        self._server.start()

    def receive(self, timeout_s: float) -> bytes | Gone | None:
        """The player's next message; `Gone` where it has gone; None where nothing came in time."""
        try:
            return self._arrived.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None

    def gone(self, why: str) -> None:
        """Says, from any thread, that no more calls will come."""
        self._arrived.put(Gone(why))

    @property
    def open(self) -> bool:
        """Whether a call waits for its answer."""
        return bool(self._open)

    def answer(self, message: bytes) -> None:
        """Answers the open call."""
        self._open = 0
        self._answers.put(message)

    def close(self) -> None:
        """Ends the server; a call without an answer is broken off."""
        self._closing = True
        self._answers.put(None)
        self._server.stop(grace=0.5).wait(2.0)

    def _exchange(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        """One call, on a thread of gRPC's."""
        with self._turn:
            self._peer = self._peer or context.peer()
            if self._closing or self._open or context.peer() != self._peer:
                return self._refuse(context, "another player plays on this port")
            self._called += 1
            self._open = call = self._called
        context.add_callback(lambda: self._ended(call))
        self._arrived.put(message)
        answer = self._answers.get()
        if answer is None:
            return self._refuse(context, "the trainer has ended")
        return answer

    def _ended(self, call: int) -> None:
        """A call is over: in order, or because the player broke it off while it was open."""
        if self._open == call and not self._closing:
            self.gone("the player broke the connection off")

    def _refuse(self, context: Any, why: str) -> bytes:
        context.abort(self._status.UNAVAILABLE, why)
        return b""
