"""Agents carry their own numbers from one decision to the next, from their first decision to their end."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.messages.codec import decode, encode
from sparring.pipeline.messages.simulator import BehaviorReport, Decisions, Ends, Step
from sparring.pipeline.messages.state import StepAllowance
from sparring.pipeline.messages.steps import BehaviorSteps
from sparring.pipeline.stepping.agents import SlotTable
from sparring.pipeline.stepping.stepper import Stepper
from tests.stepping.stepping_fakes import REMAINDER, SPEC, FakePolicy, FakeSimulator, carried_on, ticks_of
from tests.stepping.stepping_scene import Scene

NOTHING = [0.0, 0.0, 0.0]


# ---------------------------------------------------------------- slots


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), numbers=st.integers(1, 4))
def test_slots_carry_what_a_dictionary_carries(seed: int, numbers: int) -> None:
    """Each slot holds the numbers of its present episode, zeros at first, while slots are taken and returned."""
    rng = random.Random(seed)
    table, twin = SlotTable(400), dict[int, list[float]]()
    for _ in range(40):
        slots = table.take(rng.choice([0, 1, 1, 2, 20]) if len(twin) < 300 else 0)
        table.begin(slots, 0, 0, 0)
        twin.update({slot: [0.0] * numbers for slot in slots.tolist()})
        some = rng.sample(sorted(twin), rng.randrange(len(twin) + 1))
        table.carried[some] = table.carry(np.array(some, np.int32), numbers) + [rng.randrange(9)] * numbers
        twin.update({slot: table.carried[slot].tolist() for slot in some})
        gone = rng.sample(sorted(twin), rng.randrange(len(twin) + 1) // 2)
        table.give_back(np.array(gone, np.int32))
        again = rng.sample(sorted(set(twin) - set(gone)), rng.randrange(len(twin) - len(gone) + 1) // 4)
        table.begin(np.array(again, np.int32), 0, 0, 0)  # ends and decides again in one frame
        twin.update({slot: [0.0] * numbers for slot in again})
        for slot in gone:
            del twin[slot]
        asked = rng.sample(sorted(twin), len(twin))
        assert table.carry(np.array(asked, np.int32), numbers).tolist() == [twin[slot] for slot in asked]


def test_carry_returns_a_copy() -> None:
    """Writes of a policy to the result do not change the table."""
    table = SlotTable(4)
    slots = table.take(2)
    table.begin(slots, 0, 0, 0)
    table.carry(slots, 2)[:] = 7
    assert not table.carry(slots, 2).any()


# ---------------------------------------------------------------- many agents


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    ticks=st.integers(5, 40),
    lockstep=st.booleans(),
    gather=st.sampled_from([1.0, 0.3]),
    steady=st.booleans(),
)
def test_carried_numbers_stay_with_their_agent_among_many(
    seed: int, ticks: int, lockstep: bool, gather: float, steady: bool
) -> None:
    """Tables grow, slots are reused, simulators connect and disconnect, allowances and weights change."""
    rng = random.Random(seed)
    scene = Scene(rng, lockstep=lockstep, carried={"A": 3, "B": 1})
    ids = [("A",), ("A", "A?team=1"), ("B", "A?team=2")]
    for tick in range(ticks):
        if tick % 5 == 0:
            agents = rng.choice([1, 4, 19])
            simulator = FakeSimulator(tick, random.Random(rng.random()), rng.choice(ids), agents, steady=steady)
            scene.connect(tick, simulator)
        elif len(scene.simulators) > 1 and rng.random() < 0.1:
            scene.disconnect(rng.choice(list(scene.simulators)))
        for name, behavior in scene.stepper.behaviors.items():
            scene.grant(name, behavior.produced + rng.choice([0, 5, 1000]))
        scene.policies["A"].version += rng.random() < 0.2
        scene.send(*[key for key in scene.ready() if lockstep or rng.random() < 0.7])
        scene.tick(take=rng.random() < gather)
    scene.grant_all()
    scene.tick()
    scene.check_counts()
    for name in scene.stepper.behaviors:
        scene.check_steps(name)


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_long_episode_keeps_its_numbers_while_the_table_grows(lockstep: bool) -> None:
    """After 30 decisions an agent carries all 30, although 200 others joined."""
    scene = Scene(random.Random(0), ["A"], lockstep=lockstep, carried={"A": 3})
    scene.connect(0, FakeSimulator(0, random.Random(0), agents=3, steady=True))
    for tick in range(30):
        if tick % 6 == 5:
            scene.connect(tick, FakeSimulator(tick, random.Random(tick), agents=40, steady=True))
        scene.grant_all()
        scene.send(*scene.ready())
        assert scene.tick().acts
    table = scene.stepper.behaviors["A"].table
    assert len(table.live) == 256
    assert table.carried[:3, 0].tolist() == [30, 30, 30]


def test_a_backpressured_agent_carries_nothing_on() -> None:
    """Carried numbers change once, when the agent acts, and not in the ticks before."""
    scene = Scene(random.Random(0), ["A"], carried={"A": 3})
    scene.connect(1, FakeSimulator(1, random.Random(1), agents=2, steady=True))
    table = scene.stepper.behaviors["A"].table
    scene.grant("A", 2)
    scene.send(1)
    scene.tick()
    scene.send(1)
    carried = [table.carried.copy()]
    for _ in range(3):
        assert not scene.tick().acts
        carried.append(table.carried.copy())
    assert all((one == carried[0]).all() for one in carried)
    scene.grant("A", 3)
    assert scene.tick().acts
    assert table.carried[:2, 0].tolist() == [2, 2]


def test_agents_that_wait_for_the_first_weights_begin_with_zeros() -> None:
    """The count of carried numbers is known only with the first weights, when many agents may wait."""
    scene = Scene(random.Random(0), [], carried={"A": 3})
    for key in (1, 2):
        scene.connect(key, FakeSimulator(key, random.Random(key), agents=20, steady=True))
    scene.grant_all()
    scene.send(1, 2)
    assert not scene.tick().acts
    scene.policies["A"] = FakePolicy(carried=3)
    assert len(scene.tick().acts) == 2
    for _ in range(3):
        scene.send(1, 2)
        scene.tick()
    assert scene.stepper.behaviors["A"].table.carried[:40, 0].tolist() == [4.0] * 40


def test_newer_weights_and_a_new_reader_keep_carried_numbers() -> None:
    """Carried numbers end with their agent, not with a version or with the service that reads the steps."""
    scene = Scene(random.Random(0), ["A"], carried={"A": 3})
    scene.connect(1, FakeSimulator(1, random.Random(1), agents=1, steady=True))
    scene.grant_all()
    before = []
    for version in (1, 2, 5, 6):
        scene.policies["A"].version = version
        if version == 5:
            scene.stepper.reintroduce_agents()
        scene.send(1)
        scene.tick()
        (steps,) = scene.steps
        before.append(carried_of(steps)[0][0])
    assert before == [0, 1, 2, 3]


# ---------------------------------------------------------------- episodes, frame by frame


def carried_of(steps: BehaviorSteps) -> list[list[float]]:
    """Returns what each agent that acted carried to its decision, row by row."""
    assert steps.acted is not None
    assert steps.acted.carried is not None
    rows: list[list[float]] = steps.acted.carried.tolist()
    return rows


class SteppedFrames:
    """Feeds a stepper with agents that observe their id and the number of their frame."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self._sequences: dict[int, int] = {}

    def receive(self, key: int, *agents: int, ended: tuple[int, ...] = ()) -> None:
        """Sends a frame of simulator `key` with decisions of `agents` and ends of `ended`."""
        sequence = self._sequences.get(key, 0)
        self._sequences[key] = sequence + 1
        decisions = Decisions(
            agents=np.array(agents, np.int64),
            observations=_observations([observed(agent, sequence) for agent in agents]),
            rewards=np.zeros(len(agents), np.float32),
        )
        ends = Ends(
            agents=np.array(ended, np.int64),
            observations=_observations([0] * len(ended)),
            rewards=np.zeros(len(ended), np.float32),
            interrupted=np.zeros(len(ended), bool),
        )
        report = BehaviorReport(behavior="A", decisions=decisions, ends=ends)
        self.stepper.receive(key, Step(sequence=sequence, reports=(report,)), 0.0)

    def tick(self) -> BehaviorSteps:
        """Runs a tick; returns its steps."""
        self.stepper.tick(0.0)
        (steps,) = self.stepper.take_steps()
        return steps

    def carried(self) -> list[list[float]]:
        """Runs a tick; returns what its acting agents carried to it."""
        return carried_of(self.tick())


