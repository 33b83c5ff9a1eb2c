"""A simulator whose agents see random pictures, for benchmarks: `python scripts/bench/pictures.py [--agents 16]`.

84 x 84 pixels of 3 channels in bytes, 4 choices, episodes of 200 decisions that end one after the other. Pictures are
sampled once and reused, so that the simulator costs little beside what is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import numpy as np

from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.simulation import ActionSpec, BehaviorSpec, ObservationSpec, decisions, ends, run

SHAPE = (3, 84, 84)
BEHAVIOR = "Pictures"
SPEC = BehaviorSpec(
    observations=(ObservationSpec(name="eye", shape=SHAPE, dtype="uint8", kind="image"),),
    actions=ActionSpec(discrete=(4,)),
)
LENGTH = 200
_PICTURES = 512


class Pictures:
    """`agents` agents that look at pictures."""

    name = "pictures"

    def __init__(self, agents: int) -> None:
        self._random = np.random.default_rng(1)
        self._pictures = self._random.integers(0, 256, (_PICTURES, *SHAPE), np.uint8)
        self._agents = np.arange(agents)
        self._ages = self._agents * LENGTH // agents

    def behaviors(self) -> Mapping[str, BehaviorSpec]:
        return {BEHAVIOR: SPEC}

    def reset(self, parameters: Mapping[str, float], seed: int | None) -> list[BehaviorReport]:
        return [BehaviorReport(behavior=BEHAVIOR, decisions=decisions(self._agents, [self._look(len(self._agents))]))]

    def step(self, actions: Mapping[str, BehaviorActions]) -> list[BehaviorReport]:
        chosen = actions[BEHAVIOR].discrete[:, 0]
        self._ages += 1
        over = np.flatnonzero(self._ages >= LENGTH)
        self._ages[over] = 0
        rewards = (chosen == 0).astype(np.float32)
        last = None
        if over.size:
            last = ends(over, [self._look(over.size)], rewards=rewards[over])
            rewards[over] = 0
        following = decisions(self._agents, [self._look(len(self._agents))], rewards=rewards)
        return [BehaviorReport(behavior=BEHAVIOR, decisions=following, ends=last)]

    def close(self) -> None:
        """Holds nothing."""

    def _look(self, count: int) -> np.ndarray:
        return self._pictures[self._random.integers(0, _PICTURES, count)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=16)
    run(Pictures(parser.parse_args().agents))
