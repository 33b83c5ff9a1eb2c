"""Sweeps with real runs of the goal game, through the command."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from sparring.pipeline.settings import read
from tests.sweeps.sweep_fakes import RATE

pytestmark = pytest.mark.slow

CONFIG = """
behaviors:
  Goal:
    hyperparameters: {batch_size: 16, buffer_size: 64, learning_rate: 5.0e-3}
    network_settings: {hidden_units: 32, num_layers: 1}
    max_steps: 1000
    summary_freq: 100
simulators: [{name: goal}]
pipeline: {mode: lockstep}
"""
DEADLINE_S = 300.0


def command(folder: Path, space: str, *words: str) -> list[str]:
    (folder / "goal.yaml").write_text(CONFIG)
    (folder / "space.yaml").write_text(space)
    files = [str(folder / "goal.yaml"), str(folder / "space.yaml")]
    return [sys.executable, "-m", "sparring", "sweep", *files, "--results-dir", str(folder), "--run-id", "s", *words]


def swept(words: Sequence[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S)
    assert not done.returncode, done.stderr
    return done.stdout


def trials(folder: Path) -> list[dict[str, str]]:
    path = folder / "s" / "trials.csv"
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def wait_until(condition: Any, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_killed_search_loses_its_running_trial_alone_and_leaves_no_process(tmp_path: Path) -> None:
    space = f"trials: 2\nsteps: 400\npruner: none\nspace: {{{RATE}: {{low: 1e-3, high: 1e-2, log: true}}}}"
    sweep = subprocess.Popen(command(tmp_path, space, "--in-process"), stderr=subprocess.DEVNULL)
    wait_until(lambda: trials(tmp_path) and (tmp_path / "s" / "trial-0001" / "run.json").exists(), sweep)
    parts = psutil.Process(sweep.pid).children(recursive=True)
    assert parts
    sweep.kill()
    sweep.wait()
    _, alive = psutil.wait_procs(parts, timeout=20)
    assert not alive
    (first,) = trials(tmp_path)
    again = swept(command(tmp_path, space, "--in-process", "--resume"))
    found = {one["trial"]: one for one in trials(tmp_path)}
    assert [found[f"trial-{n:04d}"]["state"] for n in range(3)] == [
        "complete",
        "interrupted",
        "complete",
    ]
    assert found["trial-0000"] == first
    assert found["trial-0001"][RATE] == found["trial-0002"][RATE]
    assert "(the file's own)" in again
    best = read(tmp_path / "s" / "best.yaml").settings.behaviors["Goal"]
    assert best.max_steps == 1000, "the configuration's own length"
    values = {float(one[RATE]): float(one["value"]) for one in found.values() if one["state"] == "complete"}
    assert values[best.hyperparameters.learning_rate] == max(values.values())
    assert {path.stem for path in (tmp_path / "s").glob("*.png")} == {"history", "parameters", "curves"}


def test_stopped_search_stops_its_trial_in_order(tmp_path: Path) -> None:
    space = f"steps: 1000000\nspace: {{{RATE}: {{low: 1e-3, high: 1e-2}}}}"
    sweep = subprocess.Popen(command(tmp_path, space, "--in-process"), stderr=subprocess.DEVNULL)
    wait_until((tmp_path / "s" / "trial-0000" / "metrics.jsonl").exists, sweep)
    for number in (signal.SIGINT, signal.SIGTERM):  # within a second
        os.kill(sweep.pid, number)
    assert sweep.wait(DEADLINE_S) == 0
    assert json.loads((tmp_path / "s" / "trial-0000" / "summary.json").read_text())["status"] == "stopped"
    assert [one["state"] for one in trials(tmp_path)] == ["interrupted"]


def test_population_trains_copies_and_goes_on(tmp_path: Path) -> None:
    population = "population: {size: 2, interval_steps: 300}\nmethod: population\nsteps: 600\nparallel: 2"
    shown = swept(
        command(tmp_path, f"{population}\nspace: {{{RATE}: {{low: 1e-5, high: 1e-2, log: true}}}}", "--in-process")
    )
    lines = [json.loads(line) for line in (tmp_path / "s" / "population.jsonl").read_text().splitlines()]
    assert [one["type"] for one in lines] == ["interval", "interval", "decision"] * 2
    (copy,) = lines[2]["copies"]
    assert lines[2]["scores"][copy["donor"]] > lines[2]["scores"][copy["member"]]
    assert all(one["steps"] >= 600 for one in lines[3:5])
    for member in range(2):
        folder = tmp_path / "s" / "generation-001" / f"member-{member:02d}"
        steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert steps == sorted(steps), "the lineage's own intervals"
        assert yaml.safe_load((folder / "configuration.yaml").read_text())["behaviors"]["Goal"]["max_steps"] == 600
    assert "descends from" in shown
    assert (tmp_path / "s" / "lineages.png").exists()
    assert swept(command(tmp_path, (tmp_path / "space.yaml").read_text(), "--resume")) == shown
