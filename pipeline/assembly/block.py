"""Holds the open segments of one source and behavior: a slot per live agent, and the log rows of its steps.

An open segment of length t has its steps in rows `path[slot, :t]` of the log; row `path[slot, t]` is
the decision that waits for its outcome. All operations are on columns of slots.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.assembly.log import RowNumbers, StepLog
from sparring.pipeline.messages.steps import ActionsChosen, AgentsStarted
from sparring.pipeline.specs import Array

Slots = NDArray[np.int32]
Mask = NDArray[np.bool_]

_FIRST_SLOTS: Final = 16
_FIRST_STEPS: Final = 16


class FinishedSegments(Protocol):
    """Names the rows of finished segments, which the log keeps.

    Attributes:
        rows: [r] rows of the steps.
        following: [s] row of the decision or end after each segment.
    """

    rows: RowNumbers
    following: RowNumbers


@dataclass(slots=True)
class SegmentSlice:
    """Holds finished segments, one after the other, as rows of the log; other columns are those of `Segments`.

    Attributes:
        rows: [r] rows of the steps.
        following: [s] row of the decision or end after each segment.
    """

    lengths: NDArray[np.int32]
    rows: RowNumbers
    following: RowNumbers
    terminated: Mask
    interrupted: Mask
    group_ended: Mask
    agents: NDArray[np.int64]
    groups: NDArray[np.int64]
    teams: NDArray[np.int32]
    simulators: NDArray[np.int32]
    matchups: NDArray[np.int64]

    def part(self, segments: slice) -> SegmentSlice:
        """Returns some of the segments."""
        starts = np.concatenate([[0], np.cumsum(self.lengths)])
        rows = slice(int(starts[segments.start or 0]), int(starts[len(self.lengths[: segments.stop])]))
        values = {name: getattr(self, name)[segments] for name in self.__slots__ if name != "rows"}
        return SegmentSlice(rows=self.rows[rows], **values)


class Block:
    """Holds the slots of live agents.

    Attributes:
        live: whether an agent has the slot.
        seen: whether the decision that waits for its outcome is in the log.
        acted: whether an action was also chosen for that decision.
        known: whether the agent's episode was seen from the start.
        matchups: number of the matchup that the agent plays under.
        has_matchups: whether the behavior is under self-play.
        lessons: serial of the lessons that the agent's simulator had when its episode began.
        has_lessons: whether environment parameters have curricula.
        lengths: steps in the agent's open segment.
        episode_lengths: steps of its episode in segments closed before, likewise both returns.

    Args:
        horizon: most steps of a segment.
    """

    per_slot: tuple[str, ...] = (
        "live",
        "seen",
        "acted",
        "known",
        "lengths",
        "agents",
        "groups",
        "teams",
        "simulators",
        "matchups",
        "lessons",
        "episode_returns",
        "episode_group_returns",
        "episode_lengths",
    )

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon
        self.log = StepLog()
        self.closed: list[SegmentSlice] = []
        self.closed_steps = 0
        self.live: Mask = np.zeros(_FIRST_SLOTS, bool)
        self.seen: Mask = np.zeros(_FIRST_SLOTS, bool)
        self.acted: Mask = np.zeros(_FIRST_SLOTS, bool)
        self.known: Mask = np.zeros(_FIRST_SLOTS, bool)
        self.lengths: NDArray[np.int64] = np.zeros(_FIRST_SLOTS, np.int64)
        self.agents: NDArray[np.int64] = np.zeros(_FIRST_SLOTS, np.int64)
        self.groups: NDArray[np.int64] = np.zeros(_FIRST_SLOTS, np.int64)
        self.teams: NDArray[np.int32] = np.zeros(_FIRST_SLOTS, np.int32)
        self.simulators: NDArray[np.int32] = np.zeros(_FIRST_SLOTS, np.int32)
        self.matchups: NDArray[np.int64] = np.zeros(_FIRST_SLOTS, np.int64)
        self.has_matchups = False
        self.lessons: NDArray[np.int64] = np.zeros(_FIRST_SLOTS, np.int64)
        self.has_lessons = False
        self.episode_returns: NDArray[np.float64] = np.zeros(_FIRST_SLOTS)
        self.episode_group_returns: NDArray[np.float64] = np.zeros(_FIRST_SLOTS)
        self.episode_lengths: NDArray[np.int64] = np.zeros(_FIRST_SLOTS, np.int64)
        self._path: RowNumbers = np.zeros((_FIRST_SLOTS, min(_FIRST_STEPS, horizon) + 1), np.int64)

    # ---------------------------------------------------------------- writing

    def join(self, joined: AgentsStarted) -> None:
        """Gives slots to agents; one that has its slot already keeps its open segment."""
        slots = joined.slots
        is_new = ~(self.live[slots] & (self.agents[slots] == joined.agents))
        new = slots[is_new]
        self.seen[new] = False
        self.acted[new] = False
        self.lengths[new] = 0
        self.episode_returns[new] = 0.0
        self.episode_group_returns[new] = 0.0
        self.episode_lengths[new] = 0
        self.known[slots] = joined.fresh | self.known[slots] & ~is_new
        self.live[slots] = True
        self.agents[slots] = joined.agents
        self.groups[slots] = joined.groups
        self.teams[slots] = joined.teams
        self.simulators[slots] = joined.simulators
        if joined.matchups is not None:
            self.has_matchups = True
            self.matchups[slots] = joined.matchups
        if joined.lessons is not None:
            self.has_lessons = True
            self.lessons[slots] = joined.lessons

    def complete(self, slots: Slots, rewards: NDArray[np.float32], group_rewards: NDArray[np.float32] | None) -> int:
        """Writes the outcomes of pending steps.

        Returns:
            How many there were; the other rows have no action that this block knows.
        """
        pending = self.acted[slots]
        done = int(np.count_nonzero(pending))
        if done < len(slots):
            slots, rewards = slots[pending], rewards[pending]
            group_rewards = None if group_rewards is None else group_rewards[pending]
        times = self.lengths[slots]
        rows = self._path[slots, times]
        self.log.rewards[rows] = rewards
        if group_rewards is not None:
            self.log.group_rewards[rows] = group_rewards
        self.lengths[slots] = times + 1
        self.acted[slots] = False
        self.seen[slots] = False
        return done

    def observe(self, slots: Slots, observations: tuple[Array, ...]) -> tuple[Slots, RowNumbers]:
        """Writes the observations of agents at their next decision.

        Returns:
            The live ones of `slots`, and the row of each.
        """
        live = self.live[slots]
        if np.count_nonzero(live) < len(slots):
            slots, observations = slots[live], tuple(column[live] for column in observations)
        rows = self._add(observations)
        times = self.lengths[slots]
        self._lengthen(int(times.max(initial=0)))
        self._path[slots, times] = rows
        self.seen[slots] = True
        return slots, rows

    def step(
        self,
        slots: Slots,
        observations: tuple[Array, ...],
        rewards: NDArray[np.float32],
        group_rewards: NDArray[np.float32] | None,
        acted: ActionsChosen,
        part: slice,
    ) -> None:
        """Writes several ticks in which the same live agents decided and acted, and nothing else happened.

        Args:
            slots: [n] slots of the agents; the outcomes of their steps before the first tick are written.
            observations: one [k n, *shape] per observation, tick by tick.
            rewards: [(k - 1) n] rewards of the steps that the later ticks complete.
            group_rewards: [(k - 1) n] group rewards likewise, or None.
            acted: record with the actions.
            part: rows of `acted`.
        """
        rows = self._add(observations)
        first, done, count = int(rows[0]), len(rewards), len(rows) // len(slots)
        self.log.rewards[first : first + done] = rewards
        if group_rewards is not None:
            self.log.group_rewards[first : first + done] = group_rewards
        self.log.act(slice(first, first + len(rows)), acted, part)
        times = self.lengths[slots]
        self._lengthen(int(times.max()) + count - 1)
        self._path[slots[:, None], times[:, None] + np.arange(count)] = rows.reshape(count, -1).T
        self.lengths[slots] = times + (count - 1)
        self.seen[slots] = True
        self.acted[slots] = True

    def append(self, observations: tuple[Array, ...]) -> RowNumbers:
        """Writes the observations of agents at their end; returns the row of each."""
        return self._add(observations)

    def act(self, acted: ActionsChosen, part: slice, slots: Slots, rows: RowNumbers | None) -> None:
        """Writes the actions chosen for decisions that are in the log.

        Args:
            acted: record with the actions.
            part: rows of `acted`.
            slots: slots of the agents.
            rows: consecutive rows of their decisions; if None, they are looked up, and decisions reported before this
                block began are left out.
        """
        if rows is not None:
            self.log.act(slice(int(rows[0]), int(rows[-1]) + 1) if len(rows) else slice(0), acted, part)
            self.acted[slots] = True
            return
        known = np.flatnonzero(self.seen[slots])
        slots = slots[known]
        self.log.act(self._path[slots, self.lengths[slots]], acted, known + part.start)
        self.acted[slots] = True

    def close_full(self, slots: Slots) -> None:
        """Finishes the segments of `slots` that have reached the horizon; steps beyond it begin new ones.

        No segment has two horizons of steps. They close in the order of the ticks in which they reached the horizon.
        """
        lengths = self.lengths[slots]
        full = np.flatnonzero(lengths >= self.horizon)
        if not full.size:
            return
        full = full[np.argsort(-lengths[full], kind="stable")]  # the longest was the first to reach it
        slots, beyond = slots[full], lengths[full] - self.horizon
        self.lengths[slots] = self.horizon
        self.close(slots, self._path[slots, self.horizon])
        moved = int(beyond[0]) + 1
        self._path[slots, :moved] = self._path[slots, self.horizon : self.horizon + moved]
        self.lengths[slots] = beyond

    def close(self, slots: Slots, following: RowNumbers) -> SegmentSlice:
        """Finishes the open segments of `slots`, each of at least one step, without ending them.

        Args:
            slots: [n] slots of the agents.
            following: [n] row of the decision or end after each segment.

        The caller sets the flags of the result, and the new lengths.
        """
        lengths, rows = self.steps_of(slots)
        piece = SegmentSlice(
            lengths=lengths,
            rows=rows,
            following=following,
            terminated=np.zeros(len(slots), bool),
            interrupted=np.zeros(len(slots), bool),
            group_ended=np.zeros(len(slots), bool),
            agents=self.agents[slots],
            groups=self.groups[slots],
            teams=self.teams[slots],
            simulators=self.simulators[slots],
            matchups=self.matchups[slots],
        )
        self.closed.append(piece)
        self.closed_steps += len(rows)
        return piece

    def steps_of(self, slots: Slots) -> tuple[NDArray[np.int32], RowNumbers]:
        """Moves the steps in the open segments of `slots` to those of closed segments.

        Returns:
            The number of steps of each slot [n], and their rows.
        """
        lengths = self.lengths[slots]
        starts = np.cumsum(lengths) - lengths
        times = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
        rows = self._path[np.repeat(slots, lengths), times]
        stepped = lengths > 0
        those, starts = slots[stepped], starts[stepped]
        self.episode_returns[those] += np.add.reduceat(self.log.rewards[rows], starts, dtype=np.float64)
        self.episode_group_returns[those] += np.add.reduceat(self.log.group_rewards[rows], starts, dtype=np.float64)
        self.episode_lengths[slots] += lengths
        return lengths.astype(np.int32), rows

    def restart(self, slots: Slots, waiting: RowNumbers) -> None:
        """Begins new segments with the pending decisions in the rows `waiting`."""
        self._path[slots, 0] = waiting
        self.lengths[slots] = 0

    def free(self, slots: Slots) -> None:
        """Frees the slots of agents that have ended."""
        self.live[slots] = False
        self.seen[slots] = False
        self.acted[slots] = False
        self.lengths[slots] = 0

    # ---------------------------------------------------------------- reading

    def of_live(self, slots: Slots) -> Slots:
        """Returns the live ones of `slots`."""
        return slots[self.live[slots]]

    def open_slots(self) -> Slots:
        """Returns the slots whose open segment has at least one step, in order."""
        return np.flatnonzero(self.live & (self.lengths > 0)).astype(np.int32)

    def waiting(self, slots: Slots) -> RowNumbers:
        """Returns the row of the present decision of each slot."""
        rows: RowNumbers = self._path[slots, self.lengths[slots]]
        return rows

    # ---------------------------------------------------------------- size

    def grow(self, slots: Slots | None) -> None:
        """Adds rows so that all of `slots` fit."""
        needed = int(slots.max()) + 1 if slots is not None and slots.size else 0
        held = len(self.live)
        if needed <= held:
            return
        more = max(needed, 2 * held) - held
        for name in self.per_slot:
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(more, column.dtype)]))
        self._path = np.concatenate([self._path, np.zeros((more, self._path.shape[1]), np.int64)])

    def _lengthen(self, time: int) -> None:
        """Adds columns so that a row at `time` fits."""
        steps = self._path.shape[1]
        if time >= steps:
            more = max(time + 1 - steps, min(steps, self.horizon + 1 - steps))
            self._path = np.concatenate([self._path, np.zeros((len(self._path), more), np.int64)], axis=1)

    def _add(self, observations: tuple[Array, ...]) -> RowNumbers:
        n = len(observations[0])
        if self.log.size + n > self.log.capacity:
            self._compact(n)
        first = self.log.add(observations)
        return np.arange(first, first + n)

    def _compact(self, rows: int) -> None:
        """Frees the rows of the log that no segment needs, so that `rows` more fit."""
        slots = np.flatnonzero(self.live)
        inside = np.arange(self._path.shape[1]) < (self.lengths + self.seen)[slots, None]
        needed = np.zeros(self.log.size, bool)
        needed[self._path[slots][inside]] = True
        for finished in self._unsent():
            needed[finished.rows] = True
            needed[finished.following] = True
        numbers = self.log.keep(needed, rows)
        moved = self._path[slots]
        moved[inside] = numbers[moved[inside]]
        self._path[slots] = moved
        for finished in self._unsent():
            finished.rows, finished.following = numbers[finished.rows], numbers[finished.following]

    def _unsent(self) -> Iterable[FinishedSegments]:
        """Returns all finished segments that are not sent yet."""
        return self.closed
