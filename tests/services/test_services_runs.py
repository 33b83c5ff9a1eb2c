"""Whole runs of the command in real processes with real sockets."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from sparring.pipeline.learning.checkpoints import CheckpointFolder
from tests.services.curriculum_runs import lesson, lessons, with_curriculum
from tests.services.services_helpers import Training, balanced, config, json_lines

pytestmark = pytest.mark.slow

AGENTS = 16
BUFFER = 2048
BUDGET = 2 * BUFFER
IN_FLIGHT = BUDGET + AGENTS  # the frame that reaches the budget may exceed it


def finish(training: Training) -> dict[str, int]:
    """Waits for the end of a run that completes, and returns its step counts."""
    assert training.end() == 0, "\n".join(training.lines)
    summary = training.summary
    assert summary["status"] == "completed", summary
    assert summary["error"] is None
    step_counts: dict[str, int] = summary["behaviors"]["Balance"]["step_counts"]
    assert balanced(step_counts), step_counts
    return step_counts


def kill_in_turn(training: Training, *parts: str) -> dict[str, Any]:
    """Kills parts of an endless run, each once the run has recovered; stops, and returns the behavior's result."""
    training.updates(2)
    training.wait_for(lambda _: recoverable(training))
    versions = CheckpointFolder(training.directory, "Balance")
    for part in parts:
        training.kill(part)
        training.wait_for(lambda lines, part=part: any("failed" in line and part in line for line in lines))
        under_way = versions.noted_version() + BUDGET // BUFFER + 1  # at most: data in flight, and a restart
        training.wait_for(lambda _, under_way=under_way: versions.noted_version() > under_way)
    training.process.send_signal(signal.SIGINT)
    assert training.end() == 0, "\n".join(training.lines)
    assert [entry["part"] for entry in training.log() if entry["event"] == "failed"] == [*parts]
    assert training.summary["status"] == "stopped"
    result: dict[str, Any] = training.summary["behaviors"]["Balance"]
    assert Path(result["checkpoint"]).is_dir()
    assert balanced(result["step_counts"]), result
    assert (result["step_counts"]["produced"], result["unaccounted"]) == (training.simulator_steps(), 0)
    assert sum(result["losses"].values()) == result["step_counts"]["lost"]
    return result


def test_run_completes_with_balanced_step_counts_and_all_files(tmp_path: Path) -> None:
    training = Training(tmp_path, str(config(tmp_path, max_steps=20_000)), tensorboard=True)
    step_counts = finish(training)
    result = training.summary["behaviors"]["Balance"]
    assert result["steps"] == step_counts["trained"] >= 20_000
    assert step_counts["lost"] == step_counts["stale"] == step_counts["ghost"] == 0
    assert step_counts["produced"] == training.simulator_steps()
    assert 0 <= result["lag"]["mean"] <= 1.1
    assert result["lag"]["max"] <= 2
    assert result["episodes"] > 0
    assert len(result["weights_sha256"]) == 64
    assert Path(result["checkpoint"]).is_dir()
    for name in ("curves.png", "metrics.jsonl", "status.json", "run.json", "config.yaml", "coordination.json"):
        assert (training.directory / name).is_file(), name
    assert list((training.directory / "Balance").glob("events.out.tfevents.*"))
    for service in ("stepping-0", "assembly", "coordination", "learning-Balance", "monitor", "supervisor"):
        assert (training.directory / "logs" / f"{service}.jsonl").is_file(), service


def bounds(training: Training, part: str) -> tuple[int, int]:
    """Returns the least and most steps that may be lost with a part; none are with others.

    The step budget bounds all steps that are not in a published update, wherever they are:

    * stepping: open steps, and steps that assembly has not acknowledged. Only the simulator may have counted the
      open step of an agent.
    * assembly: open segments, finished ones that are not acknowledged, and the step of each agent whose observation
      only the former incarnation knew.
    * learning: the updates since its newest checkpoint, and the segments for the next one.
    """
    if part == "learning-Balance":
        updates = rolled_back(training)
        return updates * BUFFER, updates * BUFFER + IN_FLIGHT
    return 0, IN_FLIGHT + AGENTS


def rolled_back(training: Training) -> int:
    """Returns the number of published updates that the checkpoint of the last incarnation does not include."""
    (entry,) = [one for one in learner_log(training) if one["event"] in ("restored", "nothing_to_restore")]
    return int(entry["version"]) - 1 - int(entry["saved"])


def recoverable(training: Training) -> bool:
    """Returns whether the learner has saved a recovery checkpoint."""
    return any((training.directory / "Balance").glob("recovery-*"))


@pytest.mark.parametrize("part", ["stepping-0", "assembly", "learning-Balance"])
def test_killed_service_restarts_and_its_lost_steps_are_counted(tmp_path: Path, part: str) -> None:
    """Monitor and coordination, each killed before another in the same run, lose nothing."""
    training = Training(tmp_path, str(config(tmp_path, max_steps=10_000_000)))
    before = {"assembly": ["monitor"], "learning-Balance": ["coordination"]}
    result = kill_in_turn(training, *before.get(part, ()), part)
    least, most = bounds(training, part)
    assert least <= result["step_counts"]["lost"] <= most
    assert result["losses"].keys() <= {part.partition("-")[0], *(["both_ends"] if part == "stepping-0" else [])}


