"""The assembler against its slow twin, with random agents."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.assembly.assembler import Assembler
from sparring.pipeline.assembly.members import Sizes
from sparring.pipeline.assembly.ticks import count_alike
from sparring.pipeline.messages.codec import decode, encode
from sparring.pipeline.messages.segments import Segments
from tests.assembly.assembly_twin import AssemblerTwin, EpisodesTwin, SegmentTwin, by_agent, read_segments
from tests.assembly.assembly_world import BehaviorTick, World, steps_of


class Pair:
    """Feeds an assembler and its twin with the same ticks, and checks every message."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.sequence = max(1, sizes.sequence)
        self.assembler = Assembler("stepping-0.1", "assembly.1", lambda _: sizes, in_groups=lambda _: False)
        self.members = self.assembler.of("B")
        self.twin = AssemblerTwin(min(sizes.horizon, sizes.largest), self.sequence)
        self.segments: list[SegmentTwin] = []
        self.episodes = EpisodesTwin()
        self.messages: list[Segments] = []
        self.began: int | None = None
        self.orphaned = 0

    def apply(self, ticks: list[BehaviorTick]) -> None:
        if self.began is None:
            self.began = ticks[0].produced_before
        for tick in ticks:
            assert tick.produced_before == self.began + self.twin.completed, "the world miscounted"
            self.twin.apply(tick)
        part = steps_of(ticks)
        self.assembler.apply([decode([bytes(frame) for frame in encode(part)])])
        has_message = self.members.closed_steps >= self.sizes.message_steps or self.twin.orphaned > self.orphaned
        self.orphaned = self.twin.orphaned
        messages = self.take(self.assembler.ready_messages())
        assert bool(messages) == has_message
        assert self.members.closed_steps < self.sizes.message_steps
        assert not any(message.flush for message in messages)
        self.check_counts()

    def flush(self, serial: int) -> None:
        self.twin.flush()
        messages = self.take(self.assembler.flush("B", serial))
        assert [message.flush for message in messages] == [0] * (len(messages) - 1) + [serial]
        assert self.members.open_steps == self.members.closed_steps == 0
        self.check_counts()

    def finish(self) -> None:
        self.twin.interrupt(list(self.twin.agents))
        self.assembler.close_all()
        messages = self.take(self.assembler.rest())
        assert not any(message.flush for message in messages)
        assert self.members.open_steps == self.members.closed_steps == 0
        self.check_counts()

    def take(self, messages: Iterable[Segments]) -> list[Segments]:
        taken = [decode([bytes(frame) for frame in encode(message)]) for message in messages]
        for message in taken:
            self.messages.append(message)
            assert (message.behavior, message.source, message.origin) == ("B", "stepping-0.1", "assembly.1")
            assert message.matchups is None, "the world has no self-play"
            sent = sum(len(one.log_probs) for one in self.messages)
            assert message.reached == (self.began or 0) + self.twin.orphaned + sent
            assert len(message.log_probs) <= self.sizes.largest
            self.segments += read_segments(message, self.sequence)
            episodes = message.episodes
            self.episodes.rows += zip(
                episodes.returns.tolist(),
                episodes.lengths.tolist(),
                episodes.teams.tolist(),
                episodes.outcomes.tolist(),
                strict=True,
            )
            self.episodes.group_returns += episodes.group_returns.tolist()
        return taken

    def check_counts(self) -> None:
        members = self.members
        sent = sum(len(message.log_probs) for message in self.messages)
        assert members.open_steps == self.twin.open_steps
        assert members.reached == (self.began or 0) + self.twin.orphaned + sent
        assert members.received == members.reached + members.open_steps + members.closed_steps

    def compare(self) -> None:
        for segment in self.twin.segments:
            for step in segment.steps:
                if step.action.mask is not None and not any(step.action.mask):
                    step.action.mask = None
        assert by_agent(self.segments) == by_agent(self.twin.segments)
        assert self.episodes.rows == self.twin.episodes.rows
        assert sorted(self.episodes.group_returns) == sorted(self.twin.episodes.group_returns)


def play(pair: Pair, world: World, ticks: int, flush_chance: float, serial: int = 0) -> None:
    while ticks:
        together = min(ticks, world.rng.choice([1, 1, 2, 5]))
        ticks -= together
        pair.apply([world.tick() for _ in range(together)])
        if world.rng.random() < flush_chance:
            serial += 1
            pair.flush(serial)


all_sizes = st.builds(
    lambda horizon, message_steps, largest, sequence: Sizes(
        horizon=horizon, message_steps=min(message_steps, largest), largest=largest, sequence=sequence
    ),
    horizon=st.sampled_from([1, 2, 3, 5, 17, 40]),
    message_steps=st.sampled_from([1, 4, 30, 10_000]),
    largest=st.sampled_from([1, 2, 7, 33, 10_000]),
    sequence=st.sampled_from([1, 2, 3, 8, 64]),
)
worlds = st.builds(
    lambda seed, **kinds: World(random.Random(seed), **kinds),
    seed=st.integers(0, 2**32),
    grouped=st.booleans(),
    masked=st.booleans(),
    steady=st.booleans(),
    carried=st.sampled_from([0, 1, 3]),
)


