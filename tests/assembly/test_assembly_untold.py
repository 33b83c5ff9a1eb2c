"""Every life is heard of once when it is over: as an episode that is told, or as one of which nothing is."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.assembly.assembler import Assembler, Sizes
from sparring.pipeline.messages.codec import decode, encode
from sparring.pipeline.messages.segments import Episodes, Segments
from sparring.pipeline.messages.steps import AgentsEnded, AgentsStarted, BehaviorSteps, OutcomesReported
from tests.assembly.assembly_world import BehaviorTick, World, told

MANY = 10**6


def made(sizes: Sizes | None = None, *, start: int = 1) -> Assembler:
    return Assembler("B", "s.1", f"a.{start}", sizes or Sizes(horizon=100, message_steps=MANY, largest=MANY))


def wake(
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
    """One tick; `joined` are lives by slot, and all that reported act, if `acted`."""
    world = World(random.Random(number), grouped=False, masked=False)
    agent_episodes = joined or {}
    n = len(agent_episodes)
    rows = np.array(reported, np.int32)
    report = OutcomesReported(
        slots=rows, observations=world._observations(len(rows)), rewards=np.ones(len(rows), np.float32)
    )
    for slot in reported:
        world._begin(slot, 0)
        world.agent_episodes[slot].state = "waiting"
    world._calm = True
    return told(
        [
            BehaviorTick(
                number=number,
                produced_before=before,
                completed=completed,
                lost=np.array(lost, np.int32) if lost else None,
                ended=AgentsEnded(
                    slots=np.array(ended, np.int32),
                    observations=world._observations(len(ended)),
                    rewards=np.ones(len(ended), np.float32),
                    group_rewards=np.full(len(ended), 0.5, np.float32),
                    interrupted=np.zeros(len(ended), bool),
                )
                if ended
                else None,
                joined=AgentsStarted(
                    slots=np.array(list(agent_episodes), np.int32),
                    agents=np.array(list(agent_episodes.values()), np.int64),
                    groups=np.zeros(n, np.int64),
                    teams=np.zeros(n, np.int32),
                    simulators=np.zeros(n, np.int32),
                    fresh=np.full(n, fresh),
                )
                if agent_episodes
                else None,
                reported=report if reported else None,
                acted=world._act(report) if reported and acted else None,
            )
        ]
    )


def over_the_wire(messages: Iterable[Segments]) -> list[Episodes]:
    return [decode([bytes(frame) for frame in encode(message)]).episodes for message in messages]


def rest(assembler: Assembler) -> tuple[list[int], list[int]]:
    """Lives told and untold in what is left."""
    found = over_the_wire(assembler.rest())
    return [life for one in found for life in one.agents.tolist()], [
        life for one in found for life in one.unreported.tolist()
    ]


def test_a_life_seen_from_its_start_to_its_end_is_told_with_its_number() -> None:
    """With the sum of its group's rewards while it lived."""
    assembler = made()
    assembler.apply(wake(1, joined={0: 1, 1: 2}, reported=(0, 1)))
    assembler.apply(wake(2, completed=2, reported=(1,), ended=(0,)))
    (found,) = over_the_wire(assembler.rest())
    assert (found.agents.tolist(), found.unreported.tolist()) == ([1], [])
    assert found.returns.tolist() == [1.0]
    assert found.shared_returns.tolist() == [0.5]
    assert found.lengths.tolist() == [1]


def test_a_life_whose_simulator_went_away_is_untold() -> None:
    """Whether it had steps or not; the others are not touched, and the slot's next life is told."""
    assembler = made()
    assembler.apply(wake(1, joined={0: 1, 1: 2, 2: 3}, reported=(0, 1)))
    assembler.apply(wake(2, completed=2, reported=(0, 1)))
    assembler.apply(wake(3, 2, lost=(0, 2), joined={0: 4}, reported=(0,)))
    assert rest(assembler) == ([], [1, 3])
    assembler.apply(wake(4, 2, completed=2, ended=(0, 1)))
    assert rest(assembler) == ([4, 2], [])


def test_a_life_joined_under_way_is_untold_when_it_ends() -> None:
    """What it had before this start of assembly nobody knows; it is not said before its end."""
    assembler = made()
    assembler.apply(wake(7, 20, joined={0: 5, 1: 6}, fresh=False, reported=(0, 1)))
    assert rest(assembler) == ([], [])
    assembler.apply(wake(8, 20, completed=2, ended=(0,), joined={0: 7}, reported=(0, 1)))
    assert rest(assembler) == ([], [5])
    assembler.apply(wake(9, 22, completed=2, ended=(0, 1)))
    assert rest(assembler) == ([7], [6])


