"""One wake-up of stepping, without I/O: frames in, steps and actions out.

Whatever simulators sent since the last wake-up is taken over first: outcomes complete steps. Then
every simulator that the budgets let go on is acted for, all rows of a behavior in one forward pass.
A simulator whose behavior is at its budget waits with all its behaviors; its outcomes are taken over
all the same, so that the learner can have them.

In lockstep a wake-up is a round: it begins when every simulator has sent its frame, and takes them in
the order of their numbers, rows by agent id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import RemoteProtocolError
from pipeline.messages.service import (
    Acted,
    BehaviorSteps,
    Ended,
    Joined,
    Permit,
    Produced,
    Reported,
)
from pipeline.messages.simulator import Act, BehaviorActions, Step
from pipeline.specs import BehaviorId, BehaviorSpec
from pipeline.stepping.agents import Slots, SlotTable
from pipeline.stepping.connections import Connection, Frame, Outcomes, Seat, Waiting, in_order, join_columns, settle


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """Actions of `n` agents.

    Attributes:
        continuous: [n, continuous] raw sample.
        executed: [n, continuous] what the simulator gets, in [-1, 1].
        discrete: [n, branches] chosen index.
        log_probs: [n] of the joint action.
    """

    continuous: NDArray[np.float32]
    executed: NDArray[np.float32]
    discrete: NDArray[np.int32]
    log_probs: NDArray[np.float32]


class Policy(Protocol):
    """The current weights of one behavior."""

    @property
    def version(self) -> int:
        """Policy version."""

    def act(self, observations: tuple[NDArray[Any], ...], masks: NDArray[np.bool_] | None) -> Chosen:
        """Chooses for all rows in one pass."""


@dataclass(slots=True)
class Behavior:
    """One behavior name over all simulators.

    Attributes:
        spec: the first simulator's; all others must agree.
        table: slots of its agents.
        produced: completed steps.
        running: actions whose outcome has not come, of simulators that are not waiting for us.
        permit: how far this process may go.
    """

    spec: BehaviorSpec
    table: SlotTable
    produced: int = 0
    running: int = 0
    permit: Permit = field(default_factory=lambda: Permit(serial=0, allowance=0))

    @property
    def remaining(self) -> int:
        """Steps that may still be started."""
        return self.permit.allowance - self.produced - self.running


@dataclass(slots=True)
class Pieces:
    """What one wake-up gathers for one behavior name."""

    produced_before: int
    ended: list[tuple[Any, Slots, NDArray[np.bool_]]] = field(default_factory=list)
    joined: list[Slots] = field(default_factory=list)
    moved: list[Slots] = field(default_factory=list)
    reported: list[tuple[Any, Slots, NDArray[np.bool_]]] = field(default_factory=list)
    acted: Acted | None = None


class Wake:
    """What a wake-up did.

    Attributes:
        acts: answers: connection key, record, time of the frame's arrival, seconds withheld.
        rows: rows acted for.
    """

    def __init__(self) -> None:
        self.acts: list[tuple[int, Act, float, float]] = []
        self.rows = 0
        self.build: Callable[[], list[BehaviorSteps]] = list

    @cached_property
    def parts(self) -> list[BehaviorSteps]:
        """What assembly gets, in order. Made when first asked for, which is before the next wake-up:
        simulators need not wait for it.
        """
        return self.build()


class Stepper:
    """All simulators and behaviors of one stepping process.

    Args:
        policies: the current weights by behavior name; a missing one makes its agents wait.
        lockstep: act in rounds.
        expected: simulators that the first round waits for, in lockstep.
        max_agents: most agents of one behavior.
    """

    def __init__(
        self, policies: Mapping[str, Policy], *, lockstep: bool = False, expected: int = 1, max_agents: int = 65536
    ) -> None:
        self.behaviors: dict[str, Behavior] = {}
        self.connections: dict[int, Connection] = {}
        self.deterministic = lockstep
        self._policies = policies
        self._lockstep = lockstep
        self._expected = expected
        self._max_agents = max_agents
        self._tick = 0
        self._rejoin: set[str] = set()

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
        connection = Connection(number=number)
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
        connection.check(step)
        newcomers = connection.newcomers(step)
        for name, n in newcomers.items():
            self._check_room(name, n)
        connection.frame = Frame(step=step, received_at=now, newcomers=newcomers)

    def permit(self, name: str, permit: Permit) -> None:
        """Coordination says how far this process may go; heard again, a permit does not undo what was given back."""
        behavior = self.behaviors.get(name)
        if behavior is None or permit.serial < behavior.permit.serial:
            return
        if permit.serial == behavior.permit.serial:
            allowance = min(permit.allowance, behavior.permit.allowance)
            permit = Permit(serial=permit.serial, allowance=allowance, version=permit.version)
        behavior.permit = permit

    def rejoin(self) -> None:
        """The reader of the parts is new: tell it of all live agents with the next parts."""
        self._rejoin = set(self.behaviors)

    # ---------------------------------------------------------------- a wake-up

    def wake(self, now: float, *, acting: bool = True) -> Wake:
        """Takes over what arrived, acts for who may go on.

        Args:
            now: time.
            acting: False at the end of a run, when outcomes still count and nobody is answered.
        """
        out = Wake()
        waiting = self._waiting()
        gone = [key for key, c in self.connections.items() if c.gone]
        ready = not self._lockstep or self._round_complete() or not acting
        if not (gone or self._rejoin or (waiting and ready)):
            return out
        self._tick += 1
        pieces: dict[str, Pieces] = {}
        self._report(waiting if ready else [key for key in waiting if key in gone], pieces, now)
        if ready and acting:
            self._act([key for key in waiting if key not in gone], pieces, out, now)
        self._tell_again(pieces)
        closed = self._close(gone) if gone else []
        out.build = lambda: [*(self._part(name, piece) for name, piece in sorted(pieces.items())), *closed]
        return out

    def state(self) -> dict[str, Produced]:
        """Where each behavior stands; an unused permit is given back where no agent lives."""
        return {name: self._produced(name, behavior) for name, behavior in self.behaviors.items()}

    @property
    def withheld(self) -> bool:
        """Whether some frame waits for a permit or weights."""
        return any(c.frame is not None and c.frame.withheld_at is not None for c in self.connections.values())

    # ---------------------------------------------------------------- inside

    def _check_room(self, name: str, n: int) -> None:
        """Refuses `n` more agents beside those here and those of frames not taken over yet, if that is too many."""
        table = self.behaviors[name].table
        frames = [c.frame for c in self.connections.values() if c.frame is not None and not c.frame.reported]
        taken = table.taken + sum(frame.newcomers.get(name, 0) for frame in frames)
        if taken + n > table.limit:
            raise RemoteProtocolError(
                "too_large",
                got=f"{n} more agents of {name} beside {taken}",
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
        return bool(living) and enough and all(c.frame is not None for c in living)

    def _report(self, keys: list[int], pieces: dict[str, Pieces], now: float) -> None:
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
            for report in frame.step.reports:
                ordered, restore = in_order(report) if self._lockstep else (report, None)
                seat = connection.seats[report.behavior]
                behavior = self.behaviors[seat.id.name]
                outcomes = settle(seat, ordered, behavior.table, connection.number)
                self._gather(seat.id.name, behavior, connection, outcomes, pieces)
                if outcomes.reported is not None:
                    decisions, slots, _ = outcomes.reported
                    frame.waiting.append(Waiting(report.behavior, seat.id.name, slots, decisions, restore))

    def _gather(
        self, name: str, behavior: Behavior, connection: Connection, outcomes: Outcomes, pieces: dict[str, Pieces]
    ) -> None:
        piece = pieces.setdefault(name, Pieces(produced_before=behavior.produced))
        if outcomes.ended is not None:
            piece.ended.append(outcomes.ended)
        if outcomes.joined is not None:
            piece.joined.append(outcomes.joined)
        if outcomes.moved is not None:
            piece.moved.append(outcomes.moved)
        if outcomes.reported is not None:
            piece.reported.append(outcomes.reported)
        done = outcomes.completed
        behavior.produced += done
        connection.pending[name] -= done
        connection.completed[name] = connection.completed.get(name, 0) + done

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
        for rows in frame.waiting:
            behavior, policy = self.behaviors[rows.name], self._policies.get(rows.name)
            if policy is None or policy.version < behavior.permit.version or behavior.remaining <= 0:
                return False
        return all(self.behaviors[name].remaining > 0 for name, count in connection.pending.items() if count)

    def _act(self, keys: list[int], pieces: dict[str, Pieces], out: Wake, now: float) -> None:
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
        answers = self._choose(admitted, pieces, out)
        for key, connection in admitted:
            frame = connection.frame
            assert frame is not None
            withheld = 0.0 if frame.withheld_at is None else now - frame.withheld_at
            act = Act(sequence=frame.step.sequence, actions=tuple(answers.get(key, ())))
            out.acts.append((key, act, frame.received_at, withheld))
            connection.frame = None

    def _admit(self, connection: Connection) -> None:
        """Counts a simulator's actions as under way."""
        assert connection.frame is not None
        for rows in connection.frame.waiting:
            connection.pending[rows.name] += len(rows.slots)
        for name, count in connection.pending.items():
            self.behaviors[name].running += count

    def _choose(
        self, admitted: list[tuple[int, Connection]], pieces: dict[str, Pieces], out: Wake
    ) -> dict[int, list[BehaviorActions]]:
        """One forward pass for each behavior name; the answers by connection."""
        by_name: dict[str, list[tuple[int, Waiting]]] = {}
        for key, connection in admitted:
            assert connection.frame is not None
            for rows in connection.frame.waiting:
                by_name.setdefault(rows.name, []).append((key, rows))
        answers: dict[int, list[BehaviorActions]] = {}
        for name, entries in sorted(by_name.items()):
            behavior, policy = self.behaviors[name], self._policies[name]
            piece = pieces.setdefault(name, Pieces(produced_before=behavior.produced))
            piece.acted, executed = _act_for([rows for _, rows in entries], behavior, policy)
            out.rows += len(piece.acted.slots)
            at = 0
            for key, rows in entries:
                n = len(rows.slots)
                part = slice(at, at + n)
                answers.setdefault(key, []).append(_answer(rows, executed[part], piece.acted.discrete[part]))
                at += n
        return answers

    def _tell_again(self, pieces: dict[str, Pieces]) -> None:
        """Adds all live agents of a behavior whose reader is new."""
        for name in self._rejoin:
            pieces.setdefault(name, Pieces(produced_before=self.behaviors[name].produced))

    def _part(self, name: str, piece: Pieces) -> BehaviorSteps:
        table = self.behaviors[name].table
        new = join_columns(piece.joined) if piece.joined else np.empty(0, np.int32)
        again = np.flatnonzero(table.live).astype(np.int32) if name in self._rejoin else _joined(piece.moved)
        self._rejoin.discard(name)
        again = again[~np.isin(again, new)] if again.size else again
        return BehaviorSteps(
            behavior=name,
            tick=self._tick,
            produced_before=piece.produced_before,
            ended=_ended(piece),
            joined=_told(table, new, again) if new.size or again.size else None,
            reported=_reported(piece),
            acted=piece.acted,
        )

    def _close(self, gone: list[int]) -> list[BehaviorSteps]:
        """Parts that tell of the agents of closed connections."""
        parts = []
        for key in gone:
            connection = self.connections.pop(key)
            for name, count in connection.pending.items():
                if connection.frame is None or not connection.frame.reported:
                    self.behaviors[name].running -= count
            for seat in connection.seats.values():
                slots = seat.roster.slots
                if slots.size:
                    behavior = self.behaviors[seat.id.name]
                    behavior.table.give_back(slots)
                    parts.append(
                        BehaviorSteps(
                            behavior=seat.id.name, tick=self._tick, produced_before=behavior.produced, lost=slots
                        )
                    )
        return parts

    def _produced(self, name: str, behavior: Behavior) -> Produced:
        agents = int(np.count_nonzero(behavior.table.live))
        if not agents and behavior.permit.allowance > behavior.produced:
            permit = behavior.permit
            behavior.permit = Permit(serial=permit.serial, allowance=behavior.produced, version=permit.version)
        frames = [c.frame for c in self.connections.values() if c.frame is not None]
        return Produced(
            steps=behavior.produced,
            serial=behavior.permit.serial,
            allowance=behavior.permit.allowance,
            agents=agents,
            waiting=sum(len(rows.slots) for frame in frames for rows in frame.waiting if rows.name == name),
        )


