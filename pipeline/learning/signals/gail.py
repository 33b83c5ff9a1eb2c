# ruff: noqa: N803, N806 (names end in their shape)
"""GAIL (Ho and Ermon 2016, arXiv 1606.03476) and VAIL (Peng et al. 2018, arXiv 1810.00821) reward steps that a
discriminator takes for demonstrations.

1. The discriminator D reads the observations; with `use_actions` also the action (one 1 for each branch of discrete
   actions) and whether the episode ended with the step (ML-Agents). Without `use_actions` it does not read the end: a
   flag that only one side can have would separate the sides whatever they do.
2. Reward `-log(1 - D (1 - 1e-7))`, always above 0 (ML-Agents; the paper's is its negative for a cost). An agent that is
   rewarded for every step has a reason to make its episodes last: see `biased`.
3. Loss `-[log D(expert) + log(1 - D(policy))]`, with as many rows of both, computed from logits.
4. Gradient penalty (Gulrajani et al. 2017, arXiv 1704.00028): 10 x (norm - 1)^2 of the gradient of D over all its
   inputs, at a random point between a row of each side, one factor for each pair. The norm is sqrt(sum + 1e-7): its own
   derivative is finite if the gradient is 0.
5. VAIL: D reads a code z ~ N(mu(h), sigma^2) of 128 numbers; its reward reads mu. The loss gains `beta (KL - 0.5)` with
   KL = sum over the code of KL(expert) + KL(policy) from N(0, I), mean over rows; after each step `beta = max(0, beta +
   0.0005 (KL - 0.5))`, from 0. sigma is one learned vector, from 1.
6. Adam takes one step on each minibatch of the policy, with constant learning rate (ML-Agents).
7. A fifth of the demonstrated episodes is held out if there are five or more: how much less often D takes these for
   demonstrations than those it learns from measures how far it overfits.
8. If `normalize` is set, the observations of both sides are normalized by the statistics of the demonstrations.

B rows of a minibatch, A action features, Z numbers of a code, r steps of a batch.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import logsigmoid

from sparring.pipeline.demonstrations.library import Demonstrations
from sparring.pipeline.learning.optimizer import Adam
from sparring.pipeline.learning.settings import ExtrinsicSettings, GailSettings
from sparring.pipeline.learning.signals.ends import EndCounts
from sparring.pipeline.learning.signals.steps import Features, Floats, Steps, linear, select_rows
from sparring.pipeline.networks.device import CPU, over
from sparring.pipeline.networks.encoders import Inputs
from sparring.pipeline.specs import BehaviorSpec

PENALTY: Final = 10.0
CODE: Final = 128
INFORMATION: Final = 0.5
BETA_STEP: Final = 0.0005
_SAFE: Final = 1e-7
_HEAD_GAIN: Final = 0.2
_CODE_GAIN: Final = 0.1
_HELD_OUT: Final = 0.2
_ROWS_AT_ONCE: Final = 4096


class DiscriminatorRows(NamedTuple):
    """Holds rows of one side, on the CPU.

    Attributes:
        inputs: prepared observations.
        more: [B, A + 1] action features, and whether the episode ended; None without `use_actions`.
    """

    inputs: Inputs
    more: Tensor | None

    def rows(self, at_B: Tensor) -> DiscriminatorRows:
        """Returns some of the rows."""
        return DiscriminatorRows(
            select_rows(self.inputs, at_B), None if self.more is None else self.more.index_select(0, at_B)
        )


class Discriminator(nn.Module):
    """Distinguishes demonstrations from steps of the policy.

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

    def prepare(self, steps: Steps) -> DiscriminatorRows:
        """Returns steps as this network reads them."""
        encoder = self.features.encoder
        inputs = encoder.prepare(encoder.join([column[: len(steps)] for column in steps.observations]))
        return DiscriminatorRows(inputs, torch.cat((steps.done, steps.flags), 1) if self.uses_actions else None)

    def forward(self, rows: DiscriminatorRows, noise: bool) -> tuple[Tensor, Tensor | None]:
        """Returns logits [B], and the mean code [B, Z] if there is one.

        Args:
            rows: prepared steps.
            noise: sample the code instead of using its mean.
        """
        features_BU = self.features(rows.inputs, rows.more)
        if self.code is None:
            return self.head(features_BU).squeeze(1), None
        mean_BZ: Tensor = self.code(features_BU)
        code_BZ = mean_BZ
        if noise:
            noise_BZ = torch.randn(mean_BZ.shape, generator=self._generator)
            code_BZ = mean_BZ + self.sigma * over(noise_BZ, mean_BZ.device)
        return self.head(code_BZ).squeeze(1), mean_BZ


