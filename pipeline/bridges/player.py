"""A game's own program: launched, watched, ended; and what to say when it fails.

A bridge speaks with a program that it does not own. Whatever goes wrong there is told with the program's name, how
far it had come, how it ended and the last lines of its log.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, get_args

from sparring.pipeline.errors import Explained

Phase = Literal["not started", "launched", "connected", "initialised", "first reset", "stepping"]
"""How far a player has come."""

PHASES: Final[tuple[Phase, ...]] = get_args(Phase)

_EXPECTED: Final[Mapping[Phase, str]] = {
    "not started": "a program that can be started",
    "launched": "a game that connects",
    "connected": "a game that introduces itself",
    "initialised": "a game that can be reset",
    "first reset": "agents that want to decide",
    "stepping": "a game that goes on",
}
_TAIL_LINES: Final = 8
_TAIL_BYTES: Final = 4096
_TAIL_LENGTH: Final = 600
"""Of one log: the supervisor shows the last 2000 bytes of what a simulator has said, and the cause stands first."""


class PlayerFailed(Explained):
    """The game did not start, or answer, or go on."""


class PlayerProgram:
    """One program that plays, or nothing where somebody starts it by hand.

    Args:
        name: for messages, as "Unity player 0".
        command: program and arguments; None: it is started by hand.
        log: file that holds what it writes; None: it writes where this process does.
        more: files that it writes itself, whose ends are told too.
        environment: variables beside those of this process.

    Attributes:
        phase: how far it has come; whoever speaks with it moves this on.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str] | None,
        *,
        log: Path | None = None,
        more: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.phase: Phase = "not started"
        self._command = command
        self._log = log
        self._logs = [*more, *([] if log is None else [log])]
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Launches it, in the process group of this process: whoever ends that group ends the game too.

        Raises:
            PlayerFailed: there is no such program, or it cannot be started.
        """
        if self._command is not None:
            try:
                self._process = self._launch(self._command)
            except OSError as error:
                raise self.failure(
                    f"{self._command[0]!r}, which cannot be started ({error.strerror or error})",
                    "correct the path, and make the file executable",
                ) from error
        self.phase = "launched"

    def _launch(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Runs nothing between fork and exec: threads of a library that listens here do not survive a fork."""
        environment = {**os.environ, **self._environment}
        if self._log is None:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)

    @property
    def launched(self) -> bool:
        """Whether this process has started it."""
        return self._process is not None

    def check(self, patience_s: float = 0.0) -> None:
        """Does nothing while it runs.

        Args:
            patience_s: how long to wait for its end, where something says that it comes.

        Raises:
            PlayerFailed: it has ended.
        """
        process = self._process
        if process is None or (process.poll() is None and not _ended(process, patience_s)):
            return
        status = process.returncode
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        raise self.failure(f"the end of the game by {how}", "see its log; start it by hand to see it fail")

    def failure(self, got: str, remedy: str = "see the game's log") -> PlayerFailed:
        """An error that names the player, how far it had come, the cause, and the end of its log.

        Args:
            got: the cause.
            remedy: what its author can do.
        """
        where = f"{self.name}, {self.phase}: {got}"
        return PlayerFailed(got=where, expected=_EXPECTED[self.phase], remedy=remedy + self._tail())

    def close(self, timeout_s: float = 5.0) -> None:
        """Waits for its end, asks for it when the time is up, and forces it when that does not help either."""
        process, self._process = self._process, None
        if process is None:
            return
        for ask in (process.terminate, process.kill):
            if _ended(process, timeout_s):
                return
            ask()
            timeout_s = 2.0
        process.wait()

    def watch(self, ended: Callable[[], None]) -> None:
        """Calls `ended` once, on a thread of its own, when the launched program has ended."""
        process = self._process
        if process is None:
            return

        def wait() -> None:
            process.wait()
            ended()

        threading.Thread(target=wait, name=f"end of {self.name}", daemon=True).start()

    def _tail(self) -> str:
        """The last lines of its logs, in one line, where there are any."""
        told = [(log, " | ".join(lines)[-_TAIL_LENGTH:]) for log in self._logs if (lines := _last_lines(log))]
        parts = [f"; the end of {log}: {end}" for log, end in told]
        if not parts and self._logs:
            return f" ({', '.join(map(str, self._logs))}: nothing)"
        return "".join(parts)


def _last_lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()][-_TAIL_LINES:]


def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True
