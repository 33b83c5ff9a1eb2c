# ruff: noqa: N803, N806 (names end in their shape)
"""GAIL (Ho and Ermon 2016, arXiv 1606.03476) and VAIL (Peng et al. 2018, arXiv 1810.00821) reward steps that a
discriminator takes for demonstrations.

1. The discriminator D reads the observations; with `use_actions` also the action (one 1 for each branch of discrete
   actions) and whether the episode ended with the step (ML-Agents). Without `use_actions` it does not read the end: a
   flag that only one side can have would separate the sides whatever they do.
2. Reward `-log(1 - D (1 - 1e-7))`, always above 0 (ML-Agents; the paper's is its negative for a cost). An agent that is
   rewarded for every step has a reason to make its episodes last: see `biased`. Other forms, which can be negative, are
   `log D - log(1 - D) = h` (AIRL, Fu et al. 2018, arXiv 1710.11248) and `-h e^h` with h from -10 to 10 (FAIRL,
   Ghasemipour et al. 2019, arXiv 1911.02256).
3. Loss `-[log D(expert) + log(1 - D(policy))]`, with as many rows of both, computed from logits.
4. Gradient penalty (Gulrajani et al. 2017, arXiv 1704.00028): `gradient_penalty` x (norm - 1)^2 of the gradient of D
   over all its inputs, at a random point between a row of each side, one factor for each pair. The norm is sqrt(sum +
   1e-7): its own derivative is finite if the gradient is 0.
5. VAIL: D reads a code z ~ N(mu(h), sigma^2) of 128 numbers; its reward reads mu. The loss gains `beta (KL - 0.5)` with
   KL = sum over the code of KL(expert) + KL(policy) from N(0, I), mean over rows; after each step `beta = max(0, beta +
   0.0005 (KL - 0.5))`, from 0. sigma is one learned vector, from 1.
6. A fifth of the demonstrated episodes is held out if there are five or more: how much less often D takes these for
   demonstrations than those it learns from measures how far it overfits.
7. If `normalize` is set, the observations of both sides are normalized by the statistics of the demonstrations.
8. An episode end bootstraps with a fraction of an episode start's value, by how often demonstrations end.

   The reward is above 0 at every step. If the value after an end were 0, the policy would learn to survive, whether the
   demonstrations do or not; if it were that of an episode start, ends would hardly matter. Kostrikov et al. (2019,
   arXiv 1809.02925, section 4.2) continue an episode in an absorbing state, which the discriminator classifies like any
   other. In a state without content it can learn only how often either side is there, and its optimum is known
   (Goodfellow et al. 2014, arXiv 1406.2661, proposition 1): D = e / (e + p), with e ends per step of the demonstrations
   and p of the policy. So no network is needed. The reward there is -log(1 - D), and log 2 at a step where the sides
   cannot be distinguished: the value after an end is log2(1 + e / p) times that after a start, at most all of it. (More
   would let values grow without bound, because each start leads to an end. A separate value is far from all others
   until these are learned, and the policy first learns to end in any way.) The other forms of the reward are 0 where
   the sides cannot be distinguished: nothing is added after an end.

   A trainer that learns from a replay learns the value of the absorbing state as it learns all others, from the reward
   that the same optimum gives for each step there (Kostrikov et al. 2019: discriminator-actor-critic).

B rows of a minibatch, A action features, Z numbers of a code, r steps of a batch.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import logsigmoid

from sparring.pipeline.demonstrations.library import Demonstrations
from sparring.pipeline.learning.settings import ExtrinsicSettings, GailSettings
from sparring.pipeline.learning.signals import Features, RewardNetwork, Steps, blocks, select_rows
from sparring.pipeline.networks.arrays import action_features
from sparring.pipeline.networks.device import CPU, over
from sparring.pipeline.networks.encoders import Inputs
from sparring.pipeline.networks.perceptron import linear
from sparring.pipeline.specs import Array, BehaviorSpec, Flags, Floats

CODE: Final = 128
INFORMATION: Final = 0.5
BETA_STEP: Final = 0.0005
_SAFE: Final = 1e-7
_LARGEST: Final = 10.0
"""Largest size of a logit where a reward grows with its exponential."""
_HEAD_GAIN: Final = 0.2
_CODE_GAIN: Final = 0.1
_HELD_OUT: Final = 0.2
_HORIZON: Final = 2000
"""Steps over which the policy's ends are counted; a larger batch counts as a whole."""


