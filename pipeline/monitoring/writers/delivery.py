"""Gives the events of a run to one writer, and keeps count of those that it does not get.

Before an event is handed over, its position is saved: a process that dies loses this event, and doubles none. A writer
that raises loses the event; after several in a row it is left alone for a while. One that is slow reads later: once it
is too many lines behind, the oldest are skipped. All of these are counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from pydantic import TypeAdapter, ValidationError
from structlog.typing import FilteringBoundLogger

from sparring.pipeline.files import regular, write_atomically
from sparring.pipeline.monitoring.events import Event, EventFiles, Position, present
from sparring.pipeline.monitoring.logs import file_name
from sparring.pipeline.monitoring.writers import FOLDER, RunInfo, Writer

Outcome = Literal["delivered", "raised", "interrupted", "skipped", "damaged", "unread"]
LOST: Final[tuple[Outcome, ...]] = ("raised", "interrupted", "skipped", "damaged", "unread")
"""Outcomes of events that a writer did not get whole: it raised; its process ended meanwhile; it was too slow; they
could not be read; the run had ended before."""


@dataclass(kw_only=True, slots=True)
class DeliveryState:
    """Holds what a restarted process continues with.

    Attributes:
        counts: events by outcome.
        starts: processes so far.
        positions: of the next event, by file.
        is_calling: the writer has not returned yet from the event before.
    """

    counts: dict[Outcome, int] = field(default_factory=dict)
    starts: int = 0
    positions: dict[str, Position] = field(default_factory=dict)
    is_calling: bool = False

    def add(self, outcome: Outcome, number: int = 1) -> None:
        """Counts events."""
        if number:
            self.counts[outcome] = self.counts.get(outcome, 0) + number

    def save(self, path: Path) -> None:
        """Writes it.

        Raises:
            OSError: it cannot be written.
        """
        write_atomically(path, _STATE.dump_json(self), durable=False)


_STATE: Final = TypeAdapter(DeliveryState)


def state_path(folder: Path, name: str) -> Path:
    """Returns where the state of a writer is, in the folder of a run."""
    return folder / FOLDER / f"{file_name(name)}.json"


def load_state(path: Path) -> DeliveryState | None:
    """Returns a state that was saved; None where there is none that can be read."""
    try:
        return _STATE.validate_json(regular(path).read_bytes())
    except (OSError, ValidationError):
        return None


def states(folder: Path) -> dict[str, DeliveryState]:
    """Returns the states of the writers of a run, by the names of their files."""
    found = {path.stem: load_state(path) for path in sorted((folder / FOLDER).glob("*.json"))}
    return {name: state for name, state in found.items() if state is not None}


class Delivery:
    """Gives events to a writer.

    Args:
        name: of the writer.
        writer: gets the events.
        run: of the events.
        log: of this process.
        clock: seconds, only rising.
        notice: shows a line on the console of the run.
        backlog: lines of a file that a writer may be behind.
        failures: events in a row at which it may raise.
        pause_s: seconds for which it is then left alone.
        late: the run existed before, without this writer: what its files hold is none of it.
    """

    def __init__(
        self,
        name: str,
        writer: Writer,
        run: RunInfo,
        log: FilteringBoundLogger,
        clock: Callable[[], float],
        notice: Callable[[str], None],
        *,
        backlog: int,
        failures: int,
        pause_s: float,
        late: bool,
    ) -> None:
        self._name, self._writer, self._run = name, writer, run
        self._log, self._clock, self._notice = log, clock, notice
        self._backlog, self._failures, self._pause_s = backlog, failures, pause_s
        self._path = state_path(run.folder, name)
        found = load_state(self._path)
        self._state = found or DeliveryState()
        former = present(run.folder) if late and found is None else {}
        self._files = EventFiles(run.folder, former, self._state.positions)
        self._damaged = 0
        self._failed, self._paused_until = 0, 0.0
        self._can_save = True

    def open(self) -> None:
        """Opens the writer, after what its process before has left unfinished is counted.

        Raises:
            Exception: what the writer has raised.
        """
        self._path.parent.mkdir(exist_ok=True)
        self._state.add("interrupted", int(self._state.is_calling))
        self._state.starts += 1
        self._save(is_calling=False)
        self._writer.open(self._run)

    def deliver(self, *, last: bool = False) -> bool:
        """Gives some events to the writer; returns whether there may be more.

        Args:
            last: the run has ended: a writer that has raised is tried again, too.
        """
        if skipped := self._files.skip(self._backlog):
            self._state.add("skipped", skipped)
            self._log.warning("events_skipped", events=skipped, cause="the writer is too slow")
        before = self._files.positions
        if last or self._clock() >= self._paused_until:
            for event in self._files.batch():
                self._give(event)
                if not last and self._clock() < self._paused_until:
                    break
        self._state.add("damaged", self._files.damaged - self._damaged)
        self._damaged = self._files.damaged
        moved = bool(skipped) or self._files.positions != before
        if moved:
            self._save(is_calling=False)
        with suppress(OSError):
            os.utime(self._path)  # for whoever watches whether this process hangs
        return moved

    def end(self, event: Event) -> None:
        """Gives the last event to the writer, and closes it.

        Raises:
            Exception: what `close` has raised.
        """
        self._give(event)
        self._save(is_calling=False)
        self._writer.close()

    def _give(self, event: Event) -> None:
        self._save(is_calling=True)
        try:
            self._writer.write(event)
        except (Exception, SystemExit) as error:
            self._failed += 1
            self._state.add("raised")
            self._log.error("writer_raised", kind=event.kind, failures=self._failed, exc_info=error)
            if self._failed == 1:
                self._notice(f"{error!r:.300}; this {event.kind} is lost")
            if self._failed >= self._failures:
                self._failed, self._paused_until = 0, self._clock() + self._pause_s
                self._notice(f"raised {self._failures} times in a row; tried again in {self._pause_s:g} s")
        else:
            self._failed = 0
            self._state.add("delivered")

    def _save(self, *, is_calling: bool) -> None:
        self._state.is_calling, self._state.positions = is_calling, self._files.positions
        try:
            self._state.save(self._path)
        except OSError as error:
            if self._can_save:
                self._log.warning("not_written", what=str(self._path), error=str(error))
            self._can_save = False
        else:
            self._can_save = True
