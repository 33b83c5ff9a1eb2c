"""The rules of step budget, flushes and step accounting, one at a time."""

from __future__ import annotations

import json

import pytest

from tests.coordination.coordination_parts import produced, segments
from tests.coordination.ledger_parts import new_ledger, state


@pytest.mark.parametrize(("overlap", "allowance"), [(0, 100), (1, 200)])
def test_the_first_allowance_is_the_budget(overlap: int, allowance: int) -> None:
    """A lone source with agents gets the whole budget; one without agents gets it in lockstep only."""
    ledger = new_ledger(overlap=overlap)
    ledger.stepped("stepping-0.1", produced(0, 0, 0, 0))
    assert ledger.allowances()["stepping-0.1"].steps == (0 if overlap else allowance)
    ledger.stepped("stepping-0.1", produced(0, 0, 0, 12))
    assert ledger.allowances()["stepping-0.1"].steps == allowance


def test_an_unused_allowance_is_free_again_once_its_source_has_no_agents() -> None:
    """A returned allowance is available to other sources."""
    ledger = new_ledger(processes=2)
    for name in ("a.1", "b.1"):
        ledger.stepped(name, produced(0, 0, 0, 5))
    first = ledger.allowances()
    assert first["a.1"].steps == first["b.1"].steps == 25
    before = ledger.in_flight
    ledger.stepped("a.1", produced(3, first["a.1"].serial, 3, 0))
    assert ledger.in_flight == before - 22
    assert ledger.allowances()["a.1"].steps == 3


def test_a_returned_allowance_that_crosses_a_newer_one_is_ignored() -> None:
    """An answer to an older allowance does not change the newer one."""
    ledger = new_ledger(processes=2)
    ledger.stepped("a.1", produced(0, 0, 0, 5))
    ledger.allowances()
    ledger.stepped("a.1", produced(20, 1, 25, 5))
    newer = ledger.allowances()["a.1"]
    assert newer.serial == 2
    ledger.stepped("a.1", produced(20, 1, 20, 0))
    assert ledger.sources["a.1"].allowance == newer.steps


def test_segments_sent_again_are_counted_once() -> None:
    """A message with a counted sequence number changes nothing."""
    ledger = new_ledger()
    message = segments("s.1", "a.1", 1, steps=7, began=0, received=9, orphaned=2)
    assert ledger.routed(message) == 2
    before = ledger.to_plain()
    assert ledger.routed(message) == 0
    assert ledger.to_plain() == before


def test_steps_that_a_former_assembly_never_sent_are_lost() -> None:
    """Produced steps before its successor began that are in no segment are lost, with an incident."""
    ledger = new_ledger()
    ledger.routed(segments("s.1", "a.1", 1, steps=30, began=0, received=50, orphaned=0))
    assert ledger.routed(segments("s.1", "a.2", 1, steps=0, began=52, received=56, orphaned=4)) == 26
    assert ledger.routed(segments("s.1", "a.2", 2, steps=5, began=52, received=61, orphaned=4)) == 0
    assert ledger.lost == 26
    assert ledger.sources["s.1"].missing == 61 - 26 - 35
    (incident,) = ledger.take_new_incidents()
    assert (incident.stage, incident.start, incident.steps) == ("assembly", "a.2", 26)
    assert ledger.take_new_incidents() == []


def test_steps_of_an_assembly_that_never_sent_a_message_are_lost() -> None:
    """The first message may come from the second incarnation; what the first one held is lost."""
    ledger = new_ledger()
    ledger.stepped("s.1", produced(40, 1, 200, 4))
    assert ledger.routed(segments("s.1", "a.2", 1, steps=8, began=30, received=40, orphaned=2)) == 32
    assert ledger.routed(segments("s.1", "a.3", 1, steps=0, began=40, received=40, orphaned=0)) == 0
    assert ledger.sources["s.1"].missing == 0


def test_late_segments_of_an_earlier_assembly_are_not_lost() -> None:
    """A late message of a dead incarnation reduces the loss that was counted at its successor's first message."""
    ledger = new_ledger()
    ledger.routed(segments("s.1", "a.1", 1, steps=10, began=0, received=50, orphaned=0))
    assert ledger.routed(segments("s.1", "a.2", 1, steps=0, began=50, received=50, orphaned=0)) == 40
    ledger.routed(segments("s.1", "a.1", 2, steps=15, began=0, received=50, orphaned=0, before=10))
    assert (ledger.lost, ledger.sources["s.1"].received) == (25, 25)


def test_delivered_steps_are_never_counted_as_lost() -> None:
    """Parts that are sent again to a new incarnation, and whose steps the old one had delivered, lose nothing."""
    ledger = new_ledger()
    ledger.routed(segments("s.1", "a.1", 1, steps=60, began=0, received=60, orphaned=0))
    lost = ledger.routed(segments("s.1", "a.2", 1, steps=0, began=48, received=60, orphaned=12))
    assert lost == 0
    assert ledger.sources["s.1"].missing == 0


