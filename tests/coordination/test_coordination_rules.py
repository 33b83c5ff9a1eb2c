"""The rules of the budget, the cuts and the books, one at a time."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from sparring.pipeline.coordination.ledger import StepLedger
from sparring.pipeline.messages.state import LearnerState, Mark
from tests.coordination.coordination_parts import produced, segments


def new_ledger(buffer_size: int = 100, overlap: int = 1, processes: int = 1) -> StepLedger:
    return StepLedger(buffer_size=buffer_size, overlap=overlap, processes=processes)


def state(start: int = 1, **changed: Any) -> LearnerState:
    """Of a learner that has taken what it says it has; only a later start can have trained steps from a checkpoint."""
    terms = ("training", "buffered", "stale", *(("trained",) if start == 1 else ()))
    changed.setdefault("taken", sum(changed.get(term, 0) for term in terms))
    return replace(LearnerState(behavior="B", start=f"learning-B.{start}", version=1, updates=0, trained=0), **changed)


@pytest.mark.parametrize(("overlap", "allowance"), [(0, 100), (1, 200)])
def test_the_first_permit_is_the_budget(overlap: int, allowance: int) -> None:
    """A lone source with agents may go as far as the budget; one without gets nothing, but in lockstep."""
    ledger = new_ledger(overlap=overlap)
    ledger.stepped("stepping-0.1", produced(0, 0, 0, 0))
    assert ledger.allowances()["stepping-0.1"].steps == (0 if overlap else allowance)
    ledger.stepped("stepping-0.1", produced(0, 0, 0, 12))
    assert ledger.allowances()["stepping-0.1"].steps == allowance


def test_an_unused_permit_goes_to_others_once_its_source_has_no_agents() -> None:
    """What a source gives back is room for the next."""
    ledger = new_ledger(processes=2)
    for name in ("a.1", "b.1"):
        ledger.stepped(name, produced(0, 0, 0, 5))
    first = ledger.allowances()
    assert first["a.1"].steps == first["b.1"].steps == 25
    before = ledger.in_flight
    ledger.stepped("a.1", produced(3, first["a.1"].serial, 3, 0))
    assert ledger.in_flight == before - 22
    assert ledger.allowances()["a.1"].steps == 3


def test_a_give_back_that_crosses_a_newer_permit_is_not_mistaken_for_it() -> None:
    """An answer to an older permit says nothing of the newer one."""
    ledger = new_ledger(processes=2)
    ledger.stepped("a.1", produced(0, 0, 0, 5))
    ledger.allowances()
    ledger.stepped("a.1", produced(20, 1, 25, 5))
    newer = ledger.allowances()["a.1"]
    assert newer.serial == 2
    ledger.stepped("a.1", produced(20, 1, 20, 0))
    assert ledger.sources["a.1"].allowance == newer.steps


def test_segments_sent_again_are_counted_once() -> None:
    """A message with a number that was counted changes nothing."""
    ledger = new_ledger()
    message = segments("s.1", "a.1", 1, steps=7, began=0, received=9, orphaned=2)
    assert ledger.routed(message) == 2
    before = ledger.to_plain()
    assert ledger.routed(message) == 0
    assert ledger.to_plain() == before


def test_a_new_assembly_start_loses_what_never_came() -> None:
    """What had been produced when it first heard of the source and is in no segment is lost, with an incident."""
    ledger = new_ledger()
    ledger.routed(segments("s.1", "a.1", 1, steps=30, began=0, received=50, orphaned=0))
    assert ledger.routed(segments("s.1", "a.2", 1, steps=0, began=52, received=56, orphaned=4)) == 26
    assert ledger.routed(segments("s.1", "a.2", 2, steps=5, began=52, received=61, orphaned=4)) == 0
    assert ledger.lost == 26
    assert ledger.sources["s.1"].missing == 61 - 26 - 35
    (incident,) = ledger.take_new_incidents()
    assert (incident.stage, incident.start, incident.steps) == ("assembly", "a.2", 26)
    assert ledger.take_new_incidents() == []


def test_what_an_assembly_start_had_that_never_spoke_is_lost() -> None:
    """The first message of all may come from the second assembly start: what the first one had is lost."""
    ledger = new_ledger()
    ledger.stepped("s.1", produced(40, 1, 200, 4))
    assert ledger.routed(segments("s.1", "a.2", 1, steps=8, began=30, received=40, orphaned=2)) == 32
    assert ledger.routed(segments("s.1", "a.3", 1, steps=0, began=40, received=40, orphaned=0)) == 0
    assert ledger.sources["s.1"].missing == 0


def test_what_comes_late_of_an_earlier_start_is_not_lost() -> None:
    """A message of a dead assembly start that arrives after its successor's first is taken off the loss again."""
    ledger = new_ledger()
    ledger.routed(segments("s.1", "a.1", 1, steps=10, began=0, received=50, orphaned=0))
    assert ledger.routed(segments("s.1", "a.2", 1, steps=0, began=50, received=50, orphaned=0)) == 40
    ledger.routed(segments("s.1", "a.1", 2, steps=15, began=0, received=50, orphaned=0, before=10))
    assert (ledger.lost, ledger.sources["s.1"].received) == (25, 25)


