"""`sparring status` of live and finished runs."""

from __future__ import annotations

import contextlib
import io
import json
import os
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparring.pipeline.monitoring.overview import Overview
from sparring.pipeline.monitoring.summary import summarize_behavior, summary
from sparring.services.commands import status
from sparring.services.main import main
from tests.monitoring.monitoring_fakes import EPOCH_S, FakeRun, read_once


def write_status(run: FakeRun, folder: Path) -> None:
    """Writes the files of a live run."""
    run.collect(12_000, [40.0, 50.0])
    run.train(12_000)
    read_once(run, folder)


def write_summary(run: FakeRun, folder: Path) -> None:
    overview = Overview()
    run.update(overview)
    results = summarize_behavior(overview, "Balance", 12_300.0)
    content = summary(
        run_id="r1",
        status="failed",
        wall_s=65.0,
        error="learning-Balance: out of memory",
        behaviors={"Balance": replace(results, checkpoint="Balance/last", weights_sha256="ab")},
    )
    (folder / "summary.json").write_text(json.dumps(content))


def run_status(*words: str, now_s: float = EPOCH_S + 0.5) -> tuple[int, str]:
    def sleep(_seconds: float) -> None:
        raise AssertionError("it shows the run once")

    return watch_status(*words, now_s=now_s, sleep=sleep)


def watch_status(*words: str, now_s: float, sleep: Callable[[float], None]) -> tuple[int, str]:
    """Runs the command at a time, and returns its exit status and what it prints."""
    parser, stream = ArgumentParser(), io.StringIO()
    status.add_arguments(parser)
    clock = SimpleNamespace(time=lambda: now_s, sleep=sleep)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(stream):
        patch.setattr(status, "time", clock)
        code = status.run(parser.parse_args(words))
    return code, stream.getvalue()


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def test_live_run_shows_behaviors_services_and_the_age_of_the_data(fake_run: FakeRun, folder: Path) -> None:
    write_status(fake_run, folder)
    code, text = run_status(str(folder))
    assert code == 0
    assert "run r1: running; data 0.5 s old" in text
    for part in ("12,000 of 500,000", "45 +- 5", "1.0/1", "812 steps", "produced 12,000", "steps 3/64", "segments"):
        assert part in text


def test_run_is_found_by_its_id(fake_run: FakeRun, folder: Path) -> None:
    write_status(fake_run, folder)
    assert run_status("run", "--results-dir", str(folder.parent))[0] == 0


def test_old_data_of_an_unfinished_run_is_an_alarm(fake_run: FakeRun, folder: Path) -> None:
    write_status(fake_run, folder)
    assert "NOT WRITTEN for 35 s" in run_status(str(folder), now_s=EPOCH_S + 35)[1]


def test_finished_run_shows_its_summary(fake_run: FakeRun, folder: Path) -> None:
    write_status(fake_run, folder)
    write_summary(fake_run, folder)
    text = run_status(str(folder))[1]
    for part in ("run r1: failed after 65 s", "learning-Balance: out of memory", "Balance/last", "12.3k", "45"):
        assert part in text


def test_checkpoint_of_a_renamed_run_is_shown_where_it_is(fake_run: FakeRun, folder: Path) -> None:
    write_summary(fake_run, folder)
    (folder / "Balance" / "last").mkdir(parents=True)
    content = json.loads(run_status(str(folder), "--json")[1])
    assert content["summary"]["behaviors"]["Balance"]["checkpoint"] == str(folder.absolute() / "Balance" / "last")


def test_resumed_run_shows_its_status(fake_run: FakeRun, folder: Path) -> None:
    write_summary(fake_run, folder)
    os.utime(folder / "summary.json", (0, 0))
    write_status(fake_run, folder)
    assert "running" in run_status(str(folder))[1]


