"""Games of Unity players that are spoken with in stepping: what they say over real gRPC, and what leaves stepping.

What agents of the stand-in see tells their age and what they did last. So each life is held against itself.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparring.pipeline.errors import SettingsError
from sparring.pipeline.messages.matches import Matchup, MatchupAssignment
from tests.simulation.unity_bridge import Doll, agents, introduction, message, player_by_hand, with_goal_camera
from tests.simulation.unity_player_peer import Played
from tests.simulation.unity_player_teams import zoo_image
from tests.stepping.players_house import CONFIGURATION, GHOST, NUMBER, AgentEpisode, Decision, Launched, Table, Told

GROUPS = (NUMBER + 1) << 32
"""What group ids of the simulator are counted from."""
TEAMS = ("SoccerTwos?team=0", "SoccerTwos?team=1")


# ---------------------------------------------------------------- where they call


def test_players_call_where_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where a simulator would have it: what it says of its player has no address."""
    asked = []

    def refuse(_player: object, *, host: str, **_: object) -> None:
        asked.append(host)
        raise SettingsError("got no room; expected some; wait")

    monkeypatch.setattr("sparring.services.endpoint.simulators.PlayerConnection", refuse)

    def launch(port: int) -> Launched:
        raise AssertionError(port)

    told = Table(1, host="127.0.0.2").meet(launch)
    assert asked == ["127.0.0.2"]
    assert told.fault is not None
    assert told.fault.got == "no room"


# ---------------------------------------------------------------- one of everything

ZOOS = [
    ("--areas 2", False),
    ("--areas 2 --layout hwc --anew next", True),
    ("--areas 3 --images float --late-after 17", False),
]


def seen_in_the_zoo(decision: Decision, before: Decision | None, member: int, age: int, bright: int) -> None:
    """What one agent sees at its age: itself, and what it did before; what it may not do."""
    numbers, entities, image, goal = decision.seen
    said = [0, 0, 0] if before is None else [*before.continuous, before.discrete @ np.array([3, 1])]
    assert numbers.tolist() == [member, age, *said]
    assert entities[:, 2].tolist() == [n if n <= 1 + (member + age) % 4 else 0 for n in range(1, 5)]
    assert np.array_equal((image * np.float32(bright)).round(), zoo_image(np.array([member]), age)[0])
    assert goal.tolist() == np.eye(2)[member % 2].tolist()
    masked = [2 + member % 3] if member % 2 == age % 2 == 0 else []
    assert (decision.mask is None and not masked) or np.flatnonzero(decision.mask).tolist() == masked


def check_zoo(life: AgentEpisode, bright: int) -> None:
    """One agent's life: three of them are a group, and end at ages 4, 8 and 12."""
    member = int(life.decisions[0].seen[0][0])
    assert life.group == GROUPS + member // 3 + 1
    end = 4 * (member % 3 + 1)
    for age, decision in enumerate(life.decisions):
        seen_in_the_zoo(decision, life.decisions[age - 1] if age else None, member, age, bright)
    for age, step in enumerate(life.steps, 1):
        assert step.reward == step.continuous[0]
        assert step.group_reward == (1.0 if age == 12 else 0.5 if age % 4 == 0 else 0.0)
    if life.ended is not None:
        assert len(life.steps) == len(life.decisions) == end
        assert life.last[0][1] == end


@pytest.mark.parametrize(("words", "lockstep"), ZOOS)
def test_one_of_everything(words: str, lockstep: bool, tmp_path: Path) -> None:
    """Groups, masks, images in either layout, entities, goals, hybrid actions, a behavior that appears late."""
    told = Table(48, lockstep=lockstep).play(tmp_path, "--game", "zoo", *words.split())
    told.check()
    areas = int(words.split()[1])
    for life in told.witness.of("Zoo"):
        check_zoo(life, 255 if "float" in words else 1)
    ended = [life for life in told.witness.of("Zoo") if life.ended is not None]
    assert len(ended) >= 9 * areas
    cut = Counter((len(life.steps), life.interrupted) for life in ended)
    assert {size for size, interrupted in cut if interrupted} == {12}
    assert cut[12, True] == 2 * areas  # every other episode
    late = told.witness.of("Late")
    assert len(late) == areas
    assert {life.group for life in late} == {0}
    for life in late:
        assert len(life.steps) > 10
        assert [step.reward for step in life.steps] == [float(step.discrete[0]) for step in life.steps]
        assert [one.seen[0][1] for one in life.decisions] == list(range(len(life.decisions)))


