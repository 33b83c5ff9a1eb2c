"""A slow twin of the group assembler, with an object per agent, step and group, and a list of members per time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sparring.pipeline.assembly.members import Sizes
from sparring.pipeline.messages.steps import AgentsEnded, AgentsStarted, OutcomesReported
from tests.assembly.assembly_twin import Action, Mask, Observed, mask_row, observed_row
from tests.assembly.assembly_world import BehaviorTick
from tests.assembly.group_records import (
    Decision,
    EpisodesTwin,
    GroupSegmentTwin,
    GroupTwin,
    MemberSegmentTwin,
    MemberTwin,
    StepTwin,
)
from tests.assembly.group_world import TickResult


class GroupsTwin:
    """Records what a group assembler with `sizes` of each behavior name should record."""

    def __init__(self, sizes: Mapping[str, Sizes]) -> None:
        self.sizes = sizes
        self.known_names: set[str] = set()
        self.members: dict[tuple[str, int], MemberTwin] = {}
        self.groups: dict[Any, GroupTwin] = {}
        self.segments: list[GroupSegmentTwin] = []
        self.all_groups: list[GroupTwin] = []
        self.episodes: dict[str, EpisodesTwin] = {name: EpisodesTwin() for name in sizes}
        self.completed = dict.fromkeys(sizes, 0)
        self.orphaned = dict.fromkeys(sizes, 0)
        self._now = 0

    def open_steps(self, name: str) -> int:
        members = sum(len(one.steps) for one in self.members.values() if one.name == name)
        ended_members = [
            member_segment
            for group in self.groups.values()
            for member_segment in group.member_segments
            if member_segment.name == name
        ]
        return members + sum(len(member_segment.steps) for member_segment in ended_members)

    def apply(self, tick_result: TickResult) -> None:
        """Applies one tick of all behavior names; separately reported losses come last."""
        everything = [(name, tick) for name, ticks in tick_result.items() for tick in ticks]
        first = {name: tick for name, tick in everything if not tick.is_separate}
        for name, tick in everything:
            self._now = tick.number
            self.completed[name] += tick.completed
            self.orphaned[name] += tick.completed
        self.lose([(name, slot) for name, tick in first.items() for slot in _slots(tick.lost)])
        self._outcomes(first)
        left = self._leave(first)
        moving = self._join(first)
        deciding = self._deciding(first)
        touched = _unique([*left, *(one.group for one, _, _ in deciding), *(group for _, group, _ in moving)])
        for group in touched:
            group.present.append([])
            group.series.append(0.0)
        for one, observed, mask in deciding:
            one.decision = Decision(observed, len(one.group.present) - 1, mask=mask)
            one.base = one.group.total
        self._move(moving)
        self._act(first)
        for group in touched:
            group.present[-1] = group.deciders()
        self._close_full()
        self.lose([(name, slot) for name, tick in everything if tick.is_separate for slot in _slots(tick.lost)])

    def flush(self, name: str) -> None:
        """Closes all groups with members of that name in their open segment."""
        for group in list(self.groups.values()):
            names = {one.name for one, _ in group.deciders()} | {
                member_segment.name for member_segment in group.member_segments
            }
            if name in names:
                self._close(group)

    def lose(self, ended_members: Sequence[tuple[str, int]]) -> None:
        """Removes the slots of disconnected simulators at once, and interrupts the open segments of their groups."""
        lost = [self.members[at] for at in ended_members if at in self.members]
        groups = _unique(one.group for one in lost)
        for group in groups:
            self._close(group, over=True, interrupted=lost)
        for one in lost:
            self.episodes[one.name].unreported.append(one.agent)
            self._remove(one)
        self._forget(group for group in groups if not group.members)

    def lose_all(self) -> None:
        self.lose(list(self.members))

    # ---------------------------------------------------------------- one tick

    def _outcomes(self, first: Mapping[str, BehaviorTick]) -> None:
        claims: dict[GroupTwin, set[float]] = {}
        for name, tick in first.items():
            for rows in (tick.ended, tick.reported):
                for row, slot in enumerate(_slots(rows)):
                    one = self.members.get((name, slot))
                    if rows is None or one is None or one.decision is None or one.decision.action is None:
                        continue
                    self.orphaned[name] -= 1
                    shared = self._outcome(one, one.decision, rows, row)
                    claims.setdefault(one.group, set()).add(one.base + shared)
        for group, totals in claims.items():
            (total,) = totals  # GroupWorld is such that all members report the same
            group.series[-1] += total - group.total
            group.total = total

    def _outcome(self, one: MemberTwin, decision: Decision, rows: AgentsEnded | OutcomesReported, row: int) -> float:
        own = float(rows.rewards[row])
        shared = 0.0 if rows.group_rewards is None else float(rows.group_rewards[row])
        one.steps.append(StepTwin(decision, decision.time, own, shared))
        one.decision = None
        one.group.series[-1] += own
        one.group.own += own
        one.total += own
        one.group_total += shared
        one.length += 1
        return shared

    def _leave(self, first: Mapping[str, BehaviorTick]) -> list[GroupTwin]:
        """Removes members that ended; returns the groups with other members, for which a new time begins."""
        ended_members: list[tuple[MemberTwin, AgentsEnded, int]] = []
        for name, tick in first.items():
            for row, slot in enumerate(_slots(tick.ended)):
                one = self.members.get((name, slot))
                if one is not None and tick.ended is not None:
                    ended_members.append((one, tick.ended, row))
                    self._remove(one)
        final_decisions: dict[GroupTwin, list[tuple[MemberTwin, Decision]]] = {}
        for one, ended, row in ended_members:
            self._record_episode(one, -1.0 if ended.outcomes is None else float(ended.outcomes[row]))
            if not one.steps:
                continue

            group, interrupted, now = one.group, bool(ended.interrupted[row]), len(one.group.present)
            end = Decision(observed_row(ended.observations, row), now)
            is_final = interrupted and not group.members  # interrupted last members are present once more
            if is_final:
                final_decisions.setdefault(group, []).append((one, end))
            group.member_segments.append(
                _member_segment(one, end, now + is_final, terminated=not interrupted, interrupted=interrupted)
            )
        groups = _unique(one.group for one, _, _ in ended_members)
        over = [group for group in groups if not group.members]
        for group in over:
            if group.key and group.whole and group.present:
                for name in group.names:
                    self.episodes[name].group_returns.append(group.total)
            self._close(group, span=len(group.present), over=True, final_decisions=final_decisions.get(group, []))
        self._forget(over)
        return [group for group in groups if group.members]

    def _record_episode(self, one: MemberTwin, outcome: float) -> None:
        episodes = self.episodes[one.name]
        if one.whole and one.length:
            row = (one.agent, one.total, one.length, one.team, outcome, one.group_total, one.key)
            episodes.rows.append(row)
        else:
            episodes.unreported.append(one.agent)

    def _join(self, first: Mapping[str, BehaviorTick]) -> list[tuple[MemberTwin, GroupTwin, int]]:
        """Adds new members; returns the members that move, with their new group and its key."""
        moving = []
        for name, tick in first.items():
            if tick.joined is None:
                continue
            for row, slot in enumerate(_slots(tick.joined)):
                one, agent, key = self.members.get((name, slot)), *_row(tick.joined, row)
                if one is None:
                    self._begin(name, tick.joined, row)
                else:
                    assert one.agent == agent, "the slot holds this agent"
                    if one.key != key:
                        moving.append((one, self._group(name, key, agent), key))
        return moving

    def _begin(self, name: str, joined: AgentsStarted, row: int) -> None:
        (agent, key), slot, fresh = _row(joined, row), int(joined.slots[row]), bool(joined.fresh[row])
        group = self._group(name, key, agent)
        team, simulator = int(joined.teams[row]), int(joined.simulators[row])
        one = MemberTwin(name, slot, agent, key, team, simulator, fresh, group)
        self.members[name, slot] = one
        group.whole = group.whole and fresh
        self._enter(one, group)

    def _enter(self, one: MemberTwin, group: GroupTwin) -> None:
        sizes = self.sizes[one.name]
        group.members.append(one)
        group.entered += 1
        group.names.add(one.name)
        group.horizon = min(group.horizon, sizes.horizon, sizes.largest)

    def _group(self, name: str, key: int, agent: int) -> GroupTwin:
        place = key or (name, agent)
        if place not in self.groups:
            group = self.groups[place] = GroupTwin(place, key, self._now)
            self.all_groups.append(group)
        return self.groups[place]

    def _deciding(self, first: Mapping[str, BehaviorTick]) -> list[tuple[MemberTwin, Observed, Mask]]:
        """Returns the members that decide in this tick, with their observations and masks."""
        out = []
        for name, tick in first.items():
            for row, slot in enumerate(_slots(tick.reported)):
                one = self.members.get((name, slot))
                if one is not None and tick.reported is not None:
                    observed = observed_row(tick.reported.observations, row)
                    out.append((one, observed, mask_row(tick.reported.masks, row)))
        return out

    def _move(self, moving: Sequence[tuple[MemberTwin, GroupTwin, int]]) -> None:
        """Moves members to other groups at once; their latest decision counts there."""
        left = [(one, one.group) for one, _, _ in moving]
        for one, group, key in moving:
            self._depart(one)
            one.key, one.group = key, group
        for one, group, _ in moving:
            self._enter(one, group)
        over = _unique(group for _, group in left if not group.members)
        for group in over:
            final_decisions = [(one, one.decision) for one, old in left if old is group and one.decision is not None]
            for member_segment in group.member_segments:  # no member is left: the last ones are present once more
                if any(member_segment.following is decision for _, decision in final_decisions):
                    member_segment.until += 1
            self._close(group, over=True, final_decisions=final_decisions)
        self._forget(over)
        for one, group, _ in moving:
            assert one.decision is not None
            one.decision = Decision(one.decision.observed, len(group.present) - 1, mask=one.decision.mask)
            one.base = group.total

    def _depart(self, one: MemberTwin) -> None:
        assert one.decision is not None, "an agent changes its group with a decision"
        one.group.members.remove(one)
        if one.steps:
            one.group.member_segments.append(_member_segment(one, one.decision, len(one.group.present) - 1))
            one.steps = []

    def _act(self, first: Mapping[str, BehaviorTick]) -> None:
        for name, tick in first.items():
            acted = tick.acted
            for row, slot in enumerate(_slots(acted)):
                one = self.members.get((name, slot))
                if acted is None or one is None or one.decision is None:
                    continue  # its decision was reported before this assembler began
                one.decision.action = Action(
                    () if acted.continuous is None else tuple(acted.continuous[row].tolist()),
                    () if acted.discrete is None else tuple(acted.discrete[row].tolist()),
                    float(acted.log_probs[row]),
                    one.decision.mask,
                    int(acted.versions[row]),
                )
                one.decision.carried = None if acted.carried is None else tuple(acted.carried[row].tolist())

    # ---------------------------------------------------------------- closing

    def _close_full(self) -> None:
        """Closes group segments that are full, or that might be too large after one more time."""
        largest = min(self.sizes[name].largest for name in self.known_names)
        for group in list(self.groups.values()):
            span = len(group.present) - 1
            if span >= group.horizon or group.entered * (span + 1) > largest:
                self._close(group)

    def _close(
        self,
        group: GroupTwin,
        *,
        span: int | None = None,
        over: bool = False,
        interrupted: Sequence[MemberTwin] = (),
        final_decisions: Sequence[tuple[MemberTwin, Decision]] = (),
    ) -> None:
        """Finishes the open segment, of `span` times or by default of all but the present one."""
        span = len(group.present) - 1 if span is None else span
        if span < 1:
            return
        deciders = group.deciders()
        for one, decision in deciders:
            member_segment = _member_segment(one, decision, span + 1, interrupted=one in interrupted)
            group.member_segments.append(member_segment)
            decision.time, one.steps = 0, []
        present = [*group.present[:span], [*deciders, *final_decisions]]
        segment = GroupSegmentTwin(group, span, over, group.series[:span], present, group.member_segments)
        self.segments.append(segment)
        group.present, group.series, group.member_segments = [deciders], [0.0], []
        group.entered = len(group.members)

    def _remove(self, one: MemberTwin) -> None:
        del self.members[one.name, one.slot]
        one.group.members.remove(one)

    def _forget(self, over: Iterable[GroupTwin]) -> None:
        for group in over:
            group.ended = self._now
            del self.groups[group.place]


def _member_segment(
    one: MemberTwin, following: Decision, until: int, *, terminated: bool = False, interrupted: bool = False
) -> MemberSegmentTwin:
    return MemberSegmentTwin(
        name=one.name,
        agent=one.agent,
        key=one.key,
        team=one.team,
        simulator=one.simulator,
        steps=one.steps,
        following=following,
        next_time=following.time,
        until=until,
        terminated=terminated,
        interrupted=interrupted,
    )


def _slots(rows: Any) -> list[int]:
    if rows is None:
        return []
    return list((rows if isinstance(rows, np.ndarray) else rows.slots).tolist())


def _row(joined: AgentsStarted, row: int) -> tuple[int, int]:
    """Returns agent and group key."""
    return int(joined.agents[row]), int(joined.groups[row])


def _unique(groups: Iterable[GroupTwin]) -> list[GroupTwin]:
    return list(dict.fromkeys(groups))
