"""Whole runs with simulated Unity players over real gRPC: `sparring train CONFIG --env PATH`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest

from sparring.pipeline.errors import UNUSABLE
from sparring.pipeline.games.registry import parse_options
from sparring.pipeline.settings import Settings, read
from sparring.services.commands import train as command
from sparring.services.commands.check import summary
from sparring.services.main import main
from sparring.services.stages import simulator
from sparring.services.supervision.topology import Restarts, SimulatorPlan, build
from tests.services.services_helpers import Training, balanced, last_of, reaches
from tests.services.unity_runs import GOAL, executable, intervals, player_events, settings, train

BALANCE = {
    "hyperparameters": {
        "batch_size": 256,
        "buffer_size": 2048,
        "learning_rate": 3e-3,
        "learning_rate_schedule": "constant",
        "beta": 1e-3,
        "num_epoch": 4,
    },
    "network_settings": {"hidden_units": 64, "num_layers": 1, "normalize": True},
    "max_steps": 32_000,
    "time_horizon": 64,
    "summary_freq": 4000,
}
UNTRAINED = 4.0
"""Limit of the mean reward of untrained agents, which is about 3; the best is 100."""


# ---------------------------------------------------------------- options


def settings_from(folder: Path, *words: str, **top: Any) -> Settings:
    """Returns the settings of a command line."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args([settings(folder, "Ball", **top), *words])
    return read(args.config, command._overrides(args)).settings


def plans(folder: Path, *words: str, **top: Any) -> tuple[SimulatorPlan, ...]:
    """Returns the simulators that a command line launches."""
    return build(settings_from(folder, *words, **top), run_id="r", directory=folder, seed=100).simulators


def options_of(plan: SimulatorPlan) -> tuple[int, dict[str, Any]]:
    """Returns areas and typed options as the simulator's process reads them."""
    parser = argparse.ArgumentParser()
    simulator.add_arguments(parser)
    args = parser.parse_args(plan.command[5:])
    assert args.name == "unity"
    return args.areas, parse_options("unity", args.option)


def test_options_of_mlagents_learn_reach_every_player(tmp_path: Path) -> None:
    """Flags override the file, which overrides defaults; words after --env-args are for the build."""
    words = ["--env", "Builds/Ball", "--num-envs", "3", "--num-areas", "2", "--base-port", "6000", "--no-graphics"]
    words += ["--timeout-wait", "9", "--time-scale", "3", "--width", "100", "--target-frame-rate", "-1"]
    words += ["--env-args", "--level", "two words", "-x", "--seed", "5"]
    found = plans(tmp_path, *words, engine_settings={"width": 50, "height": 60, "capture_frame_rate": 0})
    assert [plan.name for plan in found] == ["simulator-0", "simulator-1", "simulator-2"]
    for number, plan in enumerate(found):
        areas, options = options_of(plan)
        assert areas == 2
        assert options == {
            "path": "Builds/Ball",
            "port": 6000,
            "arguments": "--level 'two words' -x --seed 5",
            "no_graphics": True,
            "timeout_s": 9.0,
            "width": 100,
            "height": 60,
            "quality_level": 5,
            "time_scale": 3.0,
            "target_frame_rate": -1,
            "capture_frame_rate": 0,
        }
        assert plan.environment["SPARRING_NUMBER"] == str(number)
        assert plan.environment["SPARRING_SEED"] == str(100 + number)
        assert plan.environment["SPARRING_LOGS"] == str(tmp_path / "run_logs")


def test_settings_of_a_file_equal_those_of_flags(tmp_path: Path) -> None:
    """`env_settings` and `engine_settings` have the keys of ML-Agents."""
    environment = {"env_path": "Ball", "num_envs": 2, "num_areas": 3, "base_port": 7000, "env_args": ["--level", "a b"]}
    by_file = plans(tmp_path, env_settings=environment, engine_settings={"time_scale": 2.0, "no_graphics": True})
    words = ["--env", "Ball", "--num-envs", "2", "--num-areas", "3", "--base-port", "7000", "--time-scale", "2"]
    by_flags = plans(tmp_path, *words, "--no-graphics", "--env-args", "--level", "a b")
    assert [options_of(plan) for plan in by_file] == [options_of(plan) for plan in by_flags]


def test_no_graphics_monitor_shows_the_first_of_several_players_only(tmp_path: Path) -> None:
    several = ("--env", "Ball", "--num-envs", "3")

    def without_graphics(*words: str) -> list[Any]:
        return [options_of(plan)[1]["no_graphics"] for plan in plans(tmp_path, *several, *words)]

    assert without_graphics("--no-graphics-monitor") == [False, True, True]
    assert without_graphics("--no-graphics-monitor", "--num-envs", "1") == [False]
    assert without_graphics("--no-graphics-monitor", "--no-graphics") == [True, True, True]
    numbers = [plan.environment["SPARRING_NUMBER"] for plan in plans(tmp_path, *several, "--no-graphics-monitor")]
    assert numbers == ["0", "1", "2"], "each listens on the port of its number"


