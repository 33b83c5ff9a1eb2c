# ruff: noqa: N803, N806 (names end in their shape)
"""Encoders map the observations of a behavior to the input of a body; each kind of observation has its own encoder.

An encoder has two parts. `prepare` is the part that no gradient flows through (joining, normalization): a learner calls
it once per update for all rows. `forward` is the part that trains, called per minibatch. Vectors are joined into one
row of features and have no trained part; images, entities and goals are passed on separately and unchanged. The agent's
previous action, if enabled, adds more features. `frozen` combines both parts in one plain function, for acting with
fixed weights.

B rows, F features, P features of the previous action, C channels, H x W pixels, U features of an image.
"""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from sparring.pipeline.networks.device import CPU, over
from sparring.pipeline.networks.layers import EntityEncoder, Recurrent, Trunk
from sparring.pipeline.networks.perceptron import HIDDEN_GAINS, ConditionedLayers, Perceptron, initialize_weights
from sparring.pipeline.networks.settings import NetworkSettings, refuse_unsupported
from sparring.pipeline.specs import Array, BehaviorSpec

Inputs = tuple[Tensor, ...]
"""[B, F] of all vectors, then one tensor for each other observation in the order of the spec."""

Encode = Callable[[Sequence[Array], Tensor | None], Tensor]
"""Maps one [B, *shape] array per observation, and previous actions [B, P] if enabled, to a body's input, [B, F]."""

Body = Trunk | Recurrent

CLIP: Final = 5.0
"""Largest absolute value after normalization."""

_SLOPE: Final = 0.01
_IMAGE_GAIN: Final = math.sqrt(2 / (1 + _SLOPE**2))

_CONVOLUTIONS: Final[dict[str, tuple[tuple[int, int, int], ...]]] = {
    "simple": ((16, 8, 4), (32, 4, 2)),
    "nature_cnn": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
    "resnet": ((16, 3, 2), (32, 3, 2), (32, 3, 2)),
    "match3": ((35, 3, 1), (144, 3, 1)),
    "fully_connected": (),
}
"""Channels, kernel size and stride of each convolution, for `resnet` of each pooling after one of 3 x 3."""


class Normalizer(nn.Module):
    """Subtracts a running mean, divides by a running standard deviation, clips to +-5.

    The statistics start as one observation of mean 0 and variance 1, so that the variance is never 0. The three buffers
    belong to the weights. Only `update` changes them: an update trains on the same numbers that acting used.

    Args:
        size: number of features.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("variance", torch.ones(size))
        self.register_buffer("count", torch.ones((), dtype=torch.int64))

    def forward(self, rows_BF: Tensor) -> Tensor:
        """Returns normalized rows [B, F]."""
        return rows_BF.sub(self.mean).div_(self.variance.sqrt()).clamp_(-CLIP, CLIP)

    def frozen(self) -> Callable[[Array], Array]:
        """Returns a NumPy function, whose calls cost less, that normalizes rows by the current statistics in place."""
        return partial(_normalize_few, self.mean.numpy().copy(), self.variance.sqrt().numpy())

    @torch.no_grad()
    def update(self, rows_BF: Tensor) -> None:
        """Merges the statistics of `rows_BF` into the running ones (Chan et al. 1979), in float64.

        Rows that hold a non-finite number change nothing.
        """
        rows = rows_BF.double()
        n, seen = len(rows), self.count.item()
        total = seen + n
        mean_F = rows.mean(0)
        shift_F = mean_F - self.mean
        squares_F = (
            rows.sub_(mean_F).square_().sum(0) + seen * self.variance.double() + shift_F.square() * (seen * n / total)
        )
        if n and bool(torch.isfinite(squares_F).all()):
            self.mean += shift_F * (n / total)
            self.variance.copy_(squares_F / total)
            self.count += n


def _normalize_few(mean_F: Array, deviation_F: Array, rows_BF: Array) -> Array:
    rows_BF -= mean_F
    rows_BF /= deviation_F
    np.maximum(rows_BF, -CLIP, out=rows_BF)
    np.minimum(rows_BF, CLIP, out=rows_BF)
    return rows_BF


class ImageEncoder(nn.Module):
    """Encodes one camera's image by convolutions and one dense layer.

    `simple` and `match3` are ML-Agents'; `nature_cnn` is that of Mnih et al. 2015 (doi 10.1038/nature14236, "Model
    architecture"), `resnet` that of Espeholt et al. 2018 (arXiv 1802.01561, figure 3, without the LSTM), with the
    pooling unpadded as in ML-Agents; `fully_connected` has no convolution. Bytes 0..255 are scaled to 0..1 only here,
    so that an image takes one byte per pixel and channel everywhere else.

    Args:
        shape: channels, height, width.
        kind: name of the architecture.
        units: U.
        generator: random source of the initial weights.
    """

    def __init__(self, shape: tuple[int, ...], kind: str, units: int, generator: torch.Generator) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(*_convolutions(shape[0], kind), nn.Flatten())
        with torch.no_grad():
            flat = self.convolutions(torch.zeros(1, *shape)).shape[1]
        self.dense = nn.Linear(flat, units)
        self.activation = nn.LeakyReLU(_SLOPE)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                initialize_weights(module, _IMAGE_GAIN, generator)
        for module in self.modules():
            if isinstance(module, _Residual):  # otherwise each block would double the variance of its input
                nn.init.zeros_(module.last.weight)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Returns features [B, U] of bytes or of floats 0..1."""
        pixels_BCHW = image_BCHW.float().div_(255) if image_BCHW.dtype == torch.uint8 else image_BCHW
        features_BU: Tensor = self.activation(self.dense(self.convolutions(pixels_BCHW)))
        return features_BU


