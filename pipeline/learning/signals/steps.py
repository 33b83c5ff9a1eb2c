# ruff: noqa: N803 (names end in their shape)
"""This module holds what all reward networks are made of: the steps that they read, their layers and their training.

B rows of a minibatch, r steps of s segments, one segment after the other; A action features.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from sparring.pipeline.learning.buffer import Batch
from sparring.pipeline.learning.optimizer import Adam
from sparring.pipeline.networks.arrays import previous_features
from sparring.pipeline.networks.encoders import Encoder, Inputs
from sparring.pipeline.networks.perceptron import hidden_layer
from sparring.pipeline.networks.settings import ACTION_LIMIT, NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, Floats

_ROWS_AT_ONCE: Final = 4096


class Steps:
    """Holds the steps of a batch as reward networks read them.

    Attributes:
        observations: one [n, *shape] per observation: those of the r steps first, then those that follow the segments.
        following: [r] row of the observation after each step.
        done: [r, A] action features: continuous actions as the simulator received them, then one 1 for each branch.
        ended: [r] the episode terminated or was interrupted with the step.
        agent_episodes: [r] number of the agent episode.

    Args:
        batch: segments, of which some may have no step at all.
        actions: spec of the actions.
        action_limit: limit of the raw samples.
    """

    def __init__(self, batch: Batch, actions: ActionSpec, action_limit: float = ACTION_LIMIT) -> None:
        stepped = np.flatnonzero(batch.lengths)
        last = np.cumsum(batch.lengths)[stepped] - 1
        self.observations = tuple(map(np.concatenate, zip(batch.observations, batch.next_observations, strict=True)))
        self.following = np.arange(1, batch.steps + 1)
        self.following[last] = batch.steps + stepped
        self.done = torch.from_numpy(previous_features(actions, batch.continuous, batch.discrete, action_limit))
        self.ended = np.zeros(batch.steps, np.bool_)
        self.ended[last] = batch.ended[stepped]
        self.agent_episodes = np.repeat(batch.agent_episodes, batch.lengths)

    def __len__(self) -> int:
        return len(self.ended)


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

    def __init__(self, spec: BehaviorSpec, settings: NetworkSettings, more: int, generator: torch.Generator) -> None:
        super().__init__()
        plain = {"memory": None, "previous_action": False, "goal_conditioning_type": "none"}
        self.encoder = Encoder(spec, settings.model_copy(update=plain), generator)
        self.size = settings.hidden_units
        self.layers = dense([self.encoder.size + more, *[self.size] * settings.num_layers], settings, generator)

    def forward(self, inputs: Inputs, more: Tensor | None = None) -> Tensor:
        """Returns features [B, size] of observations from `encoder.prepare`."""
        encoded = self.encoder(inputs)
        features: Tensor = self.layers(encoded if more is None else torch.cat((encoded, more), 1))
        return features


def dense(sizes: Sequence[int], settings: NetworkSettings, generator: torch.Generator) -> nn.Sequential:
    """Builds layers of hidden units; `sizes` begins with the number of inputs."""
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers.append(hidden_layer(before, after, settings, generator))
        layers.append(nn.Tanh() if settings.activation == "tanh" else nn.SiLU())
    return nn.Sequential(*layers)


def select_rows(inputs: Inputs, rows: Tensor) -> Inputs:
    """Returns some rows of each column."""
    return tuple(column.index_select(0, rows) for column in inputs)


def blocks(rows: int) -> Iterator[Tensor]:
    """Yields the numbers of rows, as many at a time as networks evaluate together."""
    return iter(torch.split(torch.arange(rows), _ROWS_AT_ONCE))


class RewardNetwork(ABC):
    """Computes a reward signal with networks of its own.

    Adam takes one step on each minibatch of the policy, with constant learning rate (ML-Agents).

    Attributes:
        module: all weights that a checkpoint saves.
        optimizer: changes the trained weights.

    Args:
        module: the networks.
        trained: the part of them that the optimizer changes.
        learning_rate: of the optimizer.
        device: device of the networks.
    """

    def __init__(self, module: nn.Module, trained: nn.Module, learning_rate: float, device: torch.device) -> None:
        self.module = module
        self.optimizer = Adam(trained, learning_rate, device)
        self._measures: list[dict[str, Tensor]] = []

    @abstractmethod
    def begin(self, steps: Steps) -> Floats:
        """Starts a batch and returns its rewards [r]; `learn` then trains on its minibatches."""

    @abstractmethod
    def learn(self, at_B: Tensor) -> None:
        """Takes one optimizer step on the rows `at_B` of the batch; the row numbers are on the CPU."""

    def terminal_bootstrap_fraction(self, ends: int, steps: int) -> float:
        """Returns the fraction, 0 to 1, of the mean value of episode starts that bootstraps a terminated episode.

        By default it is 1: novelty does not depend on the episode, so the next one counts as the rest of this one.

        Args:
            ends: number of terminated episodes in the batch; interrupted ones do not count.
            steps: number of steps in the batch.
        """
        del ends, steps
        return 1.0

    def statistics(self) -> dict[str, float]:
        """Ends the batch and returns the means of its measures since `begin`, by ML-Agents' names."""
        names = self._measures[0] if self._measures else ()
        return {name: torch.stack([one[name] for one in self._measures]).mean().item() for name in names}

    def take_step(self, loss: Tensor, measures: dict[str, Tensor]) -> bool:
        """Takes one optimizer step and stores its measures; returns False if it was skipped."""
        if not self.optimizer.step((loss,), (torch.ones_like(loss),)):
            return False
        self._measures.append(measures)
        return True