def test_steps_that_came_are_never_counted_as_lost() -> None:
    """Parts sent again to a new assembly start, whose steps the old one had already delivered, lose nothing."""
    ledger = new_ledger()
    ledger.routed(segments("s.1", "a.1", 1, steps=60, began=0, received=60, orphaned=0))
    lost = ledger.routed(segments("s.1", "a.2", 1, steps=0, began=48, received=60, orphaned=12))
    assert lost == 0
    assert ledger.sources["s.1"].missing == 0


def test_a_learner_that_starts_anew_loses_what_its_weights_do_not_hold() -> None:
    """Steps taken by earlier starts and not in the restored lineage are lost; a later word of it loses no more."""
    ledger = new_ledger()
    ledger.routed(segments("s.1", "a.1", 1, steps=180, began=0, received=190, orphaned=0))
    assert ledger.learner(state(trained=100, training=60), 0) == 0
    assert ledger.learner(state(2, trained=40), 180) == 140
    assert ledger.learner(state(2, trained=40), 180) == 0
    assert (ledger.trained, ledger.lost, ledger.training) == (40, 140, 0)
    assert ledger.step_counts().open == 10
    assert ledger.learner(state(3, trained=40), 185) == 5


def test_what_a_new_learner_start_has_trained_by_itself_hides_no_loss() -> None:
    """Coordination may hear of a new start only after its first update: the loss is that of the restored weights."""
    ledger = new_ledger()
    ledger.learner(state(trained=100, training=60), 0)
    later = state(2, trained=240, taken=260, training=30, buffered=20, stale=10)
    assert ledger.learner(later, 180) == 180 - 40
    assert (ledger.trained, ledger.lost, ledger.stale) == (240, 140, 10)


@pytest.mark.parametrize("counts_hold", [0, 60, 180])
def test_weights_that_hold_more_than_the_books_are_taken_at_their_word(counts_hold: int) -> None:
    """Where power failed, a checkpoint may be newer than the books: they balance, and the budget is what it was."""
    ledger = new_ledger()
    if counts_hold:
        ledger.routed(segments("s.1", "a.1", 1, steps=counts_hold, began=0, received=counts_hold, orphaned=0))
        ledger.source_closed("s.1")
    assert ledger.learner(state(2, trained=200), counts_hold) == 0
    assert ledger.unrecorded == 200 - counts_hold
    assert (ledger.produced, ledger.trained, ledger.lost, ledger.step_counts().open) == (200, 200, 0, 0)
    assert ledger.in_flight == 0
    ledger.stepped("s.2", produced(0, 0, 0, 4))
    assert ledger.allowances()["s.2"].steps == ledger.budget
    twin = new_ledger()
    twin.restore(json.loads(json.dumps(ledger.to_plain())))
    assert twin.produced == 200
    assert ledger.learner(state(3, trained=150), counts_hold) == 50
    assert (ledger.produced, ledger.trained, ledger.lost, ledger.step_counts().open) == (200, 150, 50, 0)


def test_stale_steps_of_all_starts_add_up() -> None:
    """A learner counts from its start; the books count from the beginning."""
    ledger = new_ledger()
    ledger.learner(state(stale=5), 0)
    ledger.learner(state(stale=7), 0)
    ledger.learner(state(2, stale=1), 7)
    assert ledger.stale == 8
    assert ledger.lost == 0


def test_permits_wait_for_the_learners_version() -> None:
    """A permit names the version to act with, in both modes: the room it gives comes from that update."""
    for overlap in (0, 1):
        ledger = new_ledger(overlap=overlap)
        ledger.stepped("s.1", produced(0, 0, 0, 4))
        ledger.learner(state(version=9), 0)
        assert ledger.allowances()["s.1"].version == 9


