"""The Gymnasium bridge runs environments of other packages and wrappers around them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit, TransformObservation

from sparring.pipeline.bridges.gymnasium import GymnasiumGame, NativeGame, make_gymnasium
from sparring.pipeline.bridges.observations import Observations
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.messages.simulator import BehaviorActions
from sparring.pipeline.specs import SpecError

MODULE = """
import gymnasium
import numpy as np
from gymnasium import spaces


class Corridor(gymnasium.Env):
    observation_space = spaces.Box(-10, 10, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length=3):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.at += 1
        return np.full(1, self.at, np.float32), 1.0, self.at >= self.length, False, {}


gymnasium.register("{name}/Corridor-v2", Corridor)
"""


class PlusOne(TransformObservation):
    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env, lambda observed: observed + 1, env.observation_space)


class Double(TransformObservation):
    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env, lambda observed: 2 * observed, env.observation_space)


HERE = __name__


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that registers an environment when it is imported, and that is removed afterwards."""
    name = "corridor_package_of_a_test"
    (tmp_path / f"{name}.py").write_text(MODULE.replace("{name}", name))
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)
    gymnasium.registry.pop(f"{name}/Corridor-v2", None)


def first(game: Any) -> list[float]:
    """Returns the first observation of every area."""
    (report,) = game.reset({}, 0)
    return list(report.decisions.observations[0][:, 0].tolist())


@pytest.mark.parametrize("areas", [1, 2, 9])
@pytest.mark.parametrize("vectorization", ["auto", "sync"])
def test_naming_the_module_makes_the_environment_of_a_package_available(
    module: str, areas: int, vectorization: str
) -> None:
    """The module registers it when it is imported; the behavior has its plain name."""
    assert f"{module}/Corridor-v2" not in gymnasium.registry
    game = make_gymnasium(f"{module}:{module}/Corridor-v2", areas, vectorization=vectorization, length=2)
    assert list(game.behaviors()) == ["Corridor?team=0"]
    assert first(game) == [0.0] * areas
    chosen = BehaviorActions(
        behavior="Corridor?team=0",
        agents=np.arange(areas),
        continuous=np.zeros((areas, 0), np.float32),
        discrete=np.zeros((areas, 1), np.int32),
    )
    game.step({chosen.behavior: chosen})
    (report,) = game.step({chosen.behavior: chosen})
    assert report.ends is not None
    assert report.ends.agents.tolist() == list(range(areas))
    game.close()


@pytest.mark.parametrize("env_id", ["no_such_package:Corridor-v2", "no_such_package:CartPole-v1"])
@pytest.mark.parametrize("areas", [1, 9])
def test_a_missing_package_is_named(env_id: str, areas: int) -> None:
    """This holds for both forms of vectorization."""
    with pytest.raises(
        SettingsError, match=r"got environment .*no_such_package.*; expected a module .*; correct the name"
    ):
        make_gymnasium(env_id, areas)


def test_a_module_without_that_environment_is_refused(module: str) -> None:
    with pytest.raises(
        SettingsError, match=r"got environment .*Tunnel-v0.*; expected a registered id; write .*Corridor-v2"
    ):
        make_gymnasium(f"{module}:{module}/Tunnel-v0")


def test_wrappers_surround_each_area_innermost_first(module: str) -> None:
    """The second wrapper transforms the output of the first."""
    env_id = f"{module}:{module}/Corridor-v2"
    inner, outer = f"{HERE}.PlusOne", f"{HERE}.Double"
    assert first(make_gymnasium(env_id, 3, wrappers=f"{inner},{outer}")) == [2.0] * 3  # (0 + 1) x 2
    assert first(make_gymnasium(env_id, 3, wrappers=f"{outer},{inner}")) == [1.0] * 3  # 0 x 2 + 1
    assert first(make_gymnasium(env_id, 1, wrappers=inner)) == [1.0]
    game = make_gymnasium(env_id, 2, wrappers=f"{inner},{outer}")
    assert isinstance(game, GymnasiumGame)
    for env in game._envs:
        assert isinstance(env, Double)
        assert isinstance(env.env, PlusOne)


