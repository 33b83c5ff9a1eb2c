# ruff: noqa: N803, N806 (names end in their shape)
"""This module converts a policy to an ONNX model that Unity's inference engine loads like one of ML-Agents.

Opset 9, because all of Unity's engines read it: Barracuda (ML-Agents' packages 2.x) and Sentis, now called Inference
Engine (from 3.0 on). PyTorch's own exporters no longer write it: the current one starts at opset 18, the one that did
is deprecated. So the graph is built here. Nothing is traced: each function adds the nodes of one kind of layer and
returns the name of their result, the formulas are written out a second time, and each export is compared with the
network itself. The batch axis of all shapes stays open.

B rows, F features, N most entities, E features of an entity, U units, C x H x W an image, M values of a memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Final

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from sparring.pipeline.export import layout
from sparring.pipeline.export.layout import ExportError, TrainedPolicy
from sparring.pipeline.networks.distributions import FORBIDDEN
from sparring.pipeline.networks.encoders import CLIP, ImageEncoder, Normalizer
from sparring.pipeline.networks.layers import EntityEncoder, Recurrent, ResidualAttention
from sparring.pipeline.networks.perceptron import ConditionedLayers, Perceptron
from sparring.pipeline.networks.settings import HEADS, Activation
from sparring.pipeline.specs import ActionSpec, Array

Shapes = Mapping[str, tuple[int, ...]]
Attribute = int | float | Sequence[int] | TensorProto

OPSET: Final = 9
_IR: Final = 4  # as old as the opset; constants need not be listed as inputs
_INT64: Final = int(TensorProto.INT64)
_ABSENT: Final = -1e9
"""Added to the score of an absent entity, whose weight is then exactly 0."""


def onnx_model(policy: TrainedPolicy) -> bytes:
    """Returns the content of an ONNX file."""
    graph = Graph()
    names = [layout.observation_name(at) for at in range(len(policy.spec.observations))]
    _act(graph, policy.spec.actions, policy, _network(graph, policy, names))
    for name, values in policy.facts.items():
        graph.add("Constant", output=name, value=numpy_helper.from_array(values))
    outputs = _described({name: values.shape for name, values in policy.facts.items()})
    outputs += _described(policy.outputs, "batch")
    outputs.sort(key=lambda one: layout.OUTPUTS.index(one.name))
    return _content(graph, policy, policy.inputs, outputs)


def godot_model(policy: TrainedPolicy) -> bytes:
    """Returns the content of an ONNX file for the inference of the plugin Godot RL Agents.

    Its inputs have the names that the game gives its observations. `output` holds the most likely continuous actions,
    then the probabilities of all choices: some versions of the plugin choose the first where none is above 0.
    """
    graph, actions = Graph(), policy.spec.actions
    head = _network(graph, policy, [one.name for one in policy.spec.observations])
    parts = []
    if actions.continuous:
        parts.append(policy.actor.continuous_onnx(graph, head, sampled=False))
    at = policy.actor.outputs - actions.mask_size
    for size in actions.discrete:
        parts.append(graph.add("Softmax", graph.slice(head, at, at + size), axis=1))
        at += size
    graph.add("Concat", *parts, axis=1, output=layout.GODOT_OUTPUT)
    graph.add("Identity", layout.GODOT_STATE_IN, output=layout.GODOT_STATE_OUT)
    inputs = {one.name: one.shape for one in policy.spec.observations} | {layout.GODOT_STATE_IN: ()}
    outputs: Shapes = {layout.GODOT_OUTPUT: (actions.continuous + actions.mask_size,), layout.GODOT_STATE_OUT: ()}
    return _content(graph, policy, inputs, _described(outputs, "batch"))


def _content(graph: Graph, policy: TrainedPolicy, inputs: Shapes, outputs: Sequence[onnx.ValueInfoProto]) -> bytes:
    """Returns the content of the file of a graph."""
    given = _described(inputs, "batch")
    made = helper.make_graph(graph.nodes, policy.behavior, given, outputs, graph.constants)
    opsets = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(made, opset_imports=opsets, ir_version=_IR, producer_name="sparring")
    described = json.dumps({"behavior": policy.behavior, "spec": asdict(policy.spec)})
    helper.set_model_props(model, {"behavior": policy.behavior, "steps": str(policy.steps), "sparring": described})
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString())


def _described(shapes: Shapes, *batch: str) -> list[onnx.ValueInfoProto]:
    """Describes inputs or outputs of these shapes, after the dimension of the batch if they have one."""
    kinds = {name: TensorProto.INT64 if name in layout.CHOICES else TensorProto.FLOAT for name in shapes}
    return [helper.make_tensor_value_info(name, kinds[name], (*batch, *shape)) for name, shape in shapes.items()]


def _network(graph: Graph, policy: TrainedPolicy, observations: Sequence[str]) -> str:
    """Returns [B, H] means and logits of observations by their names; adds the memory as another output."""
    actor = policy.actor
    rows, goal = _encode(graph, policy, observations)
    if actor.recurrent is not None:
        head, memory = recurrent(graph, actor.recurrent, rows, goal, layout.MEMORY_IN, actor.outputs)
        graph.add("Unsqueeze", memory, axes=[1], output=layout.MEMORY_OUT)
        return head
    return layers(graph, actor.body, rows, goal, actor.outputs)


def _encode(graph: Graph, policy: TrainedPolicy, observations: Sequence[str]) -> tuple[str, str]:
    """Returns features and goals that condition the body ("" for none), in the order of `Encoder`."""
    encoder = policy.actor.encoder
    names: dict[str, list[str]] = {"vector": [], "own": [], "entities": [], "goal": []}
    sizes = []
    for name, one, kind in zip(observations, policy.spec.observations, encoder.kinds, strict=True):
        names[kind].append(name)
        sizes += [one.shape[1]] if kind == "entities" else []
    features = [graph.concatenate(names["vector"])] if names["vector"] else []
    if encoder.normalizer is not None:
        features = [normalize(graph, encoder.normalizer, features[0])]
    features += [image(graph, part, name) for part, name in zip(encoder.images, names["own"], strict=True)]
    if encoder.entities is not None:
        own = graph.concatenate(features) if features else None
        features.append(entities(graph, encoder.entities, names["entities"], sizes, own))
    return graph.concatenate(features), graph.concatenate(names["goal"]) if names["goal"] else ""


def _act(graph: Graph, actions: ActionSpec, policy: TrainedPolicy, head: str) -> None:
    """Adds the outputs of sampled and most likely actions."""
    actor = policy.actor
    if actions.continuous:
        actor.continuous_onnx(graph, head, sampled=True, output=layout.SAMPLED)
        actor.continuous_onnx(graph, head, sampled=False, output=layout.LIKELIEST)
    if actions.discrete:
        _choose(graph, actions, graph.slice(head, actor.outputs - actions.mask_size, actor.outputs))


def _choose(graph: Graph, actions: ActionSpec, logits: str) -> None:
    """Adds a choice of each branch among those that the masks allow."""
    far_below = graph.add("Mul", graph.add("Sub", graph.constant(1.0), layout.MASKS), graph.constant(FORBIDDEN))
    masked = graph.add("Add", graph.add("Mul", logits, layout.MASKS), far_below)
    ends = np.cumsum(actions.discrete).tolist()
    branches = [graph.slice(masked, end - size, end) for end, size in zip(ends, actions.discrete, strict=True)]
    sampled = [graph.add("Multinomial", one, sample_size=1, dtype=_INT64) for one in branches]
    likeliest = [graph.add("ArgMax", one, axis=1, keepdims=1) for one in branches]
    for output, branch in zip(layout.CHOICES, (sampled, likeliest), strict=True):
        graph.add("Concat", *branch, axis=1, output=output)


class Graph:
    """Collects the nodes and constants of a graph.

    Attributes:
        nodes: in an order in which they can be run.
        constants: weights and the like.
    """

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, values: Tensor | Array | Sequence[int] | float) -> str:
        """Stores values, floats as float32 and integers as int64, and returns their name."""
        found = values.detach().numpy() if isinstance(values, Tensor) else np.asarray(values)
        name = f"constant_{len(self.constants)}"
        kind = np.int64 if found.dtype.kind == "i" else np.float32
        self.constants.append(onnx.numpy_helper.from_array(np.array(found, kind), name))
        return name

    def add(self, operator: str, *inputs: str, output: str = "", **attributes: Attribute) -> str:
        """Adds a node and returns the name of its result."""
        name = output or f"{operator}_{len(self.nodes)}"
        node = helper.make_node(operator, inputs, [name], name)
        node.attribute.extend(helper.make_attribute(key, value) for key, value in sorted(attributes.items()))
        self.nodes.append(node)
        return name

    def gemm(self, rows_BF: str, weight_UF: Tensor, bias_U: Tensor) -> str:
        """Returns rows [B, U] of a linear layer."""
        return self.add("Gemm", rows_BF, self.constant(weight_UF), self.constant(bias_U), transB=1)

    def reshape(self, name: str, *shape: int) -> str:
        """Reshapes the values of a result; 0 keeps a dimension."""
        return self.add("Reshape", name, self.constant(shape))

    def concatenate(self, names: Sequence[str], axis: int = 1) -> str:
        """Joins results along an axis."""
        return names[0] if len(names) == 1 else self.add("Concat", *names, axis=axis)

    def slice(self, name: str, first: int, last: int) -> str:
        """Selects columns from `first` to before `last` of [B, F]."""
        return self.add("Slice", name, starts=[first], ends=[last], axes=[1])


def normalize(graph: Graph, normalizer: Normalizer, rows_BF: str) -> str:
    """Returns normalized rows [B, F]."""
    shifted = graph.add("Sub", rows_BF, graph.constant(normalizer.mean))
    scaled = graph.add("Div", shifted, graph.constant(normalizer.variance.sqrt()))
    return graph.add("Clip", scaled, min=-CLIP, max=CLIP)


def linear(graph: Graph, layer: nn.Module, rows_BF: str, outputs: int | None = None) -> str:
    """Returns the first `outputs`, or all, of a linear layer, [B, U]."""
    weight, bias = layer.parameters()
    return graph.gemm(rows_BF, weight[:outputs], bias[:outputs])


def activate(graph: Graph, activation: Activation, sums: str) -> str:
    """Applies the function of hidden units."""
    if activation != "silu":
        return graph.add(activation.capitalize(), sums)
    return graph.add("Mul", sums, graph.add("Sigmoid", sums))


def layers(graph: Graph, body: nn.Module, rows_BF: str, goal_BG: str, outputs: int | None = None) -> str:
    """Returns the first `outputs`, or all, of layers of hidden units."""
    if isinstance(body, ConditionedLayers):
        return _conditioned(graph, body, rows_BF, goal_BG, outputs)
    assert isinstance(body, Perceptron)
    *hidden, last = body.layers
    return linear(graph, last, _hidden(graph, body.activation, hidden, rows_BF), outputs)


def _hidden(graph: Graph, activation: Activation, hidden: Iterable[nn.Module], rows_BF: str) -> str:
    for layer in hidden:
        rows_BF = activate(graph, activation, linear(graph, layer, rows_BF))
    return rows_BF


def _conditioned(graph: Graph, body: ConditionedLayers, rows_BF: str, goal_BG: str, outputs: int | None) -> str:
    """Returns the first `outputs`, or all, of a body whose last hidden layer is generated from the goal."""
    rows_BF = _hidden(graph, body.activation, body.layers, rows_BF)
    hyper = body.hyper
    code_BU = activate(graph, body.activation, linear(graph, hyper.code, goal_BG))
    units = hyper.biases.out_features
    weights = graph.reshape(linear(graph, hyper.weights, code_BU), 0, units, hyper.weights.out_features // units)
    product = graph.add("MatMul", weights, graph.add("Unsqueeze", rows_BF, axes=[2]))
    sums = graph.add("Add", graph.add("Squeeze", product, axes=[2]), linear(graph, hyper.biases, code_BU))
    return sums if body.head is None else linear(graph, body.head, activate(graph, body.activation, sums), outputs)


def recurrent(
    graph: Graph, body: Recurrent, rows_BF: str, goal_BG: str, memory_B1M: str, outputs: int | None = None
) -> tuple[str, str]:
    """Returns the first `outputs`, or all, of one step, and the memory after it, [B, M]."""
    made = activate(graph, body.activation, layers(graph, body.trunk, rows_BF, goal_BG))
    units = body.lstm.hidden_size
    memory = graph.reshape(memory_B1M, 0, 2 * units)
    hidden, cell = graph.slice(memory, 0, units), graph.slice(memory, units, 2 * units)
    arriving, recalled, arriving_bias, recalled_bias = body.lstm.parameters()
    gates = graph.add("Add", graph.gemm(made, arriving, arriving_bias), graph.gemm(hidden, recalled, recalled_bias))
    entering, kept, new, leaving = (graph.slice(gates, at * units, (at + 1) * units) for at in range(4))
    remembered = graph.add("Mul", graph.add("Sigmoid", kept), cell)
    learned = graph.add("Mul", graph.add("Sigmoid", entering), graph.add("Tanh", new))
    cell = graph.add("Add", remembered, learned)
    hidden = graph.add("Mul", graph.add("Sigmoid", leaving), graph.add("Tanh", cell))
    return linear(graph, body.head, hidden, outputs), graph.concatenate([hidden, cell])


def image(graph: Graph, layer: nn.Module, name: str) -> str:
    """Returns features [B, U] of an observation with an encoder of its own, or the result of one layer of that encoder.

    An image has floats 0..1.
    """
    if callable(own := getattr(layer, "onnx", None)):  # of a plug-in
        return str(own(graph, name))
    match layer:
        case nn.Sequential() | ImageEncoder():
            for part in layer.children():
                name = image(graph, part, name)
            return name
        case nn.Linear():
            return linear(graph, layer, name)
        case nn.Conv2d():
            return _convolution(graph, layer, name)
        case nn.LeakyReLU():
            return graph.add("LeakyRelu", name, alpha=layer.negative_slope)
        case nn.ReLU():
            return graph.add("Relu", name)
        case nn.Tanh():
            return activate(graph, "tanh", name)
        case nn.SiLU():
            return activate(graph, "silu", name)
        case nn.MaxPool2d():
            return graph.add("MaxPool", name, kernel_shape=_pair(layer.kernel_size), strides=_pair(layer.stride))
        case nn.Flatten():
            return graph.add("Flatten", name, axis=1)
    if isinstance(inner := getattr(layer, "layers", None), nn.Sequential):  # with a residual connection
        return graph.add("Add", name, image(graph, inner, name))
    raise ExportError(
        got=f"a layer {type(layer).__name__} in an image encoder",
        expected="a layer that this exporter can translate to ONNX",
        remedy="give the encoder a method `onnx(graph, name)`, or choose another network_settings.vis_encode_type",
    )


def _convolution(graph: Graph, layer: nn.Conv2d, name: str) -> str:
    assert layer.bias is not None
    high, wide = (int(one) for one in layer.padding)
    weight, bias = graph.constant(layer.weight), graph.constant(layer.bias)
    kernel, strides = _pair(layer.kernel_size), _pair(layer.stride)
    return graph.add("Conv", name, weight, bias, kernel_shape=kernel, strides=strides, pads=[high, wide, high, wide])


def _pair(size: int | tuple[int, ...]) -> list[int]:
    return [size, size] if isinstance(size, int) else list(size)


def entities(graph: Graph, layer: EntityEncoder, lists: Sequence[str], sizes: Sequence[int], own_BS: str | None) -> str:
    """Returns features [B, U] of lists of entities of E features each, and of any features of the agent itself."""
    embedded = [
        _embed(graph, embed, one, size, own_BS) for embed, one, size in zip(layer.embeddings, lists, sizes, strict=True)
    ]
    here_BN = graph.concatenate([_here(graph, one) for one in lists])
    result_BNU = _attend(graph, layer.attention, graph.concatenate(embedded), here_BN)
    present_BN1 = graph.add("Unsqueeze", here_BN, axes=[2])
    sums = graph.add("ReduceSum", graph.add("Mul", result_BNU, present_BN1), axes=[1], keepdims=0)
    number = graph.add("ReduceSum", here_BN, axes=[1], keepdims=1)
    return graph.add("Div", sums, graph.add("Max", number, graph.constant(np.ones(1))))


def _embed(graph: Graph, layer: nn.Module, list_BNE: str, size: int, own_BS: str | None) -> str:
    """Returns [B, N, U]; the agent's own part is computed once and added to each entity's."""
    weight, bias = layer.parameters()
    if own_BS is None:
        return _each(graph, weight, bias, list_BNE)
    parts = graph.add("MatMul", list_BNE, graph.constant(weight[:, :size].t()))
    own = graph.gemm(own_BS, weight[:, size:], bias)
    return graph.add("Add", parts, graph.add("Unsqueeze", own, axes=[1]))


def _here(graph: Graph, list_BNE: str) -> str:
    """Returns [B, N] 1 for an entity, 0 for padding: a row of zeros."""
    largest = graph.add("ReduceMax", graph.add("Abs", list_BNE), axes=[2], keepdims=0)
    there = graph.add("Greater", largest, graph.constant(0.0))
    return graph.add("Cast", there, to=TensorProto.FLOAT)


def _attend(graph: Graph, attention: ResidualAttention, embedded_BNU: str, here_BN: str) -> str:
    """Returns [B, N, U]."""
    inputs, units = _layer_norm(graph, attention.before, embedded_BNU), attention.project.in_features
    parts = zip(*(torch.split(one, units) for one in (attention.project.weight, attention.project.bias)), strict=True)
    queries, keys, values = (
        graph.reshape(_each(graph, weight, bias, inputs), 0, 0, HEADS, units // HEADS) for weight, bias in parts
    )
    queries, values = (graph.add("Transpose", one, perm=[0, 2, 1, 3]) for one in (queries, values))
    scores = graph.add("MatMul", queries, graph.add("Transpose", keys, perm=[0, 2, 3, 1]))
    scaled = graph.add("Mul", scores, graph.constant(1 / math.sqrt(units // HEADS)))
    absent = graph.add("Mul", graph.add("Sub", graph.constant(1.0), here_BN), graph.constant(_ABSENT))
    shares = graph.add("Softmax", graph.add("Add", scaled, graph.add("Unsqueeze", absent, axes=[1, 2])), axis=3)
    heads = graph.add("Transpose", graph.add("MatMul", shares, values), perm=[0, 2, 1, 3])
    merged = _each(graph, attention.merge.weight, attention.merge.bias, graph.reshape(heads, 0, 0, units))
    return _layer_norm(graph, attention.after, graph.add("Add", inputs, merged))


def _each(graph: Graph, weight: Tensor, bias: Tensor, rows_BNU: str) -> str:
    """Applies a linear layer to each entity."""
    product = graph.add("MatMul", rows_BNU, graph.constant(weight.t()))
    return graph.add("Add", product, graph.constant(bias))


def _layer_norm(graph: Graph, layer: nn.LayerNorm, rows_BNU: str) -> str:
    """Normalizes the last of three dimensions; ONNX has a node for this only from opset 17 on."""
    shifted = graph.add("Sub", rows_BNU, graph.add("ReduceMean", rows_BNU, axes=[2], keepdims=1))
    variance = graph.add("ReduceMean", graph.add("Mul", shifted, shifted), axes=[2], keepdims=1)
    deviation = graph.add("Sqrt", graph.add("Add", variance, graph.constant(layer.eps)))
    scaled = graph.add("Mul", graph.add("Div", shifted, deviation), graph.constant(layer.weight))
    return graph.add("Add", scaled, graph.constant(layer.bias))
