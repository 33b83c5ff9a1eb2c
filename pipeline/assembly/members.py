"""Holds the members of one behavior name of a source: a slot per live agent, and the log rows of its open segment.

An open segment of length t has its steps in rows `path[slot, :t]` of the log; row `path[slot, t]` is
the decision that waits for its outcome. All operations are on columns of slots.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.assembly import columns
from sparring.pipeline.assembly.columns import NO_ROWS, Mask, Places, RowNumbers, Slots, pick_ragged
from sparring.pipeline.assembly.log import MemberSegments, StepLog
from sparring.pipeline.assembly.ticks import TickEvents
from sparring.pipeline.messages.rows import concatenate, pick_where
from sparring.pipeline.messages.segments import Episodes
from sparring.pipeline.messages.steps import AgentsEnded, AgentsStarted, BehaviorSteps, OutcomesReported
from sparring.pipeline.specs import Array

NO_SLOTS: Final[Slots] = np.empty(0, np.int32)
_ALL: Final = slice(None)
_IDENTITY: Final = ("agents", "groups", "teams", "simulators", "matchups", "lessons")
_OF_SEGMENT: Final = ("places", "agents", "groups", "teams", "simulators", "matchups")
_OF_EPISODE: Final = ("seen", "acted", "lengths", "episode_returns", "episode_group_returns", "episode_lengths")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sets the sizes of segments and messages.

    Attributes:
        horizon: most steps of a segment, or group timesteps of a group's.
        message_steps: least steps of a message, except after a flush.
        largest: most steps of a message; a single longer segment is split, as if a flush closed its first part.
        sequence: steps from one stored memory of an agent to the next; 0 for policies without memory.
    """

    horizon: int
    message_steps: int
    largest: int
    sequence: int = 0


