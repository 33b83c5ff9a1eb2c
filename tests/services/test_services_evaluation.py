"""`sparring evaluate` and `sparring train --inference` in real processes."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

from sparring.pipeline.demonstrations.episodes import read
from sparring.pipeline.errors import BELOW
from sparring.pipeline.evaluation.statistics import by_team, describe
from sparring.services.commands import evaluate
from sparring.services.commands.runs import find
from sparring.services.main import main
from tests.services.services_helpers import Training, balanced, progress
from tests.services.started import start

MANY = 10**6


def configuration(folder: Path) -> Path:
    """Writes the configuration of a game that is learned in seconds; returns its path."""
    plain = {
        "behaviors": {
            "Goal": {
                "hyperparameters": {"batch_size": 16, "buffer_size": 64, "learning_rate": 5e-3},
                "network_settings": {"hidden_units": 16, "num_layers": 1},
                "max_steps": 400,
                "time_horizon": 64,
                "summary_freq": 200,
            }
        },
        "simulators": [{"name": "goal", "areas": 2}],
        "pipeline": {"mode": "lockstep", "restarts": {"backoff_s": 0.1}},
    }
    file = folder / "goal.yaml"
    file.write_text(yaml.safe_dump(plain))
    return file


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a trained run; tests must not change its files."""
    results = tmp_path_factory.mktemp("results")
    training = Training(results, str(configuration(results)), "--seed", "1", "--in-process", run_id="goal")
    assert training.end() == 0, "\n".join(training.lines)
    return results / "goal"


class PlayCommand(Training):
    """A command that evaluates or plays, and names its folder."""

    def __init__(self, *arguments: str) -> None:
        self._watch(start(arguments))
        self.wait_for(lambda lines: any("run_started" in line for line in lines))
        started = next(line for line in self.lines if "run_started" in line)
        self.directory = Path(re.search(r"folder=(\S+)", started)[1])  # type: ignore[index]

    def playing(self) -> None:
        """Returns once a summary of episodes is printed."""
        self.wait_for(lambda lines: bool(progress(lines, "Goal")))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def evaluated(trained: Path, *arguments: str, status: int = 0) -> tuple[Path, dict[str, Any]]:
    """Runs an evaluation to its end; returns its folder and `evaluation.json`."""
    command = PlayCommand("evaluate", str(trained), *arguments)
    assert command.end() == status, command.text
    assert command.lines[-1] == str(command.directory / "evaluation.json")
    assert ("  a mean reward is below --at-least 99" in command.lines) == (status == BELOW)
    return command.directory, json.loads((command.directory / "evaluation.json").read_text())


def rows(directory: Path) -> list[dict[str, str]]:
    with (directory / "Goal" / "episodes.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def digests(directory: Path) -> dict[str, str]:
    """Returns the digest of each file of a run, without those of evaluations."""
    own = [path for path in directory.rglob("*") if path.is_file()]
    names = {path: str(path.relative_to(directory)) for path in own}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path, name in names.items()
        if not name.startswith(("evaluation-", "inference-"))
    }


def step_counts(directory: Path) -> dict[str, int]:
    summary = json.loads((directory / "summary.json").read_text())
    found: dict[str, int] = summary["behaviors"]["Goal"]["step_counts"]
    return found


# ---------------------------------------------------------------- whole evaluations


@pytest.mark.slow
def test_evaluation_counts_and_records_episodes_and_does_not_change_the_run(trained: Path) -> None:
    before = digests(trained)
    directory, found = evaluated(trained, "--episodes", "20", "--record", "--seed", "3")
    assert digests(trained) == before
    assert directory.parent == trained
    assert directory.name.startswith("evaluation-")

    table = rows(directory)
    assert [int(row["agents"]) for row in table] == list(range(1, 21))
    returns = [float(row["returns"]) for row in table]
    assert (found["status"], found["complete"], found["episodes"], found["seed"]) == ("completed", True, 20, 3)
    goal = found["behaviors"]["Goal"]
    assert goal["episodes"] == 20
    assert Path(goal["checkpoint"]) == max((trained / "Goal").glob("checkpoint-*"))
    assert goal["reward"]["mean"] == pytest.approx(np.mean(returns), abs=1e-6)
    assert goal["reward"]["interval"][0] <= goal["reward"]["mean"] <= goal["reward"]["interval"][1]
    assert goal["length"]["mean"] == np.mean([int(row["lengths"]) for row in table])
    assert goal["teams"] == {}

    recorded = {}
    for path in sorted((directory / "Goal").glob("*.episodes.safetensors")):
        columns = read(path).columns
        sums = np.add.reduceat(columns["rewards"], np.cumsum(columns["lengths"]) - columns["lengths"])
        recorded |= dict(zip(columns["agents"].tolist(), sums.tolist(), strict=True))
        assert np.abs(columns["continuous"]).max() <= 1
        assert columns["terminated"].all()
    assert recorded == {int(row["agents"]): pytest.approx(float(row["returns"]), abs=1e-5) for row in table}

    counted = step_counts(directory)
    assert balanced(counted)
    assert counted["produced"] == counted["ghost"] + counted["open"]
    assert counted["ghost"] >= sum(int(row["lengths"]) for row in table)


