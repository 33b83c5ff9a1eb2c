"""Samples of all kinds of samplers."""

from __future__ import annotations

import itertools
import statistics

from hypothesis import given
from hypothesis import strategies as st

from sparring.pipeline.messages.simulator import Sampler

NUMBERS = st.floats(-1e6, 1e6)
RANGES = st.tuples(NUMBERS, NUMBERS).map(sorted)


def first_samples(kind: str, values: tuple[float, ...], n: int = 1000, seed: int = 1) -> list[float]:
    return list(itertools.islice(Sampler(kind=kind, values=values, seed=seed).samples(), n))  # type: ignore[arg-type]


@given(RANGES, st.integers(0, 2**31 - 1))
def test_a_uniform_sampler_stays_in_its_range(bounds: list[float], seed: int) -> None:
    low, high = bounds
    assert all(low <= value <= high for value in first_samples("uniform", (low, high), 20, seed))


@given(st.lists(RANGES, min_size=1, max_size=4), st.integers(0, 2**31 - 1))
def test_a_sampler_of_ranges_stays_in_them(ranges: list[list[float]], seed: int) -> None:
    """The ranges may have no width."""
    values = tuple(value for one in ranges for value in one)
    for value in first_samples("multirangeuniform", values, 20, seed):
        assert any(low <= value <= high for low, high in ranges)


def test_ranges_are_sampled_in_proportion_to_their_widths() -> None:
    found = first_samples("multirangeuniform", (0.0, 1.0, 10.0, 13.0), 4000)
    assert 0.22 < sum(value <= 1 for value in found) / len(found) < 0.28
    points = first_samples("multirangeuniform", (1.0, 1.0, 2.0, 2.0), 4000)
    assert 0.45 < points.count(1.0) / len(points) < 0.55


def test_a_gaussian_sampler_has_its_mean_and_deviation() -> None:
    found = first_samples("gaussian", (3.0, 0.5), 4000)
    assert abs(statistics.mean(found) - 3.0) < 0.05
    assert abs(statistics.stdev(found) - 0.5) < 0.03
    assert set(first_samples("gaussian", (3.0, 0.0), 5)) == {3.0}


def test_the_seed_determines_all_samples() -> None:
    for kind, values in (
        ("uniform", (0.0, 1.0)),
        ("gaussian", (0.0, 1.0)),
        ("multirangeuniform", (0.0, 1.0, 2.0, 3.0)),
    ):
        assert first_samples(kind, values) == first_samples(kind, values)
        assert first_samples(kind, values) != first_samples(kind, values, seed=2)
