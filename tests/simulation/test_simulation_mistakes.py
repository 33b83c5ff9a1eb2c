"""Mistakes in an environment are explained in its author's words: what it has returned, and what its space says."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils.conversions import aec_to_parallel

from sparring.pipeline.bridges.actions import Actions, forbidden_choices, note_unread_masks
from sparring.pipeline.bridges.explain import NotFinite, flag, traceback_of
from sparring.pipeline.bridges.gymnasium import GymnasiumGame, NativeGame, make_gymnasium
from sparring.pipeline.bridges.making import read_wrappers
from sparring.pipeline.bridges.observations import Observations
from sparring.pipeline.bridges.pettingzoo import make_pettingzoo
from sparring.pipeline.bridges.pettingzoo.turns import TurnGame
from sparring.pipeline.errors import SettingsError, described
from sparring.pipeline.messages.simulator import BehaviorActions
from sparring.pipeline.specs import ActionSpec, ObservationSpec, SpecError

IMAGE = spaces.Box(0, 255, (8, 8, 3), np.uint8)


@pytest.mark.parametrize(
    ("space", "value", "explained"),
    [
        (spaces.Dict(a=spaces.Discrete(2)), {"b": 0}, r"got a dict with the keys b without the observation 'a'"),
        (spaces.Dict(a=spaces.Discrete(2)), None, r"got None \(NoneType\) without the observation 'a'"),
        (spaces.Discrete(5), 5, r"got 5 \(int\) as observation 'observation'; expected .* Discrete\(5\)"),
        (spaces.Discrete(5), -1, "got -1"),
        (spaces.MultiDiscrete([2, 2]), np.array([2, 0]), r"got an array \(2,\) of int64 with values from 0 to 2"),
        (spaces.Box(0, 1, (2,)), np.zeros(3), r"got an array \(3,\) of float64 .* expected .* \(2,\)"),
        (spaces.Box(0, 1, (2,)), ["0", "1"], r"got a list of 2 \(str, str\)"),
        (spaces.Box(0, 1, (2,)), np.zeros(2, complex), "of complex128"),
        (spaces.Box(0, 1, (2,)), np.ma.masked_array(np.zeros(2), [True, False]), r"got a masked array \(2,\)"),
        (spaces.Discrete(5), 1.5, "got 1.5"),
        (spaces.MultiBinary(2), np.array([1, 2]), r"got an array \(2,\) of int64 with values from 1 to 2"),
        (IMAGE, np.full((8, 8, 3), "7"), "of <U1"),
        (IMAGE, np.zeros((3, 8, 8), np.uint8), r"got an array \(3, 8, 8\) of uint8"),
        (IMAGE, np.full((8, 8, 3), 0.5), r"float64 with values from 0.5 to 0.5"),
        (IMAGE, np.full((8, 8, 3), 300), "with values from 300 to 300"),
        (IMAGE, np.eye(8)[:, :, None].repeat(3, 2), "float64 with values from 0 to 1 as observation"),
    ],
)
def test_a_value_that_its_space_does_not_have_is_shown(space: spaces.Space[Any], value: Any, explained: str) -> None:
    with pytest.raises(SpecError, match=explained):
        Observations(space).rows([value])


@pytest.mark.parametrize(
    ("space", "remedy"),
    [
        (spaces.Box(0, 255, (8, 8, 3, 4), np.uint8), "to stack frames, make them gray before that"),
        ({"a": spaces.Discrete(2)}, "make it a gymnasium.spaces.Dict"),
        (lambda: spaces.Discrete(2), r"set the space as an attribute in __init__\(\), in place of a method"),
    ],
)
def test_what_is_no_space_has_its_remedy(space: Any, remedy: str) -> None:
    with pytest.raises(SpecError, match=remedy):
        Observations(space)


@pytest.mark.parametrize(
    ("space", "value", "noted"),
    [
        (IMAGE, np.ones((8, 8, 3), np.uint8), "the image 'observation' has values up to 1: bytes are divided by 255"),
        (IMAGE, np.zeros((8, 8, 3), np.uint8), ""),
        (
            spaces.Box(0, 255, (8, 8, 3)),
            np.full((8, 8, 3), 255.0),
            "the image 'observation' has values up to 255: floats",
        ),
        (
            spaces.Box(0, 1, (20, 20)),
            np.ones((20, 20)),
            "observation 'observation', a box of (20, 20) float32, is read",
        ),
    ],
)
def test_images_of_another_scale_or_read_as_vectors_are_noted_once(
    space: Any, value: Any, noted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reader = Observations(space)
    for _ in range(200):
        reader.rows([value])
    lines = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("notice: ")[: len(noted)] for line in lines] == ([noted] if noted else [])


def test_whole_numbers_of_other_types_are_pixels() -> None:
    np.testing.assert_array_equal(Observations(IMAGE).rows([np.full((8, 8, 3), 255.0)])[0], 255)


class Formerly:
    """A space of another package than Gymnasium, and a value with a gradient."""

    def sample(self) -> None:
        """Returns nothing."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad")


def test_spaces_and_values_of_other_packages_are_named() -> None:
    for read in (Actions, Observations):
        with pytest.raises(SpecError, match=rf"Formerly object at .* of {__name__}, not of gymnasium.spaces; expected"):
            read(Formerly())  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"Formerly.* as observation 'observation'; expected a value of its space"):
        Observations(spaces.Box(0, 1, (1,))).rows([Formerly()])


def test_a_mask_leaves_a_choice_in_each_branch() -> None:
    masks, spec = [None, [1, 0, 0, 0]], ActionSpec(discrete=(2, 2))
    with pytest.raises(SpecError, match=r"forbids every choice of a branch of area 1; .* can do nothing has ended"):
        forbidden_choices(masks, spec, lambda row: f" of area {row}")


@pytest.mark.parametrize("mask", [[-1, 2], [1, 0.5], ["1", "0"], [float("nan"), 1]])
def test_a_mask_has_ones_and_zeros(mask: list[Any]) -> None:
    with pytest.raises(SpecError, match=r"got an action mask with .*; expected 1 for each choice that is allowed"):
        forbidden_choices([None, mask], ActionSpec(discrete=(2,)))


# ---------------------------------------------------------------- Gymnasium


class Returns(gymnasium.Env[Any, Any]):
    """Returns what it is given from reset and step."""

    observation_space, action_space = spaces.Box(0, 1, (1,)), spaces.Discrete(2)

    def __init__(self, begun: Any, stepped: Any = None) -> None:
        self.begun, self.stepped = begun, stepped

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.begun

    def step(self, action: Any) -> Any:
        return self.stepped


ZERO = np.zeros(1, np.float32)


def chosen(behavior: str, *agents: int) -> dict[str, BehaviorActions]:
    n = len(agents)
    continuous, discrete = np.zeros((n, 0), np.float32), np.ones((n, 1), np.int32)
    numbers = np.array(agents, np.int64)
    return {behavior: BehaviorActions(behavior=behavior, agents=numbers, continuous=continuous, discrete=discrete)}


