"""Key and door equals a slow twin; limits, statistics, seeds and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.key_door import SIGNS, KeyDoor, Maze
from sparring.pipeline.messages.simulator import BehaviorReport, Decisions, Ends
from sparring.pipeline.simulation import run
from sparring.pipeline.simulation.game import StatisticsGame
from tests.simulation.compliance_simulator import verdicts_of
from tests.simulation.key_door_twin import (
    EXPERT,
    KEY,
    LEFT,
    RANDOM,
    RIGHT,
    Twin,
    act,
    decisions_of,
    over,
    rows_of,
    starts,
    to_goal,
)
from tests.simulation.simulation_helpers import check_report

# ---------------------------------------------------------------- rules


@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32 - 1),
    areas=st.integers(1, 4),
    size=st.integers(2, 4),
    rooms=st.integers(3, 5),
    extra=st.integers(0, 40),
    cost=st.sampled_from([0.0, 0.01]),
    shares=st.sampled_from([(0.0, 0.0), (0.5, 0.1), (1.0, 0.0), (0.0, 1.0), (0.8, 0.2)]),
)
def test_every_report_equals_that_of_the_twin(
    seed: int, areas: int, size: int, rooms: int, extra: int, cost: float, shares: tuple[float, float]
) -> None:
    """Observations, rewards, ends and reported actions are equal for each agent, whoever plays."""
    limit = int(max(to_goal(twin) for twin in starts(size, rooms))) + extra
    game, random = KeyDoor(areas, size=size, rooms=rooms, limit=limit), np.random.default_rng(seed)
    (report,) = game.reset({"step_cost": cost}, seed)
    signs_seen: dict[Any, list[float]] = {}
    twins = [Twin(size, rooms, False, signs_seen) for _ in range(areas)]
    for twin, seen in zip(twins, decisions_of(report).observations[0], strict=True):
        twin.begin(seen)
    scripts_are = [EXPERT, RANDOM, 0]
    for _ in range(2 * limit):
        chosen = random.integers(0, 4, areas)
        scripts = random.choice(scripts_are, areas, p=[*shares, 1 - sum(shares)])
        (report,) = game.step(act(chosen, scripts))
        check_report(report, dict(game.behaviors()))
        did = decisions_of(report).did_discrete
        assert (did is not None) == scripts.any()
        done = chosen if did is None else did[:, 0]
        np.testing.assert_array_equal(done[scripts == 0], chosen[scripts == 0])
        for agent, twin in enumerate(twins):
            check_agent(report, agent, twin, int(done[agent]), limit, cost)


def check_agent(report: BehaviorReport, agent: int, twin: Twin, choice: int, limit: int, cost: float) -> None:
    won = twin.move(choice)
    ended, row = over(report), decisions_of(report).agents.tolist().index(agent)
    assert (agent in ended) == (won or twin.age == limit)
    rows: Decisions | Ends = decisions_of(report)
    if agent in ended:
        assert report.ends is not None
        rows, at = report.ends, ended[agent]
        assert rows.interrupted[at] == (not won)
        twin.compare(rows.observations[0][at])
        if rows.did_discrete is not None:
            assert rows.did_discrete[at].tolist() == [choice]
        assert decisions_of(report).rewards[row] == 0
        twin.begin(decisions_of(report).observations[0][row])
    else:
        at = row
        twin.compare(rows.observations[0][at])
    assert rows.rewards[at] == pytest.approx(float(won) - cost)


def test_every_start_and_both_keys_are_equally_likely() -> None:
    """An episode may begin at another place than that of a demonstration."""
    (report,) = KeyDoor(6400).reset({}, 5)
    _, counts = np.unique(decisions_of(report).observations[0], axis=0, return_counts=True)
    assert len(counts) == 2 * 4 * 4
    assert counts.min() > 140  # of 200
    assert counts.max() < 260


def test_observations_lie_in_minus_one_to_one_and_distinguish_all_states() -> None:
    """A policy without memory can solve it; the key's place is observed until the agent has the key."""
    maze = Maze(4, 4)
    assert maze.seen.shape == (2 * 3 * 64, 4 + 4 + 4 + 3 + SIGNS)
    assert np.abs(maze.seen).max() == 1
    assert (
        len(np.unique(maze.seen[:, :-SIGNS], axis=0)) == 3 * 64 + 64
    )  # without the key there are two states per place


def test_signs_are_unique_to_each_place_and_phase_and_never_change() -> None:
    """They do not depend on the key's place, and recorded episodes keep their signs."""
    signs = Maze(4, 4).seen[:, -SIGNS:]
    assert set(signs.ravel().tolist()) == {-1, 1}
    np.testing.assert_array_equal(signs[:192], signs[192:])
    assert len(np.unique(signs, axis=0)) == 192
    bits = (signs[[0, 100, 191]] > 0) @ (1 << np.arange(SIGNS))
    assert bits.tolist() == [12747359, 12957577, 3887766]


def test_the_door_stops_an_agent_without_key() -> None:
    """An agent moves from the place before the door, with and without key."""
    game = KeyDoor()
    for phase, expected in ((0, (1, 0)), (1, (0, 1)), (2, (0, 1))):
        game.reset({}, 0)
        game._states[:] = np.ravel_multi_index((0, phase, 4, 3), (2, 3, 16, 4))
        (report,) = game.step(act([LEFT]))
        seen = decisions_of(report).observations[0][0]
        assert (seen[1], seen[0]) == expected
        assert seen[14] == expected[1], "the observation shows whether the door is passed"


