"""An assembler of groups and its twin, fed with the same ticks; every message is read and compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sparring.pipeline.assembly.assembler import Sizes
from sparring.pipeline.assembly.group_assembler import GroupAssembler
from sparring.pipeline.messages.codec import decode, encode
from sparring.pipeline.messages.segments import Segments
from tests.assembly.group_records import EpisodesTwin, GroupTwin
from tests.assembly.group_twin import GroupsTwin
from tests.assembly.group_views import GroupView, of_twin, read
from tests.assembly.group_world import GroupWorld, TickResult, parts_of


class GroupPair:
    """Both of them.

    Args:
        sizes: of each behavior name.
    """

    def __init__(self, sizes: dict[str, Sizes]) -> None:
        self.sizes = sizes
        self.assembler = GroupAssembler("stepping-0.1", "assembly.1", sizes.__getitem__)
        self.twin = GroupsTwin(sizes)
        self.messages: dict[str, list[Segments]] = {name: [] for name in sizes}
        self.views: dict[str, list[tuple[int, GroupView]]] = {name: [] for name in sizes}
        self.episodes = {name: EpisodesTwin() for name in sizes}
        self.began: dict[str, int] = {}

    def apply(self, wakes: Sequence[TickResult]) -> None:
        parts = parts_of(wakes)
        for part in parts:
            self.began.setdefault(part.behavior, part.produced_before)
        self.twin.heard_of |= {part.behavior for part in parts}
        for wake in wakes:
            if wake:
                self.twin.apply(wake)
        self.assembler.apply([decode([bytes(frame) for frame in encode(part)]) for part in parts])
        members = self.assembler.members
        worth = any(one.closed_steps >= self.sizes[name].message_steps for name, one in members.items())
        unreported = any(one.account.unreported for one in members.values())
        taken = self.take(self.assembler.ready_messages())
        assert worth or unreported or not taken
        assert not any(one.account.unreported for one in members.values())
        assert not any(message.flush for message in taken)
        if worth:
            self.check_sent()
        self.check_counts()

    def flush(self, name: str, serial: int) -> None:
        self.twin.heard_of.add(name)
        self.twin.flush(name)
        taken = self.take(self.assembler.flush(name, serial))
        flushes = [message.flush for message in taken if message.behavior == name]
        assert flushes == [0] * (len(flushes) - 1) + [serial], "the last message of the name carries the serial"
        assert not any(message.flush for message in taken if message.behavior != name)
        assert self.assembler.of(name).open_steps == 0
        self.check_sent()
        self.check_counts()

    def finish(self) -> None:
        self.twin.lose_all()
        self.assembler.close_all()
        assert not any(message.flush for message in self.take(self.assembler.rest()))
        assert not any(one.open_steps for one in self.assembler.members.values())
        self.check_sent()
        self.check_counts()

    def take(self, messages: Iterable[Segments]) -> list[Segments]:
        taken = [decode([bytes(frame) for frame in encode(message)]) for message in messages]
        for message in taken:
            name = message.behavior
            self.messages[name].append(message)
            assert message.sequence == len(self.messages[name])
            assert (message.source, message.origin) == ("stepping-0.1", "assembly.1")
            assert message.began == self.began.get(name, 0)
            assert message.orphaned == self.twin.orphaned[name]
            assert message.received == self.began.get(name, 0) + self.twin.completed[name]
            teammates = () if message.shared is None else message.shared.teammates
            assert len(message.log_probs) + sum(len(one.times) for one in teammates) <= self.sizes[name].largest
            self.views[name] += read(message, self.sizes[name].sequence)
            self._note(self.episodes[name], message)
        return taken

    def _note(self, episodes: EpisodesTwin, message: Segments) -> None:
        told = message.episodes
        columns: tuple[Any, ...] = (
            told.agents,
            told.returns,
            told.lengths,
            told.teams,
            told.outcomes,
            told.shared_returns,
            told.groups,
        )
        episodes.rows += zip(*(column.tolist() for column in columns), strict=True)
        episodes.group_returns += told.group_returns.tolist()
        episodes.unreported += told.unreported.tolist()

    def check_sent(self) -> None:
        """Whatever is worth a message leaves nothing behind, of no behavior name."""
        assert not any(one.closed_steps for one in self.assembler.members.values())

    def check_counts(self) -> None:
        """Every step that was completed is sent, closed, open or orphaned, once, for its own behavior name."""
        closed: Counter[str] = Counter()
        for segment in self.twin.segments:
            closed.update({name: segment.steps(name) for name in self.sizes})
        for name, one in self.assembler.members.items():
            sent = sum(len(message.log_probs) for message in self.messages[name])
            began = self.began.get(name, 0)
            assert one.open_steps == self.twin.open_steps(name)
            assert one.closed_steps == closed[name] - sent
            assert one.orphaned == self.twin.orphaned[name]
            assert one.received == began + self.twin.completed[name]
            assert one.received == began + sent + one.open_steps + one.closed_steps + one.orphaned

    # ---------------------------------------------------------------- at the end

    def compare(self) -> None:
        """Each group's segments are those of the twin, for each behavior name that has steps there."""
        for name in self.sizes:
            self._compare(name)
            ours, theirs = self.episodes[name], self.twin.episodes[name]
            assert sorted(ours.rows) == sorted(theirs.rows)
            assert sorted(ours.unreported) == sorted(theirs.unreported)
            assert sorted(ours.group_returns) == sorted(theirs.group_returns)

    def _compare(self, name: str) -> None:
        expected: dict[GroupTwin, list[GroupView]] = {}
        for segment in self.twin.segments:
            if segment.steps(name):
                view = of_twin(segment, name, self._sequence(name))
                expected.setdefault(segment.group, []).append(view)
        found = self._found(name)
        assert found.keys() == expected.keys()
        for group, told in expected.items():
            assert found[group] == told

    def matched(self) -> Iterator[tuple[GroupTwin, str, GroupView]]:
        """Each group segment once, as one of the names that were told of it heard of it; compared before."""
        heard = {name: {group: iter(views) for group, views in self._found(name).items()} for name in self.sizes}
        for segment in self.twin.segments:
            views = [(name, next(heard[name][segment.group])) for name in self.sizes if segment.steps(name)]
            yield from ((segment.group, *view) for view in views[:1])

    def _found(self, name: str) -> dict[GroupTwin, list[GroupView]]:
        groups = {number: group for group, number in self.numbers().items()}
        out: dict[GroupTwin, list[GroupView]] = {}
        for number, view in self.views[name]:
            out.setdefault(groups[number], []).append(view)
        return out

    def _sequence(self, name: str) -> int:
        carrying = any(message.carried is not None for message in self.messages[name])
        return self.sizes[name].sequence if carrying else 0

    def numbers(self) -> dict[GroupTwin, int]:
        """What the origin calls each group's life, for all behavior names: found by rows, each there once."""
        seen: dict[Any, int] = {}
        for views in self.views.values():
            for number, view in views:
                for one in view.own:
                    assert seen.setdefault(one.shown.rows[0] if one.shown.rows else one, number) == number
        numbers: dict[GroupTwin, int] = {}
        for segment in self.twin.segments:
            for stay in segment.stays:
                if stay.steps:
                    step = stay.steps[0]
                    row = (step.time, step.decision.seen, step.decision.did)
                    assert numbers.setdefault(segment.group, seen.get(row, -1)) == seen.get(row, -1)
        assert len(set(numbers.values())) == len(numbers), "a number for each life"
        return numbers


def play(pair: GroupPair, world: GroupWorld, wakes: int, cut_chance: float, serial: int = 0) -> int:
    """Some ticks, one or several to a batch, with cuts between; returns the last serial."""
    rng = world.rng
    while wakes > 0:
        together = min(wakes, rng.choice([1, 1, 2, 5]))
        wakes -= together
        pair.apply([world.wake() for _ in range(together)])
        if rng.random() < cut_chance and pair.assembler.members:
            serial += 1
            pair.flush(rng.choice(list(pair.assembler.members)), serial)
    return serial
