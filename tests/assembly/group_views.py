"""What one behavior name is told of a group segment: read from messages, and written from the slow twin.

Who was there at each time, and what it saw and did last, is made of the columns as the docstring of `Shared` explains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparring.pipeline.messages.segments import Segments, Shared, TeammateSegments
from tests.assembly.assembly_twin import Carried, Seen, _seen
from tests.assembly.group_records import Did, GroupSegmentTwin, StayTwin


@dataclass(frozen=True, order=True)
class MemberStay:
    """A segment of a member, as its mates know it; `next_did` is None where it has no meaning.

    Attributes:
        rows: time, what was seen and what was done at each decision.
    """

    rows: tuple[tuple[int, Seen, Did | None], ...]
    following: Seen
    next_time: int
    until: int
    next_did: Did | None


@dataclass(frozen=True)
class Own:
    """... and as its learner does.

    Attributes:
        got: own reward, group reward, log-probability, version and mask of each row.
        carried: to each sequence.
    """

    shown: MemberStay
    who: tuple[int, int, int, int]
    flags: tuple[bool, bool]
    got: tuple[tuple[Any, ...], ...]
    carried: tuple[Carried, ...]


@dataclass
class GroupView:
    """A group segment.

    Attributes:
        present: at each time and the next, behavior name and what was seen and done last by whom was there.
    """

    span: int
    over: bool
    rewards: list[float]
    present: list[list[tuple[str, Seen, Did | None]]]
    own: list[Own]
    teammates: dict[str, list[MemberStay]] = field(default_factory=dict)

    def sort(self) -> GroupView:
        """In an order of its own: that of members within a group is nobody's business."""
        self.own.sort(key=lambda one: one.shown.following)
        for there in self.present:
            there.sort(key=repr)
        for stays in self.teammates.values():
            stays.sort(key=repr)
        return self


# ---------------------------------------------------------------- of the twin


def of_twin(segment: GroupSegmentTwin, name: str, sequence: int) -> GroupView:
    """What `name` should be told; `sequence` is 0 where nothing is carried."""
    teammates: dict[str, list[MemberStay]] = {}
    for stay in segment.stays:
        if stay.name != name:
            teammates.setdefault(stay.name, []).append(_stay(stay, segment.span))
    return GroupView(
        span=segment.span,
        over=segment.over,
        rewards=segment.rewards,
        present=[
            [(one.name, decision.seen, decision.did if at < segment.span else None) for one, decision in there]
            for at, there in enumerate(segment.present)
        ],
        own=[_own(stay, segment.span, sequence) for stay in segment.stays if stay.name == name],
        teammates=teammates,
    ).sort()


def _stay(stay: StayTwin, span: int) -> MemberStay:
    return MemberStay(
        rows=tuple((step.time, step.decision.seen, step.decision.did) for step in stay.steps),
        following=stay.following.seen,
        next_time=stay.next_time,
        until=stay.until,
        next_did=stay.following.did if stay.next_time < min(span, stay.until) else None,
    )


def _own(stay: StayTwin, span: int, sequence: int) -> Own:
    return Own(
        shown=_stay(stay, span),
        who=(stay.agent, stay.key, stay.team, stay.simulator),
        flags=(stay.terminated, stay.interrupted),
        got=tuple(
            (step.reward, step.group_reward, action.log_prob, action.version, action.mask)
            for step in stay.steps
            if (action := step.decision.action) is not None
        ),
        carried=tuple(stay.steps[row].decision.carried for row in begins([s.time for s in stay.steps], sequence)),
    )


