"""Assembly reports the lessons in which each agent episode began."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.assembly.assembler import Assembler
from sparring.pipeline.assembly.members import Sizes
from sparring.pipeline.messages.codec import decode, encode
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.steps import AgentsStarted
from tests.assembly.assembly_world import World, steps_of
from tests.assembly.group_world import GroupWorld, Kind, parts_of


def with_lessons(joined: AgentsStarted | None) -> AgentsStarted | None:
    """Adds the lessons of agent episodes, computed from their ids."""
    return None if joined is None else replace(joined, lessons=joined.agents * 3 + 1)


def check(messages: list[Segments], *, has_lessons: bool) -> int:
    """Checks the lessons of each episode, none without `has_lessons`; returns the count of episodes."""
    found = 0
    for message in messages:
        episodes = decode([bytes(frame) for frame in encode(message)]).episodes
        np.testing.assert_array_equal(episodes.lessons, episodes.agents * 3 + 1 if has_lessons else [])
        found += len(episodes.agents)
    return found


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), parts=st.integers(1, 15), has_lessons=st.booleans())
def test_every_episode_names_the_lessons_of_its_start(seed: int, parts: int, has_lessons: bool) -> None:
    """Slots are reused, agents are reported again to a new reader, and groups change."""
    rng = random.Random(seed)
    world = World(rng, grouped=rng.random() < 0.5, masked=False, steady=False)
    assembler = Assembler(
        "s.1", "a.1", lambda _: Sizes(horizon=4, message_steps=10, largest=20), in_groups=lambda _: False
    )
    messages: list[Segments] = []
    for _ in range(parts):
        world.rejoin = rng.random() < 0.1
        ticks = [world.tick() for _ in range(rng.randint(1, 4))]
        assembler.apply(
            [
                steps_of(
                    [replace(tick, joined=with_lessons(tick.joined) if has_lessons else tick.joined) for tick in ticks]
                )
            ]
        )
        messages += assembler.ready_messages()
    assembler.close_all()
    messages += assembler.rest()
    check(messages, has_lessons=has_lessons)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), ticks=st.integers(1, 30), has_lessons=st.booleans())
def test_every_episode_of_a_group_member_names_the_lessons_of_its_start(
    seed: int, ticks: int, has_lessons: bool
) -> None:
    rng = random.Random(seed)
    kind = Kind(names=("A", "B"), moving=0.2, slow=3, losing=0.1, separate_losses=True, carried=(0, 0, 0))
    world = GroupWorld(rng, kind)
    assembler = Assembler(
        "s.1", "a.1", lambda _: Sizes(horizon=4, message_steps=10, largest=1000), in_groups=lambda _: True
    )
    messages: list[Segments] = []
    for _ in range(ticks):
        world.rejoin = rng.random() < 0.1
        tick = world.tick()
        if has_lessons:
            tick = {
                name: [replace(part, joined=with_lessons(part.joined)) for part in parts]
                for name, parts in tick.items()
            }
        assembler.apply(parts_of([tick]))
        messages += assembler.ready_messages()
    assembler.close_all()
    messages += assembler.rest()
    check(messages, has_lessons=has_lessons)


def test_random_agents_have_episodes_that_end() -> None:
    """Without them the two tests above would prove nothing."""
    rng = random.Random(1)
    world, found = World(rng, grouped=False, masked=False, steady=False), 0
    assembler = Assembler(
        "s.1", "a.1", lambda _: Sizes(horizon=4, message_steps=10, largest=20), in_groups=lambda _: False
    )
    for _ in range(20):
        tick = world.tick()
        assembler.apply([steps_of([replace(tick, joined=with_lessons(tick.joined))])])
        found += check(list(assembler.ready_messages()), has_lessons=True)
    assert found > 5
