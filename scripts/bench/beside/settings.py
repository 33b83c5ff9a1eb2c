"""The games of `peers.py` with their settings, which all trainers share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

SHARE: Final = float(os.environ.get("PEERS_SHARE", "1"))
"""Part of the steps of each run, for a trial."""


@dataclass(frozen=True)
class Settings:
    """Settings of PPO for a game.

    Attributes:
        environment: its id, which importing `beside.environments` registers.
        steps: of a run.
        threshold: mean return of 100 episodes that counts as learned.
        shape: of an observation.
        choices: of the discrete action; 0 for continuous ones.
        continuous: number of continuous actions.
        environments: side by side.
        horizon: steps of each environment for an update.
        batch: steps of a minibatch.
        epochs: passes over the data of an update.
        rate: learning rate, constant.
        entropy: weight of the entropy.
        discount: gamma.
        trace: lambda of generalized advantage estimation.
        units: of each of two hidden layers of actor and critic; of the last layer of a network for images.
        images: observations are images.
    """

    environment: str
    steps: int
    threshold: float
    shape: tuple[int, ...]
    choices: int = 0
    continuous: int = 0
    environments: int = 8
    horizon: int = 128
    batch: int = 64
    epochs: int = 6
    rate: float = 1e-3
    entropy: float = 1e-3
    discount: float = 0.99
    trace: float = 0.95
    units: int = 64
    images: bool = False


GAMES: Final = {
    "cartpole": Settings("CartPole-v9", int(150_000 * SHARE), 475.0, (4,), choices=2),
    "single": Settings("Single-v9", int(60_000 * SHARE), 475.0, (4,), choices=2, environments=1, horizon=1024),
    "balance": Settings(
        "Balance-v9", int(300_000 * SHARE), 90.0, (8,), continuous=2, horizon=256, rate=3e-4, units=128
    ),
    "catch": Settings(
        "Catch-v9",
        int(60_000 * SHARE),
        0.9,
        (40, 40, 1),
        choices=3,
        batch=256,
        epochs=4,
        entropy=1e-2,
        units=256,
        images=True,
    ),
}