def test_what_a_gymnasium_environment_returns_is_checked() -> None:
    with pytest.raises(SpecError, match=r"from reset\(\); expected a tuple of 2: observation, info"):
        GymnasiumGame("a", [Returns(ZERO)]).reset({}, 0)
    for stepped, explained in (
        ((ZERO, 0.0, False, False, None), r"got None \(NoneType\) as info from step\(\); expected a dict; return {}"),
        (
            (ZERO, 0.0, False, {}),
            r"got a tuple of 4 \(ndarray, float, bool, dict\) from step\(\); expected a tuple of 5",
        ),
        ((ZERO, "good", False, False, {}), r"got 'good' \(str\) as reward of area 0; expected a number"),
        ((ZERO, None, False, False, {}), r"got None \(NoneType\) as reward of area 0; expected a number"),
        ((ZERO, 10**400, False, False, {}), r"\(int\) as reward of area 0; expected finite numbers"),
        ((ZERO, -1e300, False, False, {}), r"got -1e\+300 \(float\) as reward of area 0; expected at most 3.4e\+38"),
        ((ZERO, "1", False, False, {}), r"got '1' \(str\) as reward of area 0; expected a number"),
        (
            (ZERO, 0.0, [None], False, {}),
            r"got a list of 1 \(NoneType\) as terminated of area 0; expected True or False",
        ),
        ((ZERO, 0.0, None, False, {}), r"got None \(NoneType\) as terminated of area 0; expected True or False"),
        ((ZERO, 0.0, 0.5, False, {}), r"got 0.5 \(float\) as terminated of area 0; expected True or False"),
        ((ZERO, 0.0, np.nan, False, {}), r"got nan \(float\) as terminated of area 0; expected True or False"),
        ((ZERO, 0.0, False, "no", {}), r"got 'no' \(str\) as truncated of area 0; expected True or False"),
        (
            (np.zeros(2), 0.0, False, False, {}),
            r"as observation 'observation' of area 0; .* its observation_space \(step",
        ),
    ):
        game = GymnasiumGame("a", [Returns((ZERO, {}), stepped)])
        game.reset({}, 0)
        with pytest.raises((SpecError, NotFinite), match=explained):
            game.step(chosen("a?team=0", 0))


class Spaceless(gymnasium.Env[Any, Any]):
    """Has forgotten its spaces."""


def test_forgotten_attributes_of_an_environment_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match=r"got Spaceless without observation_space; .* set it in __init__\(\)"):
        GymnasiumGame("a", [Spaceless()])
    monkeypatch.delattr(Pair, "possible_agents")
    with pytest.raises(SpecError, match="got Pair without possible_agents"):
        play(lambda **_: Pair(lambda _, *parts: parts), "parallel_env", monkeypatch)


@pytest.mark.parametrize("method", ["reset", "step"])
def test_method_that_an_environment_only_inherits_is_named(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Returns, method, getattr(gymnasium.Env, method))
    game = GymnasiumGame("a", [Returns((ZERO, {}))])

    def begin() -> None:
        game.reset({}, 0)
        game.step(chosen("a?team=0", 0))

    with pytest.raises(SpecError, match=rf"got Returns without {method}\(\); expected one; define it"):
        begin()
    monkeypatch.setattr(Pair, method, getattr(ParallelEnv, method))
    with pytest.raises(SpecError, match=rf"got Pair without {method}\(\)"):
        play(lambda **_: Pair(lambda _, *parts: parts), "parallel_env", monkeypatch)


class Unseeded(Returns):
    def reset(self) -> Any:  # type: ignore[override]
        return self.begun


def test_method_that_does_not_take_its_arguments_is_shown_as_it_has_to_be() -> None:
    line, owner = Unseeded.reset.__code__.co_firstlineno, r"Unseeded.reset\(\)"
    expected = rf"got {owner} got an unexpected .*; expected def reset\(self, seed=None, options=None\); .*:{line}\)$"
    with pytest.raises(SpecError, match=expected):
        GymnasiumGame("a", [Unseeded((ZERO, {}))]).reset({}, 0)


NAN = np.full(1, np.nan, np.float32)


@pytest.mark.parametrize(
    ("stepped", "got"),
    [
        ((ZERO, float("nan"), False, False, {}), r"nan \(float\) as reward of area 0"),
        ((ZERO, np.float64(np.inf), False, False, {}), r"inf \(float64\) as reward of area 0"),
        ((NAN, 0.0, False, False, {}), r"an array \(1,\) of float32 with 1 that are NaN or infinite as observation"),
        ((NAN, 0.0, True, False, {}), "as observation 'observation' of area 0"),
    ],
)
def test_number_that_is_not_finite_is_no_mistake_for_ever_and_is_named_with_the_code(stepped: Any, got: str) -> None:
    """It may not come again, so the simulator that has sent it is restarted: the error is none of the spec."""
    game = GymnasiumGame("a", [Returns((ZERO, {}), stepped)])
    game.reset({}, 0)
    line = Returns.step.__code__.co_firstlineno
    with pytest.raises(NotFinite, match=rf"{got}.*divides by zero.* \(step\(\) of Returns, {__file__}:{line}\)$"):
        game.step(chosen("a?team=0", 0))


def test_mistake_of_a_reset_within_a_step_is_named_with_the_reset() -> None:
    env = Returns((ZERO, {}), (ZERO, 0.0, True, False, {}))
    game = GymnasiumGame("a", [env])
    game.reset({}, 0)
    env.begun = ZERO
    line = Returns.reset.__code__.co_firstlineno
    with pytest.raises(SpecError, match=rf"from reset\(\).* \(reset\(\) of Returns, {__file__}:{line}\)$"):
        game.step(chosen("a?team=0", 0))


