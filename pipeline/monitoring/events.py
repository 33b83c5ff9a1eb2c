"""Reads the events of a run from the files in its folder, which are the queue of a reader of any speed."""

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import pydantic_core

from sparring.pipeline.files import Json, regular

EventKind = Literal["interval", "checkpoint", "lesson", "match", "end"]

Identity = tuple[int, int, int]
"""Device, number and last change of a file."""

Position = tuple[int, int]
"""What tells a file from others, and the offset of the next line in it."""

PIPELINE: Final = "Pipeline"
"""First part of the names of numbers that ML-Agents does not have."""

_HEAD: Final = 256
"""First bytes of a file, which tell it from others: its number is given anew as soon as it is removed."""

_BATCH: Final = 2**20
"""Bytes of a file that are read at once, or one line where that is longer."""


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

    @property
    def scalars(self) -> dict[str, float]:
        """Returns every number of an interval that is plotted over steps, by its name in TensorBoard."""
        return scalars(self.values) if self.kind == "interval" else {}


def scalars(line: Mapping[str, Json]) -> dict[str, float]:
    """Returns the numbers of a line of `metrics.jsonl`, under the names that users of ML-Agents know.

    `Policy/Extrinsic Reward` is the mean return unless the learner publishes its own. A simulator's number is plotted
    unless it has the name of a built-in one.
    """
    found: dict[str, float | None] = {
        "Policy/Extrinsic Reward": line["reward"],
        "Is Training": float(line["trained"] > 0),
        f"{PIPELINE}/Steps per Second": line["steps_per_s"],
        f"{PIPELINE}/Policy Lag Mean": line["lag_mean"],
        f"{PIPELINE}/Policy Lag Max": line["lag_max"],
        f"{PIPELINE}/Episodes Ended": line["episodes"],
        f"{PIPELINE}/Episodes Open": line["open_episodes"],
        f"{PIPELINE}/Oldest Episode": line["oldest"],
    }
    found |= {f"{PIPELINE}/Steps {column.capitalize()}": steps for column, steps in line["step_counts"].items()}
    found |= {name: value for name, value in line["gauges"].items() if "/" in name}
    found |= {name: value for name, value in line["means"].items() if "/" in name or name == "Is Training"}
    return {name: float(value) for name, value in {**line["simulators"], **found}.items() if value is not None}


