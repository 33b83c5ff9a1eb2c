# ruff: noqa: N803, N806 (names end in their shape)
"""Curiosity (Pathak et al. 2017, arXiv 1705.05363) rewards observations that a forward model predicts badly.

1. Observations are encoded to f. The inverse model predicts the action from f and the next f; the forward model
   predicts the next f from f and the action. Both learn together with the encoder, so that f holds what actions change.
2. Reward: half the squared error of the forward model, summed over f; at most 1 / strength (ML-Agents), and 0 until the
   first update: errors of untrained models do not measure novelty.
3. Loss: 10 x (0.2 forward + 0.8 inverse) (ML-Agents). The inverse loss is the squared error of continuous actions as
   simulators receive them, and the cross-entropy of each branch, both summed.
4. Adam takes one step on each minibatch of the policy, with constant learning rate (ML-Agents).
5. If `normalize` is set, observations are normalized by the statistics of all earlier updates.

B rows of a minibatch, U features, A action features, r steps of a batch.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from sparring.pipeline.learning.optimizer import Adam
from sparring.pipeline.learning.settings import CuriositySettings
from sparring.pipeline.learning.signals.steps import Features, Floats, Steps, dense, linear, select_rows
from sparring.pipeline.networks.device import CPU, back, over
from sparring.pipeline.networks.encoders import Inputs
from sparring.pipeline.specs import BehaviorSpec

FORWARD: Final = 0.2
LOSS: Final = 10.0
_UNITS: Final = 256
_ROWS_AT_ONCE: Final = 4096


class CuriosityModels(nn.Module):
    """Combines encoder, inverse model and forward model.

    Args:
        spec: observations and actions of the behavior.
        settings: the signal's settings.
        generator: random source of the initial weights.
    """

    updated: Tensor

    def __init__(self, spec: BehaviorSpec, settings: CuriositySettings, generator: torch.Generator) -> None:
        super().__init__()
        self._actions = spec.actions
        done = spec.actions.continuous + spec.actions.mask_size
        self.features = Features(spec, settings.network_settings, 0, generator)
        units = self.features.size
        self.inverse = dense([2 * units, _UNITS], settings.network_settings, generator)
        self.inverse_head = linear(_UNITS, done, 1.0, generator)
        self.forward_model = dense([units + done, _UNITS], settings.network_settings, generator)
        self.forward_head = linear(_UNITS, units, 1.0, generator)
        self.register_buffer("updated", torch.zeros(()))

    def forward(self, before: Inputs, after: Inputs, done_BA: Tensor) -> tuple[Tensor, Tensor]:
        """Returns squared errors of the forward model, halved and summed [B], and the loss of the inverse model [B]."""
        features_BU, next_BU = self.features(before), self.features(after)
        predicted_BU = self.forward_head(self.forward_model(torch.cat((features_BU, done_BA), 1)))
        guessed_BA = self.inverse_head(self.inverse(torch.cat((features_BU, next_BU), 1)))
        return 0.5 * (predicted_BU - next_BU).square().sum(1), self._inverse_loss(guessed_BA, done_BA)

    def _inverse_loss(self, guessed_BA: Tensor, done_BA: Tensor) -> Tensor:
        continuous = self._actions.continuous
        loss_B = (guessed_BA[:, :continuous] - done_BA[:, :continuous]).square().sum(1)
        branches = list(self._actions.discrete)
        if branches:
            guessed, done = (rows[:, continuous:].split_with_sizes(branches, 1) for rows in (guessed_BA, done_BA))
            for logits_Bk, chosen_Bk in zip(guessed, done, strict=True):
                loss_B = loss_B - (torch.log_softmax(logits_Bk, 1) * chosen_Bk).sum(1)
        return loss_B


class Curiosity:
    """Trains the models of one behavior, and computes rewards with them.

    Attributes:
        module: all trained weights.
        optimizer: changes its parameters.

    Args:
        spec: observations and actions of the behavior.
        settings: the signal's settings.
        generator: random source of the initial weights.
        device: device of the models.
    """

    def __init__(
        self,
        spec: BehaviorSpec,
        settings: CuriositySettings,
        generator: torch.Generator,
        device: torch.device = CPU,
    ) -> None:
        self.module = CuriosityModels(spec, settings, generator)
        self.optimizer = Adam(self.module, settings.learning_rate, device)
        self._largest = 1 / settings.strength if settings.strength else 0.0
        self._joined: Inputs = ()
        self._inputs: Inputs = ()
        self._following = torch.empty(0, dtype=torch.int64)
        self._done = torch.empty(0)
        self._taken: list[tuple[Tensor, Tensor]] = []

    def begin(self, steps: Steps) -> Floats:
        """Starts a batch and returns its rewards [r]; `learn` then trains on its minibatches."""
        encoder = self.module.features.encoder
        self._joined = encoder.join(steps.observations)
        self._inputs = encoder.prepare(self._joined)
        self._following, self._done = torch.from_numpy(steps.following), steps.done
        self._taken = []
        if not self.module.updated:
            return torch.zeros(len(steps)).numpy()
        with torch.no_grad():
            blocks = torch.split(torch.arange(len(steps)), _ROWS_AT_ONCE)
            errors_r = torch.cat([self._errors(at)[0] for at in blocks])
        rewards: Floats = back(errors_r.clamp_(max=self._largest))
        return rewards

    def learn(self, at_B: Tensor) -> None:
        """Takes one optimizer step on some rows of the batch."""
        forward_B, inverse_B = self._errors(at_B)
        forward, inverse = forward_B.mean(), inverse_B.mean()
        loss = LOSS * (FORWARD * forward + (1 - FORWARD) * inverse)
        if self.optimizer.step((loss,), (torch.ones_like(loss),)):
            self._taken.append((forward.detach(), inverse.detach()))
            self.module.updated.fill_(1)

    def terminal_bootstrap_fraction(self, ends: int, steps: int) -> float:
        """Returns 1: novelty does not depend on the episode, so the next one counts as the rest of this one."""
        del ends, steps
        return 1.0

    def restored(self) -> None:
        """Does nothing, because no result of the previous weights is stored."""

    def statistics(self) -> dict[str, float]:
        """Returns the mean losses since `begin`, and adds the batch's observations to the running statistics."""
        self.module.features.encoder.update(tuple(column[: len(self._done)] for column in self._joined))
        if not self._taken:
            return {}
        forward, inverse = (torch.stack(column).mean().item() for column in zip(*self._taken, strict=True))
        return {"Losses/Curiosity Forward Loss": forward, "Losses/Curiosity Inverse Loss": inverse}

    def _errors(self, at_B: Tensor) -> tuple[Tensor, Tensor]:
        after = select_rows(self._inputs, self._following.index_select(0, at_B))
        inputs = select_rows(self._inputs, at_B), after, self._done.index_select(0, at_B)
        errors: tuple[Tensor, Tensor] = self.module(*over(inputs, self.optimizer.device))
        return errors
