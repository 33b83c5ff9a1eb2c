"""No observation of an environment is read as something else in silence, and its images can be named."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from pettingzoo import ParallelEnv

from sparring.pipeline.bridges.gymnasium import GymnasiumGame, make_gymnasium
from sparring.pipeline.bridges.making import read_wrappers
from sparring.pipeline.bridges.observations import Observations
from sparring.pipeline.bridges.pettingzoo import make_pettingzoo
from sparring.pipeline.bridges.pettingzoo.parallel import ParallelGame
from sparring.pipeline.bridges.pettingzoo.turns import TurnGame
from sparring.pipeline.bridges.spaces import Value
from sparring.pipeline.bridges.video import MOST_FRAMES, Video
from sparring.pipeline.errors import SettingsError

GO = spaces.Box(0, 1, (19, 19, 17), np.bool_)
BOARD = spaces.Box(0, 1, (6, 7, 2), np.int8)
GRAY = spaces.Box(0, 255, (84, 84), np.uint8)


@pytest.mark.parametrize(
    ("space", "size"), [(GO, 19 * 19 * 17), (BOARD, 84), (GRAY, 84 * 84), (spaces.MultiBinary([3, 3, 2]), 18)]
)
def test_an_array_that_becomes_a_vector_is_noted_and_an_explicit_choice_is_not(
    space: spaces.Space[Any], size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (spec,) = Observations(space).specs
    assert spec.shape == (size,)
    err = capsys.readouterr().err
    assert err.startswith("notice: observation 'observation'")
    assert f"vector of {size} numbers; the option images=observation" in err
    assert Observations(space, images="").specs == (spec,)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("space", "shape", "dtype", "low", "high"),
    [
        (GO, (17, 19, 19), "uint8", 0, 255),
        (BOARD, (2, 6, 7), "float32", 0, 1),
        (GRAY, (1, 84, 84), "uint8", 0, 255),
        (spaces.Box(-2, 2, (4, 4, 1), np.int32), (1, 4, 4), "float32", 0, 1),
        (spaces.MultiBinary([5, 5]), (1, 5, 5), "uint8", 0, 255),
    ],
)
def test_a_named_image_keeps_its_place_and_fills_the_range(
    space: Any, shape: tuple[int, ...], dtype: str, low: float, high: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Channels come first; bytes fill 0 to 255, and integers 0 to 1 in proportion to their bounds."""
    read = Observations(space, images="observation")
    (spec,) = read.specs
    assert (spec.kind, spec.shape, spec.dtype) == ("image", shape, dtype)
    assert capsys.readouterr().err == ""
    extremes = [np.full(space.shape, one, space.dtype) for one in (getattr(space, "low", 0), getattr(space, "high", 1))]
    (column,) = read.rows(extremes)
    assert column.shape == (2, *shape)
    assert column.dtype == dtype
    assert [column[0].min(), column[1].max()] == [low, high]
    value = np.zeros(space.shape, space.dtype)
    value.flat[1] = 1
    (column,) = read.rows([value])
    first_channel_last = len(space.shape) == 3
    assert np.argmax(column[0] - column[0].min()) == (
        np.argmax(np.moveaxis(value, -1, 0) if first_channel_last else value)
    )


def test_a_dictionary_may_hold_images() -> None:
    space = spaces.Dict({"board": BOARD, "clock": spaces.Box(0, 1, (2,), np.float32)})
    assert [one.kind for one in Observations(space, images="board").specs] == ["image", "vector"]


class Mixed(ParallelEnv[str, Any, Any]):
    """Only the second type of agents has an image."""

    metadata = {"name": "mixed_v0"}  # noqa: RUF012

    def __init__(self) -> None:
        self.possible_agents = ["blind_0", "seeing_0"]

    def observation_space(self, agent: str) -> Any:
        return spaces.Dict({"board": BOARD} if agent == "seeing_0" else {"clock": spaces.Box(0, 1, (2,), np.float32)})

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "mixed_of_a_test", SimpleNamespace(parallel_env=Mixed))
    return "mixed_of_a_test"


def test_an_image_need_not_be_one_of_every_behavior(mixed: str) -> None:
    game = make_pettingzoo(mixed, behaviors="per_type", images="board")
    kinds = {name: spec.observations[0].kind for name, spec in game.behaviors().items()}
    assert kinds == {"blind?team=0": "vector", "seeing?team=0": "image"}


@pytest.mark.parametrize("name", ["bord", "clock"])
def test_a_name_that_is_no_image_is_refused(mixed: str, name: str) -> None:
    with pytest.raises(SettingsError, match=rf"got images '{name}'; expected .* clock, board; correct the"):
        make_pettingzoo(mixed, behaviors="per_type", images=f"board, {name}")
    with pytest.raises(SettingsError, match=r"got images 'screen'; expected .* observation; correct the"):
        make_gymnasium("CartPole-v1", images="screen")


# ---------------------------------------------------------------- wrappers and videos


