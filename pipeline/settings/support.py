"""Finds parts of a configuration that have no effect or are not available on this machine."""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

from sparring.pipeline.bridges.unity.build import find_build
from sparring.pipeline.errors import SettingsError, install_command
from sparring.pipeline.networks.settings import NetworkSettings, Unsupported
from sparring.pipeline.settings.model import Settings
from sparring.pipeline.settings.writers import unusable

_BY_HAND: Final = {
    "unity": ("the Unity editor: press Play when asked to", 5004),
    "godot": ("a Godot game: start it when asked to", 11008),
}
"""Games that a person starts if no path is given, and the ports that they call."""
_CURIOUS: Final = frozenset({"curiosity", "rnd"})
"""Reward signals that only add to that of an environment; with others alone, such as gail, an agent learns a task."""
_TRIAL_S: Final = 120.0
"""The first use of a GPU may take a minute."""


def without_effect(settings: Settings) -> Iterator[str]:
    """Yields the written keys that have no effect here, one line for each."""
    if not any(simulator.name == "unity" for simulator in settings.launched):
        if settings.engine_settings.model_fields_set:
            yield "engine_settings: belong to Unity players"
        if ignored := sorted(settings.env_settings.model_fields_set - {"seed", "env_path"}):
            yield f"env_settings.{', '.join(ignored)}: belong to Unity players; see simulators and pipeline"
    for name in settings.active_writers:
        yield from (f"writers.{name}: {problem}" for problem in unusable(name))
    if settings.debug:
        yield "debug: the files in logs/ always hold everything"
    for section, behavior in settings.sections.items():
        parameters = behavior.hyperparameters
        if parameters.splits_segments and behavior.max_steps < parameters.buffer_size:
            yield (
                f"{section}.max_steps {behavior.max_steps}: "
                f"the run ends after the first update, which trains buffer_size {parameters.buffer_size} steps"
            )
        if parameters.splits_segments and behavior.time_horizon > parameters.buffer_size:
            yield (
                f"{section}.time_horizon {behavior.time_horizon}: "
                f"segments are flushed when buffer_size {parameters.buffer_size} is reached"
            )
        extrinsic = behavior.reward_signals.extrinsic
        if extrinsic is not None and extrinsic.network_settings != NetworkSettings():  # ML-Agents writes the defaults
            yield (f"{section}.reward_signals.extrinsic.network_settings: the simulator's reward needs no network")
        strong = {name for name, one in behavior.reward_signals.named().items() if one.strength}
        if strong <= _CURIOUS and behavior.behavioral_cloning is None:
            yield (
                f"{section}.reward_signals: the reward of the environment is not learned from, "
                "because extrinsic is left out or its strength is 0"
            )
        memory = behavior.network_settings.memory
        if memory is not None and memory.sequence_length > behavior.time_horizon:
            yield (
                f"{section}.network_settings.memory.sequence_length {memory.sequence_length}: "
                f"sequences end with their segment, after time_horizon {behavior.time_horizon}"
            )


def started_by_hand(settings: Settings) -> list[str]:
    """Returns the games that a person has to start, one line for each."""
    waiting = [one for one in settings.launched if one.name in _BY_HAND and "path" not in one.options]
    games = [(*_BY_HAND[str(one.name)], one.options) for one in waiting]
    why = "" if settings.simulators else "; the configuration names no simulators"
    return [f"waits for {game} (port {options.get('port', port)}){why}" for game, port, options in games]


def not_here(settings: Settings) -> list[str]:
    """Returns the programs and libraries for simulators that this machine does not have, one line for each."""
    commands = [simulator.command[0] for simulator in settings.launched if simulator.command is not None]
    lines = [
        f"simulators: command {program!r}, which is no program on this machine: give its path, or start it by hand"
        for program in dict.fromkeys(commands)
        if shutil.which(program) is None
    ]
    if settings.pipeline.websocket_address is not None and importlib.util.find_spec("websockets") is None:
        lines.append(
            "pipeline.websocket_address: the library websockets, which is not installed: try "
            + install_command("websocket")
        )
    for one in settings.launched:
        if one.name == "unity" and "path" in one.options:
            try:
                find_build(str(one.options["path"]))
            except SettingsError as error:
                lines.append(str(error))
    return lines


def no_device(settings: Settings) -> Unsupported | None:
    """Returns why services on this machine cannot use the configured devices; None if they can.

    A process of its own tries each device, so that the caller neither loads torch nor holds GPU memory.

    Args:
        settings: settings of the run.
    """
    of_torch = settings.torch_settings
    wanted = {of_torch.of_learner(name): "device" for name in settings.behaviors or ("*",)}
    wanted.setdefault(of_torch.acting_device, "acting_device")
    for device, key in wanted.items():
        if device not in (None, "cpu") and (refused := _try_device(f"torch_settings.{key}", str(device))):
            return refused
    return None


def _try_device(key: str, device: str) -> Unsupported | None:
    """Returns why a device cannot be used on this machine; None if it can."""
    command = [sys.executable, "-P", "-m", "sparring.pipeline.networks.device", device, key]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TRIAL_S, check=False)
        if not tried.returncode:
            return None
        got, expected, remedy = json.loads(tried.stdout)
        return Unsupported(got=got, expected=expected, remedy=remedy)
    except subprocess.TimeoutExpired:
        what = f"which did not answer within {_TRIAL_S:g} s"
    except ValueError:  # it ended without an answer
        last = next(reversed(tried.stderr.strip().splitlines()), "no output")
        what = f"whose test ended with status {tried.returncode}: {last:.200}"
    return Unsupported(
        got=f"{key} {device!r}, {what}",
        expected="a device that works",
        remedy=f"repair it, or leave {key} out",
    )
