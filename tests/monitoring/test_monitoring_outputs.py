"""Output of the monitor: console lines, TensorBoard, curves and Prometheus."""

from __future__ import annotations

import json
import logging
import math
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from matplotlib.axes import Axes

from sparring.pipeline.monitoring import console, curves, logs
from sparring.pipeline.monitoring.files import RunFiles, to_json
from sparring.pipeline.monitoring.intervals import Interval
from sparring.pipeline.monitoring.metrics import SIMULATOR
from sparring.pipeline.monitoring.overview import Overview
from sparring.pipeline.monitoring.prometheus import HELP, UNKNOWN, Exporter
from tests.monitoring.monitoring_fakes import FakeRun

Make = Callable[..., Interval]
Patch = pytest.MonkeyPatch

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


# ---------------------------------------------------------------- console


def test_the_line_of_an_interval(make_interval: Make) -> None:
    assert console.line(make_interval()) == (
        "Balance  step 24,000 of 500,000  12.3k/s  ETA 39 s  reward 45.2 +- 12.1 (37 episodes)  updates 2"
        "  lag 1.0/1  entropy 1.42  open 64 episodes, oldest 812 steps"
    )


def test_line_shows_the_kl_divergence_after_the_lag(make_interval: Make) -> None:
    means = {"Update/Approximate KL": 0.00812, "Policy/Entropy": 1.42}
    assert "  lag 1.0/1  kl 0.00812  entropy 1.42  " in console.line(make_interval(means=means))


def test_line_without_ended_episodes_shows_open_ones_and_their_age(make_interval: Make) -> None:
    interval = make_interval(
        reward=None, reward_deviation=None, episodes=0, lag_mean=None, means={}, open_episodes=1, oldest=1
    )
    assert console.line(interval) == (
        "Balance  step 24,000 of 500,000  12.3k/s  ETA 39 s  no episode ended  updates 2  open 1 episode, oldest 1 step"
    )


def test_line_of_a_group_behavior_shows_the_group_reward(make_interval: Make) -> None:
    assert "  group reward 0.5  " in console.line(make_interval(group_reward=0.5))


def test_long_interval_shows_progress_and_waiting_stages(make_interval: Make) -> None:
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


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0 s"), (59.4, "59 s"), (310, "5 min 10 s"), (3_600, "1 h"), (12_030, "3 h 20 min"), (187_200, "2 d 4 h")],
)
def test_durations_have_two_units(seconds: float, shown: str) -> None:
    assert console.duration(seconds) == shown


def test_line_of_a_game_without_ends_shows_the_reward_per_step(make_interval: Make) -> None:
    interval = make_interval(reward=None, episodes=0, means={"Environment/Reward per Step": 0.0123})
    assert "  no episode ended, reward per step 0.0123  " in console.line(interval)
    assert "  no episode ended, reward per step 0.0123  " in console.meanwhile(interval, ())


@dataclass
class Screen:
    """A terminal of one column of lines, to which several processes write."""

    master: int
    slave: int

    def rows(self) -> list[str]:
        """Returns the rows that the terminal shows now."""
        os.write(self.slave, b"\0")
        found = b""
        while not found.endswith(b"\0"):
            found += os.read(self.master, 4096)
        text = found[:-1].decode().replace("\x1b[?7l", "").replace("\x1b[?7h", "").replace("\r\n", "\n")
        return [row.rpartition("\r\x1b[K")[2] for row in text.split("\n")]


@pytest.fixture
def screen() -> Iterator[Screen]:
    master, slave = pty.openpty()
    yield Screen(master, slave)
    os.close(master)
    os.close(slave)


def test_lines_of_two_writers_on_a_terminal_are_never_over_each_other(folder: Path, screen: Screen) -> None:
    """The monitor shows lines and progress, and the supervisor logs to the same terminal."""
    monitor = console.Display(logs.Terminal(screen.slave))
    supervisor = logs.Terminal(screen.slave)
    monitor.progress(["Balance step 10,000 of 500,000", "Walk step 3"])
    supervisor.handle(logging.makeLogRecord({"levelno": logging.WARNING, "msg": "failed"}))
    monitor.progress(["Balance step 20,000 of 500,000", "Walk step 4"])
    monitor.line("Balance  step 24,000")
    monitor.progress(["Balance step 30,000 of 500,000", "Walk step 5"])
    shown = screen.rows()
    monitor.line("end")
    monitor.close()
    assert shown == ["failed", "Balance  step 24,000", "Balance step 30,000 of 500,000   Walk step 5"]
    assert screen.rows() == ["end", ""]


