"""Godot games play through the bridge: a scripted game in its own process, over real TCP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparring.pipeline.bridges.godot.game import make_godot
from sparring.pipeline.bridges.player import PlayerFailed
from sparring.pipeline.compliance.steps import StepWatch
from sparring.pipeline.compliance.trial import random_actions
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport, Step
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from tests.simulation.godot_helpers import ALL, GAME, Open, knowing, play
from tests.simulation.simulation_helpers import check_report

HEIGHT, WIDTH = 4, 6


def test_the_first_generation_has_one_behavior_with_the_usual_name(opened: Open) -> None:
    """All agents share one space, and policies have no names."""
    game = opened(generation=1, agents=3)
    assert game.behaviors() == {
        "Godot?team=0": BehaviorSpec(
            observations=(ObservationSpec(name="obs", shape=(1,)),), actions=ActionSpec(continuous=1)
        )
    }
    (report,) = game.reset({}, 0)
    assert report.decisions is not None
    assert report.decisions.agents.tolist() == [0, 1, 2]


def test_every_policy_of_the_second_generation_is_a_behavior(opened: Open) -> None:
    """Spaces of each kind are read, empty ones are left out, and hybrid actions have the order of the game."""
    game = opened(kinds=ALL, agents=7)
    image = ObservationSpec(name="camera_2d", shape=(3, HEIGHT, WIDTH), dtype="uint8", kind="image")
    assert game.behaviors() == {
        "walker?team=0": BehaviorSpec(
            observations=(ObservationSpec(name="obs", shape=(1,)),), actions=ActionSpec(continuous=1)
        ),
        "hopper?team=0": BehaviorSpec(
            observations=(ObservationSpec(name="obs", shape=(2,)), ObservationSpec(name="lane", shape=(3,))),
            actions=ActionSpec(discrete=(2,)),
        ),
        "seer?team=0": BehaviorSpec(observations=(image,), actions=ActionSpec(continuous=3, discrete=(2, 2))),
    }
    rows = [report.decisions.agents.tolist() for report in game.reset({}, None) if report.decisions is not None]
    assert rows == [[0, 3, 6], [1, 4], [2, 5]]


@pytest.mark.parametrize(("options", "name"), [({"generation": 1}, "Runner"), ({"kinds": "hopper"}, "Runner?team=1")])
def test_a_game_with_one_policy_takes_the_given_behavior_name(opened: Open, options: dict[str, Any], name: str) -> None:
    assert list(opened(behavior=name, **options).behaviors()) == [name if "?" in name else f"{name}?team=0"]


PUBLISHED = {
    "BallChase": ({"generation": 1, "kinds": "ball", "agents": 16}, {"Godot?team=0": (21, 2, list(range(16)))}),
    "MultiAgentSimple": (
        {"kinds": "runner,chaser", "agents": 32},
        {"runner?team=0": (48, 2, list(range(0, 32, 2))), "chaser?team=0": (12, 1, list(range(1, 32, 2)))},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_games_are_read_and_played_to_their_goals(opened: Open, name: str) -> None:
    """One has sixteen agents of the first generation, the other two policies whose heads differ in size."""
    options, expected = PUBLISHED[name]
    game = opened(env_seed=3, **options)
    assert game.behaviors() == {
        behavior: BehaviorSpec(
            observations=(ObservationSpec(name="obs", shape=(size,)),), actions=ActionSpec(continuous=moves)
        )
        for behavior, (size, moves, _) in expected.items()
    }
    frames = play(game, 6)
    for frame in frames:
        assert {one.behavior: one.decisions.agents.tolist() for one in frame} == {
            behavior: agents for behavior, (*_, agents) in expected.items()
        }
    for behavior, (_, moves, agents) in expected.items():
        mine = [report for frame in frames for report in frame if report.behavior == behavior]
        observed = [one.decisions.observations[0] for one in mine]
        for at, column in enumerate(observed[:5]):  # each action covers a fifth of the way
            assert np.allclose(column[:, 1 : 1 + moves], 0.2 * at * column[:, :1])
            assert not column[:, 1 + moves :].any()
        assert [one.ends is None for one in mine] == [True] * 5 + [False, True]
        assert mine[5].ends.agents.tolist() == agents
        assert np.allclose(mine[5].ends.rewards, 1.06)


def test_agent_methods_are_called_before_the_first_reset(opened: Open, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is called once in the given order; results are reported, equal ones once; later calls are allowed."""
    game = opened(kinds="runner,chaser", agents=20, call="face_left, get_obs_space")
    (first, second) = game.reset({}, None)
    for report in (first, second):
        assert report.decisions is not None
        assert (report.decisions.observations[0][:, 0] == -1).all()
    assert capsys.readouterr().err.splitlines() == [
        "Godot game 0: face_left of 20 agents returned null",
        'Godot game 0: get_obs_space of 20 agents returned {"obs": {"size": [48], "space": "box"}}, '
        '{"obs": {"size": [12], "space": "box"}}',
    ]
    game.reset({}, None)
    assert capsys.readouterr().err == ""
    game.step({report.behavior: knowing(report) for report in (first, second)})
    assert game.call("nothing") == [None] * 20


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("type=1", "an answer of type 1 where 'call' was expected"),
        ("returns=[1]", "1 entries as 'returns' of 4 agents.*correct twice of the agents' controllers"),
        ("hang_up", "the end of the connection by the game"),
    ],
)
def test_a_failed_method_call_names_game_and_phase(opened: Open, fault: str, expected: str) -> None:
    """Before the first reset the phase is initialization."""
    game = opened(fault=fault, at=1, call="twice")
    with pytest.raises(PlayerFailed, match=f"Godot game 0, initialized: {expected}"):
        game.reset({}, None)