def test_a_late_behavior_that_the_configuration_does_not_have_ends_the_player(tmp_path: Path) -> None:
    """By its name; the player is told to quit."""
    told = Table(40, behaviors=CONFIGURATION).play(tmp_path, "--game", "zoo", "--areas", "2")
    assert told.fault is not None
    assert (told.fault.code, told.fault.got) == ("unknown_behavior", "behavior 'Late?team=0'")
    assert told.player is not None
    assert told.player.code == 0
    assert "quit: quit" in told.player.log
    assert told.witness.of("Zoo")


@pytest.mark.parametrize("anew", ["same", "next"])
def test_all_begin_anew_where_a_lesson_asks_for_it(anew: str, tmp_path: Path) -> None:
    """In the middle of episodes, whose agents are lost; their next lives are whole, and the late ones stay late."""
    words = ("--game", "zoo", "--areas", "2", "--anew", anew)
    told = Table(45, anew_after=19).play(tmp_path, *words)
    told.check()
    assert told.player is not None
    assert len(told.player.told("reset")) == 2
    lost = [life for life in told.witness.agent_episodes if life.lost]
    assert Counter(life.behavior for life in lost) == {"Zoo": 4, "Late": 2}
    for life in told.witness.of("Zoo"):
        check_zoo(life, 1)
    assert sum(life.ended is not None for life in told.witness.of("Zoo")) >= 12


# ---------------------------------------------------------------- two teams

LIMIT = 25
KICKS = np.array([0, 1, -1])


def check_soccer(agent_episodes: list[AgentEpisode], team: int) -> None:
    """Two pitches, each with a group of two; age is what an agent sees second."""
    for life in agent_episodes:
        assert life.group - GROUPS in (2 * team + 1, 2 * team + 2)
        ages = [round(float(one.seen[0][1]) * LIMIT) for one in life.decisions]
        assert ages == list(range(len(ages)))
        assert (life.decisions[0].seen[0].shape, life.decisions[0].seen[1].shape) == ((264,), (72,))
        assert len(life.decisions[0].discrete) == 3
    together = Counter((life.ended, life.group) for life in agent_episodes)
    assert set(together.values()) == {2}


def pushed(told: Told, pitch: int) -> list[tuple[float, float]]:
    """Step by step of a pitch's first episode: how hard the ball was pushed, and how far it went."""
    agent_episodes = told.witness.of("SoccerTwos")
    sides = [[life for life in agent_episodes if life.group == GROUPS + 1 + pitch + 2 * team][:2] for team in (0, 1)]
    kicks = [np.mean([[KICKS[one.discrete[0]] for one in life.steps] for life in side], axis=0) for side in sides]
    ball = np.array([float(one.seen[0][0]) for one in [*sides[0][0].decisions]] + [float(sides[0][0].last[0][0])])
    return list(zip(kicks[0] - kicks[1], np.diff(ball), strict=True))


@pytest.mark.parametrize("words", ["", "--anew next"])
def test_two_teams_of_one_name(words: str, tmp_path: Path) -> None:
    """Each in groups of its own; the ball goes where all push it; at the limit all of a pitch end at once."""
    told = Table(54).play(tmp_path, *f"--game soccer --areas 2 --max-steps {LIMIT} {words}".split())
    told.check()
    agent_episodes = told.witness.of("SoccerTwos")
    for team in (0, 1):
        check_soccer([life for life in agent_episodes if life.team == team], team)
    ended = [life for life in agent_episodes if life.ended is not None]
    assert len({life.ended for life in ended}) == 2
    assert len(ended) == 16
    for life in ended:
        assert life.interrupted
        assert len(life.steps) == LIMIT
        assert not any(step.group_reward or step.reward for step in life.steps)
    assert np.corrcoef(np.array(pushed(told, 0) + pushed(told, 1)).T)[0, 1] > 0.9


@pytest.mark.parametrize("learning", [0, 1])
def test_the_team_that_learns_beats_a_ghost_that_stands_still(learning: int, tmp_path: Path) -> None:
    """Only of the one that learns is told; each match of a group ends with its goal, and is won."""
    assignment = MatchupAssignment(
        serial=1, matchups=(Matchup(number=5, team=learning, ghosts={TEAMS[1 - learning]: GHOST}),)
    )
    table = Table(70, self_play=["SoccerTwos"], assignment=assignment, first=1)
    told = table.play(tmp_path, "--game", "soccer", "--areas", "2", "--max-steps", "40")
    told.check()
    agent_episodes = told.witness.of("SoccerTwos")
    assert {life.team for life in agent_episodes} == {learning}
    check_soccer_goals(agent_episodes)
    behavior = table.stepper.behaviors["SoccerTwos"]
    assert behavior.ghosts == behavior.produced > 0
    rows = [(*row,) for one in told.witness.results for row in zip(one.scores, one.explicit, one.rewards, strict=True)]
    goals = {(life.ended, life.group): life.steps[-1].group_reward for life in agent_episodes if life.ended is not None}
    assert [(score, said) for score, said, _ in rows if score >= 0] == [(1.0, 0)] * len(goals)
    assert sorted(reward for score, _, reward in rows if score >= 0) == sorted(goals.values())
    assert len(goals) >= 4


