"""This module extracts a policy from a checkpoint for export to any format, and lays out inputs and outputs."""

import json
from dataclasses import dataclass
from typing import Final

import numpy as np

from sparring.pipeline.errors import ExplainedError, install_command
from sparring.pipeline.export import missing_packages
from sparring.pipeline.learning.checkpoints import Checkpoint
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.networks.device import load_arrays
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.specs import Array, BehaviorSpec, read_spec

VERSION: Final = 3
"""Version of the layout of a model, which ML-Agents' packages from 2.0 on load."""

MASKS: Final = "action_masks"
MEMORY_IN: Final = "recurrent_in"
MEMORY_OUT: Final = "recurrent_out"
OUTPUTS: Final = (
    "version_number",
    "memory_size",
    "continuous_actions",
    "continuous_action_output_shape",
    "deterministic_continuous_actions",
    "discrete_actions",
    "discrete_action_output_shape",
    "deterministic_discrete_actions",
    MEMORY_OUT,
)
"""Names of all possible outputs, in order."""

Tensors = dict[str, Array]
"""Inputs or outputs of a model, by name."""

_ACTOR: Final = "actor."


class ExportError(ExplainedError):
    """Reports a policy that cannot be exported, or an export that differs from its policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedPolicy:
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
    def vectors(self) -> list[int]:
        """Returns the positions of the observations that are joined and normalized; goals may condition the body."""
        kinds = ("vector",) if self.actor.encoder.goal else ("vector", "goal")
        return [at for at, one in enumerate(self.spec.observations) if one.kind in kinds]

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
            found |= dict.fromkeys(("continuous_actions", "deterministic_continuous_actions"), (actions.continuous,))
        if actions.discrete:
            found |= dict.fromkeys(("discrete_actions", "deterministic_discrete_actions"), (len(actions.discrete),))
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
    """
    described = checkpoint.description
    spec = read_spec(described["spec"])
    network = NetworkSettings.model_validate_json(json.dumps(described["network_settings"]))
    actor = Actor(spec, network, values=len(described["signals"]) if described["shared_critic"] else 0)
    weights = {name.removeprefix(_ACTOR): one for name, one in checkpoint.weights.items() if name.startswith(_ACTOR)}
    load_arrays(actor, weights)
    return TrainedPolicy(
        behavior=checkpoint.behavior,
        spec=spec,
        network=network,
        actor=actor.eval().requires_grad_(False),
        steps=checkpoint.trained,
        version=checkpoint.version,
    )


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
