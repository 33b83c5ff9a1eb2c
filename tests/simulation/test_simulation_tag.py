"""Tag: reports, rules, motion, and a chance for both sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.tag import (
    BODY,
    HALF,
    MAX_STEPS,
    PILLAR,
    RESTED,
    SPEEDS,
    SPRINT,
    STEP_COST,
    TAG_REACH,
    TIRES,
    Tag,
)
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport
from sparring.pipeline.simulation import run
from sparring.pipeline.specs import ActionSpec
from tests.simulation.compliance_simulator import verdicts_of
from tests.simulation.simulation_helpers import check_report

IDS = ("Chaser?team=0", "Runner?team=1")
FASTEST = SPEEDS[1] * SPRINT
Policy = Callable[[tuple[np.ndarray, ...], np.random.Generator], np.ndarray]
Reports = tuple[BehaviorReport, ...]


def actions(chaser: Any, runner: Any, sprint: Any = 0) -> dict[str, BehaviorActions]:
    """Returns actions by behavior id: directions [areas, 2], and which runners sprint."""
    places = [np.asarray(rows, np.float32).reshape(-1, 2) for rows in (chaser, runner)]
    n = len(places[0])
    branches = (np.zeros((n, 0), np.int32), np.broadcast_to(np.asarray(sprint, np.int32), n)[:, None].copy())
    return {
        key: BehaviorActions(behavior=key, agents=np.arange(n), continuous=rows, discrete=branch)
        for key, rows, branch in zip(IDS, places, branches, strict=True)
    }


def started(areas: int, parameters: dict[str, float] | None = None, **places: Any) -> Tag:
    """Returns a game whose players rest at the given places."""
    game = Tag(areas)
    game.reset(parameters or {}, 0)
    for index, name in enumerate(("chaser", "runner")):
        if name in places:
            game._places[:, index] = places[name]
    return game


def at_random(observed: tuple[np.ndarray, ...], random: np.random.Generator) -> np.ndarray:
    return random.normal(size=(len(observed[0]), 2)) / 3


def pursue(observed: tuple[np.ndarray, ...], random: np.random.Generator) -> np.ndarray:
    """Returns directions to the expected place of the other, around the pillar if it is in the way."""
    del random
    place, to = observed[0][:, 0:2] * HALF, observed[0][:, 4:6] * HALF + 0.3 * FASTEST * observed[0][:, 6:8]
    far = np.linalg.norm(to, axis=1) + 1e-6
    ahead = to / far[:, None]
    along, aside = -(place * ahead).sum(1), place[:, 0] * ahead[:, 1] - place[:, 1] * ahead[:, 0]
    round_it = np.stack([-place[:, 1], place[:, 0]], 1)
    round_it *= np.sign((round_it * to).sum(1))[:, None]
    blocked = (along > 0) & (along < far) & (np.abs(aside) < PILLAR + BODY)
    return np.where(blocked[:, None], round_it, ahead)


def flee(observed: tuple[np.ndarray, ...], random: np.random.Generator) -> np.ndarray:
    """Returns the one of 16 directions that leads farthest from the other and not into a corner."""
    del random
    place, limit = observed[0][:, 0:2] * HALF, HALF - BODY
    other = place + observed[0][:, 4:6] * HALF
    angles = np.arange(16) * np.pi / 8
    ways = np.stack([np.cos(angles), np.sin(angles)], 1)
    there = np.clip(place[:, None] + 1.2 * ways, -limit, limit)
    middle = np.linalg.norm(there, axis=2)
    there *= np.maximum((PILLAR + BODY) / middle, 1)[..., None]
    worth = np.linalg.norm(there - other[:, None], axis=2) - 0.15 * middle
    return ways[worth.argmax(1)]


def chaser_wins(chaser: Policy, runner: Policy, areas: int = 64) -> float:
    """Returns the chaser's share of wins in the first matches of all areas and those that followed in their time."""
    game, random = Tag(areas), np.random.default_rng(1)
    observed = [report.decisions.observations for report in game.reset({}, 0)]
    won: list[float] = []
    for _ in range(MAX_STEPS):
        near = np.linalg.norm(observed[1][0][:, 4:6], axis=1) * HALF < 1.5
        reports = game.step(actions(chaser(observed[0], random), runner(observed[1], random), near))
        observed = [report.decisions.observations for report in reports]
        won += [] if reports[0].ends is None else reports[0].ends.outcomes.tolist()
    assert len(won) >= areas
    return float(np.mean(won))


# ---------------------------------------------------------------- reports


