"""Lockstep acts in rounds whose order does not depend on the order of arrival."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stepping.stepping_fakes import FakeSimulator
from tests.stepping.stepping_scene import Scene

IDS = [("A",), ("A", "A?team=1"), ("B", "A?team=2"), ("B",)]


def plain(value: Any) -> Any:
    """Returns a record as plain values that can be compared."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


def run(seed: int, rounds: int, order: random.Random, simulators: int, carried: int) -> tuple[list[Any], list[Any]]:
    """Returns all parts and acts of a run whose frames arrive in a random order, with idle ticks between."""
    rng = random.Random(seed)
    scene = Scene(rng, lockstep=True, expected=simulators, carried={"A": carried})
    numbers = list(range(simulators))
    seeds = [rng.random() for _ in numbers]
    ids = [rng.choice(IDS) for _ in numbers]
    order.shuffle(numbers)
    for number in numbers:  # the key of a connection follows its arrival, its number does not
        scene.connect(len(scene.simulators), FakeSimulator(number, random.Random(seeds[number]), ids[number], 4))
    by_key = {key: simulator.number for key, simulator in scene.simulators.items()}
    parts, acts = [], []
    for index in range(rounds):
        for name, behavior in scene.stepper.behaviors.items():
            scene.grant(name, behavior.produced + 3 * (index % 3))
        ready = scene.ready()
        order.shuffle(ready)
        for position, key in enumerate(ready):
            scene.send(key)
            if position < len(ready) - 1:
                scene.tick()
                assert not scene.steps, "a round begins once all frames have arrived"
        result = scene.tick()
        parts += [plain(steps) for steps in scene.steps]
        acts.append(sorted((by_key[key], plain(act)["actions"]) for key, act, *_ in result.acts))
        admitted = {key for key, *_ in result.acts}
        assert admitted in (set(), set(scene.simulators)), "all act or none"
    assert scene.stepper.requirements.deterministic
    scene.check_counts()
    for part in parts:
        part.pop("ticks")
    return parts, acts


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    order=st.integers(0, 2**32),
    rounds=st.integers(1, 12),
    simulators=st.integers(1, 4),
    carried=st.sampled_from([0, 3]),
)
def test_the_order_of_arrival_changes_nothing(
    seed: int, order: int, rounds: int, simulators: int, carried: int
) -> None:
    """The same frames in another order give the same parts and acts."""
    one, other = (run(seed, rounds, random.Random(chance), simulators, carried) for chance in (0, order))
    assert one == other


def test_rows_are_sorted_and_answers_keep_each_simulators_order() -> None:
    """A forward pass sorts simulators by number and agents by id; each simulator gets its own order."""
    scene = Scene(random.Random(0), ["A"], lockstep=True, expected=2)
    scene.connect(1, FakeSimulator(9, random.Random(1), agents=5, steady=True))
    scene.connect(2, FakeSimulator(4, random.Random(2), agents=5, steady=True))
    scene.grant("A", 1000)
    for _ in range(3):
        scene.send(1, 2)
        joined_rows = [(s.number, agent.agent, agent.seen) for s in scene.simulators.values() for agent in s.asked["A"]]
        scene.tick()  # each simulator checks its own answer
        (steps,) = scene.steps
        assert steps.acted is not None
        assert steps.acted.continuous is not None
        numbers = steps.acted.continuous[:, 0].tolist()
        assert numbers == [seen for _, _, seen in sorted(joined_rows)]


def test_the_first_round_waits_for_all_simulators_of_the_supervisor() -> None:
    """No agent acts before the expected number of simulators has sent a first frame."""
    scene = Scene(random.Random(0), ["A"], lockstep=True, expected=2)
    scene.connect(1, FakeSimulator(1, random.Random(1), agents=1, steady=True))
    scene.send(1)
    scene.tick()
    assert not scene.steps
    scene.connect(2, FakeSimulator(2, random.Random(2), agents=1, steady=True))
    scene.tick()
    assert not scene.steps
    scene.grant("A", 1000)
    scene.send(2)
    assert len(scene.tick().acts) == 2


def test_one_behavior_at_its_budget_holds_the_whole_round() -> None:
    """All simulators act together or wait together, with their outcomes recorded."""
    scene = Scene(random.Random(0), lockstep=True, expected=2)
    scene.connect(1, FakeSimulator(1, random.Random(1), ("A",), agents=2, steady=True))
    scene.connect(2, FakeSimulator(2, random.Random(2), ("B",), agents=2, steady=True))
    scene.grant("A", 1000)
    scene.grant("B", 2)
    scene.send(1, 2)
    assert len(scene.tick().acts) == 2
    scene.send(1, 2)
    assert not scene.tick().acts
    assert [scene.stepper.behaviors[name].produced for name in ("A", "B")] == [2, 2]
    scene.grant("B", 3)
    assert len(scene.tick().acts) == 2


def test_a_behavior_at_its_budget_holds_the_round_without_agents() -> None:
    """Its learner waits for a flush, whose order relative to other simulators' steps must be fixed."""
    scene = Scene(random.Random(0), lockstep=True, expected=2)
    scene.connect(1, FakeSimulator(1, random.Random(1), ("A",), agents=2, steady=True))
    scene.connect(2, FakeSimulator(2, random.Random(2), ("B",), agents=0, steady=True))
    scene.grant("A", 1000)
    scene.send(1, 2)
    assert len(scene.tick().acts) == 2, "a behavior without an allowance has used up none"
    scene.grant("B", 0)
    scene.send(1, 2)
    assert not scene.tick().acts
    scene.grant("B", 1)
    assert len(scene.tick().acts) == 2


def test_a_disconnected_simulator_ends_determinism_and_not_the_run() -> None:
    """The other simulators continue, and the stepper no longer reports that it is deterministic."""
    scene = Scene(random.Random(0), ["A"], lockstep=True, expected=2)
    for key in (1, 2):
        scene.connect(key, FakeSimulator(key, random.Random(key), agents=2, steady=True))
    scene.grant("A", 1000)
    scene.send(1, 2)
    scene.tick()
    scene.send(2)
    assert not scene.tick().acts
    scene.disconnect(1)
    result = scene.tick()
    assert [key for key, *_ in result.acts] == [2]
    assert not scene.stepper.requirements.deterministic
    scene.send(2)
    assert scene.tick().acts
