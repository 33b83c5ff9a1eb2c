"""The duel: two teams play the goal game side by side and do not affect each other."""

from __future__ import annotations

import numpy as np
import pytest

from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.specs import BehaviorId
from tests.games.duel import Duel
from tests.simulation.simulation_helpers import actions_for, check_report

SYMMETRIC = ("Goal?team=0", "Goal?team=1")
ASYMMETRIC = ("Goal?team=0", "GoalRival?team=1")


@pytest.mark.parametrize(("asymmetric", "behavior_ids"), [(False, SYMMETRIC), (True, ASYMMETRIC)])
def test_each_team_has_a_behavior_id(asymmetric: bool, behavior_ids: tuple[str, ...]) -> None:
    """A symmetric game has one name with two teams, an asymmetric one two names."""
    parsed = [BehaviorId.parse(behavior_id) for behavior_id in Duel(asymmetric=asymmetric).behaviors()]
    assert [(one.name, one.team) for one in parsed] == [
        (BehaviorId.parse(s).name, team) for team, s in enumerate(behavior_ids)
    ]


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("discrete", [False, True])
def test_every_report_follows_the_rules(asymmetric: bool, discrete: bool) -> None:
    """Each step reports both teams, all their agents decide, and reports agree with specs."""
    game, random = Duel(areas=3, discrete=discrete, asymmetric=asymmetric), np.random.default_rng(0)
    specs = dict(game.behaviors())
    reports = game.reset({}, 3)
    ended = dict.fromkeys(specs, 0)
    for _ in range(150):
        assert [report.behavior for report in reports] == list(specs)
        actions = {}
        for report in reports:
            check_report(report, specs)
            assert report.decisions is not None
            assert report.decisions.agents.tolist() == [0, 1, 2]
            ended[report.behavior] += 0 if report.ends is None else len(report.ends.agents)
            actions[report.behavior] = actions_for(report, specs[report.behavior], random)
        reports = game.step(actions)
    assert min(ended.values()) > 0
    game.close()


def actions_towards(report: BehaviorReport, sign: float) -> BehaviorActions:
    """Returns actions that walk to the observed goal (sign 1) or away from it (sign -1)."""
    assert report.decisions is not None
    moves = sign * report.decisions.observations[0].astype(np.float32)
    nothing = np.zeros((len(moves), 0), np.int32)
    return BehaviorActions(behavior=report.behavior, agents=report.decisions.agents, continuous=moves, discrete=nothing)


def test_each_team_is_rewarded_for_its_own_actions_only() -> None:
    """One team always walks to its goal, the other away from it; neither changes the rewards of the other."""
    game = Duel(areas=2)
    reports = game.reset({}, 1)
    earned: dict[str, list[float]] = {behavior_id: [] for behavior_id in game.behaviors()}
    for _ in range(60):
        signs = (1.0, -1.0)
        acts = {r.behavior: actions_towards(r, sign) for r, sign in zip(reports, signs, strict=True)}
        reports = game.step(acts)
        for report in reports:
            if report.ends is not None:
                earned[report.behavior] += report.ends.rewards.tolist()
    good, bad = earned.values()
    assert good
    assert bad
    assert good == pytest.approx([1.06] * len(good))
    assert bad == pytest.approx([-1.06] * len(bad))


def goals(game: Duel, seed: int | None) -> list[list[float]]:
    """Returns the goals that each team observes first."""
    found = []
    for report in game.reset({}, seed):
        assert report.decisions is not None
        found.append(report.decisions.observations[0][:, 0].tolist())
    return found


def test_a_seed_repeats_the_games_and_each_team_has_its_own() -> None:
    first = goals(Duel(areas=32), 7)
    assert goals(Duel(areas=32), 7) == first
    assert goals(Duel(areas=32), 8) != first
    assert first[0] != first[1]


def test_a_reset_without_a_seed_continues_with_other_goals() -> None:
    game = Duel(areas=32)
    assert goals(game, 7) != goals(game, None)