def observed(agent: int, sequence: int) -> int:
    """Returns the number that an agent observes in a frame."""
    return 50 * sequence + agent


def after(agent: int, *sequences: int) -> list[float]:
    """Returns what an agent carries after decisions in these frames."""
    carried = NOTHING
    for sequence in sequences:
        carried = carried_on(carried, observed(agent, sequence))
    return carried


def _observations(values: list[int]) -> tuple[Any, ...]:
    pixels = np.array([value % 256 for value in values], np.uint8).reshape(-1, 1, 1, 1)
    return np.array(values, np.float32).reshape(-1, 1), np.broadcast_to(pixels, (len(values), 1, 2, 2)).copy()


def made(*keys: int, lockstep: bool = False, carried: int = 3) -> SteppedFrames:
    stepper = Stepper({"A": FakePolicy(carried=carried)}, lockstep=lockstep)
    for key in keys:
        stepper.connect(key, key, {"A": SPEC})
    stepper.grant("A", StepAllowance(serial=1, steps=10**6))
    return SteppedFrames(stepper)


def test_rows_hold_what_agents_carried_before_their_decisions() -> None:
    """An agent's first row is zeros; each later row is what its earlier decisions left."""
    frames = made(1)
    frames.receive(1, 8, 9)
    assert frames.carried() == [NOTHING, NOTHING]
    frames.receive(1, 9, 8)
    assert frames.carried() == [after(9, 0), after(8, 0)]
    frames.receive(1, 9, 8)
    assert frames.carried() == [after(9, 0, 1), after(8, 0, 1)]
    frames.receive(1, 8)
    assert frames.carried() == [after(8, 0, 1, 2)]
    frames.receive(1, 7, 9)
    assert frames.carried() == [NOTHING, after(9, 0, 1, 2)]
    assert after(9, 0, 1) == [2.0, (9 + 59) % REMAINDER, 59.0]


