"""Exported models compute the same as the networks, in the layout that a game expects."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import zipfile

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from sparring.pipeline.errors import CheckpointError
from sparring.pipeline.export import checkpoints as export_checkpoints
from sparring.pipeline.export import onnx as export_onnx
from sparring.pipeline.export.checkpoints import SUFFIXES, export, load_onnx
from sparring.pipeline.export.layout import ExportError, random_inputs, trained_policy
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.networks.arrays import to_environment
from sparring.pipeline.networks.device import load_arrays
from sparring.pipeline.networks.perceptron import FUNCTIONS
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import read_spec
from tests.learning.export_helpers import HYBRID, KINDS, MEMORY, VECTOR, checkpoint_of

# Operators documented for Barracuda 2.0, the oldest engine that loads this layout; later engines have all of them.
BARRACUDA = """
Abs Add And ArgMax ArgMin AveragePool BatchNormalization Cast Ceil Clip Concat Constant ConstantOfShape Conv
ConvTranspose Div Elu Equal Exp Expand Flatten Floor Gather Gemm Greater Identity LeakyRelu Less Log LogSoftmax MatMul
Max MaxPool Mean Min Mul Multinomial Neg Not Or Pad Pow RandomNormal RandomNormalLike RandomUniform RandomUniformLike
Reciprocal ReduceMax ReduceMean ReduceMin ReduceSum Relu Reshape Resize Shape Sigmoid Slice Softmax Split Sqrt Squeeze
Sub Sum Tanh Tile TopK Transpose Unsqueeze Where
"""
SAMPLES = 20_000
# Kinds that use every operator and every kind of network; the others differ in sizes and combinations only.
SCRIPTED = [
    "vectors-normalized", "one-layer", "goal-hyper", "limit", "tanh-goal-memory", "bytes-and-image", "nature_cnn",
    "resnet", "match3", "everything",
]  # fmt: skip


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Returns checkpoint, file content and model of a kind, exported once."""
    folder = tmp_path_factory.mktemp("exports")

    @functools.cache
    def of(name: str, shared: bool = False):
        path = folder / f"{name}-{shared}.onnx"
        checkpoint = checkpoint_of(KINDS[name], shared=shared)
        done = export(checkpoint, [path])
        assert done.difference <= 1e-4
        assert done.size == path.stat().st_size
        content = path.read_bytes()
        return checkpoint, onnx.load_from_string(content), load_onnx(content)

    return of


def acting(checkpoint):
    """Returns the policy as stepping uses it."""
    description = checkpoint.description
    network = NetworkSettings.model_validate_json(json.dumps(description["network_settings"]))
    values = len(description["signals"]) if description["shared_critic"] else 0
    actor = Actor(read_spec(description["spec"]), network, values=values)
    load_arrays(actor, {key[6:]: value for key, value in checkpoint.weights.items() if key.startswith("actor.")})
    return actor.frozen()


