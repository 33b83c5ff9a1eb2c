"""The expert of key and door is optimal, random play fails, and scripted actions are reported."""

from __future__ import annotations

import numpy as np
import pytest

from sparring.pipeline.games.key_door import KeyDoor, Maze
from sparring.pipeline.simulation.game import ScriptedGame
from tests.simulation.key_door_twin import (
    DOWN,
    EXPERT,
    LEFT,
    RANDOM,
    RIGHT,
    UP,
    act,
    decisions_of,
    over,
    played,
    rows_of,
    starts,
    to_goal,
)

# ---------------------------------------------------------------- scripts


def test_the_game_offers_its_scripts() -> None:
    game = KeyDoor(behavior="Thief")
    assert isinstance(game, ScriptedGame)
    assert game.scripts() == {"Thief": ("expert", "random")}
    assert list(game.behaviors()) == ["Thief?team=0"]
    assert game.behaviors()["Thief?team=0"].actions.discrete == (4,)


@pytest.mark.parametrize(("size", "rooms", "limit"), [(4, 4, 150), (2, 3, 20), (5, 4, 200), (3, 6, 150)])
def test_the_expert_takes_a_shortest_way_from_every_start(size: int, rooms: int, limit: int) -> None:
    """A breadth-first search over the moves of the twin finds the length."""
    wanted = [to_goal(twin) for twin in starts(size, rooms)]
    game = KeyDoor(len(wanted), size=size, rooms=rooms, limit=limit)
    game.reset({}, 1)
    game._states[:] = game._maze.starts
    took: dict[int, int] = {}
    for age in range(1, max(wanted) + 1):
        (report,) = game.step(played(len(wanted), EXPERT))
        for agent, row in over(report).items():
            assert report.ends is not None
            if agent not in took:
                took[agent] = age
                assert report.ends.rewards[row] == 1
                assert not report.ends.interrupted[row]
    assert [took[agent] for agent in range(len(wanted))] == wanted


def test_the_expert_needs_35_to_47_moves_with_default_options() -> None:
    """It needs 41 in the mean, of 150."""
    maze = Maze(4, 4)
    ways = maze.away[maze.starts]
    assert (ways.min(), ways.mean(), ways.max()) == (35, 41, 47)


def test_the_expert_samples_among_equally_short_ways() -> None:
    """Its demonstrations from one state differ."""
    game = KeyDoor(64)
    game.reset({}, 1)
    game._states[:] = game._maze.starts[5]
    (report,) = game.step(played(64, EXPERT))
    done = decisions_of(report).did_discrete
    assert done is not None
    assert set(done[:, 0].tolist()) == {RIGHT, DOWN}


def test_the_random_script_chooses_all_moves_equally_often() -> None:
    game = KeyDoor(4000)
    game.reset({}, 1)
    (report,) = game.step(played(4000, RANDOM))
    done = decisions_of(report).did_discrete
    assert done is not None
    counts = np.bincount(done[:, 0], minlength=4)
    assert counts.min() > 900
    assert counts.max() < 1100


def test_taken_actions_are_reported_for_all_rows_if_a_script_played_any_of_them() -> None:
    """Decisions and ends report them, but not the first report, and not reports without scripts."""
    game = KeyDoor(4, limit=47)
    (report,) = game.reset({}, 1)
    assert decisions_of(report).did_discrete is None
    for scripts in (None, [0, 0, 0, 0]):
        for _ in range(47):
            (report,) = game.step(act([RIGHT] * 4, scripts))
            assert all(rows.did_discrete is None for rows in rows_of(report))
    chosen = [UP, RIGHT, LEFT, UP]
    ended = 0
    for _ in range(50):
        (report,) = game.step(act(chosen, [EXPERT, 0, 0, RANDOM]))
        for rows in rows_of(report):
            assert rows.did_discrete is not None
            assert rows.did_discrete.shape == (rows.agents.size, 1)
            assert rows.did_discrete.dtype == np.int32
            by_agent = dict(zip(rows.agents.tolist(), rows.did_discrete[:, 0].tolist(), strict=True))
            assert [by_agent.get(1, RIGHT), by_agent.get(2, LEFT)] == [RIGHT, LEFT]
        ended += report.ends is not None
    assert ended


# ---------------------------------------------------------------- random play


def by_chance(maze: Maze, limit: int) -> float:
    """Returns the exact probability that random moves reach the goal in an episode, which is a Markov chain."""
    following = np.where(maze.goals[:, None], np.arange(len(maze.goals))[:, None], maze.following)
    share = np.bincount(maze.starts, minlength=len(following)) / len(maze.starts)
    for _ in range(limit):
        share = sum(np.bincount(move, share / 4, len(following)) for move in following.T)
    return float(share[maze.goals].sum())


def test_chance_finds_the_goal_in_two_of_100_000_episodes() -> None:
    """A learner without another reward signal has nothing to learn from."""
    assert by_chance(Maze(4, 4), 150) == pytest.approx(1.95e-5, rel=0.05)


def test_random_episodes_find_the_key_sometimes_and_never_the_goal() -> None:
    """The key is near; exploration is hard after it."""
    game, random = KeyDoor(1000), np.random.default_rng(7)
    game.reset({}, 7)
    for _ in range(150):
        (report,) = game.step(act(random.integers(0, 4, 1000)))
        assert not decisions_of(report).rewards.any()
    assert report.ends is not None
    assert report.ends.interrupted.all()
    statistics = {one.name: one.value for one in game.statistics()}
    assert 0.05 < statistics["KeyDoor/Key"] < 0.12
    assert statistics["KeyDoor/Door"] < 0.002
    assert statistics["KeyDoor/Goal"] == 0