# ---------------------------------------------------------------- limits and ends


def test_at_the_limit_all_are_interrupted_and_restart_in_the_same_report() -> None:
    game = KeyDoor(3, limit=60)
    (report,) = game.reset({}, 1)
    for age in range(1, 121):
        before = decisions_of(report).observations[0]
        (report,) = game.step(act([RIGHT] * 3))
        assert decisions_of(report).agents.tolist() == [0, 1, 2]
        assert (decisions_of(report).rewards == 0).all()
        if age % 60:
            assert report.ends is None
            continue
        assert report.ends is not None
        assert report.ends.agents.tolist() == [0, 1, 2]
        assert report.ends.interrupted.all()
        assert (report.ends.rewards == 0).all()
        np.testing.assert_array_equal(report.ends.observations[0], before)  # all agents have long reached a wall
        assert (decisions_of(report).observations[0][:, 1] == 1).all()


def test_a_reset_restarts_all_areas() -> None:
    """It also resets ages and sets the step cost."""
    game = KeyDoor(2, limit=47)
    game.reset({"step_cost": 0.5}, 1)
    for _ in range(46):
        game.step(act([RIGHT] * 2))
    (report,) = game.reset({}, None)
    assert report.ends is None
    assert (decisions_of(report).observations[0][:, 1] == 1).all()
    for _ in range(46):
        (report,) = game.step(act([RIGHT] * 2))
        assert report.ends is None
        assert (decisions_of(report).rewards == 0).all()


# ---------------------------------------------------------------- statistics, seeds, refusals


def test_statistics_are_reported_once_as_many_episodes_as_areas_have_ended() -> None:
    """They cover all episodes, each once."""
    game = KeyDoor(3, limit=47)
    assert isinstance(game, StatisticsGame)
    game.reset({}, 2)
    goals = ended = reports = 0
    for _ in range(400):
        (report,) = game.step(act([RIGHT] * 3, [EXPERT, EXPERT, 0]))
        if report.ends is not None:
            ended += report.ends.agents.size
            goals += int((report.ends.rewards == 1).sum())
        statistics = {one.name: one.value for one in game.statistics()}
        assert bool(statistics) == (ended >= 3)
        if statistics:
            reports += 1
            assert statistics == {f"KeyDoor/{part}": pytest.approx(goals / ended) for part in ("Key", "Door", "Goal")}
            goals = ended = 0
    assert reports > 5


def test_statistics_distinguish_key_door_and_goal() -> None:
    game = KeyDoor(4, limit=47, behavior="Thief")
    game.reset({}, 2)
    game._ages[:] = 46
    states = [(0, 0, 9, 0), (0, 1, 9, 0), (0, 2, 9, 0), (0, 2, 1, 0)]
    game._states[:] = [np.ravel_multi_index(state, (2, 3, 16, 4)) for state in states]
    game.step({KEY.replace("KeyDoor", "Thief"): act([LEFT] * 4)[KEY]})
    statistics = {one.name: one.value for one in game.statistics()}
    assert statistics == {"Thief/Key": 0.75, "Thief/Door": 0.5, "Thief/Goal": 0.25}


def test_the_seed_determines_reports_and_scripts_do_not_change_the_starts() -> None:
    def play(seed: int, script: int) -> tuple[list[bytes], list[list[Any]]]:
        game = KeyDoor(5, limit=47)
        (report,) = game.reset({}, seed)
        first, rest = [decisions_of(report).observations[0].tobytes()], []
        for _ in range(47):
            (report,) = game.step(act([RIGHT] * 5, [0, 0, 0, 0, script]))
            rest.append([rows.observations[0].tolist() for rows in rows_of(report)])
        first += [decisions_of(report).observations[0][:4].tobytes()]
        return first, rest

    assert play(3, RANDOM) == play(3, RANDOM)
    assert play(3, RANDOM)[1] != play(4, RANDOM)[1]
    assert play(3, RANDOM)[0] == play(3, 0)[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"size": 1}, "got size=1; expected 2 to 12; correct option 'size'"),
        ({"size": 13}, "got size=13; expected 2 to 12"),
        ({"rooms": 2}, "got rooms=2; expected 3 to 10"),
        ({"rooms": 11}, "got rooms=11; expected 3 to 10"),
        ({"limit": 46}, "got limit=46; expected 47 or more, .* raise limit, or lower size or rooms"),
        ({"size": 12, "rooms": 10}, "got limit=150; expected 435 or more"),
    ],
)
def test_a_maze_that_cannot_be_built_or_solved_is_refused(options: dict[str, int], expected: str) -> None:
    with pytest.raises(SettingsError, match=expected):
        KeyDoor(1, **options)


def test_key_door_passes_the_compliance_test() -> None:
    """It connects over a socket, as with `sparring compliance`."""
    verdicts = verdicts_of(lambda address: run(KeyDoor(2), address, connect_timeout_s=1.0))
    assert {rule: verdict.status for rule, verdict in verdicts.items() if verdict.status != "PASS"} == {}
