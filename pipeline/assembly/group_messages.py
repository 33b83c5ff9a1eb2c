"""Turns finished group segments into the messages of each behavior name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from sparring.pipeline.assembly.groups import ClosedGroupSegments, MemberSegments
from sparring.pipeline.assembly.members import BehaviorMembers, observations
from sparring.pipeline.errors import ServiceError
from sparring.pipeline.messages.segments import GroupSegments, Segments, TeammateSegments

_PER_ROW: Final = ("continuous", "discrete", "log_probs", "rewards", "group_rewards", "versions")


def divided(behavior: str, closed: ClosedGroupSegments, largest: int) -> Iterator[ClosedGroupSegments]:
    """Yields the group segments in which a behavior name has steps, as many at a time as fit into a message.

    Args:
        behavior: behavior name.
        closed: finished group segments.
        largest: most steps of a message, those of teammates included.

    Raises:
        ServiceError: a single group segment does not fit.
    """
    own = np.flatnonzero(closed.steps(behavior))
    sizes = np.sum([closed.steps(name) for name in closed.members], axis=0)[own]
    start, size = 0, 0
    for at, steps in enumerate(sizes.tolist()):
        if steps > largest:
            raise ServiceError(
                f"got {steps} steps of one group at once for {behavior}; expected at most {largest}; "
                "raise hyperparameters.buffer_size, or form smaller groups"
            )
        if size + steps > largest:
            yield closed.pick(own[start:at])
            start, size = at, 0
        size += steps
    if start < len(own):
        yield closed.pick(own[start:])


def message(
    members: Mapping[str, BehaviorMembers], behavior: str, closed: ClosedGroupSegments | None, flush: int
) -> Segments:
    """Returns the next message of a behavior name.

    Args:
        members: members by behavior name, for the whole source.
        behavior: behavior name of the message.
        closed: group segments in which it has steps, if any.
        flush: serial of the flush that the message completes, else 0.
    """
    one = members[behavior]
    log = one.block.log
    if closed is None:
        nothing = np.empty(0, np.int64)
        closed = ClosedGroupSegments(nothing, nothing.astype(np.int32), nothing > 0, nothing.astype(np.float32), {})
    own = closed.members.get(behavior) or _no_segments()
    rows, times = own.rows, log.times[own.rows]
    return Segments(
        **one.account.next_message(len(rows)),
        flush=flush,
        lengths=own.lengths,
        observations=observations(log.observations, rows),
        next_observations=observations(log.observations, own.following),
        masks=None if log.masks is None else log.masks[rows],
        terminated=own.terminated,
        interrupted=own.interrupted,
        group_ended=closed.ended[own.groups],
        teams=own.teams,
        groups=own.keys,
        agents=own.agents,
        simulators=own.simulators,
        matchups=own.matchups if one.block.has_matchups else None,
        episodes=one.notes.take(),
        carried=None if log.carried is None else log.carried[rows[one.starts(own.lengths, times)]],
        shared=GroupSegments(
            numbers=closed.numbers,
            spans=closed.spans,
            ended=closed.ended,
            rewards=closed.rewards,
            teammates=tuple(
                _teammates(name, members[name], segments, len(closed.numbers))
                for name, segments in closed.members.items()
                if name != behavior
            ),
            **_common_columns(one, own, len(closed.numbers)),
        ),
        **{name: getattr(log, name)[rows] for name in _PER_ROW},
    )


def _teammates(behavior: str, one: BehaviorMembers, segments: MemberSegments, groups: int) -> TeammateSegments:
    log = one.block.log
    return TeammateSegments(
        behavior=behavior,
        lengths=segments.lengths,
        observations=observations(log.observations, segments.rows),
        next_observations=observations(log.observations, segments.following),
        continuous=log.continuous[segments.rows],
        discrete=log.discrete[segments.rows],
        **_common_columns(one, segments, groups),
    )


def _common_columns(one: BehaviorMembers, segments: MemberSegments, groups: int) -> dict[str, Any]:
    """Returns the columns that `GroupSegments` and `TeammateSegments` have in common."""
    log = one.block.log
    return {
        "members": np.bincount(segments.groups, minlength=groups).astype(np.int32),
        "times": log.times[segments.rows],
        "next_times": segments.next_times,
        "until": segments.until,
        "next_continuous": log.continuous[segments.following],
        "next_discrete": log.discrete[segments.following],
    }


def _no_segments() -> MemberSegments:
    nothing = np.empty(0, np.int64)
    numbers, flags = nothing.astype(np.int32), nothing > 0
    return MemberSegments(
        nothing, numbers, nothing, nothing, numbers, numbers, flags, flags, nothing, nothing, numbers, numbers, nothing
    )
