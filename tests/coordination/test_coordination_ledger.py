"""Step budget, flushes and step accounting in a tiny pipeline with a seeded schedule."""

from __future__ import annotations

import json
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.coordination.ledger import StepLedger
from tests.coordination.coordination_world import Pipeline


def pipelines(
    *, processes: int = 3, overlaps: tuple[int, ...] = (0, 1), buffers: tuple[int, ...] = (4, 16, 50, 128)
) -> st.SearchStrategy[Pipeline]:
    return st.builds(
        lambda seed, buffer_size, overlap, simulators, horizon: Pipeline(
            random.Random(seed),
            buffer_size=buffer_size,
            overlap=overlap,
            simulators=simulators,
            horizon=horizon,
        ),
        seed=st.integers(0, 2**32),
        buffer_size=st.sampled_from(buffers),
        overlap=st.sampled_from(overlaps),
        simulators=st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3), min_size=1, max_size=processes),
        horizon=st.sampled_from([1, 5, 1000]),
    )


def check_budget(pipeline: Pipeline) -> None:
    """Checks the true count of steps in flight: produced, and in no published update."""
    ledger = pipeline.ledger
    done = len(pipeline.trained) + len(pipeline.truly_lost)
    assert pipeline.numbers - done <= ledger.budget + pipeline.frames + pipeline.unreported


def check_step_counts(pipeline: Pipeline, *, is_complete: bool = False) -> None:
    """Compares the settled ledger with the stages; without `is_complete` some losses may be unknown to it."""
    ledger = pipeline.ledger.step_counts()
    still_open = pipeline.open()
    assert pipeline.numbers == len(pipeline.trained) + len(still_open) + len(pipeline.truly_lost), (
        "the test's own counts"
    )
    assert len(set(still_open)) == len(still_open)
    assert not pipeline.truly_lost & set(still_open)
    assert ledger.produced == ledger.trained + ledger.ghost + ledger.stale + ledger.lost + ledger.open
    assert ledger.trained == len(pipeline.trained)
    assert ledger.lost <= len(pipeline.truly_lost)
    assert ledger.open >= 0
    if is_complete:
        assert ledger.open == len(still_open)
        # steps that a stepping process lost before reporting them are in neither count
        assert pipeline.numbers - ledger.produced == len(pipeline.truly_lost) - ledger.lost


def check_fed(pipeline: Pipeline) -> None:
    """Checks that a whole waiting buffer is flushed, delivered and in training once the pipeline is settled."""
    assert pipeline.training or pipeline.ledger.waiting < pipeline.buffer_size


def run(pipeline: Pipeline, moves: int) -> None:
    for _ in range(moves):
        pipeline.step()
        check_budget(pipeline)


@settings(max_examples=60, deadline=None)
@given(pipeline=pipelines(), rests=st.integers(1, 6))
def test_without_a_crash_the_budget_holds_and_nothing_is_lost(pipeline: Pipeline, rests: int) -> None:
    """At most a frame of each process exceeds the budget, and settled step counts are exact."""
    for _ in range(rests):
        run(pipeline, 120)
        pipeline.settle()
        check_step_counts(pipeline, is_complete=True)
        check_fed(pipeline)
        assert not pipeline.truly_lost
        assert not pipeline.ledger.incidents


@settings(max_examples=40, deadline=None)
@given(pipeline=pipelines())
def test_training_never_ends(pipeline: Pipeline) -> None:
    """More buffers are trained as long as simulators run, for all sizes and schedules."""
    for _ in range(40):
        if len(pipeline.updates) >= 3:
            break
        run(pipeline, 200)
    assert len(pipeline.updates) >= 3, f"stalled with {pipeline.ledger.in_flight} in flight"


@settings(max_examples=30, deadline=None)
@given(pipeline=pipelines(processes=1, overlaps=(0,)))
def test_lockstep_trains_on_all_produced_steps(pipeline: Pipeline) -> None:
    """With overlap 0 and one process an update takes every step, so none is older than one version."""
    while len(pipeline.updates) < 3:
        pipeline.step()
        if pipeline.training:
            assert len(pipeline.trained) + len(pipeline.training) == pipeline.numbers
            assert not any(stepping.remaining > 0 for stepping in pipeline.steppings)


