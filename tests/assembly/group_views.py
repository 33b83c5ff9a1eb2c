"""Views of a group segment for one behavior name, read from messages or computed from the slow twin.

Members, observations and actions at each time are read from the columns as `GroupSegments` defines them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparring.pipeline.messages.segments import GroupSegments, Segments, TeammateSegments
from tests.assembly.assembly_twin import Carried, Observed, observed_row
from tests.assembly.group_records import Actions, GroupSegmentTwin, MemberSegmentTwin


@dataclass(frozen=True, order=True)
class VisibleSegment:
    """A segment of a member as its teammates receive it; `next_actions` is None where it has no meaning.

    Attributes:
        rows: time, observation and actions of each decision.
    """

    rows: tuple[tuple[int, Observed, Actions | None], ...]
    following: Observed
    next_time: int
    until: int
    next_actions: Actions | None


@dataclass(frozen=True)
class OwnSegment:
    """A segment of a member as its own learner receives it.

    Attributes:
        outcomes: own reward, group reward, log-probability, version and mask of each row.
        carried: numbers carried to each sequence.
    """

    visible: VisibleSegment
    who: tuple[int, int, int, int]
    flags: tuple[bool, bool]
    outcomes: tuple[tuple[Any, ...], ...]
    carried: tuple[Carried, ...]


@dataclass
class GroupView:
    """A group segment as one behavior name receives it.

    Attributes:
        present: behavior name, last observation and last actions of each member, at each time and the next.
    """

    span: int
    over: bool
    rewards: list[float]
    present: list[list[tuple[str, Observed, Actions | None]]]
    own: list[OwnSegment]
    teammates: dict[str, list[VisibleSegment]] = field(default_factory=dict)

    def sort(self) -> GroupView:
        """Sorts members, whose order within a group is not defined."""
        self.own.sort(key=lambda one: one.visible.following)
        for members in self.present:
            members.sort(key=repr)
        for member_segments in self.teammates.values():
            member_segments.sort(key=repr)
        return self


# ---------------------------------------------------------------- views of the twin


def of_twin(segment: GroupSegmentTwin, name: str, sequence: int) -> GroupView:
    """Returns what `name` should receive; `sequence` is 0 without memory."""
    teammates: dict[str, list[VisibleSegment]] = {}
    for member_segment in segment.member_segments:
        if member_segment.name != name:
            teammates.setdefault(member_segment.name, []).append(_stay(member_segment, segment.span))
    return GroupView(
        span=segment.span,
        over=segment.over,
        rewards=segment.rewards,
        present=[
            [
                (one.name, decision.observed, decision.actions if at < segment.span else None)
                for one, decision in members
            ]
            for at, members in enumerate(segment.present)
        ],
        own=[
            _own(member_segment, segment.span, sequence)
            for member_segment in segment.member_segments
            if member_segment.name == name
        ],
        teammates=teammates,
    ).sort()


def _stay(member_segment: MemberSegmentTwin, span: int) -> VisibleSegment:
    return VisibleSegment(
        rows=tuple((step.time, step.decision.observed, step.decision.actions) for step in member_segment.steps),
        following=member_segment.following.observed,
        next_time=member_segment.next_time,
        until=member_segment.until,
        next_actions=member_segment.following.actions
        if member_segment.next_time < min(span, member_segment.until)
        else None,
    )


def _own(member_segment: MemberSegmentTwin, span: int, sequence: int) -> OwnSegment:
    return OwnSegment(
        visible=_stay(member_segment, span),
        who=(member_segment.agent, member_segment.key, member_segment.team, member_segment.simulator),
        flags=(member_segment.terminated, member_segment.interrupted),
        outcomes=tuple(
            (step.reward, step.group_reward, action.log_prob, action.version, action.mask)
            for step in member_segment.steps
            if (action := step.decision.action) is not None
        ),
        carried=tuple(
            member_segment.steps[row].decision.carried
            for row in begins([s.time for s in member_segment.steps], sequence)
        ),
    )


def begins(times: Sequence[int], sequence: int) -> list[int]:
    """Returns the first row, and the first row in each further window of `sequence` group timesteps."""
    if not sequence:
        return []
    return [row for row, time in enumerate(times) if not row or time // sequence != times[row - 1] // sequence]


# ---------------------------------------------------------------- views of a message


def read(message: Segments, sequence: int) -> list[tuple[int, GroupView]]:
    """Returns number and view of each group segment in message order; checks that all columns fit together."""
    shared = message.shared
    assert shared is not None
    groups = len(shared.numbers)
    assert len(shared.spans) == len(shared.members) == len(shared.ended) == groups
    assert len(shared.rewards) == shared.spans.sum()
    assert (shared.spans > 0).all()
    spans = shared.spans.tolist()
    own = _by_group(shared, message, spans)
    teammates = {one.behavior: _by_group(one, one, spans) for one in shared.teammates}
    assert len(teammates) == len(shared.teammates)
    assert message.behavior not in teammates
    rows, carried = _rows(message), iter([] if message.carried is None else message.carried.tolist())
    out, at, series = [], 0, shared.rewards.tolist()
    flags = message.group_ended.tolist()
    for group, (number, span) in enumerate(zip(shared.numbers.tolist(), spans, strict=True)):
        view = GroupView(span, bool(shared.ended[group]), series[:span], [[] for _ in range(span + 1)], [])
        series = series[span:]
        for member_segment in own[group]:
            outcomes = tuple(next(rows) for _ in member_segment.rows)
            starts = begins(
                [time for time, _, _ in member_segment.rows], sequence if message.carried is not None else 0
            )
            view.own.append(
                _own_segment(message, at, member_segment, outcomes, tuple(tuple(next(carried)) for _ in starts))
            )
            _place(view, message.behavior, member_segment)
            assert flags[at] == view.over
            at += 1
        for name, member_segments in teammates.items():
            for member_segment in member_segments[group]:
                view.teammates.setdefault(name, []).append(member_segment)
                _place(view, name, member_segment)
        out.append((number, view.sort()))
    assert at == len(message.lengths)
    assert not list(rows)
    assert not list(carried), "one row for each sequence"
    return out


def _rows(message: Segments) -> Iterator[tuple[Any, ...]]:
    masks: list[Any] = [None] * len(message.log_probs) if message.masks is None else message.masks.tolist()
    return zip(
        message.rewards.tolist(),
        message.group_rewards.tolist(),
        message.log_probs.tolist(),
        message.versions.tolist(),
        [tuple(mask) if mask is not None and any(mask) else None for mask in masks],
        strict=True,
    )


def _own_segment(
    message: Segments, at: int, member_segment: VisibleSegment, outcomes: tuple[Any, ...], carried: tuple[Carried, ...]
) -> OwnSegment:
    who = (message.agents[at], message.groups[at], message.teams[at], message.simulators[at])
    flags = bool(message.terminated[at]), bool(message.interrupted[at])
    agent, key, team, simulator = map(int, who)
    return OwnSegment(member_segment, (agent, key, team, simulator), flags, outcomes, carried)


def _by_group(
    visible: GroupSegments | TeammateSegments, columns: Segments | TeammateSegments, spans: Sequence[int]
) -> list[list[VisibleSegment]]:
    """Returns the member segments of one behavior name in each group segment."""
    lengths = columns.lengths.tolist()
    assert int(visible.members.sum()) == len(lengths) == len(visible.until) == len(visible.next_times)
    assert sum(lengths) == len(visible.times) == len(columns.continuous)
    out, segment, row = [], 0, 0
    for members, span in zip(visible.members.tolist(), spans, strict=True):
        member_segments = []
        for _ in range(members):
            rows = range(row, row + lengths[segment])
            next_time, until = int(visible.next_times[segment]), int(visible.until[segment])
            member_segments.append(
                VisibleSegment(
                    rows=tuple(
                        (
                            int(visible.times[at]),
                            observed_row(columns.observations, at),
                            (tuple(columns.continuous[at].tolist()), tuple(columns.discrete[at].tolist())),
                        )
                        for at in rows
                    ),
                    following=observed_row(columns.next_observations, segment),
                    next_time=next_time,
                    until=until,
                    next_actions=(
                        tuple(visible.next_continuous[segment].tolist()),
                        tuple(visible.next_discrete[segment].tolist()),
                    )
                    if next_time < min(span, until)
                    else None,
                )
            )
            segment, row = segment + 1, rows.stop
        out.append(member_segments)
    return out


def _place(view: GroupView, name: str, member_segment: VisibleSegment) -> None:
    """Adds a member to all times of its segment: row i lasts until the time of row i + 1, the last until `until`."""
    times = [*(time for time, _, _ in member_segment.rows), member_segment.next_time, member_segment.until]
    assert all(0 <= time <= view.span + 1 for time in times), times
    assert times[:-1] == sorted(set(times[:-1])), "no two decisions at one time"
    assert times[-1] >= times[-2]
    last = [
        *((observed, actions) for _, observed, actions in member_segment.rows),
        (member_segment.following, member_segment.next_actions),
    ]
    for (observed, actions), start, stop in zip(last, times, times[1:], strict=False):
        for at in range(start, stop):
            view.present[at].append((name, observed, actions if at < view.span else None))
