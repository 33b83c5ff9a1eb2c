"""Steps of one source and behavior in, finished segments out.

A segment closes when it has `time_horizon` steps, its agent ends, its simulator goes away, or a cut
asks for it. Small pieces are gathered into messages of at least `message_steps` steps; a cut sends what is
there, so nothing waits for ever: a learner that waits for steps always causes a cut.
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
from sparring.pipeline.assembly.log import Lines
from sparring.pipeline.assembly.notes import Account, Notes
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.steps import AgentsEnded, BehaviorSteps, OutcomesReported


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How segments are cut and sent.

    Attributes:
        horizon: most steps of a segment.
        message_steps: steps that are worth a message.
        largest: most steps of a message; a single longer segment is split, its first part closed by a cut.
        sequence: steps from one stored memory of an agent to the next; 0 where nothing is remembered.
    """

    horizon: int
    message_steps: int
    largest: int
    sequence: int = 0


class Assembler:
    """Open and finished segments of one behavior from one source.

    Args:
        behavior: name.
        source: start of the stepping process.
        origin: this start of assembly.
        sizes: how segments are cut and sent.
    """

    def __init__(self, behavior: str, source: str, origin: str, sizes: Sizes) -> None:
        self._sizes = sizes
        self._account = Account(behavior, source, origin)
        self._notes = Notes()
        self.block = Block(min(sizes.horizon, sizes.largest))

    @property
    def received(self) -> int:
        """Steps the source had produced by the last part that arrived."""
        return self._account.received

    @property
    def orphaned(self) -> int:
        """Steps that could not be recorded, because they began before this start of assembly."""
        return self._account.orphaned

    @property
    def open_steps(self) -> int:
        """Steps in open segments."""
        return int(self.block.lengths[self.block.live].sum())

    @property
    def closed_steps(self) -> int:
        """Steps in finished segments that are not sent yet."""
        return self.block.closed_steps

    def apply(self, part: BehaviorSteps) -> None:
        """Takes over the steps of some ticks."""
        self._account.begin(part.produced_before, part.ghosts)
        self._notes.ended(part.results)
        for record in (part.ended, part.joined, part.reported, part.acted):
            self.block.grow(None if record is None else record.slots)
        bounds = [[0, 0, 0, 0, 0], *np.cumsum(part.rows, axis=0).tolist()]
        completed = part.completed.tolist()
        at = 0
        while at < len(completed):
            following = at + self.alike(part, at)
            rows = [slice(start, stop) for start, stop in zip(bounds[at], bounds[following], strict=True)]
            take = self._tick if following == at + 1 else self._ticks
            found = take(part, rows, following - at)
            self._account.count(sum(completed[at:following]), found)
            at = following

    def skip(self, part: BehaviorSteps) -> None:
        """Counts the steps of some ticks as not recorded; matches that ended are kept."""
        self._account.begin(part.produced_before, part.ghosts)
        self._account.count(int(part.completed.sum()), 0)
        self._notes.ended(part.results)

    def close_all(self) -> None:
        """The source is gone: everything open is interrupted, every agent is gone."""
        self._interrupt(np.flatnonzero(self.block.live).astype(np.int32))

    def flush(self, serial: int) -> Iterator[Segments]:
        """Closes everything open without ending it, and sends all; the last message carries `serial`."""
        block = self.block
        slots = block.open_slots()
        if slots.size:
            waiting = block.waiting(slots)
            block.close(slots, waiting)
            block.restart(slots, waiting)
        yield from self._messages(serial, everything=True)

    def ready_messages(self) -> Iterator[Segments]:
        """Messages that are worth sending now: of enough steps, or of matches where no steps are to be waited for."""
        if self.closed_steps >= self._sizes.message_steps:
            yield from self._messages(0, everything=False)
        elif self._notes.results and not self.open_steps:
            yield from self._messages(0, everything=True)
        if self._account.unreported:
            yield self.greeting()

    def greeting(self) -> Segments:
        """An empty message, so that its reader hears of this source before its first segment."""
        return self._message([], 0)

    def rest(self) -> Iterator[Segments]:
        """Messages with everything finished."""
        if self.closed_steps or self._notes:
            yield from self._messages(0, everything=True)

    # ---------------------------------------------------------------- one tick

    def alike(self, part: BehaviorSteps, first: int) -> int:
        """How many ticks from `first` on can be taken together: the same live agents decide and act in each."""
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
        """Applies `count` ticks that are alike at once. Returns how many steps they completed."""
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
        """Applies one tick: its slice of the rows lost, ended, joined, reported, acted.

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
        decided: tuple[Slots, Lines | None] = (_NOBODY, None)
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
        self._notes.unreported(block.agents[slots])
        block.free(slots)

    def _end(self, ended: AgentsEnded) -> int:
        """Returns how many steps it completed."""
        block = self.block
        done = block.complete(ended.slots, ended.rewards, ended.group_rewards)
        here = np.flatnonzero(block.live[ended.slots])
        slots = ended.slots[here]
        stepped = block.lengths[slots] > 0
        gone = self._groups_gone(slots)
        if np.count_nonzero(stepped):
            last = here[stepped]
            piece = block.close(slots[stepped], block.append(tuple(column[last] for column in ended.observations)))
            piece.interrupted = ended.interrupted[last]
            piece.terminated = ~piece.interrupted
            piece.group_ended = gone[stepped]
        ended_whole = slots[self._notes.told(block, slots) & gone]
        outcomes = None if ended.outcomes is None else ended.outcomes[here]
        self._notes.add(block, slots, outcomes, self._group_returns(ended_whole))
        block.free(slots)
        return done

    def _groups_gone(self, ending: Slots) -> NDArray[np.bool_]:
        """[n] Whether no agent of the same group is left once `ending` are gone; alone counts as a group."""
        groups = self.block.groups[ending]
        if not groups.any():
            return np.ones(len(ending), bool)
        left = self.block.live.copy()
        left[ending] = False
        gone: NDArray[np.bool_] = ~np.isin(groups, self.block.groups[left]) | (groups == 0)
        return gone

    def _report(self, reported: OutcomesReported, part: slice) -> tuple[int, tuple[Slots, Lines | None]]:
        """Returns how many steps it completed; all agents with the rows of their decisions, None if one has none."""
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
        """One return for each group whose last agents are `last`.

        Members of a group that end together saw the same group rewards; the one that lived longest saw most.
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
        """Finished segments in messages of at most `largest` steps."""
        block = self.block
        while block.closed_steps >= (1 if everything else self._sizes.message_steps):
            pieces: list[SegmentSlice] = []
            steps = 0
            while block.closed and steps + len(block.closed[0].rows) <= self._sizes.largest:
                piece = block.closed.pop(0)
                pieces.append(piece)
                steps += len(piece.rows)
            if not pieces:  # one piece with several segments that do not fit together
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
            matchups=joined([piece.matchups for piece in pieces], np.int64) if self.block.drawn else None,
            **self._notes.take(),
            carried=None if log.carried is None else log.carried[rows[self._starts(per_segment["lengths"])]],
            **{name: getattr(log, name)[rows] for name in _PER_ROW},
            **per_segment,
        )

    def _starts(self, lengths: NDArray[np.int32]) -> NDArray[np.int64]:
        """First row of each sequence."""
        return sequences.divide(lengths, self._sizes.sequence)[0]


_NOBODY: Slots = np.empty(0, np.int32)
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
