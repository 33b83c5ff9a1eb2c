"""Single steps, as reward networks are shown them: what was seen, what was done, and what followed.

r steps of s segments, one segment after the other; C continuous actions, D branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sparring.pipeline.demonstrations.library import Demonstrations
from sparring.pipeline.networks.actions import LIMIT, shown_features, to_environment
from sparring.pipeline.networks.encoders import Encoder, Inputs
from sparring.pipeline.networks.initialization import HIDDEN_GAINS, initialize_weights
from sparring.pipeline.networks.perceptron import unset_linear
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Columns of steps.

    Attributes:
        actions: spec of the actions.
        observations: one [n, *shape] per observation: of the r steps first, then others that followed some of them.
        following: [r] which of these rows followed each step.
        continuous: [r, C] as the simulator got them, in [-1, 1].
        discrete: [r, D] chosen index.
        ended: [r] the episode ended with the step, or was cut.
        agent_episodes: [r] number of the agent's life.
    """

    actions: ActionSpec
    observations: tuple[NDArray[Any], ...]
    following: NDArray[np.int64]
    continuous: Floats
    discrete: NDArray[np.int32]
    ended: NDArray[np.bool_]
    agent_episodes: NDArray[np.int64]

    @classmethod
    def of_segments(
        cls,
        actions: ActionSpec,
        lengths_s: NDArray[Any],
        observations: Sequence[NDArray[Any]],
        next_observations: Sequence[NDArray[Any]],
        continuous: Floats,
        discrete: NDArray[np.int32],
        ended_s: NDArray[np.bool_],
        lives_s: NDArray[np.int64],
        action_limit: float = LIMIT,
    ) -> Steps:
        """Those of segments: `continuous` are raw samples. A segment may have no step at all."""
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
            agent_episodes=np.repeat(lives_s, lengths_s),
        )

    @classmethod
    def of_demonstrations(cls, actions: ActionSpec, shown: Demonstrations) -> Steps:
        """Those of demonstrations."""
        rows, last = len(shown.ended), np.flatnonzero(shown.ended)
        following = np.arange(1, rows + 1)
        following[last] = rows + np.arange(len(last))
        both = zip(shown.observations, shown.next_observations, strict=True)
        return cls(
            actions=actions,
            observations=tuple(np.concatenate([column, after[last]]) for column, after in both),
            following=following,
            continuous=shown.continuous,
            discrete=shown.discrete,
            ended=shown.ended,
            agent_episodes=shown.episode.astype(np.int64),
        )

    def __len__(self) -> int:
        return len(self.ended)

    @cached_property
    def done(self) -> Tensor:
        """[r, A] What was done: continuous actions, then one 1 for each branch."""
        return torch.from_numpy(shown_features(self.actions, self.continuous, self.discrete))

    @cached_property
    def flags(self) -> Tensor:
        """[r, 1] 1 where the episode ended."""
        return torch.from_numpy(self.ended.astype(np.float32)[:, None])


class Features(nn.Module):
    """Encoder and layers of a reward network, which can be derived twice.

    Goals count as vectors, and nothing is remembered. More inputs may stand beside the observations.

    Args:
        spec: of the behavior.
        settings: of the network.
        more: inputs beside the observations.
        generator: random source of the initial weights.

    Attributes:
        size: features.
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
        """Features [B, size] of observations that `encoder.prepare` has seen."""
        encoded = self.encoder(inputs)
        features: Tensor = self.layers(encoded if more is None else torch.cat((encoded, more), 1))
        return features


def dense(sizes: Sequence[int], settings: NetworkSettings, generator: torch.Generator | None) -> nn.Sequential:
    """Layers of hidden units of these sizes, of which the first is that of the inputs."""
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layer = unset_linear(before, after)
        initialize_weights(layer, HIDDEN_GAINS[settings.initialization], generator, settings.initialization)
        layers += [layer, nn.Tanh() if settings.activation == "tanh" else nn.SiLU()]
    return nn.Sequential(*layers)


def linear(before: int, after: int, gain: float, generator: torch.Generator | None) -> nn.Linear:
    """A linear layer: weights of variance gain^2 / inputs, biases 0."""
    layer = unset_linear(before, after)
    initialize_weights(layer, gain, generator)
    return layer


def some(inputs: Inputs, rows: Tensor) -> Inputs:
    """Rows of each column."""
    return tuple(column.index_select(0, rows) for column in inputs)
