"""The episodes that began first: which they are, when they have come, why not those that end first."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.pipeline.evaluation.episodes import COLUMNS, FirstEpisodes, read_episodes, write_episodes
from tests.playing.playing_helpers import ended


def twin(over: set[int], unreported: set[int], wanted: int) -> tuple[list[int], bool]:
    """Lives that surely count, and whether that are all: from life 1 on, as long as each is over."""
    counted, life = [], 1
    while life in over and len(counted) < wanted:
        if life not in unreported:
            counted.append(life)
        life += 1
    return counted, len(counted) == wanted


@given(
    seed=st.integers(0, 2**32),
    agent_episodes=st.integers(0, 40),
    wanted=st.integers(1, 20),
    lost=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    sizes=st.lists(st.integers(0, 6), max_size=15),
)
def test_in_whatever_order_lives_end_the_first_told_ones_count(
    seed: int, agent_episodes: int, wanted: int, lost: float, sizes: list[int]
) -> None:
    """By number; complete as soon as, and only when, all that began before the last of them are over."""
    rng = random.Random(seed)
    order = rng.sample(range(1, agent_episodes + 1), agent_episodes)
    unreported = {life for life in order if rng.random() < lost}
    first, over = FirstEpisodes(wanted), set[int]()
    for size in [*sizes, agent_episodes]:
        batch, order = order[:size], order[size:]
        first.add(
            ended([life for life in batch if life not in unreported], [life for life in batch if life in unreported])
        )
        over.update(batch)
        counted, complete = twin(over, unreported, wanted)
        assert (first.count, first.complete) == (len(counted), complete)
        assert first.unreported == unreported & over
        if complete:  # and it stays so, whatever else ends
            columns = first.columns()
            assert columns["agents"].tolist() == counted
            expected = ended(counted)
            for name, dtype in COLUMNS.items():
                assert columns[name].dtype == dtype
                np.testing.assert_array_equal(columns[name], getattr(expected, name))


def test_what_has_come_of_an_unfinished_count_is_in_the_order_of_starts() -> None:
    """An evaluation that was stopped shows what surely counts: nothing that began after a life under way."""
    first = FirstEpisodes(3)
    first.add(ended([5, 3]))
    assert (first.count, first.complete) == (0, False)
    assert first.columns()["agents"].tolist() == []
    first.add(ended([2, 1]))
    assert (first.count, first.complete) == (3, True)
    assert first.columns()["agents"].tolist() == [1, 2, 3]
    other = FirstEpisodes(4)
    other.add(ended([5, 2, 1]))
    assert (other.count, other.columns()["agents"].tolist()) == (2, [1, 2])


def test_what_waits_is_named_and_what_can_not_count_any_more_is_forgotten() -> None:
    """However long the first episode lasts."""
    first = FirstEpisodes(3)
    for life in range(2, 1000):
        first.add(ended([life]))
    assert first.waiting_for.startswith("the end of episode 1; ")
    assert sum(map(len, first.columns().values())) == 0
    first.add(ended([1]))
    assert first.complete
    assert first.columns()["agents"].tolist() == [1, 2, 3]


def test_nothing_has_come_at_first() -> None:
    first = FirstEpisodes(1)
    assert (first.count, first.complete) == (0, False)
    assert all(len(column) == 0 for column in first.columns().values())


def ends(agents: list[Callable[[], int]]) -> Iterator[tuple[int, int]]:
    """Life and length of episodes in the order of their ends, of agents that begin anew at once, for ever."""
    under_way = [(draw(), agent, agent + 1) for agent, draw in enumerate(agents)]
    lengths = {life: end for end, _, life in under_way}
    heapq.heapify(under_way)
    begun = len(agents)
    while True:
        now, agent, life = heapq.heappop(under_way)
        yield life, lengths.pop(life)
        begun += 1
        lengths[begun] = agents[agent]()
        heapq.heappush(under_way, (now + lengths[begun], agent, begun))


def mean_lengths(agents: list[Callable[[], int]], wanted: int) -> tuple[float, float]:
    """Mean length of the first that began, and of the first that ended."""
    first, seen = FirstEpisodes(wanted), []
    for life, length in ends(agents):
        first.add(ended([life], lengths=[length]))
        seen.append(length)
        if first.complete:
            break
    return float(first.columns()["lengths"].mean()), float(np.mean(seen[:wanted]))


def test_the_worked_example() -> None:
    """Three agents have episodes of 5 steps and one of 100: of the eight that began first, one is of 100."""
    agents = [lambda length=length: length for length in (5, 5, 5, 100)]
    assert mean_lengths(agents, 8) == ((7 * 5 + 100) / 8, 5.0)


def test_to_count_the_first_ends_would_be_biased_and_this_is_not() -> None:
    """Every other episode takes 200 steps, the rest 2: the mean is 101, and 64 agents show it in 100 episodes."""
    began, ended_first = [], []
    for seed in range(40):
        rng = random.Random(seed)
        ours, theirs = mean_lengths([lambda rng=rng: rng.choice([2, 200])] * 64, 100)
        began.append(ours)
        ended_first.append(theirs)
    error = 99 / np.sqrt(100 * 40)  # of a mean over all their episodes
    assert abs(np.mean(began) - 101) < 3 * error
    assert np.mean(ended_first) < 101 - 20 * error


@given(agent_episodes=st.lists(st.integers(1, 2**62), unique=True, max_size=20), seed=st.integers(0, 2**32))
def test_the_table_holds_every_digit(
    tmp_path_factory: pytest.TempPathFactory, agent_episodes: list[int], seed: int
) -> None:
    """Written and read, columns are the same to the bit, and no rows are still columns."""
    numbers, n = np.random.default_rng(seed), len(agent_episodes)
    columns = {
        "agents": np.array(agent_episodes, np.int64),
        "returns": numbers.integers(0, 2**32, n).astype(np.uint32).view(np.float32),  # any float32 at all
        "shared_returns": numbers.normal(size=n).astype(np.float32),
        "lengths": numbers.integers(1, 2**31, n).astype(np.int32),
        "teams": numbers.integers(0, 2**31, n).astype(np.int32),
        "outcomes": numbers.choice([-1, 0, 0.5, 1], n).astype(np.float32),
    }
    columns["returns"][~np.isfinite(columns["returns"])] = 0
    path = tmp_path_factory.mktemp("table") / "episodes.csv"
    write_episodes(path, columns)
    found = read_episodes(path)
    assert list(found) == list(columns)
    for name, column in columns.items():
        assert found[name].dtype == column.dtype
        np.testing.assert_array_equal(found[name], column)
    assert len(path.read_text().splitlines()) == n + 1


def test_no_table_is_no_columns(tmp_path: Path) -> None:
    assert read_episodes(tmp_path / "episodes.csv") == {}
