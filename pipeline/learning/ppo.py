# ruff: noqa: N806 (names end in their shape)
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

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from sparring.pipeline.learning.actor_critic import AgentNetworks
from sparring.pipeline.learning.buffer import Batch
from sparring.pipeline.learning.minibatches import Minibatch, RecurrentState
from sparring.pipeline.learning.policy_gradient import VALUE_WEIGHT, Estimated, ForwardPass, PolicyGradient, Targets


class PPO(PolicyGradient[AgentNetworks, Targets, None]):
    """Trains the networks of one behavior with PPO; every agent is a group of one."""

    def _targets(self, batch: Batch, epsilon: float) -> Targets:
        prepared = self.networks.prepare(batch)
        found = self.networks.estimate(prepared, batch)
        rewards = self.signals.begin(self.signals.scaled(*batch.series), lambda: self._reward_steps(batch))
        occupied = np.ones(len(batch.lengths), bool)
        advantages_RS = self._advantages(
            batch.series, rewards, found.values, found.next_values, batch.terminated, occupied
        )
        returns_RS = advantages_RS + found.values
        rows = self._rows(batch, prepared.inputs, advantages_RS.mean(1), returns_RS, found.values, epsilon)
        return Targets(
            rows=rows,
            recurrence=found.recurrence,
            returns=rows.returns,
            values=rows.values,
            observed=[(self.actor.encoder, prepared.joined)],
            terminated=bool(batch.terminated.any()),
        )

    def _minibatches(self, targets: Targets) -> Iterator[tuple[Minibatch, RecurrentState | None, Tensor, None]]:
        return ((*part, None) for part in self._of_actor(targets))

    def _forward(self, rows: Minibatch, state: RecurrentState | None, critic: None) -> ForwardPass:
        head_BH, values_BS, backward_fn = self.networks.run(rows.inputs, state)
        values = Estimated(values_BS, rows.returns, rows.values, VALUE_WEIGHT)
        return ForwardPass(head_BH, {"Value": values}, backward_fn)
