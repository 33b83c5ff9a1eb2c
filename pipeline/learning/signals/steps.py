"""This module holds single steps as reward networks read them: observation, action and next observation.

r steps of s segments, one segment after the other; C continuous actions, D branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sparring.pipeline.demonstrations.library import Demonstrations
from sparring.pipeline.networks.actions import LIMIT, action_features, to_environment
from sparring.pipeline.networks.encoders import Encoder, Inputs
from sparring.pipeline.networks.initialization import HIDDEN_GAINS, initialize_weights
from sparring.pipeline.networks.perceptron import unset_linear
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import ActionSpec, Array, BehaviorSpec

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Holds columns of steps.

    Attributes:
        actions: spec of the actions.
        observations: one [n, *shape] per observation: those of the r steps first, then others that follow some of them.
        following: [r] row of the observation after each step.
        continuous: [r, C] as the simulator received them, in [-1, 1].
        discrete: [r, D] chosen index.
        ended: [r] the episode terminated or was interrupted with the step.
        agent_episodes: [r] number of the agent episode.
    """

    actions: ActionSpec
    observations: tuple[Array, ...]
    following: NDArray[np.int64]
    continuous: Floats
    discrete: NDArray[np.int32]
    ended: NDArray[np.bool_]
    agent_episodes: NDArray[np.int64]

    @classmethod
    def of_segments(
        cls,
        actions: ActionSpec,
        lengths_s: Array,
        observations: Sequence[Array],
        next_observations: Sequence[Array],
        continuous: Floats,
        discrete: NDArray[np.int32],
        ended_s: NDArray[np.bool_],
        episodes_s: NDArray[np.int64],
        action_limit: float = LIMIT,
    ) -> Steps:
        """Builds the steps of segments; `continuous` are raw samples, and a segment may have no step at all."""
        rows, stepped = int(lengths_s.sum()), np.flatnonzero(lengths_s)
        last = np.cumsum(lengths_s)[stepped] - 1
        following = np.arange(1, rows + 1)
        following[last] = rows + stepped
        ended = np.zeros(rows, bool)
        ended[last] = ended_s[stepped]
        return cls(
            actions=actions,
            observations=tuple(map(np.concatenate, zip(observations, next_observations, strict=True))),
            following=following,
            continuous=to_environment(continuous, action_limit),
            discrete=discrete,
            ended=ended,
            agent_episodes=np.repeat(episodes_s, lengths_s),
        )

    @classmethod
    def of_demonstrations(cls, actions: ActionSpec, demonstrations: Demonstrations) -> Steps:
        """Builds the steps of demonstrations."""
        rows, last = len(demonstrations.ended), np.flatnonzero(demonstrations.ended)
        following = np.arange(1, rows + 1)
        following[last] = rows + np.arange(len(last))
        both = zip(demonstrations.observations, demonstrations.next_observations, strict=True)
        return cls(
            actions=actions,
            observations=tuple(np.concatenate([column, after[last]]) for column, after in both),
            following=following,
            continuous=demonstrations.continuous,
            discrete=demonstrations.discrete,
            ended=demonstrations.ended,
            agent_episodes=demonstrations.episode.astype(np.int64),
        )

    def __len__(self) -> int:
        return len(self.ended)

    @cached_property
    def done(self) -> Tensor:
        """Returns [r, A] the action features: continuous actions, then one 1 for each branch."""
        return torch.from_numpy(action_features(self.actions, self.continuous, self.discrete))

    @cached_property
    def flags(self) -> Tensor:
        """Returns [r, 1] 1 if the episode ended with the step."""
        return torch.from_numpy(self.ended.astype(np.float32)[:, None])


class Features(nn.Module):
    """Combines encoder and layers of a reward network, which can be differentiated twice.

    Goals count as vectors, and there is no memory. Other inputs may be added to the observations.

    Args:
        spec: observations and actions of the behavior.
        settings: the network's settings.
        more: number of other inputs.
        generator: random source of the initial weights.

    Attributes:
        size: number of features.
    """

    def __init__(
        self, spec: BehaviorSpec, settings: NetworkSettings, more: int, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        plain = {"memory": None, "previous_action": False, "goal_conditioning_type": "none"}
        self.encoder = Encoder(spec, settings.model_copy(update=plain), generator)
        units = settings.hidden_units
        self.layers = dense([self.encoder.size + more, *[units] * settings.num_layers], settings, generator)
        self.size = units

    def forward(self, inputs: Inputs, more: Tensor | None = None) -> Tensor:
        """Returns features [B, size] of observations from `encoder.prepare`."""
        encoded = self.encoder(inputs)
        features: Tensor = self.layers(encoded if more is None else torch.cat((encoded, more), 1))
        return features


def dense(sizes: Sequence[int], settings: NetworkSettings, generator: torch.Generator | None) -> nn.Sequential:
    """Builds layers of hidden units; `sizes` begins with the number of inputs."""
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layer = unset_linear(before, after)
        initialize_weights(layer, HIDDEN_GAINS[settings.initialization], generator, settings.initialization)
        layers += [layer, nn.Tanh() if settings.activation == "tanh" else nn.SiLU()]
    return nn.Sequential(*layers)


def linear(before: int, after: int, gain: float, generator: torch.Generator | None) -> nn.Linear:
    """Builds a linear layer: weights of variance gain^2 / inputs, biases 0."""
    layer = unset_linear(before, after)
    initialize_weights(layer, gain, generator)
    return layer


def select_rows(inputs: Inputs, rows: Tensor) -> Inputs:
    """Returns some rows of each column."""
    return tuple(column.index_select(0, rows) for column in inputs)