def reward_of(logits_B: Tensor, form: str) -> Tensor:
    """Returns rewards [B] in one of the forms (2)."""
    if form == "airl":
        return logits_B
    if form == "fairl":
        bounded_B = logits_B.clamp(-_LARGEST, _LARGEST)
        return -bounded_B * bounded_B.exp()
    return -torch.log1p(-logits_B.sigmoid() * (1 - _SAFE))


class EndCounts:
    """Counts the episode ends of demonstrations and policy.

    Args:
        ends: number of demonstrated episodes that terminated; interrupted ones do not count.
        steps: number of demonstrated steps.
    """

    def __init__(self, ends: int, steps: int) -> None:
        self._demonstrated = ends / max(steps, 1)
        self._ends = 0.0
        self._steps = 0.0

    def share(self, ends: int, steps: int) -> float:
        """Returns the fraction, 0 to 1, of an episode start's value that bootstraps an end, after `ratio`."""
        return min(1.0, math.log2(1.0 + self.ratio(ends, steps)))

    def ratio(self, ends: int, steps: int) -> float:
        """Returns how much more often demonstrations end than the policy; infinity if this never does.

        Adds a batch of the policy's steps, and forgets as many earlier ones beyond the horizon.
        """
        kept = 0.0 if steps >= _HORIZON else min(1.0, (_HORIZON - steps) / max(self._steps, 1.0))
        self._ends = kept * self._ends + ends
        self._steps = kept * self._steps + steps
        return self._demonstrated * self._steps / self._ends if self._ends else math.inf


