"""A foreign simulator under examination: its process, and one connection of it. No threads."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from sparring.pipeline.compliance.steps import Finding, failed
from sparring.pipeline.errors import CodecError, Explained, ProtocolError
from sparring.pipeline.messages.codec import SIMULATORS, FrameReader, to_bytes
from sparring.pipeline.messages.conversation import Conversation
from sparring.pipeline.messages.simulator import Bye, Fault, Ping, Pong

ADDRESS_VARIABLE: Final = "SPARRING_ADDRESS"
GRACE_S: Final = 2.0
"""From the request to end to the end by force."""


class SimulatorHost(Protocol):
    """Runs the simulator and accepts its connections."""

    def start(self) -> None:
        """Starts the simulator anew; one that still runs is ended first."""

    def accept(self, timeout_s: float) -> socket.socket:
        """Its next connection.

        Raises:
            TimeoutError: it did not connect in time.
        """

    def exit_status(self, timeout_s: float) -> int | None:
        """Its exit status, or None where it still runs after `timeout_s`."""

    def last_words(self) -> str:
        """The end of what it printed."""

    def stop(self) -> None:
        """Ends the simulator."""


class SimulatorProcess:
    """A simulator as a process of its own, with the address in its environment and arguments.

    Args:
        command: program and arguments; `{address}` in them is replaced.
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
        self._listener.settimeout(timeout_s)
        return self._listener.accept()[0]

    def exit_status(self, timeout_s: float) -> int | None:
        try:
            return None if self._process is None else self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return " | ".join(line.strip() for line in lines[-3:])

    def stop(self) -> None:
        self._end()
        self._listener.close()
        self._log.unlink(missing_ok=True)

    def _end(self) -> None:
        """Ends the process and what it started; what it left in the backlog is not ours any more."""
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
            self.exit_status(GRACE_S)
        self._process.wait()
        self._empty_backlog()

    def _empty_backlog(self) -> None:
        self._listener.setblocking(False)
        try:
            while True:
                self._listener.accept()[0].close()
        except BlockingIOError:
            return


class ConversationStopped(Exception):
    """The conversation cannot go on.

    Args:
        finding: why.
        rule: the rule that it breaks; "" for the one under examination.
    """

    def __init__(self, finding: Finding, rule: str = "") -> None:
        super().__init__(finding.got)
        self.finding = finding
        self.rule = rule


class SilenceTimeout(ConversationStopped):
    """No message came in time; the connection is still there."""


class TrialConnection:
    """One connection of the simulator, seen from the trainer's side."""

    def __init__(self, connected: socket.socket, timeout_s: float, clock: Callable[[], float]) -> None:
        self._socket = connected
        self._timeout_s = timeout_s
        self._clock = clock
        self._reader = FrameReader(SIMULATORS)
        self._conversation = Conversation("trainer")

    @property
    def state(self) -> str:
        """Of the conversation."""
        return self._conversation.state

    def send(self, message: Any) -> None:
        """Sends one message.

        Raises:
            Stopped: the connection is gone.
        """
        self._conversation.sending(message)
        self._socket.settimeout(self._timeout_s)
        try:
            self._socket.sendall(to_bytes(message))
        except OSError as error:
            raise ConversationStopped(
                failed(f"{error} on sending {type(message).__name__}", "an open connection", "stay")
            ) from error

    def _receive(self, deadline: float) -> Any:
        """The next message; a Ping is answered and handed out as well."""
        try:
            while (message := self._reader.next()) is None:
                self._fill(deadline)
            self._conversation.received(message)
        except CodecError as error:
            raise ConversationStopped(_explained(error), "decoding") from error
        except ProtocolError as error:
            raise ConversationStopped(_explained(error), "order") from error
        if isinstance(message, Ping):
            self.send(Pong(number=message.number))
        return message

    def expect(self, *kinds: type[Any]) -> Any:
        """The next message of one of `kinds`; Pings and late Pongs are passed over.

        Raises:
            Silent: none came in time, Pings and Pongs not counted.
            Stopped: the connection closed, what came breaks the protocol, or the simulator ends the conversation.
        """
        deadline = self._clock() + self._timeout_s
        wanted = " or ".join(kind.__name__ for kind in kinds)
        while True:
            message = self._receive(deadline)
            if isinstance(message, kinds):
                return message
            if isinstance(message, Fault):
                told = f"Fault {message.code}: got {message.got}, expected {message.expected}"
                raise ConversationStopped(failed(told, wanted, "see whether the simulator's own checks are right"))
            if isinstance(message, Bye):
                raise ConversationStopped(failed(f"Bye ({message.reason})", wanted, "stay until the trainer says Bye"))

    def closes(self) -> bool:
        """Whether the simulator closes the connection in time; what it still says is passed over."""
        deadline = self._clock() + self._timeout_s
        try:
            while True:
                self._reader = FrameReader(SIMULATORS)
                self._fill(deadline)
        except SilenceTimeout:
            return False
        except ConversationStopped:
            return True

    def drop(self) -> None:
        """Closes the connection without a word."""
        self._socket.close()

    def _fill(self, deadline: float) -> None:
        self._socket.settimeout(max(deadline - self._clock(), 0.001))
        try:
            data = self._socket.recv(2**18)
        except TimeoutError as error:
            got = f"no message in time in state {self._conversation.state!r}"
            raise SilenceTimeout(failed(got, "a message", "answer at once, also while the game computes")) from error
        except OSError as error:
            raise ConversationStopped(failed(f"{error}", "an open connection", "see the simulator's log")) from error
        if not data:
            raise ConversationStopped(
                failed("the connection closed without Bye", "a message", "see the simulator's log")
            )
        self._reader.feed(data)


def _explained(error: Explained) -> Finding:
    return failed(error.got, error.expected, error.remedy)
