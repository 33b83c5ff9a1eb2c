"""Launches, supervises and ends a game's own program, and explains its failures.

A bridge talks to a program that it does not own. Every error about it holds the program's name, its phase, its exit
status and the last lines of its log.
"""

import shlex
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, get_args

from sparring.pipeline.errors import ExplainedError, SettingsError, how_ended
from sparring.pipeline.files import regular

Phase = Literal["not started", "launched", "connected", "initialized", "first reset", "stepping"]
"""The stages of a player's start, in order."""

PHASES: Final[tuple[Phase, ...]] = get_args(Phase)

_EXPECTED: Final[Mapping[Phase, str]] = {
    "not started": "a program that can be started",
    "launched": "a game that connects",
    "connected": "a game that introduces itself",
    "initialized": "a game that can be reset",
    "first reset": "agents that want to decide",
    "stepping": "a game that keeps running",
}
ORDERLY_END: Final = "an orderly end of the game"
_TAIL_LINES: Final = 8
_TAIL_BYTES: Final = 4096
_TAIL_LENGTH: Final = 600
"""Characters of one log: the supervisor shows the last 2000 bytes of a simulator's output, cause first."""


class PlayerFailed(ExplainedError):
    """Reports that the game did not start, did not answer, or ended."""


class PlayerProgram:
    """Represents one program that plays, or none if a person starts the game.

    Args:
        name: name for messages, such as "Unity player 0".
        command: program and arguments; None if a person starts the game.
        log: file for the program's output; None: it shares the output of this process.
        more: log files that the program writes itself; errors include their ends.

    Attributes:
        phase: stage of the start; the bridge updates it.
        has_failed: whether an error about it was made.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str] | None,
        *,
        log: Path | None = None,
        more: Sequence[Path] = (),
    ) -> None:
        self.name = name
        self.phase: Phase = "not started"
        self.has_failed = False
        self._command = command
        self._log = log
        self._logs = [*more, *([] if log is None else [log])]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Launches the program in the process group of this process, so that both end together.

        Raises:
            PlayerFailed: the program does not exist or cannot be started.
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
        """Launches the program without code between fork and exec: threads of a listening library do not survive a
        fork.
        """
        if self._log is None:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with regular(self._log).open("wb") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @property
    def launched(self) -> bool:
        """Returns whether this process has started the program."""
        return self._process is not None

    def check(self, wait_s: float = 0.0, orderly: str = "") -> None:
        """Raises if the program has ended.

        Args:
            wait_s: time to wait for an end that is expected.
            orderly: description of the end where the program has announced it; an exit status of 0 is orderly, too.

        Raises:
            PlayerFailed: the program has ended.
        """
        process = self._process
        if process is None or not _ended(process, wait_s):
            return
        status = process.returncode
        how = how_ended(status)
        if orderly or not status:
            what, remedy = orderly or ORDERLY_END, "keep it running: it was closed, or quit by itself; see its log"
        else:
            what, remedy = "the end of the game", "see its log; start it by hand to see it fail"
        raise self.failure(f"{what} by {how}", remedy)

    def failure(self, got: str, remedy: str = "see the game's log") -> PlayerFailed:
        """Returns an error with the player's name, its phase, the cause, and the end of its log.

        Args:
            got: the cause.
            remedy: what the game's author can do.
        """
        self.has_failed = True
        where = f"{self.name}, {self.phase}: {got}"
        return PlayerFailed(got=where, expected=_EXPECTED[self.phase], remedy=remedy + self._tail())

    def close(self, timeout_s: float = 5.0) -> None:
        """Waits for the program's end, then terminates it, and finally kills it."""
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
        """Calls `ended` once, on its own thread, when the launched program has ended."""
        process = self._process
        if process is None:
            return

        def wait() -> None:
            process.wait()
            ended()

        threading.Thread(target=wait, name=f"end of {self.name}", daemon=True).start()

    def _tail(self) -> str:
        """Returns the last lines of its logs in one line, or ""."""
        ends = [(log, " | ".join(lines)[-_TAIL_LENGTH:]) for log in self._logs if (lines := _last_lines(log))]
        parts = [f"; the end of {log}: {end}" for log, end in ends]
        if not parts and self._logs:
            return f" ({', '.join(map(str, self._logs))}: nothing)"
        return "".join(parts)


def _last_lines(log: Path) -> list[str]:
    try:
        with regular(log).open("rb") as file:
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


def split_arguments(arguments: str) -> list[str]:
    """Returns the words of a game's command line.

    Raises:
        SettingsError: a quotation is not closed.
    """
    try:
        return shlex.split(arguments)
    except ValueError as error:
        raise SettingsError(
            f"got the game's arguments {arguments!r} ({error}); expected words as a shell splits them; close the quotes"
        ) from error
