# ruff: noqa: N803, N806 (names end in their shape)
"""This module implements the policy of SAC: Gaussian samples of continuous actions are squashed by tanh.

Mean and log sigma depend on the observation, and actions are in (-1, 1) by construction, as simulators receive them
(Haarnoja et al. 2018, arXiv 1801.01290, appendix C). Each branch of discrete actions is a categorical, as in PPO.

B rows, C continuous actions, K choices of all branches, H = 2 C + K: means, log sigmas, and logits.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from sparring.pipeline.networks.actor import LOGIT_GAINS, MEAN_GAINS, Actor, Choices, OnnxGraph, Sampler
from sparring.pipeline.networks.distributions import ActionSampler, Source
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, Flags, Floats

LOG_SIGMA: Final = (-20.0, 2.0)
"""Range of the logarithm of standard deviations (the authors' code, and ML-Agents)."""

_LOG_2PI: Final = math.log(2 * math.pi)
_LOG_2: Final = math.log(2)


class SquashedActor(Actor):
    """Implements a policy whose continuous actions are squashed; its arguments are those of `Actor`."""

    def __init__(
        self, spec: BehaviorSpec, settings: NetworkSettings, generator: torch.Generator | None = None, values: int = 0
    ) -> None:
        super().__init__(spec, settings, generator, values)
        self.action_limit = 1.0  # samples are what simulators receive
        self.log_sigma = nn.Parameter(torch.empty(0))  # the body computes it

    @staticmethod
    def gains(actions: ActionSpec, settings: NetworkSettings) -> list[float]:
        """Returns factors on the initial weights of each output: means, log sigmas, then logits."""
        mean, logit = MEAN_GAINS[settings.initialization], LOGIT_GAINS[settings.initialization]
        return [mean] * (2 * actions.continuous) + [logit] * actions.mask_size

    def sampler(self) -> Sampler:
        """Returns what samples actions from the outputs of the body."""
        return SquashedSampler(self.actions)

    def split(self, head_BH: Tensor) -> tuple[Tensor, Tensor]:
        """Returns means [B, C] before squashing, and log sigmas [B, C]."""
        continuous = self.actions.continuous
        return head_BH[:, :continuous], head_BH[:, continuous : 2 * continuous].clamp(*LOG_SIGMA)

    def scaled_means(self, head_BH: Tensor) -> Tensor:
        """Returns the most likely continuous actions [B, C] as simulators receive them."""
        return self.split(head_BH)[0].tanh()

    def continuous(self, head_BH: Tensor, *, sampled: bool) -> Tensor:
        """Returns continuous actions [B, C] as simulators receive them, sampled or the most likely ones."""
        means_BC, log_sigma_BC = self.split(head_BH)
        raw_BC = means_BC + torch.randn_like(means_BC) * log_sigma_BC.exp() if sampled else means_BC
        return raw_BC.tanh()

    def continuous_onnx(self, graph: OnnxGraph, head: str, *, sampled: bool, output: str = "") -> str:
        """Adds the nodes of `continuous` to a graph of ONNX, and returns the name of the result."""
        continuous = self.actions.continuous
        raw = graph.slice(head, 0, continuous)
        if sampled:
            log_sigma = graph.slice(head, continuous, 2 * continuous)
            sigma = graph.add("Exp", graph.add("Clip", log_sigma, min=LOG_SIGMA[0], max=LOG_SIGMA[1]))
            raw = graph.add("Add", raw, graph.add("Mul", graph.add("RandomNormalLike", raw), sigma))
        return graph.add("Tanh", raw, output=output)


def squash(means_BC: Tensor, log_sigma_BC: Tensor, noise_BC: Tensor) -> tuple[Tensor, Tensor]:
    """Returns actions [B, C] and the log-probability [B] of each row's; both can be differentiated.

    `log p(a) = log N(u) - log (1 - tanh(u)^2)` for `a = tanh(u)` (appendix C); the logarithm of the slope is
    `2 (log 2 - u - softplus(-2 u))`, which is finite for every u.

    Args:
        means_BC: of the Gaussian.
        log_sigma_BC: logarithms of its standard deviations.
        noise_BC: samples of the standard normal distribution.
    """
    raw_BC = means_BC + noise_BC * log_sigma_BC.exp()
    gaussian_BC = -0.5 * (noise_BC.square() + _LOG_2PI) - log_sigma_BC
    slope_BC = 2 * (_LOG_2 - raw_BC - softplus(-2 * raw_BC))
    return raw_BC.tanh(), (gaussian_BC - slope_BC).sum(1)


class SquashedSampler:
    """Samples the actions of a few agents at a time, by NumPy, whose calls cost less than PyTorch's.

    Args:
        actions: spec of the actions.
    """

    def __init__(self, actions: ActionSpec) -> None:
        self._continuous = actions.continuous
        branches = ActionSpec(discrete=actions.discrete) if actions.discrete else None
        self._branches = None if branches is None else ActionSampler(branches, np.empty(0, np.float32))

    def sample(self, head: Floats, masks: Flags | None, source: Source, deterministic: bool = False) -> Choices:
        """Chooses an action per row; its arguments are those of `Sampler.sample`."""
        rows, continuous = len(head), self._continuous
        discrete, log_prob = np.empty((rows, 0), np.int32), np.zeros(rows, head.dtype)
        if self._branches is not None:
            _, discrete, log_prob = self._branches.sample(head[:, 2 * continuous :], masks, source, deterministic)
        if not continuous:
            return np.empty((rows, 0), head.dtype), discrete, log_prob
        means_BC, log_sigma_BC = head[:, :continuous], np.clip(head[:, continuous : 2 * continuous], *LOG_SIGMA)
        noise_BC = np.zeros_like(means_BC)
        if not deterministic:
            noise_BC = source.standard_normal(means_BC.shape, head.dtype.type)
        raw_BC = means_BC + noise_BC * np.exp(log_sigma_BC)
        slope_BC = 2 * (_LOG_2 - raw_BC - np.logaddexp(0, -2 * raw_BC))
        gaussian_BC = -0.5 * (noise_BC * noise_BC + _LOG_2PI) - log_sigma_BC
        return np.tanh(raw_BC), discrete, log_prob + (gaussian_BC - slope_BC).sum(1, dtype=head.dtype)
