"""Files that grow with a run stay within their bounds, whichever process writes them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sparring.pipeline.monitoring import curves, logs
from sparring.pipeline.monitoring.files import RotatingFile, RunFiles, full, to_json, trim

MOST = 10_000
KEPT = 2


def size_of(folder: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern))


def test_log_stays_within_its_bound_and_keeps_the_newest_lines(tmp_path: Path) -> None:
    path = logs.configure(tmp_path, "run", "assembly", most_bytes=MOST, kept=KEPT)
    try:
        for number in range(1000):
            logs.get().info("line", number=number)
    finally:
        logs.close()
    assert size_of(path.parent, "*") <= MOST * (KEPT + 1)
    parts = [path.with_name(path.name + end) for end in (".2", ".1", "")]
    numbers = [json.loads(line)["number"] for part in parts for line in part.read_text().splitlines()]
    assert numbers == list(range(1000 - len(numbers), 1000))


def test_service_and_interval_files_stay_within_bounds_and_keep_the_newest_lines(tmp_path: Path) -> None:
    files = RunFiles(tmp_path, MOST, KEPT)
    for number in range(1000):
        files.services.append(to_json({"type": "service", "number": number, "text": "x" * 50}))
        files.intervals.append(to_json({"type": "interval", "behavior": "Walk", "number": number, "text": "x" * 50}))
    for name in ("services.jsonl", "metrics.jsonl"):
        assert size_of(tmp_path, f"{name}*") <= MOST * (KEPT + 1)
        parts = [tmp_path / f"{name}{end}" for end in (".2", ".1", "")]
        numbers = [json.loads(line)["number"] for part in parts for line in part.read_text().splitlines()]
        assert numbers == list(range(1000 - len(numbers), 1000))


def test_file_of_intervals_that_cannot_be_written_at_the_start_is_written_later(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.mkdir()
    files = RunFiles(tmp_path, MOST, KEPT)
    with pytest.raises(OSError, match="Is a directory"):
        files.intervals.append(b"{}")
    path.rmdir()
    files.intervals.append(b"{}")
    assert path.read_text() == "{}\n"


def test_curves_show_all_kept_intervals_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plotted: list[int] = []
    monkeypatch.setattr(
        curves, "picture", lambda found, _: plotted.extend(line["step"] for line in found["Walk"]) or b"a picture"
    )
    for start in (0, 500):  # the second monitor continues after the first
        files = RunFiles(tmp_path, MOST, KEPT)
        for step in range(start, start + 500):
            files.intervals.append(to_json({"type": "interval", "behavior": "Walk", "step": step}))
    files.plot_curves("run")
    lines = sum(len(path.read_text().splitlines()) for path in tmp_path.glob("metrics.jsonl*"))
    assert plotted == list(range(1000 - lines, 1000))
    assert lines > 2 * MOST / 60, "lines of rotated files are included"


def test_rotation_splits_no_line_and_a_long_line_has_its_own_file(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "f", 10, 1)
    for line in (b"12345", b"6789", b"x" * 50, b"a"):
        file.append(line)
    assert (tmp_path / "f").read_text() == "a\n"
    assert (tmp_path / "f.1").read_text() == "x" * 50 + "\n"
    assert {path.name for path in tmp_path.iterdir()} == {"f", "f.1"}


WRITER = """
import os, sys
descriptor = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | (os.O_APPEND if sys.argv[2] == "append" else 0))
for line in sys.stdin:
    os.write(descriptor, line.encode())
    print("done", flush=True)
"""


@pytest.mark.parametrize("how", ["append", "at its place"])
def test_log_of_another_process_is_rotated_while_it_writes(tmp_path: Path, how: str) -> None:
    path = tmp_path / "log"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def write(line: str) -> None:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()
            process.stdout.readline()

        for round_ in range(5):
            write(str(round_) * 40_000)
            assert full(path, MOST)
            assert trim(path, 50_000, KEPT) == 0
            assert not full(path, MOST)
        write("the end")
        process.stdin.close()
    assert path.read_bytes().strip(b"\0") == b"the end\n"
    kept = [(tmp_path / name).read_bytes().strip(b"\n\0") for name in ("log.1", "log.2")]
    assert kept == [b"4" * 40_000, b"3" * 40_000]
    assert len(list(tmp_path.iterdir())) == 3
    assert path.stat().st_blocks * 512 <= 2 * MOST


def test_of_a_file_that_grows_faster_than_its_bound_only_the_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("0" * 5 * MOST + "1" * MOST)
    assert trim(path, MOST, KEPT) == 5 * MOST
    assert (path.stat().st_size, (tmp_path / "log.1").read_text()) == (0, "1" * MOST)


def test_failed_copy_leaves_the_file_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("kept")
    (tmp_path / "log.new").mkdir()
    with pytest.raises(OSError, match=r"log\.new"):
        trim(path, MOST, KEPT)
    assert path.read_text() == "kept"


def test_missing_file_is_not_full(tmp_path: Path) -> None:
    assert not full(tmp_path / "none", 0)
