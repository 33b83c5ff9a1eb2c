"""The budget, the cuts and the books, in a tiny pipeline under a seeded schedule."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from coordination_parts import produced, segments
from coordination_world import Pipeline
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.coordination.ledger import Ledger
from pipeline.messages.service import LearnerState


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
    """Truly in flight: produced and not in a finished update, as the learner has published it."""
    ledger = pipeline.ledger
    done = len(pipeline.trained) + len(pipeline.truly_lost)
    assert pipeline.numbers - done <= ledger.budget + pipeline.frames + pipeline.unheard


def check_books(pipeline: Pipeline, *, found_out: bool = False) -> None:
    """At rest: the ledger's terms are what the stages hold, but for what was lost and not found out yet."""
    books = pipeline.ledger.books()
    still_open = pipeline.open()
    assert pipeline.numbers == len(pipeline.trained) + len(still_open) + len(pipeline.truly_lost), (
        "the test's own books"
    )
    assert len(set(still_open)) == len(still_open)
    assert not pipeline.truly_lost & set(still_open)
    assert books.produced == books.trained + books.ghost + books.stale + books.lost + books.open
    assert books.trained == len(pipeline.trained)
    assert books.lost <= len(pipeline.truly_lost)
    assert books.open >= 0
    if found_out:
        assert books.open == len(still_open)
        # What died with a stepping process before anyone heard of it is in neither term.
        assert pipeline.numbers - books.produced == len(pipeline.truly_lost) - books.lost


def check_fed(pipeline: Pipeline) -> None:
    """At rest, a whole buffer that waits has been cut, has arrived, and is being trained."""
    assert pipeline.training or pipeline.ledger.waiting < pipeline.buffer_size


def run(pipeline: Pipeline, moves: int) -> None:
    for _ in range(moves):
        pipeline.step()
        check_budget(pipeline)


@settings(max_examples=60, deadline=None)
@given(pipeline=pipelines(), rests=st.integers(1, 6))
def test_without_a_crash_the_budget_holds_the_learner_is_fed_and_nothing_is_lost(
    pipeline: Pipeline, rests: int
) -> None:
    """At every moment at most a frame of each process over the budget; at every rest the books are exact."""
    for _ in range(rests):
        run(pipeline, 120)
        pipeline.settle()
        check_books(pipeline, found_out=True)
        check_fed(pipeline)
        assert not pipeline.truly_lost
        assert not pipeline.ledger.incidents


@settings(max_examples=40, deadline=None)
@given(pipeline=pipelines())
def test_training_never_ends(pipeline: Pipeline) -> None:
    """Whatever the sizes and the order of things, more buffers are trained as long as simulators run."""
    for _ in range(40):
        if len(pipeline.updates) >= 3:
            return
        run(pipeline, 200)
    raise AssertionError(f"{len(pipeline.updates)} updates, {pipeline.ledger.in_flight} in flight")


@settings(max_examples=30, deadline=None)
@given(pipeline=pipelines(processes=1, overlaps=(0,)))
def test_lockstep_trains_on_all_that_was_produced(pipeline: Pipeline) -> None:
    """With overlap 0 and one process an update takes every step there is, so nothing is older than one version."""
    while len(pipeline.updates) < 3:
        pipeline.step()
        if pipeline.training:
            assert len(pipeline.trained) + len(pipeline.training) == pipeline.numbers
            assert not any(stepping.remaining > 0 for stepping in pipeline.steppings)


KILLS = ("stepping", "assembly", "coordination", "learner")


@settings(max_examples=100, deadline=None)
@given(pipeline=pipelines(), kills=st.lists(st.sampled_from(KILLS), min_size=1, max_size=4), before=st.integers(0, 400))
def test_a_crash_loses_what_its_stage_held_and_the_books_say_so(
    pipeline: Pipeline, kills: list[str], before: int
) -> None:
    """Whichever part dies at whichever moment, work goes on, and what was lost is found out and counted once."""
    for kill in kills:
        run(pipeline, before)
        pipeline.save()
        run(pipeline, 5)
        held = kill_one(pipeline, kill)
        lost = len(pipeline.truly_lost)
        assert lost <= held
        run(pipeline, 400)
        pipeline.settle()
        check_books(pipeline)
    train_on(pipeline)
    pipeline.settle()
    check_books(pipeline, found_out=True)