KILLS = ("stepping", "assembly", "coordination", "learner")


@settings(max_examples=60, deadline=None)
@given(pipeline=pipelines(), kills=st.lists(st.sampled_from(KILLS), min_size=1, max_size=4), before=st.integers(0, 400))
def test_a_crash_loses_and_counts_what_its_stage_held(pipeline: Pipeline, kills: list[str], before: int) -> None:
    """Work continues after a crash of any stage at any time, and each lost step is counted once."""
    for kill in kills:
        run(pipeline, before)
        pipeline.save()
        run(pipeline, 5)
        held = kill_one(pipeline, kill)
        lost = len(pipeline.truly_lost)
        assert lost <= held
        run(pipeline, 400)
        pipeline.settle()
        check_step_counts(pipeline)
    train_on(pipeline)
    pipeline.settle()
    check_step_counts(pipeline, is_complete=True)


def kill_one(pipeline: Pipeline, kill: str) -> int:
    """Crashes a stage; returns how many steps may be lost in all by now."""
    before = len(pipeline.truly_lost)
    if kill == "stepping":
        index = pipeline.rng.randrange(pipeline.processes)
        held = sum(len(part.completed) for part in pipeline.steppings[index].outbox)
        pipeline.kill_stepping(index)
    elif kill == "assembly":
        held = sum(len(assembler.held()) for assembler in pipeline.assemblers.values())
        pipeline.kill_assembly()
    elif kill == "learner":
        if pipeline.rng.random() < 0.5:
            pipeline.checkpoint = list(pipeline.trained)
            pipeline.step()
        held = len(pipeline.trained) - len(pipeline.checkpoint) + len(pipeline.training) + len(pipeline.buffer)
        pipeline.kill_learner()
    else:
        held = 0
        pipeline.kill_coordination()
    return before + held


def train_on(pipeline: Pipeline) -> None:
    """Trains more buffers, by which time every loss is known."""
    updates = len(pipeline.updates)
    for _ in range(60):
        if len(pipeline.updates) >= updates + 4:
            break
        run(pipeline, 200)
    assert len(pipeline.updates) >= updates + 4, f"stalled with {pipeline.ledger.in_flight} in flight"


@settings(max_examples=60, deadline=None)
@given(pipeline=pipelines(overlaps=(1,), buffers=(50, 128)), before=st.integers(0, 300))
def test_a_stepping_process_without_simulators_starves_no_other(pipeline: Pipeline, before: int) -> None:
    """Steps that a crashed source had open or lost do not keep the others from training."""
    run(pipeline, before)
    pipeline.kill_stepping(0, simulators=False)
    if pipeline.processes > 1:
        train_on(pipeline)
    pipeline.settle()
    check_step_counts(pipeline)


@settings(max_examples=60, deadline=None)
@given(pipeline=pipelines(), before=st.integers(0, 300), other=st.integers(1, 500))
def test_saved_and_restored_at_any_point_changes_nothing(pipeline: Pipeline, before: int, other: int) -> None:
    """A ledger that went through JSON answers and saves as the original."""
    run(pipeline, before)
    ledger = pipeline.ledger
    plain = json.loads(json.dumps(ledger.to_plain()))
    twin = StepLedger(buffer_size=pipeline.buffer_size, overlap=pipeline.overlap, processes=pipeline.processes)
    twin.restore(json.loads(json.dumps(plain)))
    copy = json.dumps(plain)
    twin.restore(plain)
    assert json.dumps(plain) == copy, "restore does not change its argument"
    assert twin.to_plain() == ledger.to_plain()
    assert (twin.produced, twin.done, twin.in_flight) == (ledger.produced, ledger.done, ledger.in_flight)
    assert twin.waiting == ledger.waiting
    assert twin.next_flush() == ledger.next_flush()
    assert (twin.flush.serial, twin.flush.required_steps) == (ledger.flush.serial, ledger.flush.required_steps)
    plain_allowances = [
        {name: (allowance.serial, allowance.steps, allowance.version) for name, allowance in one.allowances().items()}
        for one in (twin, ledger)
    ]
    assert plain_allowances[0] == plain_allowances[1]
    assert twin.take_new_incidents() == []