def test_actions_reach_their_agent_and_head(opened: Open) -> None:
    """Every agent walks to its goal with all heads, and each episode ends with the full reward."""
    frames = play(opened(kinds=ALL, agents=8, env_seed=3), 12)
    ended = [report.ends for frame in frames for report in frame if report.ends is not None]
    assert sum(rows.agents.size for rows in ended) == 2 * 8
    assert all(np.allclose(rows.rewards, 1.06) for rows in ended)


@pytest.mark.parametrize("late", [{}, {"late": True}], ids=["at once", "a frame later"])
def test_done_ends_an_episode_without_bootstrap_and_begins_the_next(opened: Open, late: dict[str, Any]) -> None:
    """The end and the next decision share the observation; the reward belongs to the end."""
    frames = play(opened(agents=2, generation=1, env_seed=5, **late), 5)
    assert [report.ends for frame in frames[:5] for report in frame] == [None] * 5
    ((last,),) = frames[5:]
    assert last.ends.agents.tolist() == last.decisions.agents.tolist() == [0, 1]
    assert not last.ends.interrupted.any()
    assert np.array_equal(last.ends.observations[0], last.decisions.observations[0])
    assert np.allclose(last.ends.rewards, 1.06)
    assert not last.decisions.rewards.any()
    assert np.allclose(frames[4][0].decisions.rewards, -0.01)


def test_reports_of_a_game_follow_every_rule_of_the_protocol(opened: Open) -> None:
    """Random play of all kinds with a reset gives no violation and no warning."""
    game, random, watch = opened(kinds=ALL, agents=9, env_seed=1), np.random.default_rng(0), StepWatch()
    specs = dict(game.behaviors())
    watch.connected(specs)

    def act(report: BehaviorReport) -> BehaviorActions:
        assert report.decisions is not None
        return random_actions(report.behavior, report.decisions, specs[report.behavior].actions, random)

    sequence = 0
    for _ in range(2):
        watch.reset()
        for frame in play(game, 120, act):
            assert watch.read(Step(sequence=sequence, reports=tuple(frame)))
            sequence += 1
            for report in frame:
                check_report(report, specs)
    assert watch.findings == {}
    assert watch.ended > 10


@pytest.mark.parametrize("old", [{}, {"old_sizes": True}], ids=["channels first", "channels last"])
def test_images_have_channels_first_for_either_order_of_the_size(opened: Open, old: dict[str, Any]) -> None:
    """Bytes are in rows of pixels in both cases; blue counts the pixels in the scripted game."""
    (report,) = opened(kinds="seer", agents=2, **old).reset({}, None)
    assert report.decisions is not None
    (observed,) = report.decisions.observations
    assert (observed.shape, observed.dtype, observed.flags.c_contiguous) == ((2, 3, HEIGHT, WIDTH), np.uint8, True)
    assert np.array_equal(observed[0, 2], np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH))
    assert sorted({observed[0, 0].min(), observed[0, 1].min()}) == [0, 255]


def test_choices_are_one_hot(opened: Open) -> None:
    """The scripted game counts its frames modulo three in `lane`."""
    frames = play(opened(kinds="hopper", agents=2), 4)
    lanes = [frame[0].decisions.observations[1].argmax(1).tolist() for frame in frames]
    assert lanes == [[0, 0], [1, 1], [2, 2], [0, 0], [1, 1]]


def test_a_message_may_arrive_byte_by_byte(opened: Open) -> None:
    """The columns equal those of a message that arrives at once."""
    slow, fast = (play(opened(kinds=ALL, agents=3, env_seed=1, **how), 3) for how in ({"dribble": True}, {}))
    for slow_report, fast_report in zip(slow, fast, strict=True):
        assert repr(slow_report) == repr(fast_report)


def test_a_reset_may_happen_at_any_time(opened: Open) -> None:
    """All agents decide and none ends."""
    game = opened(agents=2)
    for _ in range(2):
        frames = play(game, 3)
        assert frames[0][0].ends is None
        assert not frames[0][0].decisions.rewards.any()


def test_the_game_receives_close_and_its_temporary_log_is_removed(opened: Open, tmp_path: Path) -> None:
    """It ends in order; a log with a given name stays."""
    log = tmp_path / "logs" / "game.log"
    game = make_godot(path=GAME, port=0, log=str(log))
    play(game, 3)
    game.close()
    assert log.read_text() == "received 3 actions and {'type': 'close'}\n"
    game = make_godot(path=GAME, port=0)
    temporary = game._temporary_log
    assert temporary is not None
    assert temporary.exists()
    game.close()
    assert not temporary.exists()
