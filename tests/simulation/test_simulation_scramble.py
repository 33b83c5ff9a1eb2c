"""Scramble: reports, rules, equal views for all behavior ids, and better results for better play."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.scramble import ARENA, BODY, LEAD, MAX_STEPS, PELLET_REWARD, REACH, Scramble, _outcomes
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.simulation import run
from tests.simulation.compliance_simulator import verdicts_of
from tests.simulation.simulation_helpers import check_report

Policy = Callable[[np.ndarray, np.random.Generator], np.ndarray]
Reports = tuple[BehaviorReport, ...]


def observed_by_all(game: Scramble) -> NDArray[np.float32]:
    """Returns the observations [areas, teams, numbers]."""
    view: NDArray[np.float64] = game._observe()[0][0]
    return view.reshape(*game._places.shape[:2], -1).astype(np.float32)


def actions(chosen: np.ndarray) -> dict[str, BehaviorActions]:
    """Returns actions by behavior id for choices [areas, teams, 2]."""
    areas, teams, _ = chosen.shape
    return {
        f"Scramble?team={team}": BehaviorActions(
            behavior=f"Scramble?team={team}",
            agents=teams * np.arange(areas) + team,
            continuous=np.zeros((areas, 0), np.float32),
            discrete=chosen[:, team].astype(np.int32),
        )
        for team in range(teams)
    }


def views(reports: Reports) -> np.ndarray:
    """Returns observations [areas, teams, numbers]."""
    return np.stack([report.decisions.observations[0] for report in reports], 1)


def copied(game: Scramble, places: np.ndarray, behavior_ids: list[int]) -> Scramble:
    """Returns a game in the same state, with matrix `places` [2, 2] applied and agents on other behavior ids."""
    other = Scramble(len(game._areas), teams=len(behavior_ids))
    other.reset({}, 0)
    for name in ("_places", "_velocities"):
        setattr(other, name, (getattr(game, name) @ places.T)[:, behavior_ids])
    other._pellets = game._pellets @ places.T
    ahead = np.stack([np.cos(game._headings), np.sin(game._headings)], -1) @ places.T
    other._headings = np.arctan2(ahead[..., 1], ahead[..., 0])[:, behavior_ids]
    other._taken = game._taken[:, behavior_ids].copy()
    other._ages = game._ages.copy()
    return other


def quiet(areas: int = 1, teams: int = 3) -> Scramble:
    """Returns a game in which no agent is near a pellet."""
    game = Scramble(areas, teams=teams)
    game.reset({}, 0)
    game._pellets[:] = [0, 50]
    return game


# ---------------------------------------------------------------- reports


def test_each_agent_is_a_team_of_one_behavior_name() -> None:
    specs = Scramble(2).behaviors()
    assert list(specs) == [f"Scramble?team={team}" for team in range(3)]
    assert len(set(map(repr, specs.values()))) == 1
    assert specs["Scramble?team=0"].observations[0].shape == (6 + 2 * 4 + 5 * 2,)
    assert specs["Scramble?team=0"].actions.discrete == (3, 3)
    two = Scramble(2, teams=2, pellets=1, behavior="Rush").behaviors()
    assert list(two) == ["Rush?team=0", "Rush?team=1"]
    assert two["Rush?team=0"].observations[0].shape == (6 + 2 + 5,)
    for wrong in ({"teams": 1}, {"pellets": 0}):
        with pytest.raises(SettingsError, match="expected 2 or more teams and 1 or more pellets"):
            Scramble(1, **wrong)


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), areas=st.integers(1, 3), teams=st.integers(2, 5))
def test_random_play_follows_the_rules(seed: int, areas: int, teams: int) -> None:
    """Rewards are pellets and the final rank, matches end after 100 steps, and ids are unique."""
    game, random = Scramble(areas, teams=teams), np.random.default_rng(seed)
    specs, over = dict(game.behaviors()), set[int]()
    reports = game.reset({}, seed)
    for step in range(1, 2 * MAX_STEPS + 1):
        matches, taken = reports[0].decisions.matches, game._taken.copy()
        reports = game.step(actions(random.integers(0, 3, (areas, teams, 2)) * [step % 10 > 2, 1]))
        for team, report in enumerate(reports):
            check_report(report, specs)
            assert report.decisions.agents.tolist() == [teams * area + team for area in range(areas)]
            assert report.decisions.matches.tolist() == reports[0].decisions.matches.tolist()
        if step % MAX_STEPS:
            gained = np.stack([report.decisions.rewards for report in reports], 1)
            np.testing.assert_allclose(gained, PELLET_REWARD * (game._taken - taken), atol=1e-6)
            assert all(report.ends is None for report in reports)
            np.testing.assert_array_equal(reports[0].decisions.matches, matches)
        else:
            over |= check_ends(reports, matches, taken)
            assert not over & set(reports[0].decisions.matches.tolist())
        assert (np.linalg.norm(game._places, axis=2) <= ARENA - BODY + 1e-9).all()


def check_ends(reports: Reports, matches: np.ndarray, taken: np.ndarray) -> set[int]:
    """Checks the ends of all areas and returns the ids of the matches; `taken` excludes pellets of the last step."""
    scores, rewards = (np.stack([getattr(r.ends, name) for r in reports], 1) for name in ("outcomes", "rewards"))
    last = (rewards - (2 * scores - 1)) / PELLET_REWARD
    np.testing.assert_allclose(last, np.round(last), atol=1e-4)
    np.testing.assert_allclose(scores, _outcomes(taken + np.round(last).astype(np.int64)))
    np.testing.assert_allclose(scores.sum(1), taken.shape[1] / 2)
    for report in reports:
        assert report.ends.matches.tolist() == matches.tolist()
        assert report.ends.agents.tolist() == report.decisions.agents.tolist()
        assert not report.ends.interrupted.any()
        assert (report.decisions.rewards == 0).all()
        assert (report.ends.observations[0][:, 4] == 0).all(), "no time is left"
        assert (report.decisions.observations[0][:, 4] == 1).all(), "the whole match is left"
    return set(matches.tolist())


@pytest.mark.parametrize(
    ("taken", "outcomes"),
    [
        ([5, 3, 1], [1, 0.5, 0]),
        ([1, 5, 3], [0, 1, 0.5]),
        ([4, 4, 1], [0.75, 0.75, 0]),
        ([4, 1, 1], [1, 0.25, 0.25]),
        ([2, 2, 2], [0.5, 0.5, 0.5]),
        ([3, 2], [1, 0]),
    ],
)
def test_outcomes_are_ranks_and_equal_ranks_share_theirs(taken: list[int], outcomes: list[float]) -> None:
    assert _outcomes(np.array([taken])).tolist() == [outcomes]


def test_the_seed_determines_everything() -> None:
    """The same seed and actions give identical reports."""

    def play(seed: int) -> bytes:
        game, random = Scramble(4), np.random.default_rng(1)
        game.reset({}, seed)
        return b"".join(
            views(game.step(actions(random.integers(0, 3, (4, 3, 2))))).tobytes() for _ in range(MAX_STEPS + 10)
        )

    assert play(3) == play(3) != play(4)


def test_a_reset_begins_other_matches() -> None:
    game = Scramble(3)
    first, second = (game.reset({}, 0)[0].decisions.matches for _ in range(2))
    assert not set(first.tolist()) & set(second.tolist())


# ---------------------------------------------------------------- rules


def test_the_nearest_agent_in_reach_gets_a_pellet_and_another_appears() -> None:
    game = quiet()
    game._places[0] = [[0, 0], [1.0, 0], [-3, 0]]
    game._velocities[:] = 0
    game._pellets[0, 0] = [0.48, 0]
    reports = game.step(actions(np.zeros((1, 3, 2), int)))
    assert game._taken.tolist() == [[1, 0, 0]]
    assert [report.decisions.rewards[0] for report in reports] == pytest.approx([PELLET_REWARD, 0, 0])
    assert game._pellets[0, 0].tolist() != [0.48, 0]
    assert np.linalg.norm(game._pellets[0, 0]) <= ARENA - BODY
    assert game._pellets[0, 1:].tolist() == [[0, 50]] * 3
    game._pellets[0, 0] = game._places[0, 2] + [0, REACH + 0.01]
    game.step(actions(np.zeros((1, 3, 2), int)))
    assert game._taken.tolist() == [[1, 0, 0]], "out of reach"


def test_agents_push_each_other_apart_and_stay_inside() -> None:
    """Two agents that collide end at the distance of their bodies."""
    game = quiet(teams=2)
    game._places[0] = [[-1, 0], [1, 0]]
    game._headings[0] = [0, np.pi]
    for _ in range(20):
        game.step(actions(np.array([[[1, 0], [1, 0]]])))
    np.testing.assert_allclose(game._places[0], [[-BODY, 0], [BODY, 0]], atol=0.1)
    for _ in range(40):
        game.step(actions(np.array([[[2, 0], [2, 0]]])))
    np.testing.assert_allclose(game._places[0], [[BODY - ARENA, 0], [ARENA - BODY, 0]], atol=1e-6)


def test_observations_are_in_the_agents_own_frame_with_the_nearest_first() -> None:
    game = quiet()
    game._places[0] = [[2, 0], [2, 1], [2, -3]]
    game._headings[0] = np.pi / 2  # faces +y: ahead is y, left is -x
    game._velocities[0] = [[0, 3], [-3, 0], [0, 0]]
    game._pellets[0] = [[2, -1], [0, 0], [2, 0.5], [4, 0]]
    game._taken[0] = [4, 3, 1]
    observed = observed_by_all(game)[0, 0]
    np.testing.assert_allclose(observed[:6], [0, 0.4, 1, 0, 1, 1 / LEAD], atol=1e-6)
    np.testing.assert_allclose(observed[6:14] * ARENA, [0.5, 0, -1, 0, 0, 2, 0, -2], atol=1e-6)
    np.testing.assert_allclose(observed[14:18] * ARENA, [1, 0, -3, 0], atol=1e-6)
    np.testing.assert_allclose(observed[18:], [0, 1, 0, 0, 1 / LEAD, 3 / LEAD], atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1),
    angle=st.floats(-3, 3),
    behavior_ids=st.permutations([0, 1, 2]),
    mirrored=st.booleans(),
)
def test_every_behavior_id_observes_the_same_game(
    seed: int, angle: float, behavior_ids: list[int], mirrored: bool
) -> None:
    """With the arena rotated or mirrored and ids exchanged, observations stay those of the agent's place."""
    random = np.random.default_rng(seed)
    game = Scramble(2)
    game.reset({}, seed)
    turned = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    left = -1 if mirrored else 1
    other = copied(game, turned @ np.diag([1, left]), behavior_ids)
    signs = np.ones(observed_by_all(game).shape[-1])
    signs[[1, 3, *range(7, 22, 2)]] = left
    turns = np.array([0, 2, 1] if mirrored else [0, 1, 2])
    for _ in range(30):
        np.testing.assert_allclose(observed_by_all(other), observed_by_all(game)[:, behavior_ids] * signs, atol=1e-5)
        before = game._taken.sum()
        chosen = random.integers(0, 3, (2, 3, 2))
        game.step(actions(chosen))
        theirs = chosen[:, behavior_ids].copy()
        theirs[..., 1] = turns[theirs[..., 1]]
        other.step(actions(theirs))
        np.testing.assert_array_equal(other._taken, game._taken[:, behavior_ids])
        if game._taken.sum() > before:
            return  # another pellet appears at random


