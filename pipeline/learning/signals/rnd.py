# ruff: noqa: N803, N806 (names end in their shape)
"""RND (Burda et al. 2018, arXiv 1810.12894) rewards observations on which a network fails to match a random one.

1. Two networks have one shape: the target keeps its random weights, the predictor learns to reproduce its output.
2. Reward: the squared error, summed over the features; the loss is its mean. (ML-Agents: the paper normalizes rewards
   by their running deviation, here `strength` weighs them.)
3. Adam takes one step on each minibatch of the policy, with constant learning rate (ML-Agents).
4. If `normalize` is set, observations are normalized by the statistics of all earlier updates (the paper, 2.4).

B rows of a minibatch, r steps of a batch.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from sparring.pipeline.learning.optimizer import Adam, place
from sparring.pipeline.learning.settings import RndSettings
from sparring.pipeline.learning.signals.steps import Features, Floats, Steps, select_rows
from sparring.pipeline.networks.device import CPU, back, over
from sparring.pipeline.networks.encoders import Inputs
from sparring.pipeline.specs import BehaviorSpec

_ROWS_AT_ONCE: Final = 4096


class Distillation(nn.Module):
    """Combines predictor and target.

    Args:
        spec: observations and actions of the behavior.
        settings: the signal's settings.
        generator: random source of the initial weights.
    """

    def __init__(self, spec: BehaviorSpec, settings: RndSettings, generator: torch.Generator) -> None:
        super().__init__()
        self.predictor = Features(spec, settings.network_settings, 0, generator)
        # The predictor's encoder normalizes the inputs of both.
        plain = settings.network_settings.model_copy(update={"normalize": False})
        self.target = Features(spec, plain, 0, generator).requires_grad_(False)

    def forward(self, inputs: Inputs) -> Tensor:
        """Returns the squared errors [B], summed over the features."""
        errors_B: Tensor = (self.predictor(inputs) - self.target(inputs)).square().sum(1)
        return errors_B


class Rnd:
    """Trains the predictor of one behavior, and computes rewards with it.

    Attributes:
        module: predictor and target.
        optimizer: changes the predictor's parameters.

    Args:
        spec: observations and actions of the behavior.
        settings: the signal's settings.
        generator: random source of the initial weights.
        device: device of the networks.
    """

    def __init__(
        self, spec: BehaviorSpec, settings: RndSettings, generator: torch.Generator, device: torch.device = CPU
    ) -> None:
        self.module = Distillation(spec, settings, generator)
        self.optimizer = Adam(self.module.predictor, settings.learning_rate, device)
        for parameter in self.module.target.parameters():  # the optimizer does not hold these
            place(parameter, parameter.detach().to(device))
        self._joined: Inputs = ()
        self._inputs: Inputs = ()
        self._taken: list[Tensor] = []

    def begin(self, steps: Steps) -> Floats:
        """Starts a batch and returns its rewards [r]; `learn` then trains on its minibatches."""
        encoder = self.module.predictor.encoder
        self._joined = encoder.join([column[: len(steps)] for column in steps.observations])
        self._inputs = encoder.prepare(self._joined)
        self._taken = []
        with torch.no_grad():
            parts = zip(*(torch.split(column, _ROWS_AT_ONCE) for column in self._inputs), strict=True)
            rewards: Floats = back(torch.cat([self.module(over(part, self.optimizer.device)) for part in parts]))
        return rewards

    def learn(self, at_B: Tensor) -> None:
        """Takes one optimizer step on some rows of the batch."""
        loss = self.module(over(select_rows(self._inputs, at_B), self.optimizer.device)).mean()
        if self.optimizer.step((loss,), (torch.ones_like(loss),)):
            self._taken.append(loss.detach())

    def terminal_bootstrap_fraction(self, ends: int, steps: int) -> float:
        """Returns 1: novelty does not depend on the episode, so the next one counts as the rest of this one."""
        del ends, steps
        return 1.0

    def restored(self) -> None:
        """Does nothing, because no result of the previous weights is stored."""

    def statistics(self) -> dict[str, float]:
        """Returns the mean loss since `begin`, and adds the batch's observations to the running statistics."""
        self.module.predictor.encoder.update(self._joined)
        return {"Losses/RND Loss": torch.stack(self._taken).mean().item()} if self._taken else {}
