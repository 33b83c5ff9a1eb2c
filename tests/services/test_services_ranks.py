"""A run whose learner has several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.services.services_helpers import Training, balanced, config, json_lines
from tests.services.started import SAME_EVERYWHERE

pytestmark = pytest.mark.slow

KILLED = """
import os, shutil, signal
from sparring.pipeline.queues.endpoints import private_folder
from sparring.services.process.runtime import MEETING

with private_folder(MEETING, shutil.rmtree):
    os.kill(os.getpid(), signal.SIGKILL)
"""
"""Leaves the folder in which ranks meet, as a learner that is killed meanwhile."""


def test_rank_that_is_killed_restarts_the_learner_and_not_the_run(tmp_path: Path) -> None:
    file = config(tmp_path, max_steps=90_000)
    file.write_text(file.read_text() + "  ranks: 2\n")
    (temporary := tmp_path / "t").mkdir()
    environment = {**SAME_EVERYWHERE, "TMPDIR": str(temporary)}
    training = Training(tmp_path, str(file), "--seed", "1", environment=environment)
    training.updates(3)
    learner = psutil.Process(training.pid("learning-Balance"))
    (rank,) = learner.children()
    os.kill(rank.pid, signal.SIGKILL)
    training.updates(2)
    again = psutil.Process(training.pid("learning-Balance"))
    assert again.pid != learner.pid
    (other,) = again.children()
    subprocess.run([sys.executable, "-c", KILLED], env=os.environ | environment, check=False)
    assert list(temporary.iterdir())
    assert training.end() == 0, "\n".join(training.lines)
    assert not list(temporary.iterdir())
    assert not any(psutil.pid_exists(one.pid) for one in (learner, rank, again, other))
    failures = [entry for entry in training.log() if entry["event"] == "failed"]
    assert [entry["part"] for entry in failures] == ["learning-Balance"]
    assert "a rank of the learner of Balance is lost: rank 1 ended by status -9" in failures[0]["error"]
    lines = json_lines(training.directory / "logs" / "learning-Balance.jsonl")
    (own,) = [entry for entry in lines if entry["event"] == "failed"]
    assert own["error"] in failures[0]["error"]
    assert "exception" not in own
    summary = training.summary["behaviors"]["Balance"]
    assert summary["steps"] >= 90_000
    assert balanced(summary["step_counts"])
