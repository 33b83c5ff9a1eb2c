# ruff: noqa: N803, N806 (names end in their shape)
"""This module extracts a policy from a checkpoint for export, lays out inputs and outputs, and compares the result.

An exported model of any format is compared with its network on the same random inputs.

B rows, C continuous actions, D branches, K choices of all branches, H = C + K, M values of a memory.
"""

import json
import math
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import torch
from pydantic import ValidationError
from scipy.special import softmax

from sparring.pipeline import plugins
from sparring.pipeline.errors import CheckpointError, ExplainedError, install_command
from sparring.pipeline.export import missing_packages
from sparring.pipeline.learning.checkpoints import Checkpoint
from sparring.pipeline.learning.settings import TrainerHyperparameters
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.networks.device import load_arrays
from sparring.pipeline.networks.distributions import FORBIDDEN
from sparring.pipeline.networks.layers import Layout
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import Array, BehaviorSpec, Floats, ObservationSpec, read_spec

TOLERANCE: Final = 1e-4
"""Largest difference between an export and its network: of an action in [-1, 1], a logit, or a value of a memory."""

BATCHES: Final = (1, 7)
"""Numbers of agents to try, because one model must take any number."""

VERSION: Final = 3
"""Version of the layout of a model, which ML-Agents' packages from 2.0 on load."""

GODOT_OUTPUT: Final = "output"
GODOT_STATE_IN: Final = "state_ins"
GODOT_STATE_OUT: Final = "state_outs"
"""Names in the layout of the plugin Godot RL Agents; its state is a number that models only pass on."""

MASKS: Final = "action_masks"
MEMORY_IN: Final = "recurrent_in"
MEMORY_OUT: Final = "recurrent_out"
SAMPLED: Final = "continuous_actions"
LIKELIEST: Final = "deterministic_continuous_actions"
CHOICES: Final = ("discrete_actions", "deterministic_discrete_actions")
OUTPUTS: Final = (
    *("version_number", "memory_size", SAMPLED, "continuous_action_output_shape", LIKELIEST),
    *(CHOICES[0], "discrete_action_output_shape", CHOICES[1], MEMORY_OUT),
)
"""Names of all possible outputs, in order."""

Tensors = dict[str, Array]
"""Inputs or outputs of a model, by name."""

Model = Callable[[Tensors], Tensors]
"""Runs an exported model: maps inputs by name to outputs by name."""

_ACTOR: Final = "actor."


class ExportError(ExplainedError):
    """Reports a policy that cannot be exported, or an export that differs from its policy."""


class TrainedPolicy(NamedTuple):
    """Holds the part of a checkpoint that acts.

    Attributes:
        behavior: name of the behavior.
        spec: observations and actions of the behavior.
        network: settings of the network.
        actor: the network.
        steps: steps trained.
        version: version of the weights.
    """

    behavior: str
    spec: BehaviorSpec
    network: NetworkSettings
    actor: Actor
    steps: int
    version: int

    @property
    def memory(self) -> int:
        """Returns M, the numbers in an agent's memory; 0 for none."""
        return 0 if self.network.memory is None else self.network.memory.memory_size

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each input for one agent, by name and in order; all are float32."""
        actions = self.spec.actions
        found = {observation_name(at): one.shape for at, one in enumerate(self.spec.observations)}
        if actions.discrete:
            found[MASKS] = (actions.mask_size,)
        if self.memory:
            found[MEMORY_IN] = (1, self.memory)
        return found

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each output that depends on the inputs, for one agent, by name."""
        actions, found = self.spec.actions, dict[str, tuple[int, ...]]()
        if actions.continuous:
            found |= dict.fromkeys((SAMPLED, LIKELIEST), (actions.continuous,))
        if actions.discrete:
            found |= dict.fromkeys(CHOICES, (len(actions.discrete),))
        if self.memory:
            found[MEMORY_OUT] = (1, self.memory)
        return found

    @property
    def facts(self) -> Tensors:
        """Returns the outputs that are the same for all inputs, float32; a game checks them before it uses a model."""
        actions = self.spec.actions
        found: Tensors = {"version_number": np.array([VERSION]), "memory_size": np.array([self.memory])}
        if actions.continuous:
            found["continuous_action_output_shape"] = np.array([actions.continuous])
        if actions.discrete:
            found["discrete_action_output_shape"] = np.array([actions.discrete])
        return {name: values.astype(np.float32) for name, values in found.items()}


def observation_name(number: int) -> str:
    """Returns the name of the input for an observation of the spec, counted from 0."""
    return f"obs_{number}"


