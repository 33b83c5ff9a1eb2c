"""Steps that arrive again after a crash, and what a learner's checkpoint knows of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sparring.pipeline.coordination.ledger import StepLedger
from sparring.pipeline.messages.state import StreamPosition
from tests.coordination.coordination_parts import produced, segments
from tests.coordination.ledger_parts import new_ledger, positions, state


def test_a_ledger_older_than_the_weights_learns_their_steps() -> None:
    """Coordination and learner crashed: 20 of 60 taken steps were in no saved ledger, and are sent again."""
    ledger = new_ledger()
    ledger.serve("learning-B.1")
    first = segments("s.1", "a.1", 1, steps=40, began=0, received=70, orphaned=0)
    ledger.routed(first)
    ledger.on_delivered(first)
    twin = new_ledger()
    twin.restore(json.loads(json.dumps(ledger.to_plain())))
    twin.serve("learning-B.2")
    restored = positions("a.1", 2, 60)
    twin.on_learner_state(reported := state(2, trained=50, latest=restored, restored=restored))
    assert twin.taken_earlier == 60
    assert twin.learner(reported, twin.taken_earlier) == 10  # in its buffer
    resent = segments("s.1", "a.1", 2, steps=20, began=0, received=70, orphaned=0, before=40)
    assert twin.is_new(resent), "its episodes have not been counted"
    assert twin.routed(resent) == 0
    twin.on_delivered(resent)
    assert (twin.produced, twin.trained, twin.lost, twin.unrecorded, twin.step_counts().open) == (70, 50, 10, 0, 10)
    twin.serve("learning-B.3")
    assert twin.taken_earlier == 60


@pytest.mark.parametrize("is_reported", [False, True], ids=["not reported", "reported as lost"])
def test_steps_of_a_dead_learner_that_assembly_sends_again_are_not_lost(is_reported: bool) -> None:
    """Coordination crashed too; the next learner's state arrives before or after the redelivery."""
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
    twin.on_learner_state(reported := state(2))
    if is_reported:
        assert twin.learner(reported, twin.taken_earlier) == 60
    for part in parts:
        assert not twin.is_new(part), "its episodes have been counted"
        assert twin.routed(part) == 0
    if not is_reported:
        assert twin.learner(reported, twin.taken_earlier) == 0
    assert [incident.steps for incident in twin.incidents] == ([60, -60] if is_reported else [])
    assert (twin.lost, twin.step_counts().open) == (0, 60)
    for part in parts:
        twin.on_delivered(part)
    twin.learner(replace(reported, taken=60, trained=60), twin.taken_earlier)
    assert (twin.produced, twin.trained, twin.lost, twin.unrecorded, twin.step_counts().open) == (60, 60, 0, 0, 0)
    twin.serve("learning-B.3")
    assert twin.taken_earlier == 60


def ledger_after_two_crashes() -> StepLedger:
    """Returns a ledger after two messages, of which the learner took one, and crashes of both services."""
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


def test_steps_that_a_dead_assembly_cannot_send_again_are_lost() -> None:
    """They are lost once the learner has a message of the next incarnation; before, they may still be queued."""
    ledger = ledger_after_two_crashes()
    ledger.routed(segments("s.1", "a.2", 1, steps=0, began=60, received=60, orphaned=0))
    assert (ledger.lost, ledger.step_counts().open) == (0, 60)
    known = positions("a.1", 1, 40)
    ledger.on_learner_state(state(taken=40, trained=40, latest=known))
    assert ledger.lost == 0
    ledger.on_learner_state(
        state(taken=40, trained=40, latest=known | {"a.2": {"s.1": StreamPosition(sequence=1, began=60, steps=0)}})
    )
    ledger.learner(state(taken=40, trained=40), 0)
    assert [(one.stage, one.steps) for one in ledger.incidents] == [("coordination", 20)]
    assert (ledger.produced, ledger.trained, ledger.lost, ledger.step_counts().open) == (60, 40, 20, 0)
    ledger.on_learner_state(state(taken=60, trained=40, latest=positions("a.1", 2, 60)))
    assert ledger.lost == 0, "the learner had taken it"


def test_steps_sent_again_or_taken_by_the_learner_are_not_lost() -> None:
    after = {"a.2": {"s.1": StreamPosition(sequence=1, began=60, steps=0)}}
    for is_resent in (True, False):
        ledger = ledger_after_two_crashes()
        if is_resent:
            ledger.routed(segments("s.1", "a.1", 2, steps=20, began=0, received=60, orphaned=0, before=40))
        ledger.routed(segments("s.1", "a.2", 1, steps=0, began=60, received=60, orphaned=0))
        ledger.on_learner_state(state(taken=40, latest=after | positions("a.1", *((1, 40) if is_resent else (2, 60)))))
        assert ledger.lost == 0


