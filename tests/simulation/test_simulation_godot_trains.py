"""A scripted Godot game trains the goal game end to end: the command, the bridge and the game as processes."""

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
# Wider units of a processor round otherwise, and a short run that learned on one machine might not on the next.
SAME_EVERYWHERE = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
}


def train(folder: Path, behaviors: list[str], **options: Any) -> tuple[int, str]:
    """A lockstep run in `folder`; its exit status and what it printed."""
    schedules = {f"{name}_schedule": "constant" for name in ("learning_rate", "beta", "epsilon")}
    behavior = {
        "hyperparameters": {"batch_size": 32, "buffer_size": BUFFER, "learning_rate": 5e-3, **schedules},
        "network_settings": {"hidden_units": 32, "num_layers": 1},
        "max_steps": STEPS - BUFFER,  # the last update may go over by less than a buffer
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
    """Mean reward of the episodes in the last interval in which there were any."""
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    values = [line["reward"] for line in lines if line["type"] == "interval" and line["behavior"] == behavior]
    return float([value for value in values if value is not None][-1])


@pytest.mark.parametrize(
    ("behaviors", "options"),
    [
        (["Godot"], {"generation": 1}),
        (["walker", "hopper"], {"kinds": "walker,hopper", "late": True}),
    ],
    ids=["one policy of the first generation", "two policies with spaces of their own"],
)
def test_it_learns_the_goal_game(tmp_path: Path, behaviors: list[str], options: dict[str, Any]) -> None:
    """Mean reward above 0.9 within 3000 steps of each policy; at best it is 1.02."""
    status, said = train(tmp_path, behaviors, **options)
    assert status == 0, said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    for behavior in behaviors:
        assert summary["behaviors"][behavior]["steps"] <= STEPS
        assert last_reward(tmp_path, behavior) > 0.9


def test_a_game_that_always_crashes_ends_the_run_with_its_name(tmp_path: Path) -> None:
    """It is started again as often as the settings say, and then the run says why it gave up."""
    status, said = train(tmp_path, ["walker"], fault="crash", at=3)
    assert status != 0
    assert "Godot game 0, stepping: the end of the game by exit status 9" in said
