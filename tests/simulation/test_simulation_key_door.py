"""Key and door: rules against a slow twin, the expert, how rare luck is, and what is said of scripts."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.key_door import SCRIPTS, SIGNS, KeyDoor, Maze, draw
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport, Decisions, Ends
from sparring.pipeline.simulation import run
from sparring.pipeline.simulation.game import GivesStatistics, ScriptedGame
from tests.simulation.simulation_helpers import check_report
from tests.simulation.test_simulation_compliance import verdicts_of

KEY = "KeyDoor?team=0"
LEFT, RIGHT, DOWN, UP = range(4)
EXPERT, RANDOM = (SCRIPTS.index(name) + 1 for name in ("expert", "random"))


def act(chosen: Any, scripts: Any = None) -> dict[str, BehaviorActions]:
    discrete = np.array(chosen, np.int32).reshape(-1, 1)
    return {
        KEY: BehaviorActions(
            behavior=KEY,
            agents=np.arange(len(discrete)),
            continuous=np.zeros((len(discrete), 0), np.float32),
            discrete=discrete,
            scripts=None if scripts is None else np.array(scripts, np.int32),
        )
    }


def played(areas: int, script: int) -> dict[str, BehaviorActions]:
    """One script plays all."""
    return act(np.zeros(areas), np.full(areas, script))


def asked(report: BehaviorReport) -> Decisions:
    assert report.decisions is not None
    return report.decisions


def over(report: BehaviorReport) -> dict[int, int]:
    """Row in the ends by agent."""
    return {} if report.ends is None else {agent: row for row, agent in enumerate(report.ends.agents.tolist())}


def rows_of(report: BehaviorReport) -> list[Decisions | Ends]:
    return [asked(report)] if report.ends is None else [asked(report), report.ends]


class Twin:
    """One maze, move by move.

    Args:
        size: places along the side of a room.
        rooms: in a row.
        high: the key lies at the top.
        marks: signs by place and phase that any twin has met, shared by all of one game.
    """

    def __init__(self, size: int, rooms: int, high: bool, marks: dict[Any, list[float]] | None = None) -> None:
        self.marks = {} if marks is None else marks
        self.size, self.rooms, self.high = size, rooms, high
        self.key = (rooms * size - 1, size - 1 if high else 0)
        self.has_key = self.passed = False
        self.place = (size, 0)
        self.age = 0

    def opening(self, left: int) -> int:
        """Row of the opening between room `left` and the next."""
        return self.size - 1 if left in range(0, self.rooms, 2) else 0

    def move(self, choice: int) -> bool:
        """Whether the goal is reached."""
        self.age += 1
        column, row = self.place
        if choice in (DOWN, UP):
            row += 1 if choice == UP else -1
            if 0 <= row < self.size:
                self.place = (column, row)
        elif self.may_pass(column, row, choice):
            self.place = (column + (1 if choice == RIGHT else -1), row)
        self.has_key |= self.place == self.key
        self.passed |= self.place[0] < self.size
        return self.place == (0, 0)

    def may_pass(self, column: int, row: int, choice: int) -> bool:
        room, within = divmod(column, self.size)
        if choice == RIGHT:
            if within < self.size - 1:
                return True
            return room < self.rooms - 1 and row == self.opening(room)
        if within > 0:
            return True
        return room > 0 and row == self.opening(room - 1) and (room > 1 or self.has_key)

    def view(self) -> list[float]:
        room, within = divmod(self.place[0], self.size)
        seen = [float(room == one) for one in range(self.rooms)]
        seen += [float(within == one) for one in range(self.size)]
        seen += [float(self.place[1] == one) for one in range(self.size)]
        lies = 0 if self.has_key else (1 if self.high else -1)
        return [*seen, lies, self.has_key, self.passed]

    def begin(self, seen: np.ndarray) -> None:
        """A new episode, as far as chance has a say in it: place and key are read off `seen`."""
        rooms, size = self.rooms, self.size
        parts = np.split(seen, [rooms, rooms + size, rooms + 2 * size])
        room, within, row = (int(part.argmax()) for part in parts[:3])
        assert room == 1, "an episode begins in the second room"
        self.__init__(size, rooms, bool(parts[3][0] > 0), self.marks)  # type: ignore[misc]
        self.place = (size + within, row)
        self.compare(seen)

    def compare(self, seen: np.ndarray) -> None:
        """What an agent sees is what it has to see; the signs are the same whenever it is in this state."""
        view = self.view()
        assert seen[:-SIGNS].tolist() == view
        mark = self.marks.setdefault((self.place, self.has_key, self.passed), seen[-SIGNS:].tolist())
        assert seen[-SIGNS:].tolist() == mark


def to_goal(twin: Twin) -> int:
    """Fewest moves to the goal, by breadth-first search over the twin's own moves."""
    first = (twin.place, twin.has_key, twin.passed)
    known, line = {first}, deque([(first, 0)])
    while line:
        (place, has_key, passed), moves = line.popleft()
        for choice in range(4):
            twin.place, twin.has_key, twin.passed = place, has_key, passed
            if twin.move(choice):
                return moves + 1
            state = (twin.place, twin.has_key, twin.passed)
            if state not in known:
                known.add(state)
                line.append((state, moves + 1))
    raise AssertionError("no way to the goal")


