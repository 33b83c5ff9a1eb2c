"""A slow twin of the assembler of groups: an object per agent, step and group; who was there at each time is a list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sparring.pipeline.assembly.assembler import Sizes
from sparring.pipeline.messages.steps import AgentsEnded, AgentsStarted, OutcomesReported
from tests.assembly.assembly_twin import Action, Seen, _seen
from tests.assembly.assembly_world import BehaviorTick
from tests.assembly.group_records import (
    Decision,
    EpisodesTwin,
    GroupSegmentTwin,
    GroupTwin,
    MemberTwin,
    StayTwin,
    StepTwin,
)
from tests.assembly.group_world import TickResult


class GroupsTwin:
    """What an assembler of groups should have recorded.

    Args:
        sizes: of each behavior name.
    """

    def __init__(self, sizes: Mapping[str, Sizes]) -> None:
        self.sizes = sizes
        self.heard_of: set[str] = set()
        self.members: dict[tuple[str, int], MemberTwin] = {}
        self.groups: dict[Any, GroupTwin] = {}
        self.segments: list[GroupSegmentTwin] = []
        self.agent_episodes: list[GroupTwin] = []
        self.episodes: dict[str, EpisodesTwin] = {name: EpisodesTwin() for name in sizes}
        self.completed = dict.fromkeys(sizes, 0)
        self.orphaned = dict.fromkeys(sizes, 0)
        self._now = 0

    def open_steps(self, name: str) -> int:
        members = sum(len(one.steps) for one in self.members.values() if one.name == name)
        gone = [stay for group in self.groups.values() for stay in group.stays if stay.name == name]
        return members + sum(len(stay.steps) for stay in gone)

    def apply(self, wake: TickResult) -> None:
        """One tick of all behavior names: who went away goes last, where that is told apart."""
        everything = [(name, tick) for name, ticks in wake.items() for tick in ticks]
        first = {name: tick for name, tick in everything if not tick.apart}
        for name, tick in everything:
            self._now = tick.number
            self.completed[name] += tick.completed
            self.orphaned[name] += tick.completed
        self.lose([(name, slot) for name, tick in first.items() for slot in _slots(tick.lost)])
        self._outcomes(first)
        left = self._leave(first)
        moving = self._join(first)
        deciding = self._deciding(first)
        touched = _once([*left, *(one.group for one, _ in deciding), *(group for _, group, _ in moving)])
        for group in touched:
            group.present.append([])
            group.series.append(0.0)
        for one, seen in deciding:
            one.decision = Decision(seen, len(one.group.present) - 1)
            one.base = one.group.total
        self._move(moving)
        self._act(first)
        for group in touched:
            group.present[-1] = group.there()
        self._close_full()
        self.lose([(name, slot) for name, tick in everything if tick.apart for slot in _slots(tick.lost)])

    def flush(self, name: str) -> None:
        """All groups with members of that name in their open segment."""
        for group in list(self.groups.values()):
            names = {one.name for one, _ in group.there()} | {stay.name for stay in group.stays}
            if name in names:
                self._close(group)

    def lose(self, gone: Sequence[tuple[str, int]]) -> None:
        """Slots whose simulator went away, all at once; what their groups had open is interrupted."""
        lost = [self.members[at] for at in gone if at in self.members]
        groups = _once(one.group for one in lost)
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
            (total,) = totals  # the world is such that all tell the same
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
        """Those that ended are gone; returns the groups of which others are left: a new time begins there."""
        gone: list[tuple[MemberTwin, AgentsEnded, int]] = []
        for name, tick in first.items():
            for row, slot in enumerate(_slots(tick.ended)):
                one = self.members.get((name, slot))
                if one is not None and tick.ended is not None:
                    gone.append((one, tick.ended, row))
                    self._remove(one)
        shown: dict[GroupTwin, list[tuple[MemberTwin, Decision]]] = {}
        for one, ended, row in gone:
            self._note(one, -1.0 if ended.outcomes is None else float(ended.outcomes[row]))
            if not one.steps:
                continue
            group, flush, now = one.group, bool(ended.interrupted[row]), len(one.group.present)
            end = Decision(_seen(ended.observations, row), now)
            again = flush and not group.members  # the last of a group that were cut are seen once more
            if again:
                shown.setdefault(group, []).append((one, end))
            group.stays.append(_stay(one, end, now + again, terminated=not flush, interrupted=flush))
        groups = _once(one.group for one, _, _ in gone)
        over = [group for group in groups if not group.members]
        for group in over:
            if group.key and group.whole and group.present:
                for name in group.names:
                    self.episodes[name].group_returns.append(group.total)
            self._close(group, span=len(group.present), over=True, shown=shown.get(group, []))
        self._forget(over)
        return [group for group in groups if group.members]

    def _note(self, one: MemberTwin, outcome: float) -> None:
        episodes = self.episodes[one.name]
        if one.whole and one.length:
            row = (one.agent, one.total, one.length, one.team, outcome, one.group_total, one.key)
            episodes.rows.append(row)
        else:
            episodes.unreported.append(one.agent)

    def _join(self, first: Mapping[str, BehaviorTick]) -> list[tuple[MemberTwin, GroupTwin, int]]:
        """New members; returns who of the others goes on in which group, and its key."""
        moving = []
        for name, tick in first.items():
            if tick.joined is None:
                continue
            for row, slot in enumerate(_slots(tick.joined)):
                one, agent, key = self.members.get((name, slot)), *_row(tick.joined, row)
                if one is None:
                    self._begin(name, tick.joined, row)
                else:
                    assert one.agent == agent, "the slot of an agent that is there"
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
            self.agent_episodes.append(group)
        return self.groups[place]

    def _deciding(self, first: Mapping[str, BehaviorTick]) -> list[tuple[MemberTwin, Seen]]:
        """Who decides in this tick, and what it sees."""
        out = []
        for name, tick in first.items():
            for row, slot in enumerate(_slots(tick.reported)):
                one = self.members.get((name, slot))
                if one is not None and tick.reported is not None:
                    out.append((one, _seen(tick.reported.observations, row)))
        return out

    def _move(self, moving: Sequence[tuple[MemberTwin, GroupTwin, int]]) -> None:
        """All at once leave their groups, and go on in others with the decision that they have just reported."""
        left = [(one, one.group) for one, _, _ in moving]
        for one, group, key in moving:
            self._depart(one)
            one.key, one.group = key, group
        for one, group, _ in moving:
            self._enter(one, group)
        over = _once(group for _, group in left if not group.members)
        for group in over:
            shown = [(one, one.decision) for one, old in left if old is group and one.decision is not None]
            for stay in group.stays:  # nobody is left: those who went last are seen once more
                if any(stay.following is decision for _, decision in shown):
                    stay.until += 1
            self._close(group, over=True, shown=shown)
        self._forget(over)
        for one, group, _ in moving:
            assert one.decision is not None
            one.decision = Decision(one.decision.seen, len(group.present) - 1)
            one.base = group.total

    def _depart(self, one: MemberTwin) -> None:
        assert one.decision is not None, "an agent tells of another group with a decision"
        one.group.members.remove(one)
        if one.steps:
            one.group.stays.append(_stay(one, one.decision, len(one.group.present) - 1))
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
                    _mask(acted.masks, row),
                    int(acted.versions[row]),
                )
                one.decision.carried = None if acted.carried is None else tuple(acted.carried[row].tolist())

    # ---------------------------------------------------------------- closing

    def _close_full(self) -> None:
        """Group segments with as many times as they may have, or that might be too large after one more."""
        largest = min(self.sizes[name].largest for name in self.heard_of)
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
        shown: Sequence[tuple[MemberTwin, Decision]] = (),
    ) -> None:
        """Finishes the open segment, of all times but the present one unless `span` says otherwise."""
        span = len(group.present) - 1 if span is None else span
        if span < 1:
            return
        there = group.there()
        for one, decision in there:
            stay = _stay(one, decision, span + 1, interrupted=one in interrupted)
            group.stays.append(stay)
            decision.time, one.steps = 0, []
        present = [*group.present[:span], [*there, *shown]]
        segment = GroupSegmentTwin(group, span, over, group.series[:span], present, group.stays)
        self.segments.append(segment)
        group.present, group.series, group.stays = [there], [0.0], []
        group.entered = len(group.members)

    def _remove(self, one: MemberTwin) -> None:
        del self.members[one.name, one.slot]
        one.group.members.remove(one)

    def _forget(self, over: Iterable[GroupTwin]) -> None:
        for group in over:
            group.ended = self._now
            del self.groups[group.place]


def _stay(
    one: MemberTwin, following: Decision, until: int, *, terminated: bool = False, interrupted: bool = False
) -> StayTwin:
    return StayTwin(
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
    """Life and group key."""
    return int(joined.agents[row]), int(joined.groups[row])


def _mask(masks: Any, row: int) -> tuple[bool, ...] | None:
    """One that forbids nothing is None."""
    return None if masks is None or not masks[row].any() else tuple(masks[row].tolist())


def _once(groups: Iterable[GroupTwin]) -> list[GroupTwin]:
    return list(dict.fromkeys(groups))
