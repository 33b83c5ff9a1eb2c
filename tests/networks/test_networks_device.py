"""What is cached for all networks serves those with a graph and those without."""

from __future__ import annotations

import torch

from sparring.pipeline.networks import device, distributions, group_critic
from sparring.pipeline.networks.device import constant
from sparring.pipeline.specs import ActionSpec


def test_what_an_update_without_a_graph_caches_can_be_part_of_a_later_graph() -> None:
    for cached in (device._constant, distributions._places, group_critic._sets):
        cached.cache_clear()
    actions = ActionSpec(continuous=1, discrete=(2, 3))
    head, log_sigma = torch.zeros(4, 6), torch.zeros(1)
    chosen = torch.zeros(4, 1), torch.zeros(4, 2, dtype=torch.int64)
    with torch.inference_mode():
        without = distributions.evaluate(actions, head, log_sigma, *chosen, None).log_prob.tolist()
        factor, (sets, _) = constant(2.0, head), group_critic._sets(2, 2, device.CPU)
    head.requires_grad_()
    found = distributions.evaluate(actions, head, log_sigma, *chosen, None).log_prob
    (found * factor).sum().backward()
    assert found.tolist() == without
    assert head.grad is not None
    assert head.grad.count_nonzero() == 4 * 5  # all logits; the means are at the mode
    assert not sets.is_inference()
