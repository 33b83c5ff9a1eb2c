"""One tick of stepping, without I/O: frames in, steps and actions out.

Whatever simulators sent since the last tick is taken over first: outcomes complete steps. Then
every simulator that the budgets let go on is acted for, all rows of a behavior in one forward pass.
A simulator whose behavior is at its budget waits with all its behaviors; its outcomes are taken over
all the same, so that the learner can have them.

In lockstep a tick is a round: it begins when every simulator has sent its frame, and takes them in
the order of their numbers, rows by agent id. A behavior that has used its budget up keeps all, whether it has agents at
the moment or not: what others do meanwhile would be before or after the cut that its learner waits for, as it happens.

A change of lessons goes out with a simulator's next answer; where it asks for new episodes, as a Reset in place of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sparring.pipeline.errors import RemoteProtocolError
from sparring.pipeline.messages.simulator import Act, BehaviorActions, Decisions, Reset, Step
from sparring.pipeline.messages.state import ProducedSteps, StepAllowance
from sparring.pipeline.messages.steps import BehaviorSteps
from sparring.pipeline.specs import BehaviorId, BehaviorSpec
from sparring.pipeline.stepping.agents import Roster, Slots, SlotTable
from sparring.pipeline.stepping.behaviors import (
    Behavior,
    Policy,
    answer,
    check_room,
    choose,
    enroll,
    scripts_of,
    standing,
)
from sparring.pipeline.stepping.connections import Arrival, Frame, SimulatorConnection, settle
from sparring.pipeline.stepping.limits import check_agents
from sparring.pipeline.stepping.matches import Matches
from sparring.pipeline.stepping.parameters import RunParameters
from sparring.pipeline.stepping.steps import BehaviorTick, PendingSteps, join_columns
from sparring.pipeline.stepping.waiting import ALLOWANCES, ASSIGNMENT, WEIGHTS, Reason


@dataclass(slots=True)
class TickResult:
    """What a tick did.

    Attributes:
        acts: answers: connection key, Act or Reset, time of the frame's arrival, seconds withheld.
        acted: rows acted for.
        rows: of these, how many are not ghosts'.
        bytes: of their observations.
    """

    acts: list[tuple[int, Act | Reset, float, float]] = field(default_factory=list)
    acted: int = 0
    rows: int = 0
    bytes: int = 0


class Stepper:
    """All simulators and behaviors of one stepping process.

    Attributes:
        introduced: what `take_steps` will return tells of all live agents, because a reader is new.
        parameters: what simulators are told of the environment parameters.
        added: behaviors whose learners came after the run had begun; before their weights nobody hears of their agents.

    Args:
        policies: the current weights by behavior name; a missing one makes its agents wait.
        ghosts: other weights that an assignment names, by behavior name and number.
        self_play: behavior names that play against ghosts.
        lockstep: act in rounds.
        expected: simulators that the first round waits for, in lockstep.
        max_agents: most agents of one behavior.
        agents_each: most agents of one simulator.
        parameters: environment parameters; None for none.
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
        self.deterministic = lockstep
        self.matches = Matches(self_play)
        self.added: frozenset[str] = frozenset()
        self.parameters = RunParameters({}) if parameters is None else parameters
        self._policies = policies
        self._ghosts = {} if ghosts is None else ghosts
        self._lockstep = lockstep
        self._expected = expected
        self._max_agents = max_agents
        self._agents_each = agents_each
        self._number = 0
        self._ticks: dict[str, BehaviorTick] = {}  # of this tick
        self._told = PendingSteps()
        self._rejoin = False
        self.introduced = False

    @property
    def teams(self) -> dict[str, tuple[int, ...]]:
        """By behavior name, the teams that simulators have named, in order."""
        found: dict[str, set[int]] = {}
        for connection in self.connections.values():
            for simulator_behavior in connection.behaviors.values():
                found.setdefault(simulator_behavior.id.name, set()).add(simulator_behavior.id.team)
        return {name: tuple(sorted(teams)) for name, teams in found.items()}

    # ---------------------------------------------------------------- simulators come and go

    def connect(
        self,
        key: int,
        number: int,
        specs: Mapping[str, BehaviorSpec],
        scripts: Mapping[str, Sequence[str]] | None = None,
    ) -> int | None:
        """A simulator said Hello.

        Args:
            key: of the connection, unique.
            number: orders the simulators.
            specs: by behavior id.
            scripts: by behavior name, what it can play agents with itself.

        Returns:
            Key of the connection that this one takes the place of: a simulator that comes back may be
            faster than the news of its broken link.

        Raises:
            RemoteProtocolError: a spec contradicts what is known.
        """
        connection = SimulatorConnection(number=number, key=key, sorts=self._lockstep, scripts=scripts or {})
        enroll(connection, specs, self.behaviors, self._max_agents)
        former = next((k for k, c in self.connections.items() if c.number == number and not c.gone), None)
        if former is not None:
            self.disconnect(former)
        self.connections[key] = connection
        return former

    def add_behaviors(self, key: int, specs: Mapping[str, BehaviorSpec]) -> None:
        """A simulator named more behaviors. Raises as `connect` and `connection`."""
        enroll(self.connection(key), specs, self.behaviors, self._max_agents)

    def connection(self, key: int) -> SimulatorConnection:
        """The simulator of a connection.

        Raises:
            RemoteProtocolError: it has not said Hello, or another connection has taken its place.
        """
        connection = self.connections.get(key)
        if connection is None:
            raise _unexpected("a message of a simulator that is not connected")
        return connection

    def begin(self, key: int, seed: int | None = None) -> Reset:
        """New episodes for all agents of a simulator, with the present parameters.

        Args:
            key: of its connection.
            seed: for its random source, or None to go on with it.
        """
        connection = self.connections[key]
        connection.lessons = self.parameters.serial
        told = self.parameters.all(connection.number)
        return Reset(parameters=told.parameters, samplers=told.samplers, seed=seed)

    def disconnect(self, key: int) -> None:
        """The link is closed: the next tick closes what its agents had open."""
        connection = self.connections.get(key)
        if connection is not None:
            connection.gone = True
            self.deterministic = False

    def receive(self, key: int, step: Step, now: float) -> None:
        """A Step arrived.

        Raises:
            RemoteProtocolError: it contradicts the specs or the agents alive, or came before the one before it was
                answered; nothing of it is used.
        """
        connection = self.connection(key)
        if connection.frame is not None:
            raise _unexpected("a Step before the answer to the one before it")
        arrivals = connection.arrive(step)
        self.matches.check(connection, arrivals, self.behaviors)
        new: dict[str, int] = {}
        for arrival in arrivals:
            if arrival.unknown:
                new[arrival.simulator_behavior.id.name] = (
                    new.get(arrival.simulator_behavior.id.name, 0) + arrival.unknown
                )
        if new:
            check_agents(connection.alive, sum(new.values()), self._agents_each)
        for name, n in new.items():
            check_room(name, self.behaviors[name], n, self.connections.values())
        connection.frame = Frame(sequence=step.sequence, received_at=now, arrivals=arrivals)

    def grant(self, name: str, allowance: StepAllowance) -> None:
        """Coordination says how far this process may go; heard again, a permit does not undo what was given back."""
        behavior = self.behaviors.get(name)
        if behavior is None or allowance.serial < behavior.allowance.serial:
            return
        if allowance.serial == behavior.allowance.serial:
            allowance = replace(allowance, steps=min(allowance.steps, behavior.allowance.steps))
        behavior.allowance = allowance

    def return_unused(self) -> None:
        """Gives back the permits of behaviors without agents: others can use them. In lockstep there are no others."""
        for behavior in () if self._lockstep else self.behaviors.values():
            allowance = behavior.allowance
            if not behavior.table.taken and allowance.steps > behavior.produced:
                behavior.allowance = replace(allowance, steps=behavior.produced)

    def rejoin(self) -> None:
        """The reader of the steps is new: tell it of all live agents with the next tick."""
        self._rejoin = True

    # ---------------------------------------------------------------- a tick

    def wake(self, now: float, *, acting: bool = True) -> TickResult:
        """Takes over what arrived, acts for who may go on.

        Args:
            now: time.
            acting: False at the end of a run, when outcomes still count and nobody is answered.
        """
        out = TickResult()
        waiting = [key for key in self._waiting() if self.covered(self.connections[key])]
        gone = [key for key, c in self.connections.items() if c.gone]
        ready = not self._lockstep or self.round_complete or not acting
        if not (gone or self._rejoin or (waiting and ready)):
            return out
        self._number += 1
        self._ticks = {}
        self._report(waiting if ready else [key for key in waiting if key in gone], now)
        if ready and acting:
            self._act([key for key in waiting if key not in gone], out, now)
        if self._rejoin:
            self._tell_again()
        for key in gone:
            self._close(self.connections.pop(key))
        return out

    @property
    def has_steps(self) -> bool:
        """Whether `take_steps` would return something."""
        return self._told.some

    def take_steps(self) -> tuple[BehaviorSteps, ...]:
        """What assembly gets of the ticks since the last call, in order of behavior names."""
        self.introduced = False
        return self._told.take(lambda name: (self.behaviors[name].ghosts, self.matches.take(name)))

    def state(self) -> dict[str, ProducedSteps]:
        """Where each behavior stands."""
        connections = self.connections.values()
        return {name: standing(name, behavior, connections) for name, behavior in self.behaviors.items()}

    @property
    def backpressured(self) -> bool:
        """Whether some frame waits for a permit or weights."""
        return any(c.frame is not None and c.frame.backpressured_at is not None for c in self.connections.values())

    def covered(self, connection: SimulatorConnection) -> bool:
        """Whether there are learners for all of a simulator, and the assignment says who plays in it."""
        return not self.lacks(connection) and self.matches.covers(connection)

    def lacks(self, connection: SimulatorConnection) -> str:
        """An added behavior of a simulator that has no weights yet; "" for none."""
        missing = self.added - self._policies.keys()
        return next((name for name in connection.pending if name in missing), "") if missing else ""

    # ---------------------------------------------------------------- inside

    def _tick(self, name: str) -> BehaviorTick:
        """What this tick leaves of behavior `name`."""
        tick = self._ticks.get(name)
        if tick is None:
            tick = self._ticks[name] = self._told.add(name, BehaviorTick(self._number), self.behaviors[name].produced)
        return tick

    @property
    def round_complete(self) -> bool:
        """Whether every simulator that is expected has sent its frame (lockstep)."""
        living = [c for c in self.connections.values() if not c.gone]
        enough = len(living) >= self._expected or not self.deterministic
        return bool(living) and enough and all(c.frame is not None and self.covered(c) for c in living)

    def _report(self, keys: list[int], now: float) -> None:
        """Takes over the outcomes of new frames."""
        for key in keys:
            connection = self.connections[key]
            frame = connection.frame
            if frame is None or frame.reported:
                continue
            frame.reported = True
            frame.backpressured_at = now
            for name, count in connection.pending.items():
                self.behaviors[name].running -= count
            for name in sorted(self.matches.end(connection, frame.arrivals, self.behaviors)):
                self._tick(name)  # takes the results along
            for arrival in frame.arrivals:
                name = arrival.simulator_behavior.id.name
                behavior = self.behaviors[name]
                begin = partial(self._begin, connection)
                done, ghosts = settle(arrival, behavior.table, connection.number, self._tick(name), begin)
                behavior.produced += done
                behavior.ghosts += ghosts
                connection.pending[name] -= done
                connection.completed[name] = connection.completed.get(name, 0) + done + ghosts

    def _waiting(self) -> list[int]:
        """Connections with a frame: by number in lockstep, else who has waited longest first."""
        order = [
            (0.0 if self._lockstep else connection.frame.received_at, connection.number, key)
            for key, connection in self.connections.items()
            if connection.frame is not None
        ]
        return [key for _, _, key in sorted(order)]

    def backpressured_for(self, connection: SimulatorConnection, frame: Frame) -> Reason | None:
        """What is missing of weights and budgets of all that would act or go on acting; None where they may."""
        for arrival in frame.waiting:
            name = arrival.simulator_behavior.id.name
            behavior, policy = self.behaviors[name], self._policies.get(name)
            if (
                self.matches.serial < behavior.allowance.assignment
                or self.parameters.serial < behavior.allowance.lessons
            ):
                return Reason(ASSIGNMENT, name)
            if not arrival.learning:
                continue
            if policy is None or policy.version < behavior.allowance.version:
                return Reason(WEIGHTS, name)
            if behavior.remaining <= 0:
                return Reason(ALLOWANCES, name)
        for name, count in connection.pending.items():
            if count and self.behaviors[name].remaining <= 0:
                return Reason(ALLOWANCES, name)
        if self._lockstep:
            return next((Reason(ALLOWANCES, name) for name, one in self.behaviors.items() if one.exhausted), None)
        return None

    def _act(self, keys: list[int], out: TickResult, now: float) -> None:
        """Answers every waiting simulator that the budgets let go on."""
        frames = [(self.connections[key], frame) for key in keys if (frame := self.connections[key].frame) is not None]
        if self._lockstep and not all(
            self.backpressured_for(connection, frame) is None for connection, frame in frames
        ):
            return
        answered = []
        for connection, frame in frames:
            if self._lockstep or self.backpressured_for(connection, frame) is None:
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
        """What a simulator is told: its actions, and what has changed; or to begin anew."""
        if self.parameters.resets(connection.lessons):
            self._vacate(connection)
            return self.begin(connection.key)
        if connection.lessons == self.parameters.serial:
            return Act(sequence=frame.sequence, actions=tuple(actions))
        told = self.parameters.since(connection.lessons, connection.number)
        connection.lessons = self.parameters.serial
        return Act(sequence=frame.sequence, actions=tuple(actions), parameters=told.parameters, samplers=told.samplers)

    def _admit(self, connection: SimulatorConnection, frame: Frame) -> None:
        """Counts a simulator's actions as under way."""
        for arrival in frame.waiting:
            connection.pending[arrival.simulator_behavior.id.name] += arrival.learning
        for name, count in connection.pending.items():
            self.behaviors[name].running += count

    def _choose(
        self, acting: list[tuple[SimulatorConnection, Frame]], out: TickResult
    ) -> dict[int, list[BehaviorActions]]:
        """One forward pass for each behavior name; the answers by connection."""
        by_name: dict[str, list[tuple[SimulatorConnection, Arrival]]] = {}
        for connection, frame in acting:
            for arrival in frame.waiting:
                by_name.setdefault(arrival.simulator_behavior.id.name, []).append((connection, arrival))
        answers: dict[int, list[BehaviorActions]] = {}
        for name, entries in sorted(by_name.items()):
            behavior, policy = self.behaviors[name], self._policies.get(name)
            table = behavior.table
            choice = choose([arrival for _, arrival in entries], behavior, policy, partial(self._ghost, name))
            told = choice.of(table.learning[join_columns(choice.slots)]) if table.ghosted else choice
            self._tick(name).choice = told
            scripted = {number: one.script for (own, number), one in self._ghosts.items() if own == name and one.script}
            at = 0
            for connection, arrival in entries:
                rows = slice(at, at + len(arrival.slots))
                scripts = scripts_of(arrival.slots, table, scripted, connection.scripts.get(name, ()))
                answers.setdefault(connection.key, []).append(answer(arrival, choice.chosen, rows, scripts))
                at = rows.stop
            learning = sum(arrival.learning for _, arrival in entries)
            out.acted += at
            out.rows += learning
            out.bytes += learning * behavior.row_bytes
        return answers

    def _ghost(self, name: str, number: int) -> Policy:
        return self._ghosts[name, number]

    def _tell_again(self) -> None:
        """Adds all live agents of each behavior: their reader is new."""
        self._rejoin = False
        self.introduced = True
        for name, behavior in self.behaviors.items():
            self._tick(name).join_all(behavior.table)

    def _begin(
        self,
        connection: SimulatorConnection,
        simulator_behavior: BehaviorId,
        table: SlotTable,
        slots: Slots,
        decisions: Decisions,
        rows: Any,
    ) -> None:
        """Agents of a simulator begin new lives; with the arguments of `Matches.begin`."""
        if self.parameters.taught:
            table.taught = True
            table.lessons[slots] = connection.lessons
        self.matches.begin(connection, simulator_behavior, table, slots, decisions, rows)

    def _close(self, connection: SimulatorConnection) -> None:
        """A connection is closed."""
        for name, count in connection.pending.items():
            if connection.frame is None or not connection.frame.reported:
                self.behaviors[name].running -= count
        self._vacate(connection)

    def _vacate(self, connection: SimulatorConnection) -> None:
        """Tells of the agents of a connection, none of whose actions is under way: lost, after all else of now."""
        connection.pending = dict.fromkeys(connection.pending, 0)
        for name in sorted(self.matches.lose(connection, self.behaviors)):
            self._tick(name)  # takes what there is to tell of its matches along
        for simulator_behavior in connection.behaviors.values():
            slots, simulator_behavior.roster = simulator_behavior.roster.slots, Roster()
            if slots.size:
                behavior = self.behaviors[simulator_behavior.id.name]
                learning = slots[behavior.table.learning[slots]]
                behavior.table.give_back(slots)
                if learning.size:
                    self._told.add(
                        simulator_behavior.id.name, BehaviorTick(self._number, lost=[learning]), behavior.produced
                    )


def _unexpected(got: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        "unexpected_message", got=got, expected="what docs/protocol.md allows", remedy="wait for the answer first"
    )
