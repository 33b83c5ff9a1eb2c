"""Unity players in whole runs: `sparring train CONFIG --env PATH`, with stand-ins that play over real gRPC."""

from __future__ import annotations

import argparse
import json
import math
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from sparring.pipeline.errors import UNUSABLE
from sparring.pipeline.games.registry import parse_options
from sparring.pipeline.settings import Settings, read
from sparring.services.commands import train as command
from sparring.services.commands.check import summary
from sparring.services.stages import simulator
from sparring.services.supervision.topology import Restarts, SimulatorPlan, build
from tests.services.services_helpers import Training, balanced, last_of
from tests.services.unity_runs import BEHAVIOR, executable, heard, intervals, players, settings, train

GOAL = {
    "hyperparameters": {
        "batch_size": 16,
        "buffer_size": 64,
        "learning_rate": 5e-3,
        **{f"{name}_schedule": "constant" for name in ("learning_rate", "beta", "epsilon")},
    },
    "network_settings": {"hidden_units": 32, "num_layers": 1},
    "max_steps": 1400,
    "time_horizon": 64,
    "summary_freq": 350,
}
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
"""Mean reward of balance is 3 without training, and 100 at best."""


# ---------------------------------------------------------------- what the words become


def asked(folder: Path, *words: str, **top: Any) -> Settings:
    """The settings of a command line."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args([settings(folder, "Ball", **top), *words])
    return read(args.config, command._overrides(args)).settings


def plans(folder: Path, *words: str, **top: Any) -> tuple[SimulatorPlan, ...]:
    """The simulators that a command line launches."""
    return build(asked(folder, *words, **top), run_id="r", directory=folder, seed=100).simulators


def options_of(plan: SimulatorPlan) -> tuple[int, dict[str, Any]]:
    """Areas, and options in their types, as the simulator's process reads them."""
    parser = argparse.ArgumentParser()
    simulator.add_arguments(parser)
    args = parser.parse_args(plan.command[5:])
    assert args.name == "unity"
    return args.areas, parse_options("unity", args.option)


def test_the_words_of_mlagents_learn_reach_every_player(tmp_path: Path) -> None:
    """Flags before the file before the defaults; what follows --env-args is the build's."""
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


def test_a_file_says_the_same_as_the_flags(tmp_path: Path) -> None:
    """`env_settings` and `engine_settings` with the keys of ML-Agents."""
    environment = {"env_path": "Ball", "num_envs": 2, "num_areas": 3, "base_port": 7000, "env_args": ["--level", "a b"]}
    by_file = plans(tmp_path, env_settings=environment, engine_settings={"time_scale": 2.0, "no_graphics": True})
    words = ["--env", "Ball", "--num-envs", "2", "--num-areas", "3", "--base-port", "7000", "--time-scale", "2"]
    by_flags = plans(tmp_path, *words, "--no-graphics", "--env-args", "--level", "a b")
    assert [options_of(plan) for plan in by_file] == [options_of(plan) for plan in by_flags]


def test_of_several_players_the_first_alone_may_show_what_it_does(tmp_path: Path) -> None:
    several = ("--env", "Ball", "--num-envs", "3")

    def without_graphics(*words: str) -> list[Any]:
        return [options_of(plan)[1]["no_graphics"] for plan in plans(tmp_path, *several, *words)]

    assert without_graphics("--no-graphics-monitor") == [False, True, True]
    assert without_graphics("--no-graphics-monitor", "--num-envs", "1") == [False]
    assert without_graphics("--no-graphics-monitor", "--no-graphics") == [True, True, True]
    numbers = [plan.environment["SPARRING_NUMBER"] for plan in plans(tmp_path, *several, "--no-graphics-monitor")]
    assert numbers == ["0", "1", "2"], "each listens on the port of its number"


