# ruff: noqa: N803 (names end in their shape)
"""From the observations of a behavior to the input of a body: one encoder per kind.

An encoder has two parts. `prepare` is what no gradient flows through (normalisation, joining): a
learner calls it once per update for all rows. `forward` is what trains, called per minibatch.
Vectors and goals are joined into one row of features and have no trained part. `frozen` is both
parts in one plain function, for acting with weights that do not change.

B rows, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipeline.errors import Explained, SettingsError
from pipeline.networks.normalizer import Normalizer
from pipeline.networks.settings import NetworkSettings
from pipeline.specs import BehaviorSpec

Encode = Callable[[Sequence[NDArray[np.float32]]], Tensor]
"""From one [B, size] array per observation to the input of a body, [B, F]."""


class Unsupported(Explained, SettingsError):
    """Something that the settings or a behavior's spec ask for and that can not be built."""


class VectorEncoder(nn.Module):
    """Joins vector and goal observations and normalises them where the settings say so.

    Args:
        spec: of the behavior.
        settings: of the network.

    Raises:
        Unsupported: an observation or a setting that this encoder can not serve.
    """

    def __init__(self, spec: BehaviorSpec, settings: NetworkSettings) -> None:
        super().__init__()
        refuse_unsupported(spec, settings)
        self.size = sum(observation.shape[0] for observation in spec.observations)
        self.normalizer = Normalizer(self.size) if settings.normalize else None

    def join(self, observations: Sequence[NDArray[np.float32]]) -> Tensor:
        """One [B, F] tensor of one [B, size] array per observation; always a copy."""
        return torch.from_numpy(np.concatenate(observations, axis=1))

    def prepare(self, joined_BF: Tensor) -> Tensor:
        """The part without gradient, [B, F]."""
        return joined_BF if self.normalizer is None else self.normalizer(joined_BF)

    def update(self, joined_BF: Tensor) -> None:
        """Takes rows into the running statistics; after an update's last minibatch, never during it."""
        if self.normalizer is not None:
            self.normalizer.update(joined_BF)

    def forward(self, prepared_BF: Tensor) -> Tensor:
        """The trained part, [B, F]: nothing for vectors."""
        return prepared_BF

    def frozen(self) -> Encode:
        """`join`, `prepare` and `forward` as one plain function, of a copy of the present weights."""
        if self.normalizer is None:
            return self.join
        join, normalize = self.join, self.normalizer.frozen()
        return lambda observations: normalize(join(observations))


def refuse_unsupported(spec: BehaviorSpec, settings: NetworkSettings) -> None:
    """Says what of a spec and of settings no network can be built for.

    Raises:
        Unsupported: there is such a thing.
    """
    for observation in spec.observations:
        if observation.kind not in ("vector", "goal"):
            raise Unsupported(
                got=f"observation {observation.name!r} of kind {observation.kind!r}",
                expected="vector and goal observations only",
                remedy="send it as a vector, or leave it out of the behavior's spec",
            )
        if observation.kind == "goal" and settings.goal_conditioning_type == "hyper":
            raise Unsupported(
                got=f"goal observation {observation.name!r} with goal_conditioning_type 'hyper'",
                expected="goal_conditioning_type 'none', which joins goals with the vectors",
                remedy="set network_settings.goal_conditioning_type to none",
            )
    if settings.memory is not None:
        raise Unsupported(
            got="network_settings.memory",
            expected="a network without memory",
            remedy="remove memory, and stack past observations in the simulator if the task needs them",
        )