def test_one_buffer_is_cut_for_once() -> None:
    """A cut is made when a buffer waits, and again only after the learner's position has changed."""
    ledger = new_ledger()
    ledger.stepped("s.1", produced(99, 1, 200, 4))
    assert not ledger.next_flush()
    ledger.stepped("s.1", produced(100, 1, 200, 4))
    assert ledger.next_flush()
    assert ledger.flush.marks == {"s.1": 100}
    ledger.stepped("s.1", produced(149, 1, 200, 4))
    assert not ledger.next_flush()
    ledger.learner(state(training=100), 0)
    ledger.stepped("s.1", produced(199, 1, 200, 4))
    assert not ledger.next_flush()
    ledger.stepped("s.1", produced(200, 1, 200, 4))
    assert ledger.next_flush()
    assert ledger.flush.serial == 2


def test_an_idle_learner_gets_another_cut_when_half_a_buffer_more_has_come() -> None:
    """Steps that a crash took count as waiting until they are missed: the cut for them brought too few."""
    ledger = new_ledger()
    ledger.stepped("s.1", produced(100, 1, 200, 4))
    assert ledger.next_flush()
    ledger.stepped("s.1", produced(149, 1, 200, 4))
    assert not ledger.next_flush()
    ledger.stepped("s.1", produced(150, 1, 200, 4))
    assert ledger.next_flush()
    assert not ledger.next_flush()


def test_a_death_or_a_birth_among_the_sources_renews_the_cut() -> None:
    """A cut that a dead source cannot complete is made again; of that source it takes what has arrived."""
    ledger = new_ledger()
    ledger.stepped("stepping-0.1", produced(100, 1, 200, 4))
    assert ledger.next_flush()
    ledger.source_gone("stepping-0.1")
    assert ledger.next_flush()
    assert ledger.flush.marks == {"stepping-0.1": 0}
    ledger.source_gone("stepping-0.1")
    assert not ledger.next_flush()
    ledger.stepped("stepping-0.2", produced(0, 0, 0, 4))
    assert ledger.next_flush()
    assert ledger.flush.marks == {"stepping-0.1": 0, "stepping-0.2": 0}
    ledger.routed(segments("stepping-0.1", "a.1", 1, steps=98, began=0, received=98, orphaned=0))
    assert ledger.source_closed("stepping-0.1") == 2
    ledger.learner(state(training=98), 0)
    ledger.stepped("stepping-0.2", produced(100, 1, 102, 4))
    assert ledger.next_flush()
    assert ledger.flush.marks == {"stepping-0.2": 100}


# ---------------------------------------------------------------- what a learner knows better than the books


def marks(origin: str, sequence: int, steps: int, began: int = 0) -> dict[str, dict[str, Mark]]:
    return {origin: {"s.1": Mark(sequence=sequence, began=began, steps=steps)}}


def test_books_that_are_older_than_the_weights_learn_of_what_these_hold() -> None:
    """Coordination and the learner died: 20 of 60 steps were taken and in no saved books; they are sent again."""
    ledger = new_ledger()
    ledger.serve("learning-B.1")
    first = segments("s.1", "a.1", 1, steps=40, began=0, received=70, orphaned=0)
    ledger.routed(first)
    ledger.on_delivered(first)
    twin = new_ledger()
    twin.restore(json.loads(json.dumps(ledger.to_plain())))
    twin.serve("learning-B.2")
    restored = marks("a.1", 2, 60)
    twin.on_learner_state(said := state(2, trained=50, latest=restored, restored=restored))
    assert twin.taken_earlier == 60
    assert twin.learner(said, twin.taken_earlier) == 10  # in its buffer
    again = segments("s.1", "a.1", 2, steps=20, began=0, received=70, orphaned=0, before=40)
    assert twin.is_new(again), "its episodes have not been counted"
    assert twin.routed(again) == 0
    twin.on_delivered(again)
    assert (twin.produced, twin.trained, twin.lost, twin.unrecorded, twin.step_counts().open) == (70, 50, 10, 0, 10)
    twin.serve("learning-B.3")
    assert twin.taken_earlier == 60


