"""Adam on one block of parameters, compared with PyTorch's."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from sparring.pipeline.learning.optimizer import Adam, StepTaken
from sparring.pipeline.networks.perceptron import backpropagate


def layer() -> nn.Linear:
    found = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    return found


def gradient(scale: float) -> torch.Tensor:
    return torch.tensor([[scale, -2 * scale]])


def stepped(adam: Adam, module: nn.Linear, scale: float) -> StepTaken:
    return adam.step(partial(backpropagate, (module(torch.ones(1, 3)),), gradient(scale)))


SCALES = (1e-6, 0.1, 30.0, 0.3)


@pytest.mark.parametrize("epsilon", [1e-8, 1e-5])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_steps_of_adam_equal_those_of_pytorch(limit: float | None, epsilon: float) -> None:
    own, other = layer(), layer()
    adam = Adam(own, 1e-2, epsilon=epsilon, max_norm=limit)
    twin = torch.optim.Adam(other.parameters(), 1e-2, eps=epsilon)
    for scale in SCALES:
        step = stepped(adam, own, scale)
        assert not step.skipped
        twin.zero_grad()
        other(torch.ones(1, 3)).backward(gradient(scale))
        norm = nn.utils.clip_grad_norm_(other.parameters(), limit or torch.inf).item()
        twin.step()
        assert step.square.sqrt().item() == pytest.approx(norm, rel=1e-5), "before it was clipped"
    for mine, theirs in zip(own.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_gradient_below_the_limit_is_unchanged_bit_for_bit() -> None:
    found = []
    for limit in (None, 100.0):
        module = layer()
        adam = Adam(module, 1e-2, max_norm=limit)
        for scale in (0.3, 1.7):
            stepped(adam, module, scale)
        found.append(torch.cat([parameter.flatten() for parameter in module.parameters()]))
    assert torch.equal(*found)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_gradient_that_is_not_finite_is_skipped(bad: float) -> None:
    module = layer()
    adam = Adam(module, 1e-2, max_norm=0.5)
    before = module.weight.detach().clone()
    step = stepped(adam, module, bad)
    assert step.skipped == 1
    assert not step.square.isfinite()
    assert torch.equal(module.weight, before)
    assert not adam.moments["exp_avg"].any()
    assert adam.moments["step"] == 0


def test_grown_optimizer_keeps_its_limit_and_epsilon() -> None:
    parts = nn.ModuleList([layer()])
    adam = Adam(parts, 1e-2, epsilon=1e-3, max_norm=0.5)
    parts.append(layer())
    grown = adam.grown()
    twin_parts = nn.ModuleList([layer(), layer()])
    twin = Adam(twin_parts, 1e-2, epsilon=1e-3, max_norm=0.5)
    for scale in (30.0, 1e-4):
        for optimizer, modules in ((grown, parts), (twin, twin_parts)):
            outputs = [module(torch.ones(1, 3)) for module in modules]
            assert not optimizer.step(partial(backpropagate, outputs, *[gradient(scale)] * 2)).skipped
    for mine, theirs in zip(parts.parameters(), twin_parts.parameters(), strict=True):
        assert torch.equal(mine, theirs)
