"""Turns finished segments, and the episodes of members that end, into the messages of each behavior name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.assembly import sequences
from sparring.pipeline.assembly.columns import NO_ROWS, Mask, RowNumbers, Slots, pick_ragged
from sparring.pipeline.assembly.groups import FinishedGroups
from sparring.pipeline.assembly.log import MemberSegments
from sparring.pipeline.assembly.members import NO_SLOTS, Members
from sparring.pipeline.errors import ServiceError
from sparring.pipeline.messages.rows import concatenate, names_of
from sparring.pipeline.messages.segments import Episodes, GroupSegments, Segments, TeammateSegments
from sparring.pipeline.specs import Array

Floats = NDArray[np.float32]
NO_RETURNS: Final[Floats] = np.empty(0, np.float32)
_PER_ROW: Final = ("continuous", "discrete", "log_probs", "rewards", "group_rewards", "versions")
_PER_SEGMENT: Final = ("lengths", "terminated", "interrupted", "group_ended", "teams", "groups", "agents", "simulators")


@dataclass(frozen=True, slots=True)
class FinishedSegments:
    """Holds finished segments of behavior names that share groups, or of one whose agents are each a group of one.

    Attributes:
        members: members by behavior name.
        segments: their segments by behavior name, in the order of their groups.
        groups: what group segments have beside these; None where each agent is a group of one.
    """

    members: Mapping[str, Members]
    segments: Mapping[str, MemberSegments]
    groups: FinishedGroups | None

    @property
    def count(self) -> int:
        """Returns the number of group segments."""
        return len(next(iter(self.segments.values())).places) if self.groups is None else len(self.groups.numbers)

    def divide(self, behavior: str, largest: int) -> Iterator[Self]:
        """Yields the group segments in which a behavior name has steps, as many at a time as fit into a message.

        Args:
            behavior: behavior name.
            largest: most steps of a message, those of teammates included.

        Raises:
            ServiceError: a single group segment does not fit.
        """
        groups = self.count
        steps = {name: np.bincount(one.places, one.lengths, groups) for name, one in self.segments.items()}
        own = np.flatnonzero(steps[behavior])
        ends = np.cumsum(np.sum([*steps.values()], axis=0)[own])
        start = 0
        while start < len(own):
            before = ends[start - 1] if start else 0
            stop = int(np.searchsorted(ends, before + largest, side="right"))
            if stop == start:
                raise ServiceError(
                    f"got {ends[start] - before:.0f} steps of one group at once for {behavior}; expected at most "
                    f"{largest}; raise hyperparameters.buffer_size, or form smaller groups"
                )
            yield self if stop - start == groups else self.pick(own[start:stop])
            start = stop

    def pick(self, which: NDArray[np.int64]) -> Self:
        """Returns some of the group segments, in their order."""
        rank = np.full(self.count, -1, np.int64)
        rank[which] = np.arange(len(which))
        picked = {}
        for name, segments in self.segments.items():
            picked[name] = pick_ragged(segments, np.flatnonzero(rank[segments.places] >= 0), "rows", "lengths")
            picked[name].places = rank[picked[name].places]
        of_groups = None if self.groups is None else pick_ragged(self.groups, which, "rewards", "spans")
        return type(self)(self.members, picked, of_groups)

    def message(self, behavior: str, flush: int) -> Segments:
        """Returns the next message of a behavior name, with all its segments.

        Args:
            behavior: behavior name.
            flush: serial of the flush that the message completes, else 0.
        """
        one, own = self.members[behavior], self.segments[behavior]
        columns = one.log.columns
        masks, carried = columns.get("masks"), columns.get("carried")
        if not one.episodes:
            note_episodes(one, NO_SLOTS)
        episodes, one.episodes = concatenate(one.episodes), []
        one.reached += len(own.rows)
        one.announced = one.reached
        return Segments(
            behavior=behavior,
            source=one.source,
            origin=one.origin,
            reached=one.reached,
            flush=flush,
            episodes=episodes,
            observations=_observations(one, own.rows),
            next_observations=_observations(one, own.following),
            masks=None if masks is None else masks[own.rows],
            next_masks=None if masks is None else masks[own.following],
            carried=None if carried is None else carried[own.rows[_starts(one, own)]],
            matchups=own.matchups if one.has_matchups else None,
            shared=None if self.groups is None else self._group_segments(behavior, self.groups),
            **{name: columns[name][own.rows] for name in _PER_ROW},
            **{name: getattr(own, name) for name in _PER_SEGMENT},
        )

    def _group_segments(self, behavior: str, groups: FinishedGroups) -> GroupSegments:
        return GroupSegments(
            teammates=tuple(
                TeammateSegments(
                    behavior=name,
                    lengths=segments.lengths,
                    observations=_observations(self.members[name], segments.rows),
                    next_observations=_observations(self.members[name], segments.following),
                    continuous=self.members[name].log.columns["continuous"][segments.rows],
                    discrete=self.members[name].log.columns["discrete"][segments.rows],
                    **self._of_members(name, len(groups.numbers)),
                )
                for name, segments in self.segments.items()
                if name != behavior and segments.places.size
            ),
            **{name: getattr(groups, name) for name in names_of(FinishedGroups)},
            **self._of_members(behavior, len(groups.numbers)),
        )

    def _of_members(self, behavior: str, groups: int) -> dict[str, Array]:
        """Returns the columns that `GroupSegments` and `TeammateSegments` have in common."""
        columns, segments = self.members[behavior].log.columns, self.segments[behavior]
        return {
            "members": np.bincount(segments.places, minlength=groups).astype(np.int32),
            "times": columns["times"][segments.rows],
            "next_times": segments.next_times,
            "until": segments.until,
            "next_continuous": columns["continuous"][segments.following],
            "next_discrete": columns["discrete"][segments.following],
        }


def _observations(one: Members, rows: RowNumbers) -> tuple[Array, ...]:
    return tuple(column[rows] for column in one.log.observations)


def _starts(one: Members, own: MemberSegments) -> RowNumbers:
    """Returns the first row of each sequence, of which the message contains what the member carried."""
    length = one.sizes.sequence
    if not length:
        return NO_ROWS
    times = one.log.columns["times"][own.rows]
    return sequences.windows(own.lengths, times, length) if one.in_groups else sequences.divide(own.lengths, length)[0]


# ---------------------------------------------------------------- episodes


def note_episodes(one: Members, slots: Slots, outcomes: Floats | None = None, returns: Floats = NO_RETURNS) -> None:
    """Notes the ended episodes of `slots`, whose steps are all in closed segments.

    Args:
        one: members of a behavior name.
        slots: [n] slots of the agents.
        outcomes: [n] outcomes of their matches; None if none was reported.
        returns: [g] returns of the groups that have ended with them.
    """
    whole = _are_whole(one, slots)
    reported = slots[whole]
    ended = Episodes(
        returns=one.episode_returns[reported].astype(np.float32),
        lengths=one.episode_lengths[reported].astype(np.int32),
        group_returns=returns,
        teams=one.teams[reported],
        outcomes=np.full(len(reported), -1.0, np.float32) if outcomes is None else outcomes[whole],
        agents=one.agents[reported],
        groups=one.groups[reported],
        shared_returns=one.episode_group_returns[reported].astype(np.float32),
        unreported=one.agents[slots[~whole]],
        lessons=one.lessons[reported if one.has_lessons else reported[:0]],
    )
    one.episodes.append(ended)


def has_episodes(one: Members) -> bool:
    """Returns whether any episode has ended since the last message."""
    return any(len(noted.agents) or len(noted.unreported) or len(noted.group_returns) for noted in one.episodes)


def are_last(one: Members, ending: Slots) -> Mask:
    """Returns [n] whether no agent of the same group remains without `ending`; a lone agent is its own group."""
    groups = one.groups[ending]
    if not groups.any():
        return np.ones(len(ending), bool)
    left = one.live.copy()
    left[ending] = False
    last: Mask = ~np.isin(groups, one.groups[left]) | (groups == 0)
    return last


def group_returns(one: Members, last: Slots) -> Floats:
    """Returns one return for each group whose last agents are `last`, if one of their episodes was seen whole.

    Members of a group that end together saw the same group rewards; the longest episode saw most of them.
    """
    last = last[one.groups[last] != 0]
    if not last.size:
        return NO_RETURNS
    last = last[_are_whole(one, last)]
    order = last[np.argsort(-one.episode_lengths[last], kind="stable")]
    _, first = np.unique(one.groups[order], return_index=True)
    return one.episode_group_returns[order[np.sort(first)]].astype(np.float32)


def _are_whole(one: Members, slots: Slots) -> Mask:
    """Returns [n] which episodes were seen from start to end, and have at least one step."""
    whole: Mask = one.known[slots] & ~one.lost[slots] & (one.episode_lengths[slots] > 0)
    return whole
