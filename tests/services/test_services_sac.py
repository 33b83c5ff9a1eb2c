"""SAC with real processes, each of which is killed in turn."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from sparring.pipeline.learning.checkpoints import CheckpointFolder
from tests.services.services_helpers import Training, balanced, json_lines

CONFIG = """
behaviors:
  Balance:
    trainer_type: sac
    hyperparameters: {buffer_size: 4000, batch_size: 32, steps_per_update: 16, save_replay_buffer: true}
    network_settings: {hidden_units: 16, num_layers: 1}
    max_steps: 1000000
    time_horizon: 64
    summary_freq: 1000
    checkpoint_interval: 1000000
simulators: [{name: balance, count: 2, areas: 8}]
pipeline: {recovery_interval: 0.5, restarts: {backoff_s: 0.1}}
"""
PARTS = ("stepping-0", "assembly", "coordination", "learning-Balance", "monitor")


@pytest.mark.slow
def test_each_killed_process_is_started_again_and_nothing_is_trained_that_was_not_produced(tmp_path: Path) -> None:
    """The replay goes on from the last checkpoint; what arrived later is lost, and counted."""
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    training = Training(tmp_path, str(config))
    for part in PARTS:
        training.updates(1)
        training.kill(part)
    training.updates(1)
    training.process.send_signal(signal.SIGINT)
    assert training.end() == 0
    found = training.summary["behaviors"]["Balance"]
    counts = found["step_counts"]
    assert balanced(counts), counts
    assert found["unaccounted"] == 0
    assert counts["stale"] == 0
    assert counts["produced"] == training.simulator_steps()
    restored = [
        one for one in json_lines(training.directory / "logs" / "learning-Balance.jsonl") if one["event"] == "restored"
    ]
    assert restored, "the learner went on from a checkpoint"
    last = CheckpointFolder(training.directory, "Balance").load_latest()
    assert last.optimizer["replay.counters"][1] == last.trained == counts["trained"]
    first_slot, first_step, reached = np.load(training.directory / "Balance" / "replay" / "counts.npy")
    assert first_slot == first_step == 0, "the replay was never empty again"
    assert counts["trained"] < reached
