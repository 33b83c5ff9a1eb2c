"""Faults of processes: killed, paused or hung."""

from __future__ import annotations

import json
import signal
import time
from functools import partial

import psutil

from sparring.services.supervision.watchdog import MONITOR_HANG_S
from tests.faults.bench import PAUSE_S, Bench, Outcome, complete
from tests.faults.judge import AllowedEffects, expect, expect_balance, judge, judge_restored, killed
from tests.faults.trial import (
    BEHAVIOR,
    BUFFER,
    LEARNER,
    LONG_S,
    Trial,
    continue_process,
    in_flight,
)

EXIT_S = 5.0
"""Time within which every process of a run ends after its supervisor was killed."""


def kill(part: str, bench: Bench) -> Outcome:
    """Kills a process, which restarts."""
    with bench.trial() as trial:
        trial.under_way()
        trained = trial.trained()
        with trial.recovering():
            if part == "watcher-0":
                psutil.Process(trial.training.pid("simulator-0")).kill()
            else:
                trial.kill(part)
            before = [path.name for path in trial.folder.newest_first()]
        outcome = complete(trial, killed(part))
        if part == LEARNER:
            judge_restored(trial, before, trained)
        return outcome


def kill_and_stop(part: str, bench: Bench) -> Outcome:
    """Kills a process, and sends Ctrl-C while the steps that it held are still being recovered."""
    with bench.trial() as trial:
        trial.under_way()
        trial.kill(part)
        trial.wait(lambda: starts(trial, part) > 1, f"{part} is restarted", LONG_S)
        # One version more than that of the restarted learner, which may have had no checkpoint yet.
        wanted = trial.version + trial.random.randrange(2, 6)
        trial.wait(lambda: trial.version >= wanted, "training after the fault", LONG_S)
        trial.interrupt()
        status = trial.end()
        expect(status == 0, f"exit status {status}: {trial.training.lines[-3:]}")
        return Outcome(judge(trial, killed(part), status="stopped"))


def pause(part: str, bench: Bench) -> Outcome:
    """Pauses a process briefly with SIGSTOP and SIGCONT; no process fails and nothing is lost."""
    with bench.trial() as trial:
        trial.under_way()
        with trial.recovering():
            pid = trial.stop(part)
            time.sleep(PAUSE_S)
            continue_process(pid)
        return complete(trial, AllowedEffects(times=0))


def hang(part: str, bench: Bench) -> Outcome:
    """Stops a process for good with SIGSTOP; the supervisor misses its heartbeat and restarts it."""
    # Training does not wait for the monitor, whose heartbeat timeout is longer, so that run has to last longer.
    with bench.trial(1.5 * MONITOR_HANG_S if part == "monitor" else 0.0) as trial:
        trial.under_way(bench.seconds)
        with trial.recovering():
            trial.stop(part)
            trial.wait(
                lambda: trial.log("supervisor", "heartbeat_missed"), f"the heartbeat of {part} is missed", LONG_S
            )
        outcome = complete(trial, killed(part))
        silent = [one["part"] for one in trial.log("supervisor", "heartbeat_missed")]
        expect(silent == [part], f"heartbeats of {silent} were missed")
        return outcome


def hang_simulator(bench: Bench) -> Outcome:
    """A simulator hangs for longer than its trainer waits; it is disconnected, ended and restarted."""
    with bench.trial() as trial:
        trial.under_way()
        with trial.recovering():
            trial.stop("simulator-0")
            trial.wait(lambda: trial.log("stepping-0", "simulator_silent"), "the simulator is disconnected", LONG_S)
            trial.wait(lambda: len(trial.log("stepping-0", "simulator_connected")) > 2, "it reconnects", LONG_S)
        silent = [one["part"] for one in trial.log("supervisor", "heartbeat_missed")]
        expect(silent == ["simulator-0"], f"heartbeats of {silent} were missed")
        return complete(trial, killed("simulator-0"))


