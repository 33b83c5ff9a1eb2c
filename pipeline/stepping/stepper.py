"""One wake-up of stepping, without I/O: frames in, steps and actions out.

Whatever simulators sent since the last wake-up is taken over first: outcomes complete steps. Then
every simulator that the budgets let go on is acted for, all rows of a behavior in one forward pass.
A simulator whose behavior is at its budget waits with all its behaviors; its outcomes are taken over
all the same, so that the learner can have them.

In lockstep a wake-up is a round: it begins when every simulator has sent its frame, and takes them in
the order of their numbers, rows by agent id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from pipeline.errors import RemoteProtocolError
from pipeline.messages.service import BehaviorSteps, Permit, Produced
from pipeline.messages.simulator import Act, BehaviorActions, Step
from pipeline.specs import BehaviorId, BehaviorSpec
from pipeline.stepping.agents import SlotTable
from pipeline.stepping.behaviors import Behavior, Policy, answer, choose
from pipeline.stepping.connections import Arrival, Connection, Frame, Seat, settle
from pipeline.stepping.matches import Matches
from pipeline.stepping.steps import Choice, Lives, Tick, Told, join_columns


@dataclass(slots=True)
class Wake:
    """What a wake-up did.

    Attributes:
        acts: answers: connection key, record, time of the frame's arrival, seconds withheld.
        acted: rows acted for.
        rows: of these, how many are not ghosts'.
        bytes: of their observations.
    """

    acts: list[tuple[int, Act, float, float]] = field(default_factory=list)
    acted: int = 0
    rows: int = 0
    bytes: int = 0


class Stepper:
    """All simulators and behaviors of one stepping process.

    Attributes:
        introduced: what `take_steps` will return tells of all live agents, because a reader is new.

    Args:
        policies: the current weights by behavior name; a missing one makes its agents wait.
        ghosts: other weights that an assignment names, by behavior name and number.
        self_play: behavior names that play against ghosts.
        lockstep: act in rounds.
        expected: simulators that the first round waits for, in lockstep.
        max_agents: most agents of one behavior.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        *,
        lockstep: bool = False,
        expected: int = 1,
        max_agents: int = 65536,
        self_play: Iterable[str] = (),
        ghosts: Mapping[tuple[str, int], Policy] | None = None,
    ) -> None:
        self.behaviors: dict[str, Behavior] = {}
        self.connections: dict[int, Connection] = {}
        self.deterministic = lockstep
        self.matches = Matches(self_play)
        self._policies = policies
        self._ghosts = {} if ghosts is None else ghosts
        self._lockstep = lockstep
        self._expected = expected
        self._max_agents = max_agents
        self._number = 0
        self._ticks: dict[str, Tick] = {}  # of this wake-up
        self._told = Told()
        self._rejoin = False
        self.introduced = False

    @property
    def teams(self) -> dict[str, tuple[int, ...]]:
        """By behavior name, the teams that simulators have named, in order."""
        found: dict[str, set[int]] = {}
        for connection in self.connections.values():
            for seat in connection.seats.values():
                found.setdefault(seat.id.name, set()).add(seat.id.team)
        return {name: tuple(sorted(teams)) for name, teams in found.items()}

    # ---------------------------------------------------------------- simulators come and go

    def connect(self, key: int, number: int, specs: Mapping[str, BehaviorSpec]) -> int | None:
        """A simulator said Hello.

        Args:
            key: of the connection, unique.
            number: orders the simulators.
            specs: by behavior id.

        Returns:
            Key of the connection that this one takes the place of: a simulator that comes back may be
            faster than the news of its broken link.

        Raises:
            RemoteProtocolError: a spec contradicts what is known.
        """
        connection = Connection(number=number, key=key, sorts=self._lockstep)
        self._enroll(connection, specs)
        former = next((k for k, c in self.connections.items() if c.number == number and not c.gone), None)
        if former is not None:
            self.disconnect(former)
        self.connections[key] = connection
        return former

    def add_behaviors(self, key: int, specs: Mapping[str, BehaviorSpec]) -> None:
        """A simulator named more behaviors. Raises as `connect`."""
        self._enroll(self.connections[key], specs)

    def disconnect(self, key: int) -> None:
        """The link is closed: the next wake-up closes what its agents had open."""
        connection = self.connections.get(key)
        if connection is not None:
            connection.gone = True
            self.deterministic = False

    def receive(self, key: int, step: Step, now: float) -> None:
        """A Step arrived.

        Raises:
            RemoteProtocolError: it contradicts the specs or the agents alive; nothing of it is used.
        """
        connection = self.connections[key]
        arrivals = connection.arrive(step)
        self.matches.check(connection, arrivals, self.behaviors)
        new: dict[str, int] = {}
        for arrival in arrivals:
            if arrival.unknown:
                new[arrival.seat.id.name] = new.get(arrival.seat.id.name, 0) + arrival.unknown
        for name, n in new.items():
            self._check_room(name, n)
        connection.frame = Frame(sequence=step.sequence, received_at=now, arrivals=arrivals)

    def permit(self, name: str, permit: Permit) -> None:
        """Coordination says how far this process may go; heard again, a permit does not undo what was given back."""
        behavior = self.behaviors.get(name)
        if behavior is None or permit.serial < behavior.permit.serial:
            return
        if permit.serial == behavior.permit.serial:
            permit = replace(permit, allowance=min(permit.allowance, behavior.permit.allowance))
        behavior.permit = permit

    def return_unused(self) -> None:
        """Gives back the permits of behaviors without agents: others can use them."""
        for behavior in self.behaviors.values():
            permit = behavior.permit
            if not behavior.table.taken and permit.allowance > behavior.produced:
                behavior.permit = replace(permit, allowance=behavior.produced)

    def rejoin(self) -> None:
        """The reader of the steps is new: tell it of all live agents with the next wake-up."""
        self._rejoin = True

    # ---------------------------------------------------------------- a wake-up

    def wake(self, now: float, *, acting: bool = True) -> Wake:
        """Takes over what arrived, acts for who may go on.

        Args:
            now: time.
            acting: False at the end of a run, when outcomes still count and nobody is answered.
        """
        out = Wake()
        waiting = [key for key in self._waiting() if self.matches.covers(self.connections[key])]
        gone = [key for key, c in self.connections.items() if c.gone]
        ready = not self._lockstep or self._round_complete() or not acting
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
        """What assembly gets of the wake-ups since the last call, in order of behavior names."""
        self.introduced = False
        return self._told.take(lambda name: (self.behaviors[name].ghosts, self.matches.take(name)))

    def state(self) -> dict[str, Produced]:
        """Where each behavior stands."""
        return {name: self._produced(name, behavior) for name, behavior in self.behaviors.items()}

    @property
    def withheld(self) -> bool:
        """Whether some frame waits for a permit or weights."""
        return any(c.frame is not None and c.frame.withheld_at is not None for c in self.connections.values())

    # ---------------------------------------------------------------- inside

    def _tick(self, name: str) -> Tick:
        """What this wake-up leaves of behavior `name`."""
        tick = self._ticks.get(name)
        if tick is None:
            tick = self._ticks[name] = self._told.add(name, Tick(self._number), self.behaviors[name].produced)
        return tick

    def _check_room(self, name: str, n: int) -> None:
        """Refuses `n` more agents beside those here and those of frames not taken over yet, if that is too many."""
        table = self.behaviors[name].table
        frames = [c.frame for c in self.connections.values() if c.frame is not None and not c.frame.reported]
        expected = sum(a.unknown for frame in frames for a in frame.arrivals if a.seat.id.name == name)
        if table.taken + expected + n > table.limit:
            raise RemoteProtocolError(
                "too_large",
                got=f"{n} more agents of {name} beside {table.taken + expected}",
                expected=f"at most {table.limit} agents of one behavior",
                remedy="run fewer areas, or raise pipeline.max_agents",
            )

    def _enroll(self, connection: Connection, specs: Mapping[str, BehaviorSpec]) -> None:
        for text, spec in specs.items():
            name = BehaviorId.parse(text).name
            known = self.behaviors.get(name)
            if known is not None and known.spec != spec:
                raise RemoteProtocolError(
                    "specs",
                    got=f"another spec for {name!r}: {spec}",
                    expected=f"the same in all simulators and teams: {known.spec}",
                    remedy="run one build of the simulator, or give the other behavior another name",
                )
        for text, spec in specs.items():
            behavior_id = BehaviorId.parse(text)
            self.behaviors.setdefault(behavior_id.name, Behavior(spec=spec, table=SlotTable(self._max_agents)))
            connection.seats.setdefault(text, Seat(behavior_id, spec))
            connection.pending.setdefault(behavior_id.name, 0)

    def _round_complete(self) -> bool:
        living = [c for c in self.connections.values() if not c.gone]
        enough = len(living) >= self._expected or not self.deterministic
        return bool(living) and enough and all(c.frame is not None and self.matches.covers(c) for c in living)

    def _report(self, keys: list[int], now: float) -> None:
        """Takes over the outcomes of new frames."""
        for key in keys:
            connection = self.connections[key]
            frame = connection.frame
            if frame is None or frame.reported:
                continue
            frame.reported = True
            frame.withheld_at = now
            for name, count in connection.pending.items():
                self.behaviors[name].running -= count
            for name in sorted(self.matches.end(connection, frame.arrivals, self.behaviors)):
                self._tick(name)  # takes the results along
            for arrival in frame.arrivals:
                name = arrival.seat.id.name
                behavior = self.behaviors[name]
                begin = partial(self.matches.begin, connection)
                done, ghosts = settle(arrival, behavior.table, connection.number, self._tick(name), begin)
                behavior.produced += done
                behavior.ghosts += ghosts
                connection.pending[name] -= done
                connection.completed[name] = connection.completed.get(name, 0) + done + ghosts

    def _waiting(self) -> list[int]:
        """Connections with a frame: by number in lockstep, else who has waited longest first."""
        order = []
        for key, connection in self.connections.items():
            if connection.frame is not None:
                since = 0.0 if self._lockstep else connection.frame.received_at
                order.append((since, connection.number, key))
        return [key for _, _, key in sorted(order)]

    def _may_act(self, connection: Connection, frame: Frame) -> bool:
        """Whether weights and budgets of all that would act or go on acting allow it."""
        for arrival in frame.waiting:
            name = arrival.seat.id.name
            behavior, policy = self.behaviors[name], self._policies.get(name)
            if self.matches.serial < behavior.permit.assignment:
                return False
            if not arrival.learning:
                continue
            if policy is None or policy.version < behavior.permit.version or behavior.remaining <= 0:
                return False
        return all(self.behaviors[name].remaining > 0 for name, count in connection.pending.items() if count)

    def _act(self, keys: list[int], out: Wake, now: float) -> None:
        """Acts for every waiting simulator that the budgets let go on."""
        frames = [(key, self.connections[key]) for key in keys]
        if self._lockstep:
            admitted = frames if all(c.frame is not None and self._may_act(c, c.frame) for _, c in frames) else []
            for _, connection in admitted:
                self._admit(connection)
        else:
            admitted = []
            for key, connection in frames:
                if connection.frame is not None and self._may_act(connection, connection.frame):
                    self._admit(connection)
                    admitted.append((key, connection))
        answers = self._choose(admitted, out)
        for key, connection in admitted:
            frame = connection.frame
            assert frame is not None
            withheld = 0.0 if frame.withheld_at is None else now - frame.withheld_at
            act = Act(sequence=frame.sequence, actions=tuple(answers.get(key, ())))
            out.acts.append((key, act, frame.received_at, withheld))
            connection.frame = None

    def _admit(self, connection: Connection) -> None:
        """Counts a simulator's actions as under way."""
        assert connection.frame is not None
        for arrival in connection.frame.waiting:
            connection.pending[arrival.seat.id.name] += arrival.learning
        for name, count in connection.pending.items():
            self.behaviors[name].running += count

    def _choose(self, admitted: list[tuple[int, Connection]], out: Wake) -> dict[int, list[BehaviorActions]]:
        """One forward pass for each behavior name; the answers by connection."""
        by_name: dict[str, list[tuple[int, Arrival]]] = {}
        for key, connection in admitted:
            assert connection.frame is not None
            for arrival in connection.frame.waiting:
                by_name.setdefault(arrival.seat.id.name, []).append((key, arrival))
        answers: dict[int, list[BehaviorActions]] = {}
        for name, entries in sorted(by_name.items()):
            behavior, policy = self.behaviors[name], self._policies.get(name)
            choice = choose([arrival for _, arrival in entries], behavior, policy, partial(self._ghost, name))
            self._tick(name).choice = self._learning(choice, behavior.table)
            at = 0
            for key, arrival in entries:
                rows = slice(at, at + len(arrival.slots))
                answers.setdefault(key, []).append(answer(arrival, choice.chosen, rows))
                at = rows.stop
            learning = sum(arrival.learning for _, arrival in entries)
            out.acted += at
            out.rows += learning
            out.bytes += learning * behavior.row_bytes
        return answers

    def _ghost(self, name: str, number: int) -> Policy:
        return self._ghosts[name, number]

    @staticmethod
    def _learning(choice: Choice, table: SlotTable) -> Choice | None:
        """What assembly is told of a choice."""
        return choice.of(table.learning[join_columns(choice.slots)]) if table.ghosted else choice

    def _tell_again(self) -> None:
        """Adds all live agents of each behavior: their reader is new."""
        self._rejoin = False
        self.introduced = True
        for name, behavior in self.behaviors.items():
            tick = self._tick(name)
            live = np.flatnonzero(behavior.table.live & behavior.table.learning).astype(np.int32)
            told = [lives.slots[lives.fresh] for lives in tick.joined]
            tick.joined = [lives for lives in tick.joined if lives.fresh.all()]
            again = live[~np.isin(live, np.concatenate(told))] if told else live
            if again.size:
                tick.joined.append(Lives(behavior.table, again, fresh=False))

    def _close(self, connection: Connection) -> None:
        """Tells of the agents of a closed connection: they are lost, after all else of this wake-up."""
        for name, count in connection.pending.items():
            if connection.frame is None or not connection.frame.reported:
                self.behaviors[name].running -= count
        for name in sorted(self.matches.lose(connection, self.behaviors)):
            self._tick(name)  # takes what there is to tell of its matches along
        for seat in connection.seats.values():
            slots = seat.roster.slots
            if slots.size:
                behavior = self.behaviors[seat.id.name]
                learning = slots[behavior.table.learning[slots]]
                behavior.table.give_back(slots)
                if learning.size:
                    self._told.add(seat.id.name, Tick(self._number, lost=[learning]), behavior.produced)

    def _produced(self, name: str, behavior: Behavior) -> Produced:
        frames = [c.frame for c in self.connections.values() if c.frame is not None]
        return Produced(
            steps=behavior.produced,
            serial=behavior.permit.serial,
            allowance=behavior.permit.allowance,
            agents=behavior.table.taken,
            ghosts=behavior.ghosts,
            waiting=sum(len(a.slots) for frame in frames for a in frame.waiting if a.seat.id.name == name),
        )
