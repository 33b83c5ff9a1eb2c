"""Two teams that play the goal game side by side: nobody hinders nobody, so each side's reward tells what plays it."""

from __future__ import annotations

from collections.abc import Mapping

from sparring.pipeline.games.goal import Goal
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.specs import BehaviorSpec

RIVAL = "Rival"


class Duel:
    """`areas` games of each of two teams, one agent to a game.

    Args:
        areas: games of each team.
        discrete: a branch of two choices instead of a continuous action.
        behavior: name of team 0's behavior.
        asymmetric: team 1 has a behavior of its own, with `Rival` behind the name.
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
        """One behavior id for each team."""
        return {behavior_id: spec for game in self._games for behavior_id, spec in game.behaviors().items()}

    def reset(self, parameters: Mapping[str, float], seed: int | None) -> tuple[BehaviorReport, ...]:
        """New episodes in all games; there are no parameters."""
        del parameters
        seeds = [None if seed is None else 2 * seed + team for team in range(len(self._games))]
        return tuple(report for game, own in zip(self._games, seeds, strict=True) for report in game.reset({}, own))

    def step(self, actions: Mapping[str, BehaviorActions]) -> tuple[BehaviorReport, ...]:
        """Moves everybody."""
        return tuple(report for game in self._games for report in game.step(actions))

    def close(self) -> None:
        """Holds nothing."""
