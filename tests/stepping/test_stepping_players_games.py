"""Games of Unity players over real gRPC, compared with the steps that leave stepping.

Observations of the stand-in's agents encode their age and their last action, so each episode is checked against itself.
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
from tests.simulation.unity_bridge import ManualPlayer, agents, introduction, manual_player, message, with_goal_camera
from tests.simulation.unity_player_peer import Played
from tests.simulation.unity_player_teams import zoo_image
from tests.stepping.player_runs import (
    CONFIGURATION,
    GHOST,
    NUMBER,
    AgentEpisode,
    Decision,
    GameRecord,
    Launched,
    PlayedGame,
)

GROUPS = (NUMBER + 1) << 32
"""Group ids of the simulator begin after this number."""
TEAMS = ("SoccerTwos?team=0", "SoccerTwos?team=1")


# ---------------------------------------------------------------- addresses


def test_players_connect_to_the_address_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulator cannot choose the address: its record of the player has none."""
    asked = []

    def refuse(_player: object, *, host: str, **_: object) -> None:
        asked.append(host)
        raise SettingsError("got no port; expected one; wait")

    monkeypatch.setattr("sparring.services.endpoint.simulators.PlayerConnection", refuse)

    def launch(port: int) -> Launched:
        raise AssertionError(port)

    record = PlayedGame(1, host="127.0.0.2").play_with(launch)
    assert asked == ["127.0.0.2"]
    assert record.fault is not None
    assert record.fault.got == "no port"


# ---------------------------------------------------------------- all kinds of observations

ZOOS = [
    ("--areas 2", False),
    ("--areas 2 --layout hwc --restart next", True),
    ("--areas 3 --images float --late-after 17", False),
]


def check_zoo_decision(decision: Decision, before: Decision | None, member: int, age: int, bright: int) -> None:
    """Checks one observation and its mask: the agent's number and age, and what it did before."""
    numbers, entities, image, goal = decision.seen
    actions = [0, 0, 0] if before is None else [*before.continuous, before.discrete @ np.array([3, 1])]
    assert numbers.tolist() == [member, age, *actions]
    assert entities[:, 2].tolist() == [n if n <= 1 + (member + age) % 4 else 0 for n in range(1, 5)]
    assert np.array_equal((image * np.float32(bright)).round(), zoo_image(np.array([member]), age)[0])
    assert goal.tolist() == np.eye(2)[member % 2].tolist()
    masked = [2 + member % 3] if member % 2 == age % 2 == 0 else []
    assert (decision.mask is None and not masked) or np.flatnonzero(decision.mask).tolist() == masked


def check_zoo(episode: AgentEpisode, bright: int) -> None:
    """Checks one agent's episode: three agents are a group, and end at ages 4, 8 and 12."""
    member = int(episode.decisions[0].seen[0][0])
    assert episode.group == GROUPS + member // 3 + 1
    end = 4 * (member % 3 + 1)
    for age, decision in enumerate(episode.decisions):
        check_zoo_decision(decision, episode.decisions[age - 1] if age else None, member, age, bright)
    for age, step in enumerate(episode.steps, 1):
        assert step.reward == step.continuous[0]
        assert step.group_reward == (1.0 if age == 12 else 0.5 if age % 4 == 0 else 0.0)
    if episode.ended is not None:
        assert len(episode.steps) == len(episode.decisions) == end
        assert episode.last[0][1] == end


@pytest.mark.parametrize(("words", "lockstep"), ZOOS)
def test_every_kind_of_observation_and_action_arrives(words: str, lockstep: bool, tmp_path: Path) -> None:
    """The game has groups, masks, images, entities, goals, hybrid actions and a behavior that appears late."""
    record = PlayedGame(48, lockstep=lockstep).play(tmp_path, "--game", "zoo", *words.split())
    record.check()
    areas = int(words.split()[1])
    for episode in record.recorder.of("Zoo"):
        check_zoo(episode, 255 if "float" in words else 1)
    ended = [episode for episode in record.recorder.of("Zoo") if episode.ended is not None]
    assert len(ended) >= 9 * areas
    ends = Counter((len(episode.steps), episode.interrupted) for episode in ended)
    assert {size for size, interrupted in ends if interrupted} == {12}
    assert ends[12, True] == 2 * areas  # every other episode
    late = record.recorder.of("Late")
    assert len(late) == areas
    assert {episode.group for episode in late} == {0}
    for episode in late:
        assert len(episode.steps) > 10
        assert [step.reward for step in episode.steps] == [float(step.discrete[0]) for step in episode.steps]
        assert [one.seen[0][1] for one in episode.decisions] == list(range(len(episode.decisions)))