class Gail:
    """Trains the discriminator of one behavior on its demonstrations, and computes rewards with it.

    Attributes:
        module: all trained weights.
        optimizer: changes its parameters.

    Args:
        spec: observations and actions of the behavior.
        settings: the signal's settings.
        demonstrations: the episodes to imitate; None if the weights are only loaded.
        generator: random source of the initial weights and of sampling.
        device: device of the discriminator.
    """

    def __init__(
        self,
        spec: BehaviorSpec,
        settings: GailSettings,
        demonstrations: Demonstrations | None,
        generator: torch.Generator,
        device: torch.device = CPU,
    ) -> None:
        self.module = Discriminator(spec, settings, generator)
        self.optimizer = Adam(self.module, settings.learning_rate, device)
        self._generator = generator
        self._taken: list[dict[str, Tensor]] = []
        if demonstrations is not None:
            self._end_counts = EndCounts(int(demonstrations.terminated.sum()), demonstrations.steps)
            learned, held_out = demonstrations.split(_HELD_OUT, seed=0)
            self._learned = Steps.of_demonstrations(spec.actions, learned)
            self._kept = Steps.of_demonstrations(spec.actions, held_out) if held_out.episodes else None
            encoder = self.module.features.encoder
            encoder.update(encoder.join([column[: len(self._learned)] for column in self._learned.observations]))
            self.restored()

    def restored(self) -> None:
        """Prepares the demonstrations again: the normalizer is one of the weights."""
        self._expert = self.module.prepare(self._learned)
        self._held_out = None if self._kept is None else self.module.prepare(self._kept)
        self._policy = self._expert

    def begin(self, steps: Steps) -> Floats:
        """Starts a batch and returns its rewards [r]; `learn` then trains on its minibatches."""
        self._policy = self.module.prepare(steps)
        self._taken = []
        logits_r = torch.cat([self._logits(self._policy, rows) for rows in _blocks(len(steps))]).cpu()
        rewards: Floats = -torch.log1p(-logits_r.double().sigmoid() * (1 - _SAFE)).float().numpy()
        return rewards

    def terminal_bootstrap_fraction(self, ends: int, steps: int) -> float:
        """Returns the fraction that `ends` computes from how often demonstrations and policy end."""
        self._end_counts.count(ends, steps)
        return self._end_counts.share

    def learn(self, at_B: Tensor) -> None:
        """Takes one optimizer step on some rows of the batch, and as many of the demonstrations."""
        which_B = torch.randint(len(self._learned), (len(at_B),), generator=self._generator)
        sides = self._policy.rows(at_B), self._expert.rows(which_B)
        self._taken += self.step(*over(sides, self.optimizer.device))

    def statistics(self) -> dict[str, float]:
        """Returns the mean measures of the steps since `begin`, and the accuracy on held-out demonstrations."""
        found = {name: torch.stack([one[name] for one in self._taken]).mean().item() for name in self._names()}
        if self._held_out is not None:
            logits = self._logits(self._held_out, torch.arange(len(self._held_out.inputs[0])))
            found["Policy/GAIL Held-Out Accuracy"] = (logits > 0).float().mean().item()
        return found

    def step(self, policy: DiscriminatorRows, expert: DiscriminatorRows) -> list[dict[str, Tensor]]:
        """Takes one optimizer step on as many rows of both sides; returns its measures, none if it was skipped.

        Args:
            policy: rows, on the discriminator's device.
            expert: rows, on the discriminator's device.
        """
        rows = len(expert.inputs[0])
        logits_2B, mean_2BZ = self.module(_both(policy, expert), True)
        policy_B, expert_B = logits_2B.split(rows)
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
        penalty = PENALTY * self._penalty(policy, expert)
        loss = loss + penalty
        report["Policy/GAIL Grad Mag Loss"] = penalty.detach()
        if not self.optimizer.step((loss,), (torch.ones_like(loss),)):
            return []
        if divergence is not None:
            self.module.beta.add_(BETA_STEP * (divergence.detach().cpu() - INFORMATION)).clamp_(min=0)
            report["Policy/GAIL Beta"] = self.module.beta.clone()
        return [report]

    # ---------------------------------------------------------------- inside

    def _penalty(self, policy: DiscriminatorRows, expert: DiscriminatorRows) -> Tensor:
        """Returns the gradient penalty (4), without its weight."""
        share_B = over(torch.rand(len(expert.inputs[0]), generator=self._generator), self.optimizer.device)
        pairs = zip(policy.inputs, expert.inputs, strict=True)
        columns = [_between(one, other, share_B).requires_grad_() for one, other in pairs]
        more = None
        if policy.more is not None and expert.more is not None:
            more = _between(policy.more, expert.more, share_B).requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):  # the other kernels can be differentiated only once
            logits_B, _ = self.module(DiscriminatorRows(tuple(columns), more), True)
            wanted = columns if more is None else [*columns, more]
            gradients = torch.autograd.grad(logits_B.sigmoid().sum(), wanted, create_graph=True, allow_unused=True)
        squares_B = sum(one.square().flatten(1).sum(1) for one in gradients if one is not None)
        assert isinstance(squares_B, Tensor)
        return (torch.sqrt(squares_B + _SAFE) - 1).square().mean()

    @torch.no_grad()
    def _logits(self, side: DiscriminatorRows, rows: Tensor) -> Tensor:
        logits_B: Tensor = self.module(over(side.rows(rows), self.optimizer.device), False)[0]
        return logits_B

    def _names(self) -> list[str]:
        return list(self._taken[0]) if self._taken else []


