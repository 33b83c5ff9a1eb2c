"""Lockstep repeats the weights of a seed bit for bit, as several processes or as one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.services.services_helpers import Training, balanced, config

pytestmark = pytest.mark.slow


def weights(results: Path, file: Path, run_id: str, *arguments: str, seed: int = 5) -> str:
    """Returns the hash of the final weights of a lockstep run."""
    training = Training(results, str(file), "--seed", str(seed), *arguments, run_id=run_id)
    assert training.end() == 0, "\n".join(training.lines)
    result = training.summary["behaviors"]["Balance"]
    assert result["lag"]["max"] == 0
    assert balanced(result["step_counts"])
    assert result["step_counts"]["lost"] == 0
    assert (results / run_id / "logs" / "stepping-0.jsonl").is_file() or "--in-process" in arguments
    digest: str = result["weights_sha256"]
    return digest


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    """Three runs of a seed agree although one simulator is slowed at random; another seed gives other weights."""
    file = config(tmp_path, mode="lockstep", count=4, max_steps=12_000, buffer_size=512)
    command = [sys.executable, "-m", "sparring", "simulator", "balance", "--areas", "8", "--slow", "4"]
    slow = f"- {{name: balance, count: 3, areas: 8}}\n  - {{command: {json.dumps(command)}}}"
    file.write_text(file.read_text().replace("- {name: balance, count: 4, areas: 8}", slow))
    first = weights(tmp_path, file, "first")
    assert weights(tmp_path, file, "second") == first
    assert weights(tmp_path, file, "third", "--in-process") == first
    assert weights(tmp_path, file, "fourth", "--in-process", seed=6) != first
