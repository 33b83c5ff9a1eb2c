"""Runs whose configuration names no behavior: learners are added when simulators name their behaviors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparring.pipeline.learning.checkpoints import initial_folder
from tests.services.services_helpers import Training, balanced
from tests.services.started import SAME_EVERYWHERE
from tests.simulation.unity_bridge import free_ports
from tests.simulation.unity_null_trainer import executable

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "trainer_type": "poca",
    "hyperparameters": {"batch_size": 16, "buffer_size": 64, "num_epoch": 1},
    "network_settings": {"hidden_units": 16, "num_layers": 1},
    "max_steps": 300,
    "time_horizon": 16,
    "summary_freq": 100,
}


def configuration(folder: Path, defaults: dict[str, Any], **top: Any) -> str:
    """Writes a configuration without behaviors and returns its path."""
    path = folder / "any.yaml"
    path.write_text(yaml.safe_dump({"default_settings": defaults, **top}))
    return str(path)


def trained(training: Training, *names: str) -> dict[str, Any]:
    """Checks that a run completed; returns its summary by behavior."""
    assert training.end() == 0, "\n".join(training.lines)
    found = training.summary["behaviors"]
    assert sorted(found) == sorted(names)
    assert all(balanced(one["step_counts"]) for one in found.values()), found
    assert not [entry for entry in training.log() if entry["event"] == "failed"]
    return dict(found)


def test_behaviors_named_by_the_game_are_trained_reproducibly_and_known_on_resume(tmp_path: Path) -> None:
    """Two behaviors of one group train in lockstep, as processes or in one; the first message names both."""
    simulators = [{"name": "goals", "options": {"mixed": True}}]
    file = configuration(tmp_path, SMALL, simulators=simulators, pipeline={"mode": "lockstep"})
    results = [
        trained(Training(tmp_path, file, "--seed", "3", *words, run_id=run_id), "Goals", "GoalsOdd")
        for run_id, words in (("first", ()), ("second", ("--in-process",)))
    ]
    assert results[0]["Goals"]["weights_sha256"] == results[1]["Goals"]["weights_sha256"]
    assert results[0]["GoalsOdd"]["weights_sha256"] == results[1]["GoalsOdd"]["weights_sha256"]
    for one in (*results[0].values(), *results[1].values()):
        assert (one["step_counts"]["lost"], one["steps"] >= 300) == (0, True)
    used = yaml.safe_load((tmp_path / "first" / "configuration.yaml").read_text())
    assert used["behaviors"]["GoalsOdd"]["max_steps"] == 300
    prepared = json.loads((tmp_path / "first" / "run.json").read_text())
    assert [*prepared["settings"]["behaviors"]] == ["Goals", "GoalsOdd"]

    more = Training(tmp_path, file, "--resume", "--max-steps", "500", run_id="first")
    later = trained(more, "Goals", "GoalsOdd")
    assert all(500 <= one["steps"] < 700 for one in later.values())
    added = [entry["behaviors"] for entry in more.log() if entry["event"] == "behaviors_added"]
    assert added == [["Goals", "GoalsOdd"]], "added once; the resumed run knows them"


def test_behavior_that_a_unity_game_names_late_gets_its_learner(tmp_path: Path) -> None:
    """The player and all services continue, and nothing is lost.

    In the second run both behaviors begin with the weights of the first, as `--initialize-from` asks.
    """
    network = {**SMALL["network_settings"], "vis_encode_type": "match3"}
    file = configuration(tmp_path, {**SMALL, "network_settings": network})
    zoo = executable(tmp_path, "--game", "zoo", "--areas", "2", "--late-after", "40", name="Zoo")
    results, words = {}, [file, "--env", str(zoo), "--no-graphics", "--seed", "1", "--base-port", str(free_ports(1))]
    for run_id, more in (("first", []), ("second", ["--in-process", "--initialize-from", "first"])):
        training = Training(tmp_path, *words, *more, run_id=run_id, environment=SAME_EVERYWHERE)
        results[run_id] = trained(training, "Zoo", "Late")
        added = [entry["behaviors"] for entry in training.log() if entry["event"] == "behaviors_added"]
        assert added == [["Zoo"], ["Late"]]
        started = [entry["part"] for entry in training.log() if entry["event"] == "started"]
        assert len(started) == len(set(started)), "no service was started again"
        assert all(one["step_counts"]["lost"] == 0 for one in results[run_id].values())
        log = (training.directory / "run_logs" / "Player-0.log").read_text()
        assert log.count("quit: status 400") == 1, "it was launched once"
    for name in ("Zoo", "Late"):
        assert initial_folder(tmp_path / "second", name).is_dir()
