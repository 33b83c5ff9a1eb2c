"""What a run has written is read once, in parts, and again where it is zoomed."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparring.services.page.history import History, lines_between, samples
from tests.page.page_runs import interval, write_run


def test_history_goes_on_where_it_ended_and_skips_what_is_no_interval(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [interval(100), {"behavior": "Walk", "step": 1}, interval(200)])
    history = History(folder)
    history.refresh()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('[]\n{"type": "interval"}\n7\nnot json\n' + "[" * 10_000 + "\n" + json.dumps(interval(300)) + "\n{")
    history.refresh()
    history.refresh()
    assert history.query("Walk", ["reward"], "step", -math.inf, math.inf, 100).axes[:, 0].tolist() == [100, 200, 300]


def test_long_run_is_shown_by_samples_until_it_is_read_and_each_look_reads_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [interval(step, behavior) for step in range(100, 100_000, 100) for behavior in ("Walk", "Run")]
    now = iter(range(10**9))
    monkeypatch.setattr("sparring.services.page.history.time.monotonic", lambda: next(now))
    monkeypatch.setattr("sparring.services.page.history._LONG", 2**18)
    history, looks = History(write_run(tmp_path / "run", lines)), 0
    while not history.is_whole:
        history.refresh(400.0)
        looks += 1
        for behavior in ("Walk", "Run"):
            steps = history.query(behavior, ["reward"], "step", -math.inf, math.inf, 4000).axes[:, 0]
            assert len(steps) == (999 if history.is_whole else len(steps))
            assert len(steps) > 200
            assert (steps[0], steps[-1]) == pytest.approx((100, 99_900), abs=2000)
            assert np.all(np.diff(steps) > 0)
    assert looks == math.ceil(len(lines) / 401)
    found = history.query("Walk", ["reward"], "step", -math.inf, math.inf, 4000)
    np.testing.assert_array_equal(found.axes[:, 0], np.arange(100, 100_000, 100))


def test_zoomed_part_of_a_long_run_has_every_line(tmp_path: Path) -> None:
    lines = [
        interval(step, behavior, reward=float(step))
        for step in range(100, 500_000, 100)
        for behavior in ("Walk", "Run")
    ]
    folder = write_run(tmp_path / "run", lines[-5000:])
    for number, part in ((1, lines[-8000:-5000]), (2, lines[:-8000])):
        (folder / f"metrics.jsonl.{number}").write_text("".join(json.dumps(line) + "\n" for line in part))
    history = History(folder)
    history.refresh()
    assert history.tables["Walk"].width > 1
    found = history.query("Walk", ["reward"], "step", 120_000, 130_000, 200)
    np.testing.assert_array_equal(found.axes[1:-1, 0], np.arange(120_000, 130_001, 100))
    np.testing.assert_array_equal(found.values[1:-1, 0, 0], found.axes[1:-1, 0])
    assert [line["step"] for line in lines_between(folder / "metrics.jsonl", 1e9 + 4000, 1e9 + 4001)] == [
        400_000
    ] * 2 + [400_100] * 2


def test_samples_are_spread_over_all_files_and_end_with_the_last_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [interval(step) for step in range(5000, 10_000)])
    (folder / "metrics.jsonl.1").write_text("".join(json.dumps(interval(step)) + "\n" for step in range(5000)))
    (folder / "metrics.jsonl.²").write_text("of another program")
    steps = [line["step"] for line in samples(folder / "metrics.jsonl", 10) if line]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (0, 9999)
    assert max(np.diff([step for step in steps if step < 9990])) < 2000


def test_huge_line_is_read_once_for_all_samples_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, read = write_run(tmp_path / "run", [interval(100), interval(150, text="x" * 10**6)]), list[int]()

    def line_after(file: Any, offset: int) -> Any:
        file.seek(offset)
        read.append(len(file.readline()) + len(file.readline()))

    monkeypatch.setattr("sparring.services.page.history._line_after", line_after)
    assert len(list(samples(folder / "metrics.jsonl", 500))) < 20
    assert sum(read) < 3 * 10**6


def test_csv_has_every_line_and_no_formula(tmp_path: Path) -> None:
    lines = [interval(step, means={"=cmd()": 2.0}) for step in (100, 200)] + [interval(200, "Run")]
    history = History(write_run(tmp_path / "run", lines))
    history.refresh()
    rows = list(csv.reader(b"".join(history.csv("Walk")).decode().splitlines()))
    assert [row[0] for row in rows] == ["step", "100.0", "200.0"]
    assert dict(zip(*rows[:2], strict=True))["reward"] == "100.0"
    assert "'=cmd()" in rows[0]


def test_events_are_what_the_logs_say_of_the_course(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [])
    at = {"timestamp": "2026-01-01T00:00:00.000+00:00"}
    logs = {
        "supervisor": [
            {"event": "started", "part": "assembly", "start": 1},
            {"event": "started", "part": "a", "start": 2},
        ],
        "learning-Walk": [{"event": "checkpoint_saved", "path": "Walk/checkpoint-1", "trained": 7}],
        "coordination": [
            *({"event": "opponents_assigned", "changes": changes, "team": changes} for changes in (0, 0, 1, 1)),
            {"event": "lesson", "parameter": "width", "lesson": 2},
        ],
        "stepping-0": [{"event": "lesson"}],
    }
    for name, events in logs.items():
        lines = "".join(json.dumps(at | event) + "\n" for event in events)
        (folder / "logs" / f"{name}.jsonl").write_text(lines + '{"event": "lesson", "timestamp": 3}\n')
    history = History(folder)
    history.refresh()
    found = {event["kind"]: (event["text"], event["step"]) for event in history.events}
    assert found == {
        "restart": ("start 2 of a", None),
        "checkpoint": ("Walk/checkpoint-1", 7.0),
        "learning team": ("team 1 learns", None),
        "lesson": ("width 2", None),
    }
    assert len(history.events) == 4
