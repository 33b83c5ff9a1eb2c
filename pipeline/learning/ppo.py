# ruff: noqa: N803, N806 (names end in their shape)
"""Proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347) trains on one batch per update.

It differs from the paper as follows:

1. The ratio of each continuous dimension and branch is clipped by itself, and the surrogate is their mean (ML-Agents).
   The bonus is for the entropy's sum over branches plus its mean over continuous dimensions. With `ratio: joint` the
   ratio is that of the joint action, as in the paper, and the bonus is multiplied by the number of dimensions and
   branches, so that `beta` keeps its weight.
2. The value loss is not clipped by default: Andrychowicz et al. 2020 (arXiv 2006.05990, section 3.2) find clipping
   harmful. It is the mean squared error times 0.5.
3. Advantages are normalized over the whole buffer, not per minibatch (ML-Agents).
4. Learning rate, clip range and entropy weight fall over training (ML-Agents; the paper's Atari runs anneal the first
   two).
5. An incomplete last minibatch is skipped (ML-Agents). The gradient is not clipped unless `max_grad_norm` is set.
6. Adam's epsilon is 1e-8 (PyTorch's) unless `adam_epsilon` is set; the authors' code has 1e-5.

7. The returns of curiosity and rnd continue after the end of an episode (ML-Agents), see `signals`;
   those of GAIL do so in proportion to how often demonstrations end, see `signals.gail`.
8. A recurrent network is trained on sequences from the memory that was stored at their start; no gradient flows beyond
   that start (ML-Agents).
9. Steps by an older version are corrected for (`proximal`).

B rows of a minibatch, R rows of the batch, F features, C continuous actions, D branches, S reward signals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from sparring.pipeline.learning import losses, returns
from sparring.pipeline.learning.actor_critic import (
    ActorCritic,
    Estimates,
    Prepared,
    Recurrence,
    RecurrentState,
    row_bytes,
)
from sparring.pipeline.learning.buffer import Batch
from sparring.pipeline.learning.cloning import Cloning, cloning_of
from sparring.pipeline.learning.optimizer import Adam
from sparring.pipeline.learning.proximal import Staleness, correct
from sparring.pipeline.learning.report import Losses, UpdateReport, diagnostics, general, lags, losses_of
from sparring.pipeline.learning.rows import Minibatch, policy_loss
from sparring.pipeline.learning.schedules import Coefficients
from sparring.pipeline.learning.settings import TrainerSettings
from sparring.pipeline.learning.signals import EpisodeStarts, Signals
from sparring.pipeline.learning.signals.steps import Steps
from sparring.pipeline.networks.device import CPU, over
from sparring.pipeline.specs import BehaviorSpec

VALUE_WEIGHT = 0.5
_WIDE = 4096
"""Bytes of a row from which a column is shuffled one minibatch at a time instead of all at once."""


class PPO:
    """Trains the networks of one behavior with PPO.

    Attributes:
        networks: actor and critic.
        actor: the one of `networks`.
        modules: both networks by name.
        optimizer: changes their parameters.
        signals: rewards, and the networks of reward signals.
        cloning: supervised training of the actor beside this; None for none.

    Args:
        behavior: name of the behavior.
        spec: observations and actions of the behavior.
        settings: the learner's settings.
        generator: random source of the initial weights and of shuffling.
        learns: False loads no demonstrations, for networks that only receive weights.
        device: device of the networks.

    Raises:
        Unsupported: no network can be built for the spec or the settings.
        RecordingError: demonstrations are missing, unreadable, or of another spec.
    """

    def __init__(
        self,
        behavior: str,
        spec: BehaviorSpec,
        settings: TrainerSettings,
        generator: torch.Generator,
        *,
        learns: bool = True,
        device: torch.device = CPU,
    ) -> None:
        self.settings = settings
        self.generator = generator
        self.networks = ActorCritic(spec, settings, generator)
        self.actor = self.networks.actor
        self.modules = self.networks.modules
        hyper = settings.hyperparameters
        self.optimizer = Adam(
            self.modules, hyper.learning_rate, device, epsilon=hyper.adam_epsilon, max_norm=hyper.max_grad_norm
        )
        self.signals = Signals(behavior, spec, settings, generator, learns=learns, device=device)
        self._episode_starts = EpisodeStarts()
        self.cloning: Cloning | None = cloning_of(behavior, self.actor, settings, generator) if learns else None

    def update(self, batch: Batch, version: int, trained: int) -> UpdateReport:
        """Trains on `batch`: values and advantages, then `num_epoch` passes over shuffled minibatches.

        Args:
            batch: whole segments.
            version: version of the current weights.
            trained: steps trained on before, for the schedules.
        """
        hyper, coefficients = self.settings.hyperparameters, Coefficients.at(self.settings, trained)
        self.optimizer.learning_rate = coefficients.learning_rate
        prepared = self.networks.prepare(batch)
        estimates = self.networks.estimate(prepared, batch)
        rows, recurrence = self._rows(batch, prepared, estimates, coefficients.epsilon), estimates.recurrence
        rows, staleness = correct(
            self.actor,
            rows,
            batch.versions < version,
            recurrence,
            coefficients.epsilon,
            decoupled=hyper.decoupled_objective,
            per_dimension=hyper.ratio == "per_dimension",
        )
        done = []
        for _ in range(hyper.num_epoch):
            for minibatch, state, at_B in (
                minibatches(rows, hyper.batch_size, self.generator)
                if recurrence is None
                else recurrent_minibatches(rows, recurrence, hyper.batch_size // batch.sequence_length, self.generator)
            ):
                done.append(self._step(*over((minibatch, state), self.optimizer.device), coefficients))
                self.signals.learn(at_B)
        cloned = {} if self.cloning is None else self.cloning.update(trained)
        self.actor.encoder.update(prepared.joined)
        taken = [step for step in done if step is not None]
        return UpdateReport(
            statistics=self._statistics(taken, coefficients, rows, staleness) | self.signals.statistics() | cloned,
            steps=batch.steps,
            minibatches=len(done),
            skipped=len(done) - len(taken),
            lags=lags(version, batch.versions),
            group_rewards=bool(batch.group_rewards.any()),
            terminated=bool(batch.terminated.any()),
            staleness=staleness,
        )

    def _rows(self, batch: Batch, prepared: Prepared, found: Estimates, epsilon: float) -> Minibatch:
        """Returns the batch as tensors, with the current critic's estimates and the advantages."""
        values, next_values = found.values, found.next_values
        extrinsic = self.signals.scaled(
            batch.rewards + batch.group_rewards, batch.lengths, batch.agent_episodes, batch.ended
        )
        rewards = self.signals.begin(extrinsic, lambda: self._reward_steps(batch))
        starts_R = (np.cumsum(batch.lengths) - batch.lengths)[
            self._episode_starts.find(batch.agent_episodes, batch.ended)
        ]
        for head, name in enumerate(self.signals.settings):
            start_value = self._episode_starts.value(name, values[starts_R, head])
            share = self.signals.terminal_bootstrap_fraction(name, int(batch.terminated.sum()), batch.steps)
            next_values[batch.terminated, head] = share * start_value
        estimates = np.stack(
            [
                returns.advantages(
                    rewards[name],
                    values[:, head],
                    next_values[:, head],
                    batch.lengths,
                    signal.gamma,
                    self.settings.hyperparameters.lambd,
                )
                for head, (name, signal) in enumerate(self.signals.settings.items())
            ],
            axis=1,
        )
        advantage_R = torch.from_numpy(returns.normalized(estimates.mean(1)))
        return Minibatch(
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

    def _reward_steps(self, batch: Batch) -> Steps:
        """Returns the batch as reward networks read it."""
        return Steps.of_segments(
            self.actor.actions,
            batch.lengths,
            batch.observations,
            batch.next_observations,
            batch.continuous,
            batch.discrete,
            batch.ended,
            batch.agent_episodes,
            self.actor.action_limit,
        )

    @torch.no_grad()
    def _step(self, rows: Minibatch, state: RecurrentState | None, coefficients: Coefficients) -> Losses | None:
        """Takes one step of Adam on a minibatch.

        Returns:
            Its losses: objective and logarithm of the ratio [B], squared value errors [B, S], entropy and gradient
                norm; None if the gradient was not finite and the step was skipped.
        """
        head_BH, values_BS, backward_fn = self.networks.run(rows.inputs, state)
        old_values_BS = rows.values if self.settings.hyperparameters.clip_value_loss else None
        chosen = policy_loss(self.actor, head_BH, rows, coefficients.beta)
        squares_BS, to_values_BS = losses.value_loss_of(
            values_BS, rows.returns, old_values_BS, coefficients.epsilon, VALUE_WEIGHT
        )
        outputs = (head_BH, self.actor.log_sigma, values_BS)
        if not self.optimizer.step(outputs, (chosen.to_head, chosen.to_log_sigma, to_values_BS), backward_fn):
            return None
        return chosen.losses() | {"values": squares_BS, "gradient_norm": self.optimizer.gradient_norm}

    def _statistics(
        self, taken: list[Losses], coefficients: Coefficients, rows: Minibatch, staleness: Staleness
    ) -> dict[str, float]:
        estimates = zip(self.signals.settings, rows.values.mean(0).tolist(), strict=True)
        return (
            general(coefficients, {"Value": estimates})
            | losses_of(taken)
            | diagnostics(taken, rows.returns.numpy(), rows.values.numpy(), coefficients.epsilon, staleness)
        )


def minibatches(rows: Minibatch, size: int, generator: torch.Generator) -> Iterator[tuple[Minibatch, None, Tensor]]:
    """Yields minibatches of `size` shuffled rows, or one of all, with row numbers; incomplete ones are left out."""
    steps = len(rows.log_prob)
    size = min(size, steps)
    count = steps // size
    order_R = torch.randperm(steps, generator=generator)[: count * size]
    inputs = zip(*(_shuffled(column, order_R, size) for column in rows.inputs), strict=True)
    others = ([None] * count if column is None else _shuffled(column, order_R, size) for column in rows[1:])
    which = torch.split(order_R, size)
    return ((Minibatch(*parts), None, at_B) for at_B, *parts in zip(which, inputs, *others, strict=True))


def recurrent_minibatches(
    rows: Minibatch, recurrence: Recurrence, size: int, generator: torch.Generator
) -> Iterator[tuple[Minibatch, RecurrentState, Tensor]]:
    """Yields minibatches of `size` (at least one) shuffled sequences, or one of all, with their row numbers.

    Incomplete ones are left out.
    """
    count = len(recurrence.lengths)
    size = min(max(1, size), count)
    order_q = torch.randperm(count, generator=generator)[: count // size * size].numpy()
    for which_q in order_q.reshape(-1, size):
        at_B, state = recurrence.select(which_q)
        yield rows.at(at_B), state, at_B


def _shuffled(column: Tensor, order_R: Tensor, size: int) -> Iterable[Tensor]:
    """Yields a reordered column, `size` rows at a time: views of one gather, unless that would copy a lot of memory."""
    if row_bytes(column) < _WIDE:
        return torch.split(column.index_select(0, order_R), size)
    return (column.index_select(0, part_B) for part_B in torch.split(order_R, size))
