"""Behavioral cloning against its loss in plain numpy, its schedule, and what it does to a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparring.pipeline.demonstrations.episodes import RecordingError
from sparring.pipeline.demonstrations.library import Demonstrations
from sparring.pipeline.learning.cloning import Cloning, imitation_loss
from sparring.pipeline.learning.poca import POCA
from sparring.pipeline.learning.ppo import PPO
from sparring.pipeline.learning.settings import BehavioralCloningSettings, TrainerSettings
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from tests.learning.group_helpers import batch_of
from tests.learning.group_lives import OWN, specs_of
from tests.learning.signals_helpers import (
    LENGTH,
    MEMORY,
    SPECS,
    Weights,
    finite,
    linear,
    moments,
    played,
    recorded,
    shaken,
    shown_of,
    signals_of,
    silu,
    slope,
    some_places,
    state,
    trainer,
    weights_of,
    world,
    write,
)

HYBRID = SPECS["hybrid"]
PRETRAINING = "Losses/Pretraining Loss"


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def settings_of(cloning: dict[str, Any], path: Path | str = "none", **how: Any) -> TrainerSettings:
    wanted = BehavioralCloningSettings(**({"demo_path": str(path)} | cloning))
    return trainer(signals_of(["extrinsic"]), cloning=wanted, **how)


def cloning(
    spec: BehaviorSpec = HYBRID, shown: Demonstrations | None = None, *, how: Any = (), seed: int = 0, **wanted: Any
) -> tuple[Actor, Cloning]:
    """An actor of its own with an optimiser's gradients in place, and its cloning."""
    settings = settings_of(wanted, **dict(how))
    generator = torch.Generator().manual_seed(seed)
    ppo = PPO("Test", spec, settings.model_copy(update={"behavioral_cloning": None}), generator)
    shaken(ppo.actor)
    shown = shown_of(spec, recorded(spec, [4, 3, 5])) if shown is None else shown
    return ppo.actor, Cloning(ppo.actor, settings, shown, generator)


def watched(one: Cloning, monkeypatch: pytest.MonkeyPatch) -> list[tuple[np.ndarray, float]]:
    """Rows of each minibatch to come, and its learning rate."""
    seen: list[tuple[np.ndarray, float]] = []
    plain = one._step

    def step(inputs: Any, rows: Any, layout: Any) -> Any:
        seen.append((rows.numpy(), one._optimizer.param_groups[0]["lr"]))
        return plain(inputs, rows, layout)

    monkeypatch.setattr(one, "_step", step)
    return seen


# ---------------------------------------------------------------- loss


def loss_of(actions: ActionSpec, head: np.ndarray, shown: Demonstrations) -> float:
    """Row by row, branch by branch: squared errors of mean / 3, minus the log-probability of each choice."""
    total = 0.0
    for row in range(len(head)):
        for at in range(actions.continuous):
            total += (head[row, at] / 3 - float(shown.continuous[row, at])) ** 2
        first = actions.continuous
        for branch, size in enumerate(actions.discrete):
            scores = head[row, first : first + size].copy()
            if shown.masks is not None:
                offset = first - actions.continuous
                scores[shown.masks[row, offset : offset + size]] = -np.inf
            total -= scores[shown.discrete[row, branch]] - np.logaddexp.reduce(scores)
            first += size
    return total / len(head)


def head_of(weights: Weights, x: np.ndarray) -> np.ndarray:
    """Means and logits of a body of vectors."""
    layers = sorted({name.rsplit(".", 1)[0] for name in weights if name.startswith("body.")})
    for layer in layers[:-1]:
        x = silu(linear(weights, layer, x))
    return linear(weights, layers[-1], x)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["hybrid", "continuous", "discrete"])
