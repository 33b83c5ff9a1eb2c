"""Reads what a run has written over time: its intervals as tables, its events, and any part of both again."""

from __future__ import annotations

import csv
import io
import math
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import pydantic_core

from sparring.pipeline.errors import SparringError
from sparring.pipeline.files import Json
from sparring.pipeline.monitoring.events import Lines
from sparring.services.page.table import AXES, MOST_ROWS, Axis, Rows, Table

T = TypeVar("T")

_TOP: Final = (
    *("reward", "reward_deviation", "episodes", "episode_length", "group_reward"),
    *("lag_mean", "lag_max", "steps_per_s", "produced", "updates", "open_episodes"),
)
"""Numbers of an interval that are columns under their own name, as the means are."""
_SECTIONS: Final = {"means": "", "simulators": "simulators/", "step_counts": "step_counts/"}
"""Sections of an interval whose numbers are columns, with the beginning of their names."""
_NUMBERS: Final = (int, float)
_LARGEST: Final = 3e38
_LONGEST_NAME: Final = 200
_MOST_EVENTS: Final = 1000
_BLOCK: Final = 2**16
"""Bytes of a file within which lines are no longer searched for but read."""
_LONGEST_LINE: Final = 2**22
_LONG: Final = 2**22
"""Bytes of the files of a run beyond which samples are shown until all has been read."""
_SCATTER: Final = (5**0.5 - 1) / 2
"""Samples at equal distances could all be of one behavior, of those that write in turn."""


def number(value: Json) -> float | None:
    """Returns a value as a number that fits into 32 bits; None where it is none."""
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGEST else None


class NotFound(SparringError):
    """There is no run, behavior or file of this name."""


def find(known: Mapping[str, T], name: str) -> T:
    """Returns what has a name.

    Raises:
        NotFound: nothing has it.
    """
    if name not in known:
        raise NotFound(f"got {name!r:.200}; expected one that the page lists; choose it there")
    return known[name]


def section(content: Json, *names: str) -> dict[str, Json]:
    """Returns a section within sections; nothing where it is missing or no object."""
    for name in names:
        content = content.get(name) if isinstance(content, dict) else None
    return content if isinstance(content, dict) else {}


def numbers(line: Mapping[str, Json]) -> dict[str, float]:
    """Returns the numbers of an interval by the names of their columns."""
    found = {}
    for name in _TOP:
        if isinstance(value := line.get(name), _NUMBERS) and -_LARGEST < value < _LARGEST:
            found[name] = float(value)
    for section, prefix in _SECTIONS.items():
        if isinstance(content := line.get(section), dict):
            for name, value in content.items():
                if isinstance(value, _NUMBERS) and -_LARGEST < value < _LARGEST:
                    found[prefix + name] = float(value)
    return found


def intervals(lines: Iterable[Json]) -> Iterator[tuple[str, float, float, dict[str, float]]]:
    """Yields behavior, step, time and numbers of each line that is an interval; others are left out."""
    for line in lines:
        if isinstance(line, dict) and line.get("type") == "interval" and isinstance(line.get("behavior"), str):
            step, time_s = number(line.get("step")), number(line.get("time_s"))
            if step is not None and time_s is not None:
                yield line["behavior"][:_LONGEST_NAME], step, time_s, numbers(line)


