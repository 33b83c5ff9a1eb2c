"""One run of one trainer: the configuration, the player, the process, and the folder that keeps them."""

from __future__ import annotations

import copy
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

BENCH: Final = Path(__file__).parents[1]
ROOT: Final = BENCH.parents[1]
MLAGENTS: Final = "mlagents"
BEHAVIORS: Final = {"balance": "3DBall", "balance_sac": "3DBall", "push": "Push"}
STEPS: Final = {"balance": 300_000, "balance_sac": 80_000, "push": 150_000}
CHECKPOINTS: Final = 3
"""Number of checkpoints that a run keeps, at equal distances."""
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "balance": {  # ML-Agents' own config/ppo/3DBall.yaml
        "trainer_type": "ppo",
        "hyperparameters": {
            "batch_size": 64,
            "buffer_size": 12_000,
            "learning_rate": 3e-4,
            "beta": 1e-3,
            "epsilon": 0.2,
            "lambd": 0.99,
            "num_epoch": 3,
            "learning_rate_schedule": "linear",
        },
        "network_settings": {"normalize": True, "hidden_units": 128, "num_layers": 2, "vis_encode_type": "simple"},
        "reward_signals": {"extrinsic": {"gamma": 0.99, "strength": 1.0}},
        "time_horizon": 1000,
    },
    "balance_sac": {  # ML-Agents' own config/sac/3DBall.yaml
        "trainer_type": "sac",
        "hyperparameters": {
            "batch_size": 64,
            "buffer_size": 200_000,
            "buffer_init_steps": 0,
            "learning_rate": 3e-4,
            "learning_rate_schedule": "constant",
            "tau": 0.005,
            "steps_per_update": 10.0,
            "save_replay_buffer": False,
            "init_entcoef": 0.5,
            "reward_signal_steps_per_update": 10.0,
        },
        "network_settings": {"normalize": True, "hidden_units": 64, "num_layers": 2, "vis_encode_type": "simple"},
        "reward_signals": {"extrinsic": {"gamma": 0.99, "strength": 1.0}},
        "time_horizon": 1000,
    },
    "push": {
        "trainer_type": "ppo",
        "hyperparameters": {
            "batch_size": 256,
            "buffer_size": 2048,
            "learning_rate": 3e-4,
            "beta": 5e-3,
            "epsilon": 0.2,
            "lambd": 0.95,
            "num_epoch": 3,
            "learning_rate_schedule": "linear",
        },
        "network_settings": {"normalize": True, "hidden_units": 64, "num_layers": 2},
        "reward_signals": {"extrinsic": {"gamma": 0.99, "strength": 1.0}},
        "time_horizon": 64,
        "self_play": {
            "save_steps": 5000,
            "team_change": 25_000,
            "swap_steps": 2000,
            "window": 10,
            "play_against_latest_model_ratio": 0.5,
            "initial_elo": 1200.0,
        },
    },
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """The configuration of a run.

    Attributes:
        trainer: `MLAGENTS`, or the label of a variant of this project.
        variant: of the game, for the name of the folder; empty for the settings as they stand here.
        overrides: changes of the behavior's settings by dotted key; those that begin with `pipeline.` are of the file.
        root: of the sources of this project that train.
        arenas: of the player, side by side; 0 for those of the game.
    """

    game: str
    trainer: str
    seed: int
    steps: int
    overrides: Mapping[str, Any]
    variant: str = ""
    root: Path = ROOT
    arenas: int = 0

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.game}{self.variant}-{self.steps}-{self.trainer}-{self.seed}"


def document(job: Job) -> dict[str, Any]:
    """Returns the configuration of a run, the same for both trainers apart from the overrides."""
    behavior = copy.deepcopy(CONFIGS[job.game])
    behavior |= {
        "max_steps": job.steps,
        "summary_freq": max(1000, job.steps // 25),
        "checkpoint_interval": job.steps // CHECKPOINTS,
        "keep_checkpoints": 2 * CHECKPOINTS,
    }
    whole: dict[str, Any] = {"behaviors": {BEHAVIORS[job.game]: behavior}}
    for key, value in job.overrides.items():
        *path, last = key.split(".")
        section = whole if path[:1] == ["pipeline"] else behavior
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    return whole


def run(job: Job, folder: Path, interpreter: Path) -> Path:
    """Trains a run, or finds the folder of one that was completed before.

    Args:
        folder: of all runs.
        interpreter: of ML-Agents' environment, in which the player runs too.

    Returns:
        The run's folder: `config.yaml`, `record.jsonl`, `log.txt`, `results/run`, and `done.json` once it is complete.

    Raises:
        RuntimeError: the trainer failed; the error has the end of its log.
    """
    place = folder / job.name
    if (place / "done.json").exists():
        return place
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (place / "config.yaml").write_text(yaml.safe_dump(document(job), sort_keys=False))
    began = time.monotonic()
    with (place / "log.txt").open("w") as log:
        command, search = _command(job, place, interpreter)
        variables = os.environ | {"PYTHONPATH": str(search)}
        status = subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, env=variables, cwd=search, check=False
        ).returncode
    if status:
        tail = "".join((place / "log.txt").read_text().splitlines(keepends=True)[-20:])
        raise RuntimeError(f"got exit status {status} of {job.name}; expected 0; {place / 'log.txt'} ends:\n{tail}")
    (place / "done.json").write_text(json.dumps({"seconds": time.monotonic() - began}))
    return place


def _command(job: Job, place: Path, interpreter: Path) -> tuple[Sequence[str], Path]:
    """Returns the command line of a trainer, and the path of its modules."""
    ours = job.trainer != MLAGENTS
    start = [sys.executable, "-m", "sparring", "train"] if ours else [str(interpreter), "-m", "beside.learn"]
    common = ["--env", str(_player(job, place, interpreter)), "--run-id", "run", "--seed", str(job.seed)]
    common += ["--results-dir", str(place / "results"), "--base-port", str(_free_port()), "--no-graphics"]
    words = [*start, str(place / "config.yaml"), *common]
    return ([*words, "--no-export"], job.root / "src") if ours else (words, BENCH)


def _player(job: Job, place: Path, interpreter: Path) -> Path:
    """Writes an executable that both trainers launch as a Unity build."""
    path = place / "player"
    command = f"{interpreter} -m beside.player {job.game} --seed {job.seed} --record {place / 'record.jsonl'}"
    command += f" --arenas {job.arenas}"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={BENCH} exec {command} "$@"\n')
    path.chmod(0o755)
    return path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
