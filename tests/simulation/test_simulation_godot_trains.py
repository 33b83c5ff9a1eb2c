"""A scripted Godot game trains the goal game end to end, with command, bridge and game as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.slow

GAME = str(Path(__file__).with_name("godot_game.py"))
STEPS = 3_000
BUFFER = 128
# CPUs with wider vector units round differently, so a short run might learn on one machine and not on another.
SAME_EVERYWHERE = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
}


def train(folder: Path, behaviors: list[str], **options: Any) -> tuple[int, str]:
    """Runs a lockstep training in `folder` and returns its exit status and output."""
    schedules = {f"{name}_schedule": "constant" for name in ("learning_rate", "beta", "epsilon")}
    behavior = {
        "hyperparameters": {"batch_size": 32, "buffer_size": BUFFER, "learning_rate": 5e-3, **schedules},
        "network_settings": {"hidden_units": 32, "num_layers": 1},
        "max_steps": STEPS - BUFFER,  # the last update may exceed it by less than a buffer
        "summary_freq": STEPS // 10,
    }
    plain = {
        "behaviors": dict.fromkeys(behaviors, behavior),
        "simulators": [{"name": "godot", "options": {"path": GAME, **options}}],
        "pipeline": {"mode": "lockstep", "restarts": {"budget": 1, "backoff_s": 0.1}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(plain))
    command = [sys.executable, "-m", "sparring", "train", str(folder / "config.yaml"), "--in-process", "--seed", "1"]
    command += ["--results-dir", str(folder), "--run-id", "run"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env={**os.environ, **SAME_EVERYWHERE}, check=False
    )
    return done.returncode, done.stdout + done.stderr


def last_reward(folder: Path, behavior: str) -> float:
    """Returns the mean reward of the last interval that has episodes."""
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    values = [line["reward"] for line in lines if line["type"] == "interval" and line["behavior"] == behavior]
    return float([value for value in values if value is not None][-1])


@pytest.mark.parametrize(
    ("behaviors", "options"),
    [
        (["Godot"], {"generation": 1}),
        (["walker", "hopper"], {"kinds": "walker,hopper", "late": True}),
    ],
    ids=["one policy of the first generation", "two policies with different spaces"],
)
def test_a_godot_game_learns_the_goal_game(tmp_path: Path, behaviors: list[str], options: dict[str, Any]) -> None:
    """The mean reward exceeds 0.9 within 3000 steps of each policy; 1.02 is the best possible."""
    status, output = train(tmp_path, behaviors, **options)
    assert status == 0, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    for behavior in behaviors:
        assert summary["behaviors"][behavior]["steps"] <= STEPS
        assert last_reward(tmp_path, behavior) > 0.9


def test_a_game_that_always_crashes_fails_the_run_with_its_name(tmp_path: Path) -> None:
    """It is restarted as often as the settings allow, and then the run fails with the cause."""
    status, output = train(tmp_path, ["walker"], fault="crash", at=3)
    assert status != 0
    assert "Godot game 0, stepping: the end of the game by exit status 9" in output