def agrees(checkpoint, model, rows: int, seed: int) -> None:
    """Checks that most likely actions and memory of a model equal those of the policy in stepping."""
    policy = trained_policy(checkpoint)
    given_, observations = random_inputs(policy, rows, np.random.default_rng(seed))
    got = model(given_)
    masks = given_["action_masks"] < 0.5 if policy.spec.actions.discrete else None
    carried = given_["recurrent_in"][:, 0].copy() if policy.memory else None
    raw, discrete, _ = acting(checkpoint).act(observations, masks, np.random.default_rng(0), True, carried)
    if policy.spec.actions.continuous:
        executed = to_environment(raw, policy.actor.action_limit)
        np.testing.assert_allclose(got["deterministic_continuous_actions"], executed, atol=1e-4)
    if policy.spec.actions.discrete:
        np.testing.assert_array_equal(got["deterministic_discrete_actions"], discrete)
    if carried is not None:
        np.testing.assert_allclose(got["recurrent_out"][:, 0], carried, atol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_model_equals_the_policy_for_one_agent_and_for_several(exported, name):
    checkpoint, _, model = exported(name)
    agrees(checkpoint, model, 1, 5)
    agrees(checkpoint, model, 7, 6)


@settings(max_examples=20)
@given(rows=st.integers(1, 40), seed=st.integers(0, 2**16))
def test_model_equals_the_policy_for_any_inputs_and_number_of_agents(exported, rows, seed):
    checkpoint, _, model = exported("entities-and-vector")
    agrees(checkpoint, model, rows, seed)


@pytest.mark.parametrize("name", ["vectors-normalized", "goal-hyper", "memory"])
def test_model_does_not_contain_values_of_a_shared_critic(exported, name):
    checkpoint, _, model = exported(name, shared=True)
    agrees(checkpoint, model, 7, 6)


@pytest.mark.parametrize("name", KINDS)
def test_model_uses_only_operators_of_every_unity_engine(exported, name):
    _, model, _ = exported(name)
    assert [one.version for one in model.opset_import] == [9]
    assert {node.op_type for node in model.graph.node} <= set(BARRACUDA.split())


def shapes(values) -> dict:
    return {
        one.name: (
            onnx.TensorProto.DataType.Name(one.type.tensor_type.elem_type),
            [axis.dim_param or axis.dim_value for axis in one.type.tensor_type.shape.dim],
        )
        for one in values
    }


def test_model_of_a_hybrid_policy_with_memory_has_names_and_shapes_of_the_layout(exported):
    _, model, _ = exported("everything")
    assert list(shapes(model.graph.input).items()) == [
        ("obs_0", ("FLOAT", ["batch", 4, 3])),
        ("obs_1", ("FLOAT", ["batch", 3, 36, 40])),
        ("obs_2", ("FLOAT", ["batch", 3])),
        ("obs_3", ("FLOAT", ["batch", 5])),
        ("obs_4", ("FLOAT", ["batch", 1, 20, 24])),
        ("obs_5", ("FLOAT", ["batch", 2, 5])),
        ("obs_6", ("FLOAT", ["batch", 3])),
        ("action_masks", ("FLOAT", ["batch", 6])),
        ("recurrent_in", ("FLOAT", ["batch", 1, 12])),
    ]
    assert list(shapes(model.graph.output).items()) == [
        ("version_number", ("FLOAT", [1])),
        ("memory_size", ("FLOAT", [1])),
        ("continuous_actions", ("FLOAT", ["batch", 2])),
        ("continuous_action_output_shape", ("FLOAT", [1])),
        ("deterministic_continuous_actions", ("FLOAT", ["batch", 2])),
        ("discrete_actions", ("INT64", ["batch", 3])),
        ("discrete_action_output_shape", ("FLOAT", [1, 3])),
        ("deterministic_discrete_actions", ("INT64", ["batch", 3])),
        ("recurrent_out", ("FLOAT", ["batch", 1, 12])),
    ]


def test_model_omits_inputs_and_outputs_that_the_policy_lacks(exported):
    continuous, discrete = exported("vector")[1], exported("one-layer")[1]
    assert list(shapes(continuous.graph.input)) == ["obs_0"]
    assert list(shapes(continuous.graph.output)) == [
        "version_number",
        "memory_size",
        "continuous_actions",
        "continuous_action_output_shape",
        "deterministic_continuous_actions",
    ]
    assert list(shapes(discrete.graph.input)) == ["obs_0", "action_masks"]
    assert list(shapes(discrete.graph.output)) == [
        "version_number",
        "memory_size",
        "discrete_actions",
        "discrete_action_output_shape",
        "deterministic_discrete_actions",
    ]


def test_model_has_the_constants_that_a_game_checks(exported):
    _, model, _ = exported("everything")
    found = {
        node.output[0]: onnx.numpy_helper.to_array(node.attribute[0].t).tolist()
        for node in model.graph.node
        if node.op_type == "Constant"
    }
    assert found == {
        "version_number": [3.0],
        "memory_size": [12.0],
        "continuous_action_output_shape": [2.0],
        "discrete_action_output_shape": [[3.0, 1.0, 2.0]],
    }


def by_hand(checkpoint, rows):
    """Returns means and logits of normalized vectors in float64."""
    weights = {key: value.astype(np.float64) for key, value in checkpoint.weights.items()}
    mean, variance = weights["actor.encoder.normalizer.mean"], weights["actor.encoder.normalizer.variance"]
    hidden = np.clip((rows - mean) / np.sqrt(variance), -5, 5)
    for layer in range(3):
        weight, bias = weights[f"actor.body.layers.{layer}.weight"], weights[f"actor.body.layers.{layer}.bias"]
        hidden = hidden @ weight.T + bias
        if layer < 2:
            hidden = hidden / (1 + np.exp(-hidden))
    return hidden[:, :2], hidden[:, 2:], np.exp(weights["actor.log_sigma"])


def many(seed: int) -> dict:
    """Returns many rows of the same observation."""
    random = np.random.default_rng(seed)
    return {
        "obs_0": np.repeat(random.normal(3, 4, (1, 5)).astype(np.float32), SAMPLES, 0),
        "obs_1": np.repeat(random.normal(3, 4, (1, 3)).astype(np.float32), SAMPLES, 0),
        "action_masks": np.ones((SAMPLES, 6), np.float32),
    }


def test_sampled_continuous_actions_have_the_clipped_normal_distribution(exported):
    """Mean and deviation are within 6 standard errors of those of NumPy samples."""
    checkpoint, _, model = exported("vectors-normalized")
    inputs = many(1)
    got = model(inputs)["continuous_actions"].astype(np.float64)
    means, _, sigma = by_hand(checkpoint, np.concatenate([inputs["obs_0"][:1], inputs["obs_1"][:1]], 1))
    own = np.clip(np.random.default_rng(0).normal(means, sigma, (SAMPLES, 2)), -3, 3) / 3
    error = 6 * own.std(0) * np.sqrt(2 / SAMPLES)
    assert (np.abs(got.mean(0) - own.mean(0)) < error).all()
    assert (np.abs(got.std(0) - own.std(0)) < error).all()
    assert np.abs(got).max() <= 1


def test_choices_have_the_probabilities_of_the_policy_and_are_never_masked(exported):
    checkpoint, _, model = exported("vectors-normalized")
    inputs = many(2)
    _, logits, _ = by_hand(checkpoint, np.concatenate([inputs["obs_0"][:1], inputs["obs_1"][:1]], 1))
    for allowed in ([1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 1], [1, 0, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]):
        inputs["action_masks"][:] = allowed
        got = model(inputs)
        chances = np.where(allowed, np.exp(logits[0] - logits[0].max()), 0.0)
        for branch, (first, last) in enumerate(((0, 3), (3, 4), (4, 6))):
            p = chances[first:last] / chances[first:last].sum()
            frequency = np.bincount(got["discrete_actions"][:, branch], minlength=last - first) / SAMPLES
            assert (frequency[p == 0] == 0).all()
            assert (np.abs(frequency - p) <= 6 * np.sqrt(p * (1 - p) / SAMPLES)).all()
            assert (got["deterministic_discrete_actions"][:, branch] == p.argmax()).all()


def test_byte_image_is_exported_as_floats_from_0_to_1(exported):
    """A game provides pixels / 255 where training used bytes."""
    checkpoint, _, model = exported("fully_connected")
    pixels = np.random.default_rng(0).integers(0, 256, (3, 1, 20, 24), np.uint8)
    raw = acting(checkpoint).act([pixels], None, np.random.default_rng(0), True)[0]
    got = model({"obs_0": pixels.astype(np.float32) / 255})["deterministic_continuous_actions"]
    np.testing.assert_allclose(got, to_environment(raw), atol=1e-5)


def test_memory_continues_from_step_to_step_as_in_stepping(exported):
    checkpoint, _, model = exported("memory")
    policy = acting(checkpoint)
    carried, memory = np.zeros((4, 12), np.float32), np.zeros((4, 1, 12), np.float32)
    random = np.random.default_rng(0)
    for _ in range(20):
        rows = random.standard_normal((4, 5), np.float32)
        raw = policy.act([rows], None, np.random.default_rng(0), True, carried)[0]
        got = model({"obs_0": rows, "action_masks": np.ones((4, 6), np.float32), "recurrent_in": memory})
        memory = got["recurrent_out"]
        np.testing.assert_allclose(got["deterministic_continuous_actions"], to_environment(raw), atol=1e-4)
    np.testing.assert_allclose(memory[:, 0], carried, atol=1e-4)


# ---------------------------------------------------------------- failures


def test_wrong_export_writes_no_file_and_keeps_an_earlier_one(tmp_path, monkeypatch):
    monkeypatch.setattr(export_onnx, "activate", lambda graph, activation, sums: graph.add("Sigmoid", sums))
    earlier = tmp_path / "Goal.onnx"
    earlier.write_bytes(b"earlier")
    with pytest.raises(ExportError, match="deterministic_continuous_actions that differ by"):
        export(checkpoint_of(KINDS["vector"]), [tmp_path / "Goal" / "Goal-1200.onnx", earlier])
    assert [path.name for path in tmp_path.rglob("*")] == ["Goal.onnx"]
    assert earlier.read_bytes() == b"earlier"


def replace_operator(monkeypatch, operator: str, other) -> None:
    """Replaces an operator in exported models."""
    add = export_onnx.Graph.add

    def changed(graph, kind, *inputs, output="", **attributes):
        if kind != operator:
            return add(graph, kind, *inputs, output=output, **attributes)
        return add(graph, kind, *other(functools.partial(add, graph), inputs), output=output, **attributes)

    monkeypatch.setattr(export_onnx.Graph, "add", changed)


def test_model_that_samples_nan_is_refused(tmp_path, monkeypatch):
    def nothing(add, inputs):
        zero = add("Sub", inputs[0], inputs[0])
        return add("Div", zero, zero), *inputs[1:]

    replace_operator(monkeypatch, "Concat", lambda add, inputs: inputs)  # a replacement by itself changes nothing
    export(checkpoint_of(KINDS["one-layer"]), [tmp_path / "Goal.onnx"])
    replace_operator(monkeypatch, "Clip", nothing)
    with pytest.raises(ExportError, match="numbers from -1 to 1"):
        export(checkpoint_of(KINDS["vector"]), [tmp_path / "Other.onnx"])
    assert not (tmp_path / "Other.onnx").exists()


@pytest.mark.parametrize("operator", ["ArgMax", "Multinomial"])
def test_model_that_chooses_a_masked_action_is_refused(tmp_path, monkeypatch, operator):
    replace_operator(monkeypatch, operator, lambda add, inputs: [add("Sub", add("Sub", *inputs, *inputs), *inputs)])
    with pytest.raises(ExportError, match="choices that the masks"):
        export(checkpoint_of(KINDS["one-layer"]), [tmp_path / "Goal.onnx"])
    assert not list(tmp_path.iterdir())


def test_policy_with_previous_action_is_refused_but_its_weights_are_exported(tmp_path):
    checkpoint = checkpoint_of(((VECTOR,), HYBRID, {"previous_action": True}))
    for kind in ("onnx", "torchscript", "torch_export"):
        with pytest.raises(ExportError, match="previous_action"):
            export(checkpoint, [tmp_path / "Goal"], kind)
    assert not list(tmp_path.iterdir())
    assert export(checkpoint, [tmp_path / "Goal.safetensors"], "safetensors").difference == 0


def test_missing_packages_are_named_with_their_installation_command(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ExportError, match=r"onnxruntime.*pip install 'onnx"):
        export(checkpoint_of(KINDS["vector"]), [tmp_path / "Goal.onnx"])


def test_model_rejected_by_the_runtime_is_an_export_error():
    with pytest.raises(ExportError, match="does not load"):
        load_onnx(b"nothing of the kind")


def test_weights_of_another_network_are_refused(tmp_path):
    checkpoint = checkpoint_of(KINDS["vector"])
    other = dataclasses.replace(checkpoint, weights=checkpoint_of(KINDS["one-branch"]).weights)
    with pytest.raises(CheckpointError):
        export(other, [tmp_path / "Goal.onnx"])


def test_network_that_no_installed_package_brings_is_refused_in_words(tmp_path):
    checkpoint = checkpoint_of(KINDS["vector"])
    network = checkpoint.description["network_settings"] | {"encoders": {"goal": {"type": "nowhere"}}}
    other = dataclasses.replace(checkpoint, description={**checkpoint.description, "network_settings": network})
    with pytest.raises(CheckpointError, match=r"not understood here .*nowhere.*install the package"):
        export(other, [tmp_path / "Goal.onnx"])


# ---------------------------------------------------------------- other formats


def test_weights_have_metadata_of_their_behavior(tmp_path):
    checkpoint = checkpoint_of(KINDS["memory"], shared=True)
    path = tmp_path / "Goal.safetensors"
    export(checkpoint, [path], "safetensors")
    with safe_open(path, "numpy") as file:
        metadata, arrays = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert metadata["behavior"] == "Goal"
    assert metadata["steps"] == "1200"
    spec = read_spec(json.loads(metadata["spec"]))
    network = NetworkSettings.model_validate_json(metadata["network_settings"])
    assert spec == read_spec(checkpoint.description["spec"])
    assert network.memory == MEMORY
    actor = Actor(spec, network)
    load_arrays(actor, arrays)
    observation = np.ones((3, 5), np.float32)
    for one, other in zip(
        actor.frozen().act([observation], None, np.random.default_rng(0), True),
        acting(checkpoint).act([observation], None, np.random.default_rng(0), True),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


def in_numpy(module):
    """Returns a PyTorch module as a model of numpy arrays."""

    def model(inputs):
        return {key: one.numpy() for key, one in module({k: torch.from_numpy(v) for k, v in inputs.items()}).items()}

    return model


@pytest.mark.filterwarnings("ignore:`torch.jit.load` is deprecated:DeprecationWarning")  # in our only call
@pytest.mark.parametrize("name", SCRIPTED)
def test_torchscript_is_loaded_by_torch_and_equals_the_policy(tmp_path, name):
    checkpoint, path = checkpoint_of(KINDS[name]), tmp_path / f"Goal{SUFFIXES['torchscript']}"
    assert export(checkpoint, [path], "torchscript").difference <= 1e-4
    script = in_numpy(torch.jit.load(path))
    for rows, seed in ((1, 5), (7, 6), (3, 7)):  # the first calls compile it for their shapes
        agrees(checkpoint, script, rows, seed)


def test_torchscript_that_differs_from_the_policy_is_refused(tmp_path, monkeypatch):
    other = FUNCTIONS["silu"]._replace(forward=torch.sigmoid)
    monkeypatch.setattr(export_checkpoints, "FUNCTIONS", {"silu": other})
    with pytest.raises(ExportError, match="recurrent_out that differ by"):
        export(checkpoint_of(KINDS["memory"]), [tmp_path / "Goal.pt"], "torchscript")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vectors-normalized", "one-layer", "goal-hyper", "bytes-and-image", "everything"])
def test_torch_program_equals_the_policy_and_contains_no_pickle(tmp_path, name):
    checkpoint, path = checkpoint_of(KINDS[name]), tmp_path / f"Goal{SUFFIXES['torch_export']}"
    assert export(checkpoint, [path], "torch_export").difference <= 1e-4
    program = in_numpy(torch.export.load(path).module())
    agrees(checkpoint, program, 1, 5)
    agrees(checkpoint, program, 7, 6)
    with zipfile.ZipFile(path) as archive:
        contents = [archive.read(one) for one in archive.infolist() if one.filename.endswith((".pt", ".pkl"))]
    assert not any(contents)


# ---------------------------------------------------------------- Godot


@pytest.mark.parametrize("name", ["vector", "vectors-normalized", "one-branch", "limit"])
def test_model_for_godot_has_the_names_of_its_plugin_and_equals_the_policy(tmp_path, name):
    """The plugin gives each observation by the game's name and a number per agent, and nothing else."""
    policy = trained_policy(checkpoint_of(KINDS[name]))
    path = tmp_path / "Goal.godot.onnx"
    assert export(checkpoint_of(KINDS[name]), [path], "godot").difference < 1e-5
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    inputs = {one.name: one.shape for one in session.get_inputs()}
    sizes = {one.name: ["batch", *one.shape] for one in policy.spec.observations}
    assert inputs == {**sizes, "state_ins": ["batch"]}
    actions = policy.spec.actions
    width = actions.continuous + sum(actions.discrete)
    outputs = {one.name: one.shape for one in session.get_outputs()}
    assert outputs == {"output": ["batch", width], "state_outs": ["batch"]}
    given = {one.name: np.ones((1, *one.shape), np.float32) for one in policy.spec.observations}
    output, state = session.run(["output", "state_outs"], {**given, "state_ins": np.ones(1, np.float32)})
    assert state.tolist() == [1]
    assert np.abs(output[0, : actions.continuous]).max(initial=0) <= 1
    at = actions.continuous
    for size in actions.discrete:
        shares, at = output[0, at : at + size], at + size
        assert shares.sum() == pytest.approx(1)
        assert shares.max() > 0


@pytest.mark.parametrize("name", ["memory", "image", "entities"])
def test_what_the_godot_plugin_cannot_pass_to_a_model_is_refused(tmp_path, name):
    with pytest.raises(ExportError, match=r"got Goal with .*; expected vectors without a memory"):
        export(checkpoint_of(KINDS[name]), [tmp_path / "Goal.godot.onnx"], "godot")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("operator", ["Softmax", "Clip"])
def test_wrong_model_for_godot_writes_no_file(tmp_path, monkeypatch, operator):
    monkeypatch.setattr(export_onnx.Graph, "add", _replaced(operator))
    with pytest.raises(ExportError, match="output that differ by"):
        export(checkpoint_of(KINDS["vectors-normalized"]), [tmp_path / "Goal.godot.onnx"], "godot")
    assert not list(tmp_path.iterdir())


def _replaced(operator):
    add = export_onnx.Graph.add

    def wrong(self, kind, *inputs, output="", **attributes):
        return (
            add(self, "Neg", *inputs, output=output)
            if kind == operator
            else add(self, kind, *inputs, output=output, **attributes)
        )

    return wrong