class _Residual(nn.Module):
    """Adds two convolutions to their input; initially it is the identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.last = nn.Conv2d(channels, channels, 3, padding=1)
        self.layers = nn.Sequential(nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), self.last)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        sum_BCHW: Tensor = image_BCHW + self.layers(image_BCHW)
        return sum_BCHW


def _convolutions(channels: int, kind: str) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for width, kernel, stride in _CONVOLUTIONS[kind]:
        if kind == "resnet":
            pool = nn.MaxPool2d(kernel, stride)
            layers += [nn.Conv2d(channels, width, 3, padding=1), pool, _Residual(width), _Residual(width)]
        else:
            layers += [nn.Conv2d(channels, width, kernel, stride), nn.LeakyReLU(_SLOPE)]
        channels = width
    return [*layers, nn.ReLU()] if kind == "resnet" else layers


class Encoder(nn.Module):
    """Encodes all observations of a behavior.

    Features are, in this order: vectors (normalized if enabled), the previous action, `hidden_units` for each image and
    each other observation with an encoder of its own, as many for all lists of entities together, and goals. Goals
    count as vectors unless they condition the body.

    Args:
        spec: observations and actions of the behavior.
        settings: the network's settings.
        generator: random source of the initial weights.

    Attributes:
        kinds: of each observation: `own` for one with an encoder of its own, as images have, else `vector`, `entities`
            or `goal`.
        vectors: places in the spec of the observations that are joined and normalized.
        others: places of all others.
        plain: all observations are vectors, so that nothing is trained.
        previous: P; 0 if the network does not read its previous action.
        goal: features of the goals that condition the body.
        size: F.

    Raises:
        Unsupported: no encoder can be built for an observation or a setting.
    """

    def __init__(self, spec: BehaviorSpec, settings: NetworkSettings, generator: torch.Generator) -> None:
        super().__init__()
        refuse_unsupported(spec, settings)
        plain_goals = settings.goal_conditioning_type == "none"
        own = [settings.encoder_of(one) for one in spec.observations]
        seen = ["vector" if one.kind == "goal" and plain_goals else one.kind for one in spec.observations]
        self.kinds = tuple("own" if encoder else str(kind) for encoder, kind in zip(own, seen, strict=True))
        kinds = self.kinds
        self.vectors = [at for at, kind in enumerate(kinds) if kind == "vector"]
        self.others = [at for at, kind in enumerate(kinds) if kind != "vector"]
        self.plain = not self.others
        # Places in `Inputs`, after the vectors, and the shapes there.
        self._images, self._entities, self._goals = (
            [place for place, at in enumerate(self.others, 1) if kinds[at] == kind]
            for kind in ("own", "entities", "goal")
        )
        shapes = [(), *(spec.observations[at].shape for at in self.others)]
        size = sum(spec.observations[at].shape[0] for at in self.vectors)
        self.normalizer = Normalizer(size) if settings.normalize and size else None
        self.previous = settings.previous_size(spec.actions)
        units = settings.hidden_units
        self.images = nn.ModuleList(
            encoder.build(one.shape, units, generator)
            for encoder, one in zip(own, spec.observations, strict=True)
            if encoder
        )
        size += self.previous + units * len(self._images)
        self.entities = None
        if self._entities:
            features = tuple(shapes[at][1] for at in self._entities)
            self.entities = EntityEncoder(features, size, units, generator)
            size += units
        self.goal = sum(shapes[at][0] for at in self._goals)
        self.size = size + self.goal

    def join(self, observations: Sequence[Array]) -> Inputs:
        """Returns tensors of one [B, *shape] array per observation; those of vectors are always copied."""
        vectors = [observations[at] for at in self.vectors]
        joined = np.concatenate(vectors, axis=1) if vectors else np.empty((len(observations[0]), 0), np.float32)
        others = (np.require(observations[at], requirements=["C", "W"]) for at in self.others)
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
        return torch.cat([*features, *(prepared[at] for at in self._goals)], 1)

    def frozen(self, device: torch.device = CPU) -> Encode:
        """Returns `join`, `prepare` and `forward` as one plain function, on a copy of the current weights.

        Args:
            device: of the weights, and of what the function returns.
        """
        if not self.plain or self.previous:
            encoder = copy.deepcopy(self).requires_grad_(False)
            return lambda seen, previous: encoder(over(encoder.prepare(encoder.join(seen), previous), device))
        normalize = np.asarray if self.normalizer is None else self.normalizer.frozen()
        return lambda seen, _: over(torch.from_numpy(normalize(np.concatenate(seen, axis=1))), device)

    def body(self, settings: NetworkSettings, output_gains: Sequence[float], generator: torch.Generator) -> Body:
        """Returns the body that reads these features, with its outputs; a recurrent one if the settings enable it.

        Args:
            settings: the network's settings.
            output_gains: factors on the initial weights of each output.
            generator: random source of the initial weights.
        """
        sizes = [self.size - self.goal, *[settings.hidden_units] * settings.num_layers]
        recurrent = settings.memory is not None
        body: Trunk
        if self.goal:
            body = ConditionedLayers(sizes, self.goal, None if recurrent else output_gains, settings, generator)
        elif recurrent:  # its outputs are the sums of the last hidden layer
            hidden = [HIDDEN_GAINS[settings.initialization]] * sizes[-1]
            body = Perceptron(sizes[:-1], hidden, settings, generator)
        else:
            body = Perceptron(sizes, output_gains, settings, generator)
        return Recurrent(body, output_gains, settings, generator) if recurrent else body
