"""Which lessons an episode began in, as assembly hands it on."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.assembly.assembler import Assembler, Sizes
from sparring.pipeline.assembly.group_assembler import GroupAssembler
from sparring.pipeline.messages.codec import decode, encode
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.steps import AgentsStarted
from tests.assembly.assembly_world import World, told
from tests.assembly.group_world import GroupWorld, Kind, parts_of


def taught(joined: AgentsStarted | None) -> AgentsStarted | None:
    """The lessons of a life, by its id."""
    return None if joined is None else replace(joined, lessons=joined.agents * 3 + 1)


def check(messages: list[Segments], *, some: bool) -> int:
    """Each episode says the lessons of its life, or none where nothing was said; returns how many there are."""
    found = 0
    for message in messages:
        episodes = decode([bytes(frame) for frame in encode(message)]).episodes
        np.testing.assert_array_equal(episodes.lessons, episodes.agents * 3 + 1 if some else [])
        found += len(episodes.agents)
    return found


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), parts=st.integers(1, 15), some=st.booleans())
def test_every_episode_says_the_lessons_that_it_began_in(seed: int, parts: int, some: bool) -> None:
    """Slots are given on, agents are told again to a new reader, groups change."""
    rng = random.Random(seed)
    world = World(rng, grouped=rng.random() < 0.5, masked=False, steady=False)
    assembler = Assembler("B", "s.1", "a.1", Sizes(horizon=4, message_steps=10, largest=20))
    messages: list[Segments] = []
    for _ in range(parts):
        world.rejoin = rng.random() < 0.1
        ticks = [world.tick() for _ in range(rng.randint(1, 4))]
        assembler.apply(told([replace(tick, joined=taught(tick.joined) if some else tick.joined) for tick in ticks]))
        messages += assembler.ready_messages()
    assembler.close_all()
    messages += assembler.rest()
    check(messages, some=some)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), wakes=st.integers(1, 30), some=st.booleans())
def test_so_does_every_episode_of_a_member(seed: int, wakes: int, some: bool) -> None:
    rng = random.Random(seed)
    kind = Kind(names=("A", "B"), moving=0.2, slow=3, losing=0.1, apart=True, carried=(0, 0, 0))
    world = GroupWorld(rng, kind)
    assembler = GroupAssembler("s.1", "a.1", lambda _: Sizes(horizon=4, message_steps=10, largest=1000))
    messages: list[Segments] = []
    for _ in range(wakes):
        world.rejoin = rng.random() < 0.1
        wake = world.wake()
        if some:
            wake = {name: [replace(part, joined=taught(part.joined)) for part in parts] for name, parts in wake.items()}
        assembler.apply(parts_of([wake]))
        messages += assembler.ready_messages()
    assembler.close_all()
    messages += assembler.rest()
    check(messages, some=some)


def test_these_worlds_have_episodes_that_end() -> None:
    """Else the two tests above would say nothing."""
    rng = random.Random(1)
    world, found = World(rng, grouped=False, masked=False, steady=False), 0
    assembler = Assembler("B", "s.1", "a.1", Sizes(horizon=4, message_steps=10, largest=20))
    for _ in range(20):
        tick = world.tick()
        assembler.apply(told([replace(tick, joined=taught(tick.joined))]))
        found += check(list(assembler.ready_messages()), some=True)
    assert found > 5
