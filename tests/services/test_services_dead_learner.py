"""A learner that dies or hangs is known, of real processes. The rule of 10 seconds itself is proven to the tenth in
virtual time (`test_services_end.py`)."""

from __future__ import annotations

import os
import signal
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.services.services_helpers import Training, config

KNOWN_S = 10.0
SLOW_MACHINE_S = 5.0
"""What a machine that is busy with other tests may add: neither who looks nor who is looked at has it for itself."""


def at(entry: dict[str, Any]) -> float:
    return datetime.fromisoformat(entry["timestamp"]).timestamp()


def known_after(training: Training, event: str, number: signal.Signals) -> float:
    """Sends the learner a signal; seconds until the supervisor's log says `event` of it."""
    before = sum(entry["event"] == event for entry in training.log())
    os.kill(training.pid("learning-Balance"), number)
    sent = datetime.now().timestamp()
    training.wait_for(lambda lines: sum(f"  {event}  " in line for line in lines) > before)
    found = [entry for entry in training.log() if entry["event"] == event and entry["part"] == "learning-Balance"]
    return at(found[-1]) - sent


@pytest.mark.slow
def test_a_dead_learner_is_known_and_so_is_one_whose_process_hangs(tmp_path: Path) -> None:
    training = Training(tmp_path, str(config(tmp_path, max_steps=10**9)))
    try:
        training.updates(1)
        killed = known_after(training, "failed", signal.SIGKILL)
        training.updates(1)
        stopped = known_after(training, "silent", signal.SIGSTOP)
    finally:
        training.process.send_signal(signal.SIGINT)
        training.end()
    print(f"known after SIGKILL {killed:.2f} s, after SIGSTOP {stopped:.2f} s")
    assert killed < SLOW_MACHINE_S
    assert stopped < KNOWN_S + SLOW_MACHINE_S
