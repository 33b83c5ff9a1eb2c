# ruff: noqa: N803, N806 (names end in their shape)
"""Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347), one update at a time.

Where this differs from the paper:

1. The bonus is for the entropy's sum over branches plus its mean over continuous dimensions, times
   the number of both, so that `beta` weighs as in ML-Agents (`ModelUtils.trust_region_policy_loss`
   there averages each dimension's surrogate; here the ratio is that of the joint action, as in the paper).
2. The value loss is not clipped unless asked for: Andrychowicz et al. 2020 (arXiv 2006.05990, section 3.2)
   find clipping harmful. It is the mean squared error, weighed 0.5.
3. Advantages are normalised over the whole buffer, not per minibatch (ML-Agents).
4. Learning rate, clip range and entropy weight fall over training (ML-Agents; the paper's Atari runs
   anneal the first two).
5. An incomplete last minibatch is skipped (ML-Agents). The gradient is not clipped.
6. Adam's epsilon is 1e-8 (PyTorch's), not the 1e-5 of the authors' code.

7. A network that remembers is trained on sequences from the memory that was stored at their start; no gradient flows
   beyond that start (ML-Agents).

B rows of a minibatch, R rows of the batch, F features, C continuous actions, D branches, S reward signals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.learning import losses, returns, signals
from pipeline.learning.actor_critic import ActorCritic, Estimates, Prepared, Recalled, Recurrence, row_bytes
from pipeline.learning.buffer import Batch
from pipeline.learning.parameters import FlatParameters
from pipeline.learning.schedules import Coefficients
from pipeline.learning.settings import TrainerSettings
from pipeline.networks import distributions
from pipeline.networks.encoders import Inputs
from pipeline.specs import BehaviorSpec

VALUE_WEIGHT = 0.5
_WIDE = 4096
"""Bytes of a row from which a column is shuffled a minibatch at a time, instead of all of it at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateReport:
    """What an update did.

    Attributes:
        statistics: by ML-Agents' names; a loss is the mean over minibatches.
        steps: rows in the batch.
        minibatches: tried.
        skipped: of these, left out because the loss or gradient was not finite.
        lags: `lags[i]` rows were acted by a policy i versions older than the one that was updated.
        group_rewards: some group reward was not 0; PPO does not learn from them.
    """

    statistics: dict[str, float]
    steps: int
    minibatches: int
    skipped: int
    lags: tuple[int, ...]
    group_rewards: bool


class Rows(NamedTuple):
    """Columns that a minibatch is made of.

    Attributes:
        inputs: prepared observations, [B, F] of the vectors first.
        continuous: [B, C] raw samples.
        discrete: [B, D] int64 choices.
        masks: [B, choices of all branches] True = forbidden; None where nothing was.
        log_prob: [B] of the joint action when it was chosen.
        advantage: [B] normalised.
        limit: [B] `losses.clip_limit` of the advantage.
        returns: [B, S] advantage + value, per signal.
        values: [B, S] before the update.
    """

    inputs: Inputs
    continuous: Tensor
    discrete: Tensor
    masks: Tensor | None
    log_prob: Tensor
    advantage: Tensor
    limit: Tensor
    returns: Tensor
    values: Tensor


