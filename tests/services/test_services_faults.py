"""A sample of `scripts/faults`, which runs every row of the table in both modes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.rows import ROWS, Bench

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SECONDS = 4.0


@pytest.mark.parametrize("row", ["link reset-within-message", "learning-Balance stopped 3 s"])
def test_run_survives_the_fault(tmp_path: Path, row: str) -> None:
    ROWS[row](Bench(tmp_path, "overlap", SECONDS, seed=1))


def test_every_part_has_every_fault() -> None:
    """Every part of a run has every kind of fault."""
    parts = ("simulator-0", "stepping-0", "assembly", "coordination", "learning-Balance", "monitor")
    for part in parts:
        for fault in ("killed", "stopped 3 s", "hangs", "killed too often"):
            assert f"{part} {fault}" in ROWS
    for row in ("supervisor killed", "link reset", "disk full", "disk full, then freed"):
        assert row in ROWS