def test_steps_of_a_dead_stepping_process_and_a_dead_assembly_are_lost() -> None:
    """The next assembly does not know that source, and reports nothing for it."""
    for over in (True, False):
        ledger = ledger_after_two_crashes()
        ledger.routed(segments("s.2", "a.2", 1, steps=0, began=0, received=0, orphaned=0))
        ledger.source_closed("s.1")
        assert ledger.lost == 0
        ledger.mark_lost({"a.2": {"s.2": StreamPosition(sequence=1, began=0, steps=0)}} if not over else {}, over=over)
        assert ledger.lost == 20


def test_steps_of_a_former_session_are_not_lost() -> None:
    """Its incarnations of assembly have no order relative to the present ones; all that they sent counts as taken."""
    ledger = ledger_after_two_crashes()
    ledger.mark_lost({"a.other-7": {"s.1": StreamPosition(sequence=1, began=60, steps=0)}})
    assert ledger.lost == 0


def test_at_the_end_steps_that_cannot_be_sent_again_are_lost() -> None:
    """The learner takes nothing of the next assembly any more."""
    ledger = ledger_after_two_crashes()
    ledger.mark_lost(positions("a.1", 1, 40), over=True)
    assert ledger.lost == 0, "its assembly may still send it again"
    ledger.routed(segments("s.1", "a.2", 1, steps=0, began=60, received=60, orphaned=0))
    ledger.mark_lost(positions("a.1", 1, 40), over=True)
    assert ledger.lost == 20


def test_redelivered_steps_that_the_weights_hold_stay_trained() -> None:
    """The checkpoint holds the first 40 of 60 steps; the last 20 were lost, and are sent again."""
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
    restored = positions("a.1", 1, 40)
    ledger.on_learner_state(reported := state(2, trained=40, latest=restored, restored=restored))
    assert ledger.learner(reported, ledger.taken_earlier) == 20
    for part in parts:
        ledger.routed(part)
    assert (ledger.trained, ledger.lost, ledger.step_counts().open) == (40, 0, 20)
    ledger.on_learner_state(reported)
    assert ledger.learner(reported, ledger.taken_earlier) == 0
    assert ledger.taken_earlier == 40


def test_redelivered_stale_steps_are_counted_as_stale_again() -> None:
    """Of 40 steps that a dead learner took 30 were stale, and all 40 are sent again."""
    ledger = new_ledger()
    ledger.serve("learning-B.1")
    part = segments("s.1", "a.1", 1, steps=40, began=0, received=40, orphaned=0)
    ledger.routed(part)
    ledger.on_delivered(part)
    ledger.learner(state(stale=30, buffered=10), 0)
    ledger.serve("learning-B.2")
    ledger.on_learner_state(reported := state(2))
    assert ledger.learner(reported, ledger.taken_earlier) == 10
    ledger.routed(part)
    assert (ledger.lost, ledger.stale, ledger.step_counts().open) == (0, 0, 40)
    ledger.learner(replace(reported, taken=40, stale=30, buffered=10), ledger.taken_earlier)
    assert (ledger.lost, ledger.stale, ledger.step_counts().open) == (0, 30, 10)


def test_steps_that_a_live_learner_took_from_a_dead_assembly_are_not_lost() -> None:
    """The saved ledger does not know the last message, and no assembly can send it again."""
    ledger = new_ledger()
    ledger.on_learner_state(state(latest=positions("a.1", 3, 30), taken=30, buffered=30))
    ledger.routed(segments("s.1", "a.2", 1, steps=0, began=32, received=32, orphaned=0))
    assert (ledger.lost, ledger.sources["s.1"].received) == (2, 30)


def test_incarnations_of_assembly_count_in_order() -> None:
    """Of 50 steps the first incarnation lost 18, and the second holds 10; a learner reports the first one later."""
    ledger = new_ledger()
    ledger.routed(segments("s.1", "a.2", 1, steps=22, began=30, received=62, orphaned=0))
    ledger.on_learner_state(state(latest=positions("a.1", 3, 12), taken=12, buffered=12))
    assert [*ledger.sources["s.1"].origins] == ["a.1", "a.2"]
    assert (ledger.lost, ledger.sources["s.1"].missing) == (18, 10)


def test_a_source_known_from_a_learner_alone_has_no_allowance() -> None:
    ledger = new_ledger()
    ledger.on_learner_state(state(latest=positions("a.1", 1, 5), taken=5, buffered=5))
    assert ledger.allowances() == {}
    ledger.stepped("s.1", produced(5, 0, 0, 4))
    assert ledger.allowances()["s.1"].steps == 5 + 195