def kill_supervisor(bench: Bench) -> Outcome:
    """Kills the supervisor; no process of the run is left, and `--resume` continues it."""
    with bench.trial() as trial:
        trial.under_way()
        family = trial.family()
        trained, version = trial.trained(), trial.version
        began = time.monotonic()
        trial.training.process.send_signal(signal.SIGKILL)
        trial.training.process.wait()
        before = [path.name for path in trial.folder.newest_first()]
        _, alive = psutil.wait_procs(family, timeout=EXIT_S)
        expect(not alive, f"still running after {EXIT_S:g} s: {alive}")
        saved = json.loads((trial.directory / "coordination.json").read_text())
        lost_before = sum(saved["behaviors"][BEHAVIOR]["learner"]["lost"].values())
        expect(lost_before == 0, f"lost before the fault: {lost_before}")
        trial.resume()
        trial.wait(lambda: trial.version >= version + 4 or trial.nearly_done(), "training after --resume", LONG_S)
        trial.recovery_s = time.monotonic() - began
        status = trial.end()
        expect(status == 0, f"exit status {status}: {trial.training.lines[-3:]}")
        outcome = Outcome(judge_resumed(trial), trial.recovery_s)
        judge_restored(trial, before, trained)
        return outcome


def judge_resumed(trial: Trial) -> int:
    """Checks that a continue_process run lost at most the steps in flight and the updates since the checkpoint."""
    lost: int = trial.training.summary["behaviors"][BEHAVIOR]["step_counts"]["lost"]
    restored = trial.restored()[-1]
    updates = restored["version"] - 1 - restored["saved"]
    most = updates * (BUFFER + in_flight("lockstep") - BUFFER) + in_flight(trial.mode)
    expect(0 <= lost <= most, f"{lost} steps lost, at most {most}")
    step_counts = trial.training.summary["behaviors"][BEHAVIOR]["step_counts"]
    expect_balance(step_counts)
    expect(trial.training.summary["status"] == "completed", "did not complete")
    return lost


def was_restarted(trial: Trial, part: str, times: int) -> bool:
    """Returns whether a process has been restarted at least `times` times."""
    return starts(trial, part) > times


def exhaust_restarts(part: str, bench: Bench) -> Outcome:
    """Kills a process more often than its restart budget allows; the run fails in order and reports the cause."""
    with bench.trial(budget=2) as trial:
        trial.under_way()
        trial.wait(trial.folder.newest_first, "a first checkpoint, which must survive the end", LONG_S)
        for number in range(3):
            if number:
                trial.wait(partial(was_restarted, trial, part, number), f"{part} is restarted", LONG_S)
                time.sleep(trial.random.uniform(0.0, 4.0))
            saved = trial.folder.load_latest().trained
            trial.kill(part)
        status = trial.end()
        expect(status == 1, f"exit status {status}")
        summary = trial.training.summary
        expect(summary["status"] == "failed", f"status {summary['status']}")
        error = summary["error"]
        expect(error.startswith(f"{part} failed 3 times") and "SIGKILL" in error, f"error {error!r}")
        expect(error in "\n".join(trial.training.lines), "the console does not show the cause")
        behavior_summary, last = summary["behaviors"][BEHAVIOR], trial.folder.load_latest().trained
        # A dead learner saves nothing; after the failure of any other process it has time to save.
        kept = last >= saved > 0 if part == LEARNER else last == behavior_summary["steps"] >= saved
        expect(
            kept, f"checkpoint of {last}, the summary says {behavior_summary['steps']}, the one before holds {saved}"
        )
        expect_balance(behavior_summary["step_counts"])
        return Outcome(behavior_summary["step_counts"]["lost"])


def starts(trial: Trial, part: str) -> int:
    """Returns how often a process was started."""
    return sum(one["part"] == part for one in trial.log("supervisor", "started"))
