"""A real run that does not go on is ended for it, with a status of its own and its cause."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import yaml

from sparring.pipeline.errors import STALLED
from tests.services.services_helpers import Training

HANGS = """
import threading
from sparring.pipeline.simulation.client import run
from sparring.pipeline.games.goal import Goal

class Hanging(Goal):
    def step(self, actions):
        threading.Event().wait()

run(Hanging(areas=4))
"""
"""Its heartbeat goes on: nobody would miss it but those who wait for its steps."""


@pytest.mark.slow
def test_a_run_whose_simulator_answers_no_more_exits_with_the_status_of_a_stall_and_says_why(tmp_path: Path) -> None:
    plain = {
        "behaviors": {"Goal": {"network_settings": {"hidden_units": 8, "num_layers": 1}}},
        "simulators": [{"command": [sys.executable, "-c", HANGS]}],
        "pipeline": {"stall_timeout": 2, "stalls": {"budget": 0}},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(plain))
    training = Training(tmp_path, str(tmp_path / "config.yaml"), "--in-process")
    training.wait_for(lambda lines: any("  run_stalled  " in line for line in lines))
    os.kill(training.pid("simulator-0"), signal.SIGKILL)  # else its end would be waited for
    assert training.end() == STALLED == 5, "\n".join(training.lines)
    assert training.summary["status"] == "stalled"
    assert training.summary["error"].startswith("simulators: nothing has moved for ")