def test_run_without_a_build_waits_for_the_editor(tmp_path: Path) -> None:
    """Without other simulators and without an address, one simulator listens on the editor's port."""
    (plan,) = plans(tmp_path)
    options = options_of(plan)[1]
    assert not {"path", "port"} & options.keys()
    assert "simulator: the Unity editor, when Play is pressed" in summary(settings_from(tmp_path))
    assert [one.command[5] for one in plans(tmp_path, simulators=[{"name": "goal"}])] == ["goal"]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, None),
        ({"max_lifetime_restarts": 4}, Restarts(budget=1, period_s=60, lifetime=4)),
        ({"restarts_rate_limit_n": 3, "restarts_rate_limit_period_s": 9}, Restarts(budget=3, period_s=9, lifetime=10)),
        (
            {"max_lifetime_restarts": -1, "restarts_rate_limit_n": -1},
            Restarts(budget=math.inf, period_s=60, lifetime=math.inf),
        ),
    ],
)
def test_settings_limit_restarts(own: dict[str, int], expected: Restarts | None, tmp_path: Path) -> None:
    """The file or flags limit restarts, and -1 is no limit; by default a player may fail as often as a service."""
    words = [word for key, value in own.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    for found in (
        plans(tmp_path, env_settings={"env_path": "Ball", **own}),
        plans(tmp_path, "--env", "Ball", *words),
    ):
        assert [plan.restarts for plan in found] == [expected]


# ---------------------------------------------------------------- runs that learn


def finished(
    training: Training,
    behaviors: str | tuple[str, ...],
    count: int,
    statuses: tuple[str, ...] = ("completed",),
) -> None:
    """Checks that a run ended, its step counts balance and agree with simulators, and each player received quit."""
    assert training.end() == 0, "\n".join(training.lines)
    result = training.summary
    names = (behaviors,) if isinstance(behaviors, str) else behaviors
    step_counts = [result["behaviors"][name]["step_counts"] for name in names]
    assert result["status"] in statuses
    assert all(map(balanced, step_counts)), step_counts
    assert not any(one["lost"] for one in step_counts)
    assert sum(one["produced"] for one in step_counts) == training.simulator_steps()
    assert not [entry for entry in training.log() if entry["event"] == "failed"]
    for number in range(count):
        assert "quit: status 400" in (training.directory / "run_logs" / f"Player-{number}.log").read_text()


@pytest.mark.slow
def test_one_player_and_four_learn_balance(tmp_path: Path) -> None:
    """Within 32,000 steps, twelve agents in lockstep balance much longer than untrained ones."""
    runs = {}
    for count in (1, 4):
        words = ("--game", "balance", "--areas", str(12 // count), "--statistics")
        program = executable(tmp_path, *words, name=f"Balance-{count}")
        config = settings(tmp_path, "Balance", mode="lockstep", own=BALANCE)
        runs[count] = train(tmp_path, config, program, count, "--in-process", run_id=f"run-{count}")
    for count, training in runs.items():
        reaches(training, 2.5 * UNTRAINED, "Balance")
        finished(training, "Balance", count, ("stopped", "completed"))  # the bar may be reached at the very end
        rewards = [line["reward"] for line in intervals(training, "Balance") if line["reward"] is not None]
        assert max(rewards) > 2 * rewards[0], rewards  # the clock decides how much of its first interval is trained
        own = [line["simulators"] for line in intervals(training, "Balance")]
        kinds = {f"Player/{kind}" for kind in ("Average", "Histogram", "Latest", "Sum")}
        assert all(set(numbers) <= kinds for numbers in own)  # an interval may have no new report of stepping
        assert set().union(*own) == kinds
        # Each message adds 1 to the sum, and its latest value is its number.
        messages = sum(numbers.get("Player/Sum", 0.0) for numbers in own) / count
        assert abs(messages - own[-1]["Player/Latest"]) < 2
        assert messages > training.summary["behaviors"]["Balance"]["steps"] / 12


@pytest.mark.slow
def test_one_player_and_four_learn_goal_and_receive_the_settings_of_the_run(tmp_path: Path) -> None:
    """The mean reward exceeds 0.9 within 1500 steps; the best is 1.02, and chance gives less than 0.

    The single player receives seed, areas, engine settings, parameters and its own arguments.
    """
    report = tmp_path / "player_events"
    wind = {"sampler_type": "uniform", "sampler_parameters": {"min_value": 1.0, "max_value": 2.0}}
    top = {
        "environment_parameters": {"size": 1.5, "wind": wind},
        "engine_settings": {"width": 90, "height": 70, "time_scale": 7.0},
        "env_settings": {"env_args": ["--events", str(report), "--level", "a b"]},
    }
    program = executable(tmp_path, "--game", "goal")
    four = settings(tmp_path, "Goal", mode="lockstep", own=GOAL)
    one = settings(tmp_path, "Goal", mode="lockstep", own=GOAL, name="one.yaml", analytics=True, **top)
    runs = {
        4: train(tmp_path, four, program, 4, "--in-process", run_id="run-4"),
        1: train(tmp_path, one, program, 1, "--time-scale", "4", run_id="run-1"),
    }
    for count, training in runs.items():
        finished(training, "Goal", count)
        assert last_of(training, "Goal", "reward") > 0.9
        assert training.summary["behaviors"]["Goal"]["steps"] <= 1500
    (arguments,) = player_events(report, "arguments")
    assert arguments == {"graphics": False, "batch": True, "unknown": ["--level", "a b"]}
    (initial,) = player_events(report, "initialization")
    assert (initial["seed"], initial["num_areas"], initial["communication_version"]) == (1, 1, "1.5.0")
    assert all(initial["capabilities"].values())
    assert [one["value"] for one in player_events(report, "engine")] == [[90, 70], 5, 4.0, -1, 60]
    assert len(player_events(report, "analytics")) == 2  # of the run, of its behavior
    assert {(one["key"], one["value"]) for one in player_events(report, "parameter")} == {("size", 1.5)}
    assert {(one["key"], one["sampler"], tuple(one["values"])) for one in player_events(report, "sampler")} == {
        ("wind", "uniform", (1.0, 2.0))
    }
    assert {path.name for path in (runs[1].directory / "run_logs").iterdir()} == {"Player-0.log", "Player-0.out"}


SMALL = {
    "trainer_type": "poca",
    "hyperparameters": {"batch_size": 32, "buffer_size": 128, "num_epoch": 1},
    "network_settings": {"hidden_units": 16, "num_layers": 1, "vis_encode_type": "match3"},
    "max_steps": 600,
    "time_horizon": 16,
    "summary_freq": 200,
}
SELF_PLAY = {"save_steps": 100, "swap_steps": 100, "team_change": 200, "window": 3}


@pytest.mark.slow
def test_runs_with_self_play_of_groups_and_with_a_late_behavior_complete(tmp_path: Path) -> None:
    """One run has self-play of groups; the other has images, masks and a second behavior that appears later."""
    soccer = executable(tmp_path, "--game", "soccer", "--areas", "2", "--max-steps", "25", name="Soccer")
    zoo = executable(tmp_path, "--game", "zoo", "--areas", "2", "--late-after", "40", name="Zoo")
    both = {"behaviors": {"Zoo": SMALL, "Late": {**SMALL, "trainer_type": "ppo", "max_steps": 150}}}
    teams = settings(tmp_path, "SoccerTwos", own={**SMALL, "self_play": SELF_PLAY}, name="soccer.yaml")
    late = settings(tmp_path, "Zoo", name="zoo.yaml", **both)
    played = train(tmp_path, teams, soccer, 1, "--in-process", run_id="soccer")
    trained = train(tmp_path, late, zoo, 1, "--in-process", run_id="zoo")
    finished(played, "SoccerTwos", 1)
    step_counts = played.summary["behaviors"]["SoccerTwos"]["step_counts"]
    assert (step_counts["trained"] >= 600, step_counts["ghost"] > 200) == (True, True)
    rewards = [line["group_reward"] for line in intervals(played, "SoccerTwos")]
    assert set(rewards) - {None} == {0}, "a zero-sum game; an interval may have no end of an episode"
    finished(trained, ("Zoo", "Late"), 1)
    assert trained.summary["behaviors"]["Late"]["steps"] >= 150
    assert last_of(trained, "Zoo", "group_reward") == 2  # 0.5 and 0.5 for those that end before, and 1 for the last


def test_missing_build_is_not_started_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The simulator exits with its own status, and its last line lists the files that exist."""
    (tmp_path / "Ball.txt").touch()
    (plan,) = plans(tmp_path, "--env", str(tmp_path / "Ball"))
    assert main([*plan.command[4:], "--connect", "tcp://127.0.0.1:1"]) == UNUSABLE
    assert f"got the build {tmp_path}/Ball, which is not there" in (report := capsys.readouterr().err)
    assert "there are Ball.txt, config.yaml" in report
