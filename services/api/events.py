"""Reads the events of a run from the files in its folder."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Literal

from sparring.pipeline.files import Json

EventKind = Literal["interval", "checkpoint", "lesson", "match", "end"]

Identity = tuple[int, int, int]
"""Device, number and last change of a file."""


@dataclass(frozen=True, slots=True)
class Event:
    """Tells of something that happened in a run.

    Attributes:
        kind: `interval`: a behavior has trained `summary_freq` more steps; `checkpoint`: one was saved; `lesson`: an
            environment parameter has got another; `match`: one of self-play has a result; `end`: the run has ended.
        values: the line of the run's file: of `metrics.jsonl` for an interval, `matches.jsonl` for a match, a log for
            a checkpoint or a lesson; of an end `status` and `error`.
    """

    kind: EventKind
    values: Mapping[str, Json]


def identity_of(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino, found.st_mtime_ns


def present(folder: Path) -> dict[Identity, int]:
    """Returns the sizes of the files with the events of a run, and of its summary, as they are now."""
    found = [path for pattern in ("*.json", "*.jsonl*", "logs/*.jsonl*") for path in folder.glob(pattern)]
    return {identity_of(one): one.st_size for one in (path.stat() for path in found)}


class Lines:
    """Reads the lines of a file that grows, and is rotated meanwhile.

    Args:
        path: of the file, which may not exist yet.
        former: files that existed before, with their sizes, whose lines until there are left out.
    """

    def __init__(self, path: Path, former: Mapping[Identity, int]) -> None:
        self._path = path
        self._former = {identity[:2]: size for identity, size in former.items()}
        self._file: IO[bytes] | None = None
        self._rest = b""
        self._has_begun = False

    def new(self) -> Iterator[dict[str, Json]]:
        """Yields the lines since the last call, at first those of the rotated files too."""
        if not self._has_begun and self._path.exists():
            self._has_begun = True
            rotated = sorted(self._path.parent.glob(f"{self._path.name}.*"), key=lambda one: -int(one.suffix[1:]))
            for one in [*rotated, self._path.with_suffix(".old.jsonl")]:
                if self._open(one):
                    yield from self._read()
                    self.close()
        while self._file is not None or self._open(self._path):
            yield from self._read()
            if not self._is_replaced():
                return
            self.close()

    def close(self) -> None:
        """Closes the file, whose path is opened anew for the next lines."""
        if self._file is not None:
            self._file.close()
        self._file, self._rest = None, b""

    def _open(self, path: Path) -> bool:
        try:
            self._file = path.open("rb")
        except OSError:
            return False
        own = os.fstat(self._file.fileno())
        known = self._former.get((own.st_dev, own.st_ino), 0)
        self._file.seek(known if known <= own.st_size else 0)  # else the number of a removed file was given anew
        return True

    def _read(self) -> Iterator[dict[str, Json]]:
        assert self._file is not None
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return map(json.loads, lines)

    def _is_replaced(self) -> bool:
        """Returns whether another file has this path now, and all of ours is read."""
        assert self._file is not None
        own = os.fstat(self._file.fileno())
        try:
            there = self._path.stat()
        except OSError:
            return False
        return (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino) and self._file.tell() == own.st_size


_LOGGED: Final[Mapping[str, EventKind]] = {"checkpoint_saved": "checkpoint", "lesson": "lesson"}


class EventFiles:
    """Reads the events of a run from its files."""

    def __init__(self, folder: Path, former: Mapping[Identity, int]) -> None:
        self._folder, self._former = folder, former
        self._intervals, self._matches = (Lines(folder / f"{one}.jsonl", former) for one in ("metrics", "matches"))
        self._logs: dict[Path, Lines] = {}

    def events(self) -> list[Event]:
        """Returns the events since the last call: those of one file in their order."""
        for path in self._folder.glob("logs/*.jsonl"):
            if path.name.startswith(("learning-", "coordination")):
                self._logs.setdefault(path, Lines(path, self._former))
        found = [Event("interval", line) for line in self._intervals.new() if line["type"] == "interval"]
        found += [Event("match", line) for line in self._matches.new()]
        logged = (line for lines in self._logs.values() for line in lines.new())
        return found + [Event(_LOGGED[line["event"]], line) for line in logged if line["event"] in _LOGGED]

    def close(self) -> None:
        """Closes all files."""
        for lines in (self._intervals, self._matches, *self._logs.values()):
            lines.close()
