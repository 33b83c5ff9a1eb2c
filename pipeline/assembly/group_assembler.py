"""Steps of all members of one source's groups in, finished group segments out.

A group's segment closes when it has `time_horizon` group times, when nobody is left, when its simulator goes away, or
when a cut asks for it: for all its members together, whatever their behavior names, because they share what they earn.
An agent without a group is a group of its own.

What leaves together was closed together: whatever is finished is sent for all behavior names at once, so the rows that
they show each other are still there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.assembly.assembler import Sizes
from sparring.pipeline.assembly.block import Slots
from sparring.pipeline.assembly.columns import slice_rows as part_of
from sparring.pipeline.assembly.group_messages import divided, message
from sparring.pipeline.assembly.groups import ClosedGroupSegments, Groups, Mask, MemberRewards, Places
from sparring.pipeline.assembly.log import Lines
from sparring.pipeline.assembly.members import BehaviorMembers, TickEvents, observations
from sparring.pipeline.assembly.notes import Account
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.steps import AgentsEnded, AgentsStarted, BehaviorSteps, OutcomesReported

_NOBODY: Slots = np.empty(0, np.int32)


class _Move(NamedTuple):
    """Members of one behavior name that go on in another group, and the keys of the groups that they leave."""

    one: BehaviorMembers
    slots: Slots
    keys: NDArray[np.int64]


class GroupAssembler:
    """Open and finished group segments of one source.

    Args:
        source: start of the stepping process.
        origin: this start of assembly.
        sizes: of each behavior name, how its segments are cut and sent.
    """

    def __init__(self, source: str, origin: str, sizes: Callable[[str], Sizes]) -> None:
        self._source, self._origin, self._sizes = source, origin, sizes
        self._largest: dict[str, int] = {}
        self._groups = Groups()
        self._closed: list[ClosedGroupSegments] = []
        self.members: dict[str, BehaviorMembers] = {}

    def of(self, behavior: str) -> BehaviorMembers:
        """The members of a behavior name, of which there may be none yet."""
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
        """Whether one of these group keys has members here."""
        return self._groups.has(keys[keys != 0])

    def apply(self, parts: Sequence[BehaviorSteps]) -> None:
        """Takes over the steps of some ticks, of several behavior names at most once each."""
        ticks: dict[int, list[tuple[BehaviorMembers, TickEvents]]] = {}
        for part in parts:
            members = self.of(part.behavior)
            members.account.begin(part.produced_before, part.ghosts)
            members.notes.ended(part.results)
            for record in (part.ended, part.joined, part.reported, part.acted):
                members.block.grow(None if record is None else record.slots)
            for number, happened in zip(part.ticks.tolist(), _ticks(part), strict=True):
                ticks.setdefault(number, []).append((members, happened))
        for number, told in sorted(ticks.items()):
            # Simulators that went away are told of apart, after what else happened in the tick.
            self._tick(number, {one: happened for one, happened in told if not happened.only_lost})
            self._lose([(one, happened.lost) for one, happened in told if happened.only_lost])

    def skip(self, part: BehaviorSteps) -> None:
        """Counts the steps of some ticks as not recorded; matches that ended are kept."""
        members = self.of(part.behavior)
        members.account.begin(part.produced_before, part.ghosts)
        members.account.count(int(part.completed.sum()), 0)
        members.notes.ended(part.results)

    def close_all(self) -> None:
        """The source is gone: everything open is interrupted, every agent is gone."""
        self._lose([(one, np.flatnonzero(one.block.live).astype(np.int32)) for one in self.members.values()])

    def flush(self, behavior: str, serial: int) -> Iterator[Segments]:
        """Closes every open group segment in which the behavior name has members, without ending it, and sends all.

        The last message of the behavior name carries `serial`.
        """
        block = self.of(behavior).block
        touched = [block.places[block.live & block.seen], *(stays.groups for stays in block.departed)]
        places = np.unique(np.concatenate(touched))
        self._close(places[self._groups.times[places] > 1])
        yield from self._messages(behavior, serial)

    def ready_messages(self) -> Iterator[Segments]:
        """Messages of all behavior names, when one of them has enough that is worth sending, or will have no more."""
        members = self.members.values()
        if any(one.closed_steps >= one.message_steps or (one.notes.results and not one.open_steps) for one in members):
            yield from self._messages()
        for behavior, one in self.members.items():
            if one.account.unreported:
                yield self.greeting(behavior)

    def greeting(self, behavior: str) -> Segments:
        """An empty message, so that its reader hears of this source before its first segment."""
        self.of(behavior)
        return message(self.members, behavior, None, 0)

    def rest(self) -> Iterator[Segments]:
        """Messages with everything finished."""
        yield from self._messages()

    # ---------------------------------------------------------------- one tick

    def _tick(self, number: int, tick: Mapping[BehaviorMembers, TickEvents]) -> None:
        """Applies one tick of all behavior names.

        Outcomes belong to the time before; then who ended leaves, who came enters, and a new time begins for every
        group of which somebody ended or decides.
        """
        self._lose([(one, happened.lost) for one, happened in tick.items() if happened.lost.size])
        self._earn(tick)
        going_on = self._leave(tick)
        moving = [self._join(one, happened.joined) for one, happened in tick.items() if happened.joined is not None]
        self._advance(tick, going_on, moving)
        decided = {one: self._observe(number, one, happened.reported) for one, happened in tick.items()}
        self._move([move for move in moving if move.slots.size])
        for one, happened in tick.items():
            self._act(one, happened, decided[one])
            one.account.count(happened.completed, one.found)
        self._close_full()

    def _earn(self, tick: Mapping[BehaviorMembers, TickEvents]) -> None:
        """Writes the outcomes of the steps under way, and credits their groups."""
        earned = []
        for one, happened in tick.items():
            one.found, block = 0, one.block
            for report in (happened.ended, happened.reported):
                if report is None:
                    continue
                pending = block.acted[report.slots]
                slots, shared = report.slots[pending], report.group_rewards
                places = block.places[slots]
                earned.append(
                    MemberRewards(
                        places,
                        report.rewards[pending],
                        np.zeros(len(slots), np.float32) if shared is None else shared[pending],
                        block.totals[slots],
                        block.decided[slots],
                        np.full(len(slots), report is happened.ended),
                    )
                )
                one.found += block.complete(report.slots, report.rewards, shared)
        self._groups.earn(earned)

    def _leave(self, tick: Mapping[BehaviorMembers, TickEvents]) -> Places:
        """Lets members go that ended; closes the groups of which nobody is left. Returns where others are left."""
        left = []
        gone: dict[BehaviorMembers, tuple[Slots, AgentsEnded]] = {}
        for one, happened in tick.items():
            if happened.ended is None:
                continue
            block, ended = one.block, happened.ended
            here = np.flatnonzero(block.live[ended.slots])
            slots = ended.slots[here]
            gone[one] = slots, part_of(ended, here)
            left.append(block.places[slots])
            np.subtract.at(self._groups.live, block.places[slots], 1)
        if not left:
            return np.empty(0, np.int64)
        places: Places = np.unique(np.concatenate(left))
        over = self._groups.live[places] == 0
        for one, (slots, ended) in gone.items():
            self._depart(one, slots, ended)
        self._note(gone)
        self._close(places[over & (self._groups.times[places] > 0)], self._groups.times, ended=True)
        self._groups.free(places[over])
        others: Places = places[~over]
        return others

    def _depart(self, one: BehaviorMembers, slots: Slots, ended: AgentsEnded) -> None:
        """Keeps the segments of members that ended, until their groups close theirs."""
        block, groups = one.block, self._groups
        stepped = np.flatnonzero(block.lengths[slots] > 0)
        those = slots[stepped]
        if not those.size:
            return
        places = block.places[those]
        following = block.append(observations(list(ended.observations), stepped))
        now = groups.times[places]
        block.log.times[following] = now
        # The last of a group that were cut are shown once more where the group's return is bootstrapped.
        shown = ended.interrupted[stepped] & (groups.live[places] == 0)
        stays = block.stays(those, following, now + shown)
        stays.interrupted = ended.interrupted[stepped]
        stays.terminated = ~stays.interrupted
        block.departed.append(stays)

    def _note(self, gone: Mapping[BehaviorMembers, tuple[Slots, AgentsEnded]]) -> None:
        """Keeps the statistics of episodes that ended, a group's once for each behavior name that it had."""
        groups = self._groups
        touched = [one.block.places[slots[one.block.groups[slots] != 0]] for one, (slots, _) in gone.items()]
        places = np.unique(np.concatenate(touched))
        over = places[(groups.live[places] == 0) & groups.known[places] & (groups.times[places] > 0)]
        for one in self.members.values():
            slots, ended = gone.get(one, (_NOBODY, None))
            own = over[groups.names[over] >> one.number & 1 > 0]
            outcomes = None if ended is None else ended.outcomes
            one.notes.add(one.block, slots, outcomes, groups.totals[own].astype(np.float32))
            one.block.free(slots)

    def _join(self, one: BehaviorMembers, joined: AgentsStarted) -> _Move:
        """Gives slots and places to new members; returns those that go on in another group."""
        block, groups = one.block, self._groups
        slots = joined.slots
        here = block.live[slots] & (block.agents[slots] == joined.agents)
        moving: Slots = slots[here & (block.groups[slots] != joined.groups)]
        move = _Move(one, moving, block.groups[moving])
        new = np.flatnonzero(~here)
        block.join(joined)
        places = groups.find(self._keys(one, joined.groups[new], joined.agents[new]))
        block.places[slots[new]] = places
        groups.enter(places, one.number, one.horizon, joined.fresh[new])
        return move

    def _advance(self, tick: Mapping[BehaviorMembers, TickEvents], going_on: Places, moving: Sequence[_Move]) -> None:
        """Begins a new time in every group of which somebody ended or decides."""
        touched = [going_on]
        for one, happened in tick.items():
            if happened.reported is not None:
                slots = happened.reported.slots
                touched.append(one.block.places[slots[one.block.live[slots]]])
        # In the groups that somebody comes to, too.
        touched += [self._groups.find(self._keys_of(move.one, move.slots)) for move in moving]
        self._groups.advance(np.unique(np.concatenate(touched)))

    def _observe(
        self, number: int, one: BehaviorMembers, reported: OutcomesReported | None
    ) -> tuple[Slots, Lines | None]:
        """Writes what members see; returns their slots, and the rows of their decisions, None if one has none."""
        if reported is None:
            return _NOBODY, None
        block = one.block
        known, rows = block.observe(reported.slots, reported.observations)
        places = block.places[known]
        block.log.times[rows] = self._groups.times[places] - 1
        block.totals[known] = self._groups.totals[places]
        block.decided[known] = number
        return reported.slots, rows if len(known) == len(reported.slots) else None

    def _act(self, one: BehaviorMembers, happened: TickEvents, decided: tuple[Slots, Lines | None]) -> None:
        """Writes what members do."""
        acted, part = happened.part.acted, happened.acted
        if acted is not None and part.start < part.stop:
            one.block.act(acted, part, *(decided if acted.slots is None else (acted.slots[part], None)))

    def _move(self, moving: Sequence[_Move]) -> None:
        """Members go on in another group, with the decision that they wait with: all leave, then all enter."""
        groups = self._groups
        left = [move.one.block.places[move.slots] for move in moving]
        for places in left:
            np.subtract.at(groups.live, places, 1)
        entered = [groups.find(self._keys_of(move.one, move.slots)) for move in moving]
        for move, places in zip(moving, entered, strict=True):
            groups.enter(places, move.one.number, move.one.horizon, np.ones(len(places), bool))
        over = [np.empty(0, np.int64)]
        for move, before, places in zip(moving, left, entered, strict=True):
            block, slots = move.one.block, move.slots
            waiting = block.waiting(slots)
            # Nobody is left in a group that dissolves: its return is bootstrapped with what its last members see now.
            dissolved = groups.live[before] == 0
            stays = block.stays(slots, waiting, groups.times[before] - 1 + dissolved)
            stays.keys = move.keys
            block.departed.append(stays.pick(np.flatnonzero(stays.lengths)))
            block.restart(slots, waiting)
            block.places[slots] = places
            block.totals[slots] = groups.totals[places]
            block.log.times[waiting] = groups.times[places] - 1
            over.append(before[dissolved])
        dissolving = np.unique(np.concatenate(over))
        self._close(dissolving[groups.times[dissolving] > 1], ended=True)
        groups.free(dissolving)

    def _lose(self, lost: Sequence[tuple[BehaviorMembers, Slots]]) -> None:
        """The simulators of these slots went away: whatever is open there is interrupted."""
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
        over = groups.live[places] == 0
        begun = groups.times[places] > 1
        self._close(places[over & begun], ended=True, lost=masks)
        self._close(places[~over & begun], lost=masks)
        for one, mask in masks.items():
            slots = np.flatnonzero(mask).astype(np.int32)
            one.notes.unreported(one.block.agents[slots])
            one.block.free(slots)
        groups.free(places[over])

    # ---------------------------------------------------------------- closing

    def _close_full(self) -> None:
        """Finishes group segments that have reached the horizon, or that would not fit into a message soon."""
        groups, largest = self._groups, min(self._largest.values())
        spans = groups.times - 1
        full = (spans >= groups.horizons) | (groups.stayed * (spans + 1) > largest)
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
            places: [g] of the groups, each with a time before the present one.
            spans: [places] group times of each; None where the present time has begun: all but that one.
            ended: nobody is left after it.
            lost: by behavior name, slots whose simulator went away.
        """
        if not places.size:
            return
        groups = self._groups
        covered = (groups.times - 1 if spans is None else spans)[places]
        rank = np.full(len(groups.live), -1, np.int64)
        rank[places] = np.arange(len(places))
        stays = {}
        for behavior, one in self.members.items():
            gone = None if lost is None else lost.get(one)
            own = one.block.collect(rank, covered, np.zeros(len(one.block.live), bool) if gone is None else gone)
            if own is not None:
                stays[behavior] = own
                one.closed_steps += len(own.rows)
        rewards = groups.rewards(places, covered)
        self._closed.append(
            ClosedGroupSegments(
                groups.numbers[places], covered.astype(np.int32), np.full(len(places), ended), rewards, stays
            )
        )
        groups.restart(places)

    def _keys(self, one: BehaviorMembers, groups: NDArray[np.int64], agents: NDArray[np.int64]) -> NDArray[np.int64]:
        """[n] What tells groups apart: their key, or a number of its own for an agent without a group."""
        return np.where(groups != 0, groups, -1 - (agents * 256 + one.number))

    def _keys_of(self, one: BehaviorMembers, slots: Slots) -> NDArray[np.int64]:
        return self._keys(one, one.block.groups[slots], one.block.agents[slots])

    # ---------------------------------------------------------------- messages

    def _messages(self, behavior: str = "", serial: int = 0) -> Iterator[Segments]:
        """Everything finished; the last message of `behavior`, which may be empty, carries `serial`."""
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
            one.block.closed_stays = []


def _ticks(part: BehaviorSteps) -> Iterator[TickEvents]:
    """The ticks of a record, one by one."""
    bounds = [[0, 0, 0, 0, 0], *np.cumsum(part.rows, axis=0).tolist()]
    records = (part.lost, part.ended, part.joined, part.reported, part.acted)
    for at, completed in enumerate(part.completed.tolist()):
        lost, ended, joined, reported, acted = (
            slice(start, stop) if record is not None else slice(0, 0)
            for start, stop, record in zip(bounds[at], bounds[at + 1], records, strict=True)
        )
        yield TickEvents(
            part=part,
            lost=_NOBODY if part.lost is None else part.lost[lost],
            ended=_some(part.ended, ended),
            joined=_some(part.joined, joined),
            reported=_some(part.reported, reported),
            acted=acted,
            completed=completed,
        )


def _some(record: AgentsEnded | AgentsStarted | OutcomesReported | None, rows: slice) -> Any:
    return None if record is None or rows.start == rows.stop else part_of(record, rows)
