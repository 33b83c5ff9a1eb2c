"""Soccer: reports, symmetry, bounds, and better results for better play."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.soccer import EXISTENCE, MAX_STEPS, Soccer
from sparring.pipeline.games.soccer_physics import GOAL_X, PLAYER_RADIUS, SIDE_Y, Pitch
from sparring.pipeline.games.soccer_script import scripted
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from tests.simulation.simulation_helpers import check_report

IDS = ("Soccer?team=0", "Soccer?team=1")
Policy = Callable[[np.ndarray, np.random.Generator], np.ndarray]
Reports = tuple[BehaviorReport, ...]


def actions(chosen: list[np.ndarray]) -> dict[str, BehaviorActions]:
    """Returns actions by behavior id for choices [n, 3] per team; one list is for team 0 alone."""
    return {
        key: BehaviorActions(
            behavior=key,
            agents=np.arange(len(rows)),
            continuous=np.zeros((len(rows), 0), np.float32),
            discrete=np.asarray(rows, np.int32),
        )
        for key, rows in zip(IDS, chosen, strict=False)
    }


def at_random(observed: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return random.integers(0, 3, (len(observed), 3))


def chase(observed: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Returns choices that run behind the ball and push it towards the rivals' goal."""
    del random
    ball, shot = observed[:, 0:2] * GOAL_X, (observed[:, 8:10] - observed[:, 0:2]) * GOAL_X
    shot /= np.maximum(np.linalg.norm(shot, axis=1, keepdims=True), 1e-6)
    across = np.stack([-shot[:, 1], shot[:, 0]], 1)
    behind, aside = (ball * shot).sum(1), (ball * across).sum(1)
    way_round = np.where(behind < 0.6, np.where(aside > 0, 1.2, -1.2), 0)
    ready = (behind > 0.5) & (np.abs(aside) < 0.4)
    target = np.where(ready[:, None], ball, ball - shot - across * way_round[:, None])
    angle = np.arctan2(target[:, 1], target[:, 0])
    turn = np.where(angle > 0.2, 1, np.where(angle < -0.2, 2, 0))
    return np.stack([np.abs(angle) < 1, np.zeros_like(turn), turn], 1)


def outcomes(policies: tuple[Policy, Policy], areas: int, steps: int) -> np.ndarray:
    """Returns the results of all matches for team 0."""
    game, random = Soccer(areas), np.random.default_rng(1)
    reports = game.reset({}, 0)
    results: list[float] = []
    for _ in range(steps):
        chosen = [
            policy(report.decisions.observations[0], random) for policy, report in zip(policies, reports, strict=True)
        ]
        reports = game.step(actions(chosen))
        if reports[0].ends is not None:
            results += reports[0].ends.outcomes[::2].tolist()
    return np.array(results)


@pytest.mark.parametrize("side", [0, 1])
def test_a_scripted_team_clearly_beats_a_random_one(side: int) -> None:
    """It wins on either side, from the agents' own observations."""
    results = outcomes((chase, at_random) if side == 0 else (at_random, chase), 16, 400)
    won = results if side == 0 else 1 - results
    assert len(won) > 50
    assert (won == 1).mean() > 0.8
    assert (won == 0).mean() < 0.1


