"""The group assembler against its slow twin, with random groups."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.assembly.assembler import Assembler
from sparring.pipeline.assembly.members import Sizes
from sparring.pipeline.messages.codec import encode
from tests.assembly.group_pair import GroupPair, play
from tests.assembly.group_records import GroupTwin
from tests.assembly.group_world import GroupWorld, Kind, parts_of

MANY = 10**6
NAMES = ("A", "B", "C")

kinds = st.builds(
    Kind,
    names=st.sampled_from([NAMES[:1], NAMES[:2], NAMES]),
    groups=st.integers(0, 3),
    churn=st.sampled_from([0.02, 0.15, 0.4]),
    moving=st.sampled_from([0.0, 0.1, 0.3]),
    slow=st.integers(1, 3),
    losing=st.sampled_from([0.0, 0.1]),
    separate_losses=st.booleans(),
    together=st.sampled_from([0.0, 0.3]),
    carried=st.tuples(*[st.integers(0, 2)] * 3),
)
one_size = st.builds(
    lambda horizon, message_steps, largest, sequence: Sizes(
        horizon=horizon, message_steps=min(message_steps, largest), largest=largest, sequence=sequence
    ),
    horizon=st.sampled_from([1, 2, 3, 5, 17]),
    message_steps=st.sampled_from([1, 4, 30, MANY]),
    largest=st.sampled_from([90, 120, MANY]),
    sequence=st.sampled_from([0, 1, 2, 3, 8]),
)
all_sizes = st.fixed_dictionaries(dict.fromkeys(NAMES, one_size))
seeds = st.integers(0, 2**32)


@settings(max_examples=25)
@given(sizes=all_sizes, kind=kinds, seed=seeds, ticks=st.integers(1, 40), flushes=st.sampled_from([0.0, 0.2]))
def test_group_segments_equal_those_of_the_twin(
    sizes: dict[str, Sizes], kind: Kind, seed: int, ticks: int, flushes: float
) -> None:
    """Members, observations, actions, rewards, flags, episodes and counts all agree."""
    pair, world = GroupPair({name: sizes[name] for name in kind.names}), GroupWorld(random.Random(seed), kind)
    play(pair, world, ticks, flushes)
    pair.finish()
    pair.compare()
    assert not any(pair.twin.orphaned.values())
    check_group_rewards(pair, world)


def check_group_rewards(pair: GroupPair, world: GroupWorld) -> None:
    """Checks that all rewards of a group sum to its members' own rewards plus each group reward once."""
    total: Counter[GroupTwin] = Counter()
    for group, _, view in pair.matched():
        total[group] += int(sum(view.rewards))
    for group in pair.twin.all_groups:
        ended = MANY if group.ended is None else group.ended
        own = sum(amount for number, key, amount in world.grants if key == group.key and group.began < number <= ended)
        assert total[group] == group.own + own


@settings(max_examples=25)
@given(
    sizes=all_sizes,
    kind=kinds,
    seed=seeds,
    before=st.integers(1, 15),
    unreported=st.integers(0, 3),
    after=st.integers(1, 25),
)
def test_a_new_assembler_continues_groups_under_way(
    sizes: dict[str, Sizes], kind: Kind, seed: int, before: int, unreported: int, after: int
) -> None:
    """After a restart steps that began before are orphaned, and their episodes unreported."""
    world = GroupWorld(random.Random(seed), kind)
    for _ in range(before):
        world.tick()
    world.new_reader()
    pair = GroupPair({name: sizes[name] for name in kind.names})
    serial = play(pair, world, unreported, 0.1)  # sent again, from before the source knew its new reader
    world.rejoin = True
    play(pair, world, after, 0.1, serial)
    pair.finish()
    pair.compare()


@settings(max_examples=25)
@given(kind=kinds, horizon=st.integers(1, 6), seed=seeds, batches=st.lists(st.integers(1, 8), min_size=1, max_size=4))
def test_the_number_of_ticks_per_batch_changes_nothing(kind: Kind, horizon: int, seed: int, batches: list[int]) -> None:
    """It depends on time, and lockstep runs must not: messages are equal to the byte."""
    world = GroupWorld(random.Random(seed), kind)
    sizes = Sizes(horizon=horizon, message_steps=MANY, largest=MANY, sequence=2)
    one, other = (Assembler("s.1", "a.1", lambda _: sizes, in_groups=lambda _: True) for _ in range(2))
    for name in kind.names:
        assert encode(one.announcement(name)) == encode(other.announcement(name))
    for size in batches:
        ticks = [world.tick() for _ in range(size)]
        one.apply(parts_of(ticks))
        for tick in ticks:
            other.apply(parts_of([tick]))
    for name in kind.names:
        assert [encode(message) for message in one.flush(name, 1)] == [encode(m) for m in other.flush(name, 1)]


@settings(max_examples=25)
@given(kind=kinds, seed=seeds, ticks=st.integers(1, 25), largest=st.sampled_from([90, MANY]))
def test_names_with_and_without_groups_do_not_affect_each_other(
    kind: Kind, seed: int, ticks: int, largest: int
) -> None:
    """Messages equal, to the byte, those of an assembler for the names in groups and one for each other name."""
    world = GroupWorld(random.Random(seed), kind)
    sizes = Sizes(horizon=3, message_steps=10, largest=largest, sequence=2)

    def assembler() -> Assembler:
        return Assembler("s.1", "a.1", lambda _: sizes, in_groups=lambda name: name != "A")

    every, in_groups, apart = assembler(), assembler(), assembler()
    found: dict[bool, list[list[bytes]]] = {True: [], False: []}
    expected: dict[bool, list[list[bytes]]] = {True: [], False: []}
    for _ in range(ticks):
        parts = parts_of([world.tick()])
        every.apply(parts)
        for message in every.ready_messages():
            found[message.behavior == "A"].append([bytes(frame) for frame in encode(message)])
        for is_apart, one in ((True, apart), (False, in_groups)):
            one.apply([part for part in parts if (part.behavior == "A") == is_apart])
            expected[is_apart] += [[bytes(frame) for frame in encode(message)] for message in one.ready_messages()]
    assert found == expected
