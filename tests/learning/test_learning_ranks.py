"""A learner of several processes learns what one of a single process learns."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.ranks import RankLost, Ranks, device_of
from sparring.pipeline.learning.settings import TrainerSettings
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.networks.device import CPU
from sparring.pipeline.queues import endpoints
from sparring.pipeline.specs import BehaviorSpec
from sparring.services.stages import ranks
from sparring.services.stages.ranks import LeadingLearner, lead
from tests.learning.group_helpers import LENGTH, poca_settings, record
from tests.learning.random_groups import OWN, World, specs_of
from tests.learning.signals_helpers import SPECS
from tests.learning.test_learning_device import POCAS, PPOS, played_records, queries_and_values, settings_of

Case = tuple[str, BehaviorSpec, TrainerSettings, Mapping[str, BehaviorSpec], list[Segments]]
"""Name, spec and settings of a behavior, the specs of its teammates, and two batches."""

EPSILON = 1e-3
"""Of Adam: with a smaller one, steps of parameters whose gradient is almost 0 depend on the rounding of sums."""


def case_of(name: str, path: Path) -> Case:
    if name in PPOS:
        spec = PPOS[name].get("spec", SPECS["hybrid"])
        settings = settings_of(path, **{"spec": spec, "max_grad_norm": 0.5, "adam_epsilon": EPSILON} | PPOS[name])
        return "Test", spec, settings, {}, played_records(settings, spec)
    spec, teammates, how = POCAS[name]
    settings, specs = poca_settings(num_epoch=1, batch_size=10, adam_epsilon=EPSILON, **how), specs_of(spec, teammates)
    world = World(specs, Actor(spec, settings.network_settings, torch.Generator().manual_seed(5)))
    records = [record(world.groups(4, horizon=5), specs, length=LENGTH if "memory" in how else 0) for _ in range(2)]
    return OWN, spec, settings, {other: one for other, one in specs.items() if other != OWN}, records


@contextmanager
def led(*identity: Any, count: int = 2) -> Iterator[LeadingLearner]:
    learner = lead(*identity, 3, count=count, timeout_s=60.0, device=CPU)
    try:
        yield learner
    finally:
        learner.end()


def weights(learner: Learner) -> dict[str, np.ndarray]:
    return {name: queries_and_values(name, array) for name, array in learner.checkpoint().weights.items()}


@pytest.mark.parametrize("name", [name for name in (*PPOS, *POCAS) if name != "bc"])
def test_two_ranks_on_halved_minibatches_equal_one(name: str, tmp_path: Path) -> None:
    behavior, spec, settings, teammates, records = case_of(name, tmp_path)
    alone = Learner(behavior, spec, settings, 3)
    with led(behavior, spec, settings) as several:
        for learner in (alone, several):
            learner.register(teammates)
            learner.raise_version(6)
        for each in records:
            reports = []
            for learner in (alone, several):
                learner.add(each)
                reports.append(learner.update(everything=True))
            assert reports[0].minibatches == reports[1].minibatches > 1
            assert reports[0].skipped == reports[1].skipped == 0
        assert several.ranks.count == 2
        expected = weights(alone)
        for kind, array in weights(several).items():
            np.testing.assert_allclose(array, expected[kind], rtol=0, atol=1e-6, err_msg=kind)


def test_ranks_drop_and_leave_over_the_same_steps(tmp_path: Path) -> None:
    """Three ranks, of which some get fewer rows than others, or all rows of a minibatch that is too small to divide."""
    behavior, spec, settings, _, records = case_of("memory", tmp_path)
    hyper = settings.hyperparameters.model_copy(update={"buffer_size": 30, "batch_size": 2 * LENGTH})
    settings = settings.model_copy(update={"hyperparameters": hyper})
    alone = Learner(behavior, spec, settings, 3)
    with led(behavior, spec, settings, count=3) as several:
        for learner in (alone, several):
            learner.raise_version(6)
            for each in [*records, *records]:
                learner.add(each)
            assert learner.drop_stale(2)
            learner.add(records[0])
            learner.update()
            assert learner.buffered
        expected = weights(alone)
        for kind, array in weights(several).items():
            np.testing.assert_allclose(array, expected[kind], rtol=0, atol=1e-6, err_msg=kind)


def test_folder_of_ranks_whose_learner_was_killed_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    behavior, spec, settings, _, _ = case_of("memory", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "sparring_ranks-left"
    left.mkdir()
    (left / endpoints._LOCK).touch()
    (left / "ranks").touch()
    with led(behavior, spec, settings):
        assert not [*tmp_path.glob("sparring*")]


def test_rank_that_is_killed_ends_the_update_with_its_name_and_status(tmp_path: Path) -> None:
    behavior, spec, settings, _, records = case_of("memory", tmp_path)
    with led(behavior, spec, settings) as several:
        several.add(records[0])
        several.update(everything=True)
        os.kill(several.processes[0].pid, signal.SIGKILL)
        several.processes[0].wait(10.0)
        several.add(records[1])
        with pytest.raises(RankLost, match="learner of Test is lost: rank 1 ended by status -9"):
            several.update(everything=True)


def test_rank_that_dies_before_it_joins_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    behavior, spec, settings, _, _ = case_of("memory", tmp_path)
    monkeypatch.setattr(ranks, "PYTHON", (sys.executable, "-c", "raise SystemExit(7)"))
    expected = "the ranks of the learner of Test have not met: rank 1 ended by status 7"
    with pytest.raises(RankLost, match=expected), led(behavior, spec, settings):
        pass


def test_learner_that_stops_goes_on_alone(tmp_path: Path) -> None:
    """The last update ends after its present minibatch, without the other ranks, which end."""
    behavior, spec, settings, _, records = case_of("memory", tmp_path)
    stops = [False]
    with led(behavior, spec, settings) as several:
        several.is_stopping = lambda: stops[0]
        several.add(records[0])
        minibatches = several.update(everything=True).minibatches
        stops[0] = True
        several.add(records[1])
        assert several.update(everything=True).minibatches == 1 < minibatches
        assert several.processes[0].wait(40.0) == 1
        assert several.checkpoint().updates == 2


@given(count=st.integers(1, 9), units=st.integers(0, 40))
def test_parts_divide_units_about_equally_or_not_at_all(count: int, units: int) -> None:
    every = [Ranks(rank, count) for rank in range(count)]
    parts = [list(range(units))[one.part(units)] for one in every]
    weights = [one.weight(units, len(part), units) for one, part in zip(every, parts, strict=True)]
    assert sum(weights) == pytest.approx(1.0)
    if units < count:
        assert parts == [list(range(units))] * count
    else:
        assert [unit for part in parts for unit in part] == list(range(units))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_cuda_is_a_device_for_each_rank() -> None:
    cuda = torch.device("cuda")
    assert [device_of(cuda, rank, 2) for rank in range(2)] == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert device_of(cuda, 0, 1) == cuda
    assert device_of(CPU, 1, 2) == CPU
