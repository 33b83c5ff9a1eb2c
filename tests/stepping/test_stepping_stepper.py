"""The stepper among simulators that keep books of their own."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.messages.simulator import BehaviorReport, Decisions, Ends, Step
from sparring.pipeline.messages.state import StepAllowance
from sparring.pipeline.messages.steps import BehaviorSteps
from sparring.pipeline.stepping.stepper import Stepper
from sparring.pipeline.stepping.waiting import WEIGHTS, waits_for
from tests.stepping.stepping_fakes import SPEC, FakePolicy, FakeSimulator, Reader
from tests.stepping.stepping_scene import Scene, hosted

IDS = [("A",), ("A", "A?team=1"), ("B", "A?team=2"), ("B",)]


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    ticks=st.integers(1, 60),
    tight=st.booleans(),
    gather=st.sampled_from([1.0, 0.3]),
    carried=st.fixed_dictionaries({"A": st.integers(0, 3), "B": st.integers(0, 3)}),
)
def test_every_step_is_told_once_and_every_answer_comes_back(
    seed: int, ticks: int, tight: bool, gather: float, carried: dict[str, int]
) -> None:
    """Simulators of several teams and behaviors come, go and wait; steps, counts, slots and answers agree.

    However many ticks gather before they are taken, and whatever agents carry from one decision to the next.
    """
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
        scene.wake(take=rng.random() < gather)
    scene.wake()
    scene.check_counts()
    for name in scene.stepper.behaviors:
        scene.check_steps(name)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), simulators=st.integers(1, 5), agents=st.integers(1, 6), granted=st.integers(1, 30))
def test_the_budget_is_overshot_by_one_frame_at_most(seed: int, simulators: int, agents: int, granted: int) -> None:
    """Whatever order frames come in, and however few agents each asks for, production ends within one frame."""
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
        scene.wake()
        for name, behavior in scene.stepper.behaviors.items():
            frame[name] = max(frame[name], *(hosted(simulator, name) for simulator in scene.simulators.values()))
            assert behavior.produced < max(1, allowance[name] + frame[name])


def test_what_is_withheld_is_reported_all_the_same() -> None:
    """At its budget a simulator gets no act, and its outcomes go on to assembly; a permit lets it go on."""
    scene = Scene(random.Random(0), ["A"])
    scene.connect(1, FakeSimulator(1, random.Random(1), agents=3, steady=True))
    scene.grant("A", 3)
    scene.send(1)
    assert len(scene.wake().acts) == 1
    scene.send(1)
    assert not scene.wake().acts
    assert scene.steps[0].reported is not None
    assert scene.steps[0].completed.tolist() == [3]
    backpressured = [scene.stepper.backpressured]
    scene.wake()
    assert scene.steps == ()  # nothing is told twice
    scene.grant("A", 4)
    (answer,) = scene.wake().acts
    assert answer[3] > 0  # seconds withheld
    backpressured.append(scene.stepper.backpressured)
    assert backpressured == [True, False]
    assert scene.stepper.behaviors["A"].produced == 3


def test_a_permit_heard_again_does_not_undo_what_was_given_back() -> None:
    """An allowance returned while no agent lived stays returned until a newer permit comes."""
    scene = Scene(random.Random(0), ["A"])
    scene.connect(1, FakeSimulator(1, random.Random(1), agents=3, steady=True))
    granted = StepAllowance(serial=1, steps=100)
    scene.stepper.grant("A", granted)
    scene.send(1)
    scene.wake()
    scene.disconnect(1)
    scene.wake()
    assert scene.stepper.state()["A"].allowance == 0
    scene.stepper.grant("A", granted)  # the board shows its latest record again at any change
    scene.connect(2, FakeSimulator(2, random.Random(1), agents=3, steady=True))
    scene.send(2)
    assert not scene.wake().acts
    assert scene.stepper.state()["A"].allowance == 0
    scene.stepper.grant("A", StepAllowance(serial=2, steps=100))
    assert scene.wake().acts


def test_a_slow_simulator_delays_no_other() -> None:
    """While one simulator computes, all others step on."""
    scene = Scene(random.Random(0), ["A"])
    for key in range(4):
        scene.connect(key, FakeSimulator(key, random.Random(key), agents=2, steady=True))
    scene.grant("A", 10**6)
    scene.send(0, 1, 2, 3)
    scene.wake()
    for frames in range(1, 20):
        scene.send(0, 1, 2)
        assert {key for key, *_ in scene.wake().acts} == {0, 1, 2}
        assert scene.stepper.behaviors["A"].produced == frames * 6


def test_a_small_budget_serves_the_one_that_has_waited_longest() -> None:
    """Where a permit is smaller than what waits, nobody is passed over for ever."""
    scene = Scene(random.Random(0), ["A"])
    for key in range(6):
        scene.connect(key, FakeSimulator(key, random.Random(key), agents=4, steady=True))
    scene.send(*range(6))
    scene.wake()
    for _ in range(12):
        scene.grant("A", scene.stepper.behaviors["A"].produced + 8)
        acts = scene.wake().acts
        assert len(acts) == 2
        scene.send(*[key for key, *_ in acts])
        scene.wake()
    assert [simulator.sequence for simulator in scene.simulators.values()] == [5] * 6


def test_both_behaviors_of_a_simulator_wait_when_one_is_at_its_budget() -> None:
    """A simulator is answered for all its behaviors or for none; one with only the other behavior goes on."""
    scene = Scene(random.Random(0))
    scene.connect(1, FakeSimulator(1, random.Random(1), ("A", "B"), agents=2, steady=True))
    scene.connect(2, FakeSimulator(2, random.Random(2), ("B",), agents=2, steady=True))
    scene.grant("A", 0)
    scene.grant("B", 1000)
    scene.send(1, 2)
    assert [key for key, *_ in scene.wake().acts] == [2]
    assert scene.policies["A"].calls == []
    scene.grant("A", 1)
    (act,) = (act for _, act, *_ in scene.wake().acts)
    assert {actions.behavior for actions in act.actions} == {"A", "B"}


def test_actions_under_way_count_for_their_budget_though_others_are_asked_for() -> None:
    """A frame without decisions of a behavior at its budget waits too while that behavior's agents are acting."""
    scene = Scene(random.Random(0))
    stepper = scene.stepper
    for key in (1, 2):
        stepper.connect(key, 10 - key, {"A": SPEC, "B": SPEC})
    scene.grant("A", 10)
    scene.grant("B", 1000)
    many = tuple(range(10))
    stepper.receive(1, _step(0, A=many, B=(1,)), 0.0)
    assert len(stepper.wake(0.0).acts) == 1
    stepper.receive(2, _step(0, A=many), 1.0)
    stepper.receive(1, _step(1, B=(1,)), 2.0)  # the ten of A are still acting
    assert [key for key, *_ in stepper.wake(3.0).acts] == [2], "both would overshoot the budget by ten"


