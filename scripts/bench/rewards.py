"""The cost of reward networks for a learner: `python scripts/bench/rewards.py [--units 512] [--network 128]`.

Updates of a PPO learner on data in memory, by itself and with each reward signal, in turn, so that other load on
the machine slows all of them down. Defaults are those of a usual imitation run: 172 observations, 5 choices, batch
128, buffer 2,048, 3 epochs, actor and critic of 2 layers of 512 units, reward networks of 2 layers of 128. Prints
milliseconds for each minibatch (CPU time of the thread, median), and the ratio to PPO alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from learner import segments_of

from sparring.pipeline.demonstrations.episodes import SUFFIX, Recording, encode
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.settings import (
    BehavioralCloningSettings,
    CuriositySettings,
    GailSettings,
    Hyperparameters,
    RewardSignals,
    RndSettings,
    TrainerSettings,
)
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

SPEC: Final = BehaviorSpec(
    observations=(ObservationSpec(name="state", shape=(172,)),), actions=ActionSpec(discrete=(5,))
)
BATCH: Final = 128
BUFFER: Final = 2048
EPOCHS: Final = 3
SEGMENT: Final = 128


def demonstrations(folder: Path) -> str:
    """Writes a file of 20 random episodes of 100 steps."""
    random, episodes, rows = np.random.default_rng(0), 20, 2000
    columns: dict[str, Any] = {
        "lengths": np.full(episodes, rows // episodes, np.int32),
        "agents": np.arange(episodes, dtype=np.int64),
        "teams": np.zeros(episodes, np.int32),
        "simulators": np.zeros(episodes, np.int32),
        "groups": np.zeros(episodes, np.int64),
        "terminated": np.ones(episodes, bool),
        "observation.0": random.standard_normal((rows, 172), np.float32),
        "final_observation.0": random.standard_normal((episodes, 172), np.float32),
        "continuous": np.zeros((rows, 0), np.float32),
        "discrete": random.integers(0, 5, (rows, 1)).astype(np.int32),
        "rewards": np.zeros(rows, np.float32),
        "group_rewards": np.zeros(rows, np.float32),
    }
    path = folder / f"bench{SUFFIX}"
    path.write_bytes(encode(Recording(behavior="Test", spec=SPEC, columns=columns)))
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=512)
    parser.add_argument("--network", type=int, default=128)
    parser.add_argument("--updates", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, small = demonstrations(Path(folder)), NetworkSettings(hidden_units=args.network)
        gail = GailSettings(demo_path=path, network_settings=small)
        variants: dict[str, dict[str, Any]] = {
            "ppo": {},
            "gail": {"gail": gail},
            "gail, actions": {"gail": gail.model_copy(update={"use_actions": True})},
            "vail": {"gail": gail.model_copy(update={"use_vail": True})},
            "curiosity": {"curiosity": CuriositySettings(network_settings=small)},
            "rnd": {"rnd": RndSettings(network_settings=small)},
            "cloning": {},
        }
        learners = {}
        for name, signals in variants.items():
            settings = TrainerSettings(
                hyperparameters=Hyperparameters(batch_size=BATCH, buffer_size=BUFFER, num_epoch=EPOCHS),
                network_settings=NetworkSettings(hidden_units=args.units),
                reward_signals=RewardSignals.model_validate({"extrinsic": {}, **signals}),
                behavioral_cloning=BehavioralCloningSettings(demo_path=path) if name == "cloning" else None,
            )
            learners[name] = Learner("Test", SPEC, settings, 1)
        times: dict[str, list[float]] = {name: [] for name in learners}
        random = np.random.default_rng(1)
        for _ in range(args.updates + 1):
            for name, learner in learners.items():
                learner.add(segments_of(learner, SPEC, BUFFER, SEGMENT, random))
                before = time.thread_time()
                learner.update()
                times[name].append(time.thread_time() - before)
    minibatches = BUFFER // BATCH * EPOCHS
    seconds = {name: statistics.median(taken[1:]) for name, taken in times.items()}
    for name, value in seconds.items():
        print(f"{name:14} {value / minibatches * 1e3:6.2f} ms, {value / seconds['ppo']:.2f} x ppo")


if __name__ == "__main__":
    main()