class ReturnsMany(VectorEnv[Any, Any, Any]):
    """Returns rewards, ends, infos and observations that it is given, for two areas."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    num_envs, single_observation_space, single_action_space = 2, spaces.Box(0, 1, (1,)), spaces.Discrete(3)

    def __init__(self, reward: Any, terminated: Any, info: Any, seen: Any = ((0.0,), (0.0,))) -> None:
        self.returned = reward, terminated, np.zeros(2, bool), info
        self.seen = np.array(seen)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.seen, self.returned[-1]

    def step(self, actions: Any) -> Any:
        return self.seen, *self.returned


NO, BOTH = np.zeros(2, bool), np.zeros(2)


def test_what_a_vectorized_environment_returns_is_checked() -> None:
    for returned, explained in (
        ((0.5, NO, {}), r"got 0.5 \(float\) as reward; expected an array \(2,\) of numbers, an entry for each area"),
        ((np.array(["1", "2"]), NO, {}), r"as reward; expected an array \(2,\) of numbers"),
        ((BOTH, np.array([None, False]), {}), r"as terminated; expected an array \(2,\) of bool"),
        ((BOTH, np.True_, {}), "as terminated; expected an array"),
        ((np.array([0.0, np.nan]), NO, {}), r"nan \(float32\) as reward of area 1; expected finite numbers"),
    ):
        game = NativeGame("a", ReturnsMany(*returned))
        game.reset({}, 0)
        with pytest.raises((SpecError, NotFinite), match=explained):
            game.step(chosen("a?team=0", 0, 1))
    with pytest.raises(
        SpecError, match=r"got an array \(3, 1\).* as observation 'observation'; expected 2 rows, one for"
    ):
        NativeGame("a", ReturnsMany(BOTH, NO, {}, [[0.0]] * 3)).reset({}, 0)
    one = ReturnsMany(BOTH, NO, {}, [0.0, 0.0])
    one.single_observation_space = spaces.Box(0, 1, (2,))
    with pytest.raises(SpecError, match=r"an array \(2,\).*; expected a row for each area, each of Box"):
        NativeGame("a", one).reset({}, 0)
    with pytest.raises(NotFinite, match="as observation 'observation' in row 1"):
        NativeGame("a", ReturnsMany(BOTH, NO, {}, [[0.0], [np.inf]])).reset({}, 0)
    with pytest.raises(SpecError, match=r"as info\['action_mask'\]; expected 2 masks"):
        NativeGame("a", ReturnsMany(BOTH, NO, {"action_mask": np.ones(3)})).reset({}, 0)


@pytest.mark.parametrize("terminated", [[True, False], [True, True]])
def test_an_area_of_a_vectorized_environment_that_does_not_begin_anew_is_named(terminated: list[bool]) -> None:
    game = NativeGame("a", ReturnsMany(BOTH, np.array(terminated), {}))
    game.reset({}, 0)
    if not all(terminated):  # else the next step is in the same frame
        game.step(chosen("a?team=0", 0, 1))
    explained = r"got another end of area 0 .*; reset the area there.* \(step\(\) of ReturnsMany"
    with pytest.raises(SpecError, match=explained):
        game.step(chosen("a?team=0", 0, 1))


def test_a_reward_at_the_step_that_begins_an_episode_is_noted_once(capsys: pytest.CaptureFixture[str]) -> None:
    env = ReturnsMany(np.array([0.5, 0.0]), np.array([True, False]), {})
    game = NativeGame("a", env)
    game.reset({}, 0)
    game.step(chosen("a?team=0", 0, 1))
    assert not capsys.readouterr().err
    for ended in (False, True, False):
        env.returned = (env.returned[0], np.array([ended, False]), *env.returned[2:])
        game.step(chosen("a?team=0", 1))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("notice: area 0 has a reward of 0.5 at the step that begins its episode")


def test_masks_of_a_vectorized_environment_count() -> None:
    """An area that has ended has none in that step; an area without an entry of `_action_mask` may do all."""
    masks = np.array([[1, 0, 1], [1, 1, 0]])
    game = NativeGame("a", ReturnsMany(BOTH, np.array([True, False]), {"action_mask": masks}))
    (report,) = game.reset({}, 0)
    assert report.decisions is not None
    np.testing.assert_array_equal(report.decisions.masks, masks == 0)
    (report,) = game.step(chosen("a?team=0", 0, 1))
    assert report.decisions is not None
    np.testing.assert_array_equal(report.decisions.masks, [[False, False, True]])
    game = NativeGame("a", ReturnsMany(BOTH, NO, {"action_mask": masks, "_action_mask": np.array([False, True])}))
    (report,) = game.reset({}, 0)
    assert report.decisions is not None
    np.testing.assert_array_equal(report.decisions.masks, [[False, False, False], [False, False, True]])


def test_what_cannot_be_made_has_the_remedy_for_its_cause(tmp_path: Path) -> None:
    gymnasium.register("Returns-v0", Returns)
    gymnasium.register("Objects-v0", object)
    for env_id, options, explained in (
        ("Nowhere-v0", {}, "expected a registered id; .* or write MODULE:Nowhere-v0"),
        ("nomodule:A-v0", {}, "No module named 'nomodule'.*expected a module that is installed, beside"),
        ("CartPole-v1", {"gravitty": 9}, "'gravitty'.*expected an environment that takes its options"),
        ("CartPole-v1", {"brightnest": 9}, "'brightnest'.*; did you mean brightest?"),
        (f"{__name__}:Returns-v0", {}, r"'begun'.*; expected an environment that needs no options"),
        (f"{__name__}:Objects-v0", {}, "expected a subclass of gymnasium.Env; .*vector_entry_point="),
        ("./mine.py:A-v0", {}, "a path; expected the name of a module, as MODULE:ID; write mine:A-v0, and give"),
        ("games/mine.py", {}, "write mine, and give its folder, games, as"),
        (":A-v0", {}, "expected MODULE:ID, or an ID alone"),
        ("pettingzoo.utils:env", {}, "write name: pettingzoo, and env_id: pettingzoo.utils.env"),
        (r"C:\games\mine:A-v0", {}, "write mine:A-v0, and give its folder, C:/games, as"),
    ):
        with pytest.raises(SettingsError, match=explained):
            make_gymnasium(env_id, **options)
    gymnasium.register("Many", vector_entry_point=lambda num_envs: ReturnsMany(BOTH, NO, {}))
    assert isinstance(make_gymnasium(f"{__name__}:Many", 2), NativeGame), "it has no other form"
    with pytest.raises(SettingsError, match=r"expected a single form, which this one lacks; leave vectorization out"):
        make_gymnasium(f"{__name__}:Many", 2, vectorization="sync")
    register = "of which these are; register '.*:Many' with entry_point= as well, or leave out the"
    with pytest.raises(SettingsError, match=f"got the video a.gif with a vector form; expected a .*, {register} video"):
        make_gymnasium(f"{__name__}:Many", 2, video="a.gif")
    with pytest.raises(SettingsError, match=f"got wrappers with a vector form; .*, {register} wrappers"):
        make_gymnasium(f"{__name__}:Many", 2, wrappers="gymnasium.wrappers.TimeAwareObservation")
    assert make_gymnasium(f"{__name__}:Many", 2, vectorization="native").name == "Many"
    with pytest.raises(SpecError, match=r"got num_envs 2 of the vector form .*; expected 8, as asked for"):
        make_gymnasium(f"{__name__}:Many", 8, vectorization="native")
    gymnasium.register("Long", vector_entry_point=lambda num_envs: ReturnsMany(BOTH, NO, {}), max_episode_steps=9)
    with pytest.raises(SettingsError, match=r"expected a vector form that takes the max_episode_steps of its"):
        make_gymnasium(f"{__name__}:Long", 2, vectorization="native")
    gymnasium.register("Fixed", vector_entry_point=lambda: ReturnsMany(BOTH, NO, {}))
    with pytest.raises(
        SettingsError, match=r"expected a vector form that takes num_envs, the number of areas; let its"
    ):
        make_gymnasium(f"{__name__}:Fixed", 2, vectorization="native")
    gymnasium.register("Plain", vector_entry_point=lambda num_envs: object())
    with pytest.raises(SettingsError, match=r"expected a vector form that is a subclass of gymnasium.vector.VectorEnv"):
        make_gymnasium(f"{__name__}:Plain", 2, vectorization="native")
    with pytest.raises(
        SettingsError, match=r"multiple values .*; leave it out; areas: N is the number of environments"
    ):
        make_gymnasium(f"{__name__}:Many", 2, vectorization="native", num_envs=16)
    gymnasium.register("Single", lambda: Returns(None))
    with pytest.raises(SettingsError, match=r"expected a vector form of its own; leave vectorization out, or register"):
        make_gymnasium(f"{__name__}:Single", 2, vectorization="native")
    gymnasium.register("Dotted", f"{__name__}.Returns")
    with pytest.raises(SettingsError, match=r"expected a class, or its place as MODULE:CLASS, as entry_point; correct"):
        make_gymnasium(f"{__name__}:Dotted")
    gymnasium.register("Absent", f"{__name__}:Absent")
    with pytest.raises(SettingsError, match=r"no attribute 'Absent'.*as entry_point; correct its registration"):
        make_gymnasium(f"{__name__}:Absent")
    gymnasium.register("Unseen", lambda: Returns(None))
    with pytest.raises(SettingsError, match=r"expected an environment that takes render_mode, which a video needs"):
        make_gymnasium(f"{__name__}:Unseen", video=str(tmp_path / "a.gif"))
    with pytest.raises(SettingsError, match=r"'steps'.*; expected those that it takes"):
        read_wrappers('[{"class": "gymnasium.wrappers.TimeLimit", "steps": 3}]')[0](Returns(None))


def test_an_environment_under_the_other_bridge_or_without_its_module_has_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its name is that of a module, or of an id, which the other bridge wants."""
    registers = "import gymnasium\ngymnasium.register('Thermo-v0', 'thermo:Thermo')\n"
    alone = "from pettingzoo import ParallelEnv\n\n\nclass Alone(ParallelEnv):\n    pass\n"
    made = ("thermo", registers), ("empty_module", ""), ("turns_module", "env = print\n"), ("class_alone", alone)
    for name, text in made:
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "folder_of_envs").mkdir()
    (tmp_path / "yaml.py").write_text("")
    importlib.import_module("yaml")  # an installed one is before it, as it is on the path of a run
    monkeypatch.syspath_prepend(tmp_path)
    for make, env_id, remedy in (
        (
            make_gymnasium,
            "folder_of_envs:A-v0",
            r"write folder_of_envs.MODULE:A-v0 with the module in .*/folder_of_envs",
        ),
        (make_gymnasium, "thermo", "write thermo:Thermo-v0"),
        (make_gymnasium, "thermo:Thermos-v0", "write thermo:Thermo-v0"),
        (make_gymnasium, "empty_module:A", r"let .*/empty_module.py register it, by gymnasium.register\(id='A'"),
        (make_gymnasium, "empty_module:A-v0", r"let .*/empty_module.py register it, by gymnasium.register\(id='A-v0'"),
        (make_gymnasium, "turns_module", "write name: pettingzoo for the environment of the module turns_module"),
        (make_pettingzoo, "./games/thermo", "a path; expected the name of a module; write thermo, and give its folder"),
        (make_pettingzoo, "thermo:Thermo-v0", "write name: gymnasium for an id of Gymnasium, env_id: thermo for"),
        (make_pettingzoo, "thermo", "write name: gymnasium and env_id: thermo:Thermo-v0"),
        (make_gymnasium, "wave:A-v0", "rename the module of yours, which Python's own wave hides"),
        (make_gymnasium, "test:A-v0", "rename the module of yours, which Python's own test hides"),
        (make_pettingzoo, "wave", "rename the module of yours, which Python's own wave hides"),
        (make_pettingzoo, "yaml", rf"rename {tmp_path}/yaml.py, which .*/yaml/__init__.py hides"),
        (make_gymnasium, "yaml:A-v0", rf"rename {tmp_path}/yaml.py, which .*/yaml/__init__.py hides"),
        (make_pettingzoo, "empty_module", r"without parallel_env\(\) and env\(\); expected one of them; define it"),
        (make_pettingzoo, "class_alone", r"expected one of them; write parallel_env = Alone below the class"),
    ):
        with pytest.raises(SettingsError, match=remedy):
            make(env_id)
    monkeypatch.setattr("turns_module.env", lambda: None)
    with pytest.raises(SpecError, match="got None in place of an environment"):
        make_pettingzoo("turns_module")
    monkeypatch.setattr("turns_module.env", object())
    with pytest.raises(SettingsError, match=r"as env of the module 'turns_module'; expected a function that .*def env"):
        make_pettingzoo("turns_module")
    monkeypatch.setattr("turns_module.env", lambda: Turns)
    with pytest.raises(SpecError, match=r"got the class Turns in place of an environment; .* return Turns\(\) from"):
        make_pettingzoo("turns_module")
    with pytest.warns(UserWarning, match="latest versioned"):
        assert make_gymnasium("thermo:CartPole").name == "CartPole", "as gymnasium.make takes it"


