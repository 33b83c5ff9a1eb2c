"""Goals equals a slow twin member by member."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.goals import Goals
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport, Decisions, Ends
from sparring.pipeline.specs import BehaviorSpec
from tests.simulation.simulation_helpers import actions_for, check_report

EVEN, ODD = "Goals?team=0", "GoalsOdd?team=0"
KINDS: dict[str, dict[str, Any]] = {"continuous": {}, "discrete": {"discrete": True}, "mixed": {"mixed": True}}


class Twin:
    """One area by the rules."""

    def __init__(self, goals: dict[int, float]) -> None:
        self.goals = goals
        self.positions = dict.fromkeys(goals, 0.0)
        self.here = set(goals)

    def step(self, moves: dict[int, float]) -> tuple[set[int], float, bool]:
        """Returns the members that end, the group reward, and whether the episode is over."""
        for member, move in moves.items():
            self.positions[member] = max(-1.0, min(1.0, self.positions[member] + max(-0.2, min(0.2, move))))
        ended = {member for member in self.here if abs(self.positions[member]) >= 1}
        self.here -= ended
        hits = [self.positions[member] * self.goals[member] for member in ended]
        share = (1 + 0.01 * 6) * sum(hits) / len(self.goals)
        return ended, share - (0.01 if self.here else 0), not self.here


def observed(rows: Decisions | Ends | None, mixed: bool) -> dict[int, tuple[float, float | None]]:
    """Returns goal and, if observed, position by agent."""
    if rows is None:
        return {}
    first = rows.observations[0].tolist()
    if len(rows.observations) == 1:
        return {agent: (goal, None) for agent, (goal,) in zip(rows.agents.tolist(), first, strict=True)}
    assert mixed
    assert all(sorted(side) == [0, 1] for side in first)
    places = rows.observations[1][:, 0].tolist()
    return {
        agent: (side[1] - side[0], place)
        for agent, side, place in zip(rows.agents.tolist(), first, places, strict=True)
    }


def rewards(rows: Decisions | Ends | None) -> dict[int, float]:
    if rows is None:
        return {}
    assert not rows.rewards.any()
    assert rows.group_rewards is not None
    return dict(zip(rows.agents.tolist(), rows.group_rewards.tolist(), strict=True))


def first_observed(reports: Sequence[BehaviorReport], mixed: bool) -> dict[int, tuple[float, float | None]]:
    return {agent: row for report in reports for agent, row in observed(report.decisions, mixed).items()}


def act_on(
    reports: Sequence[BehaviorReport], specs: Mapping[str, BehaviorSpec], random: np.random.Generator | None = None
) -> dict[str, BehaviorActions]:
    deciding = [report for report in reports if report.decisions is not None]
    return {report.behavior: actions_for(report, specs[report.behavior], random) for report in deciding}


def chosen_by(actions: dict[str, BehaviorActions]) -> dict[int, float]:
    """Returns the distance of each agent's action."""
    moves: dict[int, float] = {}
    for entry in actions.values():
        discrete = entry.discrete.shape[1] == 1
        values = np.where(entry.discrete[:, 0] == 1, 0.2, -0.2) if discrete else entry.continuous[:, 0]
        moves |= dict(zip(entry.agents.tolist(), values.tolist(), strict=True))
    return moves


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), areas=st.integers(1, 4), members=st.integers(2, 5), kind=st.sampled_from([*KINDS]))
def test_every_report_equals_that_of_the_twin(seed: int, areas: int, members: int, kind: str) -> None:
    mixed, random = kind == "mixed", np.random.default_rng(seed)
    game = Goals(areas, members, **KINDS[kind])
    specs = dict(game.behaviors())
    reports = game.reset({}, seed)
    numbers = [range(area * members, (area + 1) * members) for area in range(areas)]
    twins = [Twin({member: first_observed(reports, mixed)[member][0] for member in own}) for own in numbers]
    for _ in range(60):
        actions = act_on(reports, specs, random)
        moves = chosen_by(actions)
        reports = game.step(actions)
        now = first_observed(reports, mixed)
        last = {agent: row for report in reports for agent, row in observed(report.ends, mixed).items()}
        at_end = {agent: reward for report in reports for agent, reward in rewards(report.ends).items()}
        going_on = {agent: reward for report in reports for agent, reward in rewards(report.decisions).items()}
        for report in reports:
            check_report(report, specs)
            assert report.ends is None or not report.ends.interrupted.any()
        for area, own in enumerate(numbers):
            twin = twins[area]
            ended, reward, over = twin.step({member: moves[member] for member in own if member in moves})
            assert {member for member in own if member in last} == ended
            for member in ended:
                check_row(last[member], twin, member)
                assert at_end[member] == pytest.approx(reward)
            if over:
                twin = twins[area] = Twin({member: now[member][0] for member in own})
            assert {member for member in own if member in now} == twin.here
            for member in twin.here:
                check_row(now[member], twin, member)
                assert going_on[member] == pytest.approx(0 if over else reward)


def check_row(row: tuple[float, float | None], twin: Twin, member: int) -> None:
    goal, place = row
    assert goal == twin.goals[member]
    assert place is None or place == pytest.approx(twin.positions[member])


