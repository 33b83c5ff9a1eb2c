# ruff: noqa: N803, N806 (names end in their shape)
"""Curiosity and RND reward observations that are new: a network has not learned yet to predict something about them.

Curiosity (Pathak et al. 2017, arXiv 1705.05363) rewards observations that a forward model predicts badly.

1. Observations are encoded to f. The inverse model predicts the action from f and the next f; the forward model
   predicts the next f from f and the action. Both learn together with the encoder, so that f holds what actions change.
2. Reward: half the squared error of the forward model, summed over f; at most 1 / strength (ML-Agents), and 0 until the
   first update: errors of untrained models do not measure novelty.
3. Loss: 10 x (0.2 forward + 0.8 inverse) (ML-Agents). The inverse loss is the squared error of continuous actions as
   simulators receive them, and the cross-entropy of each branch, both summed.

RND (Burda et al. 2018, arXiv 1810.12894) rewards observations on which a network fails to match a random one.

1. Two networks have one shape: the target keeps its random weights, the predictor learns to reproduce its output.
2. Reward: the squared error, summed over the features; the loss is its mean. (ML-Agents: the paper normalizes rewards
   by their running deviation, here `strength` weighs them.)

Both: if `normalize` is set, observations are normalized by the statistics of all earlier updates (Burda, 2.4).

B rows of a minibatch, U features, A action features, r steps of a batch.
"""

from abc import abstractmethod
from typing import Final

import torch
from torch import Tensor, nn

from sparring.pipeline.learning.settings import CuriositySettings, RndSettings
from sparring.pipeline.learning.signals import Features, RewardNetwork, Steps, blocks, dense, select_rows
from sparring.pipeline.networks.device import CPU, back, move_parameters, over
from sparring.pipeline.networks.encoders import Inputs
from sparring.pipeline.networks.perceptron import linear
from sparring.pipeline.specs import BehaviorSpec, Floats

FORWARD: Final = 0.2
LOSS: Final = 10.0
_UNITS: Final = 256


class _Novelty(RewardNetwork):
    """Rewards the errors of networks that learn from the policy's own steps.

    Args:
        module: the networks.
        trained: the part of them that learns.
        features: whose encoder prepares the observations.
        learning_rate: of the optimizer.
        device: device of the networks.
    """

    def __init__(
        self, module: nn.Module, trained: nn.Module, features: Features, learning_rate: float, device: torch.device
    ) -> None:
        super().__init__(module, trained, learning_rate, device)
        self._encoder = features.encoder
        self._joined: Inputs = ()

    @abstractmethod
    def _errors(self, at_B: Tensor) -> tuple[Tensor, ...]:
        """Returns the errors [B] of some rows; the first are those that the signal rewards."""

    def begin(self, steps: Steps) -> Floats:
        joined = self._encoder.join(steps.observations)
        self._joined = tuple(column[: len(steps)] for column in joined)
        self._inputs = over(self._encoder.prepare(joined), self.optimizer.device)
        return self._rewards(steps)

    @torch.no_grad()
    def _rewards(self, steps: Steps) -> Floats:
        rewards: Floats = back(torch.cat([self._errors(at)[0] for at in blocks(len(steps), self.optimizer.device)]))
        return rewards

    def statistics(self) -> dict[str, float]:
        """Returns the mean losses since `begin`, and adds the batch's observations to the running statistics."""
        self._encoder.update(self._joined)
        return super().statistics()