@pytest.mark.parametrize(
    ("space", "remedy"),
    [
        (spaces.Box(-np.inf, np.inf, (2,)), r"give it bounds, such as Box\(-1, 1, \(2,\)\)"),
        (spaces.Box(0, 9, (2,), np.int64), "use MultiDiscrete for whole numbers"),
        (spaces.Tuple([spaces.Discrete(2)]), r"join its parts in one of these, and take an action apart in step\(\)"),
    ],
)
def test_an_action_space_that_does_not_suit_has_a_remedy_that_works(space: Any, remedy: str) -> None:
    with pytest.raises(SpecError, match=remedy):
        Actions(space)


@pytest.mark.parametrize(
    ("observed", "info", "noted"),
    [
        ((), {"action_masks": [1, 0]}, "info['action_masks'] is not read; a mask of actions is info['action_mask']"),
        (("mask",), {}, "'mask' is read as an observation; a mask of actions is info['action_mask']"),
        (("a/action_mask",), {}, "'a/action_mask' is read as an observation"),
        (("mask",), {"action_mask": [1, 0], "_action_mask": [1]}, "'mask' is read as an observation"),
        ((), {"legal_moves": [0, 1]}, "info['legal_moves'] is not read; a mask of actions is info['action_mask']"),
        (("valid_actions",), {"is_valid": True}, "'valid_actions' is read as an observation"),
        (("task",), {"action_mask": [1, 0]}, ""),
    ],
)
def test_what_may_be_meant_as_a_mask_is_noted(
    observed: tuple[str, ...], info: dict[str, Any], noted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    specs = [ObservationSpec(name=name, shape=(2,)) for name in observed]
    note_unread_masks(ActionSpec(discrete=(2,)), specs, info)
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith(f"notice: {noted}") for line in lines] == ([True] if noted else [])


@pytest.mark.parametrize(("info", "noted"), [({}, 1), ({"action_mask": [1, 0]}, 0)])
def test_a_method_that_returns_masks_is_noted(
    info: dict[str, Any], noted: int, capsys: pytest.CaptureFixture[str]
) -> None:
    env = Returns((ZERO, info))
    env.action_masks = lambda: [1, 0]  # type: ignore[attr-defined]
    game = GymnasiumGame("a", [env])
    for _ in range(2):
        game.reset({}, 0)
    assert capsys.readouterr().err.count("action_masks() is not called; a mask of actions is info['action") == noted


def test_masks_that_are_not_used_are_noted_once(capsys: pytest.CaptureFixture[str]) -> None:
    note_unread_masks(ActionSpec(continuous=2), [], {"action_mask": [1, 0]})
    assert "info['action_mask'] is not read, because all actions are continuous" in capsys.readouterr().err
    env = Returns((ZERO, {"action_mask": [1, 0]}), (ZERO, 0.0, False, False, {}))
    many = ReturnsMany(BOTH, NO, {"action_mask": np.ones((2, 3))})
    for name, game in (("single", GymnasiumGame("a", [env])), ("native", NativeGame("a", many))):
        game.reset({}, 0)
        assert not capsys.readouterr().err, name
        if name == "native":
            many.returned = (*many.returned[:-1], {})
        for _ in range(2):
            game.step(chosen("a?team=0", 0))
        assert capsys.readouterr().err.count("info['action_mask'] is missing after some steps") == 1, name


def test_a_registered_environment_is_checked_in_the_same_words() -> None:
    gymnasium.register("Four", lambda: Returns((ZERO, {}), (ZERO, 0.0, False, {})))
    game = make_gymnasium(f"{__name__}:Four")
    game.reset({}, 0)
    with pytest.raises(SpecError, match=r"got a tuple of 4 .* from step\(\); expected a tuple of 5"):
        game.step(chosen("Four?team=0", 0))


def test_a_vector_form_of_another_kind_is_refused_where_it_is_demanded() -> None:
    class Other(ReturnsMany):
        metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    rule = r"AutoresetMode.SAME_STEP; expected AutoresetMode.NEXT_STEP, .*; reset an area in the step after its end"
    for env_id, forms, end in (
        ("Other", {}, "and say so in metadata$"),
        ("Both", {"entry_point": lambda: Returns((ZERO, {}))}, "and say so in metadata, or leave vectorization out$"),
    ):
        gymnasium.register(env_id, vector_entry_point=lambda num_envs: Other(BOTH, NO, {}), **forms)
        with pytest.raises(SettingsError, match=f"{rule}, {end}"):
            make_gymnasium(f"{__name__}:{env_id}", 2, vectorization="native")
    with pytest.raises(SettingsError, match=rf"{rule}, and say so in metadata$"):
        make_gymnasium(f"{__name__}:Other", 2)


@pytest.mark.parametrize(("method", "part"), [("reset", "2: observation, info"), ("step", "5: observation, reward")])
def test_what_a_wrapper_of_gymnasium_cannot_unpack_is_answered_in_the_same_words(method: str, part: str) -> None:
    """An environment with a limit of steps has one."""
    for number, wrong in enumerate((None, (ZERO, 0.0, False) if method == "step" else (ZERO, {}, {}))):
        given = (wrong, None) if method == "reset" else ((ZERO, {}), wrong)
        env_id = f"{method.title()}{number}"
        gymnasium.register(env_id, partial(Returns, *given), max_episode_steps=9)
        wrappers = '[{"class": "gymnasium.wrappers.TimeAwareObservation"}]'
        game = make_gymnasium(f"{__name__}:{env_id}", wrappers=wrappers)
        expected = rf"got what {method}\(\) returns: .*unpack.*; expected a tuple of {part}"
        with pytest.raises(SpecError, match=expected):  # noqa: PT012 - both are its call
            game.reset({}, 0)
            game.step(chosen(f"{env_id}?team=0", 0))