def trained_policy(checkpoint: Checkpoint) -> TrainedPolicy:
    """Extracts the policy from a checkpoint.

    Raises:
        CheckpointError: its weights do not fit its description.
        SettingsError: no installed package brings its trainer.
    """
    described = checkpoint.description
    spec = read_spec(described["spec"])
    try:
        network = NetworkSettings.model_validate_json(json.dumps(described["network_settings"]))
    except ValidationError as error:
        reason = " ".join(error.errors()[0]["msg"].split())
        raise CheckpointError(
            got=f"network_settings of the checkpoint that are not understood here ({reason})",
            expected="settings and encoders that are installed",
            remedy="install the package that brings the encoder, or the version of sparring that wrote it",
        ) from error
    trainer: type[TrainerHyperparameters] = plugins.load(plugins.TRAINERS, described["trainer"])
    actor = trainer.actor(spec, network, values=len(described["signals"]) if described["shared_critic"] else 0)
    weights = {name.removeprefix(_ACTOR): one for name, one in checkpoint.weights.items() if name.startswith(_ACTOR)}
    load_arrays(actor, weights)
    actor.eval().requires_grad_(False)
    return TrainedPolicy(checkpoint.behavior, spec, network, actor, checkpoint.trained, checkpoint.version)


def require_packages() -> None:
    """Checks that the extra `onnx` is installed.

    Raises:
        ExportError: one of its packages is missing.
    """
    if missing := missing_packages():
        raise ExportError(
            got=f"no package {' and no package '.join(missing)}",
            expected="the packages of the extra onnx, which write and run ONNX files",
            remedy=install_command("onnx"),
        )


def compare(policy: TrainedPolicy, model: Model, *, godot: bool = False) -> float:
    """Runs a model and its network on the same random inputs.

    Args:
        policy: the policy with the network.
        model: the model, loaded from the exported file.
        godot: the model has the layout of the plugin Godot RL Agents.

    Returns:
        The largest difference. For a choice it is the network's preference for its own choice over the model's.

    Raises:
        ExportError: a name or shape differs from the layout, a sampled action is invalid, or the difference is above
            1e-4.
    """
    differences: list[tuple[float, str]] = []
    for rows in BATCHES:
        random = np.random.default_rng(rows)
        given, observations = random_inputs(policy, rows, random)
        allowed_BK = given.get(MASKS)
        expected, logits_BK = _outputs(policy, given, observations)
        if godot:
            state_B = random.random(rows, np.float32)
            shares = (softmax(one_Bk, 1) for one_Bk in _branches(policy, logits_BK))
            output = np.concatenate([expected.get(LIKELIEST, np.empty((rows, 0))), *shares], 1)
            expected = {GODOT_OUTPUT: output, GODOT_STATE_OUT: state_B}
            given = dict(zip((one.name for one in policy.spec.observations), observations, strict=True))
            given[GODOT_STATE_IN] = state_B
        got = model(given)
        shapes, wanted = ({name: one.shape for name, one in every.items()} for every in (got, expected))
        if shapes != wanted:
            raise _wrong(policy, f"outputs {shapes}", f"{wanted}")
        for name, values in expected.items():
            if allowed_BK is not None and name in CHOICES:
                found = _preference(policy, name, got[name], allowed_BK, logits_BK)
            elif name == SAMPLED:
                found = 0.0  # any difference is by chance
                if not (np.abs(got[name]) <= 1).all():
                    raise _wrong(policy, f"{name} {got[name].tolist()}", "numbers from -1 to 1")
            else:
                found = float(np.abs(got[name] - values).max())
            differences.append((found if math.isfinite(found) else math.inf, name))
    most, name = max(differences)
    if most > TOLERANCE:
        raise _wrong(policy, f"{name} that differ by {most:.3g}", f"at most {TOLERANCE:g}")
    return most


def random_inputs(policy: TrainedPolicy, rows: int, random: np.random.Generator) -> tuple[Tensors, list[Array]]:
    """Returns inputs as a game would provide them, and the same observations as the network reads them in training.

    Vectors follow the statistics of a normalizer if there is one. Lists of entities hold some, all or none. Each branch
    has an allowed choice.
    """
    observations = [_observation(one, rows, random) for one in policy.spec.observations]
    normalizer = policy.actor.encoder.normalizer
    if normalizer is not None:
        mean, deviation = normalizer.mean.numpy(), normalizer.variance.sqrt().numpy()
        first = 0
        for at in policy.actor.encoder.vectors:
            part = slice(first, first := first + observations[at].shape[1])
            observations[at] = observations[at] * deviation[part] + mean[part]
    floats = (one.astype(np.float32) / np.float32(255) if one.dtype == np.uint8 else one for one in observations)
    given = {observation_name(at): one for at, one in enumerate(floats)}
    if policy.spec.actions.discrete:
        given[MASKS] = _masks(policy.spec.actions.discrete, rows, random)
    if policy.memory:
        given[MEMORY_IN] = random.uniform(-1, 1, (rows, 1, policy.memory)).astype(np.float32)
    return given, observations


