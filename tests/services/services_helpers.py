"""Real runs of the `sparring` command, watched through what they print and write."""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.services.started import SAME_EVERYWHERE, Started, start

HANG_S = 500.0
"""Deadline for a run that hangs; a heavily loaded machine needs less."""

EXPORTING = f"""
import sys
from sparring.services.supervision import exports, supervisor
from sparring.services.main import main
exports.NICENESS, supervisor.EXPORT_S = 0, {HANG_S}
sys.exit(main())
"""
"""The command, with exports at normal priority: at the lowest one they may never get the CPU."""

CONFIG = """
behaviors:
  Balance:
    hyperparameters: {{batch_size: 128, buffer_size: {buffer_size}, learning_rate: 0.0003, num_epoch: {num_epoch}}}
    network_settings: {{hidden_units: 32, num_layers: 1}}
    max_steps: {max_steps}
    time_horizon: 64
    summary_freq: {summary_freq}
    checkpoint_interval: 1000000
simulators:
  - {{name: balance, count: {count}, areas: 8}}
pipeline:
  mode: {mode}
  recovery_interval: 1
  restarts: {{backoff_s: 0.1}}
"""


def config(path: Path, **values: Any) -> Path:
    """Writes a small configuration and returns its path."""
    defaults = {
        "buffer_size": 2048,
        "num_epoch": 3,
        "max_steps": 40_000,
        "summary_freq": 2048,
        "count": 2,
        "mode": "overlap",
    }
    file = path / "config.yaml"
    file.write_text(CONFIG.format(**{**defaults, **values}))
    return file


class Training:
    """One `sparring train` process and the lines that it prints.

    `apart`: it has its own session, because Linux divides CPU time among sessions (sched_autogroup).
    `prefix`: words before the command.
    `export`: checkpoints are exported beside the run.
    `forked`: it is started without its imports, if none of the others is given.
    `tensorboard`: the run has the writer that every run has by default, a process more.
    """

    def __init__(
        self,
        results: Path,
        *arguments: str,
        run_id: str = "run",
        environment: Mapping[str, str] | None = None,
        apart: bool = False,
        prefix: Sequence[str] = (),
        export: bool = False,
        forked: bool = True,
        tensorboard: bool = False,
    ) -> None:
        self.directory = results / run_id
        words = ["train", *arguments, "--results-dir", str(results), "--run-id", run_id]
        words += [] if export else ["--no-export"]
        words += [] if tensorboard else ["--set", "writers.tensorboard=false"]
        if forked and sys.platform == "linux" and not (apart or prefix or export):
            self._watch(start(words, environment))
        else:
            program = ["-c", EXPORTING] if export else ["-m", "sparring"]
            command = [*prefix, sys.executable, *program, *words]
            self._watch(
                subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env={**os.environ, **(environment or {})},
                    start_new_session=apart,
                )
            )

    def _watch(self, process: Started | subprocess.Popen[str]) -> None:
        """Collects the lines of a process."""
        self.process = process
        self.lines: list[str] = []
        self._arrived = threading.Condition()
        self.has_ended = False
        self._collector = threading.Thread(target=self._collect, daemon=True)
        self._collector.start()

    def _collect(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                with self._arrived:
                    self.lines.append(line.rstrip())
                    self._arrived.notify_all()
        with self._arrived:
            self.has_ended = True
            self._arrived.notify_all()

    def wait_for(self, found: Callable[[list[str]], bool], timeout_s: float = HANG_S) -> None:
        """Returns when `found(lines)` is true; fails at the end of the run or at the deadline."""
        with self._arrived:
            held = self._arrived.wait_for(lambda: self.has_ended or found(self.lines), timeout_s)
            if not held or not found(self.lines):
                self.process.kill()
                raise AssertionError("not found in time:\n" + "\n".join(self.lines))

    def updates(self, count: int) -> None:
        """Returns after `count` more intervals of a behavior."""
        before = len(progress(self.lines))
        self.wait_for(lambda lines: len(progress(lines)) >= before + count)

    def end(self, timeout_s: float = HANG_S) -> int:
        """Waits for the end and for all output until then; returns the exit status."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError("did not end:\n" + "\n".join(self.lines)) from None
        self._collector.join(timeout_s)
        assert not self._collector.is_alive(), "a process outlives the run and keeps its output open:\n" + "\n".join(
            self.lines
        )
        return status

    def pid(self, part: str) -> int:
        """Returns the process id of the current incarnation of a part."""
        found = [entry["pid"] for entry in self.log() if entry["event"] == "started" and entry["part"] == part]
        return int(found[-1])

    def kill(self, part: str) -> None:
        """Kills a part without warning."""
        os.kill(self.pid(part), signal.SIGKILL)

    def log(self) -> list[dict[str, Any]]:
        """Returns the lines of the supervisor's log."""
        return json_lines(self.directory / "logs" / "supervisor.jsonl")

    @property
    def summary(self) -> dict[str, Any]:
        """Content of `summary.json`."""
        return dict(json.loads((self.directory / "summary.json").read_text()))

    def simulator_steps(self) -> int:
        """Returns the number of steps that the built-in simulators counted themselves."""
        total = 0
        for path in sorted((self.directory / "logs").glob("simulator-*.stderr")):
            for line in path.read_text().splitlines():
                if line.startswith("{"):
                    total += sum(json.loads(line)["steps"].values())
        return total


def side_by_side(folder: Path, plain: Mapping[str, Any], seeds: Sequence[int]) -> list[Training]:
    """Starts one run of a configuration per seed, each in one process."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(dict(plain)))
    return [
        Training(
            folder, str(file), "--seed", str(seed), "--in-process", run_id=f"run{seed}", environment=SAME_EVERYWHERE
        )
        for seed in seeds
    ]


def last_of(training: Training, behavior: str, key: str, intervals: int = 1) -> float:
    """Waits for the end; returns the mean of `key` in the last intervals of a behavior that have one.

    Where an interval ends depends on the clock, and one alone may be of few episodes.
    """
    assert training.end() == 0, "\n".join(training.lines)
    lines = json_lines(training.directory / "metrics.jsonl")
    values = [line[key] for line in lines if line["type"] == "interval" and line["behavior"] == behavior]
    return float(statistics.mean([value for value in values if value is not None][-intervals:]))


def reaches(training: Training, bar: float, *behaviors: str, key: str = "reward") -> None:
    """Stops a run in order as soon as two intervals in succession of each behavior have a mean `key` above the bar.

    Fails if the run ends before, unless its last intervals are above the bar.
    """

    def above(behavior: str) -> bool:
        path = training.directory / "metrics.jsonl"
        lines = json_lines(path) if path.exists() else []
        values = [line[key] for line in lines if line["type"] == "interval" and line["behavior"] == behavior]
        known = [value > bar for value in values if value is not None]
        at_the_end = training.has_ended and known[-1:] == [True]
        return at_the_end or any(both == (True, True) for both in itertools.pairwise(known))

    training.wait_for(lambda _: all(map(above, behaviors)))
    training.process.send_signal(signal.SIGINT)
    assert training.end() == 0, "\n".join(training.lines)


def progress(lines: list[str], behavior: str = "Balance") -> list[str]:
    """Returns the console lines of a behavior's intervals, without reports of unfinished ones."""
    return [line for line in lines if line.startswith(f"{behavior}  step ") and " produced in " not in line]


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the complete lines of a file that is still being written."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def balanced(step_counts: dict[str, int]) -> bool:
    """Returns whether produced is the sum of all other terms."""
    return step_counts["produced"] == sum(value for term, value in step_counts.items() if term != "produced")