# ---------------------------------------------------------------- rules


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32 - 1),
    areas=st.integers(1, 4),
    size=st.integers(2, 4),
    rooms=st.integers(3, 5),
    extra=st.integers(0, 40),
    cost=st.sampled_from([0.0, 0.01]),
    shares=st.sampled_from([(0.0, 0.0), (0.5, 0.1), (1.0, 0.0), (0.0, 1.0), (0.8, 0.2)]),
)
def test_every_report_is_that_of_the_twin(
    seed: int, areas: int, size: int, rooms: int, extra: int, cost: float, shares: tuple[float, float]
) -> None:
    """Agent by agent: what is seen, earned and ended, whoever plays, and what each agent is said to have done."""
    limit = int(max(to_goal(twin) for twin in starts(size, rooms))) + extra
    game, random = KeyDoor(areas, size=size, rooms=rooms, limit=limit), np.random.default_rng(seed)
    (report,) = game.reset({"step_cost": cost}, seed)
    marks: dict[Any, list[float]] = {}
    twins = [Twin(size, rooms, False, marks) for _ in range(areas)]
    for twin, seen in zip(twins, asked(report).observations[0], strict=True):
        twin.begin(seen)
    scripts_are = [EXPERT, RANDOM, 0]
    for _ in range(2 * limit):
        chosen = random.integers(0, 4, areas)
        scripts = random.choice(scripts_are, areas, p=[*shares, 1 - sum(shares)])
        (report,) = game.step(act(chosen, scripts))
        check_report(report, dict(game.behaviors()))
        did = asked(report).did_discrete
        assert (did is not None) == scripts.any()
        done = chosen if did is None else did[:, 0]
        np.testing.assert_array_equal(done[scripts == 0], chosen[scripts == 0])
        for agent, twin in enumerate(twins):
            check_agent(report, agent, twin, int(done[agent]), limit, cost)


def check_agent(report: BehaviorReport, agent: int, twin: Twin, choice: int, limit: int, cost: float) -> None:
    won = twin.move(choice)
    ended, row = over(report), asked(report).agents.tolist().index(agent)
    assert (agent in ended) == (won or twin.age == limit)
    rows: Decisions | Ends = asked(report)
    if agent in ended:
        assert report.ends is not None
        rows, at = report.ends, ended[agent]
        assert rows.interrupted[at] == (not won)
        twin.compare(rows.observations[0][at])
        if rows.did_discrete is not None:
            assert rows.did_discrete[at].tolist() == [choice]
        assert asked(report).rewards[row] == 0
        twin.begin(asked(report).observations[0][row])
    else:
        at = row
        twin.compare(rows.observations[0][at])
    assert rows.rewards[at] == pytest.approx(float(won) - cost)


def starts(size: int, rooms: int) -> list[Twin]:
    """A twin at each start, for each place of the key."""
    found = []
    for high in (False, True):
        for column in range(size):
            for row in range(size):
                found.append(Twin(size, rooms, high))
                found[-1].place = (size + column, row)
    return found


def test_every_start_and_both_keys_are_equally_likely() -> None:
    """Whatever a demonstration shows, the next episode may begin elsewhere."""
    (report,) = KeyDoor(6400).reset({}, 5)
    _, counts = np.unique(asked(report).observations[0], axis=0, return_counts=True)
    assert len(counts) == 2 * 4 * 4
    assert counts.min() > 140  # of 200
    assert counts.max() < 260


def test_what_is_seen_lies_between_minus_one_and_one_and_tells_all_states_apart() -> None:
    """As nothing else is hidden, one policy without a memory can solve it; the key's place is told until it is had."""
    maze = draw(4, 4)
    assert maze.seen.shape == (2 * 3 * 64, 4 + 4 + 4 + 3 + SIGNS)
    assert np.abs(maze.seen).max() == 1
    assert len(np.unique(maze.seen[:, :-SIGNS], axis=0)) == 3 * 64 + 64  # without the key there are two of each