def test_loss_and_gradient(name: str, masked: bool) -> None:
    """What is reported is the loss before the step, and the gradient is that of differences of the twin."""
    spec = SPECS[name]
    shown = shown_of(spec, recorded(spec, [4, 3, 5], masked=masked))
    actor, one = cloning(spec, shown, num_epoch=1, batch_size=12)
    weights = weights_of(actor)
    x = np.concatenate([column.astype(np.float64) for column in shown.observations], 1)

    def loss(moved: Weights) -> float:
        return loss_of(spec.actions, head_of(moved, x), shown)

    assert one.update(0) == {PRETRAINING: pytest.approx(loss(weights), rel=1e-4)}
    gradients = {key: parameter.grad for key, parameter in actor.named_parameters()}
    for key, place in some_places(weights, [key for key in weights if key.startswith("body.")]):
        slow = slope(loss, weights, key, place)
        found = gradients[key]
        assert found is not None
        assert found[place].item() == pytest.approx(slow, rel=2e-3, abs=2e-4), (key, place)


def test_large_means_are_not_clipped() -> None:
    """A mean beyond 3 is further off than 3 is: the loss goes on growing, and so there is always a way back."""
    spec = SPECS["continuous"]
    actor, _ = cloning(spec)
    wanted, none = torch.ones(1, 2), torch.zeros(1, 0, dtype=torch.int64)
    found = [imitation_loss(actor, torch.full((1, 2), mean), wanted, none, None).item() for mean in (3.0, 6.0, 9.0)]
    assert found == pytest.approx([0.0, 2.0, 8.0])


def test_the_demonstrated_mean_is_what_the_limit_makes_of_it() -> None:
    spec = SPECS["continuous"]
    actor, _ = cloning(spec)
    actor.action_limit = 0.5
    shown, none = torch.tensor([[1.0, -0.5]]), torch.zeros(1, 0, dtype=torch.int64)
    assert imitation_loss(actor, torch.tensor([[0.5, -0.25]]), shown, none, None).item() == 0


def test_forbidden_choices_get_no_gradient() -> None:
    """Logits of masked choices are neither pulled nor pushed."""
    spec = SPECS["discrete"]
    actor, _ = cloning(spec)
    head = torch.randn((3, 6), generator=torch.Generator().manual_seed(0), requires_grad=True)
    masks = torch.zeros((3, 6), dtype=torch.bool)
    masks[1, 3] = masks[2, 4] = True
    discrete = torch.tensor([[0, 1], [1, 0], [1, 3]])
    loss = imitation_loss(actor, head, torch.zeros(3, 0), discrete, masks)
    (gradient,) = torch.autograd.grad(loss, head)
    assert torch.equal(gradient == 0, masks)


def test_the_deviation_is_the_policys_own() -> None:
    """Cloning beside training leaves log sigma as it is."""
    actor, one = cloning()
    before = actor.log_sigma.detach().clone()
    one.update(0)
    assert torch.equal(actor.log_sigma, before)


# ---------------------------------------------------------------- learning rate