def test_a_vector_form_that_is_not_used_is_noted_with_the_cause(capsys: pytest.CaptureFixture[str]) -> None:
    class Same(ReturnsMany):
        metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    gymnasium.register("Same", lambda: Returns((ZERO, {})), vector_entry_point=lambda num_envs: Same(BOTH, NO, {}))
    assert isinstance(make_gymnasium(f"{__name__}:Same", 8), GymnasiumGame)
    assert (
        "metadata['autoreset_mode'] is AutoresetMode.SAME_STEP, not AutoresetMode.NEXT_STEP" in capsys.readouterr().err
    )
    wrapper = '[{"class": "gymnasium.wrappers.TimeLimit", "max_episode_steps": 3}]'
    make_gymnasium(f"{__name__}:Same", 8, wrappers=wrapper)
    assert "options and wrappers are for its single form; 8 single environments are stepped" in capsys.readouterr().err
    make_gymnasium(f"{__name__}:Same", 7, wrappers=wrapper)
    assert not capsys.readouterr().err


def test_a_missing_import_of_an_environment_is_told_from_a_missing_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imports_nothing.py").write_text("import nunpy_of_a_test\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imports_beside.py").write_text("from . import other\n")
    (tmp_path / "older.py").write_text("import gym\n")
    with pytest.raises(
        SettingsError, match=r"expected a module whose imports are installed; write import gymnasium as gym"
    ):
        make_gymnasium("older:A-v0")
    with pytest.raises(
        SettingsError, match=r"expected a module of PettingZoo; write name: gymnasium for an id of Gymn"
    ):
        make_pettingzoo("CartPole-v1")
    (tmp_path / "plain_of_a_test.py").write_text("")
    with pytest.raises(
        SettingsError, match=r"expected a module; write plain_of_a_test, the module, in place of plain_"
    ):
        make_pettingzoo("plain_of_a_test.Game")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "of_a_test").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    own = (
        r"imports_nothing.py:1\); .*; install nunpy_of_a_test, correct the import, or give the folder that has nunpy_of"
    )
    for make, ending in ((make_gymnasium, ":A-v0"), (make_pettingzoo, "")):
        with pytest.raises(SettingsError, match=own):
            make(f"imports_nothing{ending}")
        with pytest.raises(
            SettingsError, match=r"imports_beside.py:1\); expected an import that a module without a pack"
        ):
            make(f"imports_beside{ending}")
        searched = (
            rf"a module that is installed, .*\(searched: .*{tmp_path}.*\); correct the name, or write pipeline.pyth"
        )
        for env_id in ("nothing_of_a_test", "nothing_of_a_test.envs", "pettingzoo.classic.nothing_v3"):
            with pytest.raises(SettingsError, match=searched):
                make(f"{env_id}{ending}")
        with pytest.raises(
            SettingsError, match=rf"write pipeline.python_path: .{tmp_path}/below., which has of_a_test"
        ):
            make(f"of_a_test.envs{ending}")


def test_an_id_without_a_version_names_its_behavior() -> None:
    gymnasium.register("Bare", lambda: Returns((ZERO, {})))
    assert make_gymnasium(f"{__name__}:Bare").name == "Bare"


# ---------------------------------------------------------------- PettingZoo


class Pair(ParallelEnv[str, Any, Any]):
    """Two agents whose episode lasts two steps; `spoil` changes what reset and step return."""

    metadata = {"name": "pair"}  # noqa: RUF012
    possible_agents = ["a", "b"]  # noqa: RUF012

    def __init__(self, spoil: Any) -> None:
        self.spoil = spoil

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 1, (1,))

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.agents, self.steps = ["a", "b"], 0
        return self.spoil(self, dict.fromkeys(self.agents, ZERO), {})

    def step(self, actions: Any) -> Any:
        self.steps += 1
        over = dict.fromkeys("ab", self.steps == 2)
        if self.steps == 2:
            self.agents = []
        return self.spoil(
            self, *(dict.fromkeys("ab", one) for one in (ZERO, 1.0)), over, dict.fromkeys("ab", False), {}
        )


def _none_ends(env: Pair, *parts: Any) -> Any:
    if not env.agents:
        parts[2].update(a=False, b=False)
    return parts


def _second_reset(env: Pair, *parts: Any) -> Any:
    env.resets = getattr(env, "resets", 0) + (not parts[2:])
    return ({"a": ZERO, "b": np.zeros(2)}, {}) if env.resets == 2 and not parts[2:] else parts


def test_an_agent_that_has_ended_and_stays_is_noted_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def caught(env: Pair, *parts: Any) -> Any:
        """Ends b in the first step alone, and lets it stay."""
        return (*parts[:2], {"a": env.steps == 4, "b": env.steps in (1, 4)}, *parts[3:]) if parts[2:] else parts

    class Long(Pair):
        def step(self, actions: Any) -> Any:
            found = super().step(actions)
            self.agents = [] if self.steps == 4 else ["a", "b"]
            return found

    play(lambda **_: Long(caught), "parallel_env", monkeypatch)
    noted = "notice: 'b' has ended and acts again in the same episode, as a new agent; step() takes agents that have"
    assert capsys.readouterr().err == f"{noted} ended out of self.agents\n"


def test_what_a_later_reset_returns_is_placed_in_it() -> None:
    class Growing(Returns):
        def reset(self, **_: Any) -> Any:
            self.begun = np.zeros(len(self.begun) + 1, np.float32)
            return self.begun, {}

    game = GymnasiumGame("a", [Growing(np.zeros(0), (ZERO, 0.0, True, False, {}))])
    game.reset({}, 0)
    with pytest.raises(SpecError, match=r"of area 0 from reset\(\); .* \(reset\(\) of Growing, "):
        game.step(chosen("a?team=0", 0))