@pytest.mark.slow
def test_exit_status_reports_a_mean_reward_below_the_threshold(trained: Path) -> None:
    """No mean reward of this game reaches 99; the result is written nevertheless."""
    _, found = evaluated(trained, "--episodes", "5", "--at-least", "99", "--in-process", status=4)
    assert found["complete"] is True
    assert found["behaviors"]["Goal"]["reward"]["max"] < 99
    (newest,) = (trained / "Goal").glob("checkpoint-*")
    named = ("--checkpoint", f"Goal={newest.name}")
    _, found = evaluated(trained, "--episodes", "1", "--at-least", "-99", *named, "--in-process")
    assert found["behaviors"]["Goal"]["reward"]["interval"] is None
    assert found["behaviors"]["Goal"]["checkpoint"].endswith(newest.name)


@pytest.mark.slow
def test_the_same_seed_plays_the_same_episodes(trained: Path) -> None:
    """Lockstep with the most likely actions repeats, as processes or in one; another seed plays other episodes."""
    arguments = ("--episodes", "30", "--deterministic")
    first, _ = evaluated(trained, *arguments, "--seed", "7", "--in-process")
    assert rows(evaluated(trained, *arguments, "--seed", "7")[0]) == rows(first)
    assert rows(evaluated(trained, *arguments, "--seed", "8", "--in-process")[0]) != rows(first)


@pytest.mark.slow
def test_interrupted_evaluation_is_not_complete(trained: Path) -> None:
    command = PlayCommand("evaluate", str(trained), "--episodes", str(MANY), "--in-process")
    command.playing()
    command.process.send_signal(signal.SIGINT)
    assert command.end() == 1, command.text
    found = json.loads((command.directory / "evaluation.json").read_text())
    assert (found["status"], found["complete"]) == ("stopped", False)
    assert 0 < found["behaviors"]["Goal"]["episodes"] < MANY
    assert balanced(step_counts(command.directory))


# ---------------------------------------------------------------- killed processes


@pytest.mark.slow
def test_killed_player_ends_the_evaluation_with_missing_episodes(trained: Path) -> None:
    command = PlayCommand("evaluate", str(trained), "--episodes", str(MANY))
    command.playing()
    command.kill("learning-Goal")
    assert command.end() == 1, command.text
    summary = command.summary
    assert summary["status"] == "failed"
    assert "learning-Goal" in summary["error"]
    assert "episodes are missing" in summary["error"]
    assert "episodes are missing" in command.text
    found = json.loads((command.directory / "evaluation.json").read_text())
    assert (found["status"], found["complete"]) == ("failed", False)


@pytest.mark.slow
def test_killed_simulator_restarts_and_the_evaluation_completes(trained: Path) -> None:
    """Its unfinished episodes are left out, and later ones count instead."""
    command = PlayCommand("evaluate", str(trained), "--episodes", str(episodes_wanted := 1000))
    command.wait_for(lambda lines: any("  behavior  " in line for line in lines))
    (simulator,) = [one for one in psutil.Process(command.process.pid).children(recursive=True) if _is_simulator(one)]
    command.playing()
    os.kill(simulator.pid, signal.SIGKILL)
    assert command.end() == 0, command.text
    assert any(entry["event"] == "failed" and entry["part"] == "simulator-0" for entry in command.log())
    episodes = [int(row["agents"]) for row in rows(command.directory)]
    assert len(episodes) == episodes_wanted
    assert episodes == sorted(episodes)
    assert 1 <= episodes[-1] - episodes_wanted <= 2  # each of two areas had an unfinished episode
    counted = step_counts(command.directory)
    assert counted["produced"] == counted["ghost"] + counted["open"]


def _is_simulator(process: psutil.Process) -> bool:
    return " ".join(process.cmdline()).startswith("sparring simulator")


# ---------------------------------------------------------------- inference


@pytest.mark.slow
def test_inference_plays_until_it_is_interrupted(trained: Path) -> None:
    """Inference does not change the trained run, and ends in order."""
    before = digests(trained)
    arguments = ["--results-dir", str(trained.parent), "--run-id", trained.name]
    command = PlayCommand("train", str(trained / "config.yaml"), *arguments, "--inference")
    command.playing()
    command.process.send_signal(signal.SIGINT)
    assert command.end() == 0, command.text
    assert digests(trained) == before
    assert command.directory.name.startswith("inference-")
    assert command.summary["status"] == "stopped"
    counted = step_counts(command.directory)
    assert balanced(counted)
    assert counted["trained"] == counted["stale"] == counted["lost"] == 0
    assert counted["ghost"] > 100
    copied = command.directory / "checkpoints" / "Goal"
    assert [path.parent for path in command.directory.rglob("checkpoint-*")] == [copied]  # the played checkpoint only


