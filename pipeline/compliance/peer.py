"""Runs a foreign simulator under test as a process, and holds one connection to it, without threads."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

from sparring.pipeline.compliance.steps import Finding, explained, failed
from sparring.pipeline.errors import CodecError, ProtocolError
from sparring.pipeline.messages.codec import SIMULATORS, FrameReader, to_bytes
from sparring.pipeline.messages.conversation import Conversation
from sparring.pipeline.messages.simulator import Bye, Fault, Ping, Pong, SimulatorMessage

Message = TypeVar("Message")

ADDRESS_VARIABLE: Final = "SPARRING_ADDRESS"
GRACE_S: Final = 2.0
"""Time between SIGTERM and SIGKILL."""


class SimulatorProcess:
    """Runs a simulator as a process, with the address in its environment and arguments.

    Args:
        command: program and arguments; `{address}` in them is replaced by the address.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._command = [part.replace("{address}", self.address) for part in command]
        self._process: subprocess.Popen[bytes] | None = None
        handle, path = tempfile.mkstemp(prefix="sparring-compliance-", suffix=".log")
        os.close(handle)
        self._log = Path(path)

    def start(self) -> None:
        """Starts a new process of the simulator; a running one is ended first."""
        self._end()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, ADDRESS_VARIABLE: self.address, "SPARRING_KEYS": ""},  # this end does not encrypt
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def accept(self, timeout_s: float) -> socket.socket:
        """Returns the simulator's next connection.

        Raises:
            TimeoutError: the simulator did not connect in time.
        """
        self._listener.settimeout(timeout_s)
        return self._listener.accept()[0]

    def exit_status(self, timeout_s: float) -> int | None:
        """Returns the simulator's exit status, or None if it still runs after `timeout_s`."""
        try:
            return None if self._process is None else self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def output_tail(self) -> str:
        """Returns the end of the simulator's output."""
        lines = self._log.read_text(errors="replace").splitlines()
        return " | ".join(line.strip() for line in lines[-3:])

    def stop(self) -> None:
        """Ends the simulator."""
        self._end()
        self._listener.close()
        self._log.unlink(missing_ok=True)

    def _end(self) -> None:
        """Ends the process and its children, and closes the connections in the backlog."""
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
            self.exit_status(GRACE_S)
        self._process.wait()
        self._listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._listener.accept()[0].close()


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


class SilenceTimeout(ConversationStopped):
    """Reports that no message came in time; the connection is still open."""


class TrialConnection:
    """Represents one connection of the simulator on the trainer's side."""

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
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
        self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
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