@pytest.mark.parametrize(
    ("spoil", "explained"),
    [
        (lambda env, *parts: parts[0], r"got a dict with the keys a, b from reset\(\)"),
        (lambda env, *parts: ({}, {}), r"got no agents after reset\(\)"),
        (lambda env, *parts: ({**parts[0], "c": ZERO}, *parts[1:]), "got an observation of c.*possible_agents"),
        (lambda env, *parts: (parts[0], 1.0, *parts[2:]) if parts[2:] else parts, r"got 1.0 \(float\) as rewards from"),
        (lambda env, *parts: (parts[0], {"a": 1.0}, *parts[2:]) if parts[2:] else parts, "got no rewards of b"),
        (
            lambda env, *parts: ({"a": ZERO}, *parts[1:]) if parts[2:] else parts,
            "got no observation of b, which has not",
        ),
        (
            lambda env, *parts: parts if env.agents else ({}, *parts[1:]),
            "got no observation of a, b, which ends with this step; .*; observe before you empty self.agents",
        ),
        (lambda env, *parts: parts if parts[2:] else ({"a": ZERO}, {}), r"got no observation of b from reset\(\)"),
        (
            lambda env, *parts: (parts[0], {"a": 0.0, "b": None}, *parts[2:]) if parts[2:] else parts,
            r"got None \(NoneType\) as reward of agent 'b' in area 0; expected a number; .* \(step\(\) of Pair, ",
        ),
        (
            lambda env, *parts: ({"a": ZERO, "b": np.zeros(2)}, *parts[1:]),
            r"observation 'observation' of agent 'b' in area 0 from reset\(\); .* \(reset\(\) of Pair, ",
        ),
        (
            _second_reset,
            r"observation 'observation' of agent 'b' in area 0 from reset\(\); .* \(reset\(\) of Pair, ",
        ),
        (
            lambda env, *parts: ({"a": ZERO, "b": np.zeros(2)}, *parts[1:]) if parts[2:] and env.agents else parts,
            r"observation 'observation' of agent 'b' in area 0; .* \(step\(\) of Pair, ",
        ),
        (
            lambda env, *parts: (*parts[:2], {"a": False, "b": None}, *parts[3:]) if parts[2:] else parts,
            r"got None \(NoneType\) as termination of agent 'b' in area 0; expected True or False",
        ),
        (
            lambda env, *parts: ({0: ZERO, "1": ZERO}, *parts[1:]) if parts[2:] else parts,
            r"got an observation of 0, 1 from step\(\); expected agents of \['a', 'b'\]",
        ),
        (
            lambda env, *parts: setattr(env, "agents", None) or parts,
            r"got None \(NoneType\) as self.agents; expected a list of the agents that play; .* \(reset\(\) of Pair, ",
        ),
        (
            lambda env, *parts: (*parts[:-1], {"action_mask": [1, 0]}),
            r"got 'action_mask' beside the agents in infos from reset\(\); expected it in the info of each agent",
        ),
        (
            lambda env, *parts: (*parts[:-1], {"a": {}, "b": np.ones(2)}),
            r"got an array \(2,\) of float64 .* as info of agent 'b'; expected a dict; .* \(reset\(\) of Pair, ",
        ),
        (_none_ends, "got an episode that is over, because self.agents is empty, without an end of a, b"),
    ],
)
def test_what_a_parallel_environment_returns_is_checked(
    spoil: Any, explained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpecError, match=explained):
        play(lambda **_: Pair(spoil), "parallel_env", monkeypatch)