@pytest.mark.parametrize("told", [False, True], ids=["not told yet", "told as lost"])
def test_what_a_dead_learner_had_taken_and_assembly_kept_comes_again_and_is_not_lost(told: bool) -> None:
    """Coordination died too, after its books were saved: whether the next learner is heard of before or after that."""
    ledger = new_ledger()
    ledger.serve("learning-B.1")
    parts = [
        segments("s.1", "a.1", 1, steps=40, began=0, received=60, orphaned=0),
        segments("s.1", "a.1", 2, steps=20, began=0, received=60, orphaned=0, before=40),
    ]
    for part in parts:
        ledger.routed(part)
        ledger.on_delivered(part)
    twin = new_ledger()
    twin.restore(json.loads(json.dumps(ledger.to_plain())))
    twin.serve("learning-B.2")
    twin.on_learner_state(said := state(2))
    if told:
        assert twin.learner(said, twin.taken_earlier) == 60
    for part in parts:
        assert not twin.is_new(part), "its episodes have been counted"
        assert twin.routed(part) == 0
    if not told:
        assert twin.learner(said, twin.taken_earlier) == 0
    assert [incident.steps for incident in twin.incidents] == ([60, -60] if told else [])
    assert (twin.lost, twin.step_counts().open) == (0, 60)
    for part in parts:
        twin.on_delivered(part)
    twin.learner(replace(said, taken=60, trained=60), twin.taken_earlier)
    assert (twin.produced, twin.trained, twin.lost, twin.unrecorded, twin.step_counts().open) == (60, 60, 0, 0, 0)
    twin.serve("learning-B.3")
    assert twin.taken_earlier == 60


def held_by_two_that_died() -> StepLedger:
    """Of an assembly start two messages came, of which the learner has the first; then both died."""
    ledger = new_ledger()
    ledger.serve("learning-B.1")
    first = segments("s.1", "a.1", 1, steps=40, began=0, received=60, orphaned=0)
    ledger.routed(first)
    ledger.routed(segments("s.1", "a.1", 2, steps=20, began=0, received=60, orphaned=0, before=40))
    ledger.on_delivered(first)
    twin = new_ledger()
    twin.restore(json.loads(json.dumps(ledger.to_plain())))
    twin.serve("learning-B.1")
    return twin


def test_what_coordination_held_and_an_assembly_that_died_can_not_send_again_is_lost() -> None:
    """As soon as the learner has something of the next assembly: before that it may still have the rest queued."""
    ledger = held_by_two_that_died()
    ledger.routed(segments("s.1", "a.2", 1, steps=0, began=60, received=60, orphaned=0))
    assert (ledger.lost, ledger.step_counts().open) == (0, 60)
    known = marks("a.1", 1, 40)
    ledger.on_learner_state(state(taken=40, trained=40, latest=known))
    assert ledger.lost == 0
    ledger.on_learner_state(
        state(taken=40, trained=40, latest=known | {"a.2": {"s.1": Mark(sequence=1, began=60, steps=0)}})
    )
    ledger.learner(state(taken=40, trained=40), 0)
    assert [(one.stage, one.steps) for one in ledger.incidents] == [("coordination", 20)]
    assert (ledger.produced, ledger.trained, ledger.lost, ledger.step_counts().open) == (60, 40, 20, 0)
    ledger.on_learner_state(state(taken=60, trained=40, latest=marks("a.1", 2, 60)))
    assert ledger.lost == 0, "it had it after all"


def test_what_an_assembly_sends_again_or_the_learner_had_is_not() -> None:
    after = {"a.2": {"s.1": Mark(sequence=1, began=60, steps=0)}}
    for again in (True, False):
        ledger = held_by_two_that_died()
        if again:
            ledger.routed(segments("s.1", "a.1", 2, steps=20, began=0, received=60, orphaned=0, before=40))
        ledger.routed(segments("s.1", "a.2", 1, steps=0, began=60, received=60, orphaned=0))
        ledger.on_learner_state(state(taken=40, latest=after | marks("a.1", *((1, 40) if again else (2, 60)))))
        assert ledger.lost == 0


def test_that_assembly_is_dead_for_a_stepping_process_too_that_died_before_it() -> None:
    """The next one has never heard of that source, and says nothing of it."""
    for over in (True, False):
        ledger = held_by_two_that_died()
        ledger.routed(segments("s.2", "a.2", 1, steps=0, began=0, received=0, orphaned=0))
        ledger.source_closed("s.1")
        assert ledger.lost == 0
        ledger.mark_lost({"a.2": {"s.2": Mark(sequence=1, began=0, steps=0)}} if not over else {}, over=over)
        assert ledger.lost == 20


