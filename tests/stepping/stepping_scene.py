"""A stepper among fake simulators, with everything that leaves it read and compared."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping

from sparring.pipeline.messages.state import StepAllowance
from sparring.pipeline.messages.steps import BehaviorSteps
from sparring.pipeline.specs import BehaviorId
from sparring.pipeline.stepping.stepper import Stepper, TickResult
from tests.stepping.stepping_fakes import FakePolicy, FakeSimulator, Reader

MUCH = 10**9


class Scene:
    """Drives a stepper by hand.

    Args:
        rng: for the simulators.
        names: behavior names that have a policy.
        lockstep: act in rounds.
        expected: simulators of the first round.
        carried: numbers that agents of each behavior name carry; none where it is not named.
    """

    def __init__(
        self,
        rng: random.Random,
        names: Iterable[str] = ("A", "B"),
        *,
        lockstep: bool = False,
        expected: int = 1,
        carried: Mapping[str, int] | None = None,
    ) -> None:
        self.rng = rng
        self.carried = {} if carried is None else carried
        self.policies = {name: FakePolicy(carried=self.carried.get(name, 0)) for name in names}
        self.stepper = Stepper(self.policies, lockstep=lockstep, expected=expected)
        self.simulators: dict[int, FakeSimulator] = {}
        self.gone: list[FakeSimulator] = []
        self.readers: dict[str, Reader] = {}
        self.steps: tuple[BehaviorSteps, ...] = ()
        self.serial = 0
        self.now = 0.0

    def connect(self, key: int, simulator: FakeSimulator) -> FakeSimulator:
        self.stepper.connect(key, simulator.number, simulator.specs)
        self.simulators[key] = simulator
        simulator.remembering = {name for name, numbers in self.carried.items() if numbers}
        return simulator

    def disconnect(self, key: int) -> None:
        self.stepper.disconnect(key)
        self.gone.append(self.simulators.pop(key))

    def grant(self, name: str, allowance: int, version: int = 0) -> None:
        self.serial += 1
        self.stepper.grant(name, StepAllowance(serial=self.serial, steps=allowance, version=version))

    def grant_all(self, allowance: int = MUCH) -> None:
        for name in self.stepper.behaviors:
            self.grant(name, allowance)

    def send(self, *keys: int) -> None:
        """The next frame of each simulator of `keys`, in that order."""
        for key in keys:
            self.now += 1
            self.stepper.receive(key, self.simulators[key].frame(), self.now)

    def wake(self, *, take: bool = True) -> TickResult:
        """Wakes the stepper; simulators take their acts, readers what was told unless it is left to gather."""
        self.now += 1
        calls = {name: len(policy.calls) for name, policy in self.policies.items()}
        wake = self.stepper.wake(self.now)
        passes = [policy.calls[calls.get(name, 0) :] for name, policy in self.policies.items()]
        assert all(len(rows) <= 1 for rows in passes), "one pass for all rows"
        assert wake.rows == sum(map(sum, passes))
        for key, act, received_at, backpressured in wake.acts:
            assert 0 <= backpressured <= self.now - received_at
            self.simulators[key].take(act)
        if take:
            self.take()
        return wake

    def take(self) -> None:
        """Readers read what has gathered."""
        self.steps = self.stepper.take_steps()
        for steps in self.steps:
            self.reader(steps.behavior).read(steps)
        self.stepper.return_unused()
        self.check_slots()

    def reader(self, name: str) -> Reader:
        """Of the parts of a behavior name."""
        return self.readers.setdefault(name, Reader(self.carried.get(name, 0)))

    def check_slots(self) -> None:
        """The stepper and the reader of its parts agree on who is alive, where, and what is awaited."""
        state = self.stepper.state()
        for name, behavior in self.stepper.behaviors.items():
            reader, table = self.reader(name), behavior.table
            live = {int(slot) for slot in table.live.nonzero()[0]}
            assert set(reader.slots) == live
            assert table.taken == len(live) == state[name].agents
            for slot, agent in reader.slots.items():
                assert agent.agent == table.agents[slot]
                assert agent.simulator == table.simulators[slot]
                assert agent.team == table.teams[slot]
                assert agent.group == table.groups[slot]
                assert agent.acted == table.acted[slot]
                assert (
                    table.carried[slot].tolist() or [0.0] * reader.carried
                ) == agent.carried  # no width: nothing yet
            assert state[name].waiting == reader.waiting
            assert state[name].steps == behavior.produced

    def check_counts(self) -> None:
        """The stepper's counts are the simulators' own, once every frame was taken over."""
        counted: Counter[str] = Counter()
        for simulator in [*self.simulators.values(), *self.gone]:
            counted.update(simulator.counted)
        for name, behavior in self.stepper.behaviors.items():
            assert behavior.produced == counted[name]

    def check_steps(self, name: str) -> None:
        """Every step that the simulators of one behavior name recorded was told once, in its life's order."""
        told = sorted(self.readers[name].steps)
        recorded = sorted(
            life.steps
            for simulator in [*self.simulators.values(), *self.gone]
            for life in simulator.agent_episodes(name)
            if life.steps
        )
        assert told == recorded

    def ready(self) -> list[int]:
        """Keys of simulators that do not wait for an answer."""
        return [key for key, simulator in self.simulators.items() if not simulator.waiting]


def outstanding(scene: Scene, name: str) -> int:
    """Actions sent out for a behavior name whose outcome has not come."""
    return sum(
        agent.acted
        for simulator in scene.simulators.values()
        for text, agents in simulator.living.items()
        if BehaviorId.parse(text).name == name
        for agent in agents.values()
    )


def hosted(simulator: FakeSimulator, name: str) -> int:
    """Live agents of a behavior name in one simulator."""
    return sum(len(agents) for text, agents in simulator.living.items() if BehaviorId.parse(text).name == name)
