"""The goal game equals a scalar twin."""

from __future__ import annotations

import numpy as np
import pytest

from sparring.pipeline.games.goal import Goal
from tests.simulation.simulation_helpers import actions_for, check_report

ID = "Goal?team=0"


class Twin:
    """One game of one agent by the rules."""

    def __init__(self, goal: float, actions: int, shown: int) -> None:
        self.goal, self.positions, self.age, self.shown = goal, [0.0] * actions, 0, shown

    def move(self, moves: list[float]) -> tuple[float, bool]:
        for index, move in enumerate(moves):
            step = min(max(move, -0.2), 0.2)
            self.positions[index] = min(max(self.positions[index] + step, -1.0), 1.0)
        self.age += 1
        if all(abs(position) >= 1 for position in self.positions):
            return (1 + 0.01 * 6) * sum(position * self.goal for position in self.positions) / len(self.positions), True
        return -0.01, False

    def see(self) -> float:
        return self.goal if self.age < self.shown else 0.0


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("actions", [1, 2])
def test_rewards_ends_and_observations_equal_those_of_the_twin(actions: int, discrete: bool, memory: bool) -> None:
    """They are equal in each step of several episodes in every area."""
    game, random = Goal(3, actions, discrete, memory), np.random.default_rng(0)
    shown = 2 if memory else 10**9
    (report,) = game.reset({}, 5)
    spec = game.behaviors()[ID]
    assert report.decisions is not None
    twins = [Twin(float(goal), actions, shown) for goal in report.decisions.observations[0][:, 0]]
    ended = 0
    for _ in range(150):
        assert report.decisions is not None
        act = actions_for(report, spec, random)
        moves = np.where(act.discrete == 1, 1.0, -1.0) if discrete else act.continuous
        moves = moves.astype(np.float64)
        (report,) = game.step({ID: act})
        check_report(report, {ID: spec})
        results = [twin.move(list(row)) for twin, row in zip(twins, moves, strict=True)]
        over = [area for area, (_, done) in enumerate(results) if done]
        assert (report.ends.agents.tolist() if report.ends else []) == over
        for row, area in enumerate(over):
            assert report.ends.rewards[row] == pytest.approx(results[area][0])
            assert report.ends.observations[0][row, 0] == twins[area].see()
            assert not report.ends.interrupted[row]
            twins[area] = Twin(float(report.decisions.observations[0][area, 0]), actions, shown)
        ended += len(over)
        wanted = [0.0 if done else reward for reward, done in results]
        assert report.decisions.rewards.tolist() == pytest.approx(wanted)
        assert report.decisions.observations[0][:, 0].tolist() == [twin.see() for twin in twins]
    assert ended > 0


@pytest.mark.parametrize("discrete", [False, True])
def test_walking_to_the_goal_takes_five_steps_and_earns_the_most(discrete: bool) -> None:
    """The reward is 1.06 at the end, after 4 times -0.01."""
    game = Goal(8, discrete=discrete)
    (report,) = game.reset({}, 0)
    for _ in range(5):
        act = actions_for(report, game.behaviors()[ID])
        goals = report.decisions.observations[0]
        act.continuous[:] = goals if not discrete else 0
        act.discrete[:] = goals > 0
        (report,) = game.step({ID: act})
    assert report.ends.rewards.tolist() == pytest.approx([1.06] * 8)
    assert report.decisions.rewards.tolist() == [0.0] * 8


def test_the_seed_determines_the_goals() -> None:
    """Both sides occur, and the same seed gives the same goals."""
    first, second, other = (Goal(64).reset({}, seed)[0].decisions.observations[0].tolist() for seed in (1, 1, 2))
    assert first == second != other
    assert {value for (value,) in first} == {-1.0, 1.0}