@pytest.mark.parametrize("steps", [0, 1000])
@pytest.mark.parametrize("strength", [0.5, 2.0])
def test_learning_rate(steps: int, strength: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strength times the policy's rate at the start; it falls linearly to 0 over `steps`, or stays for ever."""
    _, one = cloning(steps=steps, strength=strength, batch_size=12, num_epoch=1, how={"learning_rate": 0.004})
    for trained in (0, 100, 500, 999):
        seen = watched(one, monkeypatch)
        one.update(trained)
        share = 1 - trained / steps if steps else 1.0
        assert [rate for _, rate in seen] == [pytest.approx(0.004 * strength * share, rel=1e-4)]
        monkeypatch.undo()


@pytest.mark.parametrize("trained", [1000, 1001, 50_000])
def test_it_stops_after_its_steps(trained: int) -> None:
    """From then on nothing is learned, drawn or published."""
    actor, one = cloning(steps=1000)
    before, drawn = (state(actor), moments(one)), one._generator.get_state()
    assert one.update(trained) == {}
    assert (state(actor), moments(one)) == before
    assert torch.equal(one._generator.get_state(), drawn)


def test_the_first_step_is_one_of_adam() -> None:
    """Adam's first step moves each weight by the learning rate against its gradient."""
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
    """Passes over 20 steps in minibatches; what is left over is left out; at most `samples_per_update` of a pass."""
    shown = shown_of(HYBRID, recorded(HYBRID, [9, 1, 10]))
    _, one = cloning(HYBRID, shown, batch_size=batch_size, num_epoch=num_epoch, samples_per_update=samples)
    seen = watched(one, monkeypatch)
    one.update(0)
    assert len(seen) == expected
    size, in_pass = min(batch_size, 20), expected // num_epoch
    for start in range(0, expected, in_pass):
        rows = np.concatenate([one for one, _ in seen[start : start + in_pass]])
        assert len(rows) == size * in_pass
        assert len(set(rows.tolist())) == len(rows)
    if expected > 1:
        assert any(not np.array_equal(seen[0][0], other) for other, _ in seen[1:])


def test_sizes_of_the_policy_where_none_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """`num_epoch` and `batch_size` are the policy's unless set."""
    _, one = cloning(how={"batch_size": 5, "num_epoch": 4})
    seen = watched(one, monkeypatch)
    one.update(0)
    assert [len(rows) for rows, _ in seen] == [5] * 8


def test_fewer_samples_than_a_minibatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most `samples_per_update` steps of a pass, even where that is less than `batch_size`."""
    _, one = cloning(batch_size=12, num_epoch=1, samples_per_update=4)
    seen = watched(one, monkeypatch)
    one.update(0)
    assert sum(len(rows) for rows, _ in seen) <= 4


def test_another_order_at_every_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator goes on: two updates do not see the same minibatches."""
    _, one = cloning(batch_size=4, num_epoch=1)
    seen = watched(one, monkeypatch)
    one.update(0)
    one.update(0)
    assert [rows.tolist() for rows, _ in seen[:3]] != [rows.tolist() for rows, _ in seen[3:]]


def test_samples_of_an_update_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `samples_per_update` it is not always the same few steps that are learned from."""
    _, one = cloning(batch_size=3, num_epoch=1, samples_per_update=3)
    seen = watched(one, monkeypatch)
    for _ in range(40):
        one.update(0)
    assert {row for rows, _ in seen for row in rows.tolist()} == set(range(12))


# ---------------------------------------------------------------- sequences


@pytest.mark.parametrize("previous", [False, True])
def test_sequences(previous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes are cut into sequences, each from an empty memory; the loss is that of a walk step by step."""
    spec, lengths = HYBRID, [4, 1, 7]
    shown = shown_of(spec, recorded(spec, lengths, masked=True))
    actor, one = cloning(
        spec, shown, how={"memory": True, "previous": previous}, batch_size=4 * LENGTH + 6 * LENGTH, num_epoch=1
    )
    acting, head = actor.frozen(), []
    plain = acting._body
    start, before = 0, np.zeros((1, 7), np.float32)
    for length in lengths:
        memory = torch.zeros(1, MEMORY)
        before[:] = 0
        for step in range(length):
            if step % LENGTH == 0:
                memory = torch.zeros(1, MEMORY)
            row = start + step
            seen = tuple(column[row : row + 1] for column in shown.observations)
            features = acting._encode(seen, torch.from_numpy(before.copy()) if previous else None)
            outputs, memory = plain(features, memory)
            head.append(outputs[0].double().numpy())
            before[0, :2] = shown.continuous[row]
            before[0, 2:] = 0
            before[0, 2 + shown.discrete[row, 0]] = before[0, 5 + shown.discrete[row, 1]] = 1
        start += length
    expected = loss_of(spec.actions, np.array(head), shown)
    rows = watched(one, monkeypatch)
    assert one.update(0) == {PRETRAINING: pytest.approx(expected, rel=1e-4)}
    assert sorted(rows[0][0].tolist()) == list(range(12))


def test_minibatches_of_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many sequences as fit into `batch_size`, at least one; rows of a sequence stay together."""
    shown = shown_of(HYBRID, recorded(HYBRID, [7, 2, 6]))
    for batch_size, size in ((1, 1), (LENGTH, 1), (2 * LENGTH + 1, 2)):
        _, one = cloning(HYBRID, shown, how={"memory": True}, batch_size=batch_size, num_epoch=1)
        seen = watched(one, monkeypatch)
        one.update(0)
        sequences = [[0, 1, 2], [3, 4, 5], [6], [7, 8], [9, 10, 11], [12, 13, 14]]
        assert len(seen) == len(sequences) // size
        for rows, _ in seen:
            firsts = {tuple(one) for one in sequences if one[0] in rows.tolist()}
            assert len(firsts) == size
            assert sorted(rows.tolist()) == sorted(row for one in firsts for row in one)
        monkeypatch.undo()


# ---------------------------------------------------------------- beside training


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    return write(tmp_path, HYBRID, recorded(HYBRID, [4, 3, 5], masked=True))


@pytest.mark.parametrize("shared", [False, True])
def test_the_critic_and_the_policys_adam_are_left_alone(demo: Path, shared: bool) -> None:
    """Cloning moves the actor, with an Adam of its own."""
    ppo = PPO("Test", HYBRID, settings_of({}, demo, shared_critic=shared), torch.Generator().manual_seed(0))
    ppo.update(played(ppo), 1, 0)
    assert ppo.cloning is not None
    critic = state(ppo.modules["critic"]) if not shared else None
    adam, actor = moments(ppo.optimizer), state(ppo.actor)
    values = {
        name: parameter.detach()[ppo.actor.outputs :].clone()
        for name, parameter in ppo.actor.named_parameters()
        if str(ppo.actor.body.output) in name and name.startswith("body.")
    }
    ppo.cloning.update(0)
    assert state(ppo.actor) != actor
    assert moments(ppo.optimizer) == adam
    if critic is not None:
        assert state(ppo.modules["critic"]) == critic
    for name, before in values.items():
        after = dict(ppo.actor.named_parameters())[name].detach()[ppo.actor.outputs :]
        assert torch.equal(after, before)


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_once_per_update_of_ppo(demo: Path, memory: bool, shared: bool) -> None:
    """An update clones after its last minibatch and tells of it; over its steps nothing more is told."""
    settings = settings_of({"steps": 100, "batch_size": 6, "num_epoch": 1}, demo, memory=memory, shared_critic=shared)
    ppo = PPO("Test", HYBRID, settings, torch.Generator().manual_seed(0))
    batch = played(ppo)
    assert ppo.cloning is not None
    for update in range(1, 3):
        report = ppo.update(batch, update, 0)
        assert np.isfinite(report.statistics[PRETRAINING])
        steps = {tensor.item() for name, tensor in ppo.cloning.moments.items() if name.endswith(".step")}
        assert steps == {2.0 * update}
        assert finite(ppo.modules)
    assert PRETRAINING not in ppo.update(batch, 3, 100).statistics


def test_beside_ma_poca(demo: Path) -> None:
    """Cloning goes on where mates of other names are met: the optimiser's block is another one then."""
    poca = POCA(OWN, HYBRID, settings_of({}, demo, kind="poca"), torch.Generator().manual_seed(0))
    specs = specs_of(HYBRID, teammates=1)
    poca.meet({name: spec for name, spec in specs.items() if name != OWN})
    batch = batch_of(world(poca, specs).groups(5), specs)
    assert poca.cloning is not None
    actor, critic = state(poca.actor), state(poca.modules["critic"])
    poca.cloning.update(0)
    assert state(poca.actor) != actor
    assert state(poca.modules["critic"]) == critic
    report = poca.update(batch, 1, 0)
    assert report.skipped == 0
    assert PRETRAINING in report.statistics
    assert finite(poca.modules)


def test_without_the_setting_there_is_none() -> None:
    """A run that does not ask for cloning has no such loss."""
    ppo = PPO("Test", HYBRID, trainer(signals_of(["extrinsic"])), torch.Generator().manual_seed(0))
    assert ppo.cloning is None
    assert PRETRAINING not in ppo.update(played(ppo), 1, 0).statistics


def test_demonstrations_of_another_spec_are_refused(tmp_path: Path) -> None:
    """At the start of training, and not where nothing is learned."""
    write(tmp_path, SPECS["discrete"], recorded(SPECS["discrete"], [3]))
    with pytest.raises(RecordingError):
        PPO("Test", HYBRID, settings_of({}, tmp_path), torch.Generator())
    assert PPO("Test", HYBRID, settings_of({}, tmp_path), torch.Generator(), learns=False).cloning is None


def test_a_gradient_that_is_not_finite_is_skipped() -> None:
    """Weights and Adam stay as they were, bit by bit; PPO's own step afterwards is not spoilt."""
    shown = shown_of(HYBRID, recorded(HYBRID, [4, 3, 5]))
    shown.continuous[3] = np.nan
    actor, one = cloning(HYBRID, shown, batch_size=12, num_epoch=2)
    before = state(actor), moments(one)
    assert one.update(0) == {}
    assert (state(actor), moments(one)) == before
    shown.continuous[3] = 0
    assert one.update(0)
    assert finite(actor)


# ---------------------------------------------------------------- it imitates


@pytest.mark.parametrize("name", ["bytes", "floats", "entities", "goal", "hybrid"])
@pytest.mark.parametrize("memory", [False, True])
def test_the_loss_falls(name: str, memory: bool) -> None:
    """Whatever is seen, a few demonstrated steps are learned; with few values to remember, what is always done."""
    spec = SPECS[name]
    columns = recorded(spec, [4, 3, 5], masked=not memory)
    if memory:
        columns["continuous"][:], columns["discrete"][:] = 0.4, 1
    _, one = cloning(
        spec, shown_of(spec, columns), how={"memory": memory, "learning_rate": 0.01}, batch_size=6, num_epoch=1
    )
    first = one.update(0)[PRETRAINING]
    for _ in range(50):
        last = one.update(0)[PRETRAINING]
    assert last < 0.6 * first


def test_the_mode_is_what_was_demonstrated() -> None:
    """A small deterministic task: the sign of what is seen says what to do."""
    spec = BehaviorSpec(
        observations=(ObservationSpec(name="goal", shape=(1,)),), actions=ActionSpec(continuous=1, discrete=(2,))
    )
    seen = np.array([-1, 1] * 10, np.float32)[:, None]
    columns = recorded(spec, [20])
    columns |= {"observation.0": seen, "continuous": 0.5 * seen, "discrete": (seen > 0).astype(np.int32)}
    actor, one = cloning(spec, shown_of(spec, columns), how={"learning_rate": 0.01}, batch_size=10, num_epoch=1)
    first = one.update(0)[PRETRAINING]
    for _ in range(150):
        last = one.update(0)[PRETRAINING]
    assert last < 0.05 * first
    continuous, discrete, _ = actor.act((seen[:2],), None, torch.Generator(), deterministic=True)
    np.testing.assert_allclose(continuous[:, 0] / 3, [-0.5, 0.5], atol=0.05)
    assert discrete[:, 0].tolist() == [0, 1]


def test_observations_are_read_by_the_policys_statistics() -> None:
    """With `normalize` demonstrations are read as the policy reads what it sees, and do not enter its statistics."""
    actor, one = cloning(how={"normalize": True}, batch_size=12, num_epoch=1)
    normalizer = actor.encoder.normalizer
    assert normalizer is not None
    normalizer.mean.fill_(0.5)
    normalizer.variance.fill_(4.0)
    shown, before = one._shown, normalizer.count.item()
    x = (np.concatenate(shown.observations, 1).astype(np.float64) - 0.5) / 2
    expected = loss_of(HYBRID.actions, head_of(weights_of(actor), x), shown)
    assert one.update(0) == {PRETRAINING: pytest.approx(expected, rel=1e-4)}
    assert normalizer.count.item() == before
