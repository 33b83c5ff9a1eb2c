# ruff: noqa: N803, N806 (names end in their shape)
"""This module trains the actor by behavioral cloning: supervised learning of demonstrated actions.

1. Loss: the squared error of the means, scaled for simulators but not clipped, summed over continuous actions, and the
   cross-entropy of each branch; mean over rows. Beside training, the deviation of continuous actions is left to the
   policy, which explores with it. If cloning is the only training, the deviation fits the errors by maximum likelihood,
   and is at least 1/20.
2. Once per update: `num_epoch` passes over the demonstrated steps in a random order, in minibatches of `batch_size`, at
   most `samples_per_update` steps of each pass if that is set (ML-Agents).
3. Adam with state of its own; its learning rate is `strength` times the policy's initial one, and falls to 0 over
   `steps` steps of training, after which cloning stops (ML-Agents). If cloning is the only training, it follows
   `learning_rate_schedule`.
4. A recurrent network learns sequences, each from an empty memory (ML-Agents).

B rows of a minibatch, E steps demonstrated, C continuous actions, D branches, K choices of all branches, Q sequences, M
values of a recurrent memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sparring.pipeline.assembly import sequences
from sparring.pipeline.demonstrations.library import Demonstrations, load
from sparring.pipeline.learning.schedules import Coefficients, scheduled
from sparring.pipeline.learning.settings import TrainerSettings
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.networks.arrays import action_features
from sparring.pipeline.networks.device import over
from sparring.pipeline.networks.distributions import FORBIDDEN
from sparring.pipeline.networks.encoders import Inputs
from sparring.pipeline.networks.recurrent import Layout

_AVERAGES: Final = ("exp_avg", "exp_avg_sq")
_OVER: Final = 1e-10
_LEAST_LOG_SIGMA: Final = math.log(1 / 20)


class CloningMinibatch(NamedTuple):
    """Holds demonstrated steps.

    Attributes:
        inputs: prepared observations, [B, F] of the vectors first.
        continuous: [B, C] as simulators received them.
        discrete: [B, D] int64 choices.
        masks: [B, K] True = forbidden; None if every choice was allowed.
        layout: how the rows form sequences; None for a network without memory.
        memory: [Q, M] at their starts; None for a network without memory.
    """

    inputs: Inputs
    continuous: Tensor
    discrete: Tensor
    masks: Tensor | None
    layout: Layout | None
    memory: Tensor | None


class Cloning:
    """Trains one behavior's actor on demonstrations.

    Args:
        actor: the network that learns; another optimizer may change its parameters too.
        settings: the learner's settings, including those of cloning.
        demonstrations: the episodes to imitate.
        generator: random source of the order.
        alone: cloning is the only training.

    Attributes:
        demo_files: files that the demonstrations were read from.
        minibatches: number in the last update.
        skipped: of these, left out because the gradient was not finite.
        tried: minibatches since creation; other threads may read it.
    """

    def __init__(
        self,
        actor: Actor,
        settings: TrainerSettings,
        demonstrations: Demonstrations,
        generator: torch.Generator,
        *,
        alone: bool = False,
    ) -> None:
        self.minibatches = self.skipped = self.tried = 0
        self.demo_files = demonstrations.files
        self._alone = alone
        self._trainer = settings
        assert settings.behavioral_cloning is not None
        self._actor = actor
        self._settings = settings.behavioral_cloning
        self._hyper = settings.hyperparameters
        self._generator = generator
        self._length = settings.network_settings.sequence_length if actor.recurrent is not None else 0
        self._demonstrations = demonstrations
        self._discrete = torch.from_numpy(demonstrations.discrete).long()
        self._continuous = torch.from_numpy(demonstrations.continuous)
        self._masks = None if demonstrations.masks is None else torch.from_numpy(demonstrations.masks)
        lengths = np.bincount(demonstrations.episode, minlength=demonstrations.episodes)
        self._first, self._lengths = sequences.divide(lengths, max(1, self._length))
        self._previous = self._previous_actions() if actor.encoder.previous else None
        self._parameters = list(actor.parameters())
        self._optimizer = torch.optim.Adam(self._parameters, lr=self._hyper.learning_rate)
        self.moments = {
            f"{at}.{name}": torch.zeros(()) if name == "step" else torch.zeros_like(parameter)
            for at, parameter in enumerate(self._parameters)
            for name in ("step", *_AVERAGES)
        }
        for at, parameter in enumerate(self._parameters):
            own = {name: self.moments[f"{at}.{name}"] for name in ("step", *_AVERAGES)}
            self._optimizer.state[parameter] = own

    def update(self, trained: int) -> dict[str, float]:
        """Trains, after `trained` steps of training; returns what to publish, nothing once cloning has stopped."""
        rate = self._rate(trained)
        if rate <= _OVER:
            return {}
        self._optimizer.param_groups[0]["lr"] = rate
        encoder = self._actor.encoder
        inputs = encoder.prepare(encoder.join(self._demonstrations.observations), self._previous)
        losses = [
            self._step(tuple(column.index_select(0, rows) for column in inputs), rows, layout)
            for _ in range(self._settings.num_epoch or self._hyper.num_epoch)
            for rows, layout in self._minibatches()
        ]
        taken = [loss for loss in losses if loss is not None]
        self.minibatches, self.skipped = len(losses), len(losses) - len(taken)
        return {"Losses/Pretraining Loss": sum(taken) / len(taken)} if taken else {}

    # ---------------------------------------------------------------- inside

    def _rate(self, trained: int) -> float:
        """Returns the learning rate after `trained` steps."""
        wanted = self._settings
        start = self._hyper.learning_rate * wanted.strength
        if self._alone:
            return Coefficients.at(self._trainer, trained).learning_rate * wanted.strength
        return scheduled("linear", start, _OVER, trained / wanted.steps) if wanted.steps else start

    def _step(self, inputs: Inputs, rows: Tensor, layout: Layout | None) -> float | None:
        """Takes one step of Adam and returns the loss; None if the gradient was not finite and the step was skipped."""
        self.tried += 1
        memory = None
        if layout is not None and self._actor.recurrent is not None:
            memory = torch.zeros(len(layout.by_length), self._actor.carried - self._actor.encoder.previous)
        masks = None if self._masks is None else self._masks.index_select(0, rows)
        continuous, discrete = (column.index_select(0, rows) for column in (self._continuous, self._discrete))
        batch = over(CloningMinibatch(inputs, continuous, discrete, masks, layout, memory), self._actor.device)
        head_BH = self._actor(batch.inputs, batch.layout, batch.memory)
        loss = imitation_loss(self._actor, head_BH, batch.continuous, batch.discrete, batch.masks)
        if self._alone:
            loss = loss + deviation_loss(self._actor, head_BH.detach(), batch.continuous)
        for parameter in self._parameters:
            assert parameter.grad is not None
            parameter.grad.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        total = sum(parameter.grad.sum().item() for parameter in self._parameters if parameter.grad is not None)
        if not math.isfinite(total):
            return None
        self._optimizer.step()
        return loss.item()

    def _minibatches(self) -> Iterator[tuple[Tensor, Layout | None]]:
        """Yields the rows of each minibatch of one pass, and for recurrent networks how they form sequences."""
        of_sequence = max(1, self._length)
        count = len(self._first)
        samples = self._settings.samples_per_update
        size = self._settings.batch_size or self._hyper.batch_size
        size = min(max(1, (min(size, samples) if samples else size) // of_sequence), count)
        most = max(1, samples // (of_sequence * size)) if samples else count
        order = torch.randperm(count, generator=self._generator)[: count // size * size].numpy()
        for which in order.reshape(-1, size)[:most]:
            lengths = self._lengths[which]
            rows = torch.from_numpy(sequences.rows_of(self._first[which], lengths))
            yield rows, Layout(lengths) if self._length else None

    def _previous_actions(self) -> Tensor:
        """Returns [E, P] the action before each step; zeros at the first step of an episode."""
        demonstrations = self._demonstrations
        done = action_features(self._actor.actions, demonstrations.continuous, demonstrations.discrete)
        before = np.zeros_like(done)
        before[1:] = np.where(demonstrations.ended[:-1, None], 0, done[:-1])
        return torch.from_numpy(before)


def cloning_of(
    behavior: str, actor: Actor, settings: TrainerSettings, generator: torch.Generator, *, alone: bool = False
) -> Cloning | None:
    """Builds cloning if the settings ask for it.

    Raises:
        RecordingError: demonstrations are missing, unreadable, or of another spec.
    """
    wanted = settings.behavioral_cloning
    if wanted is None:
        return None
    demonstrations = load(wanted.demo_path, behavior, actor.spec, wanted.demo_actions)
    return Cloning(actor, settings, demonstrations, generator, alone=alone)


def imitation_loss(
    actor: Actor, head_BH: Tensor, continuous_BC: Tensor, discrete_BD: Tensor, masks_BK: Tensor | None
) -> Tensor:
    """Returns loss (1) of demonstrated rows.

    Args:
        actor: the network with these outputs.
        head_BH: means and logits first.
        continuous_BC: as simulators received them, in [-1, 1].
        discrete_BD: choices.
        masks_BK: True = forbidden.
    """
    actions = actor.actions
    loss = (head_BH[:, : actions.continuous] / actor.action_limit - continuous_BC).square().sum(1).mean()
    if actions.discrete:
        logits_BK = head_BH[:, actions.continuous : actor.outputs]
        if masks_BK is not None:
            logits_BK = logits_BK.masked_fill(masks_BK, FORBIDDEN)
        for branch, logits_Bk in enumerate(logits_BK.split_with_sizes(list(actions.discrete), 1)):
            loss = loss + cross_entropy(logits_Bk, discrete_BD[:, branch])
    return loss


def deviation_loss(actor: Actor, head_BH: Tensor, continuous_BC: Tensor) -> Tensor:
    """Returns minus the log-likelihood of demonstrated actions, up to a constant; only the deviation learns from it.

    Args:
        actor: the network with the deviation.
        head_BH: means first; without gradient.
        continuous_BC: as simulators received them.
    """
    if not actor.actions.continuous:
        return torch.zeros(())
    log_sigma_C = actor.log_sigma.clamp(min=_LEAST_LOG_SIGMA)
    errors_BC = (continuous_BC * actor.action_limit - head_BH[:, : actor.actions.continuous]) / log_sigma_C.exp()
    return (0.5 * errors_BC.square() + log_sigma_C).sum(1).mean()
