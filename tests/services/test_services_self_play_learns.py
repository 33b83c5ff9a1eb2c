"""ML-Agents' own four self-play tests: who learns what from whom, in lockstep, one agent to a team."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trio.testing import MockClock

from sparring.pipeline.games.duel import Duel
from tests.services.self_play_runs import (
    KINDS,
    Play,
    check_no_resets,
    check_step_counts,
    plain_settings,
    same_order,
    whole,
)

pytestmark = pytest.mark.slow

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
"""Mean return of the last episodes of a side that has learned; who knows nothing gets about 0."""


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return ("trio", {"clock": MockClock(autojump_threshold=0)})


@pytest.fixture(autouse=True)
def one_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    same_order(monkeypatch, 0)
    yield
    torch.set_num_threads(before)


async def returns(folder: Path, kind: str, discrete: bool, steps: int, **rules: Any) -> list[float]:
    """Mean return of the last 20 episodes of each side, the lower first, after `steps` learner steps."""
    plain = plain_settings(
        KINDS[kind],
        mode="lockstep",
        self_play=rules,
        hyperparameters=LEARNING,
        network_settings={"hidden_units": 32, "num_layers": 1},
        max_steps=steps - BUFFER,  # the last update goes beyond it
        time_horizon=64,
    )
    play = await whole(folder, [Duel(discrete=discrete, asymmetric=kind == "asymmetric")], plain, frame_s=0.0)
    _check(play, steps)
    means = [sum(ended[-20:]) / 20 for ended in play.games[0].returns.values()]
    assert len(means) == 2
    return sorted(means)


def _check(play: Play, steps: int) -> None:
    for step_counts in check_step_counts(play).values():
        assert step_counts["trained"] <= steps + BUFFER
        assert step_counts["lost"] == 0
    check_no_resets(play)


both_actions = pytest.mark.parametrize("discrete", [False, True], ids=["continuous", "discrete"])


@pytest.mark.anyio
@both_actions
async def test_symmetric_both_teams_learn_when_opponents_are_swapped_in(tmp_path: Path, discrete: bool) -> None:
    """What one team has learned, the other one plays with after the swap."""
    rules = {"play_against_latest_model_ratio": 1.0, "save_steps": 2000, "swap_steps": 2000}
    lower, _ = await returns(tmp_path, "symmetric", discrete, 2500, **rules)
    assert lower > LEARNED


@pytest.mark.anyio
@both_actions
async def test_symmetric_the_ghost_stays_untrained_when_the_swap_is_beyond_the_end(
    tmp_path: Path, discrete: bool
) -> None:
    """No weights leak from the team that learns to the one that does not."""
    rules = {"play_against_latest_model_ratio": 1.0, "save_steps": 2000, "swap_steps": 4000}
    lower, higher = await returns(tmp_path, "symmetric", discrete, 2500, **rules)
    assert higher > LEARNED > lower


@pytest.mark.anyio
@both_actions
async def test_asymmetric_both_sides_learn_in_turns(tmp_path: Path, discrete: bool) -> None:
    rules = {"play_against_latest_model_ratio": 1.0, "save_steps": 10_000, "swap_steps": 10_000, "team_change": 400}
    lower, _ = await returns(tmp_path, "asymmetric", discrete, 4000, **rules)
    assert lower > LEARNED


@pytest.mark.anyio
@both_actions
async def test_asymmetric_a_side_that_only_its_untrained_self_plays_shows_nothing_of_what_it_learned(
    tmp_path: Path, discrete: bool
) -> None:
    """The idle side is its first snapshot for ever, so one side looks untrained."""
    rules = {"play_against_latest_model_ratio": 0.0, "save_steps": 5000, "swap_steps": 5000, "team_change": 2000}
    lower, higher = await returns(tmp_path, "asymmetric", discrete, 3000, **rules)
    assert higher > LEARNED > lower
