"""The rules of step budget, flushes and step accounting, one at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparring.pipeline.coordination.ledger import StepLedger
from sparring.pipeline.messages.state import EARLIER, AssembledSteps
from tests.coordination.ledger_parts import FIRST, OTHER, SECOND, THIRD, new_ledger, produced, state, terms


@pytest.mark.parametrize(("overlap", "allowance"), [(0, 100), (1, 200)])
def test_the_first_allowance_is_the_budget(overlap: int, allowance: int) -> None:
    """A lone source with agents gets the whole budget; one without agents gets it in lockstep only."""
    ledger = new_ledger(overlap=overlap)
    ledger.on_produced(FIRST, produced(0, 0, 0, 0))
    assert ledger.allowances()[FIRST].steps == (0 if overlap else allowance)
    ledger.on_produced(FIRST, produced(0, 0, 0, 12))
    assert ledger.allowances()[FIRST].steps == allowance


def test_an_unused_allowance_is_free_again_once_its_source_has_no_agents() -> None:
    """A returned allowance is available to other sources."""
    ledger = new_ledger(processes=2)
    for name in (FIRST, OTHER):
        ledger.on_produced(name, produced(0, 0, 0, 5))
    first = ledger.allowances()
    assert first[FIRST].steps == first[OTHER].steps == 25
    before = ledger.in_flight
    ledger.on_produced(FIRST, produced(3, first[FIRST].serial, 3, 0))
    assert ledger.in_flight == before - 22
    assert ledger.allowances()[FIRST].steps == 3


def test_a_returned_allowance_that_crosses_a_newer_one_is_ignored() -> None:
    """An answer to an older allowance does not change the newer one."""
    ledger = new_ledger(processes=2)
    ledger.on_produced(FIRST, produced(0, 0, 0, 5))
    ledger.allowances()
    ledger.on_produced(FIRST, produced(20, 1, 25, 5))
    newer = ledger.allowances()[FIRST]
    assert newer.serial == 2
    ledger.on_produced(FIRST, produced(20, 1, 20, 0))
    assert ledger.sources[FIRST].allowance == newer.steps


# ---------------------------------------------------------------- where a lost step was


def test_gaps_that_the_learner_counts_are_lost_by_their_stage() -> None:
    """The learner's counts are those of its lineage: a later state takes the place of an earlier one."""
    ledger = new_ledger()
    ledger.on_produced(FIRST, produced(80))
    ledger.on_learner_state(state(trained=20, buffered=10, stale=5, lost={"assembly": 7, "learning": 3}))
    assert terms(ledger) == (80, 20, 0, 5, 10, 45)
    assert ledger.losses == {"assembly": 7, "learning": 3}
    assert ledger.take_new_losses() == {"assembly": 7, "learning": 3}
    ledger.on_learner_state(state(trained=20, buffered=10, stale=5, lost={"assembly": 9, "learning": 3}))
    assert ledger.take_new_losses() == {"assembly": 2}
    assert ledger.take_new_losses() == {}


def test_a_dead_source_is_lost_once_its_successor_reaches_the_learner() -> None:
    """Until then its segments may still arrive; only its own service's successor closes it."""
    ledger = new_ledger(processes=2)
    ledger.on_produced(FIRST, produced(50))
    ledger.on_produced(OTHER, produced(10))
    ledger.replace(SECOND)
    ledger.on_learner_state(state(buffered=40, reached={FIRST: 30, OTHER: 10}))
    assert (terms(ledger)[4:], ledger.losses) == ((0, 60), {})
    ledger.on_learner_state(state(buffered=45, reached={FIRST: 35, OTHER: 10, SECOND: 0}))
    assert (terms(ledger)[4:], ledger.losses) == ((15, 45), {"stepping": 15})


def test_a_dead_source_is_lost_also_where_the_learner_heard_of_its_successor_first() -> None:
    """A restarted learner says nothing more while it waits for steps, which lockstep allows once the old are lost."""
    ledger = new_ledger(overlap=0)
    ledger.on_produced(FIRST, produced(100, serial=1, allowance=100))
    ledger.on_learner_state(state(2, reached={SECOND: 0}))
    assert ledger.allowances()[FIRST].steps == 100, "coordination has not heard of the successor"
    ledger.on_produced(SECOND, produced(0))
    ledger.replace(SECOND)
    assert ledger.losses == {"stepping": 100}
    assert ledger.allowances()[SECOND].steps == 100


