"""A stepper turns frames into steps and actions, one tick after the other, without I/O.

A tick first applies everything that simulators have sent since the last one: outcomes complete steps. Then it acts for
every simulator whose step allowances suffice, with one forward pass for all rows of a behavior. A simulator with an
exhausted behavior waits with all its behaviors; its outcomes apply all the same, so that learners receive them.

In lockstep a tick is a round: it begins when every simulator has sent its frame, and takes them in the order of their
numbers, rows by agent id. A behavior with an exhausted allowance then holds back all simulators, even those without its
agents: otherwise timing would decide whether their steps come before or after the flush that its learner waits for.

A change of lessons goes out with a simulator's next answer; one that requires new episodes replaces it with a Reset.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.simulator import Act, BehaviorActions, Reset, Step
from sparring.pipeline.messages.state import ProducedSteps, StepAllowance
from sparring.pipeline.messages.steps import BehaviorSteps
from sparring.pipeline.specs import BehaviorSpec
from sparring.pipeline.stepping.acting import Policy, TickResult, choose, select_actions
from sparring.pipeline.stepping.agents import Behavior, Roster
from sparring.pipeline.stepping.connections import Arrival, Frame, SimulatorConnection, check_capacity, contradiction
from sparring.pipeline.stepping.matches import Matches
from sparring.pipeline.stepping.parameters import RunParameters
from sparring.pipeline.stepping.processes import SimulatorProcesses
from sparring.pipeline.stepping.steps import PendingSteps, apply_report
from sparring.pipeline.stepping.waiting import Requirements

Waiting = tuple[SimulatorConnection, Frame]
"""A simulator with its frame, which waits for an answer."""


@dataclass(eq=False)
class Stepper:
    """A Stepper acts for all simulators and behaviors of one stepping process.

    Attributes:
        policies: latest policy by behavior name; agents of a missing one wait.
        lockstep: act in rounds.
        expected: number of simulators that the first round waits for, in lockstep.
        max_agents: maximum number of agents of one behavior.
        agents_each: maximum number of agents of one simulator.
        self_play: behavior names that play against ghosts.
        ghosts: fixed policies that an assignment names, by behavior name and number.
        parameters: environment parameters.
        behaviors, connections: by name; simulators by connection key.
        specs: those that the run has already, by behavior name; other processes may have learned them.
        processes: steps of the simulators' processes.
        introduced: the next steps list all live agents, as all agents of a new incarnation are new.
        matches: of self-play.
        requirements: decide which simulators may be answered.
    """

    policies: Mapping[str, Policy]
    _: KW_ONLY
    lockstep: bool = False
    expected: int = 1
    max_agents: int = 65536
    agents_each: int = 65536
    self_play: InitVar[Iterable[str]] = ()
    ghosts: Mapping[tuple[str, int], Policy] = field(default_factory=dict)
    parameters: RunParameters = field(default_factory=lambda: RunParameters({}))
    behaviors: dict[str, Behavior] = field(init=False, default_factory=dict)
    connections: dict[int, SimulatorConnection] = field(init=False, default_factory=dict)
    specs: Mapping[str, BehaviorSpec] = field(init=False, default_factory=dict)
    processes: SimulatorProcesses = field(init=False, default_factory=SimulatorProcesses)
    introduced: bool = field(init=False, default=True)
    _pending_steps: PendingSteps = field(init=False, default_factory=PendingSteps)
    _reintroduce: bool = field(init=False, default=False)

    def __post_init__(self, self_play: Iterable[str]) -> None:
        self.matches = Matches(self_play)
        self.requirements = Requirements(
            self.connections, self.behaviors, self.policies, self.matches, self.parameters, self.lockstep, self.expected
        )

    @property
    def teams(self) -> dict[str, tuple[int, ...]]:
        """Returns the teams that simulators have named, in order, by behavior name."""
        found = sorted({one.id for connection in self.connections.values() for one in connection.behaviors.values()})
        return {name: tuple(one.team for one in ids) for name, ids in itertools.groupby(found, lambda one: one.name)}

    # ---------------------------------------------------------------- simulators

    def connect(
        self,
        key: int,
        number: int,
        specs: Mapping[str, BehaviorSpec],
        scripts: Mapping[str, Sequence[str]] | None = None,
        *,
        process: str = "",
        reported: Mapping[str, int] | None = None,
    ) -> int | None:
        """Adds a simulator that has sent Hello.

        Args:
            key: of the connection, unique.
            number: orders the simulators.
            specs: by behavior id.
            scripts: by behavior name, scripts with which it can play agents itself.
            process: name of its process; "" for none.
            reported: steps that it has reported since it started, by behavior name.

        Returns:
            Key of the connection that this one replaces: a simulator may reconnect before its broken link is noticed.

        Raises:
            RemoteProtocolError: a spec contradicts a known one.
        """
        connection = SimulatorConnection(number=number, key=key, sorts=self.lockstep, scripts=scripts or {})
        connection.register(specs, self.behaviors, self.max_agents, self.specs)
        former = next((k for k, c in self.connections.items() if c.number == number and not c.is_closed), None)
        if former is not None:
            self.disconnect(former)
        self.connections[key] = connection
        self.processes.connect(connection, process, reported or {})
        return former

    def add_behaviors(self, key: int, specs: Mapping[str, BehaviorSpec]) -> None:
        """Adds behaviors of a simulator. Raises as `connect` and `connection`."""
        self.connection(key).register(specs, self.behaviors, self.max_agents, self.specs)

    def adopt_specs(self, specs: Mapping[str, BehaviorSpec]) -> dict[int, RemoteProtocolError]:
        """Adopts the specs of the run, and disconnects simulators that have declared others.

        No agent of a behavior has acted with another spec than the run's, because no weights fit it.

        Returns:
            Why they are disconnected, by connection key.
        """
        self.specs, refused = specs, dict[int, RemoteProtocolError]()
        wrong = [one for one in self.behaviors.values() if specs.get(one.name, one.spec) != one.spec]
        for behavior in wrong:
            for key, connection in self.connections.items():
                if any(one.behavior is behavior for one in connection.behaviors.values()):
                    refused[key] = contradiction(behavior.name, behavior.spec, specs[behavior.name])
                    self.disconnect(key)
            behavior.replace_spec(specs[behavior.name])
        return refused

    def connection(self, key: int) -> SimulatorConnection:
        """Returns the simulator of a connection.

        Raises:
            RemoteProtocolError: it has not sent Hello, or another connection has replaced it.
        """
        connection = self.connections.get(key)
        if connection is None:
            raise _unexpected("a message of a simulator that is not connected")
        return connection

    def begin_episodes(self, key: int, seed: int | None = None) -> Reset:
        """Returns a Reset for all agents of a simulator, with the present parameters.

        Args:
            key: of its connection.
            seed: of its random source; None to continue with its present state.
        """
        connection = self.connections[key]
        connection.lessons = self.parameters.serial
        parameters, samplers = self.parameters.of(connection.number)
        return Reset(parameters=parameters, samplers=samplers, seed=seed)

    def disconnect(self, key: int) -> None:
        """Marks a connection as closed: the next tick reports its agents as lost."""
        connection = self.connections.get(key)
        if connection is not None:
            connection.is_closed = True
            self.requirements.deterministic = False

    def receive(self, key: int, step: Step, now: float) -> None:
        """Validates a Step and keeps it for the next tick.

        Raises:
            RemoteProtocolError: the Step contradicts the specs or the live agents, or the one before it is still
                unanswered; it is dropped.
        """
        connection = self.connection(key)
        if connection.frame is not None:
            raise _unexpected("a Step before the answer to the one before it")
        arrivals = connection.arrive(step)
        self.matches.check(connection, arrivals)
        check_capacity(connection, arrivals, self.connections.values(), self.agents_each)
        connection.frame = Frame(sequence=step.sequence, received_at=now, arrivals=arrivals)

    def grant(self, name: str, allowance: StepAllowance) -> None:
        """Adopts a step allowance; the same allowance received again does not restore returned steps."""
        if name in self.behaviors:
            self.behaviors[name].grant(allowance)

    def return_unused(self) -> None:
        """Returns the unused steps of behaviors without agents to other processes; lockstep has no others."""
        for behavior in () if self.lockstep else self.behaviors.values():
            behavior.return_unused()

    def reintroduce_agents(self) -> None:
        """Lists all live agents with the next tick, because assembly restarted."""
        self._reintroduce = True

    # ---------------------------------------------------------------- ticks

    def tick(self, now: float, *, acting: bool = True) -> TickResult:
        """Applies all frames that arrived, and acts for the simulators that may be answered.

        Args:
            now: seconds.
            acting: False at the end of a run, when outcomes still count and no simulator is answered.
        """
        out, closed = TickResult(), [connection for connection in self.connections.values() if connection.is_closed]
        waiting = [pair for pair in self._sort_by_arrival() if self._is_due(pair[0], acting=acting)]
        ready = self.requirements.round_is_complete or not acting
        if not (closed or self._reintroduce or (waiting and ready)):
            return out
        self._pending_steps.begin_tick()
        for connection, frame in waiting:
            if (ready or connection.is_closed) and not frame.reported:
                self._report(connection, frame, now)
        if ready and acting:
            self._act([pair for pair in waiting if not pair[0].is_closed], out, now)
        if self._reintroduce:
            self._reintroduce, self.introduced = False, True
            for behavior in self.behaviors.values():
                self._pending_steps.present(behavior).join_all(behavior.table)
        for connection in closed:
            self._close(connection)
        return out

    @property
    def has_every_frame(self) -> bool:
        """Returns whether every simulator waits for an answer, so that no other frame can join the next tick."""
        return all(connection.frame is not None for connection in self.connections.values())

    @property
    def has_steps(self) -> bool:
        """Returns whether `take_steps` would return any."""
        return not self._pending_steps.is_empty

    def take_steps(self) -> tuple[BehaviorSteps, ...]:
        """Returns the steps of all ticks since the last call, in order of behavior names."""
        self.introduced = False
        return self._pending_steps.take()

    def state(self) -> dict[str, ProducedSteps]:
        """Returns the published state of each behavior."""
        frames = [one.frame for one in self.connections.values() if one.frame is not None]
        waiting: Counter[str] = Counter()
        for arrival in (arrival for frame in frames for arrival in frame.waiting):
            waiting[arrival.name] += len(arrival.slots)
        return {
            name: ProducedSteps(
                steps=behavior.produced,
                serial=behavior.allowance.serial,
                allowance=behavior.allowance.steps,
                agents=behavior.table.taken,
                ghosts=behavior.ghosts,
                waiting=waiting[name],
            )
            for name, behavior in self.behaviors.items()
        }

    @property
    def backpressured(self) -> bool:
        """Returns whether a frame waits for a step allowance or weights."""
        return any(c.frame is not None and c.frame.backpressured_at is not None for c in self.connections.values())

    # ---------------------------------------------------------------- inside

    def _sort_by_arrival(self) -> list[Waiting]:
        """Returns the frames: by number of their simulators in lockstep, else the longest waiting first."""
        pairs = [(one, one.frame) for one in self.connections.values() if one.frame is not None]
        return sorted(pairs, key=lambda p: (0.0 if self.lockstep else p[1].received_at, p[0].number, p[0].key))

    def _is_due(self, connection: SimulatorConnection, *, acting: bool) -> bool:
        """Returns whether the outcomes of a frame count now: the last ones do before an added behavior has weights."""
        is_last = connection.is_closed or not acting
        return self.requirements.is_covered(connection) or (is_last and self.matches.covers(connection))

    def _report(self, connection: SimulatorConnection, frame: Frame, now: float) -> None:
        """Applies the outcomes of a new frame; agents without a learner have not acted and are left out."""
        frame.reported = True
        frame.backpressured_at = now
        for name, count in connection.pending.items():
            self.behaviors[name].running -= count
        self.matches.end(connection, frame.arrivals)
        without_weights = self.requirements.without_weights
        for arrival in frame.arrivals:
            behavior = arrival.simulator_behavior.behavior
            if behavior.name in without_weights:
                continue
            tick, begin = self._pending_steps.present(behavior), partial(self._begin, connection)
            done, ghosts = apply_report(arrival, connection.number, tick, begin)
            behavior.produced += done
            behavior.ghosts += ghosts
            connection.pending[behavior.name] -= done
            connection.completed[behavior.name] = connection.completed.get(behavior.name, 0) + done + ghosts

    def _act(self, waiting: list[Waiting], out: TickResult, now: float) -> None:
        """Answers every waiting simulator whose requirements are met; in lockstep all or none."""
        missing_for = self.requirements.missing_for
        if self.lockstep and any(missing_for(connection, frame) is not None for connection, frame in waiting):
            return
        answered, acting = [], []
        for connection, frame in waiting:
            if self.lockstep or missing_for(connection, frame) is None:
                answered.append((connection, frame))
                if not self.parameters.resets(connection.lessons):
                    self._admit(connection, frame)
                    acting.append((connection, frame))
        actions = self._choose(acting, out)
        for connection, frame in answered:
            backpressured = 0.0 if frame.backpressured_at is None else now - frame.backpressured_at
            answer = self._answer(connection, frame, actions.get(connection.key, []))
            out.acts.append((connection.key, answer, frame.received_at, backpressured))
            connection.frame = None

    def _answer(self, connection: SimulatorConnection, frame: Frame, actions: list[BehaviorActions]) -> Act | Reset:
        """Returns a simulator's actions with the changed parameters, or a Reset."""
        if self.parameters.resets(connection.lessons):
            self._vacate(connection)
            return self.begin_episodes(connection.key)
        if connection.lessons == self.parameters.serial:
            return Act(sequence=frame.sequence, actions=tuple(actions))
        parameters, samplers = self.parameters.of(connection.number, connection.lessons)
        connection.lessons = self.parameters.serial
        return Act(sequence=frame.sequence, actions=tuple(actions), parameters=parameters, samplers=samplers)

    def _admit(self, connection: SimulatorConnection, frame: Frame) -> None:
        """Counts a simulator's actions as running."""
        for arrival in frame.waiting:
            connection.pending[arrival.name] += arrival.learning
        for name, count in connection.pending.items():
            self.behaviors[name].running += count

    def _choose(self, acting: list[Waiting], out: TickResult) -> dict[int, list[BehaviorActions]]:
        """Chooses the actions of all behaviors; returns them by connection."""
        by_name: dict[str, list[tuple[SimulatorConnection, Arrival]]] = {}
        for connection, frame in acting:
            for arrival in frame.waiting:
                by_name.setdefault(arrival.name, []).append((connection, arrival))
        answers: dict[int, list[BehaviorActions]] = {}
        for name, entries in sorted(by_name.items()):
            behavior, policy = self.behaviors[name], self.policies.get(name)
            chosen, learned = choose(behavior, [arrival for _, arrival in entries], policy, self.ghosts)
            if learned.log_probs.size:
                self._pending_steps.present(behavior).acted.append(learned)
            playing = {number: one.script for (own, number), one in self.ghosts.items() if own == name and one.script}
            at = 0
            for connection, arrival in entries:
                rows = slice(at, at + len(arrival.slots))
                actions = select_actions(arrival, chosen, rows, playing, connection.scripts.get(name, ()))
                answers.setdefault(connection.key, []).append(actions)
                at = rows.stop
            learning = sum(arrival.learning for _, arrival in entries)
            out.acted += at
            out.rows += learning
            out.bytes += learning * behavior.row_bytes
        return answers

    def _begin(self, connection: SimulatorConnection, arrival: Arrival, rows: NDArray[np.intp]) -> None:
        """Begins the episodes of new agents, with the arguments of `Matches.begin`."""
        if self.parameters.has_curricula:
            arrival.table.has_curricula = True
            arrival.table.lessons[arrival.slots[rows]] = connection.lessons
        self.matches.begin(connection, arrival, rows)

    def _close(self, connection: SimulatorConnection) -> None:
        """Removes a closed connection, its agents and running actions."""
        del self.connections[connection.key]
        for name, count in connection.pending.items():
            if connection.frame is None or not connection.frame.reported:
                self.behaviors[name].running -= count
        self._vacate(connection)
        self.processes.close(connection)

    def _vacate(self, connection: SimulatorConnection) -> None:
        """Reports the agents of a connection without running actions as lost, after all else in this tick."""
        connection.pending = dict.fromkeys(connection.pending, 0)
        self.matches.drop(connection)
        for simulator_behavior in connection.behaviors.values():
            slots, simulator_behavior.roster = simulator_behavior.roster.slots, Roster()
            behavior = simulator_behavior.behavior
            learning = slots[behavior.table.learning[slots]]
            behavior.table.give_back(slots)
            if learning.size:
                self._pending_steps.add_lost(behavior, learning)


def _unexpected(got: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        "unexpected_message", got=got, expected="what docs/protocol.md allows", remedy="wait for the answer first"
    )
