"""Runs a foreign simulator under test as a process, and holds one connection to it, without threads."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from sparring.pipeline.compliance.steps import Finding, explained, failed
from sparring.pipeline.errors import CodecError, ExplainedError, ProtocolError, how_ended
from sparring.pipeline.messages.codec import SIMULATORS, FrameReader, to_bytes
from sparring.pipeline.messages.conversation import Conversation
from sparring.pipeline.messages.simulator import Bye, Fault, Ping, Pong, SimulatorMessage

Message = TypeVar("Message")

GRACE_S: Final = 5.0
"""Time between SIGTERM and SIGKILL."""
_LOOK_S: Final = 0.1
"""How often a process that has not connected is looked at."""
_TAIL: Final = 8192


class ConversationStopped(Exception):
    """Reports that the conversation cannot continue.

    Args:
        finding: the reason.
        rule: the broken rule; "" for the one that is checked.
    """

    def __init__(self, finding: Finding, rule: str = "") -> None:
        super().__init__(finding.got)
        self.finding = finding
        self.rule = rule


class SimulatorProcess:
    """Runs a simulator as a process, and accepts its connections.

    Args:
        address: to which it connects; with `ws://`, over a WebSocket.
        listener: bound to that address.
        command: program and arguments; empty for a simulator that connects by itself.
        environment: variables in addition to this process's own and SPARRING_ADDRESS.
    """

    def __init__(
        self, address: str, listener: socket.socket, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.address = address
        self.command = command
        self._listener = listener
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (`stop` closes it)

    def start(self) -> None:
        """Starts a new process of the simulator; a running one is ended first."""
        self._end()
        if self.command:
            self._process = subprocess.Popen(
                self.command,
                env={**os.environ, "SPARRING_ADDRESS": self.address, **self._environment},
                stdin=subprocess.PIPE,  # never written to: it closes when this process ends
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def accept(self, timeout_s: float | None) -> socket.socket | WebSocketConnection:
        """Returns the simulator's next connection.

        Raises:
            ConversationStopped: the simulator ended without one, or did not connect in time; None waits for ever.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        how = None
        while not select.select([self._listener], [], [], _LOOK_S if how is None else 0.0)[0]:
            if how is not None or time.monotonic() > deadline:
                got = f"no connection in time; it printed: {self.printed() or 'nothing'}"
                if how is not None:
                    got = f"a simulator that ended before it connected ({how or 'in order'})"
                remedy = "connect a stream socket there at the start; read its output, or raise --timeout"
                raise ConversationStopped(failed(got, "a connection to the address in SPARRING_ADDRESS", remedy))
            how = self.ended(0)
        connected = self._listener.accept()[0]
        return WebSocketConnection(connected) if self.address.startswith("ws:") else connected

    def ended(self, timeout_s: float) -> str | None:
        """Returns how the process has ended, "" for in order; None where it still runs after `timeout_s`."""
        try:
            status = None if self._process is None else self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        if not status:
            return None if status is None else ""
        how = how_ended(status)
        printed = self.printed()
        return f"{how}: {printed}" if printed else how

    def printed(self) -> str:
        """Returns the end of the simulator's output."""
        descriptor = self._log.fileno()
        text = os.pread(descriptor, _TAIL, max(0, os.fstat(descriptor).st_size - _TAIL)).decode(errors="replace")
        return " | ".join(line.strip() for line in text.splitlines()[-3:])

    def stop(self) -> None:
        """Ends the simulator."""
        self._end()
        self._listener.close()
        self._log.close()

    def _end(self) -> None:
        """Ends the process and its children, and closes the connections in the backlog."""
        if self._process is None:
            return
        with self._process:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, number)
                self.ended(GRACE_S)
        self._log.seek(0)
        self._log.truncate()
        while select.select([self._listener], [], [], 0.0)[0]:
            self._listener.accept()[0].close()


