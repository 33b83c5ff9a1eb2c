"""An evaluation counts the episodes that began first, because those that end first are biased."""

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
from tests.evaluation.evaluation_helpers import ended


def twin(over: set[int], unreported: set[int], wanted: int) -> tuple[list[int], bool]:
    """Returns the episodes that count so far, and whether they are complete: from 1 on, while each is over."""
    counted, number = [], 1
    while number in over and len(counted) < wanted:
        if number not in unreported:
            counted.append(number)
        number += 1
    return counted, len(counted) == wanted


@given(
    seed=st.integers(0, 2**32),
    count=st.integers(0, 40),
    wanted=st.integers(1, 20),
    lost=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    sizes=st.lists(st.integers(0, 6), max_size=15),
)
def test_first_reported_episodes_count_in_any_order_of_ends(
    seed: int, count: int, wanted: int, lost: float, sizes: list[int]
) -> None:
    """The count is complete exactly when all episodes that began before its last one are over."""
    rng = random.Random(seed)
    order = rng.sample(range(1, count + 1), count)
    unreported = {number for number in order if rng.random() < lost}
    first, over = FirstEpisodes(wanted), set[int]()
    for size in [*sizes, count]:
        batch, order = order[:size], order[size:]
        first.add(
            ended(
                [number for number in batch if number not in unreported],
                [number for number in batch if number in unreported],
            )
        )
        over.update(batch)
        counted, complete = twin(over, unreported, wanted)
        assert (first.count, first.complete) == (len(counted), complete)
        assert first.unreported == unreported & over
        if complete:  # and stays complete, whatever else ends
            columns = first.columns()
            assert columns["agents"].tolist() == counted
            expected = ended(counted)
            for name, dtype in COLUMNS.items():
                assert columns[name].dtype == dtype
                np.testing.assert_array_equal(columns[name], getattr(expected, name))


def test_unfinished_count_is_in_the_order_of_beginnings() -> None:
    """A stopped evaluation excludes every episode that began after an unfinished one."""
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


def test_awaited_episode_is_named_and_later_ones_are_discarded() -> None:
    """Columns stay empty however long the first episode lasts."""
    first = FirstEpisodes(3)
    for number in range(2, 1000):
        first.add(ended([number]))
    assert first.waiting_for.startswith("the end of episode 1; ")
    assert sum(map(len, first.columns().values())) == 0
    first.add(ended([1]))
    assert first.complete
    assert first.columns()["agents"].tolist() == [1, 2, 3]


def test_count_is_empty_at_first() -> None:
    first = FirstEpisodes(1)
    assert (first.count, first.complete) == (0, False)
    assert all(len(column) == 0 for column in first.columns().values())


def ends(agents: list[Callable[[], int]]) -> Iterator[tuple[int, int]]:
    """Yields number and length of episodes in the order of their ends; agents start new ones at once, forever."""
    under_way = [(length(), agent, agent + 1) for agent, length in enumerate(agents)]
    lengths = {number: end for end, _, number in under_way}
    heapq.heapify(under_way)
    begun = len(agents)
    while True:
        now, agent, number = heapq.heappop(under_way)
        yield number, lengths.pop(number)
        begun += 1
        lengths[begun] = agents[agent]()
        heapq.heappush(under_way, (now + lengths[begun], agent, begun))


def mean_lengths(agents: list[Callable[[], int]], wanted: int) -> tuple[float, float]:
    """Returns the mean length of the first episodes to begin, and of the first to end."""
    first, seen = FirstEpisodes(wanted), []
    for number, length in ends(agents):
        first.add(ended([number], lengths=[length]))
        seen.append(length)
        if first.complete:
            break
    return float(first.columns()["lengths"].mean()), float(np.mean(seen[:wanted]))


def test_worked_example_of_first_episodes() -> None:
    """Three agents have episodes of 5 steps and one of 100: one of the first eight has 100 steps."""
    agents = [lambda length=length: length for length in (5, 5, 5, 100)]
    assert mean_lengths(agents, 8) == ((7 * 5 + 100) / 8, 5.0)


def test_first_ended_episodes_are_biased_and_first_begun_ones_are_not() -> None:
    """Half of all episodes take 200 steps, the rest 2, so an unbiased mean is 101."""
    began, ended_first = [], []
    for seed in range(40):
        rng = random.Random(seed)
        ours, theirs = mean_lengths([lambda rng=rng: rng.choice([2, 200])] * 64, 100)
        began.append(ours)
        ended_first.append(theirs)
    error = 99 / np.sqrt(100 * 40)  # standard error of the mean of all episodes
    assert abs(np.mean(began) - 101) < 3 * error
    assert np.mean(ended_first) < 101 - 20 * error


@given(numbers=st.lists(st.integers(1, 2**62), unique=True, max_size=20), seed=st.integers(0, 2**32))
def test_table_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[int], seed: int
) -> None:
    """Columns are read as they were written, bit for bit, even without rows."""
    rng, n = np.random.default_rng(seed), len(numbers)
    columns = {
        "agents": np.array(numbers, np.int64),
        "returns": rng.integers(0, 2**32, n).astype(np.uint32).view(np.float32),  # any float32 at all
        "shared_returns": rng.normal(size=n).astype(np.float32),
        "lengths": rng.integers(1, 2**31, n).astype(np.int32),
        "teams": rng.integers(0, 2**31, n).astype(np.int32),
        "outcomes": rng.choice([-1, 0, 0.5, 1], n).astype(np.float32),
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


def test_missing_table_has_no_columns(tmp_path: Path) -> None:
    assert read_episodes(tmp_path / "episodes.csv") == {}