def _observation(spec: ObservationSpec, rows: int, random: np.random.Generator) -> Array:
    shape = (rows, *spec.shape)
    if spec.dtype == "uint8":
        return random.integers(0, 256, shape, np.uint8)
    if spec.kind == "image":
        return random.random(shape, np.float32)
    values = random.standard_normal(shape, np.float32)
    if spec.kind == "entities":
        present = random.integers(0, spec.shape[0] + 1, rows)
        present[: rows // 2 : 3] = 0
        values[np.arange(spec.shape[0]) >= present[:, None]] = 0
    return values


def _masks(branches: tuple[int, ...], rows: int, random: np.random.Generator) -> Floats:
    """Returns [B, K] 1 = allowed."""
    parts = []
    for size in branches:
        part = random.random((rows, size)) < 0.5
        part[np.arange(rows), random.integers(0, size, rows)] = True
        parts.append(part)
    return np.concatenate(parts, 1).astype(np.float32)


@torch.no_grad()
def _network(policy: TrainedPolicy, observations: list[Array], memory_B1M: Array | None) -> tuple[Array, Array]:
    """Returns means and logits [B, H], and the memory after them, [B, 1, M]."""
    actor = policy.actor
    prepared = actor.encoder.prepare(actor.encoder.join(observations))
    if actor.recurrent is None or memory_B1M is None:
        head_BH = actor(prepared).numpy()[:, : actor.outputs]
        return head_BH, np.empty((len(head_BH), 1, 0), np.float32)
    each = Layout(np.ones(len(memory_B1M), np.int64))
    head_BH, after_BM = actor.recurrent(actor.encoder(prepared), each, torch.from_numpy(memory_B1M[:, 0]))
    return head_BH.numpy()[:, : actor.outputs], after_BM.unsqueeze(1).numpy()


def _outputs(policy: TrainedPolicy, given: Tensors, observations: list[Array]) -> tuple[Tensors, Array]:
    """Returns the most likely outputs of the network by name, zeros for choices, and [B, K] all logits."""
    actions = policy.spec.actions
    head_BH, after_B1M = _network(policy, observations, given.get(MEMORY_IN))
    executed_BC = policy.actor.continuous(torch.from_numpy(head_BH), sampled=False).numpy()
    found = dict.fromkeys((SAMPLED, LIKELIEST), executed_BC)
    found |= dict.fromkeys(CHOICES, np.zeros((len(head_BH), len(actions.discrete)), np.int64))
    found |= {MEMORY_OUT: after_B1M} | policy.facts
    logits_BK = policy.actor.logits(torch.from_numpy(head_BH)).numpy()
    return {name: found[name] for name in (*policy.facts, *policy.outputs)}, logits_BK


def _branches(policy: TrainedPolicy, columns_BK: Array) -> list[Array]:
    return np.split(columns_BK, np.cumsum(policy.spec.actions.discrete)[:-1], 1) if columns_BK.shape[1] else []


def _preference(policy: TrainedPolicy, name: str, choices_BD: Array, allowed_BK: Array, logits_BK: Array) -> float:
    """Returns the network's largest preference for its own choice over a likeliest one; refuses forbidden choices."""
    worst, logits_BK = 0.0, np.where(allowed_BK > 0, logits_BK, FORBIDDEN)
    parts = zip(choices_BD.T, _branches(policy, allowed_BK), _branches(policy, logits_BK), strict=True)
    for choice_B, allowed_Bk, logits_Bk in parts:
        if not ((choice_B >= 0) & (choice_B < allowed_Bk.shape[1])).all() or not _at(allowed_Bk, choice_B).all():
            expected = f"choices that the masks {allowed_BK.tolist()} allow"
            raise _wrong(policy, f"{name} {choices_BD.tolist()}", expected)
        worst = max(worst, float((logits_Bk.max(1) - _at(logits_Bk, choice_B)).max()))
    return worst if name == CHOICES[1] else 0.0


def _at(values_Bk: Array, choice_B: Array) -> Array:
    return np.take_along_axis(values_Bk, choice_B[:, None], 1)[:, 0]


def _wrong(policy: TrainedPolicy, got: str, expected: str) -> ExportError:
    return ExportError(
        got=f"an export of {policy.behavior} with {got}",
        expected=f"the outputs of its network: {expected}",
        remedy="report it with the run's settings; export the weights as safetensors meanwhile",
    )
