"""Updates by 1 rank and by 2, each with one thread.

    python scripts/bench/ranks.py [CASE ...]

Prints the wall time of an update by 1 rank, and how many times faster 2 are (2.0 would be ideal): minimum, median and
maximum over five turns, in which the two follow each other. It needs two free cores.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

import pictures
from learner import VECTORS, Case, segments_of, settings_of

from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.networks.device import CPU
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.services.stages.ranks import lead

CASES = {
    "128x2, batch 256": Case(batch=256, buffer=8192, network=VECTORS),
    "128x2, batch 4,096": Case(batch=4096, buffer=65_536, network=VECTORS),
    "512x3, batch 2,048": Case(batch=2048, buffer=20_480, network=NetworkSettings(hidden_units=512, num_layers=3)),
    "images, batch 64": Case(
        batch=64,
        buffer=512,
        spec=pictures.SPEC,
        network=NetworkSettings(hidden_units=128, num_layers=1, vis_encode_type="nature_cnn"),
    ),
}
TURNS = 5


def measure(case: Case) -> tuple[float, list[float]]:
    """Returns the median seconds of an update by 1 rank, and the ratios of both in each turn."""
    identity = "Bench", case.spec, settings_of(case), 1
    alone, several = Learner(*identity), lead(*identity, count=2, timeout_s=60.0, device=CPU)
    record = segments_of(alone, case.spec, case.buffer, case.horizon, np.random.default_rng(1))
    taken = []
    try:
        for _ in range(TURNS + 1):
            seconds = []
            for learner in (alone, several):
                began = time.perf_counter()
                learner.add(record)
                learner.update()
                seconds.append(time.perf_counter() - began)
            taken.append(seconds)
    finally:
        several.end()
    return statistics.median(one for one, _ in taken[1:]), sorted(one / two for one, two in taken[1:])


def main() -> None:
    """Measures the named cases, or all."""
    torch.set_num_threads(1)
    for name, case in CASES.items():
        if not sys.argv[1:] or name in sys.argv[1:]:
            seconds, ratios = measure(case)
            least, median, most = ratios[0], statistics.median(ratios), ratios[-1]
            print(f"{name:20}  {seconds * 1e3:8.0f} ms   2 ranks: {least:.2f} {median:.2f} {most:.2f} times as fast")


if __name__ == "__main__":
    main()