def test_steps_that_died_with_all_who_counted_them_are_lost_at_both_ends(tmp_path: Path) -> None:
    """Coordination dies, and 0.3 s later stepping and assembly: only simulators know what was completed meanwhile.

    The learner is faster than stepping here, so that a part of the allowance is left when coordination dies. What
    stepping produces from then on is not flushed, and assembly holds some of it at its death.
    """
    file = config(tmp_path, max_steps=10_000_000, buffer_size=16_384, num_epoch=1, summary_freq=16_384)
    training = Training(tmp_path, str(file))
    training.updates(1)
    training.kill("coordination")
    time.sleep(0.3)
    training.kill("stepping-0")
    training.kill("assembly")
    versions = CheckpointFolder(training.directory, "Balance")
    training.wait_for(lambda lines: sum("failed" in line for line in lines) >= 3)
    under_way = versions.noted_version() + BUDGET // BUFFER + 1
    training.wait_for(lambda _: versions.noted_version() > under_way)
    training.process.send_signal(signal.SIGINT)
    assert training.end() == 0, "\n".join(training.lines)
    result = training.summary["behaviors"]["Balance"]
    assert balanced(result["step_counts"]), result
    assert (result["step_counts"]["produced"], result["unaccounted"]) == (training.simulator_steps(), 0)
    assert sum(result["losses"].values()) == result["step_counts"]["lost"] > 0
    assert result["losses"].keys() <= {"stepping", "assembly", "both_ends"}


def test_with_an_assembly_for_each_stepping_process_any_of_them_may_die(tmp_path: Path) -> None:
    file = config(tmp_path, max_steps=10_000_000)
    settings = yaml.safe_load(file.read_text())
    settings["pipeline"] |= {"stepping_processes": 2, "assembly": "per stepping"}
    file.write_text(yaml.safe_dump(settings))
    training = Training(tmp_path, str(file))
    result = kill_in_turn(training, "assembly-1", "stepping-0", "assembly-0")
    assert result["losses"].keys() <= {"stepping", "assembly", "both_ends"}
    numbers = json_lines(training.directory / "services.jsonl")
    for name in ("assembly-0", "assembly-1"):
        sent = [one["queues"]["segments:Balance.out"]["put_steps"] for one in numbers if one["service"] == name]
        assert max(sent) > 0


def test_no_process_outlives_a_killed_supervisor_and_the_run_resumes_in_its_lesson(tmp_path: Path) -> None:
    """The second lesson lasts for half of `max_steps`, which the first run cannot reach before it is killed."""
    file = str(with_curriculum(tmp_path, max_steps=10_000_000))
    training = Training(tmp_path, file)
    training.wait_for(lambda lines: any("lesson gravity 1" in line for line in lines))
    training.wait_for(lambda _: recoverable(training))
    family = psutil.Process(training.process.pid).children(recursive=True)
    assert len(family) >= 9  # five services, two watchers, two simulators
    os.kill(training.process.pid, signal.SIGKILL)
    training.process.wait()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    assert lesson(training) == 1
    further = 2 * CheckpointFolder(training.directory, "Balance").noted_version() * BUFFER + 12_000
    resumed = Training(tmp_path, file, "--resume", "--max-steps", str(further))
    step_counts = finish(resumed)
    assert step_counts["trained"] >= further
    assert any(entry["event"] == "restored" for entry in learner_log(resumed))
    assert lesson(resumed) == 2
    assert lessons(resumed) == ["second", "third"]  # of both runs: no lesson began twice
    # The steps that each part held are lost, all of them in flight. The saved step counts may be older than the last
    # update.
    rolled = rolled_back(resumed) * BUFFER
    assert max(1, rolled - BUFFER) <= step_counts["lost"] <= rolled + IN_FLIGHT


def test_second_interrupt_ends_every_process_at_once(tmp_path: Path) -> None:
    """A learner that SIGSTOP has stopped would hold up an orderly end."""
    training = Training(tmp_path, str(config(tmp_path, max_steps=10_000_000)))
    training.updates(2)
    family = psutil.Process(training.process.pid).children(recursive=True)
    os.kill(training.pid("learning-Balance"), signal.SIGSTOP)
    training.process.send_signal(signal.SIGINT)
    training.wait_for(lambda lines: any("stopping" in line for line in lines))
    began = time.monotonic()
    while time.monotonic() < began + 5 and not any("stopped_at_once" in line for line in training.lines):
        training.process.send_signal(signal.SIGINT)  # signals within a second count as one
        time.sleep(0.1)
    assert any("stopped_at_once" in line for line in training.lines)
    assert training.end(60) in (0, 130)
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive


def test_service_that_fails_repeatedly_ends_the_run_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    command = json.dumps([sys.executable, "-c", "exit(7)"])
    file.write_text(config(tmp_path).read_text().replace("name: balance", f"command: {command}"))
    file.write_text(file.read_text().replace(", areas: 8", "").replace("backoff_s: 0.1", "backoff_s: 0, budget: 2"))
    training = Training(tmp_path, str(file))
    assert training.end() == 1
    assert training.summary["status"] == "failed"
    assert "simulator-" in training.summary["error"]
    assert "exit status 7" in training.summary["error"]


def test_refused_simulator_ends_the_run_at_once(tmp_path: Path) -> None:
    """The trainer's answer is the error of the run: another attempt would get the same one."""
    file = tmp_path / "small.yaml"
    simulator = "{name: goal, options: {observe: image, pixels: 10}}"
    file.write_text("behaviors: {Goal: {}}\nsimulators: [" + simulator + "]\n")
    training = Training(tmp_path, str(file))
    assert training.end() == 1
    for text in ("'goal' of 10 x 10 pixels", "behavior Goal", "at least 20 x 20", "match3"):
        assert text in training.summary["error"]
    assert [entry["part"] for entry in training.log() if entry["event"] == "failed"] == ["simulator-0"]


def learner_log(training: Training) -> list[dict[str, Any]]:
    """Returns the lines of the learner's log."""
    return service_log(training, "learning-Balance")


def service_log(training: Training, service: str) -> list[dict[str, Any]]:
    """Returns the lines of a service's log."""
    return json_lines(training.directory / "logs" / f"{service}.jsonl")