def test_progress_is_for_terminals_only(tmp_path: Path) -> None:
    with (tmp_path / "piped").open("wb") as file:
        shown = console.Display(logs.Terminal(file.fileno()))
        shown.line("Balance  step 24,000")
        shown.progress(["Balance step 30,000"])
    assert (tmp_path / "piped").read_text() == "Balance  step 24,000\n"


def test_names_of_a_simulator_cannot_command_a_terminal(screen: Screen, make_interval: Make) -> None:
    shown = console.Display(logs.Terminal(screen.slave))
    name = "Ball\x1b]0;owned\x07\x9b2J\r"
    shown.line(console.line(make_interval(behavior=name)))
    shown.progress([console.progress(make_interval(behavior=name), 1.0)])
    shown_name = r"Ball\x1b]0;owned\x07\x9b2J\r"
    assert [row.partition(" ")[0] for row in screen.rows()] == [shown_name, shown_name]


def test_console_that_nothing_reads_blocks_no_caller() -> None:
    reader, writer = os.pipe()
    shown = console.Display(logs.LineWriter(logs.Terminal(writer), waiting=10))
    for _ in range(2_000):
        shown.line("x" * 100)  # more than a pipe holds
    os.close(reader)
    shown.close()
    os.close(writer)


def test_closed_console_raises_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    shown = console.Display(logs.LineWriter(logs.Terminal(writer)))
    for _ in range(3):
        shown.line("Balance  step 24,000")
        shown.progress(["Balance step 24,000"])
    shown.close()
    os.close(writer)


# ---------------------------------------------------------------- curves and lines


def test_line_of_an_earlier_step_replaces_later_ones(make_interval: Make) -> None:
    lines = [make_interval(step=step).plain() for step in (10, 20, 30, 15, 25)]
    damaged = [None, [], {"type": "interval"}, {"type": "interval", "behavior": "Balance", "step": "10"}]
    kept = curves.lineages([{"type": "service"}, *lines, *damaged])
    assert [line["step"] for line in kept["Balance"]] == [10, 15, 25]


def test_curves_are_a_png(make_interval: Make) -> None:
    lines = [
        make_interval(behavior=behavior, step=step, means={"Losses/Value Loss": 1.0 / (step + 1)}).plain()
        for behavior in ("Balance", "_Goal $x$")
        for step in (10, 20)
    ]
    lines.append(make_interval(step=30, reward=None, reward_deviation=None, lag_mean=None).plain())
    picture = curves.picture(curves.lineages(lines), "run $1")
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")


def test_curves_do_not_depend_on_the_windows_of_the_user() -> None:
    code = "from sparring.pipeline.monitoring import pictures; print(pictures.png(pictures.figure(1, 1))[1:4])"
    environment = os.environ | {"MPLBACKEND": "nowhere"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout) == (0, "b'PNG'\n"), found.stderr


def test_pictures_leave_no_folder_where_matplotlib_cannot_write_its_own(tmp_path: Path) -> None:
    """A service ends without the hook at exit that would remove it."""
    code = "import os; from sparring.pipeline.monitoring.pictures import *; png(figure(1, 1)); os._exit(0)"
    away = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"), "/proc/nowhere")
    environment = {key: value for key, value in os.environ.items() if key != "MPLCONFIGDIR"} | away
    command = [sys.executable, "-W", "ignore", "-c", code]
    subprocess.run(command, env=environment | {"TMPDIR": str(tmp_path)}, timeout=60, check=True)
    assert not list(tmp_path.iterdir())


def titles(monkeypatch: Patch, intervals: list[Interval]) -> list[str]:
    """Returns the titles of the panels in a picture of these intervals."""
    found: list[str] = []
    monkeypatch.setattr(Axes, "set_title", lambda _axes, title, **_: found.append(title))
    curves.picture(curves.lineages(one.plain() for one in intervals), "run")
    return found


def test_curves_of_self_play_begin_with_rating_and_win_rate(make_interval: Make, monkeypatch: Patch) -> None:
    means = {"Self-play/ELO": 1250.0, "Self-play/Opponents ELO": 1200.0, "Self-play/Win Rate": 0.5}
    own = {"Policy/Entropy": 1.4, "Update/Approximate KL": 0.01, "Environment/Reward per Step": 0.1}
    shown = titles(monkeypatch, [make_interval(means={**means, **own})])
    assert shown[:3] == ["Rating", "Win rate", "Cumulative reward"]
    assert {"Policy entropy", "Change of policy by an update", "Speed (steps/s)", "Reward per step"} < set(shown)


