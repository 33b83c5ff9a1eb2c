"""This module builds what a learner trains from its settings, and checks which checkpoints fit it."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from sparring.pipeline.demonstrations.library import DemonstrationFile, load
from sparring.pipeline.errors import CheckpointError
from sparring.pipeline.files import Json
from sparring.pipeline.learning.actor_critic import ActorCritic, AgentNetworks
from sparring.pipeline.learning.checkpoints import Checkpoint
from sparring.pipeline.learning.cloning import BC, Cloning
from sparring.pipeline.learning.group_networks import GroupNetworks
from sparring.pipeline.learning.optimizer import Adam
from sparring.pipeline.learning.poca import POCA
from sparring.pipeline.learning.ppo import PPO
from sparring.pipeline.learning.settings import SignalSettings, TrainerSettings
from sparring.pipeline.learning.signals import EXTRINSIC, RewardNetwork, Signals
from sparring.pipeline.learning.signals.gail import Gail
from sparring.pipeline.learning.signals.novelty import Curiosity, Rnd
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.networks.device import CPU
from sparring.pipeline.specs import BehaviorSpec

_CLONING: Final = "cloning."
"""Prefix of the optimizer state of behavioral cloning."""


Algorithm = PPO | POCA | BC


def networks_of(algorithm: Algorithm) -> nn.ModuleDict:
    """Returns all networks: actor, critic and those of the reward signals."""
    return nn.ModuleDict({**dict(algorithm.networks.modules.items()), "signals": algorithm.signals.modules})


def moments_of(algorithm: Algorithm) -> dict[str, Tensor]:
    """Returns the states of all optimizers by name, to be saved and restored in place."""
    cloning = {} if algorithm.cloning is None else algorithm.cloning.moments
    return {
        **algorithm.optimizer.moments,
        **{f"signals.{name}": moment for name, moment in algorithm.signals.moments.items()},
        **{f"{_CLONING}{name}": moment for name, moment in cloning.items()},
    }


def build(
    behavior: str,
    spec: BehaviorSpec,
    settings: TrainerSettings,
    generator: torch.Generator,
    *,
    learns: bool = True,
    device: torch.device = CPU,
) -> tuple[Algorithm, tuple[DemonstrationFile, ...]]:
    """Builds the algorithm that `trainer_type` names; returns it and the demonstration files that it read, each once.

    Args:
        behavior: name of the behavior.
        spec: observations and actions of the behavior.
        settings: the learner's settings.
        generator: random source of the initial weights and of shuffling.
        learns: False loads no demonstrations, for networks that only receive weights.
        device: device of the networks.

    Raises:
        Unsupported: no network can be built for the spec or the settings.
        RecordingError: demonstrations are missing, unreadable, or of another spec.
    """
    networks: ActorCritic
    if settings.trainer_type == "bc":
        networks = ActorCritic(Actor(spec, settings.network_settings, generator), None, settings)
    elif settings.trainer_type == "poca":
        networks = GroupNetworks(behavior, spec, settings, generator)
    else:
        networks = AgentNetworks(spec, settings, generator)
    hyper = settings.hyperparameters
    optimizer = Adam(networks.modules, hyper.learning_rate, device, hyper.adam_epsilon, hyper.max_grad_norm)
    sources: dict[str, RewardNetwork] = {}
    files: tuple[DemonstrationFile, ...] = ()
    wanted = settings.reward_signals
    if (gail := wanted.gail) is not None:
        demonstrations = load(gail.demo_path, behavior, spec, gail.demo_actions) if learns else None
        files = () if demonstrations is None else demonstrations.files
        sources["gail"] = Gail(spec, gail, demonstrations, generator, device)
    if wanted.curiosity is not None:
        sources["curiosity"] = Curiosity(spec, wanted.curiosity, generator, device)
    if wanted.rnd is not None:
        sources["rnd"] = Rnd(spec, wanted.rnd, generator, device)
    signals = Signals(wanted, sources)
    cloning = None
    if (imitated := settings.behavioral_cloning) is not None and learns:
        demonstrations = load(imitated.demo_path, behavior, spec, imitated.demo_actions)
        files += demonstrations.files
        cloning = Cloning(networks.actor, settings, demonstrations, generator)
    algorithm: Algorithm
    if isinstance(networks, GroupNetworks):
        algorithm = POCA(networks, optimizer, signals, settings, generator, cloning)
    elif isinstance(networks, AgentNetworks):
        algorithm = PPO(networks, optimizer, signals, settings, generator, cloning)
    else:
        algorithm = BC(networks, optimizer, signals, cloning)
    return algorithm, tuple(dict.fromkeys(files))


def describe(spec: BehaviorSpec, teammates: Mapping[str, BehaviorSpec], settings: TrainerSettings) -> dict[str, Json]:
    """Returns what the networks are built from, in the form in which JSON restores it.

    Args:
        spec: observations and actions of the behavior.
        teammates: specs of the other behavior names that share groups with it.
        settings: the learner's settings.
    """
    signals = settings.reward_signals.named()
    described = {
        "trainer": settings.trainer_type,
        "spec": dataclasses.asdict(spec),
        "teammates": {name: dataclasses.asdict(one) for name, one in teammates.items()},
        "network_settings": _shape(settings.network_settings.model_dump(exclude={"deterministic"})),
        "shared_critic": settings.hyperparameters.shared_critic,
        "signals": list(signals),
        "reward_networks": {name: _reward_network(one) for name, one in signals.items() if name != EXTRINSIC},
    }
    extrinsic = settings.reward_signals.extrinsic
    if extrinsic is not None and extrinsic.normalize:  # absent otherwise, as in checkpoints older than this setting
        described["normalized_rewards"] = [EXTRINSIC]
    return dict(json.loads(json.dumps(described)))


def check_description(behavior: str, description: dict[str, Json], checkpoint: Checkpoint) -> None:
    """Refuses a checkpoint of another behavior, spec or network; its teammates may differ.

    Raises:
        CheckpointError: the checkpoint differs from `behavior` and `description`.
    """
    own = {"behavior": behavior} | description | {"teammates": checkpoint.description.get("teammates", {})}
    other = {"behavior": checkpoint.behavior} | checkpoint.description
    if differing := sorted(key for key in own.keys() | other.keys() if own.get(key) != other.get(key)):
        raise CheckpointError(
            got=f"a checkpoint with { ({key: other.get(key) for key in differing}) }",
            expected=f"{ ({key: own.get(key) for key in differing}) }",
            remedy="resume with the settings and the simulator of the run that wrote it, or start a new run",
        )


def restorable(algorithm: Algorithm, generator: torch.Generator, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Returns the moments that a checkpoint restores: those of cloning only if it was not enabled or disabled since.

    Raises:
        CheckpointError: its optimizer state differs from that of `algorithm`, or its random state from `generator`'s.
    """
    moments, found = moments_of(algorithm), {name: array.shape for name, array in checkpoint.optimizer.items()}
    cloned, saved = ({name for name in every if name.startswith(_CLONING)} for every in (moments, found))
    if cloned != saved:
        moments = {name: moment for name, moment in moments.items() if name not in cloned}
        found = {name: shape for name, shape in found.items() if name not in saved}
    own = {name: tuple(moment.shape) for name, moment in moments.items()}
    own["generator"] = tuple(generator.get_state().shape)
    if own != found:
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
    return moments


def _shape(network: dict[str, Json]) -> dict[str, Json]:
    """Returns the settings that weights depend on: not initialization; SiLU is implied, as in old checkpoints."""
    implied = {"initialization"} | ({"activation"} if network["activation"] == "silu" else set())
    return {key: value for key, value in network.items() if key not in implied}


def _reward_network(signal: SignalSettings) -> dict[str, Json]:
    """Returns the settings that the weights of a reward network depend on."""
    plain = signal.model_dump(include={"network_settings", "encoding_size", "use_actions", "use_vail"})
    return plain | {"network_settings": _shape(plain["network_settings"])}