def test_a_restarted_learner_loses_steps_beyond_its_checkpoint() -> None:
    """Steps that earlier incarnations took and the checkpoint lacks are lost, once."""
    ledger = new_ledger()
    ledger.routed(segments("s.1", "a.1", 1, steps=180, began=0, received=190, orphaned=0))
    assert ledger.learner(state(trained=100, training=60), 0) == 0
    assert ledger.learner(state(2, trained=40), 180) == 140
    assert ledger.learner(state(2, trained=40), 180) == 0
    assert (ledger.trained, ledger.lost, ledger.training) == (40, 140, 0)
    assert ledger.step_counts().open == 10
    assert ledger.learner(state(3, trained=40), 185) == 5


def test_training_after_a_restart_hides_no_loss() -> None:
    """The first received state may follow an update; the loss is still that of the restored weights."""
    ledger = new_ledger()
    ledger.learner(state(trained=100, training=60), 0)
    later = state(2, trained=240, taken=260, training=30, buffered=20, stale=10)
    assert ledger.learner(later, 180) == 180 - 40
    assert (ledger.trained, ledger.lost, ledger.stale) == (240, 140, 10)


@pytest.mark.parametrize("counts_hold", [0, 60, 180])
def test_a_checkpoint_with_more_steps_than_the_ledger_is_trusted(counts_hold: int) -> None:
    """After a power failure the step counts balance, and the budget is unchanged."""
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


def test_stale_steps_of_all_learner_incarnations_add_up() -> None:
    """A learner counts from its own start; the ledger counts from the beginning of the run."""
    ledger = new_ledger()
    ledger.learner(state(stale=5), 0)
    ledger.learner(state(stale=7), 0)
    ledger.learner(state(2, stale=1), 7)
    assert ledger.stale == 8
    assert ledger.lost == 0


def test_allowances_name_the_learners_version() -> None:
    """They do in both modes, as their steps become available with that update."""
    for overlap in (0, 1):
        ledger = new_ledger(overlap=overlap)
        ledger.stepped("s.1", produced(0, 0, 0, 4))
        ledger.learner(state(version=9), 0)
        assert ledger.allowances()["s.1"].version == 9


def test_each_buffer_is_flushed_once() -> None:
    """A flush is requested when a buffer waits, and again only after the learner has advanced."""
    ledger = new_ledger()
    ledger.stepped("s.1", produced(99, 1, 200, 4))
    assert not ledger.next_flush()
    ledger.stepped("s.1", produced(100, 1, 200, 4))
    assert ledger.next_flush()
    assert ledger.flush.required_steps == {"s.1": 100}
    ledger.stepped("s.1", produced(149, 1, 200, 4))
    assert not ledger.next_flush()
    ledger.learner(state(training=100), 0)
    ledger.stepped("s.1", produced(199, 1, 200, 4))
    assert not ledger.next_flush()
    ledger.stepped("s.1", produced(200, 1, 200, 4))
    assert ledger.next_flush()
    assert ledger.flush.serial == 2


def test_an_idle_learner_gets_another_flush_after_half_a_buffer_more() -> None:
    """Steps lost in a crash count as waiting until the loss is known, so the first flush brought too few."""
    ledger = new_ledger()
    ledger.stepped("s.1", produced(100, 1, 200, 4))
    assert ledger.next_flush()
    ledger.stepped("s.1", produced(149, 1, 200, 4))
    assert not ledger.next_flush()
    ledger.stepped("s.1", produced(150, 1, 200, 4))
    assert ledger.next_flush()
    assert not ledger.next_flush()


def test_a_lost_or_new_source_renews_the_flush() -> None:
    """A flush that a dead source cannot complete is requested again, with what has arrived from that source."""
    ledger = new_ledger()
    ledger.stepped("stepping-0.1", produced(100, 1, 200, 4))
    assert ledger.next_flush()
    ledger.source_gone("stepping-0.1")
    assert ledger.next_flush()
    assert ledger.flush.required_steps == {"stepping-0.1": 0}
    ledger.source_gone("stepping-0.1")
    assert not ledger.next_flush()
    ledger.stepped("stepping-0.2", produced(0, 0, 0, 4))
    assert ledger.next_flush()
    assert ledger.flush.required_steps == {"stepping-0.1": 0, "stepping-0.2": 0}
    ledger.routed(segments("stepping-0.1", "a.1", 1, steps=98, began=0, received=98, orphaned=0))
    assert ledger.source_closed("stepping-0.1") == 2
    ledger.learner(state(training=98), 0)
    ledger.stepped("stepping-0.2", produced(100, 1, 102, 4))
    assert ledger.next_flush()
    assert ledger.flush.required_steps == {"stepping-0.2": 100}
