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


def send(training: Training, event: str, number: signal.Signals) -> float:
    """Sends the learner a signal, and waits until the console shows `event`; returns when it was sent."""
    before = sum(entry["event"] == event for entry in training.log())
    os.kill(training.pid("learning-Balance"), number)
    sent = datetime.now().timestamp()
    training.wait_for(lambda lines: sum(f"  {event}  " in line for line in lines) > before)
    return sent


def noticed(training: Training, event: str) -> float:
    """Returns when the supervisor logged `event` for the learner the last time."""
    return [
        at(entry) for entry in training.log() if (entry["event"], entry.get("part")) == (event, "learning-Balance")
    ][-1]


@pytest.mark.slow
def test_supervisor_notices_dead_and_hanging_learner(tmp_path: Path) -> None:
    training = Training(tmp_path, str(config(tmp_path, max_steps=10**9)))
    try:
        training.updates(1)
        killed_at = send(training, "failed", signal.SIGKILL)
        training.updates(1)
        killed = noticed(training, "failed") - killed_at
        stopped_at = send(training, "heartbeat_missed", signal.SIGSTOP)
    finally:
        training.process.send_signal(signal.SIGINT)
        training.end()
    stopped = noticed(training, "heartbeat_missed") - stopped_at  # the console may be ahead of the file
    print(f"noticed after SIGKILL {killed:.2f} s, after SIGSTOP {stopped:.2f} s")
    assert killed < SLOW_MACHINE_S
    assert stopped < NOTICED_S + SLOW_MACHINE_S
