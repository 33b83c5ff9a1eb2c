"""Bounds files that grow forever: a full one is rotated to FILE.1, FILE.2 and so on.

No other process may write to a file of `RotatingFile`. `trim` is for a file that another process has open: its content
is copied and the file emptied in place, so that the other process can continue to write to it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from sparring.pipeline.files import append

_BLOCK: Final = 512
"""Bytes of a block that `st_blocks` counts."""


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


def trim(path: Path, kept: int) -> int:
    """Copies the content of a file that another process has open to FILE.1, and empties the file.

    Returns:
        The bytes that were written in between and are lost.

    Raises:
        OSError: the copy cannot be written; the file is as it was.
    """
    new = path.with_name(f"{path.name}.new")
    with path.open("rb+") as file:
        if hasattr(os, "SEEK_DATA"):  # a process that does not append keeps its position: an earlier `trim` left a hole
            os.lseek(file.fileno(), 0, os.SEEK_DATA)
        with new.open("wb") as copy:
            shutil.copyfileobj(file, copy)
        lost = os.fstat(file.fileno()).st_size - file.tell()
        file.truncate(0)
    _shift(path, kept)
    new.replace(_rotated(path, 1))
    return lost


def _rotated(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