class History:
    """Follows the files of one run; reading goes on where it ended.

    Attributes:
        tables: intervals by behavior.
        is_whole: whether these are all intervals; otherwise samples of a long run, which is still being read.
        events: what happened, the newest last.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.tables: dict[str, Table] = {}
        self.is_whole = False
        self.events: deque[dict[str, Json]] = deque(maxlen=_MOST_EVENTS)
        self._path = folder / "metrics.jsonl"
        self._lines = Lines(self._path)
        self._read = self.tables
        self._logs: dict[Path, Lines] = {}
        self._team_changes = 0

    @property
    def size(self) -> int:
        """Returns the memory of the tables in bytes."""
        read = () if self.is_whole else self._read.values()
        return sum(table.size for table in (*self.tables.values(), *read))

    def refresh(self, most_s: float = math.inf) -> None:
        """Reads what was written since the last call; of a long run that has not been read, for about `most_s`."""
        if not self.is_whole and self.tables is self._read:
            self.tables = {}
            if self._path.is_file() and sum(part.stat().st_size for part in parts(self._path)) > _LONG:
                _add(self.tables, samples(self._path, MOST_ROWS))
        end_s = math.inf if self.is_whole or not self.tables else time.monotonic() + most_s
        if _add(self._read, unread(self._lines) if self._path.is_file() else (), end_s):
            self.tables, self.is_whole = self._read, True
        for path in self._path.parent.glob("logs/*.jsonl"):
            if path.name.startswith(("supervisor", "coordination", "learning-")) and path.is_file():
                for line in unread(self._logs.setdefault(path, Lines(path))):
                    if isinstance(line, dict) and (event := self._event(line)):
                        self.events.append(event)

    def _event(self, line: Mapping[str, Json]) -> dict[str, Json] | None:
        """Returns what a line of a log says about the course of the run; None for nothing."""
        event, part = line.get("event"), str(line.get("part", ""))[:_LONGEST_NAME]
        text = ""
        if event == "started" and line.get("start", 1) != 1:
            kind, text = "restart", f"start {line['start']} of {part}"
        elif event in ("failed", "run_failed", "stalled"):
            kind, text = "failure", f"{part} {line.get('error') or line.get('root') or ''}".strip()
        elif event == "lesson":
            kind, text = "lesson", " ".join(str(line[name]) for name in ("parameter", "lesson") if name in line)
        elif event == "checkpoint_saved":
            kind, text = "checkpoint", str(line.get("path", ""))
        elif event == "opponents_assigned" and line.get("changes", 0) != self._team_changes:
            self._team_changes = line["changes"]
            kind, text = "learning team", f"team {line.get('team')} learns"
        elif event in ("run_started", "restored"):
            kind, text = str(event).replace("_", " "), str(line.get("trained", ""))
        else:
            return None
        try:
            time_s = datetime.fromisoformat(str(line["timestamp"])).timestamp()
        except (KeyError, ValueError, OverflowError):
            return None
        return {"kind": kind, "text": text[:_LONGEST_NAME], "time_s": time_s, "step": number(line.get("trained"))}

    def query(self, behavior: str, names: list[str], axis: Axis, begin: float, end: float, points: int) -> Rows:
        """Returns columns of a behavior in about `points` rows at most; a zoomed part is read again from the files.

        Raises:
            NotFound: there is no such behavior.
            KeyError: there is no such column.
        """
        table = find(self.tables, behavior)
        found = table.query(names, axis, begin, end, points)
        if (table.width == 1 and self.is_whole) or len(found.axes) > points // 2 or not len(found.axes):
            return found
        times = found.axes[:, AXES["time"]]
        fine = Table(max(MOST_ROWS, points))
        for name, step, time_s, values in intervals(lines_between(self._path, times[0], times[-1])):
            if name == behavior:
                fine.add(step, time_s, values)
        return fine.query(names, axis, begin, end, points) if fine.columns.keys() >= set(names) else found

    def csv(self, behavior: str) -> Iterator[bytes]:
        """Yields all lines of a behavior as CSV, beginning with the names of the columns.

        Raises:
            NotFound: there is no such behavior.
        """
        columns, text = list(find(self.tables, behavior).columns), io.StringIO()
        writer = csv.writer(text)
        plain = (f"'{one}" if one.startswith(("=", "+", "-", "@")) else one for one in columns)  # no formula of a sheet
        writer.writerow(["step", "time_s", *plain])
        for name, step, time_s, values in intervals(lines_between(self._path, -math.inf, math.inf)):
            if name == behavior:
                writer.writerow([step, time_s, *(values.get(column, "") for column in columns)])
            if text.tell() > _BLOCK:
                yield text.getvalue().encode(errors="replace")
                text.seek(0)
                text.truncate()
        yield text.getvalue().encode(errors="replace")


def _add(tables: dict[str, Table], lines: Iterable[Json], end_s: float = math.inf) -> bool:
    """Adds the intervals among some lines; returns whether all were added by a time of the monotonic clock."""
    for behavior, step, time_s, values in intervals(lines):
        tables.setdefault(behavior, Table()).add(step, time_s, values)
        if time.monotonic() >= end_s:
            return False
    return True


def unread(lines: Lines) -> Iterator[Json]:
    """Yields all lines of a file that have not been read; those that are no JSON are left out."""
    while True:
        before = lines.position
        yield from lines.batch()
        if lines.position == before:
            return


def parts(path: Path) -> list[Path]:
    """Returns the rotated files and the file itself, the oldest first."""
    rotated = [one for one in path.parent.glob(f"{path.name}.*") if one.suffix[1:].isdecimal()]
    return [one for one in (*sorted(rotated, key=lambda one: -int(one.suffix[1:])), path) if one.is_file()]


def lines_between(path: Path, begin_s: float, end_s: float) -> Iterator[Json]:
    """Yields the lines of a file and its rotated ones whose time is between two; the first is found by bisection."""
    for part in parts(path):
        with part.open("rb") as file:
            low, high = 0, os.fstat(file.fileno()).st_size
            while high - low > _BLOCK and begin_s > -math.inf:
                middle = (low + high) // 2
                time_s = _time_of(_line_after(file, middle))
                low, high = (middle, high) if time_s is not None and time_s < begin_s else (low, middle)
            _ = file.seek(low) and file.readline()
            for raw in iter(partial(file.readline, _LONGEST_LINE), b""):
                line = _parsed(raw)
                time_s = _time_of(line)
                if time_s is not None and time_s > end_s:
                    return
                if time_s is not None and time_s >= begin_s:
                    yield line


def samples(path: Path, most: int) -> Iterator[Json]:
    """Yields about `most` lines of a file and its rotated ones, evenly spaced, the last included."""
    found = [(part, part.stat().st_size) for part in parts(path)]
    every = max(1, sum(size for _, size in found) // most)
    for part, size in found:
        with part.open("rb") as file:
            for at, begin in enumerate(range(0, max(1, size - _BLOCK // 8), every)):
                offset = begin + int(at * _SCATTER % 1 * every)
                if file.tell() <= offset <= size:  # a huge line is read once
                    yield _line_after(file, offset)
    for part, size in found[-1:]:
        with part.open("rb") as file:
            file.seek(max(0, size - _BLOCK // 8))
            yield from map(_parsed, file.read().split(b"\n")[size > _BLOCK // 8 :])


def _line_after(file: io.BufferedReader, offset: int) -> Json:
    file.seek(offset)
    if offset:
        file.readline(_LONGEST_LINE)
    return _parsed(file.readline(_LONGEST_LINE))


def _parsed(raw: bytes) -> Json:
    try:
        return pydantic_core.from_json(raw)
    except ValueError:  # incomplete, or damaged
        return None


def _time_of(line: Json) -> float | None:
    return number(line.get("time_s")) if isinstance(line, dict) else None
