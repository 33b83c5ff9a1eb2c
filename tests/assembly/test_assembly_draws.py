"""Self-play as assembly hands it on: the draw of each segment, matches that ended, steps of ghosts."""

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
from tests.assembly.assembly_world import World, told
from tests.assembly.group_world import GroupWorld, Kind, TickResult, parts_of

MANY = 10**6
NAMES = ("A?team=0", "A?team=1", "B?team=1")
COLUMNS = ("numbers", "matchups", "simulators", "row_counts", "who", "scores", "explicit", "rewards")
Plain = tuple[tuple[float, ...], ...]


def results(*numbers: int, names: int = 2) -> Results:
    """Matches with values that no other number has, each of two seats."""
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
    """The columns of several records, one after the other."""
    some = [one for one in records if one is not None]
    return tuple(tuple(value for one in some for value in getattr(one, name).tolist()) for name in COLUMNS)


def sent(messages: Iterable[Segments]) -> list[Segments]:
    """As they arrive."""
    return [decode([bytes(frame) for frame in encode(message)]) for message in messages]


def draw_of(agents: Any) -> Any:
    """The draw of lives, by their ids."""
    return agents * 3 + 1


def drawn(joined: AgentsStarted | None) -> AgentsStarted | None:
    return None if joined is None else replace(joined, matchups=draw_of(joined.agents))


def with_draws(wake: TickResult) -> TickResult:
    return {name: [replace(part, joined=drawn(part.joined)) for part in parts] for name, parts in wake.items()}


def check_draws(messages: Sequence[Segments]) -> int:
    """Each segment says the draw of the life that it is of; returns how many there are."""
    found = 0
    for message in messages:
        if message.matchups is None:
            assert not len(message.lengths), "draws of every segment"
            continue
        np.testing.assert_array_equal(message.matchups, draw_of(message.agents))
        found += len(message.lengths)
    return found