# ---------------------------------------------------------------- bad input


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command that is refused, and returns its error message."""

    def run(*arguments: str) -> str:
        assert main([str(argument) for argument in arguments]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        return output.err

    return run


def untrained(folder: Path) -> Path:
    """Returns the folder of a run that was prepared and has no checkpoint."""
    from sparring.pipeline.settings import read as read_settings
    from sparring.services.supervision.topology import build

    directory = folder / "bare"
    directory.mkdir()
    build(read_settings(configuration(folder)).settings, run_id="bare", directory=directory, seed=1).save()
    return directory


def test_folder_without_a_run_is_refused(tmp_path: Path, error_of: Any) -> None:
    message = error_of("evaluate", tmp_path)
    assert str(tmp_path / "run.json") in message
    assert "name the folder of a run" in message
    (tmp_path / "run.json").write_text("{}")
    assert "cannot be used" in error_of("evaluate", tmp_path)
    (tmp_path / "mine").mkdir()
    message = error_of("evaluate", "nowhere", "--results-dir", tmp_path)
    assert f"got run 'nowhere'; expected a folder, or one of the runs in {tmp_path}: mine" in message


def test_run_is_found_by_folder_or_id(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert find("mine", tmp_path) == find(tmp_path / "mine", Path("results")) == tmp_path / "mine"


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path, error_of: Any) -> None:
    message = error_of("evaluate", untrained(tmp_path))
    assert "got no checkpoint" in message
    assert "Goal" in message
    assert "train it first" in message


def test_unknown_checkpoint_is_refused_with_the_known_ones(tmp_path: Path, error_of: Any) -> None:
    directory = untrained(tmp_path)
    (directory / "Goal" / "checkpoint-000000000064").mkdir(parents=True)
    message = error_of("evaluate", directory, "--checkpoint", "checkpoint-7")
    assert "got no checkpoint checkpoint-7 of Goal" in message
    assert "checkpoint-000000000064" in message
    assert "correct --checkpoint" in message


@pytest.mark.parametrize("number", ["0", "-5", "1" + "0" * 400])
def test_number_of_episodes_must_be_positive(tmp_path: Path, error_of: Any, number: str) -> None:
    message = error_of("evaluate", untrained(tmp_path), "--episodes", number)
    assert f"got --episodes {number:.20}; expected more than 0" in message


def test_inference_needs_a_run_and_removes_none(tmp_path: Path, error_of: Any) -> None:
    directory, file = untrained(tmp_path), str(tmp_path / "goal.yaml")
    where = ("--results-dir", str(tmp_path))
    before = digests(directory)
    assert "without --run-id" in error_of("train", file, *where, "--inference")
    assert "with --force" in error_of("train", file, *where, "--run-id", "bare", "--inference", "--force")
    assert "got no checkpoint" in error_of("train", file, *where, "--run-id", "bare", "--inference")
    assert "got no checkpoint" in error_of("train", file, *where, "--run-id", "other", "--inference")
    assert digests(directory) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "goal.yaml"]


@pytest.mark.slow
def test_damaged_checkpoint_is_refused_by_name(trained: Path, tmp_path: Path, error_of: Any) -> None:
    """The command is refused before it starts any process or writes any file."""
    copy = tmp_path / "goal"
    shutil.copytree(trained, copy, ignore=shutil.ignore_patterns("evaluation-*", "inference-*"))
    (newest,) = (copy / "Goal").glob("checkpoint-*")
    weights = newest / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00\x01")
    message = error_of("evaluate", str(copy), "--episodes", "5", "--in-process")
    assert newest.name in message
    assert "damaged" in message
    assert not list(copy.glob("evaluation-*"))


def test_checkpoint_of_an_unknown_behavior_is_refused(tmp_path: Path, error_of: Any) -> None:
    message = error_of("evaluate", untrained(tmp_path), "--checkpoint", "Other=checkpoint-7")
    assert "--checkpoint for ['Other']; expected one of ['Goal']" in message


def test_lines_say_how_many_episodes_each_team_has_and_why_there_are_no_intervals() -> None:
    """Episodes are those that began first, so that matches may be cut."""
    several = np.array([0.0, 0.0, 0.0, 1.0])
    columns = dict.fromkeys(("returns", "shared_returns", "lengths", "outcomes"), several)
    columns["teams"] = several.astype(np.int64)
    for groups in (0, 1):
        found = {**describe({**columns, "groups": np.full(4, groups)}), "checkpoint": "c"}
        found["teams"] = by_team({**columns, "groups": np.full(4, groups)})
        lines = [*evaluate._lines({"episodes": 4, "behaviors": {"A": found}})]
        assert any(line.startswith("  team 0 (3 of them): lost 100.0%") for line in lines)
        assert any(line.startswith("  team 1 (1 of them): won 100.0%") for line in lines)
        assert ("no confidence intervals, because the members of a group" in lines[-1]) == bool(groups)