@settings(max_examples=30, deadline=None)
@given(sizes=all_sizes, world=worlds, ticks=st.integers(1, 45), flush_chance=st.sampled_from([0.0, 0.1, 0.5]))
def test_segments_episodes_and_counts_equal_those_of_the_twin(
    sizes: Sizes, world: World, ticks: int, flush_chance: float
) -> None:
    """Rows, next observations, flags, statistics and counts all agree."""
    pair = Pair(sizes)
    play(pair, world, ticks, flush_chance)
    pair.finish()
    pair.compare()
    assert pair.twin.orphaned == 0


@settings(max_examples=30, deadline=None)
@given(
    sizes=all_sizes,
    world=worlds,
    before=st.integers(1, 20),
    unreported=st.integers(0, 3),
    after=st.integers(1, 30),
    flush_chance=st.sampled_from([0.0, 0.2]),
)
def test_a_new_assembler_continues_a_stream_under_way(
    sizes: Sizes, world: World, before: int, unreported: int, after: int, flush_chance: float
) -> None:
    """After a restart only steps that began before it are missing, and they count as orphaned."""
    for _ in range(before):
        world.tick()
    pair = Pair(sizes)
    play(pair, world, unreported, flush_chance)  # sent again, from before the source knew its new reader
    world.rejoin = True
    play(pair, world, after, flush_chance, serial=unreported)
    pair.finish()
    pair.compare()


@settings(max_examples=40)
@given(
    horizon=st.integers(1, 9),
    sequence=st.integers(1, 9),
    world=worlds,
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6),
)
def test_ticks_of_one_message_leave_the_same_rows_as_single_ticks(
    horizon: int, sequence: int, world: World, sizes: list[int]
) -> None:
    """The number of ticks in a message depends on time, and lockstep runs must not."""
    unlimited = Sizes(horizon=horizon, message_steps=10**6, largest=10**6, sequence=sequence)
    one, other = (Assembler("s.1", "a.1", lambda _: unlimited, in_groups=lambda _: False) for _ in range(2))
    for size in sizes:
        ticks = [world.tick() for _ in range(size)]
        one.apply([steps_of(ticks)])
        for tick in ticks:
            other.apply([steps_of([tick])])
    (ours,), (theirs,) = one.flush("B", 1), other.flush("B", 1)
    assert [frame == twin for frame, twin in zip(encode(ours), encode(theirs), strict=True)].count(False) == 0


def test_ticks_with_the_same_agents_are_applied_together() -> None:
    """The fast path is taken, and only where agents are the same in every tick."""
    world = World(random.Random(5), grouped=False, masked=False, steady=True)
    assembler = Assembler(
        "s.1", "a.1", lambda _: Sizes(horizon=20, message_steps=10**6, largest=10**6), in_groups=lambda _: False
    )
    lengths = []
    for _ in range(40):
        part = steps_of([world.tick() for _ in range(10)])
        at = 0
        while at < len(part.ticks):
            members = assembler.of("B")
            lengths.append(count_alike(part, at, members.live, members.horizon))
            at += lengths[-1]
        assembler.apply([part])
    assert max(lengths) >= 5
    assert min(lengths) == 1


def test_a_flush_without_data_is_answered_by_an_empty_message() -> None:
    """The message names the flush even where there was no step at all."""
    pair = Pair(Sizes(horizon=4, message_steps=4, largest=8))
    pair.flush(3)
    assert [len(message.log_probs) for message in pair.messages] == [0]


def test_a_long_run_keeps_only_what_its_live_agents_need() -> None:
    """Slots and log grow with the peak of live agents and their open steps, not with the length of the run."""
    world = World(random.Random(3), grouped=False, masked=False)
    pair = Pair(Sizes(horizon=5, message_steps=10, largest=100))
    play(pair, world, 400, 0.0)
    assert len(pair.members.live) <= 128
    assert pair.members.log.capacity <= 2048


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_an_action_without_a_known_observation_makes_no_step(steps: int) -> None:
    """A decision reported before a restart and acted on after it is orphaned, as its observation is missing."""
    world = World(random.Random(1), grouped=False, masked=False)
    while not any(episode.state == "waiting" for episode in world.agent_episodes.values()):
        world.tick()
    pair = Pair(Sizes(horizon=steps, message_steps=1, largest=100))
    world.rejoin = True
    play(pair, world, 12, 0.0)
    pair.finish()
    pair.compare()
    assert pair.twin.orphaned
