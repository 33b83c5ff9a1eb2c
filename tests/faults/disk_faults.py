"""Faults of the disk: full for a while or for good."""

from __future__ import annotations

import shutil
import time

from sparring.pipeline.monitoring.summary import STATUSES
from tests.faults.bench import Bench, Outcome
from tests.faults.judge import expect
from tests.faults.places import small_disk
from tests.faults.trial import (
    BEHAVIOR,
    LONG_S,
    RECOVERY_S,
    Trial,
    in_flight,
)

DISK_MB = 12


def fill_disk(bench: Bench, *, freed: bool) -> Outcome:
    """Fills the run's disk, and frees it after some seconds or never."""
    place = bench.folder / "small"
    with small_disk(place, DISK_MB) as small:
        try:
            with bench.trial(results=place, patience_s=LONG_S if freed else 2 * RECOVERY_S) as trial:
                trial.under_way()
                began, trained = time.monotonic(), trial.trained()
                small.fill()
                if not freed:
                    _expect_failure(trial, trained)
                    small.free()
                    trial.resume()
                    expect(trial.end() == 0, f"the run does not go on with space again: {trial.training.lines[-3:]}")
                    return Outcome(trial.training.summary["behaviors"][BEHAVIOR]["step_counts"]["lost"])
                time.sleep(2 * RECOVERY_S)
                small.free()
                wanted = trial.version + 4
                trial.wait(lambda: trial.version >= wanted or trial.nearly_done(), "training with space again")
                trial.recovery_s = time.monotonic() - began
                return _expect_completion(trial)
        finally:
            shutil.copytree(place, bench.folder / "disk", ignore=shutil.ignore_patterns("ballast"))


def _expect_completion(trial: Trial) -> Outcome:
    """With space again the run completes and loses nothing."""
    status = trial.end()
    expect(status == 0, f"exit status {status}: {trial.training.lines[-3:]}")
    summary = trial.training.summary
    step_counts = summary["behaviors"][BEHAVIOR]["step_counts"]
    expect(summary["status"] == "completed", f"status {summary['status']}")
    expect(step_counts["lost"] == 0, f"{step_counts['lost']} steps lost")
    expect(trial.folder.load_latest().trained == summary["behaviors"][BEHAVIOR]["steps"], "the last checkpoint is old")
    expect(any("not_written" in line for line in trial.training.lines), "the console shows no not_written")
    return Outcome(step_counts["lost"], trial.recovery_s)


def _expect_failure(trial: Trial, trained: int) -> None:
    """Without space the run ends, reports the cause, and leaves the last checkpoint intact."""
    status = trial.end()
    expect(status in (STATUSES["failed"], STATUSES["stalled"]), f"exit status {status}: {trial.training.lines[-3:]}")
    causes = [line for line in trial.training.lines if "run_failed" in line or "run_stalled" in line]
    is_reported = any(word in line for line in causes for word in ("No space left", "room from the disk", "no room"))
    expect(is_reported, f"no cause in {causes or trial.training.lines[-5:]}")
    noise = [line for line in trial.training.lines if "Traceback" in line or "Logging error" in line]
    expect(not noise, f"the console shows {noise[:3]}")
    found = trial.folder.newest_first()
    if found:
        last = trial.folder.load_latest()  # raises if it is damaged
        expect(last.trained <= trained + 8 * in_flight(trial.mode), f"checkpoint of {last.trained}, trained {trained}")
