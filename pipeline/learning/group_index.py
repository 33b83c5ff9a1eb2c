"""This module finds the members present at each group timestep, as rows of their columns.

Timesteps are the group times of all segments one after the other: each segment's own, then the one after it. A token is
a member that is present at a timestep, with the row of its last observation and action. No row is copied.

g group segments; s segments of members; r rows of our own members, K timesteps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.assembly import sequences
from sparring.pipeline.learning.group_buffer import GroupBatch, GroupMembers
from sparring.pipeline.specs import Array

Numbers = NDArray[np.int64]


class GroupIndex:
    """Indexes the group timesteps of a batch.

    Rows of a behavior name are numbered: its decisions first, then the observation after each segment.

    Attributes:
        first: [g] first timestep of each group segment.
        last: [g] the timestep after it.
        counts: [K] members present.
        own: [K] of these, with our own behavior name.
        decisions: [K] rows of our own that were decided then.
        timesteps: [r] timestep of each row.
        places: [r] position of its member among those present then; our own come first.
        in_series: [T] timesteps within the segments, in the order of `GroupBatch.shared`.

    Args:
        batch: group segments.
        names: behavior names in the critic's order, our own first.
    """

    def __init__(self, batch: GroupBatch, names: list[str]) -> None:
        members = [batch.own, *(batch.teammates.get(name) for name in names[1:])]
        self.last: Numbers = np.cumsum(batch.spans + 1, dtype=np.int64) - 1
        self.first: Numbers = self.last - batch.spans
        self.in_series = sequences.rows_of(self.first, batch.spans)
        found = [(at, one) for at, one in enumerate(members) if one is not None]
        tokens = [self._tokens(one) for _, one in found]
        sizes = [len(rows) for rows, _, _ in tokens]
        timesteps = np.concatenate([at for _, at, _ in tokens])
        order = np.argsort(timesteps, kind="stable")
        most = int(self.last[-1]) + 1
        self.counts: Numbers = np.bincount(timesteps, minlength=most)
        self.own: Numbers = np.bincount(timesteps[: sizes[0]], minlength=most)
        self._starts = np.cumsum(self.counts) - self.counts
        self._token_rows = np.concatenate([rows for rows, _, _ in tokens])[order]
        self._token_names = np.repeat([at for at, _ in found], sizes)[order]
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        decided = tokens[0][2]
        self.timesteps = timesteps[decided]
        self.places = rank[decided] - self._starts[self.timesteps]
        self.decisions: Numbers = np.bincount(self.timesteps, minlength=most)

    def tokens(self, timesteps: Numbers) -> tuple[Numbers, Numbers]:
        """Returns the rows and behavior name numbers of the members present at some timesteps, one after the other."""
        at = sequences.rows_of(self._starts[timesteps], self.counts[timesteps])
        return self._token_rows[at], self._token_names[at]

    def _tokens(self, members: GroupMembers) -> tuple[Numbers, Numbers, Numbers]:
        """Returns row and timestep of each token, and the first token of each decision."""
        group_s = np.repeat(np.arange(len(members.members)), members.members)
        group_r = np.repeat(group_s, members.lengths)
        end_r: Array = np.empty_like(members.times)
        end_r[:-1] = members.times[1:]
        stepped = members.lengths > 0
        end_r[np.cumsum(members.lengths)[stepped] - 1] = members.next_times[stepped]
        begin = np.concatenate([members.times, members.next_times]).astype(np.int64)
        length = np.concatenate([end_r, members.until]) - begin
        timesteps = sequences.rows_of(self.first[np.concatenate([group_r, group_s])] + begin, length)
        first = np.cumsum(length) - length
        return np.repeat(np.arange(len(begin)), length), timesteps, first[: len(members.times)]