def test_a_late_behavior_without_configuration_ends_the_player(tmp_path: Path) -> None:
    """The fault names the behavior, and the player receives the command to quit."""
    record = PlayedGame(40, behaviors=CONFIGURATION).play(tmp_path, "--game", "zoo", "--areas", "2")
    assert record.fault is not None
    assert (record.fault.code, record.fault.got) == ("unknown_behavior", "behavior 'Late?team=0'")
    assert record.player is not None
    assert record.player.code == 0
    assert "quit: status 400" in record.player.log
    assert record.recorder.of("Zoo")


@pytest.mark.parametrize("restart", ["same", "next"])
def test_a_lesson_can_reset_all_agents(restart: str, tmp_path: Path) -> None:
    """Open episodes are lost, later episodes are whole, and the late behavior stays late."""
    words = ("--game", "zoo", "--areas", "2", "--restart", restart)
    record = PlayedGame(45, reset_after=19).play(tmp_path, *words)
    record.check()
    assert record.player is not None
    assert len(record.player.received("reset")) == 2
    lost = [episode for episode in record.recorder.episodes if episode.lost]
    assert Counter(episode.behavior for episode in lost) == {"Zoo": 4, "Late": 2}
    for episode in record.recorder.of("Zoo"):
        check_zoo(episode, 1)
    assert sum(episode.ended is not None for episode in record.recorder.of("Zoo")) >= 12


# ---------------------------------------------------------------- two teams

LIMIT = 25
KICKS = np.array([0, 1, -1])


def check_soccer(episodes: list[AgentEpisode], team: int) -> None:
    """Checks two pitches, each with a group of two; the second observed number is the age."""
    for episode in episodes:
        assert episode.group - GROUPS in (2 * team + 1, 2 * team + 2)
        ages = [round(float(one.seen[0][1]) * LIMIT) for one in episode.decisions]
        assert ages == list(range(len(ages)))
        assert (episode.decisions[0].seen[0].shape, episode.decisions[0].seen[1].shape) == ((264,), (72,))
        assert len(episode.decisions[0].discrete) == 3
    together = Counter((episode.ended, episode.group) for episode in episodes)
    assert set(together.values()) == {2}


def pushed(record: GameRecord, pitch: int) -> list[tuple[float, float]]:
    """Returns push and movement of the ball for each step of a pitch's first episode."""
    episodes = record.recorder.of("SoccerTwos")
    sides = [[episode for episode in episodes if episode.group == GROUPS + 1 + pitch + 2 * team][:2] for team in (0, 1)]
    kicks = [np.mean([[KICKS[one.discrete[0]] for one in episode.steps] for episode in side], axis=0) for side in sides]
    ball = np.array([float(one.seen[0][0]) for one in [*sides[0][0].decisions]] + [float(sides[0][0].last[0][0])])
    return list(zip(kicks[0] - kicks[1], np.diff(ball), strict=True))


@pytest.mark.parametrize("words", ["", "--restart next"])
def test_two_teams_of_one_name_have_groups_of_their_own(words: str, tmp_path: Path) -> None:
    """The ball moves where all push it, and all agents of a pitch end at the step limit."""
    record = PlayedGame(54).play(tmp_path, *f"--game soccer --areas 2 --max-steps {LIMIT} {words}".split())
    record.check()
    episodes = record.recorder.of("SoccerTwos")
    for team in (0, 1):
        check_soccer([episode for episode in episodes if episode.team == team], team)
    ended = [episode for episode in episodes if episode.ended is not None]
    assert len({episode.ended for episode in ended}) == 2
    assert len(ended) == 16
    for episode in ended:
        assert episode.interrupted
        assert len(episode.steps) == LIMIT
        assert not any(step.group_reward or step.reward for step in episode.steps)
    assert np.corrcoef(np.array(pushed(record, 0) + pushed(record, 1)).T)[0, 1] > 0.9


@pytest.mark.parametrize("learning", [0, 1])
def test_the_team_that_learns_beats_a_ghost_that_stands_still(learning: int, tmp_path: Path) -> None:
    """Only episodes of the learning team are reported; each match of a group ends with its goal, and is won."""
    assignment = MatchupAssignment(
        serial=1, matchups=(Matchup(number=5, team=learning, ghosts={TEAMS[1 - learning]: GHOST}),)
    )
    game = PlayedGame(70, self_play=["SoccerTwos"], assignment=assignment, first=1)
    record = game.play(tmp_path, "--game", "soccer", "--areas", "2", "--max-steps", "40")
    record.check()
    episodes = record.recorder.of("SoccerTwos")
    assert {episode.team for episode in episodes} == {learning}
    check_soccer_goals(episodes)
    behavior = game.stepper.behaviors["SoccerTwos"]
    assert behavior.ghosts == behavior.produced > 0
    rows = [
        (*row,) for one in record.recorder.results for row in zip(one.scores, one.explicit, one.rewards, strict=True)
    ]
    goals = {
        (episode.ended, episode.group): episode.steps[-1].group_reward
        for episode in episodes
        if episode.ended is not None
    }
    assert [(score, explicit) for score, explicit, _ in rows if score >= 0] == [(1.0, 0)] * len(goals)
    assert sorted(reward for score, _, reward in rows if score >= 0) == sorted(goals.values())
    assert len(goals) >= 4


