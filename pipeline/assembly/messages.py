"""Turns finished segments into the messages of each behavior name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from sparring.pipeline.assembly import sequences
from sparring.pipeline.assembly.columns import NO_PLACES, NO_ROWS, NO_SLOTS, RowNumbers
from sparring.pipeline.assembly.finished import FinishedSegments, MemberSegments
from sparring.pipeline.assembly.members import Members
from sparring.pipeline.messages.segments import GroupSegments, Segments, TeammateSegments
from sparring.pipeline.specs import Array

_PER_ROW: Final = ("continuous", "discrete", "log_probs", "rewards", "group_rewards", "versions")
_PER_SEGMENT: Final = (
    "lengths", "terminated", "interrupted", "group_ended", "teams", "groups", "agents", "simulators"
)  # fmt: skip

_NO_FLAGS: Final = np.empty(0, bool)
_NO_SEGMENTS: Final = MemberSegments(
    rows=NO_ROWS,
    lengths=NO_SLOTS,
    following=NO_ROWS,
    places=NO_PLACES,
    next_times=NO_SLOTS,
    until=NO_SLOTS,
    terminated=_NO_FLAGS,
    interrupted=_NO_FLAGS,
    group_ended=_NO_FLAGS,
    agents=NO_ROWS,
    groups=NO_ROWS,
    teams=NO_SLOTS,
    simulators=NO_SLOTS,
    matchups=NO_ROWS,
)
NOTHING: Final = FinishedSegments.concatenate([])


def message(
    source: str, origin: str, one: Members, finished: FinishedSegments, flush: int, shared: Mapping[str, Members] | None
) -> Segments:
    """Returns the next message of a behavior name.

    Args:
        source: incarnation of the stepping service.
        origin: incarnation of this assembly service.
        one: members of the behavior name.
        finished: group segments in which it has steps, if any.
        flush: serial of the flush that the message completes, else 0.
        shared: members of all names that share groups; None where each agent is a group of one.
    """
    columns, own = one.log.columns, finished.members.get(one.behavior, _NO_SEGMENTS)
    masks, carried = columns.get("masks"), columns.get("carried")
    reached, episodes = one.notes.take(len(own.rows))
    return Segments(
        behavior=one.behavior,
        source=source,
        origin=origin,
        reached=reached,
        flush=flush,
        episodes=episodes,
        observations=_observations(one, own.rows),
        next_observations=_observations(one, own.following),
        masks=None if masks is None else masks[own.rows],
        carried=None if carried is None else carried[own.rows[_starts(one, own, in_groups=shared is not None)]],
        matchups=own.matchups if one.has_matchups else None,
        shared=None if shared is None else _group_segments(one, finished, own, shared),
        **{name: columns[name][own.rows] for name in _PER_ROW},
        **{name: getattr(own, name) for name in _PER_SEGMENT},
    )


def _group_segments(
    one: Members, finished: FinishedSegments, own: MemberSegments, shared: Mapping[str, Members]
) -> GroupSegments:
    groups = len(finished.numbers)
    return GroupSegments(
        numbers=finished.numbers,
        spans=finished.spans,
        ended=finished.ended,
        rewards=finished.rewards,
        teammates=tuple(
            TeammateSegments(
                behavior=name,
                lengths=segments.lengths,
                observations=_observations(shared[name], segments.rows),
                next_observations=_observations(shared[name], segments.following),
                continuous=shared[name].log.columns["continuous"][segments.rows],
                discrete=shared[name].log.columns["discrete"][segments.rows],
                **_of_members(shared[name], segments, groups),
            )
            for name, segments in finished.members.items()
            if name != one.behavior
        ),
        **_of_members(one, own, groups),
    )


def _of_members(one: Members, segments: MemberSegments, groups: int) -> dict[str, Array]:
    """Returns the columns that `GroupSegments` and `TeammateSegments` have in common."""
    columns = one.log.columns
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


def _starts(one: Members, own: MemberSegments, *, in_groups: bool) -> RowNumbers:
    """Returns the first row of each sequence, of which the message contains what the member carried."""
    length = one.sizes.sequence
    if not length:
        return NO_ROWS
    times = one.log.columns["times"][own.rows]
    return sequences.windows(own.lengths, times, length) if in_groups else sequences.divide(own.lengths, length)[0]