def test_the_sides_are_two_behaviors_with_different_specs() -> None:
    chaser, runner = Tag(2).behaviors().items()
    assert (chaser[0], runner[0]) == IDS
    assert [(one.name, one.shape) for one in chaser[1].observations] == [("view", (9,))]
    assert [(one.name, one.shape) for one in runner[1].observations] == [("view", (9,)), ("surroundings", (6,))]
    assert chaser[1].actions == ActionSpec(continuous=2)
    assert runner[1].actions == ActionSpec(continuous=2, discrete=(2,))
    assert list(Tag(1, chaser="Cat", runner="Mouse").behaviors()) == ["Cat?team=0", "Mouse?team=1"]
    with pytest.raises(SettingsError, match="got 'Cat' as the name of both behaviors; expected two"):
        Tag(1, chaser="Cat", runner="Cat")


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), areas=st.integers(1, 4), stubborn=st.integers(1, 30))
def test_random_play_follows_the_rules(seed: int, areas: int, stubborn: int) -> None:
    """Both sides of a match begin and end together, one wins, ids are unique, and no player is in a wall."""
    game, random = Tag(areas), np.random.default_rng(seed)
    specs = dict(game.behaviors())
    reports = game.reset({"approach": 0.1}, seed)
    now, over = reports[0].decisions.matches, set[int]()
    for step in range(150):
        if step % stubborn == 0:
            chosen = random.uniform(-1, 1, (2, areas, 2)), random.integers(0, 2, areas)
        reports = game.step(actions(*chosen[0], chosen[1]))
        for report in reports:
            check_report(report, specs)
        over |= check_pair(reports, now, over)
        now = reports[0].decisions.matches
        far = np.linalg.norm(game._places, axis=2)
        assert (np.abs(game._places) <= HALF - BODY + 1e-9).all()
        assert (far >= PILLAR + BODY - 1e-9).all()


def check_pair(reports: Reports, before: np.ndarray, over: set[int]) -> set[int]:
    """Checks a Step and returns the matches that ended."""
    chaser, runner = reports
    np.testing.assert_array_equal(chaser.decisions.agents, runner.decisions.agents)
    np.testing.assert_array_equal(chaser.decisions.matches, runner.decisions.matches)
    np.testing.assert_array_equal(chaser.decisions.rewards, -runner.decisions.rewards)
    if chaser.ends is None or runner.ends is None:
        assert chaser.ends is runner.ends is None
        np.testing.assert_array_equal(chaser.decisions.matches, before)
        return set()
    ended = chaser.ends.matches.tolist()
    assert ended == runner.ends.matches.tolist() == before[chaser.ends.agents].tolist()
    np.testing.assert_array_equal(chaser.ends.outcomes + runner.ends.outcomes, 1)
    np.testing.assert_array_equal(chaser.ends.rewards, -runner.ends.rewards)
    np.testing.assert_array_equal(chaser.ends.outcomes == 1, chaser.ends.rewards > 0)
    assert not chaser.ends.interrupted.any()
    assert not runner.ends.interrupted.any()
    assert (chaser.decisions.rewards[chaser.ends.agents] == 0).all()
    assert not (over | set(ended)) & set(chaser.decisions.matches.tolist())
    return set(ended)


def test_the_seed_determines_everything() -> None:
    """The same seed and actions give identical reports."""

    def play(seed: int) -> bytes:
        game, random = Tag(4), np.random.default_rng(1)
        parts = []
        game.reset({}, seed)
        for _ in range(MAX_STEPS + 10):
            reports = game.step(actions(*random.uniform(-1, 1, (2, 4, 2)), random.integers(0, 2, 4)))
            parts += [array.tobytes() for report in reports for array in report.decisions.observations]
        return b"".join(parts)

    assert play(3) == play(3) != play(4)


def test_a_reset_begins_other_matches() -> None:
    game = Tag(3)
    first, second = (game.reset({}, 0)[0].decisions.matches for _ in range(2))
    assert not set(first.tolist()) & set(second.tolist())


# ---------------------------------------------------------------- rules


def test_the_chaser_wins_within_reach() -> None:
    """A step into reach ends that match at once, and no other."""
    game = started(2, chaser=[-3, 0], runner=[[-3, TAG_REACH + 0.05], [3, 3]])
    chaser, runner = game.step(actions([[0, 1], [0, 1]], [[0, 0], [0, 0]]))
    assert chaser.ends.agents.tolist() == runner.ends.agents.tolist() == [0]
    assert (chaser.ends.outcomes.tolist(), runner.ends.outcomes.tolist()) == ([1.0], [0.0])
    assert chaser.ends.rewards.tolist() == pytest.approx([1 - STEP_COST])
    assert chaser.decisions.rewards.tolist() == pytest.approx([0, -STEP_COST])