def check_soccer_goals(episodes: list[AgentEpisode]) -> None:
    """Checks that a goal rewards both agents of a group with their last step, earlier goals more."""
    for episode in episodes:
        assert not episode.interrupted
        for at, step in enumerate(episode.steps, 1):
            scored = episode.ended is not None and at == len(episode.steps)
            assert step.group_reward == (np.float32(1 - at / 40) if scored else 0.0)
            assert step.discrete[0] == 1


# ---------------------------------------------------------------- Match3, Basic, and old packages

BOARDS = [
    ("--images png", ((6, 9, 8), "uint8"), ((3, 9, 8), "uint8")),
    ("--images float --restart next", ((6, 9, 8), "float32"), ((3, 9, 8), "float32")),
    ("--images png --protocol 1.0.0", ((6, 9, 8), "float32"), ((3, 9, 8), "uint8")),
    ("--images float --areas 30", ((6, 9, 8), "float32"), ((3, 9, 8), "float32")),  # large: read on a thread
]


@pytest.mark.parametrize(("words", "cells", "special"), BOARDS)
def test_match3_observations_and_masks_arrive(words: str, cells: object, special: object, tmp_path: Path) -> None:
    """Each decision has a mask over 127 moves and one kind of cell per place; an episode has ten moves."""
    record = PlayedGame(24).play(tmp_path, *f"--game match3 --areas 3 --max-steps 10 {words}".split())
    record.check()
    episodes = record.recorder.of("Match3")
    for episode in episodes:
        for decision in episode.decisions:
            for board, wanted in zip(decision.seen, (cells, special), strict=True):
                assert (board.shape, board.dtype) == wanted
                assert (board.sum(0) == (255 if board.dtype == np.uint8 else 1)).all()
            assert decision.mask is not None
            assert decision.mask.shape == (127,)
            assert 60 < decision.mask.sum() < 127
            assert not decision.mask[decision.discrete[0]]
        for step in episode.steps:
            assert step.reward == np.float32(0.01 * (step.discrete[0] % 10))
    ended = [episode for episode in episodes if episode.ended is not None]
    assert len(ended) >= len(episodes) / 2
    assert all(episode.interrupted and len(episode.steps) == 10 for episode in ended)


@pytest.mark.parametrize("restart", ["same", "next"])
def test_basic_has_a_new_agent_for_every_episode(restart: str, tmp_path: Path) -> None:
    """Its steps follow its choices, and never more agents than areas are live."""
    game = PlayedGame(90)
    record = game.play(tmp_path, *f"--game basic --areas 3 --max-steps 12 --restart {restart}".split())
    record.check()
    episodes = record.recorder.of("Basic")
    assert len(episodes) > 20
    assert game.stepper.behaviors["Basic"].table.taken <= 3
    for episode in episodes:
        squares = [int(one.seen[0].argmax()) for one in episode.decisions]
        squares += [int(episode.last[0].argmax())] if episode.last else []
        moves = [(0, -1, 1)[step.discrete[0]] for step in episode.steps]
        assert squares[0] == 10
        assert np.diff(squares)[: len(moves)].tolist() == moves
        if episode.ended is not None:
            assert episode.interrupted == (squares[-1] not in (7, 17))
            assert episode.steps[-1].reward == pytest.approx({7: 0.09, 17: 0.99}.get(squares[-1], -0.01))


@pytest.mark.parametrize("words", ["", "--discrete --actions 2"])
def test_a_player_of_version_1_0_walks_to_its_goal(words: str, tmp_path: Path) -> None:
    """It receives its actions in the fields of that version, and executes them."""
    record = PlayedGame(60, first=1).play(tmp_path, *f"--areas 4 --protocol 1.0.0 {words}".split())
    record.check()
    ended = [episode for episode in record.recorder.of("Goal") if episode.ended is not None]
    assert ended
    for episode in ended:
        (goal,) = episode.decisions[0].seen[0].tolist()
        if words:
            assert episode.steps[-1].reward == pytest.approx(1.06 * goal * np.mean([1, *_final_position(episode)]))
        else:
            moved = np.cumsum([np.clip(step.continuous[0], -0.2, 0.2) for step in episode.steps])
            assert abs(moved[-1]) > 0.5
            assert episode.steps[-1].reward == pytest.approx(1.06 * goal * np.sign(moved[-1]))


