# ruff: noqa: N803, N806 (names end in their shape)
"""RND (Burda et al. 2018, arXiv 1810.12894): reward for what a network that copies a random one has not seen.

1. Two networks of one shape: the target keeps its random weights, the predictor learns to put out the same.
2. Reward: the squared error, summed over the features; the loss is its mean. (ML-Agents: the paper normalises rewards
   by their running deviation, here `strength` weighs them.)
3. One step of Adam for each minibatch of the policy, on it, with constant learning rate (ML-Agents).
4. Observations are normalised, where `normalize` asks for it, by all that came in former updates (the paper, 2.4).

B rows of a minibatch, r steps of a batch.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from sparring.pipeline.learning.optimizer import Adam
from sparring.pipeline.learning.parameters import place
from sparring.pipeline.learning.settings import RndSettings
from sparring.pipeline.learning.signals.steps import Features, Floats, Steps, some
from sparring.pipeline.networks.device import CPU, back, over
from sparring.pipeline.networks.encoders import Inputs
from sparring.pipeline.specs import BehaviorSpec

_ROWS_AT_ONCE: Final = 4096


class Distillation(nn.Module):
    """Predictor and target.

    Args:
        spec: of the behavior.
        settings: of the signal.
        generator: random source of initial weights.
    """

    def __init__(self, spec: BehaviorSpec, settings: RndSettings, generator: torch.Generator) -> None:
        super().__init__()
        self.predictor = Features(spec, settings.network_settings, 0, generator)
        plain = settings.network_settings.model_copy(
            update={"normalize": False}
        )  # it reads what the predictor's has prepared
        self.target = Features(spec, plain, 0, generator).requires_grad_(False)

    def forward(self, inputs: Inputs) -> Tensor:
        """Squared errors, summed, [B]."""
        errors_B: Tensor = (self.predictor(inputs) - self.target(inputs)).square().sum(1)
        return errors_B


class Rnd:
    """Networks of one behavior.

    Attributes:
        module: both.
        optimizer: of the predictor's parameters.

    Args:
        spec: of the behavior.
        settings: of the signal.
        generator: random source of initial weights.
        device: where they are.
    """

    def __init__(
        self, spec: BehaviorSpec, settings: RndSettings, generator: torch.Generator, device: torch.device = CPU
    ) -> None:
        self.module = Distillation(spec, settings, generator)
        self.optimizer = Adam(self.module.predictor, settings.learning_rate, device)
        for parameter in self.module.target.parameters():  # which no optimiser moves
            place(parameter, parameter.detach().to(device))
        self._joined: Inputs = ()
        self._inputs: Inputs = ()
        self._taken: list[Tensor] = []

    def begin(self, steps: Steps) -> Floats:
        """[r] Rewards of a batch, on whose minibatches `learn` goes on."""
        encoder = self.module.predictor.encoder
        self._joined = encoder.join([column[: len(steps)] for column in steps.observations])
        self._inputs = encoder.prepare(self._joined)
        self._taken = []
        with torch.no_grad():
            parts = zip(*(torch.split(column, _ROWS_AT_ONCE) for column in self._inputs), strict=True)
            rewards: Floats = back(torch.cat([self.module(over(part, self.optimizer.device)) for part in parts]))
        return rewards

    def learn(self, at_B: Tensor) -> None:
        """One step on some rows of the batch."""
        loss = self.module(over(some(self._inputs, at_B), self.optimizer.device)).mean()
        if self.optimizer.step((loss,), (torch.ones_like(loss),)):
            self._taken.append(loss.detach())

    def terminal_bootstrap_fraction(self, ends: int, steps: int) -> float:
        """All: what is new is so in any episode, and the next one counts as the rest of this one."""
        del ends, steps
        return 1.0

    def restored(self) -> None:
        """Nothing is kept of former weights."""

    def statistics(self) -> dict[str, float]:
        """Of the steps since `begin`; takes its observations into the running statistics."""
        self.module.predictor.encoder.update(self._joined)
        return {"Losses/RND Loss": torch.stack(self._taken).mean().item()} if self._taken else {}