def discrete_act(report: BehaviorReport, up: dict[int, bool]) -> dict[str, BehaviorActions]:
    act = actions_for(report, Goals(discrete=True).behaviors()[EVEN])
    act.discrete[:, 0] = [up[agent] for agent in act.agents.tolist()]
    return {EVEN: act}


def test_a_member_that_arrives_ends_and_the_group_earns_its_share() -> None:
    """Member 0 ends after 5 steps with its half, less the cost of time; member 1 first hesitates twice."""
    game = Goals(discrete=True)
    (report,) = game.reset({}, 0)
    assert report.decisions is not None
    goals = report.decisions.observations[0][:, 0] > 0
    for step in range(5):
        (report,) = game.step(discrete_act(report, {0: goals[0], 1: bool(goals[1]) ^ (step == 1)}))
    assert report.ends is not None
    assert report.ends.agents.tolist() == [0]
    assert rewards(report.ends) == {0: pytest.approx(0.52)}
    assert rewards(report.decisions) == {1: pytest.approx(0.52)}
    for _ in range(2):
        assert report.decisions is not None
        assert report.decisions.agents.tolist() == [1]
        (report,) = game.step(discrete_act(report, {1: goals[1]}))
    assert rewards(report.ends) == {1: pytest.approx(0.53)}
    assert rewards(report.decisions) == {0: 0, 1: 0}  # the next episode has both
    assert report.decisions is not None
    assert report.decisions.groups is not None
    assert report.decisions.groups.tolist() == [1, 1]


@pytest.mark.parametrize("kind", [*KINDS])
def test_a_group_earns_the_most_if_all_walk_straight_to_their_goals(kind: str) -> None:
    """In 5 steps every member receives 4 times -0.01, then 1.06."""
    game = Goals(4, 4, **KINDS[kind])
    specs, reports, returns = game.behaviors(), game.reset({}, 1), np.zeros(16)
    for _ in range(5):
        actions = {}
        for report in reports:
            act = actions_for(report, specs[report.behavior])
            goals = np.array([goal for goal, _ in observed(report.decisions, True).values()])
            act.continuous[:] = goals[:, None]
            act.discrete[:] = goals[:, None] > 0
            actions[report.behavior] = act
        reports = game.step(actions)
        for report in reports:
            for agent, reward in (rewards(report.ends) or rewards(report.decisions)).items():
                returns[agent] += reward
    assert returns.tolist() == pytest.approx([1.02] * 16)


def test_mixed_groups_have_two_behaviors_with_their_own_observations_and_actions() -> None:
    """Even members act continuously and observe the goal; odd members choose and observe side and position."""
    game = Goals(2, 3, mixed=True)
    specs = game.behaviors()
    assert [[(one.name, one.shape) for one in spec.observations] for spec in specs.values()] == [
        [("goal", (1,))],
        [("goal", (2,)), ("place", (1,))],
    ]
    assert [(spec.actions.continuous, spec.actions.discrete) for spec in specs.values()] == [(1, ()), (0, (2,))]
    even, odd = game.reset({}, 0)
    assert (even.behavior, odd.behavior) == (EVEN, ODD) == tuple(specs)
    assert even.decisions is not None
    assert odd.decisions is not None
    assert even.decisions.agents.tolist() == [0, 2, 3, 5]
    assert odd.decisions.agents.tolist() == [1, 4]
    assert even.decisions.groups is not None
    assert odd.decisions.groups is not None
    assert even.decisions.groups.tolist() == [1, 1, 2, 2]
    assert odd.decisions.groups.tolist() == [1, 2]


def test_a_behavior_whose_members_have_all_ended_has_no_report_and_needs_no_actions() -> None:
    """The odd member arrives first; the even one continues alone, and both are present in the next episode."""
    game = Goals(mixed=True)
    specs, reports = game.behaviors(), game.reset({}, 0)
    behaviors = []
    for step in range(9):
        actions = act_on(reports, specs)
        if step >= 4:
            actions[EVEN].continuous[:] = 1
        reports = game.step(actions)
        behaviors.append([report.behavior for report in reports])
    assert behaviors == [[EVEN, ODD]] * 5 + [[EVEN]] * 3 + [[EVEN, ODD]]
    assert reports[0].ends is not None
    assert reports[1].ends is None
    assert reports[1].decisions is not None


def test_the_seed_determines_the_goals() -> None:
    """Both sides occur, members differ, and the same seed gives the same goals."""
    first, again, other = (first_observed(Goals(16).reset({}, seed), False) for seed in (1, 1, 2))
    assert first == again != other
    assert {goal for goal, _ in first.values()} == {-1.0, 1.0}
    assert any(first[2 * area] != first[2 * area + 1] for area in range(16))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"discrete": True, "mixed": True}, "expected one of them"),
        ({"members": 0}, "expected 1 or more"),
        ({"members": 1, "mixed": True}, "expected 2 or more"),
    ],
)
def test_invalid_group_options_are_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(SettingsError, match=expected):
        Goals(**options)
