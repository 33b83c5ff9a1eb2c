"""Steps of one source and behavior in, finished segments out.

A segment closes when it has `time_horizon` steps, its agent ends, its simulator goes away, or a cut
asks for it. Small pieces are gathered into messages of at least `flush` steps; a cut sends what is
there, so nothing waits for ever: a learner that waits for steps always causes a cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.assembly.block import Block, Rows, Slots
from pipeline.messages.service import BehaviorSteps, Ended, Episodes, Reported, Segments


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How segments are cut and sent.

    Attributes:
        horizon: most steps of a segment.
        flush: steps that are worth a message.
        largest: most steps of a message; a single longer segment is split, its first part closed by a cut.
    """

    horizon: int
    flush: int
    largest: int


class Assembler:
    """Open and finished segments of one behavior from one source.

    Args:
        behavior: name.
        source: start of the stepping process.
        origin: this start of assembly.
        sizes: how segments are cut and sent.
    """

    def __init__(self, behavior: str, source: str, origin: str, sizes: Sizes) -> None:
        self.behavior, self.source, self.origin = behavior, source, origin
        self._sizes = sizes
        self.block = Block(min(sizes.horizon, sizes.largest))
        self.received = 0
        self.orphaned = 0
        self.episodes: list[Episodes] = []
        self._began: int | None = None
        self._sequence = 0
        self._closed: list[Rows] = []
        self._closed_steps = 0

    @property
    def open_steps(self) -> int:
        """Steps in open segments."""
        return int(self.block.lengths[self.block.live].sum())

    @property
    def closed_steps(self) -> int:
        """Steps in finished segments that are not sent yet."""
        return self._closed_steps

    def apply(self, part: BehaviorSteps) -> None:
        """Takes over one wake-up's steps."""
        if self._began is None:
            self._began = self.received = part.produced_before
        if part.lost is not None:
            self._interrupt(part.lost)
        if part.ended is not None:
            self._end(part.ended)
        if part.joined is not None:
            self.block.join(part.joined)
        if part.reported is not None:
            self._report(part.reported)
        if part.acted is not None:
            self.block.act(part.acted)

    def close_all(self) -> None:
        """The source is gone: everything open is interrupted, every agent is gone."""
        self._interrupt(np.flatnonzero(self.block.live).astype(np.int32))

    def cut(self, serial: int) -> Iterator[Segments]:
        """Closes everything open without ending it, and sends all; the last message carries `serial`."""
        slots = self.block.open_slots()
        if slots.size:
            times = self.block.lengths[slots]
            self._close(slots, self.block.waiting_observations(slots))
            self.block.restart(slots, times)
        yield from self._messages(serial, everything=True)

    def flush(self) -> Iterator[Segments]:
        """Messages that are worth sending now."""
        if self._closed_steps >= self._sizes.flush:
            yield from self._messages(0, everything=False)

    def greeting(self) -> Segments:
        """An empty message, so that its reader hears of this source before its first segment."""
        return self._message([], 0)

    def rest(self) -> Iterator[Segments]:
        """Messages with everything finished."""
        if self._closed_steps or self.episodes:
            yield from self._messages(0, everything=True)

    # ---------------------------------------------------------------- what closes a segment

    def _interrupt(self, lost: Slots) -> None:
        slots = self.block.of_live(lost)
        stepped = slots[self.block.lengths[slots] > 0]
        if stepped.size:
            rows = self._close(stepped, self.block.waiting_observations(stepped))
            rows.interrupted[:] = True
        self.block.free(slots)

    def _end(self, ended: Ended) -> None:
        block = self.block
        self.received += int(np.count_nonzero(ended.completed))
        known = ended.slots < len(block.live)
        if not known.all():
            self.orphaned += int(np.count_nonzero(ended.completed & ~known))
            ended = _rows_of(ended, known)
        self.orphaned += block.complete(ended)
        here = np.flatnonzero(block.live[ended.slots])
        slots = ended.slots[here]
        lengths = block.lengths[slots]
        finals = here[lengths > 0]
        gone = self._groups_gone(slots)
        if finals.size:
            rows = self._close(ended.slots[finals], [column[finals] for column in ended.observations])
            rows.interrupted = ended.interrupted[finals].copy()
            rows.terminated = ~rows.interrupted
            rows.group_ended = gone[lengths > 0]
        self._note_episodes(slots, gone, None if ended.outcomes is None else ended.outcomes[here])
        block.free(slots)

    def _groups_gone(self, ending: Slots) -> NDArray[np.bool_]:
        """[n] Whether no agent of the same group is left once `ending` are gone; alone counts as a group."""
        groups = self.block.groups[ending]
        if not groups.any():
            return np.ones(len(ending), bool)
        left = self.block.live.copy()
        left[ending] = False
        gone: NDArray[np.bool_] = ~np.isin(groups, self.block.groups[left]) | (groups == 0)
        return gone

    def _report(self, reported: Reported) -> None:
        block = self.block
        self.received += int(np.count_nonzero(reported.completed))
        known = reported.slots < len(block.live)
        if not known.all():
            self.orphaned += int(np.count_nonzero(reported.completed & ~known))
            reported = _rows_of(reported, known)
        self.orphaned += block.complete(reported)
        full = np.flatnonzero(block.lengths[reported.slots] >= block.horizon)
        if full.size:
            slots = reported.slots[full]
            self._close(slots, [column[full] for column in reported.observations])
            block.lengths[slots] = 0
        block.observe(reported)

    def _close(self, slots: Slots, following: list[Any]) -> Rows:
        rows = self.block.rows(slots, following)
        self._closed.append(rows)
        self._closed_steps += rows.steps
        return rows

    def _note_episodes(self, slots: Slots, gone: NDArray[np.bool_], outcomes: NDArray[np.float32] | None) -> None:
        """Keeps the statistics of whole episodes; one that was joined under way tells nothing."""
        block = self.block
        told = block.known[slots] & (block.episode_lengths[slots] > 0)
        if not told.any():
            return
        whole = slots[told]
        self.episodes.append(
            Episodes(
                returns=block.episode_returns[whole].astype(np.float32),
                lengths=block.episode_lengths[whole].astype(np.int32),
                group_returns=self._group_returns(slots[told & gone]),
                teams=block.teams[whole],
                outcomes=np.full(len(whole), -1.0, np.float32) if outcomes is None else outcomes[told].copy(),
            )
        )

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
        while self._closed_steps >= (1 if everything else self._sizes.flush):
            pieces: list[Rows] = []
            steps = 0
            while self._closed and steps + self._closed[0].steps <= self._sizes.largest:
                piece = self._closed.pop(0)
                pieces.append(piece)
                steps += piece.steps
            if not pieces:  # one piece with several segments that do not fit together
                self._closed[:1] = _halves(self._closed[0])
                continue
            self._closed_steps -= steps
            yield self._message(pieces, serial if not self._closed else 0)
            if serial and not self._closed:
                return
        if serial or (everything and self.episodes):
            yield self._message([], serial)

    def _message(self, pieces: list[Rows], serial: int) -> Segments:
        if not pieces:
            pieces = [self.block.rows(np.empty(0, np.int32), self.block.waiting_observations(np.empty(0, np.int32)))]
        self._sequence += 1
        episodes, self.episodes = _joined_episodes(self.episodes), []
        return Segments(
            behavior=self.behavior,
            source=self.source,
            origin=self.origin,
            sequence=self._sequence,
            began=self._began or 0,
            orphaned=self.orphaned,
            received=self.received,
            cut=serial,
            masks=_joined_masks(pieces),
            observations=_joined_lists([piece.observations for piece in pieces]),
            next_observations=_joined_lists([piece.next_observations for piece in pieces]),
            episodes=episodes,
            **{name: _joined([getattr(piece, name) for piece in pieces]) for name in _PLAIN},
        )