class WebSocketConnection:
    """Has the methods of a socket that `TrialConnection` uses, over a WebSocket of any origin."""

    def __init__(self, connected: socket.socket) -> None:
        from sparring.pipeline.messages.websocket import WebSocket  # it needs the extra `websocket`

        self._socket = connected
        self._websocket = WebSocket(None, SIMULATORS.total)
        self._deadline = 0.0

    def settimeout(self, seconds: float) -> None:
        """Sets the time for the next call."""
        self._deadline = time.monotonic() + seconds
        self._socket.settimeout(seconds)

    def recv(self, size: int) -> bytes:
        """Returns whole messages; b"" once the connection is closed.

        Raises:
            OSError: they did not come in time, or what came is no WebSocket.
        """
        messages = b""
        while not (messages or self._websocket.is_closed):
            self._socket.settimeout(_left_s(self._deadline))
            if not (data := self._socket.recv(size)):
                break
            try:
                messages = self._websocket.receive(data)
            except ExplainedError as error:
                raise OSError(str(error)) from error
            finally:
                self._socket.sendall(self._websocket.to_send())
        return messages

    def sendall(self, message: bytes) -> None:
        """Sends one message. Raises OSError if the connection is closed."""
        self._socket.sendall(self._websocket.wrap(message))

    def close(self) -> None:
        """Closes the connection without a Close frame, as a broken one."""
        self._socket.close()


def _left_s(deadline: float) -> float:
    """Returns the seconds until a time, which may pass while messages of no interest arrive.

    Raises:
        TimeoutError: it has passed.
    """
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


class SilenceTimeout(ConversationStopped):
    """Reports that no message came in time; the connection is still open."""


class TrialConnection:
    """Represents one connection of the simulator on the trainer's side."""

    def __init__(self, connected: socket.socket | WebSocketConnection, timeout_s: float) -> None:
        self._socket = connected
        self._timeout_s = timeout_s
        self._reader = FrameReader(SIMULATORS)
        self._conversation = Conversation("trainer")

    @property
    def state(self) -> str:
        """Returns the state of the conversation."""
        return self._conversation.state

    def send(self, message: SimulatorMessage) -> None:
        """Sends one message.

        Raises:
            ConversationStopped: the connection is closed.
        """
        self._conversation.sending(message)
        self._socket.settimeout(self._timeout_s)
        try:
            self._socket.sendall(to_bytes(message))
        except OSError as error:
            got = f"{error} on sending {type(message).__name__}"
            raise ConversationStopped(failed(got, "an open connection", "keep the connection open")) from error

    def _receive(self, deadline: float) -> SimulatorMessage:
        """Returns the next message; a Ping is answered and returned too."""
        try:
            while (received := self._reader.next()) is None:
                self._fill(deadline)
            message: SimulatorMessage = received
            self._conversation.received(message)
        except CodecError as error:
            raise ConversationStopped(explained(error), "decoding") from error
        except ProtocolError as error:
            raise ConversationStopped(explained(error), "order") from error
        if isinstance(message, Ping):
            self.send(Pong(number=message.number))
        return message

    def expect(self, *kinds: type[Message]) -> Message:
        """Returns the next message of one of `kinds`; skips Pings and late Pongs.

        Raises:
            SilenceTimeout: none came in time, Pings and Pongs not counted.
            ConversationStopped: the connection closed, a message breaks the protocol, or the simulator ends the
                conversation.
        """
        deadline = time.monotonic() + self._timeout_s
        wanted = " or ".join(kind.__name__ for kind in kinds)
        while True:
            message = self._receive(deadline)
            if isinstance(message, kinds):
                return message
            if isinstance(message, Fault):
                got = f"Fault {message.code}: got {message.got}, expected {message.expected}"
                raise ConversationStopped(failed(got, wanted, "check the simulator's own checks"))
            if isinstance(message, Bye):
                raise ConversationStopped(failed(f"Bye ({message.reason})", wanted, "stay until the trainer sends Bye"))

    def closes(self) -> bool:
        """Returns whether the simulator closes the connection in time; skips its remaining messages."""
        deadline = time.monotonic() + self._timeout_s
        try:
            while True:
                self._reader = FrameReader(SIMULATORS)
                self._fill(deadline)
        except SilenceTimeout:
            return False
        except ConversationStopped:
            return True

    def drop(self) -> None:
        """Closes the connection without a Bye."""
        self._socket.close()

    def _fill(self, deadline: float) -> None:
        try:
            self._socket.settimeout(_left_s(deadline))
            data = self._socket.recv(2**18)
        except TimeoutError as error:
            got = f"no message in time in state {self._conversation.state!r}"
            raise SilenceTimeout(failed(got, "a message", "answer at once, also while the game computes")) from error
        except OSError as error:
            raise ConversationStopped(failed(f"{error}", "an open connection", "see the simulator's log")) from error
        if not data:
            finding = failed("the connection closed without Bye", "a message", "see the simulator's log")
            raise ConversationStopped(finding)
        self._reader.feed(data)
