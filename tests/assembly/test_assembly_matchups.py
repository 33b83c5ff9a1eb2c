"""Self-play in assembly: the matchup of each segment, results of matches, and steps of ghosts."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.assembly.assembler import Assembler, Sizes
from sparring.pipeline.assembly.group_assembler import GroupAssembler
from sparring.pipeline.messages.codec import decode, encode
from sparring.pipeline.messages.matches import Results
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.steps import ActionsChosen, AgentsStarted, BehaviorSteps, OutcomesReported
from tests.assembly.assembly_world import World, steps_of
from tests.assembly.group_world import GroupWorld, Kind, TickResult, parts_of

MANY = 10**6
NAMES = ("A?team=0", "A?team=1", "B?team=1")
COLUMNS = ("numbers", "matchups", "simulators", "row_counts", "who", "scores", "explicit", "rewards")
Plain = tuple[tuple[float, ...], ...]


def results(*numbers: int, names: int = 2) -> Results:
    """Returns results of two behavior ids each, with values that differ between `numbers`."""
    column = np.array(numbers, np.int64)
    rows = np.repeat(column, 2)
    return Results(
        numbers=column,
        matchups=column * 10,
        simulators=(column % 3).astype(np.int32),
        row_counts=np.full(len(column), 2, np.int32),
        names=NAMES[:names],
        who=np.tile(np.array([0, 1], np.int32), len(column)),
        scores=np.tile(np.array([1, 0], np.float32), len(column)),
        explicit=(rows % 2).astype(np.int32),
        rewards=(rows / 4).astype(np.float32),
    )


def plain(records: Iterable[Results | None]) -> Plain:
    """Concatenates the columns of several records."""
    zero = [one for one in records if one is not None]
    return tuple(tuple(value for one in zero for value in getattr(one, name).tolist()) for name in COLUMNS)


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


# ---------------------------------------------------------------- matchups of segments


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    parts=st.integers(1, 15),
    grouped=st.booleans(),
    horizon=st.integers(1, 6),
    message_steps=st.sampled_from([1, 10, MANY]),
)
def test_every_segment_names_its_matchup_and_every_result_leaves_once(
    seed: int, parts: int, grouped: bool, horizon: int, message_steps: int
) -> None:
    """Slots are reused, agents are reported again to a new reader, groups change, and flushes close segments."""
    rng = random.Random(seed)
    world = World(rng, grouped=grouped, masked=False, steady=rng.random() < 0.3)
    assembler = Assembler(
        "B", "s.1", "a.1", Sizes(horizon=horizon, message_steps=message_steps, largest=max(20, horizon))
    )
    messages: list[Segments] = []
    ended: list[Results] = []
    ghosts = 0
    for number in range(parts):
        world.rejoin = rng.random() < 0.1
        ticks = [world.tick() for _ in range(rng.randint(1, 4))]
        part = steps_of([replace(tick, joined=with_matchups(tick.joined)) for tick in ticks])
        ghosts += rng.choice([0, 0, 7])
        if rng.random() < 0.4:
            ended.append(results(2 * number, 2 * number + 1, names=2 + (number > 5)))
            part = replace(part, results=ended[-1])
        assembler.apply(replace(part, ghosts=ghosts))
        messages += transmitted(assembler.ready_messages())
        if rng.random() < 0.1:
            messages += transmitted(assembler.flush(number + 1))
    assembler.close_all()
    messages += transmitted(assembler.rest())
    steps = sum(int(message.lengths.sum()) for message in messages)
    assert (check_matchups(messages) > 0) == (steps > 0)
    assert plain(message.results for message in messages) == plain(ended)
    assert [message.ghosts for message in messages] == sorted(message.ghosts for message in messages)


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
    assembler = GroupAssembler("s.1", "a.1", lambda _: sizes)
    messages: list[Segments] = []
    ended: dict[str, list[Results]] = {name: [] for name in names}
    for number in range(ticks):
        world.rejoin = rng.random() < 0.1
        parts = parts_of([tick_with_matchups(world.tick()) for _ in range(rng.randint(1, 3))])
        for at, part in enumerate(parts):
            if rng.random() < 0.4:
                ended[part.behavior].append(results(10 * number + at))
                parts[at] = replace(part, results=ended[part.behavior][-1], ghosts=number)
        assembler.apply(parts)
        messages += transmitted(assembler.ready_messages())
        if rng.random() < 0.1:
            messages += transmitted(assembler.flush(rng.choice(names), number + 1))
    assembler.close_all()
    messages += transmitted(assembler.rest())
    steps = sum(int(message.lengths.sum()) for message in messages)
    assert (check_matchups(messages) > 0) == (steps > 0)
    for name in names:
        assert plain(message.results for message in messages if message.behavior == name) == plain(ended[name])


# ---------------------------------------------------------------- when results leave


def part(
    *,
    before: int = 0,
    joined: bool = False,
    acted: bool = False,
    completed: int = 0,
    behavior: str = "A",
    ghosts: int = 0,
    ended: Results | None = None,
) -> BehaviorSteps:
    """Returns the steps of a tick with at most one agent."""
    zero = np.zeros(1, np.int32)
    return BehaviorSteps(
        behavior=behavior,
        produced_before=before,
        ticks=np.array([before + 1]),
        completed=np.array([completed]),
        rows=np.array([[0, 0, int(joined), int(acted), int(acted)]], np.int32),
        joined=AgentsStarted(
            slots=zero,
            agents=np.ones(1, np.int64),
            groups=np.zeros(1, np.int64),
            teams=zero,
            simulators=zero,
            fresh=np.ones(1, bool),
            matchups=np.array([4]),
        )
        if joined
        else None,
        reported=OutcomesReported(
            slots=zero, observations=(np.zeros((1, 1), np.float32),), rewards=np.ones(1, np.float32)
        )
        if acted
        else None,
        acted=ActionsChosen(
            slots=None,
            log_probs=np.zeros(1, np.float32),
            versions=np.ones(1, np.int64),
            discrete=np.zeros((1, 1), np.int32),
        )
        if acted
        else None,
        ghosts=ghosts,
        results=ended,
    )


class SingleAssembly:
    """An assembler for single agents."""

    def __init__(self) -> None:
        self.assembler: Any = Assembler("A", "s.1", "a.1", Sizes(horizon=3, message_steps=MANY, largest=MANY))

    def apply(self, steps: BehaviorSteps) -> list[Segments]:
        self.assembler.apply(steps)
        return transmitted(self.assembler.ready_messages())

    def flush(self) -> list[Segments]:
        return transmitted(self.assembler.flush(1))

    def rest(self) -> list[Segments]:
        return transmitted(self.assembler.rest())


class GroupAssembly(SingleAssembly):
    """An assembler for groups."""

    def __init__(self) -> None:
        self.assembler = GroupAssembler("s.1", "a.1", lambda _: Sizes(horizon=3, message_steps=MANY, largest=MANY))

    def apply(self, steps: BehaviorSteps) -> list[Segments]:
        self.assembler.apply([steps])
        return transmitted(self.assembler.ready_messages())

    def flush(self) -> list[Segments]:
        return transmitted(self.assembler.flush("A", 1))


both_assemblers = pytest.mark.parametrize("assembly_class", [SingleAssembly, GroupAssembly])


@both_assemblers
def test_a_result_leaves_at_once_where_no_step_is_open(assembly_class: type[SingleAssembly]) -> None:
    """A tick may have no rows: ghosts can play alone, and then no later step would bring the result."""
    assembly = assembly_class()
    assert assembly.apply(part(ghosts=5)) == []
    (message,) = assembly.apply(part(ghosts=9, ended=results(1, 2)))
    assert plain([message.results]) == plain([results(1, 2)])
    assert message.ghosts == 9
    assert not len(message.lengths)
    assert assembly.apply(part(ghosts=9)) == []
    assert assembly.rest() == []


@both_assemblers
def test_a_result_leaves_with_open_steps_once_they_are_sent(assembly_class: type[SingleAssembly]) -> None:
    """It waits for these steps only, and never overtakes a step that preceded it."""
    assembly = assembly_class()
    assert assembly.apply(part(joined=True, acted=True)) == []
    assert assembly.apply(part(before=0, acted=True, completed=1, ended=results(1))) == []
    messages = assembly.flush()
    assert [message.lengths.tolist() for message in messages] == [[1]]
    assert messages[0].matchups is not None
    assert messages[0].matchups.tolist() == [4]
    assert plain(message.results for message in messages) == plain([results(1)])
    assert assembly.rest() == []


@both_assemblers
def test_closed_segments_leave_with_a_result_that_need_not_wait(assembly_class: type[SingleAssembly]) -> None:
    assembly = assembly_class()
    assembly.apply(part(joined=True, acted=True))
    for before in range(3):
        assert assembly.apply(part(before=before, acted=True, completed=1)) == []
    assembly.assembler.close_all()
    messages = assembly.apply(part(before=3, ended=results(7)))
    assert [int(message.lengths.sum()) for message in messages] == [3]
    assert plain(message.results for message in messages) == plain([results(7)])


@both_assemblers
def test_results_of_several_parts_use_the_names_of_the_latest(assembly_class: type[SingleAssembly]) -> None:
    """A later record appends behavior ids to those of the earlier one."""
    assembly = assembly_class()
    assembly.apply(part(joined=True, acted=True))
    assembly.apply(part(acted=True, completed=1, ended=results(1)))
    assembly.apply(part(before=1, acted=True, completed=1, ended=results(2, 3, names=3)))
    (message,) = [one for one in assembly.flush() if one.results is not None]
    assert message.results is not None
    assert message.results.names == NAMES
    assert plain([message.results]) == plain([results(1, 2, 3)])


@both_assemblers
def test_steps_of_ghosts_are_counted_cumulatively(assembly_class: type[SingleAssembly]) -> None:
    assembly = assembly_class()
    counts = []
    for number, ghosts in enumerate([3, 8, 8, 20]):
        counts += [message.ghosts for message in assembly.apply(part(ghosts=ghosts, ended=results(number)))]
    assert counts == [3, 8, 8, 20]


@both_assemblers
def test_without_self_play_segments_have_no_matchups_and_no_results(assembly_class: type[SingleAssembly]) -> None:
    assembly = assembly_class()
    first = part(joined=True, acted=True)
    assert first.joined is not None
    assembly.apply(replace(first, joined=replace(first.joined, matchups=None)))
    assembly.apply(part(acted=True, completed=1))
    (message,) = assembly.flush()
    assert (message.matchups, message.results, message.ghosts) == (None, None, 0)
    assert message.lengths.tolist() == [1]


def test_results_of_a_name_without_open_steps_wait_for_no_other_name() -> None:
    """The other name has open steps; only its own results wait for them."""
    assembler = GroupAssembler("s.1", "a.1", lambda _: Sizes(horizon=9, message_steps=MANY, largest=MANY))
    assembler.apply([part(), part(behavior="B", joined=True, acted=True)])
    assembler.apply([part(behavior="B", acted=True, completed=1)])
    assembler.apply([part(ended=results(1))])
    messages = transmitted(assembler.ready_messages())
    assert plain(message.results for message in messages if message.behavior == "A") == plain([results(1)])
