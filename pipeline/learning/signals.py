"""What is learned from: a reward per step for each reward signal."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.learning.buffer import Batch
from pipeline.learning.group_buffer import GroupBatch
from pipeline.learning.settings import TrainerSettings
from pipeline.networks.limits import Unsupported


def rewards(signal: str, strength: float, batch: Batch) -> NDArray[np.float32]:
    """[r] rewards of a signal, times its strength.

    The extrinsic signal is the agent's own reward; the group's reward is for algorithms that credit
    a group.
    """
    assert signal == "extrinsic", "refused by refuse_unsupported"
    scaled: NDArray[np.float32] = batch.rewards * np.float32(strength)
    return scaled


def group_rewards(signal: str, strength: float, batch: GroupBatch) -> NDArray[np.float32]:
    """[T] what groups earn of a signal between each time and the next, times its strength.

    The extrinsic signal is the sum of the members' own rewards, and the group's once.
    """
    assert signal == "extrinsic", "refused by refuse_unsupported"
    scaled: NDArray[np.float32] = batch.shared * np.float32(strength)
    return scaled


def refuse_unsupported(settings: TrainerSettings) -> None:
    """Says what no learner can be built for.

    Raises:
        Unsupported: there is such a thing.
    """
    asked: dict[str, Any] = {
        "behavioral_cloning": settings.behavioral_cloning is not None,
    } | {f"reward signal {name}": name != "extrinsic" for name in settings.reward_signals.named()}
    if refused := [name for name, here in asked.items() if here]:
        raise Unsupported(
            got=", ".join(refused),
            expected="the extrinsic reward signal alone",
            remedy="remove these from the behavior's settings",
        )
