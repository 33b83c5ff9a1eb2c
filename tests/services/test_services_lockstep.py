"""Lockstep: the same seed gives the same weights to the bit, as processes or in one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from services_helpers import Training, balanced, config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def weights(results: Path, file: Path, run_id: str, *arguments: str) -> str:
    """Hash of the final weights of a lockstep run."""
    training = Training(results, str(file), "--seed", "5", *arguments, run_id=run_id)
    assert training.end() == 0, "\n".join(training.lines)
    figures = training.summary["behaviors"]["Balance"]
    assert figures["lag"]["max"] == 0
    assert balanced(figures["books"])
    assert figures["books"]["lost"] == 0
    assert (results / run_id / "logs" / "stepping-0.jsonl").is_file() or "--in-process" in arguments
    digest: str = figures["weights_sha256"]
    return digest


@pytest.mark.parametrize("count", [1, 4])
def test_the_same_seed_gives_the_same_weights(tmp_path: Path, count: int) -> None:
    file = config(tmp_path, mode="lockstep", count=count, max_steps=12_000, buffer_size=512)
    text = file.read_text()
    if count > 1:  # one of them is slowed at random
        command = [sys.executable, "-m", "services", "simulator", "balance", "--areas", "8", "--slow", "4"]
        slow = f"- {{name: balance, count: 3, areas: 8}}\n  - {{command: {json.dumps(command)}}}"
        text = text.replace("- {name: balance, count: 4, areas: 8}", slow)
        file.write_text(text)
    first = weights(tmp_path, file, "first")
    assert weights(tmp_path, file, "second") == first
    assert weights(tmp_path, file, "third", "--in-process") == first


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    file = config(tmp_path, mode="lockstep", count=1, max_steps=4_000, buffer_size=512)
    training = Training(tmp_path, str(file), "--seed", "6", "--in-process", run_id="six")
    assert training.end() == 0
    assert training.summary["behaviors"]["Balance"]["weights_sha256"] != weights(tmp_path, file, "five", "--in-process")
