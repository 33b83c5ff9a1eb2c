"""Godot games through the bridge: a scripted game as a process of its own, over real TCP."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparring.pipeline.bridges.godot import game as godot
from sparring.pipeline.bridges.godot.game import GodotGame, make_godot
from sparring.pipeline.bridges.player import PlayerFailed
from sparring.pipeline.compliance.steps import StepWatch
from sparring.pipeline.compliance.trial import random_actions
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.games.registry import make
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport, Step
from sparring.pipeline.settings import read
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec
from tests.simulation.simulation_helpers import check_report

GAME = str(Path(__file__).with_name("godot_game.py"))
HEIGHT, WIDTH = 4, 6
ALL = "walker,hopper,seer"

Open = Callable[..., GodotGame]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Makes games that are closed at the end."""
    games: list[GodotGame] = []

    def make_one(**options: Any) -> GodotGame:
        games.append(make_godot(**({"path": GAME, "port": 0} | options)))
        return games[-1]

    yield make_one
    for game in games:
        game.close()


def knowing(report: BehaviorReport) -> BehaviorActions:
    """Actions that go to the goal, which any kind of agent sees."""
    assert report.decisions is not None
    seen = report.decisions.observations[0]
    goals = seen[:, 0] if seen.ndim == 2 else np.where(seen[:, 1].any((1, 2)), 1, -1)
    widths = {"walker": (1, 0), "hopper": (0, 1), "seer": (3, 2), "runner": (2, 0), "chaser": (1, 0)}
    continuous, branches = widths.get(report.behavior.partition("?")[0], (2 if seen.shape[1:] == (21,) else 1, 0))
    return BehaviorActions(
        behavior=report.behavior,
        agents=report.decisions.agents,
        continuous=np.repeat(goals[:, None], continuous, 1).astype(np.float32),
        discrete=np.repeat(goals[:, None] > 0, branches, 1).astype(np.int32),
    )


def play(game: GodotGame, steps: int, act: Callable[[BehaviorReport], BehaviorActions] = knowing) -> list[Any]:
    """The reports of a reset and of `steps` frames."""
    frames: list[Sequence[BehaviorReport]] = [game.reset({}, None)]
    for _ in range(steps):
        frames.append(game.step({report.behavior: act(report) for report in frames[-1]}))
    return frames


def test_the_first_generation_has_one_behavior_with_the_usual_name(opened: Open) -> None:
    """One space for all agents, and no policy names."""
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
    """Spaces of each kind: vectors, a choice, an image, what is empty left out; hybrid actions in the game's order."""
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
def test_a_game_with_one_policy_takes_the_behavior_that_is_asked_for(
    opened: Open, options: dict[str, Any], name: str
) -> None:
    assert list(opened(behavior=name, **options).behaviors()) == [name if "?" in name else f"{name}?team=0"]


