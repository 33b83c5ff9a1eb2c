"""Whole runs of the command: real processes, real sockets."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from services_helpers import Training, balanced, config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

AGENTS = 16
BUFFER = 2048
BUDGET = 2 * BUFFER


def finish(training: Training) -> dict[str, int]:
    """Waits for the end of a run that completes, and returns its books."""
    assert training.end() == 0, "\n".join(training.lines)
    summary = training.summary
    assert summary["status"] == "completed", summary
    assert summary["error"] is None
    books: dict[str, int] = summary["behaviors"]["Balance"]["books"]
    assert balanced(books), books
    return books


def test_a_run_completes_with_balanced_books_and_all_its_files(tmp_path: Path) -> None:
    training = Training(tmp_path, str(config(tmp_path)))
    books = finish(training)
    figures = training.summary["behaviors"]["Balance"]
    assert figures["steps"] == books["trained"] >= 40_000
    assert books["lost"] == books["stale"] == books["ghost"] == 0
    assert books["produced"] == training.simulator_steps()
    assert 0 <= figures["lag"]["mean"] <= 1.1
    assert figures["lag"]["max"] <= 2
    assert figures["episodes"] > 0
    assert len(figures["weights_sha256"]) == 64
    assert Path(figures["checkpoint"]).is_dir()
    for name in ("curves.png", "metrics.jsonl", "status.json", "run.json", "config.yaml", "coordination.json"):
        assert (training.directory / name).is_file(), name
    assert list((training.directory / "Balance").glob("events.out.tfevents.*"))
    for service in ("stepping-0", "assembly", "coordination", "learning-Balance", "monitor", "supervisor"):
        assert (training.directory / "logs" / f"{service}.jsonl").is_file(), service


@pytest.mark.parametrize("part", ["stepping-0", "assembly", "coordination", "learning-Balance", "monitor"])
def test_a_killed_service_comes_back_and_the_books_count_what_it_took(tmp_path: Path, part: str) -> None:
    training = Training(tmp_path, str(config(tmp_path, max_steps=60_000)))
    training.updates(4)
    training.kill(part)
    books = finish(training)
    failed = [entry for entry in training.log() if entry["event"] == "failed"]
    assert [entry["part"] for entry in failed] == [part]
    bound = {
        "stepping-0": AGENTS * 66,  # the step in flight and 64 unacknowledged messages
        "assembly": BUDGET + AGENTS,
        "coordination": 0,
        "learning-Balance": 30 * BUFFER,  # what a second of recovery interval trains, and a buffer
        "monitor": 0,
    }[part]
    assert 0 <= books["lost"] <= bound
    assert 0 <= training.simulator_steps() - books["produced"] <= (AGENTS * 66 if part == "stepping-0" else 0)


def test_a_killed_simulator_comes_back_and_nobody_else_notices(tmp_path: Path) -> None:
    training = Training(tmp_path, str(config(tmp_path, max_steps=60_000)))
    training.updates(4)
    training.kill("simulator-0")
    books = finish(training)
    assert [entry["part"] for entry in training.log() if entry["event"] == "failed"] == ["simulator-0"]
    assert books["lost"] == 0


def test_nothing_outlives_a_killed_supervisor_and_resume_goes_on(tmp_path: Path) -> None:
    file = str(config(tmp_path, max_steps=10_000_000))
    training = Training(tmp_path, file)
    training.updates(6)
    trained = [entry for entry in metrics(training) if entry.get("behavior") == "Balance"][-1]["step"]
    family = psutil.Process(training.process.pid).children(recursive=True)
    assert len(family) >= 9  # five services, two watchers, two simulators
    os.kill(training.process.pid, signal.SIGKILL)
    training.end(10)
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    resumed = Training(tmp_path, file, "--resume", "--max-steps", str(trained + 60_000))
    books = finish(resumed)
    assert books["trained"] >= trained + 60_000
    assert books["lost"] > 0  # what the killed processes held
    assert any(entry["event"] == "restored" for entry in learner_log(resumed))


def test_the_first_interrupt_stops_in_order_and_keeps_a_checkpoint(tmp_path: Path) -> None:
    training = Training(tmp_path, str(config(tmp_path, max_steps=10_000_000)))
    training.updates(3)
    training.process.send_signal(signal.SIGINT)
    assert training.end() == 0
    summary = training.summary
    assert summary["status"] == "stopped"
    figures = summary["behaviors"]["Balance"]
    assert Path(figures["checkpoint"]).is_dir()
    assert balanced(figures["books"])


def test_the_second_interrupt_ends_everything_at_once(tmp_path: Path) -> None:
    training = Training(tmp_path, str(config(tmp_path, max_steps=10_000_000)))
    training.updates(2)
    family = psutil.Process(training.process.pid).children(recursive=True)
    training.process.send_signal(signal.SIGINT)
    training.wait_for(lambda lines: any("stopping" in line for line in lines))
    training.process.send_signal(signal.SIGINT)
    assert training.end(20) in (0, 130)
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive


def test_a_service_that_fails_for_good_ends_the_run_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    command = json.dumps([sys.executable, "-c", "exit(7)"])
    file.write_text(config(tmp_path).read_text().replace("name: balance", f"command: {command}"))
    file.write_text(file.read_text().replace(", areas: 8", "").replace("backoff_s: 0.1", "backoff_s: 0, budget: 2"))
    training = Training(tmp_path, str(file))
    assert training.end() == 1
    assert training.summary["status"] == "failed"
    assert "simulator-" in training.summary["error"]
    assert "exit status 7" in training.summary["error"]


def metrics(training: Training) -> list[dict[str, object]]:
    """Lines of `metrics.jsonl`."""
    return [json.loads(line) for line in (training.directory / "metrics.jsonl").read_text().splitlines()]


def learner_log(training: Training) -> list[dict[str, object]]:
    """The learner's log."""
    text = (training.directory / "logs" / "learning-Balance.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]
