"""Every agent episode is listed once after its end, as reported or as unreported."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.assembly.assembler import Assembler
from sparring.pipeline.assembly.members import Sizes
from sparring.pipeline.messages.codec import decode, encode
from sparring.pipeline.messages.segments import Episodes, Segments
from sparring.pipeline.messages.steps import ActionsChosen, AgentsEnded, AgentsStarted, BehaviorSteps, OutcomesReported
from tests.assembly.assembly_world import BehaviorTick, World, steps_of

MANY = 10**6


def assembler_of(sizes: Sizes | None = None, *, start: int = 1) -> Assembler:
    sizes = sizes or Sizes(horizon=100, message_steps=MANY, largest=MANY)
    return Assembler("s.1", f"a.{start}", lambda _: sizes, in_groups=lambda _: False)


def observations(n: int) -> tuple[Any, ...]:
    return (np.zeros((n, 2), np.float32),)


def tick(
    number: int,
    before: int = 0,
    *,
    completed: int = 0,
    lost: tuple[int, ...] = (),
    ended: tuple[int, ...] = (),
    joined: dict[int, int] | None = None,
    fresh: bool = True,
    reported: tuple[int, ...] = (),
    acted: bool = True,
) -> BehaviorSteps:
    """Returns the steps of one tick; `joined` maps slots to agents, and with `acted` all reported agents act."""
    n = len(joined or {})
    rows = np.array(reported, np.int32)
    return steps_of(
        [
            BehaviorTick(
                number=number,
                produced_before=before,
                completed=completed,
                lost=np.array(lost, np.int32) if lost else None,
                ended=AgentsEnded(
                    slots=np.array(ended, np.int32),
                    observations=observations(len(ended)),
                    rewards=np.ones(len(ended), np.float32),
                    group_rewards=np.full(len(ended), 0.5, np.float32),
                    interrupted=np.zeros(len(ended), bool),
                )
                if ended
                else None,
                joined=AgentsStarted(
                    slots=np.array(list(joined), np.int32),
                    agents=np.array(list(joined.values()), np.int64),
                    groups=np.zeros(n, np.int64),
                    teams=np.zeros(n, np.int32),
                    simulators=np.zeros(n, np.int32),
                    fresh=np.full(n, fresh),
                )
                if joined
                else None,
                reported=OutcomesReported(
                    slots=rows, observations=observations(len(rows)), rewards=np.ones(len(rows), np.float32)
                )
                if reported
                else None,
                acted=ActionsChosen(
                    slots=rows,
                    log_probs=np.zeros(len(rows), np.float32),
                    versions=np.ones(len(rows), np.int64),
                    discrete=np.zeros((len(rows), 1), np.int32),
                )
                if reported and acted
                else None,
            )
        ]
    )


def transmitted(messages: Iterable[Segments]) -> list[Episodes]:
    return [decode([bytes(frame) for frame in encode(message)]).episodes for message in messages]


def rest(assembler: Assembler) -> tuple[list[int], list[int]]:
    """Returns reported and unreported agents of all remaining messages."""
    found = transmitted(assembler.rest())
    return [agent for one in found for agent in one.agents.tolist()], [
        agent for one in found for agent in one.unreported.tolist()
    ]


def test_an_episode_with_a_known_start_is_reported_with_its_agent() -> None:
    """The report includes the sum of group rewards during the episode."""
    assembler = assembler_of()
    assembler.apply([tick(1, joined={0: 1, 1: 2}, reported=(0, 1))])
    assembler.apply([tick(2, completed=2, reported=(1,), ended=(0,))])
    (found,) = transmitted(assembler.rest())
    assert (found.agents.tolist(), found.unreported.tolist()) == ([1], [])
    assert found.returns.tolist() == [1.0]
    assert found.shared_returns.tolist() == [0.5]
    assert found.lengths.tolist() == [1]


def test_an_episode_of_a_disconnected_simulator_is_unreported() -> None:
    """It may have steps or not; other episodes and the next one in its slot are reported."""
    assembler = assembler_of()
    assembler.apply([tick(1, joined={0: 1, 1: 2, 2: 3}, reported=(0, 1))])
    assembler.apply([tick(2, completed=2, reported=(0, 1))])
    assembler.apply([tick(3, 2, lost=(0, 2), joined={0: 4}, reported=(0,))])
    assert rest(assembler) == ([], [1, 3])
    assembler.apply([tick(4, 2, completed=2, ended=(0, 1))])
    assert rest(assembler) == ([4, 2], [])


def test_an_episode_joined_under_way_is_unreported_at_its_end() -> None:
    """Its steps before this incarnation of assembly are unknown; it is listed only after its end."""
    assembler = assembler_of()
    assembler.apply([tick(7, 20, joined={0: 5, 1: 6}, fresh=False, reported=(0, 1))])
    assert rest(assembler) == ([], [])
    assembler.apply([tick(8, 20, completed=2, ended=(0,), joined={0: 7}, reported=(0, 1))])
    assert rest(assembler) == ([], [5])
    assembler.apply([tick(9, 22, completed=2, ended=(0, 1))])
    assert rest(assembler) == ([7], [6])


def test_an_episode_without_a_step_is_unreported() -> None:
    """It may join and end in one tick, or end while its first decision is backpressured."""
    assembler = assembler_of()
    assembler.apply([tick(1, joined={0: 1}, reported=(0,), acted=False)])
    assembler.apply([tick(2, ended=(0,), joined={0: 2, 1: 3})])
    assembler.apply([tick(3, ended=(1,))])
    assert rest(assembler) == ([], [1, 3])


def test_all_open_episodes_of_a_lost_source_are_unreported() -> None:
    assembler = assembler_of()
    assembler.apply([tick(1, joined={3: 1, 5: 2}, reported=(3,))])
    assembler.apply([tick(2, completed=1, reported=(3,))])
    assembler.close_all()
    assert rest(assembler) == ([], [1, 2])


def test_unreported_episodes_alone_are_sent_once_at_the_end() -> None:
    """No later step would bring them, and coordination waits for them."""
    assembler = assembler_of()
    assembler.apply([tick(1, joined={0: 1})])
    assembler.apply([tick(2, lost=(0,))])
    (message,) = assembler.rest()
    assert (len(message.log_probs), message.episodes.unreported.tolist()) == (0, [1])
    assert list(assembler.rest()) == []
    (flush,) = assembler.flush("B", 1)
    assert flush.episodes.unreported.tolist() == []


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    grouped=st.booleans(),
    steady=st.booleans(),
    sizes=st.builds(Sizes, horizon=st.integers(1, 9), message_steps=st.integers(1, 12), largest=st.integers(12, 40)),
    batches=st.lists(st.integers(1, 8), max_size=25),
    restart=st.integers(1, 40),
)
def test_each_ended_episode_is_listed_exactly_once(
    seed: int, grouped: bool, steady: bool, sizes: Sizes, batches: list[int], restart: int
) -> None:
    """Lost episodes, those joined under way and those without a step are unreported, all others reported.

    Episodes that end before a new incarnation of assembly receives them are in neither list.
    """
    world = World(random.Random(seed), grouped=grouped, masked=False, steady=steady)
    assembler, expected = assembler_of(sizes), ExpectedEpisodes()
    found: list[Episodes] = []
    for number, batch in enumerate(batches):
        if number == restart:
            found += transmitted(assembler.rest())
            assembler, world.rejoin = assembler_of(sizes, start=2), bool(world.agent_episodes)
            expected.new_reader()
        ticks = [world.tick() for _ in range(batch)]
        for tick in ticks:
            expected.follow(tick)
        assembler.apply([steps_of(ticks)])
        found += transmitted(assembler.ready_messages())
    found += transmitted(assembler.rest())
    assert Counter(agent for one in found for agent in one.agents.tolist()) == Counter(expected.reported)
    assert Counter(agent for one in found for agent in one.unreported.tolist()) == Counter(expected.unreported)
    lengths = {
        agent: length for one in found for agent, length in zip(one.agents.tolist(), one.lengths.tolist(), strict=True)
    }
    assert lengths == {agent: expected.actions[agent] for agent in expected.reported}


class ExpectedEpisodes:
    """Computes from ticks, slot by slot, which episodes are reported."""

    def __init__(self) -> None:
        self.reported: list[int] = []
        self.unreported: list[int] = []
        self.actions: Counter[int] = Counter()
        self._slots: dict[int, int] = {}
        self._late: set[int] = set()  # begun before this incarnation of assembly
        self._unknown: set[int] = set()  # of these, not yet received

    def new_reader(self) -> None:
        self._late = set(self._slots.values())
        self._unknown = set(self._late)

    def follow(self, tick: BehaviorTick) -> None:
        for slot in [] if tick.lost is None else tick.lost.tolist():
            self._end(self._slots.pop(slot), reported=False)
        for slot in [] if tick.ended is None else tick.ended.slots.tolist():
            agent = self._slots.pop(slot)
            self._end(agent, reported=self.actions[agent] > 0 and agent not in self._late)
        if tick.joined is not None:
            self._slots.update(zip(tick.joined.slots.tolist(), tick.joined.agents.tolist(), strict=True))
            self._unknown -= set(tick.joined.agents.tolist())
        for slot in [] if tick.acted is None else tick.acted.slots.tolist():
            self.actions[self._slots[slot]] += 1

    def _end(self, agent: int, *, reported: bool) -> None:
        if agent not in self._unknown:
            (self.reported if reported else self.unreported).append(agent)


def test_messages_without_unreported_episodes_decode_with_defaults() -> None:
    """An `Episodes` without the newer fields lists no agent."""
    none = np.empty(0, np.float32)
    bare = Episodes(
        returns=none, lengths=none.astype(np.int32), group_returns=none, teams=none.astype(np.int32), outcomes=none
    )
    for name in ("agents", "shared_returns", "unreported"):
        assert len(getattr(bare, name)) == 0
    assert {field.name for field in dataclasses.fields(bare)} >= {"agents", "shared_returns", "unreported"}
