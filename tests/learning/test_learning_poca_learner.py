"""The learner of MA-POCA: reproducibility, checkpoints, teammates registered during training, reports."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sparring.pipeline.errors import CheckpointError
from sparring.pipeline.learning.learner import Learner
from tests.learning.group_helpers import decisions_of, poca_settings, record
from tests.learning.random_groups import OWN, PLAIN, TEAMMATES, World, specs_of


def learner(seed=0, teammates=0, **hyper):
    one = Learner(OWN, PLAIN, poca_settings(**hyper), seed)
    one.register(dict(list(TEAMMATES.items())[:teammates]))
    return one


def fed(one, seed=0, teammates=0, count=9, **changes):
    specs = specs_of(teammates=teammates)
    one.add(record(World(specs, seed=seed).groups(count, horizon=5), specs, **changes))
    return one


@pytest.mark.parametrize("teammates", [0, 2])
def test_same_seed_and_segments_give_the_same_weights_bit_for_bit(teammates):
    hashes = []
    for _ in range(2):
        one = learner(7, teammates)
        for seed in range(3):
            fed(one, seed, teammates).update(everything=True)
            torch.rand(3)  # the global random source is not used
        hashes.append(one.weights_sha256)
    assert hashes[0] == hashes[1]
    assert learner(8, teammates).weights_sha256 != learner(7, teammates).weights_sha256


def test_resumed_learner_continues_bit_for_bit_with_its_teammates():
    """Teammates are registered between updates; a resumed learner gets them from the checkpoint."""
    through = fed(learner(3))
    through.update(everything=True)
    through.register({"Driver": TEAMMATES["Driver"]})
    fed(through, 1, 1).update(everything=True)
    through.register({"Crane": TEAMMATES["Crane"]})
    resumed = learner(99)
    resumed.restore(through.checkpoint())
    assert list(resumed.teammates) == list(through.teammates) == list(TEAMMATES)
    assert resumed.weights_sha256 == through.weights_sha256
    for seed in range(2, 4):
        first, second = (fed(one, seed, 2).update(everything=True) for one in (through, resumed))
        assert first == second
    assert resumed.weights_sha256 == through.weights_sha256
    after, other = through.checkpoint(), resumed.checkpoint()
    for name, array in (after.weights | after.optimizer).items():
        np.testing.assert_array_equal((other.weights | other.optimizer)[name], array)


def test_refused_checkpoint_changes_nothing_and_registers_no_teammates():
    state = learner(0, 2).checkpoint()
    other = Learner("Other", PLAIN, poca_settings(), 0)
    before = other.weights_sha256
    with pytest.raises(CheckpointError, match="Walker"):
        other.restore(state)
    assert not other.teammates
    assert other.weights_sha256 == before


def test_resumed_learner_keeps_embeddings_whatever_the_order_of_registration():
    """Two behaviors of one spec must not exchange their embeddings."""
    twins = dict.fromkeys(("Left", "Right"), TEAMMATES["Driver"])
    through, resumed = learner(0), learner(1)
    for name in twins:
        through.register({name: twins[name]})
    for name in reversed(twins):
        resumed.register({name: twins[name]})
    resumed.restore(through.checkpoint())
    ours, theirs = (one._algorithm.networks.critic for one in (through, resumed))
    for name in twins:
        expected, got = (one.observed[one.names.index(name)].weight for one in (ours, theirs))
        assert torch.equal(got, expected)


def test_teammates_that_have_not_acted_have_zero_actions():
    """Until assembly receives a first action, the columns of actions have width 0."""
    specs, hashes = specs_of(teammates=1), []
    for width in (1, 0):
        world, one = World(specs, seed=3), learner(0, 1)
        waiting, later = world.groups(6, most=3), world.groups(6)
        for group in waiting:
            for mate in group.of("Driver"):
                mate.steps, mate.until = [], group.span + 1
                mate.following.continuous, mate.following.discrete = np.zeros(1, np.float32), np.zeros(1, np.int32)
        message = record(waiting, specs)
        (teammates,) = message.shared.teammates
        columns = ("continuous", "discrete", "next_continuous", "next_discrete")
        teammates = replace(teammates, **{name: getattr(teammates, name)[:, :width] for name in columns})
        one.add(replace(message, shared=replace(message.shared, teammates=(teammates,))))
        one.add(record(later, specs))
        assert one.update(everything=True).skipped == 0
        hashes.append(one.weights_sha256)
    assert hashes[0] == hashes[1]


def test_registering_a_teammate_keeps_existing_weights_and_adam_moments():
    one = fed(learner())
    one.update(everything=True)
    before, weights = one._algorithm.optimizer, one.checkpoint().weights
    named = {
        name: {key: part.clone() for key, part in before.named(before.moments[name]).items()}
        for name in ("exp_avg", "exp_avg_sq")
    }
    steps, rate = before.moments["step"].item(), before.learning_rate
    assert steps > 0
    one.register({"Driver": TEAMMATES["Driver"]})
    grown = one._algorithm.optimizer
    assert grown is not before
    assert (grown.moments["step"].item(), grown.learning_rate) == (steps, rate)
    for name, moments in named.items():
        after = grown.named(grown.moments[name])
        new = set(after) - set(moments)
        assert new
        assert {key.split(".")[1] for key in new} <= {"encoders", "observed", "acted"}
        for key, part in after.items():
            assert torch.equal(part, moments.get(key, torch.zeros_like(part)))
    for name, array in weights.items():
        np.testing.assert_array_equal(one.checkpoint().weights[name], array)
    for parameter in one._algorithm.networks.modules.parameters():
        inside = parameter.data_ptr() - grown.flat.data_ptr()
        assert 0 <= inside < grown.flat.numel() * 4, "a view of the optimizer's block"
    before = one.weights_sha256
    one.register({"Driver": TEAMMATES["Driver"]})
    assert one.weights_sha256 == before, "registered before"
    assert not one.unknown_behaviors(record(World(specs_of(teammates=1)).groups(3), specs_of(teammates=1)))
    assert fed(one, 1, 1).update(everything=True).skipped == 0


def test_loading_weights_only_starts_a_new_lineage_with_their_teammates():
    """With `init_path` the network is that of the checkpoint, including its teammates."""
    one, other = fed(learner(0, 2), 0, 2), learner(1)
    one.update(everything=True)
    other.load_weights(one.checkpoint())
    assert list(other.teammates) == list(TEAMMATES)
    assert other.weights_sha256 == one.weights_sha256
    assert (other.version, other.updates, other.trained) == (1, 0, 0)


def test_unregistered_behaviors_are_reported_as_unknown():
    groups = World(specs_of(teammates=2), seed=4).groups(6)
    assert sorted(learner().unknown_behaviors(record(groups, specs_of(teammates=2)))) == sorted(TEAMMATES)
    assert not learner().unknown_behaviors(record(World(specs_of()).groups(2), specs_of()))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_reward_is_skipped_and_counted_without_changing_weights(bad):
    one, specs = learner(normalize=False), specs_of()
    groups = World(specs).groups(9)
    groups[0].rewards[0] = bad
    one.add(record(groups, specs))
    before = {name: array for name, array in one.checkpoint().weights.items() if "largest" not in name}
    report = one.update(everything=True)
    assert report.skipped == report.minibatches > 0
    assert not {name for name in report.statistics if name.startswith("Losses/")}
    after = one.checkpoint()
    assert not after.optimizer["exp_avg"].any()
    for name, array in before.items():
        np.testing.assert_array_equal(after.weights[name], array)
    assert fed(one, 1).update(everything=True).skipped == 0


def test_statistics_have_ml_agents_names_and_diagnostics_their_own():
    report = fed(learner()).update(everything=True)
    assert set(report.statistics) == {
        "Policy/Learning Rate", "Policy/Epsilon", "Policy/Beta", "Policy/Entropy",
        "Policy/Extrinsic Value Estimate", "Policy/Extrinsic Baseline Estimate",
        "Losses/Policy Loss", "Losses/Value Loss", "Losses/Baseline Loss",
        "Update/Approximate KL", "Update/Clip Fraction", "Update/Explained Variance", "Update/Gradient Norm",
        "Update/Stale Weight", "Update/Effective Sample Size",
    }  # fmt: skip


def test_report_says_whether_agents_shared_a_group():
    assert fed(learner()).update(everything=True).groups
    alone = learner()
    alone.add(record(World(specs_of()).groups(6, most=1), specs_of()))
    report = alone.update(everything=True)
    assert (report.groups, report.skipped) == (False, 0)


def test_report_counts_steps_and_their_lag():
    one = learner(batch_size=4)
    groups = World(specs_of()).groups(9)
    steps = [step for _, _, step in decisions_of(groups)]
    for at, step in enumerate(steps):
        step.version = 3 if at % 4 == 0 else 5
    one.version = 5
    one.add(record(groups, specs_of()))
    report = one.update(everything=True)
    old = len(steps[::4])
    assert (report.steps, report.lags) == (len(steps), (len(steps) - old, 0, old))
    assert (one.version, one.updates, one.trained) == (6, 1, len(steps))


def test_update_takes_complete_group_segments():
    one = fed(learner(buffer_size=32, batch_size=8), count=30)
    assert one.ready
    size, before = one.size_of_update(), one.buffered
    assert size >= 32
    assert one.update().steps == size
    assert one.buffered == before - size
