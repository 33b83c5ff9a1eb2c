"""Which simulators wait under self-play, and which ghosts stay in use."""

from __future__ import annotations

import pytest

from sparring.pipeline.errors import RemoteProtocolError
from tests.stepping.matches_by_hand import MUCH, ONE, PAIR, THREE, TWO, SteppedMatches, first, second
from tests.stepping.matches_simulator import LATEST
from tests.stepping.stepping_fakes import SPEC

# ---------------------------------------------------------------- waiting simulators


def test_an_agent_that_changes_its_match_without_an_end_is_refused() -> None:
    """A learner or a ghost may change after its end, also in the same frame; a refused frame changes nothing."""
    for behavior_id in PAIR:
        stepped = SteppedMatches(first(1, A1=7))
        stepped.play(stepped.report(behavior_id, [1, 2], matches=[5, 5]))
        stepped.play(stepped.report(behavior_id, [1, 2], [1], matches=[6, 5]))
        with pytest.raises(RemoteProtocolError) as refused:
            stepped.receive(0, stepped.report(behavior_id, [1, 2], matches=[6, 6]))
        assert refused.value.code == "match"
        assert "agent 2" in str(refused.value)
        assert stepped.tick() == {}


def test_a_refusal_does_not_depend_on_the_former_agent_of_a_slot() -> None:
    """An agent that names its match after its start is always refused, or never."""
    refused = []
    for former in (None, [5], [6]):
        stepped = SteppedMatches(first(1, A1=7))
        if former is not None:
            stepped.play(stepped.report(ONE, [1], matches=former))
            stepped.play(stepped.report(ONE, ends=[1]))
        stepped.play(stepped.report(ONE, [1]))
        try:
            stepped.receive(0, stepped.report(ONE, [1], matches=[6]))
        except RemoteProtocolError as error:
            refused.append(error.code)
        else:
            refused.append("")
    assert len(set(refused)) == 1, refused


def test_a_simulator_with_an_unassigned_behavior_waits_alone() -> None:
    stepped = SteppedMatches(first(1, A1=7))
    stepped.connect(1, (*PAIR, THREE))
    stepped.receive(1, stepped.report(ONE, [1]))
    stepped.receive(0, stepped.report(ONE, [1]))
    assert stepped.tick() == {0: {ONE: [LATEST]}}
    assert stepped.play(stepped.report(ONE, [1])) == {ONE: [LATEST]}
    stepped.assign(first(2, A1=7, A2=9))
    assert stepped.tick() == {1: {ONE: [LATEST]}}


def test_all_simulators_wait_for_the_first_assignment() -> None:
    stepped = SteppedMatches()
    stepped.receive(0, stepped.report(ONE, [1]))
    assert stepped.tick() == {}
    assert stepped.parts == []
    stepped.assign(first(1, A1=7))
    assert stepped.tick() == {0: {ONE: [LATEST]}}


def test_ghosts_need_no_allowance_and_no_weights_of_the_learner() -> None:
    stepped = SteppedMatches(first(1, A1=7))
    stepped.grant("A", 0)
    del stepped.latest["A"]
    for _ in range(3):
        assert stepped.play(stepped.report(TWO, [1, 2])) == {TWO: [7, 7]}
    state = stepped.stepper.state()["A"]
    assert (state.steps, state.ghosts) == (0, 4)


def test_a_simulator_whose_learner_is_at_its_budget_waits_as_a_whole() -> None:
    """Its ghosts wait too; another simulator whose agents are all ghosts continues."""
    stepped = SteppedMatches(first(1, A1=7))
    stepped.connect(1, (TWO,))
    stepped.grant("A", 1)
    assert stepped.play(*(stepped.report(behavior_id, [1]) for behavior_id in PAIR)) == {ONE: [LATEST], TWO: [7]}
    stepped.receive(0, *(stepped.report(behavior_id, [1]) for behavior_id in PAIR))
    stepped.receive(1, stepped.report(TWO, [1]))
    assert stepped.tick() == {1: {TWO: [7]}}
    state = stepped.stepper.state()["A"]
    assert (state.steps, state.ghosts) == (1, 1)
    stepped.grant("A", 2)
    assert stepped.tick() == {0: {ONE: [LATEST], TWO: [7]}}