def kill_one(pipeline: Pipeline, kill: str) -> int:
    """Kills a part; returns how many steps may be lost in all by now."""
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
    """More buffers are trained, and by then every loss has been found out."""
    updates = len(pipeline.updates)
    for _ in range(60):
        if len(pipeline.updates) >= updates + 4:
            break
        run(pipeline, 200)
    assert len(pipeline.updates) >= updates + 4, f"stalled with {pipeline.ledger.in_flight} in flight"


@settings(max_examples=60, deadline=None)
@given(pipeline=pipelines(overlaps=(1,), buffers=(50, 128)), before=st.integers(0, 300))
def test_a_stepping_process_whose_simulators_stay_away_starves_nobody(pipeline: Pipeline, before: int) -> None:
    """What a dead source had open, or lost on the way, does not keep the others from training."""
    run(pipeline, before)
    pipeline.kill_stepping(0, simulators=False)
    if pipeline.processes > 1:
        train_on(pipeline)
    pipeline.settle()
    check_books(pipeline)


@settings(max_examples=60, deadline=None)
@given(pipeline=pipelines(), before=st.integers(0, 300), other=st.integers(1, 500))
def test_saved_and_restored_at_any_point_changes_nothing(pipeline: Pipeline, before: int, other: int) -> None:
    """A ledger that went through JSON answers and saves as the one it was."""
    run(pipeline, before)
    ledger = pipeline.ledger
    plain = json.loads(json.dumps(ledger.to_plain()))
    twin = Ledger(buffer_size=pipeline.buffer_size, overlap=pipeline.overlap, processes=pipeline.processes)
    twin.restore(json.loads(json.dumps(plain)))
    again = json.dumps(plain)
    twin.restore(plain)
    assert json.dumps(plain) == again, "restore leaves what it is given alone"
    assert twin.to_plain() == ledger.to_plain()
    assert (twin.produced, twin.done, twin.in_flight) == (ledger.produced, ledger.done, ledger.in_flight)
    assert twin.waiting == ledger.waiting
    assert twin.next_cut() == ledger.next_cut()
    assert (twin.cut.serial, twin.cut.marks) == (ledger.cut.serial, ledger.cut.marks)
    plain_permits = [
        {name: (permit.serial, permit.allowance, permit.version) for name, permit in one.permits().items()}
        for one in (twin, ledger)
    ]
    assert plain_permits[0] == plain_permits[1]
    assert twin.take_new_incidents() == []


# ---------------------------------------------------------------- one rule at a time


def ledger(buffer_size: int = 100, overlap: int = 1, processes: int = 1) -> Ledger:
    return Ledger(buffer_size=buffer_size, overlap=overlap, processes=processes)


def state(start: int = 1, **changed: Any) -> LearnerState:
    return replace(LearnerState(behavior="B", start=f"learning-B.{start}", version=1, updates=0, trained=0), **changed)


@pytest.mark.parametrize(("overlap", "allowance"), [(0, 100), (1, 200)])
def test_the_first_permit_is_the_budget(overlap: int, allowance: int) -> None:
    """A lone source with agents may go as far as the budget; one without gets nothing."""
    books = ledger(overlap=overlap)
    books.stepped("stepping-0.1", produced(0, 0, 0, 0))
    assert books.permits()["stepping-0.1"].allowance == 0
    books.stepped("stepping-0.1", produced(0, 0, 0, 12))
    assert books.permits()["stepping-0.1"].allowance == allowance