# ---------------------------------------------------------------- draws, in random worlds


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    parts=st.integers(1, 15),
    grouped=st.booleans(),
    horizon=st.integers(1, 6),
    message_steps=st.sampled_from([1, 10, MANY]),
)
def test_every_segment_says_the_draw_of_its_agents_life_and_every_match_comes_once(
    seed: int, parts: int, grouped: bool, horizon: int, message_steps: int
) -> None:
    """Slots are given on, agents are told again to a new reader, groups change, cuts close segments."""
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
        part = told([replace(tick, joined=drawn(tick.joined)) for tick in ticks])
        ghosts += rng.choice([0, 0, 7])
        if rng.random() < 0.4:
            ended.append(results(2 * number, 2 * number + 1, names=2 + (number > 5)))
            part = replace(part, results=ended[-1])
        assembler.apply(replace(part, ghosts=ghosts))
        messages += sent(assembler.ready_messages())
        if rng.random() < 0.1:
            messages += sent(assembler.flush(number + 1))
    assembler.close_all()
    messages += sent(assembler.rest())
    steps = sum(int(message.lengths.sum()) for message in messages)
    assert (check_draws(messages) > 0) == (steps > 0)
    assert plain(message.results for message in messages) == plain(ended)
    assert [message.ghosts for message in messages] == sorted(message.ghosts for message in messages)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    wakes=st.integers(1, 30),
    names=st.sampled_from([("A",), ("A", "B"), ("A", "B", "C")]),
    horizon=st.integers(1, 6),
    message_steps=st.sampled_from([1, 10, MANY]),
)
def test_so_does_every_segment_of_a_group(
    seed: int, wakes: int, names: tuple[str, ...], horizon: int, message_steps: int
) -> None:
    """Members that have left, that moved to another group, or of another behavior name, too."""
    rng = random.Random(seed)
    kind = Kind(names=names, moving=0.2, slow=3, losing=0.1, apart=True, carried=(0, 0, 0))
    world, sizes = GroupWorld(rng, kind), Sizes(horizon=horizon, message_steps=message_steps, largest=1000)
    assembler = GroupAssembler("s.1", "a.1", lambda _: sizes)
    messages: list[Segments] = []
    ended: dict[str, list[Results]] = {name: [] for name in names}
    for number in range(wakes):
        world.rejoin = rng.random() < 0.1
        parts = parts_of([with_draws(world.wake()) for _ in range(rng.randint(1, 3))])
        for at, part in enumerate(parts):
            if rng.random() < 0.4:
                ended[part.behavior].append(results(10 * number + at))
                parts[at] = replace(part, results=ended[part.behavior][-1], ghosts=number)
        assembler.apply(parts)
        messages += sent(assembler.ready_messages())
        if rng.random() < 0.1:
            messages += sent(assembler.flush(rng.choice(names), number + 1))
    assembler.close_all()
    messages += sent(assembler.rest())
    steps = sum(int(message.lengths.sum()) for message in messages)
    assert (check_draws(messages) > 0) == (steps > 0)
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
    """A tick of at most one agent."""
    some = np.zeros(1, np.int32)
    return BehaviorSteps(
        behavior=behavior,
        produced_before=before,
        ticks=np.array([before + 1]),
        completed=np.array([completed]),
        rows=np.array([[0, 0, int(joined), int(acted), int(acted)]], np.int32),
        joined=AgentsStarted(
            slots=some,
            agents=np.ones(1, np.int64),
            groups=np.zeros(1, np.int64),
            teams=some,
            simulators=some,
            fresh=np.ones(1, bool),
            matchups=np.array([4]),
        )
        if joined
        else None,
        reported=OutcomesReported(
            slots=some, observations=(np.zeros((1, 1), np.float32),), rewards=np.ones(1, np.float32)
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


class Plainly:
    """An assembler of one behavior name."""

    def __init__(self) -> None:
        self.assembler: Any = Assembler("A", "s.1", "a.1", Sizes(horizon=3, message_steps=MANY, largest=MANY))

    def apply(self, steps: BehaviorSteps) -> list[Segments]:
        self.assembler.apply(steps)
        return sent(self.assembler.ready_messages())

    def flush(self) -> list[Segments]:
        return sent(self.assembler.flush(1))

    def rest(self) -> list[Segments]:
        return sent(self.assembler.rest())


class Grouped(Plainly):
    """One of groups."""

    def __init__(self) -> None:
        self.assembler = GroupAssembler("s.1", "a.1", lambda _: Sizes(horizon=3, message_steps=MANY, largest=MANY))

    def apply(self, steps: BehaviorSteps) -> list[Segments]:
        self.assembler.apply([steps])
        return sent(self.assembler.ready_messages())

    def flush(self) -> list[Segments]:
        return sent(self.assembler.flush("A", 1))


both = pytest.mark.parametrize("made", [Plainly, Grouped])


@both
def test_a_match_is_told_at_once_where_no_step_is_open(made: type[Plainly]) -> None:
    """Of a tick without rows, too: ghosts may go on alone, and no step comes that it could leave with."""
    assembly = made()
    assert assembly.apply(part(ghosts=5)) == []
    (message,) = assembly.apply(part(ghosts=9, ended=results(1, 2)))
    assert plain([message.results]) == plain([results(1, 2)])
    assert message.ghosts == 9
    assert not len(message.lengths)
    assert assembly.apply(part(ghosts=9)) == []
    assert assembly.rest() == []


@both
def test_a_match_leaves_with_the_next_steps_where_some_are_open_and_with_what_is_closed(made: type[Plainly]) -> None:
    """It waits for no more than these, and comes before nothing that it followed."""
    assembly = made()
    assert assembly.apply(part(joined=True, acted=True)) == []
    assert assembly.apply(part(before=0, acted=True, completed=1, ended=results(1))) == []
    messages = assembly.flush()
    assert [message.lengths.tolist() for message in messages] == [[1]]
    assert messages[0].matchups is not None
    assert messages[0].matchups.tolist() == [4]
    assert plain(message.results for message in messages) == plain([results(1)])
    assert assembly.rest() == []


@both
def test_what_is_closed_leaves_with_a_match_that_would_have_to_wait_for_nothing(made: type[Plainly]) -> None:
    assembly = made()
    assembly.apply(part(joined=True, acted=True))
    for before in range(3):
        assert assembly.apply(part(before=before, acted=True, completed=1)) == []
    assembly.assembler.close_all()
    messages = assembly.apply(part(before=3, ended=results(7)))
    assert [int(message.lengths.sum()) for message in messages] == [3]
    assert plain(message.results for message in messages) == plain([results(7)])


@both
def test_results_of_several_parts_are_joined_by_the_names_of_the_latest(made: type[Plainly]) -> None:
    """A later record knows more seats, and has those of the earlier first."""
    assembly = made()
    assembly.apply(part(joined=True, acted=True))
    assembly.apply(part(acted=True, completed=1, ended=results(1)))
    assembly.apply(part(before=1, acted=True, completed=1, ended=results(2, 3, names=3)))
    (message,) = [one for one in assembly.flush() if one.results is not None]
    assert message.results is not None
    assert message.results.names == NAMES
    assert plain([message.results]) == plain([results(1, 2, 3)])


@both
def test_ghosts_are_counted_in_all_and_never_backwards(made: type[Plainly]) -> None:
    assembly = made()
    counts = []
    for number, ghosts in enumerate([3, 8, 8, 20]):
        counts += [message.ghosts for message in assembly.apply(part(ghosts=ghosts, ended=results(number)))]
    assert counts == [3, 8, 8, 20]


@both
def test_without_self_play_nothing_is_said_of_it(made: type[Plainly]) -> None:
    assembly = made()
    first = part(joined=True, acted=True)
    assert first.joined is not None
    assembly.apply(replace(first, joined=replace(first.joined, matchups=None)))
    assembly.apply(part(acted=True, completed=1))
    (message,) = assembly.flush()
    assert (message.matchups, message.results, message.ghosts) == (None, None, 0)
    assert message.lengths.tolist() == [1]


def test_a_name_without_open_steps_waits_for_no_other_name_of_the_groups() -> None:
    """The other has steps open; its own matches wait for them, those of the first do not."""
    assembler = GroupAssembler("s.1", "a.1", lambda _: Sizes(horizon=9, message_steps=MANY, largest=MANY))
    assembler.apply([part(), part(behavior="B", joined=True, acted=True)])
    assembler.apply([part(behavior="B", acted=True, completed=1)])
    assembler.apply([part(ended=results(1))])
    messages = sent(assembler.ready_messages())
    assert plain(message.results for message in messages if message.behavior == "A") == plain([results(1)])
