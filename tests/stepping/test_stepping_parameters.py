"""Environment parameters that simulators receive, and the resets that lessons cause."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.messages.simulator import Act, Reset, Sampler
from sparring.pipeline.messages.state import LessonsState, StepAllowance
from sparring.pipeline.stepping.parameters import RunParameters
from tests.stepping.stepping_fakes import FakeSimulator
from tests.stepping.stepping_scene import Scene

UNIFORM = Sampler(kind="uniform", values=(0.0, 1.0), seed=-1)
GAUSSIAN = Sampler(kind="gaussian", values=(5.0, 0.1), seed=-1)


def state(serial: int, resets: int = 0, **numbers: int) -> LessonsState:
    """Returns lessons in which every lesson but a first one began with change `serial`."""
    since = {name: serial if number else 0 for name, number in numbers.items()}
    return LessonsState(serial=serial, numbers=numbers, since=since, resets=resets)


def plain(samplers: dict[str, Sampler]) -> dict[str, tuple[str, tuple[float, ...], int]]:
    return {name: (one.kind, one.values, one.seed) for name, one in samplers.items()}


# ---------------------------------------------------------------- the values


def test_every_parameter_has_a_value_and_a_sampler_its_first_sample() -> None:
    values, samplers = RunParameters({"mass": [2.0], "wind": [UNIFORM]}, seed=3).of(1)
    assert values["mass"] == 2.0
    assert values["wind"] == next(samplers["wind"].samples())
    assert set(samplers) == {"wind"}


def test_every_sampler_simulator_and_lesson_has_its_own_int32_seed() -> None:
    parameters = RunParameters({"a": [UNIFORM, UNIFORM], "b": [UNIFORM, UNIFORM]}, seed=3)
    seeds = [one.seed for simulator in range(20) for one in parameters.of(simulator)[1].values()]
    parameters.adopt(state(1, a=1, b=1))
    seeds += [one.seed for simulator in range(20) for one in parameters.of(simulator)[1].values()]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    again = RunParameters({"b": [UNIFORM, UNIFORM], "a": [UNIFORM, UNIFORM]}, seed=3)
    assert again.of(0)[1]["a"].seed == seeds[0], "the order of the file does not matter"


def test_a_configured_seed_counts_up_with_the_simulators() -> None:
    written = RunParameters({"a": [Sampler(kind="uniform", values=(0.0, 1.0), seed=2**31 - 1)]}, seed=3)
    assert [written.of(simulator)[1]["a"].seed for simulator in range(3)] == [2**31 - 1, 0, 1]


def test_only_changed_parameters_are_sent_again() -> None:
    parameters = RunParameters({"a": [1.0, 2.0, GAUSSIAN], "b": [3.0, 4.0], "c": [5.0]})
    assert parameters.has_curricula
    assert not parameters.known
    assert parameters.adopt(state(0, a=0, b=0))
    assert parameters.known
    assert parameters.of(0)[0] == {"a": 1.0, "b": 3.0, "c": 5.0}
    assert not parameters.adopt(state(0, a=0, b=0))
    assert parameters.adopt(LessonsState(serial=2, numbers={"a": 1, "b": 1}, since={"a": 1, "b": 2}))
    assert parameters.of(0, 0)[0] == {"a": 2.0, "b": 4.0}
    assert parameters.of(0, 1)[0] == {"b": 4.0}
    assert parameters.of(0, 2)[0] == {}
    assert parameters.adopt(LessonsState(serial=3, numbers={"a": 2, "b": 1}, since={"a": 3, "b": 2}))
    values, samplers = parameters.of(0, 2)
    assert plain(samplers).keys() == values.keys() == {"a"}
    assert not parameters.adopt(state(1, a=1, b=0)), "lessons never go back"


def test_without_curricula_parameters_are_known_at_once() -> None:
    parameters = RunParameters({"a": [1.0], "b": [UNIFORM]})
    assert parameters.known
    assert not parameters.has_curricula
    assert parameters.serial == 0
    assert not parameters.resets(0)


def test_a_lesson_beyond_the_settings_is_their_last_one() -> None:
    parameters = RunParameters({"a": [1.0, 2.0]})
    parameters.adopt(state(4, a=7))
    assert parameters.of(0)[0] == {"a": 2.0}


# ---------------------------------------------------------------- the stepper


class ResettableSimulator(FakeSimulator):
    """A simulator that can be reset, and records its parameters.

    Attributes:
        serial: of the lessons that it should know.
        has: parameters that it received.
        resets: count of received Resets.
    """

    serial = 0
    resets = 0
    has: dict[str, float]

    def take(self, act: Act | Reset) -> None:
        if isinstance(act, Act):
            super().take(act)
            self.has = self.has | act.parameters
            return
        assert self.waiting
        assert act.seed is None
        self.waiting, self.asked = False, {}
        self.resets += 1
        self.has = dict(act.parameters)
        for text, agents in self.living.items():
            self.past += [(text, agent) for agent in agents.values()]
            agents.clear()


def scene_with(rng: random.Random, *, lockstep: bool, simulators: int = 3) -> Scene:
    parameters = RunParameters({"level": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "still": [7.0]})
    parameters.adopt(state(0, level=0))
    scene = Scene(rng, lockstep=lockstep, expected=simulators, parameters=parameters)
    for key in range(simulators):
        connect(scene, key, ResettableSimulator(key, rng, ("A", "B?team=1")))
    scene.grant_all()
    return scene


def connect(scene: Scene, key: int, simulator: ResettableSimulator) -> ResettableSimulator:
    scene.connect(key, simulator)
    simulator.has = dict(scene.stepper.begin_episodes(key, 1).parameters)
    simulator.serial = scene.stepper.parameters.serial
    return simulator


def simulators_of(scene: Scene) -> list[ResettableSimulator]:
    return [one for one in [*scene.simulators.values(), *scene.gone] if isinstance(one, ResettableSimulator)]


def tick(scene: Scene) -> list[type[Act | Reset]]:
    """Runs a tick; checks the lessons of joining agents, and the parameters of answered simulators."""
    serials = {simulator.number: simulator.serial for simulator in simulators_of(scene)}
    done = scene.tick()
    present = scene.stepper.parameters.serial
    for steps in scene.steps:
        if steps.joined is not None:
            assert steps.joined.lessons is not None
            assert steps.joined.lessons.tolist() == [serials[number] for number in steps.joined.simulators.tolist()]
    for key, *_ in done.acts:
        simulator = scene.simulators[key]
        assert isinstance(simulator, ResettableSimulator)
        simulator.serial = present
        assert simulator.has == {"level": float(present), "still": 7.0}
    return [type(answer) for _, answer, *_ in done.acts]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), lockstep=st.booleans())
def test_lessons_arrive_with_the_next_answer_and_every_step_is_counted(seed: int, lockstep: bool) -> None:
    """Simulators are reset, join late and disconnect meanwhile; each episode names the lessons of its start."""
    rng = random.Random(seed)
    scene = scene_with(rng, lockstep=lockstep)
    resets = serial = 0
    late = 3
    for _ in range(40):
        if serial < 5 and rng.random() < 0.2:
            serial += 1
            resets = serial if rng.random() < 0.5 else resets
            scene.stepper.parameters.adopt(state(serial, resets, level=serial))
        if rng.random() < 0.05 and not lockstep:
            connect(scene, late, ResettableSimulator(late, rng, ("A",)))
            late += 1
        if rng.random() < 0.05 and len(scene.simulators) > 1 and not lockstep:
            scene.disconnect(rng.choice(list(scene.simulators)))
        ready = scene.ready()
        scene.send(*(ready if lockstep else [key for key in ready if rng.random() < 0.7]))
        tick(scene)
        scene.grant_all()  # returned where a reset left a behavior without agents
    scene.send(*scene.ready())
    tick(scene)
    scene.check_counts()
    for name in ("A", "B"):
        scene.check_steps(name)
    assert all(behavior.running == sum(_pending(scene, name)) for name, behavior in scene.stepper.behaviors.items())


def _pending(scene: Scene, name: str) -> list[int]:
    """Returns the count of actions under way in each simulator that is not waiting for an answer."""
    return [c.pending.get(name, 0) for c in scene.stepper.connections.values() if c.frame is None and not c.is_closed]


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_reset_replaces_the_act_once(lockstep: bool) -> None:
    """Outcomes in the frame still count, and open steps are reported lost in the same tick."""
    scene = scene_with(random.Random(1), lockstep=lockstep)
    scene.send(0, 1, 2)
    assert tick(scene) == [Act] * 3
    scene.send(0, 1, 2)
    scene.stepper.parameters.adopt(state(1, 1, level=1))
    produced = {name: behavior.produced for name, behavior in scene.stepper.behaviors.items()}
    assert tick(scene) == [Reset] * 3
    assert any(behavior.produced > produced[name] for name, behavior in scene.stepper.behaviors.items())
    assert all(behavior.table.taken == behavior.running == 0 for behavior in scene.stepper.behaviors.values())
    scene.grant_all()  # returned where a behavior had no agents
    for _ in range(3):
        scene.send(0, 1, 2)
        assert tick(scene) == [Act] * 3
    scene.stepper.parameters.adopt(LessonsState(serial=2, numbers={"level": 2}, since={"level": 2}, resets=1))
    scene.send(0, 1, 2)
    assert tick(scene) == [Act] * 3
    assert [simulator.resets for simulator in simulators_of(scene)] == [1, 1, 1]


@pytest.mark.parametrize("lockstep", [False, True])
def test_an_allowance_waits_for_the_lessons_that_it_names(lockstep: bool) -> None:
    scene = scene_with(random.Random(2), lockstep=lockstep, simulators=1)
    for name in scene.stepper.behaviors:
        scene.serial += 1
        scene.stepper.grant(name, StepAllowance(serial=scene.serial, steps=10**9, lessons=1))
    scene.send(0)
    assert tick(scene) == []
    scene.stepper.parameters.adopt(state(1, 1, level=1))
    assert tick(scene) == [Reset]


def test_without_curricula_steps_have_no_lessons() -> None:
    scene = Scene(random.Random(3))
    scene.connect(0, FakeSimulator(0, random.Random(3)))
    scene.grant_all()
    scene.send(0)
    scene.tick()
    assert scene.steps[0].joined is not None
    assert scene.steps[0].joined.lessons is None
