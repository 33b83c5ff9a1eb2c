"""The cost of self-play: `python scripts/bench/self_play.py [--pairs 3]`.

Trains soccer (two against two) plainly and under self-play in turn, with the same learner and the same simulators, and
prints trained agent-steps per second of both and their ratio, for two loads:

learner   the learner is the bottleneck: MA-POCA, 3 epochs, minibatches of 256, as in configs/soccer.yaml.
stepping  stepping and the simulators are: PPO, 1 epoch over 32 units. Every ghost's step replaces one that could be
          learned from, so that self-play with two teams reaches half at most; and the rows of one tick are divided
          among several policies.

Exit status 1 if the median ratio of the first is below 0.75.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
BAR = 0.75
LOADS: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {
    # trainer, hyperparameters, network settings, steps
    "learner": (
        "poca",
        {"batch_size": 256, "buffer_size": 2048, "num_epoch": 3},
        {"hidden_units": 64, "num_layers": 2},
        196_608,
    ),
    "stepping": (
        "ppo",
        {"batch_size": 4096, "buffer_size": 8192, "num_epoch": 1},
        {"hidden_units": 32, "num_layers": 1},
        491_520,
    ),
}


def rate(load: str, *, self_play: bool) -> float:
    """Trained agent-steps per second of one run, the median of its intervals without the first two."""
    trainer, hyperparameters, network, steps = LOADS[load]
    behavior: dict[str, Any] = {
        "trainer_type": trainer,
        "hyperparameters": hyperparameters,
        "network_settings": network,
        "max_steps": steps,
        "time_horizon": 64,
        "summary_freq": steps // 12,
    }
    if self_play:
        behavior["self_play"] = {"save_steps": 32_768, "swap_steps": 16_384, "team_change": 131_072}
    plain = {
        "behaviors": {"Soccer": behavior},
        "simulators": [{"name": "soccer", "count": 2, "areas": 16, "options": {"every": 2}}],
    }
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump(plain))
        command = [sys.executable, "-m", "sparring", "train", str(config), "--results-dir", folder, "--run-id", "run"]
        subprocess.run([*command, "--seed", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    rate: float = statistics.median(
        line["steps_per_s"] for line in lines if line["type"] == "interval" and line["step"] > steps / 6
    )
    return rate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    medians = {}
    for load in LOADS:
        ratios = []
        for _ in range(args.pairs):
            plain, ghosts = rate(load, self_play=False), rate(load, self_play=True)
            ratios.append(ghosts / plain)
            print(f"{load}: plain {plain:,.0f}/s, self-play {ghosts:,.0f}/s, ratio {ghosts / plain:.2f}", flush=True)
        medians[load] = statistics.median(ratios)
        print(f"{load}: median ratio {medians[load]:.2f}", flush=True)
    return 1 if medians["learner"] < BAR else 0


if __name__ == "__main__":
    sys.exit(main())
