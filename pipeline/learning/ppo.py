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
9. Steps by an older version are corrected for (`losses.correct`).

`PolicyGradient` is what it has in common with MA-POCA. An algorithm computes targets of a whole batch (`_targets`).
After the correction for staleness (`losses.correct`), Adam takes a step on each of several shuffled minibatches: minus
the clipped surrogate and the entropy bonus, plus the losses of the critic's estimates, which the algorithm evaluates
(`_forward`).

B rows of a minibatch, R rows of the batch, T steps of g series, H means and logits, S reward signals.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from sparring.pipeline.learning import losses, minibatches
from sparring.pipeline.learning.actor_critic import ActorCritic, AgentNetworks
from sparring.pipeline.learning.algorithm import Algorithm, Parts
from sparring.pipeline.learning.buffer import Batch, Series
from sparring.pipeline.learning.cloning import Cloning
from sparring.pipeline.learning.minibatches import Minibatch, Part, Recurrence
from sparring.pipeline.learning.optimizer import Adam, of_finite
from sparring.pipeline.learning.settings import Coefficients, Hyperparameters, TrainerSettings
from sparring.pipeline.learning.signals import EpisodeStarts, Signals, Steps
from sparring.pipeline.networks.device import over
from sparring.pipeline.networks.encoders import Encoder, Inputs
from sparring.pipeline.networks.perceptron import accumulate
from sparring.pipeline.specs import Array, Floats

VALUE_WEIGHT: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class Targets:
    """Holds the targets of a batch.

    Attributes:
        rows: all decisions, on the device.
        recurrence: the actor's sequences; None for an actor without memory.
        returns: [T, S] targets of the values.
        before: [n, S] the critic's estimates before the update, by kind; those of values have the rows of `returns`.
        observed: observations before normalization, for the running statistics of each encoder.
        groups: some agents shared a group.
    """

    rows: Minibatch
    recurrence: Recurrence | None
    returns: Floats
    before: Mapping[str, Floats]
    observed: Sequence[tuple[Encoder, Inputs]]
    groups: bool = False


class Estimated(NamedTuple):
    """Holds estimates of the critic for a minibatch.

    Attributes:
        found: [n, S].
        weight: factor of their mean squared error.
        returns: [n, S] their targets.
        before: [n, S] the estimates before the update.
    """

    found: Tensor
    weight: float
    returns: Tensor
    before: Tensor


class ForwardPass(NamedTuple):
    """Holds the outputs of the networks for a minibatch.

    Attributes:
        head: [B, H] means and logits.
        estimates: of the critic, by kind.
        backward_fn: propagates gradients of head and estimates to the parameters.
    """

    head: Tensor
    estimates: Mapping[str, Estimated]
    backward_fn: Callable[..., object]


NetworksT = TypeVar("NetworksT", bound=ActorCritic)
TargetsT = TypeVar("TargetsT", bound=Targets)