def test_a_life_that_ended_without_a_step_is_untold() -> None:
    """It joined and ended in one tick, or ended while its first decision was withheld."""
    assembler = made()
    assembler.apply(wake(1, joined={0: 1}, reported=(0,), acted=False))
    assembler.apply(wake(2, ended=(0,), joined={0: 2, 1: 3}))
    assembler.apply(wake(3, ended=(1,)))
    assert rest(assembler) == ([], [1, 3])


def test_all_lives_of_a_source_that_is_gone_are_untold() -> None:
    assembler = made()
    assembler.apply(wake(1, joined={3: 1, 5: 2}, reported=(3,)))
    assembler.apply(wake(2, completed=1, reported=(3,)))
    assembler.close_all()
    assert rest(assembler) == ([], [1, 2])


def test_untold_lives_alone_are_worth_a_message_at_the_end_and_each_is_said_once() -> None:
    """Who waits for them would wait for ever; there are no steps that could bring them."""
    assembler = made()
    assembler.apply(wake(1, joined={0: 1}))
    assembler.apply(wake(2, lost=(0,)))
    (message,) = assembler.rest()
    assert (len(message.log_probs), message.episodes.unreported.tolist()) == (0, [1])
    assert list(assembler.rest()) == []
    (flush,) = assembler.flush(1)
    assert flush.episodes.unreported.tolist() == []


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**32),
    grouped=st.booleans(),
    steady=st.booleans(),
    sizes=st.builds(Sizes, horizon=st.integers(1, 9), message_steps=st.integers(1, 12), largest=st.integers(12, 40)),
    batches=st.lists(st.integers(1, 8), max_size=25),
    restart=st.integers(1, 40),
)
def test_each_life_is_told_or_untold_once_or_still_lives(
    seed: int, grouped: bool, steady: bool, sizes: Sizes, batches: list[int], restart: int
) -> None:
    """In any world: those lost, joined under way or without a step untold, all others told; also after a restart.

    Only what is over before a new start of assembly has heard of it is in neither; who counts has to know of that.
    """
    world = World(random.Random(seed), grouped=grouped, masked=False, steady=steady)
    assembler, agent_episodes = made(sizes), AgentEpisodes()
    found: list[Episodes] = []
    for number, batch in enumerate(batches):
        if number == restart:
            found += over_the_wire(assembler.rest())
            assembler, world.rejoin = made(sizes, start=2), bool(world.agent_episodes)
            agent_episodes.new_reader()
        ticks = [world.tick() for _ in range(batch)]
        for tick in ticks:
            agent_episodes.follow(tick)
        assembler.apply(told(ticks))
        found += over_the_wire(assembler.ready_messages())
    found += over_the_wire(assembler.rest())
    assert Counter(life for one in found for life in one.agents.tolist()) == Counter(agent_episodes.told)
    assert Counter(life for one in found for life in one.unreported.tolist()) == Counter(agent_episodes.unreported)
    lengths = {
        life: length for one in found for life, length in zip(one.agents.tolist(), one.lengths.tolist(), strict=True)
    }
    assert lengths == {life: agent_episodes.actions[life] for life in agent_episodes.told}


class AgentEpisodes:
    """What ticks say, slot by slot."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.unreported: list[int] = []
        self.actions: Counter[int] = Counter()
        self._slots: dict[int, int] = {}
        self._late: set[int] = set()  # begun before this start of assembly
        self._unheard: set[int] = set()  # of these, whom it has not heard of yet

    def new_reader(self) -> None:
        self._late = set(self._slots.values())
        self._unheard = set(self._late)

    def follow(self, tick: BehaviorTick) -> None:
        for slot in [] if tick.lost is None else tick.lost.tolist():
            self._end(self._slots.pop(slot), told=False)
        for slot in [] if tick.ended is None else tick.ended.slots.tolist():
            life = self._slots.pop(slot)
            self._end(life, told=self.actions[life] > 0 and life not in self._late)
        if tick.joined is not None:
            self._slots.update(zip(tick.joined.slots.tolist(), tick.joined.agents.tolist(), strict=True))
            self._unheard -= set(tick.joined.agents.tolist())
        for slot in [] if tick.acted is None else tick.acted.slots.tolist():
            self.actions[self._slots[slot]] += 1

    def _end(self, life: int, *, told: bool) -> None:
        if life not in self._unheard:
            (self.told if told else self.unreported).append(life)


def test_messages_of_before_there_were_untold_lives_have_none() -> None:
    """The fields have a default: an `Episodes` without them says of no life anything."""
    none = np.empty(0, np.float32)
    bare = Episodes(
        returns=none, lengths=none.astype(np.int32), group_returns=none, teams=none.astype(np.int32), outcomes=none
    )
    for name in ("agents", "shared_returns", "unreported"):
        assert len(getattr(bare, name)) == 0
    assert {field.name for field in dataclasses.fields(bare)} >= {"agents", "shared_returns", "unreported"}
