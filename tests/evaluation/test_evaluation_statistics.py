"""Statistics of episodes and their confidence intervals."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.evaluation.ratings import CONFIDENCE
from sparring.pipeline.evaluation.statistics import by_team, describe, share, spread

VALUES = st.floats(-1e6, 1e6, width=32)


def columns(returns: Any, **changes: Any) -> dict[str, Any]:
    n = len(returns)
    plain = {
        "returns": np.array(returns, np.float32),
        "shared_returns": np.zeros(n, np.float32),
        "lengths": np.full(n, 5, np.int32),
        "teams": np.zeros(n, np.int32),
        "outcomes": np.full(n, -1, np.float32),
        "groups": np.zeros(n, np.int64),
    }
    return plain | {name: np.array(value, plain[name].dtype) for name, value in changes.items()}


@settings(max_examples=30)
@given(st.lists(VALUES, min_size=2, max_size=30))
def test_interval_contains_the_mean_and_is_within_the_values(values: list[float]) -> None:
    """This includes ties and outliers, and the result is valid JSON."""
    found = spread(np.array(values, np.float32))
    low, high = found["interval"]
    slack = 1e-9 * max(1.0, *map(abs, values))
    assert low - slack <= found["mean"] <= high + slack
    assert found["min"] - slack <= low <= high <= found["max"] + slack
    assert found["min"] <= found["quartiles"][0] <= found["quartiles"][1] <= found["quartiles"][2] <= found["max"]
    json.dumps(found, allow_nan=False)


@given(st.lists(VALUES, min_size=2, max_size=20))
def test_same_episodes_have_the_same_interval(values: list[float]) -> None:
    """The bootstrap has its own seed."""
    assert spread(np.array(values)) == spread(np.array(values))


@given(VALUES, st.integers(2, 50))
def test_interval_of_equal_values_is_that_value(value: float, n: int) -> None:
    found = spread(np.full(n, value, np.float32))
    assert found["interval"] == [value, value]
    assert found["min"] == found["max"] == value
    assert found["deviation"] == pytest.approx(0, abs=1e-6 * abs(value))


def test_one_value_has_no_interval() -> None:
    found = spread(np.array([3], np.int32))
    assert (found["mean"], found["interval"], found["deviation"]) == (3.0, None, None)
    assert found["quartiles"] == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("odd", [1.0000001, 2.0, -1e30, 1e-45])
def test_single_outlier_gives_a_finite_interval(odd: float) -> None:
    """It is the smallest case of resampling."""
    found = spread(np.array([1.0] * 50 + [odd], np.float32))
    assert all(map(math.isfinite, found["interval"]))
    assert found["interval"][0] < found["interval"][1]


SKEWED = {
    "exponential": (lambda rng: rng.exponential(1.0, 60), 1.0),
    "mostly at the top": (lambda rng: np.minimum(rng.normal(1.0, 0.7, 60), 1.0), 1.0 - 0.7 / math.sqrt(2 * math.pi)),
}


@pytest.mark.parametrize("kind", SKEWED)
def test_intervals_of_skewed_returns_cover_the_mean_at_their_confidence(kind: str) -> None:
    """With a confidence of 95 %, 90 to 98 % of the intervals of 60 episodes contain the true mean."""
    sample, mean = SKEWED[kind]
    rng = np.random.default_rng(11)
    inside = 0
    for _ in range(200):
        low, high = spread(sample(rng))["interval"]
        inside += low <= mean <= high
    assert CONFIDENCE == 0.95
    assert 0.90 <= inside / 200 <= 0.98


def test_interval_of_skewed_returns_is_longer_toward_the_tail() -> None:
    """A symmetric interval would not be."""
    found = spread(np.random.default_rng(3).exponential(1.0, 60))
    low, high = found["interval"]
    assert high - found["mean"] > 1.1 * (found["mean"] - low)


@given(st.integers(1, 300), st.data())
def test_share_has_a_wilson_interval(n: int, data: Any) -> None:
    """It equals the closed form, within 0..1 even if the share is 0 or 1."""
    times = data.draw(st.integers(0, n))
    found = share(np.arange(n) < times)
    z, p = 1.959963984540054, times / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert found["share"] == p
    assert found["times"] == times
    assert found["interval"] == pytest.approx([middle - half, middle + half], abs=1e-9)
    assert 0 <= found["interval"][0] <= p <= found["interval"][1] <= 1


def test_shares_are_of_episodes_with_a_reported_outcome() -> None:
    found = describe(columns([1, 2, 3, 4, 5], outcomes=[1, 0.5, 0, 1, -1]))
    shares = {name: (one["share"], one["times"]) for name, one in found["outcomes"].items()}
    assert shares == {"won": (0.5, 2), "drawn": (0.25, 1), "lost": (0.25, 1)}


def test_unreported_values_are_left_out() -> None:
    """Outcomes and group rewards are optional, and without episodes only their number remains."""
    assert list(describe(columns([1, 2]))) == ["episodes", "reward", "length"]
    assert "group_reward" in describe(columns([1, 2], shared_returns=[0, 3]))
    assert describe(columns([])) == {"episodes": 0}


def test_several_teams_are_described_separately() -> None:
    both = columns([1, 10, 3, 30], teams=[0, 7, 0, 7], outcomes=[1, 0, 1, 0])
    found = by_team(both)
    assert list(found) == ["0", "7"]
    assert [found[team]["reward"]["mean"] for team in found] == [2.0, 20.0]
    assert [found[team]["outcomes"]["won"]["share"] for team in found] == [1.0, 0.0]
    assert by_team(columns([1, 2, 3])) == {}
    assert by_team(columns([])) == {}


def test_groups_have_no_interval_because_members_are_not_independent() -> None:
    """Means and shares are still reported."""
    found = describe(columns([1, 2, 3, 4], shared_returns=[1, 1, 2, 2], outcomes=[1, 1, 0, 0], groups=[7, 7, 8, 8]))
    for name in ("reward", "group_reward", "length"):
        assert found[name]["interval"] is None
    assert (found["reward"]["mean"], found["outcomes"]["won"]) == (2.5, {"share": 0.5, "interval": None, "times": 2})


def test_interval_of_many_episodes_is_fast() -> None:
    """Beyond some thousands percentiles replace the bias correction, whose cost is quadratic."""
    found = spread(np.random.default_rng(1).exponential(size=20_000))
    low, high = found["interval"]
    assert low < found["mean"] < high
    assert 2 * 1.8 / 20_000**0.5 < high - low < 2 * 2.1 / 20_000**0.5
