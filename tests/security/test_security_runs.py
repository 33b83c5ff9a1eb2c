"""A small sample of `scripts/bench/unauthenticated.py` with real processes and real keys."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "unauthenticated.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_continues_while_unauthenticated_peers_attack_it() -> None:
    """No service restarts, step accounting balances, no file holds a secret, and no peer without keys connects."""
    command = [sys.executable, str(SCRIPT), "--seconds", "0.5", "--half-open", "400"]
    done = subprocess.run([*command, "--only", "no_key", "half_open"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fault credential" in done.stdout
    assert "an honest one was welcomed" in done.stdout