@pytest.mark.parametrize("lockstep", [False, True])
def test_rows_of_several_simulators_carry_their_own_numbers(lockstep: bool) -> None:
    """Agents with the same id in two simulators carry different numbers."""
    frames = made(1, 2, lockstep=lockstep)
    frames.receive(1, 9, 8)
    frames.receive(2, 8)
    frames.tick()
    frames.receive(2, 8, 9)
    frames.receive(1, 8, 9)
    got = {}
    part = frames.tick()
    (tick,) = ticks_of(part)
    slots = tick["reported"].slots if tick["acted"].slots is None else tick["acted"].slots
    table = frames.stepper.behaviors["A"].table
    for slot, carried in zip(slots.tolist(), carried_of(part), strict=True):
        key = int(table.simulators[slot])
        got.setdefault(key, []).append(carried)
    assert {key: sorted(rows) for key, rows in got.items()} == {
        1: sorted([after(8, 0), after(9, 0)]),
        2: sorted([after(8, 0), NOTHING]),
    }


def test_gathered_ticks_keep_the_numbers_carried_to_each() -> None:
    """Later decisions do not change gathered rows, and the codec keeps the rows as they are."""
    frames = made(1)
    for _ in range(4):
        frames.receive(1, 8, 9)
        frames.stepper.tick(0.0)
    (steps,) = frames.stepper.take_steps()
    expected = [after(agent, *range(sequence)) for sequence in range(4) for agent in (8, 9)]
    assert carried_of(steps) == expected
    assert carried_of(decode([bytes(frame) for frame in encode(steps)])) == expected