def greedy(observed: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Returns choices that turn to the nearest pellet and run."""
    del random
    angle = np.arctan2(observed[:, 7], observed[:, 6])
    turn = np.where(angle > 0.25, 1, np.where(angle < -0.25, 2, 0))
    return np.stack([np.abs(angle) < 1, turn], 1)


def at_random(observed: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return random.integers(0, 3, (len(observed), 2))


@pytest.mark.parametrize("behavior_id", [0, 1, 2])
def test_an_agent_that_runs_for_pellets_beats_random_ones(behavior_id: int) -> None:
    """It nearly always wins with every behavior id."""
    game, random = Scramble(64), np.random.default_rng(0)
    policies: list[Policy] = [at_random] * 3
    policies[behavior_id] = greedy
    observed = views(game.reset({}, 0))
    for _ in range(MAX_STEPS):
        chosen = np.stack([policy(observed[:, team], random) for team, policy in enumerate(policies)], 1)
        reports = game.step(actions(chosen))
        observed = views(reports)
    assert reports[behavior_id].ends.outcomes.mean() > 0.95
    assert np.mean([report.ends.outcomes.mean() for report in reports]) == pytest.approx(0.5)


def test_scramble_passes_the_compliance_test() -> None:
    """It connects over a socket, as with `sparring compliance`."""
    verdicts = verdicts_of(lambda address: run(Scramble(2), address, connect_timeout_s=1.0))
    assert {rule: verdict.status for rule, verdict in verdicts.items() if verdict.status != "PASS"} == {}
