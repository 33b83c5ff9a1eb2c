"""Lines, events, curves, summary: what is made of the numbers."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from monitoring_fakes import EPOCH_S, FakeRun, Terminal
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.messages.service import Metrics
from pipeline.monitoring import console, curves, events, prometheus
from pipeline.monitoring.files import RunFiles, to_json
from pipeline.monitoring.intervals import Interval, Intervals
from pipeline.monitoring.overview import Overview
from pipeline.monitoring.pace import Pace
from pipeline.monitoring.status import Windows
from pipeline.monitoring.summary import Figures, Kept, figures, from_status, summary

Make = Callable[..., Interval]


def watched(frequency: int = 24_000) -> tuple[Overview, Intervals]:
    overview = Overview(FakeRun.services)
    return overview, Intervals(overview, {"Balance": frequency}, 50_000, {"Balance": 500_000})


def take(overview: Overview, run: FakeRun) -> None:
    for record in run.records():
        overview.update(record)


# ---------------------------------------------------------------- intervals


def test_an_interval_ends_when_the_steps_pass_a_multiple_of_summary_freq(fake_run: FakeRun) -> None:
    overview, intervals = watched(10_000)
    intervals.track("Balance", 0.0)
    due = []
    for _ in range(5):
        fake_run.collect(4_000, [1.0])
        fake_run.train(4_000)
        take(overview, fake_run)
        due.append(intervals.due("Balance"))
        if due[-1]:
            intervals.close("Balance", 1.0)
    assert due == [False, False, True, False, True]  # at 12,000 and at 20,000


def test_an_interval_holds_what_happened_in_it_and_nothing_earlier(fake_run: FakeRun) -> None:
    overview, intervals = watched()
    intervals.track("Balance", 10.0)
    fake_run.collect(24_000, [100.0, 100.0], length=50)
    fake_run.train(24_000, lag=4, entropy=9.0)
    take(overview, fake_run)
    intervals.close("Balance", 12.0)
    fake_run.collect(12_000, [1.0, 3.0], length=10)
    fake_run.train(12_000, lag=1, entropy=2.0)
    take(overview, fake_run)
    interval = intervals.close("Balance", 16.0)
    assert (interval.step, interval.trained, interval.seconds, interval.steps_per_s) == (36_000, 12_000, 4.0, 3_000.0)
    assert (interval.reward, interval.reward_deviation, interval.episodes) == (2.0, 1.0, 2)
    assert (interval.episode_length, interval.lag_mean, interval.lag_max, interval.lag) == (10, 1, 1, {"1": 12_000})
    assert interval.means["Policy/Entropy"] == 2.0
    assert interval.books == {"produced": 36_000, "trained": 36_000, "ghost": 0, "stale": 0, "lost": 0, "open": 0}


def test_a_restarted_service_never_makes_an_interval_go_back(fake_run: FakeRun) -> None:
    overview, intervals = watched()
    intervals.track("Balance", 0.0)
    fake_run.collect(24_000, [5.0])
    fake_run.train(24_000)
    take(overview, fake_run)
    intervals.close("Balance", 1.0)
    for service in ("stepping-0", "assembly", "learning-Balance"):
        fake_run.restart(service)
    fake_run.collect(1_000, [7.0])
    fake_run.train(1_000)
    take(overview, fake_run)
    interval = intervals.close("Balance", 2.0)
    assert (interval.trained, interval.produced, interval.updates, interval.episodes) == (1_000, 1_000, 1, 1)
    assert interval.reward == 7.0


def test_steps_that_a_crash_rolled_back_are_summarised_again(fake_run: FakeRun) -> None:
    overview, intervals = watched(10_000)
    intervals.track("Balance", 0.0)
    fake_run.train(32_000)
    take(overview, fake_run)
    intervals.close("Balance", 1.0)
    fake_run.trained = 25_000  # the learner came back from its recovery checkpoint
    fake_run.train(1_000)
    take(overview, fake_run)
    intervals.track("Balance", 2.0)
    assert overview.step("Balance") == 26_000
    assert not intervals.due("Balance")
    fake_run.train(5_000)
    take(overview, fake_run)
    intervals.track("Balance", 3.0)
    assert intervals.due("Balance")
    assert overview.trained("Balance") == 38_000


def test_intervals_go_on_after_a_restart_of_the_monitor(fake_run: FakeRun) -> None:
    overview, intervals = watched()
    intervals.track("Balance", 100.0)
    fake_run.train(24_000)
    take(overview, fake_run)
    intervals.close("Balance", 102.0)
    state = json.loads(json.dumps([overview.state(), intervals.state()]))
    fake_run.train(6_000)  # nobody watches
    again, continued = watched()
    again.restore(state[0])
    continued.restore(state[1], gap_s=3.0)
    take(again, fake_run)
    interval = continued.close("Balance", 106.0)
    assert (interval.trained, interval.seconds, interval.lag_max) == (6_000, 4.0, 1.0)


def test_a_pause_of_the_run_is_not_part_of_an_interval(fake_run: FakeRun) -> None:
    overview, intervals = watched()
    intervals.track("Balance", 100.0)
    fake_run.train(24_000)
    take(overview, fake_run)
    _, resumed = watched()
    resumed.restore(intervals.state(), gap_s=86_400.0)
    assert resumed.peek("Balance", 86_504.0).seconds == pytest.approx(4.0)


def test_a_run_that_only_acts_is_measured_in_steps_produced(fake_run: FakeRun) -> None:
    overview = Overview(FakeRun.services, training=False)
    intervals = Intervals(overview, {"Balance": 1_000}, 50_000, {})
    intervals.track("Balance", 0.0)
    fake_run.collect(1_500, [3.0])
    take(overview, fake_run)
    assert intervals.due("Balance")
    assert intervals.close("Balance", 1.0).step == 1_500


# ---------------------------------------------------------------- console


def test_the_line_of_an_interval(make_interval: Make) -> None:
    assert console.line(make_interval()) == (
        "Balance  step 24,000  12.3k/s  reward 45.2 +- 12.1 (37 episodes)  updates 2  lag 1.0/1  entropy 1.42"
        "  open 64 episodes, oldest 812 steps"
    )


def test_a_line_without_episodes_says_so_with_those_under_way_and_their_age(make_interval: Make) -> None:
    interval = make_interval(
        reward=None, reward_deviation=None, episodes=0, lag_mean=None, means={}, open_episodes=1, oldest=1
    )
    assert console.line(interval) == (
        "Balance  step 24,000  12.3k/s  no episode ended  updates 2  open 1 episode, oldest 1 step"
    )


def test_a_line_for_teams_shows_their_reward(make_interval: Make) -> None:
    assert "  group reward 0.5  " in console.line(make_interval(group_reward=0.5))


def test_a_long_interval_says_what_moves_and_what_waits(make_interval: Make) -> None:
    stuck = ["learning-Balance waits for segments", "stepping-0 is silent"]
    still = make_interval(trained=0, produced=0, seconds=60.0, reward=None, episodes=0)
    assert console.meanwhile(still, stuck) == (
        "Balance  step 24,000 of 500,000  +0 trained and +0 produced in 60 s  no episode ended"
        "  open 64 episodes, oldest 812 steps  learning-Balance waits for segments  stepping-0 is silent"
    )
    assert "waits for" not in console.meanwhile(make_interval(), stuck)


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0"), (999.4, "999"), (999.6, "1.0k"), (12_345, "12.3k"), (2_500_000, "2.50M")]
)
def test_rates_are_short(value: float, shown: str) -> None:
    assert console.rate(value) == shown


def test_a_terminal_gets_bars_and_keeps_the_lines() -> None:
    terminal = Terminal()
    shown = console.display(terminal, lambda: 1.0)
    shown.progress("Balance", 10_000, 500_000, 12_300.0)
    shown.line("[Balance]  step 24,000")
    shown.close()
    assert "10000/500000" in terminal.getvalue()
    assert "12.3k/s" in terminal.getvalue()
    assert "[Balance]  step 24,000\n" in terminal.getvalue()


# ---------------------------------------------------------------- TensorBoard


def read_back(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def drawn(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(one.step, one.value) for one in read_back(folder).Scalars(tag)]


def test_tensorboard_reads_the_names_that_ml_agents_users_know(folder: Path, make_interval: Make) -> None:
    means = {
        "Losses/Policy Loss": 0.25,
        "Losses/Value Loss": 0.5,
        "Policy/Beta": 0.005,
        "Policy/Entropy": 1.42,
        "Policy/Epsilon": 0.2,
        "Policy/Extrinsic Value Estimate": 3.0,
        "Policy/Learning Rate": 3e-4,
        "wait": 1.0,
    }
    interval = make_interval(means=means, group_reward=7.0)
    RunFiles(folder, EPOCH_S).add_events("Balance", events.scalars(interval), interval.step, interval.time_s)
    tags = read_back(folder / "Balance").Tags()["scalars"]
    own = {tag for tag in tags if not tag.startswith("Pipeline/")}
    assert own == {
        "Environment/Cumulative Reward",
        "Environment/Episode Length",
        "Environment/Group Cumulative Reward",
        "Is Training",
        "Losses/Policy Loss",
        "Losses/Value Loss",
        "Policy/Beta",
        "Policy/Entropy",
        "Policy/Epsilon",
        "Policy/Extrinsic Reward",
        "Policy/Extrinsic Value Estimate",
        "Policy/Learning Rate",
    }
    assert drawn(folder / "Balance", "Losses/Policy Loss") == [(24_000, 0.25)]
    assert drawn(folder / "Balance", "Is Training") == [(24_000, 1.0)]


def test_without_episodes_no_reward_is_drawn(make_interval: Make) -> None:
    assert "Environment/Cumulative Reward" not in events.scalars(make_interval(reward=None))


def test_tensorboard_forgets_what_was_rolled_back(folder: Path) -> None:
    files = RunFiles(folder, EPOCH_S)
    for step, value in ((10, 1.0), (20, 2.0), (30, 3.0), (15, 1.5), (25, 2.5)):
        files.add_events("Balance", {"a/b": value}, step, EPOCH_S + step)
    assert drawn(folder / "Balance", "a/b") == [(10, 1.0), (15, 1.5), (25, 2.5)]


def test_a_restarted_monitor_goes_on_in_a_file_of_its_own(folder: Path) -> None:
    RunFiles(folder, EPOCH_S).add_events("Balance", {"a/b": 1.0}, 10, EPOCH_S)
    RunFiles(folder, EPOCH_S + 5).add_events("Balance", {"a/b": 2.0}, 20, EPOCH_S + 5)
    assert len(list((folder / "Balance").iterdir())) == 2
    assert drawn(folder / "Balance", "a/b") == [(10, 1.0), (20, 2.0)]


def test_every_record_of_an_event_file_states_its_length() -> None:
    data = events.opening(EPOCH_S)
    (length,) = struct.unpack_from("<Q", data)
    assert len(data) == 8 + 4 + length + 4


# ---------------------------------------------------------------- curves and lines


def test_a_later_line_replaces_those_it_goes_back_behind(make_interval: Make) -> None:
    lines = [make_interval(step=step).plain() for step in (10, 20, 30, 15, 25)]
    kept = curves.lineages([{"type": "service"}, *lines])
    assert [line["step"] for line in kept["Balance"]] == [10, 15, 25]


def test_the_curves_are_a_picture(make_interval: Make) -> None:
    lines = [
        make_interval(behavior=behavior, step=step, means={"Losses/Value Loss": 1.0 / (step + 1)}).plain()
        for behavior in ("Balance", "_Goal $x$")
        for step in (10, 20)
    ]
    lines.append(make_interval(step=30, reward=None, reward_deviation=None, lag_mean=None).plain())
    picture = curves.picture(curves.lineages(lines), "run $1")
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert curves.picture({}, "nothing yet").startswith(b"\x89PNG")


def test_half_a_line_of_a_dead_monitor_harms_nobody(folder: Path, make_interval: Make) -> None:
    line = json.dumps(make_interval().plain())
    (folder / "metrics.jsonl").write_text(line + "\n" + line[: line.index("}") + 1])
    files = RunFiles(folder, EPOCH_S)
    files.append(make_interval(step=48_000).plain())
    files.draw("run")
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 48_000
    assert (folder / "curves.png").exists()


def test_json_has_null_where_there_is_no_number() -> None:
    assert to_json({"a": [math.nan, 1.0], "b": math.inf}) == '{"a": [null, 1.0], "b": null}'


# ---------------------------------------------------------------- status, summary, pace, Prometheus


def test_the_line_of_a_service_tells_queues_waits_and_latency(fake_run: FakeRun) -> None:
    overview, windows = Overview(), Windows()
    fake_run.collect(1_000, [1.0])
    take(overview, fake_run)
    windows.report("stepping-0", overview.services["stepping-0"], EPOCH_S)
    fake_run.collect(500, [1.0])
    take(overview, fake_run)
    line = windows.report("stepping-0", overview.services["stepping-0"], EPOCH_S + 10)
    assert (line["seconds"], line["waiting_for"], line["counters"]["steps/Balance"]) == (10.0, "segments", 500)
    assert line["queues"] == {"steps": {"messages": 3, "steps": 300, "capacity": 64, "waits": 0, "waited_s": 0}}
    latency = line["histograms"]["action_latency_s"]
    assert latency["count"] == 100
    assert latency["p50"] == pytest.approx(0.0005, rel=0.12)
    assert latency["p99"] == pytest.approx(0.0005, rel=0.12)
    assert latency["max"] == pytest.approx(0.004, rel=0.12)


def collected(fake_run: FakeRun) -> Figures:
    overview = Overview()
    fake_run.collect(25_000, [1.0])
    fake_run.train(24_000)
    take(overview, fake_run)
    return figures(overview, "Balance", 12_300.0)


def test_the_summary_has_exactly_the_fields_of_the_contract(fake_run: FakeRun) -> None:
    content = summary(
        run_id="r1",
        status="completed",
        wall_s=170.25,
        error=None,
        behaviors={"Balance": collected(fake_run)},
        kept={"Balance": Kept(checkpoint="Balance/Balance-24000.safetensors", weights_sha256="ab")},
    )
    assert content == {
        "run_id": "r1",
        "status": "completed",
        "wall_s": 170.25,
        "error": None,
        "behaviors": {
            "Balance": {
                "steps": 24_000,
                "steps_per_s": 12_300.0,
                "updates": 1,
                "episodes": 37,
                "reward_mean_last100": 45.0,
                "books": {"produced": 25_000, "trained": 24_000, "ghost": 0, "stale": 0, "lost": 0, "open": 1_000},
                "lag": {"mean": 1.0, "max": 1.0},
                "checkpoint": "Balance/Balance-24000.safetensors",
                "weights_sha256": "ab",
            }
        },
    }


def test_a_behavior_of_which_nothing_was_heard_still_has_every_field() -> None:
    content = summary(
        run_id="r1",
        status="failed",
        wall_s=1.0,
        error="stepping-0: no simulators",
        behaviors={"Balance": figures(Overview(), "Balance", 0.0)},
        kept={},
    )
    entry = json.loads(json.dumps(content, allow_nan=False))["behaviors"]["Balance"]
    assert entry["lag"] == {"mean": None, "max": None}
    assert (entry["steps"], entry["checkpoint"], sum(entry["books"].values())) == (0, None, 0)


def test_the_figures_tell_whether_the_books_balance(fake_run: FakeRun) -> None:
    assert collected(fake_run).balanced
    fake_run.produced += 1
    assert not collected_again(fake_run).balanced


def collected_again(fake_run: FakeRun) -> Figures:
    overview = Overview()
    fake_run.registries["coordination"].gauge("books.produced/Balance", fake_run.produced)
    take(overview, fake_run)
    return figures(overview, "Balance", 0.0)


def test_the_figures_can_be_read_from_the_status(fake_run: FakeRun) -> None:
    from dataclasses import asdict

    one = collected(fake_run)
    status = json.loads(json.dumps({"behaviors": {"Balance": {"figures": asdict(one)}}}))
    assert from_status(status) == {"Balance": one}


@pytest.mark.parametrize(("status", "error"), [("done", None), ("failed", None)])
def test_a_summary_that_makes_no_sense_is_refused(status: Any, error: str | None) -> None:
    with pytest.raises(ValueError, match=r"got .*; "):
        summary(run_id="r", status=status, wall_s=1.0, error=error, behaviors={}, kept={})


def test_the_rate_is_of_the_recent_past_and_the_mean_leaves_pauses_out() -> None:
    pace = Pace()
    for second in range(31):
        pace.look(float(second), max(0, second - 9) * 100)
    assert pace.recent == pytest.approx(100.0)
    assert pace.mean(2_100) == pytest.approx(100.0)
    again = Pace.restored(pace.state())
    again.look(5_000.0, 2_100)
    assert again.mean(2_100) == pytest.approx(100.0)
    assert again.recent == 0.0


@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(0, 1000)), max_size=40))
def test_rates_are_never_negative_whatever_the_looks(looks: list[tuple[float, int]]) -> None:
    pace, clock_s, produced = Pace(), 0.0, 0
    for seconds, steps in looks:
        clock_s, produced = clock_s + seconds, produced + steps
        pace.look(clock_s, produced)
        assert pace.recent >= 0
        assert pace.mean(produced) >= 0


def test_prometheus_reads_names_labels_and_buckets(fake_run: FakeRun) -> None:
    overview = Overview()
    fake_run.collect(1_000, [1.0])
    fake_run.train(800)
    take(overview, fake_run)
    lines = prometheus.text('run "1"', overview.services, overview.behaviors()).splitlines()
    labels = r'run="run \"1\"",service="learning-Balance",behavior="Balance"'
    assert f"sparring_trained_total{{{labels}}} 800.0" in lines
    assert f'sparring_lag_bucket{{{labels},le="0"}} 0' in lines
    assert f'sparring_lag_bucket{{{labels},le="+Inf"}} 800' in lines
    assert f"sparring_losses_policy_loss_count_total{{{labels}}} 10.0" in lines
    assert len({line for line in lines if line.startswith("# TYPE")}) == sum(
        line.startswith("# TYPE") for line in lines
    )


def test_an_unknown_service_is_taken_in() -> None:
    overview = Overview()
    assert overview.update(Metrics(service="new", start="new.1", sequence=1, time_s=0.0))
    assert list(overview.services) == ["new"]
