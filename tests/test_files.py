"""Files are complete or absent, even on a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

import pytest

from sparring.pipeline import errors, files
from sparring.pipeline.errors import SettingsError


def full(file: BinaryIO, data: bytes) -> None:
    """Writes half of the data, as a disk that becomes full does."""
    file.write(data[: len(data) // 2])
    raise OSError(errno.ENOSPC, "No space left on device")


def test_named_pipe_is_no_file_of_a_run_and_blocks_nothing(tmp_path: Path) -> None:
    pipe, missing = tmp_path / "pipe", tmp_path / "missing"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="Not a regular file") as raised:
        files.append(pipe, b"line")
    assert str(errors.first_failure(raised.value)) == f"got {pipe}: Not a regular file; expected a file; move it away"
    assert files.regular(missing) == missing
    assert files.regular(tmp_path) == tmp_path, "opening it fails, as it is a folder"
    lost, new = tmp_path / "lost", tmp_path / "new"
    lost.symlink_to(tmp_path / "nowhere" / "file")
    new.symlink_to(missing)
    with pytest.raises(OSError, match="A link into a folder that does not exist"):
        files.append(lost, b"line")
    assert files.append(new, b"line") == 4, "its target is made"


def test_folder_is_copied_without_broken_links_and_a_pipe_in_it_is_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("content")
    (source / "lock").touch()
    (source / "broken").symlink_to("nowhere")
    files.copy_folder(source, tmp_path / "copy", "lock")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["file"]
    os.mkfifo(source / "pipe")
    with pytest.raises(errors.SettingsError, match=r"which cannot be copied \(`.*pipe` is a named pipe\)"):
        files.copy_folder(source, tmp_path / "other")


@pytest.mark.parametrize(
    ("status", "text"), [(0, "exit status 0"), (3, "exit status 3"), (-9, "signal SIGKILL"), (-35, "signal 35")]
)
def test_end_of_a_process_is_told(status: int, text: str) -> None:
    assert errors.how_ended(status) == text


def test_no_folder_for_temporary_files_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(SettingsError, match=r"No usable temporary directory.*set TMPDIR"):
        files.temporary_folder()


def test_a_folder_for_temporary_files_that_no_library_can_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/tmp/t\udcff")
    with pytest.raises(SettingsError, match=r"t.udcff'; expected a path in UTF-8; set TMPDIR"):
        files.temporary_folder()


def test_a_folder_is_gone_where_another_is_in_its_place_and_not_where_it_cannot_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    number = files.identity(folder)
    assert not files.is_gone(folder, number)
    folder.rename(tmp_path / "moved")
    assert files.is_gone(folder, number)
    folder.mkdir()
    assert files.is_gone(folder, number)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)
    assert not files.is_gone(folder, number)


def test_database_has_its_name_whatever_that_is(tmp_path: Path) -> None:
    path = tmp_path / "a?b %20 #c.db"
    sqlite3.connect(files.sqlite(path).removeprefix("sqlite:///"), uri=True).execute("create table t (a)")
    assert path.exists()


def test_append_writes_a_line_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    assert files.append(path, b"first\n") == 6
    with monkeypatch.context() as patched:
        patched.setattr(files, "put", full)
        with pytest.raises(OSError, match="No space left"):
            files.append(path, b"second\n")
    assert path.read_bytes() == b"first\n"
    assert files.append(path, b"third\n") == 12
    assert path.read_bytes() == b"first\nthird\n"


def test_replaced_file_keeps_its_old_content_until_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    files.write_atomically(path, b"old")
    monkeypatch.setattr(files, "put", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_atomically(path, b"newer")
    assert [found.name for found in tmp_path.iterdir()] == ["state"]
    assert path.read_bytes() == b"old"


class UnbufferedFile:
    """A file that accepts two bytes at a time."""

    def __init__(self) -> None:
        self.content = b""

    def write(self, data: memoryview) -> int:
        self.content += bytes(data[:2])
        return len(data[:2])


def test_put_writes_the_rest_after_a_partial_write() -> None:
    file = UnbufferedFile()
    files.put(file, b"seven..")  # type: ignore[arg-type]
    assert file.content == b"seven.."


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
@pytest.mark.skipif(sys.platform == "win32", reason="it has no named pipes")
def test_pipe_that_nothing_writes_to_is_waited_for_so_long(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(TimeoutError, match=r"nothing came from this pipe for 0.01 s"):
        files.read_most(pipe, 100, 0.01)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # so that there may be a writer
    with pipe.open("wb", buffering=0) as writing:
        writing.write(b"abc")
        with pytest.raises(TimeoutError):
            files.read_most(pipe, 100, 0.01)
        writing.write(b"abc")
        assert files.read_most(pipe, 2, 10.0) == b"ab"
    assert files.read_most(pipe, 100, 10.0) == b"c"
    os.close(reading)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file of Linux")
def test_error_of_a_full_disk_names_the_file() -> None:
    with Path("/dev/full").open("wb", buffering=0) as file, pytest.raises(OSError, match="'/dev/full'"):
        files.put(file, b"data")


def test_who_may_read_a_new_file_is_what_the_user_has_chosen_except_for_secrets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files.write_atomically(tmp_path / "model.onnx", b"x", durable=False)
        files.write_atomically(tmp_path / "secret", b"x", durable=False, mode=0o600)
    finally:
        os.umask(before)
    assert (tmp_path / "model.onnx").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert len(list(tmp_path.iterdir())) == 2


def test_what_killed_writers_leave_is_removed_and_nothing_else(tmp_path: Path) -> None:
    kept = [tmp_path / name for name in (".hidden", "state.0123abcd", ".partial-00000000", ".git.0123abcd.bak")]
    (tmp_path / "below").mkdir()
    left = [tmp_path / ".status.json.0123abcd", tmp_path / "below" / ".state.ffffffff"]
    for path in (*kept, *left):
        path.write_text("")
    files.remove_unfinished(tmp_path)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {*kept}


def test_folder_in_the_place_of_a_file_is_named_and_not_the_file_that_was_to_replace_it(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.mkdir()
    with pytest.raises(IsADirectoryError) as raised:
        files.write_atomically(path, b"x")
    assert str(errors.first_failure(raised.value)) == f"got a folder at {path}; expected a file; move it away"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (IsADirectoryError(errno.EISDIR, "Is a directory", "x"), "Is a directory"),
        (KeyError("steps"), "there is no 'steps'"),
        (IndexError("list index out of range"), "list index out of range"),
        (ValueError("Expecting value"), "Expecting value"),
        (AttributeError("no attribute"), "no attribute"),
        (ZeroDivisionError("division by zero"), "division by zero"),
        (RecursionError("too deep"), "too deep"),
    ],
)
def test_whatever_a_reader_meets_in_a_file_is_one_error_that_names_the_file(error: Exception, reason: str) -> None:
    with pytest.raises(SettingsError) as raised, files.reading(Path("a.json"), "a list", "restore it"):
        raise error
    assert str(raised.value) == f"got a.json, which cannot be used ({reason}); expected a list; restore it"
    assert raised.value.__cause__ is error


def test_error_with_an_explanation_of_its_own_keeps_it() -> None:
    with pytest.raises(SettingsError, match=r"^own$"), files.reading(Path("a.json"), "a list", "restore it"):
        raise SettingsError("own")


@pytest.mark.parametrize(("number", "is_refused"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_disk_that_writes_no_folders_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_refused: bool
) -> None:
    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output error") if is_refused else contextlib.nullcontext():
        files.sync_folder(tmp_path)