class Screen(gymnasium.Env[Any, Any]):
    """Shows its time as brightness; an episode has four steps."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012
    observation_space = spaces.Box(0, 255, (8, 8, 3), np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None, *, result: str = "image") -> None:
        self.render_mode, self.result = render_mode, result

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return np.zeros((8, 8, 3), np.uint8), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        return self.render(), 0.0, self.time == 4, False, {}

    def render(self) -> Any:
        return np.full((8, 8, 3), 60 * self.time, np.uint8) if self.result == "image" else None


class Blind(Screen):
    render = gymnasium.Env.render  # which is not implemented


class Brighter(gymnasium.ObservationWrapper[Any, Any, Any]):
    def __init__(self, env: gymnasium.Env[Any, Any], by: int, *, times: int = 1) -> None:
        super().__init__(env)
        self.by = by * times

    def observation(self, observation: Any) -> Any:
        return observation + np.uint8(self.by)


@pytest.fixture(autouse=True)
def _registered() -> Any:
    gymnasium.register("ScreenOfATest-v0", Screen, disable_env_checker=True)
    yield
    gymnasium.registry.pop("ScreenOfATest-v0", None)


def play(game: Any, steps: int) -> None:
    """Plays without moving."""
    (report,) = game.reset({}, 0)
    from tests.simulation.simulation_helpers import actions_for

    for _ in range(steps):
        (report,) = game.step({report.behavior: actions_for(report, game.behaviors()[report.behavior])})


def test_a_wrapper_takes_arguments() -> None:
    """They stand beside its class, in a list that is innermost first."""
    inner, outer = (f'{{"class": "{__name__}.Brighter", "by": {by}, "times": 2}}' for by in (3, 5))
    game = make_gymnasium("ScreenOfATest-v0", 2, wrappers=f"[{inner}, {outer}]")
    (report,) = game.reset({}, 0)
    assert report.decisions is not None
    assert set(report.decisions.observations[0].ravel().tolist()) == {16}
    assert isinstance(game, GymnasiumGame)
    assert [game._envs[0].by, game._envs[0].env.by] == [10, 6]  # type: ignore[attr-defined]
    stack = '[{"class": "gymnasium.wrappers.FrameStackObservation", "stack_size": 4}]'
    (spec,) = make_gymnasium("CartPole-v1", wrappers=stack).behaviors().values()
    assert spec.observations[0].shape == (16,)


@pytest.mark.parametrize("text", ["[1]", '[{"stack_size": 4}]', "[", '[{"class": 3}]'])
def test_wrappers_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"got (the wrapper|wrappers) .*; expected .*; "):
        read_wrappers(text)


def lonely(env: Value, *, agents: int = 1) -> Value:
    """A wrapper that is a function, as those of SuperSuit."""
    env.possible_agents = env.possible_agents[:agents]
    return env


def test_pettingzoo_environments_are_wrapped_and_may_change_their_form() -> None:
    wrapped = make_pettingzoo("mpe2.simple_spread_v3", wrappers=f'[{{"class": "{__name__}.lonely", "agents": 2}}]')
    assert isinstance(wrapped, ParallelGame)
    assert len(wrapped._names) == 2
    turns = make_pettingzoo("mpe2.simple_spread_v3", wrappers="pettingzoo.utils.conversions.parallel_to_aec")
    assert isinstance(turns, TurnGame)
    turns.close()


@pytest.mark.parametrize("name", ["video.mp4", "no folder/video.gif"])
def test_a_video_that_cannot_be_written_is_refused_before_any_environment_is_made(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match=r"got video=.*; expected a file \.gif in a folder that exists"):
        make_gymnasium("ScreenOfATest-v0", 1, video=str(tmp_path / name))


def test_a_video_shows_the_first_area_from_its_first_frame(tmp_path: Path) -> None:
    from PIL import Image

    file = tmp_path / "video.gif"
    game = make_gymnasium("ScreenOfATest-v0", 9, video=str(file))
    play(game, 6)
    game.close()
    with Image.open(file) as video:
        assert video.info["duration"] == 50
        seen = []
        for frame in range(video.n_frames):  # type: ignore[attr-defined]
            video.seek(frame)
            seen.append(video.convert("RGB").getpixel((3, 3))[0])  # type: ignore[index]
    assert seen == pytest.approx([0, 60, 120, 180, 0, 60], abs=8)


def test_a_video_without_room_is_noted_and_leaves_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "video.gif"
    file.write_bytes(b"former")
    monkeypatch.setattr("sparring.pipeline.files.put", full)
    screen = Screen()
    screen.reset()
    video = Video(screen, str(file), 30)
    video.step(0)
    video.close()
    assert capsys.readouterr().err == "notice: the video is not written: [Errno 28] No space left on device\n"
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"former"]


def test_a_video_is_bounded_and_of_the_first_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "video.gif"
    screen = Screen()
    video = Video(screen, str(file), 30)
    for number in range(MOST_FRAMES):
        assert not file.exists()
        screen.time = number % 4
        video.step(0)
    written = file.stat().st_mtime_ns
    screen.reset()
    video.step(0)
    video.close()
    assert file.stat().st_mtime_ns == written
    monkeypatch.setenv("SPARRING_NUMBER", "1")
    game = make_gymnasium("ScreenOfATest-v0", 1, video=str(tmp_path / "other.gif"))
    play(game, 2)
    game.close()
    assert not (tmp_path / "other.gif").exists()


def test_an_environment_that_does_not_render_is_refused(tmp_path: Path) -> None:
    blind = GymnasiumGame("a", [Video(Blind(), str(tmp_path / "video.gif"), 30)])
    silent = make_gymnasium("ScreenOfATest-v0", 1, video=str(tmp_path / "video.gif"), result="nothing")
    for game in (silent, blind):
        with pytest.raises(
            SettingsError, match=r"got None \(NoneType\) from the environment's render\(\); expected an"
        ):
            play(game, 1)


class Broken(gymnasium.Env[Any, Any]):
    def __init__(self) -> None:
        np()  # type: ignore[operator]


def test_a_mistake_in_the_constructor_is_named_with_file_and_line() -> None:
    gymnasium.register("BrokenOfATest-v0", Broken)
    try:
        line = Broken.__init__.__code__.co_firstlineno + 1
        with pytest.raises(SettingsError, match=rf"'module' object is not callable.* \({__file__}:{line}\); expected"):
            make_gymnasium("BrokenOfATest-v0")
    finally:
        gymnasium.registry.pop("BrokenOfATest-v0", None)
