"""Helpers for tests of Godot games."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparring.pipeline.bridges.godot.game import GodotGame
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport

GAME = str(Path(__file__).with_name("godot_game.py"))
ALL = "walker,hopper,seer"
Open = Callable[..., GodotGame]


def knowing(report: BehaviorReport) -> BehaviorActions:
    """Returns actions that walk to the goal, which agents of any kind observe."""
    assert report.decisions is not None
    observed = report.decisions.observations[0]
    goals = observed[:, 0] if observed.ndim == 2 else np.where(observed[:, 1].any((1, 2)), 1, -1)
    widths = {"walker": (1, 0), "hopper": (0, 1), "seer": (3, 2), "runner": (2, 0), "chaser": (1, 0)}
    continuous, branches = widths.get(report.behavior.partition("?")[0], (2 if observed.shape[1:] == (21,) else 1, 0))
    return BehaviorActions(
        behavior=report.behavior,
        agents=report.decisions.agents,
        continuous=np.repeat(goals[:, None], continuous, 1).astype(np.float32),
        discrete=np.repeat(goals[:, None] > 0, branches, 1).astype(np.int32),
    )


def play(game: GodotGame, steps: int, act: Callable[[BehaviorReport], BehaviorActions] = knowing) -> list[Any]:
    """Returns the reports of a reset and of `steps` frames."""
    frames: list[Sequence[BehaviorReport]] = [game.reset({}, None)]
    for _ in range(steps):
        frames.append(game.step({report.behavior: act(report) for report in frames[-1]}))
    return frames
