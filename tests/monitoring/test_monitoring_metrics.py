"""Registry, histograms, totals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from sparring.pipeline.messages import codec
from sparring.pipeline.messages.metrics import Histogram, Metrics
from sparring.pipeline.monitoring import metrics
from sparring.pipeline.monitoring.metrics import LAG_BOUNDS, LATENCY_BOUNDS, Registry
from sparring.pipeline.monitoring.overview import Numbers, Overview, Totals

SAVED = TypeAdapter(Totals)
FINITE = st.floats(1e-7, 1e3, allow_nan=False)


def filled(bounds: tuple[float, ...], values: list[float]) -> Histogram:
    registry = Registry("stepping-0", "stepping-0.1")
    registry.histogram("h", bounds)
    registry.observe_many("h", values)
    return registry.snapshot(0.0).histograms["h"]


@given(st.lists(FINITE, min_size=1, max_size=200), st.floats(0.0, 1.0))
def test_estimated_quantile_is_in_the_bucket_of_the_true_one(values: list[float], q: float) -> None:
    estimate = metrics.quantile(filled(LATENCY_BOUNDS, values), q)
    exact = {float(np.quantile(values, min(1.0, max(0.0, p)), method="inverted_cdf")) for p in (q - 1e-9, q, q + 1e-9)}
    buckets = [bisect(value) for value in exact]
    assert any(low <= estimate <= high for low, high in buckets)


def bisect(value: float) -> tuple[float, float]:
    index = int(np.searchsorted(LATENCY_BOUNDS, value))
    low = LATENCY_BOUNDS[index - 1] if index else 0.0
    return (low, LATENCY_BOUNDS[index]) if index < len(LATENCY_BOUNDS) else (LATENCY_BOUNDS[-1], LATENCY_BOUNDS[-1])


@given(st.lists(FINITE, max_size=50))
def test_observing_many_values_equals_observing_each(values: list[float]) -> None:
    registry = Registry("stepping-0", "stepping-0.1")
    registry.histogram("h", LATENCY_BOUNDS)
    for value in values:
        registry.observe("h", value)
    one_by_one, together = registry.snapshot(0.0).histograms["h"], filled(LATENCY_BOUNDS, values)
    assert one_by_one.counts == together.counts
    assert one_by_one.total == pytest.approx(together.total)


def test_integer_lags_are_exact() -> None:
    lag = filled(LAG_BOUNDS, [0, 0, 1, 3])
    assert (metrics.mean(lag), metrics.highest(lag), metrics.count(lag)) == (1.0, 3.0, 4)
    assert lag.counts[:4] == (2, 1, 0, 1)


def test_value_above_all_bounds_is_reported_as_more_than_the_last() -> None:
    assert metrics.highest(filled(LAG_BOUNDS, [17])) == 17
    assert metrics.highest(filled(LAG_BOUNDS, [2, 40, 41])) == 41, "at least: their mean is 40.5"
    assert metrics.quantile(filled(LAG_BOUNDS, [40]), 0.5) == 16


def test_empty_histogram_has_no_statistics() -> None:
    empty = filled(LAG_BOUNDS, [])
    assert metrics.quantile(empty, 0.5) is None
    assert metrics.mean(empty) is None
    assert metrics.highest(empty) is None


def test_histograms_with_other_bounds_are_not_combined() -> None:
    lag, latency = filled(LAG_BOUNDS, [1]), filled(LATENCY_BOUNDS, [1.0])
    assert metrics.added(lag, latency) is latency
    assert metrics.since(latency, lag) is latency


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_moments_give_mean_and_deviation(values: list[float]) -> None:
    registry = Registry("assembly", "assembly.1")
    registry.observe_moments("episode_return", values)
    numbers = Numbers(counters=registry.snapshot(0.0).counters)
    assert numbers.mean("episode_return") == pytest.approx(np.mean(values), abs=1e-6)
    assert numbers.deviation("episode_return") == pytest.approx(np.std(values), rel=1e-3, abs=0.1)


def test_mean_of_an_interval_is_the_difference_of_sums_over_that_of_counts() -> None:
    registry = Registry("learning-Ball", "learning-Ball.1")
    registry.observe_moments("Losses/Policy Loss", [1.0] * 10, "Ball")
    before = registry.snapshot(0.0).counters
    registry.observe_moments("Losses/Policy Loss", [3.0] * 5, "Ball")
    after = registry.snapshot(1.0).counters
    name = "Losses/Policy Loss.{}/Ball"
    total, number = (after[name.format(end)] - before[name.format(end)] for end in ("sum", "count"))
    assert total / number == 3.0


def test_values_that_are_not_finite_are_counted_and_never_recorded() -> None:
    registry = Registry("learning-Ball", "learning-Ball.1")
    registry.histogram("h", LAG_BOUNDS)
    registry.gauge("reward", math.nan)
    registry.observe("h", math.inf)
    registry.observe_many("h", [1.0, math.nan])
    registry.observe_moments("loss", [math.nan] * 3)
    registry.observe_moments("r", [math.inf, 2.0])
    record = registry.snapshot(0.0)
    assert "reward" not in record.gauges
    assert record.counters[metrics.NOT_FINITE] == 6
    assert record.counters["r.sum"] == 2.0


def test_values_too_large_to_be_summed_are_counted_and_left_out() -> None:
    """A simulator may report any finite number, and it must not make a sum infinite."""
    registry = Registry("stepping-0", "stepping-0.1")
    for _ in range(3):
        registry.add("sum", 1.7e308)
        registry.observe_moments("loss", [-1.7e308] * 2)
        registry.observe_moments("r", [1.7e308, 2.0])
    registry.add("sum", math.nan)
    registry.add("sum", 5.0)
    counters = registry.snapshot(0.0).counters
    assert (counters["sum"], counters["r.sum"], counters["r.sumsq"]) == (5.0, 6.0, 12.0)
    assert counters[metrics.NOT_FINITE] == 3 + 3 * 2 + 3 + 1


def test_metrics_survive_the_codec() -> None:
    registry = Registry("stepping-0", "stepping-0.1")
    registry.histogram("lag/Ball", LAG_BOUNDS)
    registry.add("steps/Ball", np.float32(3))
    registry.gauge("agents/Ball", np.int64(12))
    registry.observe_many("lag/Ball", np.array([0, 1, 1]))
    sent = registry.snapshot(12.5, "allowance")
    got = codec.decode(codec.encode(sent))
    assert isinstance(got, Metrics)
    assert (got.counters, got.gauges, got.waiting_for) == (sent.counters, sent.gauges, "allowance")
    assert got.histograms["lag/Ball"].counts == sent.histograms["lag/Ball"].counts


def test_histogram_keeps_its_registered_bounds() -> None:
    registry = Registry("stepping-0", "stepping-0.1")
    registry.histogram("h", LAG_BOUNDS)
    registry.histogram("h", LAG_BOUNDS)
    with pytest.raises(ValueError, match="other bounds"):
        registry.histogram("h", LATENCY_BOUNDS)
    with pytest.raises(ValueError, match="each above the one before"):
        registry.histogram("falling", (2.0, 1.0))


# ---------------------------------------------------------------- totals


def record(start: int, sequence: int, steps: float, gauge: float = 0.0) -> Metrics:
    return Metrics(
        service="stepping-0",
        start=f"stepping-0.{start}",
        sequence=sequence,
        time_s=0.0,
        counters={"steps/Ball": steps},
        gauges={"agents/Ball": gauge},
        histograms={"h": Histogram(bounds=(1.0,), counts=(int(steps), 0), total=steps)},
    )


def test_restart_adds_to_counters_and_replaces_gauges() -> None:
    totals = Totals()
    totals.update(record(1, 5, 100, gauge=12))
    totals.update(record(2, 1, 7, gauge=3))
    assert totals.numbers.counters["steps/Ball"] == 107
    assert totals.numbers.gauges["agents/Ball"] == 3
    assert totals.numbers.histograms["h"].counts == (107, 0)
    assert totals.starts == 2


def test_old_and_repeated_records_are_ignored() -> None:
    totals = Totals()
    totals.update(record(1, 5, 100))
    totals.update(record(2, 2, 7))
    assert not totals.update(record(2, 2, 7))
    assert not totals.update(record(2, 1, 5))
    assert not totals.update(record(1, 9, 500))
    assert totals.numbers.counters["steps/Ball"] == 107


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 50)), max_size=30), st.integers(0, 30))
def test_totals_are_sums_over_incarnations_even_if_the_reader_restarts(work: list[tuple[int, int]], at: int) -> None:
    totals, steps = Totals(), dict.fromkeys(range(1, 5), 0)
    for index, (start, amount) in enumerate(sorted(work)):
        if index == at:
            totals = SAVED.validate_json(SAVED.dump_json(totals))
        before = totals.numbers.counters.get("steps/Ball", 0)
        steps[start] += amount
        totals.update(record(start, index, steps[start]))
        assert totals.numbers.counters["steps/Ball"] >= before
    assert totals.numbers.counters.get("steps/Ball", 0) == sum(steps.values())


def test_gauges_of_services_add_up_except_the_oldest_episode() -> None:
    overview = Overview()
    for number, age in enumerate((10.0, 30.0)):
        registry = Registry(f"stepping-{number}", "1")
        registry.add("steps/Ball", 5)
        registry.gauge("agents/Ball", 6)
        registry.gauge("episode_oldest/Ball", age)
        overview.update(registry.snapshot(0.0))
    numbers = overview.numbers.of("Ball")
    assert overview.behaviors() == ["Ball"]
    assert (numbers.counters["steps"], numbers.gauges["agents"], numbers.gauges["episode_oldest"]) == (10, 12, 30)