PUBLISHED = {
    "BallChase": ({"generation": 1, "kinds": "ball", "agents": 16}, {"Godot?team=0": (21, 2, list(range(16)))}),
    "MultiAgentSimple": (
        {"kinds": "runner,chaser", "agents": 32},
        {"runner?team=0": (48, 2, list(range(0, 32, 2))), "chaser?team=0": (12, 1, list(range(1, 32, 2)))},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_games_have_their_spaces_and_are_played_to_their_goals(opened: Open, name: str) -> None:
    """Sixteen agents of the first generation; two policies in turn, whose heads of one name have other sizes."""
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
        seen = [one.decisions.observations[0] for one in mine]
        for at, column in enumerate(seen[:5]):  # a fifth of the way with each action
            assert np.allclose(column[:, 1 : 1 + moves], 0.2 * at * column[:, :1])
            assert not column[:, 1 + moves :].any()
        assert [one.ends is None for one in mine] == [True] * 5 + [False, True]
        assert mine[5].ends.agents.tolist() == agents
        assert np.allclose(mine[5].ends.rewards, 1.06)


def test_methods_of_the_agents_are_called_before_the_first_reset(
    opened: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, in their order; what they return is said, equal values once; later ones may be called at any time."""
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
        ("type=1", "an answer of type 1 where 'call' was due"),
        ("returns=[1]", "1 entries as 'returns' of 4 agents.*correct twice of the agents' controllers"),
        ("hang_up", "the end of the connection by the game"),
    ],
)
def test_a_call_that_goes_wrong_names_the_game_and_the_phase(opened: Open, fault: str, expected: str) -> None:
    """Before the first reset the game is initialised."""
    game = opened(fault=fault, at=1, call="twice")
    with pytest.raises(PlayerFailed, match=f"Godot game 0, initialised: {expected}"):
        game.reset({}, None)


def test_actions_reach_the_agent_and_head_that_they_are_for(opened: Open) -> None:
    """Every agent goes to the goal that it sees, with all of its heads: each episode ends with the full reward."""
    frames = play(opened(kinds=ALL, agents=8, env_seed=3), 12)
    ended = [report.ends for frame in frames for report in frame if report.ends is not None]
    assert sum(rows.agents.size for rows in ended) == 2 * 8
    assert all(np.allclose(rows.rewards, 1.06) for rows in ended)


@pytest.mark.parametrize("late", [{}, {"late": True}], ids=["at once", "a frame later"])
def test_done_ends_an_episode_without_bootstrap_and_begins_the_next(opened: Open, late: dict[str, Any]) -> None:
    """The end and the next decision of the agent share the observation; the reward belongs to the end."""
    frames = play(opened(agents=2, generation=1, env_seed=5, **late), 5)
    assert [report.ends for frame in frames[:5] for report in frame] == [None] * 5
    ((last,),) = frames[5:]
    assert last.ends.agents.tolist() == last.decisions.agents.tolist() == [0, 1]
    assert not last.ends.interrupted.any()
    assert np.array_equal(last.ends.observations[0], last.decisions.observations[0])
    assert np.allclose(last.ends.rewards, 1.06)
    assert not last.decisions.rewards.any()
    assert np.allclose(frames[4][0].decisions.rewards, -0.01)


def test_what_a_game_says_keeps_every_rule_of_the_protocol(opened: Open) -> None:
    """Random play of all kinds, Step by Step, with a reset on the way: nothing found, not even a warning."""
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
def test_pictures_have_their_channels_first_whatever_the_order_of_the_size(opened: Open, old: dict[str, Any]) -> None:
    """Their bytes are row by row and pixel by pixel in either case; blue counts the pixels in the scripted game."""
    (report,) = opened(kinds="seer", agents=2, **old).reset({}, None)
    assert report.decisions is not None
    (seen,) = report.decisions.observations
    assert (seen.shape, seen.dtype, seen.flags.c_contiguous) == ((2, 3, HEIGHT, WIDTH), np.uint8, True)
    assert np.array_equal(seen[0, 2], np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH))
    assert sorted({seen[0, 0].min(), seen[0, 1].min()}) == [0, 255]


def test_choices_are_one_hot(opened: Open) -> None:
    """The scripted game counts its frames modulo three in `lane`."""
    frames = play(opened(kinds="hopper", agents=2), 4)
    lanes = [frame[0].decisions.observations[1].argmax(1).tolist() for frame in frames]
    assert lanes == [[0, 0], [1, 1], [2, 2], [0, 0], [1, 1]]


def test_a_message_may_come_byte_by_byte(opened: Open) -> None:
    """The columns are those of a message that comes at once."""
    slow, fast = (play(opened(kinds=ALL, agents=3, env_seed=1, **how), 3) for how in ({"dribble": True}, {}))
    for one, other in zip(slow, fast, strict=True):
        assert repr(one) == repr(other)


def test_a_reset_may_come_at_any_time(opened: Open) -> None:
    """All agents decide, and none ends."""
    game = opened(agents=2)
    for _ in range(2):
        frames = play(game, 3)
        assert frames[0][0].ends is None
        assert not frames[0][0].decisions.rewards.any()


def test_the_game_is_told_to_close_and_its_log_goes_with_it(opened: Open, tmp_path: Path) -> None:
    """It ends in order; a temporary log is removed, one with a name stays."""
    log = tmp_path / "logs" / "game.log"
    game = make_godot(path=GAME, port=0, log=str(log))
    play(game, 3)
    game.close()
    assert log.read_text() == "heard 3 actions and {'type': 'close'}\n"
    game = make_godot(path=GAME, port=0)
    temporary = game._litter
    assert temporary is not None
    assert temporary.exists()
    game.close()
    assert not temporary.exists()


def started(tmp_path: Path, open_one: Open, **options: Any) -> list[str]:
    """The command line that a game saw."""
    open_one(started=str(tmp_path / "started"), **options)
    words: list[str] = json.loads((tmp_path / "started").read_text())[0]
    return words


def test_options_become_the_command_line(opened: Open, tmp_path: Path) -> None:
    """Known ones by their names in the plugin, unknown ones as --key=value, further words as they are."""
    words = started(
        tmp_path,
        opened,
        env_seed=7,
        speedup=8.0,
        action_repeat=4,
        framerate=60,
        level=2,
        dark=True,
        arguments="-v 'a b'",
    )
    assert re.fullmatch(r"--port=\d+", words[0])
    assert words[1:] == [
        *("--headless", "--fixed-fps", "60", "--env_seed=7", "--speedup=8.0", "--action_repeat=4"),
        *(f"--started={tmp_path}/started", "--level=2", "--dark=true", "-v", "a b"),
    ]
    assert "--headless" not in started(tmp_path, opened, headless=False)


def test_the_seed_is_the_supervisors_where_none_is_given(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The protocol has no word for a seed, so that it can only stand in the command line."""
    monkeypatch.setenv("SPARRING_SEED", "41")
    assert "--env_seed=41" in started(tmp_path, opened)
    assert "--env_seed=5" in started(tmp_path, opened, env_seed=5)
    monkeypatch.delenv("SPARRING_SEED")
    assert not any("env_seed" in word for word in started(tmp_path, opened))


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_the_port_counts_up_with_the_simulators_number(
    opened: Open, tmp_path: Path, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A usual port that is taken gives way to a free one; one that was asked for is refused, with what to do."""
    monkeypatch.setenv("SPARRING_NUMBER", "3")
    monkeypatch.setattr(godot, "PORT", taken - 3)
    (word,) = (word for word in started(tmp_path, opened, port=taken - 3) if word.startswith("--port="))
    assert word != f"--port={taken}"
    monkeypatch.undo()
    with pytest.raises(SettingsError, match=rf"got port {taken}, .* choose another with the option port"):
        opened(port=taken)
    with pytest.raises(SettingsError, match="expected 0 to 65535"):
        opened(port=70_000)


class Bell(io.StringIO):
    """Standard error that starts a game when the bridge says where it waits."""

    games: list[subprocess.Popen[bytes]]

    def __init__(self) -> None:
        super().__init__()
        self.games = []

    def write(self, text: str) -> int:
        found = re.search(r"--port=\d+", text)
        if found:
            self.games.append(subprocess.Popen([GAME, found[0], "--kinds=hopper"], stdout=subprocess.PIPE))
        return super().write(text)


def test_a_game_that_is_started_by_hand_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bridge says once where it listens; it does not end what it did not start, but tells it to."""
    bell = Bell()
    monkeypatch.setattr(sys, "stderr", bell)
    game = make_godot(port=0)
    play(game, 2)
    game.close()
    (started_game,) = bell.games
    said, _ = started_game.communicate(timeout=20)
    assert (started_game.returncode, said) == (0, b"heard 2 actions and {'type': 'close'}\n")
    assert len(bell.getvalue().splitlines()) == 1
    assert "press Play in the Godot editor" in bell.getvalue()


def test_the_program_may_be_a_folder_of_macos_or_on_the_path(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "Ball.app" / "Contents" / "MacOS" / "Ball"
    program.parent.mkdir(parents=True)
    shutil.copy(GAME, program)
    assert list(opened(path=str(tmp_path / "Ball.app")).behaviors()) == ["walker?team=0"]
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    assert list(opened(path="Ball").behaviors()) == ["walker?team=0"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"areas": 2}, "for more games raise count"),
        ({"timeout_s": 0.0}, "some time"),
        ({"path": "nowhere.x86_64"}, "where no program is"),
        ({"show_window": True}, "expected 'headless'"),
        ({"seed": 3}, "expected 'env_seed'"),
        ({"arguments": "--level 'two"}, "as a shell splits them"),
        ({"call": "set_level(2)"}, "expected names of methods"),
        ({"kinds": ALL, "behavior": "One"}, "the policies hopper, seer, walker"),
    ],
)
def test_what_can_not_be_is_refused(options: dict[str, Any], expected: str) -> None:
    """Before or while the game starts; got, expected, remedy."""
    areas = options.pop("areas", 1)
    with pytest.raises(SettingsError, match=expected):
        make("godot", areas, **({"path": GAME, "port": 0} | options))


def test_environment_parameters_are_refused(opened: Open) -> None:
    """They would have no effect: the protocol has no place for them."""
    with pytest.raises(SettingsError, match="the environment parameters gravity"):
        opened().reset({"gravity": 9.81}, None)


def test_the_configuration_in_the_document_is_valid(tmp_path: Path) -> None:
    """What a reader copies from docs/godot.md can be trained."""
    document = (Path(__file__).parents[2] / "docs" / "godot.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", document, re.DOTALL)
    (tmp_path / "ball.yaml").write_text(blocks[0])
    result = read(tmp_path / "ball.yaml")
    assert result.notices == ()
