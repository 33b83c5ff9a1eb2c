# ruff: noqa: N803, N806 (names end in their shape)
"""Losses of critics that learn from recorded steps alone.

Without a simulator nothing corrects what a critic expects of actions that were never taken.

    CQL       1/2 (Q(s, a) - y)^2 + weight (log sum exp_a' Q(s, a') - Q(s, a))     (Kumar et al. 2020, equation 4)
    IQ-Learn  V(s) - Q(s, a) + (Q(s, a) - gamma V'(s'))^2 / (4 weight)             (Garg et al. 2021, equation 10)

1. The sum over choices is exact. That over continuous actions is estimated by importance sampling from 10 uniform
   actions and 10 of the policy (appendix F of Kumar et al., without the actions of the next state).
2. In IQ-Learn, V(s) is that of the critic itself under the present policy, V'(s') that of the target critics. Its
   states are those of the data, where V(s) - gamma V'(s') telescopes to the value of the start (the authors' code:
   `value`).

B rows, N samples of each, C continuous actions, S reward signals, X values of an action for a signal.
"""

import math
from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from sparring.pipeline.networks.device import over
from sparring.pipeline.networks.squashed import SquashedActor, squash

SAMPLES: Final = 10
"""Uniform actions for each row, and as many of the policy."""


class Evaluate(Protocol):
    """Evaluates actions of some rows."""

    def __call__(self, rows_N: Tensor, continuous_NC: Tensor) -> Tensor:
        """Returns values [N, S, X] of continuous actions, together with every choice, in the rows of these numbers."""


def conservative_loss(values_BS: Tensor, targets_BS: Tensor, sums_BS: Tensor, weight: float) -> Tensor:
    """Returns the loss of CQL; the last argument but one is `log_sum` of the same rows."""
    return 0.5 * (values_BS - targets_BS).square().mean() + weight * (sums_BS - values_BS).mean()


def inverse_loss(values_BS: Tensor, following_BS: Tensor, soft_BS: Tensor, weight: float) -> Tensor:
    """Returns the loss of IQ-Learn.

    Args:
        values_BS: of the recorded actions.
        following_BS: discounted values of what follows.
        soft_BS: values of the recorded states under the policy.
        weight: alpha of the regularizer.
    """
    return (soft_BS - values_BS).mean() + (values_BS - following_BS).square().mean() / (4 * weight)


def log_sum(values_NSX: Tensor, masks_NK: Tensor | None, branches: Sequence[int]) -> Tensor:
    """Returns [N, S] `log sum exp` of values over all combinations of allowed choices, which is a sum over branches."""
    if masks_NK is None:
        return values_NSX[..., 0]
    allowed_NSX = values_NSX.masked_fill(masks_NK.unsqueeze(1), -math.inf)
    parts = [one.logsumexp(2) for one in allowed_NSX.split_with_sizes(list(branches), 2)]
    return torch.stack(parts).sum(0)


def log_sum_of_all(
    actor: SquashedActor, head_BH: Tensor, masks_BK: Tensor | None, evaluate: Evaluate, generator: torch.Generator
) -> Tensor:
    """Returns [B, S] `log sum exp` of values over all actions, continuous ones by importance sampling (1).

    Args:
        actor: the policy.
        head_BH: its outputs.
        masks_BK: True = forbidden; None without branches.
        evaluate: estimates values with one critic.
        generator: random source.
    """
    rows, continuous, device = len(head_BH), actor.actions.continuous, head_BH.device
    at_N = torch.arange(rows, device=device).repeat_interleave(SAMPLES)
    shape = (len(at_N), continuous)
    uniform_NC = over(2 * torch.rand(shape, generator=generator) - 1, device)
    with torch.no_grad():
        noise_NC = over(torch.randn(shape, generator=generator), device)
        means_NC, log_sigma_NC = actor.split(head_BH.index_select(0, at_N))
        policy_NC, log_p_N = squash(means_NC, log_sigma_NC, noise_NC)
    density_N = torch.cat([torch.full_like(log_p_N, -continuous * math.log(2)), log_p_N])
    both_N = at_N.repeat(2)
    masks = None if masks_BK is None else masks_BK.index_select(0, both_N)
    values_NS = log_sum(evaluate(both_N, torch.cat([uniform_NC, policy_NC])), masks, actor.actions.discrete)
    weighted = (values_NS - density_N.unsqueeze(1)).view(2, rows, SAMPLES, -1)
    return weighted.logsumexp((0, 2)) - math.log(2 * SAMPLES)
