"""What simulators are told of environment parameters, and when they are reset for them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.messages.samplers import samples
from sparring.pipeline.messages.simulator import Act, Reset, Sampler
from sparring.pipeline.messages.state import LessonsState, StepAllowance
from sparring.pipeline.stepping.parameters import RunParameters
from tests.stepping.stepping_fakes import FakeSimulator
from tests.stepping.stepping_scene import Scene

UNIFORM = Sampler(kind="uniform", values=(0.0, 1.0), seed=-1)
GAUSSIAN = Sampler(kind="gaussian", values=(5.0, 0.1), seed=-1)


def state(serial: int, resets: int = 0, **numbers: int) -> LessonsState:
    """Lessons of which the last change began all that are not the first."""
    since = {name: serial if number else 0 for name, number in numbers.items()}
    return LessonsState(serial=serial, numbers=numbers, since=since, resets=resets)


def plain(samplers: dict[str, Sampler]) -> dict[str, tuple[str, tuple[float, ...], int]]:
    return {name: (one.kind, one.values, one.seed) for name, one in samplers.items()}


# ---------------------------------------------------------------- the values


def test_all_parameters_have_a_number_and_samplers_their_first_draw() -> None:
    told = RunParameters({"mass": [2.0], "wind": [UNIFORM]}, seed=3).all(1)
    assert told.parameters["mass"] == 2.0
    assert told.parameters["wind"] == next(samples(told.samplers["wind"]))
    assert set(told.samplers) == {"wind"}


def test_each_sampler_in_each_simulator_and_lesson_has_a_seed_of_its_own_that_fits_an_int32() -> None:
    parameters = RunParameters({"a": [UNIFORM, UNIFORM], "b": [UNIFORM, UNIFORM]}, seed=3)
    seeds = [one.seed for simulator in range(20) for one in parameters.all(simulator).samplers.values()]
    parameters.adopt(state(1, a=1, b=1))
    seeds += [one.seed for simulator in range(20) for one in parameters.all(simulator).samplers.values()]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    again = RunParameters({"b": [UNIFORM, UNIFORM], "a": [UNIFORM, UNIFORM]}, seed=3)
    assert again.all(0).samplers["a"].seed == seeds[0], "the order of the file does not matter"


def test_a_sampler_with_a_seed_of_its_own_has_it_in_the_first_simulator_and_the_next_in_the_others() -> None:
    written = RunParameters({"a": [Sampler(kind="uniform", values=(0.0, 1.0), seed=2**31 - 1)]}, seed=3)
    assert [written.all(simulator).samplers["a"].seed for simulator in range(3)] == [2**31 - 1, 0, 1]


def test_only_what_has_changed_is_told_again() -> None:
    parameters = RunParameters({"a": [1.0, 2.0, GAUSSIAN], "b": [3.0, 4.0], "c": [5.0]})
    assert parameters.taught
    assert not parameters.known
    assert parameters.adopt(state(0, a=0, b=0))
    assert parameters.known
    assert parameters.all(0).parameters == {"a": 1.0, "b": 3.0, "c": 5.0}
    assert not parameters.adopt(state(0, a=0, b=0))
    assert parameters.adopt(LessonsState(serial=2, numbers={"a": 1, "b": 1}, since={"a": 1, "b": 2}))
    assert parameters.since(0, 0).parameters == {"a": 2.0, "b": 4.0}
    assert parameters.since(1, 0).parameters == {"b": 4.0}
    assert parameters.since(2, 0).parameters == {}
    assert parameters.adopt(LessonsState(serial=3, numbers={"a": 2, "b": 1}, since={"a": 3, "b": 2}))
    told = parameters.since(2, 0)
    assert plain(told.samplers).keys() == told.parameters.keys() == {"a"}
    assert not parameters.adopt(state(1, a=1, b=0)), "lessons never go back"


def test_without_curricula_nothing_has_to_be_heard() -> None:
    parameters = RunParameters({"a": [1.0], "b": [UNIFORM]})
    assert parameters.known
    assert not parameters.taught
    assert parameters.serial == 0
    assert not parameters.resets(0)


def test_a_lesson_that_the_settings_no_longer_have_is_the_last_one() -> None:
    parameters = RunParameters({"a": [1.0, 2.0]})
    parameters.adopt(state(4, a=7))
    assert parameters.all(0).parameters == {"a": 2.0}


# ---------------------------------------------------------------- the stepper


class Pupil(FakeSimulator):
    """A simulator that can be reset, and notes what it is told.

    Attributes:
        serial: of the lessons that it should know.
        has: parameters as told.
        resets: answers that were a Reset.
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


