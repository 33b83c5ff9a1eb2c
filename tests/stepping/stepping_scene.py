"""A stepper among fake simulators, with everything that leaves it read and compared."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping

from sparring.pipeline.messages.state import StepAllowance
from sparring.pipeline.messages.steps import BehaviorSteps
from sparring.pipeline.specs import BehaviorId
from sparring.pipeline.stepping.acting import TickResult
from sparring.pipeline.stepping.parameters import RunParameters
from sparring.pipeline.stepping.stepper import Stepper
from tests.stepping.stepping_fakes import FakePolicy, FakeSimulator, Reader

MUCH = 10**9


class Scene:
    """Drives a stepper and its fake simulators.

    Args:
        rng: for the simulators.
        names: behavior names that have a policy.
        lockstep: act in rounds.
        expected: simulators of the first round.
        carried: how many numbers agents of each behavior name carry; 0 for other names.
    """

    def __init__(
        self,
        rng: random.Random,
        names: Iterable[str] = ("A", "B"),
        *,
        lockstep: bool = False,
        expected: int = 1,
        carried: Mapping[str, int] | None = None,
        parameters: RunParameters | None = None,
    ) -> None:
        self.rng = rng
        self.carried = {} if carried is None else carried
        self.policies = {name: FakePolicy(carried=self.carried.get(name, 0)) for name in names}
        self.stepper = Stepper(
            self.policies, lockstep=lockstep, expected=expected, parameters=parameters or RunParameters({})
        )
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
        """Sends the next frame of each simulator of `keys`, in that order."""
        for key in keys:
            self.now += 1
            self.stepper.receive(key, self.simulators[key].frame(), self.now)

    def tick(self, *, take: bool = True) -> TickResult:
        """Runs a tick; simulators take their acts, and readers the steps unless `take` is False."""
        self.now += 1
        calls = {name: len(policy.calls) for name, policy in self.policies.items()}
        result = self.stepper.tick(self.now)
        passes = [policy.calls[calls.get(name, 0) :] for name, policy in self.policies.items()]
        assert all(len(rows) <= 1 for rows in passes), "one pass for all rows"
        assert result.rows == sum(map(sum, passes))
        for key, act, received_at, backpressured in result.acts:
            assert 0 <= backpressured <= self.now - received_at
            self.simulators[key].take(act)
        if take:
            self.take()
        return result

    def take(self) -> None:
        """Lets readers read all gathered steps."""
        self.steps = self.stepper.take_steps()
        for steps in self.steps:
            self.reader(steps.behavior).read(steps)
        self.stepper.return_unused()
        self.check_slots()

    def reader(self, name: str) -> Reader:
        """Returns the reader of a behavior name."""
        return self.readers.setdefault(name, Reader(self.carried.get(name, 0)))

    def check_slots(self) -> None:
        """Checks that the stepper and the readers agree on live agents, their slots and their open decisions."""
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
                ) == agent.carried  # no columns before the first weights
            assert state[name].waiting == reader.waiting
            assert state[name].steps == behavior.produced

    def check_counts(self) -> None:
        """Checks the stepper's counts against the simulators' own, once every frame is taken over."""
        counted: Counter[str] = Counter()
        for simulator in [*self.simulators.values(), *self.gone]:
            counted.update(simulator.counted)
        for name, behavior in self.stepper.behaviors.items():
            assert behavior.produced == counted[name]

    def check_steps(self, name: str) -> None:
        """Checks that every step recorded by simulators is reported once, in the order of its episode."""
        received = sorted(self.readers[name].steps)
        recorded = sorted(
            episode.steps
            for simulator in [*self.simulators.values(), *self.gone]
            for episode in simulator.agent_episodes(name)
            if episode.steps
        )
        assert received == recorded

    def ready(self) -> list[int]:
        """Returns the keys of simulators that do not wait for an answer."""
        return [key for key, simulator in self.simulators.items() if not simulator.waiting]


def outstanding(scene: Scene, name: str) -> int:
    """Returns the count of actions of a behavior name without a reported outcome."""
    return sum(
        agent.acted
        for simulator in scene.simulators.values()
        for text, agents in simulator.living.items()
        if BehaviorId.parse(text).name == name
        for agent in agents.values()
    )


def hosted(simulator: FakeSimulator, name: str) -> int:
    """Returns the count of live agents of a behavior name in one simulator."""
    return sum(len(agents) for text, agents in simulator.living.items() if BehaviorId.parse(text).name == name)