@pytest.mark.parametrize("columns", ["0", "²", "-1", "x"])
def test_width_that_no_terminal_has_is_ignored(
    fake_run: FakeRun, folder: Path, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    write_status(fake_run, folder)
    monkeypatch.setenv("COLUMNS", columns)
    assert "running" in run_status(str(folder))[1]


def test_json_contains_status_and_summary(fake_run: FakeRun, folder: Path) -> None:
    write_status(fake_run, folder)
    write_summary(fake_run, folder)
    content = json.loads(run_status(str(folder), "--json")[1])
    assert content["summary"]["status"] == "failed"
    assert content["status"]["behaviors"]["Balance"]["step"] == 12_000
    (folder / "status.json").write_text('{"behaviors": {}}')
    assert json.loads(run_status(str(folder), "--json")[1])["status"] == {"behaviors": {}}


@pytest.mark.parametrize("on_terminal", [False, True])
def test_watch_shows_each_second_and_ends_with_the_run(
    fake_run: FakeRun, folder: Path, on_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    write_status(fake_run, folder)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            write_summary(fake_run, folder)

    code, text = watch_status(str(folder), "--watch", now_s=EPOCH_S, sleep=sleep)
    assert code == 0
    assert slept == [1.0, 1.0, 1.0]
    assert text.count("12,000 of 500,000") >= 3
    assert "failed after 65 s" in text


def refusal(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Returns what the command prints about input that it refuses."""
    assert main(["status", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_unknown_run_is_refused_with_the_known_ones(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "got run 'ruin'; expected" in refusal("ruin", "--results-dir", str(folder.parent), capsys=capsys)


def test_folder_without_a_status_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "neither status.json nor summary.json" in refusal(str(folder), capsys=capsys)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_status_is_refused_by_name(folder: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "status.json").write_text(content)
    assert "status.json" in refusal(str(folder), capsys=capsys)


@pytest.mark.parametrize(
    "content",
    [
        {"self_play": [1]},
        {"self_play": {"rules": {"sides": [1]}}},
        {"self_play": 1},
        {"self_play": {"rules": {"elo": {}, "sides": {"A": {"records": {"A@1": [0, 0.0]}}}}}},
    ],
)
def test_coordination_of_another_shape_is_one_clear_message(
    fake_run: FakeRun, folder: Path, content: object, capsys: pytest.CaptureFixture[str]
) -> None:
    write_status(fake_run, folder)
    (folder / "coordination.json").write_text(json.dumps(content))
    (line,) = refusal(str(folder), capsys=capsys).splitlines()
    assert line.startswith(f"sparring: got {folder / 'coordination.json'}, which cannot be used (")


def test_status_of_another_shape_is_one_clear_message(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "status.json").write_text('{"time_s": 1, "ended": false}')
    assert "which cannot be used (there is no 'run_id')" in refusal(str(folder), capsys=capsys)


def test_names_in_a_status_cannot_command_a_terminal(fake_run: FakeRun, folder: Path) -> None:
    write_status(fake_run, folder)
    text = (folder / "status.json").read_text().replace("Balance", r"Ball\u001b]0;owned\u0007")
    (folder / "status.json").write_text(text)
    shown = run_status(str(folder))[1]
    assert "\x1b" not in shown
    assert r"Ball\x1b]0;owned\x07" in shown


def test_game_without_ends_shows_its_reward_per_step(fake_run: FakeRun, folder: Path) -> None:
    fake_run.registries["assembly"].observe_moments("step_reward", [0.5, 1.0], "Balance")
    fake_run.collect(12_000, [])
    fake_run.train(12_000)
    read_once(fake_run, folder)
    assert "0.75 per step" in " ".join(run_status(str(folder))[1].split())


def test_80_columns_break_no_name_and_no_step_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run = FakeRun()
    write_status(run, tmp_path)
    running = run_status(str(tmp_path))[1]
    write_summary(run, tmp_path)
    over = run_status(str(tmp_path))[1]
    assert max(map(len, (running + over).splitlines())) <= 80
    for text in (running, over):
        assert "Balance" in text
        assert "produced" in text
    assert "learning-Balance" in running
    assert "checkpoint of Balance: Balance/last" in over