def test_blanks_and_trailing_commas_are_ignored() -> None:
    assert isinstance(make_gymnasium("CartPole-v1", 1, wrappers=""), GymnasiumGame)
    game = make_gymnasium("CartPole-v1", 1, wrappers=f" {HERE}.PlusOne , ,")
    assert isinstance(game, GymnasiumGame)
    assert isinstance(game._envs[0], PlusOne)


def test_spaces_are_those_of_the_outermost_wrapper() -> None:
    """The example is a wrapper of Gymnasium that changes observations."""
    game = make_gymnasium("FrozenLake-v1", 2, wrappers="gymnasium.wrappers.FlattenObservation")
    (spec,) = game.behaviors().values()
    assert spec.observations[0].shape == (16,)


def test_with_wrappers_many_areas_are_single_environments() -> None:
    """The environment's own vectorization does not support wrappers."""
    assert isinstance(make_gymnasium("CartPole-v1", 16), NativeGame)
    assert isinstance(make_gymnasium("CartPole-v1", 16, wrappers=f"{HERE}.PlusOne"), GymnasiumGame)
    with pytest.raises(SettingsError, match=r"got wrappers with a vector form; .*; leave vectorization out, or"):
        make_gymnasium("CartPole-v1", 16, wrappers=f"{HERE}.PlusOne", vectorization="native")


@pytest.mark.parametrize(
    "path",
    ["no_such_package.Wrapper", "gymnasium.wrappers.NoSuchWrapper", "gymnasium.no_such_module.Wrapper", "JustAName"],
)
def test_a_missing_wrapper_is_named(path: str) -> None:
    """The error has a remedy and is raised before any environment is made."""
    with pytest.raises(SettingsError, match=rf"got wrapper '{path}': .*; expected a class, .*; correct the path"):
        make_gymnasium("CartPole-v1", wrappers=f"{HERE}.PlusOne,{path}")


@pytest.mark.parametrize("text", ["[", "[" * 100_000])
def test_wrappers_that_are_no_json_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"got wrappers '\[.*; expected a list as JSON; correct the option"):
        make_gymnasium("CartPole-v1", wrappers=text)


def test_a_wrapper_that_needs_more_than_the_environment_is_refused() -> None:
    """`TimeLimit` needs a limit; the error names the wrapper and how it gets one."""
    assert TimeLimit.__module__.startswith("gymnasium.wrappers")
    with pytest.raises(
        SettingsError, match=r"got wrapper 'gymnasium.*TimeLimit'.*max_episode_steps.*; expected .* NAME:"
    ):
        make_gymnasium("CartPole-v1", wrappers="gymnasium.wrappers.TimeLimit")


class Planes(gymnasium.Env[Any, Any]):
    """An environment that observes an image of three cells with values from 0 to `most`."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, most: int = 1) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (1, 3, 1), np.uint8)
        self._most = most

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.linspace(0, self._most, 3).round().astype(np.uint8).reshape(1, 3, 1), {}


@pytest.mark.parametrize(("most", "middle"), [(1, 0), (2, 128), (10, 128), (255, 128)])
def test_images_with_few_values_are_scaled_to_the_full_range(most: int, middle: int) -> None:
    """Otherwise a map of 0 and 1 would be nearly black everywhere."""
    (report,) = GymnasiumGame("planes", [Planes(most)], partial(Observations, brightest=most)).reset({}, 1)
    assert report.decisions is not None
    assert report.decisions.observations[0].ravel().tolist() == [0, middle, 255]


def test_an_image_brighter_than_the_option_is_refused() -> None:
    with pytest.raises(SpecError, match=r"with a value of 3.*at most 2, as option brightest says"):
        GymnasiumGame("planes", [Planes(3)], partial(Observations, brightest=2)).reset({}, 1)


@pytest.mark.parametrize("brightest", [0, 256, 2.5, "high"])
def test_an_invalid_brightness_is_refused(brightest: Any) -> None:
    with pytest.raises(SettingsError, match="a whole number from 1 to 255"):
        make_gymnasium("CartPole-v1", brightest=brightest)
