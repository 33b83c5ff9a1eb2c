# ruff: noqa: N803, N806 (names end in their shape)
"""This module implements a body whose last hidden layer is generated from the goal.

B rows, F features, G features of the goal, U units, O outputs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from sparring.pipeline.networks.activations import FUNCTIONS
from sparring.pipeline.networks.initialization import HIDDEN_GAINS, initialize_weights
from sparring.pipeline.networks.settings import Activation, Initialization


class ConditionedLayers(nn.Module):
    """Generates the last of its hidden layers from the goal by a hypernetwork (Ha et al. 2016, arXiv 1609.09106).

    So each goal selects another network instead of being another input; ML-Agents does the same.

    Args:
        features: F.
        goal: G, the last inputs of each row.
        units: U of each hidden layer, in order.
        output_gains: O factors on the initial weights of each output; None outputs the sums of the last hidden layer.
        generator: random source of the initial weights.
        activation: function of the hidden units.
        initialization: distribution of the initial weights; the hypernetwork's own are He-normal.

    Attributes:
        output: name of the layer of outputs.
        activation: function of the hidden units.
    """

    def __init__(
        self,
        features: int,
        goal: int,
        units: Sequence[int],
        output_gains: Sequence[float] | None,
        generator: torch.Generator,
        activation: Activation = "silu",
        initialization: Initialization = "he_normal",
    ) -> None:
        super().__init__()
        self.activation = activation
        self._goal = goal
        self.output = "head"
        sizes = [features, *units]
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(sizes[:-1]))
        self.hyper = _Hyper(sizes[-2], sizes[-1], goal, generator, activation)
        self.head = None if output_gains is None else nn.Linear(sizes[-1], len(output_gains))
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            initialize_weights(layer, HIDDEN_GAINS[initialization], generator, initialization)
        if self.head is not None:
            initialize_weights(self.head, 1.0, generator, initialization)
            with torch.no_grad():
                self.head.weight.mul_(torch.tensor(output_gains).unsqueeze(1))

    def forward(self, rows_BF: Tensor) -> Tensor:
        """Returns outputs [B, O] of features followed by the goal."""
        hidden_BU, goal_BG = rows_BF[:, : -self._goal], rows_BF[:, -self._goal :]
        activate = FUNCTIONS[self.activation].forward
        for layer in self.layers:
            hidden_BU = activate(layer(hidden_BU))
        sums_BU: Tensor = self.hyper(hidden_BU, goal_BG)
        return sums_BU if self.head is None else self.head(activate(sums_BU))

    def frozen(self, outputs: int | None = None) -> Callable[[Tensor], Tensor]:
        """Returns the first `outputs`, or all, as a plain function of rows, on a copy of the current weights."""
        body = copy.deepcopy(self).requires_grad_(False)
        if body.head is not None:
            body.head.weight.data, body.head.bias.data = body.head.weight[:outputs], body.head.bias[:outputs]
        return body


class _Hyper(nn.Module):
    """Applies a linear layer whose weights are the outputs of a perceptron of the goal."""

    def __init__(
        self, inputs: int, outputs: int, goal: int, generator: torch.Generator, activation: Activation
    ) -> None:
        super().__init__()
        self._activation = activation
        self._shape = (outputs, inputs)
        self.code = nn.Linear(goal, outputs)
        self.weights = nn.Linear(outputs, outputs * inputs)
        self.biases = nn.Linear(outputs, outputs)
        initialize_weights(self.code, 1.0, generator)
        initialize_weights(self.biases, 1.0, generator)
        # Half the variance of an ordinary layer depends on the goal, half is the same for all goals.
        initialize_weights(self.weights, math.sqrt(0.5 / inputs), generator)
        with torch.no_grad():
            self.weights.bias.normal_(0.0, math.sqrt(0.5 / inputs), generator=generator)

    def forward(self, rows_BF: Tensor, goal_BG: Tensor) -> Tensor:
        code_BU = FUNCTIONS[self._activation].forward(self.code(goal_BG))
        weights_BUF = self.weights(code_BU).unflatten(1, self._shape)
        made_BU: Tensor = torch.einsum("buf,bf->bu", weights_BUF, rows_BF) + self.biases(code_BU)
        return made_BU