def begins(times: Sequence[int], sequence: int) -> list[int]:
    """Rows at which a sequence begins: the first, and the first in every window of `sequence` group times."""
    if not sequence:
        return []
    return [row for row, time in enumerate(times) if not row or time // sequence != times[row - 1] // sequence]


# ---------------------------------------------------------------- of a message


def read(message: Segments, sequence: int) -> list[tuple[int, GroupView]]:
    """Number of the group's life and segment, in the order of the message; checks that all columns fit together."""
    shared = message.shared
    assert shared is not None
    groups = len(shared.numbers)
    assert len(shared.spans) == len(shared.members) == len(shared.ended) == groups
    assert len(shared.rewards) == shared.spans.sum()
    assert (shared.spans > 0).all()
    spans = shared.spans.tolist()
    own = _divided(shared, message, spans)
    teammates = {one.behavior: _divided(one, one, spans) for one in shared.teammates}
    assert len(teammates) == len(shared.teammates)
    assert message.behavior not in teammates
    rows, carried = _rows(message), iter([] if message.carried is None else message.carried.tolist())
    out, at, series = [], 0, shared.rewards.tolist()
    flags = message.group_ended.tolist()
    for group, (number, span) in enumerate(zip(shared.numbers.tolist(), spans, strict=True)):
        view = GroupView(span, bool(shared.ended[group]), series[:span], [[] for _ in range(span + 1)], [])
        series = series[span:]
        for stay in own[group]:
            got = tuple(next(rows) for _ in stay.rows)
            starts = begins([time for time, _, _ in stay.rows], sequence if message.carried is not None else 0)
            view.own.append(_told(message, at, stay, got, tuple(tuple(next(carried)) for _ in starts)))
            _place(view, message.behavior, stay)
            assert flags[at] == view.over
            at += 1
        for name, stays in teammates.items():
            for stay in stays[group]:
                view.teammates.setdefault(name, []).append(stay)
                _place(view, name, stay)
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


def _told(message: Segments, at: int, stay: MemberStay, got: tuple[Any, ...], carried: tuple[Carried, ...]) -> Own:
    who = (message.agents[at], message.groups[at], message.teams[at], message.simulators[at])
    flags = bool(message.terminated[at]), bool(message.interrupted[at])
    agent, key, team, simulator = map(int, who)
    return Own(stay, (agent, key, team, simulator), flags, got, carried)


def _divided(
    shown: Shared | TeammateSegments, columns: Segments | TeammateSegments, spans: Sequence[int]
) -> list[list[MemberStay]]:
    """Segments of members of one behavior name in each group segment."""
    lengths = columns.lengths.tolist()
    assert int(shown.members.sum()) == len(lengths) == len(shown.until) == len(shown.next_times)
    assert sum(lengths) == len(shown.times) == len(columns.continuous)
    out, segment, row = [], 0, 0
    for members, span in zip(shown.members.tolist(), spans, strict=True):
        stays = []
        for _ in range(members):
            rows = range(row, row + lengths[segment])
            next_time, until = int(shown.next_times[segment]), int(shown.until[segment])
            stays.append(
                MemberStay(
                    rows=tuple(
                        (
                            int(shown.times[at]),
                            _seen(columns.observations, at),
                            (tuple(columns.continuous[at].tolist()), tuple(columns.discrete[at].tolist())),
                        )
                        for at in rows
                    ),
                    following=_seen(columns.next_observations, segment),
                    next_time=next_time,
                    until=until,
                    next_did=(
                        tuple(shown.next_continuous[segment].tolist()),
                        tuple(shown.next_discrete[segment].tolist()),
                    )
                    if next_time < min(span, until)
                    else None,
                )
            )
            segment, row = segment + 1, rows.stop
        out.append(stays)
    return out


def _place(view: GroupView, name: str, stay: MemberStay) -> None:
    """Row i is its last decision from its time on, up to that of row i + 1 or of what followed; that until `until`."""
    times = [*(time for time, _, _ in stay.rows), stay.next_time, stay.until]
    assert all(0 <= time <= view.span + 1 for time in times), times
    assert times[:-1] == sorted(set(times[:-1])), "no two decisions at one time"
    assert times[-1] >= times[-2]
    last = [*((seen, did) for _, seen, did in stay.rows), (stay.following, stay.next_did)]
    for (seen, did), start, stop in zip(last, times, times[1:], strict=False):
        for at in range(start, stop):
            view.present[at].append((name, seen, did if at < view.span else None))