def test_the_runner_wins_at_the_time_limit_which_both_observe() -> None:
    """The match ends by the rules after 120 steps, without interruption."""
    game = started(1, chaser=[-3, 0], runner=[3, 0])
    for step in range(1, MAX_STEPS):
        reports = game.step(actions([0, 0], [0, 0]))
        for report in reports:
            assert report.ends is None
            assert report.decisions.observations[0][0, 8] == pytest.approx(1 - step / MAX_STEPS)
    chaser, runner = game.step(actions([0, 0], [0, 0]))
    assert (chaser.ends.outcomes.tolist(), runner.ends.outcomes.tolist()) == ([0.0], [1.0])
    assert runner.ends.rewards.tolist() == pytest.approx([1 + STEP_COST])
    assert runner.ends.interrupted.tolist() == [False]
    assert runner.ends.observations[0][0, 8] == 0
    assert runner.decisions.observations[0][0, 8] == 1


def test_an_approach_earns_the_parameter_approach() -> None:
    """The chaser earns it per meter, and the runner loses as much."""
    game = started(1, {"approach": 2.0}, chaser=[-3, 0], runner=[-3, 3])
    before = game._apart()[0]
    chaser, runner = game.step(actions([0, 1], [0, 0]))
    gained = 2.0 * (before - game._apart()[0]) - STEP_COST
    assert gained > 0
    assert (chaser.decisions.rewards[0], runner.decisions.rewards[0]) == pytest.approx((gained, -gained))


def test_the_chaser_has_the_higher_speed_and_the_runner_the_higher_acceleration() -> None:
    """The runner is fastest while it sprints; a third of the action range is full speed."""
    game = started(2, chaser=[-3.5, -3.5], runner=[-3.5, 3.5])
    game.step(actions([[1, 0], [0.34, 0]], [[1, 0], [1, 0]], [0, 1]))
    speed = game._velocities[..., 0]
    assert (speed[:, 1] > speed[:, 0]).all()
    for _ in range(12):
        game.step(actions([[1, 0], [0.34, 0]], [[1, 0], [1, 0]], [0, 1]))
    speed = game._velocities[..., 0]
    assert speed[0, 0] == pytest.approx(speed[1, 0]) == pytest.approx(SPEEDS[0], rel=0.1)
    assert speed[0, 1] == pytest.approx(SPEEDS[1], rel=0.01)
    assert speed[1, 1] == pytest.approx(FASTEST, rel=0.01)
    assert speed[0, 1] < speed[0, 0] < speed[1, 1]


def test_a_sprint_ends_without_stamina_which_recovers() -> None:
    game = started(1, chaser=[-3.5, 0], runner=[3.5, 0])
    for left in range(RESTED - TIRES, -1, -TIRES):
        reports = game.step(actions([0, 0], [0, 1], 1))
        assert reports[1].decisions.observations[1][0, 5] == pytest.approx(left / RESTED)
    game.step(actions([0, 0], [0, 1], 1))
    assert game._stamina[0] == 1
    for _ in range(8):
        game.step(actions([0, 0], [0, 0]))
    assert game._stamina[0] == 9


def test_both_sides_observe_their_places() -> None:
    """Relative places are opposite; the runner also observes distances to walls and pillar."""
    game = started(1, chaser=[-2, 1], runner=[3, -1])
    game._velocities[0] = [[1, 0], [0, 2]]
    (view,), (_, surroundings) = game._observe()
    chaser, runner, around = view[0::2], view[1::2], surroundings[1::2]
    np.testing.assert_allclose(chaser[0, :8], [-0.5, 0.25, 1 / FASTEST, 0, 1.25, -0.5, -1 / FASTEST, 2 / FASTEST])
    np.testing.assert_allclose(runner[0, 4:8], -chaser[0, 4:8])
    limit = HALF - BODY
    free = [limit + 3, limit - 3, limit - 1, limit + 1, np.sqrt(10) - PILLAR - BODY]
    np.testing.assert_allclose(around[0], [*(np.array(free) / HALF), 1], rtol=1e-6)


def test_both_sides_can_win() -> None:
    """A skilled side beats a random one, and two skilled sides both win matches."""
    assert 0.05 < chaser_wins(at_random, at_random) < 0.5
    assert chaser_wins(pursue, at_random) > 0.95
    assert chaser_wins(at_random, flee) < 0.05
    assert 0.3 < chaser_wins(pursue, flee) < 0.98


def test_tag_passes_the_compliance_test() -> None:
    """It connects over a socket, as with `sparring compliance`."""
    verdicts = verdicts_of(lambda address: run(Tag(2), address, connect_timeout_s=1.0))
    assert {rule: verdict.status for rule, verdict in verdicts.items() if verdict.status != "PASS"} == {}
