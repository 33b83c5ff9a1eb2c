"""A run whose learner has several processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.services.services_helpers import Training, balanced, config
from tests.services.started import SAME_EVERYWHERE

pytestmark = pytest.mark.slow


def test_rank_that_is_killed_restarts_the_learner_and_not_the_run(tmp_path: Path) -> None:
    file = config(tmp_path, max_steps=90_000)
    file.write_text(file.read_text() + "  ranks: 2\n")
    training = Training(tmp_path, str(file), "--seed", "1", environment=SAME_EVERYWHERE)
    training.updates(3)
    learner = psutil.Process(training.pid("learning-Balance"))
    (rank,) = learner.children()
    os.kill(rank.pid, signal.SIGKILL)
    training.updates(2)
    again = psutil.Process(training.pid("learning-Balance"))
    assert again.pid != learner.pid
    (other,) = again.children()
    assert training.end() == 0, "\n".join(training.lines)
    assert not any(psutil.pid_exists(one.pid) for one in (learner, rank, again, other))
    failures = [entry for entry in training.log() if entry["event"] == "failed"]
    assert [entry["part"] for entry in failures] == ["learning-Balance"]
    assert "a rank of the learner of Balance is lost: rank 1 ended by status -9" in failures[0]["error"]
    summary = training.summary["behaviors"]["Balance"]
    assert summary["steps"] >= 90_000
    assert balanced(summary["step_counts"])
