# ruff: noqa: N803, N806 (names end in their shape)
"""This module encodes images by convolutions and one dense layer.

B rows, C channels, H x W pixels, U features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn

from sparring.pipeline.networks.initialization import initialize_weights
from sparring.pipeline.networks.settings import VisualEncoder

_SLOPE: Final = 0.01
_GAIN: Final = math.sqrt(2 / (1 + _SLOPE**2))


class ImageEncoder(nn.Module):
    """Encodes one camera's image.

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

    def __init__(
        self, shape: tuple[int, ...], kind: VisualEncoder, units: int, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        channels = shape[0]
        self.convolutions = nn.Sequential(*_CONVOLUTIONS[kind](channels), nn.Flatten())
        with torch.no_grad():
            flat = self.convolutions(torch.zeros(1, *shape)).shape[1]
        self.dense = nn.Linear(flat, units)
        self.activation = nn.LeakyReLU(_SLOPE)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                initialize_weights(module, _GAIN, generator)
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


def _simple(channels: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, 16, 8, 4), nn.LeakyReLU(_SLOPE), nn.Conv2d(16, 32, 4, 2), nn.LeakyReLU(_SLOPE)]


def _nature(channels: int) -> list[nn.Module]:
    return [
        nn.Conv2d(channels, 32, 8, 4),
        nn.LeakyReLU(_SLOPE),
        nn.Conv2d(32, 64, 4, 2),
        nn.LeakyReLU(_SLOPE),
        nn.Conv2d(64, 64, 3, 1),
        nn.LeakyReLU(_SLOPE),
    ]


def _resnet(channels: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for width in (16, 32, 32):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.MaxPool2d(3, 2), _Residual(width), _Residual(width)]
        channels = width
    return [*layers, nn.ReLU()]


def _match3(channels: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, 35, 3), nn.LeakyReLU(_SLOPE), nn.Conv2d(35, 144, 3), nn.LeakyReLU(_SLOPE)]


def _nothing(_channels: int) -> list[nn.Module]:
    return []


_CONVOLUTIONS: Final[dict[VisualEncoder, Callable[[int], list[nn.Module]]]] = {
    "simple": _simple,
    "nature_cnn": _nature,
    "resnet": _resnet,
    "match3": _match3,
    "fully_connected": _nothing,
}
