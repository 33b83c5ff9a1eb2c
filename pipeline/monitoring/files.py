"""Writes the monitor's files in the folder of a run, and bounds files that grow forever.

A full file is rotated to FILE.1, FILE.2 and so on. No other process may write to a file of `RotatingFile`. `trim` is
for a file that another process has open: its content is copied and the file emptied in place, so that the other process
can continue to write to it.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pydantic_core

from sparring.pipeline.files import Json, append, regular, write_atomically
from sparring.pipeline.monitoring import curves

_BLOCK: Final = 512
"""Bytes of a block that `st_blocks` counts."""


class RunFiles:
    """Holds the monitor's files in the folder of a run.

    Attributes:
        intervals: `metrics.jsonl`.
        services: `services.jsonl`.

    Args:
        folder: existing folder of the run.
        most_bytes: size at which `services.jsonl` and `metrics.jsonl` are rotated.
        kept: number of rotated files of each that are kept.
    """

    def __init__(self, folder: Path, most_bytes: int = 16 * 2**20, kept: int = 3) -> None:
        self._folder = folder
        self.services = RotatingFile(folder / "services.jsonl", most_bytes, kept)
        self.intervals = RotatingFile(folder / "metrics.jsonl", most_bytes, kept)
        try:
            self._end_last_line()
        except FileNotFoundError:  # there is no folder
            raise
        except OSError:  # later lines may be written
            pass

    def _end_last_line(self) -> None:
        """Ends the last line of the intervals, within which an earlier monitor may have been killed."""
        with regular(self.intervals.path).open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")

    def replace(self, name: str, data: bytes) -> None:
        """Replaces a file so that a reader sees the old or the new content, never a part."""
        path, new = self._folder / name, self._folder / f".{name}.new"
        new.write_bytes(data)
        new.replace(path)

    def plot_curves(self, title: str) -> None:
        """Writes `curves.png` from the intervals in `metrics.jsonl` and its rotated files, unless there is none."""
        if lines := curves.lineages(self._read_intervals()):
            write_atomically(self._folder / "curves.png", curves.picture(lines, title), durable=False)

    def _read_intervals(self) -> Iterator[Mapping[str, Json]]:
        for path in self.intervals.parts():
            yield from read_lines(path)


def read_lines(path: Path) -> Iterator[Mapping[str, Json]]:
    """Yields the intervals in a file."""
    with regular(path).open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):  # an incomplete line of a killed process, or damage
                continue


def to_json(content: Json) -> bytes:
    """Returns `content` as JSON, with null for NaN and infinity."""
    return pydantic_core.to_json(content, inf_nan_mode="null")


class RotatingFile:
    """Writes lines to a file of bounded size.

    Args:
        path: path in an existing folder.
        most_bytes: size beyond which a line first rotates the file.
        kept: number of rotated files that are kept.
    """

    def __init__(self, path: Path, most_bytes: int, kept: int) -> None:
        self.path = path
        self._most_bytes = most_bytes
        self._kept = kept

    def append(self, line: bytes) -> None:
        """Appends a line and a newline.

        Raises:
            OSError: the line cannot be written.
        """
        size = self.path.stat().st_size if self.path.exists() else 0
        if size and size + len(line) + 1 > self._most_bytes:
            _shift(self.path, self._kept)
            self.path.replace(_rotated(self.path, 1))
        append(self.path, line + b"\n")

    def parts(self) -> list[Path]:
        """Returns the existing rotated files and the file itself, the oldest first."""
        paths = [*(_rotated(self.path, number) for number in range(self._kept, 0, -1)), self.path]
        return [path for path in paths if path.exists()]


def _shift(path: Path, kept: int) -> None:
    """Moves rotated files one number up, replacing the oldest."""
    for number in range(kept, 1, -1):
        if _rotated(path, number - 1).exists():
            _rotated(path, number - 1).replace(_rotated(path, number))


def full(path: Path, most_bytes: int) -> bool:
    """Returns whether a file takes more space on the disk than `most_bytes`; a hole in it takes none."""
    try:
        found = path.stat()
    except OSError:
        return False
    return min(found.st_size, getattr(found, "st_blocks", found.st_size) * _BLOCK) > most_bytes


def trim(path: Path, most_bytes: int, kept: int) -> int:
    """Copies the end of a file that another process has open to FILE.1, and empties the file.

    Args:
        path: of the file.
        most_bytes: copied at most, so that a process which writes without end cannot fill the disk.
        kept: number of rotated files to keep.

    Returns:
        The bytes that are lost: before those that are copied, or written since.

    Raises:
        OSError: the copy cannot be written; the file is as it was.
    """
    new = path.with_name(f"{path.name}.new")
    with regular(path).open("rb+") as file:
        # A process that does not append keeps its position: an earlier `trim` left a hole.
        begin = os.lseek(file.fileno(), 0, os.SEEK_DATA) if hasattr(os, "SEEK_DATA") else 0
        end = os.fstat(file.fileno()).st_size
        first = max(begin, end - most_bytes)
        file.seek(first)
        with new.open("wb") as copy:
            copy.write(file.read(end - first))
        lost = first - begin + os.fstat(file.fileno()).st_size - end
        file.truncate(0)
    _shift(path, kept)
    new.replace(_rotated(path, 1))
    return lost


def _rotated(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