def test_missing_or_old_weights_make_agents_wait() -> None:
    """Nobody acts before the first weights, nor with older ones than the permit asks for."""
    scene = Scene(random.Random(0), [])
    scene.connect(1, FakeSimulator(1, random.Random(1), agents=2, steady=True))
    scene.grant("A", 100, version=5)
    scene.send(1)
    assert not scene.wake().acts
    scene.policies["A"] = FakePolicy(version=4)
    assert not scene.wake().acts
    scene.policies["A"].version = 5
    assert scene.wake().acts
    assert scene.readers["A"].versions == [5, 5]


def test_a_disconnect_frees_slots_and_the_actions_under_way() -> None:
    """What a vanished simulator was doing leaves the budget, and its slots are told as lost once."""
    scene = Scene(random.Random(0), ["A"])
    scene.connect(1, FakeSimulator(1, random.Random(1), agents=6, steady=True))
    scene.connect(2, FakeSimulator(2, random.Random(2), agents=6, steady=True))
    scene.grant("A", 6)
    scene.send(1, 2)
    assert [key for key, *_ in scene.wake().acts] == [1]
    assert not scene.wake().acts
    scene.disconnect(1)
    wakes = [scene.wake(take=False), scene.wake()]
    lost = [steps.lost for steps in scene.steps if steps.lost is not None]
    assert [sorted(slots.tolist()) for slots in lost] == [[0, 1, 2, 3, 4, 5]]
    assert [key for wake in wakes for key, *_ in wake.acts] == [2]
    assert scene.stepper.behaviors["A"].running == 6
    scene.disconnect(2)
    scene.wake()
    assert scene.stepper.behaviors["A"].running == 0
    assert scene.stepper.behaviors["A"].table.taken == 0


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_frame_that_came_before_its_link_broke_counts(lockstep: bool) -> None:
    """Outcomes of a frame that stepping has received are recorded though its simulator is gone by then."""
    scene = Scene(random.Random(0), ["A"], lockstep=lockstep)
    scene.connect(1, FakeSimulator(1, random.Random(1), agents=2, steady=True))
    scene.grant("A", 100)
    scene.send(1)
    scene.wake()
    scene.send(1)
    scene.disconnect(1)
    scene.wake()
    assert scene.stepper.behaviors["A"].produced == 2
    scene.check_steps("A")


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), ticks=st.integers(1, 30), lockstep=st.booleans())
def test_a_new_reader_is_told_of_every_live_agent(seed: int, ticks: int, lockstep: bool) -> None:
    """With the first parts after `rejoin`, a reader that knows nothing knows all who live, as under way or new."""
    rng = random.Random(seed)
    scene = Scene(rng, lockstep=lockstep, expected=3)
    for key in range(3):
        scene.connect(key, FakeSimulator(key, random.Random(rng.random()), rng.choice(IDS), 3))
    scene.grant_all()
    for _ in range(ticks):
        scene.send(*[key for key in scene.ready() if rng.random() < 0.7])
        scene.wake()
    before = {name: set(reader.agent_episodes) for name, reader in scene.readers.items()}
    scene.stepper.rejoin()
    scene.send(*scene.ready())
    scene.stepper.wake(scene.now)
    parts = scene.stepper.take_steps()
    assert {part.behavior for part in parts} == set(scene.stepper.behaviors)
    for part in parts:
        table = scene.stepper.behaviors[part.behavior].table
        joined = part.joined
        told = [] if joined is None else joined.slots.tolist()
        assert sorted(told) == np.flatnonzero(table.live).tolist()
        if joined is not None:
            known = before.get(part.behavior, set())
            assert joined.fresh.tolist() == [agent not in known for agent in joined.agents.tolist()]
    scene.stepper.wake(scene.now)
    assert all(part.joined is None for part in scene.stepper.take_steps())