def test_signs_mark_every_place_and_phase_and_never_change() -> None:
    """Nobody else has a place's signs, wherever the key lies; those of a recorded episode are those of today."""
    signs = draw(4, 4).seen[:, -SIGNS:]
    assert set(signs.ravel().tolist()) == {-1, 1}
    np.testing.assert_array_equal(signs[:192], signs[192:])
    assert len(np.unique(signs, axis=0)) == 192
    bits = (signs[[0, 100, 191]] > 0) @ (1 << np.arange(SIGNS))
    assert bits.tolist() == [12747359, 12957577, 3887766]


def test_the_door_stops_who_has_no_key() -> None:
    """From the place before it, with and without."""
    game = KeyDoor()
    for phase, expected in ((0, (1, 0)), (1, (0, 1)), (2, (0, 1))):
        game.reset({}, 0)
        game._states[:] = np.ravel_multi_index((0, phase, 4, 3), (2, 3, 16, 4))
        (report,) = game.step(act([LEFT]))
        seen = asked(report).observations[0][0]
        assert (seen[1], seen[0]) == expected
        assert seen[14] == expected[1], "it is said to be passed"


# ---------------------------------------------------------------- limits and ends


def test_at_the_limit_all_end_interrupted_and_the_next_episodes_begin_in_the_same_report() -> None:
    game = KeyDoor(3, limit=60)
    (report,) = game.reset({}, 1)
    for age in range(1, 121):
        before = asked(report).observations[0]
        (report,) = game.step(act([RIGHT] * 3))
        assert asked(report).agents.tolist() == [0, 1, 2]
        assert (asked(report).rewards == 0).all()
        if age % 60:
            assert report.ends is None
            continue
        assert report.ends is not None
        assert report.ends.agents.tolist() == [0, 1, 2]
        assert report.ends.interrupted.all()
        assert (report.ends.rewards == 0).all()
        np.testing.assert_array_equal(report.ends.observations[0], before)  # all have long stood at a wall
        assert (asked(report).observations[0][:, 1] == 1).all()


def test_a_reset_begins_everywhere_anew() -> None:
    """Ages included, and the step cost is that of the last reset."""
    game = KeyDoor(2, limit=47)
    game.reset({"step_cost": 0.5}, 1)
    for _ in range(46):
        game.step(act([RIGHT] * 2))
    (report,) = game.reset({}, None)
    assert report.ends is None
    assert (asked(report).observations[0][:, 1] == 1).all()
    for _ in range(46):
        (report,) = game.step(act([RIGHT] * 2))
        assert report.ends is None
        assert (asked(report).rewards == 0).all()


# ---------------------------------------------------------------- scripts


def test_the_scripts_are_offered() -> None:
    game = KeyDoor(behavior="Thief")
    assert isinstance(game, ScriptedGame)
    assert game.scripts() == {"Thief": ("expert", "random")}
    assert list(game.behaviors()) == ["Thief?team=0"]
    assert game.behaviors()["Thief?team=0"].actions.discrete == (4,)


@pytest.mark.parametrize(("size", "rooms", "limit"), [(4, 4, 150), (2, 3, 20), (5, 4, 200), (3, 6, 150)])
def test_the_expert_goes_a_shortest_way_from_every_start(size: int, rooms: int, limit: int) -> None:
    """Against a breadth-first search over the moves of the twin."""
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


def test_the_expert_needs_35_to_47_moves_where_nothing_else_is_asked_for() -> None:
    """41 in the mean, of 150."""
    maze = draw(4, 4)
    ways = maze.away[maze.starts]
    assert (ways.min(), ways.mean(), ways.max()) == (35, 41, 47)


def test_the_expert_draws_among_equally_short_ways() -> None:
    """From one state its demonstrations differ."""
    game = KeyDoor(64)
    game.reset({}, 1)
    game._states[:] = game._maze.starts[5]
    (report,) = game.step(played(64, EXPERT))
    done = asked(report).did_discrete
    assert done is not None
    assert set(done[:, 0].tolist()) == {RIGHT, DOWN}


def test_the_random_script_chooses_each_move_alike() -> None:
    game = KeyDoor(4000)
    game.reset({}, 1)
    (report,) = game.step(played(4000, RANDOM))
    done = asked(report).did_discrete
    assert done is not None
    counts = np.bincount(done[:, 0], minlength=4)
    assert counts.min() > 900
    assert counts.max() < 1100


