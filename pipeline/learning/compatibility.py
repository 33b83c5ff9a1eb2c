"""This module names the state that a checkpoint holds of a learner, and checks that a checkpoint fits one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from sparring.pipeline.errors import CheckpointError
from sparring.pipeline.learning.algorithm import Algorithm
from sparring.pipeline.learning.checkpoints import Checkpoint
from sparring.pipeline.learning.settings import TrainerSettings
from sparring.pipeline.learning.signals import EXTRINSIC
from sparring.pipeline.specs import BehaviorSpec

CLONING: Final = "cloning."
"""Prefix of the optimizer state of behavioral cloning."""


def networks_of(algorithm: Algorithm) -> nn.ModuleDict:
    """Returns all networks: actor, critic and those of the reward signals."""
    return nn.ModuleDict({**dict(algorithm.modules.items()), "signals": algorithm.signals.modules})


def moments_of(algorithm: Algorithm) -> dict[str, Tensor]:
    """Returns the states of all optimizers by name, to be saved and restored in place."""
    cloning = {} if algorithm.cloning is None else algorithm.cloning.moments
    return {
        **algorithm.optimizer.moments,
        **{f"signals.{name}": moment for name, moment in algorithm.signals.moments.items()},
        **{f"{CLONING}{name}": moment for name, moment in cloning.items()},
    }


def describe(
    spec: BehaviorSpec, teammates: Mapping[str, BehaviorSpec], settings: TrainerSettings, algorithm: Algorithm
) -> dict[str, Any]:
    """Returns what the networks are built from, in the form in which JSON restores it.

    Args:
        spec: observations and actions of the behavior.
        teammates: specs of the other behavior names that share groups with it.
        settings: the learner's settings.
        algorithm: the algorithm with the networks.
    """
    described = {
        "trainer": settings.trainer_type,
        "spec": dataclasses.asdict(spec),
        "teammates": {name: dataclasses.asdict(one) for name, one in teammates.items()},
        "network_settings": _shape(settings.network_settings.model_dump(exclude={"deterministic"})),
        "shared_critic": settings.hyperparameters.shared_critic,
        "signals": list(settings.reward_signals.named()),
        "reward_networks": {
            name: {
                key: _shape(value) if key == "network_settings" else value
                for key, value in one.model_dump().items()
                if key in ("network_settings", "encoding_size", "use_actions", "use_vail")
            }
            for name, one in settings.reward_signals.named().items()
            if name != EXTRINSIC
        },
    }
    if EXTRINSIC in algorithm.signals.modules:  # absent otherwise, as in checkpoints older than this setting
        described["normalized_rewards"] = [EXTRINSIC]
    return dict(json.loads(json.dumps(described)))


def check_description(behavior: str, description: dict[str, Any], checkpoint: Checkpoint) -> None:
    """Refuses a checkpoint of another behavior, spec or network; its teammates may differ.

    Raises:
        CheckpointError: the checkpoint differs from `behavior` and `description`.
    """
    own, other = (
        {"behavior": behavior} | description | {"teammates": checkpoint.description.get("teammates", {})},
        {"behavior": checkpoint.behavior} | checkpoint.description,
    )
    if differing := sorted(key for key in own.keys() | other.keys() if own.get(key) != other.get(key)):
        raise CheckpointError(
            got=f"a checkpoint with { ({key: other.get(key) for key in differing}) }",
            expected=f"{ ({key: own.get(key) for key in differing}) }",
            remedy="resume with the settings and the simulator of the run that wrote it, or start a new run",
        )


def check_moments(moments: Mapping[str, Tensor], generator: torch.Generator, checkpoint: Checkpoint) -> None:
    """Refuses a checkpoint whose optimizer or random state cannot be restored.

    Raises:
        CheckpointError: its optimizer state differs from `moments`, or its random state from that of `generator`.
    """
    own = {name: tuple(moment.shape) for name, moment in moments.items()}
    own["generator"] = tuple(generator.get_state().shape)
    found = {name: array.shape for name, array in checkpoint.optimizer.items() if not name.startswith(CLONING)}
    if {name: shape for name, shape in own.items() if not name.startswith(CLONING)} != found:
        raise CheckpointError(
            got=f"optimizer state {sorted(checkpoint.optimizer)} of other names or sizes",
            expected=f"{sorted(own)} with the sizes of this network",
            remedy="use a checkpoint of this version of sparring",
        )
    try:
        torch.Generator().set_state(torch.from_numpy(np.array(checkpoint.optimizer["generator"])))
    except (TypeError, RuntimeError) as error:
        raise CheckpointError(
            got=f"optimizer state with an invalid random state ({error})",
            expected="the state of a torch.Generator",
            remedy="use another checkpoint",
        ) from error


def _shape(network: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that weights depend on: not initialization; SiLU is implied, as in old checkpoints."""
    implied = {"initialization"} | ({"activation"} if network["activation"] == "silu" else set())
    return {key: value for key, value in network.items() if key not in implied}
