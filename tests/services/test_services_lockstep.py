"""Lockstep repeats the weights of a seed bit for bit, as several processes or as one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.services.curriculum_runs import lesson, with_curriculum
from tests.services.services_helpers import Training, balanced

pytestmark = pytest.mark.slow


def weights(results: Path, file: Path, run_id: str, *arguments: str) -> str:
    """Returns the hash of the final weights of a lockstep run."""
    training = Training(results, str(file), "--seed", "5", *arguments, run_id=run_id)
    assert training.end() == 0, "\n".join(training.lines)
    result = training.summary["behaviors"]["Balance"]
    assert result["lag"]["max"] == 0
    assert balanced(result["step_counts"])
    assert result["step_counts"]["lost"] == 0
    assert result["step_counts"]["produced"] == training.simulator_steps()
    assert lesson(training) == 2
    assert (results / run_id / "logs" / "stepping-0.jsonl").is_file() or "--in-process" in arguments
    digest: str = result["weights_sha256"]
    return digest


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    """A run of many processes and one in one process agree, although a simulator is slowed at random in each.

    Simulators get the parameters of a curriculum's three lessons.
    """
    file = with_curriculum(tmp_path, mode="lockstep", count=4, max_steps=12_000, buffer_size=512)
    command = [sys.executable, "-m", "sparring", "simulator", "balance", "--areas", "8", "--slow", "4"]
    slow = f"- {{name: balance, count: 3, areas: 8}}\n  - {{command: {json.dumps(command)}}}"
    file.write_text(file.read_text().replace("- {name: balance, count: 4, areas: 8}", slow))
    assert weights(tmp_path, file, "first") == weights(tmp_path, file, "second", "--in-process")