@dataclass(slots=True, eq=False)
class Members:
    """Holds the slots of live agents.

    Attributes:
        source: incarnation of the stepping service.
        origin: incarnation of this assembly service.
        number: number of the behavior name among those in groups.
        in_groups: the segments of members of a group close together; else each agent is a group of one.
        horizon: most steps of a segment, or group timesteps of a group's.
        received: steps that the source had produced by the last part that arrived.
        reached: steps that are in messages or could not be recorded; `announced` of them the last message reported.
        live: whether an agent has the slot.
        lost: whether its simulator has disconnected.
        seen: whether the decision that waits for its outcome is in the log.
        acted: whether an action was also chosen for that decision.
        known: whether the agent's episode was seen from the start.
        matchups: number of the matchup that the agent plays under.
        lessons: serial of the lessons that the agent's simulator had when its episode began.
        lengths: steps in the agent's open segment.
        episode_lengths: steps of its episode in segments closed before, likewise both returns.
        places: place of the agent's group in the table of groups.
        totals: rewards of the group itself up to the agent's last decision.
        decided: tick of that decision.
        departed: segments of agents that have left groups whose segments are still open.
        unsent: finished segments that are not sent yet, in all of `closed_steps`.
        episodes: episodes that have ended since the last message.
        has_matchups: whether the behavior is under self-play.
        has_lessons: whether environment parameters have curricula.
    """

    behavior: str
    source: str
    origin: str
    number: int
    sizes: Sizes
    in_groups: bool
    horizon: int
    received: int = 0
    reached: int = 0
    announced: int = 0
    log: StepLog = field(default_factory=StepLog)
    live: Mask = field(default_factory=columns.flags)
    lost: Mask = field(default_factory=columns.flags)
    seen: Mask = field(default_factory=columns.flags)
    acted: Mask = field(default_factory=columns.flags)
    known: Mask = field(default_factory=columns.flags)
    agents: NDArray[np.int64] = field(default_factory=columns.integers)
    groups: NDArray[np.int64] = field(default_factory=columns.integers)
    teams: NDArray[np.int32] = field(default_factory=columns.short_integers)
    simulators: NDArray[np.int32] = field(default_factory=columns.short_integers)
    matchups: NDArray[np.int64] = field(default_factory=columns.integers)
    lessons: NDArray[np.int64] = field(default_factory=columns.integers)
    lengths: NDArray[np.int64] = field(default_factory=columns.integers)
    episode_returns: NDArray[np.float64] = field(default_factory=columns.sums)
    episode_group_returns: NDArray[np.float64] = field(default_factory=columns.sums)
    episode_lengths: NDArray[np.int64] = field(default_factory=columns.integers)
    places: Places = field(default_factory=columns.integers)
    totals: NDArray[np.float64] = field(default_factory=columns.sums)
    decided: NDArray[np.int64] = field(default_factory=columns.integers)
    path: RowNumbers = field(default_factory=lambda: columns.integers()[:, None])
    departed: list[MemberSegments] = field(default_factory=list)
    unsent: list[MemberSegments] = field(default_factory=list)
    closed_steps: int = 0
    episodes: list[Episodes] = field(default_factory=list)
    has_matchups: bool = False
    has_lessons: bool = False

    @property
    def open_steps(self) -> int:
        """Returns the steps in open segments, those of departed members included."""
        return int(self.lengths[self.live].sum()) + sum(len(segments.rows) for segments in self.departed)

    # ---------------------------------------------------------------- ticks

    def begin(self, part: BehaviorSteps) -> None:
        """Prepares for the ticks of `part`, whose slots it makes fit; steps before the first part were not recorded."""
        self.count(part.produced_before - self.received, 0)
        for record in (part.ended, part.joined, part.reported, part.acted):
            slots = None if record is None else record.slots
            if slots is not None and slots.size and slots.max() >= len(self.live):
                columns.grow(self, int(slots.max()) + 1)

    def count(self, completed: int, found: int) -> None:
        """Counts the steps that a tick completes, and those of them that could be recorded."""
        self.received += completed
        self.reached += completed - found

    def take(self) -> MemberSegments:
        """Returns all finished segments that are not sent yet, and forgets them."""
        unsent, self.unsent, self.closed_steps = self.unsent, [], 0
        segments = concatenate(unsent or [self.cut(NO_SLOTS)])
        if not self.in_groups:
            segments.places = np.arange(len(segments.lengths))
        return segments

    def keys(self, slots: Slots) -> NDArray[np.int64]:
        """Returns [n] what distinguishes groups: their key, or a unique number for an agent without a group."""
        groups = self.groups[slots]
        return np.where(groups != 0, groups, -1 - (self.agents[slots] * 256 + self.number))

    def join(self, joined: AgentsStarted) -> Mask:
        """Gives slots to agents; returns which are new, as one that has its slot already keeps its open segment."""
        slots = joined.slots
        is_new: Mask = ~(self.live[slots] & (self.agents[slots] == joined.agents))
        new = slots[is_new]
        for name in _OF_EPISODE:
            getattr(self, name)[new] = 0
        self.known[slots] = joined.fresh | self.known[slots] & ~is_new
        self.live[slots] = True
        for name in _IDENTITY:
            column: Array | None = getattr(joined, name)
            if column is not None:
                getattr(self, name)[slots] = column
        self.has_matchups |= joined.matchups is not None
        self.has_lessons |= joined.lessons is not None
        return is_new

    def complete(self, report: AgentsEnded | OutcomesReported, ticks: int = 1) -> int:
        """Writes the outcomes of pending steps, of the first tick where several are alike.

        Returns:
            How many of the steps that the report completes are known here.
        """
        n = len(report.slots) // ticks
        slots, rewards, shared = report.slots[:n], report.rewards[:n], report.group_rewards
        pending = self.acted[slots]
        known = int(np.count_nonzero(pending))
        which: Mask | slice = pending if known < n else _ALL
        slots = slots[which]
        times = self.lengths[slots]
        rows = self.path[slots, times]
        self.log.columns["rewards"][rows] = rewards[which]
        if shared is not None:
            self.log.columns["group_rewards"][rows] = shared[:n][which]
        self.lengths[slots] = times + 1
        self.acted[slots] = False
        self.seen[slots] = False
        return known + (ticks - 1) * n

    def observe(self, events: TickEvents) -> tuple[Slots, RowNumbers]:
        """Writes the observations of agents at their next decision, and the outcomes within ticks that are alike.

        Returns:
            The slots of the live agents [n], and the rows of their decisions [ticks n].
        """
        reported, ticks = events.reported, events.ticks
        if reported is None:
            return NO_SLOTS, NO_ROWS
        slots, observations = reported.slots[: len(reported.slots) // ticks], reported.observations
        masks = reported.masks
        live = self.live[slots]
        if np.count_nonzero(live) < len(slots):
            slots, observations = slots[live], tuple(column[live] for column in observations)
            masks = None if masks is None else masks[live]
        rows = self._add(observations, masks)
        times = self.lengths[slots]
        self._lengthen(int(times.max(initial=0)) + ticks - 1)
        self.seen[slots] = True
        if ticks == 1:
            self.path[slots, times] = rows
            return slots, rows
        n, shared = len(slots), reported.group_rewards
        self.path[slots[:, None], times[:, None] + np.arange(ticks)] = rows.reshape(ticks, n).T
        self.lengths[slots] = times + (ticks - 1)
        within = slice(int(rows[0]), int(rows[-n]))
        self.log.columns["rewards"][within] = reported.rewards[n:]
        if shared is not None:
            self.log.columns["group_rewards"][within] = shared[n:]
        return slots, rows

    def act(self, events: TickEvents, rows: RowNumbers) -> None:
        """Writes the actions chosen for decisions that are in the log.

        Args:
            events: events of a tick.
            rows: rows of the decisions that it reports.
        """
        acted, reported = events.acted, events.reported
        if acted is None:
            return
        slots = acted.slots
        if slots is None:
            slots = NO_SLOTS if reported is None else reported.slots
            if 0 < len(slots) == len(rows):
                self.log.act(slice(int(rows[0]), int(rows[-1]) + 1), acted, _ALL)
                self.acted[slots[: len(slots) // events.ticks]] = True
                return
        known = np.flatnonzero(self.seen[slots])  # others were reported before this incarnation began
        slots = slots[known]
        self.log.act(self.path[slots, self.lengths[slots]], acted, known)
        self.acted[slots] = True

    # ---------------------------------------------------------------- ends of segments

    def depart(self, ended: AgentsEnded, group_ended: Mask) -> MemberSegments:
        """Returns the last segments of live agents that end, those without a step left out.

        Args:
            ended: n agents.
            group_ended: [n] whether the group of each has no other member left.
        """
        stepped = self.lengths[ended.slots] > 0
        ended = pick_where(ended, stepped)
        segments = self._segments(ended.slots, self._add(ended.observations))
        segments.terminated = ~ended.interrupted
        segments.interrupted = ~segments.terminated  # a copy, as the record is not this service's
        segments.group_ended = group_ended[stepped]
        return segments

    def cut(self, slots: Slots) -> MemberSegments:
        """Returns the open segments of `slots` up to their present decisions, with which new segments begin."""
        waiting: RowNumbers = self.path[slots, self.lengths[slots]]
        segments = self._segments(slots, waiting)
        segments.interrupted = self.lost[slots]
        self.path[slots, 0] = waiting
        self.lengths[slots] = 0
        return segments

    def cut_full(self, slots: Slots) -> None:
        """Finishes the segments of `slots` that have reached the horizon; steps beyond it begin new ones.

        No segment has two horizons of steps. They close in the order of the ticks in which they reached the horizon.
        """
        lengths, horizon = self.lengths[slots], self.horizon
        full = (lengths >= horizon).nonzero()[0]
        if not full.size:
            return
        full = full[np.argsort(-lengths[full], kind="stable")]  # the longest was the first to reach it
        slots, beyond = slots[full], lengths[full] - horizon
        self.lengths[slots] = horizon
        self.finish(self.cut(slots))
        moved = int(beyond[0]) + 1
        self.path[slots, :moved] = self.path[slots, horizon : horizon + moved]
        self.lengths[slots] = beyond

    def collect(self, rank: NDArray[np.int64], spans: NDArray[np.int64], first: int, *, ended: bool) -> None:
        """Finishes the segments of all members of closing groups; members that continue begin new ones.

        Args:
            rank: [places] index of each group among those that close, -1 for the others.
            spans: [g] group timesteps of the closing groups.
            first: number of finished group segments before.
            ended: whether the groups have no members left.
        """
        present = self.cut(np.flatnonzero(self.live & self.seen & (rank[self.places] >= 0)).astype(np.int32))
        present.until = (spans[rank[present.places]] + 1).astype(np.int32)
        self.log.columns["times"][present.following] = 0
        every = concatenate([present, *self.departed])
        order = np.argsort(rank[every.places], kind="stable")
        remaining = np.searchsorted(rank[every.places[order]], 0)
        self.departed = [pick_ragged(every, order[:remaining], "rows", "lengths")] if remaining else []
        closing = pick_ragged(every, order[remaining:], "rows", "lengths")
        closing.places = rank[closing.places] + first
        closing.group_ended = np.full(len(closing.places), ended)
        self.finish(closing)

    def finish(self, segments: MemberSegments) -> None:
        """Adds segments to those that are sent next."""
        self.unsent.append(segments)
        self.closed_steps += len(segments.rows)

    def free(self, slots: Slots) -> None:
        """Frees the slots of agents that have ended."""
        for column in (self.live, self.seen, self.acted, self.lengths):
            column[slots] = 0

    # ---------------------------------------------------------------- inside

    def _segments(self, slots: Slots, following: RowNumbers) -> MemberSegments:
        """Returns the open segments of `slots`, and adds their steps to those of closed segments."""
        lengths, log = self.lengths[slots], self.log.columns
        starts = np.cumsum(lengths) - lengths
        times = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
        rows = self.path[np.repeat(slots, lengths), times]
        stepped = lengths > 0
        those, starts = slots[stepped], starts[stepped]
        self.episode_returns[those] += np.add.reduceat(log["rewards"][rows], starts, dtype=np.float64)
        self.episode_group_returns[those] += np.add.reduceat(log["group_rewards"][rows], starts, dtype=np.float64)
        self.episode_lengths[slots] += lengths
        next_times: NDArray[np.int32] = log["times"][following]
        no_flags = np.zeros(len(slots), bool)
        return MemberSegments(
            rows=rows,
            lengths=lengths.astype(np.int32),
            following=following,
            next_times=next_times,
            until=next_times,
            terminated=no_flags,
            interrupted=no_flags,
            group_ended=no_flags,
            **{name: getattr(self, name)[slots] for name in _OF_SEGMENT},
        )

    def _lengthen(self, time: int) -> None:
        """Adds columns to the paths so that a row at `time` fits."""
        steps = self.path.shape[1]
        if time >= steps:
            more = max(time + 1 - steps, min(steps, self.horizon + 1 - steps))
            self.path = np.concatenate([self.path, np.zeros((len(self.path), more), np.int64)], axis=1)

    def _add(self, observations: tuple[Array, ...], masks: Mask | None = None) -> RowNumbers:
        if self.log.size + len(observations[0]) > self.log.capacity:
            self._compact(len(observations[0]))
        return self.log.add(observations, masks)

    def _compact(self, rows: int) -> None:
        """Frees the rows of the log that no segment needs, so that `rows` more fit."""
        slots = np.flatnonzero(self.live)
        inside = np.arange(self.path.shape[1]) < (self.lengths + self.seen)[slots, None]
        needed = np.zeros(self.log.size, bool)
        needed[self.path[slots][inside]] = True
        for finished in (*self.departed, *self.unsent):
            needed[finished.rows] = True
            needed[finished.following] = True
        numbers = self.log.keep(needed, rows)
        moved = self.path[slots]
        moved[inside] = numbers[moved[inside]]
        self.path[slots] = moved
        for finished in (*self.departed, *self.unsent):
            finished.rows, finished.following = numbers[finished.rows], numbers[finished.following]