def scene_with(rng: random.Random, *, lockstep: bool, pupils: int = 3) -> Scene:
    scene = Scene(rng, lockstep=lockstep, expected=pupils)
    scene.stepper.parameters = RunParameters({"level": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "still": [7.0]})
    scene.stepper.parameters.adopt(state(0, level=0))
    for key in range(pupils):
        enter(scene, key, Pupil(key, rng, ("A", "B?team=1")))
    scene.grant_all()
    return scene


def enter(scene: Scene, key: int, pupil: Pupil) -> Pupil:
    scene.connect(key, pupil)
    pupil.has = dict(scene.stepper.begin(key, 1).parameters)
    pupil.serial = scene.stepper.parameters.serial
    return pupil


def pupils_of(scene: Scene) -> list[Pupil]:
    return [one for one in [*scene.simulators.values(), *scene.gone] if isinstance(one, Pupil)]


def wake(scene: Scene) -> list[type[Act | Reset]]:
    """Wakes the stepper; who joins has the lessons that its simulator had; who is answered has the present ones."""
    serials = {pupil.number: pupil.serial for pupil in pupils_of(scene)}
    done = scene.wake()
    present = scene.stepper.parameters.serial
    for steps in scene.steps:
        if steps.joined is not None:
            assert steps.joined.lessons is not None
            assert steps.joined.lessons.tolist() == [serials[number] for number in steps.joined.simulators.tolist()]
    for key, *_ in done.acts:
        pupil = scene.simulators[key]
        assert isinstance(pupil, Pupil)
        pupil.serial = present
        assert pupil.has == {"level": float(present), "still": 7.0}
    return [type(answer) for _, answer, *_ in done.acts]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), lockstep=st.booleans())
def test_lessons_come_with_the_next_answer_and_no_step_is_lost_from_the_books(seed: int, lockstep: bool) -> None:
    """Also where simulators are reset, come late, and go; and it is told which lessons an episode began in."""
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
            enter(scene, late, Pupil(late, rng, ("A",)))
            late += 1
        if rng.random() < 0.05 and len(scene.simulators) > 1 and not lockstep:
            scene.disconnect(rng.choice(list(scene.simulators)))
        ready = scene.ready()
        scene.send(*(ready if lockstep else [key for key in ready if rng.random() < 0.7]))
        wake(scene)
        scene.grant_all()  # given back where a reset has left a behavior without agents
    scene.send(*scene.ready())
    wake(scene)
    scene.check_counts()
    for name in ("A", "B"):
        scene.check_steps(name)
    assert all(behavior.running == sum(_pending(scene, name)) for name, behavior in scene.stepper.behaviors.items())


def _pending(scene: Scene, name: str) -> list[int]:
    """Actions under way of each simulator that is not waiting for us."""
    return [c.pending.get(name, 0) for c in scene.stepper.connections.values() if c.frame is None and not c.gone]


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_reset_takes_the_place_of_the_act_and_comes_once(lockstep: bool) -> None:
    """The outcomes in the frame still count; what had been open is told as lost in the same tick."""
    scene = scene_with(random.Random(1), lockstep=lockstep)
    scene.send(0, 1, 2)
    assert wake(scene) == [Act] * 3
    scene.send(0, 1, 2)
    scene.stepper.parameters.adopt(state(1, 1, level=1))
    produced = {name: behavior.produced for name, behavior in scene.stepper.behaviors.items()}
    assert wake(scene) == [Reset] * 3
    assert any(behavior.produced > produced[name] for name, behavior in scene.stepper.behaviors.items())
    assert all(behavior.table.taken == behavior.running == 0 for behavior in scene.stepper.behaviors.values())
    scene.grant_all()  # given back where a behavior had no agents
    for _ in range(3):
        scene.send(0, 1, 2)
        assert wake(scene) == [Act] * 3
    scene.stepper.parameters.adopt(LessonsState(serial=2, numbers={"level": 2}, since={"level": 2}, resets=1))
    scene.send(0, 1, 2)
    assert wake(scene) == [Act] * 3
    assert [pupil.resets for pupil in pupils_of(scene)] == [1, 1, 1]


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_permit_waits_for_the_lessons_that_it_names(lockstep: bool) -> None:
    scene = scene_with(random.Random(2), lockstep=lockstep, pupils=1)
    for name in scene.stepper.behaviors:
        scene.serial += 1
        scene.stepper.grant(name, StepAllowance(serial=scene.serial, steps=10**9, lessons=1))
    scene.send(0)
    assert wake(scene) == []
    scene.stepper.parameters.adopt(state(1, 1, level=1))
    assert wake(scene) == [Reset]


def test_without_curricula_nothing_is_told_of_lessons() -> None:
    scene = Scene(random.Random(3))
    scene.connect(0, FakeSimulator(0, random.Random(3)))
    scene.grant_all()
    scene.send(0)
    scene.wake()
    assert scene.steps[0].joined is not None
    assert scene.steps[0].joined.lessons is None
