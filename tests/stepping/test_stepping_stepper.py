"""The stepper among simulators that count their own steps."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.state import StepAllowance
from sparring.pipeline.specs import ActionSpec
from sparring.pipeline.stepping.waiting import WEIGHTS
from tests.stepping.stepping_fakes import SPEC, FakePolicy, FakeSimulator
from tests.stepping.stepping_records import step_of
from tests.stepping.stepping_scene import Scene, hosted

IDS = [("A",), ("A", "A?team=1"), ("B", "A?team=2"), ("B",)]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    ticks=st.integers(1, 60),
    tight=st.booleans(),
    gather=st.sampled_from([1.0, 0.3]),
    carried=st.fixed_dictionaries({"A": st.integers(0, 3), "B": st.integers(0, 3)}),
)
def test_every_step_is_reported_once_and_every_decision_is_answered(
    seed: int, ticks: int, tight: bool, gather: float, carried: dict[str, int]
) -> None:
    """Steps, counts, slots and answers agree while simulators of several behaviors connect, wait and disconnect."""
    rng = random.Random(seed)
    scene, keys = Scene(rng, carried=carried), 0
    for _ in range(ticks):
        if rng.random() < 0.2:
            keys += 1
            scene.connect(keys, FakeSimulator(keys, random.Random(rng.random()), rng.choice(IDS), rng.randrange(5)))
        if scene.simulators and rng.random() < 0.05:
            scene.disconnect(rng.choice(list(scene.simulators)))
        if rng.random() < 0.7:
            for name, behavior in scene.stepper.behaviors.items():
                scene.grant(name, behavior.produced + (rng.randrange(20) if tight else 10**6))
        if rng.random() < 0.1:
            scene.policies["A"].version += 1
        scene.send(*[key for key in scene.ready() if rng.random() < 0.7])
        scene.tick(take=rng.random() < gather)
    scene.tick()
    scene.check_counts()
    for name in scene.stepper.behaviors:
        scene.check_steps(name)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), simulators=st.integers(1, 5), agents=st.integers(1, 6), granted=st.integers(1, 30))
def test_the_budget_is_overshot_by_one_frame_at_most(seed: int, simulators: int, agents: int, granted: int) -> None:
    """Production ends within one frame of the allowance, in any order of frames of any size."""
    rng = random.Random(seed)
    scene = Scene(rng)
    for key in range(simulators):
        scene.connect(key, FakeSimulator(key, random.Random(rng.random()), rng.choice(IDS), agents))
    allowance = dict.fromkeys(scene.stepper.behaviors, 0)
    frame = dict.fromkeys(allowance, 0)
    for _ in range(60):
        for name, behavior in scene.stepper.behaviors.items():
            if behavior.produced >= allowance[name] and rng.random() < 0.3:
                allowance[name] = behavior.produced + granted
                scene.serial += 1
                scene.stepper.grant(name, StepAllowance(serial=scene.serial, steps=allowance[name]))
        scene.send(*[key for key in scene.ready() if rng.random() < 0.6])
        scene.tick()
        for name, behavior in scene.stepper.behaviors.items():
            frame[name] = max(frame[name], *(hosted(simulator, name) for simulator in scene.simulators.values()))
            assert behavior.produced < max(1, allowance[name] + frame[name])


def test_outcomes_of_a_backpressured_simulator_are_still_reported() -> None:
    """A simulator at its budget gets no act, and its outcomes still reach assembly."""
    scene = Scene(random.Random(0), ["A"])
    scene.connect(1, FakeSimulator(1, random.Random(1), agents=3, steady=True))
    scene.grant("A", 3)
    scene.send(1)
    assert len(scene.tick().acts) == 1
    scene.send(1)
    assert not scene.tick().acts
    assert scene.steps[0].reported is not None
    assert scene.steps[0].completed.tolist() == [3]
    backpressured = [scene.stepper.backpressured]
    scene.tick()
    assert scene.steps == ()  # nothing is reported twice
    scene.grant("A", 4)
    (answer,) = scene.tick().acts
    assert answer[3] > 0  # seconds backpressured
    backpressured.append(scene.stepper.backpressured)
    assert backpressured == [True, False]
    assert scene.stepper.behaviors["A"].produced == 3


def test_a_repeated_allowance_does_not_undo_its_return() -> None:
    """A returned allowance stays returned until a newer one arrives."""
    scene = Scene(random.Random(0), ["A"])
    scene.connect(1, FakeSimulator(1, random.Random(1), agents=3, steady=True))
    granted = StepAllowance(serial=1, steps=100)
    scene.stepper.grant("A", granted)
    scene.send(1)
    scene.tick()
    scene.disconnect(1)
    scene.tick()
    assert scene.stepper.state()["A"].allowance == 0
    scene.stepper.grant("A", granted)  # the topic delivers its latest record again at any change
    scene.connect(2, FakeSimulator(2, random.Random(1), agents=3, steady=True))
    scene.send(2)
    assert not scene.tick().acts
    assert scene.stepper.state()["A"].allowance == 0
    scene.stepper.grant("A", StepAllowance(serial=2, steps=100))
    assert scene.tick().acts


def test_a_slow_simulator_delays_no_other() -> None:
    """All other simulators keep stepping while one computes."""
    scene = Scene(random.Random(0), ["A"])
    for key in range(4):
        scene.connect(key, FakeSimulator(key, random.Random(key), agents=2, steady=True))
    scene.grant("A", 10**6)
    scene.send(0, 1, 2, 3)
    scene.tick()
    for frames in range(1, 20):
        scene.send(0, 1, 2)
        assert {key for key, *_ in scene.tick().acts} == {0, 1, 2}
        assert scene.stepper.behaviors["A"].produced == frames * 6


def test_a_small_allowance_serves_the_simulator_that_has_waited_longest() -> None:
    """No simulator is passed over for ever where an allowance covers only some of them."""
    scene = Scene(random.Random(0), ["A"])
    for key in range(6):
        scene.connect(key, FakeSimulator(key, random.Random(key), agents=4, steady=True))
    scene.send(*range(6))
    scene.tick()
    for _ in range(12):
        scene.grant("A", scene.stepper.behaviors["A"].produced + 8)
        acts = scene.tick().acts
        assert len(acts) == 2
        scene.send(*[key for key, *_ in acts])
        scene.tick()
    assert [simulator.sequence for simulator in scene.simulators.values()] == [5] * 6


def test_both_behaviors_of_a_simulator_wait_when_one_is_at_its_budget() -> None:
    """A simulator is answered for all its behaviors or for none; one with only the other behavior continues."""
    scene = Scene(random.Random(0))
    scene.connect(1, FakeSimulator(1, random.Random(1), ("A", "B"), agents=2, steady=True))
    scene.connect(2, FakeSimulator(2, random.Random(2), ("B",), agents=2, steady=True))
    scene.grant("A", 0)
    scene.grant("B", 1000)
    scene.send(1, 2)
    assert [key for key, *_ in scene.tick().acts] == [2]
    assert scene.policies["A"].calls == []
    scene.grant("A", 1)
    (act,) = (act for _, act, *_ in scene.tick().acts)
    assert {actions.behavior for actions in act.actions} == {"A", "B"}


def test_actions_under_way_of_a_behavior_at_its_budget_delay_other_frames() -> None:
    """A frame that asks for another behavior waits while agents of the behavior at its budget still act."""
    scene = Scene(random.Random(0))
    stepper = scene.stepper
    for key in (1, 2):
        stepper.connect(key, 10 - key, {"A": SPEC, "B": SPEC})
    scene.grant("A", 10)
    scene.grant("B", 1000)
    many = tuple(range(10))
    stepper.receive(1, step_of(0, A=many, B=(1,)), 0.0)
    assert len(stepper.tick(0.0).acts) == 1
    stepper.receive(2, step_of(0, A=many), 1.0)
    stepper.receive(1, step_of(1, B=(1,)), 2.0)  # the ten of A are still acting
    assert [key for key, *_ in stepper.tick(3.0).acts] == [2], "both would overshoot the budget by ten"


def test_missing_or_old_weights_make_agents_wait() -> None:
    """No agent acts before the first weights, nor with older weights than the allowance names."""
    scene = Scene(random.Random(0), [])
    scene.connect(1, FakeSimulator(1, random.Random(1), agents=2, steady=True))
    scene.grant("A", 100, version=5)
    scene.send(1)
    assert not scene.tick().acts
    scene.policies["A"] = FakePolicy(version=4)
    assert not scene.tick().acts
    scene.policies["A"].version = 5
    assert scene.tick().acts
    assert scene.readers["A"].versions == [5, 5]


def test_a_disconnect_frees_slots_and_actions_under_way() -> None:
    """The actions of a disconnected simulator leave the budget, and its slots are reported lost once."""
    scene = Scene(random.Random(0), ["A"])
    scene.connect(1, FakeSimulator(1, random.Random(1), agents=6, steady=True))
    scene.connect(2, FakeSimulator(2, random.Random(2), agents=6, steady=True))
    scene.grant("A", 6)
    scene.send(1, 2)
    assert [key for key, *_ in scene.tick().acts] == [1]
    assert not scene.tick().acts
    scene.disconnect(1)
    results = [scene.tick(take=False), scene.tick()]
    lost = [steps.lost for steps in scene.steps if steps.lost is not None]
    assert [sorted(slots.tolist()) for slots in lost] == [[0, 1, 2, 3, 4, 5]]
    assert [key for result in results for key, *_ in result.acts] == [2]
    assert scene.stepper.behaviors["A"].running == 6
    scene.disconnect(2)
    scene.tick()
    assert scene.stepper.behaviors["A"].running == 0
    assert scene.stepper.behaviors["A"].table.taken == 0


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_frame_that_arrived_before_its_connection_broke_counts(lockstep: bool) -> None:
    """Outcomes of a received frame are recorded although its simulator has disconnected."""
    scene = Scene(random.Random(0), ["A"], lockstep=lockstep)
    scene.connect(1, FakeSimulator(1, random.Random(1), agents=2, steady=True))
    scene.grant("A", 100)
    scene.send(1)
    scene.tick()
    scene.send(1)
    scene.disconnect(1)
    scene.tick()
    assert scene.stepper.behaviors["A"].produced == 2
    scene.check_steps("A")


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), ticks=st.integers(1, 30), lockstep=st.booleans())
def test_a_new_reader_receives_every_live_agent(seed: int, ticks: int, lockstep: bool) -> None:
    """The first parts after `rejoin` report every live agent, as continuing or new."""
    rng = random.Random(seed)
    scene = Scene(rng, lockstep=lockstep, expected=3)
    for key in range(3):
        scene.connect(key, FakeSimulator(key, random.Random(rng.random()), rng.choice(IDS), 3))
    scene.grant_all()
    for _ in range(ticks):
        scene.send(*[key for key in scene.ready() if rng.random() < 0.7])
        scene.tick()
    before = {name: set(reader.agent_episodes) for name, reader in scene.readers.items()}
    scene.stepper.reintroduce_agents()
    scene.send(*scene.ready())
    scene.stepper.tick(scene.now)
    parts = scene.stepper.take_steps()
    assert {part.behavior for part in parts} == set(scene.stepper.behaviors)
    for part in parts:
        table = scene.stepper.behaviors[part.behavior].table
        joined = part.joined
        slots = [] if joined is None else joined.slots.tolist()
        assert sorted(slots) == np.flatnonzero(table.live).tolist()
        if joined is not None:
            known = before.get(part.behavior, set())
            assert joined.fresh.tolist() == [agent not in known for agent in joined.agents.tolist()]
    scene.stepper.tick(scene.now)
    assert all(part.joined is None for part in scene.stepper.take_steps())


@pytest.mark.parametrize("end", ["of the run", "of the connection"])
def test_the_last_outcomes_count_while_a_frame_waits_for_an_added_behavior(end: str) -> None:
    """The simulator has counted them; agents of the added behavior have not acted so far, and stay out."""
    scene = Scene(random.Random(0), ["A"])
    scene.connect(1, FakeSimulator(1, random.Random(1), ("A", "B"), agents=2, steady=True))
    scene.grant_all()
    scene.policies["B"] = FakePolicy()
    scene.send(1)
    scene.tick()
    produced = scene.stepper.behaviors["A"].produced
    scene.stepper.requirements.added = frozenset({"B"})
    del scene.policies["B"]
    scene.send(1)
    scene.stepper.tick(scene.now)
    assert scene.stepper.behaviors["A"].produced == produced, "the frame waits"
    if end == "of the connection":
        scene.stepper.disconnect(1)
    scene.stepper.tick(scene.now, acting=end == "of the connection")
    assert scene.stepper.behaviors["A"].produced == produced + 2
    assert scene.stepper.behaviors["B"].produced == 0


def test_agents_of_an_added_behavior_are_reported_only_once_it_has_weights() -> None:
    """The frame waits, as assembly restarts for the behavior and would miss first observations; others continue."""
    scene = Scene(random.Random(0), ["A"])
    scene.stepper.requirements.added = frozenset({"B"})
    scene.connect(1, FakeSimulator(1, random.Random(1), ("A",), agents=2, steady=True))
    scene.connect(2, FakeSimulator(2, random.Random(2), ("A", "B"), agents=2, steady=True))
    scene.grant_all()
    scene.send(1, 2)
    assert [key for key, *_ in scene.tick().acts] == [1]
    assert [(one.behavior, len(one.rows)) for one in scene.steps] == [("A", 1)]
    assert scene.stepper.requirements.waits_for("A") == (WEIGHTS, "B", "")
    scene.policies["B"] = FakePolicy()
    scene.grant("B", 1000)
    assert [key for key, *_ in scene.tick().acts] == [2]
    assert {one.behavior for one in scene.steps} == {"A", "B"}
    scene.send(1, 2)
    scene.tick()
    scene.check_counts()
    for name in ("A", "B"):
        scene.check_steps(name)


def test_simulators_with_another_spec_than_the_run_has_are_disconnected_and_others_play() -> None:
    """The run may have its spec from another stepping process, or from before this one was restarted."""
    scene = Scene(random.Random(0))
    wrong, right = (FakeSimulator(number, random.Random(number), ("A",), 3) for number in (1, 2))
    wrong.specs = {"A": dataclasses.replace(SPEC, actions=ActionSpec(discrete=(2,)))}
    scene.connect(1, wrong)
    (refused,) = scene.stepper.adopt_specs({"A": SPEC}).items()
    assert (refused[0], refused[1].code) == (1, "specs")
    scene.connect(2, right)
    scene.grant_all()
    scene.send(2)
    assert [key for key, *_ in scene.tick().acts] == [2]
    assert [*scene.stepper.connections] == [2]
    with pytest.raises(RemoteProtocolError, match="got another spec for 'A'"):
        scene.connect(3, wrong)
    assert scene.stepper.adopt_specs({"A": SPEC}) == {}
    scene.stepper.adopt_specs({"A": SPEC, "B": SPEC})
    with pytest.raises(RemoteProtocolError, match="got another spec for 'B'"):
        scene.stepper.connect(4, 4, {"B": wrong.specs["A"]})