def test_without_a_build_the_run_waits_for_the_editor(tmp_path: Path) -> None:
    """One simulator that listens on the editor's port, as none is named; other simulators or an address end that."""
    (plan,) = plans(tmp_path)
    options = options_of(plan)[1]
    assert not {"path", "port"} & options.keys()
    assert "simulator: the Unity editor, when Play is pressed" in summary(asked(tmp_path))
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
def test_restarts_are_limited_as_the_settings_say(
    own: dict[str, int], expected: Restarts | None, tmp_path: Path
) -> None:
    """By the file or by flags; -1 is no limit; where nothing is said, a player may fail as often as a service."""
    words = [word for key, value in own.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    for found in (
        plans(tmp_path, env_settings={"env_path": "Ball", **own}),
        plans(tmp_path, "--env", "Ball", *words),
    ):
        assert [plan.restarts for plan in found] == [expected]


# ---------------------------------------------------------------- runs that learn


def finished(training: Training, behaviors: str | tuple[str, ...], count: int) -> None:
    """A run that completed: books balance, the simulators counted the same steps, each player was told to quit."""
    assert training.end() == 0, "\n".join(training.lines)
    result = training.summary
    names = (behaviors,) if isinstance(behaviors, str) else behaviors
    step_counts = [result["behaviors"][name]["step_counts"] for name in names]
    assert result["status"] == "completed"
    assert all(map(balanced, step_counts)), step_counts
    assert not any(one["lost"] for one in step_counts)
    assert sum(one["produced"] for one in step_counts) == training.simulator_steps()
    assert not [entry for entry in training.log() if entry["event"] == "failed"]
    for number in range(count):
        assert "quit: quit" in (training.directory / "run_logs" / f"Player-{number}.log").read_text()


@pytest.mark.slow
def test_one_player_and_four_learn_balance(tmp_path: Path) -> None:
    """In lockstep, twelve agents in all, 32,000 steps: balls stay up many times as long as untrained."""
    runs = {}
    for count in (1, 4):
        words = ("--game", "balance", "--areas", str(12 // count), "--statistics")
        program = executable(tmp_path, *words, name=f"Balance-{count}")
        config = settings(tmp_path, "Balance", mode="lockstep", own=BALANCE)
        runs[count] = train(tmp_path, config, program, count, "--in-process", run_id=f"run-{count}")
    for count, training in runs.items():
        finished(training, "Balance", count)
        rewards = [line["reward"] for line in intervals(training, "Balance") if line["reward"] is not None]
        assert rewards[0] < UNTRAINED
        # Of the last 100 episodes: an interval holds as many as the machine is fast.
        assert training.summary["behaviors"]["Balance"]["reward_mean_last100"] > 2.5 * UNTRAINED
        own = [line["simulators"] for line in intervals(training, "Balance")]
        kinds = {f"Player/{kind}" for kind in ("Average", "Histogram", "Latest", "Sum")}
        assert all(set(told) <= kinds for told in own)  # none is new in an interval between two reports of stepping
        assert set().union(*own) == kinds
        # Each message says 1, and which of its player's it is.
        messages = sum(told.get("Player/Sum", 0.0) for told in own) / count
        assert abs(messages - own[-1]["Player/Latest"]) < 2
        assert messages > training.summary["behaviors"]["Balance"]["steps"] / 12


@pytest.mark.slow
def test_one_player_and_four_learn_goal_and_hear_what_the_run_says(tmp_path: Path) -> None:
    """A mean reward above 0.9 within 1500 steps, at best it is 1.02, by chance below 0; one as processes.

    It hears seed, areas, engine settings, parameters and its own arguments; its logs stand where users look.
    """
    said = tmp_path / "heard"
    wind = {"sampler_type": "uniform", "sampler_parameters": {"min_value": 1.0, "max_value": 2.0}}
    top = {
        "environment_parameters": {"size": 1.5, "wind": wind},
        "engine_settings": {"width": 90, "height": 70, "time_scale": 7.0},
        "env_settings": {"env_args": ["--heard", str(said), "--level", "a b"]},
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
    (arguments,) = heard(said, "arguments")
    assert arguments == {"graphics": False, "batch": True, "unknown": ["--level", "a b"]}
    (initial,) = heard(said, "initialisation")
    assert (initial["seed"], initial["num_areas"], initial["communication_version"]) == (1, 1, "1.5.0")
    assert all(initial["capabilities"].values())
    assert [one["value"] for one in heard(said, "engine")] == [[90, 70], 5, 4.0, -1, 60]
    assert len(heard(said, "analytics")) == 2  # of the run, of its behavior
    assert {(one["key"], one["value"]) for one in heard(said, "parameter")} == {("size", 1.5)}
    assert {(one["key"], one["sampler"], tuple(one["values"])) for one in heard(said, "sampler")} == {
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
def test_teams_against_each_other_and_a_behavior_that_appears_late(tmp_path: Path) -> None:
    """Self-play of groups; and one of everything, with images, masks and a second learner whose agents come later."""
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
    assert set(rewards) - {None} == {0}, "what one team wins the other loses; an interval may see no end of an episode"
    finished(trained, ("Zoo", "Late"), 1)
    assert trained.summary["behaviors"]["Late"]["steps"] >= 150
    assert last_of(trained, "Zoo", "group_reward") == 2  # 0.5 and 0.5 for those that end before, and 1 for the last


# ---------------------------------------------------------------- runs with players that fail

STALL_S = 20
"""A healthy player starts within it, beside all others on a slow machine."""


def faulty(folder: Path) -> Path:
    """Players 1 and 3 stall and player 2 sends NaN after some messages of their first start; the other is healthy.

    Whoever starts again waits at a gate, which `{folder}/open` opens.
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
    """Whether a player does no more, by its own log."""
    path = training.directory / "run_logs" / f"Player-{number}.log"
    return path.exists() and " ERROR stalled" in path.read_text()


@pytest.mark.slow
def test_one_killed_one_stalled_one_that_sends_nan_and_one_that_goes_on(tmp_path: Path) -> None:
    """Each is told by name, phase and cause and comes back; meanwhile the steps of the fourth go on rising."""
    buffer = 512
    hyper = {**BEHAVIOR["hyperparameters"], "buffer_size": buffer}
    own = {**BEHAVIOR, "hyperparameters": hyper, "summary_freq": buffer, "max_steps": 10_000_000}
    config = settings(tmp_path, "Balance", own=own)
    training = train(tmp_path, config, faulty(tmp_path), 4, "--timeout-wait", str(STALL_S))
    training.wait_for(lambda _: stalled(training, 3))
    players(training)[3].kill()
    for part in ("simulator-2", "simulator-3"):
        training.wait_for(_told(part))
    training.wait_for(lambda _: stalled(training, 1))
    training.updates(2)  # they tell of all that was done before
    alone = intervals(training, "Balance")[-1]["step"] + 2 * 2 * buffer  # twice what may be in flight of all of them
    training.wait_for(lambda _: intervals(training, "Balance")[-1]["step"] > alone)
    (tmp_path / "open").touch()
    training.wait_for(_told("simulator-1"))
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


def _told(part: str) -> Any:
    return lambda lines: any("failed" in line and part in line for line in lines)


def _events(training: Training, event: str, part: str) -> list[dict[str, Any]]:
    return [entry for entry in training.log() if entry["event"] == event and entry["part"] == part]


def _connected(training: Training) -> int:
    status = json.loads((training.directory / "status.json").read_text())
    return int(status["services"]["stepping-0"]["simulators"])


@pytest.mark.slow
def test_a_player_that_fails_too_often_ends_the_run(tmp_path: Path) -> None:
    """By the limit in all or by that of a period, while the other is -1; the message says how often and why."""
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


def test_a_build_that_is_not_there_is_not_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The simulator's exit status says so, and its last line what there is."""
    (tmp_path / "Ball.txt").touch()
    (plan,) = plans(tmp_path, "--env", str(tmp_path / "Ball"))
    assert simulator.main([*plan.command[5:], "--connect", "tcp://127.0.0.1:1"]) == UNUSABLE
    assert f"got the build {tmp_path}/Ball, which is not there" in (said := capsys.readouterr().err)
    assert "there are Ball.txt, config.yaml" in said
