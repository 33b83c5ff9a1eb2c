"""Agents learn the goal game with every kind of observation and action, within ML-Agents' own number of steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.services.services_helpers import Training, last_of, reaches, side_by_side

pytestmark = pytest.mark.slow

STEPS = 3_000
FIRST_STEPS = 900
SEEDS = (1, 4)
"""Not every seed learns in so few steps: of 1 to 10, 8 do with hybrid actions, and 9 with images for `resnet`."""

LARGER = {"batch_size": 32, "buffer_size": 128}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # options of the simulator, changes to the network, changes to the hyperparameters
    "one camera": ({"observe": "image"}, {}, {"learning_rate": 3e-3}),
    "two cameras": ({"observe": "image+image"}, {}, {"learning_rate": 3e-3} | LARGER),
    "entities": ({"observe": "entities"}, {}, {}),
    "entities and a vector": ({"observe": "vector+entities"}, {}, {}),
    "conditioned by the goal": ({"observe": "vector+goal"}, {}, {}),
    "hybrid actions": ({"hybrid": True}, {}, {}),
    "previous action": ({}, {"previous_action": True}, {}),
    "a shared critic": ({}, {}, {"shared_critic": True}),
}
MEMORY_STEPS = 6_000
MEMORY = {
    "network": {"memory": {"sequence_length": 8, "memory_size": 16}},
    "hyper": {"batch_size": 64, "buffer_size": 512, "learning_rate": 1e-2, "num_epoch": 6},
}
ENCODERS = {"simple": 20, "nature_cnn": 36, "resnet": 15, "match3": 5, "fully_connected": 1}


def runs(
    folder: Path, steps: int, options: dict[str, Any], seeds: Sequence[int] = SEEDS, **changes: dict[str, Any]
) -> list[Training]:
    """Starts a lockstep run for each seed, whose intervals are tenths of it; the runs are parallel."""
    schedules = {f"{name}_schedule": "constant" for name in ("learning_rate", "beta", "epsilon")}
    hyper = {"batch_size": 16, "buffer_size": 64, "learning_rate": 5e-3, **schedules} | changes["hyper"]
    plain = {
        "behaviors": {
            "Goal": {
                "hyperparameters": hyper,
                "network_settings": {"hidden_units": 32, "num_layers": 1} | changes["network"],
                "max_steps": steps - hyper["buffer_size"],  # the last update may exceed it by less than a buffer
                "time_horizon": 64,
                "summary_freq": steps // 10,
            }
        },
        "simulators": [{"name": "goal", "options": options}],
        "pipeline": {"mode": "lockstep"},
    }
    return side_by_side(folder, plain, seeds)


def learn(training: Sequence[Training], steps: int) -> None:
    """Checks that the mean reward exceeds 0.9 in two tenths in succession; nothing more is trained then."""
    for run in training:
        reaches(run, 0.9, "Goal")
        assert run.summary["behaviors"]["Goal"]["steps"] <= steps


@pytest.mark.parametrize("case", CASES)
def test_agent_learns_with_its_observations_and_actions(tmp_path: Path, case: str) -> None:
    options, network, hyper = CASES[case]
    learn(runs(tmp_path, STEPS, options, network=network, hyper=hyper), STEPS)


def test_agent_with_memory_reaches_a_goal_that_is_visible_for_two_steps(tmp_path: Path) -> None:
    learn(runs(tmp_path, MEMORY_STEPS, {"memory": True}, **MEMORY), MEMORY_STEPS)


def test_agent_without_memory_does_not_learn_that_goal(tmp_path: Path) -> None:
    """Two steps are too few to reach the goal, so the test above proves memory."""
    (run,) = runs(tmp_path, MEMORY_STEPS, {"memory": True}, SEEDS[:1], network={}, hyper=MEMORY["hyper"])
    assert last_of(run, "Goal", "reward") < 0.7


@pytest.mark.parametrize("encoder", ENCODERS)
def test_every_encoder_learns_from_its_smallest_image(tmp_path: Path, encoder: str) -> None:
    options: dict[str, Any] = {"observe": "image", "pixels": ENCODERS[encoder]}
    network: dict[str, Any] = {"vis_encode_type": encoder}
    hyper = {"learning_rate": 1e-3}
    if encoder == "fully_connected":  # a single pixel
        network, hyper = network | {"hidden_units": 64}, {"learning_rate": 2e-3}
    for run in runs(tmp_path, FIRST_STEPS, options, network=network, hyper=hyper):
        assert last_of(run, "Goal", "reward") > 0.5
