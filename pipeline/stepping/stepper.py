"""A stepper turns frames into steps and actions, one tick after the other, without I/O.

A tick first applies everything that simulators have sent since the last one: outcomes complete steps. Then it acts for
every simulator whose step allowances suffice, with one forward pass for all rows of a behavior. A simulator with an
exhausted behavior waits with all its behaviors; its outcomes apply all the same, so that learners receive them.

In lockstep a tick is a round: it begins when every simulator has sent its frame, and takes them in the order of their
numbers, rows by agent id. A behavior with an exhausted allowance then holds back all simulators, even those without its
agents: otherwise timing would decide whether their steps come before or after the flush that its learner waits for.

A change of lessons goes out with a simulator's next answer; one that requires new episodes replaces it with a Reset.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.simulator import Act, BehaviorActions, Decisions, Reset, Step
from sparring.pipeline.messages.state import ProducedSteps, StepAllowance
from sparring.pipeline.messages.steps import BehaviorSteps
from sparring.pipeline.specs import BehaviorId, BehaviorSpec
from sparring.pipeline.stepping.acting import Policy, TickResult, answer_behavior
from sparring.pipeline.stepping.agents import Roster, Slots, SlotTable
from sparring.pipeline.stepping.behaviors import (
    Behavior,
    check_capacity,
    new_agents,
    produced_steps,
    register_behaviors,
)
from sparring.pipeline.stepping.connections import Arrival, Frame, SimulatorConnection, apply_report
from sparring.pipeline.stepping.limits import check_agents
from sparring.pipeline.stepping.matches import Matches
from sparring.pipeline.stepping.parameters import RunParameters
from sparring.pipeline.stepping.processes import SimulatorProcesses
from sparring.pipeline.stepping.steps import BehaviorTick, PendingSteps
from sparring.pipeline.stepping.waiting import Reason, Requirements, sort_by_arrival, waits_for


class Stepper:
    """A Stepper acts for all simulators and behaviors of one stepping process.

    Args:
        policies: latest policy by behavior name; agents of a missing one wait.
        lockstep: act in rounds.
        expected: number of simulators that the first round waits for, in lockstep.
        max_agents: maximum number of agents of one behavior.
        agents_each: maximum number of agents of one simulator.
        self_play: behavior names that play against ghosts.
        ghosts: fixed policies that an assignment names, by behavior name and number.
        parameters: environment parameters.

    Attributes:
        behaviors, connections: by name; simulators by connection key.
        matches: of self-play.
        parameters: environment parameters.
        requirements: decide which simulators may be answered.
        introduced: the next steps list all live agents.
        processes: steps of the simulators' processes.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        *,
        lockstep: bool = False,
        expected: int = 1,
        max_agents: int = 65536,
        agents_each: int = 65536,
        self_play: Iterable[str] = (),
        ghosts: Mapping[tuple[str, int], Policy] | None = None,
        parameters: RunParameters | None = None,
    ) -> None:
        self.behaviors: dict[str, Behavior] = {}
        self.connections: dict[int, SimulatorConnection] = {}
        self.matches = Matches(self_play)
        self.processes = SimulatorProcesses()
        self.parameters = RunParameters({}) if parameters is None else parameters
        self.requirements = Requirements(
            self.behaviors, policies, self.matches, self.parameters, lockstep=lockstep, expected=expected
        )
        self.introduced = True  # all agents of a new incarnation are new
        self._policies = policies
        self._ghosts = {} if ghosts is None else ghosts
        self._lockstep = lockstep
        self._max_agents = max_agents
        self._agents_each = agents_each
        self._number = 0
        self._ticks: dict[str, BehaviorTick] = {}  # of this tick
        self._pending_steps = PendingSteps()
        self._reintroduce = False

    @property
    def deterministic(self) -> bool:
        """Returns whether the run is in lockstep and no simulator has left it."""
        return self.requirements.deterministic

    @property
    def teams(self) -> dict[str, tuple[int, ...]]:
        """Returns the teams that simulators have named, in order, by behavior name."""
        found: dict[str, set[int]] = {}
        for connection in self.connections.values():
            for simulator_behavior in connection.behaviors.values():
                found.setdefault(simulator_behavior.id.name, set()).add(simulator_behavior.id.team)
        return {name: tuple(sorted(teams)) for name, teams in found.items()}

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
        connection = SimulatorConnection(number=number, key=key, sorts=self._lockstep, scripts=scripts or {})
        register_behaviors(connection, specs, self.behaviors, self._max_agents)
        former = next((k for k, c in self.connections.items() if c.number == number and not c.is_closed), None)
        if former is not None:
            self.disconnect(former)
        self.connections[key] = connection
        self.processes.connect(connection, process, reported or {})
        return former

    def add_behaviors(self, key: int, specs: Mapping[str, BehaviorSpec]) -> None:
        """Adds behaviors of a simulator. Raises as `connect` and `connection`."""
        register_behaviors(self.connection(key), specs, self.behaviors, self._max_agents)

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
        present = self.parameters.all(connection.number)
        return Reset(parameters=present.parameters, samplers=present.samplers, seed=seed)

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
        self.matches.check(connection, arrivals, self.behaviors)
        if new := new_agents(arrivals):
            check_agents(connection.alive, sum(new.values()), self._agents_each)
        for name, n in new.items():
            check_capacity(name, self.behaviors[name], n, self.connections.values())
        connection.frame = Frame(sequence=step.sequence, received_at=now, arrivals=arrivals)

    def grant(self, name: str, allowance: StepAllowance) -> None:
        """Adopts a step allowance; the same allowance received again does not restore returned steps."""
        if name in self.behaviors:
            self.behaviors[name].grant(allowance)

    def return_unused(self) -> None:
        """Returns the unused steps of behaviors without agents to other processes; lockstep has no others."""
        for behavior in () if self._lockstep else self.behaviors.values():
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
        out, keys = TickResult(), sort_by_arrival(self.connections, lockstep=self._lockstep)
        waiting = [key for key in keys if self.requirements.is_covered(self.connections[key])]
        closed = [key for key, c in self.connections.items() if c.is_closed]
        ready = not self._lockstep or self.requirements.round_is_complete(self.connections) or not acting
        if not (closed or self._reintroduce or (waiting and ready)):
            return out
        self._number += 1
        self._ticks = {}
        self._report(waiting if ready else [key for key in waiting if key in closed], now)
        if ready and acting:
            self._act([key for key in waiting if key not in closed], out, now)
        if self._reintroduce:
            self._list_live_agents()
        for key in closed:
            self._close(self.connections.pop(key))
        return out

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
        connections = self.connections.values()
        return {name: produced_steps(name, behavior, connections) for name, behavior in self.behaviors.items()}

    @property
    def backpressured(self) -> bool:
        """Returns whether a frame waits for a step allowance or weights."""
        return any(c.frame is not None and c.frame.backpressured_at is not None for c in self.connections.values())

    def waits_for(self, behavior: str) -> Reason | None:
        """Returns what the simulators of a behavior wait for; None where a frame waits for the next tick only."""
        return waits_for(self.requirements, self.connections, behavior)

    # ---------------------------------------------------------------- inside

    def _behavior_tick(self, name: str) -> BehaviorTick:
        """Returns the present tick of behavior `name`, a new one where it has none yet."""
        tick = self._ticks.get(name)
        if tick is None:
            produced = self.behaviors[name].produced
            tick = self._ticks[name] = self._pending_steps.add(name, BehaviorTick(self._number), produced)
        return tick

    def _report(self, keys: list[int], now: float) -> None:
        """Applies the outcomes of new frames."""
        for connection in map(self.connections.__getitem__, keys):
            frame = connection.frame
            if frame is None or frame.reported:
                continue
            frame.reported = True
            frame.backpressured_at = now
            for name, count in connection.pending.items():
                self.behaviors[name].running -= count
            self.matches.end(connection, frame.arrivals, self.behaviors)
            for arrival in frame.arrivals:
                name = arrival.simulator_behavior.id.name
                behavior = self.behaviors[name]
                tick, begin = self._behavior_tick(name), partial(self._begin, connection)
                done, ghosts = apply_report(arrival, behavior.table, connection.number, tick, begin)
                behavior.produced += done
                behavior.ghosts += ghosts
                connection.pending[name] -= done
                connection.completed[name] = connection.completed.get(name, 0) + done + ghosts

    def _act(self, keys: list[int], out: TickResult, now: float) -> None:
        """Answers every waiting simulator whose requirements are met; in lockstep all or none."""
        frames = [(self.connections[key], frame) for key in keys if (frame := self.connections[key].frame) is not None]
        missing_for = self.requirements.missing_for
        if self._lockstep and any(missing_for(connection, frame) is not None for connection, frame in frames):
            return
        answered = []
        for connection, frame in frames:
            if self._lockstep or missing_for(connection, frame) is None:
                if not self.parameters.resets(connection.lessons):
                    self._admit(connection, frame)
                answered.append((connection, frame))
        actions = self._choose([pair for pair in answered if not self.parameters.resets(pair[0].lessons)], out)
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
        new = self.parameters.since(connection.lessons, connection.number)
        connection.lessons = self.parameters.serial
        return Act(sequence=frame.sequence, actions=tuple(actions), parameters=new.parameters, samplers=new.samplers)

    def _admit(self, connection: SimulatorConnection, frame: Frame) -> None:
        """Counts a simulator's actions as running."""
        for arrival in frame.waiting:
            connection.pending[arrival.simulator_behavior.id.name] += arrival.learning
        for name, count in connection.pending.items():
            self.behaviors[name].running += count

    def _choose(
        self, acting: list[tuple[SimulatorConnection, Frame]], out: TickResult
    ) -> dict[int, list[BehaviorActions]]:
        """Chooses the actions of all behaviors; returns them by connection."""
        by_name: dict[str, list[tuple[SimulatorConnection, Arrival]]] = {}
        for connection, frame in acting:
            for arrival in frame.waiting:
                by_name.setdefault(arrival.simulator_behavior.id.name, []).append((connection, arrival))
        answers: dict[int, list[BehaviorActions]] = {}
        for name, entries in sorted(by_name.items()):
            behavior = self.behaviors[name]
            answered = answer_behavior(name, entries, behavior, self._policies.get(name), self._ghosts)
            self._behavior_tick(name).choice = answered.choice
            for key, actions in answered.actions:
                answers.setdefault(key, []).append(actions)
            out.acted += answered.acted
            out.rows += answered.learning
            out.bytes += answered.learning * behavior.row_bytes
        return answers

    def _list_live_agents(self) -> None:
        """Adds all live agents of each behavior to the tick, because assembly restarted."""
        self._reintroduce = False
        self.introduced = True
        for name, behavior in self.behaviors.items():
            self._behavior_tick(name).join_all(behavior.table)

    def _begin(
        self,
        connection: SimulatorConnection,
        behavior_id: BehaviorId,
        table: SlotTable,
        slots: Slots,
        decisions: Decisions,
        rows: Any,
    ) -> None:
        """Begins episodes of new agents, with the arguments of `Matches.begin`."""
        if self.parameters.has_curricula:
            table.has_curricula = True
            table.lessons[slots] = connection.lessons
        self.matches.begin(connection, behavior_id, table, slots, decisions, rows)

    def _close(self, connection: SimulatorConnection) -> None:
        """Removes the agents and running actions of a closed connection."""
        for name, count in connection.pending.items():
            if connection.frame is None or not connection.frame.reported:
                self.behaviors[name].running -= count
        self._vacate(connection)
        self.processes.close(connection)

    def _vacate(self, connection: SimulatorConnection) -> None:
        """Reports the agents of a connection without running actions as lost, after all else in this tick."""
        connection.pending = dict.fromkeys(connection.pending, 0)
        self.matches.drop(connection, self.behaviors)
        for simulator_behavior in connection.behaviors.values():
            slots, simulator_behavior.roster = simulator_behavior.roster.slots, Roster()
            if slots.size:
                behavior = self.behaviors[simulator_behavior.id.name]
                learning = slots[behavior.table.learning[slots]]
                behavior.table.give_back(slots)
                if learning.size:
                    self._pending_steps.add(
                        simulator_behavior.id.name, BehaviorTick(self._number, lost=[learning]), behavior.produced
                    )


def _unexpected(got: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        "unexpected_message", got=got, expected="what docs/protocol.md allows", remedy="wait for the answer first"
    )
