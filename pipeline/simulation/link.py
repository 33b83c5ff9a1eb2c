"""Keeps one connection to the trainer alive, over a plain blocking socket with a heartbeat."""

import contextlib
import os
import select
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final

from sparring.pipeline.errors import CodecError, ExplainedError, RemoteProtocolError
from sparring.pipeline.messages.codec import FrameReader, FrameWriter, to_bytes
from sparring.pipeline.messages.conversation import Conversation
from sparring.pipeline.messages.simulator import Adopted, Bye, Fault, Ping, Pong, SimulatorMessage, Welcome
from sparring.pipeline.simulation.encrypted import NOT_READY, credential_error, has_unread

RECEIVE_BYTES: Final = 2**18
"""One system call receives an `Act` of thousands of agents."""
_LONGEST_S: Final = 1e6
"""The system waits for no longer time at once."""


class LinkLost(ExplainedError):
    """Reports that the connection broke or was silent for too long."""


class StopRequested(Exception):
    """Reports a call of `Stop.request`, which is no failure."""


class Stop:
    """Asks a client to stop; `request` may be called from any thread or signal handler."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._reader, self._writer = socket.socketpair()

    def request(self, reason: str) -> None:
        """Wakes all waiting calls. The first reason counts."""
        if self.reason is None:
            self.reason = reason
            self._writer.send(b"\0")

    def fileno(self) -> int:
        """Returns a descriptor that becomes readable with the request."""
        return self._reader.fileno()

    def wait(self, seconds: float) -> None:
        """Waits for `seconds`, or until a stop is requested."""
        select.select([self._reader], [], [], seconds)

    def close(self) -> None:
        """Frees the sockets; a later request does nothing."""
        self.reason = self.reason or "closed"
        self._reader.close()
        self._writer.close()


class Link:
    """Represents one connection, from its Hello to its end.

    All blocking calls end: `send` after `timeout_s`; `receive` after `timeout_s` without any message in spite of the
    heartbeat's Pings, or `timeout_s` after the start of a message that is not complete.

    Args:
        connected: a connected stream socket; the link owns it.
        stop: ends `receive` early.
        timeout_s: limit until the Welcome sets another.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self, connected: socket.socket, *, stop: Stop, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._socket = connected
        self._stop = stop
        self._clock = clock
        self._timeout_s = timeout_s
        self._socket.setblocking(False)  # with a timeout, Python would make two system calls for each
        if self._socket.family != getattr(socket, "AF_UNIX", None):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(stop.fileno(), selectors.EVENT_READ)
        self._conversation = Conversation("simulator")
        self._reader, self._writer = FrameReader(), FrameWriter()
        self._begun: float | None = None  # when the wait for the rest of an incomplete message began
        self._space = memoryview(bytearray(RECEIVE_BYTES))
        self._lock = threading.Lock()
        self._last_sent = clock()
        self._heartbeat: threading.Thread | None = None
        self._closing = threading.Event()
        self._failure: BaseException | None = None  # of the heartbeat
        _LINKS.add(self)

    def keep_alive(self, welcome: Welcome | Adopted) -> None:
        """Adopts the trainer's times and starts the heartbeat."""
        self._timeout_s = min(welcome.timeout_s, _LONGEST_S)
        interval_s = min(welcome.heartbeat_s, self._timeout_s / 3)  # at least two Pings must fit into the timeout
        # A daemon: an author who forgets `close` can still exit.
        self._heartbeat = threading.Thread(target=self._beat, args=(interval_s,), name="heartbeat", daemon=True)
        self._heartbeat.start()

    def send(self, message: SimulatorMessage) -> None:
        """Sends one message.

        Raises:
            LinkLost: the connection broke, or did not take the message within `timeout_s`.
            CodecError: a column has a wrong dtype or number of dimensions; nothing was sent.
            LocalProtocolError: the conversation does not allow the message now; nothing was sent.
        """
        data = self._writer.to_bytes(message)
        with self._lock:
            self._conversation.sending(message)
            try:
                self._send_all(data)
            except OSError as error:
                raise self._lost(f"{type(error).__name__}: {error}") from error
            self._last_sent = self._clock()

    def receive(self) -> SimulatorMessage:
        """Returns the next message other than Ping (answered here) and Pong.

        Raises:
            LinkLost: the connection broke or was silent.
            StopRequested: a stop was requested.
            RemoteProtocolError: the trainer sent a malformed message or one out of turn; a Fault was sent to it.
        """
        while True:
            try:
                message: SimulatorMessage | None = self._reader.next()
                if message is None:
                    self._fill()
                    continue
                self._begun = None
                with self._lock:
                    self._conversation.received(message)
            except (CodecError, RemoteProtocolError) as error:
                raise self.refuse(error) from error
            if isinstance(message, Ping):
                self.send(Pong(number=message.number))
            elif not isinstance(message, Pong):
                return message

    def refuse(self, error: CodecError | RemoteProtocolError) -> RemoteProtocolError:
        """Sends the trainer a Fault about its mistake if the connection is open, and returns the error to raise."""
        code = error.code if isinstance(error, RemoteProtocolError) else "malformed"
        fault = Fault(code=code, got=error.got, expected=error.expected, remedy=error.remedy)
        if self._conversation.state != "closed":
            try:
                self.send(fault)
            except LinkLost as lost:
                error.add_note(f"the Fault could not be sent: {lost}")
        return RemoteProtocolError(code, got=error.got, expected=error.expected, remedy=error.remedy)

    def close(self, bye: Bye | None = None) -> None:
        """Sends `bye` if the conversation still allows it, and frees the socket."""
        self._closing.set()
        if self._heartbeat is not None:
            self._heartbeat.join()
        try:
            if bye is not None and self._conversation.state not in ("greeting", "closed"):
                self.send(bye)
                self._discard_unread()
        except (LinkLost, OSError):
            return  # the connection is closed already: the trainer cannot receive the Bye
        finally:
            self._selector.close()
            self._socket.close()

    def _discard_unread(self) -> None:
        """Reads what is unread: closing over it would reset the connection, and lose the Bye."""
        self._socket.shutdown(socket.SHUT_WR)
        with contextlib.suppress(BlockingIOError):
            while self._socket.recv_into(self._space):
                pass

    def _send_all(self, data: bytes) -> None:
        sent = self._try(data)
        if sent == len(data):
            return
        rest, deadline = memoryview(data)[sent:], self._clock() + self._timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_WRITE)
            while rest:
                left_s = deadline - self._clock()
                if left_s <= 0:
                    raise TimeoutError(f"{len(rest)} bytes not sent in {self._timeout_s:g} s")
                selector.select(left_s)
                rest = rest[self._try(rest) :]

    def _try(self, data: bytes | memoryview) -> int:
        """Returns how many bytes the system accepted."""
        try:
            return self._socket.send(data)
        except NOT_READY:
            return 0

    def _fill(self) -> None:
        left_s = self._left_s()
        ready = self._selector.select(0 if has_unread(self._socket) else max(0.0, left_s))
        if self._stop.reason is not None:
            raise StopRequested
        if left_s <= 0 or not (ready or has_unread(self._socket)):
            received = f"{self._reader.buffered} bytes of a message" if self._reader.buffered else "nothing"
            raise self._lost(f"{received} received for {self._timeout_s:g} s")
        try:
            with self._lock:  # the heartbeat may be writing, and TLS is one state for both directions
                size = self._socket.recv_into(self._space)
        except NOT_READY:  # select reported readiness, but there is no data
            return
        except OSError as error:
            if (refusal := credential_error(error)) is not None:
                raise refusal from error
            raise self._lost(f"{type(error).__name__}: {error}") from error
        if size == 0:
            raise self._lost("the connection closed without Bye")
        self._reader.feed(self._space[:size])

    def _left_s(self) -> float:
        """Returns how long to wait for more: `timeout_s` bounds a silence, and a message from its first byte to its
        last.
        """
        if not self._reader.buffered:
            return self._timeout_s
        now = self._clock()
        if self._begun is None:
            self._begun = now
        return self._begun + self._timeout_s - now

    def _lost(self, got: str) -> LinkLost:
        if self._failure is not None and not isinstance(self._failure, OSError):
            raise self._failure  # a bug in the heartbeat, not a broken connection
        return LinkLost(
            got=f"{got} (in state {self._conversation.state!r})",
            expected="a trainer that answers",
            remedy="see the trainer's log for the cause",
        )

    def _beat(self, interval_s: float) -> None:
        """Sends Pings while the game computes or the simulator is backpressured.

        An error in it shuts the connection down, so that the thread that waits in `receive` gets it.
        """
        due_s = interval_s
        try:
            while not self._closing.wait(due_s):
                due_s = self._ping_if_silent(interval_s)
        except BaseException as error:  # kept for the thread that uses the link
            self._failure = error
            with contextlib.suppress(OSError):  # the connection is broken already
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # below TLS, which another thread may be reading

    def _ping_if_silent(self, interval_s: float) -> float:
        """Sends a Ping if nothing was sent for `interval_s`; returns the seconds until the next is due."""
        with self._lock:
            left = self._last_sent + interval_s - self._clock()
            if left > 0 or self._conversation.state == "closed":
                return max(left, interval_s / 10)
            self._conversation.sending(Ping())
            self._send_all(to_bytes(Ping()))
            self._last_sent = self._clock()
            return interval_s

    def forget(self) -> None:
        """Closes the socket of this process alone, which is a fork: its parent goes on with the connection."""
        self._socket.close()


_LINKS: Final[weakref.WeakSet[Link]] = weakref.WeakSet()
"""Connections of this process."""


def _forget_all() -> None:
    for link in _LINKS:
        link.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
