"""Members of groups that have one behavior name: their slots, and the segments that their groups have not closed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.assembly import sequences
from sparring.pipeline.assembly.block import Block, FinishedSegments, Slots
from sparring.pipeline.assembly.groups import Mask, MemberSegments, Places
from sparring.pipeline.assembly.log import Lines
from sparring.pipeline.assembly.notes import Account, Notes
from sparring.pipeline.messages.steps import AgentsEnded, AgentsStarted, BehaviorSteps, OutcomesReported


@dataclass(frozen=True, kw_only=True, slots=True)
class TickEvents:
    """One tick of one behavior name.

    Attributes:
        part: the record it stands in.
        lost: slots whose simulator went away.
        ended: agents that ended.
        joined: agents that came.
        reported: agents at their next decision.
        acted: rows of the actions.
        completed: steps it completes.
    """

    part: BehaviorSteps
    lost: Slots
    ended: AgentsEnded | None
    joined: AgentsStarted | None
    reported: OutcomesReported | None
    acted: slice
    completed: int

    @property
    def only_lost(self) -> bool:
        """Whether simulators went away and nothing else is told of."""
        others = self.ended or self.joined or self.reported
        return self.lost.size > 0 and others is None and self.acted.start == self.acted.stop


class MemberBlock(Block):
    """Slots of members.

    A segment ends with that of its group: `departed` keeps those of members that are gone before.

    Attributes:
        places: [slots] of the member's group in the group table.
        totals: [slots] what the group itself had earned at the member's last decision.
        decided: [slots] tick of that.
        departed: of members that are gone, whose groups go on.
        closed_stays: finished, and not sent yet.
    """

    per_slot = (*Block.per_slot, "places", "totals", "decided")

    def __init__(self, horizon: int) -> None:
        super().__init__(horizon)
        self.places: Places = np.zeros(len(self.live), np.int64)
        self.totals: NDArray[np.float64] = np.zeros(len(self.live))
        self.decided: NDArray[np.int64] = np.zeros(len(self.live), np.int64)
        self.departed: list[MemberSegments] = []
        self.closed_stays: list[MemberSegments] = []

    def stays(self, slots: Slots, following: Lines, until: NDArray[np.int64]) -> MemberSegments:
        """The open segments of `slots`; the caller says how they end, and frees or restarts the slots.

        Args:
            slots: [n] whose.
            following: [n] row of what came after.
            until: [n] group time from which on the member is not there.
        """
        lengths, rows = self.steps_of(slots)
        return MemberSegments(
            groups=self.places[slots],
            lengths=lengths,
            rows=rows,
            following=following,
            next_times=self.log.times[following],
            until=until.astype(np.int32),
            terminated=np.zeros(len(slots), bool),
            interrupted=np.zeros(len(slots), bool),
            agents=self.agents[slots],
            keys=self.groups[slots],
            teams=self.teams[slots],
            simulators=self.simulators[slots],
            matchups=self.matchups[slots],
        )

    def collect(self, rank: NDArray[np.int64], spans: NDArray[np.int64], lost: Mask) -> MemberSegments | None:
        """Finishes the segments of all members of closing groups; those that go on begin new ones.

        Args:
            rank: [places] number of each group among those that close, -1 for the others.
            spans: [g] their group times.
            lost: [slots] whose simulator went away.
        """
        found = []
        here: Slots = np.flatnonzero(self.live & self.seen & (rank[self.places] >= 0)).astype(np.int32)
        if here.size:
            waiting = self.waiting(here)
            stays = self.stays(here, waiting, spans[rank[self.places[here]]] + 1)
            stays.interrupted = lost[here]
            found.append(stays)
            self.restart(here, waiting)
            self.log.times[waiting] = 0
        if self.departed:
            gone = MemberSegments.concatenate(self.departed)
            closing = rank[gone.groups] >= 0
            if np.count_nonzero(closing):
                found.append(gone.pick(np.flatnonzero(closing)))
                self.departed = [gone.pick(np.flatnonzero(~closing))]
        if not found:
            return None
        every = MemberSegments.concatenate(found)
        every.groups = rank[every.groups]
        every = every.pick(np.argsort(every.groups, kind="stable"))
        self.closed_stays.append(every)
        return every

    def _kept(self) -> Iterable[FinishedSegments]:
        return (*self.departed, *self.closed_stays)


class BehaviorMembers:
    """One behavior name of a source.

    Attributes:
        number: of the behavior name.
        block: the slots.
        account: counts.
        notes: episodes that ended.
        horizon: most group times of a segment.
        message_steps: steps that are worth a message.
        sequence: group times from one stored memory of an agent to the next; 0 where nothing is remembered.
        closed_steps: steps in finished segments that are not sent yet.
        found: steps recorded in the present tick.
    """

    def __init__(self, number: int, account: Account, *, horizon: int, message_steps: int, sequence: int) -> None:
        self.number = number
        self.block = MemberBlock(horizon)
        self.account = account
        self.notes = Notes()
        self.horizon = horizon
        self.message_steps = message_steps
        self.sequence = sequence
        self.closed_steps = 0
        self.found = 0

    @property
    def received(self) -> int:
        """Steps the source had produced by the last part that arrived."""
        return self.account.received

    @property
    def orphaned(self) -> int:
        """Steps that could not be recorded, because they began before this start of assembly."""
        return self.account.orphaned

    @property
    def open_steps(self) -> int:
        """Steps in open segments, those of members that are gone included."""
        block = self.block
        departed = sum(len(stays.rows) for stays in block.departed)
        return int(block.lengths[block.live].sum()) + departed

    def starts(self, lengths: NDArray[np.int32], times: NDArray[np.int32]) -> Lines:
        """First row of each sequence, at which it is said what the member carried."""
        if not self.sequence:
            return np.empty(0, np.int64)
        return sequences.windows(lengths, times, self.sequence)


def observations(columns: list[NDArray[Any]], rows: Lines) -> tuple[NDArray[Any], ...]:
    """The given rows of every observation."""
    return tuple(column[rows] for column in columns)
