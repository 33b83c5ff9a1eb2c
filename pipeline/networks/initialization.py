"""This module initializes the weights of layers."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import nn

from sparring.pipeline.networks.settings import Initialization

HIDDEN_GAINS: Final[dict[Initialization, float]] = {"he_normal": 1.0, "orthogonal": math.sqrt(2)}
"""Gains of hidden layers."""
MEAN_GAINS: Final[dict[Initialization, float]] = {"he_normal": 0.2, "orthogonal": 0.01}
"""Gains of the means of continuous actions. A policy that begins near the same action everywhere learns more steadily
(Andrychowicz et al. 2020, arXiv 2006.05990, section 3.2)."""
LOGIT_GAINS: Final[dict[Initialization, float]] = {"he_normal": 0.1, "orthogonal": 0.01}
"""Gains of the logits of discrete actions."""


def initialize_weights(
    layer: nn.Conv2d | nn.Linear,
    gain: float,
    generator: torch.Generator | None,
    initialization: Initialization = "he_normal",
) -> None:
    """Samples the initial weights of a layer, and sets its biases to 0.

    Args:
        layer: changed in place.
        gain: factor.
        generator: random source.
        initialization: `he_normal`: a normal distribution of variance gain^2 / inputs (He et al. 2015, arXiv
            1502.01852); `orthogonal`: a random orthogonal matrix times the gain (Saxe et al. 2014, arXiv 1312.6120).
    """
    with torch.no_grad():
        if initialization == "orthogonal":
            nn.init.orthogonal_(layer.weight, gain, generator)
        else:
            layer.weight.normal_(0.0, gain / math.sqrt(layer.weight[0].numel()), generator=generator)
        if layer.bias is not None:
            layer.bias.zero_()
