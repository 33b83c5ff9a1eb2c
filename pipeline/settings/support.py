"""What can be written in a configuration and not be run yet."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from pipeline.settings.behavior import BehaviorSettings
from pipeline.settings.model import Settings


def unsupported(settings: Settings) -> list[str]:
    """What this version can not train, one line for each; empty if it can train all of it."""
    lines = [f"behaviors.{name}.{what}" for name, b in settings.behaviors.items() for what in _of_behavior(b)]
    lines += [
        f"environment_parameters.{name}: samplers and curricula"
        for name, value in settings.environment_parameters.items()
        if not isinstance(value, float)
    ]
    if settings.env_settings.env_path is not None:
        lines.append("env_settings.env_path: Unity players; list a command under simulators")
    if settings.checkpoint_settings.initialize_from is not None:
        lines.append("checkpoint_settings.initialize_from: weights of another run")
    return lines


def without_effect(settings: Settings) -> list[str]:
    """What was written and changes nothing here, one line for each."""
    lines = []
    if settings.engine_settings.model_fields_set:
        lines.append("engine_settings: belong to Unity players")
    if ignored := sorted(settings.env_settings.model_fields_set - {"seed", "env_path"}):
        lines.append(f"env_settings.{', '.join(ignored)}: belong to Unity players; see simulators and pipeline")
    for name, behavior in settings.behaviors.items():
        parameters = behavior.hyperparameters
        if behavior.time_horizon > parameters.buffer_size:
            lines.append(
                f"behaviors.{name}.time_horizon {behavior.time_horizon}: "
                f"segments are cut when buffer_size {parameters.buffer_size} is reached"
            )
        memory = behavior.network_settings.memory
        if memory is not None and memory.sequence_length > behavior.time_horizon:
            lines.append(
                f"behaviors.{name}.network_settings.memory.sequence_length {memory.sequence_length}: "
                f"sequences end with their segment, after time_horizon {behavior.time_horizon}"
            )
    return lines


def _of_behavior(behavior: BehaviorSettings) -> Iterator[str]:
    if behavior.behavioral_cloning is not None:
        yield "behavioral_cloning: imitation of demonstrations"
    if behavior.init_path is not None:
        yield "init_path: weights of another run"
    for name in behavior.reward_signals.named():
        if name != "extrinsic":
            yield f"reward_signals.{name}: reward signals other than extrinsic"


def not_here(settings: Settings) -> list[str]:
    """Programs of simulators that this machine does not have, one line for each."""
    commands = [simulator.command[0] for simulator in settings.simulators if simulator.command is not None]
    return [
        f"simulators: command {program!r}, which is no program here: give its path, or start it by hand"
        for program in dict.fromkeys(commands)
        if shutil.which(program) is None
    ]