def test_steps_of_ghosts_do_not_use_the_budget() -> None:
    stepped = SteppedMatches(first(1, A1=7))
    stepped.grant("A", 2)
    for _ in range(2):
        assert stepped.play(stepped.report(ONE, [1]), stepped.report(TWO, [1, 2, 3]))
    stepped.receive(0, stepped.report(ONE, [1]), stepped.report(TWO, [1, 2, 3]))
    assert stepped.tick() == {}
    assert stepped.stepper.behaviors["A"].running == 0


def test_in_lockstep_an_allowance_waits_for_the_assignment_that_it_names() -> None:
    """All simulators wait after their outcomes are recorded; then new matches take the new matchups."""
    stepped = SteppedMatches(first(1, A1=7), lockstep=True, expected=2)
    stepped.connect(1)
    for key in (0, 1):
        stepped.receive(key, *(stepped.report(behavior_id, [1]) for behavior_id in PAIR))
    assert len(stepped.tick()) == 2
    stepped.grant("A", MUCH, assignment=2)
    for key in (0, 1):
        stepped.receive(key, *(stepped.report(behavior_id, [1]) for behavior_id in PAIR))
    assert stepped.tick() == {}
    assert stepped.stepper.behaviors["A"].produced == 2
    stepped.assign(second(2, A0=8))
    assert stepped.tick() == {key: {ONE: [LATEST], TWO: [7]} for key in (0, 1)}
    for key in (0, 1):
        stepped.receive(key, *(stepped.report(behavior_id, [1], [1]) for behavior_id in PAIR))
    assert stepped.tick() == {key: {ONE: [8], TWO: [LATEST]} for key in (0, 1)}


# ---------------------------------------------------------------- ghosts in use


def test_a_ghost_stays_in_use_while_its_match_lasts_without_its_agents() -> None:
    """The next agent of the ghost's behavior id plays under the matchup of the match."""
    stepped = SteppedMatches(first(1, A1=7))
    stepped.play(*(stepped.report(behavior_id, [1], matches=[5]) for behavior_id in PAIR))
    stepped.play(stepped.report(ONE, [1], matches=[5]), stepped.report(TWO, ends=[1]))
    stepped.assign(first(2, A1=8), release=True)
    assert ("A", 7) in stepped.ghosts
    assert stepped.play(stepped.report(TWO, [2], matches=[5])) == {TWO: [7]}


def test_ghosts_are_in_use_only_while_assigned_or_playing() -> None:
    stepped = SteppedMatches(first(1, A1=7), first(2, A1=8))
    stepped.play(stepped.report(TWO, [1]))
    stepped.assign(first(3, A1=9), release=True)
    assert set(stepped.ghosts) == {("A", 7), ("A", 9)}
    stepped.play(stepped.report(TWO, [1], [1]))
    stepped.assign(first(4, A1=9), release=True)
    assert set(stepped.ghosts) == {("A", 9)}


def test_a_new_behavior_in_a_match_under_way_delays_no_other_simulator() -> None:
    """The match's matchup does not cover the behavior, so only its own simulator may be refused."""
    stepped = SteppedMatches(first(1, A1=7))
    stepped.connect(1)
    stepped.play(stepped.report(ONE, [1], matches=[5]))
    stepped.stepper.add_behaviors(0, {THREE: SPEC})
    stepped.assign(first(2, A1=8, A2=9))
    stepped.receive(1, stepped.report(TWO, [1], matches=[1]))
    try:
        stepped.receive(0, stepped.report(THREE, [1], matches=[5]))
    except RemoteProtocolError:
        stepped.stepper.disconnect(0)
    assert stepped.tick()[1] == {TWO: [8]}
