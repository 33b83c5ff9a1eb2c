"""Intervals and rates between two readings of the counters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.pipeline.messages.metrics import Metrics
from sparring.pipeline.monitoring.intervals import Intervals, Pace
from sparring.pipeline.monitoring.overview import Overview
from tests.monitoring.monitoring_fakes import FakeRun


def tracked(frequency: int = 24_000) -> tuple[Overview, Intervals]:
    overview = Overview(FakeRun.services)
    return overview, Intervals(overview, {"Balance": frequency}, {"Balance": 500_000})


def advance(
    run: FakeRun,
    overview: Overview,
    steps: int,
    returns: list[float],
    length: int = 100,
    lag: int = 1,
    entropy: float = 1.42,
) -> None:
    """Collects and trains steps, and updates the overview."""
    run.collect(steps, returns, length)
    run.train(steps, lag, entropy)
    run.update(overview)


def test_interval_ends_when_steps_pass_a_multiple_of_summary_freq(fake_run: FakeRun) -> None:
    overview, intervals = tracked(10_000)
    intervals.track("Balance", 0.0)
    due = []
    for _ in range(5):
        advance(fake_run, overview, 4_000, returns=[1.0])
        due.append(intervals.due("Balance"))
        if due[-1]:
            intervals.close("Balance", 1.0)
    assert due == [False, False, True, False, True]  # at 12,000 and at 20,000


def test_interval_contains_nothing_from_before_it(fake_run: FakeRun) -> None:
    overview, intervals = tracked()
    intervals.track("Balance", 10.0)
    advance(fake_run, overview, 24_000, returns=[100.0, 100.0], length=50, lag=4, entropy=9.0)
    intervals.close("Balance", 12.0)
    advance(fake_run, overview, 12_000, returns=[1.0, 3.0], length=10, lag=1, entropy=2.0)
    interval = intervals.close("Balance", 16.0)
    assert (interval.step, interval.trained, interval.seconds, interval.steps_per_s) == (36_000, 12_000, 4.0, 3_000.0)
    assert (interval.reward, interval.reward_deviation, interval.episodes) == (2.0, 1.0, 2)
    assert (interval.episode_length, interval.lag_mean, interval.lag_max) == (10, 1, 1)
    assert interval.means["Policy/Entropy"] == 2.0
    assert interval.step_counts == {"produced": 36_000, "trained": 36_000, "ghost": 0, "stale": 0, "lost": 0, "open": 0}


def test_statistics_of_simulators_are_in_the_intervals_of_every_behavior(fake_run: FakeRun) -> None:
    """Means, sums and latest values have the names of the simulator and stay apart from those of behaviors."""
    overview, intervals = tracked()
    intervals.track("Balance", 10.0)
    stepping = fake_run.registries["stepping-0"]
    for average, total in ((1.0, 5.0), (3.0, 2.0)):
        stepping.observe_moments("simulator.Goals/Balance", [average, average])
        stepping.add("simulator.Shots/Balance.total", total)
        stepping.gauge("simulator.Level", average)
        advance(fake_run, overview, 24_000, returns=[1.0])
        interval = intervals.close("Balance", 12.0)
        assert interval.simulators == {"Goals/Balance": average, "Shots/Balance": total, "Level": average}
    assert not any("simulator" in name for name in (*interval.means, *interval.gauges))
    assert overview.behaviors() == ["Balance"]
    advance(fake_run, overview, 24_000, returns=[1.0])
    assert intervals.close("Balance", 14.0).simulators == {"Shots/Balance": 0.0, "Level": 3.0}


def test_restarted_service_never_reduces_an_interval(fake_run: FakeRun) -> None:
    overview, intervals = tracked()
    intervals.track("Balance", 0.0)
    advance(fake_run, overview, 24_000, returns=[5.0])
    intervals.close("Balance", 1.0)
    for service in ("stepping-0", "assembly", "learning-Balance"):
        fake_run.restart(service)
    advance(fake_run, overview, 1_000, returns=[7.0])
    interval = intervals.close("Balance", 2.0)
    assert (interval.trained, interval.produced, interval.updates, interval.episodes) == (1_000, 1_000, 1, 1)
    assert interval.reward == 7.0


def test_steps_rolled_back_by_a_crash_are_summarized_again(fake_run: FakeRun) -> None:
    overview, intervals = tracked(10_000)
    intervals.track("Balance", 0.0)
    fake_run.train(32_000)
    fake_run.update(overview)
    intervals.close("Balance", 1.0)
    fake_run.trained = 25_000  # the learner came back from its recovery checkpoint
    fake_run.train(1_000)
    fake_run.update(overview)
    intervals.track("Balance", 2.0)
    assert overview.step("Balance") == 26_000
    assert not intervals.due("Balance")
    fake_run.train(5_000)
    fake_run.update(overview)
    intervals.track("Balance", 3.0)
    assert intervals.due("Balance")
    assert overview.trained("Balance") == 38_000


def test_intervals_continue_after_a_restart_of_the_monitor(fake_run: FakeRun) -> None:
    overview, intervals = tracked()
    intervals.track("Balance", 100.0)
    fake_run.train(24_000)
    fake_run.update(overview)
    intervals.close("Balance", 102.0)
    services, starts = dict(overview.services), dict(intervals.starts)
    fake_run.train(6_000)  # while no monitor runs
    again, continued = tracked()
    again.restore(services)
    continued.restore(starts, gap_s=3.0)
    fake_run.update(again)
    interval = continued.close("Balance", 106.0)
    assert (interval.trained, interval.seconds, interval.lag_max) == (6_000, 4.0, 1.0)


def test_pause_of_the_run_is_not_part_of_an_interval(fake_run: FakeRun) -> None:
    overview, intervals = tracked()
    intervals.track("Balance", 100.0)
    fake_run.train(24_000)
    fake_run.update(overview)
    _, resumed = tracked()
    resumed.restore(intervals.starts, gap_s=86_400.0)
    assert resumed.peek("Balance", 86_504.0).seconds == pytest.approx(4.0)


def test_run_that_only_plays_is_measured_in_produced_steps(fake_run: FakeRun) -> None:
    overview = Overview(FakeRun.services, training=False)
    intervals = Intervals(overview, {"Balance": 1_000}, {})
    intervals.track("Balance", 0.0)
    fake_run.collect(1_500, [3.0])
    fake_run.update(overview)
    assert intervals.due("Balance")
    assert intervals.close("Balance", 1.0).step == 1_500


def test_rate_is_recent_and_mean_excludes_pauses() -> None:
    pace = Pace()
    for second in range(31):
        pace.look(float(second), max(0, second - 9) * 100)
    assert pace.recent == pytest.approx(100.0)
    assert pace.mean(2_100) == pytest.approx(100.0)
    again = Pace(pace.active_s)
    again.look(5_000.0, 2_100)
    assert again.mean(2_100) == pytest.approx(100.0)
    assert again.recent == 0.0


@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(0, 1000)), max_size=40))
def test_rates_are_never_negative(looks: list[tuple[float, int]]) -> None:
    pace, clock_s, produced = Pace(), 0.0, 0
    for seconds, steps in looks:
        clock_s, produced = clock_s + seconds, produced + steps
        pace.look(clock_s, produced)
        assert pace.recent >= 0
        assert pace.mean(produced) >= 0


def test_unknown_service_is_added_to_the_overview() -> None:
    overview = Overview()
    assert overview.update(Metrics(service="new", start="new.1", sequence=1, time_s=0.0))
    assert list(overview.services) == ["new"]
