"""This module computes the hyperparameters that change over training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sparring.pipeline.learning.settings import Schedule, TrainerSettings

LEARNING_RATE_END: Final = 1e-10
EPSILON_END: Final = 0.1
BETA_END: Final = 1e-5


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Holds learning rate, clip range and entropy weight of one update."""

    learning_rate: float
    epsilon: float
    beta: float

    @classmethod
    def at(cls, settings: TrainerSettings, trained: int) -> Coefficients:
        """Returns the coefficients after `trained` steps of `max_steps`."""
        hyper, progress = settings.hyperparameters, trained / settings.max_steps
        return cls(
            learning_rate=scheduled(hyper.learning_rate_schedule, hyper.learning_rate, LEARNING_RATE_END, progress),
            epsilon=scheduled(hyper.epsilon_schedule, hyper.epsilon, EPSILON_END, progress),
            beta=scheduled(hyper.beta_schedule, hyper.beta, BETA_END, progress),
        )


def scheduled(schedule: Schedule, start: float, end: float, progress: float) -> float:
    """Returns `start`, or under a linear schedule the line from `start` to `end` at `progress` (0 to 1, beyond: `end`).

    A start below `end` stays: a schedule never rises.
    """
    if schedule == "constant" or start <= end:
        return start
    return end + (start - end) * max(0.0, 1.0 - progress)