@pytest.mark.parametrize("lockstep", [False, True])
def test_an_id_that_ends_and_decides_in_one_frame_begins_with_zeros(lockstep: bool) -> None:
    """It keeps its slot and nothing of the former episode; other agents keep their numbers."""
    frames = made(1, lockstep=lockstep)
    frames.receive(1, 8, 9)
    frames.tick()
    frames.receive(1, 8, 9, ended=(9,))
    part = frames.tick()
    assert part.joined is not None
    assert part.joined.slots.tolist() == [1]
    assert carried_of(part) == [after(8, 0), NOTHING]
    frames.receive(1, 8, 9)
    assert frames.carried() == [after(8, 0, 1), after(9, 1)]


def test_a_reused_slot_begins_with_zeros_also_within_one_tick() -> None:
    """Neither an agent's end nor another simulator's agent leaves numbers in a slot."""
    frames = made(1, 2)
    frames.receive(1, 8, 9)
    frames.tick()
    frames.receive(1, 9, ended=(8,))
    frames.receive(2, 4)
    part = frames.tick()
    assert part.joined is not None
    assert part.joined.slots.tolist() == [0], "the slot that was freed in this tick"
    assert carried_of(part) == [after(9, 0), NOTHING]
    frames.receive(2, ended=(4,))
    frames.stepper.tick(0.0)
    frames.stepper.take_steps()
    frames.receive(1, 9, 5)
    assert frames.carried() == [after(9, 0, 1), NOTHING]


@pytest.mark.parametrize("is_reported", [False, True])
@pytest.mark.parametrize("lockstep", [False, True])
def test_agents_of_a_reconnected_simulator_begin_with_zeros(is_reported: bool, lockstep: bool) -> None:
    """The ids are the same; the stepper may or may not have noticed the broken connection before."""
    frames = made(1, 2, lockstep=lockstep)
    for _ in range(2):
        frames.receive(1, 8, 9)
        frames.receive(2, 7)
        frames.tick()
    if is_reported:
        frames.stepper.disconnect(1)
        frames.stepper.tick(0.0)
        frames.stepper.take_steps()
    former = frames.stepper.connect(3, 1, {"A": SPEC})
    assert former == (None if is_reported else 1)
    frames.receive(2, 7)
    frames.receive(3, 8, 9)
    assert sorted(frames.carried()) == sorted([after(7, 0, 1), NOTHING, NOTHING])
    frames.receive(2, 7)
    frames.receive(3, 8, 9)
    assert sorted(frames.carried()) == sorted([after(7, 0, 1, 2), after(8, 0), after(9, 0)])


def test_steps_without_memory_have_no_carried_column() -> None:
    """The encoded record has no such column either."""
    frames = made(1, carried=0)
    for _ in range(3):
        frames.receive(1, 8, 9)
        steps = decode([bytes(frame) for frame in encode(frames.tick())])
        assert steps.acted.carried is None
    assert frames.stepper.behaviors["A"].table.carried.shape == (16, 0)


def test_each_behavior_carries_what_its_policy_needs() -> None:
    """One behavior has a memory, and the other has none."""
    scene = Scene(random.Random(0), carried={"B": 2})
    scene.connect(1, FakeSimulator(1, random.Random(1), ("A", "B"), agents=20, steady=True))
    scene.grant_all()
    for count in range(3):
        scene.send(1)
        scene.tick()
        carried = {steps.behavior: steps.acted and steps.acted.carried for steps in scene.steps}
        assert carried["A"] is None
        assert carried["B"] is not None
        assert carried["B"][:, 0].tolist() == [count] * 20
