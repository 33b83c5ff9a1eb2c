"""Reports of the Gymnasium bridge equal what the environments return."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from sparring.pipeline.bridges.actions import Actions, forbidden_choices
from sparring.pipeline.bridges.gymnasium import GymnasiumGame, NativeGame, make_gymnasium
from sparring.pipeline.bridges.observations import Observations
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.messages.simulator import BehaviorActions, BehaviorReport, Decisions
from sparring.pipeline.specs import ActionSpec, SpecError


def act(report: BehaviorReport, discrete: Any = (), continuous: Any = ()) -> Mapping[str, BehaviorActions]:
    """Returns actions [n, k] for all decisions of a report."""
    decisions = report.decisions
    assert decisions is not None
    n = len(decisions.agents)
    entry = BehaviorActions(
        behavior=report.behavior,
        agents=decisions.agents,
        continuous=np.array(continuous, np.float32).reshape(n, -1 if len(continuous) else 0),
        discrete=np.array(discrete, np.int32).reshape(n, -1 if len(discrete) else 0),
    )
    return {report.behavior: entry}


def only(reports: Any) -> BehaviorReport:
    (report,) = reports
    return report


def observed(rows: Any) -> np.ndarray[Any, Any]:
    return rows.observations[0]


def test_each_area_equals_the_bare_environment_with_its_seed() -> None:
    areas, random = 3, np.random.default_rng(0)
    game = make_gymnasium("CartPole-v1", areas)
    bare = [gymnasium.make("CartPole-v1") for _ in range(areas)]
    report = only(game.reset({}, 7))
    np.testing.assert_array_equal(observed(report.decisions), [env.reset(seed=7 + i)[0] for i, env in enumerate(bare)])
    for _ in range(150):
        choices = random.integers(0, 2, areas)
        report = only(game.step(act(report, choices)))
        ended = 0
        for area, env in enumerate(bare):
            observation, reward, terminated, truncated, _ = env.step(int(choices[area]))
            if terminated or truncated:
                assert report.ends is not None
                assert report.ends.agents[ended] == area
                assert report.ends.rewards[ended] == reward
                assert report.ends.interrupted[ended] == (not terminated)
                np.testing.assert_array_equal(observed(report.ends)[ended], observation)
                ended, reward = ended + 1, 0.0
                observation, _ = env.reset()
            np.testing.assert_array_equal(observed(report.decisions)[area], observation)
            assert report.decisions is not None
            assert report.decisions.rewards[area] == reward
        assert ended == (0 if report.ends is None else len(report.ends.agents))


def test_the_native_form_reports_the_same_episodes_as_the_bare_vector_environment() -> None:
    """An area that ends has no decision in that frame and restarts in the next."""
    areas, random = 8, np.random.default_rng(0)
    game = make_gymnasium("CartPole-v1", areas)
    assert isinstance(game, NativeGame)
    bare = gymnasium.make_vec("CartPole-v1", areas, vectorization_mode="vector_entry_point")
    report = only(game.reset({}, 3))
    np.testing.assert_array_equal(observed(report.decisions), bare.reset(seed=3)[0])
    ended = 0
    for _ in range(100):
        assert report.decisions is not None
        choices = random.integers(0, 2, len(report.decisions.agents))
        full = np.zeros(areas, np.int64)
        full[report.decisions.agents] = choices
        report = only(game.step(act(report, choices)))
        observations, rewards, terminated, truncated, _ = bare.step(full)
        over = terminated | truncated
        np.testing.assert_array_equal(report.decisions.agents, np.flatnonzero(~over))
        np.testing.assert_array_equal(observed(report.decisions), observations[~over])
        np.testing.assert_array_equal(report.decisions.rewards, rewards[~over])
        if over.any():
            assert report.ends is not None
            np.testing.assert_array_equal(report.ends.agents, np.flatnonzero(over))
            np.testing.assert_array_equal(observed(report.ends), observations[over])
            ended += len(report.ends.agents)
    assert ended > areas


@pytest.mark.parametrize("vectorization", ["sync", "native"])
def test_truncation_interrupts_and_a_report_always_holds_decisions(vectorization: str) -> None:
    game = make_gymnasium("CartPole-v1", 2, vectorization=vectorization, max_episode_steps=3)
    report = only(game.reset({}, 0))
    for frame in range(1, 10):
        report = only(game.step(act(report, [0, 1])))
        assert report.decisions is not None
        assert report.decisions.agents.tolist() == [0, 1]
        assert (report.ends is not None) == (frame % 3 == 0)
        if report.ends is not None:
            assert report.ends.interrupted.tolist() == [True, True]
            assert report.ends.rewards.tolist() == [1.0, 1.0]
            assert report.decisions.rewards.tolist() == [0.0, 0.0]
            assert np.abs(observed(report.decisions)).max() <= 0.05


@pytest.mark.parametrize("vectorization", ["sync", "native"])
def test_the_same_seed_gives_the_same_first_observations(vectorization: str) -> None:
    game = make_gymnasium("CartPole-v1", 2, vectorization=vectorization)
    first = observed(only(game.reset({}, 5)).decisions).copy()
    other = observed(only(game.reset({}, 6)).decisions).copy()
    np.testing.assert_array_equal(observed(only(game.reset({}, 5)).decisions), first)
    assert not np.array_equal(other, first)
    game.close()


def test_parameters_reach_the_environment_as_reset_options_in_every_episode() -> None:
    game = make_gymnasium("CartPole-v1", 1, max_episode_steps=2)
    report = only(game.reset({"low": 0.01, "high": 0.02}, 1))
    for _ in range(6):
        assert (
            (observed(report.decisions) >= 0.01) & (observed(report.decisions) <= 0.02)
        ).all() or report.ends is None
        report = only(game.step(act(report, [0])))
    assert report.ends is not None


def test_auto_vectorization_is_native_for_eight_areas_or_more_without_options() -> None:
    assert isinstance(make_gymnasium("CartPole-v1", 7), GymnasiumGame)
    assert isinstance(make_gymnasium("CartPole-v1", 8, vectorization="sync"), GymnasiumGame)
    assert isinstance(make_gymnasium("CartPole-v1", 8, sutton_barto_reward=True), GymnasiumGame)
    assert isinstance(make_gymnasium("MountainCar-v0", 8), GymnasiumGame)


def test_the_behavior_has_the_name_of_the_environment_or_the_given_one() -> None:
    assert list(make_gymnasium("CartPole-v1").behaviors()) == ["CartPole?team=0"]
    assert list(make_gymnasium("CartPole-v1", behavior="Pole").behaviors()) == ["Pole?team=0"]


def test_masks_in_the_infos_forbid_choices() -> None:
    game = make_gymnasium("Taxi-v4" if "Taxi-v4" in gymnasium.registry else "Taxi-v3", 2)
    random = np.random.default_rng(0)
    report = only(game.reset({}, 1))
    for _ in range(30):
        decisions = report.decisions
        assert isinstance(decisions, Decisions)
        assert decisions.masks is not None
        assert decisions.masks.shape == (2, 6)
        assert decisions.masks.any()
        assert not decisions.masks.all(axis=1).any()
        choices = [int(random.choice(np.flatnonzero(~mask))) for mask in decisions.masks]
        before = observed(decisions).argmax(axis=1)
        report = only(game.step(act(report, choices)))
        assert (observed(report.decisions).argmax(axis=1) != before).all(), "a legal move in Taxi changes the state"


def test_continuous_actions_are_rescaled_to_the_bounds() -> None:
    game = make_gymnasium("Pendulum-v1", 2)
    assert game.behaviors()["Pendulum?team=0"].actions == ActionSpec(continuous=1)
    report = only(game.reset({}, 0))
    bare = gymnasium.make("Pendulum-v1")
    bare.reset(seed=0)
    report = only(game.step(act(report, continuous=[0.5, -1.0])))
    np.testing.assert_allclose(observed(report.decisions)[0], bare.step(np.array([1.0], np.float32))[0])


# ---------------------------------------------------------------- spaces


BOX = spaces.Box(0, 255, (10, 12, 3), np.uint8)
OBSERVATIONS: dict[str, tuple[spaces.Space[Any], list[tuple[str, tuple[int, ...], str, str]]]] = {
    "vector": (spaces.Box(-1, 1, (4,)), [("observation", (4,), "float32", "vector")]),
    "doubles": (spaces.Box(-1, 1, (4,), np.float64), [("observation", (4,), "float32", "vector")]),
    "bytes": (spaces.Box(0, 255, (128,), np.uint8), [("observation", (128,), "float32", "vector")]),
    "matrix": (spaces.Box(-1, 1, (3, 2)), [("observation", (6,), "float32", "vector")]),
    "scalar": (spaces.Box(-1, 1, ()), [("observation", (1,), "float32", "vector")]),
    "board": (spaces.Box(0, 1, (3, 3, 2), np.int8), [("observation", (18,), "float32", "vector")]),
    "image": (BOX, [("observation", (3, 10, 12), "uint8", "image")]),
    "channels first": (spaces.Box(0, 1, (3, 10, 12)), [("observation", (3, 10, 12), "float32", "image")]),
    "many channels": (spaces.Box(0, 1, (7, 7, 20)), [("observation", (20, 7, 7), "float32", "image")]),
    "many channels first": (spaces.Box(0, 1, (20, 7, 7)), [("observation", (20, 7, 7), "float32", "image")]),
    "discrete": (spaces.Discrete(5, start=3), [("observation", (5,), "float32", "vector")]),
    "multi-discrete": (spaces.MultiDiscrete([3, 2]), [("observation", (5,), "float32", "vector")]),
    "multi-binary": (spaces.MultiBinary(6), [("observation", (6,), "float32", "vector")]),
    "nested": (
        spaces.Dict({"eye": BOX, "body": spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1, (3,))])}),
        [
            ("body/0", (2,), "float32", "vector"),
            ("body/1", (3,), "float32", "vector"),
            ("eye", (3, 10, 12), "uint8", "image"),
        ],
    ),
}


@pytest.mark.parametrize(("space", "expected"), OBSERVATIONS.values(), ids=OBSERVATIONS.keys())
def test_observation_spaces_become_specs_and_columns(space: spaces.Space[Any], expected: Any) -> None:
    reader = Observations(space)
    found = [(spec.name, spec.shape, spec.dtype, spec.kind) for spec in reader.specs]
    assert sorted(found) == sorted(expected)
    space.seed(0)
    samples = [space.sample() for _ in range(3)]
    for spec, column in zip(reader.specs, reader.rows(samples), strict=True):
        assert column.shape == (3, *spec.shape)
        assert column.dtype == spec.dtype
    batched = gymnasium.vector.utils.concatenate(space, samples, gymnasium.vector.utils.create_empty_array(space, 3))
    for row_column, batch_column in zip(reader.rows(samples), reader.batch(batched), strict=True):
        np.testing.assert_array_equal(row_column, batch_column)


def test_one_hot_and_channel_order_hold_the_values() -> None:
    np.testing.assert_array_equal(Observations(spaces.Discrete(3, start=-1)).rows([-1, 1])[0], [[1, 0, 0], [0, 0, 1]])
    multi = Observations(spaces.MultiDiscrete([2, 3], start=[1, 5]))
    np.testing.assert_array_equal(multi.rows([np.array([2, 5])])[0], [[0, 1, 1, 0, 0]])
    image = np.arange(10 * 12 * 3, dtype=np.uint8).reshape(10, 12, 3)
    column = Observations(BOX).rows([image])[0]
    np.testing.assert_array_equal(column[0, 2], image[:, :, 2])
    assert column.flags.c_contiguous


ACTIONS: dict[str, tuple[spaces.Space[Any], ActionSpec]] = {
    "discrete": (spaces.Discrete(4, start=2), ActionSpec(discrete=(4,))),
    "multi-discrete": (spaces.MultiDiscrete([3, 2], start=[1, -1]), ActionSpec(discrete=(3, 2))),
    "multi-discrete of two dimensions": (spaces.MultiDiscrete([[3, 2], [2, 2]]), ActionSpec(discrete=(3, 2, 2, 2))),
    "multi-binary": (spaces.MultiBinary(3), ActionSpec(discrete=(2, 2, 2))),
    "box": (spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, 10.0]), dtype=np.float64), ActionSpec(continuous=2)),
    "box of two dimensions": (spaces.Box(-0.1, 0.3, (2, 3)), ActionSpec(continuous=6)),
}


@pytest.mark.parametrize(("space", "expected"), ACTIONS.values(), ids=ACTIONS.keys())
def test_every_action_of_the_spec_is_in_the_space(space: spaces.Space[Any], expected: ActionSpec) -> None:
    writer = Actions(space)
    assert writer.spec == expected
    for extreme in (0, 1):
        continuous = np.full((2, expected.continuous), 2 * extreme - 1, np.float32)
        discrete = np.array([[extreme * (size - 1) for size in expected.discrete]] * 2, np.int32).reshape(2, -1)
        assert all(space.contains(value) for value in writer.rows(continuous, discrete))
    if isinstance(space, spaces.Box):
        np.testing.assert_allclose(writer.rows(continuous, discrete)[0], space.high)
        np.testing.assert_allclose(writer.rows(-9 * continuous, discrete)[0], space.low)


class CustomBox(spaces.Box):
    """A subclass of Box in user code."""


def test_subclasses_of_spaces_are_read_as_their_base() -> None:
    assert Observations(CustomBox(-1, 1, (2,))).specs[0].shape == (2,)


@pytest.mark.parametrize(
    "space", [spaces.Text(5), spaces.Sequence(spaces.Discrete(2)), spaces.Box(-1, 1, (2, 2, 2, 2))], ids=str
)
def test_an_unsupported_observation_space_is_refused(space: spaces.Space[Any]) -> None:
    with pytest.raises(SpecError, match="wrap the environment"):
        Observations(spaces.Dict({"odd": space}))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-np.inf, 1, (2,)),
        spaces.Box(0, 5, (2,), np.int64),
        spaces.Tuple([spaces.Discrete(2)]),
        spaces.Text(5),
    ],
    ids=["unbounded", "integers", "tuple", "text"],
)
def test_an_unsupported_action_space_is_refused(space: spaces.Space[Any]) -> None:
    with pytest.raises(SpecError, match="expected"):
        Actions(space)


def test_masks_of_branches_are_joined_and_must_have_the_right_size() -> None:
    spec = ActionSpec(discrete=(3, 2))
    one = (np.array([1, 0, 1], np.int8), np.array([0, 1], np.int8))
    expected = [[False, True, False, True, False], [False] * 5]
    np.testing.assert_array_equal(forbidden_choices([one, None], spec), expected)
    assert forbidden_choices([None, None], spec) is None
    with pytest.raises(SpecError, match="correct the mask"):
        forbidden_choices([np.ones(4)], spec)


# ---------------------------------------------------------------- invalid input


@pytest.mark.parametrize(
    "wrong",
    [
        {"env_id": "NoSuchGame-v0"},
        {"env_id": "CartPole-v1", "gravity_of_moon": True},
        {"env_id": "CartPole-v1", "areas": 0},
        {"env_id": "CartPole-v1", "vectorization": "quantum"},
        {"env_id": "MountainCar-v0", "vectorization": "native"},
    ],
    ids=str,
)
def test_an_environment_that_gymnasium_cannot_make_is_refused_with_a_remedy(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"got .*; expected .*; "):
        make_gymnasium(**wrong)


def test_the_bridges_import_their_packages_only_when_used() -> None:
    program = (
        "import sys; from sparring.pipeline.bridges import gymnasium, pettingzoo; "
        "from sparring.pipeline.compliance import rules\n"
        "assert not {'gymnasium', 'pettingzoo', 'torch', 'zmq', 'anyio', 'pydantic', 'structlog'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


def test_a_missing_package_is_reported_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(SettingsError, match=r"pip install 'gymnasium"):
        make_gymnasium("CartPole-v1")