def test_an_unused_permit_goes_to_others_once_its_source_has_no_agents() -> None:
    """What a source gives back is room for the next."""
    books = ledger(processes=2)
    for name in ("a.1", "b.1"):
        books.stepped(name, produced(0, 0, 0, 5))
    first = books.permits()
    assert first["a.1"].allowance == first["b.1"].allowance == 25
    before = books.in_flight
    books.stepped("a.1", produced(3, first["a.1"].serial, 3, 0))
    assert books.in_flight == before - 22
    assert books.permits()["a.1"].allowance == 3


def test_a_give_back_that_crosses_a_newer_permit_is_not_mistaken_for_it() -> None:
    """An answer to an older permit says nothing of the newer one."""
    books = ledger(processes=2)
    books.stepped("a.1", produced(0, 0, 0, 5))
    books.permits()
    books.stepped("a.1", produced(20, 1, 25, 5))
    newer = books.permits()["a.1"]
    assert newer.serial == 2
    books.stepped("a.1", produced(20, 1, 20, 0))
    assert books.sources["a.1"].allowance == newer.allowance


def test_segments_sent_again_are_counted_once() -> None:
    """A message with a number that was counted changes nothing."""
    books = ledger()
    message = segments("s.1", "a.1", 1, steps=7, began=0, received=9, orphaned=2)
    assert books.routed(message) == 2
    before = books.to_plain()
    assert books.routed(message) == 0
    assert books.to_plain() == before


def test_a_new_assembly_start_loses_what_never_came() -> None:
    """What had been produced when it first heard of the source and is in no segment is lost, with an incident."""
    books = ledger()
    books.routed(segments("s.1", "a.1", 1, steps=30, began=0, received=50, orphaned=0))
    assert books.routed(segments("s.1", "a.2", 1, steps=0, began=52, received=56, orphaned=4)) == 26
    assert books.routed(segments("s.1", "a.2", 2, steps=5, began=52, received=61, orphaned=4)) == 0
    assert books.lost == 26
    assert books.sources["s.1"].missing == 61 - 26 - 35
    (incident,) = books.take_new_incidents()
    assert (incident.stage, incident.start, incident.steps) == ("assembly", "a.2", 26)
    assert books.take_new_incidents() == []


def test_what_an_assembly_start_had_that_never_spoke_is_lost() -> None:
    """The first message of all may come from the second assembly start: what the first one had is lost."""
    books = ledger()
    books.stepped("s.1", produced(40, 1, 200, 4))
    assert books.routed(segments("s.1", "a.2", 1, steps=8, began=30, received=40, orphaned=2)) == 32
    assert books.routed(segments("s.1", "a.3", 1, steps=0, began=40, received=40, orphaned=0)) == 0
    assert books.sources["s.1"].missing == 0


def test_what_comes_late_of_an_earlier_start_is_not_lost() -> None:
    """A message of a dead assembly start that arrives after its successor's first is taken off the loss again."""
    books = ledger()
    books.routed(segments("s.1", "a.1", 1, steps=10, began=0, received=50, orphaned=0))
    assert books.routed(segments("s.1", "a.2", 1, steps=0, began=50, received=50, orphaned=0)) == 40
    books.routed(segments("s.1", "a.1", 2, steps=15, began=0, received=50, orphaned=0))
    assert (books.lost, books.sources["s.1"].received) == (25, 25)


def test_steps_that_came_are_never_counted_as_lost() -> None:
    """Parts sent again to a new assembly start, whose steps the old one had already delivered, lose nothing."""
    books = ledger()
    books.routed(segments("s.1", "a.1", 1, steps=60, began=0, received=60, orphaned=0))
    lost = books.routed(segments("s.1", "a.2", 1, steps=0, began=48, received=60, orphaned=12))
    assert lost == 0
    assert books.sources["s.1"].missing == 0