@dataclass(eq=False)
class PolicyGradient(Algorithm, Generic[NetworksT, TargetsT]):
    """Trains the networks of one behavior.

    Attributes:
        networks: actor and critic.
        optimizer: changes their parameters.
        signals: rewards, and the networks of reward signals.
        settings: the learner's settings.
        generator: random source of shuffling.
        cloning: trains the actor on demonstrations beside this; None for none.
        is_stopping: returns whether an update is to end after its present minibatch.
        actor: the one of `networks`.
        hyper: hyperparameters of the settings.
    """

    networks: NetworksT
    optimizer: Adam
    signals: Signals
    settings: TrainerSettings
    generator: torch.Generator
    cloning: Cloning | None = None
    is_stopping: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.actor = self.networks.actor
        self.hyper = hyperparameters_of(self.settings)
        self._episode_starts = EpisodeStarts()

    def update(self, batch: Batch, version: int, trained: int) -> losses.UpdateReport:
        """Trains on `batch`: estimates and advantages, then `num_epoch` passes over shuffled minibatches.

        Args:
            batch: whole segments.
            version: version of the current weights.
            trained: steps trained on before, for the schedules.
        """
        hyper, coefficients = self.hyper, Coefficients.at(self.hyper, trained / self.settings.max_steps)
        epsilon = coefficients.epsilon
        self.optimizer.learning_rate = coefficients.learning_rate
        targets, stale = self._targets(batch, epsilon), batch.versions < version
        rows, staleness = losses.correct(self.actor, targets.rows, stale, targets.recurrence, epsilon, hyper)
        targets = replace(targets, rows=rows)
        done = []
        passes = (self._minibatches(targets) for _ in range(hyper.num_epoch))
        # Inference mode saves a twentieth of a small update, but its tensors can never be part of a graph.
        has_graph = self.networks.needs_graph or bool(self.signals.sources)
        with torch.no_grad() if has_graph else torch.inference_mode():
            for part in chain.from_iterable(passes):
                done.append(self._step(targets, part, coefficients))
                self.signals.learn(part.at)
                if self.is_stopping():
                    break
        cloned = {} if self.cloning is None else self.cloning.update(trained)
        for encoder, joined in targets.observed:
            encoder.update(joined)
        taken = of_finite([(one.step.skipped, one) for one in done])
        names = ("Policy/Learning Rate", "Policy/Epsilon", "Policy/Beta")
        return losses.UpdateReport(
            statistics=dict(zip(names, coefficients, strict=True))
            | {
                f"Policy/{signal.capitalize()} {kind} Estimate": mean
                for kind, estimates in targets.before.items()
                for signal, mean in zip(self.signals.settings, estimates.mean(0).tolist(), strict=True)
            }
            | losses.losses_of(taken)
            | losses.diagnostics(taken, targets.returns, targets.before["Value"], epsilon, staleness)
            | self.signals.statistics()
            | cloned,
            steps=batch.steps,
            minibatches=len(done),
            skipped=len(done) - len(taken),
            lags=losses.lags(version, batch.versions),
            group_rewards=bool(batch.group_rewards.any()),
            groups=targets.groups,
            terminated=bool(batch.terminated.any()),
            staleness=staleness,
        )

    # ---------------------------------------------------------------- what differs

    @abstractmethod
    def _targets(self, batch: Batch, epsilon: float) -> TargetsT:
        """Estimates a batch, and computes returns and advantages from that."""

    @abstractmethod
    def _minibatches(self, targets: TargetsT) -> Iterator[Part]:
        """Yields the minibatches of one pass."""

    @abstractmethod
    def _forward(self, targets: TargetsT, part: Part) -> ForwardPass:
        """Evaluates a minibatch for differentiation, under `no_grad`."""

    # ---------------------------------------------------------------- what is shared

    def _advantages(
        self,
        series: Series,
        rewards: Mapping[str, Floats],
        values_TS: Floats,
        next_values_gS: Floats,
        terminated_g: Array,
        occupied_g: Array,
    ) -> Floats:
        """Returns [T, S] generalized advantage estimates.

        Args:
            series: segments of agents or groups.
            rewards: [T] by signal.
            values_TS: estimates before the update.
            next_values_gS: those of what follows each segment; replaced where no member is left.
            terminated_g: no member is left after the segment.
            occupied_g: a member is there at its first step.
        """
        begun_g = self._episode_starts.find(series.numbers, series.ended) & occupied_g
        begun = (np.cumsum(series.lengths) - series.lengths)[begun_g]
        found = []
        for head, (name, signal) in enumerate(self.signals.settings.items()):
            values_T, next_values_g = values_TS[:, head], next_values_gS[:, head]
            source, ends = self.signals.sources.get(name), int(terminated_g.sum())
            share = 0.0 if source is None else source.terminal_bootstrap_fraction(ends, len(values_T))
            next_values_g[terminated_g] = share * self._episode_starts.value(name, values_T[begun])
            lambd = self.hyper.lambd
            found.append(losses.advantages(rewards[name], values_T, next_values_g, series.lengths, signal.gamma, lambd))
        return np.stack(found, axis=1)

    def _rows(
        self, batch: Batch, inputs: Inputs, advantages_R: Floats, returns_RS: Floats, values_RS: Floats, epsilon: float
    ) -> Minibatch:
        """Returns all decisions of a batch, with normalized advantages, on the device."""
        advantage_R = torch.from_numpy(losses.normalized(advantages_R))
        rows = Minibatch(
            inputs=inputs,
            continuous=torch.from_numpy(batch.continuous),
            discrete=torch.from_numpy(batch.discrete).long(),
            masks=None if batch.masks is None else torch.from_numpy(batch.masks),
            log_prob=torch.from_numpy(batch.log_probs),
            advantage=advantage_R,
            limit=losses.clip_limit(advantage_R, epsilon),
            returns=torch.from_numpy(returns_RS),
            values=torch.from_numpy(values_RS),
        )
        return over(rows, self.optimizer.device)

    def _reward_steps(self, batch: Batch) -> Steps:
        """Returns our own decisions as reward networks read them."""
        return Steps(batch, self.actor.actions, self.actor.action_limit)

    def _of_actor(self, targets: Targets) -> Iterator[Part]:
        """Yields shuffled minibatches of rows, or of whole sequences."""
        size, ranks = self.hyper.batch_size, self.optimizer.ranks
        if targets.recurrence is None:
            return minibatches.minibatches(targets.rows, size, self.generator, ranks)
        size //= self.settings.network_settings.sequence_length
        return minibatches.recurrent_minibatches(targets.rows, targets.recurrence, size, self.generator, ranks)

    def _step(self, targets: TargetsT, part: Part, coefficients: Coefficients) -> losses.Losses:
        """Takes one step of Adam on a minibatch, and returns its losses; called under `no_grad`."""
        head_BH, estimates, backward_fn = self._forward(targets, part)
        clipped = self.hyper.clip_value_loss
        terms, to_head_BH, to_log_sigma_C = losses.policy_loss(self.actor, head_BH, part.rows, coefficients.beta)
        if part.weight != 1.0:
            to_head_BH, to_log_sigma_C = to_head_BH * part.weight, to_log_sigma_C * part.weight
        squares, gradients = {}, [to_head_BH]
        for kind, (found, weight, aims, before) in estimates.items():
            old = before if clipped else None
            squares[kind], gradient = losses.value_loss(found, aims, weight, old, coefficients.epsilon)
            gradients.append(gradient)

        def backward() -> None:
            accumulate(self.actor.log_sigma, to_log_sigma_C)
            backward_fn(*gradients)

        return losses.Losses(terms, squares, self.optimizer.step(backward))


