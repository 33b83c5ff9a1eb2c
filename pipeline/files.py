"""Files that are whole or not there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import BinaryIO


def put(file: BinaryIO, data: bytes) -> None:
    """Writes to a file of a run. What has to survive is written here only, so that a test can fill the disk."""
    left = memoryview(data)
    while left:  # a file without a buffer may take a part of it
        left = left[file.write(left) :]


def write_atomically(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replaces `path` by `data` in one step: a reader sees the old or the new, never a part.

    Args:
        path: its folder exists.
        data: the whole content.
        durable: also survive a loss of power, at the price of waiting for the disk.

    Raises:
        OSError: the disk is full or the folder cannot be written; `path` is as it was.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            put(file, data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def write_through(path: Path, data: bytes) -> None:
    """Writes a file whose folder is not in place yet, and waits for the disk.

    Raises:
        OSError: the disk is full or the folder cannot be written; a part may be there.
    """
    with path.open("wb") as file:
        put(file, data)
        file.flush()
        os.fsync(file.fileno())


def append(path: Path, data: bytes) -> int:
    """Adds to the end of a file, all of `data` or, unless the process dies, nothing; returns the file's size.

    Raises:
        OSError: the disk is full or the folder cannot be written; the file is as it was.
    """
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            put(file, data)
        except OSError:
            file.truncate(before)
            raise
        return file.tell()


def sync_folder(path: Path) -> None:
    """Makes renames within a folder survive a loss of power, where the platform can."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