def test_an_episode_without_living_agents_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some environments leave agents that have ended in `agents`, where no agent would ever act again."""

    def leave(env: Pair, *parts: Any) -> Any:
        env.agents = ["a", "b"]
        return parts

    assert play(lambda **_: Pair(leave), "parallel_env", monkeypatch) == [2, 2, 2, 2]


def test_a_reward_of_an_agent_that_has_ended_is_noted_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Late(Pair):
        """The second agent ends first, and gets rewards in the last step too, observed or not."""

        reward, is_observed = 3.0, True

        def step(self, actions: Any) -> Any:
            self.steps += 1
            self.agents = ["a"] if self.steps == 1 else []
            seen, rewards = dict.fromkeys("ab", ZERO), {"a": 1.0, "b": 1.0 if self.steps == 1 else self.reward}
            if self.steps == 2 and not self.is_observed:
                del seen["b"]
            return seen, rewards, {"a": self.steps == 2, "b": True}, dict.fromkeys("ab", False), {}

    for reward, is_observed in ((3.0, True), (3.0, False), (0.0, True)):
        Late.reward, Late.is_observed = reward, is_observed
        play(lambda **_: Late(lambda _, *parts: parts), "parallel_env", monkeypatch)
        assert capsys.readouterr().err.count("the reward 3 of 'b' is not learned from, because 'b'") == bool(reward)


def test_teams_and_groups_that_are_hardly_meant_are_noted_or_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Alike(Pair):
        possible_agents = ["player_0", "player_1"]  # noqa: RUF012

    module = ModuleType("alike")
    module.parallel_env = lambda **_: Alike(None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "alike", module)
    make_pettingzoo("alike", teams="each")
    assert not capsys.readouterr().err
    make_pettingzoo("alike", teams="each", groups=True)
    assert "groups have one agent each, because no team has more (teams: each)" in capsys.readouterr().err
    make_pettingzoo("alike", teams="per_type")
    assert "per_type makes one team of the agents player_0, player_1, whose names" in capsys.readouterr().err
    with pytest.raises(
        SettingsError, match=r"makes one team of the agents player_0, player_1; expected teams that can"
    ):
        make_pettingzoo("alike", teams="per_type", outcomes=True)


@pytest.mark.parametrize("loser", [0.0, -1.0])
def test_outcomes_in_which_none_loses_are_noted_once(
    loser: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reward(env: Pair, *parts: Any) -> Any:
        return (parts[0], {"a": 1.0, "b": loser}, *parts[2:]) if parts[2:] else parts

    module = ModuleType("outcomes")
    module.parallel_env = lambda **_: Pair(reward)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "outcomes", module)
    game = make_pettingzoo("outcomes", teams="each", outcomes=True)
    game.reset({}, 0)
    for _ in range(100):
        game.step({**chosen("outcomes?team=0", 0), **chosen("outcomes?team=1", 1)})
    assert capsys.readouterr().err.count("20 agents have won, and none has lost") == (loser == 0)


class Turns(AECEnv[str, Any, Any]):
    """Two agents in turn, with masks; the episode ends after two turns."""

    metadata = {"name": "turns"}  # noqa: RUF012
    possible_agents = ["a", "b"]  # noqa: RUF012

    def __init__(self, mistake: str) -> None:
        self.mistake = mistake
        if mistake == "space":
            self.action_space = spaces.Discrete(2)
        self.possible_agents = ["a", "a"] if mistake == "twice" else ["a", "b"]

    def observation_space(self, agent: str) -> Any:
        return spaces.Dict(observation=spaces.Box(0, 1, (1,)), action_mask=spaces.Box(0, 1, (2,), np.int8))

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def reset(self, seed: Any = None, options: Any = None) -> None:
        self.agents = [] if self.mistake == "none" else ["a", "b"]
        self.rewards, self._cumulative_rewards = dict.fromkeys("ab", 0.0), dict.fromkeys("ab", 0.0)
        self.terminations, self.truncations = dict.fromkeys("ab", False), dict.fromkeys("ab", False)
        self.infos: dict[str, Any] = {"a": {}, "b": {}}
        self.agent_selection, self.turns = "a", 0
        if self.mistake == "entry":
            self.terminations.clear()
        if self.mistake == "attribute":
            del self.agent_selection
        if self.mistake == "alias":
            self.agents = self.possible_agents

    def observe(self, agent: str) -> Any:
        return {"observation": ZERO} | ({} if self.mistake == "mask" else {"action_mask": np.ones(2, np.int8)})

    def last(self, observe: bool = True) -> Any:
        return None if self.mistake == "last" else super().last(observe)

    def step(self, action: Any) -> None:
        if self.mistake == "rewards":
            self.rewards = {"b": 1.0}
        if self.terminations[self.agent_selection]:
            if self.mistake != "dead":
                self._was_dead_step(action)
            return
        self.turns += 1
        self.agent_selection = "ab"[self.turns % 2] if self.mistake != "selection" else "c"
        self.terminations = dict.fromkeys("ab", "no" if self.mistake == "flag" else self.turns == 2)
        if self.mistake == "mover":  # ends for the one that moved last, and not for the other
            self.terminations = {"a": False, "b": self.turns >= 2}
        if self.mistake == "empty" and self.turns == 2:
            self.agents = []
        if self.mistake == "ends":
            self.terminations.clear()


@pytest.mark.parametrize(
    ("mistake", "explained"),
    [
        ("none", r"got no agents after reset\(\)"),
        (
            "mask",
            "got a dict with the keys observation as what 'a' observes; expected a dict with the key 'action_mask'",
        ),
        ("dead", r"got 'a', which has ended, in self.agents after its step\(None\).*_was_dead_step"),
        ("selection", "got agent_selection 'c'; expected one of self.agents"),
        (
            "mover",
            r"got agent_selection 'b' after its step\(None\), with which it has left; .*; set the terminations of all "
            r"agents where the game is over; .* without 'b', end step\(\) with self._deads_step_first\(\)",
        ),
        (
            "entry",
            r"got no 'a' in self.terminations after reset\(\); expected an entry for each.* \(reset\(\) of Turns, ",
        ),
        ("ends", r"got no 'b' in self.terminations after step\(\); .*; set them all in step\(\)"),
        ("rewards", r"got no 'a' in self.rewards after step\(\); .*; set them all in step\(\)"),
        ("alias", r"got possible_agents without a, b after an episode; .*; let self.agents be another list"),
        ("twice", r"got the agents \['a', 'a'\] in possible_agents; expected a name of its own for each"),
        ("last", r"got None \(NoneType\) from last\(\); expected a tuple of 5: .* \(last\(\) of Turns, "),
        ("flag", r"got 'no' \(str\) as termination of agent 'b' in area 0; expected True or False"),
        ("empty", "got an episode that is over, because self.agents is empty, without an end of a, b"),
        ("attribute", r"got Turns without agent_selection; expected one; set it in reset\(\) \(reset\(\) of Turns, "),
        ("space", r"got action_space that is Discrete\(2\) .*; define action_space\(self, agent\)"),
    ],
)
def test_mistakes_of_an_environment_in_turns_are_explained(
    mistake: str, explained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert play(lambda **_: Turns(""), "env", monkeypatch) == [1, 1, 1, 1]
    with pytest.raises(SpecError, match=explained):
        play(lambda **_: Turns(mistake), "env", monkeypatch)


def test_a_mask_that_the_space_lacks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unsaid(Turns):
        def observation_space(self, agent: str) -> Any:
            return spaces.Dict(observation=spaces.Box(0, 1, (1,)))

        def observe(self, agent: str) -> Any:
            return {"observation": ZERO, "action_mask": np.array([0, 1], np.int8)}

    module = ModuleType("unsaid")
    module.env = lambda **_: Unsaid("")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "unsaid", module)
    (report,) = make_pettingzoo("unsaid").reset({}, 1)
    assert report.decisions is not None
    assert report.decisions.masks is not None
    assert report.decisions.masks.tolist() == [[True, False]]


def test_a_module_whose_parallel_form_cannot_be_made_is_played_in_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = ModuleType("both")
    module.env, module.parallel_env = lambda **_: Turns(""), lambda **_: aec_to_parallel(Turns(""))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "both", module)
    assert isinstance(make_pettingzoo("both", areas=3), TurnGame)
    assert capsys.readouterr().err.count("env() is played in turn, because parallel_env() cannot be made of it") == 1


def test_agent_that_acts_after_all_others_have_ended_is_noted_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Alone(Turns):
        def step(self, action: Any) -> None:
            if self.terminations[agent := self.agent_selection]:
                self._was_dead_step(action)
                self.agent_selection = "a"
                return
            self.turns += 1
            self.terminations[agent] = self.turns in (2, 4)
            self.agent_selection = "a" if len(self.agents) == 1 else "ab"[self.turns % 2]

    play(lambda **_: Turns(""), "env", monkeypatch)
    assert not capsys.readouterr().err
    play(lambda **_: Alone(""), "env", monkeypatch)
    assert (
        capsys.readouterr().err.count("'a' acts after all others have ended; where that is the end of the game,") == 1
    )


@pytest.mark.parametrize("mistake", ["", "sum", "none", "all", "cleared", "sparse"])
def test_rewards_that_are_counted_again_or_lost_are_noted_once(
    mistake: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Paying(Turns):
        def step(self, action: Any) -> None:
            if self.terminations[agent := self.agent_selection]:
                super().step(action)
                return
            if mistake not in ("sum", "sparse"):
                self._cumulative_rewards[agent] = 0
            if mistake == "all":
                self._cumulative_rewards = dict.fromkeys("ab", 0.0)
            super().step(action)
            is_paid = mistake != "sparse" or self.turns == 1
            self.rewards = dict.fromkeys("ab", 0.25 if is_paid else 0.0)
            if mistake != "none":
                self._accumulate_rewards()
            if mistake == "cleared":  # late, which changes no sum
                self._clear_rewards()

    play(lambda **_: Paying(""), "env", monkeypatch)
    begins = "begins with self._cumulative_rewards[agent] = 0"
    noted = {
        "sum": f"['b'] is 0.5 after the step() of 'b'; with its reward of 0.25 it would be 0.25; step() {begins}",
        "none": "['a'] is 0 after the step() of 'a'; with its reward of 0.25 it would be 0.25; step() ends with "
        "self._accumulate_rewards()",
        "all": f"['a'] is 0.25 after the step() of 'b'; with its reward of 0.25 it would be 0.5; step() {begins}, "
        "which leaves those of other agents as they are",
        "sparse": f"['b'] is 0.25 after the step() of 'b'; with its reward of 0 it would be 0; step() {begins}",
    }
    lines = [f"notice: self._cumulative_rewards{noted[mistake]}"] if mistake in noted else []
    assert capsys.readouterr().err.splitlines() == lines


def test_an_environment_without_close_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(AECEnv, "close")
    monkeypatch.setitem(__import__("sys").modules, "turns_m", module := ModuleType("turns_m"))
    module.env = lambda: Turns("")  # type: ignore[attr-defined]
    make_pettingzoo("turns_m").close()


def test_an_option_that_the_environment_swallows_is_noted_if_it_looks_like_one_of_the_bridge(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "turns_m", module := ModuleType("turns_m"))
    module.env = lambda **_: Turns("")  # type: ignore[attr-defined]
    make_pettingzoo("turns_m", size=3, num_teams=2)
    assert not capsys.readouterr().err
    make_pettingzoo("turns_m", share_reward=True)
    noted = "notice: the option share_reward is given to the environment; did you mean shared_reward?\n"
    assert capsys.readouterr().err == noted
    with pytest.raises(SettingsError, match=r"outcomes with teams=shared; .*; set teams as well; did you mean teams\?"):
        make_pettingzoo("turns_m", team="each", outcomes=True)


@pytest.mark.parametrize(
    ("last", "noted"), [((1, 0, -1, -1), "'a_1' in area 0 is 0.5, and 1"), ((1, 1, -1, -1), ""), ((0, 0, 0, 0), "")]
)
def test_outcomes_that_differ_within_a_team_are_noted_once(
    last: tuple[int, ...], noted: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["a_0", "a_1", "b_0", "b_1"]

    class Teams(ParallelEnv[str, Any, Any]):
        metadata = {"name": "teams"}  # noqa: RUF012
        possible_agents = names

        def observation_space(self, agent: str) -> Any:
            return spaces.Box(0, 1, (1,))

        def action_space(self, agent: str) -> Any:
            return spaces.Discrete(2)

        def reset(self, seed: Any = None, options: Any = None) -> Any:
            self.agents = names[:]
            return dict.fromkeys(names, ZERO), {}

        def step(self, actions: Any) -> Any:
            self.agents = []
            rewards = dict(zip(names, last, strict=True))
            ends = dict.fromkeys(names, True), dict.fromkeys(names, False)
            return dict.fromkeys(names, ZERO), rewards, *ends, {}

    monkeypatch.setitem(__import__("sys").modules, "teams_m", module := ModuleType("teams_m"))
    module.parallel_env = Teams  # type: ignore[attr-defined]
    game = make_pettingzoo("teams_m", teams="per_type", outcomes=True)
    game.reset({}, 1)
    for _ in range(3):
        game.step(chosen("teams_m?team=0", 0, 1) | chosen("teams_m?team=1", 2, 3))
    rule = "the sign of an agent's last reward is its outcome (option outcomes); give all of a team one sign"
    expected = [f"notice: the outcome of agent {noted} of a teammate: {rule}"] if noted else []
    assert capsys.readouterr().err.splitlines() == expected


@pytest.mark.filterwarnings("ignore:Your environment should override")
def test_a_space_that_is_not_defined_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rootless:
        possible_agents = ("a",)
        observation_space = action_space = staticmethod(lambda _: spaces.Discrete(2))

        def reset(self, seed: Any = None, options: Any = None) -> None:
            """Returns nothing, as an environment in turns."""

    with pytest.raises(SpecError, match=r"Rootless.*, whose reset\(\) returns nothing; .*, or from pettingzoo.AECEnv"):
        play(lambda **_: Rootless(), "env", monkeypatch)

    class Agentless(Turns):
        def action_space(self) -> Any:  # type: ignore[override]
            return spaces.Discrete(2)

    with pytest.raises(SpecError, match=r"got no action_space of agent 'a'; .*define action_space\(self, agent\)"):
        play(lambda **_: Agentless(""), "env", monkeypatch)

    class Spaceless(Turns):
        action_space = AECEnv.action_space

    with pytest.raises(SpecError, match=r"got no action_space of agent 'a'; .*define action_space\(self, agent\)"):
        play(lambda **_: Spaceless(""), "env", monkeypatch)


class Reusing(gymnasium.Env[Any, Any]):
    """Counts its steps in an array that it returns each time; an episode has two."""

    observation_space = spaces.Dict(count=spaces.Box(0, 9, (1,)), both=spaces.Tuple([spaces.Box(0, 9, (1,))]))
    action_space = spaces.Discrete(2)
    count = np.zeros(1, np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.count[:] = 0
        return self.see(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self.see(), 0.0, bool(self.count == 2), False, {}

    def see(self) -> Any:
        return {"count": self.count, "both": (self.count,)}


class ReusingPair(Pair):
    """Does so for two agents that act together."""

    def __init__(self) -> None:
        self.count = np.zeros(1, np.float32)
        super().__init__(self.see)

    def see(self, _: Any, seen: Any, *parts: Any) -> Any:
        self.count[:] = self.steps
        return dict.fromkeys(seen, self.count), *parts


class ReusingTurns(Turns):
    """Does so for two agents that act in turn."""

    def __init__(self) -> None:
        self.count = np.zeros(1, np.float32)
        super().__init__("")

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 9, (1,))

    def observe(self, agent: str) -> Any:
        self.count[:] = self.turns
        return self.count


def test_last_observation_is_kept_where_the_first_one_after_it_is_written_to_the_same_array(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for form, made in (("parallel_env", ReusingPair), ("env", ReusingTurns)):
        module = ModuleType(form)
        setattr(module, form, lambda made=made, **_: made())
        monkeypatch.setitem(__import__("sys").modules, form, module)
    for game in (GymnasiumGame("a", [Reusing()]), make_pettingzoo("parallel_env"), make_pettingzoo("env")):
        (report,) = game.reset({}, 0)
        name = report.behavior
        for _ in range(2):
            assert report.decisions is not None
            (report,) = game.step(chosen(name, *report.decisions.agents))
        assert report.ends is not None
        assert report.decisions is not None
        for ended, begun in zip(report.ends.observations, report.decisions.observations, strict=True):
            assert (set(ended.ravel()), set(begun.ravel())) == ({2.0}, {0.0}), name


def play(make: Any, form: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Plays four steps; returns how many agents decided after each."""
    module = ModuleType("mistaken")
    setattr(module, form, make)
    monkeypatch.setitem(__import__("sys").modules, "mistaken", module)
    game, decided = make_pettingzoo("mistaken"), []
    reports = game.reset({}, 0)
    for _ in range(4):
        reports = game.step(chosen("mistaken?team=0", *(reports[0].decisions.agents if reports[0].decisions else ())))
        decided.append(sum(len(report.decisions.agents) for report in reports if report.decisions is not None))
    return decided


