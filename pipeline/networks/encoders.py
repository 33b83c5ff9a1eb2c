# ruff: noqa: N803 (names end in their shape)
"""Encoders map the observations of a behavior to the input of a body; each kind of observation has its own encoder.

An encoder has two parts. `prepare` is the part that no gradient flows through (joining, normalization): a learner calls
it once per update for all rows. `forward` is the part that trains, called per minibatch. Vectors are joined into one
row of features and have no trained part; images, entities and goals are passed on separately and unchanged. The agent's
previous action, if enabled, adds more features. `frozen` combines both parts in one plain function, for acting with
fixed weights.

B rows, F features, P features of the previous action.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from sparring.pipeline.networks.entities import EntityEncoder
from sparring.pipeline.networks.goals import ConditionedLayers
from sparring.pipeline.networks.images import ImageEncoder
from sparring.pipeline.networks.initialization import HIDDEN_GAINS
from sparring.pipeline.networks.limits import refuse_unsupported
from sparring.pipeline.networks.normalizer import Normalizer
from sparring.pipeline.networks.perceptron import Perceptron
from sparring.pipeline.networks.recurrent import Recurrent
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import Array, BehaviorSpec

Inputs = tuple[Tensor, ...]
"""[B, F] of all vectors, then one tensor for each other observation in the order of the spec."""

Encode = Callable[[Sequence[Array], Tensor | None], Tensor]
"""Maps one [B, *shape] array per observation, and previous actions [B, P] if enabled, to a body's input, [B, F]."""

Body = Perceptron | ConditionedLayers | Recurrent


class Encoder(nn.Module):
    """Encodes all observations of a behavior.

    Features are, in this order: vectors (normalized if enabled), the previous action, `hidden_units` for each image, as
    many for all lists of entities together, and goals. Goals count as vectors unless they condition the body.

    Args:
        spec: observations and actions of the behavior.
        settings: the network's settings.
        generator: random source of the initial weights; unneeded if weights are loaded afterwards.

    Raises:
        Unsupported: no encoder can be built for an observation or a setting.
    """

    def __init__(self, spec: BehaviorSpec, settings: NetworkSettings, generator: torch.Generator | None = None) -> None:
        super().__init__()
        refuse_unsupported(spec, settings)
        vectors = {"vector", "goal"} if settings.goal_conditioning_type == "none" else {"vector"}
        self._vectors = [at for at, one in enumerate(spec.observations) if one.kind in vectors]
        others = [(at, one) for at, one in enumerate(spec.observations) if at not in self._vectors]
        self._others = [at for at, _ in others]
        self._images, self._entities, self._goals = (
            [place for place, (_, one) in enumerate(others, 1) if one.kind == kind]
            for kind in ("image", "entities", "goal")
        )
        size = sum(spec.observations[at].shape[0] for at in self._vectors)
        self.normalizer = Normalizer(size) if settings.normalize and size else None
        self.previous = settings.previous_size(spec.actions)
        size += self.previous
        units = settings.hidden_units
        self.images = nn.ModuleList(
            ImageEncoder(one.shape, settings.vis_encode_type, units, generator)
            for _, one in others
            if one.kind == "image"
        )
        size += units * len(self._images)
        self.entities = None
        if self._entities:
            shapes = tuple(one.shape[1] for _, one in others if one.kind == "entities")
            self.entities = EntityEncoder(shapes, size, units, generator)
            size += units
        self.goal = sum(one.shape[0] for _, one in others if one.kind == "goal")
        self.size = size + self.goal

    @property
    def plain(self) -> bool:
        """Returns whether all observations are vectors, so that nothing is trained."""
        return not self._others

    def join(self, observations: Sequence[Array]) -> Inputs:
        """Returns tensors of one [B, *shape] array per observation; those of vectors are always copied."""
        if self.plain:
            return (torch.from_numpy(np.concatenate(observations, axis=1)),)
        vectors = [observations[at] for at in self._vectors]
        joined = np.concatenate(vectors, axis=1) if vectors else np.empty((len(observations[0]), 0), np.float32)
        others = (np.require(observations[at], requirements=["C", "W"]) for at in self._others)
        return (torch.from_numpy(joined), *map(torch.from_numpy, others))

    def prepare(self, joined: Inputs, previous_BP: Tensor | None = None) -> Inputs:
        """Applies the part without gradient; previous actions are required if they are enabled."""
        vectors, *others = joined
        if self.normalizer is not None:
            vectors = self.normalizer(vectors)
        return (vectors if previous_BP is None else torch.cat((vectors, previous_BP), 1), *others)

    def update(self, joined: Inputs) -> None:
        """Adds rows to the running statistics; called after an update's last minibatch, never during it."""
        if self.normalizer is not None:
            self.normalizer.update(joined[0])

    def forward(self, prepared: Inputs) -> Tensor:
        """Applies the trained part, [B, F]; vectors have none."""
        if self.plain:
            return prepared[0]
        features = [prepared[0]]
        features += [encode(prepared[at]) for encode, at in zip(self.images, self._images, strict=True)]
        if self.entities is not None:
            features.append(self.entities([prepared[at] for at in self._entities], torch.cat(features, 1)))
        features += [prepared[at] for at in self._goals]
        return torch.cat(features, 1)

    def frozen(self) -> Encode:
        """Returns `join`, `prepare` and `forward` as one plain function, on a copy of the current weights."""
        if not self.plain or self.previous:
            encoder = copy.deepcopy(self).requires_grad_(False)
            return lambda observations, previous: encoder(encoder.prepare(encoder.join(observations), previous))
        if self.normalizer is None:
            return lambda observations, _: torch.from_numpy(_joined(observations))
        normalize = self.normalizer.frozen()
        return lambda observations, _: torch.from_numpy(normalize(_joined(observations)))

    def body(self, settings: NetworkSettings, output_gains: Sequence[float], generator: torch.Generator) -> Body:
        """Returns the body that reads these features, with its outputs; a recurrent one if the settings enable it.

        Args:
            settings: the network's settings.
            output_gains: factors on the initial weights of each output.
            generator: random source of the initial weights.
        """
        width, features = settings.hidden_units, self.size - self.goal
        units = [width] * settings.num_layers
        kind = settings.activation, settings.initialization
        if settings.memory is None:
            if self.goal:
                return ConditionedLayers(features, self.goal, units, output_gains, generator, *kind)
            return Perceptron(features, units, output_gains, generator, *kind)
        trunk = (
            ConditionedLayers(features, self.goal, units, None, generator, *kind)
            if self.goal
            else Perceptron(features, units[1:], [HIDDEN_GAINS[kind[1]]] * width, generator, *kind)
        )
        return Recurrent(trunk, width, settings.memory.memory_size, output_gains, generator, kind[1])


def _joined(observations: Sequence[Array]) -> Array:
    return np.concatenate(observations, axis=1)