def _final_position(episode: AgentEpisode) -> list[float]:
    """Returns the final value of the second position."""
    at = 0.0
    for step in episode.steps:
        at = min(max(at + (0.2 if step.discrete[1] else -0.2), -1), 1)
    return [round(at)]


# ---------------------------------------------------------------- agents in any order

ORDERS = ([5, 1, 9], [9, 5, 1], [1, 9], [5, 9, 1])
ENDS = {1: 9, 3: 5}
"""Message number to the agent that ends in it and begins again in the same message."""


class ScriptedPlayer(threading.Thread):
    """A player that introduces itself, runs `plays`, and then expects the command to quit."""

    def __init__(self, port: int, plays: Callable[[ManualPlayer], None]) -> None:
        super().__init__()
        self._port = port
        self._plays = plays
        self.played = Played(1, [], "")
        self.start()

    def run(self) -> None:
        with manual_player(self._port) as doll:
            doll.ask(introduction())
            doll.ask(message())
            self._plays(doll)
            assert doll.ask(message()).unity_input.rl_input.command == 2
        self.played = Played(0, [], "")


def unsorted_agents(number: int, ids: list[int]) -> Any:
    """Returns a message of agents that observe ten times their id plus the number of the message."""
    made = agents(known=number == 0, count=0)
    infos = made.unity_output.rl_output.agentInfos["Doll?team=0"].value
    ends = [(ENDS[number], True)] if number in ENDS else []
    for one, done in [(ids[0], False), *ends, *((one, False) for one in ids[1:])]:
        seen = infos.add(id=one, done=done).observations.add(shape=[1], dimension_properties=[1], name="seen")
        seen.float_data.data.append(10 * one + number)
    return made


DOLL = "behaviors: {Doll: }"


@pytest.mark.parametrize("lockstep", [False, True])
def test_each_agent_receives_its_own_action_in_any_order_of_rows(lockstep: bool) -> None:
    """Lockstep acts in the order of agent ids, and answers in the player's order."""
    given: dict[int, float] = {}

    def plays(doll: ManualPlayer) -> None:
        for number, ids in enumerate(ORDERS):
            actions = doll.ask(unsorted_agents(number, ids)).unity_input.rl_input.agent_actions["Doll?team=0"].value
            for one, action in zip(ids, actions, strict=True):
                given[10 * one + number] = action.continuous_actions[0]

    record = PlayedGame(len(ORDERS), behaviors=DOLL, lockstep=lockstep).play_with(
        lambda port: ScriptedPlayer(port, plays)
    )
    record.check()
    episodes = record.recorder.of("Doll")
    chosen = {int(one.seen[0][0]): one.continuous[0] for episode in episodes for one in episode.decisions}
    assert chosen == given
    names = [{int(one.seen[0][0]) // 10 for one in episode.decisions} for episode in episodes]
    assert Counter(number for own in names for number in own) == {1: 1, 5: 2, 9: 2}
    assert all(len(own) == 1 for own in names)


def test_an_image_goal_signal_is_logged_once() -> None:
    """The warning names signal and behavior: networks read the image, and are not conditioned on it."""

    def plays(doll: ManualPlayer) -> None:
        for number in range(2):
            doll.ask(with_goal_camera(agents(known=not number)))

    record = PlayedGame(2, behaviors=DOLL).play_with(lambda port: ScriptedPlayer(port, plays))
    record.check()
    (line,) = (one for one in record.logged if one["event"] == "goal_not_conditioned_on")
    assert line["log_level"] == "warning"
    assert line["got"] == "goal signal 'GoalCamera' of Doll?team=0, read as any other image"
    assert record.recorder.of("Doll")[0].decisions[0].seen[1].shape == (3, 20, 20)


def test_a_port_in_use_is_reported_with_its_remedy() -> None:
    """Got, expected and remedy appear once each, and no player is launched."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        record = PlayedGame(1, behaviors=DOLL, port=port).play_with(
            lambda port: ScriptedPlayer(port, lambda doll: None)
        )
    assert record.player is None
    assert record.fault is not None
    assert record.fault.got == f"port {port} on 127.0.0.1, which is not free"
    assert record.fault.expected == "a free one for a Unity player"
    assert record.fault.remedy.startswith("stop what uses it, or choose another for a build with --base-port; the ed")