def test_steps_that_an_earlier_learner_received_are_lost_with_it() -> None:
    """It had 40 of 50 steps of a dead source, whose assembler is gone; its successor restores 25."""
    ledger = new_ledger()
    ledger.on_produced(FIRST, produced(50))
    ledger.on_learner_state(state(buffered=40))
    ledger.on_learner_state(state(2, trained=25, reached={FIRST: 25, SECOND: 0}))
    assert terms(ledger) == (50, 25, 0, 0, 25, 0)
    assert ledger.losses == {"learning": 15, "stepping": 10}


def test_a_checkpoint_with_more_steps_than_the_ledger_is_trusted() -> None:
    """After a power failure the step counts balance, and the whole budget is free."""
    ledger = new_ledger()
    ledger.on_learner_state(state(2, trained=200, reached={FIRST: 60, EARLIER: 140}))
    ledger.on_produced(SECOND, produced(0))
    assert terms(ledger) == (200, 200, 0, 0, 0, 0)
    assert ledger.allowances()[SECOND].steps == ledger.limit


def test_recovered_steps_are_lost_at_both_ends_until_the_learner_receives_them() -> None:
    """A dead source published 10 steps and its simulators reported 30: assembly has some of them."""
    ledger = new_ledger()
    ledger.on_produced(FIRST, produced(10))
    ledger.replace(SECOND)
    ledger.recovered += 20
    assert (terms(ledger), ledger.losses) == ((30, 0, 0, 0, 20, 10), {"both_ends": 20})
    ledger.on_learner_state(state(buffered=25, reached={FIRST: 25, SECOND: 0}))
    assert (terms(ledger), ledger.losses) == ((30, 0, 0, 0, 5, 25), {"both_ends": 5})


def test_more_steps_than_deaths_can_lose_are_no_count() -> None:
    """A simulator that miscounts changes no term; the comparison with its totals shows it."""
    ledger = new_ledger(buffer_size=100, overlap=1)
    ledger.recover(10**15)
    assert (ledger.produced, ledger.losses) == (0, {})
    ledger.recover(2 * (200 + ledger.most_agents))
    assert ledger.losses["both_ends"] == 2 * (200 + ledger.most_agents)


@pytest.mark.parametrize("final", [True, False], ids=["ended in order", "died"])
def test_at_the_end_what_assembly_holds_stays_open(final: bool) -> None:
    """Of 100 steps the learner has 60 of 70 sent, assembly holds 20, and 10 had not left stepping."""
    ledger = new_ledger()
    ledger.on_produced(FIRST, produced(100))
    ledger.on_learner_state(state(buffered=60))
    ledger.close({FIRST: AssembledSteps(sent=70, open=15, closed=5)} if final else {})
    assert ledger.losses == ({"learning": 10, "stepping": 10} if final else {"assembly": 40})
    assert terms(ledger)[4:] == ((20, 80) if final else (40, 60))


def test_a_resumed_run_has_lost_what_was_open_at_its_end() -> None:
    """What assembly held at the end stayed open, and is lost once the run is resumed."""
    ledger = new_ledger()
    ledger.on_produced(FIRST, produced(100))
    ledger.on_learner_state(state(trained=50, buffered=10))
    ledger.close({FIRST: AssembledSteps(sent=60, open=40, closed=0)})
    assert (ledger.losses, ledger.open) == ({}, 50)
    ledger.close_former_run()
    ledger.on_learner_state(state(2, trained=50, lost={"learning": 10}))
    assert terms(ledger) == (100, 50, 0, 0, 50, 0)
    assert (ledger.losses, ledger.allowances()) == ({"learning": 10, "stepping": 40}, {})


def test_the_learner_of_a_resumed_run_says_itself_that_it_is_done() -> None:
    """The run may be resumed with more steps to make: it must not end before its learner is there."""
    ledger = new_ledger()
    ledger.on_learner_state(replace(state(trained=50), done=True))
    ledger.close_former_run()
    assert not ledger.learner.done


