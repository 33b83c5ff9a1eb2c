# ruff: noqa: N803, N806 (names end in their shape)
"""Soft actor-critic (Haarnoja et al. 2018, arXiv 1812.05905) trains on minibatches of all steps in a replay.

Each gradient step samples a minibatch, and takes one step of Adam on three losses:

    critics     1/2 (Q_i(s, a) - y)^2 for both, y = r + gamma V(s') and V(s') = min_i Q_i'(s', a') + alpha H(s')
    policy      minus the mean of min_i Q_i(s, a) + alpha H(s), a sampled by the policy
    alpha       log alpha (H(s) - target)

Then the target critics Q' approach the critics by `tau`. It differs from the paper as follows:

1. Discrete actions (Christodoulou 2019, arXiv 1910.07207): a critic estimates every choice of a branch at once, and
   expectations over choices are exact. The value of a joint action is the sum of one value for each branch, each of
   which also reads the continuous actions (ML-Agents: their mean), so that it fits a factorized policy.
2. The continuous actions together, and each branch, have an entropy coefficient of their own. Targets are minus the
   number of continuous actions, and `discrete_target_entropy` log n for a branch (ML-Agents: 0.2 log n), where n
   counts the choices that are allowed.
3. Each reward signal has its own value in the critics. Each includes the entropy, and the policy maximizes their mean
   (ML-Agents). Curiosity and rnd continue after the end of an episode with the mean value of the minibatch's following
   observations. GAIL continues in an absorbing state (Kostrikov et al. 2019, arXiv 1809.02925, section 4.2), whose
   value is one number for each signal, learned at the pace of the target critics; see `signals.gail`. Its entropy is
   the mean of the minibatch: a bonus that ended with the episode would be a reward for not ending it.
4. `n_step` rewards are summed before the target critics estimate the rest, without a correction for the policy.
5. All losses have one optimizer (the paper: one each); a step with a non-finite gradient is skipped for all of them.
6. A recurrent network is trained on sequences. The actor continues from the memory that was stored at their start, the
   critics from an empty one; critics remember the actions that they evaluate (ML-Agents).
7. Observations are normalized by the running statistics of all steps that have arrived, those of the update included.
8. Without a simulator, critics have another loss, see `offline`.

B rows of a minibatch, r steps and s segments of a sample, C continuous actions, D branches, K choices of all branches,
X values of an action for a signal: K, or 1 without branches; E kinds of action with an entropy coefficient; S reward
signals, M values of a recurrent memory, P features of an action.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparring.pipeline.learning.algorithm import Algorithm, Parts
from sparring.pipeline.learning.buffer import Batch
from sparring.pipeline.learning.losses import UpdateReport, lags
from sparring.pipeline.learning.offline import conservative_loss, inverse_loss, log_sum, log_sum_of_all
from sparring.pipeline.learning.optimizer import of_finite
from sparring.pipeline.learning.replay import Replay
from sparring.pipeline.learning.sac_settings import CLONING_STEPS, SACHyperparameters
from sparring.pipeline.learning.settings import LEARNING_RATE_END, scheduled
from sparring.pipeline.learning.signals import Steps
from sparring.pipeline.learning.soft_networks import Decisions, SoftNetworks, View, soft_values, target_entropies
from sparring.pipeline.networks.actor import Critic
from sparring.pipeline.networks.device import back, move_parameters, over
from sparring.pipeline.networks.layers import Layout
from sparring.pipeline.networks.squashed import SquashedActor
from sparring.pipeline.specs import Array, Floats


class Minibatch(NamedTuple):
    """Holds what a gradient step trains on.

    Attributes:
        now: the observations of the decisions to evaluate.
        continuous: [B, C] the actions that were taken.
        chosen: [B, X] 1 for each choice that was taken; ones without branches.
        following: the observations that decide the rest of the return, with those between for recurrent networks.
        at: [B] which rows of `following` these are.
        rewards: [B, S] discounted sums until then.
        discounts: [B, S] of the value of what follows.
        shares: [S] fraction of the mean value that follows the end of an episode.
        absorbing: [S] reward of each step after it.
        lasting: [S] 1 where there are such steps, else 0.
        terminated: [B, 1].
    """

    now: View
    continuous: Tensor
    chosen: Tensor
    following: View
    at: Tensor
    rewards: Tensor
    discounts: Tensor
    shares: Tensor
    absorbing: Tensor
    lasting: Tensor
    terminated: Tensor


class Measures(NamedTuple):
    """Holds what a gradient step has found, detached.

    Attributes:
        policy: loss of the policy, a scalar.
        critics: [2] mean squared errors.
        entropies: [E] means.
        values: [S] means of the targets.
    """

    policy: Tensor
    critics: Tensor
    entropies: Tensor
    values: Tensor


class SAC(Algorithm):
    """Trains the networks of one behavior.

    Args:
        parts: what it is built from.
        hyper: hyperparameters of its settings.

    Attributes:
        replay: the steps that it trains on.
    """

    networks: SoftNetworks

    def __init__(self, parts: Parts, hyper: SACHyperparameters) -> None:
        settings, actions = parts.settings, parts.spec.actions
        self.hyper, self.settings, self.generator = hyper, settings, parts.generator
        self.networks = SoftNetworks(parts, hyper.init_entcoef)
        assert isinstance(self.networks.actor, SquashedActor)
        self.actor = self.networks.actor
        self.optimizer = parts.adam(self.networks.trained)
        for name in ("target", "absorbing"):
            move_parameters(self.networks.modules[name], parts.device)
        self.signals = parts.signals()
        self.cloning = parts.cloning(self.networks)
        self._gammas = np.array([one.gamma for one in self.signals.settings.values()], np.float32)
        self._gammas_S = over(torch.from_numpy(self._gammas), parts.device)
        network, self._offline = settings.network_settings, settings.offline if parts.offline else None
        recorded = None if self._offline is None else parts.recorded(self._offline)
        slots = hyper.buffer_size if recorded is None else recorded.steps + len(recorded.lengths)
        self.replay = Replay(
            parts.spec,
            slots if parts.learns else 1,
            sequence_length=network.sequence_length,
            carried=network.carried(actions),
            folder=parts.replay_folder if parts.learns else None,
            keep=hyper.save_replay_buffer and recorded is None,
        )
        self._counters = self.replay.counters
        if recorded is not None:
            self._counters = torch.zeros_like(self._counters)  # a resumed learner reads the recorded steps again
            self._add(recorded)

    @property
    def moments(self) -> dict[str, Tensor]:
        """Returns the states of all optimizers, and the counters of the replay."""
        return super().moments | {"replay.counters": self._counters}

    def update(self, batch: Batch, version: int, trained: int) -> UpdateReport:
        """Stores new steps, then takes as many gradient steps as `steps_per_update` allows for them.

        Args:
            batch: whole segments.
            version: version of the current weights.
            trained: steps that arrived before, for the schedule.
        """
        self._add(batch)
        report = self._train(self.replay.stored, batch.steps, trained)
        return report._replace(
            lags=lags(version, batch.versions),
            group_rewards=bool(batch.group_rewards.any()),
            terminated=bool(batch.terminated.any()),
        )

    def update_offline(self, steps: int, trained: int) -> UpdateReport:
        """Takes as many gradient steps on the recorded steps as if so many new ones had arrived."""
        return self._train(self.replay.stored + trained + steps, steps, trained)

    # ---------------------------------------------------------------- inside

    def _add(self, batch: Batch) -> None:
        encoder, rewards = self.actor.encoder, self.signals.scaled(*batch.series)
        encoder.update(encoder.join(batch.observations))
        self.signals.begin(rewards, partial(self._reward_steps, batch))  # for the sums of the episodes that ended
        self.replay.add(batch, rewards)

    def _train(self, stored: int, new: int, trained: int) -> UpdateReport:
        """Takes the gradient steps that new steps allow, after `stored` in all."""
        hyper, progress, done = self.hyper, trained / self.settings.max_steps, []
        rate = scheduled(hyper.learning_rate_schedule, hyper.learning_rate, LEARNING_RATE_END, progress)
        self.optimizer.learning_rate = rate
        for _ in range(hyper.gradient_steps(stored, new, hyper.steps_per_update)):
            done.append(self._step(self._minibatch(self._sample())))
            if self.is_stopping():
                break
        of_signals = hyper.reward_signal_steps_per_update or hyper.steps_per_update
        for _ in range(hyper.gradient_steps(stored, new, of_signals) if self.signals.sources else 0):
            sampled = self._sample()
            self.signals.evaluate(sampled.rewards, self._reward_steps(sampled))
            self.signals.learn(torch.arange(sampled.steps, device=self.optimizer.device))
            if self.is_stopping():
                break
        is_due = bool(done) and stored // CLONING_STEPS > (stored - new) // CLONING_STEPS
        cloned = self.cloning.update(trained) if self.cloning is not None and is_due else {}
        taken = of_finite(done)
        return UpdateReport(
            statistics=self._statistics(taken) | {"Policy/Learning Rate": rate} | self.signals.statistics() | cloned,
            steps=new,
            minibatches=len(done),
            skipped=len(done) - len(taken),
            lags=(),
            group_rewards=False,
        )

    # ---------------------------------------------------------------- minibatches

    def _sample(self) -> Batch:
        count = self.hyper.batch_size
        if self.networks.memory:
            count = max(1, count // self.settings.network_settings.sequence_length)
        return self.replay.sample(count, self.hyper.n_step, self.generator)

    def _reward_steps(self, batch: Batch) -> Steps:
        return Steps(batch, self.actor.actions, self.actor.action_limit)

    def _minibatch(self, batch: Batch) -> Minibatch:
        """Returns sampled steps as the networks read them, on the device."""
        actions, memory = self.actor.actions, self.networks.memory
        steps = self._reward_steps(batch)
        lengths, encoder, done_rP = batch.lengths, self.actor.encoder, steps.done
        previous = self.networks.previous(batch, done_rP.numpy()) if encoder.previous else None
        inputs = encoder.prepare(encoder.join(steps.observations), previous)
        masks = None
        if batch.masks is not None and batch.next_masks is not None:
            masks = torch.from_numpy(np.concatenate([batch.masks, batch.next_masks]))
        first_s, after_s = np.cumsum(lengths) - lengths, batch.steps + np.arange(len(lengths))
        first, counts, terminated = first_s, lengths, batch.terminated
        if memory:  # every step is evaluated
            first, counts = np.arange(batch.steps), np.ones(batch.steps, np.int64)
            terminated = np.zeros(batch.steps, np.bool_)
            terminated[first_s + lengths - 1] = batch.terminated

        def view(rows: Array, lengths_q: Array) -> View:
            at = torch.from_numpy(rows)
            seen = tuple(column.index_select(0, at) for column in inputs)
            allowed = None if masks is None else masks.index_select(0, at)
            if not memory:
                return View(seen, allowed)
            assert batch.carried is not None
            return View(seen, allowed, Layout(lengths_q), torch.from_numpy(batch.carried[:, :memory]))

        following = view(np.insert(first, np.cumsum(lengths), after_s) if memory else after_s, lengths + 1)
        at = np.arange(len(first)) + (np.repeat(np.arange(len(lengths)), lengths) + 1 if memory else 0)
        done_BP = done_rP.index_select(0, torch.from_numpy(first))
        chosen = done_BP[:, actions.continuous :] if actions.discrete else torch.ones(len(done_BP), 1)
        rewards, discounts = self._returns(batch, steps, first, counts)
        shares, absorbing, lasting = self._after_end(int(batch.terminated.sum()), batch.steps)
        minibatch = Minibatch(
            now=view(first, lengths),
            continuous=done_BP[:, : actions.continuous],
            chosen=chosen,
            following=following,
            at=torch.from_numpy(at),
            rewards=torch.from_numpy(rewards),
            discounts=torch.from_numpy(discounts),
            shares=torch.tensor(shares),
            absorbing=torch.tensor(absorbing),
            lasting=torch.tensor(lasting),
            terminated=torch.from_numpy(terminated).unsqueeze(1),
        )
        return over(minibatch, self.optimizer.device)

    def _returns(self, batch: Batch, steps: Steps, first_B: Array, counts_B: Array) -> tuple[Floats, Floats]:
        """Returns discounted sums of rewards [B, S], and the discount of what follows [B, S].

        Args:
            batch: sampled segments.
            steps: the same as reward networks read them.
            first_B: first step of each sum.
            counts_B: number of its steps.
        """
        found = self.signals.evaluate(batch.rewards, steps)
        sums_BS = np.zeros((len(first_B), len(found)), np.float32)
        rewards_rS = np.stack(list(found.values()), 1)
        for step in range(int(counts_B.max())):
            here = counts_B > step
            sums_BS[here] += self._gammas**step * rewards_rS[first_B[here] + step]
        return sums_BS, self._gammas ** counts_B[:, None].astype(np.float32)

    def _after_end(self, ends: int, steps: int) -> tuple[list[float], ...]:
        """Returns `shares`, `absorbing` and `lasting` of a minibatch, [S] each."""
        shares, rewards, lasting = [], [], []
        for name, signal in self.signals.settings.items():
            source = self.signals.sources.get(name)
            reward = 0.0 if source is None else source.absorbing_reward(ends, steps)
            shares.append(float(reward is None))
            rewards.append((reward or 0.0) * signal.strength)
            lasting.append(float(source is not None and reward is not None))
        return shares, rewards, lasting

    # ---------------------------------------------------------------- one gradient step

    def _step(self, minibatch: Minibatch) -> tuple[Tensor, Measures]:
        """Takes one gradient step; returns 1 if it was skipped, else 0, and its measures."""
        networks, now = self.networks, minibatch.now
        alpha_E = networks.log_alpha.detach().exp()
        targets_BS = self._targets(minibatch, alpha_E)
        with torch.enable_grad():
            taken_B1X, decided = minibatch.chosen.unsqueeze(1), networks.decide(now, self.generator)
            estimates = [networks.evaluate(critic, now, minibatch.continuous) for critic in networks.critics]
            taken = [(one_BSX * taken_B1X).sum(2) for one_BSX in estimates]
            both = zip(networks.critics, estimates, taken, strict=True)
            losses = [self._critic_loss(minibatch, targets_BS, decided, *each) for each in both]
            if self.actor.actions.continuous:
                least_BSX = networks.least_for_policy(now, decided.continuous)
            else:  # both have estimated every choice already
                least_BSX = torch.minimum(*estimates).detach()
            policy = -soft_values(decided, least_BSX, alpha_E).mean()
            wanted_BE = target_entropies(self.actor, now.masks, self.hyper.discrete_target_entropy)
            excess_BE = (decided.entropies - wanted_BE).detach()
            temperature = (networks.log_alpha * excess_BE).mean(0).sum()
            loss = policy + temperature + losses[0] + losses[1]
        skipped = self.optimizer.step(loss.backward).skipped
        entropies_BE = decided.entropies.detach()
        absorbing_S = minibatch.absorbing + minibatch.lasting * (entropies_BE * alpha_E).sum(1).mean()
        networks.follow(self.hyper.tau, absorbing_S + self._gammas_S * networks.absorbing)
        critics = torch.stack([(one_BS.detach() - targets_BS).square().mean() for one_BS in taken])
        return skipped, Measures(policy.detach(), critics, entropies_BE.mean(0), targets_BS.mean(0))

    def _critic_loss(
        self,
        minibatch: Minibatch,
        targets_BS: Tensor,
        decided: Decisions,
        critic: Critic,
        estimates_BSX: Tensor,
        values_BS: Tensor,
    ) -> Tensor:
        """Returns the loss of one critic.

        Args:
            minibatch: what it is evaluated for.
            targets_BS: what it learns.
            decided: what the policy would do.
            critic: the critic.
            estimates_BSX: its values of the actions that were taken, with every choice.
            values_BS: its values of the actions that were taken.
        """
        offline, now, actor = self._offline, minibatch.now, self.actor
        if offline is None:
            return 0.5 * (values_BS - targets_BS).square().mean()

        def evaluate(rows_N: Tensor, continuous_NC: Tensor) -> Tensor:
            seen = tuple(column.index_select(0, rows_N) for column in now.inputs)
            return self.networks.evaluate(critic, View(seen, None), continuous_NC)

        if offline.objective == "iq_learn":
            own = decided._replace(weights=decided.weights.detach(), entropies=decided.entropies.detach())
            if actor.actions.continuous:
                estimates_BSX = evaluate(
                    torch.arange(len(values_BS), device=values_BS.device), decided.continuous.detach()
                )
            soft_BS = soft_values(own, estimates_BSX, self.networks.log_alpha.detach().exp())
            return inverse_loss(values_BS, targets_BS, soft_BS, offline.weight)
        if actor.actions.continuous:
            with torch.no_grad():
                head_BH = actor(now.inputs)
            sums_BS = log_sum_of_all(actor, head_BH, now.masks, evaluate, self.generator)
        else:
            sums_BS = log_sum(estimates_BSX, now.masks, actor.actions.discrete)
        return conservative_loss(values_BS, targets_BS, sums_BS, offline.weight)

    @torch.no_grad()
    def _targets(self, minibatch: Minibatch, alpha_E: Tensor) -> Tensor:
        """Returns [B, S] what the critics learn."""
        following = minibatch.following
        decided = self.networks.decide(following, self.generator)
        values_BS = soft_values(
            decided, self.networks.least(self.networks.targets, following, decided.continuous), alpha_E
        )
        values_BS = values_BS.index_select(0, minibatch.at)
        after_end_S = minibatch.shares * values_BS.mean(0) + self.networks.absorbing
        values_BS = torch.where(minibatch.terminated, after_end_S, values_BS)
        rewards_BS = minibatch.rewards
        if self._offline is not None and self._offline.objective == "iq_learn":
            rewards_BS = torch.zeros_like(rewards_BS)  # the critics imply them
        return rewards_BS + minibatch.discounts * values_BS

    def _statistics(self, taken: list[Measures]) -> dict[str, float]:
        """Returns the means of the measures, by ML-Agents' names, and what the networks hold now."""
        alphas = back(self.networks.log_alpha.detach().exp()).tolist()
        continuous = self.actor.actions.continuous > 0
        found = {"Update/Replay Share": self.replay.share}
        found |= {"Policy/Continuous Entropy Coeff": alphas[0]} if continuous else {}
        if discrete := alphas[continuous:]:
            found["Policy/Discrete Entropy Coeff"] = sum(discrete) / len(discrete)
        if not taken:
            return found
        policy, critics, entropies, values = (back(torch.stack(column).mean(0)) for column in zip(*taken, strict=True))
        estimates = zip(self.signals.settings, values.tolist(), strict=True)
        return {
            **found,
            "Losses/Policy Loss": float(policy),
            "Losses/Q1 Loss": float(critics[0]),
            "Losses/Q2 Loss": float(critics[1]),
            "Policy/Entropy": float(entropies.sum()),
            **{f"Policy/{name.capitalize()} Value Estimate": value for name, value in estimates},
        }
