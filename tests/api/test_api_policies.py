"""`sparring.load` acts as the trained network does, from a checkpoint, an ONNX file, and in environments' own terms."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import sparring
from sparring.pipeline.bridges.actions import Actions
from sparring.pipeline.bridges.explain import NotFinite
from sparring.pipeline.bridges.observations import Observations
from sparring.pipeline.errors import SettingsError
from sparring.pipeline.export import layout
from sparring.pipeline.export.layout import random_inputs, trained_policy
from sparring.pipeline.export.onnx import onnx_model
from sparring.pipeline.learning.checkpoints import CheckpointFolder
from sparring.pipeline.specs import SpecError
from tests.learning.export_helpers import KINDS, MEMORY, Kind, checkpoint_of

ROWS = 7


def saved(folder: Path, kind: Kind, name: str = "Goal") -> Path:
    """Saves a checkpoint in the folder of a run, which is returned."""
    CheckpointFolder(folder, name).save(checkpoint_of(kind, name=name), 5)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_policy_acts_as_its_network_and_its_onnx_file_do(kind: str, tmp_path: Path) -> None:
    """Two decisions in succession, the second with the memory of the first."""
    trained = trained_policy(checkpoint_of(KINDS[kind]))
    given, observations = random_inputs(trained, ROWS, np.random.default_rng(3))
    (tmp_path / "goal.onnx").write_bytes(onnx_model(trained))
    policies = [sparring.load(saved(tmp_path / "run", KINDS[kind])), sparring.load(tmp_path / "goal.onnx")]
    named = {one.name: column for one, column in zip(trained.spec.observations, observations, strict=True)}
    allowed = given.get(layout.MASKS)
    memory = given[layout.MEMORY_IN][:, 0] if trained.memory else None
    for policy, tolerance in zip(policies, (1e-6, 1e-6), strict=True):
        assert (policy.behavior, policy.spec) == ("Goal", trained.spec)
        before = memory
        for _ in range(2):
            inputs = dict(given) | ({} if before is None else {layout.MEMORY_IN: before[:, None]})
            expected, logits = layout._outputs(trained, inputs, observations)
            actions, after = policy.act(named, allowed, deterministic=True, memory=before)
            if trained.spec.actions.continuous:
                np.testing.assert_allclose(actions.continuous, expected[layout.LIKELIEST], rtol=0, atol=tolerance)
            for branch, part in enumerate(layout._branches(trained, logits)):
                legal = layout._branches(trained, allowed)[branch] > 0
                assert (actions.discrete[:, branch] == np.where(legal, part, -np.inf).argmax(1)).all()
            if not trained.memory:
                assert after is None
                break
            np.testing.assert_allclose(after, expected[layout.MEMORY_OUT][:, 0], rtol=0, atol=tolerance)
            before = after


def test_observations_of_one_agent_or_several_by_name_or_order(tmp_path: Path) -> None:
    policy = sparring.load(saved(tmp_path, KINDS["vectors-normalized"]))
    random = np.random.default_rng(1)
    columns = [random.standard_normal((3, *one.shape), np.float32) for one in policy.spec.observations]
    several = policy.act(columns, deterministic=True).actions
    names = [one.name for one in policy.spec.observations]
    for form in (dict(zip(names, columns, strict=True)), tuple(columns), [one.tolist() for one in columns]):
        assert (policy.act(form, deterministic=True).actions.continuous == several.continuous).all()
    one = policy.act([column[1] for column in columns], [1, 0, 0, 1, 0, 1], deterministic=True).actions
    np.testing.assert_allclose(one.continuous, several.continuous[1], atol=1e-6)
    assert one.discrete.tolist() == [0, 0, 1]


def test_sampled_actions_follow_the_seed(tmp_path: Path) -> None:
    saved(tmp_path, KINDS["vector"])
    first, again, other = (sparring.load(tmp_path, seed=seed) for seed in (1, 1, 2))
    rows = np.zeros((4, 5), np.float32)
    chosen = [one.act(rows).actions.continuous for one in (first, again, other)]
    assert (chosen[0] == chosen[1]).all()
    assert (chosen[0] != chosen[2]).all()
    assert (np.abs(chosen[0]) <= 1).all()


@pytest.mark.parametrize(
    ("observations", "masks", "memory", "message"),
    [
        (np.zeros((2, 4)), None, None, r"got arrays of the shapes \[\(2, 4\)\]; expected .* vector \(5,\) float32"),
        ({"other": np.zeros(5)}, None, None, r"got observations \['other'\]"),
        ([np.zeros((2, 5)), np.zeros((2, 5))], None, None, "got arrays of the shapes"),
        (
            np.full((2, 5), np.nan),
            None,
            None,
            r"with 10 that are NaN or infinite as observation 'vector'",
        ),
        (np.zeros((2, 5)), np.ones((2, 4)), None, "an action mask of 4 entries"),
        (None, None, None, r"got None \(NoneType\) as vector"),
        ("abcd", None, None, r"got 'abcd' \(str\) as vector"),
        (["1", "2", "3", "4", "5"], None, None, r"got a list of 5 .* as vector \(values of <U1\)"),
        (np.zeros((2, 5), complex), None, None, r"as vector \(values of complex128\)"),
        (np.ma.masked_array(np.zeros((2, 5)), True), None, None, r"as vector \(values that are masked\)"),
        (np.zeros((2, 5)), np.array(None), None, r"got an array \(\) of object as masks; expected those of each agent"),
        (np.zeros((2, 5)), 5, None, r"got 5 \(int\) as masks; expected those of each agent"),
        (np.zeros((2, 5)), None, "x", r"got 'x' \(str\) as memory"),
        (np.zeros((2, 5)), None, np.zeros((1, 12)), r"a memory of the shape \(1, 12\); expected \(2, 12\)"),
    ],
)
def test_values_of_another_form_are_refused(
    observations: Any, masks: Any, memory: Any, message: str, tmp_path: Path
) -> None:
    policy = sparring.load(saved(tmp_path, KINDS["memory"]))
    with pytest.raises((SettingsError, SpecError, NotFinite), match=message):
        policy.act(observations, masks, memory=memory)
    with pytest.raises(SettingsError, match="got 'no' as deterministic; expected True or False"):
        policy.act(np.zeros((2, 5)), deterministic="no")  # type: ignore[arg-type]


# ---------------------------------------------------------------- which policy


def test_newest_checkpoint_of_a_run_is_loaded_by_path_or_id(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "run", "Goal")
    for trained in (900, 12_000):
        folder.save(checkpoint_of(KINDS["vector"] if trained > 900 else KINDS["image"], trained=trained), 5)
    shutil.copytree(folder.path / "checkpoint-000000012000", folder.path / "checkpoint-000000013000.bak")
    for policy in (sparring.load(tmp_path / "run"), sparring.load("run", results_dir=tmp_path)):
        assert policy.spec.observations == KINDS["vector"][0]
    older = sparring.load(tmp_path / "run" / "Goal" / "checkpoint-000000000900")
    assert older.spec.observations == KINDS["image"][0]


def test_run_with_several_behaviors_needs_the_name_of_one(tmp_path: Path) -> None:
    saved(saved(tmp_path, KINDS["vector"]), KINDS["image"], "Other")
    assert sparring.load(tmp_path, "Other").spec.observations == KINDS["image"][0]
    with pytest.raises(SettingsError, match="has checkpoints of Goal, Other; expected one of these as behavior"):
        sparring.load(tmp_path)
    with pytest.raises(SettingsError, match="correct the behavior"):
        sparring.load(tmp_path, "Third")
    (tmp_path / "results" / "known").mkdir(parents=True)
    with pytest.raises(SettingsError, match="has checkpoints of no behavior; expected a run or a checkpoint"):
        sparring.load(tmp_path / "results")
    with pytest.raises(SettingsError, match=r"got run 'nowhere'; expected a folder, or one of the runs in .*: known;"):
        sparring.load("nowhere", results_dir=tmp_path / "results")
    with pytest.raises(SettingsError, match=r"got .*nowhere.onnx, which is no file"):
        sparring.load("nowhere.onnx", results_dir=tmp_path / "results")
    with pytest.raises(SettingsError, match=f"got run '{'a' * 300}'; expected a folder, or one"):
        sparring.load("a" * 300, results_dir=tmp_path / "results")  # no file can have such a name


def test_foreign_or_damaged_onnx_file_is_refused(tmp_path: Path) -> None:
    import onnx

    path = tmp_path / "model.onnx"
    path.write_bytes(b"not a model")
    with pytest.raises(SettingsError, match="which cannot be loaded"):
        sparring.load(path)
    model = onnx.load_from_string(onnx_model(trained_policy(checkpoint_of(KINDS["vector"]))))
    del model.metadata_props[:]
    path.write_bytes(model.SerializeToString())
    with pytest.raises(SettingsError, match="without the description of a behavior"):
        sparring.load(path)


# ---------------------------------------------------------------- environments

SEEN = spaces.Dict(
    {
        "card": spaces.Discrete(4, start=1),
        "eye": spaces.Box(0, 255, (20, 24, 3), np.uint8),
        "place": spaces.Box(-1, 1, (2, 2), np.float32),
    }
)
MOVES = spaces.Box(np.float32([0, -5]), np.float32([10, 5]))


def trained_in(folder: Path, seen: spaces.Space[Any], moves: spaces.Space[Any], **network: Any) -> Path:
    return saved(folder, (Observations(seen).specs, Actions(moves).spec, network))


class Room(gymnasium.Env[Any, Any]):
    observation_space, action_space = SEEN, MOVES

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(np.asarray(action, np.float32)), action
        return self.observation_space.sample(), 0.0, False, False, {}


def test_environment_of_one_agent_is_played_in_its_own_terms(tmp_path: Path) -> None:
    run, env = trained_in(tmp_path, SEEN, MOVES, memory=MEMORY), Room()
    policy, columns = sparring.load(run, env=env), sparring.load(run)
    seen, memory = env.reset(seed=1)[0], None
    other: Any = None
    for _ in range(3):
        action, memory = policy.act(seen, deterministic=True, memory=memory)
        plain, other = columns.act(Observations(SEEN).rows([seen]), deterministic=True, memory=other)
        expected = MOVES.low + (plain.continuous[0] + 1) / 2 * (MOVES.high - MOVES.low)
        np.testing.assert_allclose(action, expected, atol=1e-6)
        seen = env.step(action)[0]


def test_vector_environment_is_played_at_once(tmp_path: Path) -> None:
    run = trained_in(tmp_path, SEEN, MOVES)
    envs = gymnasium.vector.SyncVectorEnv([Room] * 3)
    policy = sparring.load(run, env=envs)
    seen = envs.reset(seed=1)[0]
    actions, _ = policy.act(seen, deterministic=True)
    assert actions.shape == (3, 2)
    with pytest.raises(SettingsError, match="got masks of 1 agents; expected 3"):
        policy.act(seen, [[1, 0]])
    with pytest.raises(SettingsError, match="got 5 as env; expected an environment"):
        sparring.load(run, env=5)
    alone = sparring.load(run, env=Room())
    for at in range(3):
        single = {name: column[at] for name, column in seen.items()}
        np.testing.assert_allclose(alone.act(single, deterministic=True).actions, actions[at], atol=1e-5)


def test_agents_are_played_by_name_with_their_masks(tmp_path: Path) -> None:
    """As in the card games of PettingZoo: the legal moves are in the observation."""
    cards = spaces.Box(0, 1, (6,), np.int8)
    seen = spaces.Dict({"observation": cards, "action_mask": spaces.Box(0, 1, (4,), np.int8)})
    moves = spaces.Discrete(4)
    env = SimpleNamespace(
        possible_agents=["one", "two"], observation_space=lambda _: seen, action_space=lambda _: moves
    )
    policy = sparring.load(trained_in(tmp_path, cards, moves), env=env)
    hands = {"one": (np.ones(6, np.int8), 2), "two": (np.zeros(6, np.int8), 3)}
    given = {
        name: {"observation": hand, "action_mask": np.eye(4, dtype=np.int8)[legal]}
        for name, (hand, legal) in hands.items()
    }
    assert policy.act(given).actions == {"one": 2, "two": 3}
    assert policy.act({"two": given["two"]}).actions == {"two": 3}
    assert policy.act(given["one"]).actions == 2
    plain = {name: one["observation"] for name, one in given.items()}
    assert policy.act(plain, {"one": [1, 0, 0, 0]}, deterministic=True).actions["one"] == 0
    with pytest.raises(SettingsError, match="those of agents by their names"):
        policy.act(plain, [[1, 0, 0, 0]] * 2)


def test_policy_plays_the_agents_of_its_own_kind(tmp_path: Path) -> None:
    """Others of the environment observe something else."""
    kinds = {"rabbit": spaces.Box(-1, 1, (2,)), "hunter": spaces.Box(-1, 1, (5,))}
    env = SimpleNamespace(possible_agents=list(kinds), observation_space=kinds.get, action_space=lambda _: MOVES)
    policy = sparring.load(trained_in(tmp_path, kinds["hunter"], MOVES), env=env)
    assert policy.act({"hunter": np.zeros(5, np.float32)}).actions["hunter"].shape == (2,)
    with pytest.raises(SpecError):
        policy.act({"rabbit": np.zeros(2, np.float32)})


def test_environment_of_another_form_is_refused(tmp_path: Path) -> None:
    run = trained_in(tmp_path, spaces.Box(-1, 1, (3,)), MOVES)
    with pytest.raises(SettingsError, match=r"got an environment with obs.*; give the environment in which Goal"):
        sparring.load(run, env=Room())