def test_what_a_former_session_left_is_not_missed() -> None:
    """Its starts of assembly are before and after none of this one's; all that they sent counts as taken."""
    ledger = held_by_two_that_died()
    ledger.mark_lost({"a.other-7": {"s.1": Mark(sequence=1, began=60, steps=0)}})
    assert ledger.lost == 0


def test_at_the_end_nobody_takes_what_was_held_and_can_not_come_again() -> None:
    """Nor does the learner take anything of the next assembly any more."""
    ledger = held_by_two_that_died()
    ledger.mark_lost(marks("a.1", 1, 40), over=True)
    assert ledger.lost == 0, "its assembly may still send it again"
    ledger.routed(segments("s.1", "a.2", 1, steps=0, began=60, received=60, orphaned=0))
    ledger.mark_lost(marks("a.1", 1, 40), over=True)
    assert ledger.lost == 20


def test_what_comes_again_and_the_weights_hold_stays_trained() -> None:
    """The checkpoint holds the first 40 of 60 steps; the 20 after them were lost, and come again."""
    ledger = new_ledger()
    ledger.serve("learning-B.1")
    parts = [
        segments("s.1", "a.1", 1, steps=40, began=0, received=60, orphaned=0),
        segments("s.1", "a.1", 2, steps=20, began=0, received=60, orphaned=0, before=40),
    ]
    for part in parts:
        ledger.routed(part)
        ledger.on_delivered(part)
    ledger.serve("learning-B.2")
    restored = marks("a.1", 1, 40)
    ledger.on_learner_state(said := state(2, trained=40, latest=restored, restored=restored))
    assert ledger.learner(said, ledger.taken_earlier) == 20
    for part in parts:
        ledger.routed(part)
    assert (ledger.trained, ledger.lost, ledger.step_counts().open) == (40, 0, 20)
    ledger.on_learner_state(said)
    assert ledger.learner(said, ledger.taken_earlier) == 0
    assert ledger.taken_earlier == 40


def test_what_was_played_or_too_old_and_comes_again_will_be_so_once_more() -> None:
    """Of 40 steps that a dead learner had taken 30 were too old; nothing says which come again, but that all do."""
    ledger = new_ledger()
    ledger.serve("learning-B.1")
    part = segments("s.1", "a.1", 1, steps=40, began=0, received=40, orphaned=0)
    ledger.routed(part)
    ledger.on_delivered(part)
    ledger.learner(state(stale=30, buffered=10), 0)
    ledger.serve("learning-B.2")
    ledger.on_learner_state(said := state(2))
    assert ledger.learner(said, ledger.taken_earlier) == 10
    ledger.routed(part)
    assert (ledger.lost, ledger.stale, ledger.step_counts().open) == (0, 0, 40)
    ledger.learner(replace(said, taken=40, stale=30, buffered=10), ledger.taken_earlier)
    assert (ledger.lost, ledger.stale, ledger.step_counts().open) == (0, 30, 10)


def test_what_a_living_learner_has_of_an_assembly_that_died_was_not_lost_with_it() -> None:
    """The books of before do not know of its last message, and nobody can send that again."""
    ledger = new_ledger()
    ledger.on_learner_state(state(latest=marks("a.1", 3, 30), taken=30, buffered=30))
    ledger.routed(segments("s.1", "a.2", 1, steps=0, began=32, received=32, orphaned=0))
    assert (ledger.lost, ledger.sources["s.1"].received) == (2, 30)


def test_starts_of_assembly_count_in_their_order_whoever_tells_of_them_first() -> None:
    """Of 50 steps 18 are gone with the first start, and 10 are with the second."""
    ledger = new_ledger()
    ledger.routed(segments("s.1", "a.2", 1, steps=22, began=30, received=62, orphaned=0))
    ledger.on_learner_state(state(latest=marks("a.1", 3, 12), taken=12, buffered=12))
    assert [*ledger.sources["s.1"].origins] == ["a.1", "a.2"]
    assert (ledger.lost, ledger.sources["s.1"].missing) == (18, 10)


def test_a_source_that_a_learner_tells_of_has_no_permit_before_it_is_heard_of_itself() -> None:
    ledger = new_ledger()
    ledger.on_learner_state(state(latest=marks("a.1", 1, 5), taken=5, buffered=5))
    assert ledger.allowances() == {}
    ledger.stepped("s.1", produced(5, 0, 0, 4))
    assert ledger.allowances()["s.1"].steps == 5 + 195
