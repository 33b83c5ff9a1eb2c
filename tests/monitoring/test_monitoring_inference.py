"""A run that only plays reports produced steps and nothing about learning."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sparring.pipeline.monitoring import console
from sparring.pipeline.monitoring.intervals import Interval, Intervals
from sparring.pipeline.monitoring.overview import Overview
from tests.monitoring.monitoring_fakes import EPOCH_S, FakeRun, FakeTransport, running_monitor, seconds

Make = Callable[..., Interval]
NOTHING_LEARNED = {"trained": 0, "updates": 0, "lag_mean": None, "lag_max": None, "means": {}, "max_steps": None}


def test_line_of_an_interval_has_steps_and_rewards_but_nothing_of_learning(make_interval: Make) -> None:
    """The rate is that of produced steps."""
    interval = make_interval(training=False, **NOTHING_LEARNED)
    assert console.line(interval) == (
        "Balance  step 24,000  12.5k/s  reward 45.2 +- 12.1 (37 episodes)  open 64 episodes, oldest 812 steps"
    )


def test_long_interval_lists_waiting_stages_only_without_produced_steps(make_interval: Make) -> None:
    """Waiting stages are listed only if no steps are produced."""
    stuck = ["stepping-0 waits for simulators"]
    moving = make_interval(training=False, **NOTHING_LEARNED, produced=70, seconds=60.0)
    assert console.meanwhile(moving, stuck) == (
        "Balance  step 24,000  +70 produced in 60 s  reward 45.2 +- 12.1 (37 episodes)"
        "  open 64 episodes, oldest 812 steps"
    )
    still = make_interval(training=False, **NOTHING_LEARNED, produced=0, seconds=60.0, reward=None, episodes=0)
    assert console.meanwhile(still, stuck) == (
        "Balance  step 24,000  +0 produced in 60 s  no episode ended  open 64 episodes, oldest 812 steps"
        "  stepping-0 waits for simulators"
    )


def test_record_of_an_interval_has_the_training_flag(make_interval: Make) -> None:
    """`metrics.jsonl` has the flag and the rate of production, which is 0 for an interval without length."""
    plain = json.loads(json.dumps(make_interval(training=False, **NOTHING_LEARNED).plain()))
    assert (plain["training"], plain["steps_per_s"], plain["trained"]) == (False, 12_500.0, 0)
    assert json.loads(json.dumps(make_interval().plain()))["training"] is True
    assert make_interval(training=False, seconds=0.0).steps_per_s == 0.0


def test_intervals_and_rates_follow_produced_steps(fake_run: FakeRun) -> None:
    """Each interval has its own episodes, and one without steps is not closed."""
    overview = Overview(FakeRun.services, training=False)
    intervals = Intervals(overview, {"Balance": 1_000}, {})
    intervals.track("Balance", 0.0)
    assert not intervals.progressed("Balance")
    found = []
    for second, steps in enumerate((600, 600, 300, 700), 1):
        fake_run.collect(steps, [float(second)])
        fake_run.update(overview)
        intervals.track("Balance", float(second))
        if intervals.due("Balance"):
            found.append(intervals.close("Balance", float(second)))
    assert [(one.step, one.produced, one.steps_per_s) for one in found] == [
        (1_200, 1_200, 600.0),
        (2_200, 1_000, 500.0),
    ]
    assert [(one.reward, one.episodes) for one in found] == [(1.5, 2), (3.5, 2)]
    assert not any(one.training or one.trained for one in found)


@pytest.mark.anyio
async def test_run_that_plays_is_reported_on_the_console_and_in_files(
    fake_run: FakeRun, transport: FakeTransport, folder: Path
) -> None:
    """Summaries follow produced steps, the status shows them, and the curves are plotted."""
    async with running_monitor(transport, folder, training=False) as monitor:
        for _ in range(5):
            fake_run.collect(5_000, [40.0, 50.0])
            fake_run.publish(transport)
            await seconds(1)
    assert monitor.lines == [
        "Balance  step 10,000  5.0k/s  reward 45 +- 5 (4 episodes)  open 64 episodes, oldest 812 steps",
        "Balance  step 20,000  5.0k/s  reward 45 +- 5 (4 episodes)  open 64 episodes, oldest 812 steps",
        "Balance  step 25,000  3.3k/s  reward 45 +- 5 (2 episodes)  open 64 episodes, oldest 812 steps",
    ]
    assert [(one["step"], one["training"]) for one in monitor.records("interval")] == [
        (10_000, False),
        (20_000, False),
        (25_000, False),
    ]
    assert monitor.read("status.json")["behaviors"]["Balance"]["step"] == 25_000
    assert (folder / "curves.png").is_file()


@pytest.mark.anyio
async def test_run_that_plays_nothing_lists_waiting_stages(
    fake_run: FakeRun, transport: FakeTransport, folder: Path
) -> None:
    async with running_monitor(transport, folder, training=False) as monitor:
        transport.subscriptions["stepping-0"].publish(fake_run.registries["stepping-0"].snapshot(EPOCH_S, "simulators"))
        await seconds(60)
        (line,) = monitor.lines
    assert "  +0 produced in 60 s  no episode ended  " in line
    assert "stepping-0 waits for simulators" in line
    assert "trained" not in line
