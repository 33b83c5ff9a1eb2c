"""A small sample of `scripts/faults`, which tries every row of the table in both modes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.rows import ROWS, Bench

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SECONDS = 4.0


@pytest.mark.parametrize("row", ["link cut-in-a-message", "learning-Balance stopped 3 s"])
def test_a_run_comes_through(tmp_path: Path, row: str) -> None:
    ROWS[row](Bench(tmp_path, "overlap", SECONDS, seed=1))


def test_every_row_of_the_table_is_tried() -> None:
    """A part that nothing is done to would be one that nobody knows of."""
    parts = ("simulator-0", "stepping-0", "assembly", "coordination", "learning-Balance", "monitor")
    for part in parts:
        for fault in ("killed", "stopped 3 s", "hangs", "killed too often"):
            assert f"{part} {fault}" in ROWS
    for row in ("supervisor killed", "link cut", "disk full", "disk full, then freed"):
        assert row in ROWS
