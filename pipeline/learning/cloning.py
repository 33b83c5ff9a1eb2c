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

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sparring.pipeline.assembly import sequences
from sparring.pipeline.demonstrations.library import Demonstrations
from sparring.pipeline.learning.minibatches import shuffled_parts
from sparring.pipeline.learning.optimizer import AVERAGES, fused_adam, of_finite
from sparring.pipeline.learning.settings import LEARNING_RATE_END, TrainerSettings, scheduled
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.networks.arrays import action_features
from sparring.pipeline.networks.device import over
from sparring.pipeline.networks.encoders import Inputs
from sparring.pipeline.networks.layers import Layout

_OVER: Final = 1e-10
_LEAST_LOG_SIGMA: Final = math.log(1 / 20)


@dataclass(eq=False)
class Cloning:
    """Trains one behavior's actor on demonstrations.

    Attributes:
        actor: the network that learns; another optimizer may change its parameters too.
        settings: the learner's settings, including those of cloning.
        demonstrations: the episodes to imitate.
        generator: random source of the order.
        minibatches: number in the last update.
        skipped: of these, left out because the gradient was not finite.
        tried: minibatches since creation; other threads may read it.
    """

    actor: Actor
    settings: TrainerSettings
    demonstrations: Demonstrations
    generator: torch.Generator

    def __post_init__(self) -> None:
        actor, settings, demonstrations = self.actor, self.settings, self.demonstrations
        self.minibatches = self.skipped = self.tried = 0
        assert settings.behavioral_cloning is not None
        self._alone = settings.trainer_type == "bc"
        self._wanted, self._hyper = settings.behavioral_cloning, settings.hyperparameters
        self._length = settings.network_settings.sequence_length if actor.recurrent is not None else 0
        masks = None if demonstrations.masks is None else torch.from_numpy(demonstrations.masks)
        discrete = torch.from_numpy(demonstrations.discrete).long()
        self._demonstrated = over((torch.from_numpy(demonstrations.continuous), discrete, masks), actor.device)
        lengths = np.bincount(demonstrations.episode, minlength=demonstrations.episodes)
        self._first, self._lengths = sequences.divide(lengths, max(1, self._length))
        self._previous = self._previous_actions() if actor.encoder.previous else None
        self._parameters = list(actor.parameters())
        self.learning_rate = self._hyper.learning_rate
        self._state = {name: [torch.zeros_like(parameter) for parameter in self._parameters] for name in AVERAGES}
        self._state["step"] = [parameter.new_zeros(()) for parameter in self._parameters]
        self.moments = {f"{at}.{name}": one for name, column in self._state.items() for at, one in enumerate(column)}

    def update(self, trained: int) -> dict[str, float]:
        """Trains, after `trained` steps of training; returns what to publish, nothing once cloning has stopped."""
        rate = self._rate(trained)
        if rate <= _OVER:
            return {}
        self.learning_rate = rate
        encoder = self.actor.encoder
        joined = encoder.join(self.demonstrations.observations)
        inputs = over(encoder.prepare(joined, self._previous), self.actor.device)
        losses = [
            self._step(tuple(column.index_select(0, rows) for column in inputs), rows, layout)
            for _ in range(self._wanted.num_epoch or self._hyper.cloning_epochs)
            for rows, layout in self._minibatches()
        ]
        taken = of_finite(losses)
        self.minibatches, self.skipped = len(losses), len(losses) - len(taken)
        return {"Losses/Pretraining Loss": torch.stack(taken).mean().item()} if taken else {}

    # ---------------------------------------------------------------- inside

    def _rate(self, trained: int) -> float:
        """Returns the learning rate after `trained` steps."""
        wanted = self._wanted
        start = self._hyper.learning_rate * wanted.strength
        if self._alone:
            progress, schedule = trained / self.settings.max_steps, self._hyper.learning_rate_schedule
            return scheduled(schedule, self._hyper.learning_rate, LEARNING_RATE_END, progress) * wanted.strength
        return scheduled("linear", start, _OVER, trained / wanted.steps) if wanted.steps else start

    def _step(self, inputs: Inputs, rows: Tensor, layout: Layout | None) -> tuple[Tensor, Tensor]:
        """Takes one step of Adam; returns 1 if the gradient was not finite, which skips the step, and its loss."""
        self.tried += 1
        actor, memory = self.actor, None
        if layout is not None:
            memory = torch.zeros(len(layout.by_length), actor.carried - actor.encoder.previous, device=actor.device)
        continuous, discrete, masks = self._demonstrated
        masks = None if masks is None else masks.index_select(0, rows)
        demonstrated = continuous.index_select(0, rows), discrete.index_select(0, rows), masks
        head_BH = actor(inputs, layout, memory)
        loss = imitation_loss(actor, head_BH, *demonstrated)
        if self._alone:
            loss = loss + deviation_loss(actor, head_BH.detach(), demonstrated[0])
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]  # each has one
        for gradient in gradients:
            gradient.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        averages, steps = [self._state[name] for name in AVERAGES], self._state["step"]
        largest: list[Tensor] = []  # of AMSGrad alone
        with torch.no_grad():
            total = torch.stack([gradient.sum() for gradient in gradients]).sum()
            skipped = total.sub(total).ne_(0)
            for step in steps:
                step.add_(1).sub_(skipped)
            how = {"lr": self.learning_rate, "eps": 1e-8, "found_inf": skipped}
            fused_adam(self._parameters, gradients, *averages, largest, steps, **how)
        return skipped, loss.detach()

    def _minibatches(self) -> Iterator[tuple[Tensor, Layout | None]]:
        """Yields the rows of each minibatch of one pass, and for recurrent networks how they form sequences."""
        of_sequence = max(1, self._length)
        count = len(self._first)
        samples = self._wanted.samples_per_update
        size = self._wanted.batch_size or self._hyper.batch_size
        parts = shuffled_parts(count, (min(size, samples) if samples else size) // of_sequence, self.generator)
        most = max(1, samples // (of_sequence * parts.shape[1])) if samples else count
        for which in parts[:most]:
            lengths = self._lengths[which]
            rows = torch.from_numpy(sequences.rows_of(self._first[which], lengths))
            yield over((rows, Layout(lengths) if self._length else None), self.actor.device)

    def _previous_actions(self) -> Tensor:
        """Returns [E, P] the action before each step; zeros at the first step of an episode."""
        demonstrations = self.demonstrations
        done = action_features(self.actor.actions, demonstrations.continuous, demonstrations.discrete)
        before = np.zeros_like(done)
        before[1:] = np.where(demonstrations.ended[:-1, None], 0, done[:-1])
        return torch.from_numpy(before)


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
    loss = (actor.scaled_means(head_BH) - continuous_BC).square().sum(1).mean()
    for branch, logits_Bk in enumerate(actor.branch_logits(head_BH, masks_BK)):
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