# ---------------------------------------------------------------- lives and groups


def _step(sequence: int, **agents: tuple[int, ...]) -> Step:
    """Decisions of some agents, by behavior."""
    reports = [BehaviorReport(behavior=name, decisions=_decisions(ids)) for name, ids in agents.items()]
    return Step(sequence=sequence, reports=tuple(reports))


def _decisions(agents: tuple[int, ...], groups: tuple[int, ...] | None = None, reward: float = 0.0) -> Decisions:
    n = len(agents)
    return Decisions(
        agents=np.array(agents, np.int64),
        observations=(np.zeros((n, 1), np.float32), np.zeros((n, 1, 2, 2), np.uint8)),
        rewards=np.full(n, reward, np.float32),
        groups=None if groups is None else np.array(groups, np.int64),
    )


def _ends(agents: tuple[int, ...], outcomes: tuple[float, ...] | None = None) -> Ends:
    n = len(agents)
    return Ends(
        agents=np.array(agents, np.int64),
        observations=(np.zeros((n, 1), np.float32), np.zeros((n, 1, 2, 2), np.uint8)),
        rewards=np.zeros(n, np.float32),
        interrupted=np.zeros(n, bool),
        outcomes=None if outcomes is None else np.array(outcomes, np.float32),
    )


def _told(stepper: Stepper) -> BehaviorSteps:
    """What a tick tells of the only behavior."""
    stepper.wake(0.0)
    (steps,) = stepper.take_steps()
    return steps


@pytest.fixture
def stepper() -> Stepper:
    stepper = Stepper({"A": FakePolicy()})
    stepper.connect(1, 5, {"A": SPEC, "A?team=3": SPEC})
    stepper.grant("A", StepAllowance(serial=1, steps=1000))
    return stepper


def test_an_id_that_ends_and_decides_in_one_frame_is_a_new_life_in_the_same_slot(stepper: Stepper) -> None:
    """The end completes the old life's step; the decision completes none."""
    stepper.receive(1, _step(0, A=(8, 9)), 0.0)
    first = _told(stepper)
    report = BehaviorReport(behavior="A", decisions=_decisions((9, 8)), ends=_ends((9,)))
    stepper.receive(1, Step(sequence=1, reports=(report,)), 0.0)
    part = _told(stepper)
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


