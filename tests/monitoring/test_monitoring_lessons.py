"""Lesson numbers in TensorBoard, on the console and in the status."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparring.pipeline.monitoring import console
from sparring.pipeline.monitoring.events import scalars
from sparring.pipeline.monitoring.intervals import Interval, Intervals
from sparring.pipeline.monitoring.overview import Overview
from sparring.services.main import main
from tests.monitoring.monitoring_fakes import FakeRun, read_once


def report_lessons(run: FakeRun) -> None:
    """Coordination publishes two curricula, one of another behavior."""
    run.collect(12_000, [40.0, 50.0])
    run.train(12_000)
    coordination = run.registries["coordination"]
    coordination.gauge("lesson/gravity/Balance", 2)
    coordination.gauge("lesson/wall/height/Other", 1)


def interval_of(run: FakeRun) -> Interval:
    overview = Overview(FakeRun.services)
    intervals = Intervals(overview, {"Balance": 10_000}, {})
    intervals.track("Balance", 0.0)
    run.update(overview)
    return intervals.close("Balance", 1.0)


def test_lesson_number_has_the_name_of_ml_agents_in_tensorboard(fake_run: FakeRun) -> None:
    report_lessons(fake_run)
    found = scalars(interval_of(fake_run).plain())
    assert {name: value for name, value in found.items() if "esson" in name} == {
        "Environment/Lesson Number/gravity": 2.0
    }


def test_console_line_names_the_lessons_of_its_behavior(fake_run: FakeRun) -> None:
    assert "lesson" not in console.line(interval_of(fake_run))
    report_lessons(fake_run)
    assert "  lesson gravity 2  " in console.line(interval_of(fake_run))


def test_status_names_the_lessons(
    fake_run: FakeRun, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    report_lessons(fake_run)
    read_once(fake_run, folder)
    assert main(["status", str(folder)]) == 0
    assert "Balance: lesson 2 of gravity\n" in capsys.readouterr().out
