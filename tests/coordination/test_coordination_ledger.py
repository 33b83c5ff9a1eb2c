"""Step budget, flushes and step accounting in a tiny pipeline with a seeded schedule."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import asdict

from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.coordination.ledger import StepLedger
from tests.coordination.coordination_world import Pipeline
from tests.coordination.ledger_parts import through_json


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
    done = len(pipeline.trained) + len(pipeline.stale) + len(pipeline.lost_by)
    assert pipeline.numbers - done <= pipeline.ledger.limit + pipeline.frames + pipeline.unreported


def check_identity(pipeline: Pipeline) -> None:
    """Checks the ledger at any time: it balances, and knows of no step and of no loss that does not exist."""
    counts, losses = pipeline.ledger.step_counts(), pipeline.ledger.losses
    assert counts.produced == counts.trained + counts.ghost + counts.stale + counts.lost + counts.open
    assert 0 <= counts.produced <= pipeline.numbers
    assert counts.open >= 0
    assert min(losses.values(), default=1) > 0
    unreported = losses.get("both_ends", 0)  # on their way, or lost with the process that had not reported them
    assert counts.lost == sum(losses.values()) <= len(pipeline.lost_by) + unreported
    assert unreported <= pipeline.unreported


def check_step_counts(pipeline: Pipeline, *, is_complete: bool = False) -> None:
    """Compares the settled ledger with the stages; without `is_complete` some losses may be unknown to it."""
    check_identity(pipeline)
    counts, places = pipeline.ledger.step_counts(), [*pipeline.trained, *pipeline.stale, *pipeline.open()]
    assert sorted([*places, *pipeline.lost_by]) == list(range(pipeline.numbers)), "each step is in one place"
    assert (counts.trained, counts.stale, counts.ghost) == (len(pipeline.trained), len(pipeline.stale), 0)
    if is_complete:
        lost, still_open = len(pipeline.lost_by), len(pipeline.open())
        assert (counts.produced, counts.lost, counts.open) == (pipeline.numbers, lost, still_open)
        assert pipeline.coordinator.state().unaccounted == {"B": 0}


def check_fed(pipeline: Pipeline) -> None:
    """Checks that a whole waiting buffer is flushed, delivered and in training once the pipeline is settled."""
    assert pipeline.training or len(pipeline.open()) < pipeline.buffer_size


def run(pipeline: Pipeline, moves: int) -> None:
    for _ in range(moves):
        pipeline.step()
        check_budget(pipeline)
        check_identity(pipeline)


@settings(max_examples=15, deadline=None)
@given(pipeline=pipelines(), rests=st.integers(1, 6))
def test_without_a_crash_the_budget_holds_and_nothing_is_lost(pipeline: Pipeline, rests: int) -> None:
    """At most a frame of each process exceeds the budget, by the ledger too, and settled step counts are exact."""
    for _ in range(rests):
        for _ in range(120):
            run(pipeline, 1)
            ledger = pipeline.ledger  # a step that the learner reports before stepping does is open and unused
            ahead = sum(max(0, source.received - source.produced) for source in ledger.sources.values())
            assert ledger.in_flight - ahead <= ledger.limit + pipeline.frames
        pipeline.settle()
        check_step_counts(pipeline, is_complete=True)
        check_fed(pipeline)
        assert not pipeline.lost_by
        assert pipeline.ledger.take_new_losses() == {}


@settings(max_examples=15, deadline=None)
@given(pipeline=pipelines())
def test_training_never_ends(pipeline: Pipeline) -> None:
    """More buffers are trained as long as simulators run, for all sizes and schedules."""
    for _ in range(40):
        if len(pipeline.updates) >= 3:
            break
        run(pipeline, 200)
    assert len(pipeline.updates) >= 3, f"stalled with {pipeline.ledger.in_flight} in flight"


@settings(max_examples=12, deadline=None)
@given(pipeline=pipelines(processes=1, overlaps=(0,)))
def test_lockstep_trains_on_all_produced_steps(pipeline: Pipeline) -> None:
    """With overlap 0 and one process an update takes every step, so none is older than one version."""
    pipeline.stale_share = 0
    while len(pipeline.updates) < 3:
        pipeline.step()
        if pipeline.training:
            assert len(pipeline.trained) + len(pipeline.training) == pipeline.numbers
            assert not any(stepping.remaining > 0 for stepping in pipeline.steppings)


KILLS = ("stepping", "assembly", "coordination", "learning")


@settings(max_examples=12, deadline=None)
@given(
    pipeline=pipelines(),
    kills=st.lists(st.sampled_from(KILLS), min_size=1, max_size=5),
    before=st.lists(st.integers(0, 300), min_size=5, max_size=5),
)
def test_a_crash_loses_and_counts_what_its_stage_held(pipeline: Pipeline, kills: list[str], before: list[int]) -> None:
    """Work continues after crashes of any stages at any times, and each lost step is counted once.

    Coordination's file and the learner's checkpoint are as old as the schedule makes them.
    """
    for kill, moves in zip(kills, before, strict=False):
        run(pipeline, moves)
        kill_one(pipeline, kill)
        run(pipeline, 20)
    train_on(pipeline)
    pipeline.settle()
    check_step_counts(pipeline, is_complete=True)
    check_identity(pipeline)
    causes = {"stepping": {"stepping", "both_ends"}}
    assert pipeline.ledger.losses.keys() <= set().union(*(causes.get(kill, {kill}) for kill in kills))


@settings(max_examples=12, deadline=None)
@given(
    pipeline=pipelines(),
    kill=st.sampled_from(KILLS),
    times=st.lists(st.integers(0, 300), min_size=1, max_size=4),
)
def test_losses_have_the_stage_that_died_as_their_cause(pipeline: Pipeline, kill: str, times: list[int]) -> None:
    """Where one stage crashes, once or more, each cause has exactly the steps that the world has noted."""
    reported: Counter[str] = Counter()
    for moves in times:
        run(pipeline, moves)
        kill_one(pipeline, kill)
    train_on(pipeline)
    pipeline.settle()
    check_step_counts(pipeline, is_complete=True)
    reported.update(pipeline.ledger.take_new_losses())
    assert pipeline.ledger.losses == reported == Counter(pipeline.lost_by.values())
    assert pipeline.ledger.take_new_losses() == {}


@settings(max_examples=12, deadline=None)
@given(pipeline=pipelines(), times=st.lists(st.integers(0, 200), min_size=2, max_size=6), saves=st.booleans())
def test_a_restart_of_coordination_loses_and_gains_nothing(pipeline: Pipeline, times: list[int], saves: bool) -> None:
    """Its counts are those of a coordination that heard the same and never crashed, however old its file is."""
    for moves in times:
        run(pipeline, moves)
        if saves:
            pipeline.save()
        pipeline.settle()
        before = pipeline.coordinator.state()
        pipeline.kill_coordination()
        check_identity(pipeline)
        pipeline.settle()
        after = pipeline.coordinator.state()
        assert asdict(after.step_counts["B"]) == asdict(before.step_counts["B"])
        assert (after.losses, after.unaccounted) == ({"B": {}}, {"B": 0})
        assert not pipeline.lost_by
        check_step_counts(pipeline, is_complete=True)
    train_on(pipeline)


def kill_one(pipeline: Pipeline, kill: str) -> None:
    """Crashes a stage; its file or its checkpoint is sometimes fresh."""
    fresh = pipeline.rng.random() < 0.5
    if kill == "stepping":
        pipeline.kill_stepping(pipeline.rng.randrange(pipeline.processes))
    elif kill == "assembly":
        pipeline.kill_assembly()
    elif kill == "learning":
        if fresh:
            pipeline.save_weights()
            pipeline.step()
        pipeline.kill_learner()
    else:
        if fresh:
            pipeline.save()
            pipeline.step()
        pipeline.kill_coordination()


def train_on(pipeline: Pipeline) -> None:
    """Trains more buffers, by which time every loss is known."""
    updates = len(pipeline.updates)
    for _ in range(60):
        if len(pipeline.updates) >= updates + 4:
            break
        run(pipeline, 200)
    assert len(pipeline.updates) >= updates + 4, f"stalled with {pipeline.ledger.in_flight} in flight"


@settings(max_examples=15, deadline=None)
@given(pipeline=pipelines(overlaps=(1,), buffers=(50, 128)), before=st.integers(0, 300))
def test_a_stepping_process_without_simulators_starves_no_other(pipeline: Pipeline, before: int) -> None:
    """Steps that a crashed source had open or lost do not keep the others from training."""
    run(pipeline, before)
    pipeline.kill_stepping(0, simulators=False)
    if pipeline.processes > 1:
        train_on(pipeline)
    pipeline.settle()
    check_step_counts(pipeline)


@settings(max_examples=15, deadline=None)
@given(pipeline=pipelines(), before=st.integers(0, 300), other=st.integers(1, 500))
def test_saved_and_restored_at_any_point_changes_nothing(pipeline: Pipeline, before: int, other: int) -> None:
    """A ledger that went through JSON answers and saves as the original."""
    run(pipeline, before)
    ledger = pipeline.ledger
    own = StepLedger(least_update_steps=pipeline.buffer_size, overlap=pipeline.overlap, processes=pipeline.processes)
    twin = own.continue_from(through_json(ledger))
    assert asdict(twin) == asdict(ledger)
    assert asdict(twin.step_counts()) == asdict(ledger.step_counts())
    assert (twin.done, twin.in_flight) == (ledger.done, ledger.in_flight)
    assert twin.losses == ledger.losses
    assert twin.next_flush() == ledger.next_flush()
    assert (twin.flush.serial, twin.flush.required_steps) == (ledger.flush.serial, ledger.flush.required_steps)
    plain_allowances = [
        {name: (allowance.serial, allowance.steps, allowance.version) for name, allowance in one.allowances().items()}
        for one in (twin, ledger)
    ]
    assert plain_allowances[0] == plain_allowances[1]
    assert twin.take_new_losses() == ledger.take_new_losses()
