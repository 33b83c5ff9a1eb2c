"""Curves from a player's record: reward over steps, steps and seconds to a threshold, steps per second."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
EVERY: Final = 1_000
"""Steps between two points of the moving mean."""


@dataclass(frozen=True)
class Curve:
    """The curve of one run, with a point every `EVERY` steps of the game.

    Attributes:
        steps: [n].
        seconds: [n] since the first step.
        rewards: [n] mean return of the episodes that ended within the window before; NaN before the first.
    """

    steps: Array
    seconds: Array
    rewards: Array

    def at(self, steps: float) -> float:
        """Returns the reward after a number of steps."""
        return float(np.interp(steps, self.steps, self.rewards))

    def reaches(self, threshold: float) -> tuple[float, float]:
        """Returns steps and seconds to a reward; infinite where it is not reached."""
        found = (self.rewards >= threshold).nonzero()[0]
        return (float(self.steps[found[0]]), float(self.seconds[found[0]])) if found.size else (np.inf, np.inf)

    def steps_per_s(self) -> float:
        """Steps per second from the first step to the last."""
        return float(self.steps[-1] / self.seconds[-1])


def read(path: Path, most: int, window: int) -> Curve:
    """Reads the curve of the first behavior of a record.

    Args:
        path: of `record.jsonl`.
        most: steps that count; a trainer may collect some more.
        window: of the moving mean, in steps.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    times = np.array([(line["step"], line["seconds"]) for line in lines], np.float64)
    ends = np.array([(line["step"], *line["returns"].values()) for line in lines if "returns" in line], np.float64)
    steps = np.arange(EVERY, min(most, times[-1, 0]) + 1, EVERY, dtype=np.float64)
    rewards = np.full(len(steps), np.nan)
    for at, step in enumerate(steps):
        recent = (ends[:, 0] > step - window) & (ends[:, 0] <= step)
        if recent.any():
            rewards[at] = ends[recent, 1].mean()
        elif at:
            rewards[at] = rewards[at - 1]
    return Curve(steps, np.interp(steps, times[:, 0], times[:, 1]), rewards)