class Discriminator(nn.Module):
    """Distinguishes demonstrations from steps of the policy.

    It reads columns of rows: prepared observations and, with `use_actions`, [B, A + 1] action features and whether the
    episode ended.

    Args:
        spec: observations and actions of the behavior.
        settings: the signal's settings.
        generator: random source of the initial weights and of codes.
    """

    beta: Tensor

    def __init__(self, spec: BehaviorSpec, settings: GailSettings, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator
        self.uses_actions = settings.use_actions
        more = spec.actions.continuous + spec.actions.mask_size + 1 if settings.use_actions else 0
        self.features = Features(spec, settings.network_settings, more, generator)
        self.code: nn.Linear | None = None
        if settings.use_vail:
            self.code = linear(self.features.size, CODE, _CODE_GAIN, generator)
            self.sigma = nn.Parameter(torch.ones(CODE))
            self.register_buffer("beta", torch.zeros(()))
        self.head = linear(CODE if settings.use_vail else self.features.size, 1, _HEAD_GAIN, generator)

    def prepare(self, observations: Sequence[Array], done_rA: Tensor, ended_r: Flags) -> Inputs:
        """Returns steps as this network reads them, on the CPU.

        Args:
            observations: one [r, *shape] per observation.
            done_rA: action features.
            ended_r: the episode ended with the step.
        """
        encoder = self.features.encoder
        inputs = encoder.prepare(encoder.join(observations))
        ended_r1 = torch.from_numpy(ended_r.astype(np.float32)[:, None])
        return (*inputs, torch.cat((done_rA, ended_r1), 1)) if self.uses_actions else inputs

    def forward(self, rows: Inputs, noise: bool) -> tuple[Tensor, Tensor | None]:
        """Returns logits [B], and the mean code [B, Z] if there is one.

        Args:
            rows: prepared steps.
            noise: sample the code instead of using its mean.
        """
        features_BU = self.features(rows[:-1], rows[-1]) if self.uses_actions else self.features(rows)
        if self.code is None:
            return self.head(features_BU).squeeze(1), None
        mean_BZ: Tensor = self.code(features_BU)
        code_BZ = mean_BZ
        if noise:
            noise_BZ = torch.randn(mean_BZ.shape, generator=self._generator)
            code_BZ = mean_BZ + self.sigma * over(noise_BZ, mean_BZ.device)
        return self.head(code_BZ).squeeze(1), mean_BZ


class Gail(RewardNetwork):
    """Trains the discriminator of one behavior on its demonstrations, and computes rewards with it.

    Args:
        spec: observations and actions of the behavior.
        settings: the signal's settings.
        demonstrations: the episodes to imitate; None if the weights are only loaded.
        generator: random source of the initial weights and of sampling.
        device: device of the discriminator.
    """

    module: Discriminator

    def __init__(
        self,
        spec: BehaviorSpec,
        settings: GailSettings,
        demonstrations: Demonstrations | None,
        generator: torch.Generator,
        device: torch.device = CPU,
    ) -> None:
        discriminator = Discriminator(spec, settings, generator)
        super().__init__(discriminator, discriminator, settings.learning_rate, device)
        if settings.use_vail:
            discriminator.beta = discriminator.beta.to(device)
        self._generator = generator
        self._actions = spec.actions
        self._form, self._weight = settings.reward, settings.gradient_penalty
        self._expert: Inputs | None = None
        if demonstrations is not None:
            self._end_counts = EndCounts(int(demonstrations.terminated.sum()), demonstrations.steps)
            self._learned, self._held_out = demonstrations.split(_HELD_OUT, seed=0)
            encoder = self.module.features.encoder
            encoder.update(encoder.join(self._learned.observations))

    def prepare(self, demonstrations: Demonstrations) -> Inputs:
        """Returns demonstrations as the discriminator reads them."""
        done = action_features(self._actions, demonstrations.continuous, demonstrations.discrete)
        inputs = self.module.prepare(demonstrations.observations, torch.from_numpy(done), demonstrations.ended)
        return over(inputs, self.optimizer.device)

    def begin(self, steps: Steps) -> Floats:
        seen = [column[: len(steps)] for column in steps.observations]
        if self._expert is None:  # the statistics that normalize it are those of the demonstrations
            self._expert = self.prepare(self._learned)
        self._policy = over(self.module.prepare(seen, steps.done, steps.ended), self.optimizer.device)
        rows = blocks(len(steps), self.optimizer.device)
        logits_r = torch.cat([self._logits(self._policy, at) for at in rows]).cpu()
        rewards: Floats = reward_of(logits_r.double(), self._form).float().numpy()
        return rewards

    def terminal_bootstrap_fraction(self, ends: int, steps: int) -> float:
        """Returns the fraction (8), by how often demonstrations and policy end."""
        return self._end_counts.share(ends, steps) if self._form == "gail" else 0.0

    def absorbing_reward(self, ends: int, steps: int) -> float:
        """Returns the reward (2) of the discriminator's optimum (8), e / (e + p), whose logit is log(e / p).

        It is at most that of a step where the sides cannot be distinguished: a policy that hardly ever ends an episode
        would otherwise learn values that are far from all others once it does.
        """
        logit = math.log(max(math.exp(-_LARGEST), min(1.0, self._end_counts.ratio(ends, steps))))
        return reward_of(torch.tensor(logit), self._form).item()

    def learn(self, at_B: Tensor) -> None:
        """Takes one optimizer step on some rows of the batch, and as many of the demonstrations."""
        assert self._expert is not None
        which_B = torch.randint(self._learned.steps, (len(at_B),), generator=self._generator)
        self.step(select_rows(self._policy, at_B), select_rows(self._expert, over(which_B, self.optimizer.device)))

    def statistics(self) -> dict[str, float]:
        """Returns the mean measures of the steps since `begin`, and the accuracy on held-out demonstrations."""
        found = super().statistics()
        if self._held_out.episodes:
            side = self.prepare(self._held_out)
            logits = self._logits(side, torch.arange(self._held_out.steps, device=self.optimizer.device))
            found["Policy/GAIL Held-Out Accuracy"] = (logits > 0).float().mean().item()
        return found

    def step(self, policy: Inputs, expert: Inputs) -> None:
        """Takes one optimizer step on as many rows of both sides.

        Args:
            policy: rows, on the discriminator's device.
            expert: rows, on the discriminator's device.
        """
        both = tuple(map(torch.cat, zip(policy, expert, strict=True)))
        logits_2B, mean_2BZ = self.module(both, True)
        policy_B, expert_B = logits_2B.chunk(2)
        loss = -(logsigmoid(expert_B) + logsigmoid(-policy_B)).mean()
        report = {
            "Policy/GAIL Policy Estimate": policy_B.detach().sigmoid().mean(),
            "Policy/GAIL Expert Estimate": expert_B.detach().sigmoid().mean(),
            "Losses/GAIL Loss": loss.detach(),
            "Policy/GAIL Policy Accuracy": (policy_B < 0).float().mean(),
            "Policy/GAIL Expert Accuracy": (expert_B > 0).float().mean(),
        }
        divergence = None
        if mean_2BZ is not None:
            divergence = kl(mean_2BZ, self.module.sigma)
            loss = loss + self.module.beta * (divergence - INFORMATION)
            report["Losses/GAIL KL Loss"] = divergence.detach()
        penalty = self._weight * self._penalty(policy, expert)
        loss = loss + penalty
        report["Policy/GAIL Grad Mag Loss"] = penalty.detach()
        skipped = self.take_step(loss, report)
        if divergence is not None:
            # Where the step was skipped the divergence may be no number, which a product with 0 would keep.
            change = (BETA_STEP * (divergence.detach() - INFORMATION)).masked_fill_(skipped > 0, 0.0)
            self.module.beta.add_(change).clamp_(min=0)
            report["Policy/GAIL Beta"] = self.module.beta.clone()

    # ---------------------------------------------------------------- inside

    def _penalty(self, policy: Inputs, expert: Inputs) -> Tensor:
        """Returns the gradient penalty (4), without its weight."""
        share_B = over(torch.rand(len(expert[0]), generator=self._generator), self.optimizer.device)
        pairs = zip(policy, expert, strict=True)
        columns = tuple(_between(one, other, share_B).requires_grad_() for one, other in pairs)
        with sdpa_kernel(SDPBackend.MATH):  # the other kernels can be differentiated only once
            logits_B, _ = self.module(columns, True)
            gradients = torch.autograd.grad(logits_B.sigmoid().sum(), columns, create_graph=True, allow_unused=True)
        squares = [one.square().flatten(1).sum(1) for one in gradients if one is not None]
        return (torch.sqrt(sum(squares[1:], squares[0]) + _SAFE) - 1).square().mean()

    @torch.no_grad()
    def _logits(self, side: Inputs, rows: Tensor) -> Tensor:
        logits_B: Tensor = self.module(select_rows(side, rows), False)[0]
        return logits_B


def kl(mean_2BZ: Tensor, sigma_Z: Tensor) -> Tensor:
    """Returns the mean over row pairs of KL(policy) + KL(expert) from N(0, I); the policy's rows come first.

    `KL(N(mu, sigma^2), N(0, 1)) = (mu^2 + sigma^2 - 1 - log sigma^2) / 2`, summed over the code.
    """
    variance_Z = sigma_Z.square()
    of_means = mean_2BZ.square().sum() / len(mean_2BZ)  # half the sum over both rows of a pair, mean over pairs
    return of_means + (variance_Z - 1 - variance_Z.log()).sum()


def biased(gail: GailSettings | None, extrinsic: ExtrinsicSettings | None) -> bool:
    """Returns whether all rewards are always above 0, because GAIL is the only one, in its own form.

    If episodes can end by themselves, such an agent first learns to survive, whether the demonstrations do so or not
    (Kostrikov et al. 2019, arXiv 1809.02925, section 4.1).
    """
    return gail is not None and gail.reward == "gail" and (extrinsic is None or not extrinsic.strength)


def _between(one: Tensor, other: Tensor, share_B: Tensor) -> Tensor:
    """Interpolates: `share` of one plus the rest of the other; image bytes become floats 0..1."""
    if one.dtype == torch.uint8:
        one, other = one.float() / 255, other.float() / 255
    share = share_B.view(-1, *[1] * (one.dim() - 1))
    return share * one + (1 - share) * other
