"""A2C, the synchronous form of A3C (Mnih et al. 2016, arXiv 1602.01783): one step of Adam on each batch."""

import numpy as np
import torch

from sparring.pipeline.learning import losses
from sparring.pipeline.learning.actor_critic import AgentNetworks
from sparring.pipeline.learning.algorithm import Algorithm, Parts
from sparring.pipeline.learning.buffer import Batch
from sparring.pipeline.learning.minibatches import RecurrentState
from sparring.pipeline.learning.settings import LEARNING_RATE_END, scheduled
from sparring.pipeline.learning.signals import Steps
from sparring.pipeline.networks import distributions
from sparring_a2c.settings import A2CHyperparameters


class A2C(Algorithm):
    """Trains the networks of one behavior."""

    def __init__(self, parts: Parts, hyper: A2CHyperparameters) -> None:
        self.hyper, self.settings = hyper, parts.settings
        self.networks = AgentNetworks(parts.spec, parts.settings, parts.generator)
        self.optimizer = parts.adam(self.networks.modules, epsilon=1e-5, max_norm=hyper.max_grad_norm)
        self.signals = parts.signals()
        self.cloning = parts.cloning(self.networks)

    def update(self, batch: Batch, version: int, trained: int) -> losses.UpdateReport:
        actor, hyper = self.networks.actor, self.hyper
        progress = trained / self.settings.max_steps
        self.optimizer.learning_rate = scheduled(
            hyper.learning_rate_schedule, hyper.learning_rate, LEARNING_RATE_END, progress
        )
        prepared = self.networks.prepare(batch)
        advantages, returns = self._targets(batch, self.networks.estimate(prepared, batch))
        masks = None if batch.masks is None else torch.from_numpy(batch.masks)
        acted = torch.from_numpy(batch.continuous), torch.from_numpy(batch.discrete).long(), masks

        with torch.no_grad():
            head, values, backward_fn = self.networks.run(prepared.inputs, RecurrentState())
            chosen = distributions.evaluate(actor.actions, head, actor.log_sigma, *acted)
            to_head, to_log_sigma = chosen.gradient(-advantages / len(advantages), -hyper.beta)
            errors = values - returns

            def backward() -> None:
                assert actor.log_sigma.grad is not None
                actor.log_sigma.grad += to_log_sigma
                backward_fn(to_head, 2 * hyper.value_weight / errors.numel() * errors)

            step = self.optimizer.step(backward)
        self.signals.learn(torch.arange(batch.steps))
        actor.encoder.update(prepared.joined)
        statistics = {
            "Losses/Policy Loss": -(chosen.log_prob * advantages).mean().item(),
            "Losses/Value Loss": errors.square().mean().item(),
            "Policy/Entropy": chosen.entropy.item(),
            "Policy/Learning Rate": self.optimizer.learning_rate,
        }
        return losses.UpdateReport(
            statistics=statistics | self.signals.statistics() | self._cloned(trained),
            steps=batch.steps,
            minibatches=1,
            skipped=int(step.skipped.item()),
            lags=losses.lags(version, batch.versions),
            group_rewards=bool(batch.group_rewards.any()),
            terminated=bool(batch.terminated.any()),
        )

    def _targets(self, batch: Batch, found) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the advantages [r], summed over reward signals, and the targets [r, S] of the values."""
        actor = self.networks.actor
        rewards = self.signals.begin(
            self.signals.scaled(*batch.series), lambda: Steps(batch, actor.actions, actor.action_limit)
        )
        found.next_values[batch.terminated] = 0
        advantages = np.empty_like(found.values)
        for at, (name, signal) in enumerate(self.signals.settings.items()):
            values, following = found.values[:, at], found.next_values[:, at]
            advantages[:, at] = losses.advantages(
                rewards[name], values, following, batch.lengths, signal.gamma, self.hyper.lambd
            )
        return torch.from_numpy(advantages.sum(1)), torch.from_numpy(found.values + advantages)

    def _cloned(self, trained: int) -> dict[str, float]:
        return {} if self.cloning is None else self.cloning.update(trained)
