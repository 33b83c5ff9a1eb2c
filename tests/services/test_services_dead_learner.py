"""The supervisor notices within 10 s that a real learner process has died or hangs.

`test_services_supervisor.py` proves the limit of 10 s exactly, in virtual time.
"""

from __future__ import annotations

import os
import signal
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.services.services_helpers import Training, config

NOTICED_S = 10.0
SLOW_MACHINE_S = 5.0
"""Allowance for a machine that runs other tests at the same time."""


def at(entry: dict[str, Any]) -> float:
    return datetime.fromisoformat(entry["timestamp"]).timestamp()


def noticed_after(training: Training, event: str, number: signal.Signals) -> float:
    """Sends the learner a signal; returns the seconds until the supervisor logs `event` for it."""
    before = sum(entry["event"] == event for entry in training.log())
    os.kill(training.pid("learning-Balance"), number)
    sent = datetime.now().timestamp()
    training.wait_for(lambda lines: sum(f"  {event}  " in line for line in lines) > before)
    found = [entry for entry in training.log() if entry["event"] == event and entry["part"] == "learning-Balance"]
    return at(found[-1]) - sent


@pytest.mark.slow
def test_supervisor_notices_dead_and_hanging_learner(tmp_path: Path) -> None:
    training = Training(tmp_path, str(config(tmp_path, max_steps=10**9)))
    try:
        training.updates(1)
        killed = noticed_after(training, "failed", signal.SIGKILL)
        training.updates(1)
        stopped = noticed_after(training, "heartbeat_missed", signal.SIGSTOP)
    finally:
        training.process.send_signal(signal.SIGINT)
        training.end()
    print(f"noticed after SIGKILL {killed:.2f} s, after SIGSTOP {stopped:.2f} s")
    assert killed < SLOW_MACHINE_S
    assert stopped < NOTICED_S + SLOW_MACHINE_S