# ---------------------------------------------------------------- errors that it raises


class Broken(Returns):
    """Fails in a library that its reset calls."""

    def reset(self, **_: Any) -> Any:
        return np.reshape(np.zeros(3), (2, 2))


def test_a_traceback_begins_in_the_code_of_the_author_and_ends_with_its_place() -> None:
    with pytest.raises(ValueError, match="cannot reshape") as caught:
        GymnasiumGame("a", [Broken(None)]).reset({}, 0)
    caught.value.__traceback__ = caught.tb.tb_next  # without this test, whose code is the author's here
    head, first, *_, last = traceback_of(caught.value).splitlines()
    assert head == "Traceback (most recent call last):"
    assert f'"{__file__}", line' in first
    assert first.endswith("in reset")
    assert last.startswith("ValueError: cannot reshape")
    assert f"({__file__}:" in last


def test_an_error_of_several_lines_is_whole_in_the_last_line_of_its_traceback() -> None:
    """A run shows that line only."""
    with pytest.raises(ValueError, match="first") as caught:
        raise ValueError("first\nsecond")
    assert traceback_of(caught.value).splitlines()[-1].startswith("ValueError: first second (")


def test_last_line_of_a_traceback_holds_the_beginning_of_a_long_error() -> None:
    with pytest.raises(ValueError, match="x") as caught:
        raise ValueError("x" * 10**6)
    last = traceback_of(caught.value).splitlines()[-1]
    assert len(last) < 3000
    assert f"x [998,012 more characters] ({__file__}:" in last
    assert described(caught.value).endswith("x [998,000 more characters]")


@pytest.mark.parametrize("is_group", [False, True])
def test_the_last_line_of_a_traceback_names_the_error_of_a_group_and_one_with_notes(is_group: bool) -> None:
    first = ValueError("closed\u2028early")
    first.add_note("a note")
    with pytest.raises((ValueError, ExceptionGroup)) as caught:
        raise ExceptionGroup("both", [ExceptionGroup("one", [first]), KeyError()]) if is_group else first
    *whole, last = traceback_of(caught.value).splitlines()
    assert last.startswith(f"ValueError: closed early ({__file__}:")
    assert any("a note" in line for line in whole)


def test_the_traceback_of_an_error_of_sparring_is_whole() -> None:
    with pytest.raises(AttributeError) as caught:
        read_wrappers(None)  # type: ignore[arg-type]
    caught.value.__traceback__ = caught.tb.tb_next
    assert "making.py" in traceback_of(caught.value)


@pytest.mark.parametrize("value", [[False], np.array([False]), np.array(0.0), np.False_, 0])
def test_what_holds_one_false_value_ends_no_episode(value: Any) -> None:
    """A list of one element would be true, whatever it holds."""
    assert flag(value, "terminated", 0) is False


def test_values_beyond_the_bounds_of_their_space_are_noted_once(capsys: pytest.CaptureFixture[str]) -> None:
    bounded, integers = (
        spaces.Box(np.array([0, -np.inf], np.float32), np.array([4, np.inf], np.float32)),
        spaces.Box(0, 9, (1,), np.int64),
    )
    observations = Observations(spaces.Dict(place=bounded, count=integers, many=spaces.MultiBinary(2)))
    for place, count in (([4.00001, 900], [9]), ([-0.5, 900], [9]), ([5.0, 900], [9]), ([0.0, 900], [12])):
        observations.rows([{"place": place, "count": count, "many": [0, 1]}])
    assert capsys.readouterr().err.splitlines() == [
        f"notice: {name} has values from {values}, beyond the bounds of its space; does the environment clip them, or "
        "is the space another one?"
        for name, values in (("'place'", "-0.5 to 900"), ("'count'", "12 to 12"))
    ]


def test_a_vector_of_another_shape_is_refused_though_it_has_as_many_numbers() -> None:
    """Its numbers would have other places than those of the space; dimensions of 1 move none."""
    observations = Observations(spaces.Box(0, 1, (2, 3)))
    (found,) = observations.rows([np.arange(6.0).reshape(1, 2, 3, 1)])
    assert found.tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]
    for wrong in (np.zeros((3, 2)), np.zeros(6)):
        with pytest.raises(SpecError, match=r"as observation 'observation'; expected a value of its space"):
            observations.rows([wrong])
