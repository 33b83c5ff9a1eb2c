"""SAC's replay and its learner: `python scripts/bench/replay.py [memory] [busy]`.

memory  A million steps of a vector observation are stored and sampled. The files have to take less than 1.2 times the
        bytes of the steps, and the process less than 100 MB of anonymous memory more than before (Linux).
busy    12 pendulums train with `steps_per_update: 1`. The learner has to train for at least 0.9 of the time.

Prints the figures. Exit status 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import yaml

from sparring.pipeline.learning.buffer import Batch
from sparring.pipeline.learning.replay import Replay
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

STEPS: Final = 1_000_000
HORIZON: Final = 64
SPEC: Final = BehaviorSpec(observations=(ObservationSpec(name="state", shape=(24,)),), actions=ActionSpec(continuous=6))
FILES: Final = 1.2
ANONYMOUS_MB: Final = 100.0
BUSY: Final = 0.9


def anonymous_mb() -> float:
    """Returns the anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("RssAnon"))


def segments(count: int) -> Batch:
    """Returns segments of random steps."""
    rows, random = count * HORIZON, np.random.default_rng(count)
    seen, after = (random.standard_normal((size, 24), np.float32) for size in (rows, count))
    zeros = np.zeros(rows, np.float32)
    return Batch(
        lengths=np.full(count, HORIZON, np.int32),
        terminated=np.zeros(count, np.bool_),
        ended=np.zeros(count, np.bool_),
        agent_episodes=np.arange(count),
        next_observations=(after,),
        observations=(seen,),
        continuous=random.standard_normal((rows, 6), np.float32),
        discrete=np.empty((rows, 0), np.int32),
        log_probs=zeros,
        masks=None,
        rewards=zeros,
        group_rewards=zeros,
        versions=np.zeros(rows, np.int64),
    )


def memory(folder: Path) -> Iterator[bool]:
    """Fills a replay and samples from it."""
    some, generator = segments(16), torch.Generator().manual_seed(0)
    before = anonymous_mb()
    replay = Replay(SPEC, STEPS + STEPS // HORIZON + 1, folder=folder / "run" / "replay", keep=True)
    for _ in range(STEPS // some.steps + 1):
        replay.add(some, some.rewards)
    for _ in range(1000):
        replay.sample(256, 1, generator)
    taken = sum(path.stat().st_size for path in (folder / "run" / "replay").iterdir())
    of_steps = STEPS * 4 * (24 + 6 + 1 + 1)  # observation, action, reward, end
    more = anonymous_mb() - before
    print(f"  files {taken / of_steps:.3f} x the bytes of the steps, {more:.1f} MB of anonymous memory", flush=True)
    yield taken < FILES * of_steps
    yield more < ANONYMOUS_MB


def busy(folder: Path) -> Iterator[bool]:
    """Trains, and compares how long the learner trained with how long it waited."""
    behavior: dict[str, Any] = {
        "trainer_type": "sac",
        "hyperparameters": {"batch_size": 256, "steps_per_update": 1},
        "network_settings": {"hidden_units": 256},
        "max_steps": 12_000,
    }
    simulator = {"name": "gymnasium", "areas": 12, "options": {"env_id": "Pendulum-v1", "behavior": "Pendulum"}}
    plain = {"behaviors": {"Pendulum": behavior}, "simulators": [simulator], "pipeline": {"export": False}}
    (folder / "config.yaml").write_text(yaml.safe_dump(plain))
    command = ["train", str(folder / "config.yaml"), "--results-dir", str(folder), "--run-id", "run", "--seed", "1"]
    subprocess.run([sys.executable, "-m", "sparring", *command], stdout=subprocess.DEVNULL, check=True)
    lines = map(json.loads, (folder / "run" / "services.jsonl").read_text().splitlines())
    counted = [line["counters"] for line in lines if line["service"] == "learning-Pendulum"]
    trained, waited = (sum(one.get(name, 0.0) for one in counted) for name in ("update_s", "wait_s"))
    share = trained / (trained + waited)
    print(f"  the learner trained for {share:.3f} of the time", flush=True)
    yield share >= BUSY


PARTS: Final[dict[str, Callable[[Path], Iterator[bool]]]] = {"memory": memory, "busy": busy}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)} (default: all)")
    args = parser.parse_args()
    missed = 0
    for name in args.parts or PARTS:
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            missed += sum(not met for met in PARTS[name](Path(folder)))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
