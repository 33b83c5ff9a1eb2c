"""Helpers for whole runs with simulated Unity players: programs, configurations, ports."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.services.services_helpers import Training, json_lines
from tests.services.started import SAME_EVERYWHERE
from tests.simulation.unity_bridge import free_ports, player_events
from tests.simulation.unity_null_trainer import executable

__all__ = ["executable", "free_ports", "player_events", "players", "settings", "train"]

BEHAVIOR: Mapping[str, Any] = {
    "hyperparameters": {"batch_size": 128, "buffer_size": 2048, "learning_rate": 3e-4, "num_epoch": 3},
    "network_settings": {"hidden_units": 32, "num_layers": 1},
    "max_steps": 40_000,
    "time_horizon": 64,
    "summary_freq": 2048,
    "checkpoint_interval": 1_000_000,
}
GOAL: Mapping[str, Any] = {
    "hyperparameters": {
        "batch_size": 16,
        "buffer_size": 64,
        "learning_rate": 5e-3,
        **{f"{name}_schedule": "constant" for name in ("learning_rate", "beta", "epsilon")},
    },
    "network_settings": {"hidden_units": 32, "num_layers": 1},
    "max_steps": 1400,
    "time_horizon": 64,
    "summary_freq": 350,
}


def settings(
    folder: Path,
    behavior: str,
    *,
    mode: str = "overlap",
    own: Mapping[str, Any] = BEHAVIOR,
    name: str = "config.yaml",
    analytics: bool = False,
    **top: Any,
) -> str:
    """Writes an ML-Agents configuration with a few settings of ours, and returns its path; `top` adds sections."""
    pipeline = {"mode": mode, "restarts": {"backoff_s": 0.1}, "training_analytics": analytics}
    plain = {"behaviors": {behavior: dict(own)}, "pipeline": pipeline, **top}
    (folder / name).write_text(yaml.safe_dump(plain))
    return str(folder / name)


def train(folder: Path, config: str, program: Path, count: int, *arguments: str, run_id: str = "run") -> Training:
    """Starts `sparring train CONFIG --env PROGRAM --num-envs COUNT`."""
    ports = ["--base-port", str(free_ports(count))]
    command_line = [config, "--env", str(program), "--num-envs", str(count), "--no-graphics", "--seed", "1", *ports]
    return Training(folder, *command_line, *arguments, run_id=run_id, environment=SAME_EVERYWHERE)


def players(training: Training) -> dict[int, psutil.Process]:
    """Returns the live players of a run by number."""
    found = {}
    for process in psutil.Process(training.process.pid).children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            command_line = process.cmdline()
            if "-logFile" in command_line:
                log = Path(command_line[command_line.index("-logFile") + 1])
                found[int(log.stem.removeprefix("Player-"))] = process
    return found


def intervals(training: Training, behavior: str) -> list[dict[str, Any]]:
    """Returns the intervals of a behavior in `metrics.jsonl`, in order."""
    lines = json_lines(training.directory / "metrics.jsonl")
    return [line for line in lines if line["type"] == "interval" and line["behavior"] == behavior]
