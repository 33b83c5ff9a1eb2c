"""Self-play in assembly: the matchup of each segment."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.assembly.assembler import Assembler
from sparring.pipeline.assembly.members import Sizes
from sparring.pipeline.messages.codec import decode, encode
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.steps import AgentsStarted
from tests.assembly.assembly_world import World, steps_of
from tests.assembly.group_world import GroupWorld, Kind, TickResult, parts_of

MANY = 10**6


def transmitted(messages: Iterable[Segments]) -> list[Segments]:
    """Returns messages as they arrive after the codec."""
    return [decode([bytes(frame) for frame in encode(message)]) for message in messages]


def matchup_of(agents: Any) -> Any:
    """Returns the matchup of agents, computed from their ids."""
    return agents * 3 + 1


def with_matchups(joined: AgentsStarted | None) -> AgentsStarted | None:
    return None if joined is None else replace(joined, matchups=matchup_of(joined.agents))


def tick_with_matchups(tick: TickResult) -> TickResult:
    return {name: [replace(part, joined=with_matchups(part.joined)) for part in parts] for name, parts in tick.items()}


def check_matchups(messages: Sequence[Segments]) -> int:
    """Checks the matchup of each segment; returns the count of segments."""
    found = 0
    for message in messages:
        if message.matchups is None:
            assert not len(message.lengths), "every segment has a matchup"
            continue
        np.testing.assert_array_equal(message.matchups, matchup_of(message.agents))
        found += len(message.lengths)
    return found


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    parts=st.integers(1, 15),
    grouped=st.booleans(),
    horizon=st.integers(1, 6),
    message_steps=st.sampled_from([1, 10, MANY]),
)
def test_every_segment_names_its_matchup(
    seed: int, parts: int, grouped: bool, horizon: int, message_steps: int
) -> None:
    """Slots are reused, agents are reported again to a new reader, groups change, and flushes close segments."""
    rng = random.Random(seed)
    world = World(rng, grouped=grouped, masked=False, steady=rng.random() < 0.3)
    sizes = Sizes(horizon=horizon, message_steps=message_steps, largest=max(20, horizon))
    assembler = Assembler("s.1", "a.1", lambda _: sizes, in_groups=lambda _: False)
    messages: list[Segments] = []
    for number in range(parts):
        world.rejoin = rng.random() < 0.1
        ticks = [world.tick() for _ in range(rng.randint(1, 4))]
        part = steps_of([replace(tick, joined=with_matchups(tick.joined)) for tick in ticks])
        assembler.apply([part])
        messages += transmitted(assembler.ready_messages())
        if rng.random() < 0.1:
            messages += transmitted(assembler.flush("B", number + 1))
    assembler.close_all()
    messages += transmitted(assembler.rest())
    steps = sum(int(message.lengths.sum()) for message in messages)
    assert (check_matchups(messages) > 0) == (steps > 0)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    ticks=st.integers(1, 30),
    names=st.sampled_from([("A",), ("A", "B"), ("A", "B", "C")]),
    horizon=st.integers(1, 6),
    message_steps=st.sampled_from([1, 10, MANY]),
)
def test_every_segment_of_a_group_names_its_matchup(
    seed: int, ticks: int, names: tuple[str, ...], horizon: int, message_steps: int
) -> None:
    """Members leave, move to another group, and may have another behavior name."""
    rng = random.Random(seed)
    kind = Kind(names=names, moving=0.2, slow=3, losing=0.1, separate_losses=True, carried=(0, 0, 0))
    world, sizes = GroupWorld(rng, kind), Sizes(horizon=horizon, message_steps=message_steps, largest=1000)
    assembler = Assembler("s.1", "a.1", lambda _: sizes, in_groups=lambda _: True)
    messages: list[Segments] = []
    for number in range(ticks):
        world.rejoin = rng.random() < 0.1
        parts = parts_of([tick_with_matchups(world.tick()) for _ in range(rng.randint(1, 3))])
        assembler.apply(parts)
        messages += transmitted(assembler.ready_messages())
        if rng.random() < 0.1:
            messages += transmitted(assembler.flush(rng.choice(names), number + 1))
    assembler.close_all()
    messages += transmitted(assembler.rest())
    steps = sum(int(message.lengths.sum()) for message in messages)
    assert (check_matchups(messages) > 0) == (steps > 0)