_PLAIN = (
    "lengths",
    "continuous",
    "discrete",
    "log_probs",
    "rewards",
    "group_rewards",
    "versions",
    "terminated",
    "interrupted",
    "group_ended",
    "teams",
    "groups",
    "agents",
    "simulators",
)
_PER_ROW = frozenset({"continuous", "discrete", "log_probs", "rewards", "group_rewards", "versions"})


def _joined(columns: list[Any]) -> Any:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _joined_lists(lists: list[list[Any]]) -> tuple[Any, ...]:
    return tuple(_joined(list(columns)) for columns in zip(*lists, strict=True))


def _joined_masks(pieces: list[Rows]) -> Any:
    """Masks of all pieces; a piece from before the first mask forbade nothing."""
    width = next((piece.masks.shape[1] for piece in pieces if piece.masks is not None), None)
    if width is None:
        return None
    return _joined([np.zeros((p.steps, width), bool) if p.masks is None else p.masks for p in pieces])


def _joined_episodes(notes: list[Episodes]) -> Episodes:
    if not notes:
        nothing, none = np.empty(0, np.float32), np.empty(0, np.int32)
        return Episodes(returns=nothing, lengths=none, group_returns=nothing, teams=none, outcomes=nothing)
    names = ("returns", "lengths", "group_returns", "teams", "outcomes")
    return Episodes(**{name: _joined([getattr(note, name) for note in notes]) for name in names})


def _halves(rows: Rows) -> list[Rows]:
    """Splits a piece of at least two segments between segments."""
    middle = len(rows.lengths) // 2
    at = int(rows.lengths[:middle].sum())
    out = []
    for segments, steps in ((slice(None, middle), slice(None, at)), (slice(middle, None), slice(at, None))):
        half = Rows()
        for name in _PLAIN:
            setattr(half, name, getattr(rows, name)[steps if name in _PER_ROW else segments])
        half.observations = [column[steps] for column in rows.observations]
        half.next_observations = [column[segments] for column in rows.next_observations]
        half.masks = None if rows.masks is None else rows.masks[steps]
        out.append(half)
    return out


def _rows_of(record: Any, keep: NDArray[np.bool_]) -> Any:
    """The rows of an Ended or Reported that `keep` marks."""
    values: dict[str, Any] = {}
    for name in type(record).__slots__:
        value = getattr(record, name)
        if isinstance(value, tuple):
            values[name] = tuple(column[keep] for column in value)
        else:
            values[name] = None if value is None else value[keep]
    return type(record)(**values)
