"""Turns the steps of one source and behavior into finished segments.

A segment closes when it has `time_horizon` steps, its agent ends, its simulator disconnects, or a flush
requests it. Small segments are gathered into messages of at least `message_steps` steps; a flush sends all
that are open, so none waits forever: a learner that waits for steps always causes a flush.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.assembly import sequences
from sparring.pipeline.assembly.block import Block, SegmentSlice, Slots
from sparring.pipeline.assembly.columns import joined, slice_rows
from sparring.pipeline.assembly.log import RowNumbers
from sparring.pipeline.assembly.notes import Account, Notes
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.steps import AgentsEnded, BehaviorSteps, OutcomesReported


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sets the sizes of segments and messages.

    Attributes:
        horizon: most steps of a segment.
        message_steps: least steps of a message, except after a flush.
        largest: most steps of a message; a single longer segment is split, as if a flush closed its first part.
        sequence: steps from one stored memory of an agent to the next; 0 for policies without memory.
    """

    horizon: int
    message_steps: int
    largest: int
    sequence: int = 0


class Assembler:
    """Assembles the segments of one behavior from one source.

    Args:
        behavior: behavior name.
        source: incarnation of the stepping service.
        origin: incarnation of this assembly service.
        sizes: of segments and messages.
    """

    def __init__(self, behavior: str, source: str, origin: str, sizes: Sizes) -> None:
        self._sizes = sizes
        self._account = Account(behavior, source, origin)
        self._notes = Notes()
        self.block = Block(min(sizes.horizon, sizes.largest))

    @property
    def received(self) -> int:
        """Returns the steps that the source had produced by the last part that arrived."""
        return self._account.received

    @property
    def reached(self) -> int:
        """Returns the steps that are in messages or could not be recorded."""
        return self._account.reached

    @property
    def open_steps(self) -> int:
        """Returns the steps in open segments."""
        return int(self.block.lengths[self.block.live].sum())

    @property
    def closed_steps(self) -> int:
        """Returns the steps in finished segments that are not sent yet."""
        return self.block.closed_steps

    def apply(self, part: BehaviorSteps) -> None:
        """Records the steps of some ticks."""
        self._account.begin(part.produced_before)
        for record in (part.ended, part.joined, part.reported, part.acted):
            self.block.grow(None if record is None else record.slots)
        bounds = [[0, 0, 0, 0, 0], *np.cumsum(part.rows, axis=0).tolist()]
        completed = part.completed.tolist()
        at = 0
        while at < len(completed):
            following = at + self.alike(part, at)
            rows = [slice(start, stop) for start, stop in zip(bounds[at], bounds[following], strict=True)]
            apply = self._tick if following == at + 1 else self._ticks
            found = apply(part, rows, following - at)
            self._account.count(sum(completed[at:following]), found)
            at = following

    def close_all(self) -> None:
        """Interrupts all open segments and removes all agents, because the source has ended."""
        self._interrupt(np.flatnonzero(self.block.live).astype(np.int32))

    def flush(self, serial: int) -> Iterator[Segments]:
        """Closes all open segments without an end, and yields all messages; the last one carries `serial`."""
        block = self.block
        slots = block.open_slots()
        if slots.size:
            waiting = block.waiting(slots)
            block.close(slots, waiting)
            block.restart(slots, waiting)
        yield from self._messages(serial, everything=True)

    def ready_messages(self) -> Iterator[Segments]:
        """Yields messages of enough steps."""
        if self.closed_steps >= self._sizes.message_steps:
            yield from self._messages(0, everything=False)
        if self._account.has_unreported:
            yield self.announcement()

    def announcement(self) -> Segments:
        """Returns an empty message, which makes this source known before its first segment."""
        return self._message([], 0)

    def rest(self) -> Iterator[Segments]:
        """Yields messages with all finished segments."""
        if self.closed_steps or self._notes:
            yield from self._messages(0, everything=True)

    # ---------------------------------------------------------------- one tick

    def alike(self, part: BehaviorSteps, first: int) -> int:
        """Returns how many ticks from `first` on can be applied together: the same live agents act in each."""
        reported, acted, counts = part.reported, part.acted, part.rows
        if reported is None or acted is None or acted.slots is not None:
            return 1
        n = int(counts[first, 3])
        plain = (counts[first:] == (0, 0, 0, n, n)).all(axis=1)
        most = min(int(np.argmin(plain)) if not plain.all() else len(plain), self.block.horizon)
        if most < 2 or not n:
            return 1
        start = int(counts[:first, 3].sum())
        slots = reported.slots[start : start + most * n].reshape(most, n)
        if np.count_nonzero(self.block.live[slots[0]]) < n:
            return 1
        same = (slots == slots[0]).all(axis=1)
        return most if same.all() else int(np.argmin(same))

    def _ticks(self, part: BehaviorSteps, rows: list[slice], count: int) -> int:
        """Applies `count` ticks that are alike at once; returns how many steps they completed."""
        assert part.reported is not None
        assert part.acted is not None
        reported, where = slice_rows(part.reported, rows[3]), rows[4]
        n = len(reported.slots) // count
        slots, shared = reported.slots[:n], reported.group_rewards
        found = self.block.complete(slots, reported.rewards[:n], None if shared is None else shared[:n])
        later = None if shared is None else shared[n:]
        self.block.step(slots, reported.observations, reported.rewards[n:], later, part.acted, where)
        self.block.close_full(slots)
        return found + (count - 1) * n

    def _tick(self, part: BehaviorSteps, rows: list[slice], _: int) -> int:
        """Applies one tick, given its slices of the rows lost, ended, joined, reported and acted.

        Returns how many steps it completed.
        """
        lost, ended, joined, reported, acted = rows
        found = 0
        if part.lost is not None and lost.start < lost.stop:
            self._interrupt(part.lost[lost])
        if part.ended is not None and ended.start < ended.stop:
            found += self._end(slice_rows(part.ended, ended))
        if part.joined is not None and joined.start < joined.stop:
            self.block.join(slice_rows(part.joined, joined))
        decided: tuple[Slots, RowNumbers | None] = (_NO_SLOTS, None)
        if part.reported is not None and reported.start < reported.stop:
            done, decided = self._report(part.reported, reported)
            found += done
        if part.acted is not None and acted.start < acted.stop:
            if part.acted.slots is not None:
                decided = (part.acted.slots[acted], None)
            self.block.act(part.acted, acted, *decided)
        return found

    def _interrupt(self, lost: Slots) -> None:
        block = self.block
        slots = block.of_live(lost[lost < len(block.live)])
        stepped = slots[block.lengths[slots] > 0]
        if stepped.size:
            block.close(stepped, block.waiting(stepped)).interrupted[:] = True
        self._notes.add_unreported(block.agents[slots])
        block.free(slots)

    def _end(self, ended: AgentsEnded) -> int:
        """Records the ends of agents; returns how many steps they completed."""
        block = self.block
        done = block.complete(ended.slots, ended.rewards, ended.group_rewards)
        here = np.flatnonzero(block.live[ended.slots])
        slots = ended.slots[here]
        stepped = block.lengths[slots] > 0
        groups_ended = self._groups_ended(slots)
        if np.count_nonzero(stepped):
            last = here[stepped]
            piece = block.close(slots[stepped], block.append(tuple(column[last] for column in ended.observations)))
            piece.interrupted = ended.interrupted[last]
            piece.terminated = ~piece.interrupted
            piece.group_ended = groups_ended[stepped]
        ended_whole = slots[self._notes.reportable(block, slots) & groups_ended]
        outcomes = None if ended.outcomes is None else ended.outcomes[here]
        self._notes.add(block, slots, outcomes, self._group_returns(ended_whole))
        block.free(slots)
        return done

    def _groups_ended(self, ending: Slots) -> NDArray[np.bool_]:
        """Returns [n] whether no agent of the same group remains without `ending`; a lone agent is its own group."""
        groups = self.block.groups[ending]
        if not groups.any():
            return np.ones(len(ending), bool)
        left = self.block.live.copy()
        left[ending] = False
        ended: NDArray[np.bool_] = ~np.isin(groups, self.block.groups[left]) | (groups == 0)
        return ended

    def _report(self, reported: OutcomesReported, part: slice) -> tuple[int, tuple[Slots, RowNumbers | None]]:
        """Records outcomes; returns the steps completed, the slots, and the rows of their decisions if all have one."""
        block = self.block
        slots = reported.slots[part]
        group_rewards = None if reported.group_rewards is None else reported.group_rewards[part]
        done = block.complete(slots, reported.rewards[part], group_rewards)
        known, rows = block.observe(slots, tuple(column[part] for column in reported.observations))
        full = block.lengths[known] >= block.horizon
        if np.count_nonzero(full):
            block.close(known[full], rows[full])
            block.restart(known[full], rows[full])
        return done, (slots, rows if len(known) == len(slots) else None)

    def _group_returns(self, last: Slots) -> NDArray[np.float32]:
        """Returns one return for each group whose last agents are `last`.

        Members of a group that end together saw the same group rewards; the longest episode saw most of them.
        """
        block = self.block
        last = last[block.groups[last] != 0]
        if not last.size:
            return np.empty(0, np.float32)
        order = last[np.argsort(-block.episode_lengths[last], kind="stable")]
        _, first = np.unique(block.groups[order], return_index=True)
        return block.episode_group_returns[order[np.sort(first)]].astype(np.float32)

    # ---------------------------------------------------------------- messages

    def _messages(self, serial: int, *, everything: bool) -> Iterator[Segments]:
        """Yields finished segments in messages of at most `largest` steps."""
        block = self.block
        while block.closed_steps >= (1 if everything else self._sizes.message_steps):
            pieces: list[SegmentSlice] = []
            steps = 0
            while block.closed and steps + len(block.closed[0].rows) <= self._sizes.largest:
                piece = block.closed.pop(0)
                pieces.append(piece)
                steps += len(piece.rows)
            if not pieces:  # one piece with several segments that together exceed a message
                middle = len(block.closed[0].lengths) // 2
                block.closed[:1] = [block.closed[0].part(slice(0, middle)), block.closed[0].part(slice(middle, None))]
                continue
            block.closed_steps -= steps
            yield self._message(pieces, serial if not block.closed else 0)
            if serial and not block.closed:
                return
        if serial or (everything and self._notes):
            yield self._message([], serial)

    def _message(self, pieces: list[SegmentSlice], serial: int) -> Segments:
        log = self.block.log
        rows = joined([piece.rows for piece in pieces], np.int64)
        following = joined([piece.following for piece in pieces], np.int64)
        per_segment = {name: joined([getattr(piece, name) for piece in pieces], dtype) for name, dtype in _PER_SEGMENT}
        return Segments(
            **self._account.next_message(len(rows)),
            flush=serial,
            observations=tuple(column[rows] for column in log.observations),
            next_observations=tuple(column[following] for column in log.observations),
            masks=None if log.masks is None else log.masks[rows],
            matchups=joined([piece.matchups for piece in pieces], np.int64) if self.block.has_matchups else None,
            episodes=self._notes.take(),
            carried=None if log.carried is None else log.carried[rows[self._starts(per_segment["lengths"])]],
            **{name: getattr(log, name)[rows] for name in _PER_ROW},
            **per_segment,
        )

    def _starts(self, lengths: NDArray[np.int32]) -> NDArray[np.int64]:
        """Returns the first row of each sequence."""
        return sequences.divide(lengths, self._sizes.sequence)[0]


_NO_SLOTS: Slots = np.empty(0, np.int32)
_PER_ROW = ("continuous", "discrete", "log_probs", "rewards", "group_rewards", "versions")
_PER_SEGMENT: tuple[tuple[str, Any], ...] = (
    ("lengths", np.int32),
    ("terminated", np.bool_),
    ("interrupted", np.bool_),
    ("group_ended", np.bool_),
    ("teams", np.int32),
    ("groups", np.int64),
    ("agents", np.int64),
    ("simulators", np.int32),
)