class PPO:
    """Networks and optimiser of one behavior.

    Attributes:
        networks: actor and critic.
        actor: the one of `networks`.

    Args:
        spec: of the behavior.
        settings: of the learner.
        generator: random source of initial weights and of shuffling.

    Raises:
        Unsupported: the spec or the settings ask for what can not be built.
    """

    def __init__(self, spec: BehaviorSpec, settings: TrainerSettings, generator: torch.Generator) -> None:
        signals.refuse_unsupported(settings)
        self.settings = settings
        self.generator = generator
        self.signals = settings.reward_signals.named()
        self.networks = ActorCritic(spec, settings, generator)
        self.actor = self.networks.actor
        self.parameters = FlatParameters(self.networks.modules)
        flat = self.parameters.flat
        self.optimizer = torch.optim.Adam([flat], lr=settings.hyperparameters.learning_rate, fused=True)
        self.moments = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(flat),
            "exp_avg_sq": torch.zeros_like(flat),
        }
        self.optimizer.state[flat] = self.moments

    def update(self, batch: Batch, version: int, trained: int) -> UpdateReport:
        """Trains on `batch`: values, advantages, `num_epoch` passes over shuffled minibatches.

        Args:
            batch: whole segments.
            version: of the present weights.
            trained: steps trained on before, for the schedules.
        """
        hyper, coefficients = self.settings.hyperparameters, Coefficients.at(self.settings, trained)
        self.optimizer.param_groups[0]["lr"] = coefficients.learning_rate
        prepared = self.networks.prepare(batch)
        estimates = self.networks.estimate(prepared, batch)
        rows, recurrence = self._rows(batch, prepared, estimates, coefficients.epsilon), estimates.recurrence
        done = [
            self._step(minibatch, recalled, coefficients)
            for _ in range(hyper.num_epoch)
            for minibatch, recalled in (
                minibatches(rows, hyper.batch_size, self.generator)
                if recurrence is None
                else recurrent_minibatches(rows, recurrence, hyper.batch_size // batch.sequence_length, self.generator)
            )
        ]
        self.actor.encoder.update(prepared.joined)
        taken = [step for step in done if step is not None]
        return UpdateReport(
            statistics=self._statistics(taken, coefficients, rows),
            steps=batch.steps,
            minibatches=len(done),
            skipped=len(done) - len(taken),
            lags=tuple(np.bincount(np.maximum(version - batch.versions, 0)).tolist()),
            group_rewards=bool(batch.group_rewards.any()),
        )

    def _rows(self, batch: Batch, prepared: Prepared, found: Estimates, epsilon: float) -> Rows:
        """The batch as tensors, with what the present critic makes of it."""
        values, next_values = found.values, found.next_values
        next_values[batch.terminated] = 0.0
        estimates = np.stack(
            [
                returns.advantages(
                    signals.rewards(name, signal.strength, batch),
                    values[:, head],
                    next_values[:, head],
                    batch.lengths,
                    signal.gamma,
                    self.settings.hyperparameters.lambd,
                )
                for head, (name, signal) in enumerate(self.signals.items())
            ],
            axis=1,
        )
        advantage_R = torch.from_numpy(returns.normalized(estimates.mean(1)))
        return Rows(
            inputs=prepared.inputs,
            continuous=torch.from_numpy(batch.continuous),
            discrete=torch.from_numpy(batch.discrete).long(),
            masks=None if batch.masks is None else torch.from_numpy(batch.masks),
            log_prob=torch.from_numpy(batch.log_probs),
            advantage=advantage_R,
            limit=losses.clip_limit(advantage_R, epsilon),
            returns=torch.from_numpy(estimates + values),
            values=torch.from_numpy(values),
        )

    def _step(
        self, rows: Rows, recalled: Recalled | None, coefficients: Coefficients
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """One step of Adam on a minibatch.

        Returns:
            Objective [B], squared value errors [B, S] and entropy; None where the gradient was not finite and nothing
            was done.
        """
        actor, actions = self.actor, self.actor.actions
        head_BH, values_BS = self.networks.both(rows.inputs, recalled)
        with torch.no_grad():
            chosen = distributions.evaluate(
                actions, head_BH, actor.log_sigma, rows.continuous, rows.discrete, rows.masks
            )
            objective_B, to_log_prob_B = losses.surrogate(chosen.log_prob, rows.log_prob, rows.advantage, rows.limit)
            squares_BS, to_values_BS = self._value_loss(rows, values_BS, coefficients.epsilon)
            parts = actions.continuous + len(actions.discrete)
            to_head_BH, to_log_sigma_C = chosen.gradient(to_log_prob_B, -coefficients.beta * parts)
            self.parameters.backward((head_BH, actor.log_sigma, values_BS), (to_head_BH, to_log_sigma_C, to_values_BS))
            # A NaN or an infinity in any row of the loss is in the gradient too, and so in its sum.
            if not math.isfinite(self.parameters.gradient.sum().item()):
                return None
            self.optimizer.step()
        return objective_B, squares_BS, chosen.entropy

    def _value_loss(self, rows: Rows, values_BS: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        if self.settings.hyperparameters.clip_value_loss:
            return losses.clipped_value_loss(values_BS, rows.returns, rows.values, epsilon, VALUE_WEIGHT)
        return losses.value_loss(values_BS, rows.returns, VALUE_WEIGHT)

    def _statistics(
        self, taken: list[tuple[Tensor, Tensor, Tensor]], coefficients: Coefficients, rows: Rows
    ) -> dict[str, float]:
        statistics = {
            "Policy/Learning Rate": coefficients.learning_rate,
            "Policy/Epsilon": coefficients.epsilon,
            "Policy/Beta": coefficients.beta,
        }
        for name, value in zip(self.signals, rows.values.mean(0).tolist(), strict=True):
            statistics[f"Policy/{name.capitalize()} Value Estimate"] = value
        if taken:
            means = ([part.mean() for part in column] for column in zip(*taken, strict=True))  # sizes may differ
            objective, squares, entropy = (torch.stack(column) for column in means)
            statistics["Losses/Policy Loss"] = objective.abs().mean().item()
            statistics["Losses/Value Loss"] = squares.mean().item()
            statistics["Policy/Entropy"] = entropy.mean().item()
        return statistics


def minibatches(rows: Rows, size: int, generator: torch.Generator) -> Iterator[tuple[Rows, None]]:
    """The rows in a random order, `size` or all at a time; what is left over is left out."""
    steps = len(rows.log_prob)
    size = min(size, steps)
    count = steps // size
    order_R = torch.randperm(steps, generator=generator)[: count * size]
    inputs = zip(*(_shuffled(column, order_R, size) for column in rows.inputs), strict=True)
    others = ([None] * count if column is None else _shuffled(column, order_R, size) for column in rows[1:])
    return ((Rows(*parts), None) for parts in zip(inputs, *others, strict=True))


def recurrent_minibatches(
    rows: Rows, recurrence: Recurrence, size: int, generator: torch.Generator
) -> Iterator[tuple[Rows, Recalled]]:
    """The sequences in a random order, `size` (at least one) or all at a time; what is left over is left out."""
    count = len(recurrence.lengths)
    size = min(max(1, size), count)
    order_q = torch.randperm(count, generator=generator)[: count // size * size].numpy()
    for which_q in order_q.reshape(-1, size):
        at_B, recalled = recurrence.some(which_q)
        others: Any = (None if column is None else column.index_select(0, at_B) for column in rows[1:])
        yield Rows(tuple(column.index_select(0, at_B) for column in rows.inputs), *others), recalled


def _shuffled(column: Tensor, order_R: Tensor, size: int) -> Iterable[Tensor]:
    """A column in another order, `size` rows at a time: views of one gather, unless that would copy a lot of memory."""
    if row_bytes(column) < _WIDE:
        return torch.split(column.index_select(0, order_R), size)
    return (column.index_select(0, part_B) for part_B in torch.split(order_R, size))