# ---------------------------------------------------------------- columns


def _act_for(entries: list[Waiting], behavior: Behavior, policy: Policy) -> tuple[Acted, NDArray[np.float32]]:
    """Chooses for all rows of a behavior; returns the record and what the simulators get."""
    columns = zip(*(rows.decisions.observations for rows in entries), strict=True)
    masks = _masks(entries, behavior.spec.actions.mask_size)
    chosen = policy.act(tuple(join_columns(column) for column in columns), masks)
    slots: Slots = join_columns([rows.slots for rows in entries])
    behavior.table.acted[slots] = True
    acted = Acted(
        slots=slots,
        continuous=chosen.continuous,
        discrete=chosen.discrete,
        log_probs=chosen.log_probs,
        masks=masks,
        versions=np.full(len(slots), policy.version, np.int64),
    )
    return acted, chosen.executed


def _masks(entries: list[Waiting], width: int) -> NDArray[np.bool_] | None:
    if all(rows.decisions.masks is None for rows in entries):
        return None
    columns = [
        np.zeros((len(rows.slots), width), bool) if rows.decisions.masks is None else rows.decisions.masks
        for rows in entries
    ]
    joined: NDArray[np.bool_] = join_columns(columns)
    return joined


def _answer(rows: Waiting, executed: NDArray[np.float32], discrete: NDArray[np.int32]) -> BehaviorActions:
    agents = rows.decisions.agents
    if rows.restore is not None:
        executed, discrete, agents = executed[rows.restore], discrete[rows.restore], agents[rows.restore]
    return BehaviorActions(behavior=rows.behavior, agents=agents, continuous=executed, discrete=discrete)