class Rules:
    """Checks reports of a game against the rules, agent by agent."""

    def __init__(self, game: Soccer, areas: int) -> None:
        self.game, self.areas = game, areas
        self.specs = dict(game.behaviors())
        self.matches: dict[int, int] = {}
        self.ages = dict.fromkeys(range(4 * areas), 0)
        self.ended = 0

    def first(self, reports: Reports) -> None:
        for report in reports:
            self._new_matches(report)

    def check(self, reports: Reports) -> None:
        assert [report.behavior for report in reports] == list(IDS)
        ended = [report.ends for report in reports]
        assert (ended[0] is None) == (ended[1] is None)
        for agent in self.ages:
            self.ages[agent] += 1
        for team, report in enumerate(reports):
            check_report(report, self.specs)
            agents = report.decisions.agents
            assert agents.tolist() == [4 * area + 2 * team + player for area in range(self.areas) for player in (0, 1)]
            assert report.decisions.groups.tolist() == [1 + 2 * (agent // 4) + team for agent in agents.tolist()]
            if report.ends is not None:
                self._check_ends(report)
            self._new_matches(report)
        if ended[0] is not None:
            assert ended[0].matches.tolist() == ended[1].matches.tolist()
            np.testing.assert_array_equal(ended[0].outcomes + ended[1].outcomes, np.ones(ended[0].agents.size))

    def _check_ends(self, report: BehaviorReport) -> None:
        ends = report.ends
        for row, agent in enumerate(ends.agents.tolist()):
            age, outcome, group = self.ages[agent], ends.outcomes[row], float(ends.group_rewards[row])
            assert ends.matches[row] == self.matches[agent]
            assert ends.interrupted[row] == (outcome == 0.5)
            assert ends.rewards[row] == pytest.approx(EXISTENCE)
            assert group == pytest.approx({1.0: 1 - age / MAX_STEPS, 0.5: 0.0, 0.0: -1.0}[float(outcome)])
            assert age <= MAX_STEPS
            assert (outcome == 0.5) <= (age == MAX_STEPS)
            self.ages[agent] = 0
            row_now = report.decisions.agents.tolist().index(agent)
            assert report.decisions.rewards[row_now] == report.decisions.group_rewards[row_now] == 0
            del self.matches[agent]
            self.ended += 1
        assert ends.agents.size % 2 == 0

    def _new_matches(self, report: BehaviorReport) -> None:
        for agent, match in zip(report.decisions.agents.tolist(), report.decisions.matches.tolist(), strict=True):
            assert self.matches.setdefault(agent, match) == match
            assert match % self.areas == agent // 4


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), areas=st.integers(1, 3), stubborn=st.integers(1, 20))
def test_random_play_follows_the_rules_and_stays_on_the_pitch(seed: int, areas: int, stubborn: int) -> None:
    """Ids, groups, matches, outcomes and rewards are consistent, and no player leaves the pitch."""
    game, random = Soccer(areas), np.random.default_rng(seed)
    rules = Rules(game, areas)
    rules.first(game.reset({}, seed))
    chosen: list[np.ndarray] = []
    for step in range(60):
        if step % stubborn == 0:
            chosen = [random.integers(0, 3, (2 * areas, 3)) for _ in IDS]
        rules.check(game.step(actions(chosen)))
        pitch = game._pitch
        limits = np.array([GOAL_X, SIDE_Y]) - PLAYER_RADIUS
        assert (np.abs(pitch.positions) <= limits + 1e-9).all()
        assert (np.abs(pitch.ball) <= np.array([GOAL_X, SIDE_Y])).all()


def test_goals_and_the_time_limit_end_matches() -> None:
    """A chase against standing players scores; two standing teams are interrupted after 500 decisions."""
    game = Soccer(2)
    rules = Rules(game, 2)
    reports = game.reset({}, 0)
    rules.first(reports)
    while rules.ended == 0:
        rivals = np.zeros((4, 3), int)
        reports = game.step(actions([chase(reports[0].decisions.observations[0], np.random.default_rng()), rivals]))
        rules.check(reports)
    assert reports[0].ends.outcomes.tolist() == [1.0] * reports[0].ends.agents.size
    reports = game.reset({}, 0)
    for _ in range(MAX_STEPS):
        assert reports[0].ends is None
        reports = game.step(actions([np.zeros((4, 3), int)] * 2))
    assert reports[0].ends.outcomes.tolist() == [0.5] * 4
    assert reports[0].ends.interrupted.all()


def test_both_teams_observe_the_same_game() -> None:
    """With the pitch rotated by half a turn and teams exchanged, team 1 observes what team 0 observed."""
    games, random = (Soccer(3), Soccer(3)), np.random.default_rng(0)
    for game in games:
        game.reset({}, 5)
    pitch, rotated = (game._pitch for game in games)
    other = [2, 3, 0, 1]
    rotated.positions[:], rotated.velocities[:] = -pitch.positions[:, other], -pitch.velocities[:, other]
    rotated.headings[:] = pitch.headings[:, other] + np.pi
    rotated.ball[:], rotated.ball_velocity[:] = -pitch.ball, -pitch.ball_velocity
    for _ in range(40):
        chosen = [random.integers(0, 3, (6, 3)) for _ in IDS]
        first, second = games[0].step(actions(chosen)), games[1].step(actions(chosen[::-1]))
        assert first[0].ends is None
        for mine, theirs in zip(first, second[::-1], strict=True):
            np.testing.assert_allclose(mine.decisions.observations[0], theirs.decisions.observations[0], atol=1e-4)