def test_what_agents_did_is_said_for_all_rows_where_a_script_played_one_of_them_and_never_else() -> None:
    """In decisions and ends; told or scripted; not in the first report, and not where scripts are asked for none."""
    game = KeyDoor(4, limit=47)
    (report,) = game.reset({}, 1)
    assert asked(report).did_discrete is None
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


# ---------------------------------------------------------------- how rare luck is


def by_chance(maze: Maze, limit: int) -> float:
    """Probability that uniformly random moves reach the goal within an episode: exact, for it is a Markov chain."""
    following = np.where(maze.goals[:, None], np.arange(len(maze.goals))[:, None], maze.following)
    share = np.bincount(maze.starts, minlength=len(following)) / len(maze.starts)
    for _ in range(limit):
        share = sum(np.bincount(move, share / 4, len(following)) for move in following.T)
    return float(share[maze.goals].sum())


def test_chance_finds_the_goal_in_two_of_100_000_episodes() -> None:
    """A learner without another signal has nothing to learn from."""
    assert by_chance(draw(4, 4), 150) == pytest.approx(1.95e-5, rel=0.05)


def test_a_thousand_random_episodes_fetch_the_key_now_and_then_and_never_see_the_goal() -> None:
    """The key is near enough to be found: what follows it is what has to be explored."""
    game, random = KeyDoor(1000), np.random.default_rng(7)
    game.reset({}, 7)
    for _ in range(150):
        (report,) = game.step(act(random.integers(0, 4, 1000)))
        assert not asked(report).rewards.any()
    assert report.ends is not None
    assert report.ends.interrupted.all()
    said = {one.name: one.value for one in game.statistics()}
    assert 0.05 < said["KeyDoor/Key"] < 0.12
    assert said["KeyDoor/Door"] < 0.002
    assert said["KeyDoor/Goal"] == 0


# ---------------------------------------------------------------- statistics, seeds, refusals


def test_statistics_are_said_once_as_many_episodes_as_areas_have_ended() -> None:
    """Of all of them, and each episode counts once."""
    game = KeyDoor(3, limit=47)
    assert isinstance(game, GivesStatistics)
    game.reset({}, 2)
    goals = ends_seen = told = 0
    for _ in range(400):
        (report,) = game.step(act([RIGHT] * 3, [EXPERT, EXPERT, 0]))
        if report.ends is not None:
            ends_seen += report.ends.agents.size
            goals += int((report.ends.rewards == 1).sum())
        said = {one.name: one.value for one in game.statistics()}
        assert bool(said) == (ends_seen >= 3)
        if said:
            told += 1
            assert said == {f"KeyDoor/{word}": pytest.approx(goals / ends_seen) for word in ("Key", "Door", "Goal")}
            goals = ends_seen = 0
    assert told > 5


def test_shares_tell_key_door_and_goal_apart() -> None:
    game = KeyDoor(4, limit=47, behavior="Thief")
    game.reset({}, 2)
    game._ages[:] = 46
    states = [(0, 0, 9, 0), (0, 1, 9, 0), (0, 2, 9, 0), (0, 2, 1, 0)]
    game._states[:] = [np.ravel_multi_index(state, (2, 3, 16, 4)) for state in states]
    game.step({KEY.replace("KeyDoor", "Thief"): act([LEFT] * 4)[KEY]})
    said = {one.name: one.value for one in game.statistics()}
    assert said == {"Thief/Key": 0.75, "Thief/Door": 0.5, "Thief/Goal": 0.25}


def test_the_same_seed_gives_the_same_reports_and_scripts_do_not_change_where_episodes_begin() -> None:
    def play(seed: int, script: int) -> tuple[list[bytes], list[list[Any]]]:
        game = KeyDoor(5, limit=47)
        (report,) = game.reset({}, seed)
        first, rest = [asked(report).observations[0].tobytes()], []
        for _ in range(47):
            (report,) = game.step(act([RIGHT] * 5, [0, 0, 0, 0, script]))
            rest.append([rows.observations[0].tolist() for rows in rows_of(report)])
        first += [asked(report).observations[0][:4].tobytes()]
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
def test_a_maze_that_can_not_be_drawn_or_solved_is_refused(options: dict[str, int], expected: str) -> None:
    """Got, expected, remedy."""
    with pytest.raises(SettingsError, match=expected):
        KeyDoor(1, **options)


def test_it_passes_the_compliance_examination() -> None:
    """Over a socket, as `sparring compliance` does it."""
    verdicts = verdicts_of(lambda address: run(KeyDoor(2), address, connect_timeout_s=1.0))
    assert {rule: verdict.status for rule, verdict in verdicts.items() if verdict.status != "PASS"} == {}
