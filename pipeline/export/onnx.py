"""This module converts a policy to an ONNX model that Unity's inference engine loads like one of ML-Agents.

Opset 9, because all of Unity's engines read it: Barracuda (ML-Agents' packages 2.x) and Sentis, now called Inference
Engine (from 3.0 on). PyTorch's own exporters no longer write it: the current one starts at opset 18, the one that did
is deprecated. So the graph is built here, and compared with the network at each export.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from sparring.pipeline.export import layers as layers
from sparring.pipeline.export.layers import Graph
from sparring.pipeline.export.policy import (
    MASKS,
    MEMORY_IN,
    MEMORY_OUT,
    OUTPUTS,
    TrainedPolicy,
    observation_name,
    refuse_previous_action,
    require_packages,
)
from sparring.pipeline.networks.distributions import FORBIDDEN
from sparring.pipeline.networks.perceptron import ConditionedLayers, Perceptron
from sparring.pipeline.specs import ActionSpec

OPSET: Final = 9
_IR: Final = 4  # as old as the opset; constants need not be listed as inputs
_INT64: Final = int(TensorProto.INT64)


def onnx_model(policy: TrainedPolicy) -> bytes:
    """Returns the content of an ONNX file.

    Raises:
        ExportError: a package is missing, or the policy needs an input that games do not provide.
    """
    require_packages()
    refuse_previous_action(policy)
    graph = Graph()
    head = _network(graph, policy)
    _act(graph, policy.spec.actions, policy, head)
    for name, values in policy.facts.items():
        graph.add("Constant", output=name, value=numpy_helper.from_array(values))
    model = helper.make_model(
        helper.make_graph(graph.nodes, policy.behavior, _inputs(policy), _outputs(policy), graph.constants),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=_IR,
        producer_name="sparring",
    )
    helper.set_model_props(model, {"behavior": policy.behavior, "steps": str(policy.steps)})
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString())


def _network(graph: Graph, policy: TrainedPolicy) -> str:
    """Returns [B, H] means and logits; adds the memory as another output."""
    actor = policy.actor
    rows, goal = _encode(graph, policy)
    if actor.recurrent is not None:
        head, memory = layers.recurrent(graph, actor.recurrent, rows, goal, MEMORY_IN, actor.outputs)
        graph.add("Unsqueeze", memory, axes=[1], output=MEMORY_OUT)
        return head
    if isinstance(actor.body, ConditionedLayers):
        return layers.conditioned(graph, actor.body, rows, goal, actor.outputs)
    assert isinstance(actor.body, Perceptron)
    return layers.perceptron(graph, actor.body, rows, actor.outputs)


def _encode(graph: Graph, policy: TrainedPolicy) -> tuple[str, str]:
    """Returns features and goals that condition the body ("" for none), in the order of `Encoder`."""
    encoder = policy.actor.encoder
    names: dict[str, list[str]] = {"vector": [], "image": [], "entities": [], "goal": []}
    sizes = []
    for at, one in enumerate(policy.spec.observations):
        kind = "vector" if one.kind == "goal" and not encoder.goal else one.kind
        names[kind].append(observation_name(at))
        sizes += [one.shape[1]] if kind == "entities" else []
    features = [graph.concatenate(names["vector"])] if names["vector"] else []
    if encoder.normalizer is not None:
        features = [layers.normalize(graph, encoder.normalizer, features[0])]
    features += [layers.image(graph, part, name) for part, name in zip(encoder.images, names["image"], strict=True)]
    if encoder.entities is not None:
        own = graph.concatenate(features) if features else None
        features.append(layers.entities(graph, encoder.entities, names["entities"], sizes, own))
    return graph.concatenate(features), graph.concatenate(names["goal"]) if names["goal"] else ""


def _act(graph: Graph, actions: ActionSpec, policy: TrainedPolicy, head: str) -> None:
    """Adds the outputs of sampled and most likely actions."""
    means, logits = head, head
    if actions.continuous and actions.discrete:
        means = graph.slice(head, 0, actions.continuous)
        logits = graph.slice(head, actions.continuous, policy.actor.outputs)
    if actions.continuous:
        sigma = graph.constant(policy.actor.log_sigma.exp())
        noise = graph.add("Mul", graph.add("RandomNormalLike", means), sigma)
        limit = policy.actor.action_limit
        _executed(graph, graph.add("Add", means, noise), limit, "continuous_actions")
        _executed(graph, means, limit, "deterministic_continuous_actions")
    if actions.discrete:
        _choose(graph, actions, logits)


def _executed(graph: Graph, raw: str, limit: float, output: str) -> None:
    """Adds an output of continuous actions as a simulator receives them."""
    clipped = graph.add("Clip", raw, min=-limit, max=limit)
    graph.add("Div", clipped, graph.constant(limit), output=output)


def _choose(graph: Graph, actions: ActionSpec, logits: str) -> None:
    """Adds a choice of each branch among those that the masks allow."""
    forbidden = graph.add("Sub", graph.constant(1.0), MASKS)
    far_below = graph.add("Mul", forbidden, graph.constant(FORBIDDEN))
    masked = graph.add("Add", graph.add("Mul", logits, MASKS), far_below)
    ends = np.cumsum(actions.discrete).tolist()
    branches = [graph.slice(masked, end - size, end) for end, size in zip(ends, actions.discrete, strict=True)]
    sampled = [graph.add("Multinomial", one, sample_size=1, dtype=_INT64) for one in branches]
    likeliest = [graph.add("ArgMax", one, axis=1, keepdims=1) for one in branches]
    graph.add("Concat", *sampled, axis=1, output="discrete_actions")
    graph.add("Concat", *likeliest, axis=1, output="deterministic_discrete_actions")


def _inputs(policy: TrainedPolicy) -> list[onnx.ValueInfoProto]:
    return [_described(name, shape, TensorProto.FLOAT) for name, shape in policy.inputs.items()]


def _outputs(policy: TrainedPolicy) -> list[onnx.ValueInfoProto]:
    """Returns the outputs in ML-Agents' order."""
    found = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, values.shape)
        for name, values in policy.facts.items()
    }
    for name, shape in policy.outputs.items():
        found[name] = _described(name, shape, TensorProto.INT64 if "discrete" in name else TensorProto.FLOAT)
    return [found[name] for name in OUTPUTS if name in found]


def _described(name: str, shape: tuple[int, ...], kind: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, ("batch", *shape))
