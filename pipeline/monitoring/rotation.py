"""Keeps files that grow for ever within a bound: what is full is put aside as FILE.1, FILE.2 and so on.

Nobody else may write to a file that `Rotating` writes. `trim` is for one that another process has open: its content is
copied and the file emptied where it stands, so that the other goes on writing to it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

_BLOCK: Final = 512
"""Bytes; what `st_blocks` counts in."""


class Rotating:
    """A file of lines with a bound.

    Args:
        path: of the file; its folder exists.
        most_bytes: it is put aside before a line would make it larger.
        kept: how many are kept that were put aside.
    """

    def __init__(self, path: Path, most_bytes: int, kept: int) -> None:
        self.path = path
        self._most_bytes = most_bytes
        self._kept = kept

    def append(self, line: str) -> None:
        """Adds a line, which ends with a newline.

        Raises:
            OSError: it cannot be written.
        """
        data = line.encode()
        self.make_way(len(data))
        with self.path.open("ab") as file:
            file.write(data)

    def make_way(self, more: int) -> None:
        """Puts the file aside where `more` bytes would make it too large.

        Raises:
            OSError: it cannot be moved.
        """
        size = self.path.stat().st_size if self.path.exists() else 0
        if size and size + more > self._most_bytes:
            make_room(self.path, self._kept)
            if self._kept:
                self.path.replace(_aside(self.path, 1))
            else:
                self.path.unlink()

    def parts(self) -> list[Path]:
        """What is there of it, the oldest first."""
        paths = [*(_aside(self.path, number) for number in range(self._kept, 0, -1)), self.path]
        return [path for path in paths if path.exists()]


def make_room(path: Path, kept: int) -> None:
    """Moves what was put aside one number up; the oldest goes."""
    for number in range(kept, 1, -1):
        if _aside(path, number - 1).exists():
            _aside(path, number - 1).replace(_aside(path, number))


def full(path: Path, most_bytes: int) -> bool:
    """Whether a file takes more room on the disk than it may; a hole in it takes none."""
    try:
        found = path.stat()
    except OSError:
        return False
    return min(found.st_size, getattr(found, "st_blocks", found.st_size) * _BLOCK) > most_bytes


def trim(path: Path, kept: int) -> int:
    """Puts the content of a file aside that another process has open, and empties the file.

    Returns:
        How many bytes were written in between and are lost.

    Raises:
        OSError: the copy cannot be written; the file is as it was.
    """
    new = path.with_name(f"{path.name}.new")
    with path.open("rb+") as file:
        _skip_hole(file.fileno())
        if kept:
            with new.open("wb") as copy:
                shutil.copyfileobj(file, copy)
        copied = file.tell()
        lost = os.fstat(file.fileno()).st_size - copied if kept else 0
        file.truncate(0)
    make_room(path, kept)
    if kept:
        new.replace(_aside(path, 1))
    return lost


def _skip_hole(descriptor: int) -> None:
    """One who does not append goes on writing where it was, which leaves a hole behind an earlier `trim`."""
    if hasattr(os, "SEEK_DATA"):
        os.lseek(descriptor, 0, os.SEEK_DATA)


def _aside(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