def test_a_learner_that_starts_anew_loses_what_its_weights_do_not_hold() -> None:
    """Steps taken by earlier starts and not in the restored lineage are lost; a later word of it loses no more."""
    books = ledger()
    books.routed(segments("s.1", "a.1", 1, steps=180, began=0, received=190, orphaned=0))
    assert books.learner(state(trained=100, training=60), 0) == 0
    assert books.learner(state(2, trained=40), 180) == 140
    assert books.learner(state(2, trained=40), 180) == 0
    assert (books.trained, books.lost, books.training) == (40, 140, 0)
    assert books.books().open == 10
    assert books.learner(state(3, trained=40), 185) == 5


def test_what_a_new_learner_start_has_trained_by_itself_hides_no_loss() -> None:
    """Coordination may hear of a new start only after its first update: the loss is that of the restored weights."""
    books = ledger()
    books.learner(state(trained=100, training=60), 0)
    later = state(2, trained=240, taken=260, training=30, buffered=20, stale=10)
    assert books.learner(later, 180) == 180 - 40
    assert (books.trained, books.lost, books.stale) == (240, 140, 10)


def test_stale_steps_of_all_starts_add_up() -> None:
    """A learner counts from its start; the books count from the beginning."""
    books = ledger()
    books.learner(state(stale=5), 0)
    books.learner(state(stale=7), 0)
    books.learner(state(2, stale=1), 7)
    assert books.stale == 8
    assert books.lost == 0


def test_permits_wait_for_the_learners_version() -> None:
    """A permit names the version to act with, in both modes: the room it gives comes from that update."""
    for overlap in (0, 1):
        books = ledger(overlap=overlap)
        books.stepped("s.1", produced(0, 0, 0, 4))
        books.learner(state(version=9), 0)
        assert books.permits()["s.1"].version == 9


def test_one_buffer_is_cut_for_once() -> None:
    """A cut is made when a buffer waits, and again only after the learner's position has changed."""
    books = ledger()
    books.stepped("s.1", produced(99, 1, 200, 4))
    assert not books.next_cut()
    books.stepped("s.1", produced(100, 1, 200, 4))
    assert books.next_cut()
    assert books.cut.marks == {"s.1": 100}
    books.stepped("s.1", produced(149, 1, 200, 4))
    assert not books.next_cut()
    books.learner(state(training=100), 0)
    books.stepped("s.1", produced(199, 1, 200, 4))
    assert not books.next_cut()
    books.stepped("s.1", produced(200, 1, 200, 4))
    assert books.next_cut()
    assert books.cut.serial == 2


def test_an_idle_learner_gets_another_cut_when_half_a_buffer_more_has_come() -> None:
    """Steps that a crash took count as waiting until they are missed: the cut for them brought too few."""
    books = ledger()
    books.stepped("s.1", produced(100, 1, 200, 4))
    assert books.next_cut()
    books.stepped("s.1", produced(149, 1, 200, 4))
    assert not books.next_cut()
    books.stepped("s.1", produced(150, 1, 200, 4))
    assert books.next_cut()
    assert not books.next_cut()


def test_a_death_or_a_birth_among_the_sources_renews_the_cut() -> None:
    """A cut that a dead source can not complete is made again; of that source it takes what has arrived."""
    books = ledger()
    books.stepped("stepping-0.1", produced(100, 1, 200, 4))
    assert books.next_cut()
    books.source_gone("stepping-0.1")
    assert books.next_cut()
    assert books.cut.marks == {"stepping-0.1": 0}
    books.source_gone("stepping-0.1")
    assert not books.next_cut()
    books.stepped("stepping-0.2", produced(0, 0, 0, 4))
    assert books.next_cut()
    assert books.cut.marks == {"stepping-0.1": 0, "stepping-0.2": 0}
    books.routed(segments("stepping-0.1", "a.1", 1, steps=98, began=0, received=98, orphaned=0))
    assert books.source_closed("stepping-0.1") == 2
    books.learner(state(training=98), 0)
    books.stepped("stepping-0.2", produced(100, 1, 102, 4))
    assert books.next_cut()
    assert books.cut.marks == {"stepping-0.2": 100}