def test_the_seed_determines_everything() -> None:
    """The same seed and actions give identical reports."""

    def play(seed: int) -> bytes:
        game, random = Soccer(4), np.random.default_rng(1)
        reports = game.reset({}, seed)
        for _ in range(60):
            reports = game.step(actions([random.integers(0, 3, (8, 3)) for _ in IDS]))
        return b"".join(report.decisions.observations[0].tobytes() for report in reports)

    assert play(3) == play(3) != play(4)


def test_a_touch_of_the_ball_earns_the_parameter_ball_touch() -> None:
    """It is added to the player's own reward."""
    game = Soccer(1)
    game.reset({"ball_touch": 0.5}, 0)
    game._pitch.positions[0, 0] = game._pitch.ball[0] - [0.4, 0]
    reports = game.step(actions([np.zeros((2, 3), int)] * 2))
    assert reports[0].decisions.rewards.tolist() == pytest.approx([0.5 + EXISTENCE, EXISTENCE])


def test_the_ball_loses_speed_and_leaves_only_through_a_goal() -> None:
    """This holds for shots from any place in any direction."""
    pitch, random = Pitch(500), np.random.default_rng(0)
    pitch.positions[:] = [(-6, 3.4), (-6, -3.4), (6, 3.4), (6, -3.4)]
    pitch.ball[:] = random.uniform(-1, 1, (500, 2)) * [GOAL_X - 0.4, SIDE_Y - 0.4]
    pitch.ball_velocity[:] = random.normal(size=(500, 2)) * 4
    still = np.zeros((500, 4))
    for _ in range(100):
        _, scored = pitch.advance(still, still, still)
        inside = scored == 0
        assert (np.abs(pitch.ball[inside]) <= [GOAL_X, SIDE_Y]).all()
        assert (np.abs(pitch.ball[~inside, 1]) < 1.8).all()
        pitch.ball[~inside], pitch.ball_velocity[~inside] = 0, 0
    assert (np.linalg.norm(pitch.ball_velocity, axis=1) < 1).all()


def against(policy: Policy, rivals: str, areas: int, steps: int) -> np.ndarray:
    """Returns the results of all matches of team 0 against rivals that the simulator moves."""
    game, random = Soccer(areas, rivals=rivals), np.random.default_rng(1)
    assert list(game.behaviors()) == [IDS[0]]
    (report,) = game.reset({}, 0)
    results: list[float] = []
    for _ in range(steps):
        (report,) = game.step(actions([policy(report.decisions.observations[0], random)]))
        assert report.behavior == IDS[0]
        check_report(report, dict(game.behaviors()))
        assert set((report.decisions.agents % 4).tolist()) == {0, 1}
        if report.ends is not None:
            results += report.ends.outcomes[::2].tolist()
            shared = report.ends.group_rewards
            assert ((shared == -1) == (report.ends.outcomes == 0)).all()
            assert ((shared > 0) == (report.ends.outcomes == 1)).all()
            assert (report.ends.interrupted == (report.ends.outcomes == 0.5)).all()
    return np.array(results)


def test_the_scripted_rivals_clearly_beat_a_random_team() -> None:
    """They score at least 9 of 10 goals; a team that chases with both players does better."""
    results = against(at_random, "scripted", 16, 400)
    assert len(results) > 50
    assert (results == 0).mean() > 0.9
    assert (results == 1).mean() < 0.05
    assert (against(chase, "scripted", 16, 400) == 1).mean() > 0.2


def test_still_rivals_never_score() -> None:
    """They stay unless they are pushed, so a team that chases wins."""
    results = against(chase, "still", 16, 400)
    assert len(results) > 50
    assert (results == 1).mean() > 0.9
    game = Soccer(3, rivals="still")
    game.reset({}, 0)
    before = game._pitch.positions[:, 2:].copy()
    for _ in range(30):
        game.step(actions([np.zeros((6, 3), int)]))
    np.testing.assert_allclose(game._pitch.positions[:, 2:], before, atol=1e-9)


