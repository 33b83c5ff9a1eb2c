"""Turns the steps of one source into finished segments of agents and groups.

An agent's segment closes when it has `time_horizon` steps, its agent ends, its simulator disconnects, or a flush
requests it. Where learners train groups, a group's segment closes when it has `time_horizon` group timesteps, when no
member is left, when its simulator disconnects, or when a flush requests it: for all its members together, whatever
their behavior names, because they share their rewards. There an agent without a group is a group of its own; elsewhere
each agent is one, and no table of groups is needed.

Small segments are gathered into messages of at least `message_steps` steps. Those of all behavior names that share
groups are sent at once, because their messages contain rows of teammates. A flush sends all that are open, so none
waits forever: a learner that waits for steps always causes a flush.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.assembly.columns import NO_ROWS, Places, RowNumbers, Slots, pick_ragged
from sparring.pipeline.assembly.groups import NO_GROUPS, Groups
from sparring.pipeline.assembly.members import NO_SLOTS, Members, Sizes
from sparring.pipeline.assembly.messages import FinishedSegments, are_last, group_returns, has_episodes, note_episodes
from sparring.pipeline.assembly.ticks import TickEvents, split_ticks
from sparring.pipeline.messages.rows import pick_where
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.steps import AgentsStarted, BehaviorSteps

Tick = Sequence[tuple[Members, TickEvents]]
"""Events of one tick by behavior name."""


class Assembler:
    """Assembles the segments of all behavior names of one source.

    Args:
        source: incarnation of the stepping service.
        origin: incarnation of this assembly service.
        sizes: returns the sizes of segments and messages of a behavior name.
        in_groups: returns whether the learner of a behavior name trains groups.
    """

    def __init__(
        self, source: str, origin: str, sizes: Callable[[str], Sizes], in_groups: Callable[[str], bool]
    ) -> None:
        self._source, self._origin, self._sizes, self._in_groups = source, origin, sizes, in_groups
        self._groups = Groups()
        self._sharing: dict[str, Members] = {}  # those whose learners train groups
        self._together = [self._sharing]  # those whose segments are sent at once
        self.members: dict[str, Members] = {}

    def of(self, behavior: str) -> Members:
        """Returns the members of a behavior name, which is added if it is new."""
        if behavior not in self.members:
            sizes, in_groups = self._sizes(behavior), self._in_groups(behavior)
            horizon = min(sizes.horizon, sizes.largest)
            one = Members(behavior, self._source, self._origin, len(self._sharing), sizes, in_groups, horizon)
            self.members[behavior] = one
            if in_groups:
                self._sharing[behavior] = one
            else:
                self._together.append({behavior: one})
        return self.members[behavior]

    def has(self, keys: NDArray[np.int64]) -> bool:
        """Returns whether one of these group keys has members."""
        return bool(np.isin(keys[keys != 0], self._groups.keys[self._groups.used]).any())

    def apply(self, parts: Sequence[BehaviorSteps]) -> None:
        """Records the steps of some ticks, in at most one part for each behavior name."""
        ticks: dict[tuple[int, bool], list[tuple[Members, TickEvents]]] = {}
        for part in parts:
            one = self.of(part.behavior)
            one.begin(part)
            for number, events in split_ticks(part, one.live, 1 if one.in_groups else one.horizon):
                if not one.in_groups:
                    self._tick_of_agents(one, events)
                    continue
                # Disconnections of simulators are reported apart, after the other events of the tick.
                others = events.ended or events.joined or events.reported or events.acted
                only_losses = events.lost is not None and others is None
                ticks.setdefault((number, only_losses), []).append((one, events))
        for (number, _), tick in sorted(ticks.items()):
            self._tick_of_groups(number, tick)

    def close_all(self) -> None:
        """Interrupts all open segments and removes all agents, because the source has ended."""
        self._lose([(one, np.flatnonzero(one.live).astype(np.int32)) for one in self.members.values()])

    def flush(self, behavior: str, serial: int) -> Iterator[Segments]:
        """Closes every open segment that has steps of the behavior name, and yields all messages.

        No episode ends. The last message of the behavior name carries `serial`.
        """
        one = self.of(behavior)
        if one.in_groups:
            touched = [one.places[one.live & one.seen], *(segments.places for segments in one.departed)]
            self._close(np.unique(np.concatenate(touched)))
        else:
            one.finish(one.cut(np.flatnonzero(one.live & (one.lengths > 0)).astype(np.int32)))
        together = next(names for names in self._together if behavior in names)
        yield from self._messages(together, behavior, serial)

    def ready_messages(self) -> Iterator[Segments]:
        """Yields messages when there are enough steps: of groups for all behavior names when one has enough."""
        for together in self._together:
            if any(one.closed_steps >= one.sizes.message_steps for one in together.values()):
                yield from self._messages(together)
        for behavior, one in self.members.items():
            if one.reached > one.announced:
                yield self.announcement(behavior)

    def announcement(self, behavior: str) -> Segments:
        """Returns an empty message, which makes this source known before its first segment."""
        one = self.of(behavior)
        groups = NO_GROUPS if one.in_groups else None
        return FinishedSegments({behavior: one}, {behavior: one.cut(NO_SLOTS)}, groups).message(behavior, 0)

    def rest(self) -> Iterator[Segments]:
        """Yields messages with all finished segments."""
        for together in self._together:
            yield from self._messages(together)

    # ---------------------------------------------------------------- one tick

    def _tick_of_agents(self, one: Members, events: TickEvents) -> None:
        """Applies ticks of agents that are each a group of one."""
        ended = events.ended
        if events.lost is not None:
            self._lose([(one, events.lost)])
        one.count(events.completed, sum([one.complete(report, events.ticks) for report in events.outcomes]))
        if ended is not None:
            ended = pick_where(ended, one.live[ended.slots])
            last = are_last(one, ended.slots)
            one.finish(one.depart(ended, last))
            note_episodes(one, ended.slots, ended.outcomes, group_returns(one, ended.slots[last]))
            one.free(ended.slots)
        if events.joined is not None:
            one.join(events.joined)
        slots, rows = one.observe(events)
        one.act(events, rows)
        one.cut_full(slots)

    def _tick_of_groups(self, number: int, tick: Tick) -> None:
        """Applies one tick of all behavior names.

        Outcomes belong to the timestep before. Then ended members leave, new ones enter, and a new timestep begins for
        every group of which a member ended or decides.
        """
        groups = self._groups
        lost = [(one, events.lost) for one, events in tick if events.lost is not None]
        if lost:
            self._lose(lost)
        self._earn(tick)
        continuing = self._leave(tick)
        moving = [(one, self._join(one, events.joined)) for one, events in tick if events.joined is not None]
        moves = [(one, slots, groups.find(one.keys(slots))) for one, slots in moving if slots.size]
        reports = [(one, events.reported.slots) for one, events in tick if events.reported is not None]
        deciding = [one.places[slots[one.live[slots]]] for one, slots in reports]
        groups.advance(np.unique(np.concatenate([continuing, *deciding, *(entered for *_, entered in moves)])))
        rows = [self._observe(number, one, events) for one, events in tick]
        if moves:
            self._move(moves)
        for (one, events), decided in zip(tick, rows, strict=True):
            one.act(events, decided)
        self._close(groups.full(min(one.sizes.largest for one in self._sharing.values())))

    def _earn(self, tick: Tick) -> None:
        """Writes the outcomes of pending steps, and credits their groups."""
        rewards = []
        for one, events in tick:
            found = 0
            for report in events.outcomes:
                pending = one.acted[report.slots]
                slots, shared = report.slots[pending], report.group_rewards
                of_group = np.zeros(len(slots), np.float32) if shared is None else shared[pending]
                ended = np.full(len(slots), report is events.ended)
                columns = (one.places, one.totals, one.decided)
                rewards.append((report.rewards[pending], of_group, ended, *(column[slots] for column in columns)))
                found += one.complete(report)
            one.count(events.completed, found)
        if rewards:
            self._groups.earn(*(np.concatenate(column) for column in zip(*rewards, strict=True)))

    def _leave(self, tick: Tick) -> Places:
        """Removes ended members, and closes the groups that are left empty; returns the places of the others."""
        groups = self._groups
        ended_of = [(one, events.ended) for one, events in tick if events.ended is not None]
        ending = {one: pick_where(ended, one.live[ended.slots]) for one, ended in ended_of}
        if not ending:
            return NO_ROWS
        places = groups.leave([one.places[ended.slots] for one, ended in ending.items()])
        empty = places[groups.live[places] == 0]
        for one, ended in ending.items():
            segments = one.depart(ended, groups.live[one.places[ended.slots]] == 0)
            now = groups.times[segments.places]
            segments.next_times = now.astype(np.int32)
            # Interrupted last members of a group count once more: the group's return is bootstrapped with them.
            segments.until = (now + (segments.interrupted & segments.group_ended)).astype(np.int32)
            one.departed.append(segments)
        for one in self._sharing.values():
            slots, outcomes = (ending[one].slots, ending[one].outcomes) if one in ending else (NO_SLOTS, None)
            note_episodes(one, slots, outcomes, groups.returns(empty, one.number))
            one.free(slots)
        groups.advance(empty)
        self._close(empty, ended=True)
        return places[groups.live[places] > 0]

    def _join(self, one: Members, joined: AgentsStarted) -> Slots:
        """Gives slots and places to new members; returns the slots of those that change their group."""
        slots, before = joined.slots, one.groups[joined.slots]
        is_new = one.join(joined)
        new = slots[is_new]
        one.places[new] = places = self._groups.find(one.keys(new))
        self._groups.enter(places, one.number, one.horizon, one.known[new])
        moving: Slots = slots[~is_new & (before != joined.groups)]
        return moving

    def _observe(self, number: int, one: Members, events: TickEvents) -> RowNumbers:
        """Writes observations, of which each is made at the present timestep of a group; returns their rows."""
        slots, rows = one.observe(events)
        places = one.places[slots]
        one.log.columns["times"][rows] = self._groups.times[places] - 1
        one.totals[slots] = self._groups.totals[places]
        one.decided[slots] = number
        return rows

    def _move(self, moves: Sequence[tuple[Members, Slots, Places]]) -> None:
        """Moves members in slots to places of other groups with their pending decisions: all leave, then all enter."""
        groups = self._groups
        before = [one.places[slots] for one, slots, _ in moves]
        left = groups.leave(before)
        for one, _, entered in moves:
            groups.enter(entered, one.number, one.horizon, np.ones(len(entered), bool))
        for (one, slots, entered), places in zip(moves, before, strict=True):
            segments = one.cut(slots)
            segments.groups = np.maximum(groups.keys[places], 0)
            # A group without members dissolves: its return is bootstrapped with what its last members see now.
            segments.until = (groups.times[places] - (groups.live[places] > 0)).astype(np.int32)
            one.departed.append(pick_ragged(segments, np.flatnonzero(segments.lengths), "rows", "lengths"))
            one.places[slots] = entered
            one.totals[slots] = groups.totals[entered]
            one.log.columns["times"][segments.following] = groups.times[entered] - 1
        self._close(left[groups.live[left] == 0], ended=True)

    def _lose(self, lost: Sequence[tuple[Members, Slots]]) -> None:
        """Interrupts the open segments of these slots, whose simulators have disconnected."""
        groups = self._groups
        held = [(one, slots[slots < len(one.live)]) for one, slots in lost]
        live = [(one, slots[one.live[slots]]) for one, slots in held]
        for one, slots in live:
            one.lost[slots] = True
            if not one.in_groups:
                one.finish(one.cut(slots[one.lengths[slots] > 0]))
        places = groups.leave([one.places[slots] for one, slots in live if one.in_groups])
        has_members = groups.live[places] > 0
        self._close(places[~has_members], ended=True)
        self._close(places[has_members])
        for one, slots in live:
            note_episodes(one, slots)
            one.free(slots)
            one.lost[slots] = False

    def _close(self, places: Places, *, ended: bool = False) -> None:
        """Finishes the segments of groups, as far as they have a timestep before the present one.

        Args:
            places: places of the groups.
            ended: whether they have no members left, so that their places become free.
        """
        groups = self._groups
        if ended:
            groups.used[places] = False
        places = places[groups.times[places] > 1]
        if not places.size:
            return
        spans = groups.times[places] - 1
        rank = np.full(len(groups.live), -1, np.int64)
        rank[places] = np.arange(len(places))
        finished = sum(len(one.numbers) for one in groups.unsent)
        for one in self._sharing.values():
            one.collect(rank, spans, finished, ended=ended)
        groups.close(places, spans, ended=ended)

    # ---------------------------------------------------------------- messages

    def _messages(self, together: Mapping[str, Members], behavior: str = "", serial: int = 0) -> Iterator[Segments]:
        """Yields all finished segments of names that share groups, or of one that does not.

        The last message of `behavior`, which may be empty, carries `serial`.
        """
        segments = {name: one.take() for name, one in together.items()}
        finished = FinishedSegments(together, segments, self._groups.take() if together is self._sharing else None)
        for name, one in together.items():
            pieces = list(finished.divide(name, one.sizes.largest))
            if not pieces and (has_episodes(one) or (serial and name == behavior)):
                pieces = [finished.pick(NO_ROWS)]
            for at, piece in enumerate(pieces, 1):
                yield piece.message(name, serial if name == behavior and at == len(pieces) else 0)
