"""Turns the steps of all members of one source's groups into finished group segments.

A group's segment closes when it has `time_horizon` group timesteps, when no member is left, when its simulator
disconnects, or when a flush requests it: for all its members together, whatever their behavior names, because they
share their rewards. An agent without a group is a group of its own.

Finished segments are sent for all behavior names at once, because the messages of each contain rows of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.assembly.assembler import Sizes
from sparring.pipeline.assembly.block import Slots
from sparring.pipeline.assembly.columns import slice_rows
from sparring.pipeline.assembly.group_messages import divided, message
from sparring.pipeline.assembly.groups import ClosedGroupSegments, Groups, Mask, MemberRewards, Places
from sparring.pipeline.assembly.log import RowNumbers
from sparring.pipeline.assembly.members import BehaviorMembers, observations
from sparring.pipeline.assembly.notes import Account
from sparring.pipeline.assembly.ticks import NO_SLOTS, TickEvents, split_ticks
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.steps import AgentsEnded, AgentsStarted, BehaviorSteps, OutcomesReported


class _Move(NamedTuple):
    """Holds members of one behavior name that change their group, and the keys of the groups that they leave."""

    one: BehaviorMembers
    slots: Slots
    keys: NDArray[np.int64]


class GroupAssembler:
    """Assembles the group segments of one source.

    Args:
        source: incarnation of the stepping service.
        origin: incarnation of this assembly service.
        sizes: returns the sizes of segments and messages of a behavior name.
    """

    def __init__(self, source: str, origin: str, sizes: Callable[[str], Sizes]) -> None:
        self._source, self._origin, self._sizes = source, origin, sizes
        self._largest: dict[str, int] = {}
        self._groups = Groups()
        self._closed: list[ClosedGroupSegments] = []
        self.members: dict[str, BehaviorMembers] = {}

    def of(self, behavior: str) -> BehaviorMembers:
        """Returns the members of a behavior name, which is added if it is new."""
        if behavior not in self.members:
            sizes = self._sizes(behavior)
            self._largest[behavior] = sizes.largest
            self.members[behavior] = BehaviorMembers(
                len(self.members),
                Account(behavior, self._source, self._origin),
                horizon=min(sizes.horizon, sizes.largest),
                message_steps=sizes.message_steps,
                sequence=sizes.sequence,
            )
        return self.members[behavior]

    def has(self, keys: NDArray[np.int64]) -> bool:
        """Returns whether one of these group keys has members."""
        return self._groups.has(keys[keys != 0])

    def apply(self, parts: Sequence[BehaviorSteps]) -> None:
        """Records the steps of some ticks, in at most one part for each behavior name."""
        ticks: dict[int, list[tuple[BehaviorMembers, TickEvents]]] = {}
        for part in parts:
            members = self.of(part.behavior)
            members.account.begin(part.produced_before)
            for record in (part.ended, part.joined, part.reported, part.acted):
                members.block.grow(None if record is None else record.slots)
            for number, events in zip(part.ticks.tolist(), split_ticks(part), strict=True):
                ticks.setdefault(number, []).append((members, events))
        for number, tick in sorted(ticks.items()):
            # Disconnections of simulators are reported apart, after the other events of the tick.
            self._tick(number, {one: events for one, events in tick if not events.has_only_losses})
            self._lose([(one, events.lost) for one, events in tick if events.has_only_losses])

    def close_all(self) -> None:
        """Interrupts all open segments and removes all agents, because the source has ended."""
        self._lose([(one, np.flatnonzero(one.block.live).astype(np.int32)) for one in self.members.values()])

    def flush(self, behavior: str, serial: int) -> Iterator[Segments]:
        """Closes every open group segment in which the behavior name has members, and yields all messages.

        No episode ends. The last message of the behavior name carries `serial`.
        """
        block = self.of(behavior).block
        touched = [block.places[block.live & block.seen], *(segments.groups for segments in block.departed)]
        places = np.unique(np.concatenate(touched))
        self._close(places[self._groups.times[places] > 1])
        yield from self._messages(behavior, serial)

    def ready_messages(self) -> Iterator[Segments]:
        """Yields messages of all behavior names when one has enough steps."""
        members = self.members.values()
        if any(one.closed_steps >= one.message_steps for one in members):
            yield from self._messages()
        for behavior, one in self.members.items():
            if one.account.has_unreported:
                yield self.announcement(behavior)

    def announcement(self, behavior: str) -> Segments:
        """Returns an empty message, which makes this source known before its first segment."""
        self.of(behavior)
        return message(self.members, behavior, None, 0)

    def rest(self) -> Iterator[Segments]:
        """Yields messages with all finished segments."""
        yield from self._messages()

    # ---------------------------------------------------------------- one tick

    def _tick(self, number: int, tick: Mapping[BehaviorMembers, TickEvents]) -> None:
        """Applies one tick of all behavior names.

        Outcomes belong to the timestep before. Then ended members leave, new ones enter, and a new timestep begins for
        every group of which a member ended or decides.
        """
        self._lose([(one, events.lost) for one, events in tick.items() if events.lost.size])
        self._earn(tick)
        continuing = self._leave(tick)
        moving = [self._join(one, events.joined) for one, events in tick.items() if events.joined is not None]
        self._advance(tick, continuing, moving)
        decided = {one: self._observe(number, one, events.reported) for one, events in tick.items()}
        self._move([move for move in moving if move.slots.size])
        for one, events in tick.items():
            self._act(one, events, decided[one])
            one.account.count(events.completed, one.found)
        self._close_full()

    def _earn(self, tick: Mapping[BehaviorMembers, TickEvents]) -> None:
        """Writes the outcomes of pending steps, and credits their groups."""
        rewards = []
        for one, events in tick.items():
            one.found, block = 0, one.block
            for report in (events.ended, events.reported):
                if report is None:
                    continue
                pending = block.acted[report.slots]
                slots, shared = report.slots[pending], report.group_rewards
                places = block.places[slots]
                rewards.append(
                    MemberRewards(
                        places,
                        report.rewards[pending],
                        np.zeros(len(slots), np.float32) if shared is None else shared[pending],
                        block.totals[slots],
                        block.decided[slots],
                        np.full(len(slots), report is events.ended),
                    )
                )
                one.found += block.complete(report.slots, report.rewards, shared)
        self._groups.earn(rewards)

    def _leave(self, tick: Mapping[BehaviorMembers, TickEvents]) -> Places:
        """Removes ended members, and closes the groups that are left empty; returns the places of the others."""
        left = []
        ending: dict[BehaviorMembers, tuple[Slots, AgentsEnded]] = {}
        for one, events in tick.items():
            if events.ended is None:
                continue
            block, ended = one.block, events.ended
            live = np.flatnonzero(block.live[ended.slots])
            slots = ended.slots[live]
            ending[one] = slots, slice_rows(ended, live)
            left.append(block.places[slots])
            np.subtract.at(self._groups.live, block.places[slots], 1)
        if not left:
            return np.empty(0, np.int64)
        places: Places = np.unique(np.concatenate(left))
        empty = self._groups.live[places] == 0
        for one, (slots, ended) in ending.items():
            self._depart(one, slots, ended)
        self._note_episodes(ending)
        self._close(places[empty & (self._groups.times[places] > 0)], self._groups.times, ended=True)
        self._groups.free(places[empty])
        others: Places = places[~empty]
        return others

    def _depart(self, one: BehaviorMembers, slots: Slots, ended: AgentsEnded) -> None:
        """Keeps the segments of ended members until the segments of their groups close."""
        block, groups = one.block, self._groups
        stepped = np.flatnonzero(block.lengths[slots] > 0)
        those = slots[stepped]
        if not those.size:
            return
        places = block.places[those]
        following = block.append(observations(list(ended.observations), stepped))
        now = groups.times[places]
        block.log.times[following] = now
        # The last members of a group, if interrupted, count once more: the group's return is bootstrapped with them.
        bootstrapped = ended.interrupted[stepped] & (groups.live[places] == 0)
        segments = block.open_segments(those, following, now + bootstrapped)
        segments.interrupted = ended.interrupted[stepped]
        segments.terminated = ~segments.interrupted
        block.departed.append(segments)

    def _note_episodes(self, ending: Mapping[BehaviorMembers, tuple[Slots, AgentsEnded]]) -> None:
        """Notes the statistics of ended episodes, a group's once for each behavior name of its members."""
        groups = self._groups
        touched = [one.block.places[slots[one.block.groups[slots] != 0]] for one, (slots, _) in ending.items()]
        places = np.unique(np.concatenate(touched))
        empty = places[(groups.live[places] == 0) & groups.known[places] & (groups.times[places] > 0)]
        for one in self.members.values():
            slots, ended = ending.get(one, (NO_SLOTS, None))
            own = empty[groups.names[empty] >> one.number & 1 > 0]
            outcomes = None if ended is None else ended.outcomes
            one.notes.add(one.block, slots, outcomes, groups.totals[own].astype(np.float32))
            one.block.free(slots)

    def _join(self, one: BehaviorMembers, joined: AgentsStarted) -> _Move:
        """Gives slots and places to new members; returns the members that change their group."""
        block, groups = one.block, self._groups
        slots = joined.slots
        known = block.live[slots] & (block.agents[slots] == joined.agents)
        moving: Slots = slots[known & (block.groups[slots] != joined.groups)]
        move = _Move(one, moving, block.groups[moving])
        new = np.flatnonzero(~known)
        block.join(joined)
        places = groups.find(self._keys(one, joined.groups[new], joined.agents[new]))
        block.places[slots[new]] = places
        groups.enter(places, one.number, one.horizon, joined.fresh[new])
        return move

    def _advance(self, tick: Mapping[BehaviorMembers, TickEvents], continuing: Places, moving: Sequence[_Move]) -> None:
        """Begins a new timestep in every group of which a member ended or decides."""
        touched = [continuing]
        for one, events in tick.items():
            if events.reported is not None:
                slots = events.reported.slots
                touched.append(one.block.places[slots[one.block.live[slots]]])
        # Groups that members move to advance too.
        touched += [self._groups.find(self._keys_of(move.one, move.slots)) for move in moving]
        self._groups.advance(np.unique(np.concatenate(touched)))

    def _observe(
        self, number: int, one: BehaviorMembers, reported: OutcomesReported | None
    ) -> tuple[Slots, RowNumbers | None]:
        """Writes observations; returns the slots, and the rows of their decisions if all have one."""
        if reported is None:
            return NO_SLOTS, None
        block = one.block
        known, rows = block.observe(reported.slots, reported.observations)
        places = block.places[known]
        block.log.times[rows] = self._groups.times[places] - 1
        block.totals[known] = self._groups.totals[places]
        block.decided[known] = number
        return reported.slots, rows if len(known) == len(reported.slots) else None

    def _act(self, one: BehaviorMembers, events: TickEvents, decided: tuple[Slots, RowNumbers | None]) -> None:
        """Writes actions."""
        acted, part = events.part.acted, events.acted
        if acted is not None and part.start < part.stop:
            one.block.act(acted, part, *(decided if acted.slots is None else (acted.slots[part], None)))

    def _move(self, moving: Sequence[_Move]) -> None:
        """Moves members to other groups with their pending decisions: first all leave, then all enter."""
        groups = self._groups
        left = [move.one.block.places[move.slots] for move in moving]
        for places in left:
            np.subtract.at(groups.live, places, 1)
        entered = [groups.find(self._keys_of(move.one, move.slots)) for move in moving]
        for move, places in zip(moving, entered, strict=True):
            groups.enter(places, move.one.number, move.one.horizon, np.ones(len(places), bool))
        empty = [np.empty(0, np.int64)]
        for move, before, places in zip(moving, left, entered, strict=True):
            block, slots = move.one.block, move.slots
            waiting = block.waiting(slots)
            # A group without members dissolves: its return is bootstrapped with what its last members see now.
            dissolved = groups.live[before] == 0
            segments = block.open_segments(slots, waiting, groups.times[before] - 1 + dissolved)
            segments.keys = move.keys
            block.departed.append(segments.pick(np.flatnonzero(segments.lengths)))
            block.restart(slots, waiting)
            block.places[slots] = places
            block.totals[slots] = groups.totals[places]
            block.log.times[waiting] = groups.times[places] - 1
            empty.append(before[dissolved])
        dissolving = np.unique(np.concatenate(empty))
        self._close(dissolving[groups.times[dissolving] > 1], ended=True)
        groups.free(dissolving)

    def _lose(self, lost: Sequence[tuple[BehaviorMembers, Slots]]) -> None:
        """Interrupts the open segments of these slots, whose simulators have disconnected."""
        groups = self._groups
        masks = {one: np.zeros(len(one.block.live), bool) for one, _ in lost}
        for one, slots in lost:
            masks[one][slots[slots < len(one.block.live)]] = True
        touched = [np.empty(0, np.int64)]
        for one, mask in masks.items():
            mask &= one.block.live
            touched.append(one.block.places[mask])
            np.subtract.at(groups.live, touched[-1], 1)
        places = np.unique(np.concatenate(touched))
        empty = groups.live[places] == 0
        begun = groups.times[places] > 1
        self._close(places[empty & begun], ended=True, lost=masks)
        self._close(places[~empty & begun], lost=masks)
        for one, mask in masks.items():
            slots = np.flatnonzero(mask).astype(np.int32)
            one.notes.add_unreported(one.block.agents[slots])
            one.block.free(slots)
        groups.free(places[empty])

    # ---------------------------------------------------------------- closing

    def _close_full(self) -> None:
        """Finishes group segments that have reached the horizon, or would soon exceed a message."""
        groups, largest = self._groups, min(self._largest.values())
        spans = groups.times - 1
        full = (spans >= groups.horizons) | (groups.participants * (spans + 1) > largest)
        self._close(np.flatnonzero(full & (groups.live > 0) & (spans > 0)))

    def _close(
        self,
        places: Places,
        spans: NDArray[np.int64] | None = None,
        *,
        ended: bool = False,
        lost: Mapping[BehaviorMembers, Mask] | None = None,
    ) -> None:
        """Finishes the segments of groups.

        Args:
            places: [g] places of the groups, each with a timestep before the present one.
            spans: [places] group timesteps of each; by default all but the present one.
            ended: whether the groups have no members left.
            lost: by behavior name, whether the simulator of each slot has disconnected.
        """
        if not places.size:
            return
        groups = self._groups
        covered = (groups.times - 1 if spans is None else spans)[places]
        rank = np.full(len(groups.live), -1, np.int64)
        rank[places] = np.arange(len(places))
        members = {}
        for behavior, one in self.members.items():
            mask = None if lost is None else lost.get(one)
            own = one.block.collect(rank, covered, np.zeros(len(one.block.live), bool) if mask is None else mask)
            if own is not None:
                members[behavior] = own
                one.closed_steps += len(own.rows)
        rewards = groups.rewards(places, covered)
        self._closed.append(
            ClosedGroupSegments(
                groups.numbers[places], covered.astype(np.int32), np.full(len(places), ended), rewards, members
            )
        )
        groups.restart(places)

    def _keys(self, one: BehaviorMembers, groups: NDArray[np.int64], agents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns [n] what distinguishes groups: their key, or a unique number for an agent without a group."""
        return np.where(groups != 0, groups, -1 - (agents * 256 + one.number))

    def _keys_of(self, one: BehaviorMembers, slots: Slots) -> NDArray[np.int64]:
        return self._keys(one, one.block.groups[slots], one.block.agents[slots])

    # ---------------------------------------------------------------- messages

    def _messages(self, behavior: str = "", serial: int = 0) -> Iterator[Segments]:
        """Yields all finished segments; the last message of `behavior`, which may be empty, carries `serial`."""
        closed = ClosedGroupSegments.concatenate(self._closed) if self._closed else None
        self._closed = []
        for name, one in self.members.items():
            own: list[ClosedGroupSegments | None] = (
                [] if closed is None else list(divided(name, closed, self._largest[name]))
            )
            if not own and (one.notes or (serial and name == behavior)):
                own = [None]
            for at, piece in enumerate(own, 1):
                yield message(self.members, name, piece, serial if name == behavior and at == len(own) else 0)
            one.closed_steps = 0
        for one in self.members.values():
            one.block.unsent = []