def check_soccer_goals(agent_episodes: list[AgentEpisode]) -> None:
    """The sooner, the better; for both of a group, with the last of its steps."""
    for life in agent_episodes:
        assert not life.interrupted
        for at, step in enumerate(life.steps, 1):
            scored = life.ended is not None and at == len(life.steps)
            assert step.group_reward == (np.float32(1 - at / 40) if scored else 0.0)
            assert step.discrete[0] == 1


# ---------------------------------------------------------------- Match3, Basic, and old packages

BOARDS = [
    ("--images png", ((6, 9, 8), "uint8"), ((3, 9, 8), "uint8")),
    ("--images float --anew next", ((6, 9, 8), "float32"), ((3, 9, 8), "float32")),
    ("--images png --protocol 1.0.0", ((6, 9, 8), "float32"), ((3, 9, 8), "uint8")),
    ("--images float --areas 30", ((6, 9, 8), "float32"), ((3, 9, 8), "float32")),  # large: read on a thread
]


@pytest.mark.parametrize(("words", "cells", "special"), BOARDS)
def test_boards_and_masks_of_match3(words: str, cells: object, special: object, tmp_path: Path) -> None:
    """127 choices with a mask for each decision, one cell of each place, a reward for each move; ten moves."""
    told = Table(24).play(tmp_path, *f"--game match3 --areas 3 --max-steps 10 {words}".split())
    told.check()
    agent_episodes = told.witness.of("Match3")
    for life in agent_episodes:
        for decision in life.decisions:
            for board, wanted in zip(decision.seen, (cells, special), strict=True):
                assert (board.shape, board.dtype) == wanted
                assert (board.sum(0) == (255 if board.dtype == np.uint8 else 1)).all()
            assert decision.mask is not None
            assert decision.mask.shape == (127,)
            assert 60 < decision.mask.sum() < 127
            assert not decision.mask[decision.discrete[0]]
        for step in life.steps:
            assert step.reward == np.float32(0.01 * (step.discrete[0] % 10))
    ended = [life for life in agent_episodes if life.ended is not None]
    assert len(ended) >= len(agent_episodes) / 2
    assert all(life.interrupted and len(life.steps) == 10 for life in ended)


@pytest.mark.parametrize("anew", ["same", "next"])
def test_basic_has_a_new_agent_for_every_episode(anew: str, tmp_path: Path) -> None:
    """Its steps go where it chose; there are never more agents than areas, however many there have been."""
    table = Table(90)
    told = table.play(tmp_path, *f"--game basic --areas 3 --max-steps 12 --anew {anew}".split())
    told.check()
    agent_episodes = told.witness.of("Basic")
    assert len(agent_episodes) > 20
    assert table.stepper.behaviors["Basic"].table.taken <= 3
    for life in agent_episodes:
        squares = [int(one.seen[0].argmax()) for one in life.decisions]
        squares += [int(life.last[0].argmax())] if life.last else []
        moves = [(0, -1, 1)[step.discrete[0]] for step in life.steps]
        assert squares[0] == 10
        assert np.diff(squares)[: len(moves)].tolist() == moves
        if life.ended is not None:
            assert life.interrupted == (squares[-1] not in (7, 17))
            assert life.steps[-1].reward == pytest.approx({7: 0.09, 17: 0.99}.get(squares[-1], -0.01))


@pytest.mark.parametrize("words", ["", "--discrete --actions 2"])
def test_a_player_of_version_1_0_walks_to_its_goal(words: str, tmp_path: Path) -> None:
    """It is told what to do in the fields of its time, and does it."""
    told = Table(60, first=1).play(tmp_path, *f"--areas 4 --protocol 1.0.0 {words}".split())
    told.check()
    ended = [life for life in told.witness.of("Goal") if life.ended is not None]
    assert ended
    for life in ended:
        (goal,) = life.decisions[0].seen[0].tolist()
        if words:
            assert life.steps[-1].reward == pytest.approx(1.06 * goal * np.mean([1, *_place(life)]))
        else:
            moved = np.cumsum([np.clip(step.continuous[0], -0.2, 0.2) for step in life.steps])
            assert abs(moved[-1]) > 0.5
            assert life.steps[-1].reward == pytest.approx(1.06 * goal * np.sign(moved[-1]))


