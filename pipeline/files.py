"""Writes files so that they are either complete or absent."""

import os
import secrets
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

Json = Any
"""A value of a parsed JSON or YAML document whose content its reader has not checked yet."""


def put(file: BinaryIO, data: bytes) -> None:
    """Writes to a file of a run; all durable data is written here, so that a test can simulate a full disk."""
    left = memoryview(data)
    try:
        while left:  # an unbuffered file may accept a part only
            left = left[file.write(left) :]
    except OSError as error:
        error.filename = file.name  # the system does not say which file
        raise


def write_atomically(path: Path, data: bytes, *, durable: bool = True, mode: int = 0o666) -> None:
    """Replaces the content of `path` in one step: a reader sees the old or the new content, never a part.

    Args:
        path: path in an existing folder.
        data: whole content.
        durable: whether to wait for the disk, so that the content survives a power loss.
        mode: permissions, less those that the process masks.

    Raises:
        OSError: the disk is full or the folder cannot be written; `path` is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb", buffering=0, opener=partial(os.open, mode=mode)) as file:
            put(file, data)
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def append(path: Path, data: bytes) -> int:
    """Appends all of `data` or, unless the process dies, nothing; returns the size of the file.

    Raises:
        OSError: the disk is full or the folder cannot be written; the file is unchanged.
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
    """Makes renames within a folder survive a power loss, on platforms that support that."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