def test_a_source_known_from_a_learner_alone_has_no_allowance() -> None:
    """Its first report makes it a living one, unless its successor has reached the learner."""
    ledger = new_ledger()
    ledger.on_learner_state(state(buffered=5))
    assert ledger.allowances() == {}
    ledger.on_produced(FIRST, produced(5))
    assert ledger.allowances()[FIRST].steps == 5 + 195
    ledger.on_learner_state(state(buffered=5, reached={FIRST: 5, THIRD: 0}))
    ledger.on_produced(FIRST, produced(5))
    assert not ledger.sources[FIRST].alive


# ---------------------------------------------------------------- flushes


def test_allowances_name_the_learners_version() -> None:
    """They do in both modes, as their steps become available with that update."""
    for overlap in (0, 1):
        ledger = new_ledger(overlap=overlap)
        ledger.on_produced(FIRST, produced(0, 0, 0, 4))
        ledger.on_learner_state(state(version=9))
        assert ledger.allowances()[FIRST].version == 9


def test_each_buffer_is_flushed_once() -> None:
    """A flush is requested when a buffer waits, and again only after the learner has advanced."""
    ledger = new_ledger()
    ledger.on_produced(FIRST, produced(99, 1, 200, 4))
    assert not ledger.next_flush()
    ledger.on_produced(FIRST, produced(100, 1, 200, 4))
    assert ledger.next_flush()
    assert ledger.flush.required_steps == {FIRST: 100}
    ledger.on_produced(FIRST, produced(149, 1, 200, 4))
    assert not ledger.next_flush()
    ledger.on_learner_state(state(training=100))
    ledger.on_produced(FIRST, produced(199, 1, 200, 4))
    assert not ledger.next_flush()
    ledger.on_produced(FIRST, produced(200, 1, 200, 4))
    assert ledger.next_flush()
    assert ledger.flush.serial == 2


def test_an_idle_learner_gets_another_flush_after_half_a_buffer_more() -> None:
    """Steps lost in a crash count as waiting until the loss is known, so the first flush brought too few."""
    ledger = new_ledger()
    ledger.on_produced(FIRST, produced(100, 1, 200, 4))
    assert ledger.next_flush()
    ledger.on_produced(FIRST, produced(149, 1, 200, 4))
    assert not ledger.next_flush()
    ledger.on_produced(FIRST, produced(150, 1, 200, 4))
    assert ledger.next_flush()
    assert not ledger.next_flush()


def test_a_lost_or_new_source_renews_the_flush() -> None:
    """A flush that waits for a dead source may never be completed; a new one names living sources only."""
    ledger = new_ledger()
    ledger.on_produced(FIRST, produced(100, 1, 200))
    assert ledger.next_flush()
    ledger.retire(FIRST)
    assert ledger.next_flush()
    assert ledger.flush.required_steps == {}
    ledger.retire(FIRST)
    assert not ledger.next_flush()
    ledger.on_produced(SECOND, produced(0))
    assert ledger.next_flush()
    assert ledger.flush.required_steps == {SECOND: 0}
    ledger.on_learner_state(state(training=98, reached={FIRST: 98, SECOND: 0}))
    ledger.on_produced(SECOND, produced(100, 1, 102))
    assert ledger.next_flush()
    assert (ledger.flush.required_steps, ledger.flush.serial) == ({SECOND: 100}, 4)


def test_an_update_has_as_many_steps_of_each_agent_as_the_trainer_wants() -> None:
    """The budget and the flushes follow the agents that are alive; a fixed budget stays."""
    ledger = StepLedger(least_update_steps=100, overlap=1, budget=200, agent_steps=16)
    ledger.on_produced(FIRST, produced(0, agents=4))
    assert (ledger.update_steps, ledger.limit) == (100, 200)
    ledger.on_produced(FIRST, produced(0, agents=20))
    assert (ledger.update_steps, ledger.limit) == (320, 640)
    assert ledger.allowances()[FIRST].steps == 640
    ledger.on_produced(FIRST, produced(319, serial=1, allowance=640, agents=20))
    assert not ledger.next_flush()
    ledger.on_produced(FIRST, produced(320, serial=1, allowance=640, agents=20))
    assert ledger.next_flush()
    ledger.retire(FIRST)
    assert (ledger.update_steps, ledger.limit) == (100, 200)
    fixed = StepLedger(least_update_steps=100, overlap=1, budget=150)
    fixed.on_produced(FIRST, produced(0, agents=20))
    assert (fixed.update_steps, fixed.limit) == (100, 150)
