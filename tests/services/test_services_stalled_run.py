"""A real run that stalls ends with its own exit status and its cause."""

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
"""A simulator that keeps its heartbeat: only the services that wait for its steps can notice."""


@pytest.mark.slow
def test_run_whose_simulator_hangs_exits_with_the_status_and_cause_of_a_stall(tmp_path: Path) -> None:
    plain = {
        "behaviors": {"Goal": {"network_settings": {"hidden_units": 8, "num_layers": 1}}},
        "simulators": [{"command": [sys.executable, "-c", HANGS]}],
        "pipeline": {"stall_timeout": 2, "stalls": {"budget": 0}},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(plain))
    training = Training(tmp_path, str(tmp_path / "config.yaml"), "--in-process")
    training.wait_for(lambda lines: any("  run_stalled  " in line for line in lines))
    os.kill(training.pid("simulator-0"), signal.SIGKILL)  # otherwise the run would wait for its end
    assert training.end() == STALLED == 5, "\n".join(training.lines)
    assert training.summary["status"] == "stalled"
    assert training.summary["error"].startswith("simulators: nothing has moved for ")
