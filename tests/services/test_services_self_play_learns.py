"""ML-Agents' own four self-play tests, in lockstep with one agent per team."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.games.duel import Duel
from tests.services.self_play_checks import check_no_resets, check_step_counts
from tests.services.self_play_runs import KINDS, Play, plain_settings, run_to_end

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fixed_order")]

BUFFER = 64
LEARNING = {
    "batch_size": 16,
    "buffer_size": BUFFER,
    "learning_rate": 5e-3,
    "learning_rate_schedule": "constant",
    "beta_schedule": "constant",
    "epsilon_schedule": "constant",
}
LEARNED = 0.9
"""Mean return of the last episodes of a trained side; that of an untrained side is about 0."""


LAST = 20
"""Number of episodes whose mean counts."""


def means(play: Play) -> list[float]:
    """Returns the mean return of the last episodes of each side, the lower first; none before there are enough."""
    found = [sum(ended[-LAST:]) / LAST for ended in play.games[0].returns.values() if len(ended) >= LAST]
    return sorted(found) if len(found) == 2 else []


async def returns(
    folder: Path, kind: str, discrete: bool, steps: int, *, both: bool = False, **rules: Any
) -> list[float]:
    """Returns the mean returns of the sides after `steps` learner steps, or as soon as both sides have learned."""
    plain = plain_settings(
        KINDS[kind],
        mode="lockstep",
        self_play=rules,
        hyperparameters=LEARNING,
        network_settings={"hidden_units": 32, "num_layers": 1},
        max_steps=steps - BUFFER,  # the last update exceeds it
        time_horizon=64,
    )
    games = [Duel(discrete=discrete, asymmetric=kind == "asymmetric")]

    def learned(play: Play) -> bool:
        return both and bool(found := means(play)) and found[0] > LEARNED

    play = await run_to_end(folder, games, plain, frame_s=0.0, until=learned)
    _check_step_counts(play, steps)
    return means(play)


def _check_step_counts(play: Play, steps: int) -> None:
    for step_counts in check_step_counts(play).values():
        assert step_counts["trained"] <= steps + BUFFER
        assert step_counts["lost"] == 0
    check_no_resets(play)


both_actions = pytest.mark.parametrize("discrete", [False, True], ids=["continuous", "discrete"])


@pytest.mark.anyio
@both_actions
async def test_symmetric_both_teams_learn_when_opponents_are_swapped(tmp_path: Path, discrete: bool) -> None:
    """After the swap each team plays with the weights that the other has learned."""
    rules = {"play_against_latest_model_ratio": 1.0, "save_steps": 2000, "swap_steps": 2000}
    lower, _ = await returns(tmp_path, "symmetric", discrete, 2500, both=True, **rules)
    assert lower > LEARNED


@pytest.mark.anyio
async def test_symmetric_ghost_stays_untrained_without_a_swap(tmp_path: Path) -> None:
    """The team that does not learn never gets the weights of the one that does."""
    rules = {"play_against_latest_model_ratio": 1.0, "save_steps": 2000, "swap_steps": 4000}
    lower, higher = await returns(tmp_path, "symmetric", False, 2500, **rules)
    assert higher > LEARNED > lower


@pytest.mark.anyio
@both_actions
async def test_asymmetric_both_sides_learn_in_turns(tmp_path: Path, discrete: bool) -> None:
    rules = {"play_against_latest_model_ratio": 1.0, "save_steps": 10_000, "swap_steps": 10_000, "team_change": 400}
    lower, _ = await returns(tmp_path, "asymmetric", discrete, 4000, both=True, **rules)
    assert lower > LEARNED


@pytest.mark.anyio
async def test_asymmetric_a_side_whose_ghost_is_its_first_snapshot_looks_untrained(tmp_path: Path) -> None:
    """The idle side always plays its first snapshot, so one side looks untrained."""
    rules = {"play_against_latest_model_ratio": 0.0, "save_steps": 5000, "swap_steps": 5000, "team_change": 2000}
    lower, higher = await returns(tmp_path, "asymmetric", True, 3000, **rules)
    assert higher > LEARNED > lower
