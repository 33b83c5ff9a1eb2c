"""Opens and copies only files, and writes them so that they are either complete or absent."""

import errno
import os
import re
import secrets
import select
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import quote

from sparring.pipeline.errors import SettingsError

Json = Any
"""A value of a parsed JSON or YAML document whose content its reader has not checked yet."""


_NO_FOLDERS: Final = errno.EBADF, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP
"""How network disks refuse to write a folder to the disk."""
_TEMPORARY: Final = re.compile(r"\..+\.[0-9a-f]{8}")
"""Names that `write_atomically` gives to files that are not complete."""


def regular(path: Path) -> Path:
    """Returns the path of a file of a run that is about to be opened, which a named pipe would block forever.

    Raises:
        OSError: what is there is neither a file nor a folder, or a link to a place that cannot be.
    """
    with suppress(FileNotFoundError):
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a folder has an error of its own
            raise OSError(errno.ENXIO, "Not a regular file", str(path))
    if path.is_symlink() and not path.resolve().parent.exists():
        raise OSError(errno.ENXIO, "A link into a folder that does not exist", str(path))
    return path


def read_most(path: Path, most: int, pipe_s: float) -> bytes:
    """Returns the first bytes of a file, or of a pipe whose writer ends.

    Args:
        path: of the file.
        most: number of bytes.
        pipe_s: seconds that a pipe may take for each part.

    Raises:
        OSError: it cannot be read; a TimeoutError where nothing comes from a pipe.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a named pipe may never have a writer
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        has_begun, found = stat.S_ISREG(os.fstat(descriptor).st_mode), b""
        while len(found) < most:
            part = file.read(most - len(found))  # None: a writer is there, and nothing to read
            if part == b"" and has_begun:
                break
            if not part and not select.select([descriptor], [], [], pipe_s)[0]:
                raise TimeoutError(errno.ETIMEDOUT, f"nothing came from this pipe for {pipe_s:g} s", str(path))
            has_begun, found = True, found + (part or b"")
        return found


DAMAGE: Final = OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError
"""What a reader raises where a file is not readable, or holds something else than what the reader expects."""


@contextmanager
def reading(path: Path, expected: str, remedy: str) -> Iterator[None]:
    """Reports as one error that a file cannot be read, or holds something else than what its reader expects.

    Args:
        path: of the file.
        expected: its content, in words.
        remedy: what the user can do.

    Raises:
        SettingsError: it is so.
    """
    try:
        yield
    except DAMAGE as error:
        reason = str(error)
        if isinstance(error, OSError):
            reason = error.strerror or reason
        elif isinstance(error, KeyError):
            reason = f"there is no {reason}"
        raise SettingsError(f"got {path}, which cannot be used ({reason}); expected {expected}; {remedy}") from error


def working_folder() -> Path:
    """Returns the working folder.

    Raises:
        SettingsError: it was removed.
    """
    try:
        return Path.cwd()
    except OSError as error:
        raise SettingsError(
            f"got a working folder that cannot be found ({error.strerror}); expected one that exists; change to another"
        ) from None


GONE: Final = (
    "got no folder {folder} any more: it was removed or replaced while the run wrote to it; expected it to stay until "
    "the end; start the run again"
)
"""Why a run fails whose folder `is_gone`."""


def identity(folder: Path) -> int | None:
    """Returns the number of a folder on its disk; 0 where there is none, and None where that cannot be seen."""
    try:
        return folder.stat().st_ino
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError:  # no permission on the way to it, or a disk that does not answer
        return None


def is_gone(folder: Path, number: int | None) -> bool:
    """Returns whether a folder was removed or replaced, given its `identity` before."""
    return identity(folder) not in (None, number)


def expanded(text: str) -> Path:
    """Returns a path, with the home folder of a user in place of `~` or `~NAME`, where there is such a user."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def temporary_folder() -> Path:
    """Returns the folder for temporary files.

    Raises:
        SettingsError: no folder can be written.
    """
    try:
        found = tempfile.gettempdir()
        found.encode()
        return Path(found)
    except UnicodeEncodeError:
        raise SettingsError(
            f"got the folder for temporary files {found!r}; expected a path in UTF-8; set TMPDIR to another folder"
        ) from None
    except OSError as error:
        raise SettingsError(
            f"got no folder for temporary files ({error.strerror}); expected one with room, and limits that allow "
            "files (`ulimit -a`); set TMPDIR to such a folder"
        ) from None


def sqlite(path: Path) -> str:
    """Returns the address of a database in a file, whose path may hold any character."""
    return f"sqlite:///file:{quote(str(path.absolute()))}?uri=true"


def remove(path: Path) -> None:
    """Removes a file, a link, or a folder with all that is in it.

    Raises:
        OSError: it does not exist, or cannot be removed.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def copy_folder(source: Path, target: Path, *ignored: str) -> None:
    """Copies a folder into another, without files whose names match one of the patterns, and without broken links.

    Raises:
        SettingsError: something cannot be read, or there is no room.
        OSError: likewise, of the folders themselves.
    """
    try:
        shutil.copytree(
            source,
            target,
            ignore=shutil.ignore_patterns(*ignored),
            ignore_dangling_symlinks=True,
            dirs_exist_ok=True,
        )
    except shutil.Error as error:  # a list of all of them
        raise SettingsError(
            f"got {source}, which cannot be copied ({error.args[0][0][2]}); expected files that can be read, and room "
            "for a copy; mend that"
        ) from error


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


def remove_unfinished(folder: Path) -> None:
    """Removes what `write_atomically` leaves in a folder, or below it, where its process is killed meanwhile."""
    for path in folder.rglob(".*"):
        if _TEMPORARY.fullmatch(path.name) and path.is_file():
            with suppress(OSError):
                path.unlink()


def append(path: Path, data: bytes) -> int:
    """Appends all of `data` or, unless the process dies, nothing; returns the size of the file.

    Raises:
        OSError: the disk is full or the folder cannot be written; the file is unchanged.
    """
    with regular(path).open("ab", buffering=0) as file:
        before = file.tell()
        try:
            put(file, data)
        except OSError:
            file.truncate(before)
            raise
        return file.tell()


def sync_folder(path: Path) -> None:
    """Makes renames within a folder survive a power loss, on platforms and disks that support that."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_FOLDERS:
                raise
        finally:
            os.close(descriptor)