def identity_of(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino, found.st_mtime_ns


def present(folder: Path) -> dict[Identity, int]:
    """Returns the sizes of the files with the events of a run, and of its summary, as they are now."""
    with suppress(OSError):  # no folder can have this name, for example
        found = [path for pattern in ("*.json", "*.jsonl*", "logs/*.jsonl*") for path in folder.glob(pattern)]
        return {identity_of(one): one.st_size for one in (path.stat() for path in found)}
    return {}


class Lines:
    """Reads the lines of a file that grows, and is rotated meanwhile.

    Args:
        path: of the file, which may not exist yet.
        former: files that existed before, with their sizes, whose lines until there are left out.
        position: where to go on; None for the oldest rotated file.

    Attributes:
        position: of the line after the one that was read last; None before the first.
        unreadable: lines that were no objects of JSON, because what wrote them was killed.
        gaps: times that a rotated file was removed before its end was read.
    """

    def __init__(self, path: Path, former: Mapping[Identity, int] | None = None, position: Position | None = None):
        self.position = position
        self.unreadable = 0
        self.gaps = 0
        self._path = path
        self._former = {number: size for (_, number, _), size in (former or {}).items()}

    def batch(self) -> Iterator[dict[str, Json]]:
        """Yields some of the lines that have not been read; none only if there is no further one."""
        for part, begin in self._parts():
            end = begin
            for line, end in part.lines(begin, _BATCH):
                self.position = part.head, end
                try:
                    content = pydantic_core.from_json(line)
                except ValueError:
                    content = None
                if isinstance(content, dict):
                    yield content
                else:
                    self.unreadable += 1
            if end > begin:
                return

    def skip(self, most: int) -> int:
        """Leaves out the oldest lines that have not been read, until `most` remain; returns how many."""
        parts = self._parts()
        surplus = skipped = max(0, sum(1 for part, begin in parts for _ in part.lines(begin)) - most)
        for part, begin in parts if surplus else ():
            for _, end in part.lines(begin):
                self.position = part.head, end
                surplus -= 1
                if not surplus:
                    return skipped
        return 0

    def _parts(self) -> list[tuple["_Part", int]]:
        """Returns the files with lines that have not been read, the oldest first, each with the offset of the first."""
        found = _parts([self._path])
        if self.position is None or [part.head for part in found] != [self.position[0]]:
            found = []
            while found != (found := self._all()):  # else they are being rotated
                pass
        if self.position is None:
            known = self._former
            # A larger size is of a removed file, whose number was given anew.
            starts = [known[part.number] if known.get(part.number, part.size + 1) <= part.size else 0 for part in found]
        else:
            at = next((at for at, part in enumerate(found) if part.head == self.position[0]), None)
            if at is None and found:
                self.gaps += 1
                self.position = found[0].head, 0
            found = found[at or 0 :]
            starts = [self.position[1], *(0 for _ in found[1:])]
        # A file that has become smaller was cut where it is written anew.
        return [(part, min(start, part.size)) for part, start in zip(found, starts, strict=False) if start != part.size]

    def _all(self) -> list["_Part"]:
        """Returns the file and the rotated ones, the oldest first."""
        rotated = [one for one in self._path.parent.glob(f"{self._path.name}.*") if one.suffix[1:].isdecimal()]
        rotated.sort(key=lambda one: -int(one.suffix[1:]))
        return _parts([*rotated, self._path.with_suffix(".old.jsonl"), self._path])


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the files of `Lines`.

    Attributes:
        path: of the file.
        number: of the file.
        head: checksum of its first bytes.
        size: in bytes.
    """

    path: Path
    number: int
    head: int
    size: int

    def lines(self, begin: int, most: int = -1) -> Iterator[tuple[bytes, int]]:
        """Yields its whole lines from an offset on, each with the offset of its end; none if it was rotated since.

        Args:
            begin: offset.
            most: bytes after which no further line is read; -1 for no bound.
        """
        with suppress(FileNotFoundError), regular(self.path).open("rb") as file:
            if os.fstat(file.fileno()).st_ino != self.number:
                return
            file.seek(begin)
            for line in file if most < 0 else file.readlines(most):
                if not line.endswith(b"\n"):
                    return
                begin += len(line)
                yield line, begin


def _parts(paths: Iterable[Path]) -> list[_Part]:
    """Returns those files that have a line."""
    found = []
    for path in paths:
        with suppress(OSError), regular(path).open("rb") as file:
            head, ends, _ = file.read(_HEAD).partition(b"\n")
            if ends or len(head) == _HEAD:
                own = os.fstat(file.fileno())
                found.append(_Part(path, own.st_ino, zlib.crc32(head), own.st_size))
    return found


_LOGGED: Final[Mapping[str, EventKind]] = {"checkpoint_saved": "checkpoint", "lesson": "lesson"}


class EventFiles:
    """Reads the events of a run from its files.

    Args:
        folder: of the run.
        former: files that existed before, with their sizes, whose events until there are left out.
        positions: of an earlier reader, which this one continues.
    """

    def __init__(
        self,
        folder: Path,
        former: Mapping[Identity, int] | None = None,
        positions: Mapping[str, Position] | None = None,
    ) -> None:
        self._folder, self._former, self._positions = folder, former, dict(positions or {})
        self._files: dict[str, Lines] = {}
        for name in ("metrics.jsonl", "matches.jsonl", *self._positions):
            self._open(name)

    def batch(self) -> Iterator[Event]:
        """Yields some of the events that have not been read, those of one file in their order.

        `positions` has passed an event once it is yielded, and does not change where nothing is left to read.
        """
        for path in self._folder.glob("logs/*.jsonl"):
            if path.name.startswith(("learning-", "coordination")):
                self._open(f"logs/{path.name}")
        for name, lines in self._files.items():
            for line in lines.batch():
                kind = self._kind(name, line)
                if kind is not None:
                    yield Event(kind, line)

    def events(self) -> Iterator[Event]:
        """Yields all events that have not been read."""
        before = None
        while before != (before := self.positions):
            yield from self.batch()

    def skip(self, most: int) -> int:
        """Leaves out the oldest intervals and matches, until `most` of each remain; returns how many."""
        return sum(lines.skip(most) for name, lines in self._files.items() if not name.startswith("logs/"))

    @property
    def positions(self) -> dict[str, Position]:
        """Returns where each file is read next."""
        return {name: lines.position for name, lines in self._files.items() if lines.position is not None}

    @property
    def damaged(self) -> int:
        """Returns how many lines could not be read, and how many files were removed before their end was."""
        return sum(lines.unreadable + lines.gaps for lines in self._files.values())

    def _open(self, name: str) -> None:
        if name not in self._files:
            self._files[name] = Lines(self._folder / name, self._former, self._positions.get(name))

    @staticmethod
    def _kind(name: str, line: Mapping[str, Json]) -> EventKind | None:
        if name.startswith("logs/"):
            return _LOGGED.get(line.get("event", ""))
        return "match" if name == "matches.jsonl" else "interval" if line.get("type") == "interval" else None


def unread(folder: Path, positions: Mapping[str, Position]) -> int:
    """Returns how many events an earlier reader has left unread, those that cannot be read included."""
    files = EventFiles(folder, positions=positions)
    return sum(1 for _ in files.events()) + files.damaged
