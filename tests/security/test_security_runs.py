"""A small sample of `scripts/bench/strangers.py`: real processes, real keys."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "strangers.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_goes_on_while_strangers_are_at_its_door() -> None:
    """No part restarts, the books balance, no secret is in the run's folder, and nobody without keys gets a word."""
    command = [sys.executable, str(SCRIPT), "--seconds", "0.5", "--half-open", "400"]
    done = subprocess.run([*command, "--only", "no_key", "half_open"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fault credential" in done.stdout
    assert "an honest one was welcomed" in done.stdout