class Curiosity(_Novelty):
    """Trains the models of one behavior, and computes rewards with them.

    Args:
        spec: observations and actions of the behavior.
        settings: the signal's settings.
        generator: random source of the initial weights.
        device: device of the models.
    """

    def __init__(
        self, spec: BehaviorSpec, settings: CuriositySettings, generator: torch.Generator, device: torch.device = CPU
    ) -> None:
        network, self._actions = settings.network_settings, spec.actions
        done = spec.actions.continuous + spec.actions.mask_size
        features = Features(spec, network, 0, generator)
        self._models = nn.ModuleDict(
            {
                "features": features,
                "inverse": dense([2 * features.size, _UNITS], network, generator),
                "inverse_head": linear(_UNITS, done, 1.0, generator),
                "forward_model": dense([features.size + done, _UNITS], network, generator),
                "forward_head": linear(_UNITS, features.size, 1.0, generator),
            }
        )
        self._updated = torch.zeros((), device=device)
        self._models.register_buffer("updated", self._updated)
        super().__init__(self._models, self._models, features, settings.learning_rate, device)
        self._largest = 1 / settings.strength if settings.strength else 0.0

    def _rewards(self, steps: Steps) -> Floats:
        self._following, self._done = over((torch.from_numpy(steps.following), steps.done), self.optimizer.device)
        if not self._updated:
            return torch.zeros(len(steps)).numpy()
        rewards = super()._rewards(steps)
        torch.from_numpy(rewards).clamp_(max=self._largest)
        return rewards

    def learn(self, at_B: Tensor) -> None:
        forward, inverse = (errors_B.mean() for errors_B in self._errors(at_B))
        loss = LOSS * (FORWARD * forward + (1 - FORWARD) * inverse)
        measures = {"Forward": forward.detach(), "Inverse": inverse.detach()}
        skipped = self.take_step(loss, {f"Losses/Curiosity {name} Loss": one for name, one in measures.items()})
        self._updated.add_(1 - skipped).clamp_(max=1)

    def _errors(self, at_B: Tensor) -> tuple[Tensor, ...]:
        """Returns squared errors of the forward model, halved and summed [B], and the loss of the inverse model [B]."""
        after = select_rows(self._inputs, self._following.index_select(0, at_B))
        before, done_BA = select_rows(self._inputs, at_B), self._done.index_select(0, at_B)
        models = self._models
        features_BU, next_BU = models["features"](before), models["features"](after)
        predicted_BU = models["forward_head"](models["forward_model"](torch.cat((features_BU, done_BA), 1)))
        guessed_BA = models["inverse_head"](models["inverse"](torch.cat((features_BU, next_BU), 1)))
        return 0.5 * (predicted_BU - next_BU).square().sum(1), self._inverse_loss(guessed_BA, done_BA)

    def _inverse_loss(self, guessed_BA: Tensor, done_BA: Tensor) -> Tensor:
        continuous, branches = self._actions.continuous, list(self._actions.discrete)
        loss_B = (guessed_BA[:, :continuous] - done_BA[:, :continuous]).square().sum(1)
        guessed, done = (rows[:, continuous:].split_with_sizes(branches, 1) for rows in (guessed_BA, done_BA))
        for logits_Bk, chosen_Bk in zip(guessed, done, strict=True):
            loss_B = loss_B - (torch.log_softmax(logits_Bk, 1) * chosen_Bk).sum(1)
        return loss_B


class Rnd(_Novelty):
    """Trains the predictor of one behavior, and computes rewards with it.

    Args:
        spec: observations and actions of the behavior.
        settings: the signal's settings.
        generator: random source of the initial weights.
        device: device of the networks.
    """

    def __init__(
        self, spec: BehaviorSpec, settings: RndSettings, generator: torch.Generator, device: torch.device = CPU
    ) -> None:
        self._predictor = Features(spec, settings.network_settings, 0, generator)
        # The predictor's encoder normalizes the inputs of both.
        plain = settings.network_settings.model_copy(update={"normalize": False})
        self._target = Features(spec, plain, 0, generator).requires_grad_(False)
        networks = nn.ModuleDict({"predictor": self._predictor, "target": self._target})
        super().__init__(networks, self._predictor, self._predictor, settings.learning_rate, device)
        move_parameters(self._target, device)  # the optimizer does not hold these

    def learn(self, at_B: Tensor) -> None:
        loss = self._errors(at_B)[0].mean()
        self.take_step(loss, {"Losses/RND Loss": loss.detach()})

    def _errors(self, at_B: Tensor) -> tuple[Tensor, ...]:
        """Returns the squared errors [B], summed over the features."""
        inputs = select_rows(self._inputs, at_B)
        return ((self._predictor(inputs) - self._target(inputs)).square().sum(1),)