def test_a_change_of_group_is_told_and_ends_nothing(stepper: Stepper) -> None:
    """An agent that names another group keeps slot and life; group keys of two simulators never meet."""
    stepper.connect(2, 6, {"A": SPEC})
    for key in (1, 2):
        report = BehaviorReport(behavior="A", decisions=_decisions((8, 9), (1, 0)))
        stepper.receive(key, Step(sequence=0, reports=(report,)), 0.0)
    first = _told(stepper).joined
    assert first is not None
    assert len(set(first.groups.tolist())) == 3  # none, and one of each simulator
    assert first.groups.tolist().count(0) == 2
    report = BehaviorReport(behavior="A", decisions=_decisions((8, 9), (1, 1)))
    stepper.receive(1, Step(sequence=1, reports=(report,)), 0.0)
    part = _told(stepper)
    moved = part.joined
    assert moved is not None
    assert (moved.slots.tolist(), moved.fresh.tolist()) == ([1], [False])
    assert moved.agents.tolist() == [first.agents[1]]
    assert moved.groups.tolist() == [first.groups[0]]
    assert part.reported is not None
    assert part.completed.tolist() == [2]
    stepper.receive(1, Step(sequence=2, reports=(report,)), 0.0)
    assert _told(stepper).joined is None


def test_outcomes_that_only_one_simulator_states_are_unsaid_for_the_others(stepper: Stepper) -> None:
    """-1 stands for an outcome that was not said."""
    stepper.connect(2, 6, {"A": SPEC})
    for key in (1, 2):
        stepper.receive(key, _step(0, A=(8,)), 0.0)
    stepper.wake(0.0)
    for key, said in ((1, None), (2, (0.5,))):
        report = BehaviorReport(behavior="A", ends=_ends((8,), said))
        stepper.receive(key, Step(sequence=1, reports=(report,)), 0.0)
    stepper.take_steps()
    wake = stepper.wake(0.0)
    ended = stepper.take_steps()[0].ended
    assert ended is not None
    assert ended.outcomes is not None
    assert ended.outcomes.tolist() == [-1.0, 0.5]
    assert [act.actions for _, act, *_ in wake.acts] == [(), ()]  # nobody decides: the simulators just go on


def test_a_living_behavior_keeps_its_permit(stepper: Stepper) -> None:
    """Only a behavior without agents gives its permit back."""
    stepper.return_unused()
    assert stepper.state()["A"].allowance == 0
    stepper.grant("A", StepAllowance(serial=2, steps=500))
    stepper.receive(1, _step(0, A=(8,)), 0.0)
    stepper.wake(0.0)
    stepper.return_unused()
    assert stepper.state()["A"].allowance == 500


def test_a_reader_refuses_what_was_told_twice() -> None:
    """The reader these tests rely on notices a part that is read twice."""
    scene = Scene(random.Random(0), ["A"])
    scene.connect(1, FakeSimulator(1, random.Random(1), agents=2, steady=True))
    scene.grant("A", 100)
    scene.send(1)
    part = _told(scene.stepper)
    reader = Reader()
    reader.read(part)
    with pytest.raises(AssertionError):
        reader.read(part)


def test_nobody_hears_of_the_agents_of_an_added_behavior_before_it_has_weights() -> None:
    """Else assembly, which starts anew for it, would miss what they saw first; the frame waits, others go on."""
    scene = Scene(random.Random(0), ["A"])
    scene.stepper.added = frozenset({"B"})
    scene.connect(1, FakeSimulator(1, random.Random(1), ("A",), agents=2, steady=True))
    scene.connect(2, FakeSimulator(2, random.Random(2), ("A", "B"), agents=2, steady=True))
    scene.grant_all()
    scene.send(1, 2)
    assert [key for key, *_ in scene.wake().acts] == [1]
    assert [(one.behavior, len(one.rows)) for one in scene.steps] == [("A", 1)]
    assert waits_for(scene.stepper, "A", lockstep=False) == (WEIGHTS, "B", "")
    scene.policies["B"] = FakePolicy()
    scene.grant("B", 1000)
    assert [key for key, *_ in scene.wake().acts] == [2]
    assert {one.behavior for one in scene.steps} == {"A", "B"}
    scene.send(1, 2)
    scene.wake()
    scene.check_counts()
    for name in ("A", "B"):
        scene.check_steps(name)