def test_curves_have_no_empty_panel(make_interval: Make, monkeypatch: Patch) -> None:
    shown = titles(
        monkeypatch, [make_interval(reward=None, episode_length=None, lag_mean=None, lag_max=None, means={})]
    )
    assert shown == ["Speed (steps/s)"]


def test_run_without_intervals_leaves_no_picture(folder: Path) -> None:
    RunFiles(folder).plot_curves("a tournament")
    assert not (folder / "curves.png").exists()


def test_incomplete_line_of_a_dead_monitor_is_skipped(folder: Path, make_interval: Make) -> None:
    line = json.dumps(make_interval().plain())
    (folder / "metrics.jsonl").write_text(line + "\n" + "[" * 10_000 + "\n" + line[: line.index("}") + 1])
    files = RunFiles(folder)
    files.intervals.append(to_json(make_interval(step=48_000).plain()))
    files.plot_curves("run")
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 48_000
    assert (folder / "curves.png").exists()


def test_json_has_null_where_there_is_no_number() -> None:
    assert to_json({"a": [math.nan, 1.0], "b": math.inf}) == b'{"a":[null,1.0],"b":null}'


# ---------------------------------------------------------------- Prometheus


def exported(fake_run: FakeRun, run_id: str = "r1") -> list[str]:
    overview = Overview()
    fake_run.update(overview)
    exporter = Exporter(run_id)
    exporter.update(overview.services, overview.behaviors(), ["simulators"])
    return exporter.text().decode().splitlines()


def test_prometheus_reads_names_labels_and_buckets(fake_run: FakeRun) -> None:
    fake_run.collect(1_000, [1.0])
    fake_run.train(800)
    lines = exported(fake_run, 'run "1"')
    labels = r'behavior="Balance",{}run="run \"1\"",service="learning-Balance"'
    assert f"sparring_trained_total{{{labels.format('')}}} 800.0" in lines
    bucket = labels.format('le="{}",')
    assert f"sparring_lag_bucket{{{bucket.format('0')}}} 0.0" in lines
    assert f"sparring_lag_bucket{{{bucket.format('+Inf')}}} 800.0" in lines
    assert f'sparring_statistic_count_total{{{labels.format("")},statistic="Losses/Policy Loss"}} 10.0' in lines
    assert 'sparring_stalled{root="simulators",run="run \\"1\\""} 1.0' in lines
    types = [line for line in lines if line.startswith("# TYPE")]
    assert len(set(types)) == len(types)


def test_prometheus_has_a_help_text_for_each_family(fake_run: FakeRun) -> None:
    fake_run.collect(1_000, [1.0])
    fake_run.train(800)
    lines = exported(fake_run)
    helps = [line.split(" ", 3) for line in lines if line.startswith("# HELP")]
    assert len(helps) == sum(line.startswith("# TYPE") for line in lines)
    assert [words[2] for words in helps if words[3] == UNKNOWN] == []


def test_the_dashboard_asks_for_families_that_exist() -> None:
    asked = set(re.findall(r"sparring_([a-z_0-9]+)\{", DASHBOARD.read_text()))
    assert len(asked) > 15
    families = {re.sub("_(total|bucket)$", "", name) for name in asked}
    assert families - HELP.keys() == {"lag_sum", "lag_count"}  # of a histogram


def test_prometheus_labels_queues_and_statistics_instead_of_naming_families_after_them(fake_run: FakeRun) -> None:
    """Names that differ in punctuation alone stay apart."""
    assembly, stepping = fake_run.registries["assembly"], fake_run.registries["stepping-0"]
    assembly.queue("segments:Balance.out", messages=1, steps=64, capacity=256, waits=0, waited_s=0.0)
    assembly.queue("steps", messages=2, steps=9, capacity=64, waits=0, waited_s=0.0)
    for name, value in (("goals/left", 1.0), ("goals left", 2.0)):
        stepping.add(f"{SIMULATOR}{name}.total", value)
        stepping.gauge(SIMULATOR + name, value)
    stepping.add("faults.malformed", 3)
    lines = exported(fake_run)
    run, own = 'run="r1",service="assembly"', 'run="r1",service="stepping-0"'
    assert f'sparring_queue_steps{{behavior="Balance",end="sender",queue="segments",{run}}} 64.0' in lines
    assert f'sparring_queue_messages{{end="receiver",queue="steps",{run}}} 2.0' in lines
    for name, value in (("goals/left", 1.0), ("goals left", 2.0)):
        assert f'sparring_simulator_statistic_accumulated_total{{{own},statistic="{name}"}} {value}' in lines
        assert f'sparring_simulator_statistic{{{own},statistic="{name}"}} {value}' in lines
    assert f'sparring_faults_by_code_total{{code="malformed",{own}}} 3.0' in lines
