"""What is exported, whatever the format: a policy taken out of a checkpoint, and the names of its tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sparring.pipeline.errors import Explained, install_command
from sparring.pipeline.export.packages import missing_packages
from sparring.pipeline.learning.checkpoints import Checkpoint
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.networks.settings import NetworkSettings
from sparring.pipeline.networks.weights import load_arrays
from sparring.pipeline.specs import BehaviorSpec, read_spec

VERSION: Final = 3
"""Of the layout of a model: the one that ML-Agents' packages from 2.0 on load."""

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
"""Of a policy that has all of them, in order."""

Tensors = dict[str, NDArray[Any]]
"""Inputs or outputs of a model, by name."""

_ACTOR: Final = "actor."


class ExportError(Explained):
    """A policy that cannot be exported, or an export that does not do what the policy does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedPolicy:
    """The part of a checkpoint that acts.

    Attributes:
        behavior: name.
        spec: of the behavior.
        network: settings of the network.
        actor: the network.
        steps: trained.
        version: of the weights.
    """

    behavior: str
    spec: BehaviorSpec
    network: NetworkSettings
    actor: Actor
    steps: int
    version: int

    @property
    def memory(self) -> int:
        """M, numbers that an agent remembers; 0 for none."""
        return 0 if self.network.memory is None else self.network.memory.memory_size

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """Shape of each input for one agent, by name and in order; all are float32."""
        actions = self.spec.actions
        found = {observation_name(at): one.shape for at, one in enumerate(self.spec.observations)}
        if actions.discrete:
            found[MASKS] = (actions.mask_size,)
        if self.memory:
            found[MEMORY_IN] = (1, self.memory)
        return found

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        """Shape of each output that depends on the inputs, for one agent, by name."""
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
        """Outputs that are the same for all inputs, float32: what a game checks before it uses a model."""
        actions = self.spec.actions
        found: Mapping[str, Any] = {"version_number": [VERSION], "memory_size": [self.memory]}
        if actions.continuous:
            found = {**found, "continuous_action_output_shape": [actions.continuous]}
        if actions.discrete:
            found = {**found, "discrete_action_output_shape": [actions.discrete]}
        return {name: np.array(values, np.float32) for name, values in found.items()}


def observation_name(number: int) -> str:
    """Name of the input for an observation of the spec, counted from 0."""
    return f"obs_{number}"


def trained_policy(checkpoint: Checkpoint) -> TrainedPolicy:
    """Takes the policy out of a checkpoint.

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


def refuse_what_nobody_feeds(policy: TrainedPolicy) -> None:
    """Refuses a policy that needs more than a game gives to a model.

    Raises:
        ExportError: it is shown its previous action.
    """
    if policy.network.previous_action:
        raise ExportError(
            got=f"{policy.behavior}, trained with network_settings.previous_action",
            expected="a policy of observations, masks and memory: a game gives its model nothing else",
            remedy="train it with network_settings.memory in its place, or export its weights as safetensors",
        )


def require_packages() -> None:
    """Refuses to go on without the extra `onnx`.

    Raises:
        ExportError: a package of it is not installed.
    """
    if missing := missing_packages():
        raise ExportError(
            got=f"no package {' and no package '.join(missing)}",
            expected="those of the extra onnx, which write ONNX files and run them",
            remedy=install_command("onnx"),
        )