def test_rivals_of_the_simulator_play_the_same_game_as_learning_ones() -> None:
    """Reports of team 0 equal those of a game in which the trainer moves team 1 alike."""
    alone, both, random = Soccer(4, rivals="still"), Soccer(4), np.random.default_rng(0)
    (one,), (two, _) = alone.reset({}, 3), both.reset({}, 3)
    for _ in range(80):
        chosen = random.integers(0, 3, (8, 3))
        (one,), (two, _) = alone.step(actions([chosen])), both.step(actions([chosen, np.zeros((8, 3), int)]))
        for name in ("agents", "groups", "rewards", "group_rewards", "matches"):
            np.testing.assert_array_equal(getattr(one.decisions, name), getattr(two.decisions, name))
        np.testing.assert_array_equal(one.decisions.observations[0], two.decisions.observations[0])


def test_the_script_is_a_function_of_the_pitch() -> None:
    """The player nearer to the ball attacks and the other keeps; each command is -1, 0 or 1."""
    pitch, random = Pitch(200), np.random.default_rng(0)
    pitch.place(np.arange(200), random)
    pitch.ball[:] = random.uniform(-1, 1, (200, 2)) * [GOAL_X, SIDE_Y]
    moves = scripted(pitch, 1)
    assert moves.shape == (200, 2, 3)
    assert set(np.unique(moves).tolist()) == {-1.0, 0.0, 1.0}
    np.testing.assert_array_equal(moves, scripted(pitch, 1))
    for array in (pitch.positions, pitch.velocities, pitch.headings):
        array[:, 2:] = array[:, [3, 2]]
    np.testing.assert_array_equal(moves[:, ::-1], scripted(pitch, 1))  # the place alone decides


def test_the_script_is_symmetric() -> None:
    """With the pitch rotated by half a turn, team 0 acts as team 1."""
    pitch, turned, random = Pitch(100), Pitch(100), np.random.default_rng(1)
    pitch.place(np.arange(100), random)
    pitch.ball[:] = random.uniform(-1, 1, (100, 2)) * [GOAL_X, SIDE_Y]
    pitch.headings[:] = random.uniform(-3, 3, pitch.headings.shape)
    turned.ball[:] = -pitch.ball
    turned.positions[:] = -pitch.positions[:, [2, 3, 0, 1]]
    turned.headings[:] = pitch.headings[:, [2, 3, 0, 1]] + np.pi
    np.testing.assert_array_equal(scripted(pitch, 1), scripted(turned, 0))


def test_a_script_plays_a_requested_behavior_id_whatever_its_actions_are() -> None:
    """It acts as if the trainer had sent the script's actions; other ids follow their own actions."""
    scripted_game, twin, random = Soccer(4), Soccer(4), np.random.default_rng(2)
    assert scripted_game.scripts() == {"Soccer": ("scripted", "still")}
    scripted_game.reset({}, 3)
    twin.reset({}, 3)
    which = [np.repeat([0, 1, 2, 0], 2), np.repeat([1, 0, 0, 2], 2)]  # of each team, by area
    for _ in range(60):
        chosen = [random.integers(0, 3, (8, 3)) for _ in IDS]
        expected_actions = [branch.copy() for branch in chosen]
        for team in (0, 1):
            moves = scripted(twin._pitch, team).reshape(8, 3)
            expected_actions[team][which[team] == 1] = np.where(moves < 0, 2, moves)[which[team] == 1]
            expected_actions[team][which[team] == 2] = 0
        requests = {
            one.behavior: replace(one, scripts=scripts.astype(np.int32))
            for one, scripts in zip(actions(chosen).values(), which, strict=True)
        }
        for one, two in zip(scripted_game.step(requests), twin.step(actions(expected_actions)), strict=True):
            np.testing.assert_array_equal(one.decisions.observations[0], two.decisions.observations[0])


def test_unknown_rivals_are_refused() -> None:
    with pytest.raises(SettingsError, match="got rivals='easy'; expected learning, scripted, still; correct 'easy'"):
        Soccer(1, rivals="easy")
