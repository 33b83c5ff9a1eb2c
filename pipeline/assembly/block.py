"""Open segments of one source and behavior, in columns: a slot per live agent and a time axis.

Writing a step of all agents is one fancy-indexed assignment per field. An open segment of length t
has its steps in rows 0..t-1 and, in row t, the decision that waits for its outcome: the observation
once it is reported, the action once it was chosen.

Legend: S slots, T time, n rows of one record.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pipeline.messages.service import Acted, Ended, Joined, Reported

Slots = NDArray[np.int32]
Mask = NDArray[np.bool_]
AnyArray = NDArray[Any]

_FIRST_SLOTS: Final = 16
_FIRST_STEPS: Final = 16


class Rows:
    """Segments cut out of a block: copies, segment after segment.

    Attributes are those of `Segments` with the same names.
    """

    __slots__ = (
        "agents",
        "continuous",
        "discrete",
        "group_ended",
        "group_rewards",
        "groups",
        "interrupted",
        "lengths",
        "log_probs",
        "masks",
        "next_observations",
        "observations",
        "rewards",
        "simulators",
        "teams",
        "terminated",
        "versions",
    )

    lengths: NDArray[np.int32]
    observations: list[AnyArray]
    next_observations: list[AnyArray]
    continuous: AnyArray
    discrete: AnyArray
    log_probs: AnyArray
    masks: AnyArray | None
    rewards: AnyArray
    group_rewards: AnyArray
    versions: AnyArray
    terminated: Mask
    interrupted: Mask
    group_ended: Mask
    teams: AnyArray
    groups: AnyArray
    agents: AnyArray
    simulators: AnyArray

    @property
    def steps(self) -> int:
        """Steps in all segments together."""
        return len(self.log_probs)


class Block:
    """The columns.

    Args:
        horizon: most steps of a segment.
    """

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon
        self.live: Mask = np.zeros(_FIRST_SLOTS, bool)
        self.seen: Mask = np.zeros(_FIRST_SLOTS, bool)
        self.acted: Mask = np.zeros(_FIRST_SLOTS, bool)
        self.known: Mask = np.zeros(_FIRST_SLOTS, bool)
        self.lengths: NDArray[np.int64] = np.zeros(_FIRST_SLOTS, np.int64)
        self.agents: NDArray[np.int64] = np.zeros(_FIRST_SLOTS, np.int64)
        self.groups: NDArray[np.int64] = np.zeros(_FIRST_SLOTS, np.int64)
        self.teams: NDArray[np.int32] = np.zeros(_FIRST_SLOTS, np.int32)
        self.simulators: NDArray[np.int32] = np.zeros(_FIRST_SLOTS, np.int32)
        self.episode_returns: NDArray[np.float64] = np.zeros(_FIRST_SLOTS)
        self.episode_group_returns: NDArray[np.float64] = np.zeros(_FIRST_SLOTS)
        self.episode_lengths: NDArray[np.int64] = np.zeros(_FIRST_SLOTS, np.int64)
        self._steps = min(_FIRST_STEPS, horizon) + 1
        self._observations: list[AnyArray] = []
        self._rewards = np.zeros((_FIRST_SLOTS, self._steps), np.float32)
        self._group_rewards = np.zeros((_FIRST_SLOTS, self._steps), np.float32)
        self._log_probs = np.zeros((_FIRST_SLOTS, self._steps), np.float32)
        self._versions = np.zeros((_FIRST_SLOTS, self._steps), np.int64)
        self._continuous: NDArray[np.float32] = np.zeros((_FIRST_SLOTS, self._steps, 0), np.float32)
        self._discrete: NDArray[np.int32] = np.zeros((_FIRST_SLOTS, self._steps, 0), np.int32)
        self._masks: Mask | None = None

    # ---------------------------------------------------------------- writing

    def join(self, joined: Joined) -> None:
        """Gives slots to agents; one that is here already keeps its open segment."""
        slots = joined.slots
        self._grow_slots(slots)
        stranger = ~(self.live[slots] & (self.agents[slots] == joined.agents))
        new = slots[stranger]
        self.seen[new] = False
        self.acted[new] = False
        self.lengths[new] = 0
        self.episode_returns[new] = 0.0
        self.episode_group_returns[new] = 0.0
        self.episode_lengths[new] = 0
        self.known[slots] = joined.fresh | self.known[slots] & ~stranger
        self.live[slots] = True
        self.agents[slots] = joined.agents
        self.groups[slots] = joined.groups
        self.teams[slots] = joined.teams
        self.simulators[slots] = joined.simulators

    def complete(self, record: Reported | Ended) -> int:
        """Writes the outcome of the steps that `record` completes.

        Returns:
            Completed steps that are not here, because they began before this block did.
        """
        slots = record.slots
        done = record.completed
        here = done & self.live[slots] & self.acted[slots]
        if here.all():
            written, rewards, group_rewards = slots, record.rewards, record.group_rewards
        else:
            written, rewards, group_rewards = slots[here], record.rewards[here], record.group_rewards[here]
        times = self.lengths[written]
        self._rewards[written, times] = rewards
        self._group_rewards[written, times] = group_rewards
        self.lengths[written] = times + 1
        self.acted[written] = False
        self.episode_returns[written] += rewards
        self.episode_group_returns[written] += group_rewards
        self.episode_lengths[written] += 1
        return int(np.count_nonzero(done)) - len(written)

    def observe(self, reported: Reported) -> None:
        """Writes what agents see at their next decision."""
        slots, observations = reported.slots, reported.observations
        if not self._observations:
            self._observations = [
                np.zeros((len(self.live), self._steps, *column.shape[1:]), column.dtype) for column in observations
            ]
        live = self.live[slots]
        if not live.all():
            slots, observations = slots[live], tuple(column[live] for column in observations)
        times = self.lengths[slots]
        self._grow_steps(times)
        for held, column in zip(self._observations, observations, strict=True):
            held[slots, times] = column
        self.seen[slots] = True

    def act(self, acted: Acted) -> None:
        """Writes the actions chosen for the decisions last reported, but for those reported before this block began."""
        slots = acted.slots
        self._shape_actions(acted)
        here = slots < len(self.live)
        here[here] = self.seen[slots[here]]
        rows: AnyArray | slice = slice(None) if here.all() else np.flatnonzero(here)
        slots = slots[rows]
        times = self.lengths[slots]
        if self._continuous.shape[2]:
            self._continuous[slots, times] = acted.continuous[rows]
        if self._discrete.shape[2]:
            self._discrete[slots, times] = acted.discrete[rows]
        self._log_probs[slots, times] = acted.log_probs[rows]
        self._versions[slots, times] = acted.versions[rows]
        if self._masks is not None:
            self._masks[slots, times] = False if acted.masks is None else acted.masks[rows]
        self.acted[slots] = True

    def free(self, slots: Slots) -> None:
        """Takes slots from agents that are gone."""
        self.live[slots] = False
        self.seen[slots] = False
        self.acted[slots] = False
        self.lengths[slots] = 0

    def restart(self, slots: Slots, times: NDArray[np.int64]) -> None:
        """Begins a new segment with the decision that waits in row `times` of each slot."""
        for column in self._columns():
            column[slots, 0] = column[slots, times]
        self.lengths[slots] = 0

    # ---------------------------------------------------------------- reading

    def of_live(self, slots: Slots) -> Slots:
        """Those of `slots` that have an agent here."""
        known = slots[slots < len(self.live)]
        return known[self.live[known]]

    def open_slots(self) -> Slots:
        """Slots whose open segment has at least one step, in order."""
        return np.flatnonzero(self.live & (self.lengths > 0)).astype(np.int32)

    def waiting_observations(self, slots: Slots) -> list[AnyArray]:
        """What follows the last step of each open segment: [n, *shape] per observation."""
        return [held[slots, self.lengths[slots]] for held in self._observations]

    def rows(self, slots: Slots, following: list[AnyArray]) -> Rows:
        """Copies the steps of the open segments of `slots`.

        Args:
            slots: [n] slots with at least one step each.
            following: [n, *shape] per observation, what followed.

        The end flags are False; the caller sets them.
        """
        lengths = self.lengths[slots]
        at = np.repeat(slots, lengths)
        starts = np.cumsum(lengths) - lengths
        times = np.arange(len(at)) - np.repeat(starts, lengths)
        out = Rows()
        out.lengths = lengths.astype(np.int32)
        out.observations = [held[at, times] for held in self._observations]
        out.next_observations = following
        out.continuous, out.discrete = self._continuous[at, times], self._discrete[at, times]
        out.log_probs, out.versions = self._log_probs[at, times], self._versions[at, times]
        out.masks = None if self._masks is None else self._masks[at, times]
        out.rewards, out.group_rewards = self._rewards[at, times], self._group_rewards[at, times]
        out.teams, out.groups = self.teams[slots], self.groups[slots]
        out.agents, out.simulators = self.agents[slots], self.simulators[slots]
        out.terminated = np.zeros(len(slots), bool)
        out.interrupted = np.zeros(len(slots), bool)
        out.group_ended = np.zeros(len(slots), bool)
        return out

    # ---------------------------------------------------------------- size

    def _columns(self) -> list[AnyArray]:
        columns = [*self._observations, self._rewards, self._group_rewards, self._log_probs, self._versions]
        columns += [self._continuous, self._discrete]
        return columns if self._masks is None else [*columns, self._masks]

    def _resize(self, slots: int, steps: int) -> None:
        """Grows every column to [slots, steps, ...]."""

        def grown(column: AnyArray) -> AnyArray:
            new = np.zeros((slots, steps, *column.shape[2:]), column.dtype)
            new[: column.shape[0], : column.shape[1]] = column
            return new

        self._observations = [grown(column) for column in self._observations]
        self._rewards, self._group_rewards = grown(self._rewards), grown(self._group_rewards)
        self._log_probs, self._versions = grown(self._log_probs), grown(self._versions)
        self._continuous, self._discrete = grown(self._continuous), grown(self._discrete)
        self._masks = None if self._masks is None else grown(self._masks)
        self._steps = steps

    def _grow_slots(self, slots: Slots) -> None:
        needed = int(slots.max()) + 1 if slots.size else 0
        held = len(self.live)
        if needed <= held:
            return
        size = max(needed, 2 * held)
        for name in ("live", "seen", "acted", "known", "lengths", "agents", "groups", "teams", "simulators"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(size - held, column.dtype)]))
        for name in ("episode_returns", "episode_group_returns", "episode_lengths"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(size - held, column.dtype)]))
        self._resize(size, self._steps)

    def _grow_steps(self, times: NDArray[np.int64]) -> None:
        if times.size and times.max() >= self._steps:
            self._resize(len(self.live), min(2 * self._steps, self.horizon + 1))

    def _shape_actions(self, acted: Acted) -> None:
        """Gives the action columns their widths when the first actions arrive."""
        size = self._log_probs.shape
        if self._continuous.shape[2] != acted.continuous.shape[1]:
            self._continuous = np.zeros((*size, acted.continuous.shape[1]), np.float32)
        if self._discrete.shape[2] != acted.discrete.shape[1]:
            self._discrete = np.zeros((*size, acted.discrete.shape[1]), np.int32)
        if self._masks is None and acted.masks is not None:
            self._masks = np.zeros((*size, acted.masks.shape[1]), bool)
