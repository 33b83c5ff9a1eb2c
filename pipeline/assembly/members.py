"""Holds the slots of group members of one behavior name, and the segments that their groups have not closed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.assembly import sequences
from sparring.pipeline.assembly.block import Block, FinishedSegments, Slots
from sparring.pipeline.assembly.groups import Mask, MemberSegments, Places
from sparring.pipeline.assembly.log import RowNumbers
from sparring.pipeline.assembly.notes import Account, Notes
from sparring.pipeline.specs import Array


class MemberBlock(Block):
    """Holds the slots of group members, whose segments close with those of their groups.

    Attributes:
        places: [slots] place of the member's group in the group table.
        totals: [slots] rewards of the group itself up to the member's last decision.
        decided: [slots] tick of that decision.
        departed: segments of members that have left groups whose segments are still open.
        unsent: finished segments that are not sent yet.
    """

    per_slot = (*Block.per_slot, "places", "totals", "decided")

    def __init__(self, horizon: int) -> None:
        super().__init__(horizon)
        self.places: Places = np.zeros(len(self.live), np.int64)
        self.totals: NDArray[np.float64] = np.zeros(len(self.live))
        self.decided: NDArray[np.int64] = np.zeros(len(self.live), np.int64)
        self.departed: list[MemberSegments] = []
        self.unsent: list[MemberSegments] = []

    def open_segments(self, slots: Slots, following: RowNumbers, until: NDArray[np.int64]) -> MemberSegments:
        """Returns the open segments of `slots`; the caller sets how they end, and frees or restarts the slots.

        Args:
            slots: [n] slots of the members.
            following: [n] row of the decision or end after each segment.
            until: [n] group timestep from which the member is absent.
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
        """Finishes the segments of all members of closing groups; members that continue begin new ones.

        Args:
            rank: [places] index of each group among those that close, -1 for the others.
            spans: [g] group timesteps of the closing groups.
            lost: [slots] whether the member's simulator has disconnected.
        """
        found = []
        present: Slots = np.flatnonzero(self.live & self.seen & (rank[self.places] >= 0)).astype(np.int32)
        if present.size:
            waiting = self.waiting(present)
            segments = self.open_segments(present, waiting, spans[rank[self.places[present]]] + 1)
            segments.interrupted = lost[present]
            found.append(segments)
            self.restart(present, waiting)
            self.log.times[waiting] = 0
        if self.departed:
            departed = MemberSegments.concatenate(self.departed)
            closing = rank[departed.groups] >= 0
            if np.count_nonzero(closing):
                found.append(departed.pick(np.flatnonzero(closing)))
                self.departed = [departed.pick(np.flatnonzero(~closing))]
        if not found:
            return None
        every = MemberSegments.concatenate(found)
        every.groups = rank[every.groups]
        every = every.pick(np.argsort(every.groups, kind="stable"))
        self.unsent.append(every)
        return every

    def _unsent(self) -> Iterable[FinishedSegments]:
        return (*self.departed, *self.unsent)


class BehaviorMembers:
    """Holds the members of one behavior name of a source.

    Attributes:
        number: number of the behavior name.
        notes: episodes that have ended.
        horizon: most group timesteps of a segment.
        message_steps: least steps of a message, except after a flush.
        sequence: group timesteps from one stored memory of an agent to the next; 0 for policies without memory.
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
        """Returns the steps that the source had produced by the last part that arrived."""
        return self.account.received

    @property
    def reached(self) -> int:
        """Returns the steps that are in messages or could not be recorded."""
        return self.account.reached

    @property
    def open_steps(self) -> int:
        """Returns the steps in open segments, those of departed members included."""
        block = self.block
        departed = sum(len(segments.rows) for segments in block.departed)
        return int(block.lengths[block.live].sum()) + departed

    def starts(self, lengths: NDArray[np.int32], times: NDArray[np.int32]) -> RowNumbers:
        """Returns the first row of each sequence, of which the message contains what the member carried."""
        if not self.sequence:
            return np.empty(0, np.int64)
        return sequences.windows(lengths, times, self.sequence)


def observations(columns: list[Array], rows: RowNumbers) -> tuple[Array, ...]:
    """Returns the given rows of every observation."""
    return tuple(column[rows] for column in columns)
