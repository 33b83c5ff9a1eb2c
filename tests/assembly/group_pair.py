"""A group assembler and its twin with the same ticks; every message is read and compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sparring.pipeline.assembly.assembler import Assembler
from sparring.pipeline.assembly.members import Sizes
from sparring.pipeline.messages.codec import decode, encode
from sparring.pipeline.messages.segments import Segments
from tests.assembly.group_records import EpisodesTwin, GroupTwin
from tests.assembly.group_twin import GroupsTwin
from tests.assembly.group_views import GroupView, of_twin, read
from tests.assembly.group_world import GroupWorld, TickResult, parts_of


class GroupPair:
    """Feeds an assembler with `sizes` of each behavior name and its twin with the same ticks."""

    def __init__(self, sizes: dict[str, Sizes]) -> None:
        self.sizes = sizes
        self.assembler = Assembler("stepping-0.1", "assembly.1", sizes.__getitem__, in_groups=lambda _: True)
        self.twin = GroupsTwin(sizes)
        self.messages: dict[str, list[Segments]] = {name: [] for name in sizes}
        self.views: dict[str, list[tuple[int, GroupView]]] = {name: [] for name in sizes}
        self.episodes = {name: EpisodesTwin() for name in sizes}
        self.began: dict[str, int] = {}

    def apply(self, ticks: Sequence[TickResult]) -> None:
        parts = parts_of(ticks)
        for part in parts:
            self.began.setdefault(part.behavior, part.produced_before)
        self.twin.known_names |= {part.behavior for part in parts}
        for tick in ticks:
            if tick:
                self.twin.apply(tick)
        self.assembler.apply([decode([bytes(frame) for frame in encode(part)]) for part in parts])
        members = self.assembler.members
        has_message = any(one.closed_steps >= self.sizes[name].message_steps for name, one in members.items())
        unreported = any(one.reached > one.announced for one in members.values())
        taken = self.take(self.assembler.ready_messages())
        assert has_message or unreported or not taken
        assert not any(one.reached > one.announced for one in members.values())
        assert not any(message.flush for message in taken)
        if has_message:
            self.check_sent()
        self.check_counts()

    def flush(self, name: str, serial: int) -> None:
        self.twin.known_names.add(name)
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
            assert (message.source, message.origin) == ("stepping-0.1", "assembly.1")
            sent = sum(len(one.log_probs) for one in self.messages[name])
            assert message.reached == self.began.get(name, 0) + self.twin.orphaned[name] + sent
            teammates = () if message.shared is None else message.shared.teammates
            assert len(message.log_probs) + sum(len(one.times) for one in teammates) <= self.sizes[name].largest
            self.views[name] += read(message, self.sizes[name].sequence)
            self._record_episodes(self.episodes[name], message)
        return taken

    def _record_episodes(self, episodes: EpisodesTwin, message: Segments) -> None:
        received = message.episodes
        columns: tuple[Any, ...] = (
            received.agents,
            received.returns,
            received.lengths,
            received.teams,
            received.outcomes,
            received.shared_returns,
            received.groups,
        )
        episodes.rows += zip(*(column.tolist() for column in columns), strict=True)
        episodes.group_returns += received.group_returns.tolist()
        episodes.unreported += received.unreported.tolist()

    def check_sent(self) -> None:
        """Checks that a sent message leaves no closed step of any behavior name behind."""
        assert not any(one.closed_steps for one in self.assembler.members.values())

    def check_counts(self) -> None:
        """Checks that every completed step is sent, closed, open or orphaned once, for its own behavior name."""
        closed: Counter[str] = Counter()
        for segment in self.twin.segments:
            closed.update({name: segment.steps(name) for name in self.sizes})
        for name, one in self.assembler.members.items():
            sent = sum(len(message.log_probs) for message in self.messages[name])
            began = self.began.get(name, 0)
            assert one.open_steps == self.twin.open_steps(name)
            assert one.closed_steps == closed[name] - sent
            assert one.reached == began + self.twin.orphaned[name] + sent
            assert one.received == began + self.twin.completed[name]
            assert one.received == one.reached + one.open_steps + one.closed_steps

    # ---------------------------------------------------------------- comparison

    def compare(self) -> None:
        """Compares each group's segments and episodes with the twin's, for each behavior name with steps there."""
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
        for group, received in expected.items():
            assert found[group] == received

    def matched(self) -> Iterator[tuple[GroupTwin, str, GroupView]]:
        """Yields each group segment once, as the first name with steps there received it; `compare` comes before."""
        remaining = {name: {group: iter(views) for group, views in self._found(name).items()} for name in self.sizes}
        for segment in self.twin.segments:
            views = [(name, next(remaining[name][segment.group])) for name in self.sizes if segment.steps(name)]
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
        """Returns the number that the assembler gave each group; groups are found by their unique rows."""
        number_of: dict[Any, int] = {}
        for views in self.views.values():
            for number, view in views:
                for one in view.own:
                    assert number_of.setdefault(one.visible.rows[0] if one.visible.rows else one, number) == number
        numbers: dict[GroupTwin, int] = {}
        for segment in self.twin.segments:
            for member_segment in segment.member_segments:
                if member_segment.steps:
                    step = member_segment.steps[0]
                    row = (step.time, step.decision.observed, step.decision.actions)
                    assert numbers.setdefault(segment.group, number_of.get(row, -1)) == number_of.get(row, -1)
        assert len(set(numbers.values())) == len(numbers), "each group has its own number"
        return numbers


def play(pair: GroupPair, world: GroupWorld, ticks: int, flush_chance: float, serial: int = 0) -> int:
    """Plays ticks in batches with flushes between; returns the last serial."""
    rng = world.rng
    while ticks > 0:
        together = min(ticks, rng.choice([1, 1, 2, 5]))
        ticks -= together
        pair.apply([world.tick() for _ in range(together)])
        if rng.random() < flush_chance and pair.assembler.members:
            serial += 1
            pair.flush(rng.choice(list(pair.assembler.members)), serial)
    return serial
