"""Behavioral cloning: its loss compared with numpy, its schedule, minibatches and sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparring.pipeline.learning.cloning import imitation_loss
from tests.learning.cloning_helpers import HYBRID, PRETRAINING, cloning, head_of, loss_of, record_minibatches
from tests.learning.signals_helpers import (
    LENGTH,
    MEMORY,
    SPECS,
    Weights,
    demonstrations_of,
    moments,
    recorded,
    slope,
    some_places,
    state,
    weights_of,
)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["hybrid", "continuous", "discrete"])
def test_loss_and_gradient(name: str, masked: bool) -> None:
    """The reported loss is that before the step, and the gradient equals central differences of the twin."""
    spec = SPECS[name]
    demonstrations = demonstrations_of(spec, recorded(spec, [4, 3, 5], masked=masked))
    actor, one = cloning(spec, demonstrations, num_epoch=1, batch_size=12)
    weights = weights_of(actor)
    x = np.concatenate([column.astype(np.float64) for column in demonstrations.observations], 1)

    def loss(moved: Weights) -> float:
        return loss_of(spec.actions, head_of(moved, x), demonstrations)

    assert one.update(0) == {PRETRAINING: pytest.approx(loss(weights), rel=1e-4)}
    gradients = {key: parameter.grad for key, parameter in actor.named_parameters()}
    for key, place in some_places(weights, [key for key in weights if key.startswith("body.")]):
        slow = slope(loss, weights, key, place)
        found = gradients[key]
        assert found is not None
        assert found[place].item() == pytest.approx(slow, rel=2e-3, abs=2e-4), (key, place)


def test_large_means_are_not_clipped() -> None:
    """The loss grows beyond a mean of 3, so its gradient always leads back."""
    spec = SPECS["continuous"]
    actor, _ = cloning(spec)
    wanted, none = torch.ones(1, 2), torch.zeros(1, 0, dtype=torch.int64)
    found = [imitation_loss(actor, torch.full((1, 2), mean), wanted, none, None).item() for mean in (3.0, 6.0, 9.0)]
    assert found == pytest.approx([0.0, 2.0, 8.0])


def test_demonstrated_mean_is_scaled_by_the_action_limit() -> None:
    spec = SPECS["continuous"]
    actor, _ = cloning(spec)
    actor.action_limit = 0.5
    demonstrations, none = torch.tensor([[1.0, -0.5]]), torch.zeros(1, 0, dtype=torch.int64)
    assert imitation_loss(actor, torch.tensor([[0.5, -0.25]]), demonstrations, none, None).item() == 0


def test_forbidden_choices_get_no_gradient() -> None:
    """The loss does not depend on logits of masked choices."""
    spec = SPECS["discrete"]
    actor, _ = cloning(spec)
    head = torch.randn((3, 6), generator=torch.Generator().manual_seed(0), requires_grad=True)
    masks = torch.zeros((3, 6), dtype=torch.bool)
    masks[1, 3] = masks[2, 4] = True
    discrete = torch.tensor([[0, 1], [1, 0], [1, 3]])
    loss = imitation_loss(actor, head, torch.zeros(3, 0), discrete, masks)
    (gradient,) = torch.autograd.grad(loss, head)
    assert torch.equal(gradient == 0, masks)


def test_cloning_does_not_change_the_deviation() -> None:
    """Cloning does not change log sigma."""
    actor, one = cloning()
    before = actor.log_sigma.detach().clone()
    one.update(0)
    assert torch.equal(actor.log_sigma, before)


# ---------------------------------------------------------------- learning rate


@pytest.mark.parametrize("steps", [0, 1000])
@pytest.mark.parametrize("strength", [0.5, 2.0])
def test_learning_rate(steps: int, strength: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts at strength times the policy's rate and falls linearly to 0 over `steps`, or is constant."""
    _, one = cloning(steps=steps, strength=strength, batch_size=12, num_epoch=1, how={"learning_rate": 0.004})
    for trained in (0, 100, 500, 999):
        seen = record_minibatches(one, monkeypatch)
        one.update(trained)
        share = 1 - trained / steps if steps else 1.0
        assert [rate for _, rate in seen] == [pytest.approx(0.004 * strength * share, rel=1e-4)]
        monkeypatch.undo()


@pytest.mark.parametrize("trained", [1000, 1001, 50_000])
def test_cloning_stops_after_its_steps(trained: int) -> None:
    """From then on nothing is trained, sampled or published."""
    actor, one = cloning(steps=1000)
    before, random_state = (state(actor), moments(one)), one.generator.get_state()
    assert one.update(trained) == {}
    assert (state(actor), moments(one)) == before
    assert torch.equal(one.generator.get_state(), random_state)


def test_first_step_is_one_of_adam() -> None:
    """The first step of Adam moves each weight by the learning rate against its gradient."""
    actor, one = cloning(batch_size=12, num_epoch=1, how={"learning_rate": 0.002})
    before = {name: parameter.detach().clone() for name, parameter in actor.named_parameters()}
    one.update(0)
    for name, parameter in actor.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        large = gradient.abs() > 1e-4
        np.testing.assert_allclose(
            (parameter.detach() - before[name])[large].numpy(), -0.002 * gradient[large].sign().numpy(), rtol=1e-2
        )


# ---------------------------------------------------------------- minibatches