def _place(life: AgentEpisode) -> list[float]:
    """Where the second position is at the end."""
    at = 0.0
    for step in life.steps:
        at = min(max(at + (0.2 if step.discrete[1] else -0.2), -1), 1)
    return [round(at)]


# ---------------------------------------------------------------- agents in any order

ORDERS = ([5, 1, 9], [9, 5, 1], [1, 9], [5, 9, 1])
OVER = {1: 9, 3: 5}
"""In which message which agent ends, and begins anew in the same one."""


class ByHand(threading.Thread):
    """A player that does what `plays` says, which introduces itself before and is told to quit after it."""

    def __init__(self, port: int, plays: Callable[[Doll], None]) -> None:
        super().__init__()
        self._port = port
        self._plays = plays
        self.played = Played(1, [], "")
        self.start()

    def run(self) -> None:
        with player_by_hand(self._port) as doll:
            doll.ask(introduction())
            doll.ask(message())
            self._plays(doll)
            assert doll.ask(message()).unity_input.rl_input.command == 2
        self.played = Played(0, [], "")


def said_unsorted(number: int, ids: list[int]) -> Any:
    """Agents that see ten times their id, and the number of the message."""
    made = agents(known=number == 0, count=0)
    infos = made.unity_output.rl_output.agentInfos["Doll?team=0"].value
    over = [(OVER[number], True)] if number in OVER else []
    for one, done in [(ids[0], False), *over, *((one, False) for one in ids[1:])]:
        seen = infos.add(id=one, done=done).observations.add(shape=[1], dimension_properties=[1], name="seen")
        seen.float_data.data.append(10 * one + number)
    return made


DOLL = "behaviors: {Doll: }"


@pytest.mark.parametrize("lockstep", [False, True])
def test_each_agent_is_told_its_own_in_whatever_order_they_stand(lockstep: bool) -> None:
    """Lockstep acts in the order of their ids, and answers in the player's."""
    given: dict[int, float] = {}

    def plays(doll: Doll) -> None:
        for number, ids in enumerate(ORDERS):
            told = doll.ask(said_unsorted(number, ids)).unity_input.rl_input.agent_actions["Doll?team=0"].value
            for one, action in zip(ids, told, strict=True):
                given[10 * one + number] = action.continuous_actions[0]

    told = Table(len(ORDERS), behaviors=DOLL, lockstep=lockstep).meet(lambda port: ByHand(port, plays))
    told.check()
    agent_episodes = told.witness.of("Doll")
    chosen = {int(one.seen[0][0]): one.continuous[0] for life in agent_episodes for one in life.decisions}
    assert chosen == given
    names = [{int(one.seen[0][0]) // 10 for one in life.decisions} for life in agent_episodes]
    assert Counter(number for own in names for number in own) == {1: 1, 5: 2, 9: 2}
    assert all(len(own) == 1 for own in names)


def test_a_goal_that_is_a_picture_is_told_of() -> None:
    """Once, by its name and that of its behavior: networks see it, and are not conditioned on it."""

    def plays(doll: Doll) -> None:
        for number in range(2):
            doll.ask(with_goal_camera(agents(known=not number)))

    told = Table(2, behaviors=DOLL).meet(lambda port: ByHand(port, plays))
    told.check()
    (line,) = (one for one in told.logged if one["event"] == "goal_not_conditioned_on")
    assert line["log_level"] == "warning"
    assert line["got"] == "goal signal 'GoalCamera' of Doll?team=0, read as any other image"
    assert told.witness.of("Doll")[0].decisions[0].seen[1].shape == (3, 20, 20)


def test_a_port_that_is_taken_is_told_with_what_to_do() -> None:
    """As got, expected and remedy, each once; no player is launched."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        told = Table(1, behaviors=DOLL, port=port).meet(lambda port: ByHand(port, lambda doll: None))
    assert told.player is None
    assert told.fault is not None
    assert told.fault.got == f"port {port} on 127.0.0.1, which is not free"
    assert told.fault.expected == "one on which a Unity player can call"
    assert told.fault.remedy == "stop what uses it, or choose another with --base-port"
