"""Groups learn from shared rewards: within ML-Agents' own number of steps, and where PPO cannot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import yaml

from tests.services.services_helpers import Training, last_of, reaches, side_by_side

pytestmark = pytest.mark.slow

STEPS = 3_000
BUFFER = 64
SEEDS = (1, 2)
CONFIGS = Path(__file__).parents[2] / "configs"

ROOMS_STEPS = 60_000
ROOMS_LEARNED = 0.87
"""Nine tenths of the best mean return of a group: 1, less 0.01 for each of three to four decisions."""
ROOMS_MISSED = 0.43
"""Less than half of `ROOMS_LEARNED`."""


def learn(folder: Path, names: tuple[str, ...], max_steps: int, **options: Any) -> None:
    """Checks that the mean group reward of each behavior exceeds 0.9 in two tenths in succession, for each seed."""
    schedules = {f"{name}_schedule": "constant" for name in ("learning_rate", "beta", "epsilon")}
    behavior = {
        "trainer_type": "poca",
        "hyperparameters": {"batch_size": 16, "buffer_size": BUFFER, "learning_rate": 5e-3, **schedules},
        "network_settings": {"hidden_units": 32, "num_layers": 1},
        "max_steps": max_steps,
        "time_horizon": 64,
        "summary_freq": STEPS // 10,
    }
    plain = {
        "behaviors": dict.fromkeys(names, behavior),
        "simulators": [{"name": "goals", "options": options}],
        "pipeline": {"mode": "lockstep"},
    }
    for run in side_by_side(folder, plain, SEEDS):
        reaches(run, 0.9, *names, key="group_reward")


def rooms(folder: Path, trainer: str, mode: str, seeds: Sequence[int]) -> list[Training]:
    """Starts a run of `configs/rooms.yaml` for each seed."""
    plain = yaml.safe_load((CONFIGS / "rooms.yaml").read_text())
    plain["behaviors"]["Rooms"] |= {"trainer_type": trainer, "max_steps": ROOMS_STEPS}
    plain["pipeline"] = {"mode": mode}
    return side_by_side(folder, plain, seeds)


@pytest.mark.parametrize("discrete", [False, True])
def test_group_whose_members_end_one_by_one_learns(tmp_path: Path, discrete: bool) -> None:
    """Steps are counted per agent, and the last update may exceed `max_steps` by less than a buffer."""
    learn(tmp_path, ("Goals",), STEPS - BUFFER, discrete=discrete)


def test_group_of_two_behaviors_learns(tmp_path: Path) -> None:
    """Each behavior has its own learner, observations and actions, and both must reach their goals."""
    learn(tmp_path, ("Goals", "GoalsOdd"), STEPS, mixed=True)


def test_member_is_credited_with_rewards_after_its_end(tmp_path: Path) -> None:
    """The group earns a reward only if one member ends its own episode before."""
    (run,) = rooms(tmp_path, "poca", "overlap", (1,))
    reaches(run, ROOMS_LEARNED, "Rooms", key="group_reward")


def test_ppo_gives_no_credit_for_rewards_after_the_end(tmp_path: Path) -> None:
    """PPO sees rewards up to an agent's end only, so the test above proves credit beyond it.

    Single outcomes vary, with the seed and with the CPU: of twelve seeds, the last intervals have a mean of 0.21 and a
    standard deviation of 0.16. So the mean of six seeds is compared.
    """
    runs = rooms(tmp_path, "ppo", "lockstep", range(1, 7))
    assert mean(last_of(run, "Rooms", "group_reward", 3) for run in runs) < ROOMS_MISSED