@pytest.mark.parametrize(
    ("batch_size", "num_epoch", "samples", "expected"),
    [
        (4, 1, 0, 5), (4, 3, 0, 15), (6, 1, 0, 3), (100, 2, 0, 2), (4, 1, 8, 2), (4, 2, 11, 4), (4, 1, 500, 5),
        (7, 1, 7, 1),
    ],
)  # fmt: skip
def test_number_of_minibatches(
    batch_size: int, num_epoch: int, samples: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs over 20 steps have complete minibatches only, and at most `samples_per_update` steps each."""
    demonstrations = demonstrations_of(HYBRID, recorded(HYBRID, [9, 1, 10]))
    _, one = cloning(HYBRID, demonstrations, batch_size=batch_size, num_epoch=num_epoch, samples_per_update=samples)
    seen = record_minibatches(one, monkeypatch)
    one.update(0)
    assert len(seen) == expected
    size, in_pass = min(batch_size, 20), expected // num_epoch
    for start in range(0, expected, in_pass):
        rows = np.concatenate([one for one, _ in seen[start : start + in_pass]])
        assert len(rows) == size * in_pass
        assert len(set(rows.tolist())) == len(rows)
    if expected > 1:
        assert any(not np.array_equal(seen[0][0], other) for other, _ in seen[1:])


def test_batch_size_and_epochs_default_to_those_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """`num_epoch` and `batch_size` default to those of the policy."""
    _, one = cloning(how={"batch_size": 5, "num_epoch": 4})
    seen = record_minibatches(one, monkeypatch)
    one.update(0)
    assert [len(rows) for rows, _ in seen] == [5] * 8


def test_samples_per_update_may_be_less_than_a_minibatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch has at most `samples_per_update` steps, even if that is less than `batch_size`."""
    _, one = cloning(batch_size=12, num_epoch=1, samples_per_update=4)
    seen = record_minibatches(one, monkeypatch)
    one.update(0)
    assert sum(len(rows) for rows, _ in seen) <= 4


def test_order_of_minibatches_changes_at_every_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two updates have different minibatches."""
    _, one = cloning(batch_size=4, num_epoch=1)
    seen = record_minibatches(one, monkeypatch)
    one.update(0)
    one.update(0)
    assert [rows.tolist() for rows, _ in seen[:3]] != [rows.tolist() for rows, _ in seen[3:]]


def test_samples_of_an_update_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `samples_per_update` each update samples other steps."""
    _, one = cloning(batch_size=3, num_epoch=1, samples_per_update=3)
    seen = record_minibatches(one, monkeypatch)
    for _ in range(40):
        one.update(0)
    assert {row for rows, _ in seen for row in rows.tolist()} == set(range(12))


# ---------------------------------------------------------------- sequences


@pytest.mark.parametrize("previous", [False, True])
def test_loss_of_sequences_equals_that_of_the_twin(previous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes are divided into sequences with zero memory at their starts, as in a step-by-step evaluation."""
    spec, lengths = HYBRID, [4, 1, 7]
    demonstrations = demonstrations_of(spec, recorded(spec, lengths, masked=True))
    actor, one = cloning(
        spec,
        demonstrations,
        how={"memory": True, "previous": previous},
        batch_size=4 * LENGTH + 6 * LENGTH,
        num_epoch=1,
    )
    acting, head = actor.frozen(), []
    plain = acting._step
    assert plain is not None
    start, before = 0, np.zeros((1, 7), np.float32)
    for length in lengths:
        memory = torch.zeros(1, MEMORY)
        before[:] = 0
        for step in range(length):
            if step % LENGTH == 0:
                memory = torch.zeros(1, MEMORY)
            row = start + step
            seen = tuple(column[row : row + 1] for column in demonstrations.observations)
            features = acting._encode(seen, torch.from_numpy(before.copy()) if previous else None)
            outputs, memory = plain(features, memory)
            head.append(outputs[0].double().numpy())
            before[0, :2] = demonstrations.continuous[row]
            before[0, 2:] = 0
            before[0, 2 + demonstrations.discrete[row, 0]] = before[0, 5 + demonstrations.discrete[row, 1]] = 1
        start += length
    expected = loss_of(spec.actions, np.array(head), demonstrations)
    rows = record_minibatches(one, monkeypatch)
    assert one.update(0) == {PRETRAINING: pytest.approx(expected, rel=1e-4)}
    assert sorted(rows[0][0].tolist()) == list(range(12))


def test_minibatches_of_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minibatch has as many complete sequences as fit into `batch_size`, at least one."""
    demonstrations = demonstrations_of(HYBRID, recorded(HYBRID, [7, 2, 6]))
    for batch_size, size in ((1, 1), (LENGTH, 1), (2 * LENGTH + 1, 2)):
        _, one = cloning(HYBRID, demonstrations, how={"memory": True}, batch_size=batch_size, num_epoch=1)
        seen = record_minibatches(one, monkeypatch)
        one.update(0)
        sequences = [[0, 1, 2], [3, 4, 5], [6], [7, 8], [9, 10, 11], [12, 13, 14]]
        assert len(seen) == len(sequences) // size
        for rows, _ in seen:
            firsts = {tuple(one) for one in sequences if one[0] in rows.tolist()}
            assert len(firsts) == size
            assert sorted(rows.tolist()) == sorted(row for one in firsts for row in one)
        monkeypatch.undo()