def hyperparameters_of(settings: TrainerSettings) -> Hyperparameters:
    """Returns the hyperparameters, which are those of PPO or of MA-POCA."""
    assert isinstance(settings.hyperparameters, Hyperparameters)
    return settings.hyperparameters


def adam(parts: Parts, networks: ActorCritic) -> Adam:
    """Returns the optimizer that the hyperparameters describe."""
    hyper = hyperparameters_of(parts.settings)
    return parts.adam(networks.modules, hyper.adam_epsilon, hyper.max_grad_norm)


def build(parts: Parts) -> "PPO":
    """Builds the networks of single agents, and what trains them."""
    networks = AgentNetworks(parts.spec, parts.settings, parts.generator)
    own = adam(parts, networks), parts.signals(), parts.settings, parts.generator, parts.cloning(networks)
    return PPO(networks, *own)


class PPO(PolicyGradient[AgentNetworks, Targets]):
    """Trains the networks of one behavior with PPO; every agent is a group of one."""

    def _targets(self, batch: Batch, epsilon: float) -> Targets:
        prepared = self.networks.prepare(batch)
        found = self.networks.estimate(prepared, batch)
        rewards = self.signals.begin(self.signals.scaled(*batch.series), lambda: self._reward_steps(batch))
        here = np.ones(len(batch.lengths), bool)
        advantages_RS = self._advantages(batch.series, rewards, found.values, found.next_values, batch.terminated, here)
        returns_RS = advantages_RS + found.values
        rows = self._rows(batch, prepared.inputs, advantages_RS.mean(1), returns_RS, found.values, epsilon)
        return Targets(
            rows=rows,
            recurrence=found.recurrence,
            returns=returns_RS,
            before={"Value": found.values},
            observed=[(self.actor.encoder, prepared.joined)],
        )

    def _minibatches(self, targets: Targets) -> Iterator[Part]:
        return self._of_actor(targets)

    def _forward(self, targets: Targets, part: Part) -> ForwardPass:
        rows = part.rows
        head_BH, values_BS, backward_fn = self.networks.run(rows.inputs, part.state)
        values = Estimated(values_BS, VALUE_WEIGHT * part.weight, rows.returns, rows.values)
        return ForwardPass(head_BH, {"Value": values}, backward_fn)
