"""Files that are whole or not there, on a disk that has no room for all of them."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import BinaryIO

import pytest

from sparring.pipeline import files


def full(file: BinaryIO, data: bytes) -> None:
    """A disk with room for half."""
    file.write(data[: len(data) // 2])
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_is_added_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    assert files.append(path, b"first\n") == 6
    with monkeypatch.context() as patched:
        patched.setattr(files, "put", full)
        with pytest.raises(OSError, match="No space left"):
            files.append(path, b"second\n")
    assert path.read_bytes() == b"first\n"
    assert files.append(path, b"third\n") == 12
    assert path.read_bytes() == b"first\nthird\n"


def test_what_is_replaced_is_the_old_one_until_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    files.write_atomically(path, b"old")
    monkeypatch.setattr(files, "put", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_atomically(path, b"newer")
    assert [found.name for found in tmp_path.iterdir()] == ["state"]
    assert path.read_bytes() == b"old"


class Sparing:
    """A file that takes two bytes at once, as one without a buffer may."""

    def __init__(self) -> None:
        self.content = b""

    def write(self, data: memoryview) -> int:
        self.content += bytes(data[:2])
        return len(data[:2])


def test_a_file_that_takes_a_part_gets_the_rest() -> None:
    file = Sparing()
    files.put(file, b"seven..")  # type: ignore[arg-type]
    assert file.content == b"seven.."
