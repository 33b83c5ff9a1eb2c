"""Files that grow as long as a run lasts stay within their bounds, whoever writes them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sparring.pipeline.monitoring import curves, logs
from sparring.pipeline.monitoring.files import RunFiles
from sparring.pipeline.monitoring.rotation import Rotating, full, trim

MOST = 10_000
KEPT = 2


def size_of(folder: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern))


def test_a_log_stays_within_its_bound_and_keeps_the_newest_lines(tmp_path: Path) -> None:
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


def test_lines_of_services_and_of_intervals_stay_within_their_bounds_and_the_newest_are_kept(tmp_path: Path) -> None:
    files = RunFiles(tmp_path, 0.0, MOST, KEPT)
    for number in range(1000):
        files.append_service({"type": "service", "number": number, "text": "x" * 50})
        files.append({"type": "interval", "behavior": "Walk", "number": number, "text": "x" * 50})
    for name in ("services.jsonl", "metrics.jsonl"):
        assert size_of(tmp_path, f"{name}*") <= MOST * (KEPT + 1)
        parts = [tmp_path / f"{name}{end}" for end in (".2", ".1", "")]
        numbers = [json.loads(line)["number"] for part in parts for line in part.read_text().splitlines()]
        assert numbers == list(range(1000 - len(numbers), 1000))


def test_curves_are_drawn_of_all_intervals_that_are_kept_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(
        curves, "picture", lambda found, _: drawn.extend(line["step"] for line in found["Walk"]) or b"a picture"
    )
    for start in (0, 500):  # the second monitor goes on where the first one died
        files = RunFiles(tmp_path, 0.0, MOST, KEPT)
        for step in range(start, start + 500):
            files.append({"type": "interval", "behavior": "Walk", "step": step})
    files.draw("run")
    lines = sum(len(path.read_text().splitlines()) for path in tmp_path.glob("metrics.jsonl*"))
    assert drawn == list(range(1000 - lines, 1000))
    assert lines > 2 * MOST / 60, "what was put aside is among them"


def test_no_line_is_torn_and_one_beyond_the_bound_has_a_file_of_its_own(tmp_path: Path) -> None:
    file = Rotating(tmp_path / "f", 10, 1)
    for line in ("12345\n", "6789\n", "x" * 50 + "\n", "a\n"):
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
def test_what_another_process_goes_on_writing_is_put_aside_without_a_loss(tmp_path: Path, how: str) -> None:
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
            assert trim(path, KEPT) == 0
            assert not full(path, MOST)
        write("the end")
        process.stdin.close()
    assert path.read_bytes().strip(b"\0") == b"the end\n"
    kept = [(tmp_path / name).read_bytes().strip(b"\n\0") for name in ("log.1", "log.2")]
    assert kept == [b"4" * 40_000, b"3" * 40_000]
    assert len(list(tmp_path.iterdir())) == 3
    assert path.stat().st_blocks * 512 <= 2 * MOST


def test_a_copy_that_can_not_be_written_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("kept")
    (tmp_path / "log.new").mkdir()
    with pytest.raises(OSError, match=r"log\.new"):
        trim(path, KEPT)
    assert path.read_text() == "kept"


def test_a_file_that_is_gone_is_not_full(tmp_path: Path) -> None:
    assert not full(tmp_path / "none", 0)
