# ruff: noqa: N803, N806 (names end in their shape)
"""MA-POCA (Cohen et al. 2021, arXiv 2111.05992, "On the Use and Misuse of Absorbing States in Multi-agent Reinforcement
Learning") trains teams that share a reward and whose members come and go.

1. Each group timestep has one value, computed from what all members there observe (the paper): attention instead of
   absorbing states, so that the number of members may change at any time.
2. A group has one series of rewards: what its members earned themselves, and the group's reward once (ML-Agents' sum).
3. Each group has one lambda return, in group time: `R_t = r_t + gamma (lambda R_{t+1} + (1 - lambda) V_{t+1})`. It
   continues after a member's end, which is posthumous credit (the paper; ML-Agents' `lambda_return`). The value after
   the segment is 0 only if the whole group ended, and not by interruption.
4. Each decision of a member has a baseline: the expected return given all that its teammates observe and do, but not
   its own action (the paper; a counterfactual baseline, after Foerster et al. 2018, COMA). The advantage is `R_t - b_t`
   of that member.
5. Rewards between two decisions of a member accrue in group time. A decision that was under way when its group's
   segment closed counts as the first timestep of the next.
6. The value does not observe members after their end. (ML-Agents includes their last observation once more; omitting it
   is the subject of the paper.)
7. Loss: surrogate + 0.5 (value loss + 0.5 baseline loss) - beta entropy (ML-Agents). The value loss is the mean over
   timesteps, the baseline loss that over decisions, both plain squared errors unless clipping is enabled (see `ppo`).
8. Advantages are normalized over the whole buffer, over all decisions (ML-Agents).
9. Actor and critic share no parameter, so each has its own kind of minibatch: the actor gets single decisions in a
   random order, as in PPO, because decisions of one timestep are much alike; the critic gets as many parts of whole
   timesteps in a random order, because members share computations about their teammates there.
10. A recurrent critic has a memory for each group, for its value, and one for each member, for its baseline. Its
    minibatches are whole windows of `sequence_length` group times, the actor's are sequences.
11. The number of members, scaled to [-1, 1] by the largest observed so far, is appended to the encoding (ML-Agents).
12. An agent without a group is a group of one: its baseline is a second value of the same observation.
13. Decisions by an older version are corrected for (`proximal`); the weight is that of the decision alone.

B rows of a minibatch, M its timesteps, R rows of the batch, K timesteps of the batch, T of these within segments, S
reward signals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparring.pipeline.learning import losses, returns
from sparring.pipeline.learning.actor_critic import Recurrence, RecurrentState
from sparring.pipeline.learning.cloning import Cloning, cloning_of
from sparring.pipeline.learning.group_buffer import GroupBatch
from sparring.pipeline.learning.group_networks import GroupEstimates, GroupNetworks, PreparedGroups
from sparring.pipeline.learning.optimizer import Adam
from sparring.pipeline.learning.ppo import minibatches, recurrent_minibatches
from sparring.pipeline.learning.proximal import Staleness, correct
from sparring.pipeline.learning.report import Losses, UpdateReport, diagnostics, general, lags, losses_of
from sparring.pipeline.learning.rows import Minibatch, policy_loss
from sparring.pipeline.learning.schedules import Coefficients
from sparring.pipeline.learning.settings import TrainerSettings
from sparring.pipeline.learning.signals import EXTRINSIC, EpisodeStarts, Signals, by_series
from sparring.pipeline.learning.signals.steps import Steps
from sparring.pipeline.networks.device import CPU, over
from sparring.pipeline.networks.group_critic import GroupRecurrentState, GroupTimesteps
from sparring.pipeline.specs import BehaviorSpec

VALUE_WEIGHT = 0.5
BASELINE_WEIGHT = 0.5 * VALUE_WEIGHT

Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]


class Targets(NamedTuple):
    """Holds the targets of a batch's values, baselines and actions.

    Attributes:
        returns: [K, S] lambda return at each timestep.
        values: [K, S] before the update.
        rows: the decisions; their `values` are the baselines before the update.
    """

    returns: Tensor
    values: Tensor
    rows: Minibatch


class CriticMinibatch(NamedTuple):
    """Holds whole timesteps, for a step of the critic.

    Attributes:
        timesteps: [M] their numbers.
        rows: [B] decisions made at these timesteps.
        inputs: members, observations and actions.
        state: sequences and the memories at their starts; None without memory.
    """

    timesteps: Numbers
    rows: Numbers
    inputs: GroupTimesteps
    state: GroupRecurrentState | None


class POCA:
    """Trains the networks of one behavior with MA-POCA.

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
        self.networks = GroupNetworks(behavior, spec, settings, generator)
        self.actor = self.networks.actor
        self.modules = self.networks.modules
        hyper = settings.hyperparameters
        self.optimizer = Adam(
            self.modules, hyper.learning_rate, device, epsilon=hyper.adam_epsilon, max_norm=hyper.max_grad_norm
        )
        self.signals = Signals(behavior, spec, settings, generator, learns=learns, device=device)
        self._episode_starts = EpisodeStarts()
        self.cloning: Cloning | None = cloning_of(behavior, self.actor, settings, generator) if learns else None

    def register(self, specs: Mapping[str, BehaviorSpec]) -> None:
        """Registers other behavior names that share groups with ours: the critic gets embeddings for them."""
        self.networks.register(specs)
        self.optimizer = self.optimizer.grown()

    def update(self, batch: GroupBatch, version: int, trained: int) -> UpdateReport:
        """Trains on `batch`: values, baselines and advantages, then `num_epoch` passes over shuffled minibatches.

        Args:
            batch: whole group segments.
            version: version of the current weights.
            trained: steps trained on before, for the schedules.
        """
        coefficients = Coefficients.at(self.settings, trained)
        self.optimizer.learning_rate = coefficients.learning_rate
        prepared = self.networks.prepare(batch)
        estimates = self.networks.estimate(prepared, batch)
        targets = self._targets(batch, prepared, estimates, coefficients.epsilon)
        recurrence, hyper = self._recurrence(batch, prepared), self.settings.hyperparameters
        rows, staleness = correct(
            self.actor,
            targets.rows,
            batch.versions < version,
            recurrence,
            coefficients.epsilon,
            decoupled=hyper.decoupled_objective,
            per_dimension=hyper.ratio == "per_dimension",
        )
        targets = targets._replace(rows=rows)
        done = []
        for _ in range(hyper.num_epoch):
            for (some, state, at_B), critic_batch in self._minibatches(prepared, estimates, targets, recurrence):
                there = over((some, state, critic_batch), self.optimizer.device)
                done.append(self._step(*there, targets, coefficients))
                self.signals.learn(at_B)
        cloned = {} if self.cloning is None else self.cloning.update(trained)
        self.networks.update(prepared)
        taken = [step for step in done if step is not None]
        return UpdateReport(
            statistics=self._statistics(taken, coefficients, targets, prepared.index.in_series, staleness)
            | self.signals.statistics()
            | cloned,
            steps=batch.steps,
            minibatches=len(done),
            skipped=len(done) - len(taken),
            lags=lags(version, batch.versions),
            group_rewards=bool(batch.group_rewards.any()),
            groups=bool(prepared.index.counts.max() > 1),
            terminated=bool(batch.over.any()),
            staleness=staleness,
        )

    def _targets(self, batch: GroupBatch, prepared: PreparedGroups, found: GroupEstimates, epsilon: float) -> Targets:
        """Computes the returns of all groups (2, 3), and from them the advantages of all decisions (4, 8)."""
        index = prepared.index
        returns_KS = np.zeros_like(found.values)
        rewards = self.signals.begin(batch.rewards, lambda: self._reward_steps(batch))
        shared_T = self.signals.scaled(batch.shared, batch.spans, batch.numbers, batch.over)
        starts_K, empty_g = (
            index.first[self._episode_starts.find(batch.numbers, batch.over)],
            index.counts[index.last] == 0,
        )
        there_K = starts_K[index.counts[starts_K] > 0]
        for head, (name, signal) in enumerate(self.signals.settings.items()):
            earned_T = (
                shared_T * np.float32(signal.strength)
                if name == EXTRINSIC
                else by_series(rewards[name], index.timesteps, index.in_series)
            )
            values_K = found.values[:, head]
            next_values_g = values_K[index.last]
            start_value = self._episode_starts.value(name, values_K[there_K])
            share = self.signals.terminal_bootstrap_fraction(name, int(empty_g.sum()), len(batch.shared))
            next_values_g[empty_g] = share * start_value  # where no member is left, the next group starts
            advantages_T = returns.advantages(
                earned_T,
                values_K[index.in_series],
                next_values_g,
                batch.spans,
                signal.gamma,
                self.settings.hyperparameters.lambd,
            )
            returns_KS[index.in_series, head] = advantages_T + values_K[index.in_series]
        returns_RS = returns_KS[index.timesteps]
        advantage_R = torch.from_numpy(returns.normalized((returns_RS - found.baselines).mean(1)))
        inputs = prepared.inputs[0]
        assert inputs is not None
        rows = Minibatch(
            inputs=tuple(column[: batch.steps] for column in inputs),
            continuous=torch.from_numpy(batch.own.continuous),
            discrete=torch.from_numpy(batch.own.discrete).long(),
            masks=None if batch.masks is None else torch.from_numpy(batch.masks),
            log_prob=torch.from_numpy(batch.log_probs),
            advantage=advantage_R,
            limit=losses.clip_limit(advantage_R, epsilon),
            returns=torch.from_numpy(returns_RS),
            values=torch.from_numpy(found.baselines),
        )
        return Targets(torch.from_numpy(returns_KS), torch.from_numpy(found.values), rows)

    def _reward_steps(self, batch: GroupBatch) -> Steps:
        """Returns our own decisions as reward networks read them."""
        own = batch.own
        return Steps.of_segments(
            self.actor.actions,
            own.lengths,
            own.observations,
            own.next_observations,
            own.continuous,
            own.discrete,
            batch.ended,
            batch.agent_episodes,
            self.actor.action_limit,
        )

    def _recurrence(self, batch: GroupBatch, prepared: PreparedGroups) -> Recurrence | None:
        """Returns the actor's sequences, in the order of the windows; None for an actor without memory."""
        if not self.networks.memory or batch.carried is None:
            return None
        windows = prepared.windows
        memory = batch.carried[windows.by_window, : self.networks.memory]
        return Recurrence(first=windows.first_q, lengths=windows.lengths_q, actor=memory, critic=None)

    def _minibatches(
        self, prepared: PreparedGroups, found: GroupEstimates, targets: Targets, recurrence: Recurrence | None
    ) -> Iterator[tuple[tuple[Minibatch, RecurrentState | None, Tensor], CriticMinibatch]]:
        """Yields as many minibatches of the actor as PPO does, each with a part of the timesteps for the critic (9,
        10).
        """
        size, steps = self.settings.hyperparameters.batch_size, len(targets.rows.log_prob)
        of_actor: Iterator[tuple[Minibatch, RecurrentState | None, Tensor]]
        if recurrence is None:
            count = steps // min(size, steps)
            of_actor = minibatches(targets.rows, size, self.generator)
        else:
            sequences = len(recurrence.lengths)
            some = min(max(1, size // self.settings.network_settings.sequence_length), sequences)
            count = sequences // some
            of_actor = recurrent_minibatches(targets.rows, recurrence, some, self.generator)
        of_critic = shuffled(prepared.windows.weights, count, self.generator)
        for at, of_policy in enumerate(of_actor):
            yield of_policy, self._critic_minibatch(prepared, found, of_critic[at % len(of_critic)])

    def _critic_minibatch(self, prepared: PreparedGroups, found: GroupEstimates, which: Numbers) -> CriticMinibatch:
        """Returns the critic's minibatch of some windows."""
        if found.groups is not None and found.members is not None:
            inputs, state, timesteps, rows = self.networks.recall(prepared, which, found.groups, found.members)
            return CriticMinibatch(timesteps, rows, inputs, state)
        windows = prepared.windows
        timesteps, rows = windows.timesteps(which), windows.first_q[windows.of_windows(which)]
        return CriticMinibatch(timesteps, rows, prepared.gather(timesteps, rows), None)

    def _step(
        self,
        rows: Minibatch,
        state: RecurrentState | None,
        critic_batch: CriticMinibatch,
        targets: Targets,
        coefficients: Coefficients,
    ) -> Losses | None:
        """Takes one step of Adam on a minibatch (7).

        Returns:
            Its losses: objective and logarithm of the ratio [B], squared errors of values [M, S] and baselines [B, S],
                entropy and gradient norm; None if the gradient was not finite and the step was skipped.
        """
        critic = self.networks.critic
        layout, memory = (None, None) if state is None else (state.layout, state.actor)
        head_BH = self.actor(rows.inputs, layout, memory)
        if critic_batch.state is None:
            values_MS, baselines_BS = critic(critic_batch.inputs)
        else:
            values_MS, baselines_BS, _ = critic.remember(critic_batch.inputs, critic_batch.state)
        with torch.no_grad():
            chosen = policy_loss(self.actor, head_BH, rows, coefficients.beta)
            squares_MS, to_values_MS = self._squares(
                values_MS, targets.returns, targets.values, critic_batch.timesteps, coefficients.epsilon, VALUE_WEIGHT
            )
            every = targets.rows
            squares_BS, to_baselines_BS = self._squares(
                baselines_BS, every.returns, every.values, critic_batch.rows, coefficients.epsilon, BASELINE_WEIGHT
            )
            outputs = (head_BH, self.actor.log_sigma, values_MS, baselines_BS)
            gradients = (chosen.to_head, chosen.to_log_sigma, to_values_MS, to_baselines_BS)
            if not self.optimizer.step(outputs, gradients):
                return None
        squares = {"values": squares_MS, "baselines": squares_BS}
        return chosen.losses() | squares | {"gradient_norm": self.optimizer.gradient_norm}

    def _squares(
        self, found: Tensor, returns_: Tensor, before: Tensor, which: Numbers, epsilon: float, weight: float
    ) -> tuple[Tensor, Tensor]:
        """Returns squared errors of some values or baselines, and the derivative of `weight` times their mean."""
        if not len(which):  # no member of ours decided at these timesteps
            return found.new_zeros(1, found.shape[1]), torch.zeros_like(found)
        at, clipped = torch.from_numpy(which), self.settings.hyperparameters.clip_value_loss
        aims = returns_.index_select(0, at), before.index_select(0, at) if clipped else None
        return losses.value_loss_of(found, *over(aims, found.device), epsilon, weight)

    def _statistics(
        self,
        taken: list[Losses],
        coefficients: Coefficients,
        targets: Targets,
        in_series: Numbers,
        staleness: Staleness,
    ) -> dict[str, float]:
        at_T = torch.from_numpy(in_series)
        returns_TS, values_TS = targets.returns[at_T], targets.values[at_T]
        estimates = {"Value": values_TS, "Baseline": targets.rows.values}
        means = {kind: zip(self.signals.settings, one.mean(0).tolist(), strict=True) for kind, one in estimates.items()}
        return (
            general(coefficients, means)
            | losses_of(taken)
            | diagnostics(taken, returns_TS.numpy(), values_TS.numpy(), coefficients.epsilon, staleness)
        )


def shuffled(weights_U: Numbers, parts: int, generator: torch.Generator) -> list[Numbers]:
    """Divides units, in a random order, into at most `parts` parts of about equal weight.

    Args:
        weights_U: weight of each unit; units of weight 0 are left out.
        parts: at least 1.
        generator: random source.
    """
    units = np.flatnonzero(weights_U)
    order = units[torch.randperm(len(units), generator=generator).numpy()]
    ends = np.cumsum(weights_U[order])
    bounds = np.searchsorted(ends, ends[-1] * np.arange(1, parts) / parts) + 1
    return [part for part in np.split(order, bounds) if part.size]
