"""Lets two teams play the goal game side by side without interaction, so that each side's reward measures its own
policy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from sparring.pipeline.games.goal import Goal
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.simulation import run
from sparring.pipeline.specs import BehaviorSpec

RIVAL = "Rival"


class Duel:
    """Simulates `areas` games of each of two teams, with one agent per game.

    Args:
        areas: number of games of each team.
        discrete: use a branch of two choices instead of a continuous action.
        behavior: name of team 0's behavior.
        asymmetric: team 1 has a behavior of its own, with the suffix `Rival`.
    """

    name = "duel"

    def __init__(
        self, areas: int = 1, discrete: bool = False, behavior: str = "Goal", asymmetric: bool = False
    ) -> None:
        names = (behavior, behavior + RIVAL if asymmetric else behavior)
        self._games = [
            Goal(areas=areas, discrete=discrete, behavior=name, team=team) for team, name in enumerate(names)
        ]

    def behaviors(self) -> Mapping[str, BehaviorSpec]:
        """Returns one behavior id for each team."""
        return {behavior_id: spec for game in self._games for behavior_id, spec in game.behaviors().items()}

    def reset(self, parameters: Mapping[str, float], seed: int | None) -> tuple[BehaviorReport, ...]:
        """Begins new episodes in all games; there are no parameters."""
        del parameters
        seeds = [None if seed is None else 2 * seed + team for team in range(len(self._games))]
        return tuple(report for game, own in zip(self._games, seeds, strict=True) for report in game.reset({}, own))

    def step(self, actions: Mapping[str, BehaviorActions]) -> tuple[BehaviorReport, ...]:
        """Moves all agents."""
        return tuple(report for game in self._games for report in game.step(actions))

    def close(self) -> None:
        """Does nothing: the game holds no resources."""


def simulator(**options: Any) -> dict[str, Any]:
    """Returns an entry of `simulators` in a configuration that starts a duel with these options."""
    return {"command": [sys.executable, "-P", __file__, json.dumps(options)]}


if __name__ == "__main__":
    result = run(Duel(**json.loads(sys.argv[1])))
    sys.stderr.write(json.dumps({"steps": result.steps}) + "\n")