def _joined(columns: list[Slots]) -> Slots:
    joined: Slots = join_columns(columns) if columns else np.empty(0, np.int32)
    return joined


def _told(table: SlotTable, new: Slots, again: Slots) -> Joined:
    slots = np.concatenate([new, again])
    return Joined(
        slots=slots,
        agents=table.agents[slots],
        groups=table.groups[slots],
        teams=table.teams[slots],
        simulators=table.simulators[slots],
        fresh=np.arange(len(slots)) < len(new),
    )


def _ended(piece: Pieces) -> Ended | None:
    if not piece.ended:
        return None
    rows = [ends for ends, _, _ in piece.ended]
    outcomes = None
    if any(ends.outcomes is not None for ends in rows):
        unsaid = [np.full(len(ends.agents), -1.0, np.float32) for ends in rows]
        outcomes = join_columns([u if e.outcomes is None else e.outcomes for u, e in zip(unsaid, rows, strict=True)])
    return Ended(
        slots=join_columns([slots for _, slots, _ in piece.ended]),
        observations=tuple(join_columns(column) for column in zip(*(e.observations for e in rows), strict=True)),
        rewards=join_columns([ends.rewards for ends in rows]),
        group_rewards=join_columns([ends.group_rewards for ends in rows]),
        completed=join_columns([completed for _, _, completed in piece.ended]),
        interrupted=join_columns([ends.interrupted for ends in rows]),
        outcomes=outcomes,
    )


def _reported(piece: Pieces) -> Reported | None:
    if not piece.reported:
        return None
    rows = [decisions for decisions, _, _ in piece.reported]
    return Reported(
        slots=join_columns([slots for _, slots, _ in piece.reported]),
        observations=tuple(join_columns(column) for column in zip(*(d.observations for d in rows), strict=True)),
        rewards=join_columns([decisions.rewards for decisions in rows]),
        group_rewards=join_columns([decisions.group_rewards for decisions in rows]),
        completed=join_columns([completed for _, _, completed in piece.reported]),
    )
