"""Seconds from the command to the first action of a run: `python scripts/bench/startup.py [--pairs 5]`.

Beside each start it measures `python -c "import torch"`, the least that any trainer needs, in turn with it. It prints
both and their difference: medians, then the least and the most. The run steps one environment with PPO, which notes the
time of its first step, and is stopped then. The machine has to be quiet.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

LIMIT_S: Final = 120.0
ENVIRONMENT: Final = """
import time
from pathlib import Path

import gymnasium

NOTED = Path(__file__).with_name("noted")


class First(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (4,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.low, {}

    def step(self, action):
        if not NOTED.exists():
            NOTED.with_suffix(".new").write_text(repr(time.time()))
            NOTED.with_suffix(".new").rename(NOTED)
        return self.observation_space.low, 0.0, False, False, {}


gymnasium.register("First-v0", First)
"""
CONFIG: Final = """
behaviors: {First: {max_steps: 1000000}}
simulators: [{name: gymnasium, options: {env_id: "first:First-v0"}}]
pipeline: {export: false}
"""


def first_action() -> float:
    """Returns the seconds until a run acts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "first.py").write_text(ENVIRONMENT)
        (folder / "config.yaml").write_text(CONFIG)
        command = [sys.executable, "-m", "sparring", "train", str(folder / "config.yaml"), "--run-id", "run"]
        began = time.time()
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen([*command, "--results-dir", name], stdout=log, stderr=log)
        try:
            while not (folder / "noted").exists():
                if process.poll() is not None or time.time() - began > LIMIT_S:
                    raise SystemExit((folder / "log").read_text())
                time.sleep(0.01)
            return float((folder / "noted").read_text()) - began
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(LIMIT_S)


def importing() -> float:
    """Returns the seconds that importing torch takes."""
    began = time.time()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    first_action()  # fills the caches of the system
    pairs = [(importing(), first_action()) for _ in range(args.pairs)]
    columns = {
        "import torch": [one for one, _ in pairs],
        "first action": [other for _, other in pairs],
        "difference": [other - one for one, other in pairs],
    }
    for name, found in columns.items():
        print(f"{name:12} {statistics.median(found):5.2f} s ({min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    main()