def kl(mean_2BZ: Tensor, sigma_Z: Tensor) -> Tensor:
    """Returns the mean over row pairs of KL(policy) + KL(expert) from N(0, I); the policy's rows come first.

    `KL(N(mu, sigma^2), N(0, 1)) = (mu^2 + sigma^2 - 1 - log sigma^2) / 2`, summed over the code.
    """
    variance_Z = sigma_Z.square()
    of_means = mean_2BZ.square().sum() / len(mean_2BZ)  # half the sum over both rows of a pair, mean over pairs
    return of_means + (variance_Z - 1 - variance_Z.log()).sum()


def biased(extrinsic: ExtrinsicSettings | None) -> bool:
    """Returns whether all rewards are always above 0, because GAIL is the only one.

    If episodes can end by themselves, such an agent first learns to survive, whether the demonstrations do so or not
    (Kostrikov et al. 2019, arXiv 1809.02925, section 4.1).
    """
    return extrinsic is None or not extrinsic.strength


def _both(one: DiscriminatorRows, other: DiscriminatorRows) -> DiscriminatorRows:
    inputs = tuple(torch.cat(columns) for columns in zip(one.inputs, other.inputs, strict=True))
    more = None if one.more is None or other.more is None else torch.cat((one.more, other.more))
    return DiscriminatorRows(inputs, more)


def _between(one: Tensor, other: Tensor, share_B: Tensor) -> Tensor:
    """Interpolates: `share` of one plus the rest of the other; image bytes become floats 0..1."""
    if one.dtype == torch.uint8:
        one, other = one.float() / 255, other.float() / 255
    share = share_B.view(-1, *[1] * (one.dim() - 1))
    return share * one + (1 - share) * other


def _blocks(rows: int) -> list[Tensor]:
    return list(torch.split(torch.arange(rows), _ROWS_AT_ONCE))
