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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from sparring.pipeline.learning.algorithm import Parts
from sparring.pipeline.learning.buffer import Batch
from sparring.pipeline.learning.group_networks import GroupEstimates, GroupNetworks, PreparedGroups
from sparring.pipeline.learning.minibatches import Part, Recurrence
from sparring.pipeline.learning.ppo import VALUE_WEIGHT, Estimated, ForwardPass, PolicyGradient, Targets, adam
from sparring.pipeline.learning.settings import EXTRINSIC
from sparring.pipeline.learning.signals import by_series
from sparring.pipeline.networks.device import over
from sparring.pipeline.specs import BehaviorSpec, Numbers

BASELINE_WEIGHT: Final = 0.5 * VALUE_WEIGHT


@dataclass(frozen=True, kw_only=True)
class GroupTargets(Targets):
    """Holds the targets of a batch of groups; `values` of its `rows` are the baselines before the update.

    Attributes:
        prepared: the batch as the networks read it.
        estimates: the critic's estimates before the update.
        of_timesteps: [K, S] lambda return at each timestep, and value before the update, on the device.
    """

    prepared: PreparedGroups
    estimates: GroupEstimates
    of_timesteps: tuple[Tensor, Tensor]


def build(parts: Parts) -> "POCA":
    """Builds an actor and a critic of groups, and what trains them."""
    networks = GroupNetworks(parts.behavior, parts.spec, parts.settings, parts.generator)
    own = adam(parts, networks), parts.signals(), parts.settings, parts.generator, parts.cloning(networks)
    return POCA(networks, *own)


class POCA(PolicyGradient[GroupNetworks, GroupTargets]):
    """Trains the networks of one behavior with MA-POCA."""

    @property
    def teammates(self) -> Mapping[str, BehaviorSpec]:
        return self.networks.teammates

    def register(self, specs: Mapping[str, BehaviorSpec]) -> None:
        self.networks.register(specs)
        self.optimizer = self.optimizer.grown()

    def _targets(self, batch: Batch, epsilon: float) -> GroupTargets:
        """Computes the returns of all groups (2, 3), and from them the advantages of all decisions (4, 8)."""
        prepared, series = self.networks.prepare(batch), batch.series
        index, found = prepared.index, self.networks.estimate(prepared, batch)
        shared_T = self.signals.scaled(*series)
        rewards = self.signals.begin(batch.rewards, lambda: self._reward_steps(batch))
        for name, signal in self.signals.settings.items():
            if name == EXTRINSIC:
                rewards[name] = shared_T * np.float32(signal.strength)
            else:
                rewards[name] = by_series(rewards[name], index.timesteps, index.in_series)
        values_TS, next_values_gS = found.values[index.in_series], found.values[index.last]
        # Where no member is left, the next group starts.
        is_empty, is_occupied = index.counts[index.last] == 0, index.counts[index.first] > 0
        returns_KS = np.zeros_like(found.values)
        advantages_TS = self._advantages(series, rewards, values_TS, next_values_gS, is_empty, is_occupied)
        returns_KS[index.in_series] = values_TS + advantages_TS
        returns_RS = returns_KS[index.timesteps]
        inputs = tuple(column[: batch.steps] for column in prepared.rows[0].inputs)
        advantages_R = (returns_RS - found.baselines).mean(1)
        return GroupTargets(
            rows=self._rows(batch, inputs, advantages_R, returns_RS, found.baselines, epsilon),
            recurrence=self._recurrence(batch, prepared),
            returns=returns_KS[index.in_series],
            before={"Value": values_TS, "Baseline": found.baselines},
            observed=self.networks.observed(prepared),
            groups=bool(index.counts.max() > 1),
            prepared=prepared,
            estimates=found,
            of_timesteps=over((torch.from_numpy(returns_KS), torch.from_numpy(found.values)), self.optimizer.device),
        )

    def _recurrence(self, batch: Batch, prepared: PreparedGroups) -> Recurrence | None:
        """Returns the actor's sequences, in the order of the windows; None for an actor without memory."""
        if not self.networks.memory or batch.carried is None:
            return None
        windows = prepared.windows
        memory = batch.carried[windows.by_window, : self.networks.memory]
        return Recurrence(first=windows.first_q, lengths=windows.lengths_q, actor=memory, critic=None)

    def _minibatches(self, targets: GroupTargets) -> Iterator[Part]:
        """Yields as many minibatches of the actor as PPO does, each with a part of the critic's windows (9, 10)."""
        size, units = self.hyper.batch_size, len(targets.rows.log_prob)
        if targets.recurrence is not None:
            units = len(targets.recurrence.lengths)
            size = max(1, size // self.settings.network_settings.sequence_length)
        of_actor = self._of_actor(targets)
        of_critic = shuffled(targets.prepared.windows.weights, units // min(size, units), self.generator)
        for at, part in enumerate(of_actor):
            yield part._replace(windows=of_critic[at % len(of_critic)])

    def _forward(self, targets: GroupTargets, part: Part) -> ForwardPass:
        """Evaluates the actor on its rows, and the critic on its timesteps and the decisions there (7)."""
        ranks, windows, units = self.optimizer.ranks, targets.prepared.windows, len(part.windows)
        critic = self.networks.inputs(targets.prepared, part.windows[ranks.part(units)], targets.estimates)
        head_BH, values_mS, baselines_nS, backward_fn = self.networks.run(part.rows.inputs, part.state, critic)
        share_m = share_n = 1.0
        if ranks.count > 1:
            share_m = ranks.weight(units, len(critic.timesteps), int(windows.lengths[part.windows].sum()))
            of_whole_q = windows.lengths_q[windows.of_windows(part.windows)]
            share_n = ranks.weight(units, len(critic.rows), int(of_whole_q.sum()))
        at_m, at_n = over((torch.from_numpy(critic.timesteps), torch.from_numpy(critic.rows)), self.optimizer.device)
        of_values = (column.index_select(0, at_m) for column in targets.of_timesteps)
        of_baselines = (column.index_select(0, at_n) for column in (targets.rows.returns, targets.rows.values))
        value = Estimated(values_mS, VALUE_WEIGHT * share_m, *of_values)
        baseline = Estimated(baselines_nS, BASELINE_WEIGHT * share_n, *of_baselines)
        return ForwardPass(head_BH, {"Value": value, "Baseline": baseline}, backward_fn)


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
