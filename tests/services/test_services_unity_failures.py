"""Whole runs with simulated Unity players that fail: `sparring train CONFIG --env PATH`."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.services.services_helpers import Training, balanced
from tests.services.unity_runs import BEHAVIOR, GOAL, executable, intervals, players, settings, train

STALL_S = 20
"""Limit within which a healthy player starts on a slow machine, at the same time as others."""


def faulty(folder: Path) -> Path:
    """Writes a program whose first players 1 and 3 stall and whose first player 2 sends NaN after some messages.

    Restarted players wait until the file `open` exists in the folder.
    """
    program = executable(folder, "--game", "balance", "--areas", "12")
    run = program.read_text().splitlines()[1]
    program.write_text(
        f"""#!/bin/sh
if mkdir "{folder}/started-$SPARRING_NUMBER"; then
  case "$SPARRING_NUMBER" in
    1|3) set -- "$@" --stall-after 150;;
    2) set -- "$@" --nan-after 150;;
  esac
else
  until test -e "{folder}/open"; do sleep 0.1; done
fi
{run}
"""
    )
    return program


def stalled(training: Training, number: int) -> bool:
    """Returns whether a player has stalled, by its own log."""
    path = training.directory / "run_logs" / f"Player-{number}.log"
    return path.exists() and " ERROR stalled" in path.read_text()


@pytest.mark.slow
def test_killed_stalled_and_nan_sending_players_restart_while_the_fourth_continues(tmp_path: Path) -> None:
    """Each failure is logged with name, phase and cause, and each player restarts while the fourth keeps playing."""
    buffer = 512
    hyper = {**BEHAVIOR["hyperparameters"], "buffer_size": buffer}
    own = {**BEHAVIOR, "hyperparameters": hyper, "summary_freq": buffer, "max_steps": 10_000_000}
    config = settings(tmp_path, "Balance", own=own)
    training = train(tmp_path, config, faulty(tmp_path), 4, "--timeout-wait", str(STALL_S))
    training.wait_for(lambda _: stalled(training, 3))
    players(training)[3].kill()
    for part in ("simulator-2", "simulator-3"):
        training.wait_for(_failure_of(part))
    training.wait_for(lambda _: stalled(training, 1))
    training.updates(2)  # reports of all steps before
    alone = intervals(training, "Balance")[-1]["step"] + 2 * 2 * buffer  # twice the step budget of all players
    training.wait_for(lambda _: intervals(training, "Balance")[-1]["step"] > alone)
    (tmp_path / "open").touch()
    training.wait_for(_failure_of("simulator-1"))
    training.wait_for(lambda _: all(len(_events(training, "started", f"simulator-{n}")) >= 2 for n in (1, 2, 3)))
    training.wait_for(lambda _: _connected(training) == 4)
    training.updates(2)
    family = psutil.Process(training.process.pid).children(recursive=True)
    training.process.send_signal(signal.SIGINT)
    assert training.end() == 0, "\n".join(training.lines)

    failed = {n: _events(training, "failed", f"simulator-{n}") for n in range(4)}
    assert [bool(failed[n]) for n in range(4)] == [False, True, True, True]
    at_the_gate = [again["error"] for number in (1, 2, 3) for again in failed[number][1:]]  # for longer than STALL_S
    assert all("launched: nothing in" in error for error in at_the_gate)
    causes = {
        1: rf"Unity player 1, stepping: nothing in {STALL_S} s; .*--timeout-wait.*stalled after 150 messages",
        2: r"Unity player 2, stepping: NaN or infinity in observation 'VectorSensor_size8' of agent \d+ of Balance",
        3: r"Unity player 3, stepping: the end of the game by signal SIGKILL; .*Player-3\.log",
    }
    for number, cause in causes.items():
        assert re.search(cause, failed[number][0]["error"]), failed[number][0]["error"]
        assert any(re.search(cause, line) for line in training.lines)

    steps = [line["step"] for line in intervals(training, "Balance")]
    assert steps == sorted(set(steps))

    step_counts = training.summary["behaviors"]["Balance"]["step_counts"]
    assert training.summary["status"] == "stopped"
    assert balanced(step_counts), step_counts
    assert (step_counts["produced"] > 0, step_counts["lost"]) == (True, 0)
    _, left = psutil.wait_procs(family, timeout=5)
    assert not left


def _failure_of(part: str) -> Any:
    return lambda lines: any("failed" in line and part in line for line in lines)


def _events(training: Training, event: str, part: str) -> list[dict[str, Any]]:
    return [entry for entry in training.log() if entry["event"] == event and entry["part"] == part]


def _connected(training: Training) -> int:
    status = json.loads((training.directory / "status.json").read_text())
    return int(status["services"]["stepping-0"]["simulators"])


@pytest.mark.slow
def test_player_that_fails_too_often_ends_the_run(tmp_path: Path) -> None:
    """Either limit ends the run while the other is -1; the message has the number of failures and their cause."""
    program = executable(tmp_path, "--crash-at", "launch")
    config = settings(tmp_path, "Goal", own=GOAL)
    limits = {
        "lifetime": ("--max-lifetime-restarts", "2", "--restarts-rate-limit-n", "-1"),
        "rate": ("--max-lifetime-restarts", "-1", "--restarts-rate-limit-n", "1"),
    }
    runs = {
        name: train(tmp_path, config, program, 1, "--in-process", *one, run_id=name) for name, one in limits.items()
    }
    why = "Unity player 0, launched: the end of the game by exit status 3"
    for name, often, failures in (("lifetime", "failed 3 times: ", 3), ("rate", "failed 2 times in 60 s: ", 2)):
        assert runs[name].end() == 1
        error = runs[name].summary["error"]
        assert f"simulator-0 {often}" in error
        assert why in error
        assert "player: crashed at launch" in error
        assert len(_events(runs[name], "failed", "simulator-0")) == failures
