"""Episodes, groups and outcomes of agents in the stepper, frame by frame."""

from __future__ import annotations

import random

import pytest

from sparring.pipeline.messages.simulator import BehaviorReport, Step
from sparring.pipeline.messages.state import StepAllowance
from sparring.pipeline.messages.steps import BehaviorSteps
from sparring.pipeline.stepping.stepper import Stepper
from tests.stepping.stepping_fakes import SPEC, FakePolicy, FakeSimulator, Reader
from tests.stepping.stepping_records import decisions_of, ends_of, step_of
from tests.stepping.stepping_scene import Scene


def steps_of_tick(stepper: Stepper) -> BehaviorSteps:
    """Runs a tick; returns the steps of the only behavior."""
    stepper.tick(0.0)
    (steps,) = stepper.take_steps()
    return steps


@pytest.fixture
def stepper() -> Stepper:
    stepper = Stepper({"A": FakePolicy()})
    stepper.connect(1, 5, {"A": SPEC, "A?team=3": SPEC})
    stepper.grant("A", StepAllowance(serial=1, steps=1000))
    return stepper


def test_an_id_that_ends_and_decides_in_one_frame_begins_a_new_episode(stepper: Stepper) -> None:
    """It keeps its slot; the end completes the step of the old episode, the decision completes none."""
    stepper.receive(1, step_of(0, A=(8, 9)), 0.0)
    first = steps_of_tick(stepper)
    report = BehaviorReport(behavior="A", decisions=decisions_of((9, 8)), ends=ends_of((9,)))
    stepper.receive(1, Step(sequence=1, reports=(report,)), 0.0)
    part = steps_of_tick(stepper)
    assert first.joined is not None
    assert part.ended is not None
    assert part.joined is not None
    assert part.reported is not None
    assert part.ended.slots.tolist() == part.joined.slots.tolist() == [1]
    assert part.joined.fresh.tolist() == [True]
    assert part.joined.agents[0] not in first.joined.agents
    assert part.reported.slots.tolist() == [1, 0]
    assert part.completed.tolist() == [2]
    assert stepper.behaviors["A"].produced == 2


def test_a_change_of_group_is_reported_and_ends_no_episode(stepper: Stepper) -> None:
    """An agent that names another group keeps slot and episode; two simulators never share group keys."""
    stepper.connect(2, 6, {"A": SPEC})
    for key in (1, 2):
        report = BehaviorReport(behavior="A", decisions=decisions_of((8, 9), (1, 0)))
        stepper.receive(key, Step(sequence=0, reports=(report,)), 0.0)
    first = steps_of_tick(stepper).joined
    assert first is not None
    assert len(set(first.groups.tolist())) == 3  # none, and one of each simulator
    assert first.groups.tolist().count(0) == 2
    report = BehaviorReport(behavior="A", decisions=decisions_of((8, 9), (1, 1)))
    stepper.receive(1, Step(sequence=1, reports=(report,)), 0.0)
    part = steps_of_tick(stepper)
    moved = part.joined
    assert moved is not None
    assert (moved.slots.tolist(), moved.fresh.tolist()) == ([1], [False])
    assert moved.agents.tolist() == [first.agents[1]]
    assert moved.groups.tolist() == [first.groups[0]]
    assert part.reported is not None
    assert part.completed.tolist() == [2]
    stepper.receive(1, Step(sequence=2, reports=(report,)), 0.0)
    assert steps_of_tick(stepper).joined is None


def test_an_outcome_that_a_simulator_does_not_state_is_reported_as_unknown(stepper: Stepper) -> None:
    """The column holds -1 for an outcome that was not stated."""
    stepper.connect(2, 6, {"A": SPEC})
    for key in (1, 2):
        stepper.receive(key, step_of(0, A=(8,)), 0.0)
    stepper.tick(0.0)
    for key, outcomes in ((1, None), (2, (0.5,))):
        report = BehaviorReport(behavior="A", ends=ends_of((8,), outcomes))
        stepper.receive(key, Step(sequence=1, reports=(report,)), 0.0)
    stepper.take_steps()
    result = stepper.tick(0.0)
    ended = stepper.take_steps()[0].ended
    assert ended is not None
    assert ended.outcomes is not None
    assert ended.outcomes.tolist() == [-1.0, 0.5]
    assert [act.actions for _, act, *_ in result.acts] == [(), ()]  # no agent decides: the simulators just continue


def test_a_behavior_with_agents_keeps_its_allowance(stepper: Stepper) -> None:
    """Only a behavior without agents returns its allowance."""
    stepper.return_unused()
    assert stepper.state()["A"].allowance == 0
    stepper.grant("A", StepAllowance(serial=2, steps=500))
    stepper.receive(1, step_of(0, A=(8,)), 0.0)
    stepper.tick(0.0)
    stepper.return_unused()
    assert stepper.state()["A"].allowance == 500


def test_a_reader_refuses_a_part_that_is_read_twice() -> None:
    """The reader that these tests rely on can fail."""
    scene = Scene(random.Random(0), ["A"])
    scene.connect(1, FakeSimulator(1, random.Random(1), agents=2, steady=True))
    scene.grant("A", 100)
    scene.send(1)
    part = steps_of_tick(scene.stepper)
    reader = Reader()
    reader.read(part)
    with pytest.raises(AssertionError):
        reader.read(part)
