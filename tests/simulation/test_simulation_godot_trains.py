"""A scripted Godot game trains the goal game end to end, with command, bridge and game as processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.services.services_helpers import Training, reaches
from tests.services.started import SAME_EVERYWHERE

pytestmark = pytest.mark.slow

GAME = str(Path(__file__).with_name("godot_game.py"))
STEPS = 3_000
BUFFER = 128


def train(folder: Path, behaviors: list[str], **options: Any) -> Training:
    """Starts a lockstep training in `folder`."""
    schedules = {f"{name}_schedule": "constant" for name in ("learning_rate", "beta", "epsilon")}
    behavior = {
        "hyperparameters": {"batch_size": 32, "buffer_size": BUFFER, "learning_rate": 5e-3, **schedules},
        "network_settings": {"hidden_units": 32, "num_layers": 1},
        "max_steps": STEPS - BUFFER,  # the last update may exceed it by less than a buffer
        "summary_freq": STEPS // 10,
    }
    plain = {
        "behaviors": dict.fromkeys(behaviors, behavior),
        "simulators": [{"name": "godot", "options": {"path": GAME, **options}}],
        "pipeline": {"mode": "lockstep", "restarts": {"budget": 1, "backoff_s": 0.1}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(plain))
    return Training(folder, str(folder / "config.yaml"), "--in-process", "--seed", "1", environment=SAME_EVERYWHERE)


@pytest.mark.parametrize(
    ("behaviors", "options"),
    [
        (["Godot"], {"generation": 1}),
        (["walker", "hopper"], {"kinds": "walker,hopper", "late": True}),
    ],
    ids=["one policy of the first generation", "two policies with different spaces"],
)
def test_a_godot_game_learns_the_goal_game(tmp_path: Path, behaviors: list[str], options: dict[str, Any]) -> None:
    """The mean reward exceeds 0.9 within 3000 steps of each policy; 1.02 is the best possible."""
    training = train(tmp_path, behaviors, **options)
    reaches(training, 0.9, *behaviors)
    for behavior in behaviors:
        assert training.summary["behaviors"][behavior]["steps"] <= STEPS


def test_a_game_that_always_crashes_fails_the_run_with_its_name(tmp_path: Path) -> None:
    """It is restarted as often as the settings allow, and then the run fails with the cause."""
    training = train(tmp_path, ["walker"], fault="crash", at=3)
    assert training.end() != 0
    assert "Godot game 0, stepping: the end of the game by exit status 9" in "\n".join(training.lines)
