"""A sample of `scripts/faults`, which runs every row of the table in both modes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.faults.places import small_disk
from tests.faults.rows import ROWS, Bench
from tests.services.services_helpers import Training, config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SECONDS = 4.0


def needs_mount(folder: Path) -> None:
    """Skips a test where this user may mount nothing."""
    try:
        with small_disk(folder / "mounted", 1):
            pass
    except OSError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("row", ["link reset-within-message", "disk full"])
def test_run_survives_the_fault(tmp_path: Path, row: str) -> None:
    if row == "disk full":
        needs_mount(tmp_path)
    ROWS[row](Bench(tmp_path, "overlap", SECONDS, seed=1))


def test_every_part_has_every_fault() -> None:
    """Every part of a run has every kind of fault."""
    parts = ("simulator-0", "stepping-0", "assembly", "coordination", "learning-Balance", "monitor")
    for part in parts:
        for fault in ("killed", "stopped 3 s", "hangs", "killed too often"):
            assert f"{part} {fault}" in ROWS
    for row in ("supervisor killed", "link reset", "disk full", "disk full, then freed"):
        assert row in ROWS


@pytest.mark.parametrize("kind", ["full", "read-only"])
def test_start_on_a_disk_without_room_says_so(tmp_path: Path, kind: str) -> None:
    needs_mount(tmp_path)
    with small_disk(tmp_path / kind, 1) as disk:
        if kind == "full":
            disk.fill()
        else:
            subprocess.run(["mount", "-o", "remount,ro", str(disk.path)], check=True)
        training = Training(disk.path, str(config(tmp_path)))
        assert training.end() == (1 if kind == "full" else 2)
        text = "\n".join(training.lines)
    assert "Traceback" not in text
    assert "room" in text
